"""The names of ring-flash-attn and flash-attn over gloo: shards go in, dense rows come out.

Rows of ring-flash-attn's ranks are computed here by chunks, as in that package's tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.segments import Segment
from ring_attn.integrations import flash_attn
from ring_attn.integrations import ring_flash_attn as names
from ring_attn.integrations.ring_flash_attn import prepared, utils
from ring_attn.testing import (
    Case,
    Heads,
    RankResult,
    Sent,
    check,
    expected,
    plain_attention,
    poisoned_empty,
    put_together,
)
from ring_attn.testing.ranks import arguments_of
from tests.cold import assert_compiles, compile_cold
from tests.distributed.pool import on_ranks
from tests.refusals import refused, says

pytestmark = pytest.mark.gloo  # code around calls; others run calls on streams


def packed(form: str, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """The tensors as a function takes them whose name has `form`, such as "varlen_kvpacked_"."""
    if "qkvpacked" in form:
        return [torch.stack((q, k, v), -3)]
    return [q, torch.stack((k, v), -3)] if "kvpacked" in form else [q, k, v]


def shards_of(case: Case, world_size: int) -> list[Tensor]:
    """This rank's q, k, v and dout."""
    return arguments_of(case, world_size, dist.get_rank())[0]


def leaves_of(case: Case, form: str, world_size: int) -> list[Tensor]:
    """This rank's tensors as a function takes them, with gradients."""
    tensors = packed(form, *shards_of(case, world_size)[:3])
    return [x.detach().requires_grad_() for x in tensors]


def adapter_result(
    case: Case, world_size: int, form: str, call: Callable[[list[Tensor], bool], Any]
) -> RankResult:
    """The results of `call(tensors, return_attn_probs)`, and their gradients."""
    *leaves, dout = shards_of(case, world_size)
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    tensors = packed(form, *leaves)
    with poisoned_empty():
        out, lse, nothing = call(tensors, True)
        assert nothing is None
        alone = call(tensors, False)
        assert isinstance(alone, Tensor) and alone.equal(out)
        grads = torch.autograd.grad(out, leaves, dout)
    found = (out.detach(), lse, *grads)
    tensors = [x[None] for x in found] if case.packed else [*found]
    return RankResult(tuple(tensors), (Sent(0, 0), Sent(0, 0)))


# -- ring-flash-attn


class Use(NamedTuple):
    """One call: the function without `func`, and how the tensors are packed."""

    family: str
    packing: str = ""
    world_size: int = 2
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softmax_scale: float | None = None

    @property
    def function(self) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(names, f"{self.family}_{self.packing}func")
        return found

    @property
    def is_packed(self) -> bool:
        return "varlen" in self.family

    def documents(self) -> tuple[int, ...]:
        """Global boundaries of documents, with lengths that the function accepts."""
        if self.family.startswith("llama3"):
            return (0, 7, 8, 28, 40, 60)
        unit = self.world_size * (2 if self.family.startswith("zigzag") else 1)
        return tuple(unit * cut for cut in (0, 5, 6, 13))

    @property
    def seqlen(self) -> int:
        return self.documents()[-1] if self.is_packed else 2 * self.world_size * 13

    @property
    def case(self) -> Case:
        cu = self.documents() if self.is_packed else None
        mask = Mask(self.seqlen, self.seqlen, self.causal, self.window, cu, cu)
        heads = Heads(4, 4 if self.packing == "qkvpacked_" else 2, 16, 16)
        rows = (own_positions(self, rank) for rank in range(self.world_size))
        layout = SequenceLayout.from_segments([[Segment(at, 1) for at in own] for own in rows])
        return Case(mask, (layout, layout), heads=heads, softmax_scale=self.softmax_scale)


# Each family packed and not; the options of the signature in turn.
USES = [
    Use("ring_flash_attn"),
    Use("ring_flash_attn", "kvpacked_"),
    # flash-attention ignores the right side of a causal window.
    Use("zigzag_ring_flash_attn", window=(9, 9)),
    Use("zigzag_ring_flash_attn", "qkvpacked_", causal=False),
    Use("stripe_flash_attn", window=(9, 0)),
    Use("stripe_flash_attn", "kvpacked_"),
    Use("ring_flash_attn_varlen", causal=False, softmax_scale=0.5),
    Use("ring_flash_attn_varlen", "qkvpacked_"),
    Use("zigzag_ring_flash_attn_varlen", world_size=3),
    Use("zigzag_ring_flash_attn_varlen", "kvpacked_"),
    Use("llama3_flash_attn_varlen", world_size=4),
    Use("llama3_flash_attn_varlen", "kvpacked_", world_size=3, causal=False),
    Use("llama3_flash_attn_varlen", "qkvpacked_"),
    Use("llama3_flash_attn_varlen", window=(3, -1)),
]


