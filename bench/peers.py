"""Attention of other packages on one device, each with the arguments of its documentation.

    torch-flash    scaled_dot_product_attention, SDPBackend.FLASH_ATTENTION: FlashAttention 2
    cudnn          scaled_dot_product_attention, SDPBackend.CUDNN_ATTENTION
    fa2            the package flash_attn: FlashAttention 2
    fa3            the package flash_attn_interface: FlashAttention 3
    fa4            the package flash_attn.cute: FlashAttention 4
    flex           torch.compile of torch.nn.attention.flex_attention
    xformers       xformers.ops.memory_efficient_attention

Inputs are put into the documented layout before the timing. No GPU has run these calls of cuDNN,
flash-attn, FlexAttention and xFormers yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ring_attn.bench.implementations import Differentiable, Implementation, Shape
from ring_attn.testing import Inputs


class HeadsFirst(Differentiable):
    """A function over (batch, heads, seqlen, dim)."""

    def __init__(self, function: Callable[..., Tensor], data: Inputs, *, backward: bool) -> None:
        heads_first = [x.transpose(1, 2).contiguous() for x in data]
        super().__init__(function, heads_first, backward=backward)

    def results(self) -> list[Tensor]:
        return [x.transpose(1, 2) for x in super().results()]


class Packed(Differentiable):
    """A function over (batch x seqlen, heads, dim), for documents."""

    def __init__(self, function: Callable[..., Tensor], data: Inputs, *, backward: bool) -> None:
        self._batch = data.q.size(0)
        super().__init__(function, [x.flatten(0, 1) for x in data], backward=backward)

    def results(self) -> list[Tensor]:
        return [x.unflatten(0, (self._batch, -1)) for x in super().results()]


class Make(Protocol):
    """Return an implementation for a problem, its data, and whether a backward follows."""

    def __call__(self, problem: Shape, data: Inputs, backward: bool) -> Implementation: ...


@dataclass(frozen=True)
class Peer:
    """An implementation of another package.

    Attributes:
        make: returns it for a problem, its data, and whether a backward follows.
        kinds: kinds of masks that it has.
        package: the module that must be installed; None is torch.
        on_cpu: whether it runs on CPUs.
        wide_v: whether v may have another head dim than q and k.
    """

    make: Make
    kinds: tuple[str, ...]
    package: str | None = None
    on_cpu: bool = False
    wide_v: bool = False

    def unavailable(self, device: torch.device) -> str | None:
        """Return the reason why it cannot run on this machine, or None."""
        if self.package is not None and not installed(self.package):
            return f"the package {self.package} is not installed"
        if device.type == "cpu" and not self.on_cpu:
            return "runs on CUDA only"
        return None

    def reason_against(self, problem: Shape) -> str | None:
        """Return the reason why it cannot run a problem, according to its documentation."""
        kind = problem.choice.kind
        if kind not in self.kinds:
            return f"has no mask {kind!r}, only {', '.join(self.kinds)}"
        if problem.dim_v != problem.head_dim and not self.wide_v:
            return "needs equal head dims of q, k and v"
        return None


def installed(module: str) -> bool:
    """Return whether a module can be found, without importing it."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # its parent is not installed
        return False


# -- torch


def _sdpa(kernel: SDPBackend) -> Make:
    """Return the maker of torch's attention by one of its kernels."""

    def make(problem: Shape, data: Inputs, backward: bool) -> Implementation:
        grouped = problem.heads != problem.kv_heads

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(kernel):
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=problem.choice.causal, enable_gqa=grouped
                )

        return HeadsFirst(attend, data, backward=backward)

    return make


