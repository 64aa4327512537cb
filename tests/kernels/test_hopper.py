"""The kernels in Gluon of sm_90: their turns, compiled code, and their PTX, executed.

The PTX runs in random orders of warpgroups and CTAs (`ptx/`), over blocks so short that every
buffer is used again and again, and is compared with float64. test_ptx.py has the configs in use,
and planted faults; test_gpu.py runs the kernels on a GPU.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from ring_attn import backends
from ring_attn.backends.rates import PORTABLE, attained, rates_of
from ring_attn.backends.triton import TritonBackend
from ring_attn.backends.triton_support import TRITON_OF_SM_100
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.kernels import configs, gluon_guard, hopper_fwd
from ring_attn.kernels.configs import Config
from ring_attn.kernels.launch import Launch
from ring_attn.kernels.step_table import transposed
from ring_attn.kernels.triton_release import RELEASE
from ring_attn.kernels.turn_table import TurnTable, make_turn_table
from ring_attn.testing import Expected, Inputs, random_sinks
from tests.bounds import assert_holds, expect, run, visible_pairs, whole
from tests.kernels.calls import (
    Step,
    assert_halves_are_equal,
    cut_keys,
    cut_rows,
    grouped,
    in_interpreter,
    same,
)
from tests.kernels.ptx import launching
from tests.masks import ON_A_GRID, TABLE

CPU = torch.device("cpu")
SMALL = Config(128, 32, 4, 2, programs_per_sm=1)

ALL_MASKS = TABLE | ON_A_GRID


def attend(
    inputs: Inputs,
    steps: Sequence[Step],
    config: Config = SMALL,
    *,
    seed: int | None = 0,
    **how: Any,
) -> Expected:
    """Forward and backward, each step in launches of its own, by their PTX."""
    dims = {inputs.q.size(3), inputs.v.size(3)}
    named = {"gluon": config}
    if len(dims) == 1 and dims <= configs.ONE_PASS["sm_90"].keys():
        named["one_pass"] = configs.ONE_PASS["sm_90"][dims.pop()]
    with launching.executing("sm_90", seed):
        return run(TritonBackend(named), inputs, steps, **how)


# -- turns


def table_of(tiles: Step, block_cols: int = 64, block_rows: int = 128) -> TurnTable:
    return make_turn_table(transposed(tiles), block_rows, block_cols, CPU)


def visits_of(table: TurnTable, block_cols: int) -> Iterator[tuple[int, int, list[int], int]]:
    """Visits in the order of tasks: the run's number from 1, block of columns, run, the number of
    the run whose turn is before."""
    runs, pieces = table.runs.tolist(), table.pieces.tolist()
    for _, _, first, last in table.blocks.tolist()[: table.num_blocks]:
        for index in range(first, last):
            c0, c1, lo, hi, r0, r1, piece, _ = run = runs[index]
            stop = -(-min(c1, r1 + hi) // block_cols)
            for col in range(max(c0, r0 + lo) // block_cols, stop):
                if col == pieces[piece][0]:
                    piece += 1
                yield index + 1, col, run, pieces[piece][1]


@pytest.mark.parametrize("block_rows", [16, 128])
@pytest.mark.parametrize("block_cols", [8, 64])
def test_a_visit_waits_for_the_one_before(block_rows: int, block_cols: int) -> None:
    """Each visit waits for a visit of an earlier task, or of the same task: no deadlock."""
    for name, mask in ALL_MASKS.items():
        tiles = whole(mask)
        table = table_of(tiles, block_cols, block_rows)
        rows = [row for row, *_ in table.blocks.tolist()[: table.num_blocks]]
        assert rows == sorted(rows, reverse=True) and not any(row % block_rows for row in rows)
        last = defaultdict[int, int](int)
        seen = torch.zeros(mask.seqlen_k, mask.seqlen_q, dtype=torch.int32)
        for run_number, col, (c0, c1, lo, hi, r0, r1, *_), before in visits_of(table, block_cols):
            assert last[col] == before, (name, run_number, col)
            last[col] = run_number
            i = torch.arange(r0, r1)[:, None]
            j = torch.arange(max(c0, col * block_cols), min(c1, (col + 1) * block_cols))
            seen[r0:r1, j] += ((j - i >= lo) & (j - i <= hi)).int()
        visible = torch.zeros_like(seen)
        for tile in tiles:
            visible[tile.kv, tile.q] += visible_pairs(tile).T.int()
        assert torch.equal(seen, visible), name


def sums_of_rows(*steps: Step) -> dict[int, list[tuple[int, ...]]]:
    """For each row of dq, the kv rows of each sum added to it, in the order of turns."""
    found = defaultdict[int, list[tuple[int, ...]]](list)
    size = 16
    for tiles in steps:
        for _, col, (c0, c1, lo, hi, r0, r1, *_), _ in visits_of(table_of(tiles, size, 32), size):
            for q in range(max(c0, col * size), min(c1, (col + 1) * size)):
                kv = tuple(range(max(r0, q - hi), min(r1, q - lo + 1)))
                if kv:
                    found[q].append(kv)
    return found


@pytest.mark.parametrize("name", ALL_MASKS)
def test_a_row_has_the_same_sums_wherever_the_sequence_is_cut(name: str) -> None:
    """Cuts the queries, as all-gather does, and the keys, in the folding order."""
    mask = ALL_MASKS[name]
    alone = sums_of_rows(whole(mask))
    for step in cut_rows(mask, *range(64, mask.seqlen_q, 64)):
        assert all(sums == alone[q] for q, sums in sums_of_rows(step).items())
    assert sums_of_rows(*cut_keys(mask, *range(64, mask.seqlen_k, 64))) == alone


# -- executed

QUICK = ("documents of other lengths",)


@in_interpreter
@pytest.mark.parametrize(
    "name",
    [*QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in ON_A_GRID if x not in QUICK)],
)
def test_masks(name: str) -> None:
    mask, number = ON_A_GRID[name], list(ON_A_GRID).index(name)
    inputs = grouped(mask, (64, 128)[number % 2])
    assert_holds(attend(inputs, [whole(mask)], seed=number), *expect(inputs, mask))


# Keys; nheads, nheads_kv, batch; head dims; config
SIZES = [
    *((200, heads, (64, 64), SMALL) for heads in ((4, 2, 1), (3, 1, 1), (2, 2, 2))),
    *((300, (1, 1, 1), (64, 64), Config(*one)) for one in ((192, 32, 4, 2), (128, 16, 4, 3))),
    *((300, (2, 1, 1), dims, Config(128, 64, 4, 2)) for dims in ((128, 64), (64, 128))),
    *((450, (2, 1, 1), (dim, dim), one) for dim, some in configs.GLUON.items() for one in some[1:]),
]


@in_interpreter
@pytest.mark.slow
@pytest.mark.parametrize(("keys", "heads", "dims", "config"), SIZES, ids=str)
def test_heads_consumers_and_stages(
    keys: int, heads: tuple[int, int, int], dims: tuple[int, int], config: Config
) -> None:
    mask = Mask(130, keys, causal=True)
    sizes = dict(zip(("nheads", "nheads_kv", "batch"), heads, strict=True))
    inputs = grouped(mask, dims[0], headdim_v=dims[1], **sizes)
    assert_holds(attend(inputs, [whole(mask)], config), *expect(inputs, mask))


@in_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("headdim", [64, 128])
def test_bits_do_not_depend_on_time_steps_grids_or_halves(headdim: int) -> None:
    """Tries several orders of CTAs and warpgroups, cut keys, and dq or dk and dv alone."""
    mask = Mask(136, 200, causal=True)
    inputs = grouped(mask, headdim, nheads=1)
    alone = attend(inputs, [whole(mask)], seed=None)
    other_grid = replace(SMALL, programs_per_sm=0, l2_bytes=1)
    assert same(attend(inputs, [whole(mask)], other_grid, seed=1), alone)
    assert same(attend(inputs, cut_keys(mask, 128)), alone)
    assert same(attend(inputs, [whole(mask)], replace(SMALL, num_stages=3), seed=5), alone)
    backend = TritonBackend({"one_pass": configs.ONE_PASS["sm_90"][headdim]})
    with launching.executing("sm_90", 5):
        assert_halves_are_equal(backend, inputs, mask, alone)


@in_interpreter
@pytest.mark.slow
def test_the_portable_forward_has_the_same_bits() -> None:
    """The two agree over equal blocks, also where the portable one ends a call without keys."""
    mask, config = Mask(140, 160, causal=True), configs.GLUON[128][0]
    inputs, sinks = grouped(mask, headdim=128), random_sinks(2)
    q, k, v, _ = inputs
    for steps in ([whole(mask)], cut_keys(mask, 128)):
        found = []
        for kind, say_last in (("gluon", True), ("gluon", False), ("fwd", True)):
            backend = TritonBackend({kind: config, f"{kind}_whole": config})
            with launching.executing("sm_90"):
                state = backend.new_state(q, 128, sinks)
                for tiles in steps:
                    last = say_last and tiles is steps[-1]
                    backend.forward(q, k, v, tiles, state, scores=Scores(0.1), last=last)
                found.append(backend.finalize(state, q.dtype))
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other))


@in_interpreter
@pytest.mark.slow
@pytest.mark.parametrize(("headdim", "bad"), [(64, float("nan")), (128, float("inf"))])
def test_what_a_document_holds_does_not_reach_its_neighbours(headdim: int, bad: float) -> None:
    bounds = (0, 40, 113, 150)
    mask = Mask(150, 150, True, (-1, -1), bounds, bounds)
    inputs = grouped(mask, headdim)
    alone = attend(inputs, [whole(mask)])
    for x in inputs:
        x[:, 40:113] = bad
    got = attend(inputs, [whole(mask)], seed=1)
    others = [*range(40), *range(113, 150)]
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(getattr(got, name)[:, others], getattr(alone, name)[:, others]), name
    assert torch.equal(got.lse[..., others], alone.lse[..., others])
    assert not got.lse[..., 40:113].isfinite().any()


@in_interpreter
def test_all_steps_of_a_call_have_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides do not change the kernel; only a last step without keys takes the portable one."""
    launches = list[Launch]()
    monkeypatch.setattr(configs, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(Launch, "run", lambda launch: launches.append(launch))
    mask, backend = Mask(40, 40), TritonBackend()
    q, k, v, _ = grouped(mask, nheads=1)
    state, scores = backend.new_state(q, 64), Scores(0.1, softcap=5.0)
    odd = torch.empty(1, 40, 1, 65, dtype=k.dtype)[..., 1:]
    for one in (k, odd, k[:, :1].expand(1, 40, 1, 64)):
        backend.forward(q, one, v, whole(mask), state, scores=scores)
    backend.forward(q, k[:, :0], v[:, :0], (), state, scores=scores, last=True)
    names = [launch.kernel.fn.__name__ for launch in launches]
    assert names == [*["hopper_fwd_kernel"] * 3, "flash_fwd_kernel"]


def test_what_bulk_copies_cannot_take_is_copied() -> None:
    copyable = hopper_fwd.copyable
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

# Architectures whose kernels the installed triton can compile.
ARCHS = [arch for arch in gluon_guard.KERNELS if arch != "sm_100" or RELEASE >= TRITON_OF_SM_100]


def kernels_in_gluon() -> list[str]:
    names = dict.fromkeys(name for arch in ARCHS for name in gluon_guard.KERNELS[arch])
    return [f"ring_attn.kernels.{name}" for name in names]


def imported_names() -> Iterator[tuple[ModuleType, str]]:
    """Modules of triton, and the names that the kernels import from them."""
    for name in kernels_in_gluon():
        for node in ast.parse(inspect.getsource(sys.modules[name])).body:
            if isinstance(node, ast.ImportFrom) and node.module and "gluon" in node.module:
                yield from ((sys.modules[node.module], alias.name) for alias in node.names)


def without(monkeypatch: pytest.MonkeyPatch, owner: ModuleType, name: str) -> None:
    """Removes a name of triton; the kernels in Gluon are imported again."""
    for kernel in kernels_in_gluon():
        monkeypatch.delitem(sys.modules, kernel, raising=False)
    if isinstance(getattr(owner, name), ModuleType):
        monkeypatch.setitem(sys.modules, f"{owner.__name__}.{name}", None)
    monkeypatch.delattr(owner, name)
    gluon_guard.gluon_missing.cache_clear()


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A context whose changes end before the guard forgets what it has found."""
    assert all(gluon_guard.gluon_missing(arch) is None for arch in ARCHS)
    with monkeypatch.context() as context:
        yield context
    gluon_guard.gluon_missing.cache_clear()


def test_each_name_that_triton_lacks_is_reported(guarded: pytest.MonkeyPatch) -> None:
    used = [pair for x in kernels_in_gluon() for pair in gluon_guard.used_names(sys.modules[x])]
    names = dict.fromkeys([*imported_names(), *used])
    assert len(names) > 40 and {name for _, name in names} >= {"mbarrier", "NVMMASharedLayout"}
    for owner, name in names:
        with guarded.context() as context:
            without(context, owner, name)
            reported = gluon_guard.gluon_missing() or gluon_guard.gluon_missing("sm_100")
            assert reported is not None and name in reported


@pytest.mark.parametrize("name", ["gluon", "PaddedSharedLayout"])
def test_without_gluon_the_portable_kernels_run(guarded: pytest.MonkeyPatch, name: str) -> None:
    owner = "triton.experimental" + ("" if name == "gluon" else ".gluon.language")
    without(guarded, sys.modules[owner], name)
    guarded.setattr(configs, "architecture", lambda device: "sm_90")
    guarded.setattr(backends, "architecture", lambda: "sm_90")
    mask = Mask(64, 64, causal=True)
    inputs = grouped(mask)
    assert_holds(run(TritonBackend(), inputs, [whole(mask)]), *expect(inputs, mask))
    spec = AttentionSpec("cuda", torch.bfloat16, 1, 8, 8, 64, 64)
    guarded.setattr(TritonBackend, "supports", lambda *args, **options: None)
    choice = backends.choose_backend.__wrapped__(spec)
    assert name in choice.why and name in backends.choose_backend.__wrapped__(spec, "triton").why
    known = rates_of("sm_90", PORTABLE, spec)
    assert known is not None
    speed = attained("sm_90", known, state_bytes=8, backward=False)
    assert choice.tflops["triton"] == round(speed / 1e12, 1)
