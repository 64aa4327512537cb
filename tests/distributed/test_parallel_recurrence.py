"""RecurrentParallel on modules of one's own: outputs and gradients of the module on the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from transformers import MiniMaxConfig
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.qwen3_next.modeling_qwen3_next import (
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
)

from ring_attn import RecurrentParallel, SequenceLayout, parallelize, register_recurrence
from ring_attn.models.recurrent import SPLITS
from ring_attn.testing import noisy_runs
from tests.bounds import assert_close, named
from tests.distributed.pool import Pools, mesh_of, on_ranks
from tests.hf_models import all_in_float64
from tests.recurrences import split_sums, sums_of_rows
from tests.refusals import refused

pytestmark = pytest.mark.gloo

DIM, HEADS, HEADDIM, WIDTH, SEQLEN = 24, 3, 8, 4, 53
DOCUMENTS = (11, 1, 20, 21)


class DeltaNet(nn.Module):
    """A convolution and a gated delta rule, in a method beside the forward."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * HEADS * HEADDIM, bias=False)
        self.gates = nn.Linear(DIM, 2 * HEADS)
        self.weight = nn.Parameter(torch.randn(3 * HEADS * HEADDIM, WIDTH))
        self.options = options

    def forward(self, x: Tensor, *, times: float = 1.0) -> Tensor:
        return self.mixed(times * x).flatten(2)

    def mixed(self, x: Tensor) -> Tensor:
        qkv = causal_conv1d_fn(self.qkv(x).mT, self.weight, activation="silu").mT
        q, k, v = (rows.unflatten(-1, (HEADS, HEADDIM)) for rows in qkv.chunk(3, -1))
        g, beta = self.gates(x).chunk(2, -1)
        options = {"use_qk_l2norm_in_kernel": True} | self.options
        g, beta = -functional.softplus(g), beta.sigmoid()
        return torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, **options)[0]


class StateSpace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(DIM, 4 * HEADDIM + 2 * 6 + 4)
        self.log_decay, self.skip = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, b, c, dt = self.rows(x).split([4 * HEADDIM, 6, 6, 4], -1)
        return mamba2_chunk_scan(
            rows.unflatten(-1, (4, HEADDIM)),
            dt,
            -self.log_decay.exp(),
            b[:, :, None],
            c[:, :, None],
            chunk_size=16,
            D=self.skip,
            dt_softplus=True,
        ).flatten(2)


class SumOfDeltaNet(nn.Module):
    """A recurrence of one's own, after a module that is split by another style."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = DeltaNet()

    def forward(self, x: Tensor) -> Tensor:
        return sums_of_rows(self.inner(x))


class Lightning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": DIM, "num_attention_heads": HEADS, "head_dim": HEADDIM}
        config = MiniMaxConfig(**sizes, num_hidden_layers=1, block_size=8)
        self.inner = MiniMaxLightningAttention(config, 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, None, None)[0]


DELTA = ["causal_conv1d_fn", "torch_chunk_gated_delta_rule"]
KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "delta rule": (DeltaNet, {"": DELTA}),
    "state space": (StateSpace, {"": ["mamba2_chunk_scan"]}),
    "one's own, around another": (SumOfDeltaNet, {"": ["sums_of_rows"], "inner": DELTA}),
    "a whole module": (Lightning, {"inner": ["MiniMaxLightningAttention"]}),
}


class How(NamedTuple):
    kind: str
    world_size: int
    layout: str
    documents: tuple[int, ...] = (SEQLEN,)


def make(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return KINDS[kind][0](), torch.randn(2, SEQLEN, DIM)


def results(module: nn.Module, x: Tensor, layout: SequenceLayout, rank: int, cuts: Any) -> Any:
    """This rank's outputs; gradients of its rows, and of all parameters."""
    rows = layout.shard(x, rank).requires_grad_()
    out = torch.cat([module(part) for part in rows.split_with_sizes(cuts, 1)], 1)
    torch.manual_seed(1)
    dout = layout.shard(torch.randn(2, SEQLEN, out.size(2)).to(out.dtype), rank)
    out.backward(dout)
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {"out": out.detach(), "rows": rows.grad} | gradients


