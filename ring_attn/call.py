"""Requests: what `ring_attention` and `tree_decode` are asked for, as one frozen value.

    arguments -> Request -> text -> operator of torch.library -> Request -> Call -> programs

A `strategies.base.Call` is a request whose choices are made: backend, strategy, layouts, mask.

The public signature has every option with its default, and a TypedDict here has its type; overloads
and adapters take options as `**options: Unpack[...]`. One more option is a parameter in api.py, a
line in a TypedDict, a field of `Request`, and the code that uses it.

A graph holds strings, numbers and tensors only. So a request crosses into the operators as text
that needs nothing else to be read: a graph that one process stores and another loads has its
request. Only tensors and the numbers of layouts, which a compiler may take for symbols, cross
beside the text.
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

from ring_attn import check
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import FlashArguments, Mask
from ring_attn.core.spec import AttentionSpec, TransportOptions
from ring_attn.core.strategy import Strategy, resolve_strategy
from ring_attn.torch_private import group_by_name, is_traced_as_constant, specialized

Group = dist.ProcessGroup | DeviceMesh | None
Layout = str | SequenceLayout | tuple[SequenceLayout, SequenceLayout]


# -- the types of all options


class _Basics(TypedDict, total=False):
    """Options that torch's scaled_dot_product_attention has under other names."""

    causal: bool
    softmax_scale: float | None


class _Scores(TypedDict, total=False):
    window_size: Sequence[int]
    softcap: float
    sinks: Tensor | None


class _Given(TypedDict, total=False):
    mask: Mask | None


class _Documents(_Given, total=False):
    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None


class _Ranks(TypedDict, total=False):
    group: Group


class _Means(TypedDict, total=False):
    backend: str
    transport: TransportOptions


class Sharing(_Means, total=False):
    """Options of `ring_attention` that say by what means, once group and layout are known."""

    strategy: str | Strategy
    same_bits: bool | None


class How(_Ranks, Sharing, total=False):
    """Options of `ring_attention` that say how it is computed."""

    layout: Layout


class What(_Basics, _Scores, _Documents, total=False):
    """Options of `ring_attention` that say what is computed."""


class SdpaOptions(_Scores, _Documents, How, total=False):
    """Options of `ring_attention` that scaled_dot_product_attention has no argument for."""


class AttentionOptions(What, How, total=False):
    """All options of `ring_attention` but those that ask for more results."""

    dropout_p: float
    alibi_slopes: Tensor | None


class DecodeOptions(_Basics, _Scores, _Given, _Ranks, _Means, total=False):
    """All options of `tree_decode` but `return_lse`."""

    layout: SequenceLayout | None


# -- the call


class Request(NamedTuple):
    """Everything that a call is asked for, apart from tensors and from layouts given by value.

    Attributes:
        causal: as in `ring_attention`; so are all that are not named here.
        group: torch's name of the process group.
        mesh_shape: sizes of the mesh's axes where the group is a mesh, else ().
        layout: its name; None where `Arguments` has the numbers of two layouts.
        differentiated: whether a backward may follow.
        max_logits: whether the greatest score of each head is asked for.
    """

    causal: bool
    window_size: tuple[int, int]
    softmax_scale: float | None
    softcap: float
    group: str
    backend: str
    transport: TransportOptions
    mesh_shape: tuple[int, ...] = ()
    layout: str | None = None
    strategy: str | Strategy = "ring"
    same_bits: bool | None = None
    differentiated: bool = False
    max_logits: bool = False

    @property
    def text(self) -> str:
        """The call as JSON, which `from_text` reads."""
        if torch.compiler.is_compiling():
            return _dumped(_plain(self))
        return _text(self)

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_text(text: str) -> Request:
        """The call whose `text` this is."""
        values: dict[str, Any] = json.loads(text)
        if isinstance(values["strategy"], dict):
            values["strategy"] = Strategy(**values["strategy"])
        values["transport"] = TransportOptions(**values["transport"])
        values["window_size"] = tuple(values["window_size"])
        values["mesh_shape"] = tuple(values["mesh_shape"])
        return Request(**values)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """All ranks of the call."""
        return group_by_name(self.group)

    @property
    def place(self) -> tuple[int, int]:
        """This rank among all ranks of the call, and how many they are."""
        group = self.process_group
        return dist.get_rank(group), dist.get_world_size(group)

    def given_strategy(self, world_size: int) -> Strategy:
        """The strategy, checked against the number of ranks."""
        return resolve_strategy(self.strategy, world_size, self.mesh_shape)


