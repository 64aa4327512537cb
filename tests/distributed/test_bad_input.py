"""Bad arguments: one error of the right type, on every rank, that says what to do; nothing is sent.

The table runs in a ring of two, where making groups and sending are replaced by functions that
raise: an error that comes later than the checks shows as another error.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from ring_attn import (
    Mask,
    SequenceLayout,
    TransportOptions,
    halo,
    masks,
    ring_attention,
    select_backend,
    sync_gradients,
    testing,
    tree_decode,
    unshard,
)
from ring_attn.core.strategy import Strategy
from ring_attn.transport import capture, p2p
from ring_attn.transport.ranks.calls import CallLedger
from tests.distributed.pool import ended, on_ranks
from tests.refusals import refused, says
from tests.unit.test_wrong_values import assert_named, defaults

pytestmark = pytest.mark.gloo  # nothing is sent

# Global length; each of the two ranks holds half.
SEQLEN = 12
ROWS = SEQLEN // 2

Arguments = dict[str, Any]


RUNS = SequenceLayout.contiguous(SEQLEN, 2)

# Replacements for good arguments, or a function that makes them on the rank; the error; and the
# words of its message, between bars.
Bad = tuple[Arguments | Callable[[], Arguments], type[Exception], str]


def refused_with(error: type[Exception]) -> Callable[..., Bad]:
    def bad(
        words: str, made: Arguments | Callable[[], Arguments] | None = None, /, **given: Any
    ) -> Bad:
        return made or given, error, words

    return bad


value_error, type_error = refused_with(ValueError), refused_with(TypeError)
not_built, state_error = refused_with(NotImplementedError), refused_with(RuntimeError)


def x(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def good() -> Arguments:
    """q, k, v of a rank: 4 query heads and 2 kv heads of headdim 8."""
    return {"q": x(1, ROWS, 4, 8), "k": x(1, ROWS, 2, 8), "v": x(1, ROWS, 2, 8)}


def packed(*cu_seqlens: int, **arguments: Any) -> Arguments:
    """Good arguments without a batch dim, and document boundaries."""
    tensors = {name: tensor[0] for name, tensor in good().items()}
    return {**tensors, "cu_seqlens": ints(*cu_seqlens), **arguments}


def paged(pages: int = 3, **arguments: Any) -> Arguments:
    """Good arguments with a pool of pages of 4, of which two are a sequence's."""
    pool = {name: x(pages, 4, 2, 8) for name in "kv"}
    tables = {"cache_seqlens": ints(9), "block_table": ints(2, 0)[None]}
    return {"q": x(1, 1, 4, 8), **pool, **tables, **arguments}


def heads_first(**arguments: Any) -> Arguments:
    """Good arguments of shape (batch, nheads, rows, headdim)."""
    return {name: tensor.transpose(1, 2) for name, tensor in good().items()} | arguments


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def all_of(dtype: torch.dtype, device: str = "cpu") -> Arguments:
    return {name: tensor.to(dtype).to(device) for name, tensor in good().items()}


def zigzag(seqlen: int, world_size: int = 2) -> SequenceLayout:
    return SequenceLayout.zigzag(seqlen, world_size)


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def dtensor(*shape: int) -> Tensor:
    """A DTensor in the place of a plain tensor."""
    return distribute_tensor(x(*shape), mesh(2), [Replicate()])


def inference(*shape: int) -> Tensor:
    """A tensor that autograd cannot keep."""
    with torch.inference_mode():
        return x(*shape)


def with_tangent(*shape: int) -> Tensor:
    """A dual tensor; its level is left at the end of the table."""
    return forward_ad.make_dual(x(*shape), torch.ones(shape))


def transport(**options: Any) -> Arguments:
    return {"transport": TransportOptions(**options)}


