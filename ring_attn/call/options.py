"""Options of a call: one frozen value, from the public functions to their effect.

An option that users pass is a parameter of a function in `api.py`, with its default and its
documentation. It is a field of `Options`, with its type, and a line of `checked_options`, which
checks it. It is also a line of a TypedDict below, for overloads and adapters that take options as
`**options: Unpack[...]`. Code that depends on it reads `call.options`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypedDict

from torch import Tensor

from ring_attn.backends import get_backend
from ring_attn.checks import attention as checks
from ring_attn.core.joint import JointLayout
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.strategy import NAMES, Strategy, checked_strategy
from ring_attn.torch_private import is_traced_as_constant, specialized
from ring_attn.transport import groups
from ring_attn.transport.groups import Group
from ring_attn.transport.options import TransportOptions
from ring_attn.values.checks import check_one_of
from ring_attn.values.compiling import cached, kept
from ring_attn.values.outside import Json

AnyLayout = SequenceLayout | JointLayout
Layout = str | AnyLayout | tuple[AnyLayout, AnyLayout]

# The masks of a call: one, one for each batch entry, or one for each group of heads of each.
Masks = Mask | Sequence[Mask] | Sequence[Sequence[Mask]]


@dataclass(frozen=True)
class Options:
    """Options of a call that are neither tensors nor read from tensors; equal on every rank.

    First come the options of what is computed, then of how, and last of where.

    Attributes:
        causal, window_size, softmax_scale, softcap: as in `ring_attention`.
        max_logits: whether the greatest scores are returned, too.
        differentiated: whether a backward may follow.
        strategy: the name or the value that the user passed, or the value that "auto" chose.
        backend: the name that the user passed, or "auto".
        same_bits: the value that the user passed; None lets the strategy choose.
        transport: options of the transport.
        layout: the name of the layout; None if layouts are passed by value.
        group: torch's name of the process group.
        mesh_shape: shape of the mesh that the user passed as the group; empty for other groups.
    """

    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softmax_scale: float | None = None
    softcap: float = 0.0
    max_logits: bool = False
    differentiated: bool = False
    strategy: str | Strategy = "ring"
    backend: str = "auto"
    same_bits: bool | None = None
    # Made by a factory: torch.compile of torch 2.11 cannot trace an object as a default value.
    transport: TransportOptions = field(default_factory=TransportOptions)
    layout: str | None = None
    group: str = ""
    mesh_shape: tuple[int, ...] = ()

    @kept
    def text(self) -> str:
        """These options as JSON, for the operators.

        A graph holds only strings, numbers and tensors. With a text in it, one process can store
        the graph, and another process can load it. (If a value is registered as an opaque type,
        torch 2.13 stores a graph that it cannot load.)
        """
        return _dumped({name: _plain(getattr(self, name)) for name in self.__dataclass_fields__})

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_text(text: str) -> Options:
        """Return the options of a `text`."""
        values: dict[str, Json] = json.loads(text)
        if isinstance(values["strategy"], dict):
            values["strategy"] = Strategy(**values["strategy"])
        values["transport"] = TransportOptions(**values["transport"])
        values["window_size"] = tuple(values["window_size"])
        values["mesh_shape"] = tuple(values["mesh_shape"])
        return Options(**values)


@cached
def checked_options(
    *,
    causal: bool,
    left: int,
    right: int,
    softmax_scale: float | None,
    softcap: float,
    backend: str,
    transport: TransportOptions,
    group: str,
    max_logits: bool = False,
    differentiated: bool = False,
    strategy: str | Strategy = "ring",
    same_bits: bool | None = None,
    layout: str | None = None,
    mesh_shape: tuple[int, ...] = (),
) -> Options:
    """Check the options that a user passed, and return them.

    The window is passed as two numbers, `left` and `right`, since the cache compares the types of
    arguments, but not of the elements of a tuple.

    Raises:
        ValueError: a value that is not accepted.
        TypeError: a type that is not accepted.
    """
    return Options(
        causal=causal,
        window_size=checks.check_window((left, right), causal),
        softmax_scale=checks.check_scale(softmax_scale),
        softcap=checks.check_softcap(softcap),
        max_logits=max_logits,
        differentiated=differentiated,
        strategy=strategy if isinstance(strategy, str) else checked_strategy(strategy),
        backend=checks.check_name("backend", backend),
        same_bits=checks.check_same_bits(same_bits),
        transport=groups.check_transport(transport),
        layout=layout,
        group=group,
        mesh_shape=mesh_shape,
    )


def _plain(value: object) -> object:
    """Return a value in types that JSON has; compilers can trace this conversion."""
    if isinstance(value, (Strategy, TransportOptions)):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, tuple):
        return [_plain(element) for element in value]
    return specialized(value)


@is_traced_as_constant
def _dumped(plain: dict[str, object]) -> str:
    return json.dumps(plain, default=float)  # `default` converts numbers of numpy


# -- the types of all options, as keywords


class _Basics(TypedDict, total=False):
    """Options that torch's scaled_dot_product_attention also has, under other names."""

    causal: bool
    softmax_scale: float | None


class _Scores(TypedDict, total=False):
    window_size: Sequence[int]
    softcap: float
    sinks: Tensor | None


class _Documents(_Scores, total=False):
    mask: Masks | None
    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None


class MathOptions(_Basics, _Documents, total=False):
    """Options of `ring_attention` that change what is computed."""


class _Execution(TypedDict, total=False):
    backend: str
    transport: TransportOptions


class ExecutionOptions(_Execution, total=False):
    """Options of how `ring_attention` is computed, without group and layout."""

    strategy: str | Strategy
    same_bits: bool | None


class DistributedOptions(ExecutionOptions, total=False):
    """Options of how and where `ring_attention` is computed."""

    group: Group
    layout: Layout


class SdpaOptions(_Documents, DistributedOptions, total=False):
    """Options of `ring_attention` that scaled_dot_product_attention lacks."""


class AttentionOptions(MathOptions, DistributedOptions, total=False):
    """All options of `ring_attention` except `return_lse` and `return_max_logits`."""

    dropout_p: float
    alibi_slopes: Tensor | None


class DecodeOptions(_Basics, _Scores, _Execution, total=False):
    """All options of `tree_decode` except `return_lse`."""

    mask: Mask | None
    group: Group
    layout: SequenceLayout | None
    cache_seqlens: int | Tensor | None
    block_table: Tensor | None


def check_execution(options: ExecutionOptions) -> None:
    """Check options that are set before a call, as far as they do not depend on the call."""
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
