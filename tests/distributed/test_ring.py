"""ring_attention over gloo at world sizes 1 to 4, held against dense attention in float64.

Every case runs once on every world size. Then: the results are within their bound, they are the
bits of a second run and of the ring in one process, and what was sent is what the cost model says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ring_attn import SequenceLayout, TransportOptions, ring_attention, unshard
from ring_attn.cost import bytes_sent, choose_traveller, num_messages
from ring_attn.mask import Mask
from ring_attn.plan import Traveller
from ring_attn.spec import AttentionSpec
from ring_attn.strategies.ring import RingCall, ring_backward, ring_forward
from ring_attn.testing import (
    RESULTS,
    RESULTS_WITH_SINKS,
    Expected,
    Inputs,
    check_all,
    dense_gradients,
    plain_gradients,
    poisoned_empty,
    random_qkv,
    random_sinks,
)
from ring_attn.transport.local import LocalTransport, run_local
from ring_attn.transport.p2p import P2PTransport, open_p2p
from ring_attn.transport.ranks.group import rank_group

pytestmark = pytest.mark.dist

WORLD_SIZES = (1, 2, 3, 4)
LAYOUTS = ("contiguous", "zigzag", "striped", "boundaries")


@dataclass(frozen=True)
class Case:
    """One call, for any world size."""

    mask: str
    layout: str = "contiguous"
    seqlen: int = 113
    batch: int = 1
    nheads: int = 2
    nheads_kv: int = 2
    headdim: int = 16
    headdim_v: int = 16
    dtype: torch.dtype = torch.float32
    backend: str = "aten"
    softmax_scale: float | None = None
    softcap: float = 0.0
    sinks: bool = False
    packed: bool = False
    noncontiguous: bool = False
    large_logits: bool = False

    def __str__(self) -> str:
        usual = Case(self.mask)
        fields = (n for n in self.__dataclass_fields__ if n not in ("mask", "layout"))
        odd = [n for n in fields if getattr(self, n) != getattr(usual, n)]
        parts = [self.mask, self.layout, *(f"{n}={getattr(self, n)}" for n in odd)]
        return "-".join(parts).replace("torch.", "").replace("=True", "")

    def attention_mask(self) -> Mask:
        """The mask by its name, over lengths made from `seqlen`."""
        return MASKS[self.mask](self.seqlen)

    def layouts(self, world_size: int) -> tuple[SequenceLayout, SequenceLayout]:
        """Of the queries and the keys."""
        mask = self.attention_mask()
        q, k = (_layout(self.layout, n, world_size) for n in (mask.seqlen_q, mask.seqlen_k))
        return q, k

    def spec(self) -> AttentionSpec:
        """Sizes and types."""
        return AttentionSpec(
            "cpu", self.dtype, self.batch, self.nheads, self.nheads_kv, self.headdim,
            self.headdim_v, self.softcap, self.sinks,
        )  # fmt: skip

    def inputs(self) -> Inputs:
        """The whole tensors, the same in every process."""
        mask = self.attention_mask()
        return random_qkv(
            batch=self.batch, seqlen_q=mask.seqlen_q, seqlen_k=mask.seqlen_k, nheads=self.nheads,
            nheads_kv=self.nheads_kv, headdim=self.headdim, headdim_v=self.headdim_v,
            dtype=self.dtype, noncontiguous=self.noncontiguous, large_logits=self.large_logits,
        )  # fmt: skip

    def build_sinks(self) -> Tensor | None:
        """(nheads,), the same in every process."""
        return random_sinks(self.nheads, seed=1) if self.sinks else None

    @property
    def results(self) -> tuple[str, ...]:
        """Their names."""
        return RESULTS_WITH_SINKS if self.sinks else RESULTS


def _documents(n: int) -> tuple[int, ...]:
    """Boundaries that divide by nothing, with an empty document, one of a row and a long one."""
    return (0, n // 11, n // 11, n // 11 + 1, n // 3, n)


def _key_documents(n: int) -> tuple[int, ...]:
    """For as many documents: one without keys, one with more keys than queries, one with fewer."""
    return (0, 0, n // 7, n // 5, n // 2, n)


MASKS: dict[str, Callable[[int], Mask]] = {
    "full": lambda n: Mask(n, n),
    "causal": lambda n: Mask(n, n, causal=True),
    "left": lambda n: Mask(n, n, causal=True, window_size=(n // 4, 0)),
    "both": lambda n: Mask(n, n, window_size=(n // 5, n // 9)),
    "open_left": lambda n: Mask(n, n, window_size=(-1, n // 9)),
    "diagonal": lambda n: Mask(n, n, window_size=(0, 0)),
    "documents": lambda n: Mask(n, n, True, (-1, -1), _documents(n), _documents(n)),
    "documents_full": lambda n: Mask(n, n, False, (-1, -1), _documents(n), _documents(n)),
    "documents_window": lambda n: Mask(n, n, True, (n // 9, -1), _documents(n), _documents(n)),
    "documents_unequal": lambda n: Mask(
        n, n + 20, True, (-1, -1), _documents(n), _key_documents(n + 20)
    ),
    # Queries in front of the first key see nothing.
    "fewer_keys": lambda n: Mask(n, n - n // 3, causal=True),
    "more_keys": lambda n: Mask(n - n // 3, n, causal=True),
    # A window that no key lies in for most queries.
    "sees_little": lambda n: Mask(n, n // 5, window_size=(3, 2)),
    "no_keys": lambda n: Mask(n, 0),
    "no_queries": lambda n: Mask(0, n, causal=True),
}


def _layout(kind: str, seqlen: int, world_size: int) -> SequenceLayout:
    if kind != "boundaries":
        return SequenceLayout.from_name(kind, seqlen, world_size)
    # Uneven, and rank 1 holds nothing (of 2 ranks, rank 0 holds nearly all).
    cuts = {
        1: [0, seqlen],
        2: [0, seqlen - seqlen // 10, seqlen],
        3: [0, seqlen // 2, seqlen // 2, seqlen],
        4: [0, seqlen // 3, seqlen // 3, seqlen // 2, seqlen],
    }
    return SequenceLayout.boundaries(cuts[world_size])


def _cases() -> Iterator[Case]:
    for mask in MASKS:
        for layout in LAYOUTS:
            yield Case(mask, layout)
    causal = Case("causal", "zigzag")
    for layout in LAYOUTS:
        for seqlen in (1, 63, 257):
            yield replace(causal, layout=layout, seqlen=seqlen)
    yield replace(causal, seqlen=97, batch=3)
    yield replace(causal, seqlen=1000)
    yield Case("left", "contiguous", seqlen=1000, nheads=4, nheads_kv=2)
    for heads in ((4, 4), (4, 2), (4, 1), (6, 3)):
        for mask in ("causal", "full"):
            nheads, nheads_kv = heads
            yield replace(causal, mask=mask, nheads=nheads, nheads_kv=nheads_kv, batch=2)
    for headdim, headdim_v in ((32, 16), (16, 40), (64, 64), (7, 5), (128, 128)):
        yield replace(causal, headdim=headdim, headdim_v=headdim_v)
        yield replace(causal, headdim=headdim, headdim_v=headdim_v, nheads=4, nheads_kv=1)
    for dtype in (torch.float16, torch.bfloat16):
        for mask in ("full", "causal", "both", "documents", "fewer_keys"):
            for backend in ("aten", "reference"):
                kv = 4 if backend == "aten" else 2
                yield Case(mask, "zigzag", dtype=dtype, backend=backend, nheads=4, nheads_kv=kv)
        yield Case("causal", "contiguous", dtype=dtype, nheads=4, nheads_kv=1, seqlen=257)
        yield Case("causal", "striped", dtype=dtype, nheads=4, headdim=64, headdim_v=64)
    for mask in MASKS:
        yield Case(mask, "zigzag", dtype=torch.float64, backend="reference")
        yield Case(mask, "striped", backend="reference", nheads=4)
    yield replace(causal, dtype=torch.float64)
    for layout in LAYOUTS:
        yield Case("documents", layout, packed=True, nheads=4)
    yield Case("documents_unequal", "zigzag", packed=True, nheads=4, nheads_kv=1)
    for mask in ("causal", "documents"):
        yield Case(mask, "zigzag", noncontiguous=True, nheads=4)
        yield Case(mask, "contiguous", noncontiguous=True, nheads=4, nheads_kv=1)
    yield replace(causal, softmax_scale=0.3)
    for mask in ("causal", "left", "documents", "fewer_keys"):
        for layout in LAYOUTS:
            yield Case(mask, layout, nheads=4, sinks=True)
        yield Case(mask, "zigzag", nheads=4, softcap=2.0, backend="reference")
        yield Case(
            mask, "contiguous", nheads=4, softcap=2.0, sinks=True, backend="auto",
            dtype=torch.bfloat16,
        )  # fmt: skip
    yield Case("documents", "zigzag", packed=True, sinks=True)
    yield replace(causal, large_logits=True)
    yield Case("full", "contiguous", large_logits=True, backend="reference")
    yield Case("causal", "contiguous", backend="auto")


CASES = tuple(_cases())


# --- what the ranks do


def run_case(case: Case) -> dict[str, Any] | None:
    """Forward and backward twice on every rank; rank 0 returns whole results and all counts."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layouts = case.layouts(world_size)
    stats = open_p2p(_world(), TransportOptions()).stats
    stats.reset()
    out, lse, leaves, dout = _forward(case, layouts, rank)
    sent = [(stats.bytes_sent, stats.messages)]
    stats.reset()
    grads = torch.autograd.grad(out, leaves, dout)
    sent.append((stats.bytes_sent, stats.messages))
    first = dict(zip(case.results, (out, lse, *grads), strict=True))

    with poisoned_empty():
        out, lse, leaves, dout = _forward(case, layouts, rank)
        again = (out, lse, *torch.autograd.grad(out, leaves, dout))
    same = {n: bool(torch.equal(x, y)) for (n, x), y in zip(first.items(), again, strict=True)}

    by_rank: list[Any] = [None] * world_size
    dsinks = first.pop("dsinks", None)
    dist.all_gather_object(by_rank, {"sent": sent, "same": same, "dsinks": dsinks})
    rows = -2 if case.packed else 1
    whole = {}
    for name, x in first.items():
        layout = layouts[name in ("dk", "dv")]
        dim = (-1 if case.packed else 2) if name == "lse" else (0 if case.packed else rows)
        whole[name] = unshard(x, layout, dim=dim)
    if case.packed:
        whole = {name: x[None] for name, x in whole.items()}
    if case.sinks:
        whole["dsinks"] = _sum([one["dsinks"] for one in by_rank])
    return {"whole": Expected(**whole), "by_rank": by_rank} if rank == 0 else None


