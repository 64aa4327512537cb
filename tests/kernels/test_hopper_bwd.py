"""The backward in Gluon of sm_90: its turns, and its PTX, executed in random orders.

Several CTAs run at once, and warpgroups of each (`ptx/`), so that the turns matter.
test_ptx.py has the masks, types and steps of a ring by way of the backend.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attn.backends.triton import TritonBackend
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.kernels import configs
from ring_attn.kernels.hopper_bwd import bwd_launch, num_turns
from ring_attn.kernels.launch import Launch
from ring_attn.kernels.step_table import transposed
from ring_attn.kernels.turn_table import TurnTable, make_turn_table
from ring_attn.testing import Inputs, random_qkv
from tests.bounds import MASKS as SMALL_MASKS
from tests.bounds import assert_holds, expect, visible_pairs, whole
from tests.kernels.calls import Step, cut_keys, in_interpreter, rectangles
from tests.kernels.ptx import launching
from tests.kernels.ptx.faults import Deadlock, Fault, NotWaited, Race
from tests.kernels.test_hopper_fwd import HEADS, MASKS

CPU = torch.device("cpu")
ROWS = 128


def table_of(tiles: Step, block_cols: int = 64, block_rows: int = ROWS) -> TurnTable:
    return make_turn_table(transposed(rectangles(tiles)), block_rows, block_cols, CPU)


# -- turns


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
    """Each visit waits for a visit of an earlier task, or of the same task: no deadlock.

    The visits hold every visible pair once.
    """
    for name, mask in (SMALL_MASKS | MASKS).items():
        tiles = whole(mask)
        table = table_of(tiles, block_cols, block_rows)
        rows = [row for row, *_ in table.blocks.tolist()[: table.num_blocks]]
        assert rows == sorted(rows, reverse=True) and not any(row % block_rows for row in rows)
        last = defaultdict[int, int](int)
        seen = torch.zeros(mask.seqlen_k, mask.seqlen_q, dtype=torch.int32)
        for run, col, (c0, c1, lo, hi, r0, r1, *_), before in visits_of(table, block_cols):
            assert last[col] == before, (name, run, col)
            last[col] = run
            i = torch.arange(r0, r1)[:, None]
            j = torch.arange(max(c0, col * block_cols), min(c1, (col + 1) * block_cols))
            seen[r0:r1, j] += ((j - i >= lo) & (j - i <= hi)).int()
        visible = torch.zeros_like(seen)
        for tile in tiles:
            visible[tile.kv, tile.q] += visible_pairs(tile).T.int()
        assert torch.equal(seen, visible), name


def sums_of_rows(table: TurnTable, block_cols: int) -> dict[int, list[tuple[int, ...]]]:
    """For each row of dq, the kv rows of each sum added to it, in the order of turns."""
    found = defaultdict[int, list[tuple[int, ...]]](list)
    for _, col, (c0, c1, lo, hi, r0, r1, *_), _ in visits_of(table, block_cols):
        for q in range(max(c0, col * block_cols), min(c1, (col + 1) * block_cols)):
            kv = tuple(k for k in range(max(r0, q - hi), min(r1, q - lo + 1)))
            if kv:
                found[q].append(kv)
    return found


@pytest.mark.parametrize("name", [*SMALL_MASKS, *MASKS])
def test_a_row_has_the_same_sums_wherever_the_sequence_is_cut(name: str) -> None:
    """Cuts the queries, as all-gather does, and the keys, in the folding order."""
    mask = (SMALL_MASKS | MASKS)[name]
    block_rows, block_cols = 32, 16
    tiles = whole(mask)
    alone = sums_of_rows(table_of(tiles, block_cols, block_rows), block_cols)
    for start in range(0, mask.seqlen_q, 64):
        stop = min(start + 64, mask.seqlen_q)
        part = [
            (max(r[0], start), min(r[1], stop), *r[2:])
            for r in rectangles(tiles)
            if r[0] < stop and r[1] > start
        ]
        cut = make_turn_table(transposed(part), block_rows, block_cols, CPU)
        for q, sums in sums_of_rows(cut, block_cols).items():
            assert sums == alone[q], q
    found = defaultdict[int, list[tuple[int, ...]]](list)
    for step in cut_keys(mask, *range(64, mask.seqlen_k, 64)):
        for q, sums in sums_of_rows(table_of(step, block_cols, block_rows), block_cols).items():
            found[q] += sums
    assert found == alone


# -- the kernel


@pytest.mark.parametrize(("headdim", "batch"), [(64, 1), (128, 2)])
def test_turns_are_in_the_workspace(
    headdim: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workspace holds turns only in the backward, of calls that use this kernel."""
    mask = Mask(257, 257, causal=True)
    q, k, v, _ = inputs_of(mask, headdim, nheads=4, batch=batch)
    backend, spec = TritonBackend(), AttentionSpec.of(q, k, v)
    assert backend.workspace_bytes(spec, whole(mask), backward=True) == 0
    monkeypatch.setattr(TritonBackend, "in_one_pass", lambda *_: True)
    turns = 4 * num_turns(q, configs.GLUON_BWD[headdim])
    assert backend.workspace_bytes(spec, whole(mask), backward=True) == turns > 0
    assert backend.workspace_bytes(spec, whole(mask)) == 0
    assert backend.workspace_bytes(spec, (), backward=True) == 0


