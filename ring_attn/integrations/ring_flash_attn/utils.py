"""`ring_flash_attn.utils`: parts for writing your own ring, over torch.distributed.

Unlike in `ring_attention`, messages carry no identity, so calls that differ between ranks are not
detected. `get_default_args`, which reads flash-attn's private functions, is left out.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import groups, refusals
from ring_attn.call import Group
from ring_attn.core.values import as_int

_Index = slice | tuple[slice, ...]


def update_out_and_lse(
    out: Tensor | None,
    lse: Tensor | None,
    block_out: Tensor,
    block_lse: Tensor,
    slice_: _Index | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges the attention to a block of keys into the attention so far.

    Args:
        out: (..., rows, nheads, headdim) float32, the output so far; None before the first block.
        lse: (..., rows, nheads, 1) float32, the lse so far.
        block_out: (..., rows, nheads, headdim), the block's output; any floating point dtype.
        block_lse: (..., nheads, rows), the block's lse.
        slice_: part of `out` and `lse` that the block covers; then both are changed in place.

    Returns:
        The merged `(out, lse)`. Rows that have seen nothing have out 0 and lse -inf.

    Raises:
        RuntimeError: the first block has a slice.

    Example:
        >>> half = torch.full((1, 1, 1), 2.0), torch.zeros(1, 1)
        >>> out, lse = update_out_and_lse(*update_out_and_lse(None, None, *half), *half)
        >>> out.item(), round(lse.exp().item(), 3)
        (2.0, 2.0)
    """
    block_out, block_lse = block_out.float(), block_lse.transpose(-2, -1).unsqueeze(-1)
    if out is None or lse is None:
        if slice_ is not None:
            raise RuntimeError(
                "the first block must be for all rows, got slice_; pass it without slice_, or out "
                "and lse"
            )
        return block_out, block_lse
    whole = (out, lse)
    if slice_ is not None:
        out, lse = out[slice_], lse[slice_]
    both = torch.logaddexp(lse, block_lse)
    # A row that sees nothing in both has -inf - -inf.
    before, block = ((x - both).exp().nan_to_num() for x in (lse, block_lse))
    out = before * out + block * block_out
    if slice_ is None:
        return out, both
    whole[0][slice_], whole[1][slice_] = out, both
    return whole


def flatten_varlen_lse(lse: Tensor, cu_seqlens: Tensor) -> Tensor:
    """(nheads, rows) of packed documents, from (documents, nheads, longest)."""
    lengths = [
        b - a for a, b in pairwise(refusals.check_cu_seqlens("cu_seqlens", cu_seqlens) or ())
    ]
    return torch.cat([document[:, :n] for document, n in zip(lse, lengths, strict=True)], 1)


def unflatten_varlen_lse(lse: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """(documents, nheads, max_seqlen), padded with 0, from packed (rows, nheads, 1)."""
    runs = list(pairwise(refusals.check_cu_seqlens("cu_seqlens", cu_seqlens) or ()))
    padded = lse.new_zeros(len(runs), as_int("max_seqlen", max_seqlen), lse.size(-2))
    for document, (start, stop) in zip(padded, runs, strict=True):
        document[: stop - start] = lse[start:stop, :, 0]
    return padded.transpose(1, 2).contiguous()


class RingComm:
    """Sends tensors to the next rank of a group, and receives the previous rank's.

    `rank` and `world_size` are in the group; `send_rank` and `recv_rank` are global ranks.
    """

    def __init__(self, process_group: Group) -> None:
        self._group = groups.check_group(process_group)
        self.rank, self.world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
        around = ((self.rank + step) % self.world_size for step in (1, -1))
        self.send_rank, self.recv_rank = (dist.get_global_rank(self._group, r) for r in around)
        self._ops: list[dist.P2POp] = []
        self._works: list[dist.Work] | None = None

    def send_recv(self, to_send: Tensor, recv_tensor: Tensor | None = None) -> Tensor:
        """Queues an exchange; the returned tensor is received after `commit` and `wait`."""
        received = torch.empty_like(to_send) if recv_tensor is None else recv_tensor
        # A single rank is its own neighbour, and cannot send to itself.
        if self.world_size == 1:
            return received.copy_(to_send)
        self._ops += (
            dist.P2POp(dist.isend, to_send, self.send_rank, group=self._group),
            dist.P2POp(dist.irecv, received, self.recv_rank, group=self._group),
        )
        return received

    def send_recv_kv(
        self, k: Tensor, v: Tensor, k_buffer: Tensor | None = None, v_buffer: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Starts to exchange k and v; the returned tensors are received after `wait`."""
        received = self.send_recv(k, k_buffer), self.send_recv(v, v_buffer)
        self.commit()
        return received

    def commit(self) -> None:
        if self._works is not None:
            raise RuntimeError("commit must follow a wait, got a second commit: call wait between")
        self._works = dist.batch_isend_irecv(self._ops) if self._ops else []

    def wait(self) -> None:
        if self._works is None:
            raise RuntimeError("wait must follow a commit, got none: call commit before")
        for work in self._works:
            work.wait()
        self._works, self._ops = None, []


class AllGatherComm:
    """Gathers tensors of all ranks, several at a time."""

    def __init__(self, group: Group = None) -> None:
        self._group = groups.check_group(group)
        self._works: list[dist.Work | None] = []

    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor) -> None:
        """Starts to gather the inputs of all ranks, concatenated in dim 0, into the output."""
        self._works.append(
            dist.all_gather_into_tensor(
                output_tensor, input_tensor, group=self._group, async_op=True
            )
        )

    def wait(self) -> None:
        for work in self._works:
            if work is not None:
                work.wait()
        self._works = []
