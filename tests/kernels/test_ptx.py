"""The kernels' PTX, executed: against float64, and with planted faults.

`ptx/` has the executor, which shows neither speed nor the code that ptxas makes of the PTX.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attn.backends.triton import TritonBackend
from ring_attn.core.mask import Mask
from ring_attn.core.masks import prefix
from ring_attn.core.spec import Scores
from ring_attn.kernels import configs, decode
from ring_attn.kernels.configs import Config
from ring_attn.kernels.launch import Launch
from ring_attn.testing import random_sinks
from tests.bounds import assert_holds, expect, run, whole
from tests.kernels.calls import cut_keys, cut_rows, frozen, grouped, in_interpreter, needs_sm_100
from tests.kernels.ptx import launching
from tests.kernels.ptx.faults import Deadlock, Fault, NotFenced, NotWaited, OutOfBounds, Race
from tests.masks import EXECUTED

pytestmark = in_interpreter

CAPPED = "causal, capped"
# Kernels of sm_80 and sm_90, of which sm_90 has some in Gluon; and sm_90's portable kernels.
KERNELS = ("sm_80", "sm_90", "sm_90 portable")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def backend(kernels: str, headdim: int, capped: bool = False) -> TritonBackend:
    """Names a config of the portable kernels, which rules out kernels in Gluon."""
    arch = arch_of(kernels)
    if kernels == arch and headdim in configs.ONE_PASS[arch] and not capped:
        return TritonBackend({"one_pass": configs.ONE_PASS[arch][headdim]})  # also of few heads
    return TritonBackend({} if kernels == arch else frozen(arch, headdim))


def arch_of(kernels: str) -> str:
    return kernels.split()[0]


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


def cases() -> Iterator[object]:
    """All kernels, masks, head dims; dtypes, and one or three steps, in turn."""
    for i, (headdim, name, kernels) in enumerate(product((64, 128), EXECUTED, KERNELS)):
        several = i % 2 == 0
        case = (kernels, name, list(DTYPES)[i // 2 % 2], headdim, several)
        quick = headdim == 64 and name == "documents" and kernels == "sm_80"
        yield case if quick else slow(*case)
    yield slow("sm_80 portable", "documents", "bfloat16", 128, True)
    yield slow("sm_90", "documents", "bfloat16", 256, False)
    yield slow("sm_90", "full", "float16", 256, True)


@pytest.mark.parametrize(("kernels", "name", "dtype", "headdim", "several"), list(cases()))
def test_forward_and_backward(
    kernels: str, name: str, dtype: str, headdim: int, several: bool
) -> None:
    mask = EXECUTED[name]
    inputs = grouped(mask, headdim, dtype=DTYPES[dtype])
    scores: dict[str, Any] = {"softcap": 5.0, "sinks": random_sinks(2)} if name == CAPPED else {}
    # One step, or a first, a middle and a last one.
    steps = cut_keys(mask, 64, 128) if several else [whole(mask)]
    with launching.executing(arch_of(kernels)) as executed:
        got = run(backend(kernels, headdim, bool(scores)), inputs, steps, **scores)
    arch = arch_of(kernels)
    one_pass = kernels == arch and headdim in configs.ONE_PASS[arch] and not scores
    assert len(executed) == (2 if one_pass else 3) * len(steps) + 1
    assert_holds(got, *(replace(x, dsinks=None) for x in expect(inputs, mask, **scores)))


# Masks, and how a ring or a gathering cuts them into steps, of which some have no diagonal.
CUTS = {
    "causal": (Mask(128, 256, causal=True), cut_keys),  # the rows of the last of two ranks
    "window": (Mask(256, 256, True, (150, 0)), cut_rows),
    "prefix": (prefix([128], [0, 256]), cut_rows),
    "documents": (Mask(256, 256, True, (-1, -1), *2 * [(0, 128, 200, 256)]), cut_rows),
}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90")])
@pytest.mark.sweep(7)
def test_steps_have_the_bits_of_one_launch(arch: str, dtype: str, headdim: int, name: str) -> None:
    """Steps with and without masked blocks are compiled apart; they add in the same order."""
    mask, cut = CUTS[name]
    inputs = grouped(mask, headdim, dtype=DTYPES[dtype], nheads=1)
    kernels = TritonBackend(frozen(arch, headdim))
    results, codes = [], []
    for steps in ([whole(mask)], cut(mask, 128)):
        state = kernels.new_state(inputs.q, headdim)
        with launching.executing(arch) as executed:
            for i, tiles in enumerate(steps):
                last = i == len(steps) - 1
                kernels.forward(*inputs[:3], tiles, state, scores=Scores(0.1), last=last)
        results.append(kernels.finalize(state, inputs.q.dtype))
        masking = ("HAS_LO", "HAS_HI", "RAGGED")
        codes.append({tuple(x.constants[name] for name in masking) for x in executed})
    assert codes[0] < codes[1]
    assert all(map(torch.equal, *results))


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
    arch: str, dtype: str, headdim: int, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "LEAST_PART", 128)
    mask = Mask(2, 300, causal=True)
    inputs = grouped(mask, headdim, dtype=DTYPES[dtype], nheads=4)
    scores = Scores(0.3, softcap)
    with launching.executing(arch) as executed:
        out, lse = TritonBackend().decode(*inputs[:3], whole(mask), scores=scores)
    _, merge = executed
    assert merge.args["num_parts"] == 3
    results = {"out": out.to(inputs.q.dtype), "lse": lse}
    assert_holds(results, *expect(inputs, mask, 0.3, softcap=softcap))


# -- planted faults

# Short blocks: of some rows every loop has a block. Programs of Gluon have several tasks.
SHORT = {
    "fwd": Config(128, 32, 8, 3),
    "gluon": Config(128, 32, 4, 2, programs_per_sm=1),
    "blackwell": Config(256, 32, 4, 2, programs_per_sm=1),
    "blackwell bwd": Config(128, 128, 4, 2),
}
RAGGED = Mask(161, 161, True, (-1, -1), (0, 30, 161), (0, 30, 161))
SQUARE = Mask(260, 260, causal=True)
# Kernels of one step, with so many blocks that every buffer is used again: which kernels, the
# kernel, mask, head dim, heads, and the seeds for orders of warpgroups.
TARGETS: dict[str, tuple[str, str, Mask, int, int, Sequence[int | None]]] = {
    **{name: ("sm_80", f"flash_{name}", RAGGED, 64, 1, [None]) for name in ("fwd", "dkdv")},
    **{
        f"sm_90 {name}": ("sm_90 portable", f"flash_{name}", RAGGED, 64, 1, [None])
        for name in ("fwd", "dkdv")
    },
    "hopper fwd": ("sm_90", "hopper_fwd", Mask(128, 160), 64, 4, range(3)),
    "hopper fwd, ragged": ("sm_90", "hopper_fwd", RAGGED, 64, 4, [None]),
    "blackwell fwd": ("sm_100", "blackwell_fwd", Mask(256, 160), 64, 4, range(3)),
    "blackwell fwd, ragged": ("sm_100", "blackwell_fwd", RAGGED, 64, 4, [None]),
    "blackwell bwd": ("sm_100", "blackwell_bwd", Mask(512, 128), 64, 1, [0]),
    "blackwell bwd, turns": ("sm_100", "blackwell_bwd", Mask(128, 384), 64, 1, range(4)),
    "hopper bwd": ("sm_90", "hopper_bwd", SQUARE, 64, 1, [0]),
    "hopper bwd, turns": ("sm_90", "hopper_bwd", Mask(128, 512), 64, 1, range(4)),
    "turns bwd": ("sm_80", "turns_bwd", Mask(64, 192), 128, 1, range(2)),
}
MOST = 32  # places to plant a fault into
RESULTS = ("out_ptr", "dq_ptr", "dk_ptr", "dv_ptr")


class OtherBits(Exception):
    """The results of a launch differ from the results of a clean one."""


@dataclass(frozen=True)
class Target:
    """A compiled launch to plant faults into, and the results of a clean run."""

    launch: Launch
    code: launching.Compiled
    seeds: Sequence[int | None]
    clean: dict[str, Tensor]

    def plant(self, edit: Callable[[str], str], seed: int | None) -> Exception | None:
        """The fault that an edit of the PTX leads to."""
        names = (*RESULTS, "turns_ptr", "counter_ptr")
        for name in names & self.launch.args.keys():
            self.launch.args[name].zero_()
        try:
            missing = launching.execute(self.launch, self.code, edit, seed)
        except Fault as fault:
            return fault
        results = {name: self.launch.args[name] for name in self.clean}
        differ = not all(torch.equal(x, self.clean[name]) for name, x in results.items())
        return missing[0] if missing else OtherBits() if differ else None

    def assert_found(self, pattern: str, new: str, fault: Any, share: float) -> None:
        """Replaces one match after another, until a share of up to MOST matches shows the fault.

        Each match is replaced alone, and runs with the next of the seeds.
        """
        ptx = self.code.ptx
        matches = list(re.finditer(pattern, ptx))
        matches = matches[:: -(-len(matches) // MOST)]
        assert matches, f"nothing to plant {new!r} into"
        found = list[Exception | None]()
        for number, match in enumerate(matches):
            text = ptx[: match.start()] + match.expand(new) + ptx[match.end() :]
            found.append(
                self.plant(lambda _, text=text: text, self.seeds[number % len(self.seeds)])
            )
            if sum(isinstance(one, fault) for one in found) >= max(1, share * len(matches)):
                return
        raise AssertionError(found)


@cache
def target(name: str) -> Target:
    kernels, kernel, mask, headdim, nheads, seeds = TARGETS[name]
    q, k, v, dout = inputs = grouped(mask, headdim, dtype=torch.bfloat16, nheads=nheads)
    one_pass = configs.ONE_PASS[arch_of(kernels)].get(headdim)
    gluon = {"gluon": SHORT["gluon"], "one_pass": one_pass}
    portable = frozen(arch_of(kernels), headdim) | {"fwd": SHORT["fwd"]}
    if "blackwell" in name:
        gluon = {"gluon": SHORT["blackwell"], "one_pass": SHORT["blackwell bwd"]}
    if kernel == "turns_bwd":
        del gluon["gluon"]
    tried = TritonBackend(portable if kernel.startswith("flash") else gluon)
    with launching.executing(arch_of(kernels)) as executed:
        if kernel.endswith("fwd"):
            state = tried.new_state(q, headdim)
            tried.forward(q, k, v, whole(mask), state, scores=Scores(0.125), last=True)
        else:
            run(tried, inputs, [whole(mask)])
    launch = next(x for x in executed if x.kernel.fn.__name__ == f"{kernel}_kernel")
    results = {x: launch.args[x] for x in RESULTS if launch.args.get(x) is not None}
    found = Target(launch, launching.compiled(launch, arch_of(kernels)), seeds, {})
    assert found.plant(str, None) is None
    found.clean.update({x: result.clone() for x, result in results.items()})
    assert all(bool(x.any()) and bool(x.isfinite().all()) for x in found.clean.values())
    return found


WARP_BARRIER = r"bar\.warp\.sync[^;]*;"
BARRIER = r"bar\.sync\s+\d+(?:, 128)?;"
WAIT = r"mbarrier\.try_wait(.*) complete, (.*), (%r\d+|\d);"
EXPECTED = r"(@%p\d+ mbarrier\.arrive\.expect_tx.*), (\d+);"
ARRIVAL = r"(@%p\d+ mbarrier\.arrive\.shared(?:::cta)?\.b64 .*)"
OTHER_PARITY = ".reg .b32 other; xor.b32 other, \\3, 1; mbarrier.try_wait\\1 complete, \\2, other;"
FENCE = r"fence\.proxy\.async[\w.:]*;"
COPY = r"(cp\.async\.cg\.shared\.global \[ %r\d+ \+) 0"
PRODUCTS = r"wgmma\.{}\.sync\.aligned( \d)?;"
DESCRIPTOR = r"(or\.b64\s+%rd\d+, %rd\d+), (\d+);"
ROWS_APART = rf"\1, {(1 << 62) + (32 << 32)};"  # the stride between groups of 8 rows
TURN = r"(acquire\.b32(?:.*\n)+?\s*setp\.ne\.b32\s+%p\d+, (%r\d+)), %r\d+;"
NEXT_TURN = r"@%p\d+ atom\.global\.gpu\.release\.exch\.b32[^;]*;"

Plant = tuple[str, str, type[Exception] | tuple[type[Exception], ...], float]
# Pattern, replacement, the fault to find, and the least share of replacements that cause it.
FAULTS: dict[str, Plant] = {
    # Some of the compiler's barriers are redundant, as the two between loops: another one follows.
    "barriers": (BARRIER, "", (Race, NotWaited), 0.5),
    "copies": (r"cp\.async\.wait_group\s+\d+;", "cp.async.wait_group 9;", NotWaited, 0.0),
    # Offsets of 16-bit elements scaled for 32-bit elements; and of copies into shared memory.
    "strides": (r"(m(?:ad|ul)\.wide\.s32\s+%rd\d+, %r\d+), 2([,;])", r"\1, 4\2", OutOfBounds, 0.0),
    "shared": (COPY, r"\1 262144", OutOfBounds, 1.0),
    "addresses": (f"{COPY}(.*%rd\\d+ \\+) 0", r"\1 0\2 16", OtherBits, 0.0),
}
FAULTS_IN_GLUON: dict[str, Plant] = {
    "parity": (WAIT, OTHER_PARITY, Fault, 1.0),
    # Waits for turns serve speed only, and some buffers are free once a later one is.
    "waits": (WAIT, "mov.pred complete, -1;", Fault, 0.75),
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
    "descriptors": (DESCRIPTOR, ROWS_APART, (OtherBits, Fault), 0.5),
}
# Two successive ones are as good as one.
BEFORE_ARRIVALS = (
    rf"(?:{BARRIER}\s*)+(?=(?:add[^;]*;\s*)?// begin inline asm\s*@%p\d+ mbarrier\.arrive)"
)
COMMIT = r"tcgen05\.commit[^;]*;"
MOVE = r"(tcgen05\.(?:ld|st)\.[^;]*\[%r\d+ \+) 0"
FAULTS_IN_TENSOR_MEMORY: dict[str, Plant] = {
    "parity": (WAIT, OTHER_PARITY, Fault, 1.0),
    "waits": (WAIT, "mov.pred complete, -1;", (Fault, OtherBits), 0.75),
    "no arrival": (ARRIVAL, "", Fault, 1.0),
    "two arrivals": (ARRIVAL, r"\1 \1", Fault, 1.0),
    "bytes": (EXPECTED, r"\1, 64;", Deadlock, 1.0),
    "barriers": (BARRIER, "", Race, 0.2),
    # Only a task's number is read before a later arrival, too.
    "barriers before arrivals": (BEFORE_ARRIVALS, "", Fault, 0.75),
    # A wait is for all moves before it: of successive parts the last one is enough.
    "moves' wait": (r"tcgen05\.wait::\w+\.sync\.aligned;", "", (Fault, OtherBits), 0.4),
    "commits": (rf"@%p\d+ {COMMIT}", "", Fault, 1.0),
    "columns": (MOVE, r"\1 4", (Fault, OtherBits), 1.0),
    "columns of P": (r"(tcgen05\.mma[^;]*, \[ %r\d+ \+) \d+", r"\1 4", OtherBits, 1.0),
    "descriptors": (DESCRIPTOR, ROWS_APART, (OtherBits, Fault), 0.5),
}
FAULTS_BY_KERNEL: dict[str, dict[str, Plant]] = {
    **dict.fromkeys(("fwd", "dkdv"), FAULTS),
    "hopper fwd": FAULTS_IN_GLUON,
    # Fences before the first copy, whose mbarrier is new, and after the zeros around a document.
    "hopper fwd, ragged": {
        "fences": (FENCE, "", NotFenced, 1.0),
        "no arrival": (ARRIVAL, "", Fault, 1.0),
    },
    "blackwell fwd": FAULTS_IN_TENSOR_MEMORY,
    "blackwell fwd, ragged": {"fences": (FENCE, "", NotFenced, 1.0)},
    "blackwell bwd": FAULTS_IN_TENSOR_MEMORY
    | {
        # The last two of a run say what nobody waits for, if another run does not follow.
        "commits": (rf"@%p\d+ {COMMIT}", "", Fault, 0.75),
        "two commits": (rf"(@%p\d+ {COMMIT})", r"\1 \1", Fault, 0.75),
    },
    "blackwell bwd, turns": {
        "not waited for": (TURN, r"\1, \2;", OtherBits, 1.0),
        "not given on": (NEXT_TURN, "", Deadlock, 1.0),
    },
    "hopper bwd": {
        "waits": (WAIT, "mov.pred complete, -1;", (Race, OtherBits), 0.7),
        "fences": (FENCE, "", Fault, 0.0),
    },
    "hopper bwd, turns": {
        "not waited for": (TURN, r"\1, \2;", Race, 0.0),
        "not given on": (NEXT_TURN, "", Deadlock, 1.0),
        # Lane 0 waits for a turn, and gives it on after what all lanes have added.
        "lanes, before": (
            rf"{WARP_BARRIER}(\s+ld\.shared.*\s+setp.*\s+@%p\d+ bra)",
            r"\1",
            Race,
            1.0,
        ),
        "lanes, behind": (
            rf"{WARP_BARRIER}(?=(?:(?!{WARP_BARRIER})[^;]*;)*[^;]*release\.exch)",
            "",
            Race,
            1.0,
        ),
    },
    "turns bwd": {
        "not waited for": (r"setp\.lt\.s32 early, [^;]*;", "mov.pred early, 0;", Race, 1.0),
        # A warp's turn, too, comes only when all its lanes have added.
        "not given on": (r"@lead atom\.global\.gpu\.release[^;]*;", "", Deadlock, 1.0),
        "lanes": (rf"{WARP_BARRIER}(?= mov\.u32 lane)", "", Race, 1.0),
    },
}
QUICK = ("fwd", "hopper fwd, ragged")
PLANTED = [
    pytest.param(
        kernel,
        *fault,
        id=f"{kernel} {name}",
        marks=[
            *([] if kernel in QUICK else [pytest.mark.slow]),
            *([needs_sm_100] if kernel.startswith("blackwell") else []),
        ],
    )
    for kernel, faults in FAULTS_BY_KERNEL.items()
    for name, fault in faults.items()
]


@pytest.mark.parametrize(("kernel", "pattern", "new", "fault", "share"), PLANTED)
def test_planted_faults_are_found(
    kernel: str, pattern: str, new: str, fault: type[Exception], share: float
) -> None:
    """Faults are found in any order of warpgroups."""
    target(kernel).assert_found(pattern, new, fault, share)


@pytest.mark.parametrize("kernel", ["hopper fwd", "hopper bwd, turns", slow("hopper bwd")])
@pytest.mark.parametrize(
    ("pattern", "new"),
    [(WARP_BARRIER, ""), (r"bar\.sync(\s+)\d+, 128;", r"bar.sync\g<1>3, 128;")],
    ids=["no warp barriers", "one barrier for both consumers"],
)
def test_faults_everywhere_are_found(kernel: str, pattern: str, new: str) -> None:
    assert isinstance(target(kernel).plant(partial(re.sub, pattern, new), None), Race)


@pytest.mark.parametrize("kernel", ["sm_90 fwd", slow("sm_90 dkdv")])
def test_proxy_fences_deleted_are_missed(kernel: str) -> None:
    """Products for sm_90 read data that `cp.async` wrote, so the kernels themselves fence it."""
    assert isinstance(target(kernel).plant(partial(re.sub, FENCE, ""), None), NotFenced)
