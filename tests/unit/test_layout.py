"""Layouts: the positions of each rank, shards, and batches cut for training."""

from collections.abc import Callable
from math import prod

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.modeling_flash_attention_utils import (
    prepare_fa_kwargs_from_position_ids as flash_documents,
)

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.segments import Segment
from ring_attn.models.batch import shard_batch
from tests.cold import compile_cold
from tests.drawn import layouts, reproducible


def positions(layout: SequenceLayout) -> list[list[int]]:
    return [layout.position_ids(rank).tolist() for rank in range(layout.world_size)]


@reproducible
@given(layouts())
def test_every_position_is_on_one_rank_in_order(layout: SequenceLayout) -> None:
    held = positions(layout)
    assert sorted(sum(held, [])) == list(range(layout.seqlen))
    assert tuple(len(one) for one in held) == layout.shard_lens
    if layout.kind in ("contiguous", "striped"):
        lens = layout.shard_lens
        assert max(lens) - min(lens) <= 1 and list(lens) == sorted(lens, reverse=True)
    everything = torch.arange(layout.seqlen)
    for rank, one in enumerate(held):
        assert layout.shard_len(rank) == len(one)
        segments = layout.segments(rank)
        assert all(segment.length > 0 for segment in segments)
        assert sum((segment.positions().tolist() for segment in segments), []) == one
        assert len(segments) <= (2 if layout.kind == "zigzag" else 1)
        # Rows of a shard are in order of position, so local causality equals global causality.
        assert one == sorted(one)
        assert torch.equal(layout.position_ids(rank), layout.shard(everything, rank, dim=0))
    again = SequenceLayout.from_segments([layout.segments(r) for r in range(layout.world_size)])
    assert positions(again) == held and again.stride in (1, layout.stride)


@reproducible
@given(layouts(), st.integers(0, 2), st.booleans())
def test_shard_and_unshard_are_inverse(layout: SequenceLayout, dim: int, negative: bool) -> None:
    shape = [2, 3, 2]
    shape[2 - dim] = layout.seqlen
    x = torch.arange(prod(shape)).view(shape).transpose(0, 2)  # not contiguous
    along = dim - 3 if negative else dim
    shards = [layout.shard(x, rank, along) for rank in range(layout.world_size)]
    for rank, shard in enumerate(shards):
        assert shard.is_contiguous()
        assert torch.equal(shard, x.index_select(dim, layout.position_ids(rank)))
    assert torch.equal(layout.unshard(shards, along), x)


def test_the_figure_of_the_module() -> None:
    for name, expected in {
        "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "zigzag": [[0, 1, 6, 7], [2, 3, 4, 5]],
        "striped": [[0, 2, 4, 6], [1, 3, 5, 7]],
    }.items():
        layout = getattr(SequenceLayout, name)(8, 2)
        assert positions(layout) == expected and layout == SequenceLayout.from_name(name, 8, 2)
    assert positions(SequenceLayout.boundaries((0, 5, 8))) == [[0, 1, 2, 3, 4], [5, 6, 7]]


@reproducible
@given(layouts(st.integers(1, 40)), st.booleans())
def test_shard_batch_shifts_labels_before_it_cuts(layout: SequenceLayout, first: bool) -> None:
    n = layout.seqlen
    tokens = torch.arange(100, 100 + 2 * n).view(2, n)
    dim = 0 if first else 1
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    batch = {name: x.movedim(1, dim) for name, x in batch.items()}
    before = {name: x.clone() for name, x in batch.items()}
    parts = [
        shard_batch(batch, layout, rank, dim=dim, ignore_index=-7)
        for rank in range(layout.world_size)
    ]

    expected = torch.full_like(tokens, -7)
    expected[:, :-1] = tokens[:, 1:]
    whole = layout.unshard([part["shift_labels"] for part in parts], dim)
    assert torch.equal(whole, expected.movedim(1, dim))
    inputs = layout.unshard([part["input_ids"] for part in parts], dim)
    assert torch.equal(inputs, batch["input_ids"])
    for rank, part in enumerate(parts):
        assert set(part) == {"input_ids", "shift_labels", "position_ids"}
        assert torch.equal(part["position_ids"], layout.position_ids(rank)[None])
    for name, x in batch.items():
        assert torch.equal(x, before[name]), "the caller's batch was changed"


