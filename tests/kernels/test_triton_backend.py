"""The triton backend: what it takes, what it says, the tables it keeps, and shards at the edge."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from ring_attn.backends import choose_backend, get_backend, kept_launches
from ring_attn.backends import triton_support as module
from ring_attn.backends.base import BackwardInputs
from ring_attn.backends.triton import TritonBackend
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.tiles import Tile
from ring_attn.kernels.flash_fwd import Carried
from ring_attn.kernels.launch import Launch
from ring_attn.testing import RESULTS, Expected, Inputs, layouts_of
from tests.bounds import MASKS, assert_holds, expect, run, whole
from tests.kernels.calls import (
    DEVICE,
    DTYPES,
    blocks,
    cut_keys,
    in_interpreter,
    inputs_for,
    patched_select,
)
from tests.kernels.rings import ring

pytestmark = pytest.mark.filterwarnings("ignore:backend='triton' on CPU:UserWarning")

SPEC = AttentionSpec(DEVICE, torch.float16, 1, 4, 2, 64, 64)


def same(a: Expected, b: Expected) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in RESULTS)


# -- what it takes


def test_it_runs_by_name() -> None:
    backend = get_backend("triton")
    assert isinstance(backend, TritonBackend) and backend.name == "triton"
    for dtype in DTYPES:
        assert backend.supports(replace(SPEC, dtype=dtype), explicit=True) is None
        assert choose_backend(replace(SPEC, dtype=dtype), "triton").name == "triton"
    for dims in ({"headdim": 256}, {"headdim_v": 256}, {"headdim": 1, "headdim_v": 3}):
        assert backend.supports(replace(SPEC, **dims), explicit=True) is None
    assert backend.supports(replace(SPEC, softcap=30.0, sinks=True), explicit=True) is None
    assert backend.workspace_bytes(SPEC, whole(MASKS["causal"]), backward=True) == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float64}, "not torch.float64"),
        ({"headdim": 257}, "up to 256, got 257 and 64"),
        ({"headdim_v": 300}, "up to 256, got 64 and 300"),
        pytest.param({"dtype": torch.bfloat16}, "bfloat16", marks=in_interpreter),
    ],
)
def test_what_it_does_not_take(changes: dict[str, object], reason: str) -> None:
    assert reason in str(TritonBackend().supports(replace(SPEC, **changes), explicit=True))
    with pytest.raises(NotImplementedError, match=f"backend='triton'.*{reason}"):
        choose_backend(replace(SPEC, **changes), "triton")


@in_interpreter
def test_on_a_cpu_it_runs_only_by_name() -> None:
    choice = choose_backend(SPEC)
    assert choice.name == "aten"
    assert "only when asked for by name" in str(choice.reasons["triton"])
    assert choose_backend(replace(SPEC, softcap=3.0)).name == "reference"


@in_interpreter
def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"numpy"}
    monkeypatch.setattr(module, "find_spec", lambda name: None if name in missing else object())
    assert "needs numpy, which is not installed" in str(
        TritonBackend().supports(SPEC, explicit=True)
    )
    missing.add("triton")
    # A spec that nothing else asks for: choices are cached.
    spec = replace(SPEC, headdim=77)
    with pytest.raises(ImportError, match=r"triton is not installed \(pip install triton\)"):
        choose_backend(spec, "triton")
    assert choose_backend(spec).name == "aten"


@in_interpreter
def test_a_compiler_cannot_become_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    reason = str(TritonBackend().supports(SPEC, explicit=True))
    assert "set TRITON_INTERPRET=1 before the program starts" in reason


def test_gpus_that_are_too_old_or_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, spec = TritonBackend(), replace(SPEC, device_type="cuda", dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a GPU that torch can use" in str(backend.supports(spec))
    assert "not on mps" in str(backend.supports(replace(spec, device_type="mps"), explicit=True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for capability, taken in (((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 1), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        assert (backend.supports(spec) is None) == taken
        if not taken:
            assert "compute capability 8.0 or newer" in str(backend.supports(spec))
    # What was set for tests must not slow a program down in silence.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET=1 is set" in str(backend.supports(spec))
    assert backend.supports(spec, explicit=True) is None


def test_a_compiler_that_leaves_out_fences_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(SPEC, device_type="cuda", dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(module, "version", {"triton": "3.6.0"}.__getitem__)
    for capability, taken in (((9, 0), True), ((10, 0), False), ((10, 3), False), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        assert (TritonBackend().supports(spec) is None) == taken
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    assert "3.6 leaves out proxy fences" in str(TritonBackend().supports(spec))
    monkeypatch.setattr(module, "version", {"triton": "3.7.1"}.__getitem__)
    assert TritonBackend().supports(spec) is None


def test_an_interpreter_and_a_numpy_that_do_not_go_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = {"triton": "3.6.0", "numpy": "2.4.6"}
    monkeypatch.setattr(module, "version", versions.__getitem__)
    assert "numpy below 2.4" in str(TritonBackend().supports(SPEC, explicit=True))
    versions["numpy"] = "2.3.5"
    assert "numpy" not in str(TritonBackend().supports(SPEC, explicit=True))


@in_interpreter
def test_it_says_once_that_it_is_the_interpreter() -> None:
    kept_launches._warn_of_interpreter.cache_clear()
    inputs = inputs_for(Mask(5, 5))
    with pytest.warns(UserWarning, match="backend='triton' on CPU tensors runs in Triton's inter"):
        run(get_backend("triton"), inputs, [whole(Mask(5, 5))])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(get_backend("triton"), inputs, [whole(Mask(5, 5))])


@in_interpreter
def test_in_a_new_process_it_asks_for_the_interpreter_itself() -> None:
    program = """
        import os, sys, warnings
        warnings.simplefilter("ignore")
        import torch
        from ring_attn.backends import choose_backend, get_backend
        from ring_attn.core.spec import AttentionSpec, Scores

        spec = AttentionSpec("cpu", torch.float32, 1, 1, 1, 16, 16)
        assert choose_backend(spec).name == "aten"
        assert "triton" not in sys.modules, "nobody has asked for it"
        backend = get_backend(choose_backend(spec, "triton").name)
        q = torch.randn(1, 3, 1, 16)
        out, lse = backend.finalize(backend.new_state(q, 16), q.dtype)
        assert not out.any() and lse.isneginf().all()
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, check=True)