# `TENSORS` and `BACKENDS` are also refused without a process group.
TENSORS: list[Bad] = [
    value_error("q (6, 8)|(batch, rows, nheads", q=x(ROWS, 8)),
    value_error("k (1, 1, 6, 2, 8)", k=x(1, 1, ROWS, 2, 8)),
    value_error("v (6, 2, 8)|all be", v=x(ROWS, 2, 8)),
    value_error("same batch size|k (2, 6, 2, 8)", k=x(2, ROWS, 2, 8)),
    value_error("same batch size|v (2,", v=x(2, ROWS, 2, 8)),
    value_error("batch|not be 0", dict(zip("qkv", 3 * [x(0, ROWS, 2, 8)], strict=True))),
    value_error("k and v|v (1, 7, 2, 8)", v=x(1, ROWS + 1, 2, 8)),
    value_error("k and v|heads|v (1, 6, 4, 8)", v=x(1, ROWS, 4, 8)),
    value_error("same headdim|q (1, 6, 4, 16)", q=x(1, ROWS, 4, 16)),
    value_error("multiple of nheads_kv|nheads=3|nheads_kv=2", q=x(1, ROWS, 3, 8)),
    value_error("must not be 0", k=x(1, ROWS, 0, 8), v=x(1, ROWS, 0, 8)),
    value_error("must not be 0", v=x(1, ROWS, 2, 0)),
    type_error("q must|float8_e4m3fn", all_of(torch.float8_e4m3fn)),
    type_error("k torch.bfloat16", k=x(1, ROWS, 2, 8, dtype=torch.bfloat16)),
    value_error("q must be on cpu or cuda|meta", all_of(torch.float32, "meta")),
    not_built("k with a tangent", lambda: {"k": with_tangent(1, ROWS, 2, 8)}),
    value_error("one device|v on meta", v=x(1, ROWS, 2, 8, device="meta")),
]

BACKENDS: list[Bad] = [
    value_error("backend must be|'aten'|'trition'", backend="trition"),
    not_built("backend='cudnn'|cpu|usable here", backend="cudnn"),
]

# Arguments of `ring_attention` and `tree_decode`.
BOTH: list[Bad] = [
    type_error("q must be a plain dense tensor|.to_local()", lambda: {"q": dtensor(1, ROWS, 4, 8)}),
    value_error("mask|window", mask=masks.causal(SEQLEN), window_size=(3, 0)),
    type_error("instead of is_causal pass causal", is_causal=True),
    type_error("from_dense|whole sequence", attn_mask=torch.ones(2, 2)),
    type_error("instead of attention_mask pass cu_seqlens", attention_mask=torch.ones(1, 2)),
    type_error("instead of scale pass softmax_scale", scale=0.2),
    type_error("a bias is not supported|softcap", attn_bias=torch.ones(2, 2)),
    type_error("instead of score_mod pass softcap", score_mod=max),
    type_error("instead of return_softmax_lse pass return_lse", return_softmax_lse=True),
    type_error("instead of windowsize pass window_size", windowsize=(3, 0)),
    type_error("no option no_such_option: leave these out", no_such_option=1),
    value_error("softmax_scale|positive|0", softmax_scale=0.0),
    value_error("positive|-0.2", softmax_scale=-0.2),
    value_error("softmax_scale|1e-46", softmax_scale=1e-46),
    value_error("softmax_scale|1e+38", softmax_scale=1e38),
    value_error("softcap|0 for no cap|1e-50", softcap=1e-50),
    value_error("softcap|2**63|1e+39", softcap=1e39),
    value_error("softcap must be positive|-30.0", softcap=-30.0),
    not_built("aten|reference", softcap=30.0, backend="aten"),
    type_error("sinks.to_local()", lambda: {"sinks": dtensor(4)}),
    value_error("query head|(4,), got (2,)", sinks=x(2)),
    value_error("sinks|q's device cpu|meta", sinks=x(4, device="meta")),
    not_built("sinks with", lambda: {"sinks": with_tangent(4)}),
    value_error("window_size|-1 is unbounded|-2", window_size=(-2, 0)),
    type_error("scale", scale=0.5),
    value_error("1000000000000000", transport(timeout=1e15)),
    value_error("timeout|1e-12", transport(timeout=1e-12)),
    value_error("nccl_max_ctas|65", transport(nccl_max_ctas=65)),
    value_error("spare_sms|-1", transport(spare_sms=-1)),
    type_error("one_communicator|1", transport(one_communicator=1)),
    value_error(
        "as the group has|world_size=3|pass a layout for 2",
        layout=zigzag(SEQLEN, 3),
    ),
    value_error(
        "must have 6 rows|pass this rank's shard",
        q=x(1, SEQLEN, 4, 8),
        k=x(1, SEQLEN, 2, 8),
        v=x(1, SEQLEN, 2, 8),
        layout=zigzag(SEQLEN),
    ),
    value_error("(1, 2, 1)|mesh['dp']", lambda: {"group": mesh(1, 2, 1, names=("dp", "cp", "tp"))}),
    value_error("their names|(2, 1)", lambda: {"group": mesh(2, 1)}),
    state_error("not a member of group", group=dist.GroupMember.NON_GROUP_MEMBER),
]

