"""The first use of kernels: right ones pass, faults are refused, and proofs are remembered."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ring_attn import backends
from ring_attn.attention import first_use
from ring_attn.attention.first_use import Use, proof, proven_backend, uses, why_wrong
from ring_attn.backends import Purpose, base, choose_backend, proofs
from ring_attn.backends.triton import TritonBackend
from ring_attn.core.oracle import Verdict
from ring_attn.core.spec import AttentionSpec
from ring_attn.kernels import decode, flash_fwd, step_table
from ring_attn.kernels.gluon_guard import gluon_missing
from tests.kernels.test_aot import run_compiling
from tests.kernels.test_launches import needs_c_compiler

SPEC = AttentionSpec("cpu", torch.float16, 1, 2, 1, 16, 16)
CAUSAL = Purpose(causal=True)


@pytest.fixture(autouse=True)
def unused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing has been used before, in this process or another one."""
    monkeypatch.setenv("RING_ATTN_FIRST_USE", "on")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    functions = (
        proven_backend,
        why_wrong,
        first_use.warn_once,
        choose_backend,
        proofs.software,
        proofs.warn_once,
    )
    for function in functions:
        function.cache_clear()
    yield
    for function in functions:
        function.cache_clear()


# -- cases, in Triton's interpreter

MASKS = ((), ("causal",), ("causal", "window"), ("causal", "several", "ragged"))
USES = [Use("triton", kind, SPEC, masks) for kind in ("forward", "backward") for masks in MASKS] + [
    Use("triton", "decode", SPEC, masks) for masks in ((), ("several",))
]


@pytest.mark.sweep(5)
@pytest.mark.parametrize("use", USES, ids=str)
def test_right_kernels_pass(use: Use) -> None:
    assert all(verdict.ok for verdict in proof(use))


def test_options_of_a_call_are_those_of_its_case() -> None:
    spec = AttentionSpec("cpu", torch.float64, 1, 16, 1, 24, 8, 30.0, True, True)
    for use in uses("reference", spec, Purpose(backward=True, causal=True, window=True)):
        assert use.spec.nheads // use.spec.nheads_kv == first_use.GROUP
        assert use.masks == ("causal", "window")
        assert all(verdict.ok for verdict in proof(use)), use


SCALES, BOUNDED, MERGED = flash_fwd.scales, step_table.bounded, decode.merge_parts_launch
LAUNCH = decode.decode_launch


def one_key_more(rectangle: Any) -> tuple[int, int, int, int]:
    start, stop, lo, hi = BOUNDED(rectangle)
    return start, stop, lo, hi + 1


