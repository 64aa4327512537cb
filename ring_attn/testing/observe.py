"""Observation of a user's training step on a rank: its inputs and its results.

The step runs as written. Recorded are the tokens and positions of each forward, the numbers that
code gives to rows, means over rows, random numbers, the masks of `ring_attention`, and the targets
of `F.cross_entropy`; weights before the first forward; gradients after the backward, and before
they are clipped or used; and the values that the step returns. A `Change` replaces some of them, to
test a hypothesis about their effect.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from ring_attn.attention import drivers
from ring_attn.call import Call
from ring_attn.core.mask import Mask
from ring_attn.testing.draws import (
    NUM_COMPARED,
    RANDOM,
    SEED_METHODS,
    SEED_NAMES,
    SEEDS,
    Draw,
    Replacement,
    Seed,
    kept,
)
from ring_attn.testing.flat_shards import FlatShards
from ring_attn.testing.parted import FUNCTIONS, called_in_parts, kind_of, mixing_kinds
from ring_attn.testing.rounding import RandomRounding
from ring_attn.testing.tiny import tiny_models
from ring_attn.values.probing import probing

# Parts of parameter names that wrappers add: DDP, torch.compile, torch's checkpointing, FSDP1.
WRAPPERS = re.compile(r"\b(module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")

# A user's training step: a function without arguments.
Step = Callable[[], object]

# Functions that are observed, and the methods that do so.
OBSERVED: dict[Callable[..., object], str] = {
    F.embedding: "_embedding",
    F.cross_entropy: "_cross_entropy",
    F.nll_loss: "_nll_loss",
    F.scaled_dot_product_attention: "_scaled_dot_product_attention",
    F.dropout: "_dropout",
    torch.arange: "_arange",
    Tensor.__getitem__: "_getitem",
    torch.mean: "_mean",
    Tensor.mean: "_mean",
    Tensor.sum: "_sum",
    torch.sum: "_sum",
}

DIVISIONS = (torch.div, Tensor.div, Tensor.__truediv__)

# Losses that are means by default, of an input and a target of the same shape.
MEAN_LOSSES = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
)

# Names of the arguments of modules that are positions.
POSITIONS = ("position_ids", "positions", "pos_ids", "input_pos", "position", "pos")

# Code that is not the user's: calls of torch in it have their place in the code that called it.
LIBRARIES = (
    str(Path(torch.__file__).parent),
    contextlib.__file__,
    random.__file__,
    __file__,
)
# Code of this package: calls of torch in it are not recorded.
OURS = str(Path(__file__).parents[1])

# The target that does not count, in records and changes.
IGNORED = -100

# An argument or a result of a function or module of torch, or a part of a `Change`.
Value: TypeAlias = Any

# How one run on one rank differs from the step as it is written. Keys and values have the types
# that this list shows.
#   "noise"           the seed of random roundings of every result
#   forward, name     the "tokens", "positions" or "targets" that replace those of this forward;
#                     "targets i" are those of its i-th cross-entropy, from 1 on
#   forward, i        a factor of the i-th cross-entropy of this forward
#   "numbers", i      the numbers that replace the i-th numbers of rows, of the same shape
#   "mean", i         a value and a factor of the gradient, which replace those of the i-th mean, or
#                     sum, of rows
#   "divisor", i      the divisor of the i-th division of a loss
#   "seen"            (rows, rows), the keys that each query sees, which replaces attention's masks
#   "seen", i         the same for the i-th attention
#   "within"          (rows, rows), the keys that queries see at most, in addition to the masks
#   "within", i       the same for the i-th attention
#   "owner"           (rows,), the rank of each row: keys get no gradients from queries of others
#   "parted", class   (rows,) of each rank: modules of this class see the rows of one rank only;
#                     or the place of functions of `parted.FUNCTIONS`
#   "gradients"       the gradients of an outcome, which replace those of the step
#   "no dropout"      True: dropout changes nothing
#   "drawn", i        the `Replacement` of the i-th random numbers
#   "seed", i         the value that replaces the i-th seed
#   "weights"         True: all ranks get the weights of rank 0 before the first forward
Change = Mapping[tuple[Value, ...], Value]


@dataclass(eq=False)
class Forward:
    """The record of one forward of the model.

    Attributes:
        fed: its first "tokens" and "positions"; and "targets" (of other cross-entropies than the
            first, "targets 1" and so on), IGNORED where they do not count.
        counts: number of targets, for each cross-entropy.
        trains: whether a backward follows it.
    """

    fed: dict[str, Tensor] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)
    trains: bool = False

    def values(self, name: str) -> Tensor | None:
        """Return the value of each row, (batch, rows), if each row has one value, else None.

        A row without a value has IGNORED.
        """
        tokens, x = self.fed.get("tokens"), self.fed.get(name)
        if tokens is None or x is None:
            return None
        batch, rows = tokens.numel() // tokens.size(-1), tokens.size(-1)
        if x.numel() == batch * (rows - 1):  # the loss shifts labels itself: the last row has none
            x = F.pad(x.reshape(batch, rows - 1), (0, 1), value=IGNORED)
        if x.numel() not in (rows, batch * rows):
            return None
        return x.reshape(-1, rows).expand(batch, rows)


class FedForward(NamedTuple):
    """A forward whose tokens are known, and its number among all forwards."""

    number: int
    tokens: Tensor  # (batch, rows)


class Numbers(NamedTuple):
    """Numbers that code gives to rows: an arange, or the rows that an index takes from a table.

    Attributes:
        forward: number of the forward in which this happened, or before which.
        place: file and line of the code.
        numbers: (rows,).
    """

    forward: int
    place: str
    numbers: Tensor


class Mean(NamedTuple):
    """A mean, or a sum, over the rows of a rank.

    Attributes:
        place: file and line of the code.
        value: the mean.
        num_values: how many values it is the mean of.
        is_sum: whether it is a sum.
    """

    place: str
    value: Tensor
    num_values: int
    is_sum: bool = False


class Division(NamedTuple):
    """A division of a loss, or of the losses of sequences, by a number.

    Attributes:
        place: file and line of the code.
        dividend: the loss.
        divisor: the number, or a number for each sequence.
    """

    place: str
    dividend: Tensor
    divisor: Tensor


@dataclass
class Outcome:
    """The record of one run on one rank.

    Attributes:
        forwards: all forwards, in order.
        results: by name: "loss", "evaluation loss", "gradient of NAME" (the first one), "weight
            NAME", and "state NAME" of buffers and frozen weights that the step changes.
        gradients: of all optimizer steps, in the order of their use.
        after_backward: by name of a parameter, its gradient after the last backward before its
            first use, when no code has summed or clipped it; without shards of FSDP.
        numbers: of rows, in order.
        means: over rows, in order, and sums for each sequence.
        divisions: of losses, in order.
        masks: of all calls of `ring_attention`, in order.
        sees_own_rows: for each call of attention, whether its keys are those of as many rows as
            its queries, as in attention within a rank.
        has_dropout: whether dropout drew random numbers.
        draws: random numbers that code has drawn, in or before forwards, in order.
        seeds: seeds that code has set, in order.
        kinds: classes of modules that may mix rows, with the name of one module of each.
        functions: functions that may mix rows, by their places.
        first_sums: by name of a parameter, a sum of its elements before the first forward; without
            shards of FSDP.
        owners: by name of a parameter, the rank that has each of its elements, for shards.
    """

    forwards: list[Forward]
    results: dict[str, Tensor]
    gradients: list[Tensor | None]
    after_backward: dict[str, Tensor] = field(default_factory=dict)
    numbers: list[Numbers] = field(default_factory=list)
    means: list[Mean] = field(default_factory=list)
    divisions: list[Division] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    sees_own_rows: list[bool] = field(default_factory=list)
    has_dropout: bool = False
    draws: list[Draw] = field(default_factory=list)
    seeds: list[Seed] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    first_sums: dict[str, float] = field(default_factory=dict)
    owners: dict[str, Tensor] = field(default_factory=dict)

    def fed(self) -> list[FedForward]:
        """Return the forwards whose tokens are known."""
        fed = []
        for number, forward in enumerate(self.forwards):
            tokens = forward.values("tokens")
            if tokens is not None:
                fed.append(FedForward(number, tokens))
        return fed


def run_step(
    step: Step, runs: Sequence[Mapping[int, Change]], limit: int = 0, tiny: bool = False
) -> list[Outcome]:
    """Return the outcomes of this rank in each run; without results if the twin cannot run it.

    Args:
        step: the training step.
        runs: for each run, the changes by rank.
        limit: limit of the memory in bytes; 0 is no limit.
        tiny: whether models of transformers are shrunk.
    """
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    outcomes = []
    for changes in runs:
        change = changes.get(dist.get_rank(), {})
        with tiny_models() if tiny else nullcontext():
            try:
                outcome = _Observer(change).run(step)
            except Exception:
                # With one rank, no other rank waits. The step raises because of the change, as it
                # ran before without one.
                if dist.get_world_size() > 1 or not change or ("noise",) in change:
                    raise
                outcome = Outcome(forwards=[], results={}, gradients=[])
        outcomes.append(outcome)
    return outcomes


class _Observer(TorchFunctionMode):
    """Records a step while it runs."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change
        self.forwards: list[Forward] = []
        self.gradients: list[tuple[Tensor, Tensor | None]] = []
        # Ids of parameters whose gradients of this optimizer step are recorded.
        self.recorded: set[int] = set()
        # Whether the next input begins a forward.
        self.ended = True
        # Whether a backward runs; inputs of what it recomputes are changed, but not recorded.
        self.backward = False
        self.has_dropout = False
        self.numbers: list[Numbers] = []
        self.means: list[Mean] = []
        self.divisions: list[Division] = []
        self.masks: list[Mask] = []
        self.sees_own_rows: list[bool] = []
        self.functions: dict[str, str] = {}
        # Buffers and frozen weights before the first forward, by id of the module, and name in it.
        self.first_states: dict[tuple[int, str], Tensor] = {}
        self.draws: list[Draw] = []
        self.seeds: list[Seed] = []
        # Whether the step runs. A file that imports a function while its step runs keeps it.
        self.runs = False
        # Replacements of random numbers, by the generator's state before they were drawn.
        self.new_draws: dict[bytes, Replacement] = {}
        self.first_sums: dict[int, float] = {}  # by id of the parameter
        self.num_attentions = 0
        # Modules that no other module calls, by id, and the depth of calls within them.
        self.outer_modules: dict[int, nn.Module] = {}
        self.depth = 0
        # Gradients after the last backward, and those before the first use, by id of the parameter.
        self.after_last: dict[int, Tensor] = {}
        self.after_backward: dict[int, Tensor] = {}
        # Names of the arguments of modules, by type.
        self.names: dict[type[nn.Module], list[str]] = {}

    def run(self, step: Step) -> Outcome:
        """Run the step, and return its record."""
        seed = self.change.get(("noise",))
        clipped = self._clipped(nn.utils.clip_grad_norm_)
        with (
            register_optimizer_step_pre_hook(self._before_optimizer),
            mock.patch.object(nn.utils, "clip_grad_norm_", clipped),
            mock.patch.object(nn.utils.clip_grad, "clip_grad_norm_", clipped),
            mock.patch.object(nn.Module, "__call__", self._called(nn.Module.__call__)),
            mock.patch.object(drivers, "forward", self._attended(drivers.forward)),
            self._observed_seeds(),
            self._clipped_by_fsdp(),
            nullcontext() if seed is None else RandomRounding(seed),
            self,
        ):
            returned = step()
        return self._outcome(returned)

    @contextlib.contextmanager
    def _observed_seeds(self) -> Iterator[None]:
        """Record the seeds that code sets, or replace them."""
        with ExitStack() as patches:
            for module_name, name in SEEDS:
                module = sys.modules.get(module_name)
                if module is not None:
                    observed = self._seeded(f"{module_name}.{name}", getattr(module, name))
                    patches.enter_context(mock.patch.object(module, name, observed))
            for module_name, name, methods in SEED_METHODS:
                module = sys.modules.get(module_name)
                if module is not None:
                    kind = self._seeded_class(
                        f"{module_name}.{name}", getattr(module, name), methods
                    )
                    patches.enter_context(mock.patch.object(module, name, kind))
            self.runs = True
            try:
                yield
            finally:
                self.runs = False

    def _seeded(self, name: str, function: Callable[..., Value]) -> Callable[..., Value]:
        """Return a function that sets a seed, and records or replaces it."""

        def seeded(*args: Value, **kwargs: Value) -> Value:
            place = _place()
            given = [kwargs[key] for key in SEED_NAMES if key in kwargs]
            value: Value = [*args, *given, None][0]
            if not self.runs or place is None or not hasattr(value, "__index__"):
                return function(*args, **kwargs)
            new = self.change.get(("seed", len(self.seeds)), value)
            self.seeds.append(Seed(name, place, int(value)))
            others = {key: x for key, x in kwargs.items() if key not in SEED_NAMES}
            return function(new, *args[1:], **others)

        return seeded

    def _seeded_class(self, name: str, kind: type, methods: Sequence[str]) -> type:
        """Return a subclass of a class of generators, whose methods record or replace seeds.

        Generators of the class itself are its instances, too.
        """

        class Kind(type(kind)):  # type: ignore[misc]  # a class of classes
            def __instancecheck__(cls, x: object) -> bool:
                return isinstance(x, kind)

        def seeded(method: str) -> Callable[..., Value]:
            def call(generator: Value, *args: Value, **kwargs: Value) -> Value:
                set_seed = partial(getattr(kind, method), generator)
                shown = f"{name}.{method}" if method == "manual_seed" else name
                return self._seeded(shown, set_seed)(*args, **kwargs)

            return call

        return Kind(kind.__name__, (kind,), {method: seeded(method) for method in methods})

    @contextlib.contextmanager
    def _clipped_by_fsdp(self) -> Iterator[None]:
        """Record gradients before the method of FSDP1 clips them."""
        clip = FullyShardedDataParallel.clip_grad_norm_

        def clipped(module: FullyShardedDataParallel, *args: Value, **kwargs: Value) -> Tensor:
            self._record(module.parameters())
            return clip(module, *args, **kwargs)

        with mock.patch.object(FullyShardedDataParallel, "clip_grad_norm_", clipped):
            yield

    def _called(self, call: Callable[..., object]) -> Callable[..., object]:
        """Return `nn.Module.__call__` that records positions, and modules that no module calls."""

        def called(module: nn.Module, *args: object, **kwargs: object) -> object:
            if torch.compiler.is_compiling():
                return call(module, *args, **kwargs)
            if self.depth == 0 and id(module) not in self.outer_modules:
                self.outer_modules[id(module)] = module
                self._begin_module(module)
            kind = type(module)
            if kind not in self.names:
                self.names[kind] = list(inspect.signature(kind.forward).parameters)[1:]  # no self
            given = list(args)
            for i, name in enumerate(self.names[kind][: len(args)]):
                if name in POSITIONS:
                    given[i] = self._fed("positions", args[i])
            for name in POSITIONS:
                if name in kwargs:
                    kwargs[name] = self._fed("positions", kwargs[name])
            columns = self.change.get(("parted", kind_of(module)))
            self.depth += 1
            try:
                # torch disables a function mode in a backward.
                with self if self.backward else nullcontext():
                    if columns is None:
                        return call(module, *given, **kwargs)
                    return called_in_parts(partial(call, module), given, kwargs, columns)
            finally:
                self.depth -= 1

        return called

    def _begin_module(self, module: nn.Module) -> None:
        """Record the weights of a module before its first forward; replace them by rank 0's."""
        shards = FlatShards(module)
        for parameter in module.parameters():
            is_shard = hasattr(parameter, "to_local") or parameter in shards
            if id(parameter) in self.first_sums or is_shard:
                continue
            if self.change.get(("weights",)):
                dist.broadcast(parameter.detach(), 0)
            self.first_sums[id(parameter)] = float(parameter.detach().double().sum())
        for key, _, x in _states(module):
            self.first_states.setdefault(key, x.detach().clone())

    def _attended(self, forward: Callable[..., Value]) -> Callable[..., Value]:
        """Return the driver of `ring_attention` that records masks."""

        def attended(call: Call, *args: Value, **kwargs: Value) -> Value:
            if not self.backward:
                self.masks.append(call.mask)
                self.sees_own_rows.append(False)
            return forward(call, *args, **kwargs)

        return attended

    def _clipped(self, clip: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return `clip_grad_norm_` that records gradients before it clips them."""

        def clipped(
            parameters: Tensor | Iterable[Tensor], *args: object, **kwargs: object
        ) -> Tensor:
            return clip(self._record(parameters), *args, **kwargs)

        return clipped

    def _before_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        groups = optimizer.param_groups
        parameters = self._record(x for group in groups for x in group["params"])
        self.recorded -= {id(parameter) for parameter in parameters}

    def __torch_function__(
        self, func: Value, types: object, args: Value = (), kwargs: Value = None
    ) -> Value:
        kwargs = kwargs or {}
        if func in (Tensor.backward, torch.autograd.backward):
            self._begin_backward()
            try:
                return func(*args, **kwargs)
            finally:
                self._end_backward()
        if torch.compiler.is_compiling() or probing.on:
            return func(*args, **kwargs)
        if func in RANDOM:
            return self._random(func, *args, **kwargs)
        if func in DIVISIONS:
            return self._divide(func, *args, **kwargs)
        if func in MEAN_LOSSES:
            return self._mean_loss(func, *args, **kwargs)
        if func in FUNCTIONS:
            return self._mixing(func, *args, **kwargs)
        if func not in OBSERVED:
            return func(*args, **kwargs)
        return getattr(self, OBSERVED[func])(*args, **kwargs)

    def _begin_backward(self) -> None:
        self.ended = self.backward = True
        for forward in reversed(self.forwards):
            if forward.trains:
                break
            forward.trains = True

    def _end_backward(self) -> None:
        """Record the gradients before any code of the step sums or clips them."""
        self.backward = False
        for module in self.outer_modules.values():
            for parameter in module.parameters():
                grad = parameter.grad
                if grad is not None and not hasattr(grad, "to_local"):
                    self.after_last[id(parameter)] = grad.detach().clone()

    def _fed(self, name: str, x: Value) -> Value:
        """Record an input at its first use in a forward; return it, or its replacement."""
        if not isinstance(x, Tensor):
            return x
        is_targets = name.startswith("targets")
        begins = self.ended and not is_targets and not self.backward
        if begins or not self.forwards:
            self.forwards.append(Forward())
            self.ended = False
        self.forwards[-1].fed.setdefault(name, _local(x).detach().clone())
        new = self.change.get((len(self.forwards) - 1, name))
        if new is None:
            return x
        # new is (batch, rows). A loss that shifts labels itself has no label for the last row, and
        # all sequences of the batch may share the positions of the first.
        for part in (new, new[:, :-1], new[:1]):
            if part.numel() == x.numel():
                return part.reshape(x.shape).to(x.dtype)
        return x

    def _arange(self, *args: Value, **kwargs: Value) -> Tensor:
        made = torch.arange(*args, **kwargs)
        new = self._numbered(made)
        return made if new is None else new.to(made.dtype)

    def _getitem(self, x: Tensor, index: Value) -> Tensor:
        entries = list(index) if isinstance(index, tuple) else [index]
        dim = _indexed_dim(x, entries)
        if dim is not None:
            entry = entries[dim]
            rows = torch.arange(x.size(dim))[entry] if isinstance(entry, slice) else entry
            new = self._numbered(rows)
            if new is not None:
                entries[dim] = new.to(x.device)
                return x[tuple(entries)]
        return x[index]

    def _numbered(self, numbers: Tensor) -> Tensor | None:
        """Record numbers of rows; return their replacement, if there is one."""
        is_known = type(numbers) is Tensor and numbers.device.type != "meta"
        if self.backward or not is_known or numbers.numel() < 2:
            return None
        place = _place()
        if place is None or bool((numbers != numbers.long()).any()):
            return None
        i = len(self.numbers)
        number = len(self.forwards) - (not self.ended)
        self.numbers.append(Numbers(number, place, numbers.detach().long().flatten().cpu()))
        new = self.change.get(("numbers", i))
        return None if new is None else new.view(numbers.shape).to(numbers.device)

    def _mean(self, input: Tensor, *args: Value, **kwargs: Value) -> Tensor:
        mean = torch.mean(input, *args, **kwargs)
        tokens = self._tokens()
        if tokens is None or type(mean) is not Tensor:
            return mean
        if not _is_over_rows(input, tokens, *args, **kwargs):
            return mean
        return self._recorded_mean(mean, input.numel() // max(1, mean.numel()))

    def _sum(self, input: Tensor, *args: Value, **kwargs: Value) -> Tensor:
        """Record sums of losses over the rows of each sequence, which must be of all its rows."""
        total = torch.sum(input, *args, **kwargs)
        tokens = self._tokens()
        if tokens is None or type(total) is not Tensor or not total.requires_grad:
            return total
        of_sequences = total.ndim > 0 and total.numel() == len(tokens)
        if tokens.ndim != 2 or input.shape != tokens.shape or not of_sequences:
            return total
        return self._recorded_mean(total, 1, is_sum=True)

    def _mean_loss(self, func: Callable[..., Tensor], *args: Value, **kwargs: Value) -> Tensor:
        loss = func(*args, **kwargs)
        tokens = self._tokens()
        if tokens is None or type(loss) is not Tensor or loss.ndim > 0:
            return loss
        bound = inspect.signature(func).bind(*args, **kwargs).arguments
        input, reduction = bound["input"], bound.get("reduction", "mean")
        if not input.ndim or not _is_over_rows(input, tokens):
            return loss
        if reduction == "mean":
            return self._recorded_mean(loss, input.numel())
        return self._recorded_mean(loss, len(input)) if reduction == "batchmean" else loss

    def _tokens(self) -> Tensor | None:
        """Return the tokens of this forward, or of the last one, for a loss; None in a backward."""
        return self.forwards[-1].fed.get("tokens") if self.forwards and not self.backward else None

    def _recorded_mean(self, mean: Tensor, num_values: int, *, is_sum: bool = False) -> Tensor:
        """Record a mean or a sum over rows; return it, or its replacement."""
        place = _place()
        if place is None:
            return mean
        i = len(self.means)
        self.means.append(Mean(place, _whole(mean), num_values, is_sum))
        value, factor = self.change.get(("mean", i), (None, 1.0))
        if value is None:
            return mean
        if num_values == 0:  # the mean of no values is NaN, and so is its gradient
            mean = mean.nan_to_num()
        return value.to(mean) + (mean - mean.detach()) * factor

    def _divide(
        self, divide: Callable[..., Tensor], dividend: Value, *args: Value, **kwargs: Value
    ) -> Tensor:
        """Record the division of a loss by a number; return its result, or another one's."""
        is_loss = type(dividend) is Tensor and dividend.requires_grad and dividend.ndim < 2
        is_plain = is_loss and len(args) == 1 and not kwargs and self._tokens() is not None
        place = _place() if is_plain and _is_number(args[0]) else None
        if place is None:
            return divide(dividend, *args, **kwargs)
        new = self.change.get(("divisor", len(self.divisions)))
        self.divisions.append(Division(place, _whole(dividend), _whole(args[0]).double()))
        return divide(dividend, args[0] if new is None else new.to(dividend))

    def _mixing(self, func: Callable[..., Value], *args: Value, **kwargs: Value) -> Value:
        """Call a function that may mix rows, on all rows or on the rows of each rank separately."""
        place = _place()
        if place is None:
            return func(*args, **kwargs)
        name = f"{func.__name__} in {place}"
        if not self.backward:
            self.functions.setdefault(name, func.__name__)
        columns = self.change.get(("parted", name))
        if columns is None:
            return func(*args, **kwargs)
        return called_in_parts(func, args, kwargs, columns)

    def _embedding(self, input: Tensor, weight: Tensor, *args: Value, **kwargs: Value) -> Tensor:
        begins = self.ended and not self.backward
        first_tokens = None if begins else self.forwards[-1].fed.get("tokens")
        # Other embeddings of the same forward, as of token types, are not recorded.
        if first_tokens is None or torch.equal(_local(input), first_tokens):
            input = self._fed("tokens", input)
        return F.embedding(input, weight, *args, **kwargs)

    def _cross_entropy(self, *args: Value, **kwargs: Value) -> Tensor:
        return self._loss_of_targets(F.cross_entropy, *args, **kwargs)

    def _nll_loss(self, *args: Value, **kwargs: Value) -> Tensor:
        return self._loss_of_targets(F.nll_loss, *args, **kwargs)

    def _loss_of_targets(
        self, loss_of: Callable[..., Tensor], *args: Value, **kwargs: Value
    ) -> Tensor:
        bound = inspect.signature(loss_of).bind(*args, **kwargs)
        bound.apply_defaults()
        target, ignored = bound.arguments["target"], bound.arguments["ignore_index"]
        if self.backward or target.is_floating_point():
            return loss_of(*args, **kwargs)
        targets = _local(target).flatten()
        i = len(self.forwards[-1].counts) if self.forwards else 0
        new = self._fed(targets_name(i), targets.masked_fill(targets == ignored, IGNORED))
        new = new.view_as(target)
        bound.arguments["target"] = new.masked_fill(new == IGNORED, ignored)
        self.ended = True
        factor = self.change.get((len(self.forwards) - 1, i), 1.0)
        self.forwards[-1].counts.append(int((targets != ignored).sum()))
        loss = loss_of(*bound.args, **bound.kwargs)
        if factor == 0.0:  # without targets, the mean is NaN, which no factor makes 0
            return loss.nan_to_num() * 0.0
        return loss * factor

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        draws = training and p > 0
        self.has_dropout |= draws
        if draws and self.change.get(("no dropout",)):
            return input
        new = self._new_draw() if draws else None
        if new is None:
            out = F.dropout(input, p, training, inplace)
        else:
            out = kept(new, input, p)
            F.dropout(input.detach(), p)  # for the generator's next state
        if draws:
            self._record_draw(out != 0, is_dropout=True)
        return out

    def _random(self, draw: Callable[..., Tensor], *args: Value, **kwargs: Value) -> Tensor:
        new = self._new_draw()
        made = draw(*args, **kwargs)
        if type(made) is not Tensor or made.is_meta:  # weights are parameters
            return made
        if new is not None:
            numbers = RANDOM[draw](new, made, *args, **kwargs)
            with torch.no_grad():
                made.copy_(numbers)
        self._record_draw(made)
        return made

    def _draws_in_forward(self) -> bool:
        """Return whether random numbers are of a forward, not of a batch or what comes before."""
        return bool(self.forwards) and (self.depth > 0 or not self.ended)

    def _new_draw(self) -> Replacement | None:
        """Return the replacement of the next random numbers, if there is one.

        A layer that is computed again, in the backward, begins with the generator's state of its
        forward: so the state identifies the numbers.
        """
        key = "drawn", len(self.draws)
        if self.backward and self.new_draws:
            return self.new_draws.get(_generator_state())
        if key not in self.change or self.backward or _place() is None:
            return None
        new: Replacement = self.change[key]
        self.new_draws[_generator_state()] = new
        return new

    def _record_draw(self, numbers: Tensor, *, is_dropout: bool = False) -> None:
        place = _place()
        if self.backward or place is None:
            return
        first = numbers.detach().flatten()[:NUM_COMPARED].cpu().clone()
        number = len(self.forwards) - self._draws_in_forward()
        self.draws.append(Draw(number, place, numbers.shape, first, is_dropout))

    def _scaled_dot_product_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Value,
    ) -> Tensor:
        mask = kwargs.pop("attn_mask", mask)
        self.has_dropout |= dropout_p > 0
        if self.change.get(("no dropout",)):
            dropout_p = 0.0
        shape = q.size(-2), k.size(-2)
        seen = self.change.get(("seen", self.num_attentions), self.change.get(("seen",)))
        within = self.change.get(("within", self.num_attentions), self.change.get(("within",)))
        owner = self.change.get(("owner",))
        if not self.backward:
            self.sees_own_rows.append(shape[0] == shape[1])
        self.num_attentions += not self.backward
        if seen is not None and seen.shape == shape:
            mask, is_causal = seen, False
        if within is not None and within.shape == shape:
            if is_causal:
                within = within.tril()
            of_call = torch.ones_like(within) if mask is None else mask
            hidden = False if of_call.dtype == torch.bool else -torch.inf
            mask, is_causal = of_call.masked_fill(~within, hidden), False
        if owner is not None and owner.shape == shape[:1] == shape[1:]:
            attend = partial(F.scaled_dot_product_attention, dropout_p=dropout_p, **kwargs)
            return _without_gradients_of_others(attend, q, k, v, mask, is_causal, owner)
        if mask is None or mask.dtype != torch.bool or not self.change:
            return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, **kwargs)
        # A query that sees no key has the output 0, as in `ring_attention`.
        is_blind = ~mask.any(-1, keepdim=True)
        mask = mask | is_blind
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, **kwargs)
        return out.masked_fill(is_blind, 0.0)

    def _record(self, parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
        """Record the gradients of parameters once for each optimizer step, and replace them."""
        given = [parameters] if isinstance(parameters, Tensor) else [*parameters]
        replacements = self.change.get(("gradients",), ())
        for parameter in given:
            if id(parameter) in self.recorded:
                continue
            index = len(self.gradients)
            new = replacements[index] if index < len(replacements) else None
            grad = parameter.grad
            self.recorded.add(id(parameter))
            if id(parameter) in self.after_last:
                self.after_backward.setdefault(id(parameter), self.after_last[id(parameter)])
            self.gradients.append((parameter, None if grad is None else grad.detach().clone()))
            if grad is not None and new is not None and new.shape == parameter.shape:
                _local(grad).copy_(new)
        return given

    def _outcome(self, returned: object) -> Outcome:
        """Return the record of a step that has returned."""
        model, *losses = returned if isinstance(returned, tuple | list) else (returned,)
        if not isinstance(model, nn.Module) or len(losses) > 2:
            raise TypeError(
                "step must return its model, or (model, loss), or (model, loss, evaluation loss), "
                f"got {type(model).__name__} as the model and {len(losses)} losses"
            )
        trained = {
            WRAPPERS.sub("", name): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._record(trained.values())
        shards = FlatShards(model)
        # The first gradient of each parameter is the last in the reversed order.
        first = {id(parameter): grad for parameter, grad in reversed(self.gradients)}
        results: dict[str, Tensor | None] = {}
        for name, loss in zip(("loss", "evaluation loss"), losses, strict=False):
            results[name] = None if loss is None else _whole(loss)
        for name, parameter in trained.items():
            grad = first[id(parameter)]
            results[f"gradient of {name}"] = _whole_of(parameter, grad, shards)
        for name, parameter in trained.items():
            results[f"weight {name}"] = _whole_of(parameter, parameter, shards)
        for key, name, x in _states(model):
            before = self.first_states.get(key)
            if before is None or x in shards:
                continue
            # The ranks' states are compared with those that the twin changes.
            if dist.get_world_size() > 1 or not torch.equal(before, x):
                results[f"state {WRAPPERS.sub('', name)}"] = _whole(x)
        return Outcome(
            forwards=self.forwards,
            results={name: x for name, x in results.items() if x is not None},
            gradients=[_whole_of(parameter, grad, shards) for parameter, grad in self.gradients],
            after_backward={
                name: _whole(self.after_backward[id(parameter)])
                for name, parameter in trained.items()
                if id(parameter) in self.after_backward and parameter not in shards
            },
            numbers=self.numbers,
            means=self.means,
            divisions=self.divisions,
            masks=self.masks,
            sees_own_rows=self.sees_own_rows,
            has_dropout=self.has_dropout,
            draws=self.draws,
            seeds=self.seeds,
            kinds=mixing_kinds([*self.outer_modules.values()]),
            functions=self.functions,
            first_sums={
                name: self.first_sums[id(parameter)]
                for name, parameter in trained.items()
                if id(parameter) in self.first_sums
            },
            owners=self._owners(trained, shards),
        )

    def _owners(self, trained: Mapping[str, nn.Parameter], shards: FlatShards) -> dict[str, Tensor]:
        """Return the rank that has each element of each sharded parameter."""
        found = {}
        for name, parameter in trained.items():
            if isinstance(parameter, DTensor):
                found[name] = _owners(parameter)
            elif parameter in shards:
                of_rank = torch.full_like(parameter, dist.get_rank(), dtype=torch.int32)
                owners = shards.whole(parameter, of_rank)
                if owners is not None:
                    found[name] = owners
        return found


def targets_name(i: int) -> str:
    """Return the name of the targets of the i-th cross-entropy of a forward."""
    return f"targets {i}" if i else "targets"


def _states(module: nn.Module) -> Iterator[tuple[tuple[int, str], str, Tensor]]:
    """Yield buffers and frozen weights of floating point, with a key and a name of each.

    Shards of FSDP2 are left out.
    """
    for prefix, part in module.named_modules():
        frozen = [x for x in part.named_parameters(recurse=False) if not x[1].requires_grad]
        for name, x in (*part.named_buffers(recurse=False), *frozen):
            if type(x) in (Tensor, nn.Parameter) and x.is_floating_point() and not x.is_meta:
                yield (id(part), name), f"{prefix}.{name}" if prefix else name, x


def _is_number(divisor: Value) -> bool:
    """Return whether a divisor is a number, or a number for each sequence, and not learned."""
    if type(divisor) is Tensor:
        return not divisor.requires_grad and divisor.ndim < 2
    return isinstance(divisor, int | float)


def _without_gradients_of_others(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    owner: Tensor,
) -> Tensor:
    """Return attention whose keys and values get gradients only from queries of the same rank.

    Tensors are (..., rows, dims), and `owner` is the rank of each row.
    """
    if is_causal:
        mask = torch.ones(len(owner), len(owner), dtype=torch.bool).tril()
    out = torch.zeros_like(attend(q.detach(), k.detach(), v.detach(), mask))
    for rank in owner.unique().tolist():
        is_own = (owner == rank)[:, None]  # (rows, 1)
        keys, values = (torch.where(is_own, x, x.detach()) for x in (k, v))
        out = torch.where(is_own, attend(q, keys, values, mask), out)
    return out


def _generator_state() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def _place() -> str | None:
    """Return file and line of the code that called torch; None if this package did."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(LIBRARIES):
            return None if file.startswith(OURS) else f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def _indexed_dim(x: Tensor, entries: Sequence[Value]) -> int | None:
    """Return the dim from which an index takes rows of a table; None if it does something else.

    A table is a tensor that no other tensor needs for its gradient, such as a buffer.
    """
    if type(x) not in (Tensor, nn.Parameter) or x.grad_fn is not None:
        return None

    def is_whole(entry: Value) -> bool:
        return entry is None or entry is Ellipsis or entry == slice(None)

    taking = [
        i for i, entry in enumerate(entries) if isinstance(entry, Tensor) or not is_whole(entry)
    ]
    if len(taking) != 1 or taking[0] >= x.ndim:
        return None
    (dim,) = taking
    entry = entries[dim]
    if any(not isinstance(before, slice) for before in entries[:dim]):  # None shifts the dims
        return None
    if isinstance(entry, slice):
        return dim
    takes_numbers = isinstance(entry, Tensor) and entry.dtype in (torch.int32, torch.int64)
    return dim if takes_numbers and entry.ndim > 0 else None


def _is_over_rows(
    x: Tensor, tokens: Tensor, dim: Value = None, *_: Value, axis: Value = None, **__: Value
) -> bool:
    """Return whether a mean over dims, by default all, is over the rows of a forward.

    Rows are not the last dim, such as that of a normalization, unless the mean is over all dims.
    """
    dim = axis if dim is None else dim
    dims = (dim,) if isinstance(dim, int) else tuple(dim or range(x.ndim))
    if not all(isinstance(one, int) for one in dims):  # a dtype by place
        return False
    reduced = {one % x.ndim for one in dims} if x.ndim else set()
    is_over_all = len(reduced) == x.ndim
    if is_over_all and x.ndim == 1:  # losses[mask]
        return True
    rows, num_tokens = tokens.size(-1), tokens.numel()
    return any(
        x.size(one) == rows or (x.size(one) and x.size(one) % num_tokens == 0)
        for one in reduced
        if is_over_all or one < x.ndim - 1
    )


def _local(x: Value) -> Tensor:
    """Return a tensor, or the local shard of a DTensor."""
    return x.to_local() if hasattr(x, "to_local") else x


def _owners(parameter: DTensor) -> Tensor:
    """Return the rank that has each element of a parameter; all ranks call it together."""
    local = torch.full_like(parameter.to_local(), dist.get_rank(), dtype=torch.int32)
    mesh, placements = parameter.device_mesh, parameter.placements
    owners = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return _whole(owners)


def _whole_of(parameter: Tensor, x: Tensor | None, shards: FlatShards) -> Tensor | None:
    """Return a parameter, or its gradient, as a whole tensor on the CPU."""
    if parameter in shards:
        return shards.whole(parameter, x)
    return None if x is None else _whole(x)


def _whole(x: Value) -> Tensor:
    """Return a number, a tensor or a whole DTensor as a tensor on the CPU."""
    whole = x.full_tensor() if hasattr(x, "full_tensor") else torch.as_tensor(x)
    return whole.detach().clone().cpu()
