"""Requests: the options of a call of `ring_attention` or `tree_decode`, as one frozen value.

    arguments -> Request -> text -> operator of torch.library -> Request -> Call -> programs

A `strategies.base.Call` is a request with backend, strategy, layouts and mask chosen.

The public signature has every option with its default, and a TypedDict here has its type; overloads
and adapters take options as `**options: Unpack[...]`. A new option is a parameter in api.py, a line
in a TypedDict, a field of `Request`, and the code that uses it.

A graph holds strings, numbers and tensors only. So a request enters the operators as
self-contained text: one process can store a graph with it, and another load the graph. Only tensors
and the numbers of layouts, which a compiler may treat as symbols, travel beside the text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from ring_attn import groups, refusals
from ring_attn.backends import get_backend
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import FlashArguments, Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.values import check_one_of
from ring_attn.strategies.strategy import NAMES, Strategy, checked_strategy, resolve_strategy
from ring_attn.torch_private import group_by_name, is_traced_as_constant, specialized
from ring_attn.transport.options import TransportOptions

Group = dist.ProcessGroup | DeviceMesh | None
Layout = str | SequenceLayout | tuple[SequenceLayout, SequenceLayout]


# -- the types of all options


class _Basics(TypedDict, total=False):
    """Options that torch's scaled_dot_product_attention also has, under other names."""

    causal: bool
    softmax_scale: float | None


class _Scores(TypedDict, total=False):
    window_size: Sequence[int]
    softcap: float
    sinks: Tensor | None
    mask: Mask | None


class _Documents(_Scores, total=False):
    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None


class _Ranks(TypedDict, total=False):
    group: Group


class _Execution(TypedDict, total=False):
    backend: str
    transport: TransportOptions


class ExecutionOptions(_Execution, total=False):
    """Options of `ring_attention` that say how it is computed, without group and layout."""

    strategy: str | Strategy
    same_bits: bool | None


class DistributedOptions(_Ranks, ExecutionOptions, total=False):
    """Options of `ring_attention` that say how it is computed."""

    layout: Layout


class MathOptions(_Basics, _Documents, total=False):
    """Options of `ring_attention` that say what is computed."""


class SdpaOptions(_Documents, DistributedOptions, total=False):
    """Options of `ring_attention` that scaled_dot_product_attention lacks."""


class AttentionOptions(MathOptions, DistributedOptions, total=False):
    """All options of `ring_attention` except `return_lse` and `return_max_logits`."""

    dropout_p: float
    alibi_slopes: Tensor | None


class DecodeOptions(_Basics, _Scores, _Ranks, _Execution, total=False):
    """All options of `tree_decode` except `return_lse`."""

    layout: SequenceLayout | None


def check_execution(options: ExecutionOptions) -> None:
    """Checks options that are given before a call, as far as they do not depend on it."""
    strategy = options.get("strategy", "auto")
    if isinstance(strategy, str):
        check_one_of("strategy", strategy, (*NAMES, "auto"))
    else:
        checked_strategy(strategy)
    backend = refusals.check_name("backend", options.get("backend", "auto"))
    if backend != "auto":
        get_backend(backend)
    refusals.check_same_bits(options.get("same_bits"))
    groups.check_transport(options.get("transport", TransportOptions()))


# -- the call


class Request(NamedTuple):
    """All options of a call, except tensors and layouts passed by value; as in `ring_attention`."""

    causal: bool
    window_size: tuple[int, int]
    softmax_scale: float | None
    softcap: float
    group: str  # torch's name of the process group
    backend: str
    transport: TransportOptions
    mesh_shape: tuple[int, ...] = ()  # sizes of the mesh's axes if the group is a mesh
    layout: str | None = None  # None if `Arguments` has the numbers of two layouts
    strategy: str | Strategy = "ring"
    same_bits: bool | None = None
    differentiated: bool = False  # a backward may follow
    max_logits: bool = False

    @property
    def text(self) -> str:
        """The request as JSON, for `from_text`."""
        if torch.compiler.is_compiling():
            return _dumped(_plain(self))
        return _text(self)

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_text(text: str) -> Request:
        """The request from its `text`."""
        values: dict[str, Any] = json.loads(text)
        if isinstance(values["strategy"], dict):
            values["strategy"] = Strategy(**values["strategy"])
        values["transport"] = TransportOptions(**values["transport"])
        values["window_size"] = tuple(values["window_size"])
        values["mesh_shape"] = tuple(values["mesh_shape"])
        return Request(**values)

    @property
    def process_group(self) -> dist.ProcessGroup:
        return group_by_name(self.group)

    @property
    def place(self) -> tuple[int, int]:
        """This process's rank in the call's group, and the number of ranks."""
        group = self.process_group
        return dist.get_rank(group), dist.get_world_size(group)

    def resolved_strategy(self, world_size: int) -> Strategy:
        """The strategy, checked against the number of ranks."""
        return resolve_strategy(self.strategy, world_size, self.mesh_shape)


