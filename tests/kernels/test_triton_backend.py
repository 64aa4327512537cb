"""The triton backend: accepted calls, messages, kept tables, and shards of extreme sizes."""

from __future__ import annotations

import textwrap
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder

from ring_attn.backends import choose_backend, get_backend, kept_launches
from ring_attn.backends import triton_support as module
from ring_attn.backends.base import BackwardInputs
from ring_attn.backends.triton import TritonBackend
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.tiles import Tile
from ring_attn.kernels.launch import Launch
from ring_attn.testing import Inputs
from tests.bounds import assert_holds, expect, run, whole
from tests.kernels.calls import (
    DEVICE,
    DTYPES,
    blocks,
    cut_keys,
    in_interpreter,
    inputs_for,
    patched_select,
    same,
)
from tests.kernels.test_aot import run_compiling
from tests.masks import TABLE

SPEC = AttentionSpec(DEVICE, torch.float16, 1, 4, 2, 64, 64)


# -- accepted calls


@in_interpreter
def test_on_a_cpu_it_runs_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose_backend(SPEC)
    assert choice.name == "aten"
    assert "only when requested by name" in str(choice.reasons["triton"])
    assert choose_backend(replace(SPEC, softcap=3.0)).name == "reference"
    with pytest.raises(NotImplementedError, match=r"backend='triton'.*not torch\.float64"):
        choose_backend(replace(SPEC, dtype=torch.float64), "triton")
    # No other test has this spec: choices are cached.
    spec = replace(SPEC, headdim=77)
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "triton" else object())
    with pytest.raises(ImportError, match=r"triton is not installed \(pip install triton\)"):
        choose_backend(spec, "triton")
    assert choose_backend(spec).name == "aten"


@dataclass(frozen=True)
class Machine:
    """The machine on which a call would run, and what differs from SPEC in the call."""

    device: str = "cuda"
    capability: tuple[int, int] = (9, 0)
    triton: str = "3.6.0"
    numpy: str | None = "2.3.5"
    interpret: bool = False
    compiled_before: bool = False
    explicit: bool = False
    spec: dict[str, Any] = field(default_factory=dict)


INTERPRETED = Machine("cpu", interpret=True, explicit=True)
MACHINES = [
    (Machine("mps", explicit=True), "not on mps"),
    (Machine(capability=(0, 0)), "needs a GPU that torch can use"),
    (Machine(capability=(7, 5)), "compute capability 8.0 or newer"),
    (Machine(capability=(8, 0)), None),
    (Machine(), None),
    # This compiler omits fences.
    (Machine(capability=(10, 0)), "3.6 leaves out proxy fences"),
    (Machine(capability=(10, 3)), "3.6 leaves out proxy fences"),
    (Machine(capability=(10, 0), triton="3.7.1"), None),
    (Machine(capability=(12, 1)), None),
    # A variable set for tests must not silently slow down a program.
    (Machine(interpret=True), "TRITON_INTERPRET=1 is set"),
    (Machine(interpret=True, explicit=True), None),
    (INTERPRETED, None),
    (replace(INTERPRETED, numpy=None), "needs numpy, which is not installed"),
    (replace(INTERPRETED, numpy="2.4.6"), None),
    (replace(INTERPRETED, compiled_before=True), "set TRITON_INTERPRET=1 before the program"),
    (replace(INTERPRETED, spec={"dtype": torch.bfloat16}), "bfloat16 arithmetic is wrong"),
    (Machine(spec={"dtype": torch.float64}), "not torch.float64"),
    (Machine(spec={"headdim": 257}), "up to 256, got 257 and 64"),
    (Machine(spec={"headdim_v": 300}), "up to 256, got 64 and 300"),
    (Machine(spec={"headdim": 1, "headdim_v": 256, "softcap": 30.0, "sinks": True}), None),
]


