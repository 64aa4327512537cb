"""`ring_flash_attn.utils`: building blocks for a custom ring, over torch.distributed.

In contrast to `ring_attention`, messages carry no identity, so ranks that make different calls are
not detected. `get_default_args`, which reads private functions of flash-attn, is left out.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.checks.attention import check_cu_seqlens
from ring_attn.transport import groups
from ring_attn.transport.groups import Group
from ring_attn.values.checks import as_int

Index = slice | tuple[slice, ...]


def update_out_and_lse(
    out: Tensor | None,
    lse: Tensor | None,
    block_out: Tensor,
    block_lse: Tensor,
    slice_: Index | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge the attention to a block of keys into the attention to earlier blocks.

    Args:
        out: (..., rows, nheads, headdim) float32, the output so far; None before the first block.
        lse: (..., rows, nheads, 1) float32, the lse so far; None before the first block.
        block_out: (..., rows, nheads, headdim), the output of the block, in any float dtype.
        block_lse: (..., nheads, rows), the lse of the block.
        slice_: the part of `out` and `lse` that the block covers; both are then changed in place.

    Returns:
        The merged `(out, lse)`. Rows that have seen no key have out 0 and lse -inf.

    Raises:
        RuntimeError: the first block has a slice.

    Example:
        >>> half = torch.full((1, 1, 1), 2.0), torch.zeros(1, 1)
        >>> out, lse = update_out_and_lse(*update_out_and_lse(None, None, *half), *half)
        >>> out.item(), round(lse.exp().item(), 3)
        (2.0, 2.0)
    """
    # (..., nheads, rows) -> (..., rows, nheads, 1)
    block_out, block_lse = block_out.float(), block_lse.transpose(-2, -1).unsqueeze(-1)
    if out is None or lse is None:
        if slice_ is not None:
            raise RuntimeError(
                "the first block must be for all rows, got slice_: pass out and lse of earlier "
                "blocks, or leave slice_ out"
            )
        return block_out, block_lse
    old_out, old_lse = (out, lse) if slice_ is None else (out[slice_], lse[slice_])
    new_lse = torch.logaddexp(old_lse, block_lse)
    # The weights of a row that sees no key are exp(-inf - -inf), NaN.
    old_weight = (old_lse - new_lse).exp().nan_to_num()
    block_weight = (block_lse - new_lse).exp().nan_to_num()
    new_out = old_weight * old_out + block_weight * block_out
    if slice_ is None:
        return new_out, new_lse
    out[slice_], lse[slice_] = new_out, new_lse
    return out, lse


def flatten_varlen_lse(lse: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the lse of packed documents, (nheads, rows), from (documents, nheads, longest).

    Raises:
        ValueError: boundaries decrease, or there are not as many documents in `lse`.
    """
    lengths = _lengths(cu_seqlens)
    if len(lengths) != len(lse):
        raise ValueError(
            f"lse must have the {len(lengths)} documents of cu_seqlens in dim 0, got shape "
            f"{tuple(lse.shape)}"
        )
    parts = [document[:, :length] for document, length in zip(lse, lengths, strict=True)]
    return torch.cat(parts, dim=1)


def unflatten_varlen_lse(lse: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Return the lse of documents, (documents, nheads, max_seqlen), from packed (rows, nheads, 1).

    Padding is 0.

    Raises:
        ValueError: boundaries decrease, or a document is longer than `max_seqlen`.
    """
    lengths = _lengths(cu_seqlens)
    max_seqlen = as_int("max_seqlen", max_seqlen, least=max(lengths, default=0))
    padded = lse.new_zeros(len(lengths), max_seqlen, lse.size(-2))
    documents = lse.squeeze(-1).split(lengths)  # each (rows, nheads)
    for into, document in zip(padded, documents, strict=True):
        into[: len(document)] = document
    return padded.transpose(1, 2).contiguous()


def _lengths(cu_seqlens: Tensor) -> list[int]:
    """Return the lengths of documents."""
    boundaries = check_cu_seqlens("cu_seqlens", cu_seqlens) or ()
    return [end - start for start, end in pairwise(boundaries)]


class RingComm:
    """Send tensors to the next rank of a group, and receive those of the previous rank.

    Attributes:
        rank: this rank in the group.
        world_size: number of ranks in the group.
        send_rank: global rank of the next rank.
        recv_rank: global rank of the previous rank.
    """

    def __init__(self, process_group: Group) -> None:
        self._group = groups.check_group(process_group)
        self.rank = dist.get_rank(self._group)
        self.world_size = dist.get_world_size(self._group)
        self.send_rank = self._global_rank(self.rank + 1)
        self.recv_rank = self._global_rank(self.rank - 1)
        self._ops: list[dist.P2POp] = []
        self._works: list[dist.Work] | None = None

    def _global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank % self.world_size)

    def send_recv(self, to_send: Tensor, recv_tensor: Tensor | None = None) -> Tensor:
        """Queue an exchange; the returned tensor is received after `commit` and `wait`."""
        received = torch.empty_like(to_send) if recv_tensor is None else recv_tensor
        if self.world_size == 1:  # a rank cannot send to itself
            return received.copy_(to_send)
        self._ops += (
            dist.P2POp(dist.isend, to_send, self.send_rank, group=self._group),
            dist.P2POp(dist.irecv, received, self.recv_rank, group=self._group),
        )
        return received

    def send_recv_kv(
        self, k: Tensor, v: Tensor, k_buffer: Tensor | None = None, v_buffer: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Start to exchange k and v; the returned tensors are received after `wait`."""
        received = self.send_recv(k, k_buffer), self.send_recv(v, v_buffer)
        self.commit()
        return received

    def commit(self) -> None:
        """Start all queued exchanges."""
        if self._works is not None:
            raise RuntimeError("commit must follow a wait, got a second commit: call wait first")
        self._works = dist.batch_isend_irecv(self._ops) if self._ops else []

    def wait(self) -> None:
        """Wait until the exchanges that `commit` started are complete."""
        if self._works is None:
            raise RuntimeError("wait must follow a commit, got none: call commit first")
        for work in self._works:
            work.wait()
        self._works, self._ops = None, []


class AllGatherComm:
    """Gather tensors of all ranks, several at a time."""

    def __init__(self, group: Group = None) -> None:
        self._group = groups.check_group(group)
        self._works: list[dist.Work | None] = []

    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor) -> None:
        """Start to gather the inputs of all ranks, concatenated along dim 0, into the output."""
        work = dist.all_gather_into_tensor(
            output_tensor, input_tensor, group=self._group, async_op=True
        )
        self._works.append(work)

    def wait(self) -> None:
        """Wait until all inputs are gathered."""
        for work in self._works:
            if work is not None:
                work.wait()
        self._works = []
