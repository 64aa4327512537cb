"""Caches of several ranks with sequences of unlike lengths, and calls that decode over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ring_attn.attention import drivers
from ring_attn.checks.decoding import check_sequences
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.strategies.tree_decode import make_call
from ring_attn.testing import Inputs, poisoned_empty
from ring_attn.transport.local import LocalTransport, run_local
from tests.bounds import assert_holds, expect, same

ROOM = 128


class Cache:
    """The caches of all ranks with sequences of some lengths; all other rows are NaN.

    Pages of a sequence are spread over a rank's pool, from the last page down.
    """

    def __init__(
        self,
        whole: Inputs,
        lengths: tuple[int, ...],
        world_size: int,
        page_size: int,
        layout: SequenceLayout | None,
        window_size: tuple[int, int] = (-1, 0),
    ) -> None:
        self.lengths, self.ranks = torch.tensor(lengths, dtype=torch.int32), []
        for rank in range(world_size):
            # Each position's row on this rank, as the documentation says it.
            if layout is None:
                rows = [p for p in range(ROOM) if p // (page_size or ROOM) % world_size == rank]
            else:
                rows = layout.position_ids(rank).tolist()
            pages = -(-len(rows) // page_size) if page_size else 0
            table = torch.arange(len(lengths) * pages, dtype=torch.int32).flip(0)
            table = table.view(len(lengths), pages)
            shape = (len(lengths) * pages, page_size) if page_size else (len(lengths), len(rows))
            k, v = (x.new_full((*shape, *x.shape[2:]), torch.nan) for x in whole[1:3])
            for i, length in enumerate(lengths):
                for j, position in enumerate(p for p in rows if p < length):
                    at = (table[i, j // page_size], j % page_size) if page_size else (i, j)
                    k[at], v[at] = whole.k[i, position], whole.v[i, position]
            pages_of = table if page_size else None
            sequences = check_sequences(k, pages_of, layout, window_size, rank, world_size)
            tables = (self.lengths, *((table,) if page_size else ()))
            self.ranks.append((k, v, sequences, tables))


def decoded(
    cache: Cache, q: Tensor, backend: str, sinks: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """out and lse, which have the same bits on all ranks."""
    k, v, *_ = cache.ranks[0]
    softcap = options.pop("softcap", 0.0)
    call = make_call(AttentionSpec.of(q, k, v, softcap, sinks), backend=backend, **options)

    def work(rank: int, transport: LocalTransport) -> tuple[Tensor, Tensor]:
        k, v, sequences, tables = cache.ranks[rank]
        return drivers.decode(call, (), q, k, v, transport, sinks, sequences, tables)

    with poisoned_empty():
        results = run_local(len(cache.ranks), work)
    assert all(same(one, results[0]) for one in results)
    return results[0]


def assert_exact(
    got: tuple[Tensor, Tensor],
    whole: Inputs,
    lengths: tuple[int, ...],
    window: tuple[int, int],
    **scores: Any,
) -> None:
    """Checks each sequence against float64."""
    out, lse = got
    for i, length in enumerate(lengths):
        one = slice(i, i + 1)
        inputs = Inputs(whole.q[one], whole.k[one, :length], whole.v[one, :length], whole.dout[one])
        mask = Mask(whole.q.size(1), length, window_size=window)
        results = {"out": out[one], "lse": lse[one]}
        assert_holds(results, *expect(inputs, mask, **scores), where=length)
