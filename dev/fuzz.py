"""Random calls on all ranks against float64, until the time is up or one of them fails.

A call that fails is made as small as it can be, and printed as the command that repeats it.
"""

from __future__ import annotations

import argparse
import ast
import re
import time
from collections import Counter
from contextlib import suppress
from itertools import count
from typing import NamedTuple

import hypothesis
import torch
from hypothesis import HealthCheck, given, reproduce_failure, settings
from hypothesis import strategies as st
from torch import Tensor

from ring_attn.core.dtypes import BY_NAME
from ring_attn.core.mask import Mask
from ring_attn.core.oracle import Inputs
from ring_attn.machines.check import check_calls
from ring_attn.testing import (
    STRATEGIES,
    Case,
    Heads,
    check_all,
    dense_gradients,
    masks,
    plain_gradients,
    run_calls,
    strategy_of,
    usable_backends,
    whole_of,
)
from ring_attn.testing.ranks import calls_of
from tests.drawn import flash_masks, layouts_for, slice_masks, table_masks

# Hypothesis draws the calls of a round before the clock is looked at again.
ROUND = 50

PRIMES = (1, 2, 3, 5, 7, 11, 13, 17, 23)
HEADS = ((1, 1), (2, 1), (2, 2), (4, 2), (3, 1), (6, 3))
BLOB = re.compile(r"reproduce_failure\('[^']*', (b'[^']*')\)")


class Drawn(NamedTuple):
    """A call, the number of its ranks, and what is done to each of q, k, v and dout."""

    case: Case
    world_size: int
    values: tuple[str, str, str, str]


@st.composite
def both_masks(draw: st.DrawFn) -> Mask:
    """The pairs that two masks of the table have in common."""
    of_size: dict[tuple[int, int], list[Mask]] = {}
    for mask in masks(draw(st.sampled_from(PRIMES))).values():
        of_size.setdefault((mask.seqlen_q, mask.seqlen_k), []).append(mask)
    same = of_size[draw(st.sampled_from(sorted(of_size)))]
    return draw(st.sampled_from(same)) & draw(st.sampled_from(same))


@st.composite
def drawn_calls(draw: st.DrawFn) -> Drawn:
    world_size = draw(st.integers(1, 5))
    mask = draw(flash_masks(23) | slice_masks() | table_masks() | both_masks())
    backend = draw(st.sampled_from([x for x in usable_backends("cpu") if x != "triton"]))
    dtypes = [x for x in BY_NAME if x != "float64" or backend == "reference"]
    case = Case(
        mask,
        draw(layouts_for(mask, st.just(world_size))),
        draw(st.sampled_from(_strategies(world_size))),
        backend,
        draw(st.sampled_from(dtypes)),
        Heads(*draw(st.sampled_from(HEADS)), draw(st.integers(1, 40)), draw(st.integers(1, 40))),
        batch=draw(st.integers(1, 2)),
        softmax_scale=draw(st.sampled_from((None, 0.01, 2.0))),
        softcap=draw(st.sampled_from((0.0, 0.0, 2.0, 30.0))),
        sinks=draw(st.booleans()),
        noncontiguous=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )
    one = st.sampled_from(("normal", "normal", "-0.0"))
    if case.dtype != "float64":  # float64's own denormals are as coarse in the oracle
        one |= st.just("denormal")
    # Plain PyTorch's scores in float16 overflow with logits of 1e4, which leaves no bound.
    of_q = one if case.dtype == "float16" else one | st.just("1e4")
    return Drawn(case, world_size, (draw(of_q), draw(one), draw(one), draw(one)))


def _strategies(world_size: int) -> list[str]:
    fitting = []
    for name in STRATEGIES:
        with suppress(NotImplementedError):
            strategy_of(name, world_size)
            fitting.append(name)
    return [name for name in fitting if name != "auto"]


def changed(x: Tensor, value: str) -> Tensor:
    """A copy with logits of 1e4, denormal numbers, or -0.0 in every other row."""
    if value == "-0.0":
        x = x.clone()
        x[:, ::2] = -0.0
        return x
    scales = {"normal": 1.0, "1e4": 1e4, "denormal": torch.finfo(x.dtype).tiny / 4}
    return x * scales[value]


def exercise(drawn: Drawn) -> str:
    """Runs a call, and asserts each result within its bound; whether the call is refused."""
    case, world_size, values = drawn
    try:
        calls = calls_of(case, world_size)
    except NotImplementedError:
        return "refused"
    faults = [fault for back in (False, True) for fault in check_calls(calls, backward=back)]
    assert not faults, faults
    inputs = Inputs(*map(changed, case.build_inputs(), values))
    layouts, sinks, mask = case.build_layouts(world_size), case.build_sinks(), case.build_mask()
    ranks = run_calls(calls, inputs, layouts, sinks, noncontiguous=case.noncontiguous)
    oracle, plain = (
        results(*inputs, mask, case.softmax_scale, softcap=case.softcap, sinks=sinks)
        for results in (dense_gradients, plain_gradients)
    )
    wrong = [str(x) for x in check_all(whole_of(ranks, layouts), oracle, plain) if not x.ok]
    assert not wrong, wrong
    return "right"


def fuzz(seed: int, examples: int, counts: Counter[str], case: str | None = None) -> str | None:
    """Runs random calls; the text of the first failure, with the command that repeats it.

    Args:
        seed: seed of the calls.
        examples: number of calls.
        counts: outcomes, added to.
        case: runs this one call only.
    """

    def clean(drawn: Drawn) -> None:
        counts[exercise(drawn)] += 1

    limits = settings(
        deadline=None, database=None, max_examples=examples, print_blob=True,
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    test = hypothesis.seed(seed)(limits(given(drawn_calls())(clean)))
    if case is not None:
        test = reproduce_failure(hypothesis.__version__, case.encode())(test)
    try:
        test()
    except hypothesis.errors.DidNotReproduce:
        return None
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        blob = BLOB.search(notes)
        blobs = [ast.literal_eval(blob[1]).decode()] if blob else [case]
        again = "\n".join(f"python -m dev fuzz --case '{each}'" for each in blobs)
        return f"{notes}\n{type(error).__name__}: {error}\n{again}"
    return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after so many minutes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the calls")
    parser.add_argument("--case", help="run one call, as a failure prints it")


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    end, failure = time.monotonic() + 60.0 * args.minutes, None
    if args.case is not None:
        failure = fuzz(args.seed, 1, counts, args.case)
    else:
        for part in count():
            failure = fuzz(args.seed * 1_000_003 + part, ROUND, counts)
            if failure is not None or time.monotonic() > end:
                break
    print(f"seed {args.seed}: {counts['right']} calls right, {counts['refused']} refused")
    if failure is not None:
        print(failure)
    return int(failure is not None)