# -- configs


@in_interpreter
def test_autotune_has_nothing_to_search_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = MASKS["causal"]
    usual = run(TritonBackend(), inputs_for(mask), [whole(mask)])
    monkeypatch.setenv("RING_ATTN_AUTOTUNE", "1")
    assert same(run(TritonBackend(), inputs_for(mask), [whole(mask)]), usual)


# -- one rank


@pytest.mark.parametrize("say_last", [True, False])
@pytest.mark.parametrize("name", ["causal", "empty rows", "documents", "no keys"])
def test_steps_whether_or_not_the_last_is_told(name: str, say_last: bool) -> None:
    mask = MASKS[name]
    inputs = inputs_for(mask)
    cuts = (16, 32) if mask.seqlen_k else ()
    got = run(get_backend("triton"), inputs, cut_keys(mask, *cuts), say_last=say_last)
    assert_holds(got, *expect(inputs, mask))


@pytest.mark.parametrize("say_last", [True, False])
@pytest.mark.parametrize("sinks", [None, (-3.0, 5.0)])
def test_a_rank_without_tiles(sinks: tuple[float, float] | None, say_last: bool) -> None:
    inputs = inputs_for(MASKS["full"], nheads=2, headdim_v=24)
    given = None if sinks is None else torch.tensor(sinks, device=DEVICE)
    lse = torch.tensor(sinks or (-torch.inf, -torch.inf), device=DEVICE)
    for steps in ([], [()], [(), ()]):
        got = run(get_backend("triton"), inputs, steps, say_last=say_last, sinks=given)
        assert torch.equal(got.lse, lse[None, :, None].expand(1, 2, 97))
        assert got.out.shape == (1, 97, 2, 24)
        assert not any(bool(x.any()) for x in (got.out, got.dq, got.dk, got.dv))


def test_the_last_launch_lets_go_of_the_state() -> None:
    mask = MASKS["causal"]
    q, k, v, _ = inputs_for(mask)
    backend, (first, last) = get_backend("triton"), cut_keys(mask, 32)
    state = backend.new_state(q, 16)
    for tiles in (first, last):
        backend.forward(q, k, v, tiles, state, scores=Scores(0.25), last=tiles is last)
        kept = [state.carried.acc, state.carried.m, state.carried.l]
        assert [x is None for x in kept] == [tiles is last] * 3


def test_sinks_of_any_strides() -> None:
    """A column of a parameter is not in one piece."""
    mask = MASKS["causal"]
    inputs = inputs_for(mask, nheads=3)
    column = torch.tensor([[1.0, 9.0], [2.0, 9.0], [-1.0, 9.0]], device=DEVICE)[:, 0]
    assert not column.is_contiguous()
    layouts = layouts_of("contiguous", mask, 1)
    got, wanted = (ring(inputs, mask, layouts, sinks=x) for x in (column, column.contiguous()))
    assert same(got, wanted)
    assert torch.equal(got.dsinks, wanted.dsinks)


def test_a_headdim_of_one_whatever_its_stride() -> None:
    mask = MASKS["causal"]
    plain = inputs_for(mask, headdim=1)
    strided = Inputs(*(torch.cat((x, x), -1)[..., :1] for x in plain))
    assert not any(x.is_contiguous() for x in strided)
    backend = get_backend("triton")
    assert same(*(run(backend, x, [whole(mask)]) for x in (plain, strided)))


