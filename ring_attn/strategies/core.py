"""From a strategy to its call: the core, and the exchanges around it."""

from __future__ import annotations

from typing import Any

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.strategies import all_gather, q_exchange, ring, ulysses
from ring_attn.strategies.base import Call


def make_call(
    strategy: Strategy,
    spec: AttentionSpec,
    layouts: tuple[SequenceLayout, SequenceLayout],
    mask: Mask,
    rank: int,
    *,
    softmax_scale: float | None = None,
    backend: str = "auto",
    same_bits: bool | None = None,
) -> Call:
    """The call with its choices made; the same on every rank but for `rank`.

    Raises:
        ValueError: degrees, heads or layouts that do not fit the strategy.
        NotImplementedError: what the strategy or the named backend does not support, or `same_bits`
            where it cannot be had; other errors as `choose_backend`.
    """

    def make_core(
        spec: AttentionSpec, layouts: tuple[SequenceLayout, SequenceLayout], rank: int
    ) -> Call:
        options: Any = {
            "softmax_scale": softmax_scale, "backend": backend, "same_bits": same_bits,
        }  # fmt: skip
        if strategy.core == "all_gather":
            return all_gather.make_call(
                spec, layouts, mask, rank, heads_per_chunk=strategy.heads_per_chunk, **options
            )
        return ring.make_call(
            spec, layouts, mask, rank, inner_degree=strategy.inner_degree, **options
        )

    if strategy.exchange_q:
        return q_exchange.make_call(spec, layouts, rank, make_core)
    if strategy.ulysses_degree > 1:
        return ulysses.make_call(
            spec, layouts, rank, strategy.ulysses_degree, make_core, same_bits=same_bits
        )
    return make_core(spec, layouts, rank)
