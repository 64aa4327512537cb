"""`make aot`: each rule fails only the kernel that breaks it, and the command reports it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dev import aot
from dev.__main__ import COMMANDS
from dev.code_rules import Limits, failures, other_orders
from dev.compiled import OPCODES, Compiled, order_of_sums
from dev.loops import Loop, loops_of
from dev.tensor_loads import early_reads
from ring_attn.cli.main import main
from ring_attn.kernels.configs import INTERPRETER
from tests.kernels.toys import die_at_one

ROOT = Path(__file__).parents[2]


def run_compiling(*words: str) -> str:
    """The output of Python with these arguments, in a process where kernels are compiled."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_toys_fail_for_their_reasons_alone() -> None:
    run_compiling("-m", "tests.kernels.toys")


@pytest.mark.slow
def test_a_compiler_that_dies_fails_its_own_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "compile_cell", die_at_one)
    cells = [aot.Cell("sm_90", i, "float16", aot.VARIANTS[0], INTERPRETER) for i in range(3)]
    rows = list(aot.compile_all(cells, 1))
    assert [row.failures for row in rows] == [(), ("does not compile: the process died",), ()]
    assert [(row.kernel, row.head_dim) for row in rows] == [("toy", 0), ("fwd", 1), ("toy", 2)]


def test_every_kernel_and_variant_has_a_cell_for_every_gpu() -> None:
    archs = [arch for arch in aot.ARCHS if aot.why_refused(arch) is None]
    for arch in archs:
        for head_dim in aot.HEAD_DIMS:
            for dtype in aot.DTYPES:
                cells = list(aot.cells(arch, head_dim, dtype))
                found = {cell.variant for cell in cells}
                assert found == set(aot.variants(arch, head_dim))
                dims = [int(dim) for dim in head_dim.split("/")]
                for cell in cells:
                    launch = cell.launch()
                    of_q = launch.constants.get("HEAD_DIM", dims[0])
                    of_v = launch.constants.get("HEAD_DIM_V", of_q)
                    assert [of_q, of_v] == [dims[0], dims[-1]]
                    assert launch.grid
    own = {
        name: {v for v in aot.VARIANTS if v.kernel.startswith(name)}
        for name in ("hopper", "blackwell", "turns")
    }
    assert all(own.values())
    portable = set(aot.VARIANTS).difference(*own.values())
    assert set(aot.variants("sm_80", "64")) == portable
    assert set(aot.variants("sm_80", "128")) == portable | own["turns"]
    assert set(aot.variants("sm_90", "64")) == portable | own["hopper"]
    assert set(aot.variants("sm_100", "64")) == portable | own["blackwell"]


GOOD = Compiled(255, 0, 1024, 512, dict.fromkeys(OPCODES, 1), (), 1.0)


# A loop with a product in a loop around it, and a loop that waits; its second part, where control
# comes only if the wait is long, stands behind the end of the code.
SASS = """
        /*0000*/                   STL [R1], R2 ;
.L_x_1:
        /*0010*/                   {around}
.L_x_0:
        /*0020*/                   HMMA.16816.F32 R4, R4, R2, R8 ;
        /*0030*/                   {within}
        /*0040*/              @P0  BRA `(.L_x_0) ;
        /*0050*/              @P1  BRA `(.L_x_1) ;
.L_x_2:
        /*0060*/              @!P0 BRA `(.L_x_3) ;
.L_x_4:
        /*0070*/                   {beside}
        /*0080*/              @P2  BRA `(.L_x_2) ;
        /*0090*/                   LDL R2, [R1] ;
        /*00a0*/                   EXIT ;
.L_x_3:
        /*00b0*/                   SYNCS R2 ;
        /*00c0*/              @!P0 BRA `(.L_x_3) ;
        /*00d0*/                   BRA `(.L_x_4) ;
"""
PLACES = ("around", "within", "beside")