@pytest.mark.parametrize(("machine", "reason"), MACHINES, ids=str)
def test_machines(machine: Machine, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"triton": machine.triton, "numpy": machine.numpy}
    monkeypatch.setattr(module, "find_spec", there.get)
    monkeypatch.setattr(module, "version", there.__getitem__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: machine.capability > (0, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: machine.capability)
    monkeypatch.setenv("TRITON_INTERPRET", str(int(machine.interpret)))
    if machine.compiled_before or machine.device == "cpu":
        monkeypatch.setattr(triton.knobs.runtime, "interpret", not machine.compiled_before)
    dtype = torch.float16 if machine.device == "cpu" else torch.bfloat16
    spec = replace(SPEC, **{"device_type": machine.device, "dtype": dtype} | machine.spec)
    found = TritonBackend().supports(spec, explicit=machine.explicit)
    assert found is None if reason is None else reason in str(found)


@in_interpreter
def test_it_says_once_that_it_is_the_interpreter() -> None:
    kept_launches.warn_of_interpreter.cache_clear()
    inputs = inputs_for(Mask(5, 5))
    with pytest.warns(UserWarning, match="backend='triton' on CPU tensors runs in Triton's inter"):
        run(get_backend("triton"), inputs, [whole(Mask(5, 5))])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(get_backend("triton"), inputs, [whole(Mask(5, 5))])


@in_interpreter
@pytest.mark.parametrize("fails", [False, True])
def test_kernels_of_the_user_keep_the_interpreter_as_it_was(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products in order, and triton 3.6's conversion of scalars, are changed for our launches."""
    theirs, within = object(), list[object]()
    monkeypatch.setattr(InterpreterBuilder, "create_dot", theirs)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", theirs)
    monkeypatch.setattr("ring_attn.kernels.interpreter.RELEASE", (3, 6))

    def kernel() -> None:
        within.extend((InterpreterBuilder.create_dot, interpreter._patch_lang_tensor))
        if fails:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
        Launch({(1,): kernel}, (1,), {}, {}, {}).run()
    assert InterpreterBuilder.create_dot is interpreter._patch_lang_tensor is theirs
    assert len(within) == 2 and theirs not in within


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
    run_compiling("-c", textwrap.dedent(program))


# -- one rank


@pytest.mark.parametrize("name", ["causal", "empty rows", "no keys"])
def test_steps_of_which_none_is_marked_as_the_last(name: str) -> None:
    mask = TABLE[name]
    inputs = inputs_for(mask)
    cuts = (16, 32) if mask.seqlen_k else ()
    got = run(get_backend("triton"), inputs, cut_keys(mask, *cuts), say_last=False)
    assert_holds(got, *expect(inputs, mask))


def test_the_last_launch_lets_go_of_the_state() -> None:
    mask = TABLE["causal"]
    q, k, v, _ = inputs_for(mask)
    backend, (first, last) = get_backend("triton"), cut_keys(mask, 32)
    state = backend.new_state(q, 16)
    for tiles in (first, last):
        backend.forward(q, k, v, tiles, state, scores=Scores(0.25), last=tiles is last)
        kept = [state.carried.acc, state.carried.m, state.carried.l]
        assert [x is None for x in kept] == [tiles is last] * 3


def test_strides_that_mean_nothing() -> None:
    """Takes a column of a parameter as sinks, and rows of one element with gaps between them."""
    mask = TABLE["causal"]
    inputs = inputs_for(mask, nheads=3, headdim=1)
    column = torch.tensor([[1.0, 9.0], [2.0, 9.0], [-1.0, 9.0]], device=DEVICE)[:, 0]
    strided = Inputs(*(torch.cat((x, x), -1)[..., :1] for x in inputs))
    assert not any(x.is_contiguous() for x in (column, *strided))
    got = run(TritonBackend(), strided, [whole(mask)], sinks=column)
    assert same(got, run(TritonBackend(), inputs, [whole(mask)], sinks=column.contiguous()))


SIZES = [(1, 97, 97), (1, 0, 40), (1, 40, 0), (1, 0, 0), (0, 9, 9)]


@pytest.mark.parametrize("sinks", [None, (-3.0, 5.0)])
@pytest.mark.parametrize(("batch", "rows", "keys"), SIZES)
def test_nothing_to_do(batch: int, rows: int, keys: int, sinks: tuple[float, ...] | None) -> None:
    """Calls without batch, rows, keys or tiles give zeros."""
    inputs = inputs_for(Mask(rows, keys), batch=batch, nheads=2, headdim_v=24)
    given = None if sinks is None else torch.tensor(sinks, device=DEVICE)
    lse = torch.tensor(sinks or (-torch.inf, -torch.inf), device=DEVICE)
    for steps, say_last in (([], True), ([()], False), ([(), ()], True)):
        got = run(get_backend("triton"), inputs, steps, say_last=say_last, sinks=given)
        assert torch.equal(got.lse, lse[None, :, None].expand(batch, 2, rows))
        assert got.out.shape == (batch, rows, 2, 24)
        assert [x.shape for x in (got.dq, got.dk, got.dv)] == [x.shape for x in inputs[:3]]
        assert not any(bool(x.any()) for x in (got.out, got.dq, got.dk, got.dv))


def test_backward_is_its_two_halves_in_place() -> None:
    mask = TABLE["causal"]
    q, k, v, dout = inputs_for(mask)
    backend, scores = get_backend("triton"), Scores(0.25)
    args = BackwardInputs(q, k, v, dout, *torch.zeros(2, 1, 1, 97, device=DEVICE)), whole(mask)

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
    """Short blocks keep the bits of dk and dv, and are not used if the caller names a config."""
    mask, long, short = TABLE[name], blocks(64, 64), blocks(64, 32)
    inputs = inputs_for(mask, nheads=4, nheads_kv=2, dtype=DTYPES[-1])
    monkeypatch.setattr("ring_attn.kernels.configs.few_programs", lambda *_: short)
    patched_select(monkeypatch, long)
    named = TritonBackend({"dkdv": long, "dkdv_whole": long})
    found = []
    for sms, backend, sizes in (
        (1, TritonBackend(), {(64, 64)}),
        (1000, TritonBackend(), {(64, 64), (32, 64)}),
        (1000, named, {(64, 64)}),
    ):
        monkeypatch.setattr("ring_attn.kernels.tasks.num_sms", lambda _, sms=sms: sms)
        found.append(run(backend, inputs, [whole(mask)]))
        assert {key[2] for key in backend.launches.tables if key[3]} == sizes
    assert same(found[0], found[1]) and same(found[0], found[2])


# -- tables


def test_tables_are_made_once_for_a_plan_and_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, backend = TABLE["documents"], TritonBackend()
    inputs, steps = inputs_for(mask), cut_keys(mask, 32, 64)
    first = run(backend, inputs, steps)
    kept = dict(backend.launches.tables)
    assert same(run(backend, inputs, steps), first)
    assert dict(backend.launches.tables) == kept
    monkeypatch.setattr(kept_launches, "MAX_KEPT", 4)
    backend, config, device = TritonBackend(), blocks(32, 16), torch.device(DEVICE)
    latest = whole(Mask(33, 33))
    kept = backend.step_table(latest, config, device)
    for seqlen in range(1, 40):
        # Nothing else holds these tiles, so another tuple may reuse their address.
        table = backend.step_table(square(seqlen), config, device)
        assert int(table.blocks[:, 1].max()) == seqlen
        assert backend.step_table(latest, config, device) is kept, "used again and again, it stays"
        assert len(backend.launches.tables) <= 4


def square(seqlen: int) -> tuple[Tile, ...]:
    return (Tile(0, seqlen, 0, seqlen),)
