"""Linear attention, state spaces and convolutions of a module on a split sequence.

A layer computes them by functions, known here by their names: those of Hugging Face's models, which
transformers replaces by those of fla and mamba-ssm where they are installed, and those that
`register_recurrence` adds. `SPLITS` has a version of each for a split sequence, which calls that
function on pieces of it; all else of a layer works on each row by itself.

    Qwen3-Next            in_proj -> causal_conv1d_fn -> torch_chunk_gated_delta_rule -> norm
    on a split sequence   in_proj -> halo, conv       -> recurrence                   -> norm

In a Python file that has such a function, its name gets a function that asks where the rows of the
layer stand that runs: `RecurrentParallel` says so for a module, `register` for Hugging Face's.

Padding at the end of rows needs nothing: no row sees a later one.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn import functional

from ring_attn import groups, refusals
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.values import as_tuple
from ring_attn.models.style import with_forward
from ring_attn.recurrence import Part, Piece, causal_conv, linear_attention, recurrence
from ring_attn.transport.p2p import tell_refusal

__all__ = ["Place"]

# Arguments of functions that differ by piece, or change what the versions here compute by hand.
NOT_SPLIT = {"initial_state", "initial_states", "seq_idx", "z", "scale"}

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
    """The recurrent layer whose forward runs in this thread.

    Attributes:
        place: where the layer's rows stand; None outside, and on one rank.
        called: the known functions that the layer has called.
    """

    place: Place | None = None
    called: set[str] = set()


current = _Current()


def register_recurrence(function: str, split: Split) -> None:
    """Lets modules run on a split sequence that call a function of this name.

    Known already, by transformers' names and arguments: `causal_conv1d_fn`,
    `torch_chunk_gated_delta_rule`, `chunk_kimi_delta_attention`, `mamba2_chunk_scan`,
    `mamba_selective_scan`. Register others before a model's first forward.

    Args:
        function: name of the function, in the Python file of the model; or of the layer's class,
            for its forward.
        split: called as `split(function, place, *args, **kwargs)` in place of
            `function(*args, **kwargs)`, with this rank's rows. `place` has `layout`, `cu_seqlens`
            and `group`, as `ring_attn.recurrence.recurrence` takes them.

    Raises:
        ValueError: the name is no identifier.
        TypeError: `split` cannot be called.

    Example:
        >>> def running_sum(cumsum, place, x):
        ...     def run(piece):
        ...         out = cumsum(piece.of(x))
        ...         add = lambda out, start: out + start[:, None]
        ...         return Part(out, out[:, -1], torch.ones(1), add)
        ...     return recurrence(run, **place._asdict())[0]
        >>> register_recurrence("cumulative_sum_of_rows", running_sum)
    """
    if not refusals.check_name("function", function).isidentifier():
        raise ValueError(f"function must be the name of a function, got {function!r}")
    if not callable(split):
        raise TypeError(f"split must be a function, got {split!r}")
    SPLITS[function] = split


@dataclass(kw_only=True, eq=False)
class RecurrentParallel(ParallelStyle):
    """A style, for `parallelize`, that splits the sequence of a recurrent module across a mesh.

    Call the module as before, with this rank's rows as plain tensors. Results and gradients are
    those of the module on the whole sequence. All that mixes rows must be in `functions`; all else
    must work on each row by itself. Checkpoint the module, not parts of it, which would be computed
    again outside of its forward.

    Args:
        functions: names of the functions in the module's Python file that mix rows, of those that
            `register_recurrence` lists and knows; each must be called in each forward. Instead of a
            function, the name of the module's class, if its whole forward is known.
        layout: positions of each rank: a `SequenceLayout`, or "contiguous", "zigzag" or "striped"
            if all ranks have equally many rows, in dim 1 of the first argument.
        cu_seqlens: boundaries of documents in the whole sequence, or a function of the module that
            returns them, called in each forward.
    """

    functions: Sequence[str]
    layout: str | SequenceLayout = "contiguous"
    cu_seqlens: Tensor | Callable[[nn.Module], Tensor | None] | None = None

    def __post_init__(self) -> None:
        self.functions = as_tuple("functions", self.functions)
        unknown = sorted({*self.functions} - SPLITS.keys())
        if unknown or not self.functions:
            raise ValueError(
                f"functions must be some of {sorted(SPLITS)}, got {list(self.functions)}: "
                "register_recurrence makes others known"
            )
        if isinstance(self.layout, str):
            SequenceLayout.from_name(self.layout, 0, 1)
        elif not isinstance(self.layout, SequenceLayout):
            raise TypeError(f"layout must be a SequenceLayout or its name, got {self.layout!r}")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Changes the module's class to one with another forward; for `parallelize_module`."""
        name, group = type(module).__name__, groups.check_group(device_mesh)
        missing = sorted({*self.functions} - _names_at(module).keys())
        if missing:
            raise ValueError(f"{missing} are no functions in the Python file of {name}")
        split_functions(module, self.functions)

        def run(
            module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
        ) -> Any:
            if torch.compiler.is_compiling():
                refuse_compiled()
            try:
                place = self._place(module, group, args)
                with at(place) as called:
                    out = forward(*args, **kwargs)
                left = sorted({*self.functions} - called)
                if left and place is not None:
                    raise NotImplementedError(
                        f"{name} did not call {left}, so that its rows were mixed in another way: "
                        "give RecurrentParallel the functions that it calls"
                    )
            except Exception as error:
                tell_refusal(error, group)
                raise
            return out

        return with_forward(module, self, run)

    def _place(
        self, module: nn.Module, group: dist.ProcessGroup, args: tuple[Any, ...]
    ) -> Place | None:
        if not args or not isinstance(args[0], Tensor) or isinstance(args[0], DTensor):
            raise TypeError(
                f"{type(module).__name__} must get this rank's rows, a plain tensor, as its first "
                f"argument, got {[type(x).__name__ for x in args]}"
            )
        world_size, layout = dist.get_world_size(group), self.layout
        if isinstance(layout, str):
            layout = SequenceLayout.from_name(layout, args[0].size(1) * world_size, world_size)
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
    code = getattr(inspect.unwrap(type(layer).forward), "__code__", None)
    called = {*getattr(code, "co_names", ()), type(layer).__name__}
    return SPLITS.keys() & called & _names_at(layer).keys()


