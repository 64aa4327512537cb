"""Recurrent layers, split and whole, and what of one is wrong on drawn layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ring_attn import SequenceLayout
from ring_attn.core import runs
from ring_attn.core.runs import plan_states
from ring_attn.models.recurrent import Place
from ring_attn.recurrence import Part, Piece, causal_conv, linear_attention, recurrence
from ring_attn.sequence.states import Maps, StartStates
from ring_attn.testing import RandomRounding, noisy_runs
from ring_attn.testing.rounding import NUM_RUNS
from tests.bounds import assert_close, named

Inputs = dict[str, Tensor]
WIDTH = 4


def step_by_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor]:
    """A delta rule with a decay of each channel of the keys: Kimi's, and others as its cases."""
    batch, _, heads, headdim = k.shape
    state = initial_state
    if state is None:
        state = v.new_zeros(batch, heads, headdim, v.size(-1))
    outs = []
    for q_, k_, v_, d_, b_ in zip(*(x.unbind(1) for x in (q, k, v, decay, beta)), strict=True):
        state = state * d_[..., None]
        seen = torch.einsum("bhk,bhkv->bhv", k_, state)
        state = state + torch.einsum("bhk,bhv->bhkv", k_, b_[..., None] * (v_ - seen))
        outs.append(torch.einsum("bhk,bhkv->bhv", q_, state))
    return torch.stack(outs, 1), state


# Outputs, and the state after the last row.
Result = tuple[Tensor, Tensor | None]


@contextmanager
def always(way: str) -> Iterator[None]:
    """Make all plans use one algorithm, for states of any size."""
    with mock.patch.object(runs, "LATENCY_BYTES", 1e18 if way == "gather" else -1e18):
        plan_states.cache_clear()
        yield
    plan_states.cache_clear()


def delta_rule(x: Inputs, place: dict[str, Any]) -> Result:
    rows = {"decay": x["decay"], "beta": x["beta"]}
    return linear_attention(step_by_step, x["q"], x["k"], x["v"], rows=rows, **place)


def running(x: Inputs) -> tuple[Tensor, Tensor]:
    """A decayed sum of k v, read by q, and the state after it: the decays are those of heads."""
    state = x["v"].new_zeros(*x["k"].shape[::2][:1], *x["k"].shape[2:], x["v"].size(-1))
    outs = []
    steps = (x[name].unbind(1) for name in ("q", "k", "v", "decay"))
    for q, k, v, decay in zip(*steps, strict=True):
        state = state * decay[..., :1, None] + k[..., None] * v[..., None, :]
        outs.append(torch.einsum("bhk,bhkv->bhv", q, state))
    return torch.stack(outs, 1), state


def decayed_sum(x: Inputs, place: dict[str, Any]) -> Result:
    def run(piece: Piece) -> Part:
        rows = {name: piece.of(tensor) for name, tensor in x.items()}
        out, end = running(rows)
        factors = rows["decay"][..., :1].cumprod(1)

        def add(out: Tensor, start: Tensor) -> Tensor:
            return out + torch.einsum("blhk,bhkv->blhv", rows["q"] * factors, start)

        return Part(out, end, factors[:, -1][..., None], add)

    return recurrence(run, **place)


# A kind of one's own: the function, and how it runs on split rows.
def sums_of_rows(x: Tensor) -> Tensor:
    return x.cumsum(1)


def split_sums(function: Any, place: Place, x: Tensor) -> Tensor:
    def run(piece: Piece) -> Part:
        out = function(piece.of(x))
        return Part(out, out[:, -1], torch.ones(1), lambda out, start: out + start[:, None])

    return recurrence(run, **place._asdict())[0]


def convolved(x: Inputs, place: dict[str, Any]) -> Result:
    return causal_conv(partial(conv, weight=x["weight"]), x["q"].flatten(2), WIDTH, **place), None


def conv(rows: Tensor, weight: Tensor) -> Tensor:
    padded = functional.pad(rows.mT, (WIDTH - 1, 0))
    return functional.conv1d(padded, weight, groups=weight.size(0)).mT


