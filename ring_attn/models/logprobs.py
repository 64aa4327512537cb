"""`token_logprobs`: log-probabilities of all tokens of a sharded sequence."""

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


# More than 60 lines, most of them documentation.
def token_logprobs(
    logits: Tensor,
    shift_labels: Tensor,
    layout: SequenceLayout,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    group: Group = None,
) -> Tensor:
    """Return the log-probabilities of the next tokens of the whole sequence, on every rank.

    This is for losses of whole sequences, such as DPO and GRPO, which every rank computes. The
    gradients of the result reach this rank's logits only, so sum the gradients of parameters over
    the ranks with `ring_attn.sync_gradients`. Every rank of the group must call this function.

    Args:
        logits: this rank's rows, (batch, rows, vocabulary).
        shift_labels: (batch, rows) the next token of each row, as `ring_attn.shard_batch` makes.
        layout: the layout of the sequence.
        temperature: divisor of the logits.
        ignore_index: the label of rows without a next token; their result is 0.
        group: as for `ring_attention`.

    Returns:
        (batch, seqlen), in the order of the sequence; the dtype of the logits, but at least
        float32.

    Raises:
        ValueError: shapes do not match each other or the layout, or the temperature is not
            positive.
        TypeError: a type is not accepted.
        RuntimeError: there is no process group, or as `ring_attention`.

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
    losses = cross_entropy(
        scaled.flatten(0, 1),  # (batch * rows, vocabulary)
        shift_labels.flatten(),
        ignore_index=ignore_index,
        reduction="none",
    )
    logprobs = -losses.view(shift_labels.shape)  # (batch, rows)
    return whole_rows(logprobs, layout, rank, process_group)


def whole_rows(x: Tensor, layout: SequenceLayout, rank: int, group: dist.ProcessGroup) -> Tensor:
    """Gather the rows of all ranks, (batch, seqlen, ...); only this rank's rows have gradients."""
    whole = unshard(x, layout, group=group)
    # This rank's values are written once more, because `x` has the gradient and `whole` has none.
    return whole.index_copy_(1, layout.position_ids(rank, x.device), x)
