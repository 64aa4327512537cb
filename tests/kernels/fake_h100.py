"""A plugin of pytest: test_gpu.py on an H100 that does not exist, as far as it goes without one.

    python -m pytest -p tests.kernels.fake_h100 -m gpu tests/kernels/test_gpu.py

Tensors are in the CPU's memory and say that they are on CUDA. Plans, refusals, choices of kernels,
step tables, launches and the shapes of results are real. No kernel is compiled or runs: a launch
fills its results with ones, and results are compared by their shapes. What the real run repeats a
hundred times, this one repeats twice.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.emulated_cuda import PretendCuda, TorchOnCuda
from tests.kernels.fake_torch import fake_torch

# As torch tells of it; with less memory than an H100 has, so that no test fills this machine.
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=40 << 30
)

# The results of all kernels, by the names of their arguments.
RESULTS = (
    "acc",
    "m",
    "l",
    "out",
    "lse",
    "minus_lse",
    "delta",
    "dq",
    "dk",
    "dv",
    "root_out",
    "root_lse",
)


class OnCuda(PretendCuda):
    """Also for devices that are given by name, and for pinned memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func == Tensor.get_device:
            return 0
        if func == Tensor.record_stream:
            return None
        args = tuple("cpu" if isinstance(x, str) and x == "cuda" else x for x in args)
        given = dict(kwargs or {})
        given.pop("pin_memory", None)
        if given.get("device") == "cuda":
            given["device"] = "cpu"
        return super().__torch_function__(func, types, args, given)


def fill(launch: Any) -> None:
    """Stands for a launch, whose arguments are as the kernel's signature has them."""
    given = {**launch.args, **launch.constants}
    assert set(given) == set(launch.kernel.arg_names)
    for name in RESULTS:
        x = given.get(f"{name}_ptr")
        if x is not None:
            x.fill_(1.0)


def alike(got: Any, oracle: Any, *_: object) -> None:
    """Compares results by their shapes."""
    named = got if isinstance(got, dict) else vars(got)
    for name, x in named.items():
        if isinstance(x, Tensor):
            assert x.shape == getattr(oracle, name).shape and bool(x.isfinite().all()), name


def shapes(inputs: Any, *_: object, **__: object) -> tuple[Any, Any]:
    """Results of the right shapes, in the place of float64's and of plain PyTorch's."""
    q, k, v, dout = inputs
    lse = torch.ones(q.size(0), q.size(2), q.size(1))
    of_shape = SimpleNamespace(out=dout, lse=lse, dq=q, dk=k, dv=v, dsinks=None)
    return of_shape, of_shape


def pretend(stack: ExitStack) -> None:
    """Puts an H100 into torch, and ones in the place of kernels."""
    cuda = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: H100,
        "get_device_name": lambda *_: H100.name,
        "is_current_stream_capturing": lambda: False,
    }
    for name, value in cuda.items():
        stack.enter_context(mock.patch.object(torch.cuda, name, value))


def ones_like_attention(
    q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object
) -> tuple[Tensor, Tensor]:
    return q.new_ones(*q.shape[:3], v.size(3)), torch.ones(q.size(0), q.size(2), q.size(1))


def ones_like_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object
) -> list[Tensor]:
    return [torch.ones_like(x) for x in (q, k, v)]


_STACK = ExitStack()
pretend(_STACK)  # when pytest loads this file: before the tests' conftest asks for a GPU
os.environ["RING_ATTN_FIRST_USE"] = "off"  # results of ones are wrong


# What tests/kernels/test_gpu.py calls, by its names there.
INSTEAD = {"REPEATS": 2, "assert_holds": alike, "expect": shapes}


@pytest.fixture(autouse=True)
def fake(request: pytest.FixtureRequest) -> Iterator[None]:
    with faking(request.module, INSTEAD):
        yield


@contextmanager
def faking(module: ModuleType, instead: Mapping[str, Any]) -> Iterator[None]:
    """Pretend that tensors are on CUDA; within, the module has other values of some names."""
    from ring_attn.attention import operators
    from ring_attn.backends import aten
    from ring_attn.kernels.launch import Launch
    from ring_attn.testing import AllRanks
    from ring_attn.transport import streams
    from tests import emulated_cuda

    run_thread, run_backward = threading.Thread.run, operators.AttentionFunction.backward

    def run(thread: threading.Thread) -> None:
        with OnCuda():
            run_thread(thread)

    def backward(context: Any, *grads: Tensor | None) -> Any:
        """Autograd calls it outside of the mode."""
        with OnCuda():
            return run_backward(context, *grads)

    with pytest.MonkeyPatch.context() as monkeypatch, fake_torch(), OnCuda():
        monkeypatch.setattr(threading.Thread, "run", run)
        monkeypatch.setattr(Launch, "run", fill)
        monkeypatch.setattr(streams, "are_used", lambda device: False)
        # Within an operator of torch no tensor would say that it is on CUDA.
        monkeypatch.setattr(operators, "attention", operators.run_attention)
        monkeypatch.setattr(operators, "attention_backward", operators.run_attention_backward)
        monkeypatch.setattr(operators.AttentionFunction, "backward", staticmethod(backward))
        monkeypatch.setattr(aten, "aten", TorchOnCuda())
        monkeypatch.setattr(emulated_cuda, "dense_forward", ones_like_attention)
        monkeypatch.setattr(emulated_cuda, "dense_backward", ones_like_gradients)
        monkeypatch.setattr(AllRanks, "failures", [])
        monkeypatch.setattr(AllRanks, "verdicts", [SimpleNamespace(ratio=0.0)])
        for name, value in instead.items():
            monkeypatch.setattr(module, name, value)
        yield