KINDS: dict[str, tuple[Callable[..., Result], Callable[[Inputs], Result]]] = {
    "delta rule": (delta_rule, lambda x: step_by_step(**x)),
    "decayed sum": (decayed_sum, running),
    "convolution": (convolved, lambda x: (conv(x["q"].flatten(2), x["weight"]), None)),
}


def inputs(seqlen: int) -> Inputs:
    torch.manual_seed(0)
    shape = 2, seqlen, 2
    x = {name: torch.randn(*shape, n) for name, n in {"q": 3, "k": 3, "v": 5}.items()}
    x["k"] = functional.normalize(x["k"], dim=-1)
    x["decay"] = 0.5 + 0.5 * torch.rand(*shape, 3)
    x["beta"] = torch.rand(shape)
    return x


def by_document(
    whole: Callable[[Inputs], Result], x: Inputs, shared: Inputs, cuts: list[int]
) -> Result:
    """The layer applied to one document after another, and the state after the last."""
    split = [t.split_with_sizes(cuts, 1) for t in x.values()]
    cut = [dict(zip(x, rows, strict=True)) for rows in zip(*split, strict=True)]
    outs, ends = zip(*(whole(part | shared) for part in cut if part["q"].size(1)), strict=True)
    return torch.cat(outs, 1), ends[-1]


def compare_start_states(layout: SequenceLayout, cuts: Sequence[int]) -> None:
    """Asserts start states of drawn maps on this rank, and the gradients of decays and ends alone.

    `cuts` are the boundaries of documents. All ranks make all exchanges before one of them asserts.
    """
    ends = tuple(sorted({0, *cuts, layout.seqlen}))
    every, group = plan_states(layout, ends, 1).runs, dist.group.WORLD
    assert group is not None
    own = sorted((run.number, i) for i, run in enumerate(every) if run.rank == dist.get_rank())
    mine = [i for _, i in own]
    torch.manual_seed(0)
    decays, adds, weights = (torch.randn(len(every), 2, 3, n) for n in (1, 5, 5))

    def of_whole(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (decays.sigmoid(), adds)]
        state, found = torch.zeros_like(leaves[1][0]), []
        for run, decay, add in zip(every, *leaves, strict=True):
            state = state if run.enters else torch.zeros_like(state)
            found.append(state)
            state = add + decay * state if run.passes else add
        starts = torch.stack(found) + 0 * leaves[1]  # of a single run, too, no constant
        return [starts, *gradients_of(starts, leaves, weights.to(dtype))]

    leaves = [x[mine].requires_grad_() for x in (decays.sigmoid(), adds)]
    passes = torch.tensor([every[i].passes for i in mine], dtype=torch.bool).view(-1, 1, 1, 1)
    factors = leaves[0].where(passes, leaves[0].detach())  # else no variable
    starts = StartStates.apply(factors, leaves[1], Maps(layout, ends, group))
    got = [starts, *gradients_of(starts, leaves, weights[mine])]
    names = "start states", "gradients of decays", "gradients of ends"
    oracles, noisy = of_whole(torch.float64), noisy_runs(lambda: of_whole(torch.float32))
    for name, result, oracle, *several in zip(names, got, oracles, *noisy, strict=True):
        all_states = oracle.detach().float()
        all_states[mine] = result.detach()
        assert_close(f"{name} of rank {dist.get_rank()}", all_states, oracle, several)


