"""Comparison of random calls on all ranks with float64, until the time is up or a call fails.

A call that fails is reduced to the smallest one that fails, and printed as the command that repeats
it.
"""

from __future__ import annotations

import argparse
import ast
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import hypothesis
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, reproduce_failure, settings
from hypothesis import strategies as st
from torch import Tensor

from ring_attn import tree_decode
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.oracle import Inputs
from ring_attn.core.spec import AttentionSpec
from ring_attn.machines.check import check
from ring_attn.strategies.registry import programs_of
from ring_attn.strategies.tree_decode import decode_tiles, make_call, program
from ring_attn.testing import Case, Heads, expected, poisoned_empty, run_all_ranks
from ring_attn.testing.ranks import calls_of
from tests import recurrences
from tests.bounds import assert_holds
from tests.distributed import test_neighbours as neighbours
from tests.distributed.pool import Pools
from tests.drawn import flash_masks, layouts, layouts_for, made_masks, slice_masks, table_masks
from tests.unit.test_programs import sent, strategies

HEADS = ((1, 1), (2, 1), (2, 2), (4, 2), (3, 1), (6, 3), (5, 5))
# Dtypes of each backend. bfloat16 is wrong in Triton's interpreter.
DTYPES = {
    **dict.fromkeys(("reference", "aten"), ("float16", "float32", "bfloat16", "float64")),
    "triton": ("float16", "float32"),
}
BLOB = re.compile(r"reproduce_failure\('[^']*', (b'[^']*')\)")

# Processes over gloo, which all calls share. In the queued ones CPU tensors are treated like CUDA
# tensors.
pools = Pools(queued=False)
queued_pools = Pools(queued=True)


# -- attention


@dataclass(frozen=True)
class Call(Case):
    """A case, the number of its ranks, and the kind of values of each of q, k, v and dout."""

    world_size: int = 1
    values: tuple[str, str, str, str] = ("normal",) * 4

    def build_inputs(self, device: torch.device | str = "cpu") -> Inputs:
        return Inputs(*map(changed, super().build_inputs(device), self.values))


def changed(x: Tensor, value: str) -> Tensor:
    """Return the tensor with logits of 1e4, denormal numbers, or -0.0 in every other row."""
    if value == "-0.0":
        x = x.clone()
        x[:, ::2] = -0.0
        return x
    scales = {"normal": 1.0, "1e4": 1e4, "denormal": torch.finfo(x.dtype).tiny / 4}
    return x * scales[value]


@st.composite
def calls(
    draw: st.DrawFn,
    backends: tuple[str, ...],
    decode: bool = False,
    world_sizes: tuple[int, ...] = (1, 2, 3, 4, 5),
) -> Call:
    world_size = draw(st.sampled_from(world_sizes))
    mask = draw(flash_masks(23) | slice_masks() | table_masks() | made_masks())
    if decode:
        hypothesis.assume(mask.seqlen_q)
        first = draw(st.integers(0, mask.seqlen_q - 1))
        mask = mask.rows(first, mask.seqlen_q)
    backend = draw(st.sampled_from(backends))
    nheads, nheads_kv = draw(st.sampled_from(HEADS))
    dims = st.integers(1, 40) | st.sampled_from((64, 80, 128, 192))
    dtype = draw(st.sampled_from(DTYPES[backend]))
    sinks = st.sampled_from((0.0, 1.5, -1e4, 100.0, -torch.inf))
    one = st.sampled_from(("normal", "normal", "-0.0"))
    if dtype != "float64":  # float64's own denormals are as coarse in the oracle
        one |= st.just("denormal")
    # Plain PyTorch's scores in float16 overflow with logits of 1e4, which leaves no bound.
    of_q = one if dtype == "float16" else one | st.just("1e4")
    return Call(
        mask,
        draw(layouts_for(mask, st.just(world_size))),
        draw(st.sampled_from(strategies(world_size))),
        backend,
        dtype,
        Heads(nheads, nheads_kv, draw(dims), draw(dims)),
        batch=draw(st.sampled_from((1, 2) if decode else (1, 2, None))),
        softmax_scale=draw(st.sampled_from((None, 0.01, 2.0, 2.0**-63))),
        # torch's fused attention has no softcap.
        softcap=0.0 if backend == "aten" else draw(st.sampled_from((0.0, 0.0, 2.0, 30.0))),
        sinks=draw(st.booleans() | st.tuples(*[sinks] * nheads)),
        noncontiguous=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
        world_size=world_size,
        values=(draw(of_q), draw(one), draw(one), draw(one)),
    )