def test_shard_batch_keeps_what_is_already_there() -> None:
    layout = SequenceLayout.striped(6, 2)
    restarted = torch.tensor([[0, 1, 2, 0, 1, 2]])
    shift_labels = torch.tensor([[1, 2, -100, 4, 5, -100]])
    batch = {"position_ids": restarted, "shift_labels": shift_labels, "attention_mask": restarted}
    part = shard_batch(batch, layout, 1)
    assert part["position_ids"].tolist() == [[1, 0, 2]]
    assert part["attention_mask"] is restarted
    assert part["shift_labels"].tolist() == [[2, 4, -100]]


def test_shard_batch_takes_batches_as_they_are() -> None:
    """By name and rule: the sizes of batch, sequence, images and dims are equal here."""
    n = 4
    layout, ids = SequenceLayout.zigzag(n, 2), torch.arange(n * n).view(n, n)
    batch = {
        "input_ids": ids,
        "inputs_embeds": torch.randn(n, n, n),
        "position_ids": torch.arange(3 * n * n).view(3, n, n),
        "attention_mask": torch.ones(n, 1, n, n),
        "pixel_values": torch.randn(n, n, n, n),
        "image_grid_thw": torch.ones(n, n),
        "video_grid_thw": torch.ones(n, n),
        "num_items_in_batch": 7,
        "scale": torch.tensor(2.0),
        "names": ["a", "b", "c", "d"],
        "features": torch.randn(n, n),
        "last": torch.arange(n * n).view(n, n),
    }
    part = shard_batch(batch, layout, 1, dims={"features": None, "last": 0})
    for name in ("input_ids", "inputs_embeds"):
        assert torch.equal(part[name], batch[name][:, 1:3])
    assert torch.equal(part["position_ids"], batch["position_ids"][..., 1:3])
    assert torch.equal(part["last"], batch["last"][1:3])
    kept = {name: x for name, x in batch.items() if part[name] is x}
    assert {*kept} == {*batch} - {"input_ids", "inputs_embeds", "position_ids", "last"}
    with pytest.raises(ValueError, match="attention_mask must cover the whole sequence of 4 rows"):
        shard_batch({"input_ids": ids, "attention_mask": torch.ones(n, 3)}, layout, 0)
    with pytest.raises(ValueError, match=r"dims must have names .* got \['other'\]"):
        shard_batch(batch, layout, 0, dims={"other": None})


@pytest.mark.parametrize("first", [0, 2])
def test_shard_batch_reads_packed_documents_from_positions(first: int) -> None:
    """As FlashAttention's path in transformers; RoBERTa's positions begin after that of padding."""
    layout = SequenceLayout.contiguous(7, 2)
    positions = torch.tensor([[0, 1, 2, 0, 0, 1, 2]]) + first
    batch = {"input_ids": X[:, :7].long(), "position_ids": positions, "labels": 1 + positions}
    part = shard_batch(batch, layout, 0)
    assert part["cu_seq_lens_q"].tolist() == part["cu_seq_lens_k"].tolist() == [0, 3, 4, 7]
    assert part["shift_labels"].tolist() == [[2 + first, 3 + first, 1 + first, 1 + first]]
    assert torch.equal(part["position_ids"], positions[:, :4])
    expected = flash_documents(positions)[0][0]
    assert torch.equal(part["cu_seq_lens_q"], expected)
    with pytest.raises(ValueError, match=r"restart at \[0, 3, 4\], but cu_seqlens .* \[0, 4, 7\]"):
        shard_batch(batch, layout, 0, cu_seqlens=[0, 4, 7])
    assert "cu_seq_lens_q" not in shard_batch(batch, layout, 0, cu_seqlens=[0, 3, 4, 7])
    # Other positions: of padding, of a tree of drafts, of several rows.
    for other in (
        {"attention_mask": torch.tensor([[1, 1, 1, 0, 1, 1, 1]])},
        {"position_ids": torch.tensor([[0, 1, 2, 2, 0, 1, 2]])},
        {"position_ids": positions.expand(2, -1), "input_ids": X[:, :7].expand(2, -1)},
    ):
        assert "cu_seq_lens_q" not in shard_batch(batch | other, layout, 0)