def own_positions(use: Use, rank: int) -> list[int]:
    """The rank's rows, in their order."""
    world_size = use.world_size
    whole = torch.arange(use.seqlen)
    if use.family.startswith("stripe"):
        return whole[rank::world_size].tolist()
    if not use.is_packed or use.family.startswith("llama3"):
        parts = [whole]
    else:
        parts = [whole[a:b] for a, b in pairwise(use.documents())]
    rows = []
    for part in parts:
        if use.family.startswith("zigzag"):
            chunks = part.chunk(2 * world_size)
            rows += [chunks[rank], chunks[2 * world_size - 1 - rank]]
        else:
            rows.append(part.chunk(world_size)[rank])
    return torch.cat(rows).tolist()


def own_arguments(use: Use, rank: int) -> list[Any]:
    """Positional arguments between the tensors and dropout_p."""
    if not use.is_packed:
        return []
    return local_arguments(use, torch.tensor(use.documents(), dtype=torch.int32), rank)


def local_arguments(use: Use, cu: Tensor, rank: int) -> list[Any]:
    """Positional arguments for documents with these global boundaries."""
    if not use.family.startswith("llama3"):
        local = cu // use.world_size
        return [local, int(local.diff().max())]
    *local, keys = names.llama3_flash_attn_prepare_cu_seqlens(cu, use.causal, rank, use.world_size)
    return [*local, 1, keys]


def run_use(use: Use) -> RankResult:
    arguments = own_arguments(use, dist.get_rank())
    options = {"softmax_scale": use.softmax_scale, "causal": use.causal, "window_size": use.window}

    def call(tensors: list[Tensor], probs: bool) -> Any:
        more = {"deterministic": True, "return_attn_probs": True} if probs else {}
        return use.function(*tensors, *arguments, **options, **more)

    return adapter_result(use.case, use.world_size, use.packing, call)


@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.family}-{use.packing}{use.world_size}")
def test_shards_give_rows_of_dense_attention(ranks: Any, one_thread: None, use: Use) -> None:
    assert not put_together(use.case, ranks(use.world_size).run(run_use, use)).failures


LLAMA3 = Use("llama3_flash_attn_varlen")


def llama3_tensors() -> list[Tensor]:
    return [x.requires_grad_() for x in shards_of(LLAMA3.case, 2)[:3]]


@on_ranks(2)
def test_llama3_exchanges_nothing_but_the_call() -> None:
    """Ranks may reuse their arguments, copy them, or make equal ones; recomputed layers, too."""
    rank = dist.get_rank()
    tensors, arguments = llama3_tensors(), own_arguments(LLAMA3, rank)

    def layer(*xs: Tensor, given: Sequence[Any] = arguments) -> Tensor:
        out: Tensor = LLAMA3.function(*xs, *given, causal=True)
        return out

    with mock.patch.object(dist, "all_gather_object", side_effect=AssertionError):
        out = checkpoint(layer, *tensors, use_reentrant=False)
        again = torch.autograd.grad(out.sum(), tensors)
        kept = torch.autograd.grad(layer(*tensors).sum(), tensors)
        copies = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
        others = [arguments, own_arguments(LLAMA3, rank), copies]
        for mine in (others, [arguments, *others]):
            equal = layer(*tensors, given=mine[rank])
            assert torch.equal(equal, out)
    assert all(map(torch.equal, again, kept))


@on_ranks(2)
def test_llama3_arguments_that_do_not_fit() -> None:
    """Every rank raises, whichever rank's arguments are of another sequence."""
    rank = dist.get_rank()
    cu = torch.tensor(LLAMA3.documents())
    *local, keys = names.llama3_flash_attn_prepare_cu_seqlens(cu, True, rank, 2)
    moved = slice(keys.start + 1, keys.stop + 1)
    with refused(ValueError, "llama3_flash_attn_prepare_cu_seqlens|are not its results"):
        LLAMA3.function(*llama3_tensors(), *local, 1, moved, causal=True)
    cu[3] = 29 if rank == 1 else cu[3]
    *local, keys = names.llama3_flash_attn_prepare_cu_seqlens(cu, True, rank, 2)
    group = dist.new_group()
    with refused(RuntimeError, "cu_seqlens: global rank"):
        LLAMA3.function(*llama3_tensors(), *local, 1, keys, causal=True, group=group)


