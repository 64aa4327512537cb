"""The kernels' PTX, executed: against float64, and with planted faults.

`ptx/` has the executor, which shows neither speed nor the code that ptxas makes of the PTX.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from ring_attn.backends.triton import TritonBackend
from ring_attn.core.mask import Mask
from ring_attn.core.spec import Scores
from ring_attn.kernels import configs, decode
from ring_attn.kernels.configs import Config
from ring_attn.kernels.launch import Launch
from ring_attn.testing import Expected, Inputs, random_qkv, random_sinks
from tests.bounds import assert_holds, expect, run, whole
from tests.kernels.calls import cut_keys, in_interpreter
from tests.kernels.ptx import launching
from tests.kernels.ptx.faults import Deadlock, Fault, NotFenced, NotWaited, OutOfBounds, Race
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
# Kernels of sm_80 and sm_90, of which sm_90 has some in Gluon; and sm_90's portable kernels.
KERNELS = ("sm_80", "sm_90", "sm_90 portable")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


Execute = Callable[[str], list[Launch]]


@pytest.fixture
def execute(monkeypatch: pytest.MonkeyPatch) -> Execute:
    """`execute(arch)` gives later launches the architecture's configs and executes their PTX."""

    def start(arch: str) -> list[Launch]:
        executed = list[Launch]()

        def run_ptx(launch: Launch) -> None:
            if all(launch.grid):
                executed.append(launch)
                assert launching.run(launch, arch) == [], "proxy fences are missing"

        monkeypatch.setattr(configs, "architecture", lambda device: arch)
        monkeypatch.setattr(Launch, "run", run_ptx)
        return executed

    return start


def inputs_of(mask: Mask, dtype: torch.dtype, headdim: int, nheads: int = 2) -> Inputs:
    return random_qkv(
        seqlen_q=mask.seqlen_q, seqlen_k=mask.seqlen_k, nheads=nheads, nheads_kv=1,
        headdim=headdim, dtype=dtype,
    )  # fmt: skip


def assert_all_hold(inputs: Inputs, mask: Mask, got: Expected, **scores: object) -> None:
    oracle, plain = expect(inputs, mask, **scores)
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert_holds({name: getattr(got, name)}, oracle, plain)


def backend(kernels: str, headdim: int, softcap: float = 0.0) -> TritonBackend:
    """Names a config of the portable kernels, which rules out kernels in Gluon."""
    arch = arch_of(kernels)
    if kernels == "sm_90" and headdim in configs.GLUON_BWD and not softcap:
        return TritonBackend({"gluon_bwd": configs.GLUON_BWD[headdim]})  # also of few heads
    kinds = ("fwd", "fwd_whole", "dq", "dq_whole", "dkdv", "dkdv_whole")
    frozen = {kind: configs.frozen(kind, arch, headdim, torch.bfloat16) for kind in kinds}
    return TritonBackend({} if kernels == arch else frozen)


def arch_of(kernels: str) -> str:
    return kernels.split()[0]


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


