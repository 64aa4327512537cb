"""Runs a training step of a user on a rank, and notes what goes into it and comes out of it.

The step runs as written. Noted are: what modules and embeddings are called with, the targets of
`F.cross_entropy`, the losses whose backward runs, gradients before they are clipped or used, and
what the step returns. A `Change` replaces some of it, to test a hypothesis about its effect.
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
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cache
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

# Operators that do not round. Their results stay as they are in a run with noise.
EXACT = {
    "masked_fill", "where", "fill", "copy", "clone", "cat", "stack", "gather", "index",
    "index_select", "embedding", "constant_pad_nd", "tril", "triu", "clamp", "neg", "abs", "relu",
    "max", "min", "maximum", "minimum", "sort", "slice_backward", "select_backward", "new_full",
    "full_like", "zeros_like", "ones_like", "roll", "flip", "sign", "isfinite", "repeat",
    "split_with_sizes_copy", "native_dropout", "amax", "amin",
}  # fmt: skip


# How one run on one rank differs from the step as it is written. The keys:
#   "seed"; "noise"           seeds of the random generators; of random roundings of every result
#   "input", forward, name    what modules and embeddings get instead
#   "targets", forward        the targets of its cross-entropies
#   "factor", forward, i      a factor of its i-th cross-entropy; "backward", forward: of its loss
#   "rows"                    rows that attention sees only among themselves, as a list of tensors
#   "causal"                  attention drops every mask but the causal one
#   "weight", name            a parameter's values at the first forward
#   "unclipped"               gradients are not clipped
Change = Mapping[tuple[Any, ...], Any]


@dataclass(eq=False)
class Forward:
    """One forward of the model: what it was fed, and the loss that followed.

    Attributes:
        tokens: (batch, rows), or None where no embedding ran.
        inputs: other integer or boolean tensors that modules were called with, by name.
        targets: of each cross-entropy, in order, flat.
        ignored: the target that does not count.
        totals: the sum of each cross-entropy.
        loss: what the backward began with; None without a backward.
    """

    tokens: Tensor | None
    inputs: dict[str, Tensor]
    training: bool
    targets: list[Tensor] = field(default_factory=list)
    ignored: int = -100
    totals: list[float] = field(default_factory=list)
    loss: float | None = None

    def target(self) -> Tensor | None:
        """Targets of the rows, (batch, rows), if the loss tells one for each.

        A model that shifts labels itself has no target for the last row, which gets `ignored`.
        """
        if self.tokens is None or not self.targets:
            return None
        batch, rows = self.tokens.shape
        for flat in (self.targets[0], torch.cat(self.targets)):
            if flat.numel() == batch * rows:
                return flat.view(batch, rows)
            if flat.numel() == batch * (rows - 1):
                return F.pad(flat.view(batch, rows - 1), (0, 1), value=self.ignored)
        return None

    def counts(self) -> list[int]:
        """Numbers of targets of each cross-entropy."""
        return [int((x != self.ignored).sum()) for x in self.targets]


@dataclass
class Outcome:
    """The notes of a run of the step on one rank."""

    forwards: list[Forward]
    losses: dict[str, Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    start: dict[str, Tensor]
    norms: list[float]
    wrapper: str
    dropout: bool
    memory: int

    @property
    def trained(self) -> list[Forward]:
        return [forward for forward in self.forwards if forward.training]


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
    found: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"{path} has no function {name!r}")
    return found


def run_step(
    step: bytes | str,
    runs: Sequence[Mapping[int, Change]],
    seconds: float,
    folder: str,
    limit: int,
    tiny: bool = False,
) -> list[Outcome | str]:
    """Notes of this rank in each run, or its error; a run has changes by rank.

    Args:
        seconds: after them this rank ends, with its stack in a file of its number in `folder`.
        limit: bytes of memory that the process may use; 0 for no limit.
        tiny: whether models of transformers are shrunk.
    """
    rank = dist.get_rank()
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with (Path(folder) / str(rank)).open("w") as file, tiny_models() if tiny else nullcontext():
        faulthandler.dump_traceback_later(seconds, file=file, exit=True)
        function, outcomes = load(step), list[Outcome | str]()
        for changes in runs:
            change = changes.get(rank, {})
            seed = change.get(("seed",), 0)
            torch.manual_seed(seed)
            random.seed(seed)
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed(seed)
            try:
                outcomes.append(_Watch(change).run(function))
            except Exception as error:
                if not change or dist.get_world_size() > 1:
                    raise
                outcomes.append(str(error))
        faulthandler.cancel_dump_traceback_later()
    return outcomes


class _Watch(TorchFunctionMode):
    """Notes and changes one run."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change
        self.forwards: list[Forward] = []
        self.inputs: dict[str, Tensor] = {}
        self.gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.start: dict[str, Tensor] = {}
        self.norms: list[float] = []
        self.wrapper = ""
        self.dropout = False
        self.depth = 0
        self.begun = False  # whether the outermost module that runs has its forward noted
        self.quiet = False  # during a backward, whose recomputation is changed, but not noted

    def run(self, step: Callable[[], Any]) -> Outcome:
        original, clip = nn.Module.__call__, nn.utils.clip_grad_norm_

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            return self._module(original, module, args, kwargs)

        def clipped(parameters: Any, *args: Any, **kwargs: Any) -> Tensor:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if ("unclipped",) in self.change:
                return torch.zeros(())
            self._keep(given)
            norm = clip(given, *args, **kwargs)
            self.norms.append(float(_local(norm)))
            return norm

        def stepped(optimizer: Any, *_: Any) -> None:
            self._keep(x for group in optimizer.param_groups for x in group["params"])

        hook = register_optimizer_step_pre_hook(stepped)
        try:
            with ExitStack() as stack:
                for owner in (nn.utils, nn.utils.clip_grad):
                    patched = mock.patch.object(owner, "clip_grad_norm_", clipped)
                    stack.enter_context(patched)
                stack.enter_context(mock.patch.object(nn.Module, "__call__", called))
                if ("causal",) in self.change:
                    stack.enter_context(mock.patch.object(ops, "attend", _one_document))
                if (noise := self.change.get(("noise",))) is not None:
                    stack.enter_context(_Noise(noise))
                stack.enter_context(self)
                returned = step()
        finally:
            hook.remove()
        return self._outcome(returned)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.compiler.is_compiling() or func not in WATCHED:
            return func(*args, **kwargs)
        return WATCHED[func](self, *args, **kwargs)

    @property
    def at(self) -> int:
        """The number of the forward that runs."""
        return len(self.forwards) - (self.begun or self.quiet or not self.depth)

    def _begin(self, tokens: Tensor) -> None:
        if not self.begun and not self.quiet:
            self.begun = self.depth > 0
            tokens = _local(tokens).detach().clone()
            tokens = tokens.view(-1, tokens.size(-1))
            self.forwards.append(Forward(tokens, self.inputs, torch.is_grad_enabled()))

    def _module(
        self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if self.depth == 0 and not self.quiet:
            self.inputs, self.begun = {}, False
            if not self.start:
                self._note_start(module)
        self.dropout |= isinstance(module, nn.Dropout) and module.training and module.p > 0
        self.depth += 1
        try:
            args, kwargs = self._arguments(module, args, kwargs)
            result = call(module, *args, **kwargs)
            if self.depth == 1 and (tokens := self.inputs.get("input_ids")) is not None:
                self._begin(tokens)
            return result
        finally:
            self.depth -= 1
            self.begun &= self.depth > 0

    def _arguments(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            bound = _signature(type(module).forward).bind(module, *args, **kwargs)
        except TypeError:
            return args, kwargs  # the call itself says what is wrong
        changed = dict[int, Any]()
        for name, x in bound.arguments.items():
            for key, value in (x if isinstance(x, dict) else {name: x}).items():
                if (new := self._input(key, value)) is not value:
                    changed[id(value)] = new
        args = tuple(changed.get(id(x), x) for x in args)
        return args, {name: changed.get(id(x), x) for name, x in kwargs.items()}

    def _input(self, name: str, x: Any) -> Any:
        """Notes an input at its first use, or returns what replaces it."""
        if not isinstance(x, Tensor) or (x.is_floating_point() and "mask" not in name):
            return x
        if not self.quiet and name not in self.inputs:
            self.inputs[name] = _local(x).detach().clone()
        new = self.change.get(("input", self.at, name))
        return x if new is None or new.numel() != x.numel() else new.view_as(x).to(x.dtype)

    def _embedding(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        tokens = self.inputs.get("input_ids", input)
        first = not self.begun or tokens is input
        if first:
            input = self._input("input_ids", input)
            self._begin(tokens)
        elif input.shape[-1] == tokens.shape[-1] and not torch.equal(_local(input), tokens):
            input = self._input("position_ids", input)
        return F.embedding(input, weight, *args, **kwargs)

    def _cross_entropy(self, *args: Any, **kwargs: Any) -> Tensor:
        bound = inspect.signature(F.cross_entropy).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        logits, target, ignored = given["input"], given["target"], given["ignore_index"]
        if self.quiet or target.is_floating_point():
            return F.cross_entropy(*args, **kwargs)
        at = max(self.at, 0)
        if not self.forwards:
            self.forwards.append(Forward(None, {}, torch.is_grad_enabled()))
        forward = self.forwards[-1]
        if (new := self.change.get(("targets", at))) is not None and new.numel() == target.numel():
            given["target"] = target = new.view_as(target)
        factor = self.change.get(("factor", at, len(forward.targets)))
        forward.targets.append(_local(target).detach().flatten().clone())
        forward.ignored = ignored
        with torch.no_grad():
            total = F.cross_entropy(logits, target, ignore_index=ignored, reduction="sum")
        forward.totals.append(float(_local(total)))
        loss = F.cross_entropy(*bound.args, **bound.kwargs)
        return loss if factor is None else loss * factor

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        attend, rows = F.scaled_dot_product_attention, self.change.get(("rows",), ())
        mask = args[0] if args else kwargs.pop("attn_mask", None)
        if ("causal",) in self.change and mask is not None:
            seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            # Rows of padding may see all: so the mask is causal if it hides most of what is ahead.
            ahead = torch.ones_like(seen).triu(1)
            kwargs["is_causal"] = bool(2 * (seen & ahead).sum() < ahead.sum())
            mask = None
        if not rows or sum(map(len, rows)) != q.size(-2) or k.size(-2) != q.size(-2):
            return attend(q, k, v, mask, *args[1:], **kwargs)
        parts = []
        for at in rows:
            local = mask if mask is None else mask[..., at, :][..., at]
            cut = (q[..., at, :], k[..., at, :], v[..., at, :], local)
            parts.append(attend(*cut, *args[1:], **kwargs))
        return torch.cat(parts, -2)[..., torch.cat([*rows]).argsort(), :]

    def _backward(self, loss: Tensor, gradient: Tensor | None = None, **kwargs: Any) -> None:
        at = len(self.forwards) - 1
        if at >= 0:
            value = float(_local(loss).detach().double().sum())
            self.forwards[at].loss = (self.forwards[at].loss or 0.0) + value
        if (factor := self.change.get(("backward", at))) is not None:
            gradient = (torch.ones_like(loss) if gradient is None else gradient) * factor
        self.quiet = True
        try:
            with self:
                torch.autograd.backward(loss, gradient, **kwargs)
        finally:
            self.quiet = False

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
        gradients, weights = {}, {}
        for name, x in model.named_parameters():
            if x.requires_grad:
                kept = self.gradients.get(id(x), (x, x.grad))[1]
                if kept is not None:
                    gradients[clean(name)] = _whole(kept)
                weights[clean(name)] = _whole(x)
        losses = {
            name: torch.as_tensor(returned[name]).detach().clone()
            for name in names[1:]
            if returned.get(name) is not None
        }
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return Outcome(
            self.forwards, losses, gradients, weights, self.start, self.norms,
            _wrapper(model), self.dropout, peak,
        )  # fmt: skip


ATTEND = ops.attend

WATCHED: dict[Callable[..., Any], Callable[..., Any]] = {
    F.embedding: _Watch._embedding,
    F.cross_entropy: _Watch._cross_entropy,
    F.scaled_dot_product_attention: _Watch._attention,
    Tensor.backward: _Watch._backward,
}


def _one_document(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, arguments: Any, *rest: Any
) -> Any:
    """`ops.attend` as if the sequence were one document."""
    ends = {name: x[[0, -1]] for name in ("cu_seqlens", "cu_seqlens_k")
            if (x := getattr(arguments, name)) is not None}  # fmt: skip
    return ATTEND(q, k, v, sinks, arguments._replace(**ends), *rest)


class _Noise(TorchDispatchMode):
    """Rounds every floating-point result at random, by half a unit in its last place.

    Runs that differ in this alone show how far roundings move each result of a step.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        made = not any(x.alias_info for x in (*func._schema.arguments, *func._schema.returns))
        if made and name not in EXACT and func.namespace == "aten":
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, Tensor) and x.is_floating_point() and _is_real(args):
                    self._round(_local(x))
        return out

    def _round(self, x: Tensor) -> None:
        if x.numel() == 0 or 0 in x.stride():
            return
        eps = torch.finfo(x.dtype).eps
        # Of mean 1: a unit below a power of 2 is half of one above.
        draw = torch.rand(x.shape, generator=self.generator)
        down, up = (draw < 1 / 3).to(x.dtype), (draw > 5 / 6).to(x.dtype)
        rounded = x * (1 - eps / 2 * down + eps * up)
        x.copy_(torch.where(rounded.isfinite(), rounded, x))


def _is_real(args: Any) -> bool:
    """Tells whether an operator takes floating-point tensors: factories take none."""
    flat = [y for x in args for y in (x if isinstance(x, tuple | list) else (x,))]
    return any(isinstance(x, Tensor) and x.is_floating_point() for x in flat)


@cache
def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(forward)


def clean(name: str) -> str:
    """A parameter's name without the parts that wrappers add."""
    for part in WRAPPERS:
        name = name.removeprefix(part).replace(f".{part}", ".")
    return name


def _wrapper(model: nn.Module) -> str:
    kinds = {type(module).__name__ for module in model.modules()}
    if "DistributedDataParallel" in kinds:
        return "DDP"
    return "FSDP" if any(kind.startswith("FSDP") for kind in kinds) else ""


def _local(x: Any) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def _whole(x: Any) -> Tensor:
    whole: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return whole.detach().clone().cpu()
