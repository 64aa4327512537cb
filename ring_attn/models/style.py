"""`ContextParallel`: a torch `ParallelStyle` that shards the sequence of an attention module.

The module's forward takes q, k and v with heads and returns their attention (it is what other
projects call core or inner attention). Each rank calls the module with its rows, plain tensors, and
gets the output of its rows.

    inside      the module's forward sees                  the attention is computed by
    "global"    DTensors of the whole sequence's shape     F.scaled_dot_product_attention in the
    "local"     plain tensors, this rank's rows              forward, run as `ring_attention`

`models.sdpa.route_sdpa` runs `F.scaled_dot_product_attention` as `ring_attention` during a forward
only. A forward that never calls it raises an error, since it would attend within a shard only.
Checkpoint the whole module: parts of it would be recomputed after the forward, and raise an error.

A module that computes attention in another way (flex_attention, flash_attn) cannot use this style.
Either call `ring_attention` in its forward, or run the module on all rows of some heads: torch's
`PrepareModuleInputOutput` (torch.distributed.tensor.parallel) exchanges `Shard(seq_dim)` for
`Shard(head_dim)` and back. Then the numbers of rows and of heads must be multiples of the number of
ranks, and the layout must be "contiguous".

(The modes by degree, the Q exchange and the choice of dims follow hyper-parallel's context
parallelism of attention modules; the ring is new here. Ulysses: arXiv 2309.14509.)

`Any` stands for the results of a module's forward, and for the arguments of torch's attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal, cast, get_args

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel.style import ParallelStyle

from ring_attn.call import DistributedOptions, ExecutionOptions, Layout, check_execution
from ring_attn.checks import attention as checks
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.strategy import Strategy, resolve_strategy
from ring_attn.models.dtensors import SplitRows, rows_of
from ring_attn.models.sdpa import route_sdpa, sdpa_attention
from ring_attn.torch_private import tree_leaves, tree_map_only
from ring_attn.transport import groups
from ring_attn.transport.options import TransportOptions
from ring_attn.values.checks import as_int, as_tuple, check_one_of, check_type

Inside = Literal["global", "local"]

# A module's forward: its parameters and its result differ from module to module.
Forward = Callable[..., Any]

# What replaces a forward: (the module, its forward, positional arguments, keywords) -> the result.
Run = Callable[[nn.Module, Forward, tuple[object, ...], dict[str, object]], object]


@dataclass(kw_only=True, eq=False)
class ContextParallel(ParallelStyle):
    """A style for `parallelize` that shards the sequence of an attention module across a mesh.

    Call the module as before, with this rank's shards as plain tensors (`to_local()` of DTensors).
    Results and gradients equal the module's on the whole sequence.

    Args:
        strategy: as for `ring_attention`.
        degree: number of consecutive ranks that exchange heads for rows; between such groups "ring"
            or "all_gather" runs. The size of the mesh means Ulysses, and 1 means only the strategy.
            For "double_ring", the size of an inner ring. For a mesh with two axes, such as (co,
            ds), it must be the size of the last axis.
        layout: positions of each rank, as for `ring_attention`. Shards of different lengths need a
            `SequenceLayout`.
        inside: tensors that the module sees, as in this file's table. With "global" it sees the
            true length, but may combine its DTensors only with DTensors; all DTensors that it
            returns, directly or in containers, must be sharded along the rows. "local" is for
            modules with parameters or buffers, and for shards whose lengths differ from
            `torch.chunk`.
        seq_dim: dim of the rows of q, k, v: 1 for (batch, rows, heads, headdim), 2 for (batch,
            heads, rows, headdim), 0 for (rows, batch, heads, headdim). "local" ignores both dims,
            because `F.scaled_dot_product_attention` fixes them.
        head_dim: dim of the heads: 2, 1, 2 for these shapes. The last dim is headdim.
        qkv_indices: positions of q, k, v in forward's arguments; by default the positions of
            `qkv_names`, or 0, 1, 2 without names.
        qkv_names: keywords of q, k, v; by default forward's parameters at `qkv_indices`.
        backend, same_bits, transport: as for `ring_attention`.

    Raises:
        ValueError: a choice is unknown, or dims or indices are not distinct.
        TypeError: `degree` is not an int.

    Example:
        >>> style = ContextParallel(strategy="ring", layout="zigzag")
        >>> # and then ring_attn.parallelize(model, mesh, {"layers.*.attention.inner": style})
    """

    strategy: str | Strategy = "ring"
    degree: int | None = None
    layout: Layout = "contiguous"
    inside: Inside = "global"
    seq_dim: int = 1
    head_dim: int = 2
    qkv_indices: Sequence[int] | None = None
    qkv_names: Sequence[str] | None = None
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
        self.rows = SplitRows(mesh, style.seq_dim)
        self.distributed: DistributedOptions = {
            "group": mesh,
            "layout": style.layout,
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
        qkv: list[Tensor] = []
        for name, key in zip("qkv", keys, strict=True):
            x = arguments[key]
            if not isinstance(x, Tensor) or isinstance(x, DTensor):
                raise TypeError(
                    f"{name} must be a plain torch.Tensor, got {type(x).__name__}: for a DTensor, "
                    "pass its to_local(), which has this rank's rows"
                )
            qkv.append(x)

        def call(tensors: Sequence[Tensor]) -> object:
            """Call the forward with other tensors instead of q, k and v."""
            changed = {**arguments, **dict(zip(keys, tensors, strict=True))}
            positional = (changed[i] for i in range(len(args)))
            return forward(*positional, **{name: changed[name] for name in kwargs})

        if self.style.inside == "global":
            return self._run_on_dtensors(module, call, qkv)
        return self._run_routed(module, call, qkv)

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
    ) -> object:
        """Run the forward while its attention is routed; refuse a forward that calls none."""
        calls: list[None] = []
        with _Routed(self, calls):
            output = call(tensors)
        if not calls:
            raise NotImplementedError(
                f"{type(module).__name__} did not call F.scaled_dot_product_attention, so its "
                "attention did not see the whole sequence; call ring_attn.ring_attention there "
                "without the style, or use torch's PrepareModuleInputOutput, which runs any module "
                "on all rows of some heads"
            )
        return output

    def _run_on_dtensors(
        self, module: nn.Module, call: Callable[[Sequence[Tensor]], object], qkv: list[Tensor]
    ) -> object:
        """Run the forward on DTensors of the whole sequence, and return this rank's rows."""
        style = self.style
        q, k, _ = qkv
        if max(style.seq_dim, style.head_dim) >= q.ndim - 1:
            raise ValueError(
                f"seq_dim {style.seq_dim} and head_dim {style.head_dim} must come before the last "
                f"dim, which is headdim, but got tensors with {q.ndim} dims"
            )
        layouts = None
        if not isinstance(style.layout, str):
            rows = (q.size(style.seq_dim), k.size(style.seq_dim))
            without_cu_seqlens = (None, None)
            layouts = checks.resolve_layouts(
                style.layout, rows, without_cu_seqlens, self.rank, self.world_size
            )
        output = self._run_routed(module, call, self.rows.distributed(qkv, layouts))
        if not any(isinstance(x, DTensor) for x in tree_leaves(output)):
            raise TypeError(
                f"{type(module).__name__} got DTensors but returned no DTensor; use "
                "inside='local', which passes this rank's shard"
            )
        return tree_map_only(DTensor, rows_of, output)

    def sdpa(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute attention over the whole sequence for this rank's rows.

        The parameters are the same as of `F.scaled_dot_product_attention`.
        """
        qkv = (query, key, value)
        is_global = self.style.inside == "global"
        if any(isinstance(x, DTensor) != is_global for x in qkv):
            wanted = "DTensors" if is_global else "plain tensors"
            raise TypeError(
                f"with inside={self.style.inside!r} F.scaled_dot_product_attention must get "
                f"{wanted}, as the module does, got {', '.join(type(x).__name__ for x in qkv)}"
            )
        options = {**kwargs, **self.distributed}
        if not is_global:
            return sdpa_attention(query, key, value, *args, **options)
        q, k, v = self.rows.shards(cast("Sequence[DTensor]", qkv))
        return self.rows.whole(sdpa_attention(q, k, v, *args, **options), query)


class _Routed(route_sdpa):
    """A context in which scaled_dot_product_attention covers the whole sequence."""

    def __init__(self, attention: _ParallelAttention, calls: list[None]) -> None:
        """Append an element to `calls` for each call of the attention inside."""
        super().__init__()
        self.attention, self.calls = attention, calls

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.append(None)
        return self.attention.sdpa(*args, **kwargs)


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