def _forward(
    case: Case, layouts: tuple[SequenceLayout, SequenceLayout], rank: int
) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    mask = case.attention_mask()
    q, k, v, dout = (
        _shard(x, layout, rank, case)
        for x, layout in zip(case.inputs(), (layouts[0], *layouts[1:] * 2, layouts[0]), strict=True)
    )
    sinks = case.build_sinks()
    leaves = [x.requires_grad_() for x in (q, k, v, sinks) if x is not None]
    cu_q, cu_k = (
        None if cu is None else torch.tensor(cu, dtype=torch.int32)
        for cu in (mask.cu_seqlens_q, mask.cu_seqlens_k)
    )
    out, lse = ring_attention(
        q, k, v, causal=mask.causal, window_size=mask.window_size, cu_seqlens=cu_q,
        cu_seqlens_k=None if cu_k is None or torch.equal(cu_q, cu_k) else cu_k,
        softmax_scale=case.softmax_scale, softcap=case.softcap, sinks=sinks, layout=layouts,
        backend=case.backend, return_lse=True,
    )  # fmt: skip
    return out, lse, leaves, dout


def _shard(x: Tensor, layout: SequenceLayout, rank: int, case: Case) -> Tensor:
    shard = layout.shard(x, rank)
    if case.noncontiguous:  # layout.shard has made it contiguous: back to odd strides
        spread = shard.new_zeros(*shard.transpose(1, 2).shape[:-1], 2 * shard.size(-1))
        spread[..., ::2] = shard.transpose(1, 2)
        shard = spread[..., ::2].transpose(1, 2)
    return shard[0] if case.packed else shard


