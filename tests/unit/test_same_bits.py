"""The order of gradients that keeps the bits at every world size, on a backend that folds in order.

The backend is the reference one, cut into blocks of four positions, so that what its sums are does
not depend on how the tiles were spread over steps. What the order owes is then seen in the bits.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attn import backends
from ring_attn.backends.base import folds_in_order, tile_within
from ring_attn.backends.reference import ReferenceBackend
from ring_attn.core import order
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.plan import Tile
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.strategy import Strategy
from ring_attn.machines import run as run_module
from ring_attn.strategies import ring as ring_module
from ring_attn.strategies.base import Call
from ring_attn.strategies.registry import make_call, program_of, why_not_same_bits
from ring_attn.strategies.ring import choose_gradients
from ring_attn.testing import LAYOUTS, AllRanks, Case, Heads, Layouts, masks, run_all_ranks
from ring_attn.transport.local import LocalTransport

UNIT = 4
CAUSAL = Mask(61, 61, causal=True)
HEADS = Heads(4, 2, 16, 8)


class BlockBackend(ReferenceBackend):
    """Folds block by block: out and dq from the diagonal downwards, dk and dv upwards.

    dq and dk are summed without the scale, as kernels do.
    """

    name = "blocks"
    in_order = True
    bits_unit = UNIT

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
        return super().forward(q, k, v, list(blocks(tiles)), state, scores=scores)

    def backward_q(self, *args: Any, scores: Scores) -> None:
        *inputs, tiles, dq = args
        q, k, v, *side = inputs
        for block in blocks(tiles):
            own = torch.zeros_like(dq)
            others = [torch.zeros_like(x, dtype=dq.dtype) for x in (k, v)]
            self.backward_tile((q, *side), k, v, block, own, *others, scores)
            dq[:, block.q] += own[:, block.q] / scores.softmax_scale

    def backward_kv(self, *args: Any, scores: Scores) -> None:
        *inputs, tiles, dk, dv = args
        q, k, v, *side = inputs
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
def in_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The backend under the name "blocks", last in the order of preference."""
    backend, real = BlockBackend(), backends.get_backend

    def get_backend(name: str) -> Any:
        return backend if name == "blocks" else real(name)

    monkeypatch.setattr(backends, "PREFERENCE", {**backends.PREFERENCE, "blocks": ("", "")})
    monkeypatch.setattr(backends, "get_backend", get_backend)
    for module in (ring_module, run_module):
        monkeypatch.setattr(module, "get_backend", get_backend)
    program_of.cache_clear()
    monkeypatch.setattr(order, "get_backend", get_backend)
    yield
    backends.choose_backend.cache_clear()
    order.why_not_in_order.cache_clear()


def cut(world_size: int, seqlen: int = 61) -> SequenceLayout:
    """Contiguous shards of unequal length that start at multiples of UNIT; some hold nothing."""
    cuts = {1: [], 2: [40], 3: [12, 12], 4: [4, 28, 48], 5: [8, 16, seqlen, seqlen]}
    return SequenceLayout.boundaries([0, *cuts[world_size], seqlen])


def run(case: Case, world_size: int) -> AllRanks:
    ran = run_all_ranks(case, world_size)
    assert not ran.failures
    return ran


def blocks_case(layout: Any, mask: Mask = CAUSAL, **options: Any) -> Case:
    usual = {"backend": "blocks", "heads": HEADS, "batch": 1, "same_bits": True}
    return Case(mask, layout, **(usual | options))


# -- with a backend that folds in order


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_at_every_world_size(dtype: str, sinks: bool, softcap: float) -> None:
    options = {"dtype": dtype, "sinks": sinks, "softcap": softcap}
    alone, *others = (run(blocks_case((cut(p), cut(p)), **options), p) for p in range(1, 6))
    for world_size, got in enumerate(others, 2):
        assert got.differing(alone) == [], world_size


def test_equal_shards_too() -> None:
    case = blocks_case("contiguous", Mask(96, 96, causal=True), batch=2)
    alone, *others = (run(case, ranks) for ranks in (1, 2, 3, 4, 8))
    assert [got.differing(alone) for got in others] == 4 * [[]]


