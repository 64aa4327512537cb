"""Linear attention, state spaces and convolutions of a module on a sharded sequence.

A layer calls functions that mix rows. They are known here by their names: the functions of Hugging
Face's models, which transformers replaces by functions of fla and mamba-ssm if these are installed,
and the functions that `register_recurrence` adds. `SPLITS` has a version of each function for a
sharded sequence, which calls the function on pieces of it. The rest of a layer works on each row
separately.

In a Python file of a model, the name of such a function is bound to a dispatcher. It reads the
current `Place`, which says where the rows of the running layer are in the sequence.
`RecurrentParallel` sets the place for a module, and `register` for Hugging Face's models.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias, cast

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

# Arguments of functions that differ by piece, or change a value that this file computes itself.
NOT_SPLIT = {"initial_state", "initial_states", "seq_idx", "cu_seqlens", "z", "scale"}

# fla's kernels accept 16-bit tensors only.
HAS_FLA = find_spec("fla") is not None


class Place(NamedTuple):
    """The positions of the rows of a layer's call in the sequence, and the ranks that share it.

    Attributes:
        layout: layout of the sequence.
        cu_seqlens: boundaries of documents in the whole sequence, or None.
        group: the ranks that share the sequence.
    """

    layout: SequenceLayout
    cu_seqlens: Tensor | None
    group: dist.ProcessGroup


# A value of another package's function, or a layer of transformers: mypy skips these.
Value: TypeAlias = Any

# A function or forward of another package; its parameters and results differ from each other's.
Function = Callable[..., Value]

# The version for a sharded sequence: (the function, the place, its arguments) -> its result for
# this rank's rows.
Split = Function


class _Current(threading.local):
    """The place of the recurrent layer that runs in this thread, and the functions it has called.

    `place` is None outside of layers, and on one rank. With `by_row`, functions mix no rows.
    """

    place: Place | None = None
    called: set[str] = set()
    by_row: bool = False


current = _Current()


def register_recurrence(function: str, split: Split) -> None:
    """Register the version for a sharded sequence of a function that mixes rows.

    These functions are registered already, with transformers' names and arguments:
    `causal_conv1d_fn`, `torch_chunk_gated_delta_rule`, `chunk_kimi_delta_attention`,
    `mamba2_chunk_scan`, `mamba_selective_scan`. Register others before a model's first forward
    (`docs/hybrid.md`).

    Args:
        function: the name of the function in the Python file of the model, or the name of a layer's
            class to replace its forward.
        split: is called as `split(function, place, *args, **kwargs)` instead of the function, with
            this rank's rows. `place` has `layout`, `cu_seqlens` and `group`, in the form that
            `ring_attn.recurrence` takes.

    Raises:
        ValueError: `function` cannot be the name of a function.
        TypeError: a type is not accepted.

    Example:
        >>> def split_sums(function, place, x):
        ...     def run(piece):
        ...         out = function(piece.of(x))  # sums of consecutive rows of one document
        ...         add = lambda out, start: out + start[:, None]
        ...         return Part(out, end=out[:, -1], decay=torch.ones(1), add=add)
        ...     out, end = recurrence(run, **place._asdict())
        ...     return out
        >>> register_recurrence("sums_of_rows", split_sums)
    """
    if not checks.check_name("function", function).isidentifier():
        raise ValueError(f"function must be the name of a function, got {function!r}")
    if not callable(split):
        raise TypeError(f"split must be a function, got {split!r}")
    SPLITS[function] = split


@dataclass(kw_only=True, eq=False)
class RecurrentParallel(ParallelStyle):
    """A style for `parallelize` that shards the sequence of a recurrent module across a mesh.

    Call the module as before, with this rank's rows as plain tensors. Every function that mixes
    rows must be in `functions`. Checkpoint the whole module: a part would be recomputed outside of
    the module's forward.

    Args:
        functions: the names of the functions that mix rows, in the module's Python file, or the
            name of the module's class. `register_recurrence` must know them, and each forward must
            call each of them.
        layout: a `SequenceLayout`; or its name if all ranks have equally many rows. Rows are dim 1
            of the module's first argument.
        cu_seqlens: boundaries of documents in the whole sequence, or a function that returns them
            for the module.

    Raises:
        ValueError: a function or the layout is unknown.
        TypeError: a type is not accepted.

    Example:
        >>> style = RecurrentParallel(functions=["mamba2_chunk_scan"], layout="zigzag")
        >>> # and then ring_attn.parallelize(model, mesh, {"layers.*.mixer": style})
    """

    functions: Sequence[str]
    layout: str | SequenceLayout = "contiguous"
    cu_seqlens: Tensor | Callable[[nn.Module], Tensor | None] | None = None

    def __post_init__(self) -> None:
        self.functions = as_tuple("functions", self.functions)
        unknown = {*self.functions} - SPLITS.keys()
        if unknown or not self.functions:
            raise ValueError(
                f"functions must be some of {sorted(SPLITS)}, got {list(self.functions)}: "
                "register other functions with register_recurrence"
            )
        if isinstance(self.layout, str):
            SequenceLayout.from_name(self.layout, 0, 1)
        else:
            check_type("layout", self.layout, SequenceLayout, "a SequenceLayout or its name")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Change the module's class to one with another forward; for `parallelize_module`."""
        group = groups.check_group(device_mesh)
        split_functions(module, self.functions)

        def run(
            module: nn.Module,
            forward: Function,
            args: tuple[object, ...],
            kwargs: dict[str, object],
        ) -> object:
            if torch.compiler.is_compiling():
                refuse_compiled()
            with reporting(group):
                place = self._place(module, group, args)
                with at(place) as called:
                    out = forward(*args, **kwargs)
                not_called = sorted({*self.functions} - called)
                if place is not None and not_called:
                    raise NotImplementedError(
                        f"{type(module).__name__} did not call {not_called}, so its rows were "
                        "mixed in another way: pass the functions that it calls to "
                        "RecurrentParallel"
                    )
                return out

        return with_forward(module, self, run)

    def _place(
        self, module: nn.Module, group: dist.ProcessGroup, args: tuple[object, ...]
    ) -> Place | None:
        """Return the place of the rows in a call of the module; None on one rank."""
        rows = args[0] if args else None
        if not isinstance(rows, Tensor) or isinstance(rows, DTensor):
            raise TypeError(
                f"the first argument of {type(module).__name__} must be this rank's rows, a plain "
                f"tensor, got {type(rows).__name__}"
            )
        world_size = dist.get_world_size(group)
        layout = self.layout
        if isinstance(layout, str):
            layout = SequenceLayout.from_name(layout, rows.size(1) * world_size, world_size)
        cuts = self.cu_seqlens(module) if callable(self.cu_seqlens) else self.cu_seqlens
        return Place(layout, cuts, group) if world_size > 1 else None


