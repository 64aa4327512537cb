"""The first use of kernels: right ones pass, planted faults are refused, and notes are kept."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ring_attn import backends, first_use
from ring_attn.backends import Purpose, base, choose_backend
from ring_attn.backends.triton import TritonBackend
from ring_attn.core.oracle import Verdict
from ring_attn.core.spec import AttentionSpec
from ring_attn.first_use import Use, proof, proven_backend, uses, why_wrong
from ring_attn.kernels import decode, flash_fwd, step_table
from ring_attn.kernels.gluon_guard import gluon_missing
from tests.kernels.test_aot import run_compiling

SPEC = AttentionSpec("cpu", torch.float16, 1, 2, 1, 16, 16)
CAUSAL = Purpose(causal=True)


@pytest.fixture(autouse=True)
def unused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing has been used before."""
    monkeypatch.setenv("RING_ATTN_FIRST_USE", "on")
    functions = proven_backend, why_wrong, first_use._warn, choose_backend
    for function in functions:
        function.cache_clear()
    yield
    for function in functions:
        function.cache_clear()


# -- cases, in Triton's interpreter

MASKS = ((), ("causal",), ("causal", "window"), ("causal", "several", "ragged"))
USES = [
    Use("triton", kind, SPEC, masks)
    for kind in ("forward", "backward")
    for masks in MASKS
] + [Use("triton", "decode", SPEC, masks) for masks in ((), ("several",))]  # fmt: skip


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
        TritonBackend, "gradient_factor", lambda self, scores: 1.01 * scores.softmax_scale,
        "backward", ("causal", "several", "ragged"), "dq dk",
    ),
    "last part": (
        decode, "merge_parts_launch", lambda *args: MERGED(*args[:-1], args[-1] - 1),
        "decode", (), "out lse",
    ),
    "pages": (
        decode, "decode_launch", lambda *args, **options: LAUNCH(
            *args[:3], torch.zeros_like(args[3]), *args[4:], **options
        ),
        "decode", ("several",), "out lse",
    ),
}  # fmt: skip


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


@pytest.mark.timeout(180)
def test_kernels_that_do_not_compile_or_compute_nothing() -> None:
    run_compiling("-m", "tests.kernels.first_uses")


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


@pytest.mark.parametrize("kind", ["forward", "backward", "decode"])
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


def test_a_case_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
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


# -- the choice

CUDA = AttentionSpec("cuda", torch.bfloat16, 1, 8, 4, 128, 128)
TRAINING = Purpose(backward=True, causal=True)


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Simulates an H100; holds the backends that are wrong on it, and why."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    properties = SimpleNamespace(name="H100", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(TritonBackend, "in_one_pass", lambda self, spec: spec.nheads_kv > 3)
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
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    base._model.cache_clear()
    yield current
    base._model.cache_clear()


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


def test_nothing_is_run_on_a_cpu(cases: list[Use]) -> None:
    assert proven_backend(SPEC, "triton", CAUSAL).name == "triton" and cases == []