def test_copies_of_llama3_arguments_that_fit_several_sequences() -> None:
    """Causal, rank 0 of 2 has the same arguments whatever documents are on rank 1."""
    first, second = (torch.tensor([0, 5, 8, end, 16]) for end in (10, 12))
    *local, keys = names.llama3_flash_attn_prepare_cu_seqlens(first, True, 0, 2)
    given = names.Local(
        cu_seqlens_q=(0, 5, 8),
        cu_seqlens_k=(0, 5, 8),
        keys=(0, 8),
        causal=True,
        rank=0,
        world_size=2,
    )
    copy = local[0].clone()
    assert keys == slice(0, 8) and prepared.all_documents(given, copy).tolist() == first.tolist()
    names.llama3_flash_attn_prepare_cu_seqlens(second, True, 0, 2)
    with refused(ValueError, "values that fit several sequences|pass the tensors"):
        prepared.all_documents(given, copy)
    assert prepared.all_documents(given, local[0]).tolist() == first.tolist()


@on_ranks(3)
def test_the_building_blocks_of_a_custom_ring() -> None:
    """The classes of `utils` pass tensors between neighbours, and gather from all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ring = utils.RingComm(None)
    k = torch.full((2, 3), float(rank))
    next_k, next_v = ring.send_recv_kv(k, -k)
    ring.wait()
    before = (rank - 1) % world_size
    assert torch.equal(next_k, torch.full((2, 3), float(before))) and torch.equal(next_v, -next_k)
    assert (ring.send_rank, ring.recv_rank) == ((rank + 1) % world_size, before)
    with refused(RuntimeError, "wait must follow a commit"):
        ring.wait()
    ring.commit()
    with refused(RuntimeError, "commit must follow a wait"):
        ring.commit()

    gathering = utils.AllGatherComm()
    outs = [torch.empty(world_size * 2, 3) for _ in range(2)]
    for out, x in zip(outs, (k, k + 10), strict=True):
        gathering.all_gather(out, x)
    gathering.wait()
    expected = torch.arange(3.0).repeat_interleave(2)[:, None].expand(6, 3)
    assert torch.equal(outs[0], expected) and torch.equal(outs[1], expected + 10)


@on_ranks(3)
def test_a_custom_ring_is_exact() -> None:
    """A ring of `RingComm` and `update_out_and_lse` computes attention over all ranks' keys."""
    case = Case("full", "contiguous", "ring", heads=Heads(2, 2, 8, 8), seqlen=27)
    q, k, v = shards_of(case, 3)[:3]
    ring, out, lse = utils.RingComm(None), None, None
    for step in range(ring.world_size):
        if step + 1 < ring.world_size:
            next_k, next_v = ring.send_recv_kv(k, v)
        block_out, block_lse = plain_attention(q, k, v, Mask(9, 9))
        out, lse = utils.update_out_and_lse(out, lse, block_out, block_lse)
        if step + 1 < ring.world_size:
            ring.wait()
            k, v = next_k, next_v
    oracle, plain = expected(case)
    rows = case.build_layouts(3)[0].position_ids(dist.get_rank())
    assert out is not None
    verdict = check(
        "out", out, oracle.out[:, rows], plain.out[:, rows], oracle.terms["out"][:, rows]
    )
    assert verdict.ok, str(verdict)


def test_merging_leaves_rows_that_see_nothing_at_zero() -> None:
    nothing = torch.zeros(1, 3, 2, 4), torch.full((1, 2, 3), -torch.inf)
    out, lse = utils.update_out_and_lse(None, None, *nothing)
    out, lse = utils.update_out_and_lse(out, lse, *nothing)
    assert not out.any() and bool((lse == -torch.inf).all())
    # A block of some rows changes these rows only.
    block = torch.ones(1, 2, 2, 4), torch.zeros(1, 2, 2)
    out, lse = utils.update_out_and_lse(out, lse, *block, slice_=(slice(None), slice(1, None)))
    assert out[:, 0].eq(0).all() and out[:, 1:].eq(1).all() and lse[:, 1:].eq(0).all()
    with refused(RuntimeError, "the first block must be for all rows"):
        utils.update_out_and_lse(None, None, *block, slice_=(slice(None), slice(1, None)))