def _plain(value: Any) -> Any:
    """The value in types that JSON can write; compilers can trace this conversion."""
    if isinstance(value, Request):
        return {name: _plain(getattr(value, name)) for name in Request._fields}
    if isinstance(value, (Strategy, TransportOptions)):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, tuple):
        return [_plain(element) for element in value]
    return specialized(value)


@is_traced_as_constant
def _dumped(plain: Any) -> str:
    return json.dumps(plain, default=float)  # numbers of numpy


@lru_cache(maxsize=1024)
def _text(call: Request) -> str:
    return _dumped(_plain(call))


class Arguments(NamedTuple):
    """Arguments of the operators beside q, k, v and sinks, in the order of their schema."""

    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None  # only if it differs
    mask: Tensor | None  # `Mask.tensor` of a mask passed by value
    layout_q: Sequence[int]  # `SequenceLayout.numbers`; empty if the request names the layout
    layout_k: Sequence[int]
    text: str  # `Request.text`

    @property
    def call(self) -> Request:
        return Request.from_text(self.text)

    @property
    def numbers(self) -> LayoutNumbers:
        return tuple(self.layout_q), tuple(self.layout_k)

    @property
    def needs_even_rows(self) -> bool:
        """Whether the number of all rows follows from one rank's rows."""
        return not self.layout_q and self.cu_seqlens is None and self.mask is None

    def documents(self) -> Documents:
        """Boundaries of the queries' documents and of the keys', checked, on the host."""
        cu_q = refusals.check_cu_seqlens("cu_seqlens", self.cu_seqlens)
        cu_k = refusals.check_cu_seqlens("cu_seqlens_k", self.cu_seqlens_k)
        refusals.check_documents(cu_q, cu_k)
        return cu_q, cu_q if cu_k is None else cu_k

    def given_mask(self) -> Mask | None:
        """The mask passed by value, if any; reads the slices once for each tensor."""
        if self.mask is None:
            return None
        if self.mask not in _masks:
            _masks[self.mask] = Mask.from_tensor(self.mask)
        mask: Mask = _masks[self.mask]
        return mask


# tensor -> its mask; does not keep the tensor alive
_masks: Any = WeakTensorKeyDictionary()

Documents = tuple[tuple[int, ...] | None, tuple[int, ...] | None]
LayoutNumbers = tuple[tuple[int, ...], tuple[int, ...]]


# -- layouts and mask


class Resolved(NamedTuple):
    layouts: tuple[SequenceLayout, SequenceLayout]
    mask: Mask


def resolve(
    call: Request,
    spec: AttentionSpec,
    rows: tuple[int, int],
    documents: Documents,
    given_mask: Mask | None,
    numbers: LayoutNumbers,
    rank: int,
    world_size: int,
) -> Resolved:
    """Layouts and mask, checked against each other and against this rank's rows of q and kv."""
    cu_q, cu_k = documents
    totals = (cu_q[-1] if cu_q else None, cu_k[-1] if cu_k else None)
    if given_mask is not None:
        totals = given_mask.seqlen_q, given_mask.seqlen_k
    layout: object = call.layout
    if call.layout is None:
        layout = tuple(map(SequenceLayout.from_numbers, numbers))

    def resolve_rows(rows: tuple[int, int]) -> Resolved:
        layouts = refusals.resolve_layouts(layout, rows, totals, rank, world_size)
        seqlens = (layouts[0].seqlen, layouts[1].seqlen)
        if given_mask is not None:
            refusals.check_given_mask(given_mask, *seqlens)
            return Resolved(layouts, given_mask)
        return Resolved(layouts, Mask(*seqlens, call.causal, call.window_size, cu_q, cu_k))

    return refusals.rows_before_heads(resolve_rows, rows, (spec.nheads, spec.nheads_kv))


def describe(spec: AttentionSpec, resolved: Resolved, call: Request) -> dict[str, object]:
    """Values that must be equal on all ranks, by name."""
    mask = resolved.mask
    flash = mask.arguments or FlashArguments(False, (-1, -1), None, None)
    return {
        **vars(spec),
        "seqlen_q": mask.seqlen_q,
        "seqlen_k": mask.seqlen_k,
        "causal": flash.causal,
        "window_size": flash.window_size,
        "cu_seqlens": flash.cu_seqlens_q,
        "cu_seqlens_k": flash.cu_seqlens_k,
        "mask": None if mask.arguments else mask,
        "layout": resolved.layouts,
        "transport": call.transport,
        "requires_grad": call.differentiated,
    }