def _flex(problem: Shape, data: Inputs, backward: bool) -> Implementation:
    """Return FlexAttention, compiled, with the block mask made before the timing."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if problem.device.type == "cpu" and backward:
        raise NotImplementedError("has no backward on CPUs: pass --mode fwd")
    rows = problem.seqlen
    block_mask = None
    if problem.choice.kind != "full":
        block_mask = create_block_mask(
            _mask_mod(problem), None, None, rows, rows, device=problem.device
        )
    grouped = problem.heads != problem.kv_heads
    compiled = torch.compile(flex_attention)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=block_mask, enable_gqa=grouped)
        return out

    return HeadsFirst(attend, data, backward=backward)


def _mask_mod(problem: Shape) -> Callable[..., Tensor]:
    """Return the mask as FlexAttention takes it: a function of batch, head, query and key."""
    choice, rows = problem.choice, problem.seqlen
    size = choice.size
    document = torch.zeros(rows, dtype=torch.int32, device=problem.device)
    if choice.kind == "docs":
        starts = torch.tensor(choice.cuts(rows)[1:-1], device=problem.device)
        positions = torch.arange(rows, device=problem.device)
        document = torch.searchsorted(starts, positions, right=True)

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        match choice.kind:
            case "window":
                return (q >= k) & (q - k <= size)
            case "chunked":
                return (q >= k) & (q // size == k // size)
            case "prefix":
                return (q >= k) | (k < size)
            case "docs":
                return (q >= k) & (document[q] == document[k])
        return q >= k

    return seen


# -- flash-attn


def _flash(package: str, unbounded: int | None = -1) -> Make:
    """Return the maker of a version of flash-attn, whose windows are unbounded by `unbounded`."""

    def make(problem: Shape, data: Inputs, backward: bool) -> Implementation:
        module = import_module(package)
        choice = problem.choice
        if choice.kind in ("docs", "chunked"):
            return _flash_packed(module.flash_attn_varlen_func, problem, data, backward)
        left = choice.size if choice.kind == "window" else unbounded
        window = (left, 0 if choice.causal else unbounded)
        if choice.kind != "window":
            window = (unbounded, unbounded)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _first(module.flash_attn_func(q, k, v, causal=choice.causal, window_size=window))

        return Differentiable(attend, data, backward=backward)

    return make


def _flash_packed(
    function: Callable[..., Any], problem: Shape, data: Inputs, backward: bool
) -> Implementation:
    cuts = documents_of(problem)
    longest = max(stop - start for start, stop in zip(cuts[:-1], cuts[1:], strict=True))
    boundaries = torch.tensor(cuts, dtype=torch.int32, device=problem.device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(
            q,
            k,
            v,
            cu_seqlens_q=boundaries,
            cu_seqlens_k=boundaries,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=True,
        )
        return _first(out)

    return Packed(attend, data, backward=backward)


def documents_of(problem: Shape) -> list[int]:
    """Return the boundaries of documents, or of chunks, of all sequences of the batch in a row."""
    choice, rows = problem.choice, problem.seqlen
    cuts = (*range(0, rows, choice.size), rows) if choice.kind == "chunked" else choice.cuts(rows)
    starts = [each * rows + cut for each in range(problem.batch) for cut in cuts[:-1]]
    return [*starts, problem.batch * rows]


def _first(result: Any) -> Tensor:
    """Return the output: some versions also return lse."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


# -- xFormers


def _xformers(problem: Shape, data: Inputs, backward: bool) -> Implementation:
    """Return memory_efficient_attention; grouped heads are (batch, rows, groups, heads, dim)."""
    ops: Any = import_module("xformers.ops")
    biases: Any = import_module("xformers.ops.fmha.attn_bias")
    group = problem.heads // problem.kv_heads
    choice = problem.choice
    bias: Any = None
    inputs: Sequence[Tensor] = data
    match choice.kind:
        case "causal":
            bias = biases.LowerTriangularMask()
        case "window":
            bias = biases.LocalAttentionFromBottomRightMask(window_left=choice.size, window_right=0)
        case "docs" | "chunked":
            cuts = documents_of(problem)
            lengths = [stop - start for start, stop in zip(cuts[:-1], cuts[1:], strict=True)]
            bias = biases.BlockDiagonalMask.from_seqlens(lengths).make_causal()
            # Its documents are of one sequence.
            inputs = [x.flatten(0, 1)[None] for x in data]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if group == 1:
            out: Tensor = ops.memory_efficient_attention(q, k, v, attn_bias=bias)
            return out
        q = q.unflatten(2, (problem.kv_heads, group))
        k, v = (x[:, :, :, None].expand(-1, -1, -1, group, -1) for x in (k, v))
        return ops.memory_efficient_attention(q, k, v, attn_bias=bias).flatten(2, 3)

    return _InBatches(attend, inputs, problem.batch, backward=backward)


class _InBatches(Differentiable):
    """A function over (1, batch x rows, heads, dim), or over (batch, rows, heads, dim)."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        batch: int,
        *,
        backward: bool,
    ) -> None:
        self._batch = batch
        super().__init__(function, inputs, backward=backward)

    def results(self) -> list[Tensor]:
        return [x.reshape(self._batch, -1, *x.shape[2:]) for x in super().results()]


FLASH_KINDS = ("causal", "full", "window", "docs", "chunked")

PEERS: dict[str, Peer] = {
    "torch-flash": Peer(_sdpa(SDPBackend.FLASH_ATTENTION), ("causal", "full"), on_cpu=True),
    "cudnn": Peer(_sdpa(SDPBackend.CUDNN_ATTENTION), ("causal", "full"), wide_v=True),
    "fa2": Peer(_flash("flash_attn"), FLASH_KINDS, package="flash_attn"),
    "fa3": Peer(
        _flash("flash_attn_interface"), FLASH_KINDS, package="flash_attn_interface", wide_v=True
    ),
    "fa4": Peer(
        _flash("flash_attn.cute", unbounded=None),
        FLASH_KINDS,
        package="flash_attn.cute",
        wide_v=True,
    ),
    "flex": Peer(
        _flex, ("causal", "full", "window", "chunked", "prefix", "docs"), on_cpu=True, wide_v=True
    ),
    "xformers": Peer(_xformers, FLASH_KINDS, package="xformers", wide_v=True),
}
