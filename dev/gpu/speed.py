"""Speed of attention on one device, one implementation a cell.

Ours is compared with the oracle before it is timed.
"""

from __future__ import annotations

from importlib import import_module

import torch

from dev.gpu import device
from dev.gpu.cells import Figures, NotHere
from dev.gpu.device import Compilations
from ring_attn.backends import get_backend
from ring_attn.backends.triton import TritonBackend
from ring_attn.bench.implementations import Implementation, Ours, Shape
from ring_attn.bench.judge import OracleJudge
from ring_attn.bench.peers import PEERS
from ring_attn.bench.timing import STAGES, TimedCall, Watch, quantiles, time_in_turn
from ring_attn.kernels import configs
from ring_attn.testing import Inputs
from tests.kernels.calls import frozen

ITERS, SECONDS = 15, 2.5
TRIAL_ROWS, TRIAL_HEADS, TRIAL_DIM = 64, (4, 2), 16

# Compared with the oracle before they are timed.
OURS = ("ours", "portable")
SDPA = {"cudnn": "cudnn", "torch flash": "torch-flash"}


class Fa3(Implementation):
    """FlashAttention 3 of the package fa3-fwd, which has only the forward."""

    def __init__(self, problem: Shape, data: Inputs) -> None:
        try:
            module = import_module("fa3_fwd_interface")
        except ImportError as error:
            raise NotHere(f"fa3-fwd is not there: {error}") from None
        self._function, self._problem, self._data = module.flash_attn_func, problem, data

    def forward(self) -> None:
        q, k, v, _ = self._data
        with torch.no_grad():
            found = self._function(q, k, v, causal=self._problem.causal)
        self.out = found[0] if isinstance(found, tuple) else found


def make(name: str, problem: Shape, data: Inputs) -> Implementation:
    if name in SDPA:
        device.need_cuda(f"{name} runs on CUDA")
        return PEERS[SDPA[name]].make(problem, data, backward=True)
    if name == "FlashAttention 3":
        device.need_cuda("FlashAttention 3 runs on CUDA")
        return Fa3(problem, data)
    if name == "portable":
        device.need_cuda("the portable kernels, which the interpreter runs in minutes")
        architecture = configs.architecture(problem.device)
        return Ours(problem, data, TritonBackend(frozen(architecture, problem.head_dim)))
    # In a trial the interpreter would take minutes.
    return Ours(problem, data, get_backend("aten" if device.is_trial() else "triton"))


def measure(name: str, rows: int, heads: int, kv_heads: int, dim: int, mask: str) -> Figures:
    """Time forward and backward; return milliseconds and TFLOP/s of each, and error / bound."""
    problem = problem_of(rows, heads, kv_heads, dim, mask)
    figures: Figures = {"implementation": name, "mask": mask, "rows": rows, "dim": dim}
    figures["heads"] = [heads, kv_heads]
    if name in OURS:
        ratio, wrong = OracleJudge(problem).verdict(lambda *given: make(name, *given))
        figures["error / bound"] = round(ratio, 3)
        if wrong:
            raise AssertionError(wrong)
    attention = make(name, problem, problem.data())
    stages = [attention.forward, attention.backward]
    if name == "FlashAttention 3":
        del stages[1:]
    call = TimedCall(stages, attention.release)
    with Compilations() as compilations:
        samples = time_in_turn(
            {name: call}, Watch(problem.device), ITERS, seconds=SECONDS, failed=_raise
        )[name]
    for mode, part in STAGES.items():
        if part.stop <= len(stages):
            p20, ms, p80 = quantiles([sum(one.ms[part]) for one in samples])
            figures[f"{mode}_ms"] = [round(x, 4) for x in (p20, ms, p80)]
            figures[f"{mode}_TFLOPs"] = float(f"{problem.flops(mode) * 1e-9 / ms:.4g}")
    host = quantiles([one.host_ms for one in samples])[1]
    return figures | {"host_ms": round(host, 4)} | compilations.figures


def problem_of(rows: int, heads: int, kv_heads: int, dim: int, mask: str) -> Shape:
    """The problem, whose sizes are small in a trial."""
    if device.is_trial():
        rows, (heads, kv_heads), dim = TRIAL_ROWS, TRIAL_HEADS, TRIAL_DIM
    dtype = torch.float32 if device.is_trial() else torch.bfloat16
    where = torch.device(device.where())
    return Shape(1, rows, heads, kv_heads, dim, mask == "causal", dtype, where)


def _raise(name: str, error: Exception) -> None:
    """An error of ours is a failure; another implementation may not take a problem."""
    if name in OURS:
        raise error
    raise NotHere(f"{name}: {type(error).__name__}: {error}") from error
