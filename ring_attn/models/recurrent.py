"""Linear attention, state spaces and convolutions of a module on a split sequence.

A layer computes them by functions, known here by their names: those of Hugging Face's models, which
transformers replaces by those of fla and mamba-ssm where they are installed, and those that
`register_recurrence` adds. `SPLITS` has a version of each for a split sequence, which calls that
function on pieces of it; all else of a layer works on each row by itself.

In a Python file that has such a function, its name gets a function that asks where the rows of the
layer stand that runs: `RecurrentParallel` says so for a module, `register` for Hugging Face's.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn import functional

from ring_attn.checks import attention as checks
from ring_attn.core.layout import SequenceLayout
from ring_attn.models.style import with_forward
from ring_attn.sequence.recurrence import Part, Piece, causal_conv, linear_attention, recurrence
from ring_attn.transport import groups
from ring_attn.transport.p2p import reporting
from ring_attn.values.checks import as_tuple, check_type

__all__ = ["Place"]

# Arguments of functions that differ by piece, or change what the versions here compute by hand.
NOT_SPLIT = {"initial_state", "initial_states", "seq_idx", "cu_seqlens", "z", "scale"}

# fla's kernels take 16 bits only.
HAS_FLA = find_spec("fla") is not None


class Place(NamedTuple):
    """The places of the rows of a layer's call."""

    layout: SequenceLayout
    cu_seqlens: Tensor | None
    group: dist.ProcessGroup


# (the function, the place, its arguments) -> its result for this rank's rows.
Split = Callable[..., Any]


class _Current(threading.local):
    """The recurrent layer whose forward runs in this thread: the functions that it has called.

    `place` is None outside of layers, and on one rank.
    """

    place: Place | None = None
    called: set[str] = set()


current = _Current()


def register_recurrence(function: str, split: Split) -> None:
    """Lets modules run on a split sequence that call a function of this name.

    Known already, by transformers' names and arguments: `causal_conv1d_fn`,
    `torch_chunk_gated_delta_rule`, `chunk_kimi_delta_attention`, `mamba2_chunk_scan`,
    `mamba_selective_scan`. Register others before a model's first forward (`docs/hybrid.md`).

    Args:
        function: name of the function, in the Python file of the model; or of the layer's class,
            for its forward.
        split: called as `split(function, place, *args, **kwargs)` instead, with this rank's rows.
            `place` has `layout`, `cu_seqlens` and `group`, as `ring_attn.recurrence` takes them.
    """
    if not checks.check_name("function", function).isidentifier():
        raise ValueError(f"function must be the name of a function, got {function!r}")
    if not callable(split):
        raise TypeError(f"split must be a function, got {split!r}")
    SPLITS[function] = split