def test_the_other_order_has_other_bits() -> None:
    # So the tests above could fail; where only KV's gradients differ, it is their order that does.
    alone, added = (run(blocks_case((cut(p), cut(p)), same_bits=False), p) for p in (1, 4))
    assert added.differing(alone) == ["dk", "dv"]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_that_are_continued_are_dense_attention(layout: str, world_size: int) -> None:
    """With one KV head KV travels, and where the backend folds in order its gradients with it."""
    for mask in masks(29).values():
        run(blocks_case(layout, mask, heads=Heads(4, 1, 16, 8), same_bits=None), world_size)


def test_a_step_waits_for_gradients_after_it_has_computed_dq(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the last rank, which sees all others: what hides the transfer of dk and dv is dq."""
    events: list[str] = []

    def noting(cls: type, name: str, event: str) -> None:
        original = getattr(cls, name)

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            if args[:1] != ("shards",):
                events.append(f"{event} {getattr(self, 'rank', '')}".strip())
            return original(self, *args, **kwargs)

        monkeypatch.setattr(cls, name, noted)

    noting(LocalTransport, "wait", "wait")
    noting(LocalTransport, "post", "post")
    noting(BlockBackend, "backward_q", "dq")
    noting(BlockBackend, "backward_kv", "dk dv")
    run(blocks_case((cut(2), cut(2))), 2)
    # One rank runs at a time, until it waits: rank 0 hands its gradients on and waits for them.
    step = ["dq", "wait 1", "dk dv", "post 1"]
    assert [e for e in events if not e.endswith(" 0")][-len(step) - 1 : -1] == step


# -- when it is on


def contiguous(seqlen: int, world_size: int) -> Layouts:
    layout = SequenceLayout.contiguous(seqlen, world_size)
    return layout, layout


FEW_KV_HEADS = AttentionSpec("cpu", torch.bfloat16, 1, 4, 1, 64, 64)

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
    assert reason in str(order.why_not_in_order(Strategy(), (8, 2), layouts, mask, backend))
    make = partial(make_call, Strategy(), FEW_KV_HEADS, layouts, mask, 0, backend=backend)
    with pytest.raises(NotImplementedError, match="same_bits=True cannot be had here: "):
        make(same_bits=True)
    for same_bits in (None, False):
        assert why_not_same_bits(make(same_bits=same_bits)) is not None


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
    assert order.why_not_in_order(Strategy(), (8, 2), layouts, mask, "blocks", UNIT) is None
    # Heads for which the Q side would cost fewer bytes.
    spec = AttentionSpec("cpu", torch.bfloat16, 1, 4, 4, 64, 64)
    usual = {
        same_bits: make_call(
            Strategy(), spec, layouts, mask, 0, backend="blocks", same_bits=same_bits
        )
        for same_bits in (None, True, False)
    }
    for same_bits in (None, True):
        assert why_not_same_bits(usual[same_bits]) is None
        assert choose_gradients(usual[same_bits]) == ("kv", True)
    assert why_not_same_bits(usual[False]) is not None
    if layouts == contiguous(64, 4):
        assert choose_gradients(usual[False])[0] == "q"


ZIGZAG = tuple(SequenceLayout.zigzag(64, 4) for _ in range(2))


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
    def made(**given: Any) -> Call:
        strategy = Strategy(inner_degree=given.pop("inner_degree", 1))
        options = {"spec": FEW_KV_HEADS, "mask": Mask(64, 64, True), "backend": "blocks", **given}
        spec, mask = options.pop("spec"), options.pop("mask")
        return make_call(strategy, spec, ZIGZAG, mask, 0, **options)

    usual = made()
    assert choose_gradients(usual) == ("kv", True) and why_not_same_bits(usual) is not None
    assert not choose_gradients(made(**change))[1]


def test_only_backends_in_order_say_so() -> None:
    for name in ("reference", "aten", "cudnn", "flash_attn"):
        assert not folds_in_order(backends.get_backend(name))
    assert folds_in_order(backends.get_backend("blocks"))
