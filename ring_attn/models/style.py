"""`ContextParallel`: a torch `ParallelStyle` that shards the sequence of an attention module.

The module's forward takes q, k and v with heads and returns their attention (it is what other
projects call core or inner attention). Each rank calls the module with its rows, as
plain tensors or as DTensors, and gets the output of its rows in the same form.

    option              the module's forward sees                 the attention is computed by
    inside="global"     DTensors of the whole sequence's shape    F.scaled_dot_product_attention in
    inside="local"      plain tensors, this rank's rows             the forward, as `ring_attention`
    replace={...}       nothing: it does not run                  `ring_attention`

`models.sdpa.route_sdpa` runs `F.scaled_dot_product_attention` as `ring_attention` during a forward
only. A forward that never calls it raises an error, since it would attend within a shard only.
Checkpoint the whole module: parts of it would be recomputed after the forward, and raise an error.

For a module that computes attention in another way (flex_attention, flash_attn), pass `replace`. Or
call `ring_attention` in its forward, without this style, or run the module on all rows of some
heads: torch's `PrepareModuleInputOutput` (torch.distributed.tensor.parallel) exchanges
`Shard(seq_dim)` for `Shard(head_dim)` and back. Then the numbers of rows and of heads must be
multiples of the number of ranks, and the layout must be "contiguous".

(The modes by degree, the Q exchange and the choice of dims follow hyper-parallel's context
parallelism of attention modules; the ring is new here. Ulysses: arXiv 2309.14509.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Literal, NamedTuple, cast, get_args

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel.style import ParallelStyle

from ring_attn.api import ring_attention
from ring_attn.call import (
    DistributedOptions,
    ExecutionOptions,
    Layout,
    MathOptions,
    check_execution,
)
from ring_attn.checks import attention as checks
from ring_attn.core.layout import Layouts, SequenceLayout
from ring_attn.core.strategy import Strategy, resolve_strategy
from ring_attn.models.dtensors import Dims, SplitRows, placed_as, rows_of
from ring_attn.models.sdpa import Argument, route_sdpa, sdpa_attention
from ring_attn.torch_private import tree_leaves, tree_map_only
from ring_attn.transport import groups
from ring_attn.transport.options import TransportOptions
from ring_attn.values.checks import as_int, as_tuple, check_one_of, check_type

Inside = Literal["global", "local"]

# What the forward of a replaced module computes: options, or a function that returns them.
Replacement = MathOptions | Callable[[nn.Module], MathOptions]

# scaled_dot_product_attention takes (batch, heads, rows, headdim).
_SDPA_DIMS = Dims(seq=2, head=1)

# A module's forward: its parameters and its result differ from module to module.
Forward = Callable[..., object]

# What replaces a forward: (the module, its forward, positional arguments, keywords) -> the result.
Run = Callable[[nn.Module, Forward, tuple[object, ...], dict[str, object]], object]


@dataclass(kw_only=True, eq=False)
class ContextParallel(ParallelStyle):
    """A style for `parallelize` that shards the sequence of an attention module across a mesh.

    Call the module as before, with q, k and v as this rank's shards or as DTensors; the attention
    comes back in the same form. Results and gradients equal the module's on the whole sequence.

    DTensors must be sharded along the rows on the style's mesh. They may be on a mesh with more
    axes, which shard heads (tensor parallelism) or the batch, or on which they are replicated.

    Args:
        strategy: as for `ring_attention`.
        degree: number of consecutive ranks that exchange heads for rows; between such groups "ring"
            or "all_gather" runs. The size of the mesh means Ulysses, and 1 means only the strategy.
            For "double_ring", the size of an inner ring. For a mesh with two axes, such as (co,
            ds), it must be the size of the last axis.
        layout: positions of each rank, as for `ring_attention`. Plain shards of different lengths
            need a `SequenceLayout`; "contiguous" DTensors have the lengths of `torch.chunk`.
        inside: tensors that the module sees, as in this file's table. With "global" it sees the
            true length, but may combine its DTensors only with DTensors; all DTensors that it
            returns, directly or in containers, must be sharded along the rows. "local" is for
            modules with parameters or buffers, and for shards whose lengths differ from
            `torch.chunk`.
        replace: options of `ring_attention` that change what it computes (`causal`, `window_size`,
            `softmax_scale`, `softcap`, `sinks`, `mask`, `cu_seqlens`, `cu_seqlens_k`), or a
            function that takes the module and returns them, which is called each time. The forward
            of the module then does not run; its other arguments must be None. If another mesh axis
            shards the heads, `sinks` are those of this rank's heads.
        seq_dim: dim of the rows of q, k, v: 1 for (batch, rows, heads, headdim), 2 for (batch,
            heads, rows, headdim), 0 for (rows, batch, heads, headdim). Plain tensors with "local"
            need neither dim, because `F.scaled_dot_product_attention` fixes both.
        head_dim: dim of the heads: 2, 1, 2 for these shapes. The last dim is headdim.
        qkv_indices: positions of q, k, v in forward's arguments; by default the positions of
            `qkv_names`, or 0, 1, 2 without names.
        qkv_names: keywords of q, k, v; by default forward's parameters at `qkv_indices`.
        output_index: index of the attention in the tuple or list that forward returns. Only this
            element changes its form; other elements are returned as forward returned them. With
            None, "global" changes all DTensors of the output, and "local" needs it only for
            DTensors that come back in a tuple or list.
        backend, same_bits, transport: as for `ring_attention`.

    Raises:
        ValueError: a choice is unknown, dims or indices are not distinct, or `replace` is combined
            with `inside="local"` or `output_index`.
        TypeError: `degree` or `output_index` is not an int, or `replace` has another type.

    Example:
        >>> style = ContextParallel(strategy="ring", layout="zigzag")
        >>> # and then ring_attn.parallelize(model, mesh, {"layers.*.attention.inner": style})
        >>> style = ContextParallel(replace={"causal": True, "window_size": (4095, 0)})
    """

    strategy: str | Strategy = "ring"
    degree: int | None = None
    layout: Layout = "contiguous"
    inside: Inside = "global"
    replace: Replacement | None = None
    seq_dim: int = 1
    head_dim: int = 2
    qkv_indices: Sequence[int] | None = None
    qkv_names: Sequence[str] | None = None
    output_index: int | None = None
    backend: str = "auto"
    same_bits: bool | None = None
    transport: TransportOptions = TransportOptions()

    def __post_init__(self) -> None:
        check_one_of("inside", self.inside, get_args(Inside))
        if self.degree is not None:
            as_int("degree", self.degree, least=1)
        if isinstance(self.layout, str):
            SequenceLayout.from_name(self.layout, 0, 1)
        else:
            checks.check_layouts(self.layout)
        execution = ("strategy", "backend", "same_bits", "transport")
        check_execution(cast(ExecutionOptions, {name: getattr(self, name) for name in execution}))
        for name in ("seq_dim", "head_dim"):
            as_int(name, getattr(self, name))
        if {self.seq_dim, self.head_dim} - {0, 1, 2} or self.seq_dim == self.head_dim:
            raise ValueError(
                "seq_dim and head_dim must be two of the dims 0, 1, 2, got "
                f"{self.seq_dim} and {self.head_dim}"
            )
        if self.qkv_indices is not None:
            _check_three("qkv_indices", self.qkv_indices, int)
        if self.qkv_names is not None:
            _check_three("qkv_names", self.qkv_names, str)
        if self.output_index is not None:
            as_int("output_index", self.output_index)
        if self.replace is not None:
            self._check_replace(self.replace)

    def _check_replace(self, replace: Replacement) -> None:
        """Refuse options of a forward that `replace` keeps from running."""
        if self.inside != "global":
            raise ValueError(
                f"inside={self.inside!r} chooses the tensors that the forward sees, but with "
                "replace the forward does not run: leave out one of them"
            )
        if self.output_index is not None:
            raise ValueError(
                f"output_index={self.output_index} chooses an element of the forward's output, but "
                "with replace the forward does not run, and the module returns the attention: "
                "leave out one of them"
            )
        if not callable(replace):
            _check_math(replace)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Change the module's class to one with another forward; for `parallelize_module`."""
        attention = _ParallelAttention(self, device_mesh, module)
        return with_forward(module, self, attention.run)


