"""Heads for rows, alone and around a ring or a gathering, with all ranks in this process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attn import cost
from ring_attn.layout import Segment, SequenceLayout
from ring_attn.mask import Mask
from ring_attn.profiling import peak_bytes
from ring_attn.spec import AttentionSpec
from ring_attn.strategies import all_gather, ring
from ring_attn.strategies.base import Call, Gradients
from ring_attn.strategies.ring import RingCall
from ring_attn.strategies.ulysses import (
    UlyssesCall,
    bytes_sent,
    make_call,
    merge_groups,
    num_messages,
    predicted_peak_bytes,
)
from ring_attn.transport.local import LocalTransport, run_local
from tests.strategies import (
    LAYOUTS,
    MASKS,
    Layouts,
    assert_holds,
    case,
    config,
    layouts_of,
    sinks_of,
    spec_of,
)

# Ranks and degree: 2 x 2, 3 x 2 and 2 x 3, and pure ones.
HYBRIDS = ((4, 2), (6, 2), (6, 3))
SIZES = ((1, 1), (3, 3), (4, 4), *HYBRIDS)


def ulysses(
    mask: Mask, degree: int, make_core: Callable[..., Call] = ring.make_call, **options: Any
) -> Callable[[AttentionSpec, Layouts, int], UlyssesCall]:
    """Makes the call of a rank from spec, layouts and rank."""

    def core(spec: AttentionSpec, layouts: Layouts, rank: int) -> Call:
        return make_core(spec, layouts, mask, rank, **options)

    def make(spec: AttentionSpec, layouts: Layouts, rank: int) -> UlyssesCall:
        return make_call(spec, layouts, rank, degree, core, same_bits=options.get("same_bits"))

    return make


# -- every mask, layout and kind of heads


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("world_size", "degree"), SIZES)
def test_every_mask_and_layout(world_size: int, degree: int, name: str, layout: str) -> None:
    mask = MASKS[name]
    layouts = layouts_of(layout, mask, world_size)
    assert_holds(ulysses(mask, degree), mask, layouts, config(nheads=6, nheads_kv=2))


HEADS = {
    "mha": config(nheads=6, nheads_kv=6),
    "3 heads": config(nheads=3, nheads_kv=3),
    "mqa": config(nheads=4, nheads_kv=1),
    "fewer heads than ranks": config(nheads=1, nheads_kv=1),
    "groups cut": config(nheads=9, nheads_kv=3, batch=2),
    "headdim_v": config(headdim_v=12),
    "strides": config(noncontiguous=True),
    "bfloat16": config(dtype=torch.bfloat16),
    "bfloat16 mqa": config(nheads_kv=1, dtype=torch.bfloat16),
    "float16 groups cut": config(nheads=9, nheads_kv=3, dtype=torch.float16),
    "float64": config(nheads_kv=1, dtype=torch.float64),
}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("world_size", "degree"), [*HYBRIDS, (4, 4)])
def test_every_kind_of_heads(world_size: int, degree: int, heads: str) -> None:
    mask = MASKS["causal"]
    layouts = layouts_of("zigzag", mask, world_size)
    assert_holds(ulysses(mask, degree), mask, layouts, HEADS[heads])


@pytest.mark.parametrize("name", ["causal", "window", "documents of other lengths", "no keys"])
@pytest.mark.parametrize(("world_size", "degree"), [(3, 3), *HYBRIDS])
def test_around_a_gathering(world_size: int, degree: int, name: str) -> None:
    mask = MASKS[name]
    make = ulysses(mask, degree, all_gather.make_call)
    for layout in LAYOUTS:
        heads = config(nheads=6, nheads_kv=2, headdim_v=12)
        assert_holds(make, mask, layouts_of(layout, mask, world_size), heads, with_sinks=True)
    for name in ("groups cut", "bfloat16 mqa"):
        assert_holds(make, mask, layouts_of("zigzag", mask, world_size), HEADS[name])


@pytest.mark.parametrize("name", ["causal", "causal window", "longer kv"])
def test_around_a_double_ring(name: str) -> None:
    """8 ranks: groups of 2, inner rings of 2 of the groups, an outer ring between these."""
    mask = MASKS[name]
    make = ulysses(mask, 2, ring.make_call, inner_degree=2)
    assert_holds(make, mask, layouts_of("zigzag", mask, 8), config(nheads=3, nheads_kv=3))


@pytest.mark.parametrize(("world_size", "degree"), [(3, 3), (4, 2)])
@pytest.mark.parametrize("stride", [1, 3])
def test_segments_in_any_order(stride: int, world_size: int, degree: int) -> None:
    """Nine runs (of a strided sequence: its three residues, in thirds), anywhere."""
    pieces = [Segment(first, 20, 3) for first in (0, 1, 2, 60, 61, 62, 120, 121, 122)]
    if stride == 1:
        pieces = [Segment(20 * first, 20) for first in range(9)]
    order = torch.randperm(9, generator=torch.Generator().manual_seed(world_size)).tolist()
    layout = SequenceLayout.from_segments(
        [[pieces[i] for i in order[rank::world_size]] for rank in range(world_size)]
    )
    mask = Mask(180, 180, causal=True)
    assert_holds(ulysses(mask, degree), mask, (layout, layout), config())


@pytest.mark.parametrize("heads", ["mqa", "groups cut", "fewer heads than ranks", "bfloat16"])
@pytest.mark.parametrize(("world_size", "degree"), [(3, 3), *HYBRIDS])
def test_softcap_and_sinks(world_size: int, degree: int, heads: str) -> None:
    mask = MASKS["documents of other lengths"]
    layouts = layouts_of("striped", mask, world_size)
    make = ulysses(mask, degree, backend="reference")
    assert_holds(make, mask, layouts, HEADS[heads], softcap=2.0, with_sinks=True)


# -- what the ranks exchange


def forward_and_backward(
    make: Callable[[AttentionSpec, Layouts, int], UlyssesCall],
    mask: Mask,
    layouts: Layouts,
    sizes: tuple[tuple[str, Any], ...],
    use: Callable[..., Any],
) -> list[Any]:
    """`use(call, shards, transport, sinks)` of all ranks."""
    inputs, _, _ = case(mask, sizes, 0.0, True)
    spec, sinks = spec_of(inputs, with_sinks=True), sinks_of(inputs)
    sides = (layouts[0], layouts[1], layouts[1], layouts[0])

    def work(rank: int, transport: LocalTransport) -> Any:
        shards = [side.shard(x, rank) for side, x in zip(sides, inputs, strict=True)]
        return use(make(spec, layouts, rank), shards, transport, sinks)

    return run_local(layouts[0].world_size, work)


def of_core(what: Callable[..., int]) -> Callable[..., int]:
    """The bytes or messages of a core."""

    def of(core: Call, *, backward: bool) -> int:
        if isinstance(core, all_gather.AllGatherCall):
            return int(getattr(all_gather, what.__name__)(core, backward=backward))
        assert isinstance(core, RingCall)
        sizes = (core.spec,) if what is cost.bytes_sent else ()
        return what(core.plan(backward=backward), *sizes, backward=backward, in_order=core.in_order)

    return of


@pytest.mark.parametrize("core", [ring, all_gather], ids=["ring", "all_gather"])
@pytest.mark.parametrize("heads", ["mha", "mqa", "bfloat16 mqa", "groups cut", "headdim_v"])
@pytest.mark.parametrize("layout", ["zigzag", "boundaries"])
@pytest.mark.parametrize(("world_size", "degree"), [(3, 3), *HYBRIDS])
def test_bytes_and_messages(
    world_size: int, degree: int, layout: str, heads: str, core: ModuleType
) -> None:
    mask = MASKS["causal window"]

    def use(
        call: UlyssesCall, shards: list[Tensor], transport: LocalTransport, sinks: Tensor
    ) -> None:
        def sent(backward: bool) -> None:
            stats = transport.stats
            predicted = (
                f(call, of_core(of), backward=backward)
                for f, of in ((bytes_sent, cost.bytes_sent), (num_messages, cost.num_messages))
            )
            assert (stats.bytes_sent, stats.messages) == tuple(predicted)
            stats.reset()

        *qkv, dout = shards
        saved = call.forward(*qkv, transport, sinks).saved
        sent(backward=False)
        call.backward(saved, dout, transport, sinks)
        sent(backward=True)

    layouts = layouts_of(layout, mask, world_size)
    make = ulysses(mask, degree, core.make_call)
    forward_and_backward(make, mask, layouts, HEADS[heads], use)


def test_bytes_of_a_plain_case() -> None:
    """By hand: 4 ranks, 16 rows each, 8 heads and 4 kv heads of 32, float32 and bfloat16."""
    layout = SequenceLayout.contiguous(64, 4)
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        spec = AttentionSpec("cpu", dtype, 1, 8, 4, 32, 32)
        call = ulysses(Mask(64, 64), 4)(spec, (layout, layout), 1)
        rows, nothing = 3 * 16, lambda *_, **__: 0  # to each of three others a quarter of the heads
        there = rows * (2 + 1 + 1) * 32 * size
        back = rows * 2 * (32 * size + 4)
        assert bytes_sent(call, nothing, backward=False) == there + back
        # dout there; dq, dk and dv back, rounded.
        assert bytes_sent(call, nothing, backward=True) == rows * (2 + 2 + 1 + 1) * 32 * size
        assert num_messages(call, nothing, backward=True) == 2


@pytest.mark.parametrize("heads", ["mqa", "mha", "bfloat16", "groups cut"])
@pytest.mark.parametrize(("world_size", "degree"), [(3, 3), (4, 2)])
def test_what_is_saved(world_size: int, degree: int, heads: str) -> None:
    """q, k, v, out and lse of the heads; neither the inputs nor messages; nothing is written to."""
    mask = MASKS["causal"]

    def use(
        call: UlyssesCall, shards: list[Tensor], transport: LocalTransport, sinks: Tensor
    ) -> None:
        copies = [x.clone() for x in shards]
        *qkv, dout = shards
        saved = call.forward(*qkv, transport, sinks).saved
        spec, batch = call.spec, call.spec.batch
        rows = sum(call.layouts[0].shard_len(rank) for rank in call.group)
        shapes: list[tuple[int, ...]] = []
        for run in call.share.runs:
            heads = (run.num, run.num_kv, run.num_kv, run.num)
            dims = (spec.headdim, spec.headdim, spec.headdim_v, spec.headdim_v)
            shapes += [(batch, rows, n, dim) for n, dim in zip(heads, dims, strict=True)]
            shapes.append((batch, run.num, rows))
        assert [tuple(x.shape) for x in saved] == shapes
        assert sum(x.untyped_storage().nbytes() for x in saved) == sum(x.nbytes for x in saved)
        assert not {x.data_ptr() for x in saved} & {x.data_ptr() for x in shards}
        kept = [x.clone() for x in saved]
        call.backward(saved, dout, transport, sinks)
        for now, before in zip((*shards, *saved), (*copies, *kept), strict=True):
            assert torch.equal(now, before)

    layouts = layouts_of("zigzag", mask, world_size)
    forward_and_backward(ulysses(mask, degree), mask, layouts, HEADS[heads], use)


@pytest.mark.parametrize("heads", ["bfloat16", "bfloat16 mqa", "float16 groups cut"])
def test_gradients_are_rounded_once(heads: str) -> None:
    """Rounding is what `rounded=False` leaves out, with replicated kv heads too."""
    mask = MASKS["causal"]

    def use(
        call: UlyssesCall, shards: list[Tensor], transport: LocalTransport, sinks: Tensor
    ) -> tuple[Gradients, Gradients]:
        *qkv, dout = shards
        saved = call.forward(*qkv, transport, sinks).saved
        rounded = call.backward(saved, dout, transport, sinks)
        return rounded, call.backward(saved, dout, transport, sinks, rounded=False)

    layouts = layouts_of("contiguous", mask, 4)
    results = forward_and_backward(ulysses(mask, 2), mask, layouts, HEADS[heads], use)
    for rounded, wide in results:
        for x, y in zip(rounded[:3], wide[:3], strict=True):
            assert x.dtype == dict(HEADS[heads])["dtype"] and y.dtype == torch.float32
            assert torch.equal(x, y.to(x.dtype)) and not torch.equal(x.to(y.dtype), y)


def test_each_rank_has_its_share_of_the_gradient_of_the_sinks() -> None:
    mask = MASKS["full"]

    def use(
        call: UlyssesCall, shards: list[Tensor], transport: LocalTransport, sinks: Tensor
    ) -> list[int]:
        *qkv, dout = shards
        saved = call.forward(*qkv, transport, sinks).saved
        dsinks = call.backward(saved, dout, transport, sinks).dsinks
        assert dsinks is not None
        return dsinks.nonzero().flatten().tolist()

    layouts = layouts_of("zigzag", mask, 4)
    sizes = config(nheads=3, nheads_kv=3)
    # Sink 0 takes no weight: see `random_sinks`.
    shares = forward_and_backward(ulysses(mask, 2), mask, layouts, sizes, use)
    assert shares == [[1], [2], [1], [2]]


# -- groups and their layouts


def test_groups_and_peers() -> None:
    mask, layout = Mask(80, 80), SequenceLayout.contiguous(80, 6)
    spec = AttentionSpec("cpu", torch.float32, 1, 6, 6, 8, 8)
    calls = [ulysses(mask, 3)(spec, (layout, layout), rank) for rank in range(6)]
    assert [call.group for call in calls] == 3 * [(0, 1, 2)] + 3 * [(3, 4, 5)]
    assert [call.peers for call in calls] == 2 * [(0, 3), (1, 4), (2, 5)]
    for call in calls:
        assert [(core.rank, core.spec.nheads) for core in call.cores] == [(call.rank // 3, 2)]
        assert call.peers[call.cores[0].rank] == call.rank == call.group[call.member]


@pytest.mark.parametrize("seqlen", [0, 1, 3, 7, 61, 97])
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(("world_size", "degree"), SIZES)
def test_rows_of_a_group(world_size: int, degree: int, kind: str, seqlen: int) -> None:
    """A row has the position in its group's shard that it has at home, and each is there once."""
    layout = layouts_of(kind, Mask(seqlen, seqlen), world_size)[0]
    merged, placed = merge_groups(layout, degree)
    assert merged.world_size == world_size // degree
    for group in range(merged.world_size):
        positions = merged.position_ids(group)
        found = torch.full_like(positions, -1)
        for member in range(degree):
            own = layout.position_ids(group * degree + member)
            for rows, group_rows in placed[group][member]:
                found[group_rows] = own[rows]
        assert torch.equal(found, positions)
    if degree == world_size:
        assert positions.tolist() == list(range(seqlen)), "in order, striped ones too"