@contextmanager
def at(place: Place | None) -> Iterator[set[str]]:
    """Set the place for the functions that run inside; yield the names of those that have run."""
    outside = current.place, current.called
    current.place, current.called = place, set()
    try:
        yield current.called
    finally:
        current.place, current.called = outside


# Dynamo does not trace this function: after an error while tracing it would run the frame
# uncompiled, with only a part of the hooks.
@torch.compiler.disable
def refuse_compiled() -> None:
    """Raise the error for recurrent layers under torch.compile."""
    raise NotImplementedError(
        "recurrent layers on a sharded sequence are not compiled: run the model without "
        "torch.compile"
    )


def functions_of(layer: nn.Module) -> set[str]:
    """Return the known functions that a layer's forward calls, and its class if that is known."""
    forward = inspect.unwrap(type(layer).forward)
    if not isinstance(forward, FunctionType):
        return set()
    called = {*forward.__code__.co_names, type(layer).__name__}
    return SPLITS.keys() & called & forward.__globals__.keys()


def has_own_kind(layer: nn.Module) -> bool:
    """Return whether a layer calls a function that a user has registered.

    No version of such a function that mixes no rows is known.
    """
    return not functions_of(layer) <= BY_ROW.keys()


def split_functions(layer: nn.Module, functions: Collection[str]) -> None:
    """Replace known functions in a layer's Python file by dispatchers, which read the place."""
    forward = cast(FunctionType, inspect.unwrap(type(layer).forward))
    names = forward.__globals__
    missing = sorted({*functions} - names.keys())
    if missing:
        raise ValueError(
            f"the Python file of {type(layer).__name__} must have every one of functions, but it "
            f"has no {missing}"
        )
    for function in functions:
        found = names[function]
        if isinstance(found, type):
            found.forward = _dispatching(function, found.forward)  # type: ignore[attr-defined]
        else:
            names[function] = _dispatching(function, found)


