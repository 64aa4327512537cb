"""Runs a training step of a user on a rank, and notes what goes into it and comes out of it.

The step runs as written. Noted are: the tokens and positions that a forward is fed, the targets of
`F.cross_entropy`, weights at the first forward, gradients before they are clipped or used, and what
the step returns. A `Change` replaces some of it, to test a hypothesis about its effect.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import inspect
import pickle
import random
import resource
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from ring_attn import ops
from ring_attn.testing.tiny import tiny_models
from ring_attn.torch_private import TorchDispatchMode

# Parts of parameter names that wrappers add: DDP, torch.compile, torch's checkpointing.
WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")

# The target that does not count, in notes and changes.
IGNORED = -100

# How one run on one rank differs from the step as it is written. The keys:
#   "seed"; "noise"   seeds of the random generators; of random roundings of every result
#   forward, name     what it is fed instead of its "tokens" or "positions", or its "targets"
#   forward, i        a factor of its i-th cross-entropy
#   "weight", name    a parameter's values at the first forward
#   "seen"            (rows, rows), which of them attention sees, whatever its mask
Change = Mapping[tuple[Any, ...], Any]


@dataclass(eq=False)
class Forward:
    """Notes of a forward of the model.

    Attributes:
        fed: its first "tokens" and "positions".
        targets: of each cross-entropy, in order, flat; IGNORED where they do not count.
    """

    training: bool
    fed: dict[str, Tensor] = field(default_factory=dict)
    targets: list[Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> Tensor | None:
        """(batch, rows), or None where no embedding ran."""
        x = self.fed.get("tokens")
        return None if x is None else x.view(-1, x.size(-1))

    def values(self, name: str) -> Tensor | None:
        """Tokens, positions or targets of the rows, (batch, rows), if there is one for each.

        A model that shifts labels itself has no target for the last row, which gets IGNORED.
        """
        if self.tokens is None:
            return None
        batch, rows = shape = self.tokens.shape
        if name != "targets":
            x = self.fed.get(name)
            fits = x is not None and x.ndim < 3 and x.size(-1) == rows
            return x.expand(shape) if x is not None and fits else None
        for flat in (self.targets[:1], self.targets):
            if (count := sum(map(torch.numel, flat))) == batch * rows:
                return torch.cat(flat).view(shape)
            if flat and count == batch * (rows - 1):
                return F.pad(torch.cat(flat).view(batch, -1), (0, 1), value=IGNORED)
        return None

    def counts(self) -> list[int]:
        """Numbers of targets of each cross-entropy."""
        return [int((x != IGNORED).sum()) for x in self.targets]


@dataclass
class Outcome:
    """The notes of a run of the step on one rank.

    Attributes:
        results: "loss", "evaluation loss", "gradient of NAME", "weight NAME".
        start: weights at the first forward.
    """

    forwards: list[Forward]
    results: dict[str, Tensor]
    start: dict[str, Tensor]


def find(step: str) -> tuple[Path, str]:
    """The file and the function of "file.py:function"."""
    path, _, name = step.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ValueError(f"step must be a function or 'file.py:function', got {step!r}")
    if not Path(path).is_file():
        raise ValueError(f"step {step!r}: there is no file {path}")
    return Path(path).resolve(), name


def load(step: bytes | str) -> Callable[[], Any]:
    """The step of a pickle, or of "file.py:function"."""
    if isinstance(step, bytes):
        return pickle.loads(step)
    path, name = find(step)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "the path is that of a file"
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not callable(found := getattr(module, name, None)):
        raise ValueError(f"{path} has no function {name!r}")
    return found


def run_step(
    step: bytes | str,
    runs: Sequence[Mapping[int, Change]],
    seconds: float,
    folder: str,
    limit: int,
    tiny: bool = False,
) -> list[Outcome]:
    """Notes of this rank in each run; a run has changes by rank.

    Args:
        seconds: after them this rank ends, with its stack in a file of its number in `folder`.
        limit: bytes of memory that the process may use; 0 for no limit.
        tiny: whether models of transformers are shrunk.
    """
    rank, outcomes = dist.get_rank(), []
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with (Path(folder) / str(rank)).open("w") as file, tiny_models() if tiny else nullcontext():
        faulthandler.dump_traceback_later(seconds, file=file, exit=True)
        function = load(step)
        for changes in runs:
            change = changes.get(rank, {})
            seed = change.get(("seed",), 0)
            torch.manual_seed(seed)
            random.seed(seed)
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed(seed)
            outcomes.append(_Watch(change).run(function))
        faulthandler.cancel_dump_traceback_later()
    return outcomes


class _Watch(TorchFunctionMode):
    """Notes and changes one run."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change
        self.forwards: list[Forward] = []
        self.now = Forward(True)  # of the outermost module; listed once it has tokens
        self.gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.start: dict[str, Tensor] = {}
        self.depth = 0
        self.quiet = False  # during a backward, whose recomputation is changed, but not noted

    def run(self, step: Callable[[], Any]) -> Outcome:
        call, clip = nn.Module.__call__, nn.utils.clip_grad_norm_

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return call(module, *args, **kwargs)
            return self._module(call, module, [*args], kwargs)

        def clipped(parameters: Any, *args: Any, **kwargs: Any) -> Tensor:
            given = [parameters] if isinstance(parameters, Tensor) else [*parameters]
            self._keep(given)
            return clip(given, *args, **kwargs)

        def stepped(optimizer: Any, *_: Any) -> None:
            self._keep(x for group in optimizer.param_groups for x in group["params"])

        seed = self.change.get(("noise",))
        hook = register_optimizer_step_pre_hook(stepped)
        try:
            with (
                mock.patch.object(nn.utils, "clip_grad_norm_", clipped),
                mock.patch.object(nn.utils.clip_grad, "clip_grad_norm_", clipped),
                mock.patch.object(nn.Module, "__call__", called),
                mock.patch.object(ops, "attend", self._attend),
                nullcontext() if seed is None else _Noise(seed),
                self,
            ):
                returned = step()
        finally:
            hook.remove()
        return self._outcome(returned)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.backward, torch.autograd.backward):
            self.quiet = True
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self.quiet = False
        if torch.compiler.is_compiling() or func not in WATCHED:
            return func(*args, **(kwargs or {}))
        return WATCHED[func](self, *args, **(kwargs or {}))

    def _module(
        self, call: Callable[..., Any], module: nn.Module, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        if self.depth == 0 and not self.quiet:
            self.now = Forward(torch.is_grad_enabled())
            if not self.start:
                self._note_start(module)
        for i, name in enumerate(inspect.signature(type(module).forward).parameters):
            if name == "position_ids" and i <= len(args):
                args[i - 1] = self._fed("positions", args[i - 1])
        if "position_ids" in kwargs:
            kwargs["position_ids"] = self._fed("positions", kwargs["position_ids"])
        # A function mode is off in a backward.
        recomputed = self if self.quiet and self.depth == 0 else nullcontext()
        self.depth += 1
        try:
            with recomputed:
                return call(module, *args, **kwargs)
        finally:
            self.depth -= 1

    def _fed(self, name: str, x: Any) -> Any:
        """Notes what a forward is fed at its first use, or returns what replaces it."""
        if not isinstance(x, Tensor):
            return x
        self.now.fed.setdefault(name, _local(x).detach().clone())
        at = len(self.forwards) - (self.quiet or "tokens" in self.now.fed)
        new = self.change.get((at, name))
        return x if new is None or new.numel() != x.numel() else new.view_as(x).to(x.dtype)

    def _embedding(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.depth == 0 and not self.quiet:
            self.now = Forward(torch.is_grad_enabled())
        tokens = self.now.fed.get("tokens")
        if tokens is None and not self.quiet:
            self.forwards.append(self.now)
        if tokens is None or torch.equal(_local(input), tokens):
            input = self._fed("tokens", input)
        elif input.shape[-1] == tokens.shape[-1]:
            input = self._fed("positions", input)
        return F.embedding(input, weight, *args, **kwargs)

    def _cross_entropy(self, *args: Any, **kwargs: Any) -> Tensor:
        bound = inspect.signature(F.cross_entropy).bind(*args, **kwargs)
        bound.apply_defaults()
        target = bound.arguments["target"]
        if self.quiet or target.is_floating_point():
            return F.cross_entropy(*args, **kwargs)
        self.forwards = self.forwards or [Forward(torch.is_grad_enabled())]
        at, forward = len(self.forwards) - 1, self.forwards[-1]
        ignored, new = bound.arguments["ignore_index"], self.change.get((at, "targets"))
        if new is not None and new.numel() == target.numel():
            target = new.view_as(target).masked_fill(new.view_as(target) == IGNORED, ignored)
            bound.arguments["target"] = target
        factor = self.change.get((at, len(forward.targets)), 1.0)
        noted = _local(target).detach().flatten()
        forward.targets.append(noted.masked_fill(noted == ignored, IGNORED))
        loss = F.cross_entropy(*bound.args, **bound.kwargs)
        return loss * factor if factor else loss.nan_to_num() * 0.0  # NaN is the mean of nothing

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        mask = kwargs.pop("attn_mask", mask)
        seen = self.change.get(("seen",))
        if seen is not None and (q.size(-2), k.size(-2)) == seen.shape:
            mask, is_causal = seen, False
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, **kwargs)

    def _attend(self, q: Any, k: Any, v: Any, sinks: Any, arguments: Any, *rest: Any) -> Any:
        """`ops.attend`, which sees one document where it shall not see masks."""
        if ("seen",) in self.change:
            ends = {name: x[[0, -1]] for name in ("cu_seqlens", "cu_seqlens_k")
                    if (x := getattr(arguments, name)) is not None}  # fmt: skip
            arguments = arguments._replace(**ends)
        return ATTEND(q, k, v, sinks, arguments, *rest)

    def _note_start(self, module: nn.Module) -> None:
        for name, x in module.named_parameters():
            values = _local(x).detach()
            if (new := self.change.get(("weight", clean(name)))) is not None:
                values.copy_(new)
            self.start[clean(name)] = values.clone().cpu()

    def _keep(self, parameters: Iterable[Tensor]) -> None:
        for x in parameters:
            if id(x) not in self.gradients:
                self.gradients[id(x)] = x, None if x.grad is None else x.grad.detach().clone()

    def _outcome(self, returned: Any) -> Outcome:
        names = ("model", "loss", "eval_loss")
        if isinstance(returned, nn.Module):
            returned = (returned,)
        if not isinstance(returned, Mapping):
            returned = dict(zip(names, returned, strict=False)) if returned else {}
        if unknown := set(returned) - set(names):
            raise ValueError(f"step must return some of {names}, got {sorted(unknown)}")
        if not isinstance(model := returned.get("model"), nn.Module):
            raise TypeError(
                "step must return its model, or (model, loss), (model, loss, evaluation loss), or "
                f"a dict with these names, got {type(model).__name__} as the model"
            )
        trained = {clean(name): x for name, x in model.named_parameters() if x.requires_grad}
        self._keep(trained.values())
        gradients = {name: self.gradients[id(x)][1] for name, x in trained.items()}
        results = {"loss": returned.get("loss"), "evaluation loss": returned.get("eval_loss")}
        results |= {f"gradient of {name}": x for name, x in gradients.items()}
        results |= {f"weight {name}": x for name, x in trained.items()}
        whole = {name: _whole(x) for name, x in results.items() if x is not None}
        return Outcome(self.forwards, whole, self.start)


ATTEND = ops.attend

WATCHED: dict[Callable[..., Any], Callable[..., Any]] = {
    F.embedding: _Watch._embedding,
    F.cross_entropy: _Watch._cross_entropy,
    F.scaled_dot_product_attention: _Watch._attention,
}


class _Noise(TorchDispatchMode):
    """Moves every floating-point result at random by at most a unit in its last place.

    Runs that differ in this alone show how far roundings move each result of a step.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        schema = func._schema
        made = not any(x.alias_info for x in (*schema.arguments, *schema.returns))
        if made and func.namespace == "aten" and any(map(_is_real, _flat(args))):
            for x in map(_local, filter(_is_real, _flat([out]))):
                if x.numel() and 0 not in x.stride():
                    draw = torch.rand(x.shape, generator=self.generator, dtype=torch.float64)
                    x.copy_(x.double() * (1 + torch.finfo(x.dtype).eps * (2 * draw - 1)))
        return out


def _flat(args: Any) -> Iterable[Any]:
    return [y for x in args for y in (x if isinstance(x, tuple | list) else (x,))]


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def clean(name: str) -> str:
    """A parameter's name without the parts that wrappers add."""
    for part in WRAPPERS:
        name = name.removeprefix(part).replace(f".{part}", ".")
    return name


def _local(x: Any) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def _whole(x: Any) -> Tensor:
    whole = x.full_tensor() if hasattr(x, "full_tensor") else torch.as_tensor(x)
    return whole.detach().clone().cpu()
