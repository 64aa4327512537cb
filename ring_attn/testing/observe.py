"""Runs a training step of a user on a rank, and notes what goes into it and comes out of it.

The step runs as written. Noted are: tokens and positions that a forward is fed, the targets of
`F.cross_entropy`, gradients before they are clipped or used, and what the step returns. A `Change`
replaces some of it, to test a hypothesis about its effect.
"""

from __future__ import annotations

import inspect
import re
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from ring_attn.testing.rounding import RandomRounding

# Parts of parameter names that wrappers add: DDP, torch.compile, torch's checkpointing.
WRAPPERS = re.compile(r"\b(module|_orig_mod|_checkpoint_wrapped_module)\.")

# Functions that are watched, each by a method of its name.
WATCHED = (F.embedding, F.cross_entropy, F.scaled_dot_product_attention)

# The target that does not count, in notes and changes.
IGNORED = -100

# How one run on one rank differs from the step as it is written. The keys:
#   "noise"           the seed of random roundings of every result
#   forward, name     what it is fed instead of its "tokens", "positions" or "targets"
#   forward, i        a factor of its i-th cross-entropy
#   "seen"            (rows, rows), which of them attention sees, whatever its mask
#   "gradients"       those of an outcome, for the step's own
Change = Mapping[tuple[Any, ...], Any]


@dataclass(eq=False)
class Forward:
    """Notes of a forward of the model."""

    # Its first "tokens" and "positions", and "targets", IGNORED where they do not count.
    fed: dict[str, Tensor] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)  # of targets, for each cross-entropy

    def values(self, name: str) -> Tensor | None:
        """The value that each row is fed, (batch, rows), if it is one; IGNORED if it has none."""
        tokens, x = self.fed.get("tokens"), self.fed.get(name)
        if tokens is None or x is None:
            return None
        batch, rows = tokens.numel() // tokens.size(-1), tokens.size(-1)
        if x.numel() == batch * (rows - 1):
            x = F.pad(x.reshape(batch, -1), (0, 1), value=IGNORED)
        whole = x.numel() in (rows, batch * rows)
        return x.reshape(-1, rows).expand(batch, rows) if whole else None


@dataclass
class Outcome:
    """Notes of a run on one rank."""

    forwards: list[Forward]
    results: dict[
        str, Tensor
    ]  # "loss", "evaluation loss", "gradient of NAME" at first, "weight NAME"
    gradients: list[Tensor | None]  # of all steps, in the order of their use

    def fed(self) -> list[tuple[int, Forward, Tensor]]:
        """Forwards whose tokens are known: number, forward, tokens."""
        known = ((at, x, x.values("tokens")) for at, x in enumerate(self.forwards))
        return [(at, x, tokens) for at, x, tokens in known if tokens is not None]


def run_step(
    step: Callable[[], Any], runs: Sequence[Mapping[int, Change]], limit: int = 0
) -> list[Outcome]:
    """Return the outcomes of this rank in each run.

    Args:
        step: the training step.
        runs: for each run, the changes by rank.
        limit: limit of the memory in bytes; 0 is no limit.
    """
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return [_Watch(changes.get(dist.get_rank(), {})).run(step) for changes in runs]