def test_lse_of_packed_documents_and_of_padded_ones() -> None:
    cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = torch.arange(10.0).view(2, 5)  # (nheads, rows)
    padded = utils.unflatten_varlen_lse(packed.t().unsqueeze(-1), cu_seqlens, 3)
    assert padded.shape == (2, 2, 3) and padded[0, :, 2].eq(0).all()
    assert torch.equal(utils.flatten_varlen_lse(padded, cu_seqlens), packed)
    with refused(ValueError, "max_seqlen must be at least 3"):
        utils.unflatten_varlen_lse(packed.t().unsqueeze(-1), cu_seqlens, 2)


@on_ranks(4)
def test_a_group_of_some_ranks() -> None:
    """`group` is the last parameter, also by position."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    use = Use("zigzag_ring_flash_attn")
    positions = own_positions(use, rank // 2)
    q, k, v, _ = (x[:, positions] for x in use.case.build_inputs())
    got = use.function(q, k, v, 0.0, None, True, (-1, -1), None, False, False, pairs[rank % 2])
    oracle, plain = expected(use.case)
    rows = ("out", got, oracle.out[:, positions], plain.out[:, positions])
    verdict = check(*rows, oracle.terms["out"][:, positions])
    assert verdict.ok, str(verdict)


@on_ranks(2)
def test_a_refusal_of_one_rank_reaches_the_others() -> None:
    """A single rank's argument is bad: the error reaches the other ranks."""
    varlen = Use("zigzag_ring_flash_attn_varlen")
    cu, most = own_arguments(varlen, 0)
    x, group = torch.randn(int(cu[-1]), 2, 8), dist.new_group()
    varlen.function(x, x, x, cu, most, causal=True, group=group)
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="max_seqlen must be at least"):
            varlen.function(x, x, x, cu, most - 1, causal=True, group=group)
    with refused(RuntimeError, "refused|max_seqlen"):
        varlen.function(x, x, x, cu, most, causal=True, group=group)


PACKED = [Use(f"{family}_varlen") for family in ("ring_flash_attn", "zigzag_ring_flash_attn")]
PACKED.append(LLAMA3)