def _sum(shares: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(shares)).sum(0)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


# --- every case


@dataclass(frozen=True)
class Ran:
    """A case, the number of ranks, and what came out."""

    case: Case
    world_size: int
    whole: Expected
    by_rank: list[dict[str, Any]]


def _params() -> list[Any]:
    return [
        pytest.param((case, world_size), id=f"{world_size}-{case}")
        for case in CASES
        for world_size in WORLD_SIZES
    ]


@pytest.fixture(scope="module", params=_params())
def ran(request: pytest.FixtureRequest, ranks: Any, one_thread: None) -> Ran:
    case, world_size = request.param
    result = ranks(world_size).run(run_case, case)[0]
    return Ran(case, world_size, result["whole"], result["by_rank"])


@lru_cache(maxsize=16)
def _oracle(case: Case) -> tuple[Expected, Expected]:
    """Dense attention in float64 and plain PyTorch in the case's dtype."""
    args = (*case.inputs(), case.attention_mask(), case.softmax_scale)
    scores: dict[str, Any] = {"softcap": case.softcap, "sinks": case.build_sinks()}
    return dense_gradients(*args, **scores), plain_gradients(*args, **scores)


def test_results_are_within_the_bound(ran: Ran) -> None:
    verdicts = check_all(ran.whole, *_oracle(ran.case))
    assert all(verdict.ok for verdict in verdicts), [str(verdict) for verdict in verdicts]