class _Watch(TorchFunctionMode):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change
        self.forwards: list[Forward] = []
        self.gradients: list[tuple[Tensor, Tensor | None]] = []
        self.kept: set[int] = set()  # parameters whose gradients of this step are noted
        self.ended = True  # whether what is fed next begins a forward
        self.backward = False  # what it recomputes is changed, but not noted

    def run(self, step: Callable[[], Any]) -> Outcome:
        call, clip = nn.Module.__call__, nn.utils.clip_grad_norm_

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return call(module, *args, **kwargs)
            names = [*inspect.signature(type(module).forward).parameters][1:]
            given = [
                self._fed("positions", x) if name == "position_ids" else x
                for name, x in zip(names, args, strict=False)
            ]
            if "position_ids" in kwargs:
                kwargs["position_ids"] = self._fed("positions", kwargs["position_ids"])
            # A function mode is off in a backward.
            with self if self.backward else nullcontext():
                return call(module, *given, *args[len(given) :], **kwargs)

        def clipped(parameters: Any, *args: Any, **kwargs: Any) -> Tensor:
            return clip(self._keep(parameters), *args, **kwargs)

        def stepped(optimizer: Any, *_: Any) -> None:
            kept = self._keep(x for group in optimizer.param_groups for x in group["params"])
            self.kept -= {*map(id, kept)}

        seed = self.change.get(("noise",))
        with (
            register_optimizer_step_pre_hook(stepped),
            mock.patch.object(nn.utils, "clip_grad_norm_", clipped),
            mock.patch.object(nn.utils.clip_grad, "clip_grad_norm_", clipped),
            mock.patch.object(nn.Module, "__call__", called),
            nullcontext() if seed is None else RandomRounding(seed),
            self,
        ):
            returned = step()
        return self._outcome(returned)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.backward, torch.autograd.backward):
            self.ended = self.backward = True
            try:
                return func(*args, **kwargs)
            finally:
                self.backward = False
        if torch.compiler.is_compiling() or func not in WATCHED:
            return func(*args, **kwargs)
        return getattr(self, f"_{func.__name__}")(*args, **kwargs)

    def _fed(self, name: str, x: Any) -> Any:
        """Record what a forward is fed at its first use, or returns what replaces it."""
        if not isinstance(x, Tensor):
            return x
        begins = self.ended and name != "targets" and not self.backward
        if begins or not self.forwards:
            self.forwards.append(Forward())
            self.ended = False
        self.forwards[-1].fed.setdefault(name, _local(x).detach().clone())
        new = self.change.get((len(self.forwards) - 1, name), torch.empty(0, 0))
        # A loss that shifts labels itself has none for the last row; rows may share positions.
        fits = [part for part in (new, new[:, :-1], new[:1]) if part.numel() == x.numel()]
        return fits[0].reshape(x.shape).to(x.dtype) if fits else x

    def _embedding(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        first = None if self.ended and not self.backward else self.forwards[-1].fed.get("tokens")
        if first is None or torch.equal(_local(input), first):
            input = self._fed("tokens", input)
        return F.embedding(input, weight, *args, **kwargs)

    def _cross_entropy(self, *args: Any, **kwargs: Any) -> Tensor:
        bound = inspect.signature(F.cross_entropy).bind(*args, **kwargs)
        bound.apply_defaults()
        target, ignored = (bound.arguments[x] for x in ("target", "ignore_index"))
        if self.backward or target.is_floating_point():
            return F.cross_entropy(*args, **kwargs)
        noted = _local(target).flatten()
        new = self._fed("targets", noted.masked_fill(noted == ignored, IGNORED)).view_as(target)
        bound.arguments["target"] = new.masked_fill(new == IGNORED, ignored)
        self.ended, counts = True, self.forwards[-1].counts
        factor = self.change.get((len(self.forwards) - 1, len(counts)), 1.0)
        counts.append(int((noted != ignored).sum()))
        loss = F.cross_entropy(*bound.args, **bound.kwargs)
        return loss * factor if factor else loss.nan_to_num() * 0.0  # NaN is the mean of nothing

    def _scaled_dot_product_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        mask = kwargs.pop("attn_mask", mask)
        seen = self.change.get(("seen",))
        if seen is not None and (q.size(-2), k.size(-2)) == seen.shape:
            mask, is_causal = seen, False
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, **kwargs)

    def _keep(self, parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
        given = [parameters] if isinstance(parameters, Tensor) else [*parameters]
        for x in given:
            if id(x) not in self.kept:
                new = self.change.get(("gradients",), ())[len(self.gradients) :]
                self.kept.add(id(x))
                self.gradients.append((x, None if x.grad is None else x.grad.detach().clone()))
                if x.grad is not None and new and getattr(new[0], "shape", None) == x.shape:
                    _local(x.grad).copy_(new[0])
        return given

    def _outcome(self, returned: Any) -> Outcome:
        model, *losses = returned if isinstance(returned, tuple | list) else (returned,)
        if not isinstance(model, nn.Module) or len(losses) > 2:
            raise TypeError(
                "step must return its model, or (model, loss), or (model, loss, evaluation loss), "
                f"got {type(model).__name__} as the model and {len(losses)} losses"
            )
        named = [(WRAPPERS.sub("", name), x) for name, x in model.named_parameters()]
        trained = {name: x for name, x in named if x.requires_grad}
        self._keep(trained.values())
        first = {id(x): grad for x, grad in reversed(self.gradients)}
        results = dict(zip(("loss", "evaluation loss"), losses, strict=False))
        results |= {f"gradient of {name}": first[id(x)] for name, x in trained.items()}
        results |= {f"weight {name}": x for name, x in trained.items()}
        results = {name: _whole(x) for name, x in results.items() if x is not None}
        gradients = [None if x is None else _whole(x) for _, x in self.gradients]
        return Outcome(self.forwards, results, gradients)


def _local(x: Any) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def _whole(x: Any) -> Tensor:
    whole = x.full_tensor() if hasattr(x, "full_tensor") else torch.as_tensor(x)
    return whole.detach().clone().cpu()