def gradients_of(out: Tensor, leaves: Sequence[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, leaves, dout, materialize_grads=True)


@dataclass(frozen=True)
class Problem:
    """A recurrence over a sequence.

    Attributes:
        kind: a key of KINDS.
        cuts: boundaries of documents, from 0 to the length.
        silent: so many first positions have no gradient of their outputs.
    """

    kind: str
    cuts: tuple[int, ...]
    silent: int

    @property
    def is_convolution(self) -> bool:
        return self.kind == "convolution"

    def tensors(self) -> tuple[Inputs, Inputs, Tensor]:
        """Return the inputs with rows, those without, and the gradient of the outputs."""
        x = inputs(self.cuts[-1])
        if self.kind != "delta rule":
            x.pop("beta")
        shared = {"weight": torch.randn(6, 1, WIDTH)} if self.is_convolution else {}
        dout = torch.randn(2, self.cuts[-1], *((6,) if self.is_convolution else (2, 5)))
        dout[:, : self.silent] = 0.0
        return x, shared, dout

    def results(self, layer: Callable[..., Result], given: Inputs, dout: Tensor) -> Inputs:
        """Return the outputs of a layer, gradients of its inputs, and its end state if it has."""
        names = ["q"] if self.is_convolution else list(given)
        leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
        out, _ = layer(leaves)
        gradients = torch.autograd.grad(out, [leaves[name] for name in names], dout)
        found = dict(zip(("out", *names), (out, *gradients), strict=True))
        if not self.is_convolution:
            with torch.no_grad():
                _, end = layer(given, output_final_state=True)
            found["end"] = end
        return found


@lru_cache(maxsize=64)
def whole_results(problem: Problem) -> tuple[Inputs, list[Inputs]]:
    """Return the results of the whole sequence in float64, and in noisy runs."""
    _, whole = KINDS[problem.kind]
    x, shared, dout = problem.tensors()
    documents = [b - a for a, b in pairwise(problem.cuts)]

    def run(dtype: torch.dtype, copies: int) -> list[Inputs]:
        """Return the results of several copies of the batch, which are one batch as well."""
        given = {name: torch.cat([t.to(dtype)] * copies) for name, t in x.items()}
        others = {name: t.to(dtype) for name, t in shared.items()}

        def layer(rows: Inputs, **_: Any) -> Result:
            return by_document(whole, rows, others, documents)

        found = problem.results(layer, given, torch.cat([dout.to(dtype)] * copies))
        by_copy = zip(*(y.chunk(copies) for y in found.values()), strict=True)
        return [dict(zip(found, part, strict=True)) for part in by_copy]

    (oracle,) = run(torch.float64, copies=1)
    with RandomRounding(seed=0):  # of each copy anew: so many noisy runs in the time of one
        noisy = run(torch.float32, copies=NUM_RUNS)
    return oracle, noisy


def compare(
    kind: str, layout: SequenceLayout, cuts: Sequence[int], spoilt: int, silent: int = 0
) -> None:
    """Assert values and gradients on this rank; then with NaN in document `spoilt`, of the others.

    `cuts` are the boundaries of documents. The outputs of the first `silent` positions get no
    gradient: their inputs get theirs through start states only. All ranks make all exchanges
    before one of them asserts.
    """
    problem = Problem(kind, tuple(cuts), silent)
    split, _ = KINDS[kind]
    rank, (x, shared, dout) = dist.get_rank(), problem.tensors()
    place = {"layout": layout, "cu_seqlens": torch.tensor(cuts) if len(cuts) > 2 else None}

    def of_shards(x: Inputs) -> Inputs:
        own = {name: layout.shard(t, rank) for name, t in x.items()}

        def layer(rows: Inputs, **final: Any) -> Result:
            return split(rows | shared, place | final)

        return problem.results(layer, own, layout.shard(dout, rank))

    oracle, noisy = whole_results(problem)
    inside = slice(*cuts[spoilt : spoilt + 2])
    spoiled = {name: t.clone() for name, t in x.items()}
    for name in ("q", "k", "v"):
        spoiled[name][:, inside] = torch.nan
    right, wrong = of_shards(x), of_shards(spoiled)
    positions = layout.position_ids(rank)
    others = (positions < inside.start) | (positions >= inside.stop)
    if not problem.is_convolution:
        assert_close("end", right.pop("end"), oracle["end"], named(noisy, "end"))
        wrong.pop("end")
    for got, rows in ((right, slice(None)), (wrong, others)):
        for name, y in got.items():
            # As the whole's, but for this rank's rows: so the bound is that of the whole.
            mine = oracle[name].detach().float()
            mine[:, positions[rows]] = y.detach()[:, rows]
            assert_close(f"{name} of rank {rank}", mine, oracle[name], named(noisy, name))
