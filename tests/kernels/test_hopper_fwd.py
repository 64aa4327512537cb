"""The forward in Gluon of sm_90 over blocks so short that every buffer is used again and again.

Its PTX is executed (`ptx/`), warpgroups in random order, and compared with float64; on an sm_90
GPU it runs. test_ptx.py has the configs in use.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attn.backends.triton import TritonBackend
from ring_attn.core import masks
from ring_attn.core.mask import Mask
from ring_attn.core.spec import Scores
from ring_attn.kernels import configs, gluon_guard
from ring_attn.kernels.configs import Config
from ring_attn.kernels.flash_fwd import forward_launch
from ring_attn.kernels.hopper_fwd import copyable, hopper_launch
from ring_attn.kernels.launch import Launch
from ring_attn.testing import Inputs, random_qkv, random_sinks
from tests.bounds import assert_holds, expect, whole
from tests.kernels.calls import Step, cut_keys, empty_state, in_interpreter, q_table
from tests.kernels.ptx import launching
from tests.kernels.test_aot import run_compiling


def on_hopper(test: Any) -> Any:
    """For tests that need the device."""
    here = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    reason = "needs a GPU of compute capability 9.0"
    return pytest.mark.gpu(pytest.mark.skipif(not here, reason=reason)(test))


REPEATS = 50

SMALL = Config(128, 32, 4, 2, programs_per_sm=1)
# The config that head dim 128 uses.
GLUON = configs.GLUON[128][0]
DOCUMENTS = (0, 40, 160, 257)

# Cuts on or off the grid of 32 columns, one block or several, fewer rows than a consumer has.
MASKS = {
    "full": Mask(257, 257),
    "whole blocks": Mask(128, 96),
    "causal": Mask(257, 257, causal=True),
    "causal, whole blocks": Mask(256, 256, causal=True),
    "one row": Mask(1, 1, causal=True),
    "one row, many keys": Mask(1, 113),
    "half a block": Mask(63, 63, causal=True),
    "less than a block": Mask(97, 97, causal=True),
    "a bit more than half": Mask(113, 113),
    "longer kv": Mask(63, 113, causal=True),
    "rows that see nothing": Mask(257, 63, causal=True),
    "window": Mask(257, 257, window_size=(40, 30)),
    "causal window": Mask(257, 257, causal=True, window_size=(70, -1)),
    "two documents": Mask(256, 256, True, (-1, -1), (0, 128, 256), (0, 128, 256)),
    "documents": Mask(257, 257, True, (-1, -1), DOCUMENTS, DOCUMENTS),
    "spans": masks.spans(257, [(30, 140), (200, 211)], left=150),
    "sink window": masks.sink_window(257, 5, 70),
    "bands": masks.from_slices(
        257, 257, [(0, 257, 0, 257, lo, hi) for lo, hi in ((-200, -40), (-9, -5), (0, 130))]
    ),
    "documents of other lengths": Mask(
        257, 150, True, (30, -1), (0, 20, 130, 257), (0, 33, 33, 150)
    ),
}

# nheads, nheads_kv, batch
HEADS = [(4, 2, 1), (3, 1, 1), (2, 2, 2), (1, 1, 1)]


def inputs_for(mask: Mask, **sizes: Any) -> Inputs:
    """Random float16 inputs on the CPU: two heads of 64 over one of keys, unless said otherwise."""
    usual = {"nheads": 2, "nheads_kv": 1, "headdim": 64, "dtype": torch.float16}
    return random_qkv(seqlen_q=mask.seqlen_q, seqlen_k=mask.seqlen_k, **(usual | sizes))


def forward(
    inputs: Inputs,
    steps: Sequence[Step],
    config: Config = SMALL,
    *,
    sinks: Tensor | None = None,
    seed: int = 0,
    **how: Any,
) -> tuple[Tensor, Tensor]:
    """out and lse, one launch for each step: by its PTX on the CPU, else on the GPU."""
    q, k, v, _ = inputs
    state = empty_state(inputs, sinks, carried=len(steps) > 1)
    for index, tiles in enumerate(steps):
        first, last = index == 0, index == len(steps) - 1
        table = q_table(tiles, config, q.size(1) if first or last else 0, q.device.type)
        if not table.num_blocks:
            continue
        launch = hopper_launch(
            q, k, v, state, table, config, softmax_scale=q.size(3) ** -0.5, first=first, last=last,
            **how,
        )  # fmt: skip
        if q.device.type == "cpu":
            assert launching.run(launch, "sm_90", seed) == []
        else:
            launch.run()
        assert state.counter == 0, "the next launch would leave tasks out"
    assert state.out is not None and state.lse is not None
    return state.out, state.lse


def assert_exact(got: tuple[Tensor, Tensor], inputs: Inputs, mask: Mask, **scores: Any) -> None:
    assert_holds(dict(zip(("out", "lse"), got, strict=True)), *expect(inputs, mask, **scores))


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


QUICK = ("one row", "window", "documents of other lengths")


@in_interpreter
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in MASKS if x not in QUICK)]
)
def test_masks(name: str) -> None:
    """Runs one order of warpgroups, and another one without turns."""
    mask = MASKS[name]
    inputs = inputs_for(mask)
    got = forward(inputs, [whole(mask)], seed=len(name))
    assert_exact(got, inputs, mask)
    if name not in QUICK:
        assert same(forward(inputs, [whole(mask)], seed=1, ping_pong=False), got)


# Heads as above, head dims, config
SIZES = [
    *((heads, (64, 64), SMALL) for heads in HEADS),
    *(((1, 1, 1), (64, 64), Config(*config)) for config in ((192, 32, 4, 2), (128, 16, 4, 3))),
    *(((2, 1, 1), dims, Config(128, 64, 4, 2)) for dims in ((128, 64), (64, 128))),
    *(((2, 1, 1), (dim, dim), one) for dim, some in configs.GLUON.items() for one in some[1:]),
]


@in_interpreter
@pytest.mark.slow
@pytest.mark.parametrize(("heads", "dims", "config"), SIZES, ids=str)
def test_heads_consumers_and_stages(
    heads: tuple[int, int, int], dims: tuple[int, int], config: Config
) -> None:
    """Buffers are used again and again."""
    mask = Mask(200, 640, causal=True)
    sizes = dict(zip(("nheads", "nheads_kv", "batch"), heads, strict=True))
    inputs = inputs_for(mask, headdim=dims[0], headdim_v=dims[1], **sizes)
    assert_exact(forward(inputs, [whole(mask)], config), inputs, mask)


@in_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "full", "causal window", "documents"])
def test_steps_have_the_bits_of_one(name: str) -> None:
    mask = MASKS[name]
    inputs = inputs_for(mask)
    alone = forward(inputs, [whole(mask)])
    for cuts in ((128,), (32, 96, 224)):
        assert same(forward(inputs, cut_keys(mask, *cuts), seed=7), alone)


@in_interpreter
@pytest.mark.slow
def test_programs_and_order_do_not_change_bits() -> None:
    mask = MASKS["causal"]
    inputs = inputs_for(mask, nheads=4, nheads_kv=2)
    alone = forward(inputs, [whole(mask)])
    assert_exact(alone, inputs, mask)
    for seed in range(3):
        for changes in ({"programs_per_sm": 0}, {"l2_bytes": 1}, {"num_stages": 3}):
            config = replace(SMALL, **changes)
            assert same(forward(inputs, [whole(mask)], config, seed=seed), alone)


@in_interpreter
@pytest.mark.slow
def test_the_portable_forward_has_the_same_bits() -> None:
    """The two agree over equal blocks, also where the portable one ends a call without keys."""
    mask = MASKS["causal"]
    inputs, sinks = inputs_for(mask, headdim=128), random_sinks(2)
    q, k, v, _ = inputs
    for steps in ([whole(mask)], cut_keys(mask, 128)):
        found = list[tuple[Tensor | None, Tensor | None]]()
        for make, empty in ((hopper_launch, False), (forward_launch, False), (hopper_launch, True)):
            state = empty_state(inputs, sinks, carried=True)
            each = [*steps, ()] if empty else steps
            for index, tiles in enumerate(each):
                first, last = index == 0, index == len(each) - 1
                table = q_table(tiles, GLUON, q.size(1), "cpu")
                launch: Any = make if tiles else forward_launch
                kv = (k, v) if tiles else (k[:, :0], v[:, :0])
                options = {"softmax_scale": 0.1, "first": first, "last": last}
                launching.run(launch(q, *kv, state, table, GLUON, **options), "sm_90")
            found.append((state.out, state.lse))
        assert same(found[0], found[1]) and same(found[0], found[2])


@in_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_a_document_holds_does_not_reach_its_neighbours(bad: float) -> None:
    bounds = (0, 40, 113, 150)
    mask = Mask(150, 150, True, (-1, -1), bounds, bounds)
    inputs = inputs_for(mask)
    alone = forward(inputs, [whole(mask)])
    for x in (inputs.k, inputs.v):
        x[:, 40:113] = bad
    out, lse = forward(inputs, [whole(mask)])
    others = [*range(40), *range(113, 150)]
    assert torch.equal(out[:, others], alone[0][:, others])
    assert torch.equal(lse[..., others], alone[1][..., others])
    assert not lse[..., 40:113].isfinite().any()


@in_interpreter
def test_all_steps_of_a_call_have_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides do not change the kernel; only a last step without keys takes the portable one."""
    launches = list[Launch]()
    monkeypatch.setattr(configs, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(Launch, "run", lambda launch: launches.append(launch))
    mask, backend = Mask(40, 40), TritonBackend()
    q, k, v, _ = inputs_for(mask)
    state, scores = backend.new_state(q, 64), Scores(0.1, softcap=5.0)
    odd = torch.empty(1, 40, 1, 65, dtype=k.dtype)[..., 1:]
    for one in (k, odd, k[:, :1].expand(1, 40, 1, 64)):
        backend.forward(q, one, v, whole(mask), state, scores=scores)
    backend.forward(q, k[:, :0], v[:, :0], (), state, scores=scores, last=True)
    names = [launch.kernel.fn.__name__ for launch in launches]
    assert names == [*["hopper_fwd_kernel"] * 3, "flash_fwd_kernel"]


def test_what_bulk_copies_cannot_take_is_copied() -> None:
    x = torch.randn(1, 97, 2, 72, dtype=torch.float16)
    heads_first = torch.randn(1, 2, 97, 64, dtype=torch.float16).transpose(1, 2)
    for taken in (x, x[..., 8:], x[:, 3:], x[:, :, 1:], heads_first):
        assert copyable(taken) is taken
    alone = x[:, :1].as_strided((1, 1, 2, 72), (0, 0, 72, 1))
    others = (x[..., 1:65], x[..., 4:68], x[:, :, :1].expand(1, 97, 3, 72), alone)
    for other in others:
        copy = copyable(other)
        assert copy is not other and torch.equal(copy, other) and copyable(copy) is copy


# -- compiled

COMPILE = """
import dataclasses, json, sys
from ring_attn.tools import aot
for cell in aot.cells("sm_90", "64", "bfloat16"):
    if cell.variant == aot.Variant("hopper_fwd", "causal"):
        row = aot.compile_cell(cell)
        print(json.dumps(dataclasses.asdict(row)))
        break
"""


def test_it_compiles_as_it_is_meant_to() -> None:
    """Compiles on any machine: no spills, specialised, every exponential beside a product."""
    row = json.loads(run_compiling("-c", COMPILE))
    assert row["failures"] == []
    opcodes = row["report"]["opcodes"]
    assert opcodes["USETMAXREG"] and opcodes["UTMALDG"] and opcodes["HGMMA"]
    # Two loops, for masked blocks and whole blocks, in each of two consumers: 64 rows x 128
    # columns over 128 threads.
    assert len(row["report"]["hidden"]) == 4 and min(row["report"]["hidden"]) >= 64


@pytest.mark.parametrize("needed", ["no.such.module", "math"])
def test_what_triton_lacks_is_told(needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gluon_guard.gluon_missing() is None
    monkeypatch.setattr(gluon_guard, "NEEDED", {needed: ("sin", "sine|sinus")})
    told = gluon_guard.gluon_missing.__wrapped__()
    if needed == "math":
        assert told == "triton's math has no sine or sinus"
    else:
        assert told is not None and told.startswith("triton has no no.such.module (")


# -- on the device

CASES = {
    "causal": Mask(1000, 1000, causal=True),
    "causal, whole blocks": Mask(1024, 1024, causal=True),
    "full": Mask(1024, 1024),
    "window": Mask(900, 1024, window_size=(100, 50)),
    "documents": Mask(1000, 1000, True, (-1, -1), (0, 100, 600, 1000), (0, 100, 600, 1000)),
}
EVERY_CONFIG = [(headdim, config) for headdim, some in configs.GLUON.items() for config in some]

# All masks with the first config of each head dim: a kernel takes seconds to compile.
AGAINST_FLOAT64 = [
    (headdim, config, name)
    for headdim, config in EVERY_CONFIG
    for name in CASES
    if name in ("causal, whole blocks", "full") or config == configs.GLUON[headdim][0]
]


def name_of(x: object) -> str:
    """Names a parameter, for the test's name."""
    return f"{x.BLOCK_M}x{x.BLOCK_N}-s{x.num_stages}" if isinstance(x, Config) else str(x)


def on_device(mask: Mask, headdim: int, **sizes: Any) -> Inputs:
    """Random inputs, bfloat16, of 8 heads over 2 unless said otherwise."""
    usual = {"nheads": 8, "nheads_kv": 2, "dtype": torch.bfloat16}
    return random_qkv(
        seqlen_q=mask.seqlen_q, seqlen_k=mask.seqlen_k, headdim=headdim, device="cuda",
        **(usual | sizes),
    )  # fmt: skip


@on_hopper
@pytest.mark.parametrize(("headdim", "config", "name"), AGAINST_FLOAT64, ids=name_of)
def test_on_hopper_against_float64(headdim: int, config: Config, name: str) -> None:
    """Takes the dtypes in turn, with sinks."""
    mask = CASES[name]
    dtype = torch.float16 if name == "causal, whole blocks" else torch.bfloat16
    inputs, sinks = on_device(mask, headdim, dtype=dtype), random_sinks(8, device="cuda")
    got = forward(inputs, [whole(mask)], config, sinks=sinks)
    assert_exact(got, inputs, mask, sinks=sinks)
    alone = replace(config, programs_per_sm=0)
    for one, turns in ((alone, True), (config, False)):
        again = forward(inputs, [whole(mask)], one, sinks=sinks, ping_pong=turns)
        assert same(again, got), "a task a program, or no turns: other bits"
    if config == configs.GLUON[headdim][0]:
        cut = forward(inputs, cut_keys(mask, 256, 512), config, sinks=sinks)
        assert same(cut, got), "cut, other bits"


@on_hopper
@pytest.mark.parametrize("name", ["causal, whole blocks", "full"])
@pytest.mark.parametrize(("headdim", "config"), EVERY_CONFIG, ids=name_of)
def test_on_hopper_repeats_are_bit_equal(headdim: int, config: Config, name: str) -> None:
    """Launches more tasks than a GPU runs at once."""
    mask = replace(CASES[name], seqlen_q=2048, seqlen_k=2048)
    inputs = on_device(mask, headdim, nheads=32, nheads_kv=8)
    first = forward(inputs, [whole(mask)], config)
    repeats = (forward(inputs, [whole(mask)], config) for _ in range(REPEATS))
    differing = sum(not same(again, first) for again in repeats)
    assert differing == 0, f"{differing} of {REPEATS} repeats differ"


@on_hopper
@pytest.mark.parametrize("headdim", configs.GLUON)
def test_on_hopper_a_document_does_not_reach_its_neighbours(headdim: int) -> None:
    """Its rows are cleared in shared memory, whose true layout only the device has."""
    bounds = (0, 300, 777, 1000)
    mask = Mask(1000, 1000, True, (-1, -1), bounds, bounds)
    inputs = on_device(mask, headdim)
    alone = forward(inputs, [whole(mask)], configs.GLUON[headdim][0])
    assert_exact(alone, inputs, mask)
    inputs.k[:, 300:777] = inputs.v[:, 300:777] = float("nan")
    got = forward(inputs, [whole(mask)], configs.GLUON[headdim][0])
    for x, y in ((got[0], alone[0]), (got[1].mT, alone[1].mT)):
        assert torch.equal(x[:, :300], y[:, :300]) and torch.equal(x[:, 777:], y[:, 777:])