@dataclass(kw_only=True, eq=False)
class RecurrentParallel(ParallelStyle):
    """A style, for `parallelize`, that splits the sequence of a recurrent module across a mesh.

    Call the module as before, with this rank's rows as plain tensors. All that mixes rows must be
    in `functions`. Checkpoint the module, not parts, which would run again outside of its forward.

    Args:
        functions: names of those that `register_recurrence` lists and knows, in the module's Python
            file; each must be called in each forward. Or the module's class.
        layout: a `SequenceLayout`, or its name if all ranks have equally many rows, in dim 1 of the
            first argument.
        cu_seqlens: boundaries of documents in the whole sequence, or a function of the module that
            returns them.
    """

    functions: Sequence[str]
    layout: str | SequenceLayout = "contiguous"
    cu_seqlens: Tensor | Callable[[nn.Module], Tensor | None] | None = None

    def __post_init__(self) -> None:
        self.functions = as_tuple("functions", self.functions)
        if {*self.functions} - SPLITS.keys() or not self.functions:
            raise ValueError(
                f"functions must be some of {sorted(SPLITS)}, got {list(self.functions)}: "
                "register_recurrence makes others known"
            )
        if isinstance(self.layout, str):
            SequenceLayout.from_name(self.layout, 0, 1)
        else:
            check_type("layout", self.layout, SequenceLayout, "a SequenceLayout or its name")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Changes the module's class to one with another forward; for `parallelize_module`."""
        group = groups.check_group(device_mesh)
        split_functions(module, self.functions)

        def run(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                refuse_compiled()
            with reporting(group), at(place := self._place(module, group, *args)) as called:
                out = forward(*args, **kwargs)
                if place and (left := sorted({*self.functions} - called)):
                    raise NotImplementedError(
                        f"{type(module).__name__} did not call {left}, so that its rows were mixed "
                        "in another way: give RecurrentParallel the functions that it calls"
                    )
                return out

        return with_forward(module, self, run)

    def _place(self, module: nn.Module, group: Any, rows: Any = None, *_: Any) -> Place | None:
        if not isinstance(rows, Tensor) or isinstance(rows, DTensor):
            raise TypeError(
                f"{type(module).__name__} must get this rank's rows, a plain tensor, as its first "
                f"argument, got {type(rows).__name__}"
            )
        world_size, layout = dist.get_world_size(group), self.layout
        if isinstance(layout, str):
            layout = SequenceLayout.from_name(layout, rows.size(1) * world_size, world_size)
        cuts = self.cu_seqlens(module) if callable(self.cu_seqlens) else self.cu_seqlens
        return Place(layout, cuts, group) if world_size > 1 else None


@contextmanager
def at(place: Place | None) -> Iterator[set[str]]:
    """A context in which known functions run at a place; gives the names of those that did."""
    outside = current.place, current.called
    current.place, current.called = place, set()
    try:
        yield current.called
    finally:
        current.place, current.called = outside


# Not traced: an error while tracing would run the rest as it is, with half of the hooks.
@torch.compiler.disable
def refuse_compiled() -> None:
    raise NotImplementedError(
        "recurrent layers on a split sequence are not compiled: leave torch.compile out"
    )


def functions_of(layer: nn.Module) -> set[str]:
    """The known functions that a layer's forward calls, or its class."""
    forward: Any = inspect.unwrap(type(layer).forward)
    if not inspect.isfunction(forward):
        return set()
    called = {*forward.__code__.co_names, type(layer).__name__}
    return SPLITS.keys() & called & forward.__globals__.keys()


def split_functions(layer: nn.Module, functions: Collection[str]) -> None:
    """Makes known functions in a layer's Python file ask for the current place."""
    names: dict[str, Any] = inspect.unwrap(type(layer).forward).__globals__
    if missing := sorted({*functions} - names.keys()):
        raise ValueError(f"{missing} are no functions in {type(layer).__name__}'s Python file")
    for function in functions:
        found: Any = names[function]
        if isinstance(found, type):
            found.forward = _dispatching(function, found.forward)  # type: ignore[attr-defined]
        else:
            names[function] = _dispatching(function, found)


def _dispatching(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(function, "dispatches"):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        place = current.place
        if place is None:
            return function(*args, **kwargs)
        current.called.add(name)
        with at(None):  # the function itself gets pieces
            return SPLITS[name](function, place, *args, **kwargs)

    call.dispatches = True  # type: ignore[attr-defined]
    return call


# -- the functions


def _convolution(
    conv: Callable[..., Tensor], place: Place, hidden_states: Tensor, weight: Tensor, *bias: Any,
    **options: Any,
) -> Tensor:  # fmt: skip
    """(batch, channels, rows) -> likewise."""
    options = _options(options)

    def run(rows: Tensor) -> Tensor:
        return conv(rows, weight, *bias, **options)

    return causal_conv(run, hidden_states, weight.size(-1), dim=2, **place._asdict())


def _delta_rule(
    kernel: Callable[..., Any], place: Place, query: Tensor, key: Tensor, value: Tensor, g: Tensor,
    beta: Tensor, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gated delta rule, or Kimi's, whose decays `g` are those of channels."""
    return linear_attention(
        kernel, query, key, value, rows={"g": g, "beta": beta}, float32=not HAS_FLA,
        **place._asdict(), **_options(options),
    )  # fmt: skip


def _mamba2(
    kernel: Callable[..., Any], place: Place, hidden_states: Tensor, dt: Tensor, A: Tensor,
    B: Tensor, C: Tensor, chunk_size: int, *, return_final_states: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """State space of scalar decays: dt (batch, rows, heads), C (batch, rows, groups, state)."""
    options = _options(options)

    def run(piece: Piece) -> Part:
        x, steps, b, c = map(piece.of, (hidden_states, dt, B, C))
        out, end = kernel(x, steps, A, b, c, chunk_size, return_final_states=True, **options)
        steps = _discretized(steps, options.get("dt_bias"), options.get("dt_softplus"))
        steps = steps.clamp(*options.get("dt_limit", (0.0, None)))
        factors = (A * steps.float()).cumsum(1).exp()  # (batch, rows, heads)

        def add(out: Tensor, start: Tensor) -> Tensor:
            heads = c.float().repeat_interleave(x.size(2) // c.size(2), 2)
            read = torch.einsum("blhn,bhpn->blhp", heads * factors[..., None], start)
            return (out + read).to(out.dtype)

        return Part(out, end, factors[:, -1, :, None, None], add)

    out, end = recurrence(run, **place._asdict(), output_final_state=return_final_states)
    return (out, end) if return_final_states else out


def _mamba1(
    kernel: Callable[..., Any], place: Place, hidden_states: Tensor, dt: Tensor, A: Tensor,
    B: Tensor, C: Tensor, *, z: Tensor | None = None, return_last_state: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    """State space of diagonal decays: (batch, channels, rows), C (batch, state, rows).

    mamba-ssm's kernel gives its last state no gradient. So each piece goes on with rows in which no
    time passes, whose outputs are that state.
    """
    options = _options(options)
    bias, softplus = options.get("delta_bias"), options.get("delta_softplus")
    bias, states = None if bias is None else bias[:, None], A.size(1)

    def run(piece: Piece) -> Part:
        rows = [piece.of(y.mT).mT for y in (hidden_states, dt, B, C)]
        x, steps, b, c = (functional.pad(y, (0, states)) for y in rows)
        # No time: the softplus of -1e4 is 0, also with a bias.
        steps[..., -states:] = -1e4 if softplus else 0 if bias is None else -bias
        c[..., -states:] = torch.eye(states, dtype=c.dtype, device=c.device)
        out, end = kernel(x, steps, A, b, c, return_last_state=True, **options)
        out, read = out.split([out.size(2) - states, states], 2)
        end = end.detach() + (read - read.detach())
        time = _discretized(rows[1], bias, softplus).float().cumsum(2)

        def add(out: Tensor, start: Tensor) -> Tensor:
            # One channel of the state at a time: all at once are `state` times the activations.
            for a, read, s in zip(A.unbind(1), rows[3].unbind(1), start.unbind(2), strict=True):
                out = out + (s[..., None] * (a[:, None] * time).exp() * read[:, None]).mT
            return out.to(hidden_states.dtype)

        return Part(out.mT, end, (A * time[..., -1:]).exp(), add)

    out, end = recurrence(run, **place._asdict(), output_final_state=return_last_state)
    out = out.mT if z is None else out.mT * functional.silu(z)
    return (out, end) if return_last_state else out


def _lightning(
    forward: Callable[..., Any], place: Place, layer: Any, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """MiniMax's attention of scalar decays: Mamba 2's scan, of steps of one, by its function."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    rows = layer.act_fn(layer.qkv_proj(hidden_states))
    q, k, v = rows.unflatten(-1, (layer.num_attention_heads, -1)).split(layer.head_dim, -1)
    slopes, steps = layer.slope_rate.flatten().float(), torch.ones_like(v[..., 0])
    out = _mamba2(mamba2_chunk_scan, place, v, steps, -slopes, k, q, layer.block_size)
    gate = functional.sigmoid(layer.output_gate(hidden_states))
    return layer.out_proj(gate * layer.norm(out.to(v.dtype).flatten(2))), None


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that are not None; refuses rows or states, which a piece would not have."""
    given = {name: x for name, x in given.items() if x is not None}
    if refused := sorted(NOT_SPLIT & given.keys()):
        raise NotImplementedError(
            f"{', '.join(refused)} of a recurrence are not built on split rows"
        )
    return given


def _discretized(dt: Tensor, bias: Tensor | None, softplus: bool | None) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return functional.softplus(dt) if softplus else dt


def _not_fused(*args: Any, **kwargs: Any) -> None:
    """Nothing, by which layers take the functions of which a fused one consists."""


SPLITS: dict[str, Split] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba2_split_conv1d_scan_combined": _not_fused,
    "mamba_selective_scan": _mamba1,
    "mamba_inner_fn": _not_fused,
    "MiniMaxLightningAttention": _lightning,
}