ATTENTION: list[Bad] = [
    value_error(
        "v was made under|v.clone()",
        lambda: {"q": x(1, ROWS, 4, 8).requires_grad_(), "v": inference(1, ROWS, 2, 8)},
    ),
    value_error("layout|seqlen=9", mask=masks.causal(9)),
    value_error("mask|causal", mask=masks.causal(SEQLEN), causal=True),
    value_error(
        "sinks was made under|sinks.clone()",
        lambda: {"q": x(1, ROWS, 4, 8).requires_grad_(), "sinks": inference(4)},
    ),
    not_built("same_bits=True|triton", same_bits=True, causal=True),
    not_built("dropout_p must be 0|0.1", dropout_p=0.1),
    not_built("alibi_slopes must be None", alibi_slopes=x(4)),
    value_error("packed|q (6, 4, 8)", packed(0, SEQLEN, cu_seqlens=None)),
    value_error("cu_seqlens must|cpu|got meta", packed(cu_seqlens=ints(0, SEQLEN).to("meta"))),
    value_error("cu_seqlens_k must|got meta", packed(0, 12, cu_seqlens_k=ints(0, 12).to("meta"))),
    value_error("cu_seqlens|start at 0|2", packed(2, SEQLEN)),
    value_error("cu_seqlens|not decrease|8 then 5", packed(0, 8, 5, SEQLEN)),
    value_error("must have 4 rows|got 6|padding|SequenceLayout", packed(0, SEQLEN - 4)),
    value_error("must have 8 rows|got 6|SequenceLayout", packed(0, SEQLEN + 4)),
    value_error("must have 3 rows|must have the boundaries|ends at 6", packed(0, 2, ROWS)),
    type_error("mask|from_dense|masks.blocks|Tensor", mask=torch.ones(2, 2)),
    value_error("rows in dim 1", heads_first(layout=zigzag(SEQLEN))),
    value_error("seqlen=12|16", packed(0, SEQLEN + 4, layout=zigzag(SEQLEN))),
    value_error("cu_seqlens|15", cu_seqlens=ints(0, 15), layout=zigzag(SEQLEN)),
    value_error("cu_seqlens_k needs cu_seqlens", cu_seqlens_k=ints(0, SEQLEN)),
    value_error(
        "same number of documents|2 and 3", packed(0, 5, SEQLEN, cu_seqlens_k=ints(0, 3, 7, SEQLEN))
    ),
    value_error("cu_seqlens_k|start at 0", packed(0, SEQLEN, cu_seqlens_k=ints(1, SEQLEN))),
    value_error(
        "seqlen=12|14", packed(0, SEQLEN, cu_seqlens_k=ints(0, SEQLEN + 2), layout=zigzag(SEQLEN))
    ),
    value_error("layout must be|'zigzag'|'zigzak'", layout="zigzak"),
    value_error("layout must be|SequenceLayout", layout="boundaries"),
    value_error("q of the group's rank|pass a SequenceLayout, not its name", layout=zigzag(20)),
    value_error("k of the group's rank|10 rows|got 6", layout=(zigzag(SEQLEN), zigzag(20))),
    type_error("layout must be|'zigzag'", layout=("zigzag", "zigzag")),
    not_built(
        "must both be striped, or neither|striped(",
        layout=(zigzag(SEQLEN), SequenceLayout.striped(SEQLEN, 2)),
    ),
    value_error("strategy must be one of|'ring'|'star'", strategy="star"),
    value_error("ulysses_degree|divide 2|two axes", strategy="hybrid"),
    value_error("inner_degree|3 and 2", strategy=Strategy(inner_degree=3)),
    value_error("one axis|'hybrid'", lambda: {"group": mesh(1, 2, names=("dp", "cp"))}),
]

