"""The names of flash-attn over gloo: shards of any layout in, dense attention's rows out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.integrations import flash_attn as names
from ring_attn.testing import Inputs, RankResult, Sent, poisoned_empty, random_qkv, whole_of
from tests.bounds import assert_holds, expect
from tests.cold import compile_cold
from tests.distributed.pool import on_ranks
from tests.refusals import refused

# Documents of queries and of keys, an empty one among them, and rows behind the last.
CU_Q, CU_K, ROWS = (0, 20, 20, 47), (0, 26, 30, 57), 53


@dataclass(frozen=True)
class Case:
    """One call: the function without `flash_attn` and `func`, and how tensors are given."""

    function: str = ""
    world_size: int = 2
    layout: str = "contiguous"
    causal: bool = True
    window: Any = (-1, -1)
    softcap: float = 0.0
    strategy: str = "ring"

    def __str__(self) -> str:
        return "-".join(str(x) for x in vars(self).values())

    @property
    def varlen(self) -> bool:
        return "varlen" in self.function

    @property
    def alike(self) -> bool:
        return "qkvpacked" in self.function

    def mask(self) -> Mask:
        window = tuple(int(n) for n in self.window)
        cu_q, cu_k = (CU_Q, CU_Q if self.alike else CU_K) if self.varlen else (None, None)
        seqlen_k = ROWS if self.alike or not self.varlen else CU_K[-1] + 3
        return Mask(ROWS, seqlen_k, self.causal, window, cu_q, cu_k)

    def inputs(self) -> Inputs:
        return random_qkv(
            batch=1 if self.varlen else 2, seqlen_q=ROWS, seqlen_k=self.mask().seqlen_k, nheads=4,
            nheads_kv=4 if self.alike else 2, headdim=16,
        )  # fmt: skip

    def layouts(self) -> tuple[SequenceLayout, SequenceLayout]:
        mask = self.mask()
        q, k = (
            SequenceLayout.from_name(self.layout, n, self.world_size)
            for n in (mask.seqlen_q, mask.seqlen_k)
        )
        return q, k


# Every function; of what they take each thing in some; one process takes padding with a name.
CASES = [
    Case(layout="zigzag", window=(numpy.int64(9), numpy.int32(4))),
    Case("kvpacked_", 3, "striped", causal=False, window=[5, 3]),
    Case("qkvpacked_", layout="zigzag", softcap=2.0),
    Case("varlen_", 3, "zigzag"),
    Case("varlen_", 1),
    Case("varlen_", causal=False, strategy="all_gather"),
    Case("varlen_kvpacked_", window=(7, 7)),
    Case("varlen_qkvpacked_", 3, "striped"),
    Case("varlen_qkvpacked_", 2, "zigzag", strategy="ulysses"),
]


def arguments_of(case: Case, q: Tensor, k: Tensor, v: Tensor) -> list[Any]:
    """By position, as far as `return_attn_probs`."""
    tensors = [q, k, v]
    if "kvpacked" in case.function:
        first = 0 if case.alike else 1
        tensors = [*tensors[:first], torch.stack(tensors[first:], -3)]
    cu_q, cu_k = (torch.tensor(cuts, dtype=torch.int32) for cuts in (CU_Q, CU_K))
    if case.varlen and case.alike:
        tensors += [cu_q, numpy.int64(27)]
    elif case.varlen:
        tensors += [cu_q, cu_k, 27, 40]
    return [*tensors, 0.0, None, case.causal, case.window, case.softcap, None, True, True]


def run_case(case: Case) -> RankResult:
    """This rank's results, as if there were a batch."""
    rank, (of_q, of_k) = dist.get_rank(), case.layouts()
    whole = case.inputs()
    shards = [of_q.shard(x, rank) for x in (whole.q, whole.dout)]
    shards[1:1] = [of_k.shard(x, rank) for x in (whole.k, whole.v)]
    if case.varlen:
        shards = [x[0] for x in shards]
    *leaves, dout = shards
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    layout: Any = case.layout if case.world_size == 1 else (of_q, of_k)
    function = getattr(names, f"flash_attn_{case.function}func")
    given = arguments_of(case, *leaves)
    with poisoned_empty():
        out, lse, nothing = function(*given, layout=layout, strategy=case.strategy)
        assert nothing is None
        alone = function(*given[:-1], layout=layout, strategy=case.strategy)
        assert isinstance(alone, Tensor) and alone.equal(out)
        grads = torch.autograd.grad(out, leaves, dout)
    found = (out.detach(), lse, *grads)
    tensors = tuple(x[None] for x in found) if case.varlen else found
    return RankResult(tensors, (Sent(0, 0), Sent(0, 0)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shards_give_rows_of_dense_attention(ranks: Any, one_thread: None, case: Case) -> None:
    of_q, of_k = case.layouts()
    got = whole_of(ranks(case.world_size).run(run_case, case), (of_q, of_k))
    assert_holds(got, *expect(case.inputs(), case.mask(), softcap=case.softcap))
    assert got.lse.dtype == torch.float32
    if case.varlen:
        assert got.out[:, CU_Q[-1] :].eq(0).all() and got.dq[:, CU_Q[-1] :].eq(0).all()
        end = (CU_Q if case.alike else CU_K)[-1]
        assert got.dk[:, end:].eq(0).all() and got.dv[:, end:].eq(0).all()
        assert got.lse[:, :, CU_Q[-1] :].eq(-torch.inf).all()


@on_ranks(2)
def test_refusals() -> None:
    """Arguments that are given and not honoured are refused on every rank."""
    x, cu = torch.randn(12, 2, 8), torch.tensor([0, 10, 24])
    good = (x, x, x, cu, cu, 14, 14)
    kv, varlen = torch.stack((x, x), 1), names.flash_attn_varlen_func
    calls: list[tuple[type[Exception], str, Any, tuple[Any, ...], dict[str, Any]]] = [
        (ValueError, "q must be (batch, rows, nheads|(12,", names.flash_attn_func, (x, x, x), {}),
        (ValueError, "k must be (rows, nheads|(1, 12", varlen, (x, x[None], *good[2:]), {}),
        (ValueError, "kv must be (rows, 2, nh", names.flash_attn_varlen_kvpacked_func,
         (x, x, *good[3:]), {}),
        (TypeError, "qkv must be float16|int64", names.flash_attn_qkvpacked_func, (kv.long(),), {}),
        (ValueError, "max_seqlen_k|at least|cu_seqlens_k|14|13", varlen, (*good[:6], 13), {}),
        (TypeError, "max_seqlen_q must be an int|None", varlen, (*good[:5], None, 14), {}),
        (TypeError, "cu_seqlens_k must be an int32|None", varlen, (*good[:4], None, 14, 14), {}),
        (ValueError, "cu_seqlens_q and cu_seqlens_k|2 and 1", varlen,
         (*good[:4], cu[:2], 14, 14), {}),
        (NotImplementedError, "block_table", varlen, good, {"block_table": cu}),
        (NotImplementedError, "dropout_p", varlen, (*good, 0.1), {}),
        (NotImplementedError, "alibi_slopes", varlen, good, {"alibi_slopes": x}),
        (ValueError, "padding|SequenceLayout", varlen, (x, x, x, cu[:2], cu[:2], 14, 14), {}),
        (TypeError, "flash_attn_varlen_func|zigzag", varlen, good, {"zigzag": True}),
    ]  # fmt: skip
    for kind, words, function, arguments, options in calls:
        with refused(kind, words):
            function(*arguments, **options)
    assert varlen(*good, causal=True).shape == x.shape


@on_ranks(2)
def test_functions_compile_whole() -> None:
    """With documents too: the bits of eager."""
    for case in (CASES[0], CASES[3]):
        case = replace(case, world_size=2)
        rank, (of_q, of_k) = dist.get_rank(), case.layouts()
        inputs = case.inputs()
        q, k, v = of_q.shard(inputs.q, rank), *(of_k.shard(x, rank) for x in inputs[1:3])
        if case.varlen:
            q, k, v = q[0], k[0], v[0]
        function = getattr(names, f"flash_attn_{case.function}func")
        given = [int(x) if isinstance(x, numpy.integer) else x for x in arguments_of(case, q, k, v)]
        given = [(9, 4) if isinstance(x, tuple) and x != (-1, -1) else x for x in given]

        def layer(*x: Any, function: Any = function, layout: Any = (of_q, of_k)) -> Any:
            return function(*x, layout=layout)[:2]

        cold, _ = compile_cold(layer, fullgraph=True)
        assert all(map(torch.equal, cold(*given), layer(*given)))