@pytest.mark.parametrize(("batch", "rows", "keys"), [(1, 0, 40), (1, 40, 0), (1, 0, 0), (0, 9, 9)])
def test_nothing_to_do(batch: int, rows: int, keys: int) -> None:
    mask = Mask(rows, keys)
    inputs = inputs_for(mask, batch=batch, nheads=2)
    got = run(get_backend("triton"), inputs, [whole(mask)])
    assert got.out.shape == inputs.q.shape and got.lse.shape == (batch, 2, rows)
    assert got.dk.shape == inputs.k.shape
    assert not any(bool(x.any()) for x in (got.out, got.dq, got.dk, got.dv))


def test_backward_is_its_two_halves_in_place() -> None:
    mask = MASKS["causal"]
    q, k, v, dout = inputs_for(mask)
    backend, scores = get_backend("triton"), Scores(0.25)
    state = backend.new_state(q, 16)
    tiles = whole(mask)
    state = backend.forward(q, k, v, tiles, state, scores=scores, last=True)
    out, lse = backend.finalize(state, q.dtype)
    args = (BackwardInputs(q, k, v, dout, *backend.row_statistics(out, dout, lse)), tiles)

    def threes() -> tuple[Tensor, ...]:
        return tuple(torch.full(x.shape, 3.0, device=DEVICE) for x in (q, k, v))

    both, halves = threes(), threes()
    backend.backward(*args, both, scores=scores)
    backend.backward(*args, (halves[0], None, None), scores=scores)
    assert all(bool((x == 3.0).all()) for x in halves[1:])
    backend.backward(*args, (None, *halves[1:]), scores=scores)
    for x, y in zip(both, halves, strict=True):
        assert torch.equal(x, y) and bool((x != 3.0).any())


@pytest.mark.parametrize("name", ["causal", "documents"])
def test_short_blocks_where_programs_are_few(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of dk and dv, whose bits they keep; not where the caller has named a config."""
    mask, long, short = MASKS[name], blocks(64, 64), blocks(64, 32)
    inputs = inputs_for(mask, nheads=4, nheads_kv=2, dtype=DTYPES[-1])
    monkeypatch.setattr("ring_attn.kernels.configs.few_programs", lambda *_: short)
    tables: dict[int, set[Any]] = {}
    found = []
    for sms in (1, 1000):
        monkeypatch.setattr("ring_attn.kernels.tasks.num_sms", lambda _, sms=sms: sms)
        backend = TritonBackend()
        patched_select(monkeypatch, long)
        found.append(run(backend, inputs, [whole(mask)]))
        tables[sms] = {key[1] for key in backend._launches.tables if key[3]}
    assert tables == {1: {(64, 64)}, 1000: {(64, 64), (32, 64)}}
    assert same(*found)
    backend = TritonBackend({"dkdv": long, "dkdv_whole": long})
    run(backend, inputs, [whole(mask)])
    assert {key[1] for key in backend._launches.tables if key[3]} == {(64, 64)}


def test_a_launch_is_made_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making it may time candidates."""
    inside: list[bool] = []

    def enqueue(run: Any, argument: Any, device: int) -> Any:
        inside.append(True)
        try:
            return run(argument)
        finally:
            inside.pop()

    def make() -> Launch:
        assert inside == [True]
        return Launch(None, (0,), {}, {}, {})

    monkeypatch.setattr(kept_launches, "enqueue", enqueue)
    kept_launches.KeptLaunches().run(((),), (torch.zeros(1, 1, 1, 1),), (), make)


# -- tables


def test_tables_are_made_once_for_a_plan() -> None:
    mask, backend = MASKS["documents"], TritonBackend()
    inputs, steps = inputs_for(mask), cut_keys(mask, 32, 64)
    first = run(backend, inputs, steps)
    kept = len(backend._launches.tables)
    # Three steps, of which the first and the last are for all rows; dq's; dk's and dv's.
    assert kept <= 9
    assert same(run(backend, inputs, steps), first)
    assert same(run(backend, inputs_for(mask), steps), first)
    assert len(backend._launches.tables) == kept


def test_the_tables_that_are_kept_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_launches, "MOST_KEPT", 4)
    backend, config, device = TritonBackend(), blocks(32, 16), torch.device(DEVICE)
    latest = whole(Mask(33, 33))
    kept = backend._table(latest, config, device)
    for seqlen in range(1, 40):
        # Nobody else holds these tiles: another tuple may take over their place in memory.
        table = backend._table(whole_again(seqlen), config, device)
        assert int(table.blocks[:, 1].max()) == seqlen
        assert backend._table(latest, config, device) is kept, "used again and again, it stays"
        assert len(backend._launches.tables) <= 4


def whole_again(seqlen: int) -> tuple[Tile, ...]:
    return (Tile(slice(0, seqlen), slice(0, seqlen), whole(Mask(1, 1))[0].band),)


def test_a_state_can_be_copied_for_a_trial() -> None:
    state = Carried(acc=torch.ones(3), sinks=torch.ones(2))
    copy = state.copy()
    assert copy.out is None and copy.m is None
    copy.acc.fill_(2.0)
    assert bool((state.acc == 1.0).all())