def _plain(value: Any) -> Any:
    """The value in types that JSON can write; a compiler can trace the conversion."""
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
    """Arguments of the operators beside q, k, v and sinks, in the order of their schema.

    Attributes:
        cu_seqlens: boundaries of the queries' documents.
        cu_seqlens_k: those of the keys', where they differ.
        mask: `Mask.tensor` of a mask that was given as a value.
        layout_q: `SequenceLayout.numbers` of the queries' layout; empty where the request has it.
        layout_k: those of the keys' layout.
        text: that of the `Request`.
    """

    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None
    mask: Tensor | None
    layout_q: Sequence[int]
    layout_k: Sequence[int]
    text: str

    @property
    def call(self) -> Request:
        return Request.from_text(self.text)

    @property
    def numbers(self) -> LayoutNumbers:
        """Numbers of both layouts, hashable."""
        return tuple(self.layout_q), tuple(self.layout_k)

    def documents(self) -> Documents:
        """Boundaries of the queries' documents and of the keys', on the host.

        Raises:
            ValueError: boundaries that do not ascend from 0, or others for the keys alone.
        """
        cu_q = check.check_cu_seqlens("cu_seqlens", self.cu_seqlens)
        cu_k = check.check_cu_seqlens("cu_seqlens_k", self.cu_seqlens_k)
        check.check_documents(cu_q, cu_k)
        return cu_q, cu_q if cu_k is None else cu_k

    def given_mask(self) -> Mask | None:
        """The mask that was given as a value; its slices are read once for each tensor."""
        if self.mask is None:
            return None
        if self.mask not in _masks:
            _masks[self.mask] = Mask.from_tensor(self.mask)
        found: Mask = _masks[self.mask]
        return found


# tensor -> its mask, which does not keep the tensor
_masks: Any = WeakTensorKeyDictionary()

Documents = tuple[tuple[int, ...] | None, tuple[int, ...] | None]
LayoutNumbers = tuple[tuple[int, ...], tuple[int, ...]]


# -- its layouts and mask


class Resolved(NamedTuple):
    """Layouts and mask of a call: who holds what, and who sees whom."""

    layouts: tuple[SequenceLayout, SequenceLayout]
    mask: Mask


def resolve(
    call: Request,
    rows: tuple[int, int],
    documents: Documents,
    given_mask: Mask | None,
    numbers: LayoutNumbers,
    rank: int,
    world_size: int,
) -> Resolved:
    """Layouts and mask, checked against each other and this rank's rows of q and of kv.

    Raises:
        ValueError: layout or documents that do not fit.
    """
    cu_q, cu_k = documents
    totals = (cu_q[-1] if cu_q else None, cu_k[-1] if cu_k else None)
    if given_mask is not None:
        totals = given_mask.seqlen_q, given_mask.seqlen_k
    given: object = call.layout
    if call.layout is None:
        given = tuple(SequenceLayout.from_numbers(one) for one in numbers)
    layouts = check.resolve_layouts(given, rows, totals, rank, world_size)
    seqlens = (layouts[0].seqlen, layouts[1].seqlen)
    if given_mask is not None:
        check.check_given_mask(given_mask, *seqlens)
        return Resolved(layouts, given_mask)
    mask = Mask(*seqlens, call.causal, call.window_size, cu_q, cu_k)
    return Resolved(layouts, check.check_mask(mask))


def describe(spec: AttentionSpec, resolved: Resolved, call: Request) -> dict[str, object]:
    """Values that must be the same on all ranks, by the names of the arguments."""
    mask = resolved.mask
    said = mask.arguments or FlashArguments(False, (-1, -1), None, None)
    return {
        "batch": spec.batch,
        "nheads": spec.nheads,
        "nheads_kv": spec.nheads_kv,
        "headdim": spec.headdim,
        "headdim_v": spec.headdim_v,
        "dtype": spec.dtype,
        "device": spec.device_type,
        "seqlen_q": mask.seqlen_q,
        "seqlen_k": mask.seqlen_k,
        "causal": said.causal,
        "window_size": said.window_size,
        "cu_seqlens": said.cu_seqlens_q,
        "cu_seqlens_k": said.cu_seqlens_k,
        "mask": None if mask.arguments else mask.slices,
        "softcap": spec.softcap,
        "sinks": spec.sinks,
        "return_max_logits": spec.max_logits,
        "layout": tuple(str(layout) for layout in resolved.layouts),
        "transport": call.transport,
        "requires_grad": call.differentiated,
    }