def on_ranks_of(how: How) -> Any:
    module, x = make(how.kind)
    layout = SequenceLayout.from_name(how.layout, SEQLEN, how.world_size)
    cuts = torch.tensor([0, *accumulate(how.documents)])
    with mock.patch.dict(SPLITS):
        register_recurrence("sums_of_rows", split_sums)
        plan = {
            key: RecurrentParallel(functions=functions, layout=layout, cu_seqlens=lambda _: cuts)
            for key, functions in KINDS[how.kind][1].items()
        }
        parallelize(module, mesh_of(how.world_size), plan)
        rank = dist.get_rank()
        found = results(module, x, layout, rank, [layout.shard_len(rank)])
    for name, gradient in found.items():
        if name not in ("out", "rows"):
            dist.all_reduce(gradient)
    return found


@pytest.mark.parametrize(
    "how",
    [
        *(How(kind, n, x) for kind in KINDS for n, x in ((2, "zigzag"), (3, "contiguous"))),
        How("delta rule", 3, "zigzag", DOCUMENTS),
        How("state space", 2, "contiguous", DOCUMENTS),
    ],
    ids=lambda how: "-".join(map(str, how)),
)
def test_results_are_those_of_the_module_alone(ranks: Pools, how: How) -> None:
    module, x = make(how.kind)
    whole = SequenceLayout.contiguous(SEQLEN, 1)
    noisy = noisy_runs(lambda: results(copy.deepcopy(module), x, whole, 0, how.documents))
    with all_in_float64():
        oracle = results(module.double(), x.double(), whole, 0, how.documents)
    layout = SequenceLayout.from_name(how.layout, SEQLEN, how.world_size)
    for rank, found in enumerate(ranks(how.world_size).run(on_ranks_of, how)):
        for name, got in found.items():
            of_rank = partial(layout.shard, rank=rank) if name in ("out", "rows") else lambda x: x
            runs = [of_rank(run) for run in named(noisy, name)]
            assert_close(name, got, of_rank(oracle[name]), runs)


def rows_of(world_size: int = 2) -> Tensor:
    return torch.randn(1, 8 // world_size, DIM)


@on_ranks(2)
def test_what_does_not_fit_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))  # of its own, as refusals leave a group behind
    rows = rows_of()

    def split(module: nn.Module, *functions: str) -> nn.Module:
        return parallelize(module, mesh, RecurrentParallel(functions=functions))

    with refused(ValueError, "register_recurrence|scan_of_rows"):
        split(DeltaNet(), "scan_of_rows")
    with refused(ValueError, "Python file|mamba_selective_scan"):
        split(DeltaNet(), "mamba_selective_scan")
    with refused(ValueError, "already"):
        split(split(DeltaNet(), *DELTA), *DELTA)
    with refused(NotImplementedError, "did not call|mamba2_chunk_scan"):
        split(DeltaNet(), *DELTA, "mamba2_chunk_scan")(rows)
    with refused(NotImplementedError, "initial_state"):
        state = torch.zeros(1, HEADS, HEADDIM, HEADDIM)
        split(DeltaNet(initial_state=state), *DELTA)(rows)
    with refused(TypeError, "plain tensor|DTensor"):
        split(DeltaNet(), *DELTA)(DTensor.from_local(rows, mesh, [Shard(1)]))
    with refused(NotImplementedError, "not compiled"):
        module = split(DeltaNet(), *DELTA)
        module.compile(backend="eager")
        module(rows)
    torch.compiler.reset()
    with pytest.raises(TypeError, match="layout"):
        RecurrentParallel(functions=DELTA, layout=3)  # type: ignore[arg-type]
    out = split(DeltaNet(), *DELTA)(rows)  # after an error a module elsewhere is whole again
    assert out.shape == (1, 4, HEADS * HEADDIM)
    assert DeltaNet()(rows).shape == out.shape
