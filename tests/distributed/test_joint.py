"""Joint layouts, of which every rank holds some rows, against float64 attention."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, Literal, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import JointLayout, Mask, SequenceLayout, masks, ring_attention, stats, unshard
from ring_attn.backends.kept_launches import KeptLaunches
from ring_attn.call import Call
from ring_attn.core import program as ops
from ring_attn.core.copies import local_layouts, local_mask
from ring_attn.core.mask import Slice
from ring_attn.core.program import Op, Program
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import resolve_strategy
from ring_attn.machines.count import bytes_sent
from ring_attn.machines.count import peak_bytes as count_peak
from ring_attn.planning.replicated import joint_programs, replicated_program
from ring_attn.profiling import collect, peak_bytes
from ring_attn.strategies.registry import make_call
from ring_attn.testing import (
    Expected,
    Inputs,
    dense_gradients,
    plain_gradients,
    random_qkv,
    random_sinks,
)
from ring_attn.transport import groups
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.p2p import open_p2p
from tests.bounds import assert_holds
from tests.distributed.pool import Pools, on_ranks
from tests.refusals import refused

pytestmark = pytest.mark.gloo

TEXT, VIDEO = 7, 31
SEQLEN = TEXT + VIDEO
# Gradients of a replicated row on the three ranks, as shares of the whole: exact in any dtype.
SHARES = (0.5, 0.25, 0.25)


def joint(kind: str = "contiguous", where: str = "first", world_size: int = 3) -> JointLayout:
    """Text and video, in one of several orders."""
    video = SequenceLayout.from_name(kind, VIDEO, world_size)
    if where == "first":
        return JointLayout([TEXT, video])
    if where == "last":
        return JointLayout([video, TEXT])
    half = SequenceLayout.from_name(kind, VIDEO - 10, world_size)
    other = SequenceLayout.from_name(kind, 10, world_size)
    return JointLayout([2, half, 1, other, TEXT - 3])  # registers, a token between, and text


def summed(local: Tensor, layout: Any) -> Tensor:
    """Return the whole tensor, in which each row is the sum of all ranks' rows."""
    whole = local.new_zeros(local.size(0), layout.seqlen, *local.shape[2:])
    whole[:, layout.position_ids(dist.get_rank())] = local.detach()
    dist.all_reduce(whole)
    return whole


def check_call(
    inputs: Inputs, seen: Mask, layouts: tuple[Any, Any], where: object, **options: Any
) -> None:
    """Compare out, lse and gradients of one call on this rank with attention in float64."""
    rank = dist.get_rank()
    layout_q, layout_k = layouts
    q, k, v = (
        layout.shard(x, rank).requires_grad_()
        for x, layout in zip(inputs[:3], (layout_q, layout_k, layout_k), strict=True)
    )
    dout = inputs.dout
    positions = layout_q.position_ids(rank)
    if isinstance(layout_q, JointLayout):
        is_replicated = torch.zeros(layout_q.seqlen, dtype=torch.bool)
        starts = torch.tensor([0, *layout_q.part_lens]).cumsum(0)
        for start, part in zip(starts, layout_q.parts, strict=False):
            if isinstance(part, int):
                is_replicated[start : start + part] = True
        dout = dout.where(~is_replicated[:, None, None], dout * SHARES[rank])
    leaves = [q, k, v]
    scores = {name: options[name] for name in ("softcap", "sinks") if name in options}
    if "sinks" in options:
        options["sinks"] = options["sinks"].clone().requires_grad_()
        leaves.append(options["sinks"])
    out, lse = ring_attention(q, k, v, layout=layouts, return_lse=True, **options)
    dq, dk, dv, *dsinks = torch.autograd.grad(out, leaves, dout[:, positions])
    for share in dsinks:
        dist.all_reduce(share)
    got = Expected(
        unshard(out.detach(), layout_q),
        unshard(lse, layout_q, dim=2),
        summed(dq, layout_q),
        summed(dk, layout_k),
        summed(dv, layout_k),
        *dsinks,
    )
    # Each rank compares its own rows, since `unshard` takes replicated rows from their owners.
    assert torch.equal(got.out[:, positions], out), where
    assert torch.equal(got.lse[:, :, positions], lse), where
    oracle = dense_gradients(*inputs, seen, **scores)
    assert_holds(got, oracle, plain_gradients(*inputs, seen, **scores), where)