def test_rows_that_see_nothing_are_exactly_zero(ran: Ran) -> None:
    visible = ran.case.attention_mask().dense()
    lonely_q, lonely_k = ~visible.any(1), ~visible.any(0)
    whole = ran.whole
    assert not whole.out[:, lonely_q].any() and not whole.dq[:, lonely_q].any()
    assert not whole.dk[:, lonely_k].any() and not whole.dv[:, lonely_k].any()
    sinks = ran.case.build_sinks()
    of_none = torch.tensor(-torch.inf) if sinks is None else sinks.unsqueeze(1)
    assert (whole.lse[:, :, lonely_q] == of_none).all()
    assert whole.lse[:, :, ~lonely_q].isfinite().all()


def test_runs_are_bit_equal_and_read_no_unwritten_memory(ran: Ran) -> None:
    # The second run has NaN wherever the first had whatever torch.empty left.
    for rank, one in enumerate(ran.by_rank):
        assert all(one["same"].values()), (rank, one["same"])


def test_same_bits_as_the_ring_in_one_process(ran: Ran) -> None:
    local = _local(ran.case, ran.world_size)
    for name in ran.case.results:
        assert torch.equal(getattr(ran.whole, name), getattr(local, name)), name


def test_sends_what_the_cost_model_says(ran: Ran) -> None:
    case = ran.case
    for rank, one in enumerate(ran.by_rank):
        call = _call(case, ran.world_size, rank)
        for backward, sent in zip((False, True), one["sent"], strict=True):
            plan = call.plan(backward=backward)
            expected = bytes_sent(plan, case.spec(), backward=backward)
            messages = num_messages(plan, backward=backward)
            assert sent == (expected, messages), (rank, backward)
            assert (messages == 0) == (plan.num_hops == 0)