@pytest.mark.parametrize("place", PLACES)
def test_spills_are_counted_in_each_loop_alone(place: str) -> None:
    code = SASS.format(**dict.fromkeys(PLACES, "FADD R1, R1, R2 ;") | {place: "LDL R2, [R1] ;"})
    spills = {name: int(name == place) for name in PLACES}
    assert loops_of(code) == (
        Loop(spills["around"], products=0, around=True),
        Loop(spills["within"], products=1, around=False),
        Loop(spills["beside"], products=0, around=False),
        Loop(0, products=0, around=False),
    )


def test_jumps_on_uniform_conditions_may_fall_through() -> None:
    code = SASS.format(**dict.fromkeys(PLACES, "LDL R2, [R1] ;"))
    uniform = re.sub(r"@(!?)P(\d) +BRA ", r"BRA.U \1UP\2, ", code)
    assert uniform != code and loops_of(uniform) == loops_of(code)


@pytest.mark.parametrize(("left", "exposed"), [("0x1", 1), ("0x0", 3)])
def test_exponentials_overlap_where_a_wait_leaves_a_product(left: str, exposed: int) -> None:
    wait = f"WARPGROUP.DEPBAR.LE gsb0, {left}"
    lines = ("MUFU.EX2 R1", wait, "MUFU.EX2 R1", wait, "MUFU.EX2 R1")
    within = " ;\n".join((*lines, "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"))
    inner = loops_of(SASS.format(around="NOP ;", within=within, beside="NOP ;"))[1]
    assert (inner.exponentials, inner.exposed) == (3, exposed)


@pytest.mark.parametrize(
    ("loop", "kind"),
    [
        (Loop(2, products=1, around=False), "within"),
        (Loop(2, products=0, around=True), "around"),
        (Loop(2, products=0, around=False), "beside"),
    ],
)
def test_a_loop_may_spill_as_often_as_its_kind_may(loop: Loop, kind: str) -> None:
    report = replace(GOOD, loops=(loop,))
    others = {name: 2 for name in PLACES if name != kind}
    for allowed, reported in ((2, 0), (1, 1)):
        expected = Limits(**others, **{kind: allowed})
        assert len(failures(report, "sm_90", expected)) == reported


OVERLAPPING = Loop(0, products=1, around=False, exponentials=66)
ALONE = dict.fromkeys(OPCODES, 0) | {"HMMA": 1}
EARLY = """
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r3 + 0];
    mov.b64 %rd1, {%r2, %r11};
    mov.b32 %r4, %r3;
    tcgen05.wait::ld.sync.aligned;
    add.f32 %r5, %r1, %r2;
"""
UNFENCED = {"missing_fences": ("line 7: wgmma", "line 9: wgmma")}


@pytest.mark.parametrize(
    ("found", "arch", "expected", "reported"),
    [
        ({}, "sm_100", {}, None),
        (
            {"shared_bytes": 65540},
            "gfx942",
            {},
            "65540 bytes of shared memory, gfx942 has 65536",
        ),
        # Decoding has too few rows for an architecture's own instructions.
        ({"opcodes": ALONE}, "sm_90", {}, "no tensor-core instruction (looked for HGMMA)"),
        ({"opcodes": ALONE}, "sm_90", {"products": "any"}, None),
        ({"opcodes": ALONE}, "sm_80", {"warp_specialize": True}, "requested and not done"),
        ({"tensor_memory": 544}, "sm_100", {}, "544 columns of tensor memory, sm_100 has 512"),
        ({"spill_bytes": 8}, "sm_90", {}, "spills 8 bytes"),
        ({"spill_bytes": 8}, "sm_90", {"spilled": 8}, None),
        # A rule can demand that exponentials stand beside products.
        ({}, "sm_90", {"exposed": 0}, "exponentials"),
        ({"loops": (OVERLAPPING, replace(OVERLAPPING, exposed=8))}, "sm_90", {"exposed": 7}, "8"),
        ({"loops": (OVERLAPPING, replace(OVERLAPPING, exposed=8))}, "sm_90", {"exposed": 8}, None),
        ({"loops": (replace(OVERLAPPING, products=24),)}, "sm_100", {"together": 24}, None),
        (
            {"loops": (replace(OVERLAPPING, products=23),)},
            "sm_100",
            {"together": 24},
            "23 products",
        ),
        # The first block of a run has no product to stand beside.
        (
            {"loops": (OVERLAPPING, replace(OVERLAPPING, exposed=66, around=True))},
            "sm_90",
            {"exposed": 0},
            None,
        ),
        (UNFENCED, "sm_90", {}, "2 products"),
        (UNFENCED, "sm_90", {}, "line 7"),
        ({"early_reads": early_reads(EARLY)}, "sm_100", {}, "1 reads before the wait"),
        ({"early_reads": early_reads(EARLY)}, "sm_100", {}, "line 3: mov.b64 %rd1"),
    ],
)
def test_rules(
    found: dict[str, Any], arch: str, expected: dict[str, Any], reported: str | None
) -> None:
    texts = failures(replace(GOOD, **found), arch, Limits(**expected))
    assert texts == () if reported is None else len(texts) == 1 and reported in texts[0]