CALLS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window_size": (9, 4)},
    "documents": {"cu_seqlens": torch.tensor([0, 5, 22, SEQLEN], dtype=torch.int32)},
    "text and a window": {
        "mask": Mask.of(
            SEQLEN,
            SEQLEN,
            [
                Slice(0, TEXT, 0, SEQLEN),
                Slice(TEXT, SEQLEN, 0, TEXT),
                Slice(TEXT, SEQLEN, TEXT, SEQLEN, lo=-6, hi=3),
            ],
        )
    },
}


def mask_of(options: dict[str, Any]) -> Mask:
    if "mask" in options:
        return options["mask"]
    cu = options.get("cu_seqlens")
    cuts = None if cu is None else tuple(cu.tolist())
    window = options.get("window_size", (-1, -1))
    return Mask(SEQLEN, SEQLEN, options.get("causal", False), window, cuts, cuts)


STRATEGIES = ["ring", "all_gather", "exchange", "ulysses"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(3)
def test_every_mask_with_every_strategy(strategy: str) -> None:
    """The strategies also take turns with the kinds of layouts, and orders of text and video."""
    kinds = ("contiguous", "zigzag", "striped")
    orders = ("first", "last", "between")
    inputs = random_qkv(batch=2, seqlen_q=SEQLEN, nheads=6, nheads_kv=3, headdim=8)
    for number, (name, options) in enumerate(CALLS.items(), STRATEGIES.index(strategy)):
        layout = joint(kinds[number % 3], orders[number // 2 % 3])
        if name == "text and a window" and layout.parts[0] != TEXT:
            layout = joint(kinds[number % 3])
        check_call(
            inputs,
            mask_of(options),
            (layout, layout),
            (name, strategy, layout),
            strategy=strategy,
            **options,
        )


@on_ranks(3)
def test_sinks_a_cap_and_other_dtypes() -> None:
    layout = joint("zigzag", "last")
    for dtype in (torch.bfloat16, torch.float64):
        inputs = random_qkv(seqlen_q=SEQLEN, nheads=4, nheads_kv=2, headdim=16, dtype=dtype)
        sinks = random_sinks(4)
        mask = Mask(SEQLEN, SEQLEN)
        check_call(inputs, mask, (layout, layout), dtype, sinks=sinks, softcap=5.0)


@on_ranks(3)
def test_a_mask_of_each_batch_entry() -> None:
    """Two prompts in a batch, as for guidance, of which one is shorter."""
    for where in ("first", "last"):
        layout, rank = joint(where=where), dist.get_rank()
        each = [with_prompt(length, where) for length in (TEXT, 2)]
        inputs = random_qkv(batch=2, seqlen_q=SEQLEN, nheads=4, headdim=8)
        q, k, v, _ = (layout.shard(x, rank) for x in inputs)
        out = ring_attention(q, k, v, mask=each, layout=layout)
        for entry, mask in enumerate(each):
            rows = [x[entry : entry + 1] for x in (q, k, v)]
            check = Inputs(*(x[entry : entry + 1] for x in inputs))
            check_call(check, mask, (layout, layout), (where, entry), mask=mask)
            one = ring_attention(*rows, mask=mask, layout=layout)
            torch.testing.assert_close(out[entry : entry + 1], one)


def with_prompt(length: int, where: str) -> Mask:
    """Return a mask that hides the padding of a shorter prompt."""
    if where == "last":
        return Mask.of(SEQLEN, SEQLEN, [Slice(0, SEQLEN, 0, VIDEO + length)])
    prompt, video = Slice(0, SEQLEN, 0, length), Slice(0, SEQLEN, TEXT, SEQLEN)
    return Mask.of(SEQLEN, SEQLEN, [prompt, video])


FRAMES, ROWS = 4, 6


def frames_seen(kind: str) -> Mask:
    """Return a mask between the frames of a video, as the page on diffusion makes them."""
    frame = torch.arange(FRAMES)
    distance = (frame[:, None] - frame).abs()
    if kind == "frame-causal":
        return masks.blocks(distance.new_ones(FRAMES, FRAMES).tril().bool(), ROWS)
    if kind == "window and sink":
        return masks.blocks((distance <= 1) | (frame[None] == 0), ROWS)
    return masks.neighborhood((FRAMES, 2, 3), (1, 1, 1))


@pytest.mark.parametrize("where", ["first", "last"])
@on_ranks(3)
def test_masks_of_frames_with_text(where: Literal["first", "last"]) -> None:
    text = 5
    for number, kind in enumerate(("frame-causal", "window and sink", "neighborhood")):
        mask = masks.with_text(frames_seen(kind), text, where)
        video = SequenceLayout.from_name(("zigzag", "contiguous", "striped")[number], 24, 3)
        layout = JointLayout([text, video] if where == "first" else [video, text])
        inputs = random_qkv(seqlen_q=24 + text, nheads=2, headdim=8)
        check_call(inputs, mask, (layout, layout), kind, mask=mask, strategy="auto")


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses", "auto"])
@on_ranks(3)
def test_keys_that_every_rank_holds_are_not_sent(strategy: str) -> None:
    video, text = SequenceLayout.striped(VIDEO, 3), JointLayout([TEXT], world_size=3)
    inputs = random_qkv(seqlen_q=VIDEO, seqlen_k=TEXT, nheads=4, nheads_kv=2, headdim=8)
    with collect():
        check_call(inputs, Mask(VIDEO, TEXT), (video, text), "text", strategy=strategy)
        sent = stats().forward.bytes_sent, stats().backward.bytes_sent
    assert sent == (0, 0)
    cuts = masks.documents([0, 4, VIDEO], [0, 3, TEXT])
    check_call(inputs, cuts, (video, text), "documents", mask=cuts, strategy=strategy)
    padded = Mask.of(VIDEO, TEXT, [Slice(0, VIDEO, 0, 5)])
    check_call(inputs, padded, (video, text), "padded", mask=padded)
    straight = SequenceLayout.zigzag(VIDEO, 3)
    frames = masks.window(VIDEO, 8, 8, seqlen_k=TEXT)
    check_call(inputs, frames, (straight, text), "window", mask=frames)


@on_ranks(3)
def test_queries_without_text_over_keys_with_text() -> None:
    video, layout = SequenceLayout.zigzag(VIDEO, 3), joint("zigzag")
    inputs = random_qkv(seqlen_q=VIDEO, seqlen_k=SEQLEN, nheads=4, headdim=8)
    check_call(inputs, Mask(VIDEO, SEQLEN), (video, layout), "video")
    text = JointLayout([5], world_size=3)
    inputs = random_qkv(seqlen_q=5, seqlen_k=SEQLEN, nheads=4, headdim=8)
    check_call(inputs, Mask(5, SEQLEN), (text, layout), "text")


@on_ranks(3)
def test_fewer_replicated_rows_than_ranks_and_none() -> None:
    for text in (0, 1, 2):
        layout = JointLayout([text, SequenceLayout.contiguous(2, 3)])
        inputs = random_qkv(seqlen_q=text + 2, nheads=2, headdim=8)
        check_call(inputs, Mask(text + 2, text + 2), (layout, layout), text)


@on_ranks(2)
def test_wrong_layouts_are_refused() -> None:
    group, rank = dist.new_group(), dist.get_rank()
    layout = joint(world_size=2)
    x = layout.shard(torch.ones(1, SEQLEN, 2, 8), rank)

    def call(rows: Tensor, given: Any, **options: Any) -> None:
        ring_attention(rows, rows, rows, layout=given, group=group, **options)

    with refused(ValueError, "q of rank|7 + |whole of each replicated part"):
        call(x[:, 1:], layout)
    with refused(ValueError, "for 2 ranks, as the group has"):
        call(x, joint(world_size=3))
    with refused(NotImplementedError, "tail halves is for a contiguous layout"):
        call(x, layout, strategy="q_exchange")
    with refused(TypeError, "a JointLayout, or a pair of"):
        call(x, (layout, "contiguous"))
    with refused(NotImplementedError, "same_bits=True|rows that every rank holds|SequenceLayout"):
        call(x, layout, same_bits=True)
    with refused(ValueError, "strategy"):
        text = JointLayout([TEXT], world_size=2)
        ring_attention(
            x, x[:, :TEXT], x[:, :TEXT], layout=(layout, text), group=group, strategy="rings"
        )


@on_ranks(2)
def test_ranks_with_other_texts_raise() -> None:
    rank = dist.get_rank()
    layout = JointLayout([TEXT + rank, SequenceLayout.contiguous(VIDEO - rank, 2)])
    x = layout.shard(torch.ones(1, SEQLEN, 2, 8), rank)
    with pytest.raises(RuntimeError, match="layout"):
        ring_attention(x, x, x, layout=layout, group=dist.new_group())


@on_ranks(3)
def test_sent_bytes_are_those_of_the_plan() -> None:
    layout, rank = joint(), dist.get_rank()
    inputs = random_qkv(batch=2, seqlen_q=SEQLEN, nheads=4, headdim=8)
    q, k, v, dout = (layout.shard(x, rank) for x in inputs)
    spec = AttentionSpec.of(q, k, v)
    counts = [layout.num_owned(owner) for owner in range(3)]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    owned = [layout.owners.shard(x, rank).requires_grad_() for x in inputs[:3]]
    sent = open_p2p(groups.check_group(None), TransportOptions()).stats

    def bytes_of(layout: Any, leaves: list[Tensor], dout: Tensor) -> tuple[int, int]:
        """Return the bytes that this rank sends forward and backward."""
        before = sent.bytes_sent
        out = ring_attention(*leaves, layout=layout)
        between = sent.bytes_sent
        torch.autograd.grad(out, leaves, dout)
        return between - before, sent.bytes_sent - between

    both = bytes_of(layout, leaves, dout)
    alone = bytes_of(layout.owners, owned, layout.owned(dout, rank))
    for backward in (False, True):
        program = replicated_program(counts, spec, rank, backward=backward)
        assert both[backward] - alone[backward] == bytes_sent(program)


# -- memory


class Sizes(NamedTuple):
    """A batch of text and video, and whether the text is first or last."""

    batch: int
    text: int
    video: int
    where: str


# The exchange holds most where the text is long; a rank may own none of a short one, or no video.
# Without a video, each rank attends to its own copy of all keys.
SIZES = [
    Sizes(1, 96, 36, "first"),
    Sizes(2, 96, 36, "last"),
    Sizes(2, 24, 90, "first"),
    Sizes(1, 2, 31, "last"),
    Sizes(2, 5, 1, "last"),
    Sizes(1, 0, 24, "first"),
    Sizes(2, 97, 0, "first"),
    Sizes(1, 2, 0, "first"),
]
# 64 heads of 8 have 2 KiB a row, so that no message is padded to 16 bytes.
NHEADS, NHEADS_KV, HEADDIM = 64, 32, 8


def joint_call(
    strategy: str, layout: JointLayout, sizes: Sizes, dtype: torch.dtype, backend: str
) -> Call:
    """Return the call of the owners on this rank."""
    spec = AttentionSpec("cpu", dtype, sizes.batch, NHEADS, NHEADS_KV, HEADDIM, HEADDIM)
    owners = layout.owners
    layouts, mask = (owners, owners), Mask(owners.seqlen, owners.seqlen)
    if layout.is_replicated:
        strategy, layouts = "ring", local_layouts(owners, owners.seqlen)
        mask = local_mask(owners, owners.seqlen, mask)
    return make_call(
        resolve_strategy(strategy, layout.world_size),
        spec,
        layouts,
        mask,
        dist.get_rank(),
        backend=backend,
    )


def measured_peak(
    strategy: str,
    layout: JointLayout | SequenceLayout,
    sizes: Sizes,
    dtype: torch.dtype,
    backend: str,
    *,
    backward: bool,
) -> int:
    """Return the peak of the bytes that this rank allocates."""
    rows = layout.shard_len(dist.get_rank())
    q, k, v, dout = (
        torch.zeros(sizes.batch, rows, nheads, HEADDIM, dtype=dtype)
        for nheads in (NHEADS, NHEADS_KV, NHEADS_KV, NHEADS)
    )
    for x in (q, k, v):
        x.requires_grad_(backward)

    def work() -> object:
        out = ring_attention(q, k, v, layout=layout, strategy=strategy, backend=backend)
        return out, torch.autograd.grad(out, (q, k, v), dout) if backward else ()

    work()  # the first call of a process makes values that stay
    return peak_bytes(work)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_peak_memory_is_that_of_the_plan(world_size: int, strategy: str, ranks: Pools) -> None:
    ranks(world_size).run(check_peaks, strategy)


def check_peaks(strategy: str) -> None:
    """Compare the bytes that a call with replicated rows takes, and those of the owners' call."""
    missed = {"own q", "out", "rows of all", "own dout"}
    # Without kernels, whose interpreter takes memory.
    with mock.patch.object(KeptLaunches, "run", lambda *_, **__: None):
        for sizes, backward in product(SIZES, (False, True)):
            call, programs = check_peak(strategy, sizes, torch.float32, "triton", backward=backward)
            for name in missed.copy():
                fewer = [without(program, name) for program in programs]
                if count_peak(fewer, call) != count_peak(programs, call):
                    missed.remove(name)
    assert not missed, "a tensor that the plan omits is found"


def check_peak(
    strategy: str, sizes: Sizes, dtype: torch.dtype, backend: str, *, backward: bool
) -> tuple[Call, list[Program]]:
    """Compare the bytes that a call takes with those of its programs, which are returned."""
    world_size = dist.get_world_size()
    video = SequenceLayout.contiguous(sizes.video, world_size)
    layout = JointLayout([sizes.text, video] if sizes.where == "first" else [video, sizes.text])
    found = measured_peak(strategy, layout, sizes, dtype, backend, backward=backward)
    call = joint_call(strategy, layout, sizes, dtype, backend)
    counts = [layout.num_owned(rank) for rank in range(world_size)] if layout.has_copies else []
    programs = joint_programs(call, counts, backward=backward)
    # The number of the forward, which the backward has in 8 bytes, and a factor that torch has in
    # 12 bytes as a tensor.
    assert found - count_peak(programs, call) in {0, 8, 12, 20}, (sizes, dtype, backward)
    return call, programs


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_peak_memory_of_16_bits_is_that_of_the_plan(
    world_size: int, strategy: str, ranks: Pools
) -> None:
    ranks(world_size).run(check_peaks_of_16_bits, strategy)


def check_peaks_of_16_bits(strategy: str) -> None:
    """Compare the bytes that a call takes, of which the sums of shares are wider."""
    for dtype, backward in product((torch.bfloat16, torch.float16), (False, True)):
        for sizes in (Sizes(1, 48, 6, "first"), Sizes(2, 24, 18, "last"), Sizes(2, 0, 24, "first")):
            check_peak(strategy, sizes, dtype, "reference", backward=backward)


def without(program: Program, name: str) -> Program:
    """Return the program without memory for a tensor."""

    def empty(op: Op) -> Op:
        if isinstance(op, ops.New) and op.name == name:
            return op._replace(array=replace(op.array, rows=0))
        return op

    return replace(program, ops=tuple(map(empty, program.ops)))