def inputs_of(mask: Mask, headdim: int = 64, nheads: int = 1, **sizes: Any) -> Inputs:
    usual = {"nheads_kv": 1, "dtype": torch.float16}
    return random_qkv(
        seqlen_q=mask.seqlen_q, seqlen_k=mask.seqlen_k, nheads=nheads, headdim=headdim,
        **(usual | sizes),
    )  # fmt: skip


def launch_of(
    inputs: Inputs,
    mask: Mask,
    tiles: Step | None = None,
    parts: str = "q kv",
    grads: Sequence[Tensor] | None = None,
) -> tuple[Launch, list[Tensor]]:
    """The launch of a step, and the unscaled gradients to which the launch adds."""
    q, k, v, dout = inputs
    oracle, _ = expect(inputs, mask)
    delta = (oracle.out * dout.double()).sum(-1).transpose(1, 2)
    grads = grads or [torch.zeros(x.shape) for x in (q, k, v)]
    config = configs.GLUON_BWD[q.size(3)]
    launch = bwd_launch(
        q, k, v, dout, (oracle.lse / -math.log(2.0)).float().contiguous(),
        delta.float().contiguous(),
        grads[0] if "q" in parts.split() else None,
        *(grads[1:] if "kv" in parts.split() else (None, None)),
        torch.zeros(num_turns(q, config), dtype=torch.int32),
        table_of(whole(mask) if tiles is None else tiles, config.BLOCK_M), config,
        softmax_scale=q.size(3) ** -0.5,
    )  # fmt: skip
    return launch, list(grads)


def backward(
    inputs: Inputs, mask: Mask, steps: Sequence[Step] | None = None, seed: int | None = 0
) -> list[Tensor]:
    """dq, dk and dv, each step in a launch of its own."""
    grads: list[Tensor] | None = None
    for tiles in steps or [whole(mask)]:
        launch, grads = launch_of(inputs, mask, tiles, grads=grads)
        if all(launch.grid):
            assert launching.run(launch, "sm_90", seed) == []
    assert grads is not None
    return grads


def assert_exact(grads: Sequence[Tensor], inputs: Inputs, mask: Mask) -> None:
    scale = inputs.q.size(3) ** -0.5
    factors = {"dq": scale, "dk": scale, "dv": 1.0}
    got = {
        name: (x * factor).to(inputs.q.dtype)
        for x, (name, factor) in zip(grads, factors.items(), strict=True)
    }
    assert_holds(got, *expect(inputs, mask))


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


QUICK = ("one row", "documents of other lengths")


@in_interpreter
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in MASKS if x not in QUICK)]
)
def test_masks(name: str) -> None:
    mask = MASKS[name]
    for headdim in (128,) if name in QUICK else (64, 128):
        inputs = inputs_of(mask, headdim, nheads=2)
        assert_exact(backward(inputs, mask, seed=len(name)), inputs, mask)


@in_interpreter
@pytest.mark.slow
@pytest.mark.parametrize(("nheads", "nheads_kv", "batch"), HEADS)
def test_heads(nheads: int, nheads_kv: int, batch: int) -> None:
    mask = Mask(97, 113, causal=True)
    inputs = inputs_of(mask, nheads=nheads, nheads_kv=nheads_kv, batch=batch)
    assert_exact(backward(inputs, mask), inputs, mask)