TTGIR = """
#mma = #ttg.nvidia_mma<{{versionMajor = 2, warpsPerCTA = [{warps}], instrShape = [16, 8]}}>
#{name} = #ttg.nvidia_mma<{{versionMajor = 2, warpsPerCTA = [4, 2], instrShape = [16, {size}]}}>
    %s = tt.dot %q, %k, %cst : tensor<..> * tensor<..> -> tensor<64x64xf32, #{name}> loc(#loc1)
    %m = "tt.reduce"(%s) <{{axis = 1 : i32}}> ({{
      tt.reduce.return %x : f32
    }}) : (tensor<64x64xf32, #mma>) -> tensor<64xf32, #ttg.slice<{{dim = 1, parent = #mma}}>>
"""
USUAL = {"warps": "8, 1", "name": "mma1", "size": 8}


@pytest.mark.parametrize(
    ("other", "same"), [({"name": "mma2"}, True), ({"warps": "4, 2"}, False), ({"size": 16}, False)]
)
def test_the_order_of_sums_is_of_reductions_and_products(other: dict[str, Any], same: bool) -> None:
    first, second = (order_of_sums(TTGIR.format(**USUAL | x)) for x in ({}, other))
    assert (first == second) == same


def test_variants_of_one_tile_must_add_in_one_order() -> None:
    row = aot.CompiledRow("fwd", "middle full", "sm_80", 64, "float16", "64x64", 4, 2, GOOD, ())
    masked = replace(row, variant="middle causal", report=replace(GOOD, order="other"))
    lost, apart = replace(masked, report=None), replace(masked, tile="32x64")
    assert [found for found, _ in other_orders([lost, row, apart, masked])] == [masked]


def test_a_failure_is_named_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = aot.CompiledRow("fwd", "middle full", "sm_90", 64, "float16", "64x64", 4, 2, GOOD, ())
    bad = replace(good, variant="only causal", failures=("spills 24 bytes per thread",))
    monkeypatch.setattr(aot, "compile_all", lambda cells, jobs: iter((good, bad)))
    monkeypatch.setattr(aot, "interpreting", lambda: False)
    assert main(["aot", "--quick", "--quiet"], commands=COMMANDS) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "FAIL sm_90 fwd only causal head_dim 64 float16 64x64 4 warps 2 stages: spills" in text
    assert "middle full" not in text and "1 failed" in text


def test_an_architecture_that_the_backend_refuses_is_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = set[str]()

    def note(cells: list[aot.Cell], jobs: int) -> Iterator[aot.CompiledRow]:
        compiled.update(cell.arch for cell in cells)
        return iter(())

    monkeypatch.setattr(aot, "RELEASE", (3, 6))
    monkeypatch.setattr(aot, "interpreting", lambda: False)
    monkeypatch.setattr(aot, "compile_all", note)
    command = ["aot", "--head-dim", "64", "--dtype", "bfloat16"]
    assert main(command, commands=COMMANDS) == 0
    assert compiled == {*aot.ARCHS} - {"sm_100"}
    assert "sm_100 is left out: the backend refuses sm_100" in capsys.readouterr().out
    compiled.clear()
    assert main([*command, "--arch", "sm_90", "sm_100"], commands=COMMANDS) == 2
    assert not compiled and "leave it out of --arch" in capsys.readouterr().err