if importlib.util.find_spec("flash_attn") is None:
    reported = "backend='flash_attn'|pip install 'ring-attn[flash]'|usable here"
    BACKENDS.append(refused_with(ImportError)(reported, backend="flash_attn"))


DECODE: list[Bad] = [
    not_built("q requires a gradient: ", q=x(1, 1, 4, 8).requires_grad_()),
    not_built("sinks requires", sinks=x(4).requires_grad_()),
    value_error("q must have at least one token, got shape (1, 0, 4", q=x(1, 0, 4, 8)),
    type_error("layout of a cache must be a SequenceLayout", layout="contiguous"),
    value_error("k of the group's rank", layout=SequenceLayout.contiguous(20, 2)),
    value_error("rows in dim 1", heads_first(layout=SequenceLayout.contiguous(SEQLEN, 2))),
    type_error("k must be a torch.Tensor, got None", k=None),
    type_error("return_max_logits", return_max_logits=True),
    value_error("block_table needs cache_seqlens", block_table=ints(0)[None]),
    value_error("cache_seqlens must be at least 0, got -1", cache_seqlens=-1),
    value_error("at most 2**30", cache_seqlens=2**31),
    type_error("cache_seqlens must be int32, got torch.int64|.int()", cache_seqlens=ints(3).long()),
    value_error("cache_seqlens must be (1), one for each|got shape (2,)", cache_seqlens=ints(3, 3)),
    value_error("cache_seqlens must be on q's device", cache_seqlens=ints(3).to("meta")),
    value_error("needs a layout|got layout=None|block_table", cache_seqlens=3),
    value_error("mask needs a cache of one length", paged(mask=masks.causal(SEQLEN))),
    type_error("block_table must be int32", paged(block_table=ints(0)[None].long())),
    value_error("block_table must be (1, pages)|got shape (1,)", paged(block_table=ints(0))),
    value_error("rank's pool|at least one page|(0, 4, 2, 8)", paged(0)),
    value_error("got 25 for sequence 0|can hold 8 rows", paged(cache_seqlens=ints(25))),
    value_error("got -1 for sequence 0", paged(cache_seqlens=ints(-1))),
    value_error("of this rank's pool, 0 to 2|got [3", paged(block_table=ints(3, 0)[None])),
    not_built("one segment|zigzag", paged(layout=zigzag(SEQLEN))),
    value_error("for 2 ranks|world_size=4", paged(layout=zigzag(SEQLEN, 4))),
    value_error("the layout has 12 positions|13", cache_seqlens=13, layout=RUNS),
    value_error("k of the group's rank", cache_seqlens=3, layout=SequenceLayout.contiguous(20, 2)),
]

UNSHARD: list[Bad] = [
    value_error("must have 6 rows|got 7", x=x(1, ROWS + 1, 4)),
    value_error(
        "as the group has|world_size=4|pass a layout for 2",
        layout=zigzag(SEQLEN, 4),
    ),
    value_error("dim", dim=3),
    value_error("meta", x=x(1, ROWS, 4, device="meta")),
]