def _check_three(name: str, value: Sequence[object], wanted: type) -> None:
    """Refuse values that are not three different indices or names, of q, k and v."""
    elements = as_tuple(name, value)
    for element in elements:
        check_type(f"each of {name}", element, wanted)
    if not len(elements) == len(set(elements)) == 3:
        raise ValueError(f"{name} must be three different values, for q, k and v, got {value}")


def with_forward(module: nn.Module, style: ParallelStyle, run: Run) -> nn.Module:
    """Change the module's class to one whose forward is `run(module, forward, args, kwargs)`.

    Refuse a module to which the same kind of style was applied before.
    """
    cls, name = type(module), type(style).__name__
    mark = f"_ring_attn_{name}"
    if hasattr(cls, mark):
        raise ValueError(
            f"this {cls.__name__} has a {name} style already: apply the style only once"
        )
    if "forward" in vars(module):
        raise NotImplementedError(
            f"this {cls.__name__} has a forward that was set on the instance, which {name} cannot "
            f"replace: apply {name} before that forward is set"
        )

    # The forward is in a subclass, as in FSDP2. Copies of the module would share a forward that is
    # set on the instance, and would call the original module.
    @wraps(cls.forward)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        return run(self, partial(cls.forward, self), args, kwargs)

    body = {"forward": forward, mark: style, "__module__": cls.__module__}
    module.__class__ = type(f"{name}{cls.__name__}", (cls,), body)
    return module


