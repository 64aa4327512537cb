"""Joint layouts: positions, shards, owners, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring_attn import JointLayout, SequenceLayout
from ring_attn.core.segments import Segment
from tests.refusals import refused

HALVES = [[Segment(0, 2), Segment(6, 2)], [Segment(2, 4)]]
LAYOUTS = {
    "text first": JointLayout([3, SequenceLayout.contiguous(8, 2)]),
    "text last": JointLayout([SequenceLayout.zigzag(9, 2), 3]),
    "striped": JointLayout([1, SequenceLayout.striped(7, 2), 4]),
    "two videos": JointLayout([2, SequenceLayout.contiguous(4, 3), 1, SequenceLayout.zigzag(9, 3)]),
    "segments": JointLayout([SequenceLayout.from_segments(HALVES), 5]),
    "text alone": JointLayout([5, 2], world_size=3),
    "video alone": JointLayout([SequenceLayout.contiguous(8, 2)]),
    "no text": JointLayout([0, SequenceLayout.contiguous(8, 2)]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_row_has_one_owner_and_comes_back(name: str) -> None:
    layout = LAYOUTS[name]
    x = torch.randn(2, layout.seqlen, 3)
    ranks = range(layout.world_size)
    shards = [layout.shard(x, rank) for rank in ranks]
    assert [shard.size(1) for shard in shards] == list(layout.shard_lens)
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, x[:, layout.position_ids(rank)])
        assert torch.equal(layout.owned(shard, rank), layout.owners.shard(x, rank))
    assert torch.equal(layout.unshard(shards), x)
    held = torch.cat([layout.owners.position_ids(rank) for rank in ranks])
    assert held.sort().values.tolist() == list(range(layout.seqlen))
    assert sum(map(layout.num_owned, ranks)) == layout.num_replicated


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_the_owners_make_every_shard(name: str) -> None:
    layout = LAYOUTS[name]
    x = torch.randn(layout.seqlen, 3)
    owned = [layout.owners.shard(x, rank, 0) for rank in range(layout.world_size)]
    gathered = torch.cat(
        [layout.owned_replicated(rows, rank, 0) for rank, rows in enumerate(owned)]
    )
    for rank, rows in enumerate(owned):
        assert torch.equal(layout.joined(rows, gathered, rank, 0), layout.shard(x, rank, 0))


def test_values() -> None:
    layout = JointLayout([3, SequenceLayout.contiguous(8, 2)])
    assert layout == JointLayout((3, SequenceLayout.contiguous(8, 2)), world_size=2)
    assert len({layout, JointLayout([3, SequenceLayout.contiguous(8, 2)])}) == 1
    assert layout != JointLayout([SequenceLayout.contiguous(8, 2), 3])
    assert not layout.is_replicated and LAYOUTS["text alone"].is_replicated
    assert str(layout) == "joint(3 on every rank, contiguous(seqlen=8, world_size=2))"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([],), ValueError, "got none"),
        (([3],), ValueError, "world_size must be given|pass the number of ranks"),
        (([-1], 2), ValueError, "at least 0, got -1"),
        (([3, "video"],), TypeError, "must be an int, got"),
        (([SequenceLayout.contiguous(4, 2)], 3), ValueError, "same number of ranks|[2, 3]"),
        (
            ([SequenceLayout.contiguous(4, 2), SequenceLayout.striped(4, 2)],),
            ValueError,
            "striped, or none",
        ),
    ],
)
def test_refused_parts(arguments: tuple[Any, ...], error: type[Exception], words: str) -> None:
    with refused(error, words):
        JointLayout(*arguments)


def test_refused_tensors_and_ranks() -> None:
    layout = LAYOUTS["text first"]
    with refused(ValueError, "must have 11 rows in dim 1"):
        layout.shard(torch.zeros(1, 10), 0)
    with refused(ValueError, "must have 7 rows|3 + 4 of its parts"):
        layout.owned(torch.zeros(1, 4), 0)
    with refused(ValueError, "unshard needs 2 shards, got 1"):
        layout.unshard([torch.zeros(1, 7)])
    with refused(ValueError, "rank must be in [0, 2)"):
        layout.shard_len(2)
