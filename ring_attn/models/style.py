"""`ContextParallel`: a torch `ParallelStyle` that spreads an attention module over a mesh.

The module's forward takes q, k, v by heads and returns their attention (core or inner attention).
Each rank calls the module with its rows, plain tensors, and gets the output of its rows.

    inside      the module's forward sees                  the attention is computed by
    "global"    DTensors of the whole sequence's shape     F.scaled_dot_product_attention in the
    "local"     plain tensors, this rank's rows              forward, run as `ring_attention`

Only during a forward, `models.sdpa.route_sdpa` runs `F.scaled_dot_product_attention` as
`ring_attention`. A forward that never calls it raises, since it would attend within a shard only.
Checkpoint the module, not parts of it: parts are recomputed after the forward, and raise.

A module that computes attention in another way (flex_attention, flash_attn) calls `ring_attention`
in its forward instead, without this style, or runs whole on some heads, by torch's own exchange:
`PrepareModuleInputOutput` of torch.distributed.tensor.parallel, from `Shard(seq_dim)` to
`Shard(head_dim)` and back. Rows and heads must divide by the ranks, and the layout be "contiguous".

(The modes by degree, the Q exchange and the choice of dims follow hyper-parallel's context
parallelism of attention modules; the ring is new here. Ulysses: arXiv 2309.14509.)
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


@dataclass(kw_only=True, eq=False)
class ContextParallel(ParallelStyle):
    """A style, for a plan, that splits the sequence of an attention module across a mesh.

    Call the module as before, with this rank's shards as plain tensors (`to_local()` of DTensors).
    Results and gradients equal the module's on the whole sequence.

    Args:
        strategy: as for `ring_attention`.
        degree: number of consecutive ranks that exchange heads for rows; between such groups "ring"
            or "all_gather" runs. The size of the mesh means Ulysses, 1 means the strategy alone.
            For "double_ring", the size of an inner ring. For a mesh with two axes, such as (co,
            ds), it must be the size of the last.
        layout: positions of each rank, as for `ring_attention`. Shards of different lengths need a
            `SequenceLayout`.
        inside: tensors that the module sees, as in this file's table. With "global" it sees the
            true length, but may combine its DTensors only with DTensors; all DTensors that it
            returns, alone or in containers, must be split along the rows. "local" is for modules
            with their own parameters or buffers, and for shards of other lengths than those of
            `torch.chunk`.
        seq_dim: dim of the rows of q, k, v: 1 for (batch, rows, heads, headdim), 2 for (batch,
            heads, rows, headdim), 0 for (rows, batch, heads, headdim). "local" needs neither dim,
            as `F.scaled_dot_product_attention` fixes both.
        head_dim: dim of the heads: 2, 1, 2 for these shapes. The last dim is headdim.
        qkv_indices: positions of q, k, v in forward's arguments; by default `qkv_names`' own,
            else 0, 1, 2.
        qkv_names: keywords of q, k, v; by default forward's parameters at `qkv_indices`.
        backend, same_bits, transport: as for `ring_attention`.

    Raises:
        ValueError: a choice is unknown, or dims or indices are not distinct.
        TypeError: `degree` is not an int.
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
        for name in ("qkv_indices", "qkv_names"):
            value = getattr(self, name)
            if value is None:
                continue
            elements = as_tuple(name, value)
            for element in elements:
                check_type(f"each of {name}", element, int if name == "qkv_indices" else str)
            if not len(elements) == len(set(elements)) == 3:
                raise ValueError(f"{name} must be three different ones, of q, k, v; got {value}")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Changes the module's class to one with another forward; for `parallelize_module`."""
        attention = _ParallelAttention(self, device_mesh, module)
        return with_forward(module, self, attention.run)


def with_forward(module: nn.Module, style: ParallelStyle, run: Callable[..., Any]) -> nn.Module:
    """Changes the module's class to one whose forward is `run(module, forward, args, kwargs)`.

    A style is applied to a module once.
    """
    cls, name = type(module), type(style).__name__
    mark = f"_ring_attn_{name}"
    if hasattr(cls, mark):
        raise ValueError(f"a {name} style is applied to this {cls.__name__} already")
    if "forward" in vars(module):
        raise NotImplementedError(
            f"this {cls.__name__} has a forward of its own, instead of its class's; apply "
            f"{name} before that forward is set"
        )

    # A subclass, like FSDP2's. Copies of the module would share a forward set on the instance,
    # which would call the original.
    @wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, partial(cls.forward, self), args, kwargs)

    body = {"forward": forward, mark: style, "__module__": cls.__module__}
    module.__class__ = type(f"{name}{cls.__name__}", (cls,), body)
    return module


