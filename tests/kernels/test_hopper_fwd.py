"""The Gluon forward of sm_90: emulated against float64; on such a GPU against `flash_fwd`, too.

In the emulator every partition, barrier, copy and wait is the kernel's own; see gluon_emulator.py.
Faults planted into the kernel's source show that it would see them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attn.core import masks
from ring_attn.core.mask import Mask
from ring_attn.kernels import configs, gluon_guard
from ring_attn.kernels.configs import Config
from ring_attn.kernels.hopper_fwd import CONFIGS, RAGGED_HEAD_DIMS, can_run, hopper_launch
from ring_attn.testing import Inputs, check, plain_gradients, random_qkv, random_sinks
from tests.bounds import assert_holds, expect, whole
from tests.kernels import calls
from tests.kernels.calls import Step, cut_keys, empty_state, q_table
from tests.kernels.gluon_emulator import Deadlock, Edit, Hazard, emulate


def on_hopper(test: Any) -> Any:
    """For tests that need the device."""
    here = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    reason = "needs a GPU of compute capability 9.0"
    return pytest.mark.gpu(pytest.mark.skipif(not here, reason=reason)(test))


ROOT = Path(__file__).parents[2]
REPEATS = 50

SMALL = Config(128, 32, 4, 2, programs_per_sm=1)
DOCUMENTS = (0, 40, 160, 257)

BARRIERS = ("q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty", "turns")

# On the grid of 32 columns or not, one block or several, fewer rows than a consumer has.
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
    edits: Sequence[Edit] = (),
    **how: Any,
) -> tuple[Tensor, Tensor]:
    """out and lse, each step in a launch of its own: emulated on the CPU, else run."""
    q, k, v, _ = inputs
    state = empty_state(inputs, sinks, carried=len(steps) > 1)
    for index, tiles in enumerate(steps):
        first, last = index == 0, index == len(steps) - 1
        table = q_table(tiles, config, q.size(1) if first or last else 0, q.device.type)
        assert can_run(q, k, v, table, 0.0) or not table.num_blocks
        if not table.num_blocks:
            continue
        launch = hopper_launch(
            q, k, v, state, table, config, softmax_scale=q.size(3) ** -0.5, first=first, last=last,
            **how,
        )  # fmt: skip
        if q.device.type == "cpu":
            emulate(launch, seed=seed, edits=edits, names=BARRIERS)
        else:
            launch.run()
    assert state.out is not None and state.lse is not None
    return state.out, state.lse


def assert_exact(got: tuple[Tensor, Tensor], inputs: Inputs, mask: Mask, **scores: Any) -> None:
    assert_holds(dict(zip(("out", "lse"), got, strict=True)), *expect(inputs, mask, **scores))


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("ping_pong", [True, False], ids=["turns", "no turns"])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, ping_pong: bool) -> None:
    mask = MASKS[name]
    inputs = inputs_for(mask)
    got = forward(inputs, [whole(mask)], ping_pong=ping_pong, seed=ping_pong)
    assert_exact(got, inputs, mask)
    if name == "rows that see nothing":
        assert (got[0][:, :194] == 0).all() and got[1][..., :194].isneginf().all()


@pytest.mark.parametrize(
    ("nheads", "nheads_kv", "batch"), [(4, 2, 1), (3, 1, 1), (2, 2, 2), (1, 1, 1)]
)
def test_heads(nheads: int, nheads_kv: int, batch: int) -> None:
    mask = Mask(97, 113, causal=True)
    inputs = inputs_for(mask, nheads=nheads, nheads_kv=nheads_kv, batch=batch)
    assert_exact(forward(inputs, [whole(mask)]), inputs, mask)


@pytest.mark.parametrize(
    ("headdim", "headdim_v", "config"),
    [
        (128, 128, Config(128, 64, 4, 2)),
        (64, 64, Config(192, 32, 4, 2)),
        (64, 64, Config(128, 16, 4, 3)),
        (256, 256, Config(128, 64, 4, 2)),
        (128, 64, Config(128, 64, 4, 2)),
    ],
)
def test_head_dims_consumers_and_stages(headdim: int, headdim_v: int, config: Config) -> None:
    mask = Mask(257, 192, causal=True, window_size=(150, -1))
    inputs = inputs_for(mask, nheads=1, headdim=headdim, headdim_v=headdim_v)
    assert_exact(forward(inputs, [whole(mask)], config), inputs, mask)


@pytest.mark.parametrize("name", ["causal", "full", "causal window", "documents"])
def test_steps_have_the_bits_of_one(name: str) -> None:
    mask = MASKS[name]
    inputs = inputs_for(mask)
    alone = forward(inputs, [whole(mask)])
    for cuts in ((128,), (32, 96, 224)):
        assert same(forward(inputs, cut_keys(mask, *cuts), seed=7), alone)


def test_programs_and_order_do_not_change_bits() -> None:
    mask = MASKS["causal"]
    inputs = inputs_for(mask, nheads=4, nheads_kv=2)
    alone = forward(inputs, [whole(mask)])
    assert_exact(alone, inputs, mask)
    for seed in range(3):
        for changes in ({"programs_per_sm": 0}, {"l2_bytes": 1}, {"num_stages": 3}):
            config = replace(SMALL, **changes)
            assert same(forward(inputs, [whole(mask)], config, seed=seed), alone)


def test_sinks() -> None:
    mask = MASKS["rows that see nothing"]
    inputs, sinks = inputs_for(mask), random_sinks(2)
    got = forward(inputs, [whole(mask)], sinks=sinks)
    assert_exact(got, inputs, mask, sinks=sinks)
    assert same(forward(inputs, cut_keys(mask, 32), sinks=sinks), got)


def test_strides() -> None:
    """Heads before rows in memory, and as parts of one tensor."""
    mask = MASKS["less than a block"]
    inputs = inputs_for(mask, nheads=2, nheads_kv=2, batch=2)
    alone = forward(inputs, [whole(mask)])
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:3]]
    assert same(forward(Inputs(*swapped, inputs.dout), [whole(mask)]), alone)
    packed = torch.stack(inputs[:3], 2).unbind(2)
    assert same(forward(Inputs(*packed, inputs.dout), [whole(mask)]), alone)


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


def test_what_it_does_not_take() -> None:
    mask = Mask(97, 97, causal=True)
    q, k, v, _ = inputs_for(mask, nheads_kv=2)
    table = q_table(whole(mask), SMALL, 97, "cpu")

    def takes(q: Tensor = q, k: Tensor = k, v: Tensor = v, softcap: float = 0.0) -> bool:
        return can_run(q, k, v, table, softcap)

    assert takes()
    assert not takes(softcap=30.0)
    assert not takes(q.float(), k.float(), v.float())
    assert not takes(v=v.bfloat16())
    assert not takes(k=k[:, :0], v=v[:, :0])
    assert not takes(v=v[..., :32])
    # The bulk copies: rows that begin between multiples of 16 bytes, and no stride at all.
    assert not takes(k=torch.empty(1, 97, 2, 65, dtype=k.dtype)[..., 1:])
    assert not takes(k=k[:, :, :1].expand_as(k))
    large = inputs_for(mask, headdim=256)[:3]
    assert not can_run(*large, table, 0.0), "no registers to clear with"
    full = Mask(97, 96)
    large = inputs_for(full, headdim=256)[:3]
    assert can_run(*large, q_table(whole(full), SMALL, 97, "cpu"), 0.0)


# Edits of the kernel's functions, "name: old -> new". Each makes results that may be wrong on a
# device, or a kernel that hangs there.
HAZARDS: dict[str, list[str]] = {
    "K is not waited for": [
        "_fold_blocks: _await_full(k_buffers, k_full, use) -> use % k_buffers.shape[0]"
    ],
    "V is not waited for": [
        "_fold_blocks: _await_full(v_buffers, v_full, use) -> use % v_buffers.shape[0]"
    ],
    "Q is not waited for": ["_consume: mbarrier.wait(q_full.index(INDEX), parity) -> pass"],
    "K is not waited to be free": [
        "_produce: _await_empty(k_buffers, k_empty, use) -> use % k_buffers.shape[0]"
    ],
    "V is not waited to be free": [
        "_produce: _await_empty(v_buffers, v_empty, use) -> use % v_buffers.shape[0]"
    ],
    "Q is not waited to be free": ["_produce: mbarrier.wait(q_empty.index(i), parity ^ 1) -> pass"],
    "the phase to be full is the other": [
        "_await_full: (use // STAGES) & 1) -> ((use // STAGES) & 1) ^ 1)"
    ],
    "Q's phase does not change": [
        "_consume: mbarrier.wait(q_full.index(INDEX), parity)"
        " -> mbarrier.wait(q_full.index(INDEX), 0)"
    ],
    "scores are used at once": ["_fold_blocks: s = warpgroup_mma_wait(1, deps=[s]) -> s = s"],
    "the wait for scores covers none": [
        "_fold_blocks: warpgroup_mma_wait(1, deps=[s]) -> warpgroup_mma_wait(2, deps=[s])"
    ],
    "the wait for out covers none": [
        "_fold_blocks: warpgroup_mma_wait(0, deps=[acc, l_i])"
        " -> warpgroup_mma_wait(1, deps=[acc, l_i])"
    ],
    "K is given back before its product's end": [
        "_fold_run: mbarrier.arrive(k_empty.index(k_stage), count=1)"
        " -> s = warpgroup_mma_wait(0, [s])",
        "_fold_run: s = warpgroup_mma_wait(0, deps=[s])"
        " -> mbarrier.arrive(k_empty.index(k_stage), count=1)",
    ],
    "V is given back before its product's end": [
        "_fold_blocks: mbarrier.arrive(v_empty.index(v_stage), count=1)"
        " -> acc, l_i = warpgroup_mma_wait(0, [acc, l_i])",
        "_fold_blocks: acc, l_i = warpgroup_mma_wait(0, deps=[acc, l_i])"
        " -> mbarrier.arrive(v_empty.index(v_stage), count=1)",
    ],
    "Q is given back before the last product": [
        "_consume: mbarrier.arrive(q_empty.index(INDEX), count=1) -> pass",
        "_consume: mbarrier.wait(q_full.index(INDEX), parity)"
        " -> mbarrier.wait(q_full.index(INDEX), parity)\n"
        "        mbarrier.arrive(q_empty.index(INDEX), count=1)",
    ],
    "the copy's bytes are not counted": [
        "_copy: mbarrier.expect(full, desc.block_type.nbytes) -> mbarrier.expect(full, 0)"
    ],
    "no fence after clearing": ["_produce: fence_async_shared() -> pass"],
    "clearing does not wait": [
        "_produce: mbarrier.wait(v_full.index(LANDED), landed_parity) -> pass"
    ],
    "a copy too many arrives": [
        "_produce: mbarrier.arrive(v_full.index(stage), count=1)"
        " -> mbarrier.arrive(v_full.index(stage), count=2)"
    ],
}
DEADLOCKS: dict[str, list[str]] = {
    "the phase to be free is the other": [
        "_await_empty: ((use // STAGES) & 1) ^ 1) -> (use // STAGES) & 1)"
    ],
    "K is not given back": [
        "_fold_blocks: mbarrier.arrive(k_empty.index(k_stage), count=1) -> pass"
    ],
    "V is not given back": ["_fold_run: mbarrier.arrive(v_empty.index(v_stage), count=1) -> pass"],
    "Q is not given back": ["_consume: mbarrier.arrive(q_empty.index(INDEX), count=1) -> pass"],
    "the turn is not passed on": [
        "_fold_blocks: mbarrier.arrive(turns.index((INDEX + 1) % CONSUMERS), count=1) -> pass"
    ],
    "everybody waits for a first turn": ["_fold_blocks: (turn & 1) ^ (INDEX == 0) -> turn & 1"],
    "too many bytes are waited for": [
        "_copy: desc.block_type.nbytes -> 2 * desc.block_type.nbytes"
    ],
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*HAZARDS, *DEADLOCKS])
def test_a_planted_fault_is_found(name: str, seed: int) -> None:
    """Whatever the order in which partitions run."""
    mask = MASKS["documents"]
    inputs = inputs_for(mask, nheads=4)
    edits = []
    for text in (HAZARDS | DEADLOCKS)[name]:
        function, _, edit = text.partition(": ")
        edits.append((function, *edit.split(" -> ")))
    error = Hazard if name in HAZARDS else Deadlock
    with pytest.raises(error) as raised:
        forward(inputs, [whole(mask)], seed=seed, edits=edits)
    if error is Deadlock:
        assert any(f" waits for {name}[" in str(raised.value) for name in BARRIERS)


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
    """On any machine: without spills, specialised, every exponential beside a product."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["failures"] == []
    opcodes = row["report"]["opcodes"]
    assert opcodes["USETMAXREG"] and opcodes["UTMALDG"] and opcodes["HGMMA"]
    # Two loops, of masked blocks and of whole ones, for each of two consumers: 64 rows x 128
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
EVERY_CONFIG = [(headdim, config) for headdim, some in CONFIGS.items() for config in some]

