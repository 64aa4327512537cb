"""The order of gradients that keeps the bits at every world size, on a backend that folds in order.

The backend is the reference one, cut into blocks of four positions, so that what its sums are does
not depend on how the tiles were spread over steps. What the order owes is then seen in the bits.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attn import backends
from ring_attn.backends.base import folds_in_order, tile_within
from ring_attn.backends.reference import ReferenceBackend
from ring_attn.layout import SequenceLayout
from ring_attn.mask import Mask
from ring_attn.plan import Hop, Tile, Traveller
from ring_attn.spec import AttentionSpec, Scores
from ring_attn.strategies import ring as ring_module
from ring_attn.strategies.ring import (
    RingCall,
    make_call,
    ring_backward,
    ring_forward,
    why_not_same_bits,
)
from ring_attn.testing import (
    RESULTS,
    Expected,
    Inputs,
    check_all,
    dense_gradients,
    plain_gradients,
    poisoned_empty,
    random_qkv,
    random_sinks,
)
from ring_attn.transport.local import LocalTransport, run_local

UNIT = 4
CAUSAL = Mask(61, 61, causal=True)

Layouts = tuple[SequenceLayout, SequenceLayout]


class BlockBackend(ReferenceBackend):
    """Folds block by block: out and dq from the diagonal downwards, dk and dv upwards.

    dq and dk are summed without the scale, as kernels do.
    """

    name = "blocks"
    in_order = True
    bits_unit = UNIT

    def __init__(self) -> None:
        self.events: dict[int, list[Any]] = defaultdict(list)

    def note(self, event: Any) -> None:
        """Every rank of a local ring is a thread."""
        self.events[threading.get_ident()].append(event)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Sequence[Tile],
        state: Any,
        *,
        scores: Scores,
        last: bool = False,
    ) -> Any:
        assert tiles, "a step without tiles is not given to a backend"
        self.note(("forward", last))
        return super().forward(q, k, v, list(blocks(tiles)), state, scores=scores)

    def backward_q(self, *args: Any, scores: Scores) -> None:
        *inputs, tiles, dq = args
        q, k, v, *side = inputs
        self.note("dq")
        for block in blocks(tiles):
            own = torch.zeros_like(dq)
            others = [torch.zeros_like(x, dtype=dq.dtype) for x in (k, v)]
            self.backward_tile((q, *side), k, v, block, own, *others, scores)
            dq[:, block.q] += own[:, block.q] / scores.softmax_scale

    def backward_kv(self, *args: Any, scores: Scores) -> None:
        *inputs, tiles, dk, dv = args
        q, k, v, *side = inputs
        self.note("dk dv")
        for block in sorted(blocks(tiles), key=lambda block: (block.kv.start, block.q.start)):
            own = [torch.zeros_like(x) for x in (dk, dv)]
            other = torch.zeros_like(q, dtype=dk.dtype)
            self.backward_tile((q, *side), k, v, block, other, *own, scores)
            dk[:, block.kv] += own[0][:, block.kv] / scores.softmax_scale
            dv[:, block.kv] += own[1][:, block.kv]

    def backward(self, *args: Any, scores: Scores, out: Tensor | None = None) -> None:
        *inputs, dq, dk, dv = args
        self.backward_q(*inputs, dq, scores=scores)
        self.backward_kv(*inputs, dk, dv, scores=scores)

    def gradient_factor(self, scores: Scores) -> float:
        return scores.softmax_scale


def blocks(tiles: Sequence[Tile]) -> Iterator[Tile]:
    """UNIT x UNIT pieces from the first q row on, and of each from the last kv row down."""
    for tile in tiles:
        for i in range(tile.q.start // UNIT * UNIT, tile.q.stop, UNIT):
            for j in reversed(range(tile.kv.start // UNIT * UNIT, tile.kv.stop, UNIT)):
                rows = slice(max(i, tile.q.start), min(i + UNIT, tile.q.stop))
                cols = slice(max(j, tile.kv.start), min(j + UNIT, tile.kv.stop))
                yield from tile_within(tile, rows, cols)


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockBackend]:
    """The backend under the name "blocks", last in the order of preference."""
    backend, real = BlockBackend(), backends.get_backend

    def get_backend(name: str) -> Any:
        return backend if name == "blocks" else real(name)

    monkeypatch.setattr(backends, "PREFERENCE", {**backends.PREFERENCE, "blocks": ("", "")})
    monkeypatch.setattr(backends, "get_backend", get_backend)
    monkeypatch.setattr(ring_module, "get_backend", get_backend)
    yield backend
    backends.choose_backend.cache_clear()
    why_not_same_bits.cache_clear()


def cut(world_size: int, seqlen: int = 61) -> SequenceLayout:
    """Contiguous shards of unequal length that start at multiples of UNIT; some hold nothing."""
    cuts = {1: [], 2: [40], 3: [12, 12], 4: [4, 28, 48], 5: [8, 16, seqlen, seqlen]}
    return SequenceLayout.boundaries([0, *cuts[world_size], seqlen])


def inputs_of(mask: Mask, **sizes: Any) -> Inputs:
    usual = {"nheads": 4, "nheads_kv": 2, "headdim": 16, "headdim_v": 8}
    return random_qkv(seqlen_q=mask.seqlen_q, seqlen_k=mask.seqlen_k, **{**usual, **sizes})


def spec_of(inputs: Inputs, softcap: float = 0.0) -> AttentionSpec:
    q, k, v, _ = inputs
    return AttentionSpec(
        "cpu", q.dtype, q.size(0), q.size(2), k.size(2), q.size(3), v.size(3), softcap
    )


def run(
    inputs: Inputs,
    mask: Mask,
    layouts: Layouts,
    backend: str = "blocks",
    *,
    same_bits: bool = True,
    travels: Traveller = "kv",
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Expected:
    """The whole ring in this process, with memory that starts as NaN."""
    spec, scale = spec_of(inputs, softcap), inputs.q.size(3) ** -0.5

    def rank_of_ring(rank: int, transport: LocalTransport) -> tuple[Any, ...]:
        call = RingCall(spec, layouts, mask, rank, scale, backend, travels, same_bits)
        sides = (layouts[0], layouts[1], layouts[1], layouts[0])
        q, k, v, dout = (side.shard(x, rank) for side, x in zip(sides, inputs, strict=True))
        out, lse = ring_forward(q, k, v, call, transport, sinks)
        return out, lse, *ring_backward(q, k, v, out, lse, dout, call, transport, sinks)

    with poisoned_empty():
        results = run_local(layouts[0].world_size, rank_of_ring)
    out, lse, dq, dk, dv, dsinks = zip(*results, strict=True)
    return Expected(
        layouts[0].unshard(out),
        layouts[0].unshard(lse, 2),
        layouts[0].unshard(dq),
        layouts[1].unshard(dk),
        layouts[1].unshard(dv),
        None if sinks is None else torch.stack(dsinks).sum(0),
    )


def assert_holds(got: Expected, inputs: Inputs, mask: Mask, **scores: Any) -> None:
    oracle, plain = (f(*inputs, mask, **scores) for f in (dense_gradients, plain_gradients))
    failed = [str(verdict) for verdict in check_all(got, oracle, plain) if not verdict.ok]
    assert not failed, "\n".join(failed)


# -- with a backend that folds in order


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_at_every_world_size(
    dtype: torch.dtype, with_sinks: bool, softcap: float
) -> None:
    inputs = inputs_of(CAUSAL, dtype=dtype)
    sinks = random_sinks(4) if with_sinks else None
    scores = {"softcap": softcap, "sinks": sinks}
    alone, *others = (run(inputs, CAUSAL, (cut(p), cut(p)), **scores) for p in range(1, 6))
    assert_holds(alone, inputs, CAUSAL, **scores)
    for world_size, got in enumerate(others, 2):
        for name in RESULTS:
            assert torch.equal(getattr(got, name), getattr(alone, name)), (world_size, name)
        assert_holds(got, inputs, CAUSAL, **scores)


def test_equal_shards_too() -> None:
    mask = Mask(96, 96, causal=True)
    inputs = inputs_of(mask, batch=2)
    layouts = [SequenceLayout.contiguous(96, p) for p in (1, 2, 3, 4, 8)]
    alone, *others = (run(inputs, mask, (layout, layout)) for layout in layouts)
    for got in others:
        assert all(torch.equal(getattr(got, name), getattr(alone, name)) for name in RESULTS)


def test_the_other_order_has_other_bits() -> None:
    # So the tests above could fail; where only KV's gradients differ, it is their order that does.
    inputs = inputs_of(CAUSAL)
    alone = run(inputs, CAUSAL, (cut(1), cut(1)), same_bits=False)
    added = run(inputs, CAUSAL, (cut(4), cut(4)), same_bits=False)
    assert torch.equal(added.dq, alone.dq)
    assert not torch.equal(added.dk, alone.dk) and not torch.equal(added.dv, alone.dv)
    assert_holds(added, inputs, CAUSAL)


def test_a_step_waits_for_gradients_after_it_has_computed_dq(in_order: BlockBackend) -> None:
    inputs, layouts = inputs_of(CAUSAL), (cut(4), cut(4))

    class Noted(LocalTransport):
        def post(self, channel: Any, step: int, hop: Hop, send: Tensor, recv: Tensor) -> None:
            in_order.note(f"post {channel} {step}")
            super().post(channel, step, hop, send, recv)

        def wait(self, channel: Any) -> None:
            in_order.note(f"wait {channel}")
            super().wait(channel)

    def rank_of_ring(rank: int, transport: LocalTransport) -> list[Any]:
        call = RingCall(spec_of(inputs), layouts, CAUSAL, rank, 0.25, "blocks", "kv", True)
        q, k, v, dout = (layouts[0].shard(x, rank) for x in inputs)
        out, lse = ring_forward(q, k, v, call, transport)
        mine = in_order.events[threading.get_ident()]
        mine.clear()
        noted = Noted(rank, tuple(range(4)), transport._exchange)
        ring_backward(q, k, v, out, lse, dout, call, noted)
        return mine

    events = run_local(4, rank_of_ring)
    own = ["post shards 0", "dq", "dk dv", "post gradients 0", "wait shards"]
    # Rank 3 sees all others; rank 1 is passed the gradients of ranks 3 and 2 without a tile.
    computed = [
        ["post shards {}", "dq", "wait gradients", "dk dv", "post gradients {}", "wait shards"],
        ["post shards {}", "wait gradients", "post gradients {}", "wait shards"],
    ]

    def steps(*with_tiles: bool) -> list[str]:
        told = list(own)
        for index, tiles in enumerate(with_tiles, 1):
            told += [event.format(index) for event in computed[not tiles]]
        # At the last step nothing more comes, and its gradients go home.
        del told[told.index(f"post shards {len(with_tiles)}")], told[-1]
        return [*told, "wait gradients"]

    assert events[3] == steps(True, True, True)
    assert events[1] == steps(True, False, False)
    assert events[0] == steps(False, False, False)


def test_last_is_the_last_step_with_tiles(in_order: BlockBackend) -> None:
    inputs = inputs_of(CAUSAL)
    run(inputs, CAUSAL, (cut(4), cut(4)))
    told = [event for events in in_order.events.values() for event in events]
    told = [event for event in told if isinstance(event, tuple)]
    # Rank r has tiles in its first r + 1 steps.
    assert sorted(told) == [("forward", False)] * 6 + [("forward", True)] * 4


# -- the order itself, with any backend, mask and layout


DOCUMENTS = (0, 9, 9, 10, 40, 61)

MASKS = {
    "full": Mask(61, 61),
    "causal": CAUSAL,
    "causal window": Mask(61, 61, causal=True, window_size=(11, -1)),
    "window": Mask(61, 61, window_size=(5, 7)),
    "longer kv": Mask(37, 61, causal=True),
    "rows that see nothing": Mask(61, 37, causal=True),
    "documents": Mask(61, 61, True, (-1, -1), DOCUMENTS, DOCUMENTS),
    "fewer rows than ranks": Mask(3, 3, causal=True),
    "no keys": Mask(7, 0),
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_continued_gradients_are_those_of_dense_attention(
    mask: Mask, kind: str, world_size: int
) -> None:
    inputs = inputs_of(mask)
    layouts = tuple(
        SequenceLayout.from_name(kind, n, world_size) for n in (mask.seqlen_q, mask.seqlen_k)
    )
    for backend, travels in [*product(("reference", "aten"), ("kv", "q")), ("blocks", "kv")]:
        assert_holds(run(inputs, mask, layouts, backend, travels=travels), inputs, mask)


def test_two_calls_in_flight() -> None:
    masks = (CAUSAL, Mask(61, 61, causal=True, window_size=(11, -1)))
    layouts = (cut(3), cut(3))
    cases = [(inputs_of(mask, seed=seed), mask) for seed, mask in enumerate(masks)]

    def both(rank: int, transport: LocalTransport) -> list[tuple[Tensor, ...]]:
        made = []
        for inputs, mask in cases:
            call = RingCall(spec_of(inputs), layouts, mask, rank, 0.25, "aten", "kv", True)
            q, k, v, dout = (layouts[0].shard(x, rank) for x in inputs)
            made.append((q, k, v, *ring_forward(q, k, v, call, transport), dout, call, transport))
        return [ring_backward(*one)[:3] for one in reversed(made)][::-1]

    with poisoned_empty():
        results = run_local(3, both)
    for index, (inputs, mask) in enumerate(cases):
        alone = run(inputs, mask, layouts, "aten")
        for i, name in enumerate(("dq", "dk", "dv")):
            got = layouts[0].unshard([one[index][i] for one in results])
            assert torch.equal(got, getattr(alone, name)), (index, name)


# -- when it is on


def contiguous(seqlen: int, world_size: int) -> Layouts:
    layout = SequenceLayout.contiguous(seqlen, world_size)
    return layout, layout


WITHOUT: dict[str, tuple[Layouts, Mask, str, str]] = {
    "backend": (contiguous(64, 4), Mask(64, 64, True), "aten", "backend 'aten' does not fold"),
    "full": (contiguous(64, 4), Mask(64, 64), "blocks", "must be causal"),
    "right window": (contiguous(64, 4), Mask(64, 64, False, (-1, 2)), "blocks", "must be causal"),
    "left window": (contiguous(64, 4), Mask(64, 64, True, (9, -1)), "blocks", "without window"),
    "documents": (
        contiguous(64, 4),
        Mask(64, 64, True, (-1, -1), (0, 30, 64), (0, 30, 64)),
        "blocks",
        "and cu_seqlens",
    ),
    "zigzag": (
        (SequenceLayout.zigzag(64, 4),) * 2,
        Mask(64, 64, True),
        "blocks",
        "must be contiguous, got zigzag",
    ),
    "striped": (
        (SequenceLayout.striped(64, 1),) * 2,
        Mask(64, 64, True),
        "blocks",
        "must be contiguous, got striped",
    ),
    "lengths": (
        (SequenceLayout.contiguous(32, 4), SequenceLayout.contiguous(64, 4)),
        Mask(32, 64, True),
        "blocks",
        "q and kv must have one layout",
    ),
    "boundaries": (
        (cut(2), SequenceLayout.boundaries([0, 20, 61])),
        CAUSAL,
        "blocks",
        "q and kv must have one layout",
    ),
    "unit": (contiguous(64, 3), Mask(64, 64, True), "blocks", "multiple of 4, one's start at 22"),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_why_not(name: str) -> None:
    layouts, mask, backend, reason = WITHOUT[name]
    inputs = inputs_of(mask)
    assert reason in str(why_not_same_bits(layouts, mask, backend))
    make = partial(make_call, spec_of(inputs), layouts, mask, 0, backend=backend)
    with pytest.raises(NotImplementedError, match="same_bits=True cannot be had here: "):
        make(same_bits=True)
    assert not make().same_bits and not make(same_bits=False).same_bits


@pytest.mark.parametrize(
    ("layouts", "mask"),
    [
        (contiguous(64, 4), Mask(64, 64, True)),
        (contiguous(64, 4), Mask(64, 64, False, (-1, 0))),
        (contiguous(61, 1), CAUSAL),
        ((SequenceLayout.contiguous(64, 4), SequenceLayout.boundaries(range(0, 80, 16))),
         Mask(64, 64, True)),
        *(((cut(p), cut(p)), CAUSAL) for p in range(1, 6)),
    ],
    ids=str,
)  # fmt: skip
def test_on_where_it_can_be_had(layouts: Layouts, mask: Mask) -> None:
    assert why_not_same_bits(layouts, mask, "blocks") is None
    # Heads for which the Q side would cost fewer bytes.
    spec = AttentionSpec("cpu", torch.bfloat16, 1, 4, 4, 64, 64)
    usual = {
        same_bits: make_call(spec, layouts, mask, 0, backend="blocks", same_bits=same_bits)
        for same_bits in (None, True, False)
    }
    assert usual[None] == usual[True]
    assert usual[True].same_bits and usual[True].travels_back == "kv"
    assert not usual[False].same_bits
    if layouts == contiguous(64, 4):
        assert usual[False].travels_back == "q"


ZIGZAG = tuple(SequenceLayout.zigzag(64, 4) for _ in range(2))
FEW_KV_HEADS = AttentionSpec("cpu", torch.bfloat16, 1, 4, 1, 64, 64)


@pytest.mark.parametrize(
    "change",
    [
        {"spec": AttentionSpec("cpu", torch.bfloat16, 1, 4, 4, 64, 64)},  # the Q side travels
        {"mask": Mask(64, 64, True, (20, 0))},
        {"backend": "reference"},
        {"inner_degree": 2},
        {"same_bits": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_gradients_are_continued_where_kv_travels_anyway(change: dict[str, Any]) -> None:
    def made(**given: Any) -> RingCall:
        options = {"spec": FEW_KV_HEADS, "mask": Mask(64, 64, True), "backend": "blocks", **given}
        spec, mask = options.pop("spec"), options.pop("mask")
        return make_call(spec, ZIGZAG, mask, 0, **options)

    usual = made()
    assert usual.in_order and usual.travels_back == "kv" and not usual.same_bits
    assert not made(**change).in_order


def test_only_backends_in_order_say_so() -> None:
    for name in ("reference", "aten", "cudnn", "flash_attn"):
        assert not folds_in_order(backends.get_backend(name))
    assert folds_in_order(backends.get_backend("blocks"))