def _dispatching(name: str, function: Function) -> Function:
    """Return a function that calls the split version if there is a place, else `function`."""
    if hasattr(function, "dispatches"):
        return function

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        place = current.place
        if current.by_row:
            return BY_ROW.get(name, function)(*args, **kwargs)
        if place is None:
            return function(*args, **kwargs)
        current.called.add(name)
        with at(None):  # the split version calls `function` itself on pieces
            return SPLITS[name](function, place, *args, **kwargs)

    call.dispatches = True  # type: ignore[attr-defined]
    return call


# -- split versions of the functions


def _convolution(
    conv: Function,
    place: Place,
    hidden_states: Tensor,
    weight: Tensor,
    *bias: Tensor | None,
    **options: object,
) -> Tensor:
    """Compute a causal convolution: (batch, channels, rows) -> (batch, channels, rows)."""
    given = _given(options)

    def run(rows: Tensor) -> Tensor:
        return conv(rows, weight, *bias, **given)

    return causal_conv(run, hidden_states, weight.size(-1), dim=2, **place._asdict())


def _delta_rule(
    kernel: Function,
    place: Place,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **options: object,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule, or Kimi's, whose `g` has a decay for each channel."""
    return linear_attention(
        kernel,
        query,
        key,
        value,
        rows={"g": g, "beta": beta},
        float32=not HAS_FLA,
        **place._asdict(),
        **_given(options),
    )


def _mamba2(
    kernel: Function,
    place: Place,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    *,
    return_final_states: bool = False,
    **options: object,
) -> Tensor | tuple[Tensor, Tensor | None]:
    """Compute Mamba 2's scan, a state space with scalar decays.

    `hidden_states` is (batch, rows, heads, headdim), `dt` (batch, rows, heads), `A` (heads,), `B`
    and `C` (batch, rows, groups, state), a state (batch, heads, headdim, state).
    """
    given = _given(options)

    def run(piece: Piece) -> Part:
        x, steps, b, c = (piece.of(rows) for rows in (hidden_states, dt, B, C))
        out, end = kernel(x, steps, A, b, c, chunk_size, return_final_states=True, **given)
        steps = _discretized(steps, given.get("dt_bias"), given.get("dt_softplus"))
        steps = steps.clamp(*given.get("dt_limit", (0.0, None)))
        # How much of the start state is left after each row: (batch, rows, heads).
        decay = (A * steps.float()).cumsum(1).exp()

        def add(out: Tensor, start: Tensor) -> Tensor:
            heads_per_group = x.size(2) // c.size(2)
            # (batch, rows, groups, state) -> (batch, rows, heads, state)
            reads = c.float().repeat_interleave(heads_per_group, 2) * decay[..., None]
            read = torch.einsum("blhn,bhpn->blhp", reads, start)
            return (out + read).to(out.dtype)

        # The decay of the whole piece is broadcast over a state's headdim and state.
        return Part(out, end, decay[:, -1, :, None, None], add)

    out, end = recurrence(run, **place._asdict(), output_final_state=return_final_states)
    return (out, end) if return_final_states else out


# More than 60 lines, as its pieces share the padding and the time steps.
def _mamba1(
    kernel: Function,
    place: Place,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    z: Tensor | None = None,
    return_last_state: bool = False,
    **options: object,
) -> Tensor | tuple[Tensor, Tensor | None]:
    """Compute Mamba's selective scan, a state space with a decay for each element of the state.

    `hidden_states` and `dt` are (batch, channels, rows), `A` is (channels, state), `B` and `C` are
    (batch, state, rows), a state is (batch, channels, state).

    mamba-ssm's kernel computes no gradient of its last state. So each piece gets more rows, in
    which no time passes, and whose outputs are the elements of the last state.
    """
    given = _given(options)
    bias, softplus = given.get("delta_bias"), given.get("delta_softplus")
    if bias is not None:
        bias = bias[:, None]  # (channels, 1)
    num_states = A.size(1)
    # The value of dt for which no time passes: the softplus of -1e4 is 0, also with a bias.
    no_time: float | Tensor = 0
    if softplus:
        no_time = -1e4
    elif bias is not None:
        no_time = -bias

    def run(piece: Piece) -> Part:
        # `Piece.of` takes the rows in dim 1, here they are the last dim.
        rows = [piece.of(whole.mT).mT for whole in (hidden_states, dt, B, C)]
        _, steps, _, c = rows
        padded_x, padded_steps, padded_b, padded_c = (
            functional.pad(each, (0, num_states)) for each in rows
        )
        padded_steps[..., -num_states:] = no_time
        # Row i of the additional rows reads element i of the state.
        padded_c[..., -num_states:] = torch.eye(num_states, dtype=c.dtype, device=c.device)
        padded_out, end = kernel(
            padded_x, padded_steps, A, padded_b, padded_c, return_last_state=True, **given
        )
        num_rows = padded_out.size(2) - num_states
        out, read = padded_out.split([num_rows, num_states], 2)
        # The kernel's value of the state, with the gradient of the outputs that read it.
        end = end.detach() + (read - read.detach())
        time = _discretized(steps, bias, softplus).float().cumsum(2)  # (batch, channels, rows)

        def add(out: Tensor, start: Tensor) -> Tensor:
            # One element of the state at a time: together they would take `state` times the memory
            # of the activations.
            elements = zip(A.unbind(1), c.unbind(1), start.unbind(2), strict=True)
            for rate, reads, element in elements:  # (channels,), (batch, rows), (batch, channels)
                decay = (rate[:, None] * time).exp()
                out = out + (element[..., None] * decay * reads[:, None]).mT
            return out.to(hidden_states.dtype)

        return Part(out.mT, end, (A * time[..., -1:]).exp(), add)

    out, end = recurrence(run, **place._asdict(), output_final_state=return_last_state)
    out = out.mT  # (batch, rows, channels) -> (batch, channels, rows)
    if z is not None:
        out = out * functional.silu(z)
    return (out, end) if return_last_state else out


def _lightning(
    forward: Function,
    place: Place,
    layer: Value,  # transformers' MiniMaxLightningAttention
    hidden_states: Tensor,
    *_: object,
    **__: object,
) -> tuple[Tensor, None]:
    """Compute MiniMax's attention with scalar decays, as Mamba 2's scan with steps of 1."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    rows = layer.act_fn(layer.qkv_proj(hidden_states))
    # (batch, rows, heads * 3 * headdim) -> three of (batch, rows, heads, headdim)
    heads = rows.unflatten(-1, (layer.num_attention_heads, -1))
    q, k, v = heads.split(layer.head_dim, -1)
    slopes = layer.slope_rate.flatten().float()
    out = _mamba2(
        mamba2_chunk_scan,
        place,
        hidden_states=v,
        dt=torch.ones_like(v[..., 0]),
        A=-slopes,
        B=k,
        C=q,
        chunk_size=layer.block_size,
    )
    assert isinstance(out, Tensor), "final states are not returned"
    gate = functional.sigmoid(layer.output_gate(hidden_states))
    merged = out.to(v.dtype).flatten(2)  # (batch, rows, heads * headdim)
    return layer.out_proj(gate * layer.norm(merged)), None


def _given(options: Mapping[str, object]) -> dict[str, Value]:
    """Return the options that are not None; refuse rows and states, which a piece does not have."""
    given = {name: value for name, value in options.items() if value is not None}
    refused = sorted(NOT_SPLIT & given.keys())
    if refused:
        raise NotImplementedError(
            f"{', '.join(refused)} of a recurrence are not supported for sharded sequences"
        )
    return given


def _discretized(dt: Tensor, bias: Tensor | None, softplus: bool | None) -> Tensor:
    """Return the time steps: `dt` with its bias, after a softplus if the kernel applies one."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return functional.softplus(dt) if softplus else dt


def _not_fused(*_: object, **__: object) -> None:
    """Return None. A layer without a fused function calls the separate functions, known here."""


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

# Functions that mix no rows, in the place of those of `SPLITS`, to find other parts that do.
BY_ROW: dict[str, Function] = {
    "causal_conv1d_fn": lambda hidden_states, *_, **__: hidden_states,
    "torch_chunk_gated_delta_rule": lambda query, key, value, *_, **__: (value, None),
    "chunk_kimi_delta_attention": lambda query, key, value, *_, **__: (value, None),
    "mamba2_chunk_scan": lambda hidden_states, *_, return_final_states=False, **__: (
        (hidden_states, None) if return_final_states else hidden_states
    ),
    "mamba2_split_conv1d_scan_combined": _not_fused,
    "mamba_selective_scan": lambda hidden_states, *_, return_last_state=False, **__: (
        (hidden_states, None) if return_last_state else hidden_states
    ),
    "mamba_inner_fn": _not_fused,
    "MiniMaxLightningAttention": lambda layer, hidden_states, *_, **__: (hidden_states, None),
}
