"""`token_logprobs`: log-probabilities of a split sequence's tokens, whole and in order."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from ring_attn.checks import attention as checks
from ring_attn.core.layout import SequenceLayout
from ring_attn.models.batch import unshard
from ring_attn.transport import groups
from ring_attn.transport.groups import Group
from ring_attn.transport.p2p import reporting
from ring_attn.values.checks import check_type


def token_logprobs(
    logits: Tensor,
    shift_labels: Tensor,
    layout: SequenceLayout,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    group: Group = None,
) -> Tensor:
    """Log-probabilities of the next tokens of the whole sequence, on every rank, in its order.

    For losses over whole sequences, such as DPO's and GRPO's, which every rank computes alike.
    Gradients go to this rank's rows alone; sum those of parameters over the ranks, as
    `ring_attn.sync_gradients` does. Every rank of the group must call it.

    Args:
        logits: this rank's rows, (batch, rows, vocabulary).
        shift_labels: (batch, rows) the next token of each row, as `ring_attn.shard_batch` makes.
        layout: how the sequence is split.
        temperature: logits are divided by it.
        ignore_index: the label of rows without a next token; their result is 0.
        group: as for `ring_attention`.

    Returns:
        (batch, seqlen) in the type of the logits, at least float32.

    Raises:
        ValueError: shapes that do not fit each other or the layout, or a temperature that is not
            positive.
        TypeError: a type that is not accepted.
        RuntimeError: no process group, or as `ring_attention`.

    Example:
        >>> # under torchrun --nproc-per-node 2, after init_process_group("gloo")
        >>> layout = ring_attn.SequenceLayout.zigzag(8, 2)
        >>> labels = layout.shard(torch.arange(1, 9)[None], rank)
        >>> ring_attn.token_logprobs(torch.zeros(1, 4, 10), labels, layout).exp()
        tensor([[0.1000, 0.1000, 0.1000, 0.1000, 0.1000, 0.1000, 0.1000, 0.1000]])
    """
    process_group = groups.check_group(group)
    with reporting(process_group):
        for name, x in (("logits", logits), ("shift_labels", shift_labels)):
            check_type(name, x, Tensor)
        if logits.ndim != 3 or logits.shape[:2] != shift_labels.shape:
            raise ValueError(
                "logits must be (batch, rows, vocabulary) and shift_labels (batch, rows), got "
                f"{tuple(logits.shape)} and {tuple(shift_labels.shape)}"
            )
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        rank = checks.check_shard(shift_labels, 1, layout, process_group)
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    own = -cross_entropy(
        scaled.flatten(0, 1), shift_labels.flatten(), ignore_index=ignore_index, reduction="none"
    )
    return whole_rows(own.view(shift_labels.shape), layout, rank, process_group)


def whole_rows(x: Tensor, layout: SequenceLayout, rank: int, group: dist.ProcessGroup) -> Tensor:
    """The whole tensor, of which each rank's loss is the same; gradients of this rank's rows."""
    whole = unshard(x, layout, group=group)
    # The same values again, but these have the gradient.
    return whole.index_copy_(1, layout.position_ids(rank, x.device), x)