def cases() -> Iterator[object]:
    """All kernels, masks, head dims; dtypes in turn; one and three steps (sm_80: in turn)."""
    quick = {("sm_80", "causal", 64, True), ("sm_90", "documents", 64, False)}
    each = product((64, 128), MASKS, KERNELS, (True, False))
    for i, (headdim, name, kernels, several) in enumerate(each):
        dtype = list(DTYPES)[(i // 2 + headdim // 128 + several) % 2]
        case = (kernels, name, dtype, headdim, several)
        if (kernels, name, headdim, several) in quick:
            yield pytest.param(*case)
        elif kernels == "sm_90" or several == (i // 4 % 2 == 0):
            yield slow(*case)
    yield slow("sm_90", "documents", "bfloat16", 256, False)
    yield slow("sm_90", "full", "float16", 256, True)


@pytest.mark.parametrize(("kernels", "name", "dtype", "headdim", "several"), list(cases()))
def test_forward_and_backward(
    kernels: str, name: str, dtype: str, headdim: int, several: bool, execute: Execute
) -> None:
    mask = MASKS[name]
    inputs = inputs_of(mask, DTYPES[dtype], headdim)
    # One step, or a first, a middle and a last one.
    steps = cut_keys(mask, 64, 128) if several else [whole(mask)]
    executed = execute(arch_of(kernels))
    got = run(backend(kernels, headdim), inputs, steps)
    one_pass = kernels == "sm_90" and headdim in configs.GLUON_BWD
    assert len(executed) == (2 if one_pass else 3) * len(steps) + 1
    assert_all_hold(inputs, mask, got)


@pytest.mark.slow
@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("kernels", KERNELS)
def test_scores_that_are_capped_and_sinks(kernels: str, headdim: int, execute: Execute) -> None:
    mask = MASKS["causal"]
    inputs, sinks = inputs_of(mask, torch.bfloat16, headdim), random_sinks(2)
    execute(arch_of(kernels))
    scores = {"softcap": 5.0, "sinks": sinks}
    got = run(backend(kernels, headdim, 5.0), inputs, cut_keys(mask, 64, 128), **scores)
    assert_all_hold(inputs, mask, got, **scores)


@pytest.mark.parametrize(
    ("arch", "dtype", "headdim", "softcap"),
    [
        ("sm_80", "bfloat16", 64, 0.0),
        slow("sm_80", "float16", 128, 0.0),
        slow("sm_80", "float16", 64, 2.0),
        slow("sm_90", "float16", 64, 0.0),
        slow("sm_90", "bfloat16", 128, 2.0),
    ],
)
def test_decode_and_merge(
    arch: str,
    dtype: str,
    headdim: int,
    softcap: float,
    execute: Execute,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode, "LEAST_PART", 128)
    mask = Mask(2, 300, causal=True)
    inputs = inputs_of(mask, DTYPES[dtype], headdim, nheads=4)
    executed = execute(arch)
    out, lse = TritonBackend().decode(*inputs[:3], tiles_of(mask), scores=Scores(0.3, softcap))
    _, merge = executed
    assert merge.args["num_parts"] == 3
    results = {"out": out.to(inputs.q.dtype), "lse": lse}
    assert_holds(results, *expect(inputs, mask, 0.3, softcap=softcap))


# -- planted faults


@dataclass(frozen=True)
class Target:
    """A compiled launch to plant faults into, and the result of a clean run."""

    launch: Launch
    code: launching.Compiled
    result: Tensor
    clean: Tensor

    def plant(
        self, pattern: str, new: str, index: int = 0, seed: int | None = None
    ) -> list[NotFenced]:
        """Replaces the index-th match of a pattern and executes the launch: the missing fences."""
        found = list(re.finditer(pattern, self.code.ptx))[index]
        self.result.zero_()
        return launching.execute(
            self.launch,
            self.code,
            lambda ptx: ptx[: found.start()] + found.expand(new) + ptx[found.end() :],
            seed,
        )

    def faults(self, pattern: str, new: str, *seeds: int) -> list[Fault | None]:
        """Findings with each match replaced in turn, each run with the next of the seeds."""
        found = list[Fault | None]()
        for index in range(len(re.findall(pattern, self.code.ptx))):
            try:
                seed = seeds[index % len(seeds)] if seeds else None
                missing = self.plant(pattern, new, index, seed)
                found.append(missing[0] if missing else None)
            except Fault as fault:
                found.append(fault)
        assert found, f"nothing to plant {new!r} into"
        return found


@cache
def target(name: str) -> Target:
    """A kernel of one step, with so many blocks that every buffer is used again."""
    arch = "sm_80" if name in ("fwd", "dq", "dkdv") else "sm_90"
    kernels = "sm_90 portable" if name.startswith("sm_90 ") else arch
    mask = Mask(128, 160) if name == "hopper" else TARGET_MASK
    with pytest.MonkeyPatch.context() as patch:
        launches = list[Launch]()
        patch.setattr(configs, "architecture", lambda device: arch)
        patch.setattr(Launch, "run", lambda launch: launches.append(launch))
        inputs = inputs_of(mask, torch.bfloat16, 64, nheads=4 if "hopper" in name else 1)
        tried = TritonBackend({"gluon": SMALL}) if "hopper" in name else backend(kernels, 64)
        run(tried, inputs, [whole(mask)])
    kernel = "hopper_fwd" if "hopper" in name else f"flash_{name.split()[-1]}"
    launch = next(x for x in launches if x.kernel.fn.__name__ == f"{kernel}_kernel")
    result = launch.args[{"flash_dq": "dq_ptr", "flash_dkdv": "dk_ptr"}.get(kernel, "out_ptr")]
    code = launching.compiled(launch, arch)
    result.zero_()
    assert launching.execute(launch, code) == []
    return Target(launch, code, result, result.clone())


# Short blocks, of which programs have several tasks.
SMALL = Config(128, 32, 4, 2, programs_per_sm=1)
TARGET_MASK = Mask(161, 161, True, (-1, -1), (0, 30, 161), (0, 30, 161))
BARRIER = r"bar\.sync\s+\d+(, 128)?;"
WAIT = r"mbarrier\.try_wait(.*) complete, (.*), (%r\d+|\d);"
EXPECTED = r"(@%p\d+ mbarrier\.arrive\.expect_tx.*), (\d+);"
ARRIVAL = r"(@%p\d+ mbarrier\.arrive\.shared::cta\.b64 .*)"
OTHER_PARITY = ".reg .b32 other; xor.b32 other, \\3, 1; mbarrier.try_wait\\1 complete, \\2, other;"
FENCE = r"fence\.proxy\.async[\w.:]*;"
COPY = r"(cp\.async\.cg\.shared\.global \[ %r\d+ \+) 0"
PRODUCTS = r"wgmma\.{}\.sync\.aligned( \d)?;"

# Pattern, replacement, the fault to find, and the least share of replacements that cause it.
FAULTS: dict[str, tuple[str, str, type[Fault], float]] = {
    # Some of the compiler's barriers are redundant: another barrier follows.
    "barriers": (BARRIER, "", Race, 0.8),
    "copies": (r"cp\.async\.wait_group\s+\d+;", "cp.async.wait_group 9;", NotWaited, 0.0),
    # Offsets of 16-bit elements scaled for 32-bit elements; and of copies into shared memory.
    "strides": (r"(m(?:ad|ul)\.wide\.s32\s+%rd\d+, %r\d+), 2([,;])", r"\1, 4\2", OutOfBounds, 0.0),
    "shared": (COPY, r"\1 262144", OutOfBounds, 1.0),
}
FAULTS_IN_GLUON: dict[str, tuple[str, str, type[Fault], float]] = {
    "parity": (WAIT, OTHER_PARITY, Fault, 1.0),
    # Some waits are for turns, which serve speed only.
    "waits": (WAIT, "mov.pred complete, -1;", NotWaited, 0.5),
    "no arrival": (ARRIVAL, "", Fault, 1.0),
    "two arrivals": (ARRIVAL, r"\1 \1", Fault, 1.0),
    "bytes": (EXPECTED, r"\1, 64;", Deadlock, 1.0),
    # 4 warps read a buffer, and one thread announces that it is free.
    "barriers": (BARRIER, "", NotWaited, 0.2),
    "products' wait": (
        PRODUCTS.format("wait_group"),
        "wgmma.wait_group.sync.aligned 7;",
        Fault,
        1.0,
    ),
    "products' group": (PRODUCTS.format("commit_group"), "", Fault, 1.0),
    # One fence is enough for two successive products whose registers nothing else changes.
    "products' fence": (PRODUCTS.format("fence"), "", Fault, 0.75),
}
# Fences before the first copy, whose mbarrier is new, and after the zeros around a document.
FAULTS_BY_KERNEL = {
    **dict.fromkeys(("fwd", "dq", "dkdv"), FAULTS),
    "hopper": FAULTS_IN_GLUON,
    "hopper ragged": {"fences": (FENCE, "", NotFenced, 1.0)},
}
PLANTED = [
    pytest.param(
        kernel,
        *fault,
        id=f"{kernel} {name}",
        marks=[] if kernel in ("fwd", "hopper ragged") or name == "parity" else pytest.mark.slow,
    )
    for kernel, faults in FAULTS_BY_KERNEL.items()
    for name, fault in faults.items()
]


@pytest.mark.parametrize(("kernel", "pattern", "new", "fault", "share"), PLANTED)
def test_planted_faults_are_found(
    kernel: str, pattern: str, new: str, fault: type[Fault], share: float
) -> None:
    """Faults are found in any order of warpgroups."""
    found = target(kernel).faults(pattern, new, *(range(3) if kernel == "hopper" else ()))
    assert sum(isinstance(one, fault) for one in found) >= max(1, share * len(found)), found


DESCRIPTOR = r"(or\.b64\s+%rd\d+, %rd\d+), (\d+);"
ROWS_APART = rf"\1, {(1 << 62) + (32 << 32)};"  # the stride between groups of 8 rows


@pytest.mark.parametrize(
    ("kernel", "pattern", "new"),
    [
        ("fwd", f"{COPY}(.*%rd\\d+ \\+) 0", r"\1 0\2 16"),
        slow("dq", f"{COPY}(.*%rd\\d+ \\+) 0", r"\1 0\2 16"),
        slow("dkdv", f"{COPY}(.*%rd\\d+ \\+) 0", r"\1 0\2 16"),
        slow("hopper", DESCRIPTOR, ROWS_APART),
    ],
)
def test_a_wrong_address_is_seen_in_the_result(kernel: str, pattern: str, new: str) -> None:
    clean = target(kernel)
    clean.plant(pattern, new)
    assert not torch.equal(clean.result, clean.clean)


@pytest.mark.parametrize("kernel", ["fwd", slow("dq"), slow("dkdv")])
def test_proxy_fences_deleted_are_missed(kernel: str) -> None:
    """Products for sm_90 read data that `cp.async` wrote, so the kernels themselves fence it."""
    clean = target(f"sm_90 {kernel}")
    edit = functools.partial(re.sub, FENCE, "")
    found = launching.execute(clean.launch, clean.code, edit)
    assert any("cp.async" in str(fault) for fault in found)