def _call(case: Case, world_size: int, rank: int) -> RingCall:
    layouts, mask, spec = case.layouts(world_size), case.attention_mask(), case.spec()
    scale = case.headdim**-0.5 if case.softmax_scale is None else case.softmax_scale
    backend = case.backend
    if backend == "auto":
        backend = "reference" if case.softcap else "aten"
    travels = choose_traveller(spec, *layouts, mask)
    return RingCall(spec, layouts, mask, rank, scale, backend, travels)


def _local(case: Case, world_size: int) -> Expected:
    """The same through ring_forward and ring_backward, all ranks in this process."""
    layouts, inputs = case.layouts(world_size), case.inputs()

    def work(rank: int, transport: LocalTransport) -> tuple[Tensor, ...]:
        sides = (layouts[0], layouts[1], layouts[1], layouts[0])
        q, k, v, dout = (layout.shard(x, rank) for x, layout in zip(inputs, sides, strict=True))
        call = _call(case, world_size, rank)
        sinks = case.build_sinks()
        out, lse = ring_forward(q, k, v, call, transport, sinks)
        return out, lse, *ring_backward(q, k, v, out, lse, dout, call, transport, sinks)

    *shards, dsinks = zip(*run_local(world_size, work), strict=True)
    whole = {}
    for name, parts in zip(RESULTS, shards, strict=True):
        layout = layouts[name in ("dk", "dv")]
        whole[name] = layout.unshard(parts, dim=2 if name == "lse" else 1)
    return Expected(**whole, dsinks=_sum(dsinks) if case.sinks else None)


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
@pytest.mark.parametrize(
    ("heads", "dtype", "travels"),
    [
        ((2, 2), torch.float32, "q"),
        ((4, 4), torch.bfloat16, "q"),
        ((4, 1), torch.float32, "kv"),
        ((4, 1), torch.bfloat16, "kv"),
    ],
)
def test_cases_have_either_side_travelling(
    world_size: int, heads: tuple[int, int], dtype: torch.dtype, travels: Traveller
) -> None:
    """Among the cases above are both paths of the backward, at every world size."""
    masks = set()
    for case in CASES:
        if ((case.nheads, case.nheads_kv), case.dtype) != (heads, dtype):
            continue
        mask = case.attention_mask()
        if mask.seqlen_q == mask.seqlen_k and case.headdim == case.headdim_v and case.seqlen > 1:
            call = _call(case, world_size, 0)
            if call.travels_back == travels and call.plan(backward=True).num_hops:
                masks.add(case.mask)
    assert "causal" in masks


# --- under autograd: each function runs on every rank and checks there


ONE = Case("causal", "zigzag", nheads=4, nheads_kv=2)