@in_interpreter
@pytest.mark.parametrize(
    ("headdim", "rows", "seeds"),
    [(64, 129, 1), *(pytest.param(x, 300, 4, marks=pytest.mark.slow) for x in (64, 128))],
)
def test_bits_do_not_depend_on_time_steps_or_halves(headdim: int, rows: int, seeds: int) -> None:
    """Tries several orders of CTAs and warpgroups, cut keys, and dq or dk and dv alone."""
    mask = Mask(rows, rows + 85, causal=True)
    inputs = inputs_of(mask, headdim)
    alone = backward(inputs, mask, seed=None)
    for seed in range(seeds):
        assert same(backward(inputs, mask, seed=seed), alone)
    assert same(backward(inputs, mask, cut_keys(mask, 128)), alone)
    for parts, part in (("q", slice(0, 1)), ("kv", slice(1, 3))):
        launch, grads = launch_of(inputs, mask, parts=parts)
        assert launching.run(launch, "sm_90", 5) == []
        assert same(grads[part], alone[part])


@in_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_a_document_holds_does_not_reach_its_neighbours(bad: float) -> None:
    bounds = (0, 40, 113, 150)
    mask = Mask(150, 150, True, (-1, -1), bounds, bounds)
    for headdim in (64, 128):
        inputs = inputs_of(mask, headdim)
        clean, alone = launch_of(inputs, mask)
        launching.run(clean, "sm_90")
        others = [*range(40), *range(113, 150)]
        for x in inputs:
            x[:, 40:113] = bad
        launch, grads = launch_of(inputs, mask)
        for name in ("minus_lse_ptr", "delta_ptr"):
            launch.args[name].copy_(clean.args[name])
            launch.args[name][..., 40:113] = bad
        launching.run(launch, "sm_90", 1)
        for x, y in zip(grads, alone, strict=True):
            assert torch.equal(x[:, others], y[:, others])


# -- planted faults


def found(
    headdim: int, pattern: str, new: str, seeds: Sequence[int] = (0,), mask: Mask | None = None
) -> list[Any]:
    """For each replaced match and each seed, the fault, or whether the bits differ."""
    mask = mask or Mask(260, 260, causal=True)
    inputs = inputs_of(mask, headdim)
    launch, clean = launch_of(inputs, mask)
    code = launching.compiled(launch, "sm_90")
    launching.execute(launch, code)
    results = list[Any]()
    for match in re.finditer(pattern, code.ptx):
        for seed in seeds:
            launch, grads = launch_of(inputs, mask)
            ptx = code.ptx[: match.start()] + match.expand(new) + code.ptx[match.end() :]
            try:
                missing = launching.execute(launch, code, lambda _, ptx=ptx: ptx, seed)
                results.append(missing[0] if missing else not same(grads, clean))
            except Fault as fault:
                results.append(fault)
    assert results, f"nothing to plant {new!r} into"
    return results


WAIT = r"mbarrier\.try_wait(.*) complete, (.*), (%r\d+|\d);"


@in_interpreter
def test_turns_that_are_not_waited_for_change_bits() -> None:
    """Adds without waiting for the turn."""
    turn = r"(acquire\.b32(?:.*\n)+?\s*setp\.ne\.b32\s+%p\d+, (%r\d+)), %r\d+;"
    faults = found(64, turn, r"\1, \2;", range(4), Mask(128, 512))
    assert any(fault is True for fault in faults), faults


@in_interpreter
def test_a_turn_that_is_not_given_on_is_a_deadlock() -> None:
    [fault] = found(64, r"@%p\d+ atom\.global\.gpu\.release\.exch\.b32[^;]*;", "")
    assert isinstance(fault, Deadlock)


@in_interpreter
def test_a_turn_is_given_on_after_what_all_lanes_have_added() -> None:
    """The executor keeps lanes in order; a GPU needs a warp barrier before the turn is passed."""
    ptx = launching.compiled(launch_of(inputs_of(mask := Mask(128, 128)), mask)[0], "sm_90").ptx
    [after] = re.findall(r"relaxed\.add(?!.*relaxed\.add)(.*)release\.exch", ptx, re.DOTALL)
    [before] = re.findall(r"gpu\.acquire(.*?)relaxed\.add", ptx, re.DOTALL)
    assert "bar.warp.sync" in after and "bar.warp.sync" in before


@in_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("headdim", [64, 128])
def test_a_wait_for_an_mbarrier_deleted_is_found(headdim: int) -> None:
    faults = found(headdim, WAIT, "mov.pred complete, -1;")
    seen = [isinstance(fault, NotWaited | Race) or fault is True for fault in faults]
    assert sum(seen) >= 0.7 * len(seen), faults


@in_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("headdim", [64, 128])
def test_a_fence_deleted_is_missed(headdim: int) -> None:
    faults = found(headdim, r"fence\.proxy\.async\.shared::cta;", "")
    assert any(isinstance(fault, Fault) for fault in faults)