@contextmanager
def no_communication() -> Iterator[None]:
    """Makes everything raise that starts to communicate."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("communication before the checks")

    with ExitStack() as stack:
        names = ("new_group", "all_gather", "all_gather_object", "isend", "irecv")
        for name in names:
            stack.enter_context(mock.patch.object(dist, name, refuse))
        stack.enter_context(mock.patch.object(CallLedger, "occupy", refuse))
        for name in ("post", "gather"):
            stack.enter_context(mock.patch.object(p2p.P2PTransport, name, refuse))
        yield


def assert_refused(call: partial[object], bad: Bad) -> None:
    """Makes a good call but for an entry of a table."""
    changes, error, words = bad
    got = ended(partial(call, **(changes() if callable(changes) else changes)))
    assert got.error is error and says(got.text, words), (call, words, got)
    assert got.alone, (words, "an error that came up while another was handled")
    assert got.text.strip() == got.text and "\n" not in got.text, got


ATTEND = partial(ring_attention, **good())
DECODED = partial(tree_decode, **good() | {"q": x(1, 1, 4, 8)})
WHOLE = partial(unshard, x=x(1, ROWS, 4), layout=zigzag(SEQLEN), dim=1)
SYNC = partial(sync_gradients, module=[x(3).requires_grad_()], **defaults(sync_gradients))


@on_ranks(2)
def test_bad_arguments() -> None:
    """Every entry of the tables raises its error, and makes no transport."""
    before = set(p2p.transports_of_groups)
    both = (*TENSORS, *BACKENDS, *BOTH)
    tables = (
        (ATTEND, (*both, *ATTENTION)),
        (DECODED, (*both, *DECODE)),
        (WHOLE, UNSHARD),
    )
    with forward_ad.dual_level(), no_communication():
        for call, table in tables:
            for bad in table:
                assert_refused(call, bad)
    assert set(p2p.transports_of_groups) == before


# Words of a message in place of an argument's name.
OTHER_WORDS = {"module": "parameter 0", "dim": "rows"}
# Which of the wrong values an argument takes.
TAKEN = {
    **dict.fromkeys(("causal", "return_lse", "return_max_logits"), ["True"]),
    **dict.fromkeys(("alibi_slopes", "cu_seqlens", "cu_seqlens_k", "group", "mask"), ["None"]),
    **dict.fromkeys(("same_bits", "sinks", "tree_decode's layout"), ["None"]),
    **dict.fromkeys(("cache_seqlens", "block_table"), ["None"]),
    "softmax_scale": ["None", "1.5"],
    "softcap": ["1.5"],
    "x": ["bool tensor", "complex"],
    "module": ["[]", "{}"],
}


@on_ranks(2)
def test_wrong_values_are_refused() -> None:
    """Every other value of a wrong type is refused by the argument's name."""
    for call in (
        partial(ring_attention, **defaults(ring_attention) | good()),
        partial(ring_attention, **defaults(ring_attention) | packed(0, SEQLEN)),
        partial(tree_decode, **defaults(tree_decode) | good() | {"causal": False}),
        partial(WHOLE, group=None),
        partial(halo, **WHOLE.keywords, left=1, right=0, group=None),
        SYNC,
    ):
        with no_communication():
            assert_named(call, TAKEN, OTHER_WORDS, runs=(None, AssertionError))


@on_ranks(2)
def test_options_by_place_are_refused() -> None:
    """Packages have them in other orders: dropout, masks or scales come next to v."""
    for function in (ring_attention, tree_decode):
        call: Any = function
        with no_communication(), refused(TypeError, "takes q, k and v by place|2 more|causal="):
            call(*good().values(), 0.0, None)


@on_ranks(2)
def test_good_arguments_run() -> None:
    """Good arguments run, so each entry fails by its change; `no_communication` does refuse."""
    out = ring_attention(**good())
    stats = p2p.open_p2p(dist.group.WORLD, TransportOptions()).stats  # type: ignore[arg-type]
    before = stats.messages
    documents = ring_attention(**packed(0, 5, SEQLEN))
    assert documents.shape == out.shape[1:]
    assert stats.messages - before == 1
    with pytest.raises(AssertionError, match="communication before"), no_communication():
        ring_attention(**good())