def attention(case: Call, processes: Pools | None = None) -> bool:
    """Run a call and check it; return whether it is supported, like the functions below."""
    try:
        ranks = calls_of(case, case.world_size)
    except NotImplementedError:
        return False
    for backward in (False, True):
        faults = check(programs_of(ranks, backward=backward), ranks[0])
        assert not faults, faults
    run = None if processes is None else processes(case.world_size).run
    ran = run_all_ranks(case, case.world_size, run)
    assert not ran.failures, ran.failures
    planned = zip(sent(ranks), sent(ranks, backward=True), strict=True)
    assert list(ran.sent) == list(planned)
    if processes is not None:
        # `ring_attention` makes strided shards contiguous.
        alone = run_all_ranks(replace(case, noncontiguous=False), case.world_size)
        assert not ran.differing(alone), "bits differ from those of one process"
    return True


def decoding(case: Call) -> bool:
    inputs = case.build_inputs()
    mask = case.build_mask()
    _, layout = case.build_layouts(case.world_size)
    spec = AttentionSpec.of(
        inputs.q, inputs.k, inputs.v, softcap=case.softcap, sinks=case.build_sinks()
    )
    call = make_call(spec, softmax_scale=case.softmax_scale, backend=case.backend)
    programs = [
        program(
            call,
            decode_tiles(layout.segments(rank), mask),
            (mask.seqlen_q, spec.batch, layout.shard_len(rank)),
            rank,
            case.world_size,
        )
        for rank in range(case.world_size)
    ]
    faults = check(programs)
    assert not faults, faults
    results = pools(case.world_size).run(decode_on_rank, case)
    oracle, plain = expected(case)
    assert_holds(dict(zip(("out", "lse"), results[0], strict=True)), oracle, plain)
    assert all(torch.equal(a, b) for each in results for a, b in zip(each, results[0], strict=True))
    return True


def decode_on_rank(case: Call) -> tuple[Tensor, Tensor]:
    _, layout = case.build_layouts(case.world_size)
    q, k, v, _ = case.build_inputs()
    k, v = (layout.shard(x, dist.get_rank()) for x in (k, v))
    with poisoned_empty():
        return tree_decode(
            q,
            k,
            v,
            mask=case.build_mask(),
            softmax_scale=case.softmax_scale,
            softcap=case.softcap,
            sinks=case.build_sinks(),
            layout=layout,
            backend=case.backend,
            return_lse=True,
        )


# -- neighbours and recurrences


class Rows(NamedTuple):
    """A layout, boundaries of documents, and two numbers of rows."""

    layout: SequenceLayout
    cuts: list[int]
    left: int
    right: int


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    layout = draw(layouts(st.integers(1, 24), st.integers(1, 5), segments=True))
    inner = draw(st.lists(st.integers(0, layout.seqlen), max_size=5))
    number = st.integers(0, layout.seqlen + 3)
    return Rows(layout, [0, *sorted(inner), layout.seqlen], draw(number), draw(number))


def neighbouring(drawn: Rows) -> bool:
    layout, cuts, left, right = drawn
    _on_ranks(neighbours.compare, layout, layout, left, right)
    _on_ranks(neighbours.compare_rolled, layout, layout, left - right, cuts)
    return True


