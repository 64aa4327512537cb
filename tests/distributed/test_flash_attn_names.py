"""The names of flash-attn over gloo: shards of any layout in, dense attention's rows out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from ring_attn.core.mask import Mask
from ring_attn.integrations import flash_attn as names
from ring_attn.testing import Case, Heads, RankResult, put_together
from tests.cold import assert_compiles
from tests.distributed.adapters import adapter_result, packed, shards_of
from tests.distributed.pool import on_ranks
from tests.refusals import refused

pytestmark = pytest.mark.gloo  # what is around calls; other tests have the calls on streams

# Documents of queries and of keys: one has no queries, and rows follow the last document.
CU_Q, CU_K, ROWS = (0, 20, 20, 47), (0, 26, 30, 57), 53


class Call(NamedTuple):
    """A function's name without `flash_attn` and `func`, the number of ranks, and the case."""

    function: str
    world_size: int
    case: Case

    @property
    def made(self) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(names, f"flash_attn_{self.function}func")
        return found

    @property
    def mask(self) -> Any:
        return self.case.build_mask().arguments


def documents(cu_k: tuple[int, ...] = CU_K, **options: Any) -> Mask:
    seqlen_k = ROWS if cu_k == CU_Q else cu_k[-1] + 3
    return Mask(ROWS, seqlen_k, **{"causal": True} | options, cu_seqlens_q=CU_Q, cu_seqlens_k=cu_k)


WINDOW, FULL_WINDOW = Mask(ROWS, ROWS, True, (9, 4)), Mask(ROWS, ROWS, False, (5, 3))
EQUAL = Heads(4, 4, 16, 16)
# Every function, and every option in some call; padding with a layout's name needs one process.
CALLS = [
    Call("", 2, Case(WINDOW, "zigzag")),
    Call("kvpacked_", 3, Case(FULL_WINDOW, "striped")),
    Call("qkvpacked_", 2, Case("causal", "zigzag", heads=EQUAL, seqlen=ROWS, softcap=2.0)),
    Call("varlen_", 3, Case(documents(), "zigzag")),
    Call("varlen_", 1, Case(documents(causal=False), strategy="all_gather")),
    Call("varlen_kvpacked_", 2, Case(documents(window_size=(7, 7)))),
    Call("varlen_qkvpacked_", 2, Case(documents(CU_Q), "zigzag", "ulysses", heads=EQUAL)),
]


def arguments_of(call: Call) -> list[Any]:
    """Positional arguments after the tensors, up to `deterministic`."""
    said, documents = call.mask, []
    cuts = [torch.tensor(cu, dtype=torch.int32) for cu in (CU_Q, CU_K)]
    if "varlen_qkv" in call.function:
        documents = [cuts[0], numpy.int64(27)]
    elif "varlen" in call.function:
        documents = [*cuts, 27, 40]
    window = [numpy.int64(said.window_size[0]), numpy.int32(said.window_size[1])]
    return [*documents, 0.0, None, said.causal, window, call.case.softcap, None, True]


def run_call(call: Call) -> RankResult:
    layouts: Any = call.case.build_layouts(call.world_size)
    how = {"layout": layouts if call.world_size > 1 else "contiguous"}
    function = partial(call.made, strategy=call.case.strategy, **how)
    given = arguments_of(call)
    return adapter_result(
        call.case, call.world_size, call.function, lambda x, probs: function(*x, *given, probs)
    )


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.function}{call.world_size}")
def test_shards_give_rows_of_dense_attention(ranks: Any, one_thread: None, call: Call) -> None:
    ran = put_together(call.case, ranks(call.world_size).run(run_call, call))
    assert not ran.failures
    got, said = ran.whole, call.mask
    assert got.lse.dtype == torch.float32
    if call.case.packed:
        rows, keys = said.cu_seqlens_q[-1], said.cu_seqlens_k[-1]
        assert got.out[:, rows:].eq(0).all() and got.dq[:, rows:].eq(0).all()
        assert got.dk[:, keys:].eq(0).all() and got.dv[:, keys:].eq(0).all()
        assert got.lse[:, :, rows:].eq(-torch.inf).all()


@on_ranks(2)
def test_refusals() -> None:
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
    for call in (CALLS[0], CALLS[3]):
        given = [*packed(call.function, *shards_of(call.case, 2)[:3]), *arguments_of(call), True]
        given = [int(x) if isinstance(x, numpy.integer) else x for x in given]
        given = [tuple(map(int, x)) if isinstance(x, list) else x for x in given]
        layouts = call.case.build_layouts(2)

        def layer(*x: Any, function: Any = call.made, layout: Any = layouts) -> Any:
            return function(*x, layout=layout)[:2]

        assert_compiles(layer, [given], fullgraph=True)