@on_ranks(2)
def test_documents_may_end_where_the_rows_of_a_rank_end() -> None:
    """Boundaries of the whole sequence run; those of one rank raise, or warn if they fit too."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, SEQLEN, 2, 8, generator=generator)
    cuts = (0, 2, ROWS)
    mask = Mask(SEQLEN, SEQLEN, causal=True, cu_seqlens_q=cuts, cu_seqlens_k=cuts)
    for inner, warns in ((ROWS, True), (ROWS + 2, False), (ROWS - 1, False)):
        layout = SequenceLayout.boundaries([0, inner, SEQLEN])
        shards = [layout.shard(x, rank, dim=0) for x in (q, k, v)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = ring_attention(*shards, causal=True, cu_seqlens=ints(*cuts), layout=layout)
        texts = [str(warning.message) for warning in caught]
        assert any("cu_seqlens ends at 6, where the rows of every" in t for t in texts) == warns
        exact = testing.dense_attention(q[None], k[None], v[None], mask)[0]
        plain = testing.plain_attention(q[None], k[None], v[None], mask)[0]
        verdict = testing.check("out", unshard(out, layout, dim=0)[None], exact, plain)
        assert verdict.ok, verdict
    # As each rank understands the boundaries of its own documents, no rank needs a message.
    for cuts in ([0, ROWS, SEQLEN], [0, ROWS + 2, SEQLEN]):
        layout = SequenceLayout.boundaries(cuts)
        own = ints(0, 2 + rank, layout.shard_len(rank))
        shards = [layout.shard(x, rank, dim=0) for x in (q, k, v)]
        with refused(ValueError, "cu_seqlens: global rank|documents in the whole sequence"):
            ring_attention(*shards, causal=True, cu_seqlens=own, layout=layout)


@pytest.mark.parametrize("call", [ATTEND, WHOLE, SYNC], ids=lambda call: call.func.__name__)
def test_no_process_group(call: partial[object]) -> None:
    assert not dist.is_initialized()
    reported = "no process group|init_process_group|torchrun"
    assert_refused(call, state_error(reported))


def test_bad_tensors_without_a_process_group() -> None:
    """Bad tensors are reported first, so that finding the mistake needs no launcher."""
    with forward_ad.dual_level():
        for bad in TENSORS:
            assert_refused(ATTEND, bad)
        for bad in (*TENSORS, *BACKENDS):
            assert_refused(partial(select_backend, **good()), bad)


# -- calls that the tables cannot hold


@on_ranks(2)
def test_scores_are_finite_at_their_bounds() -> None:
    torch.manual_seed(0)
    for scale, softcap in product((2.0**-63, 2.0**63), (0.0, 2.0**-63, 2.0**63)):
        tensors = {name: torch.randn_like(one).requires_grad_() for name, one in good().items()}
        options = {"softmax_scale": scale, "softcap": softcap, "backend": "reference"}
        out = ring_attention(**tensors, **options, causal=True)
        grads = torch.autograd.grad(out.sum(), [*tensors.values()])
        decoded = tree_decode(
            **{name: one.detach() for name, one in tensors.items()}, causal=False, **options
        )
        assert all(bool(one.isfinite().all()) for one in (out, decoded, *grads))


@on_ranks(2)
def test_functionalize_changes_nothing() -> None:
    tensors = good()
    tensors["v"] += 1.0
    out = torch.func.functionalize(lambda q: ring_attention(**{**tensors, "q": q}))(tensors["q"])
    assert float((out - 1.0).abs().max()) < 1e-6


@on_ranks(2)
def test_lost_groups_are_named() -> None:
    group = dist.new_group([0, 1])
    dist.barrier()  # the other rank may still connect
    dist.destroy_process_group(group)
    alone = DeviceMesh("cpu", [0])
    layout = zigzag(SEQLEN)
    calls: list[Callable[[], object]] = [
        lambda: ring_attention(**good(), group=group),
        lambda: tree_decode(**good(), group=group),
        lambda: unshard(x(1, ROWS, 4), layout, group=group),
        lambda: sync_gradients([x(3).requires_grad_()], group),
    ]
    for call in calls:
        with no_communication(), refused(RuntimeError, "group was destroyed"):
            call()
    if dist.get_rank() == 1:
        for function in (ring_attention, tree_decode):
            with (
                no_communication(),
                refused(RuntimeError, "rank, 1, is not a member of group|[0]"),
            ):
                function(**good(), group=alone)


@on_ranks(2)
def test_a_capture_that_needs_the_host_is_refused() -> None:
    """Refuses calls that this rank has not made before, and calls for which the host waits."""
    q, k, v = (one.requires_grad_() for one in good().values())
    layout = SequenceLayout.contiguous(2 * q.size(1), 2)
    backward = ring_attention(q, k, v).sum()
    calls: list[tuple[str, Callable[[], object]]] = [
        ("same forward call", lambda: ring_attention(**good())),
        ("choose a strategy", lambda: ring_attention(**good(), strategy="auto")),
        ("same decode call", lambda: tree_decode(**good(), layout=layout)),
        ("unshard", lambda: unshard(q.detach(), layout)),
        ("halo", lambda: halo(q, layout, 1, 1)),
        ("same backward call", backward.backward),
    ]
    for words, call in calls:
        with (
            refused(NotImplementedError, f"cannot be captured in a CUDA graph|{words}"),
            mock.patch.object(capture, "captures", lambda device: True),
            no_communication(),
        ):
            call()
