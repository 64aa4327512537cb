"""`shard_batch` cuts a training batch by a layout; `unshard` gathers a tensor again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ring_attn.checks import attention as checks
from ring_attn.core.layout import SequenceLayout
from ring_attn.transport import groups
from ring_attn.transport.base import Agreement
from ring_attn.transport.groups import Group
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.p2p import new_p2p, reporting
from ring_attn.values.checks import as_int, as_ints, check_type


def shard_batch(
    batch: Mapping[str, Tensor],
    layout: SequenceLayout,
    rank: int,
    *,
    dim: int = 1,
    ignore_index: int = -100,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """The rank's part of a training batch, with labels shifted *before* the cut.

    Shifting inside a shard would give the last row of each segment a wrong label or none. Here row
    i of the shard has the label `labels[position_ids[i] + 1]`.

    Args:
        batch: tensors with `layout.seqlen` rows in `dim`, such as `input_ids` (batch, seqlen). With
            `labels` (unshifted, as in Hugging Face batches) the result has `shift_labels` instead,
            whose last position is `ignore_index`. Labels on the CPU that are the next of the
            `input_ids` everywhere are refused: they would be shifted twice. `attention_mask` stays
            whole: attention needs the padding of all ranks' rows.
        layout: how the sequence is split.
        rank: the rank that holds the part.
        dim: the sequence dim of every tensor.
        ignore_index: the label of positions that have no next token.
        cu_seqlens: boundaries of packed documents, from 0. Positions restart at 0 in each document,
            and its last token has no label. Rows after the last boundary are a document too.

    Returns:
        The shards by the same names, `shift_labels` in place of `labels`, and `position_ids` of
        shape (1, shard_len) unless the batch has its own.

    Raises:
        ValueError: a tensor without `layout.seqlen` rows, labels that cannot hold `ignore_index`
            or are shifted already, a batch with both `labels` and `shift_labels`, or boundaries
            beyond the sequence.
        TypeError: a batch that is not a dict of tensors, or a layout given by name.

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
        shifted = labels.roll(-1, dim)
        last = torch.tensor([cut - 1 for cut in cuts if cut], dtype=torch.int64)
        shifted.index_fill_(dim, last.to(shifted.device), ignore_index)
        whole["shift_labels"] = shifted
    part = {
        name: x if name == "attention_mask" else layout.shard(x, rank, dim)
        for name, x in whole.items()
    }
    if "position_ids" not in part:
        device = next(iter(part.values())).device if part else None
        positions = layout.position_ids(rank)
        part["position_ids"] = from_document(positions, cuts).to(device)[None]
    return part


def from_document(positions: Tensor, cuts: Sequence[int] | None) -> Tensor:
    """Positions on the host, counted from the start of their documents."""
    if not cuts:
        return positions
    starts = torch.tensor(cuts, device="cpu")
    return positions - starts[torch.searchsorted(starts, positions, right=True) - 1]


def unshard(x: Tensor, layout: SequenceLayout, *, group: Group = None, dim: int = 1) -> Tensor:
    """The whole tensor on every rank, from the shards of all ranks; for evaluation, no gradient.

    Args:
        x: this rank's shard, `layout.shard_len(rank)` rows in `dim`.
        layout: how the sequence is split.
        group: as for `ring_attention`.
        dim: the sequence dim.

    Returns:
        `x` with `layout.seqlen` rows in `dim`.

    Raises:
        ValueError: a wrong number of rows, or a dim that x lacks.
        TypeError: a type that is not accepted, such as a layout given by name.
        RuntimeError: no process group.
    """
    process_group = groups.check_group(group)
    with reporting(process_group):
        checks.check_shard(x, dim, layout, process_group)
        checks.check_capture("unshard", x)
    # An all-gather needs equal sizes: short shards are padded, and cut again after it.
    longest = max(layout.shard_lens)
    rows = torch.zeros(longest, *x.movedim(dim, 0).shape[1:], dtype=x.dtype, device=x.device)
    rows[: x.size(dim)] = x.detach().movedim(dim, 0)
    dim = dim % x.ndim
    described = {"dtype": x.dtype, "shape": rows.shape, "dim": dim, "layout": layout}
    transport = new_p2p(process_group, TransportOptions())
    with transport.call("unshard", Agreement(described), x.device):
        gathered = transport.gather(rows)
    shards = zip(gathered, layout.shard_lens, strict=True)
    return layout.unshard([part[:n].movedim(0, dim) for part, n in shards], dim)


def _boundaries(cu_seqlens: Tensor | Sequence[int] | None, seqlen: int) -> list[int]:
    """First positions of the documents, and the end of the sequence."""
    cuts = [0]
    if cu_seqlens is not None:
        cuts = [*as_ints("cu_seqlens", cu_seqlens)]
        if cuts != sorted(cuts) or cuts[:1] != [0] or cuts[-1] > seqlen:
            raise ValueError(
                f"cu_seqlens must not decrease, from 0 to at most {seqlen}, the rows of the "
                f"layout, got {cuts}"
            )
    return [*cuts, seqlen]


def _check_ignore_index(labels: Tensor, ignore_index: int) -> None:
    index = as_int("ignore_index", ignore_index)
    if labels.is_floating_point():
        return
    if labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers, got {labels.dtype}")
    bounds = torch.iinfo(labels.dtype)
    if not bounds.min <= index <= bounds.max:
        raise ValueError(f"ignore_index must fit labels of {labels.dtype}, got {index}")


def _check_unshifted(labels: Tensor, ids: Tensor | None, dim: int, ignore_index: int) -> None:
    """Refuses labels of which each is the next of the `input_ids`, where that costs no wait."""
    if ids is None or ids.shape != labels.shape or {ids.device.type, labels.device.type} != {"cpu"}:
        return
    rows = labels.size(dim)
    if rows < 2:
        return
    targets = labels.narrow(dim, 0, rows - 1)
    counted = targets != ignore_index
    shifted, unshifted = (
        bool((targets == ids.narrow(dim, start, rows - 1))[counted].all()) for start in (1, 0)
    )
    if shifted and not unshifted and int(counted.sum()) > 1:
        raise ValueError(
            "labels are shifted already: each that counts is the next of the input_ids; pass them "
            "as shift_labels, or unshifted as labels"
        )