def test_few_rows_keep_their_stride() -> None:
    """Queries in stride 4 and keys of one row or none to a rank: still one band."""
    for seqlen_k in range(5):
        mask = Mask(13, seqlen_k, causal=True)
        layouts = layouts_of("striped", mask, 4)
        assert_holds(ulysses(mask, 2), mask, layouts, config())


# -- memory

ROWS = 256
SHARE = 0.05


class Echo:
    """A transport that brings zeros: memory is measured on one rank alone."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.world_size = len(ranks)

    def sub(self, ranks: tuple[int, ...]) -> Echo:
        return Echo(ranks)

    def post(self, channel: str, step: int, hop: object, send: object, recv: Tensor) -> None:
        recv.zero_()

    def all_to_all(
        self, channel: str, step: int, send: object, counts: object, recv: Tensor, _: object
    ) -> None:
        recv.zero_()

    def wait(self, channel: str) -> None:
        pass


@pytest.mark.parametrize("backward", [False, True], ids=["fwd", "fwd_bwd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nheads_kv", [4, 1])
@pytest.mark.parametrize(
    ("world_size", "degree", "rank"), [(4, 4, 1), (3, 3, 0), (4, 2, 0), (6, 3, 5)]
)
def test_a_call_holds_what_is_predicted(
    world_size: int, degree: int, rank: int, nheads_kv: int, dtype: torch.dtype, backward: bool
) -> None:
    seqlen = ROWS * world_size
    layout = SequenceLayout.zigzag(seqlen, world_size)
    spec = AttentionSpec("cpu", dtype, 1, 8, nheads_kv, 64, 64)
    mask = Mask(seqlen, seqlen, causal=True)
    call = ulysses(mask, degree, backend="aten")(spec, (layout, layout), rank)
    q, dout = (torch.randn(1, ROWS, 8, 64).to(dtype) for _ in range(2))
    k, v = (torch.randn(1, ROWS, nheads_kv, 64).to(dtype) for _ in range(2))
    transport: Any = Echo(tuple(range(world_size)))

    def run() -> object:
        result = call.forward(q, k, v, transport, None)
        return result, call.backward(result.saved, dout, transport, None) if backward else None

    predicted = predicted_peak_bytes(call, ring.predicted_peak_bytes, backward=backward)
    assert abs(peak_bytes(run) - predicted) <= SHARE * predicted


# -- what is refused

SPEC = AttentionSpec("cpu", torch.float32, 1, 6, 3, 8, 8)


def make_with(degree: int, world_size: int = 4, **options: Any) -> UlyssesCall:
    layout = SequenceLayout.contiguous(64, world_size)
    spec = options.pop("spec", SPEC)
    return ulysses(Mask(64, 64, True), degree, **options)(spec, (layout, layout), 0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (partial(make_with, 3), ValueError, "ulysses_degree must divide .* got 3 and 4"),
        (partial(make_with, 8), ValueError, "ulysses_degree must divide .* got 8 and 4"),
        (partial(make_with, 0), ValueError, "ulysses_degree must divide .* got 0 and 4"),
        (
            partial(make_with, 2, spec=replace(SPEC, nheads=7)),
            ValueError,
            "nheads must divide by nheads_kv, got 7 and 3",
        ),
        (
            partial(make_with, 2, same_bits=True, backend="triton"),
            NotImplementedError,
            "same_bits=True cannot be had here: with 6 heads, 3 kv heads and ulysses_degree 2",
        ),
        (
            partial(make_with, 4, same_bits=True, spec=replace(SPEC, nheads=8, nheads_kv=4)),
            NotImplementedError,
            "same_bits=True cannot be had here: backend 'aten'",
        ),
    ],
)
def test_refused(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_every_rank_says_the_same_of_the_call() -> None:
    """Ranks without heads too, and those whose cores are of another number of heads."""
    mask, layout = Mask(64, 64, True), SequenceLayout.contiguous(64, 4)
    for nheads, nheads_kv, degree in ((3, 1, 4), (9, 3, 2), (2, 2, 4)):
        spec = replace(SPEC, nheads=nheads, nheads_kv=nheads_kv)
        calls = [ulysses(mask, degree)(spec, (layout, layout), rank) for rank in range(4)]
        said = {(call.backend, call.softmax_scale, call.same_bits) for call in calls}
        assert said == {("aten", 1.0 / math.sqrt(8), False)}


def test_what_one_rank_refuses_all_do() -> None:
    """A core that takes no single head: the ranks that have more of them refuse the call too."""

    def picky(spec: AttentionSpec, *_: object, **__: object) -> Any:
        if spec.nheads == 1:
            raise NotImplementedError("one head")
        return SimpleNamespace(softmax_scale=1.0, backend="picky", same_bits=False)

    layout = SequenceLayout.contiguous(64, 2)
    for rank in range(2):
        with pytest.raises(NotImplementedError, match="one head"):
            ulysses(Mask(64, 64), 2, picky)(replace(SPEC, nheads=3), (layout, layout), rank)


def test_inputs_are_those_of_the_oracle() -> None:
    """The harness can fail: a rank that mixes up its heads is noticed."""
    mask = MASKS["causal"]
    layouts = layouts_of("contiguous", mask, 2)

    class Mixed(UlyssesCall):
        def forward(self, q: Tensor, *args: Any) -> Any:
            return super().forward(q.roll(1, 2), *args)

    def make(spec: AttentionSpec, layouts: Layouts, rank: int) -> UlyssesCall:
        return Mixed(**vars(ulysses(mask, 2)(spec, layouts, rank)))

    with pytest.raises(AssertionError):
        assert_holds(make, mask, layouts, config())
