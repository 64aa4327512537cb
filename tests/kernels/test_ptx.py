"""The kernels' PTX, executed: against float64 and the interpreter, and with planted faults.

`ptx/` has the executor. It says nothing of speed, nor of what ptxas makes of the PTX.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch

from ring_attn.backends.triton import TritonBackend
from ring_attn.core.mask import Mask
from ring_attn.core.spec import Scores
from ring_attn.kernels import configs, decode
from ring_attn.kernels.launch import Launch
from ring_attn.testing import Expected, Inputs, random_qkv, random_sinks
from tests.bounds import assert_holds, expect, run, whole
from tests.kernels.calls import Step, cut_keys, in_interpreter
from tests.kernels.ptx import launching
from tests.kernels.ptx.faults import NotWaited, Race
from tests.kernels.test_decode import tiles_of

pytestmark = [
    in_interpreter,
    pytest.mark.filterwarnings("ignore:backend='triton' on CPU:UserWarning"),
]

ROWS = 193
MASKS = {
    "full": Mask(192, 256),
    "causal": Mask(ROWS, ROWS, causal=True),
    "window": Mask(ROWS, ROWS, causal=True, window_size=(100, -1)),
    "documents": Mask(ROWS, ROWS, True, (-1, -1), (0, 40, 170, ROWS), (0, 40, 170, ROWS)),
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Executed:
    """The launches that were executed."""

    launches: list[Launch] = field(default_factory=list)


Execute = Callable[[str], Executed]


@pytest.fixture
def execute(monkeypatch: pytest.MonkeyPatch) -> Execute:
    """From `execute(arch)` on, launches have the architecture's configs, and their PTX runs."""

    def start(arch: str) -> Executed:
        executed = Executed()

        def run_ptx(launch: Launch) -> None:
            if all(launch.grid):
                executed.launches.append(launch)
                launching.run(launch, arch)

        monkeypatch.setattr(configs, "architecture", lambda device: arch)
        monkeypatch.setattr(Launch, "run", run_ptx)
        return executed

    return start


def inputs_of(mask: Mask, dtype: torch.dtype, headdim: int, nheads: int = 2) -> Inputs:
    return random_qkv(
        seqlen_q=mask.seqlen_q, seqlen_k=mask.seqlen_k, nheads=nheads, nheads_kv=1,
        headdim=headdim, dtype=dtype,
    )  # fmt: skip


def steps_of(mask: Mask, several: bool) -> list[Step]:
    """One step, or a first, a middle and a last one."""
    return cut_keys(mask, 64, 128) if several else [whole(mask)]


def assert_all_hold(inputs: Inputs, mask: Mask, got: Expected, **scores: object) -> None:
    oracle, plain = expect(inputs, mask, **scores)
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert_holds({name: getattr(got, name)}, oracle, plain)


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


CASES = [
    ("sm_80", "causal", "bfloat16", 64, True),
    slow("sm_80", "full", "bfloat16", 64, False),
    slow("sm_80", "full", "float16", 128, True),
    slow("sm_80", "causal", "float16", 64, False),
    slow("sm_80", "causal", "bfloat16", 128, True),
    slow("sm_80", "window", "float16", 64, True),
    slow("sm_80", "window", "bfloat16", 128, False),
    slow("sm_80", "documents", "bfloat16", 64, False),
    slow("sm_80", "documents", "float16", 128, True),
]


@pytest.mark.parametrize(("arch", "name", "dtype", "headdim", "several"), CASES)
def test_forward_and_backward(
    arch: str, name: str, dtype: str, headdim: int, several: bool, execute: Execute
) -> None:
    mask = MASKS[name]
    inputs = inputs_of(mask, DTYPES[dtype], headdim)
    steps = steps_of(mask, several)
    executed = execute(arch)
    got = run(TritonBackend(), inputs, steps)
    assert len(executed.launches) == 3 * len(steps) + 1
    assert_all_hold(inputs, mask, got)


@pytest.mark.slow
@pytest.mark.parametrize("headdim", [64, 128])
def test_scores_that_are_capped_and_sinks(headdim: int, execute: Execute) -> None:
    mask = MASKS["causal"]
    inputs, sinks = inputs_of(mask, torch.bfloat16, headdim), random_sinks(2)
    execute("sm_80")
    scores = {"softcap": 5.0, "sinks": sinks}
    got = run(TritonBackend(), inputs, steps_of(mask, True), **scores)
    assert_all_hold(inputs, mask, got, **scores)