# All masks with the first config of each head dim: a kernel takes seconds to compile.
AGAINST_FLOAT64 = [
    (headdim, config, name)
    for headdim, config in EVERY_CONFIG
    for name in CASES
    if name in ("causal, whole blocks", "full") or config == CONFIGS[headdim][0]
    if headdim in RAGGED_HEAD_DIMS or name not in ("causal", "documents")
]


def name_of(x: object) -> str:
    """Of a parameter, for the test's name."""
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
    mask = CASES[name]
    inputs = on_device(mask, headdim)
    got = forward(inputs, [whole(mask)], config)
    assert_exact(got, inputs, mask)
    alone = replace(config, programs_per_sm=0)
    assert same(forward(inputs, [whole(mask)], alone), got), "a task a program, other bits"
    if config == CONFIGS[headdim][0]:
        assert same(forward(inputs, cut_keys(mask, 256, 512), config), got), "cut, other bits"


@on_hopper
@pytest.mark.parametrize("headdim", CONFIGS)
def test_on_hopper_against_flash_fwd(headdim: int) -> None:
    """With float16, sinks, and without turns, which change no bits."""
    mask = CASES["causal, whole blocks"]
    inputs = on_device(mask, headdim, dtype=torch.float16)
    sinks = random_sinks(8, device="cuda")
    frozen = configs.frozen("fwd", "sm_90", headdim, torch.float16)
    other = calls.forward(inputs, [whole(mask)], frozen, sinks=sinks)
    plain = plain_gradients(*inputs, mask, sinks=sinks)
    for config in CONFIGS[headdim]:
        got = forward(inputs, [whole(mask)], config, sinks=sinks)
        assert_exact(got, inputs, mask, sinks=sinks)
        for name, x, y in zip(("out", "lse"), got, other, strict=True):
            verdict = check(name, x, y.double(), getattr(plain, name))
            assert verdict.ok, str(verdict)
        assert same(forward(inputs, [whole(mask)], config, sinks=sinks, ping_pong=False), got)