class _Shards(NamedTuple):
    """This rank's q, k, v in the module's order of dims, and their layout.

    `restore` returns the attention in the form of q: a plain tensor or a DTensor.
    """

    tensors: list[Tensor]
    layout: Layout
    restore: Callable[[Tensor], Tensor]


class _ParallelAttention:
    """A style that is applied to a module on a mesh. It has no state between calls."""

    def __init__(self, style: ContextParallel, mesh: DeviceMesh, module: nn.Module) -> None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"ContextParallel needs a DeviceMesh, got {type(mesh).__name__}")
        if mesh.get_coordinate() is None:
            raise RuntimeError(
                "this rank is not in the mesh of ContextParallel: apply the style only on ranks of "
                "the mesh"
            )
        self.style = style
        group = groups.check_group(mesh)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.dims = Dims(style.seq_dim, style.head_dim)
        self.rows = SplitRows(mesh, style.seq_dim)
        self.distributed: DistributedOptions = {
            "group": mesh,
            "strategy": _strategy_on(mesh, style),
            "backend": style.backend,
            "same_bits": style.same_bits,
            "transport": style.transport,
        }
        self.parameters = _parameters_of_qkv(style, module)

    def run(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        """Run the module's forward with attention over the whole sequence."""
        arguments: dict[int | str, object] = dict(enumerate(args))
        arguments.update(kwargs)
        keys = [self._key(i, len(args), kwargs, module) for i in range(3)]
        qkv = _checked_forms([arguments[key] for key in keys])

        def call(tensors: Sequence[Tensor]) -> object:
            """Call the forward with other tensors instead of q, k and v."""
            changed = {**arguments, **dict(zip(keys, tensors, strict=True))}
            positional = (changed[i] for i in range(len(args)))
            return forward(*positional, **{name: changed[name] for name in kwargs})

        if self.style.replace is not None:
            others = [key for key, x in arguments.items() if key not in keys and x is not None]
            return self._replaced(module, qkv, others)
        if self.style.inside == "global":
            return self._run_on_dtensors(module, call, qkv)
        return self._run_on_shards(module, call, qkv)

    def _key(self, i: int, num: int, kwargs: dict[str, object], module: nn.Module) -> int | str:
        """Return the position or name of one of q, k, v in a call.

        `i` is 0 for q, 1 for k, 2 for v; the call has `num` positional arguments.
        """
        index, name = self.parameters[i]
        if name is not None and name in kwargs:
            return name
        if index is not None and index < num:
            return index
        raise ValueError(
            f"{type(module).__name__} was called with {num} positional arguments and "
            f"keywords {list(kwargs)}, but without {'qkv'[i]} at index {index} or as {name!r}: "
            "pass its position or name as qkv_indices or qkv_names"
        )

    def _run_routed(
        self,
        module: nn.Module,
        call: Callable[[Sequence[Tensor]], object],
        tensors: Sequence[Tensor],
        layout: Layout,
    ) -> object:
        """Run the forward while its attention is routed; refuse a forward that calls none."""
        calls: list[None] = []
        with _Routed(self, layout, calls):
            output = call(tensors)
        if not calls:
            raise NotImplementedError(
                f"{type(module).__name__} did not call F.scaled_dot_product_attention, so its "
                "attention did not see the whole sequence; pass replace={...} with the options of "
                "ring_attention, or use torch's PrepareModuleInputOutput, which runs any module on "
                "all rows of some heads"
            )
        return output

    def _run_on_dtensors(
        self, module: nn.Module, call: Callable[[Sequence[Tensor]], object], qkv: list[Tensor]
    ) -> object:
        """Run the forward on DTensors of the whole sequence; return the form that was passed."""
        style, are_plain = self.style, not isinstance(qkv[0], DTensor)
        self.dims.check(qkv[0].ndim)
        tensors = qkv
        if are_plain:
            tensors = self.rows.distributed(qkv, self._layouts_of_shards(qkv))
        else:
            self.rows.check_placements(cast("list[DTensor]", qkv), self.dims)
        output = self._run_routed(module, call, tensors, style.layout)
        if style.output_index is None:
            returned = [x for x in tree_leaves(output) if isinstance(x, DTensor)]
        else:
            attention, replaced = self._element(module, output, style.output_index)
            returned = [attention] if isinstance(attention, DTensor) else []
        if not returned:
            where = "" if style.output_index is None else f" at output_index {style.output_index}"
            raise TypeError(
                f"{type(module).__name__} got DTensors but returned no DTensor{where}; use "
                "inside='local', which passes this rank's shard"
            )
        if not are_plain:
            return output
        if style.output_index is None:
            return tree_map_only(DTensor, rows_of, output)
        return replaced(rows_of(returned[0]))

    def _layouts_of_shards(self, qkv: Sequence[Tensor]) -> Layouts | None:
        """Return the layouts of plain queries and keys; None if their name fits equal shards."""
        layout = self.style.layout
        if isinstance(layout, str):
            return None
        rows = (qkv[0].size(self.dims.seq), qkv[1].size(self.dims.seq))
        without_cu_seqlens = (None, None)
        return checks.resolve_layouts(layout, rows, without_cu_seqlens, self.rank, self.world_size)

    def _run_on_shards(
        self, module: nn.Module, call: Callable[[Sequence[Tensor]], object], qkv: list[Tensor]
    ) -> object:
        """Run the forward on this rank's rows, plain tensors; return the form that was passed."""
        index = self.style.output_index
        shards = self._shards(qkv, self.dims)
        output = self._run_routed(module, call, shards.tensors, shards.layout)
        if index is not None:
            attention, replaced = self._element(module, output, index)
            return replaced(shards.restore(attention))
        if not isinstance(qkv[0], DTensor):
            return output
        if not isinstance(output, Tensor):
            raise TypeError(
                f"{type(module).__name__} got DTensors and returned a {type(output).__name__}, not "
                "a tensor: pass output_index, the index of the attention in a tuple or list"
            )
        return shards.restore(output)

    def _element(
        self, module: nn.Module, output: object, index: int
    ) -> tuple[Tensor, Callable[[Tensor], object]]:
        """Return the attention in a forward's output, and a function that replaces it there."""
        name = type(module).__name__
        if not isinstance(output, (tuple, list)):
            raise TypeError(
                f"{name} must return a tuple or list for output_index={index}, got "
                f"{type(output).__name__}"
            )
        elements = [*output]
        if not -len(elements) <= index < len(elements):
            raise ValueError(
                f"output_index={index} is not in the {len(elements)} elements that {name} returned"
            )
        attention = elements[index]
        if not isinstance(attention, Tensor):
            raise TypeError(
                f"{name} must return the attention, a tensor, at output_index={index}, got "
                f"{type(attention).__name__}"
            )

        def replaced(changed: Tensor) -> object:
            elements[index] = changed
            make_named_tuple = getattr(output, "_make", None)
            make = type(output) if make_named_tuple is None else make_named_tuple
            return make(elements)

        return attention, replaced

    def _replaced(
        self, module: nn.Module, qkv: list[Tensor], others: Sequence[int | str]
    ) -> Tensor:
        """Compute attention instead of the forward; `others` are its other arguments."""
        name, replace = type(module).__name__, self.style.replace
        if others:
            raise NotImplementedError(
                f"{name} is replaced by ring_attention, which does not know the arguments "
                f"{others}: pass None for them, and options of ring_attention in replace"
            )
        if qkv[0].ndim != 4:
            raise ValueError(
                "q, k and v must have 4 dims with replace, batch, rows, heads and headdim, got "
                f"shape {tuple(qkv[0].shape)}"
            )
        options = cast(MathOptions, replace(module) if callable(replace) else replace)
        _check_math(options)
        shards = self._shards(qkv, self.dims)
        # From the module's order of dims to (batch, rows, heads, headdim).
        batch_dim = 3 - self.dims.seq - self.dims.head
        order = (batch_dim, self.dims.seq, self.dims.head, 3)
        q, k, v = (x.permute(order) for x in shards.tensors)
        distributed: DistributedOptions = {**self.distributed, "layout": shards.layout}
        out = ring_attention(q, k, v, **distributed, **options)
        return shards.restore(out.permute([order.index(dim) for dim in range(4)]))

    def _shards(self, qkv: list[Tensor], dims: Dims, layout: Layout | None = None) -> _Shards:
        """Return this rank's rows of q, k and v, plain tensors or DTensors; see `_Shards`."""
        layout = self.style.layout if layout is None else layout
        q, k, _ = qkv
        if not isinstance(q, DTensor):
            return _Shards(qkv, layout, lambda out: out)
        dtensors = cast("list[DTensor]", qkv)
        are_of_sdpa = dims is _SDPA_DIMS
        names = ("query", "key", "value") if are_of_sdpa else ("q", "k", "v")
        self.rows.check_placements(dtensors, dims, names)
        lengths = (q.size(dims.seq), k.size(dims.seq))
        layout = self.rows.layout_of_lengths(lengths, layout)
        return _Shards([x.to_local() for x in dtensors], layout, partial(placed_as, q=q))

    def sdpa(
        self,
        layout: Layout,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Argument,
        **kwargs: Argument,
    ) -> Tensor:
        """Compute attention over the whole sequence for this rank's rows in a layout.

        The other parameters are the same as of `F.scaled_dot_product_attention`.
        """
        qkv = [query, key, value]
        is_global = self.style.inside == "global"
        if any(isinstance(x, DTensor) != is_global for x in qkv):
            wanted = "DTensors" if is_global else "plain tensors"
            raise TypeError(
                f"with inside={self.style.inside!r} F.scaled_dot_product_attention must get "
                f"{wanted}, as the module does, got {', '.join(type(x).__name__ for x in qkv)}"
            )
        shards = self._shards(qkv, _SDPA_DIMS, layout)
        q, k, v = shards.tensors
        options = {**kwargs, **self.distributed, "layout": shards.layout}
        return shards.restore(sdpa_attention(q, k, v, *args, **options))


class _Routed(route_sdpa):
    """A context in which scaled_dot_product_attention covers the whole sequence."""

    def __init__(self, attention: _ParallelAttention, layout: Layout, calls: list[None]) -> None:
        """Append an element to `calls` for each call of the attention inside."""
        super().__init__()
        self.attention, self.layout, self.calls = attention, layout, calls

    def attend(self, *args: Argument, **kwargs: Argument) -> Tensor:
        self.calls.append(None)
        return self.attention.sdpa(self.layout, *args, **kwargs)


def _strategy_on(mesh: DeviceMesh, style: ContextParallel) -> str | Strategy:
    """Return the style's strategy for the size of the mesh; "auto" stays as it is."""
    strategy, degree = style.strategy, style.degree
    size, shape = mesh.size(), tuple(mesh.shape)
    if degree is not None and (isinstance(strategy, Strategy) or strategy == "auto"):
        raise ValueError(
            f"degree={degree} needs a strategy by name, got {strategy}: a Strategy has its "
            "ulysses_degree, and 'auto' chooses one, so leave degree out"
        )
    if len(shape) == 2:
        last_axis = shape[1]
        if degree not in (None, last_axis):
            raise ValueError(
                f"degree must be {last_axis}, the size of the last axis of a mesh with two axes, "
                f"got {degree}"
            )
        degree = last_axis
    if strategy == "auto":
        return strategy
    if isinstance(strategy, str):
        strategy = Strategy.from_name(strategy, size, degree)
    return resolve_strategy(strategy, size, shape)


def _parameters_of_qkv(
    style: ContextParallel, module: nn.Module
) -> list[tuple[int | None, str | None]]:
    """Return the position and the name of each of q, k, v in forward; None if it has none."""
    parameters = inspect.signature(module.forward).parameters.values()
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if style.qkv_names is None:
        indices = style.qkv_indices or range(3)
        return [(i, positional[i] if i < len(positional) else None) for i in indices]
    if style.qkv_indices is not None:
        return [*zip(style.qkv_indices, style.qkv_names, strict=True)]
    return [
        (positional.index(name) if name in positional else None, name) for name in style.qkv_names
    ]


def _checked_forms(qkv: Sequence[object]) -> list[Tensor]:
    """Return q, k and v if all of them are plain tensors, or all of them are DTensors."""
    checked: list[Tensor] = []
    for name, x in zip("qkv", qkv, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        checked.append(x)
        q = checked[0]
        if isinstance(x, DTensor) != isinstance(q, DTensor):
            raise TypeError(
                "q, k and v must all be plain tensors, or all be DTensors, but q is a "
                f"{type(q).__name__} and {name} is a {type(x).__name__}"
            )
    return checked


def _check_math(options: object) -> None:
    """Check the names of options in `replace`; `ring_attention` checks their values."""
    known = [*MathOptions.__annotations__]
    if not isinstance(options, Mapping):
        raise TypeError(
            "replace must be a dict of options of ring_attention, or a function of the module that "
            f"returns one, got {type(options).__name__}"
        )
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(f"replace must have some of the options {known}, got {unknown}")
