"""The whole ring, forward and backward, with all ranks in this process.

Every result is held against dense attention in float64 within the bound of `ring_attn.testing`, and
all memory that the ring allocates starts as NaN.
"""

import threading
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attn.backends.aten import AtenBackend
from ring_attn.mask import Mask
from ring_attn.plan import Hop, Traveller
from ring_attn.spec import AttentionSpec
from ring_attn.state import State
from ring_attn.strategies.ring import RingCall, ring_backward, ring_forward
from ring_attn.testing import (
    RESULTS,
    Expected,
    Inputs,
    check_all,
    poisoned_empty,
)
from ring_attn.transport.local import LocalTransport, run_local
from tests.strategies import (
    LAYOUTS,
    MASKS,
    Config,
    Layouts,
    case,
    config,
    layout_of,
    layouts_of,
    sinks_of,
)

WORLD_SIZES = (1, 2, 3, 4)
BACKENDS = ("reference", "aten")
TRAVELLERS: tuple[Traveller, ...] = ("kv", "q")

Shards = tuple[Tensor, ...]


def call_of(
    inputs: Inputs,
    layouts: Layouts,
    mask: Mask,
    rank: int,
    backend: str,
    travels: Traveller,
    softcap: float = 0.0,
) -> RingCall:
    q, k, v, _ = inputs
    spec = AttentionSpec(
        "cpu", q.dtype, q.size(0), q.size(2), k.size(2), q.size(3), v.size(3), softcap
    )
    return RingCall(
        spec=spec,
        layouts=layouts,
        mask=mask,
        rank=rank,
        softmax_scale=q.size(3) ** -0.5,
        backend=backend,
        travels_back=travels,
    )


def shards_of(inputs: Inputs, layouts: Layouts, rank: int) -> Shards:
    q, k, v, dout = inputs
    layout_q, layout_kv = layouts
    return (
        layout_q.shard(q, rank),
        layout_kv.shard(k, rank),
        layout_kv.shard(v, rank),
        layout_q.shard(dout, rank),
    )


