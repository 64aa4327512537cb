"""Shard a training batch by a layout (`shard_batch`), and gather a tensor (`unshard`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ring_attn.checks import attention as checks
from ring_attn.core.joint import JointLayout
from ring_attn.core.layout import SequenceLayout
from ring_attn.transport import groups
from ring_attn.transport.base import Agreement
from ring_attn.transport.groups import Group
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.p2p import new_p2p, reporting
from ring_attn.values.checks import as_int, as_ints, check_type


# More than 60 lines, most of them documentation.
def shard_batch(
    batch: Mapping[str, Tensor],
    layout: SequenceLayout,
    rank: int,
    *,
    dim: int = 1,
    ignore_index: int = -100,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """Return a rank's shard of a training batch, with the labels shifted *before* sharding.

    Shifting labels inside a shard would give the last row of each segment a wrong label or none.
    Here row i of the shard has the label `labels[position_ids[i] + 1]`.

    Args:
        batch: tensors with `layout.seqlen` rows in `dim`, such as `input_ids` (batch, seqlen). If
            it has `labels` (unshifted, as in Hugging Face batches), the result has `shift_labels`
            instead, whose last position is `ignore_index`. Labels on the CPU that equal the next
            `input_ids` everywhere raise an error, because they would be shifted twice.
            `attention_mask` is not sharded: attention needs the padding of all ranks' rows.
        layout: the layout of the sequence.
        rank: the rank whose shard is returned.
        dim: the sequence dim of every tensor.
        ignore_index: the label of positions that have no next token.
        cu_seqlens: boundaries of packed documents, from 0. Positions restart at 0 in each document,
            and its last token has no label. Rows after the last boundary are one more document.

    Returns:
        The shards under the same names, with `shift_labels` instead of `labels`, and
        `position_ids` of shape (1, shard_len) unless the batch has `position_ids`.

    Raises:
        ValueError: a tensor does not have `layout.seqlen` rows, labels cannot hold `ignore_index`
            or are shifted already, the batch has both `labels` and `shift_labels`, or boundaries
            exceed the sequence.
        TypeError: the batch is not a dict of tensors, or the layout is given by name.

    Example:
        >>> layout = SequenceLayout.contiguous(4, 2)
        >>> part = shard_batch({"input_ids": torch.tensor([[5, 6, 7, 8]]),
        ...                     "labels": torch.tensor([[5, 6, 7, 8]])}, layout, rank=0)
        >>> part["shift_labels"].tolist(), part["position_ids"].tolist()
        ([[6, 7]], [[0, 1]])
        >>> part = shard_batch({"labels": torch.tensor([[5, 6, 7, 8]])}, layout, rank=0,
        ...                    cu_seqlens=[0, 1, 4])
        >>> part["shift_labels"].tolist(), part["position_ids"].tolist()
        ([[-100, 7]], [[0, 0]])
    """
    check_type("batch", batch, Mapping, "a dict of tensors")
    check_type("layout", layout, SequenceLayout)
    for name, x in batch.items():
        layout.check_rows(x, dim, f"batch[{name!r}]")
    cuts = _boundaries(cu_seqlens, layout.seqlen)
    whole = dict(batch)
    if "labels" in whole:
        if "shift_labels" in whole:
            raise ValueError("batch has both labels and shift_labels; give one of them")
        labels = whole.pop("labels")
        _check_ignore_index(labels, ignore_index)
        _check_unshifted(labels, whole.get("input_ids"), dim, ignore_index)
        whole["shift_labels"] = _shifted(labels, cuts, dim, ignore_index)
    part = {
        name: x if name == "attention_mask" else layout.shard(x, rank, dim)
        for name, x in whole.items()
    }
    if "position_ids" not in part:
        device = next(iter(part.values())).device if part else None
        positions = from_document(layout.position_ids(rank), cuts)
        part["position_ids"] = positions.to(device).unsqueeze(0)  # (1, shard_len)
    return part


def _shifted(labels: Tensor, cuts: Sequence[int], dim: int, ignore_index: int) -> Tensor:
    """Return the label of the next token for each row; the last row of a document has none."""
    shifted = labels.roll(-1, dim)
    last_rows = torch.tensor([cut - 1 for cut in cuts if cut > 0], dtype=torch.int64)
    return shifted.index_fill_(dim, last_rows.to(shifted.device), ignore_index)


def from_document(positions: Tensor, cuts: Sequence[int] | None) -> Tensor:
    """Return positions counted from the start of their documents; `positions` are on the CPU."""
    if not cuts:
        return positions
    starts = torch.tensor(cuts, device="cpu")
    document = torch.searchsorted(starts, positions, right=True) - 1
    return positions - starts[document]


def unshard(
    x: Tensor, layout: SequenceLayout | JointLayout, *, group: Group = None, dim: int = 1
) -> Tensor:
    """Gather the whole tensor on every rank from the shards of all ranks, without gradient.

    This is for evaluation. Every rank of the group must call it.

    Args:
        x: this rank's shard, `layout.shard_len(rank)` rows in `dim`.
        layout: the layout of the sequence. Rows that every rank holds are taken from their owners.
        group: as for `ring_attention`.
        dim: the sequence dim.

    Returns:
        `x` with `layout.seqlen` rows in `dim`.

    Raises:
        ValueError: the number of rows is wrong, or x does not have the dim.
        TypeError: a type is not accepted; for example, the layout is given by name.
        RuntimeError: there is no process group.

    Example:
        >>> # under torchrun --nproc-per-node 2, after init_process_group("gloo")
        >>> layout = ring_attn.SequenceLayout.zigzag(8, 2)
        >>> shard = layout.shard(torch.arange(8)[None], rank)
        >>> ring_attn.unshard(shard, layout)
        tensor([[0, 1, 2, 3, 4, 5, 6, 7]])
    """
    process_group = groups.check_group(group)
    with reporting(process_group):
        if isinstance(layout, JointLayout):
            x = layout.owned(x, process_group.rank(), dim)
            layout = layout.owners
        checks.check_shard(x, dim, layout, process_group)
        checks.check_capture("unshard", x)
    # An all-gather needs equal sizes, so short shards are padded, and trimmed after it.
    longest = max(layout.shard_lens)
    rows_first = x.detach().movedim(dim, 0)
    rows = torch.zeros(longest, *rows_first.shape[1:], dtype=x.dtype, device=x.device)
    rows[: x.size(dim)] = rows_first
    dim = dim % x.ndim
    described = {"dtype": x.dtype, "shape": rows.shape, "dim": dim, "layout": layout}
    transport = new_p2p(process_group, TransportOptions())
    with transport.call("unshard", Agreement(described), x.device):
        gathered = transport.gather(rows)
    shards = [
        padded[:length].movedim(0, dim)
        for padded, length in zip(gathered, layout.shard_lens, strict=True)
    ]
    return layout.unshard(shards, dim)


def _boundaries(cu_seqlens: Tensor | Sequence[int] | None, seqlen: int) -> list[int]:
    """Return the first positions of the documents, and the end of the sequence."""
    cuts = [0]
    if cu_seqlens is not None:
        cuts = [*as_ints("cu_seqlens", cu_seqlens)]
        if cuts != sorted(cuts) or cuts[:1] != [0] or cuts[-1] > seqlen:
            raise ValueError(
                f"cu_seqlens must not decrease, must start at 0 and must end at {seqlen} or "
                f"before, because the layout has {seqlen} rows, but got {cuts}"
            )
    return [*cuts, seqlen]


def _check_ignore_index(labels: Tensor, ignore_index: int) -> None:
    """Refuse labels that are not numbers, or whose dtype cannot hold `ignore_index`."""
    index = as_int("ignore_index", ignore_index)
    if labels.is_floating_point():
        return
    if labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers, got {labels.dtype}")
    bounds = torch.iinfo(labels.dtype)
    if not bounds.min <= index <= bounds.max:
        raise ValueError(f"ignore_index must fit labels of {labels.dtype}, got {index}")


def _check_unshifted(labels: Tensor, ids: Tensor | None, dim: int, ignore_index: int) -> None:
    """Refuse labels that equal the next `input_ids` everywhere.

    Only tensors on the CPU are compared: reading values of a GPU would synchronise it.
    """
    if ids is None or ids.shape != labels.shape:
        return
    if ids.device.type != "cpu" or labels.device.type != "cpu":
        return
    rows = labels.size(dim)
    if rows < 2:
        return
    targets = labels.narrow(dim, 0, rows - 1)
    counted = targets != ignore_index
    same_ids = ids.narrow(dim, 0, rows - 1)
    next_ids = ids.narrow(dim, 1, rows - 1)
    is_unshifted = bool((targets == same_ids)[counted].all())
    is_shifted = bool((targets == next_ids)[counted].all())
    # A single label, or ids that are all equal, prove nothing.
    if is_shifted and not is_unshifted and int(counted.sum()) > 1:
        raise ValueError(
            "labels are shifted already: each label that is not ignored equals the next of the "
            "input_ids; pass them as shift_labels, or pass unshifted labels"
        )
