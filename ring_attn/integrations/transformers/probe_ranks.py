"""Refuse a model with parts, other than attention, that mix rows but see those of one rank only.

    1. each rank by itself    few random tokens        which parts mix rows? (`probe`)
    2. all ranks together     the user's own inputs    does such a part see rows of other ranks?

After each search, ranks exchange what they have found (five numbers), so that all of them enter the
second stage or none does. In this stage, each part that mixes rows runs four times on its
arguments: as usual, once more for the noise of its results, and with other values in the rows of
the first rank, and of the last one. The part is right if its results change on other ranks, too. A
part in which all rows depend on the first one must see these changes on all ranks but one: a causal
part, and a pooling of the first row, see none on the rank with the first rows.

If a model cannot run on random tokens, or calls functions of ring_attn, the first stage runs on the
user's inputs, on all ranks together.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_attn.integrations.transformers.probe import (
    ALL_ROWS,
    FAILED,
    NO_ROWS,
    NOTHING,
    Finding,
    Inputs,
    Moved,
    Search,
    Splice,
    changed_inputs,
    changed_rows,
    forward_of,
    named_outputs,
    own_inputs,
    probe_mode,
    random_inputs,
    shape_of,
    tensors_of,
)
from ring_attn.integrations.transformers.untyped import Keywords, Model, Value
from ring_attn.models.gathered import of_ranks
from ring_attn.values.probing import probing


def check_mixing(
    model: Model,
    given: Keywords,
    first: int,
    pools: bool,
    group: dist.ProcessGroup,
    trusted: Collection[str],
) -> None:
    """Refuse a model with a part that mixes the rows of one rank only, on all ranks.

    Args:
        model: a model whose attention is ours.
        given: the keywords of its forward.
        first: the position_id of a sequence's first token.
        pools: whether outputs without rows are pooled over the ranks.
        group: the ranks that share the sequence.
        trusted: names of classes that are not judged.

    Raises:
        NotImplementedError: there is such a part, or the model cannot be judged.
    """
    if type(model).__name__ in trusted:
        return
    search = Search(model, pools, trusted)
    with probe_mode(model):
        tokens = partial(random_inputs, model, given, first)
        found = _parts_that_mix(search, tokens, group, alone=True)
        if isinstance(found, _Problem):
            found = _parts_that_mix(search, partial(own_inputs, model, given), group, alone=False)
        if isinstance(found, _Problem):
            raise _not_judged(model, found)
        if not found:
            return
        seen = Judge(search, found, group).seen_on_ranks(partial(own_inputs, model, given))
    if isinstance(seen, _Problem):
        raise _not_judged(model, seen)
    for finding, (num_seeing, num_needed) in zip(found, seen, strict=True):
        if num_seeing < num_needed:
            raise _mixes(search, finding)


# Seconds that a rank whose forward has failed waits for the others before it logs its error.
PATIENCE_S = 10.0

logger = logging.getLogger("ring_attn")


@contextmanager
def _telling(model: Model, error: Exception | None) -> Iterator[None]:
    """Log the error that ended the probe on this rank if the other ranks do not come.

    They may wait for this rank in a collective that the model calls itself, which nothing but its
    timeout ends.
    """
    if error is None:
        yield
        return
    text = (
        f"the probe of {type(model).__name__} has failed on this rank ({type(error).__name__}: "
        f"{error}), and other ranks do not come: they may wait for this rank in a collective that "
        "the model calls itself. The model must run on all ranks alike; register(trusted=["
        f"{type(model).__name__!r}]) leaves out the probe"
    )
    timer = threading.Timer(PATIENCE_S, logger.warning, ["%s", text])
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as failure:
        failure.add_note(text)
        raise
    finally:
        timer.cancel()


# -- the first stage


class _Problem:
    """The error that ended a stage on this rank, or the rank on which it ended."""

    def __init__(self, error: Exception | None, rank: int) -> None:
        self.text = (
            f"rank {rank} has the error" if error is None else f"{type(error).__name__}: {error}"
        )


def _parts_that_mix(
    search: Search, make_inputs: Callable[[], Inputs], group: dist.ProcessGroup, alone: bool
) -> list[Finding] | _Problem:
    """Return the parts that mix rows; all ranks return the same ones, or all have a problem.

    With `alone`, functions of ring_attn that call other ranks raise an error before they do: they
    take the rows of a layout, which may be as many as these on one rank only. Other collectives,
    such as those of FSDP, run: all ranks have the same tokens and the same weights.
    """
    findings: list[Finding] = []
    device = next(search.model.parameters()).device
    while True:
        error = None
        try:
            probing.alone = alone
            own = search.find(make_inputs())
        except Exception as problem:
            error, own = problem, Finding(FAILED)
        finally:
            probing.alone = False
        numbers = torch.tensor(own, dtype=torch.int32, device=device)
        with _telling(search.model, error):
            exchanged = of_ranks(numbers, group).tolist()
        each = [Finding(*map(int, of_rank)) for of_rank in exchanged]
        failed = [rank for rank, finding in enumerate(each) if finding.part == FAILED]
        if failed:
            return _Problem(error, failed[0])
        new = next((finding for finding in each if finding.part != NOTHING), None)
        if new is None:
            return findings
        if any(new[:2] == known[:2] for known in findings):
            return _Problem(RuntimeError(f"{_name(search, new)} mixes rows again"), 0)
        findings.append(new)
        search.keep(new)


# -- the second stage


class Judge:
    """Runs parts that mix rows again, with other values in the rows of some ranks."""

    def __init__(
        self, search: Search, findings: Sequence[Finding], group: dist.ProcessGroup
    ) -> None:
        self.search, self.findings, self.group = search, findings, group
        self.model: Model = search.model
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.seen: dict[int, bool] = {}
        self._is_inside = False

    def seen_on_ranks(self, make_inputs: Callable[[], Inputs]) -> list[tuple[int, int]] | _Problem:
        """Return, for each part, the number of ranks that see others' rows, and that must."""
        error, device = None, next(self.model.parameters()).device
        flags = torch.full((len(self.findings),), FAILED, dtype=torch.int32, device=device)
        try:
            self._run(make_inputs())
            own = [int(self.seen.get(index, False)) for index in range(len(self.findings))]
            flags = flags.new_tensor(own)
        except Exception as problem:
            error = problem
        with _telling(self.model, error):
            each = of_ranks(flags, self.group)  # (ranks, parts)
        failed = (each == FAILED).any(1).nonzero().flatten().tolist()
        if failed:
            return _Problem(error, failed[0])
        counts = each.sum(0).tolist()
        return [
            (count, self.num_needed(finding))
            for count, finding in zip(counts, self.findings, strict=True)
        ]

    def num_needed(self, finding: Finding) -> int:
        """Return the number of ranks that must see a change of other ranks' rows.

        What depends on the first token only does not see other rows on the rank with this token.
        """
        return self.world_size - 1 if finding.everywhere else 1

    def _run(self, inputs: Inputs) -> None:
        """Judge all parts: modules in one run of the model, and then its outputs."""
        self.inputs, shape = inputs, shape_of(inputs)
        self.splice = Splice(self.search.kept, shape)
        modules = dict(self.model.named_modules())
        handles = []
        for name in self.search.kept:
            handles.append(modules[name].register_forward_hook(partial(self._keep, name)))
        for index, finding in enumerate(self.findings):
            if finding.part:
                part = modules[self.search.names[finding.part]]
                hook = partial(self._judge_part, index)
                handles.append(part.register_forward_pre_hook(hook, with_kwargs=True))
        try:
            forward_of(self.model)(**inputs)
            for index, finding in enumerate(self.findings):
                if not finding.part:
                    self._note(index, partial(self._output_of_model, finding))
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, name: str, part: nn.Module, args: Value, output: Value) -> Value:
        """Keep a part that runs inside of a judged one from mixing rows."""
        return self.splice.output(name, output) if self._is_inside else None

    def _judge_part(self, index: int, part: nn.Module, args: Value, kwargs: Value) -> None:
        """Judge a part on the arguments of a call, before the call."""
        if self._is_inside:
            return

        def run(moved: Moved) -> list[Tensor]:
            changed_args = [self._changed(x, moved) for x in args]
            changed_kwargs = {name: self._changed(x, moved) for name, x in kwargs.items()}
            return tensors_of(part.forward(*changed_args, **changed_kwargs))

        self._note(index, run)

    def _changed(self, x: Value, moved: Moved) -> Value:
        """Return an argument with other values in some rows, if it has values of rows."""
        if not isinstance(x, Tensor) or x.shape[:2] != shape_of(self.inputs):
            return x
        ids = self.inputs.get("input_ids")
        is_ids = (
            isinstance(ids, Tensor)
            and x.numel() == ids.numel()
            and torch.equal(x, ids.reshape(x.shape))
        )
        if not (is_ids or x.is_floating_point()):
            return x
        return changed_rows(self.model, x, moved)

    def _output_of_model(self, finding: Finding, moved: Moved) -> list[Tensor]:
        """Return the output of the model that has shown the finding."""
        output = forward_of(self.model)(**changed_inputs(self.model, self.inputs, moved))
        return [[*named_outputs(output).values()][finding.output]]

    def _note(self, index: int, run: Callable[[Moved], list[Tensor]]) -> None:
        """Note whether the results change with the rows of other ranks; in every call of a part."""
        self._is_inside = True
        try:
            self.splice.begin(None)
            usual = run(NO_ROWS)
            self.splice.begin(NO_ROWS)
            noise = greatest_difference(usual, run(NO_ROWS))
            sees = False
            for rank in (0, self.world_size - 1):
                moved = ALL_ROWS if rank == self.rank else NO_ROWS
                self.splice.begin(moved)
                difference = greatest_difference(usual, run(moved))
                sees |= rank != self.rank and difference > 2 * noise
        finally:
            self._is_inside = False
        self.seen[index] = self.seen.get(index, True) and sees


