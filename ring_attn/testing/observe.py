"""Observation of a user's training step on a rank: its inputs and its results.

The step runs as written. Recorded are the tokens and positions of each forward, the targets of
`F.cross_entropy`, gradients before they are clipped or used, and the values that the step returns.
A `Change` replaces some of them, to test a hypothesis about their effect.
"""

from __future__ import annotations

import inspect
import re
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from ring_attn.testing.rounding import RandomRounding
from ring_attn.testing.tiny import tiny_models
from ring_attn.values.probing import probing

# Parts of parameter names that wrappers add: DDP, torch.compile, torch's checkpointing.
WRAPPERS = re.compile(r"\b(module|_orig_mod|_checkpoint_wrapped_module)\.")

# A user's training step: a function without arguments.
Step = Callable[[], object]

# Functions that are observed, each by a method of its name.
OBSERVED = (F.embedding, F.cross_entropy, F.scaled_dot_product_attention, F.dropout)

# The target that does not count, in records and changes.
IGNORED = -100

# An argument or a result of a function or module of torch, or a part of a `Change`.
Value: TypeAlias = Any

# How one run on one rank differs from the step as it is written. Keys and values have the types
# that this list shows.
#   "noise"           the seed of random roundings of every result
#   forward, name     the "tokens", "positions" or "targets" that replace those of this forward
#   forward, i        a factor of the i-th cross-entropy of this forward
#   "seen"            (rows, rows), the keys that each query sees, which replaces attention's mask
#   "gradients"       the gradients of an outcome, which replace those of the step
#   "no dropout"      True: dropout changes nothing
Change = Mapping[tuple[Value, ...], Value]


@dataclass(eq=False)
class Forward:
    """The record of one forward of the model.

    Attributes:
        fed: its first "tokens" and "positions"; and "targets", IGNORED where they do not count.
        counts: number of targets, for each cross-entropy.
    """

    fed: dict[str, Tensor] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)

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


@dataclass
class Outcome:
    """The record of one run on one rank.

    Attributes:
        forwards: all forwards, in order.
        results: by name: "loss", "evaluation loss", "gradient of NAME" (the first one), "weight
            NAME".
        gradients: of all optimizer steps, in the order of their use.
        has_dropout: whether dropout drew random numbers.
    """

    forwards: list[Forward]
    results: dict[str, Tensor]
    gradients: list[Tensor | None]
    has_dropout: bool = False

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
    """Return the outcomes of this rank in each run.

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
            outcomes.append(_Observer(change).run(step))
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

    def run(self, step: Step) -> Outcome:
        """Run the step, and return its record."""
        seed = self.change.get(("noise",))
        clipped = self._clipped(nn.utils.clip_grad_norm_)
        with (
            register_optimizer_step_pre_hook(self._before_optimizer),
            mock.patch.object(nn.utils, "clip_grad_norm_", clipped),
            mock.patch.object(nn.utils.clip_grad, "clip_grad_norm_", clipped),
            mock.patch.object(nn.Module, "__call__", self._called(nn.Module.__call__)),
            nullcontext() if seed is None else RandomRounding(seed),
            self,
        ):
            returned = step()
        return self._outcome(returned)

    def _called(self, call: Callable[..., object]) -> Callable[..., object]:
        """Return `nn.Module.__call__` that records positions."""

        def called(module: nn.Module, *args: object, **kwargs: object) -> object:
            if torch.compiler.is_compiling():
                return call(module, *args, **kwargs)
            names = list(inspect.signature(type(module).forward).parameters)[1:]  # without self
            given = list(args)
            for i, name in enumerate(names[: len(args)]):
                if name == "position_ids":
                    given[i] = self._fed("positions", args[i])
            if "position_ids" in kwargs:
                kwargs["position_ids"] = self._fed("positions", kwargs["position_ids"])
            # torch disables a function mode in a backward.
            with self if self.backward else nullcontext():
                return call(module, *given, **kwargs)

        return called

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
            self.ended = self.backward = True
            try:
                return func(*args, **kwargs)
            finally:
                self.backward = False
        if torch.compiler.is_compiling() or func not in OBSERVED or probing.on:
            return func(*args, **kwargs)
        return getattr(self, f"_{func.__name__}")(*args, **kwargs)

    def _fed(self, name: str, x: Value) -> Value:
        """Record an input at its first use in a forward; return it, or its replacement."""
        if not isinstance(x, Tensor):
            return x
        begins = self.ended and name != "targets" and not self.backward
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

    def _embedding(self, input: Tensor, weight: Tensor, *args: Value, **kwargs: Value) -> Tensor:
        begins = self.ended and not self.backward
        first_tokens = None if begins else self.forwards[-1].fed.get("tokens")
        # Other embeddings of the same forward, as of token types, are not recorded.
        if first_tokens is None or torch.equal(_local(input), first_tokens):
            input = self._fed("tokens", input)
        return F.embedding(input, weight, *args, **kwargs)

    def _cross_entropy(self, *args: Value, **kwargs: Value) -> Tensor:
        bound = inspect.signature(F.cross_entropy).bind(*args, **kwargs)
        bound.apply_defaults()
        target, ignored = bound.arguments["target"], bound.arguments["ignore_index"]
        if self.backward or target.is_floating_point():
            return F.cross_entropy(*args, **kwargs)
        targets = _local(target).flatten()
        new = self._fed("targets", targets.masked_fill(targets == ignored, IGNORED))
        new = new.view_as(target)
        bound.arguments["target"] = new.masked_fill(new == IGNORED, ignored)
        self.ended = True
        counts = self.forwards[-1].counts
        factor = self.change.get((len(self.forwards) - 1, len(counts)), 1.0)
        counts.append(int((targets != ignored).sum()))
        loss = F.cross_entropy(*bound.args, **bound.kwargs)
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
        return F.dropout(input, p, training, inplace)

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
        seen = self.change.get(("seen",))
        if seen is not None and (q.size(-2), k.size(-2)) == seen.shape:
            mask, is_causal = seen, False
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, **kwargs)

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
        # The first gradient of each parameter is the last in the reversed order.
        first = {id(parameter): grad for parameter, grad in reversed(self.gradients)}
        results: dict[str, Value] = dict(zip(("loss", "evaluation loss"), losses, strict=False))
        for name, parameter in trained.items():
            results[f"gradient of {name}"] = first[id(parameter)]
        for name, parameter in trained.items():
            results[f"weight {name}"] = parameter
        return Outcome(
            forwards=self.forwards,
            results={name: _whole(x) for name, x in results.items() if x is not None},
            gradients=[None if grad is None else _whole(grad) for _, grad in self.gradients],
            has_dropout=self.has_dropout,
        )


def _local(x: Value) -> Tensor:
    """Return a tensor, or the local shard of a DTensor."""
    return x.to_local() if hasattr(x, "to_local") else x


def _whole(x: Value) -> Tensor:
    """Return a number, a tensor or a whole DTensor as a tensor on the CPU."""
    whole = x.full_tensor() if hasattr(x, "full_tensor") else torch.as_tensor(x)
    return whole.detach().clone().cpu()
