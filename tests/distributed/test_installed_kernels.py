"""The calls of fla's, mamba-ssm's and causal-conv1d's functions, where transformers finds them.

None of these runs without a GPU. Their stand-ins have the parameters and the peculiarities of the
public functions, and compute by transformers' torch code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from ring_attn import SequenceLayout, unshard
from ring_attn.models import recurrent
from ring_attn.models.recurrent import SPLITS, Place
from ring_attn.testing import noisy_runs
from tests.bounds import assert_close
from tests.distributed.pool import on_ranks
from tests.hf_models import all_in_float64

SEQLEN, HEADS, DIM, STATE = 83, 4, 8, 6


class Kernel(NamedTuple):
    """A function of a model of transformers, and the public one by which it is replaced."""

    model: str
    function: str
    package: str
    public: str
    stand_in: Callable[[Any], Callable[..., Any]]
    inputs: Callable[[], dict[str, Any]]
    dtype: torch.dtype = torch.float32


def of_fla(torch_function: Any) -> Callable[..., Any]:
    def chunk(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        assert q.dtype == k.dtype == v.dtype != torch.float32, "fla takes 16 bits only"
        assert initial_state is None or initial_state.dtype == torch.float32
        assert scale is None and cu_seqlens is None
        options = {"initial_state": initial_state, "output_final_state": output_final_state}
        options |= {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        out: tuple[Tensor, Tensor | None] = torch_function(q, k, v, g=g, beta=beta, **options)
        return out

    return chunk


def scan_of_mamba2(torch_function: Any) -> Callable[..., Any]:
    def mamba_chunk_scan_combined(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
    ) -> Any:
        assert z is None and seq_idx is None and cu_seqlens is None and initial_states is None
        return torch_function(
            x,
            dt,
            A,
            B,
            C,
            chunk_size,
            D=D,
            dt_bias=dt_bias,
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
            return_final_states=return_final_states,
        )

    return mamba_chunk_scan_combined


def scan_of_mamba1(torch_function: Any) -> Callable[..., Any]:
    def selective_scan_fn(
        u: Tensor,
        delta: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
    ) -> Any:
        """Its text: the gradient of the last state is not considered in the backward pass."""
        options = {"D": D, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
        out, end = torch_function(u, delta, A, B, C, return_last_state=True, **options)
        assert z is None
        return (out, end.detach()) if return_last_state else out

    return selective_scan_fn


def convolution(torch_function: Any) -> Callable[..., Any]:
    def causal_conv1d_fn(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        seq_idx: Tensor | None = None,
        initial_states: Tensor | None = None,
        return_final_states: bool = False,
        final_states_out: Tensor | None = None,
        activation: str | None = None,
    ) -> Any:
        assert seq_idx is None and initial_states is None and not return_final_states
        return torch_function(x, weight, bias, activation=activation)

    return causal_conv1d_fn


def rows(*shape: int) -> Tensor:
    return torch.randn(2, SEQLEN, *shape)


def of_delta(*channels: int) -> dict[str, Any]:
    x = {name: rows(HEADS, DIM) for name in ("query", "key", "value")}
    return x | {"g": -rows(HEADS, *channels).abs(), "beta": rows(HEADS).sigmoid()}


def of_mamba1() -> dict[str, Any]:
    x = {name: rows(n).mT for name, n in {"hidden_states": DIM, "dt": DIM, "B": STATE}.items()}
    return x | {"C": rows(STATE).mT}


def of_mamba2() -> dict[str, Any]:
    x = {"hidden_states": rows(HEADS, DIM), "dt": rows(HEADS)}
    return x | {"B": rows(2, STATE), "C": rows(2, STATE)}


# Arguments that have no rows.
FIXED: dict[str, dict[str, Any]] = {
    "causal_conv1d_fn": {"weight": torch.ones(DIM, 4), "activation": "silu"},
    "mamba_selective_scan": {
        "A": -torch.arange(1, DIM * STATE + 1).view(DIM, STATE) / 50,
        "D": torch.ones(DIM),
        "delta_bias": torch.ones(DIM) / 3,
        "delta_softplus": True,
    },
    "mamba2_chunk_scan": {"A": -torch.arange(1, HEADS + 1) / 9, "chunk_size": 16, "dt_softplus": 1},
    "torch_chunk_gated_delta_rule": {"use_qk_l2norm_in_kernel": True},
    "chunk_kimi_delta_attention": {"use_qk_l2norm_in_kernel": True},
}
KERNELS = {
    "gated delta rule": Kernel(
        "qwen3_next",
        "torch_chunk_gated_delta_rule",
        "fla",
        "ops.gated_delta_rule.chunk_gated_delta_rule",
        of_fla,
        of_delta,
        torch.bfloat16,
    ),
    "Kimi's": Kernel(
        "kimi_linear",
        "chunk_kimi_delta_attention",
        "fla",
        "ops.kda.chunk_kda",
        of_fla,
        lambda: of_delta(DIM),
        torch.bfloat16,
    ),
    "Mamba 2": Kernel(
        "mamba2",
        "mamba2_chunk_scan",
        "mamba_ssm",
        "ops.triton.ssd_combined.mamba_chunk_scan_combined",
        scan_of_mamba2,
        of_mamba2,
    ),
    "Mamba 1": Kernel(
        "falcon_mamba",
        "mamba_selective_scan",
        "mamba_ssm",
        "ops.selective_scan_interface.selective_scan_fn",
        scan_of_mamba1,
        of_mamba1,
    ),
    "convolution": Kernel(
        "lfm2",
        "causal_conv1d_fn",
        "causal_conv1d",
        "causal_conv1d_fn",
        convolution,
        lambda: {"hidden_states": rows(DIM).mT},
    ),
}


def package(path: str, function: Callable[..., Any]) -> Any:
    """A package that has the function at a path of names."""
    module = ModuleType(path)
    first, _, rest = path.partition(".")
    setattr(module, first, package(rest, function) if rest else function)
    return module


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=pytest.mark.slow if x in ("Kimi's", "Mamba 1") else ())
        for x in KERNELS
    ],
)
@on_ranks(2)
def test_public_functions_are_called_as_they_are(name: str) -> None:
    kernel, rank = KERNELS[name], dist.get_rank()
    home = import_module(f"transformers.models.{kernel.model}.modeling_{kernel.model}")
    torch_function = inspect.unwrap(getattr(home, kernel.function))
    stand_in = mock.Mock(wraps=kernel.stand_in(torch_function))
    stand_in.__signature__ = inspect.signature(kernel.stand_in(torch_function))
    found = {kernel.package: package(kernel.public, stand_in)}
    with mock.patch.dict("sys.modules", found):
        public = kernel.public.rpartition(".")[2]
        function = use_kernel_func_from_hub_with_fallback(public, kernel.package)(torch_function)
    torch.manual_seed(0)
    layout, fixed = SequenceLayout.zigzag(SEQLEN, 2), FIXED[kernel.function]
    x = {
        name: t.to(t.dtype if name == "g" else kernel.dtype) for name, t in kernel.inputs().items()
    }
    dim = 2 if kernel.function in ("causal_conv1d_fn", "mamba_selective_scan") else 1
    dout: Any = None

    def results(call: Callable[..., Any], given: dict[str, Any], of_rank: bool) -> list[Tensor]:
        nonlocal dout
        leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
        out = call(**leaves, **fixed)
        out = out[0] if isinstance(out, tuple) else out
        if dout is None:
            dout = torch.randn(out.shape)
        part = (layout.shard(dout, rank, dim) if of_rank else dout).to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), part)]

    noisy = noisy_runs(lambda: results(torch_function, x, False))
    with all_in_float64():
        wide = {name: t.double() if isinstance(t, Tensor) else t for name, t in fixed.items()}
        with mock.patch.dict(fixed, wide):
            oracle = results(torch_function, {name: t.double() for name, t in x.items()}, False)
    assert dist.group.WORLD is not None
    place, own = (
        Place(layout, None, dist.group.WORLD),
        {n: layout.shard(t, rank, dim) for n, t in x.items()},
    )
    with mock.patch.object(recurrent, "HAS_FLA", kernel.package == "fla"):
        got = results(lambda **given: SPLITS[kernel.function](function, place, **given), own, True)
    assert stand_in.called
    for what, result, exact, *runs in zip(("out", *x), got, oracle, *noisy, strict=True):
        assert_close(what, unshard(result.contiguous(), layout, dim=dim), exact, runs)