@pytest.mark.parametrize("dim", [0, 1])
def test_shard_batch_refuses_labels_that_are_shifted_already(dim: int) -> None:
    ids = torch.tensor([[5, 6, 7, 5, 8, 9]])
    shifted = torch.tensor([[6, 7, -100, 8, 9, 3]])
    unshifted = torch.tensor([[-100, -100, 7, 5, 8, 9]])
    of_equal_tokens = torch.full_like(ids, 5)
    layout = SequenceLayout.zigzag(6, 2)

    def cut(ids: torch.Tensor, labels: torch.Tensor) -> object:
        batch = {"input_ids": ids, "labels": labels}
        if dim == 0:
            batch = {name: x.T for name, x in batch.items()}
        return shard_batch(batch, layout, 0, dim=dim)

    with pytest.raises(ValueError, match="shifted already"):
        cut(ids, shifted)
    cut(ids, unshifted)
    cut(ids, ids)
    cut(of_equal_tokens, of_equal_tokens)
    cut(ids, torch.tensor([[6, -100, -100, -100, -100, -100]]))  # one may be equal by chance


ZIGZAG = SequenceLayout.zigzag(8, 2)
X = torch.zeros(1, 8)
HALVES = (Segment(0, 2), Segment(2, 2))


# Wrong types are tested in tests/unit/test_wrong_values.py.
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SequenceLayout.from_name("ring", 8, 2), "got 'ring'"),
        (lambda: SequenceLayout.zigzag(8, 0), "got 0"),
        (lambda: SequenceLayout.boundaries([1, 8]), r"start at 0, got \[1, 8\]"),
        (lambda: SequenceLayout.boundaries([0, 5, 4]), r"5 then 4 for rank 1 in \[0, 5, 4\]"),
        (lambda: SequenceLayout("boundaries", 8, 2, [0, 4, 8]), "use a constructor"),
        (
            lambda: SequenceLayout("boundaries", 9, 2, (0, 4, 8)),
            "seqlen=8, .* got seqlen=9, world_size=2",
        ),
        (lambda: SequenceLayout("zigzag", 8, 2, (0, 4, 8)), r"cuts=None .* got .*\(0, 4, 8\)"),
        (lambda: SequenceLayout("segments", 8, 2), "at least one rank"),
        (lambda: SequenceLayout("segments", 4, 1, None, (HALVES,)), "use a constructor"),
        (lambda: ZIGZAG.unshard([X]), "2 shards, got 1"),
        (lambda: ZIGZAG.unshard([X[:, :4], X[:, :4].double()]), "rank 1 must be torch.float32"),
        (lambda: SequenceLayout.contiguous(9, 2).shard(X, 0), r"9 rows in dim 1 .*got \(1, 8\)"),
        (lambda: shard_batch({"labels": X.byte()}, ZIGZAG, 0), "torch.uint8, got -100"),
        (lambda: shard_batch({"labels": X, "shift_labels": X}, ZIGZAG, 0), "both labels and"),
        (lambda: shard_batch({"labels": X[:, :7]}, ZIGZAG, 0), r"8 rows .*got \(1, 7\)"),
        (lambda: shard_batch({"ids": X}, ZIGZAG, 2), r"\[0, 2\).*got 2"),
        (lambda: segments(), "at least one rank"),
        (lambda: segments([Segment(0, 3)], [Segment(2, 2)]), "2 is held twice"),
        (lambda: segments([Segment(1, 3)], [Segment(2, 1)]), "0 is held nowhere"),
        (
            lambda: segments([Segment(2, 2, 2), Segment(0, 1)], [Segment(1, 1, 2), Segment(4, 1)]),
            "4 is held twice",
        ),
        (lambda: segments([Segment(0, 3, 0)]), r"3 rows in total, got .* of rank 0"),
        (lambda: segments([Segment(-1, 2)]), r"2 rows in total, got .* of rank 0"),
        (lambda: segments([Segment(0, 2)], [Segment(3, 1)]), r"3 rows in total, got .* of rank 1"),
        (
            lambda: segments([Segment(0, 2, 2)], [Segment(1, 1), Segment(3, 2)]),
            r"one stride, got \[1, 2\]",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        make()


def segments(*parts: list[Segment]) -> SequenceLayout:
    return SequenceLayout.from_segments(parts)


def test_integers_of_numpy_are_ints() -> None:
    eight, two, one = numpy.int64(8), numpy.int32(2), numpy.uint8(1)
    layout = SequenceLayout.zigzag(eight, two)  # type: ignore[arg-type]
    assert layout == SequenceLayout.zigzag(8, 2)
    assert layout.shard_len(one) == 4  # type: ignore[arg-type]
    assert SequenceLayout.boundaries(numpy.array([0, 3, 8])) == SequenceLayout.boundaries([0, 3, 8])
    assert layout.appended(one, one) == layout.appended(1, 1)  # type: ignore[arg-type]
    assert layout.appended(1, 0) is layout
    assert SequenceLayout("zigzag", eight, two) == layout  # type: ignore[arg-type]


def test_equal_layouts_are_equal_however_made() -> None:
    cuts = SequenceLayout.boundaries([0, 5, 5, 9])
    again = segments([Segment(0, 2), Segment(2, 3)], [Segment(7, 0)], [Segment(5, 4)])
    assert len({cuts, again, SequenceLayout.boundaries((0, 5, 5, 9))}) == 1
    assert SequenceLayout.zigzag(8, 2) != SequenceLayout.contiguous(8, 2)
    halves = segments([Segment(0, 2), Segment(6, 2)], [Segment(2, 4)])
    assert halves == SequenceLayout.from_segments([ZIGZAG.segments(0), ZIGZAG.segments(1)])
    assert halves.kind == "segments" and halves.stride == 1


def test_segments_are_checked_without_a_list_of_positions() -> None:
    size = 2**40
    parts = [[Segment(0, size), Segment(3 * size, size + 1)], [Segment(size, 2 * size)]]
    assert SequenceLayout.from_segments(parts).seqlen == 4 * size + 1
    with pytest.raises(ValueError, match=f"{size} is held twice"):
        SequenceLayout.from_segments([[Segment(0, size + 1)], [Segment(size, size - 1)]])


COMPILED = [
    SequenceLayout.contiguous,
    SequenceLayout.zigzag,
    SequenceLayout.striped,
    lambda n, _: SequenceLayout.boundaries([0, 7, 7, n]),
    lambda n, ranks: SequenceLayout.zigzag(n - 4, ranks).followed_by(
        SequenceLayout.contiguous(4, ranks)
    ),
]


@pytest.mark.parametrize("make", COMPILED)
def test_a_new_layout_compiles_and_an_eager_look_changes_nothing(
    make: Callable[[int, int], SequenceLayout],
) -> None:
    def read(x: Tensor, layout: SequenceLayout) -> Tensor:
        rows = x[: layout.shard_len(1)] + sum(layout.numbers) + layout.stride
        return torch.cat((rows, layout.unshard(x.split(layout.shard_lens), dim=0)))

    make(35, 3)
    compiled, num_graphs = compile_cold(read, fullgraph=True)
    x, layout = torch.randn(35, 2), make(35, 3)  # a new layout without cached values
    got = compiled(x, layout)
    assert got.equal(read(x, layout)) and got.equal(compiled(x, layout))
    assert num_graphs() == 1