@pytest.mark.parametrize("headdim", [64, slow(128)])
def test_against_the_interpreter(headdim: int, execute: Execute) -> None:
    """Within the bound of one another, as either is of float64."""
    mask = MASKS["causal"]
    inputs, steps = inputs_of(mask, torch.float16, headdim, nheads=1), steps_of(mask, True)
    oracle, plain = expect(inputs, mask)
    interpreted = run(TritonBackend(), inputs, steps)
    execute("sm_80")
    got = run(TritonBackend(), inputs, steps)
    for name in ("out", "lse", "dq", "dk", "dv"):
        near = {name: getattr(interpreted, name).double(), "terms": oracle.terms}
        assert_holds({name: getattr(got, name)}, Expected(**vars(oracle) | near), plain)


@pytest.mark.parametrize(
    ("dtype", "headdim", "softcap"),
    [("bfloat16", 64, 0.0), slow("float16", 128, 0.0), slow("bfloat16", 128, 2.0)],
)
def test_decode_and_merge(
    dtype: str, headdim: int, softcap: float, execute: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "LEAST_PART", 128)
    mask = Mask(2, 300, causal=True)
    inputs = inputs_of(mask, DTYPES[dtype], headdim, nheads=4)
    executed = execute("sm_80")
    out, lse = TritonBackend().decode(*inputs[:3], tiles_of(mask), scores=Scores(0.3, softcap))
    _, merge = executed.launches
    assert merge.args["num_parts"] == 3
    results = {"out": out.to(inputs.q.dtype), "lse": lse}
    assert_holds(results, *expect(inputs, mask, 0.3, softcap=softcap))


# -- planted faults


@dataclass(frozen=True)
class Target:
    """A compiled launch to plant faults into, with results of the clean one."""

    launch: Launch
    code: launching.Compiled

    def with_(self, pattern: str, new: str, index: int) -> None:
        """Executes it with the index-th match of a pattern replaced."""
        matches = list(re.finditer(pattern, self.code.ptx))
        assert matches, f"nothing to plant {pattern} into"
        found = matches[index]
        launching.execute(
            self.launch,
            self.code,
            lambda ptx: ptx[: found.start()] + found.expand(new) + ptx[found.end() :],
        )

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.code.ptx))


@cache
def target(kernel: str, arch: str = "sm_80") -> Target:
    """The forward, dq or dk/dv of a causal step, clean."""
    with pytest.MonkeyPatch.context() as patch:
        launches = list[Launch]()
        patch.setattr(configs, "architecture", lambda device: arch)
        patch.setattr(Launch, "run", launches.append)
        mask = Mask(161, 161, causal=True)
        run(TritonBackend(), inputs_of(mask, torch.bfloat16, 64, nheads=1), [whole(mask)])
    launch = next(x for x in launches if x.kernel.fn.__name__ == f"flash_{kernel}_kernel")
    clean = Target(launch, launching.compiled(launch, arch))
    launching.execute(launch, clean.code)
    return clean


BARRIER = r"bar\.sync\s+0;"


@pytest.mark.parametrize("kernel", ["fwd", slow("dq"), slow("dkdv")])
def test_a_barrier_deleted_is_a_race(kernel: str) -> None:
    """Nearly all: the compiler has put some barriers where another one follows."""
    clean = target(kernel)
    found = []
    for index in range(clean.count(BARRIER)):
        try:
            clean.with_(BARRIER, "", index)
        except Race as race:
            found.append(race)
    assert len(found) >= 0.85 * clean.count(BARRIER)
    assert any("no barrier between" in str(race) for race in found)


@pytest.mark.parametrize("kernel", ["fwd", "dq", "dkdv"])
def test_a_wait_weakened_is_found(kernel: str) -> None:
    clean = target(kernel)
    waits = r"cp\.async\.wait_group\s+(\d+);"
    found = []
    for index in range(clean.count(waits)):
        try:
            clean.with_(waits, r"cp.async.wait_group 9;", index)
        except NotWaited as fault:
            found.append(fault)
    assert found and all("cp.async" in str(fault) for fault in found)
