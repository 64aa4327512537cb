"""torch's scaled_dot_product_attention, computed by ring_attention.

    sdpa_attention      ring_attention with the parameters of F.scaled_dot_product_attention
    route_sdpa          a context in which F.scaled_dot_product_attention is sdpa_attention

Both take this rank's shards, plain tensors (batch, nheads, rows, headdim), and support `is_causal`,
`scale` and `enable_gqa`, but not `attn_mask` and `dropout_p`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, TypeAlias, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ring_attn.api import ring_attention
from ring_attn.call import SdpaOptions
from ring_attn.core.layout import SequenceLayout
from ring_attn.torch_private import native_sdpa
from ring_attn.values.checks import check_tensor

# An argument of a function of torch; a function mode gets the calls of all of them.
Argument: TypeAlias = Any


# More than 60 lines, most of them documentation.
def sdpa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: Unpack[SdpaOptions],
) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention` of a sharded sequence.

    Args:
        query: (batch, nheads, rows, headdim), this rank's shard; any strides. As in torch, autocast
            rounds query, key and value to its dtype, except float64.
        key: (batch, nheads_kv, rows_kv, headdim).
        value: (batch, nheads_kv, rows_kv, headdim_v).
        attn_mask: must be None.
        dropout_p: must be 0.
        is_causal: whether a query sees no later keys, by global positions. torch aligns the
            diagonal at the top left, ring_attention at the bottom right; for equally many queries
            and keys both are the same.
        scale: factor of the scores; `headdim ** -0.5` by default.
        enable_gqa: whether several query heads may share a KV head.
        **options: options of `ring_attention`: group, layout, strategy, window_size and so on.

    Returns:
        (batch, nheads, rows, headdim_v), this rank's rows; a transposed view of a tensor
        (batch, rows, nheads, headdim_v).

    Raises:
        ValueError: tensors do not have four dims, or numbers of heads differ without `enable_gqa`.
        NotImplementedError: `attn_mask` or dropout is given, or `is_causal` with unequal numbers of
            queries and keys.
        Exception: as `ring_attention`.

    Example:
        >>> # under torchrun --nproc-per-node 2, after init_process_group("gloo")
        >>> q, k, v = torch.randn(3, 1, 8, 500, 64)
        >>> sdpa_attention(q, k, v, is_causal=True, layout="zigzag").shape
        torch.Size([1, 8, 500, 64])
    """
    if attn_mask is not None:
        raise NotImplementedError(
            f"attn_mask must be None, got {_shown(attn_mask)}: a mask of one rank's rows does not "
            "cover the keys of other ranks; pass is_causal=True, or call "
            "ring_attn.ring_attention with window_size or cu_seqlens"
        )
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.ndim != 4:
            raise ValueError(f"{name} must be (batch, nheads, rows, headdim), got {_shown(x)}")
    if query.size(1) != key.size(1) and not enable_gqa:
        raise ValueError(
            "query and key must have equally many heads unless enable_gqa=True, got "
            f"{query.size(1)} and {key.size(1)}"
        )
    num_queries, num_keys = _lengths(query, key, options.get("layout"))
    if is_causal and num_queries != num_keys:
        raise NotImplementedError(
            f"is_causal=True needs as many queries as keys, got {num_queries} and {num_keys}: "
            "scaled_dot_product_attention aligns the first query with the first key, while "
            "ring_attn.ring_attention aligns the last query with the last key; call "
            "ring_attn.ring_attention for that alignment"
        )
    # (batch, nheads, rows, headdim) -> (batch, rows, nheads, headdim)
    q, k, v = (as_autocast(x).transpose(1, 2) for x in (query, key, value))
    out = ring_attention(
        q, k, v, causal=is_causal, softmax_scale=scale, dropout_p=dropout_p, **options
    )
    return out.transpose(1, 2)


