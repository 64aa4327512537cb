"""Tests that need a GPU: every config, a hundred repeats, and the bits of a ring.

The configs are the frozen configs of this GPU's architecture. Where there is no GPU the tests
are listed for sm_90 and skipped.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ring_attn.attention import drivers
from ring_attn.backends.rates import ONE_PASS_KV_HEADS
from ring_attn.backends.triton import TritonBackend
from ring_attn.core.cache import next_rank
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.kernels import configs
from ring_attn.kernels.configs import Config
from ring_attn.strategies.tree_decode import decode_tiles
from ring_attn.strategies.tree_decode import make_call as make_decode
from ring_attn.testing import (
    RESULTS,
    STRATEGIES,
    Case,
    Heads,
    Inputs,
    check,
    run_all_ranks,
)
from ring_attn.transport.local import LocalTransport, run_local
from tests.bounds import assert_holds, expect, run, whole
from tests.kernels.calls import DEVICE, cut_keys, frozen, inputs_for, same
from tests.masks import LAUNCHED, LONG

Configs = dict[str, Config]

CUDA = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA, reason="needs a GPU that torch can use"),
]

ARCHITECTURE = configs.architecture(torch.device("cuda")) if CUDA else "sm_90"

HEADDIMS = (64, 128, 256)
REPEATS = 100


def gluon(headdim: int, config: Config) -> Configs:
    backward = configs.ONE_PASS[ARCHITECTURE].get(headdim)
    return {"gluon": config} | ({} if backward is None else {"one_pass": backward})


# By name: the head dim and the configs.
KERNELS = {f"portable {headdim}": (headdim, frozen(ARCHITECTURE, headdim)) for headdim in HEADDIMS}
if ARCHITECTURE in ("sm_90", "sm_100"):
    KERNELS |= {
        f"gluon {headdim}, {number}": (headdim, gluon(headdim, config))
        for headdim, some in configs.in_gluon(ARCHITECTURE).items()
        for number, config in enumerate(some)
    }
else:
    KERNELS |= {
        f"one pass {headdim}": (headdim, {"one_pass": config})
        for headdim, config in configs.ONE_PASS.get(ARCHITECTURE, {}).items()
    }


def changed(given: Configs, **changes: int) -> TritonBackend:
    return TritonBackend({kind: replace(config, **changes) for kind, config in given.items()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LAUNCHED)
@pytest.mark.parametrize(("headdim", "given"), KERNELS.values(), ids=KERNELS)
def test_every_config_against_float64(
    headdim: int, given: Configs, name: str, dtype: torch.dtype
) -> None:
    """One launch of each kernel is right, and two that continue each other have the same bits."""
    mask = LAUNCHED[name]
    inputs = inputs_for(mask, headdim=headdim, dtype=dtype, nheads=8, nheads_kv=2)
    once = run(TritonBackend(given), inputs, [whole(mask)])
    assert_holds(once, *expect(inputs, mask))
    half = mask.seqlen_k // 2 // 128 * 128
    assert same(run(TritonBackend(given), inputs, cut_keys(mask, half)), once), "cut, other bits"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("headdim", "given"), KERNELS.values(), ids=KERNELS)
def test_repeats_are_bit_equal(headdim: int, given: Configs, causal: bool) -> None:
    """Launches more programs than an H100 runs at once, so that their timing varies.

    Two runs have other orders of tasks: the order for an L2 cache of 1 MiB, and no persistent grid.
    """
    mask = Mask(2048, 2048, causal=causal)
    inputs = inputs_for(mask, nheads=32, nheads_kv=8, headdim=headdim, dtype=torch.bfloat16)
    backend, differing = TritonBackend(given), 0
    expected = run(backend, inputs, [whole(mask)])
    for changes in ({"l2_bytes": 1 << 20}, {"programs_per_sm": 0}):
        assert same(run(changed(given, **changes), inputs, [whole(mask)]), expected), changes
    for _ in range(REPEATS):
        differing += not same(run(backend, inputs, [whole(mask)]), expected)
    assert differing == 0, f"{differing} of {REPEATS} repeats differ"


@pytest.mark.parametrize(("headdim", "given"), KERNELS.values(), ids=KERNELS)
def test_a_document_does_not_reach_its_neighbours(headdim: int, given: Configs) -> None:
    """Gluon clears its rows in shared memory, whose true layout only the device has."""
    bounds = (0, 300, 777, 1000)
    mask = Mask(1000, 1000, True, (-1, -1), bounds, bounds)
    inputs = inputs_for(mask, headdim=headdim, dtype=torch.bfloat16, nheads=8, nheads_kv=2)
    alone = run(TritonBackend(given), inputs, [whole(mask)])
    for x in inputs:
        x[:, 300:777] = float("nan")
    got = run(TritonBackend(given), inputs, [whole(mask)])
    for name in ("out", "dq", "dk", "dv"):
        x, y = (getattr(results, name) for results in (got, alone))
        assert torch.equal(x[:, :300], y[:, :300]) and torch.equal(x[:, 777:], y[:, 777:]), name


def test_offsets_beyond_32_bits() -> None:
    """q and out have more than 2^31 elements; a window keeps the work small.

    The last queries and keys are compared with dense attention over them alone.
    """
    seqlen, tail, left = 140_000, 512, 64
    if torch.cuda.get_device_properties(0).total_memory < 60 << 30:
        pytest.skip("needs a GPU with 60 GiB")
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int) -> Tensor:
        shape = (1, seqlen, heads, 128)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    inputs = Inputs(draw(128), draw(1), draw(1), draw(128))
    assert inputs.q.numel() > 1 << 31
    mask = Mask(seqlen, seqlen, causal=True, window_size=(left, -1))
    got = run(TritonBackend(), inputs, [whole(mask)])
    ends = Inputs(*(x[:, -tail:] for x in inputs))
    small = Mask(tail, tail, causal=True, window_size=(left, -1))
    oracle, plain = expect(ends, small)
    # The tail's first rows see keys before the tail, so the gradients of their keys differ, too.
    kept = {"out": (1, tail - left), "lse": (2, tail - left), "dq": (1, tail - left)}
    kept |= {"dk": (1, tail - 2 * left), "dv": (1, tail - 2 * left)}
    for name, (dim, rows) in kept.items():
        three = (getattr(x, name) for x in (got, oracle, plain))
        last = [x.narrow(dim, x.size(dim) - rows, rows) for x in (*three, oracle.terms[name])]
        verdict = check(name, *last)
        assert verdict.ok, str(verdict)


# -- every strategy; the ranks are in this process, and the local transport copies on the device

WORLD_SIZE = 4
HEADS = Heads(8, 2, 128, 128)


@pytest.mark.parametrize("backend", ["triton", "aten"])
@pytest.mark.parametrize("mask", LONG.values(), ids=LONG)
@pytest.mark.parametrize("name", STRATEGIES[:-1])  # "auto" needs processes
def test_every_strategy_holds_and_repeats(name: str, mask: Mask, backend: str) -> None:
    layout = "contiguous" if name == "q_exchange" else "zigzag"
    case = Case(mask, layout, name, backend, "bfloat16", HEADS, batch=1)
    got = run_all_ranks(case, WORLD_SIZE, device=DEVICE)
    assert not got.failures
    if backend == "triton":
        assert got.differing(run_all_ranks(case, WORLD_SIZE, device=DEVICE)) == []


# With fewer kv heads at a time the backward has another kernel, and the same bits are refused. So
# Ulysses needs that many for each of 8 ranks, and an all_gather in a chunk.
LEAST = ONE_PASS_KV_HEADS
BITS = [
    *(("ring", (*heads, dim, dim)) for heads in ((8, 2), (4, 4)) for dim in HEADDIMS),
    (Strategy("all_gather", heads_per_chunk=LEAST), (2 * LEAST, 2 * LEAST, 128, 128)),
    ("ulysses", (8 * LEAST, 8 * LEAST, 128, 128)),
]


@pytest.mark.parametrize(("strategy", "heads"), BITS, ids=str)
def test_the_bits_of_one_rank(strategy: str | Strategy, heads: tuple[int, int, int, int]) -> None:
    case = Case(
        Mask(2048, 2048, causal=True),
        "contiguous",
        strategy,
        "triton",
        "bfloat16",
        Heads(*heads),
        batch=1,
        same_bits=True,
    )
    alone, *others = (run_all_ranks(case, ranks, device=DEVICE) for ranks in (1, 2, 4, 8))
    assert all(got.differing(alone) == [] for got in others)
    assert all(bool(getattr(alone.whole, name).any()) for name in RESULTS)


@pytest.mark.parametrize("seqlen_q", [1, 17, 64])
def test_decode(seqlen_q: int) -> None:
    layout = SequenceLayout.contiguous(3000, 3)
    while layout.seqlen < 3100:
        layout = layout.appended(next_rank(layout, block=64), 64)
    seqlen = layout.seqlen
    mask = Mask(seqlen_q, seqlen, causal=True)
    inputs = inputs_for(mask, headdim=128, dtype=torch.bfloat16, nheads=8, nheads_kv=2)
    q, k, v, _ = inputs
    call = make_decode(AttentionSpec.of(q, k, v), backend="triton")

    def work(rank: int, transport: LocalTransport) -> tuple[Tensor, Tensor]:
        tiles = decode_tiles(layout.segments(rank), mask)
        shards = (layout.shard(x, rank) for x in (k, v))
        return drivers.decode(call, tiles, q, *shards, transport)

    results = run_local(layout.world_size, work)
    assert_holds(dict(zip(("out", "lse"), results[0], strict=True)), *expect(inputs, mask))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))