@pytest.mark.parametrize(
    ("use", "inside", "backend", "scalars"),
    [
        (LLAMA3, True, "eager", True),
        pytest.param(PACKED[0], False, "eager", False, marks=pytest.mark.slow),
        pytest.param(PACKED[1], False, "inductor", True, marks=pytest.mark.slow),
    ],
    ids=["llama3", "ring", "zigzag"],
)
@on_ranks(2)
def test_functions_over_documents_stand_between_graphs(
    use: Use, inside: bool, backend: str, scalars: bool
) -> None:
    """All batches share two graphs; the graph before the call is remade if a size is a symbol."""
    rank, seqlen = dist.get_rank(), use.seqlen

    def layer(x: list[Tensor], cu: Tensor, arguments: list[Any] | None) -> Tensor:
        if arguments is None:
            *local, keys = names.llama3_flash_attn_prepare_cu_seqlens(cu, True, rank, 2)
            arguments = [*local, 1, keys]
        return use.function(*[y * 2 for y in x], *arguments, causal=True).relu()

    from torch._dynamo import config  # loads the compiler

    with config.patch(capture_scalar_outputs=scalars):
        calls = []
        for cuts in ((4, 12), (8,), (12, 16, 20)):
            cu = torch.tensor([0, *cuts, seqlen], dtype=torch.int32)
            x = [y[0, : seqlen // 2].requires_grad_() for y in use.case.build_inputs()[:3]]
            calls.append((x, cu, None if inside else local_arguments(use, cu, rank)))
        assert_compiles(layer, calls, backend, graphs=(2, 3))


@on_ranks(2)
def test_one_graph_over_documents_is_refused_with_what_to_call() -> None:
    """The refusal of `fullgraph=True` names `ring_attention` instead."""
    for use in PACKED:
        x = [y[0, : use.seqlen // 2] for y in use.case.build_inputs()[:3]]
        arguments = local_arguments(use, torch.tensor(use.documents()), dist.get_rank())
        cold, _ = compile_cold(use.function, fullgraph=True)
        with pytest.raises(RuntimeError) as error:
            cold(*x, *arguments, causal=True)
        assert says(str(error.value), "cu_seqlens|fullgraph|ring_attention")


# -- flash-attn

# Documents of queries and of keys: one has no queries, and rows follow the last document.
CU_Q, CU_K, ROWS = (0, 20, 20, 47), (0, 26, 30, 57), 53


class Call(NamedTuple):
    """A function's name without `flash_attn` and `func`, the number of ranks, and the case."""

    function: str
    world_size: int
    case: Case

    @property
    def made(self) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(flash_attn, f"flash_attn_{self.function}func")
        return found

    @property
    def mask(self) -> Any:
        return self.case.build_mask().arguments

    @property
    def arguments(self) -> list[Any]:
        """Positional arguments after the tensors, up to `deterministic`."""
        said, documents = self.mask, []
        cuts = [torch.tensor(cu, dtype=torch.int32) for cu in (CU_Q, CU_K)]
        if "varlen_qkv" in self.function:
            documents = [cuts[0], numpy.int64(27)]
        elif "varlen" in self.function:
            documents = [*cuts, 27, 40]
        window = [numpy.int64(said.window_size[0]), numpy.int32(said.window_size[1])]
        return [*documents, 0.0, None, said.causal, window, self.case.softcap, None, True]


def documents_mask(cu_k: tuple[int, ...] = CU_K, **options: Any) -> Mask:
    seqlen_k = ROWS if cu_k == CU_Q else cu_k[-1] + 3
    return Mask(ROWS, seqlen_k, **{"causal": True} | options, cu_seqlens_q=CU_Q, cu_seqlens_k=cu_k)


WINDOW, FULL_WINDOW = Mask(ROWS, ROWS, True, (9, 4)), Mask(ROWS, ROWS, False, (5, 3))
EQUAL = Heads(4, 4, 16, 16)
# Every function, and every option in some call; padding with a layout's name needs one process.
CALLS = [
    Call("", 2, Case(WINDOW, "zigzag")),
    Call("kvpacked_", 3, Case(FULL_WINDOW, "striped")),
    Call("qkvpacked_", 2, Case("causal", "zigzag", heads=EQUAL, seqlen=ROWS, softcap=2.0)),
    Call("varlen_", 3, Case(documents_mask(), "zigzag")),
    Call("varlen_", 1, Case(documents_mask(causal=False), strategy="all_gather")),
    Call("varlen_kvpacked_", 2, Case(documents_mask(window_size=(7, 7)))),
    Call("varlen_qkvpacked_", 2, Case(documents_mask(CU_Q), "zigzag", "ulysses", heads=EQUAL)),
]


def run_call(call: Call) -> RankResult:
    layouts: Any = call.case.build_layouts(call.world_size)
    how = {"layout": layouts if call.world_size > 1 else "contiguous"}
    function = partial(call.made, strategy=call.case.strategy, **how)
    given = call.arguments
    return adapter_result(
        call.case, call.world_size, call.function, lambda x, probs: function(*x, *given, probs)
    )


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.function}{call.world_size}")
def test_any_layout_gives_rows_of_dense_attention(ranks: Any, one_thread: None, call: Call) -> None:
    ran = put_together(call.case, ranks(call.world_size).run(run_call, call))
    assert not ran.failures
    got, said = ran.whole, call.mask
    assert got.lse.dtype == torch.float32
    if call.case.packed:
        rows, keys = said.cu_seqlens_q[-1], said.cu_seqlens_k[-1]
        assert got.out[:, rows:].eq(0).all() and got.dq[:, rows:].eq(0).all()
        assert got.dk[:, keys:].eq(0).all() and got.dv[:, keys:].eq(0).all()
        assert got.lse[:, :, rows:].eq(-torch.inf).all()


# -- both


@on_ranks(2)
def test_refusals() -> None:
    """Unsupported arguments are refused on every rank."""
    varlen = Use("zigzag_ring_flash_attn_varlen")
    cu, most = own_arguments(varlen, 0)
    ring, kv_ring, llama3 = (
        partial(use.function, causal=True)
        for use in (varlen, varlen._replace(packing="kvpacked_"), LLAMA3)
    )
    x = torch.randn(int(cu[-1]), 2, 8)
    tensors, own = llama3_tensors(), own_arguments(LLAMA3, dist.get_rank())
    batched = [x[None] for x in tensors]
    calls: list[tuple[type[Exception], str, Any, tuple[Any, ...], dict[str, Any]]] = [
        (ValueError, "max_seqlen|14|13", ring, (x, x, x, cu, most - 1), {}),
        (ValueError, "of 4|2 ranks", ring, (x, x, x, torch.tensor([0, 3, 26]), most + 9), {}),
        (ValueError, "q must have cu_seqlens[-1] rows|26|25", ring, (*3 * [x[1:]], cu, most), {}),
        (ValueError, "v must have cu_seqlens[-1]", ring, (x, x, x[1:], cu, most), {}),
        (TypeError, "cu_seqlens|None", ring, (x, x, x, None, most), {}),
        (ValueError, "kv|rows, 2|(26, 2", kv_ring, (x, x, cu, most), {}),
        (NotImplementedError, "dropout_p", ring, (x, x, x, cu, most), {"dropout_p": 0.1}),
        (NotImplementedError, "alibi_slopes", ring, (x, x, x, cu, most), {"alibi_slopes": x}),
        (ValueError, "heads_k_stride|2|3", llama3, (*tensors, *own[:4], 3, own[5]), {}),
        (ValueError, "q must be (rows, nheads|(1, 30", llama3, (*batched, *own), {}),
        (TypeError, "local_k_slice|int", llama3, (*tensors, *own[:5], 7), {}),
        (ValueError, "max_seqlen_k", llama3, (*tensors, *own[:3], 1, *own[4:]), {}),
    ]
    x, cu = torch.randn(12, 2, 8), torch.tensor([0, 10, 24])
    good = (x, x, x, cu, cu, 14, 14)
    kv, varlen = torch.stack((x, x), 1), flash_attn.flash_attn_varlen_func
    dense, kv_varlen = flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_kvpacked_func
    calls += [
        (ValueError, "q must be (batch, rows, nheads|(12,", dense, (x, x, x), {}),
        (ValueError, "k must be (rows, nheads|(1, 12", varlen, (x, x[None], *good[2:]), {}),
        (ValueError, "kv must be (rows, 2, nh", kv_varlen, (x, x, *good[3:]), {}),
        (
            TypeError,
            "qkv must be float16|int64",
            flash_attn.flash_attn_qkvpacked_func,
            (kv.long(),),
            {},
        ),
        (ValueError, "max_seqlen_k|at least|cu_seqlens_k|14|13", varlen, (*good[:6], 13), {}),
        (TypeError, "max_seqlen_q must be an int|None", varlen, (*good[:5], None, 14), {}),
        (TypeError, "cu_seqlens_k must be an int32|None", varlen, (*good[:4], None, 14, 14), {}),
        (NotImplementedError, "block_table", varlen, good, {"block_table": cu}),
        (NotImplementedError, "dropout_p", varlen, (*good, 0.1), {}),
        (NotImplementedError, "alibi_slopes", varlen, good, {"alibi_slopes": x}),
        (ValueError, "padding|SequenceLayout", varlen, (x, x, x, cu[:2], cu[:2], 14, 14), {}),
        (TypeError, "flash_attn_varlen_func|zigzag", varlen, good, {"zigzag": True}),
    ]
    for kind, words, function, arguments, options in calls:
        with refused(kind, words):
            function(*arguments, **options)
    assert varlen(*good, causal=True).shape == x.shape


@on_ranks(2)
def test_functions_compile_whole() -> None:
    """Also with options that ring_attention lacks; only functions over local documents do not."""
    for family in ("ring_flash_attn", "zigzag_ring_flash_attn", "stripe_flash_attn"):
        use = Use(family, "qkvpacked_")
        x = leaves_of(use.case, "qkvpacked_", 2)
        options = {"window_size": (9, 9), "deterministic": True, "return_attn_probs": True}
        layer = partial(use.function, causal=True, **options)
        assert_compiles(layer, [x], fullgraph=True)
    for call in (CALLS[0], CALLS[3]):
        given = [int(x) if isinstance(x, numpy.integer) else x for x in call.arguments]
        given = [tuple(map(int, x)) if isinstance(x, list) else x for x in given]
        x = leaves_of(call.case, call.function, 2)
        layer = partial(call.made, layout=call.case.build_layouts(2))
        assert_compiles(layer, [[*x, *given, True]], fullgraph=True)