def rank_of_ring(
    inputs: Inputs,
    layouts: Layouts,
    mask: Mask,
    backend: str,
    travels: Traveller,
    rank: int,
    transport: LocalTransport,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """One rank's out, lse, dq, dk, dv, dsinks."""
    call = call_of(inputs, layouts, mask, rank, backend, travels, softcap)
    q, k, v, dout = shards_of(inputs, layouts, rank)
    out, lse = ring_forward(q, k, v, call, transport, sinks)
    return out, lse, *ring_backward(q, k, v, out, lse, dout, call, transport, sinks)


def together(results: list[tuple[Any, ...]], layouts: Layouts) -> Expected:
    """The ranks' results as those of one process; the gradient of the sinks is their sum."""
    out, lse, dq, dk, dv, dsinks = zip(*results, strict=True)
    layout_q, layout_kv = layouts
    return Expected(
        layout_q.unshard(out),
        layout_q.unshard(lse, 2),
        layout_q.unshard(dq),
        layout_kv.unshard(dk),
        layout_kv.unshard(dv),
        None if dsinks[0] is None else torch.stack(dsinks).sum(0),
    )


def ring(
    inputs: Inputs,
    mask: Mask,
    layouts: Layouts,
    backend: str,
    travels: Traveller = "kv",
    **scores: Any,
) -> Expected:
    fn = partial(rank_of_ring, inputs, layouts, mask, backend, travels, **scores)
    with poisoned_empty():
        return together(run_local(layouts[0].world_size, fn), layouts)


def assert_holds(got: Expected, oracle: Expected, plain: Expected) -> None:
    failed = [str(verdict) for verdict in check_all(got, oracle, plain) if not verdict.ok]
    assert not failed, "\n".join(failed)


def exercise(mask: Mask, kind: str, world_size: int, backend: str, sizes: Config) -> None:
    inputs, oracle, plain = case(mask, sizes)
    layouts = layouts_of(kind, mask, world_size)
    for travels in TRAVELLERS:
        assert_holds(ring(inputs, mask, layouts, backend, travels), oracle, plain)


# -- against dense attention


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_ring_is_dense_attention(mask: Mask, kind: str, world_size: int, backend: str) -> None:
    exercise(mask, kind, world_size, backend, config())


SIZES = {
    "float64": config(dtype=torch.float64),
    "bfloat16": config(dtype=torch.bfloat16),
    "float16": config(dtype=torch.float16),
    "batch, mqa": config(batch=3, nheads=3, nheads_kv=1),
    "headdim_v less": config(headdim=12, headdim_v=5),
    "headdim_v more": config(nheads_kv=4, headdim=5, headdim_v=12),
    "large logits": config(large_logits=True),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sizes_and_dtypes(sizes: Config, backend: str) -> None:
    for kind, name in (
        ("zigzag", "causal"),
        ("contiguous", "causal window"),
        ("striped", "rows that see nothing"),
    ):
        exercise(MASKS[name], kind, 3, backend, sizes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layouts_of_q_and_kv_may_differ(backend: str) -> None:
    kinds = ("contiguous", "zigzag", "boundaries")
    for (kind_q, kind_kv), name in product(
        product(kinds, kinds), ("causal", "longer kv", "documents of other lengths")
    ):
        mask = MASKS[name]
        inputs, oracle, plain = case(mask, config())
        layouts = (layout_of(kind_q, mask.seqlen_q, 3), layout_of(kind_kv, mask.seqlen_k, 3))
        for travels in TRAVELLERS:
            assert_holds(ring(inputs, mask, layouts, backend, travels), oracle, plain)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_combination(kind: str, world_size: int, sizes: Config) -> None:
    for mask, backend in product(MASKS.values(), BACKENDS):
        exercise(mask, kind, world_size, backend, sizes)


# -- softcap and sinks


SCORES = (
    ("reference", 2.0, False),
    ("reference", 2.0, True),
    ("reference", 0.0, True),
    ("aten", 0.0, True),
)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_softcap_and_sinks(scores: tuple[str, float, bool], kind: str, world_size: int) -> None:
    backend, softcap, with_sinks = scores
    for name in ("causal", "causal window", "documents", "rows that see nothing", "no keys"):
        for sizes in (config(), config(dtype=torch.bfloat16, nheads_kv=1)):
            inputs, oracle, plain = case(MASKS[name], sizes, softcap, with_sinks)
            sinks = sinks_of(inputs) if with_sinks else None
            layouts = layouts_of(kind, MASKS[name], world_size)
            for travels in TRAVELLERS:
                got = ring(
                    inputs, MASKS[name], layouts, backend, travels, softcap=softcap, sinks=sinks
                )
                assert_holds(got, oracle, plain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_see_nothing_have_their_sinks(backend: str) -> None:
    mask = MASKS["rows that see nothing"]
    inputs, _, _ = case(mask, config())
    sinks = torch.tensor([-torch.inf, -1e4, 0.0, 3.0])
    got = ring(inputs, mask, layouts_of("contiguous", mask, 4), backend, sinks=sinks)
    without = ring(inputs, mask, layouts_of("contiguous", mask, 4), backend)
    alone = ~mask.dense().any(-1)
    assert bool((got.lse[:, :, alone] == sinks.view(1, 4, 1)).all())
    assert bool((got.out[:, alone] == 0.0).all()) and bool((got.dq[:, alone] == 0.0).all())
    assert got.dsinks is not None and bool(got.dsinks.isfinite().all())
    assert got.dsinks[:2].tolist() == [0.0, 0.0] and bool((got.dsinks[2:] != 0.0).all())
    # A sink of -inf is none.
    assert torch.equal(got.out[:, :, 0], without.out[:, :, 0])
    assert torch.equal(got.lse[:, 0], without.lse[:, 0])


# -- rows that see nothing


@pytest.mark.parametrize("travels", TRAVELLERS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_rows_that_see_nothing(kind: str, backend: str, travels: Traveller) -> None:
    mask = MASKS["rows that see nothing"]
    inputs, _, _ = case(mask, config())
    got = ring(inputs, mask, layouts_of(kind, mask, 3), backend, travels)
    alone = ~mask.dense().any(-1)
    assert int(alone.sum()) == 61 - 37
    assert bool((got.out[:, alone] == 0.0).all())
    assert bool((got.lse[:, :, alone] == -torch.inf).all())
    assert bool((got.dq[:, alone] == 0.0).all())
    assert bool(got.lse[:, :, ~alone].isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("travels", TRAVELLERS)
def test_keys_that_nobody_sees_have_no_gradient(travels: Traveller, backend: str) -> None:
    # The second document has keys and no queries.
    mask = Mask(20, 30, False, (-1, -1), (0, 12, 12, 20), (0, 10, 17, 30))
    inputs, oracle, plain = case(mask, config())
    got = ring(inputs, mask, layouts_of("contiguous", mask, 3), backend, travels)
    assert_holds(got, oracle, plain)
    for grad in (got.dk, got.dv):
        assert bool((grad[:, 10:17] == 0.0).all())
        assert bool((grad[:, :10] != 0.0).any())


# -- the same bits again, and the same error on more ranks


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_two_runs_are_bit_equal(kind: str, dtype: torch.dtype, backend: str) -> None:
    mask = MASKS["causal window"]
    inputs, _, _ = case(mask, config(dtype=dtype))
    layouts = layouts_of(kind, mask, 4)
    for travels in TRAVELLERS:
        first, second = (ring(inputs, mask, layouts, backend, travels) for _ in range(2))
        for name in RESULTS:
            assert torch.equal(getattr(first, name), getattr(second, name)), name


def rms_errors(got: Expected, oracle: Expected) -> dict[str, float]:
    return {
        name: float((getattr(got, name).double() - getattr(oracle, name)).square().mean().sqrt())
        for name in RESULTS
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_the_error_does_not_grow_with_the_ranks(
    kind: str, dtype: torch.dtype, backend: str
) -> None:
    mask = Mask(512, 512, causal=True)
    inputs, oracle, _ = case(mask, config(nheads=2, nheads_kv=2, headdim=32, dtype=dtype))
    alone = rms_errors(ring(inputs, mask, layouts_of(kind, mask, 1), backend), oracle)
    for travels in TRAVELLERS:
        layouts = layouts_of(kind, mask, 8)
        errors = rms_errors(ring(inputs, mask, layouts, backend, travels), oracle)
        for name in RESULTS:
            # The promise of the design: within 10 % of the error of one rank.
            assert errors[name] <= 1.1 * alone[name], (name, travels, errors, alone)


# -- several calls at a time, and under autograd


@pytest.mark.parametrize("travels", TRAVELLERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_layers_in_flight(backend: str, travels: Traveller) -> None:
    world_size = 3
    layers = []
    for seed, (kind, name) in enumerate((("zigzag", "causal"), ("contiguous", "causal window"))):
        mask = MASKS[name]
        inputs, _, _ = case(mask, config(seed=seed))
        layers.append((inputs, layouts_of(kind, mask, world_size), mask))

    def both(rank: int, transport: LocalTransport) -> list[Shards]:
        made = []
        for inputs, layouts, mask in layers:
            call = call_of(inputs, layouts, mask, rank, backend, travels)
            q, k, v, dout = shards_of(inputs, layouts, rank)
            out, lse = ring_forward(q, k, v, call, transport)
            made.append((call, q, k, v, out, lse, dout))
        results = []
        for call, q, k, v, out, lse, dout in reversed(made):
            grads = ring_backward(q, k, v, out, lse, dout, call, transport)
            results.append((out, lse, *grads))
        return results[::-1]

    with poisoned_empty():
        results = run_local(world_size, both)
    for index, (inputs, layouts, mask) in enumerate(layers):
        got = together([one[index] for one in results], layouts)
        alone = ring(inputs, mask, layouts, backend, travels)
        for name in RESULTS:
            assert torch.equal(getattr(got, name), getattr(alone, name)), (index, name)


def test_inputs_are_left_as_they_were() -> None:
    mask = MASKS["causal"]
    inputs, _, _ = case(mask, config())
    before = [x.clone() for x in inputs]
    for world_size, backend, travels in product((1, 3), BACKENDS, TRAVELLERS):
        ring(inputs, mask, layouts_of("contiguous", mask, world_size), backend, travels)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


# -- run_local itself


def test_results_are_in_the_order_of_the_ranks() -> None:
    assert run_local(4, lambda rank, transport: (rank, transport.rank, transport.world_size)) == [
        (rank, rank, 4) for rank in range(4)
    ]


def test_messages_of_two_channels_do_not_mix() -> None:
    def fn(rank: int, transport: LocalTransport) -> tuple[list[int], list[int]]:
        got = {"shards": [], "gradients": []}
        for step in range(3):
            received = {}
            hops = {
                "shards": Hop((rank + 1) % 3, (rank - 1) % 3),
                "gradients": Hop((rank - 1) % 3, (rank + 1) % 3),
            }
            for offset, channel in ((0, "shards"), (100, "gradients")):
                mine = torch.tensor([offset + 10 * step + rank], dtype=torch.uint8)
                received[channel] = torch.zeros(1, dtype=torch.uint8)
                transport.post(channel, step, hops[channel], mine, received[channel])
            for channel in ("gradients", "shards"):
                transport.wait(channel)
                got[channel].append(int(received[channel]))
        return got["shards"], got["gradients"]

    for rank, (shards, gradients) in enumerate(run_local(3, fn)):
        assert shards == [10 * step + (rank - 1) % 3 for step in range(3)]
        assert gradients == [100 + 10 * step + (rank + 1) % 3 for step in range(3)]


def test_grad_mode_is_the_callers() -> None:
    with torch.no_grad():
        assert run_local(2, lambda rank, transport: torch.is_grad_enabled()) == [False, False]
    assert run_local(2, lambda rank, transport: torch.is_grad_enabled()) == [True, True]


class Broken(Exception):
    """What a rank fails with here."""


class BreaksAfter(AtenBackend):
    """A backend that raises after so many forward steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def forward(self, *args: Any, **kwargs: Any) -> State:
        self.steps -= 1
        if self.steps < 0:
            raise Broken("step failed")
        return super().forward(*args, **kwargs)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_error_in_one_rank_surfaces(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = MASKS["full"]
    inputs, _, _ = case(mask, config())
    layouts = layouts_of("contiguous", mask, 3)
    backends = {"aten": AtenBackend(), "broken": BreaksAfter(steps)}
    monkeypatch.setattr("ring_attn.strategies.ring.get_backend", backends.__getitem__)
    entered = []

    def fn(rank: int, transport: LocalTransport) -> None:
        entered.append(rank)
        backend = "broken" if rank == 1 else "aten"
        rank_of_ring(inputs, layouts, mask, backend, "kv", rank, transport)

    threads = threading.active_count()
    with pytest.raises(Broken, match="step failed"):
        run_local(3, fn)
    assert threading.active_count() == threads, "a rank is still waiting"
    assert 1 in entered


@pytest.mark.timeout(30)
@pytest.mark.parametrize("failing", range(3))
def test_whoever_waits_is_told(failing: int) -> None:
    told: list[tuple[int, str]] = []

    def fn(rank: int, transport: LocalTransport) -> None:
        hop = Hop((rank + 1) % 3, (rank - 1) % 3)
        send, recv = torch.zeros(2, 1, dtype=torch.uint8)
        try:
            for step in range(2):
                if (rank, step) == (failing, 1):
                    raise Broken("before its second message")
                transport.post("shards", step, hop, send, recv)
                transport.wait("shards")
        except RuntimeError as error:
            told.append((rank, str(error)))
            raise

    with pytest.raises(Broken, match="before its second message"):
        run_local(3, fn)
    message = "another rank of the local ring failed"
    assert sorted(told) == [(rank, message) for rank in range(3) if rank != failing]
