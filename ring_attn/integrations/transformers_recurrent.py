"""Linear attention, Mamba and convolutions of Hugging Face models on a split sequence.

transformers computes them by functions of a model's Python file, which it replaces by those of fla
and mamba-ssm where they are installed. Here each of these names has a version for a split sequence,
which calls that function on pieces of it; all else of a layer works on each row by itself.

    Qwen3-Next            in_proj -> causal_conv1d_fn -> torch_chunk_gated_delta_rule -> norm
    on a split sequence   in_proj -> halo, conv       -> recurrence                   -> norm

Padding at the end of rows needs nothing: no row sees a later one.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ring_attn import refusals
from ring_attn.core.layout import SequenceLayout
from ring_attn.recurrence import Part, Piece, causal_conv, linear_attention, recurrence

__all__ = ["Place", "register_recurrence"]

# fla's kernels take 16 bits only.
HAS_FLA = find_spec("fla") is not None

# Types of layers in a config that have a recurrence, and that mix no rows.
ALONE_TYPES = {"linear_attention", "conv"}  # without attention beside the recurrence
RECURRENT_TYPES = ALONE_TYPES | {"hybrid", "hybrid_sliding"}
ROWWISE_TYPES = {"mlp", "moe"}

WITH_CACHE = (
    "recurrent layers on a split sequence do not continue from a cache: generate with another "
    "attn_implementation, in one process"
)


class Place(NamedTuple):
    """Where the rows of a layer's call stand."""

    layout: SequenceLayout
    cu_seqlens: Tensor | None
    group: dist.ProcessGroup


# (the function, the place, its arguments) -> its result for this rank's rows.
Split = Callable[..., Any]


class _Current(threading.local):
    """The place of the layer that runs in this thread; None outside, and on one rank."""

    place: Place | None = None


_current = _Current()


def register_recurrence(function: str, split: Split) -> None:
    """Lets models run on a split sequence whose layers call a function of this name.

    Layers are known by the names that their forward calls, or by their own class. Register before a
    model's first forward.

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
        ...     return recurrence(run, **place._asdict())
        >>> register_recurrence("cumulative_sum_of_rows", running_sum)
    """
    if not refusals.check_name("function", function).isidentifier():
        raise ValueError(f"function must be the name of a function, got {function!r}")
    if not callable(split):
        raise TypeError(f"split must be a function, got {split!r}")
    SPLITS[function] = split


def recurrent_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules whose forward calls one of the known functions."""
    return (part for part in model.modules() if _called(part))


# Not traced: an error while tracing would run the rest as it is, with half of the hooks.
@torch.compiler.disable
def refuse_compiled() -> None:
    raise NotImplementedError(
        "recurrent layers on a split sequence are not compiled: leave torch.compile out"
    )


def prepare(layer: nn.Module, place_of: Callable[[dict[str, Any], int], Place | None]) -> None:
    """Makes a layer call the known functions' versions for a split sequence, where `place_of` says.

    `place_of` gets the layer's keywords and its number of rows. It is called before each forward,
    also of those that recompute activations.
    """
    names = inspect.unwrap(type(layer).forward).__globals__
    for function in _called(layer):
        found, is_layer = names[function], isinstance(names[function], type)
        inner = found.forward if is_layer else found
        if hasattr(inner, "dispatches"):
            continue
        if is_layer:
            found.forward = _dispatching(function, inner)
        else:
            names[function] = _dispatching(function, inner)
    if any(hasattr(hook, "enters") for hook in layer._forward_pre_hooks.values()):
        return

    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows: Tensor = args[0] if args else kwargs["hidden_states"]
        _current.place = place_of(kwargs, rows.size(1))
        if _current.place is None:
            return None
        _refuse_states(layer, kwargs)
        left_out = dict.fromkeys(
            {"attention_mask", "cu_seq_lens_q", "cache_params", "past_key_values"} & kwargs.keys()
        )
        return args, kwargs | left_out

    enter.enters = True  # type: ignore[attr-defined]
    layer.register_forward_pre_hook(enter, with_kwargs=True)
    layer.register_forward_hook(_leave, always_call=True)


def _leave(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    _current.place = None


def _called(layer: nn.Module) -> set[str]:
    forward = inspect.unwrap(type(layer).forward)
    code = getattr(forward, "__code__", None)
    if code is None:
        return set()
    return SPLITS.keys() & {*code.co_names, type(layer).__name__} & forward.__globals__.keys()


def _dispatching(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _current.place is None:
            return function(*args, **kwargs)
        return SPLITS[name](function, _current.place, *args, **kwargs)

    call.dispatches = True  # type: ignore[attr-defined]
    return call


def _refuse_states(layer: Any, kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("cache_params", kwargs.get("past_key_values"))
    layers, index = getattr(cache, "layers", ()), getattr(layer, "layer_idx", 0)
    states = getattr(layers[index], "has_previous_state", {}) if index < len(layers) else {}
    if any(states.values()):
        raise NotImplementedError(WITH_CACHE)


# -- the functions


def _convolution(
    conv: Callable[..., Tensor],
    place: Place,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **ignored: Any,
) -> Tensor:
    """(batch, channels, rows) -> likewise."""

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
    **ignored: Any,
) -> tuple[Tensor, None]:
    """Gated delta rule, or Kimi's, whose decays `g` are those of channels; no end state."""
    out = linear_attention(
        kernel, query, key, value, rows={"g": g, "beta": beta}, **place._asdict(),
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, float32=not HAS_FLA,
    )  # fmt: skip
    return out, None


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
    **ignored: Any,
) -> Tensor:
    """State space of scalar decays: dt (batch, rows, heads), C (batch, rows, groups, state)."""
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

    return recurrence(run, **place._asdict())


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
    """State space of diagonal decays: (batch, channels, rows), C (batch, state, rows)."""
    options |= {"D": D, "delta_bias": delta_bias, "delta_softplus": delta_softplus}

    def run(piece: Piece) -> Part:
        x, steps, b, c = (piece.of(y.mT).mT for y in (hidden_states, dt, B, C))
        out, end = kernel(x, steps, A, b, c, return_last_state=True, **options)
        bias = None if delta_bias is None else delta_bias[:, None]
        time = _discretized(steps, bias, delta_softplus).float().cumsum(2)

        def add(out: Tensor, start: Tensor) -> Tensor:
            # One channel of the state at a time: all at once are `state` times the activations.
            states = zip(A.unbind(1), c.unbind(1), start.unbind(2), strict=True)
            for a, c_, s in states:
                out = out + (s[..., None] * (a[:, None] * time).exp() * c_[:, None]).mT
            return out.to(hidden_states.dtype)

        return Part(out.mT, end, (A * time[..., -1:]).exp(), add)

    out = recurrence(run, **place._asdict()).mT
    out = out if z is None else out * functional.silu(z)
    return (out, None) if return_last_state else out


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

    out = layer.norm(recurrence(run, **place._asdict()))
    return layer.out_proj(functional.sigmoid(layer.output_gate(hidden_states)) * out), None


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