@on_hopper
@pytest.mark.parametrize("name", ["causal, whole blocks", "full"])
@pytest.mark.parametrize(("headdim", "config"), EVERY_CONFIG, ids=name_of)
def test_on_hopper_repeats_are_bit_equal(headdim: int, config: Config, name: str) -> None:
    """With more tasks than a GPU has places for."""
    mask = replace(CASES[name], seqlen_q=2048, seqlen_k=2048)
    inputs = on_device(mask, headdim, nheads=32, nheads_kv=8)
    first = forward(inputs, [whole(mask)], config)
    repeats = (forward(inputs, [whole(mask)], config) for _ in range(REPEATS))
    differing = sum(not same(again, first) for again in repeats)
    assert differing == 0, f"{differing} of {REPEATS} repeats differ"


@on_hopper
@pytest.mark.parametrize("headdim", RAGGED_HEAD_DIMS)
def test_on_hopper_a_document_does_not_reach_its_neighbours(headdim: int) -> None:
    """Its rows are cleared in shared memory, where they lie as only the device has them."""
    bounds = (0, 300, 777, 1000)
    mask = Mask(1000, 1000, True, (-1, -1), bounds, bounds)
    inputs = on_device(mask, headdim)
    alone = forward(inputs, [whole(mask)], CONFIGS[headdim][0])
    assert_exact(alone, inputs, mask)
    inputs.k[:, 300:777] = inputs.v[:, 300:777] = float("nan")
    got = forward(inputs, [whole(mask)], CONFIGS[headdim][0])
    for x, y in ((got[0], alone[0]), (got[1].mT, alone[1].mT)):
        assert torch.equal(x[:, :300], y[:, :300]) and torch.equal(x[:, 777:], y[:, 777:])