def _names_at(layer: nn.Module) -> dict[str, Any]:
    """The names in the Python file of a layer."""
    return getattr(inspect.unwrap(type(layer).forward), "__globals__", {})


def split_functions(layer: nn.Module, functions: Collection[str]) -> None:
    """Makes known functions in a layer's Python file ask for the current place."""
    names = _names_at(layer)
    for function in functions:
        found, is_layer = names[function], isinstance(names[function], type)
        inner = found.forward if is_layer else found
        if hasattr(inner, "dispatches"):
            continue
        if is_layer:
            found.forward = _dispatching(function, inner)
        else:
            names[function] = _dispatching(function, inner)


def _dispatching(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
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
    conv: Callable[..., Tensor],
    place: Place,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> Tensor:
    """(batch, channels, rows) -> likewise."""
    _check_others(others)

    def run(x: Tensor) -> Tensor:
        return conv(x, weight, bias, activation=activation)

    return causal_conv(run, hidden_states, weight.size(-1), dim=2, **place._asdict())


def _delta_rule(
    kernel: Callable[..., Any],
    place: Place,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    output_final_state: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule, or Kimi's, whose decays `g` are those of channels."""
    _check_others(others)
    return linear_attention(
        kernel, query, key, value, rows={"g": g, "beta": beta}, **place._asdict(),
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        float32=not HAS_FLA,
    )  # fmt: skip


def _mamba2(
    kernel: Callable[..., Any],
    place: Place,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **others: Any,
) -> Any:
    """State space of scalar decays: dt (batch, rows, heads), C (batch, rows, groups, state)."""
    _check_others(others)
    options = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}

    def run(piece: Piece) -> Part:
        x, steps, b, c = map(piece.of, (hidden_states, dt, B, C))
        out, end = kernel(x, steps, A, b, c, chunk_size, return_final_states=True, **options)
        steps = _discretized(steps, dt_bias, dt_softplus).clamp(*dt_limit)
        factors = (A * steps.float()).cumsum(1).exp()  # (batch, rows, heads)

        def add(out: Tensor, start: Tensor) -> Tensor:
            heads = c.float().repeat_interleave(x.size(2) // c.size(2), 2)
            read = torch.einsum("blhn,bhpn->blhp", heads * factors[..., None], start)
            return (out + read).to(out.dtype)

        return Part(out, end, factors[:, -1, :, None, None], add)

    out, end = recurrence(run, **place._asdict(), output_final_state=return_final_states)
    return (out, end) if return_final_states else out


def _mamba1(
    kernel: Callable[..., Any],
    place: Place,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **options: Any,
) -> Any:
    """State space of diagonal decays: (batch, channels, rows), C (batch, state, rows).

    mamba-ssm's kernel gives its last state no gradient. So each piece goes on with rows in which no
    time passes, whose outputs are that state.
    """
    options |= {"D": D, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
    states = A.size(1)

    def run(piece: Piece) -> Part:
        x, steps, b, c = (piece.of(y.mT).mT for y in (hidden_states, dt, B, C))
        bias = None if delta_bias is None else delta_bias[:, None]
        rows = x.size(2)
        x_, steps_, b_, c_ = (functional.pad(y, (0, states)) for y in (x, steps, b, c))
        # No time: the softplus of -1e4 is 0, also with a bias.
        steps_[..., rows:] = -1e4 if delta_softplus else 0 if bias is None else -bias
        c_[..., rows:] = torch.eye(states, dtype=c.dtype, device=c.device)
        out, end = kernel(x_, steps_, A, b_, c_, return_last_state=True, **options)
        out, read = out.split([rows, states], 2)
        end = end.detach() + (read - read.detach())
        time = _discretized(steps, bias, delta_softplus).float().cumsum(2)

        def add(out: Tensor, start: Tensor) -> Tensor:
            # One channel of the state at a time: all at once are `state` times the activations.
            states = zip(A.unbind(1), c.unbind(1), start.unbind(2), strict=True)
            for a, c_, s in states:
                out = out + (s[..., None] * (a[:, None] * time).exp() * c_[:, None]).mT
            return out.to(hidden_states.dtype)

        return Part(out.mT, end, (A * time[..., -1:]).exp(), add)

    out, end = recurrence(run, **place._asdict(), output_final_state=return_last_state)
    out = out.mT if z is None else out.mT * functional.silu(z)
    return (out, end) if return_last_state else out


def _lightning(
    forward: Callable[..., Any], place: Place, layer: Any, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """MiniMax's attention of scalar decays, whose forward has no function for it.

    That forward runs on pieces of projected rows, and as a layer whose other parts do nothing.
    """
    kept = (
        "num_attention_heads", "head_dim", "block_size", "layer_idx", "slope_rate", "query_decay",
        "key_decay", "diagonal_decay",
    )  # fmt: skip
    nothing = dict.fromkeys(("qkv_proj", "act_fn", "norm", "out_proj"), nn.Identity())
    bare = SimpleNamespace(**{name: getattr(layer, name) for name in kept}, **nothing)
    bare.output_gate = lambda x: x.new_tensor(torch.inf)
    projected = layer.act_fn(layer.qkv_proj(hidden_states))
    slope = layer.slope_rate.flatten().float()

    def run(piece: Piece) -> Part:
        rows = piece.of(projected)
        out, end = forward(bare, rows, None, None)
        q = rows.unflatten(-1, (layer.num_attention_heads, -1))[..., : layer.head_dim]
        factors = torch.exp(-slope * torch.arange(1, rows.size(1) + 1, device=q.device)[:, None])

        def add(out: Tensor, start: Tensor) -> Tensor:
            read = torch.einsum("blhk,bhkv->blhv", q * factors[..., None], start)
            return (out + read.flatten(2)).to(out.dtype)

        return Part(out, end, factors[-1, :, None, None], add)

    out = recurrence(run, **place._asdict())[0]
    gate = functional.sigmoid(layer.output_gate(hidden_states))
    return layer.out_proj(gate * layer.norm(out)), None


def _check_others(others: Mapping[str, Any]) -> None:
    """Refuses arguments of rows or states that a piece of them would not have."""
    given = sorted(name for name in NOT_SPLIT if others.get(name) is not None)
    if given:
        raise NotImplementedError(f"{', '.join(given)} of a recurrence are not built on split rows")


def _discretized(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
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
