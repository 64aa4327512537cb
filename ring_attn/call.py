"""The call: one frozen value, from the public functions to the kernels.

    arguments -> asked: text -> operator of torch.library -> Call -> programs -> machines

The public signature has every option with its default, and a TypedDict here has its type; overloads
and adapters take options as `**options: Unpack[...]`. A new option is a parameter in api.py, a line
in a TypedDict, in `asked` and in `Call`, and the code that uses it.

A graph holds strings, numbers and tensors only. So a call enters the operators as self-contained
text: one process can store a graph with it, and another load the graph. (Of a value registered as
an opaque type, torch 2.13 stores a graph that it cannot load.) Only tensors and the numbers of
layouts, which a compiler may treat as symbols, travel beside the text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ring_attn.backends import Purpose, get_backend
from ring_attn.checks import attention as checks
from ring_attn.core.layout import Layouts, SequenceLayout
from ring_attn.core.mask import FlashArguments, Mask
from ring_attn.core.program import Program
from ring_attn.core.ranks import OneRank
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.strategy import NAMES, Strategy, checked_strategy, resolve_strategy
from ring_attn.core.tiles import Traveller
from ring_attn.torch_private import group_by_name, is_traced_as_constant, specialized
from ring_attn.transport import groups
from ring_attn.transport.groups import Group
from ring_attn.transport.options import TransportOptions
from ring_attn.values.checks import check_one_of
from ring_attn.values.compiling import remembered

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


class _Execution(TypedDict, total=False):
    backend: str
    transport: TransportOptions


class ExecutionOptions(_Execution, total=False):
    """Options of `ring_attention` that say how it is computed, without group and layout."""

    strategy: str | Strategy
    same_bits: bool | None


class DistributedOptions(ExecutionOptions, total=False):
    """Options of `ring_attention` that say how it is computed."""

    group: Group
    layout: Layout


class SdpaOptions(_Documents, DistributedOptions, total=False):
    """Options of `ring_attention` that scaled_dot_product_attention lacks."""


class AttentionOptions(_Basics, _Documents, DistributedOptions, total=False):
    """All options of `ring_attention` except `return_lse` and `return_max_logits`."""

    dropout_p: float
    alibi_slopes: Tensor | None


class DecodeOptions(_Basics, _Scores, _Execution, total=False):
    """All options of `tree_decode` except `return_lse`."""

    group: Group
    layout: SequenceLayout | None
    cache_seqlens: int | Tensor | None
    block_table: Tensor | None


def check_execution(options: ExecutionOptions) -> None:
    """Checks options that are given before a call, as far as they do not depend on it."""
    strategy = options.get("strategy", "auto")
    if isinstance(strategy, str):
        check_one_of("strategy", strategy, (*NAMES, "auto"))
    else:
        checked_strategy(strategy)
    backend = checks.check_name("backend", options.get("backend", "auto"))
    if backend != "auto":
        get_backend(backend)
    checks.check_same_bits(options.get("same_bits"))
    groups.check_transport(options.get("transport", TransportOptions()))


# -- the call

# Spec and mask of a call before its tensors are known.
NO_TENSORS = AttentionSpec("", torch.float32, 0, 0, 0, 0, 0)
NO_MASK = Mask(0, 0)


class GradientPlan(NamedTuple):
    """The side that travels in a backward, if one does, and whether gradients are summed in order.

    In order: dK and dV are summed in the order of the queries, as one process sums them.
    """

    travels: Traveller | None
    in_order: bool


@dataclass(frozen=True)
class Call:
    """A call as plain data, equal on every rank except for `rank`.

    Attributes:
        spec, layouts, mask: of the tensors, which a graph knows when it runs; before that, spec and
            mask are empty and layouts have no rows. Decoding has tiles in their place.
        softmax_scale: None is `headdim ** -0.5`.
        backend: "auto" until it is chosen.
        same_bits: the caller's choice; None leaves the choice to the strategy.
        gradients: None leaves the choice to the strategy.
        differentiated: whether a backward may follow.
        causal, window_size, layout: what mask and layouts come from, unless given by value.
        group: torch's name of the process group.
    """

    spec: AttentionSpec
    layouts: Layouts
    mask: Mask
    rank: int
    strategy: Strategy
    softmax_scale: float | None = None
    backend: str = "auto"
    same_bits: bool | None = None
    gradients: GradientPlan | None = None
    differentiated: bool = True
    decoding: bool = False
    softcap: float = 0.0
    max_logits: bool = False
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    layout: str | None = None
    group: str = ""
    transport: TransportOptions = TransportOptions()

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_text(text: str, rank: int, world_size: int) -> Call:
        """The call of an `asked` text on a rank, without tensors."""
        values: dict[str, Any] = json.loads(text)
        strategy, mesh_shape = values.pop("strategy"), values.pop("mesh_shape")
        if isinstance(strategy, dict):
            strategy = Strategy(**strategy)
        values["strategy"] = resolve_strategy(strategy, world_size, mesh_shape)
        values["transport"] = TransportOptions(**values["transport"])
        values["window_size"] = tuple(values["window_size"])
        no_rows = SequenceLayout.contiguous(0, world_size)
        return Call(NO_TENSORS, (no_rows, no_rows), NO_MASK, rank, **values)

    @property
    def world_size(self) -> int:
        return self.layouts[0].world_size

    @cached_property
    def scores(self) -> Scores:
        scale = self.softmax_scale
        scale = 1.0 / math.sqrt(self.spec.headdim) if scale is None else scale
        return Scores(scale, self.spec.softcap)

    @property
    def purpose(self) -> Purpose:
        """Properties of the call, beside its spec, on which the choice of a backend depends."""
        if self.decoding:
            return Purpose(decoding=True)
        given = self.differentiated, self.same_bits
        return Purpose.of(self.mask, backward=given[0], same_bits=given[1], layouts=self.layouts)

    @cached_property
    def programs(self) -> dict[bool, Program]:
        """The rank's programs made so far, by `backward`.

        Kept on the call: hashing a call for a cache takes longer than posting a step.
        """
        return {}

    @cached_property
    def ranks(self) -> OneRank:
        """This rank among all: its peers, rows and tiles."""
        return OneRank(self.layouts, self.mask, self.rank)

    def facts(self) -> dict[str, object]:
        """Values that must be equal on all ranks, by name."""
        mask = self.mask
        flash = mask.arguments or FlashArguments(False, (-1, -1), None, None)
        return {
            **vars(self.spec),
            "seqlen_q": mask.seqlen_q,
            "seqlen_k": mask.seqlen_k,
            "causal": flash.causal,
            "window_size": flash.window_size,
            "cu_seqlens": flash.cu_seqlens_q,
            "cu_seqlens_k": flash.cu_seqlens_k,
            "mask": None if mask.arguments else mask,
            "layout": self.layouts,
            "transport": self.transport,
            "requires_grad": self.differentiated,
            "softmax_scale": self.scores.softmax_scale,
            "strategy": self.strategy,
            "backend": self.backend,
        }


# -- a call as text


@remembered
def asked(
    *,
    causal: bool,
    left: int,
    right: int,
    softmax_scale: float | None,
    softcap: float,
    backend: str,
    transport: TransportOptions,
    group: str,
    mesh_shape: tuple[int, ...] = (),
    layout: str | None = None,
    strategy: str | Strategy = "ring",
    same_bits: bool | None = None,
    differentiated: bool = False,
    max_logits: bool = False,
    decoding: bool = False,
) -> str:
    """A call of these options, checked, as JSON for `Call.from_text`; the window is two numbers."""
    values = {
        "causal": causal,
        "window_size": list(checks.check_window((left, right), causal)),
        "softmax_scale": checks.check_scale(softmax_scale),
        "softcap": checks.check_softcap(softcap),
        "backend": checks.check_name("backend", backend),
        "transport": _plain(groups.check_transport(transport)),
        "group": group,
        "mesh_shape": list(mesh_shape),
        "layout": layout,
        "strategy": _plain(strategy if isinstance(strategy, str) else checked_strategy(strategy)),
        "same_bits": checks.check_same_bits(same_bits),
        "differentiated": differentiated,
        "max_logits": max_logits,
        "decoding": decoding,
    }
    return _dumped({name: _plain(value) for name, value in values.items()})


def with_strategy(text: str, strategy: Strategy) -> str:
    """The text of a call for which a strategy has been chosen."""
    return _dumped({**json.loads(text), "strategy": _plain(strategy), "mesh_shape": []})


def _plain(value: Any) -> Any:
    """The value in types that JSON can write; compilers can trace this conversion."""
    if isinstance(value, (Strategy, TransportOptions)):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, (list, dict)):
        return value if isinstance(value, dict) else [_plain(element) for element in value]
    return specialized(value)


@is_traced_as_constant
def _dumped(plain: Any) -> str:
    return json.dumps(plain, default=float)  # numbers of numpy


@lru_cache(maxsize=1024)
def _group_of(text: str) -> str:
    group: str = json.loads(text)["group"]
    return group


class Arguments(NamedTuple):
    """Arguments of the operators beside q, k, v and sinks, in the order of their schema."""

    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None  # only if it differs
    mask: Tensor | None  # `Mask.tensor` of a mask passed by value
    layout_q: Sequence[int]  # `SequenceLayout.numbers`; empty if the call names the layout
    layout_k: Sequence[int]
    text: str  # of `asked`

    def asked(self) -> tuple[dist.ProcessGroup, Call]:
        """The process group, and the call on this rank without tensors."""
        group = group_by_name(_group_of(self.text))
        return group, Call.from_text(self.text, group.rank(), group.size())

    @property
    def needs_even_rows(self) -> bool:
        """Tells whether the number of all rows follows from one rank's rows."""
        return not self.layout_q and self.cu_seqlens is None and self.mask is None

    def documents(self) -> Documents:
        """Boundaries of the queries' documents and of the keys', checked, on the host."""
        cu_q = checks.check_cu_seqlens("cu_seqlens", self.cu_seqlens)
        cu_k = checks.check_cu_seqlens("cu_seqlens_k", self.cu_seqlens_k)
        checks.check_documents(cu_q, cu_k)
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


def sized(
    call: Call,
    spec: AttentionSpec,
    rows: tuple[int, int],
    documents: Documents,
    given_mask: Mask | None,
    numbers: LayoutNumbers,
) -> Call:
    """The call with its tensors' sizes, layouts and mask, checked against each other.

    `rows` are this rank's rows of q and kv.
    """
    cu_q, cu_k = documents
    totals = (cu_q[-1] if cu_q else None, cu_k[-1] if cu_k else None)
    if given_mask is not None:
        totals = given_mask.seqlen_q, given_mask.seqlen_k
    layout: object = call.layout
    if call.layout is None:
        layout = tuple(map(SequenceLayout.from_numbers, numbers))

    layouts = checks.resolve_layouts(layout, rows, totals, call.rank, call.world_size)
    seqlens, mask = (layouts[0].seqlen, layouts[1].seqlen), given_mask
    if mask is not None:
        checks.check_given_mask(mask, *seqlens)
    else:
        mask = Mask(*seqlens, call.causal, call.window_size, cu_q, cu_k)
    return replace(call, spec=spec, layouts=layouts, mask=mask)