class route_sdpa(TorchFunctionMode):  # noqa: N801 - used as a context manager, like torch.no_grad
    """A context in which F.scaled_dot_product_attention of this thread is `sdpa_attention`.

    It is a torch function mode: it patches nothing, works however the caller imported the function,
    and affects no other threads, except the threads of a backward that runs inside.
    `nn.MultiheadAttention` and the transformer layers of `torch.nn` are routed if
    `need_weights=False`. With True they compute attention by other functions, so they raise an
    error, as does `flex_attention`. A backward may run outside, unless it recomputes activations
    (`torch.utils.checkpoint`): these would not be routed, which torch detects if
    `use_reentrant=False`. Direct calls of other packages' kernels are not routed. `torch.compile`
    includes the routing in graphs of functions called inside, except for `nn.MultiheadAttention`,
    which breaks the graph.

    Args:
        **options: options of `ring_attention`: group, layout, strategy, window_size and so on.

    Raises:
        NotImplementedError: inside, for calls that `sdpa_attention` refuses, for attention weights,
            and for `flex_attention`, which compiles itself, so that torch's compiler shows the
            error within an error of the compiler.

    Example:
        >>> # under torchrun --nproc-per-node 2, after init_process_group("gloo")
        >>> with route_sdpa(layout="zigzag"):
        ...     out = F.scaled_dot_product_attention(*torch.randn(3, 1, 8, 500, 64), is_causal=True)
    """

    def __init__(self, **options: Unpack[SdpaOptions]) -> None:
        super().__init__()
        self.options = options

    def attend(self, *args: Argument, **kwargs: Argument) -> Tensor:
        """Compute a call of F.scaled_dot_product_attention; subclasses override this method."""
        return sdpa_attention(*args, **{**kwargs, **self.options})

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run a function of torch. torch calls this for each function, with the mode off."""
        kwargs = kwargs or {}
        if func is native_sdpa:
            return self.attend(*args, **kwargs)
        if func is F.multi_head_attention_forward and kwargs.get("need_weights", True):
            raise NotImplementedError(
                "need_weights must be False inside route_sdpa, got True: no rank of a ring has all "
                "attention weights; call nn.MultiheadAttention with need_weights=False"
            )
        if getattr(func, "__name__", None) == "flex_attention":
            raise NotImplementedError(
                "flex_attention is not routed and would attend to this rank's keys only: inside "
                "route_sdpa call F.scaled_dot_product_attention, or ring_attn.ring_attention"
            )
        if func in _WITH_CALLS_INSIDE:
            with self:
                return _body_of(cast(FunctionType, func))(*args, **kwargs)
        return func(*args, **kwargs)


# Functions that may call scaled_dot_product_attention; a backward may recompute activations.
_WITH_CALLS_INSIDE = (
    F.multi_head_attention_forward,
    torch.autograd.backward,
    torch.autograd.grad,
    Tensor.backward,
)


def _body_of(func: FunctionType) -> FunctionType:
    """Copy a function without its check for overrides.

    While a mode is on, that check would call the mode again instead of the body. The copy also
    ignores overrides by tensor subclasses.
    """
    checks = [name for name in func.__globals__ if name.startswith("has_torch_function")]
    scope = {**func.__globals__, **dict.fromkeys(checks, lambda *_: False)}
    copy = FunctionType(func.__code__, scope, func.__name__, func.__defaults__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def as_autocast(x: Tensor) -> Tensor:
    """Return the tensor in the dtype that autocast uses for scaled_dot_product_attention."""
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _lengths(query: Tensor, key: Tensor, layout: object) -> tuple[int, int]:
    """Return the numbers of queries and keys: global ones if known, otherwise this rank's."""
    if isinstance(layout, (tuple, list)) and all(isinstance(x, SequenceLayout) for x in layout):
        return layout[0].seqlen, layout[1].seqlen
    return query.size(2), key.size(2)


def _shown(x: object) -> str:
    """Return the shape of a tensor, or the type of another value, for an error."""
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__