def recurrent(drawn: Rows) -> bool:
    layout, cuts, number, _ = drawn
    spoilt = number % (len(cuts) - 1)  # a document
    _on_ranks(recurrences.compare_start_states, layout, layout, cuts)
    for kind in recurrences.KINDS:
        _on_ranks(recurrences.compare, layout, kind, layout, cuts, spoilt)
    return True


def _on_ranks(fn: Callable[..., None], layout: SequenceLayout, *args: object) -> None:
    """Run a function on all ranks of the layout; fail if an assertion of a rank fails."""
    failed = [text for text in pools(layout.world_size).run(asserted, fn, *args) if text]
    assert not failed, failed


def asserted(fn: Callable[..., None], *args: object) -> str:
    """Return the text of a failed assertion, or "".

    If the rank raised instead, the other ranks would wait for it.
    """
    try:
        fn(*args)
    except AssertionError as error:
        return f"rank {dist.get_rank()}: {error or 'wrong'}"
    return ""


# -- rounds


class Kind(NamedTuple):
    """A kind of calls, and the number of calls in a round.

    `Any`: a `Call` or `Rows`, which `run` accepts.
    """

    drawn: st.SearchStrategy[Any]
    run: Callable[[Any], bool]
    share: int


# Triton's interpreter takes a second for a call.
PLAIN = ("reference", "aten")
KINDS = {
    "attention": Kind(calls(PLAIN, world_sizes=(1, 2, 3, 4, 5, 6, 8)), attention, 600),
    "processes": Kind(calls(PLAIN), partial(attention, processes=pools), 120),
    "queued": Kind(calls(PLAIN), partial(attention, processes=queued_pools), 60),
    "decode": Kind(calls(PLAIN, decode=True), decoding, 100),
    "triton": Kind(calls(("triton",)), attention, 9),
    "triton-decode": Kind(calls(("triton",), decode=True), decoding, 6),
    "neighbours": Kind(rows(), neighbouring, 60),
    "recurrences": Kind(rows(), recurrent, 40),
}


def fuzz(
    kind: str, seed: int, examples: int, counts: Counter[str], case: str | None = None
) -> str | None:
    """Run random calls; return the text of the first failure, with the command that repeats it.

    Args:
        kind: a key of KINDS.
        seed: seed of the calls.
        examples: number of calls.
        counts: counts of correct calls by kind, and of refused calls, to which this adds.
        case: runs only this call.
    """

    def clean(drawn: object) -> None:
        counts[kind if KINDS[kind].run(drawn) else "refused"] += 1

    limits = settings(
        deadline=None,
        database=None,
        max_examples=examples,
        print_blob=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    test = hypothesis.seed(seed)(limits(given(KINDS[kind].drawn)(clean)))
    if case is not None:
        test = reproduce_failure(hypothesis.__version__, case.encode())(test)
    try:
        test()
    except hypothesis.errors.DidNotReproduce:
        return None
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        blob = BLOB.search(notes)
        again = ast.literal_eval(blob[1]).decode() if blob else case
        return f"{notes}\n{type(error).__name__}: {error}\nmake fuzz ARGS='--case {kind}:{again}'"
    return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after this many minutes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the calls")
    parser.add_argument("--case", help="run only one call, in the form that a failure prints")


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    counts = Counter[str]()
    end = time.monotonic() + 60.0 * args.minutes
    failure = None
    if args.case is not None:
        kind, case = args.case.split(":")
        failure = fuzz(kind, args.seed, 1, counts, case)
    for turn in count() if args.case is None else ():
        part, number = divmod(turn, len(KINDS))
        kind = list(KINDS)[number]
        failure = fuzz(kind, args.seed * 1_000_003 + part, KINDS[kind].share, counts)
        if failure is not None or time.monotonic() > end:
            break
    pools.close()
    queued_pools.close()
    print(f"seed {args.seed}: {counts.total() - counts['refused']} calls right: {dict(counts)}")
    if failure is not None:
        print(failure)
    return int(failure is not None)
