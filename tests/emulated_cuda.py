"""Emulations of the attention operators that need CUDA, by their documented behaviour.

Masks, shapes, paddings and results are those of the kernels; the arithmetic is dense, on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.bounds import textbook_backward, textbook_forward


def dense_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(batch, rows, heads, dim) and lse as FlashAttention 2 has it: +inf where nothing is seen."""
    out, lse = textbook_forward(q.float(), k.float(), v.float(), seen, scale, softcap)
    return out.to(q.dtype), lse.masked_fill(lse.isneginf(), torch.inf)


def dense_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    seen: Tensor,
    softcap: float = 0.0,
    into: tuple[Tensor, ...] = (),
) -> list[Tensor]:
    dtype, (dout, q, k, v, out) = q.dtype, (x.float() for x in (dout, q, k, v, out))
    delta = (dout * out).sum(-1).transpose(1, 2)
    grads = textbook_backward(q, k, v, dout, lse, delta, seen, scale, softcap)
    for wanted, grad in zip(into, grads, strict=False):
        wanted.copy_(grad)
    return [grad.to(dtype) for grad in grads]


def flash_2_visible(rows: int, cols: int, left: int, right: int) -> Tensor:
    """The mask of FlashAttention 2's kernels, with the rules of its C++ (flash_api.cpp).

    A side of at least seqlen_k counts as unbounded. Where one side alone is unbounded it becomes
    seqlen_k, which is counted from the diagonal like any other.
    """
    left, right = (-1 if side >= cols else side for side in (left, right))
    if left < 0 <= right:
        left = cols
    elif right < 0 <= left:
        right = cols
    i = torch.arange(rows)[:, None] + cols - rows
    j = torch.arange(cols)[None]
    seen = torch.ones(rows, cols, dtype=torch.bool)
    return seen if left < 0 else (j >= i - left) & (j <= i + right)


def flash_3_visible(rows: int, cols: int, left: int, right: int) -> Tensor:
    """The mask of FlashAttention 3's kernels, with the rules of its C++ (flash_api.cpp)."""
    left = cols - 1 if left < 0 or left >= cols - 1 else left
    right = rows - 1 if right < 0 or right >= rows - 1 else right
    return flash_4_visible(rows, cols, left, right)


def flash_4_visible(rows: int, cols: int, left: int | None, right: int | None) -> Tensor:
    """A window from the bottom right corner; its two sides cannot exclude each other."""
    assert left is None or right is None or left + right >= 0
    i = torch.arange(rows)[:, None] + cols - rows
    j = torch.arange(cols)[None]
    seen = torch.ones(rows, cols, dtype=torch.bool)
    seen = seen if left is None else seen & (j >= i - left)
    return seen if right is None else seen & (j <= i + right)


def cudnn_visible(rows: int, cols: int, is_causal: bool) -> Tensor:
    assert rows == cols or not is_causal
    seen = torch.ones(rows, cols, dtype=torch.bool)
    return seen.tril() if is_causal else seen


def require_kernel_shapes(*tensors: Tensor) -> None:
    assert len({x.size(-1) for x in tensors}) == 1, "one headdim"
    assert tensors[0].size(-1) % 8 == 0, "headdim in multiples of 8"
    assert all(x.stride(-1) == 1 for x in tensors), "a contiguous headdim"


# Placeholder for operator results that the backends ignore.
UNUSED = torch.zeros(0)


class FlashAttn2:
    """`torch.ops.flash_attn`: arguments by the names and in the order of flash-attn 2.8."""

    @staticmethod
    def _flash_attn_forward(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        return_softmax,
    ):
        # The package makes the headdim contiguous itself.
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        require_kernel_shapes(q, k, v)
        assert (dropout_p, causal, alibi_slopes, return_softmax) == (0.0, False, None, False)
        seen = flash_2_visible(q.size(1), k.size(1), window_size_left, window_size_right)
        return *dense_forward(q, k, v, softmax_scale, seen, softcap), UNUSED, UNUSED

    @staticmethod
    def _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state=None,
    ):
        dout, q, k, v, out = (
            x if x.stride(-1) == 1 else x.contiguous() for x in (dout, q, k, v, out)
        )
        require_kernel_shapes(dout, q, k, v, out, dq, dk, dv)
        assert softmax_lse.is_contiguous()
        assert (dropout_p, causal, alibi_slopes) == (0.0, False, None)
        assert deterministic
        seen = flash_2_visible(q.size(1), k.size(1), window_size_left, window_size_right)
        into = (dq, dk, dv)
        dense_backward(dout, q, k, v, out, softmax_lse, softmax_scale, seen, softcap, into)
        return UNUSED


class FlashAttn3:
    """`torch.ops.flash_attn_3`: arguments by the names and in the order of flash-attn 3.0.0."""

    @staticmethod
    def fwd(
        q,
        k,
        v,
        k_new=None,
        v_new=None,
        q_v=None,
        out=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        cu_seqlens_k_new=None,
        seqused_q=None,
        seqused_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        page_table=None,
        kv_batch_idx=None,
        leftpad_k=None,
        rotary_cos=None,
        rotary_sin=None,
        seqlens_rotary=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        softmax_scale=None,
        is_causal=False,
        window_size_left=-1,
        window_size_right=-1,
        attention_chunk=0,
        softcap=0.0,
        is_rotary_interleaved=False,
        scheduler_metadata=None,
        num_splits=0,
        pack_gqa=None,
        sm_margin=0,
    ):
        require_kernel_shapes(q, k, v)
        assert (out, cu_seqlens_q, is_causal, num_splits) == (None, None, False, 1)
        seen = flash_3_visible(q.size(1), k.size(1), window_size_left, window_size_right)
        return *dense_forward(q, k, v, softmax_scale, seen, softcap), UNUSED, UNUSED

    @staticmethod
    def bwd(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq=None,
        dk=None,
        dv=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        seqused_q=None,
        seqused_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        softmax_scale=None,
        is_causal=False,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        deterministic=False,
        sm_margin=0,
    ):
        require_kernel_shapes(dout, q, k, v, out, dq, dk, dv)
        assert (cu_seqlens_q, is_causal, deterministic) == (None, False, True)
        seen = flash_3_visible(q.size(1), k.size(1), window_size_left, window_size_right)
        into = (dq, dk, dv)
        dense_backward(dout, q, k, v, out, softmax_lse, softmax_scale, seen, softcap, into)
        return 5 * [UNUSED]