# Name -> object, attribute, and faulty function; kind and masks of a use; wrong results.
FAULTS: dict[str, tuple[object, str, Callable[..., Any], str, tuple[str, ...], str]] = {
    "scale": (flash_fwd, "scales", lambda s, c: SCALES(1.01 * s, c), "forward", (), "out lse"),
    "diagonal": (step_table, "bounded", one_key_more, "forward", ("causal",), "out lse"),
    "factor of gradients": (
        TritonBackend,
        "gradient_factor",
        lambda self, scores: 1.01 * scores.softmax_scale,
        "backward",
        ("causal", "several", "ragged"),
        "dq dk",
    ),
    "last part": (
        decode,
        "merge_parts_launch",
        lambda *args: MERGED(*args[:-1], args[-1] - 1),
        "decode",
        (),
        "out lse",
    ),
    "pages": (
        decode,
        "decode_launch",
        lambda *args, **options: LAUNCH(*args[:3], torch.zeros_like(args[3]), *args[4:], **options),
        "decode",
        ("several",),
        "out lse",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused_with_its_figures(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, function, kind, masks, wrong = FAULTS[fault]
    monkeypatch.setattr(owner, name, function)
    backends.get_backend.cache_clear()  # tables and launches are cached
    try:
        reason = why_wrong(Use("triton", kind, SPEC, masks))
    finally:
        backends.get_backend.cache_clear()
    assert reason is not None and kind in reason
    assert all(f"{name}: error" in reason for name in wrong.split()), reason
    assert "dv" not in reason


@needs_c_compiler
@pytest.mark.timeout(600)
def test_kernels_that_do_not_compile_or_compute_nothing() -> None:
    facts = proofs.facts_of(repr(USE), "H100")
    proofs.remember(facts, ["out"])
    run_compiling("-m", "tests.kernels.first_uses", "remembered")


def test_the_callers_modes_do_not_matter() -> None:
    use = next(uses("aten", SPEC, Purpose(backward=True)))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert why_wrong(use) is None


# -- time, of what no GPU has run: each operator by a launch, its bytes and its products

# Of a slow host, and of the slowest GPU with tensor cores that NVIDIA sells to servers, an A2:
# 200 GB/s, 4.5 TFLOP/s in float32, of which float64 is the 64th part.
LAUNCH_S, BYTES_S, FLOPS_S, DOUBLE_FLOPS_S = 50e-6, 200e9, 4.5e12, 4.5e12 / 64

# Everything that makes a case larger.
LARGEST = AttentionSpec("cpu", torch.bfloat16, 8, 64, 8, 256, 256, 30.0, True)
EVERYTHING = Purpose(backward=True, causal=True, window=True)


class Clock(TorchDispatchMode):
    """Adds up the seconds of operators, which run on the CPU, as on a GPU."""

    seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        moved = sum(x.nbytes for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor))
        flops = flop_registry.get(func.overloadpacket, lambda *_, **__: 0)(*args, out_val=out)
        double = isinstance(out, Tensor) and out.dtype == torch.float64
        rate = DOUBLE_FLOPS_S if double else FLOPS_S
        self.seconds += LAUNCH_S + moved / BYTES_S + flops / rate
        return out


def seconds_of(use: Use, monkeypatch: pytest.MonkeyPatch) -> float:
    clock, run_local = Clock(), first_use.run_local

    def timed(world_size: int, work: Callable[..., Any]) -> Any:
        def on_time(*given: Any) -> Any:
            with clock:  # modes belong to threads
                return work(*given)

        return run_local(world_size, on_time)

    monkeypatch.setattr(first_use, "run_local", timed)
    with clock:
        proof(use)
    monkeypatch.setattr(first_use, "run_local", run_local)
    return clock.seconds


def largest(kind: str, monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds of the largest case of a kind."""
    purpose = Purpose(decoding=True) if kind == "decode" else EVERYTHING
    use = next(use for use in uses("reference", LARGEST, purpose) if use.kind == kind)
    return seconds_of(use, monkeypatch)


@pytest.mark.parametrize(
    "kind", ["decode", *(pytest.param(x, marks=pytest.mark.slow) for x in ("forward", "backward"))]
)
def test_a_case_takes_two_seconds_at_most(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert largest(kind, monkeypatch) < 2.0


# -- once in a process

USE = Use("triton", "forward", SPEC, ())
GOOD, BAD = Verdict("out", 1e-3, 2e-3, True), Verdict("out", 0.5, 2e-3, False)


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> list[Use]:
    """The cases run so far; each passes."""
    ran: list[Use] = []
    monkeypatch.setattr(first_use, "proof", lambda use: ran.append(use) or [GOOD])
    return ran


def again(use: Use = USE) -> str | None:
    """As in another process."""
    why_wrong.cache_clear()
    return why_wrong(use)


def test_a_case_that_has_passed_is_not_run_again(cases: list[Use]) -> None:
    assert why_wrong(USE) is None and why_wrong(USE) is None and cases == [USE]
    why_wrong(Use("triton", "forward", SPEC, ("causal",)))
    assert len(cases) == 2


def test_a_case_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "proof", lambda use: [GOOD, BAD])
    reason = again()
    assert reason is not None and str(BAD) in reason and str(GOOD) not in reason


def test_a_full_gpu_is_no_fault_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(use: Use) -> list[Verdict]:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(first_use, "proof", full)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        again()
    assert "RING_ATTN_FIRST_USE=off" in caught.value.__notes__[0]


def test_a_case_that_does_not_end_is_logged_with_its_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a kernel that hangs, which no thread can end."""
    texts, logged = list[str](), threading.Event()

    def hangs(use: Use) -> list[Verdict]:
        assert logged.wait(60)
        return [GOOD]

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())
            logged.set()

    monkeypatch.setattr(first_use, "proof", hangs)
    monkeypatch.setattr(first_use, "SLOW_S", 0.01)
    seen = Seen()
    first_use.logger.addHandler(seen)
    try:
        assert why_wrong(USE) is None
    finally:
        first_use.logger.removeHandler(seen)
    (text,) = texts
    assert str(USE) in text and f"process {os.getpid()}" in text


# -- proofs that passed, in files


def notes() -> list[Path]:
    """The files of proofs, and those that a broken write has left."""
    found = Path(os.environ["XDG_CACHE_HOME"]).rglob("*")
    return [path for path in found if path.is_file() and path.suffix != ".lock"]


def test_another_process_does_not_run_a_case_that_has_passed(cases: list[Use]) -> None:
    assert again() is None and again() is None
    assert cases == [USE] and len(notes()) == 1
    again(Use("triton", "forward", SPEC, ("causal",)))
    assert len(cases) == 2


@pytest.mark.parametrize("changed", ["gpu", "driver", "torch", "ring_attn", "configs", "sources"])
def test_what_a_proof_depends_on_needs_another_proof(
    changed: str, cases: list[Use], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver, configs, source = (tmp_path / name for name in ("version", "configs", "kernel.py"))
    for path in (driver, configs, source):
        path.write_text("1")
    monkeypatch.setattr(proofs, "DRIVER_FILES", (tmp_path / "none", driver))
    monkeypatch.setattr(proofs, "sources", lambda: iter([source]))
    monkeypatch.setenv("RING_ATTN_CONFIGS", str(configs))
    again()
    use = USE
    if changed == "gpu":
        use = Use(USE.backend, USE.kind, USE.spec, USE.masks, "H100, 132 multiprocessors")
    elif changed == "torch":
        monkeypatch.setattr(proofs, "installed_version", lambda name: "another")
    elif changed == "ring_attn":
        monkeypatch.setattr(proofs, "__version__", "another")
    else:
        {"driver": driver, "configs": configs, "sources": source}[changed].write_text("2")
    proofs.software.cache_clear()
    again(use)
    assert len(cases) == 2
    again(use)
    assert len(cases) == 2


def test_sources_are_those_of_the_kernels_too() -> None:
    """In a checkout their folder is a link, which Path.rglob would not enter."""
    names = {path.name for path in proofs.sources()}
    assert {"flash_fwd.py", "hopper_bwd.py", "first_use.py", "triton.py"} <= names


def test_a_case_that_fails_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "proof", lambda use: [GOOD, BAD])
    assert again() is not None and notes() == []


@pytest.mark.parametrize(
    "text",
    ["", '{"passed": ', "[]", "null", '{"passed": ["out"]}', '{"facts": {}, "passed": ["out"]}'],
)
def test_a_broken_file_costs_a_proof_and_is_mended(text: str, cases: list[Use]) -> None:
    again()
    (note,) = notes()
    whole = note.read_text()
    note.write_text(text)
    assert again() is None and len(cases) == 2
    assert note.read_text() == whole


def test_bytes_that_are_no_text_cost_a_proof(cases: list[Use]) -> None:
    again()
    notes()[0].write_bytes(b"\xff\xfe\x00")
    assert again() is None and len(cases) == 2


@pytest.mark.parametrize("broken", ["a file", "read-only", "full", "no home"])
def test_a_folder_that_cannot_be_written_costs_proofs_and_is_reported_once(
    broken: str, cases: list[Use], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    if broken == "a file":
        home.write_text("")
    elif broken == "read-only":  # root may write in any folder
        monkeypatch.setattr(Path, "mkdir", raising(PermissionError(13, "Permission denied")))
    elif broken == "full":
        monkeypatch.setattr(os, "replace", raising(OSError(28, "No space left on device")))
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert again() is None and again() is None
    assert len(cases) == 2
    (reported,) = [str(one.message) for one in caught]
    assert "XDG_CACHE_HOME" in reported and "RING_ATTN_FIRST_USE=always" in reported
    assert [path for path in notes() if path != home] == []


def raising(error: OSError) -> Callable[..., None]:
    def function(*_: object, **__: object) -> None:
        raise error

    return function


@pytest.mark.parametrize(("value", "runs"), [("always", 2), ("on", 1)])
def test_remembering_can_be_turned_off(
    value: str, runs: int, cases: list[Use], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RING_ATTN_FIRST_USE", value)
    again()
    again()
    assert len(cases) == runs and len(notes()) == (value == "on")


def prove_together(start: Any, path: Path) -> None:
    def proof(use: Use) -> list[Verdict]:
        with path.open("a") as file:
            file.write("proven\n")
        time.sleep(0.1)  # others find no file yet
        return [GOOD]

    first_use.proof = proof
    start.wait()
    assert why_wrong(USE) is None


def test_processes_that_start_together_prove_once(tmp_path: Path) -> None:
    fork, path = multiprocessing.get_context("fork"), tmp_path / "proven"
    start = fork.Barrier(3)
    processes = [fork.Process(target=prove_together, args=(start, path)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert path.read_text() == "proven\n"


@pytest.mark.parametrize("hangs", [True, False], ids=["a process that hangs", "no locks"])
def test_a_lock_that_is_not_to_be_had_costs_a_proof(
    hangs: bool, cases: list[Use], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "PATIENCE_S", 0.05)
    facts = proofs.facts_of(repr(USE), USE.gpu)
    if not hangs:
        monkeypatch.setattr(proofs.fcntl, "flock", raising(OSError(38, "Function not implemented")))
    with proofs.one_at_a_time(facts):
        assert again() is None
    assert cases == [USE] and proofs.has_passed(facts)


FACTS = {"use": "forward", "gpu": "H100"}


def remember_again_and_again() -> None:
    for _ in range(60):
        proofs.remember(FACTS, 1000 * ["out"])


def test_two_processes_that_write_one_proof_leave_it_whole_at_every_moment() -> None:
    proofs.remember(FACTS, ["out"])
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=remember_again_and_again) for _ in range(2)]
    for writer in writers:
        writer.start()
    reads = 0
    while any(writer.is_alive() for writer in writers) or reads == 0:
        assert proofs.has_passed(FACTS)
        reads += 1
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert len(notes()) == 1


# -- the choice

CUDA = AttentionSpec("cuda", torch.bfloat16, 1, 8, 4, 128, 128)
TRAINING = Purpose(backward=True, causal=True)


def has_many_heads(self: TritonBackend, spec: AttentionSpec, kv_rows: int | None = None) -> bool:
    return spec.nheads_kv > 3


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Simulates an H100; holds the backends that are wrong on it, and why."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    properties = SimpleNamespace(name="H100", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(TritonBackend, "in_one_pass", has_many_heads)
    gluon_missing()  # imports Gluon, which it cannot without the variable: kernels are interpreted
    monkeypatch.delenv("TRITON_INTERPRET")
    reasons: dict[str, str] = {}
    monkeypatch.setattr(first_use, "why_wrong", lambda use: reasons.get(use.backend))
    return reasons


def test_auto_takes_the_next_backend_and_says_so_once(wrong: dict[str, str]) -> None:
    assert proven_backend(CUDA, "auto", TRAINING).name == "triton"
    proven_backend.cache_clear()
    wrong["triton"] = "dq: error 0.3"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        choice = proven_backend(CUDA, "auto", TRAINING)
        for same_bits in (False, None):
            proven_backend(CUDA, "auto", TRAINING._replace(same_bits=same_bits))
    assert choice.name not in ("triton", "reference")
    assert choice.reasons["triton"] == "dq: error 0.3"
    texts = [str(one.message) for one in caught]
    assert len(set(texts)) == len(texts) and all("dq: error 0.3" in text for text in texts)
    assert choice.name in texts[0]


def test_a_named_backend_that_is_wrong_raises(wrong: dict[str, str]) -> None:
    wrong["triton"] = "dq: error 0.3"
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="dq: error 0.3"):
            proven_backend(CUDA, "triton", TRAINING)


def test_the_reference_is_left_if_all_are_wrong(wrong: dict[str, str]) -> None:
    wrong |= dict.fromkeys(backends.PREFERENCE, "wrong")
    with pytest.warns(UserWarning, match="takes 'reference' here"):
        assert proven_backend(CUDA, "auto", TRAINING).name == "reference"


def test_off_checks_nothing(wrong: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong["triton"] = "wrong"
    monkeypatch.setenv("RING_ATTN_FIRST_USE", "off")
    assert proven_backend(CUDA, "auto", TRAINING).name == "triton"
    monkeypatch.setenv("RING_ATTN_FIRST_USE", "never")
    proven_backend.cache_clear()
    with pytest.raises(ValueError, match="RING_ATTN_FIRST_USE"):
        proven_backend(CUDA, "auto", TRAINING)


def test_few_heads_are_proven_apart_where_they_have_another_kernel(wrong: dict[str, str]) -> None:
    heads = [(use.kind, use.spec.nheads_kv) for use in uses("triton", CUDA, TRAINING)]
    assert heads == [("forward", 4), ("backward", 4), ("backward", 1)]
    assert [use.kind for use in uses("triton", CUDA, Purpose(decoding=True))] == ["decode"]


def test_calls_of_few_heads_also_prove_the_kernel_of_many(wrong: dict[str, str]) -> None:
    few = replace(CUDA, nheads_kv=2)
    for same_bits, expected in ((None, [2, 4]), (False, [2, 4]), (True, [2])):
        purpose = TRAINING._replace(same_bits=same_bits)
        cases = [use for use in uses("triton", few, purpose) if use.kind == "backward"]
        assert [use.spec.nheads_kv for use in cases] == expected


@pytest.fixture
def gpus(wrong: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Two H100 and an A100; the last number is torch's current device."""
    current, models = [0], [("H100", 132, 9), ("H100", 132, 9), ("A100", 108, 8)]
    properties = [SimpleNamespace(name=x, multi_processor_count=sms) for x, sms, _ in models]
    index = lambda *given: given[0] if given else current[-1]  # noqa: E731
    for name, value in {
        "current_device": lambda: current[-1],
        "get_device_properties": lambda *given: properties[index(*given)],
        "get_device_capability": lambda *given: (models[index(*given)][2], 0),
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    base.model_of_gpu.cache_clear()
    yield current
    base.model_of_gpu.cache_clear()


def test_each_model_of_gpu_has_its_cases_and_its_choice(
    gpus: list[int], cases: list[Use], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_use, "why_wrong", why_wrong)
    purpose, chosen = TRAINING._replace(same_bits=False), list[str]()
    for device in (0, 1, 2, 0):
        gpus.append(device)
        chosen.append(proven_backend(CUDA, "auto", purpose).name)
    assert chosen == ["cudnn", "cudnn", "aten", "cudnn"]
    models = [use.gpu.partition(",")[0] for use in cases]
    assert models == ["H100", "H100", "A100", "A100"]  # forward and backward of each
    assert len(set(cases)) == 4


# -- a CUDA context that is lost

ILLEGAL = "an illegal memory access was encountered"


class Context:
    """Emulates a GPU on which kernels may fail, and whose errors `synchronize` raises.

    `happens` is called in the proof of Triton's kernels; other backends are right.
    """

    def __init__(self, happens: Callable[[Context], list[Verdict]]) -> None:
        self.happens = happens
        self.dead = False
        self.pending: RuntimeError | None = None  # an error that is raised once
        self.proven: list[str] = []

    def synchronize(self) -> None:
        if self.dead:
            raise torch.AcceleratorError(f"CUDA error: {ILLEGAL}")
        if self.pending is not None:
            error, self.pending = self.pending, None
            raise error

    def proof(self, use: Use) -> list[Verdict]:
        self.proven.append(use.backend)
        return self.happens(self) if use.backend == "triton" else [GOOD]


def dies(context: Context) -> list[Verdict]:
    context.dead = True
    raise RuntimeError(f"Triton Error [CUDA]: {ILLEGAL}")


def dies_unnoticed(context: Context) -> list[Verdict]:
    context.dead = True
    return [GOOD]


def dies_with_wrong_results(context: Context) -> list[Verdict]:
    context.dead = True
    return [BAD]


def does_not_launch(context: Context) -> list[Verdict]:
    context.pending = torch.AcceleratorError("CUDA error: invalid configuration argument")
    raise RuntimeError("Triton Error [CUDA]: out of resources")


def does_not_compile(context: Context) -> list[Verdict]:
    raise RuntimeError("CompilationError")


@pytest.fixture
def context_in_which(
    wrong: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[Context], list[Verdict]]], Context]:
    """Makes a context in which something happens to Triton's kernels."""

    def make(happens: Callable[[Context], list[Verdict]]) -> Context:
        context = Context(happens)
        monkeypatch.setattr(first_use, "why_wrong", why_wrong)
        monkeypatch.setattr(first_use, "proof", context.proof)
        monkeypatch.setattr(torch.cuda, "synchronize", context.synchronize)
        return context

    return make


@pytest.mark.parametrize("happens", [dies, dies_unnoticed, dies_with_wrong_results])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_no_backend_is_tried_after_a_context_is_lost(
    backend: str, happens: Callable[[Context], list[Verdict]], context_in_which: Any
) -> None:
    context = context_in_which(happens)
    with pytest.raises(torch.AcceleratorError, match=ILLEGAL) as caught:
        proven_backend(CUDA, backend, TRAINING)
    assert context.proven == ["triton"] and notes() == []
    (note,) = caught.value.__notes__
    for words in ("by the first use of forward of triton", "H100", "end the process"):
        assert words in note
    cause = caught.value.__cause__
    assert (happens is dies) == (cause is not None and "Triton Error" in str(cause))
    # A call after that does not try another backend either, and blames no kernel of its own.
    with pytest.raises(torch.AcceleratorError) as again:
        proven_backend(CUDA, "auto", TRAINING)
    assert "before the first use of" in again.value.__notes__[0] and len(context.proven) == 1


@pytest.mark.parametrize("happens", [does_not_launch, does_not_compile])
def test_auto_takes_the_next_backend_where_the_context_is_alive(
    happens: Callable[[Context], list[Verdict]], context_in_which: Any
) -> None:
    context = context_in_which(happens)
    with pytest.warns(UserWarning, match="the first use failed .forward of triton"):
        choice = proven_backend(CUDA, "auto", TRAINING)
    assert choice.name not in ("triton", "reference")
    assert set(context.proven) == {"triton", choice.name}
    assert all(choice.name in note.read_text() for note in notes())


def test_an_error_of_earlier_kernels_is_not_blamed_on_a_first_use(context_in_which: Any) -> None:
    context = context_in_which(dies)
    context.dead = True
    with pytest.raises(torch.AcceleratorError) as caught:
        proven_backend(CUDA, "auto", TRAINING)
    assert "before the first use of" in caught.value.__notes__[0] and context.proven == []


def test_nothing_is_run_on_a_cpu(cases: list[Use]) -> None:
    assert proven_backend(SPEC, "triton", CAUSAL).name == "triton" and cases == []
