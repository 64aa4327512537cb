"""Candidates of a choice: every strategy with every degree, over every layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ring_attn.backends import get_backend
from ring_attn.checks import attention as checks
from ring_attn.core.copies import local_layouts
from ring_attn.core.joint import JointLayout
from ring_attn.core.layout import LAYOUTS, Layouts, SequenceLayout, with_world_size
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import NAMES, Strategy
from ring_attn.core.work import totals
from ring_attn.planning import balance
from ring_attn.planning.choice import Candidate, Problem
from ring_attn.planning.scale import MAX_EXACT
from ring_attn.strategies.registry import code_of
from ring_attn.values.checks import as_tuple

# Number of positions considered for balanced boundaries: bounds the time for long sequences.
BALANCE_POSITIONS = 1 << 15


def strategies_for(spec: AttentionSpec, world_size: int, node_size: int) -> Iterator[Strategy]:
    """Yield every strategy with every sensible degree; of equally fast ones the first is chosen."""
    if world_size == 1:  # all strategies do the same
        yield Strategy()
        return
    for named in NAMES.values():
        yield from named.candidates(spec, world_size, node_size)


def strategies_of(problem: Problem, names: Sequence[str | Strategy] | None) -> list[Strategy]:
    """Return the requested strategies, all if `names` is None; a name is all its degrees.

    If every rank holds all rows, a call runs a ring without hops, whatever is requested.
    """
    requested = _requested(problem, names)
    return [Strategy()] if problem.has_local_keys else requested


def _requested(problem: Problem, names: Sequence[str | Strategy] | None) -> list[Strategy]:
    """Return the strategies of the names and values, all if `names` is None."""
    every = list(strategies_for(problem.spec, problem.world_size, problem.cluster.node_size))
    if names is None:
        return every
    if isinstance(names, (str, Strategy)):
        raise TypeError(f"strategies must be a sequence of names or values, got {names!r}")
    requested: list[Strategy] = []
    for value in as_tuple("strategies", names):
        if isinstance(value, Strategy):
            requested.append(value)
        elif not isinstance(value, str) or value not in NAMES:
            raise ValueError(
                f"each of strategies must be one of {[*NAMES]} or a Strategy, got {value!r}"
            )
        else:
            of_name = [s for s in every if s.name_on(problem.world_size) == value]
            if not of_name and problem.world_size > 1:
                raise ValueError(
                    f"{value} has no degree for {problem.world_size} ranks; pass a Strategy"
                )
            # On one rank all strategies do the same.
            requested += of_name or every
    return list(dict.fromkeys(requested))


def candidates_of(
    problem: Problem,
    layouts: Mapping[str, Layouts],
    strategies: Sequence[Strategy],
    *,
    are_requested: bool,
) -> Iterator[Candidate]:
    """Yield every strategy over every layout; without a request, only those that can win."""
    for name, pair in layouts.items():
        sparse = are_requested or _is_sparse(problem, pair)
        for strategy in strategies:
            if code_of(strategy).sparse and not sparse:
                continue
            hybrid = 1 < strategy.ulysses_degree < problem.world_size
            if len(layouts) > 1 and name == "striped" and hybrid:
                # A group's rows would be many short runs; zigzag has the same balance.
                continue
            yield Candidate(strategy, pair, name, problem.world_size)


def _is_sparse(problem: Problem, layouts: Layouts) -> bool:
    """Whether at least half of all pairs of ranks have no visible pairs."""
    if problem.quick and problem.world_size > MAX_EXACT:
        layouts = with_world_size(layouts, MAX_EXACT) or layouts
    try:
        seen = totals(*layouts, problem.mask).seen
    except (ValueError, NotImplementedError):
        return True  # layouts that do not fit; the candidate is refused later, with the reason
    pairs = len(seen) * (len(seen) - 1)
    return 2 * int(seen.sum() - seen.diagonal().sum()) <= pairs


def layouts_of(problem: Problem, layout: str | SequenceLayout | Layouts) -> dict[str, Layouts]:
    """Return the layouts to choose among, by name."""
    mask, world_size = problem.mask, problem.world_size
    if not isinstance(layout, str):
        layout = checks.check_layouts(layout)
        if problem.has_local_keys:
            return {"given": local_layouts(layout[0], mask.seqlen_q)}
        for side, value, seqlen in zip("qk", layout, (mask.seqlen_q, mask.seqlen_k), strict=True):
            if (value.world_size, value.seqlen) != (world_size, seqlen):
                raise ValueError(
                    f"the layout of {side} must be over {seqlen} positions and {world_size} ranks, "
                    f"got {value}"
                )
        return {"given": (layout[0], layout[1])}
    names = [*LAYOUTS, "balanced"]
    if layout != "auto" and layout not in names:
        raise ValueError(
            f"layout must be 'auto', one of {names} or a SequenceLayout, got {layout!r}"
        )
    if layout != "auto":
        names = [layout]
    elif problem.recurrent:
        names.remove("striped")  # where a state is sent for each row
    if problem.replicated:
        if layout == "balanced":
            raise NotImplementedError(
                "layout='balanced' is not supported for replicated rows: pass 'auto', another name "
                "or a JointLayout"
            )
        names = [name for name in names if name != "balanced"]
    if problem.has_local_keys:
        # Only split rows have another layout by another name.
        return {names[0]: local_layouts(_named(names[0], problem)[0], mask.seqlen_q)}
    return {name: _named(name, problem) for name in names}


def _named(name: str, problem: Problem) -> Layouts:
    if name == "balanced":
        return _balanced(problem)
    seqlens = problem.mask.seqlen_q, problem.mask.seqlen_k
    if problem.replicated:
        text = sum(problem.replicated)
        video = SequenceLayout.from_name(name, seqlens[0] - text, problem.world_size)
        owners = JointLayout([text, video]).owners
        return owners, owners
    q, k = (SequenceLayout.from_name(name, n, problem.world_size) for n in seqlens)
    return q, k


def _balanced(problem: Problem) -> Layouts:
    """Return boundaries with equal mask area, on a grid.

    Each block is weighed by its middle row.
    """
    mask, world_size, backend = problem.mask, problem.world_size, get_backend(problem.backend)
    step = -(-mask.seqlen_q // BALANCE_POSITIONS)
    if backend.in_order and mask.seqlen_q >= 8 * backend.bits_unit * world_size:
        step = -(-step // backend.bits_unit) * backend.bits_unit
    starts = torch.arange(0, mask.seqlen_q, step)
    rows = torch.full_like(starts, step)
    rows[-1] = mask.seqlen_q - int(starts[-1])
    first, last = mask.visible_runs(starts + rows // 2)
    in_steps = balance.by_cost((last - first).sum(0) * rows, world_size).cuts
    assert in_steps is not None, "by_cost makes boundaries"
    cuts = [min(cut * step, mask.seqlen_q) for cut in in_steps]
    queries = SequenceLayout.boundaries(cuts)
    if mask.seqlen_k == mask.seqlen_q:
        return queries, queries
    return queries, SequenceLayout.contiguous(mask.seqlen_k, world_size)