def greatest_difference(usual: list[Tensor], other: list[Tensor]) -> float:
    """Return the greatest difference between results."""
    differences = [
        float((y.double() - x.double()).abs().nan_to_num(0.0).max())
        for x, y in zip(usual, other, strict=True)
        if x.is_floating_point() and x.shape == y.shape and x.numel()
    ]
    return max(differences, default=0.0)


# -- errors


def _name(search: Search, finding: Finding) -> str:
    """Return the name and class of a part; for the model itself, its class and output."""
    name, model = search.names[finding.part], type(search.model).__name__
    if name:
        return f"{name} ({type(search.model.get_submodule(name)).__name__})"
    if finding.others:
        return model
    output = search.output_names[finding.output]
    return f"{model} (its output {output})"


def _mixes(search: Search, finding: Finding) -> NotImplementedError:
    name = search.names[finding.part]
    class_name = type(search.model.get_submodule(name)).__name__
    plural = "s" if finding.others > 1 else ""
    others = f"{finding.others} other row{plural}" if finding.others else "an output without rows"
    return NotImplementedError(
        f"{_name(search, finding)} mixes rows of the sequence outside of attention: a change of "
        f"token {finding.row} changed {others}, too, but changes of another rank's rows did not "
        "reach all ranks that they should, so on a sharded sequence it would see the rows of one "
        "rank only. Pool rows with ring_attn.pool, get neighbouring rows with ring_attn.halo, name "
        "a recurrence with ring_attn.register_recurrence, or use the model on one rank. If it is "
        "right all the same, as when it mixes rows that are always on one rank, call "
        f"register(trusted=[{class_name!r}]); register(probe=False) skips this test for all models"
    )


def _not_judged(model: Model, problem: _Problem) -> NotImplementedError:
    name = type(model).__name__
    return NotImplementedError(
        f"{name} could not be probed: without attention it runs neither on random tokens nor on "
        f"the inputs of this forward ({problem.text}), so a part other than attention that mixes "
        "the rows of one rank only would not be found. Compare its outputs with those of one "
        f"process; if they are equal, call register(trusted=[{name!r}]), with which this model is "
        "not probed"
    )