class FlashAttn4:
    """`flash_attn.cute.interface`: arguments by name, as of flash-attn 4.0.0 beta 22."""

    @staticmethod
    def _flash_attn_fwd(
        q,
        k,
        v,
        *,
        softmax_scale=None,
        causal=False,
        softcap=None,
        window_size_left=None,
        window_size_right=None,
        num_splits=1,
        return_lse=False,
        out=None,
        lse=None,
    ):
        require_kernel_shapes(q, k, v)
        assert (causal, num_splits, return_lse, out, lse) == (False, 1, True, None, None)
        seen = flash_4_visible(q.size(1), k.size(1), window_size_left, window_size_right)
        made, found = dense_forward(q, k, v, softmax_scale, seen, softcap)
        return made, found.masked_fill(found == torch.inf, -torch.inf), None, None

    @staticmethod
    def _flash_attn_bwd(
        q,
        k,
        v,
        out,
        dout,
        lse,
        softmax_scale=None,
        causal=False,
        softcap=0.0,
        window_size_left=None,
        window_size_right=None,
        *,
        deterministic=False,
        dq=None,
        dk=None,
        dv=None,
    ):
        require_kernel_shapes(dout, q, k, v, out, dq, dk, dv)
        assert (causal, deterministic) == (False, True)
        seen = flash_4_visible(q.size(1), k.size(1), window_size_left, window_size_right)
        into = (dq, dk, dv)
        dense_backward(dout, q, k, v, out, lse, softmax_scale, seen, softcap, into)
        return into


class TorchOnCuda:
    """The operators of `torch.ops.aten` that the backends call on CUDA."""

    def __init__(self) -> None:
        self.called: set[str] = set()

    def _flash_attention_forward(
        self,
        query,
        key,
        value,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        return_debug_mask,
        *,
        scale,
        window_size_left,
        window_size_right,
    ):
        self.called.add("flash")
        require_kernel_shapes(query, key, value)
        assert (cum_seq_q, cum_seq_k) == (None, None)
        assert (max_q, max_k) == (query.size(1), key.size(1))
        assert (dropout_p, is_causal, return_debug_mask) == (0.0, False, False)
        seen = flash_2_visible(max_q, max_k, window_size_left, window_size_right)
        return *dense_forward(query, key, value, scale, seen), UNUSED, UNUSED, UNUSED

    def _flash_attention_backward(
        self,
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        rng_state,
        unused,
        *,
        scale,
        window_size_left,
        window_size_right,
    ):
        self.called.add("flash backward")
        require_kernel_shapes(grad_out, query, key, value, out)
        assert logsumexp.is_contiguous()
        assert (dropout_p, is_causal) == (0.0, False)
        seen = flash_2_visible(max_q, max_k, window_size_left, window_size_right)
        return tuple(dense_backward(grad_out, query, key, value, out, logsumexp, scale, seen))

    def _scaled_dot_product_cudnn_attention(
        self,
        query,
        key,
        value,
        attn_bias,
        compute_log_sumexp,
        dropout_p=0.0,
        is_causal=False,
        return_debug_mask=False,
        *,
        scale,
    ):
        self.called.add("cudnn")
        require_kernel_shapes(query, key, value)
        assert (attn_bias, compute_log_sumexp) == (None, True)
        assert (dropout_p, return_debug_mask) == (0.0, False)
        seen = cudnn_visible(query.size(2), key.size(2), is_causal)
        out, lse = dense_forward(*(x.transpose(1, 2) for x in (query, key, value)), scale, seen)
        return out.transpose(1, 2), lse.unsqueeze(-1), *7 * [None]

    def _scaled_dot_product_cudnn_attention_backward(
        self,
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        philox_seed,
        philox_offset,
        attn_bias,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        *,
        scale,
    ):
        self.called.add("cudnn backward")
        require_kernel_shapes(grad_out, query, key, value, out)
        assert logsumexp.shape == (*query.shape[:3], 1)
        assert (attn_bias, cum_seq_q, cum_seq_k, dropout_p) == (None, None, None, 0.0)
        assert (max_q, max_k) == (query.size(2), key.size(2))
        seen = cudnn_visible(max_q, max_k, is_causal)
        rows = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        grads = dense_backward(*rows, logsumexp.squeeze(-1), scale, seen)
        return tuple(grad.transpose(1, 2) for grad in grads)


class PretendCuda(TorchFunctionMode):
    """Makes tensors report device CUDA, and creates CUDA tensors on the CPU instead."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == torch.Tensor.device.__get__:
            return torch.device("cuda")
        args = tuple(self._here(x) for x in args)
        return func(*args, **{name: self._here(x) for name, x in (kwargs or {}).items()})

    @staticmethod
    def _here(x: Any) -> Any:
        return torch.device("cpu") if isinstance(x, torch.device) else x