def _ring(case: Case) -> tuple[Callable[..., Any], Inputs]:
    """ring_attention with the case's options, and this rank's shards; each requires a gradient."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    (layout, _), mask = case.layouts(world_size), case.attention_mask()
    q, k, v, dout = (layout.shard(x, rank) for x in case.inputs())
    shards = Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)
    return partial(ring_attention, causal=mask.causal, layout=layout), shards


def two_layers_in_one_graph() -> None:
    """One layer's output is the next one's query and part of its value; against call by call."""
    ring, (q, k, v, dout) = _ring(Case("causal", "zigzag"))
    first = ring(q, k, v)
    got = torch.autograd.grad(ring(first, k, first + v), (q, k, v), dout)

    # The chain rule by hand; each sum has two terms, so their order is no matter.
    first = ring(q, k, v)
    query, value = (x.detach().requires_grad_() for x in (first, first + v))
    grads = torch.autograd.grad(ring(query, k, value), (query, k, value), dout)
    below = torch.autograd.grad(first, (q, k, v), grads[0] + grads[2])
    wanted = (below[0], below[1] + grads[1], below[2] + grads[2])
    for name, x, y in zip("qkv", got, wanted, strict=True):
        assert torch.equal(x, y), name


def calls_in_flight() -> None:
    """Two forwards, then their backwards in either order, against one after the other."""
    (ring, a), (_, b) = _ring(ONE), _ring(replace(ONE, nheads_kv=1))

    def both(order: str) -> dict[str, tuple[Tensor, ...]]:
        outs = {"a": ring(*a[:3]), "b": ring(*b[:3])}
        inputs = {"a": a, "b": b}
        return {n: torch.autograd.grad(outs[n], inputs[n][:3], inputs[n].dout) for n in order}

    forwards, backwards = both("ab"), both("ba")
    for name, shards in (("a", a), ("b", b)):
        alone = torch.autograd.grad(ring(*shards[:3]), shards[:3], shards.dout)
        for x, y, z in zip(alone, forwards[name], backwards[name], strict=True):
            assert torch.equal(x, y) and torch.equal(x, z), name


def double_backward_is_refused() -> None:
    """Whether dout is a constant, depends on the inputs, or is a leaf that requires a gradient."""
    ring, (q, k, v, dout) = _ring(ONE)
    for wrt in (q, k, v):
        for seed in (torch.ones_like(dout), dout.clone().requires_grad_()):
            (grad,) = torch.autograd.grad(ring(q, k, v), wrt, seed, create_graph=True)
            assert grad.requires_grad
            with pytest.raises(NotImplementedError, match="differentiable once"):
                grad.sum().backward()
    (grad,) = torch.autograd.grad(ring(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        torch.autograd.grad(grad.sum(), k)
    # Asked for and not used, it changes nothing.
    (kept,) = torch.autograd.grad(ring(q, k, v), q, dout, create_graph=True)
    (usual,) = torch.autograd.grad(ring(q, k, v), q, dout)
    assert torch.equal(kept, usual) and not usual.requires_grad


def lse_takes_no_gradient() -> None:
    """lse is a constant to autograd, and out beside it is not."""
    ring, (q, k, v, dout) = _ring(ONE)
    out, lse = ring(q, k, v, return_lse=True)
    assert out.requires_grad and not lse.requires_grad
    assert lse.dtype == torch.float32 and lse.shape == (1, ONE.nheads, q.size(1))
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(lse.sum(), q)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    usual = torch.autograd.grad(ring(q, k, v), (q, k, v), dout)
    assert all(torch.equal(x, y) for x, y in zip(grads, usual, strict=True))


def saves_five_tensors() -> None:
    """q, k, v as they were passed, out, lse: no buffer of the communication, nor a view of one.

    And the number of the call, for its backward.
    """
    ring, (q, k, v, _) = _ring(ONE)
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        out, lse = ring(q, k, v, return_lse=True)
    *saved, number = saved
    assert number.shape == () and [x.shape for x in saved] == [x.shape for x in (q, k, v, out, lse)]
    for one, x in zip(saved, (q, k, v, out, lse), strict=True):
        assert one.data_ptr() == x.data_ptr()
        assert one.untyped_storage().nbytes() == x.numel() * x.element_size()


def checkpointed() -> None:
    """Recomputed in the backward, by either implementation: the same bits."""
    ring, (q, k, v, dout) = _ring(ONE)
    usual = torch.autograd.grad(ring(q, k, v), (q, k, v), dout)
    for use_reentrant in (False, True):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = checkpoint(ring, *leaves, use_reentrant=use_reentrant)
        out.backward(dout)
        for leaf, grad in zip(leaves, usual, strict=True):
            assert leaf.grad is not None and torch.equal(leaf.grad, grad), use_reentrant


def some_inputs_without_gradient() -> None:
    """Every choice of inputs gets the bits of all three; with none there is no graph."""
    ring, (q, k, v, dout) = _ring(ONE)
    usual = torch.autograd.grad(ring(q, k, v), (q, k, v), dout)
    for chosen in range(8):
        leaves = [x.detach().requires_grad_(bool(chosen >> i & 1)) for i, x in enumerate((q, k, v))]
        out = ring(*leaves)
        assert out.requires_grad == bool(chosen)
        if chosen:
            out.backward(dout)
        for leaf, grad in zip(leaves, usual, strict=True):
            assert (leaf.grad is not None) == leaf.requires_grad
            assert leaf.grad is None or torch.equal(leaf.grad, grad)
    with torch.no_grad():
        assert not ring(q, k, v).requires_grad
    with torch.inference_mode():
        assert torch.equal(ring(q, k, v), ring(q.detach(), k.detach(), v.detach()))


def any_strides_of_dout() -> None:
    """A gradient of stride 0 (out.sum()), of transposed heads, and one that starts off its rows."""
    ring, (q, k, v, dout) = _ring(ONE)

    def gradients(seed: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(ring(q, k, v), (q, k, v), seed)

    summed = torch.autograd.grad(ring(q, k, v).sum(), (q, k, v))
    expanded = torch.ones(()).expand_as(dout)
    transposed = dout.transpose(1, 2).contiguous().transpose(1, 2)
    spread = torch.zeros(*dout.shape[:-1], 2 * dout.size(-1) + 1)[..., 1::2].copy_(dout)
    usual, ones = gradients(dout), gradients(torch.ones_like(dout))
    pairs = ((summed, ones), (gradients(expanded), ones))
    pairs += ((gradients(transposed), usual), (gradients(spread), usual))
    for got, wanted in pairs:
        assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


def inputs_are_not_touched() -> None:
    """q, k, v and dout are read only; a second backward through a kept graph gives the same."""
    ring, (q, k, v, dout) = _ring(ONE)
    before = [x.detach().clone() for x in (q, k, v, dout)]
    out = ring(q, k, v)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    second = torch.autograd.grad(out, (q, k, v), dout)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v, dout), before, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def gradients_accumulate() -> None:
    """backward() twice adds to .grad, as for any parameter."""
    ring, (q, k, v, dout) = _ring(ONE)
    once = torch.autograd.grad(ring(q, k, v), (q, k, v), dout)
    for _ in range(2):
        ring(q, k, v).backward(dout)
    for x, grad in zip((q, k, v), once, strict=True):
        assert x.grad is not None and torch.equal(x.grad, grad + grad)


def changed_inputs_are_found() -> None:
    """A saved input changed in place before the backward is an error, not a wrong gradient."""
    ring, (q, k, v, dout) = _ring(ONE)
    out = ring(q, k, v)
    with torch.no_grad():
        k.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout)


def the_ring_has_its_own_groups() -> None:
    """One transport for each group and options; collectives of the caller run between its steps."""
    world = _world()
    ring, (q, k, v, _) = _ring(ONE)
    assert open_p2p(world, TransportOptions()) is open_p2p(world, TransportOptions())
    other = open_p2p(world, TransportOptions(timeout=20))
    assert other is not open_p2p(world, TransportOptions())
    usual = ring(q, k, v)
    before = other.stats.messages
    assert torch.equal(usual, ring(q, k, v, transport=TransportOptions(timeout=20)))
    assert other.stats.messages - before == dist.get_world_size() - 1
    # An unfinished collective on the caller's group does not stand in the way.
    x = torch.full((1000,), float(dist.get_rank() + 1))
    work = dist.all_reduce(x, async_op=True)
    assert torch.equal(usual, ring(q, k, v))
    work.wait()
    total = dist.get_world_size() * (dist.get_world_size() + 1) // 2
    assert bool((x == total).all())


ON_RANKS = [
    two_layers_in_one_graph,
    calls_in_flight,
    double_backward_is_refused,
    lse_takes_no_gradient,
    saves_five_tensors,
    checkpointed,
    some_inputs_without_gradient,
    any_strides_of_dout,
    inputs_are_not_touched,
    gradients_accumulate,
    changed_inputs_are_found,
    the_ring_has_its_own_groups,
]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("check_on_ranks", ON_RANKS, ids=lambda fn: fn.__name__)
def test_autograd(ranks: Any, check_on_ranks: Callable[[], None], world_size: int) -> None:
    ranks(world_size).run(check_on_ranks)


# --- gradients that are continued rank by rank


CONTINUED = (
    Case("causal", "contiguous", nheads=4),
    Case("causal", "boundaries", nheads=4, nheads_kv=2, dtype=torch.bfloat16),
    Case("left", "contiguous"),
    Case("full", "zigzag"),
    Case("documents_unequal", "boundaries"),
)


def continued_gradients(case: Case) -> None:
    """Bits and messages are those of the ring in one process, and of the cost model."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layouts, inputs = case.layouts(world_size), case.inputs()
    transport = open_p2p(_world(), TransportOptions())

    def work(rank: int, transport: LocalTransport | P2PTransport) -> tuple[Tensor | None, ...]:
        call = replace(_call(case, world_size, rank), travels_back="kv", in_order=True)
        sides = (layouts[0], layouts[1], layouts[1], layouts[0])
        q, k, v, dout = (side.shard(x, rank) for side, x in zip(sides, inputs, strict=True))
        out, lse = ring_forward(q, k, v, call, transport)
        transport.stats.reset()
        return ring_backward(q, k, v, out, lse, dout, call, transport)

    with poisoned_empty():
        got = work(rank, transport)
    plan = replace(_call(case, world_size, rank), travels_back="kv").plan(backward=True)
    options = {"backward": True, "in_order": True}
    assert transport.stats.bytes_sent == bytes_sent(plan, case.spec(), **options)
    assert transport.stats.messages == num_messages(plan, **options)
    for x, y in zip(got[:3], run_local(world_size, work)[rank][:3], strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", CONTINUED, ids=str)
def test_continued_gradients(ranks: Any, one_thread: None, case: Case, world_size: int) -> None:
    ranks(world_size).run(continued_gradients, case)


# --- gathering


def unshard_round_trips() -> None:
    """unshard undoes shard for every layout, dim and dtype, uneven and empty shards included."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for kind in LAYOUTS:
        for seqlen in (1, 2, 113):
            layout = _layout(kind, seqlen, world_size)
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
                x = torch.arange(2 * seqlen * 3).reshape(2, seqlen, 3).to(dtype)
                assert torch.equal(unshard(layout.shard(x, rank), layout), x)
            x = torch.arange(seqlen * 4.0)
            for shape, dim in (((seqlen, 4), 0), ((4, seqlen), 1), ((2, 2, seqlen), -1)):
                whole = x.reshape(shape)
                got = unshard(layout.shard(whole, rank, dim), layout, dim=dim)
                assert torch.equal(got, whole), (kind, seqlen, shape)
    layout = SequenceLayout.contiguous(113, world_size)
    shard = layout.shard(torch.randn(1, 113, 4), rank).requires_grad_()
    assert not unshard(shard, layout).requires_grad


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_unshard(ranks: Any, world_size: int) -> None:
    ranks(world_size).run(unshard_round_trips)


def transport_of_the_world() -> tuple[int, int, list[str]]:
    """Rank, world size, and the connections that the ring has made."""
    transport: P2PTransport = open_p2p(_world(), TransportOptions())
    ring_attention(*(torch.ones(1, 3, 2, 8) for _ in range(3)))
    return transport.rank, transport.world_size, list(rank_group(_world())._media)


def test_a_ring_of_one_makes_no_connections(ranks: Any) -> None:
    assert ranks(1).run(transport_of_the_world) == [(0, 1, [])]
    assert ranks(2).run(transport_of_the_world) == [(0, 2, ["cpu"]), (1, 2, ["cpu"])]