class _ParallelAttention:
    """A style applied to a module on a mesh; stateless between calls."""

    def __init__(self, style: ContextParallel, mesh: DeviceMesh, module: nn.Module) -> None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"ContextParallel needs a DeviceMesh, got {type(mesh).__name__}")
        if mesh.get_coordinate() is None:
            raise RuntimeError("this rank is not in the mesh of ContextParallel")
        self.style = style
        group = groups.check_group(mesh)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.rows = SplitRows(mesh, style.seq_dim)
        self.distributed: DistributedOptions = {
            "group": mesh, "layout": style.layout, "strategy": _strategy_on(mesh, style),
            "backend": style.backend, "same_bits": style.same_bits, "transport": style.transport,
        }  # fmt: skip
        self.parameters = _parameters_of_qkv(style, module)

    def run(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        arguments: dict[int | str, Any] = dict(enumerate(args))
        arguments.update(kwargs)
        keys = [self._key(i, len(args), kwargs, module) for i in range(3)]
        qkv = [arguments[key] for key in keys]
        for name, x in zip("qkv", qkv, strict=True):
            if not isinstance(x, Tensor) or isinstance(x, DTensor):
                raise TypeError(
                    f"{name} must be a plain torch.Tensor, got {type(x).__name__}: of a DTensor "
                    "pass to_local(), this rank's rows"
                )

        def call(tensors: Sequence[Tensor]) -> Any:
            changed = {**arguments, **dict(zip(keys, tensors, strict=True))}
            positional = (changed[i] for i in range(len(args)))
            return forward(*positional, **{name: changed[name] for name in kwargs})

        if self.style.inside == "global":
            return self._seen_globally(module, call, qkv)
        return self._captured(module, call, qkv)

    def _key(self, i: int, num: int, kwargs: dict[str, Any], module: nn.Module) -> int | str:
        """Position or name of one of q, k, v in a call with `num` positional arguments."""
        index, name = self.parameters[i]
        if name is not None and name in kwargs:
            return name
        if index is not None and index < num:
            return index
        raise ValueError(
            f"{type(module).__name__} was called with {num} positional arguments and "
            f"keywords {list(kwargs)}: no {'qkv'[i]} at index {index} or by the name "
            f"{name!r}; say where it is by qkv_indices or qkv_names"
        )

    def _captured(
        self, module: nn.Module, call: Callable[..., Any], tensors: Sequence[Tensor]
    ) -> Any:
        calls: list[None] = []
        with _Routed(self, calls):
            output = call(tensors)
        if not calls:
            raise NotImplementedError(
                f"{type(module).__name__} did not call F.scaled_dot_product_attention, so that its "
                "attention did not see the whole sequence; call ring_attn.ring_attention there "
                "without the style, or use torch's PrepareModuleInputOutput, which runs any module "
                "on all rows of some heads"
            )
        return output

    def _seen_globally(self, module: nn.Module, call: Callable[..., Any], qkv: list[Tensor]) -> Any:
        style, q = self.style, qkv[0]
        if max(style.seq_dim, style.head_dim) >= q.ndim - 1:
            raise ValueError(
                f"seq_dim {style.seq_dim} and head_dim {style.head_dim} must come before the last "
                f"dim, which is headdim; got tensors with {q.ndim} dims"
            )
        layouts = None
        if not isinstance(style.layout, str):
            rows = (q.size(style.seq_dim), qkv[1].size(style.seq_dim))
            place = self.rank, self.world_size
            layouts = checks.resolve_layouts(style.layout, rows, (None, None), *place)
        output = self._captured(module, call, self.rows.distributed(qkv, layouts))
        if not any(isinstance(x, DTensor) for x in tree_leaves(output)):
            raise TypeError(
                f"{type(module).__name__} got DTensors and returned none; use inside='local', "
                "which passes this rank's shard"
            )
        return tree_map_only(DTensor, rows_of, output)

    def sdpa(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`F.scaled_dot_product_attention` over the whole sequence, for this rank's rows."""
        qkv = (query, key, value)
        is_global = self.style.inside == "global"
        if any(isinstance(x, DTensor) != is_global for x in qkv):
            raise TypeError(
                f"with inside={self.style.inside!r} F.scaled_dot_product_attention must get what "
                f"the module got, got {', '.join(type(x).__name__ for x in qkv)}"
            )
        options = {**kwargs, **self.distributed}
        if not is_global:
            return sdpa_attention(query, key, value, *args, **options)
        q, k, v = self.rows.shards(qkv)
        return self.rows.whole(sdpa_attention(q, k, v, *args, **options), query)


class _Routed(route_sdpa):
    """A context in which scaled_dot_product_attention covers the whole sequence."""

    def __init__(self, attention: _ParallelAttention, calls: list[None]) -> None:
        """`calls` gets an element for every call."""
        super().__init__()
        self.attention, self.calls = attention, calls

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.append(None)
        return self.attention.sdpa(*args, **kwargs)


def _strategy_on(mesh: DeviceMesh, style: ContextParallel) -> str | Strategy:
    strategy, degree = style.strategy, style.degree
    size, shape = mesh.size(), tuple(mesh.shape)
    if degree is not None and (isinstance(strategy, Strategy) or strategy == "auto"):
        raise ValueError(
            f"degree={degree} goes with a strategy by name, got {strategy}; a Strategy has its "
            "ulysses_degree, and 'auto' chooses one"
        )
    if len(shape) == 2:
        if degree not in (None, shape[1]):
            raise ValueError(
                f"degree must be the size of the last axis of a mesh with two, got {degree} and "
                f"{shape[1]}"
            )
        degree = shape[1]
    if strategy == "auto":
        return strategy
    if isinstance(strategy, str):
        strategy = Strategy.from_name(strategy, size, degree)
    return resolve_strategy(strategy, size, shape)


def _parameters_of_qkv(
    style: ContextParallel, module: nn.Module
) -> list[tuple[int | None, str | None]]:
    """Position and name of each of q, k, v in forward; None if a parameter lacks one."""
    parameters = inspect.signature(module.forward).parameters.values()
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if style.qkv_names is None:
        indices = style.qkv_indices or range(3)
        return [(i, positional[i] if i < len(positional) else None) for i in indices]
    if style.qkv_indices is not None:
        return [*zip(style.qkv_indices, style.qkv_names, strict=True)]
    return [(positional.index(n) if n in positional else None, n) for n in style.qkv_names]
