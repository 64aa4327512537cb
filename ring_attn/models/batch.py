"""Shard a training batch by a layout (`shard_batch`), and gather a tensor (`unshard`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

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
from ring_attn.values.checks import as_int, as_ints, check_tensor, check_type

# Names of Hugging Face's inputs that are tensors with a row for each token.
TENSORS = {"input_ids", "inputs_embeds", "labels", "position_ids", "shift_labels"}

# Names of Hugging Face's inputs that have no row per token, or that attention needs as a whole. A
# name ends with "*" if it is only the beginning of names.
WHOLE = (
    "attention_mask",
    "attention_mask_*",
    "aspect_ratio_*",
    "audio_*",
    "cross_attention_mask",
    "cu_seq_lens_*",
    "decoder_attention_mask",
    "feature_attention_mask",
    "image_*",
    "input_features",
    "input_features_mask",
    "max_length_*",
    "num_items_in_batch",
    "pixel_*",
    "second_per_grid_ts",
    "spatial_shapes",
    "video_*",
)


# More than 60 lines, most of them documentation. The values of a batch have the types that the
# user's model takes.
def shard_batch(
    batch: Mapping[str, Any],
    layout: SequenceLayout,
    rank: int,
    *,
    dim: int = 1,
    ignore_index: int = -100,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    dims: Mapping[str, int | None] | None = None,
) -> dict[str, Any]:
    """Return a rank's shard of a training batch, with the labels shifted *before* sharding.

    Shifting labels inside a shard would give the last row of each segment a wrong label or none.
    Here row i of the shard has the label `labels[position_ids[i] + 1]`.

    What is sharded depends on names, never on sizes:

    - `position_ids` along their last dim: (batch, seqlen), (1, seqlen), or (3, batch, seqlen) of
      models with several positions for each token (mrope)
    - not sharded: masks (`attention_mask`, with 2 or 4 dims), because attention needs those of all
      rows; images, videos and audio, such as `pixel_values` and `image_grid_thw` (the names are in
      `models.batch.WHOLE`)
    - not sharded: values that are not tensors, and tensors without dims
    - all other tensors along `dim`, in which they must have `layout.seqlen` rows

    If one row of `position_ids` restarts, it is packed, as FlashAttention reads it in transformers:
    a document starts at each smallest position. Then the result has `cu_seq_lens_q` and
    `cu_seq_lens_k` for the model. As there, labels are shifted over the whole row: collators that
    pack set the label of each document's first token to `ignore_index`.

    Args:
        batch: the batch. If it has `labels` (unshifted, as in Hugging Face batches), the result has
            `shift_labels` instead, whose last position is `ignore_index`. Labels on the CPU that
            equal the next `input_ids` everywhere raise an error, because they would be shifted
            twice.
        layout: the layout of the sequence.
        rank: the rank whose shard is returned.
        dim: the sequence dim of tensors without a rule.
        ignore_index: the label of positions that have no next token.
        cu_seqlens: boundaries of packed documents, from 0. Positions restart at 0 in each document,
            and its last token has no label. Rows after the last boundary are one more document.
        dims: sequence dims by name, for names without a rule or with another one; None means that
            the tensor is not sharded.

    Returns:
        The shards under the same names, with `shift_labels` instead of `labels`, and
        `position_ids` of shape (1, shard_len) unless the batch has `position_ids`.

    Raises:
        ValueError: a tensor does not have `layout.seqlen` rows, labels cannot hold `ignore_index`
            or are shifted already, the batch has both `labels` and `shift_labels`, boundaries
            exceed the sequence or contradict the positions, or `dims` has a name that the batch
            lacks.
        TypeError: the batch is not a dict, or the layout is given by name.

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
    dim = as_int("dim", dim)
    for name in TENSORS & batch.keys():
        check_tensor(f"batch[{name!r}]", batch[name])
    sequence_dims = _sequence_dims(batch, dim, dims or {})
    for name, sequence_dim in sequence_dims.items():
        layout.check_rows(batch[name], sequence_dim, f"batch[{name!r}]")
    if "attention_mask" not in sequence_dims:
        _check_mask(batch.get("attention_mask"), layout.seqlen, dim)
    whole = dict(batch)
    packed = None if dim != 1 else _documents_of_positions(batch)
    if packed is not None:
        _check_same_documents(packed, cu_seqlens, layout.seqlen)
    cuts = _boundaries(cu_seqlens, layout.seqlen)
    if "labels" in whole:
        if "shift_labels" in whole:
            raise ValueError("batch has both labels and shift_labels; give one of them")
        labels = whole.pop("labels")
        _check_ignore_index(labels, ignore_index)
        _check_unshifted(labels, whole.get("input_ids"), dim, ignore_index)
        whole["shift_labels"] = _shifted(labels, cuts, dim, ignore_index)
        sequence_dims["shift_labels"] = dim
    part = {
        name: layout.shard(x, rank, sequence_dims[name]) if name in sequence_dims else x
        for name, x in whole.items()
    }
    if packed is not None and cu_seqlens is None:
        # The attention takes documents from these names; a tensor, because each layer reads it.
        boundaries = torch.tensor(packed, dtype=torch.int32, device=part["position_ids"].device)
        part["cu_seq_lens_q"] = boundaries
        part["cu_seq_lens_k"] = boundaries
    if "position_ids" not in part:
        device = next((part[name].device for name in sequence_dims if name in part), None)
        positions = from_document(layout.position_ids(rank), cuts)
        part["position_ids"] = positions.to(device).unsqueeze(0)  # (1, shard_len)
    return part


def _sequence_dims(
    batch: Mapping[str, object], dim: int, dims: Mapping[str, int | None]
) -> dict[str, int]:
    """Return the sequence dims of the tensors to shard, by name."""
    unknown = sorted(dims.keys() - batch.keys())
    if unknown:
        raise ValueError(f"dims must have names of the batch, {sorted(batch)}, got {unknown}")
    found = {}
    for name, x in batch.items():
        if name in dims:
            sequence_dim = dims[name]
        elif name not in TENSORS and _is_whole(name, x):
            sequence_dim = None
        elif name == "position_ids" and dim == 1:
            sequence_dim = -1
        else:
            sequence_dim = dim
        if sequence_dim is not None:
            found[name] = as_int(f"the sequence dim of {name}", sequence_dim)
    return found


def _is_whole(name: str, x: object) -> bool:
    """Return whether an input is not sharded: a plain value, or one of `WHOLE`."""
    if not isinstance(x, Tensor) or x.ndim == 0:
        return True
    return any(fnmatch(name, rule) for rule in WHOLE)


def _check_mask(mask: object, seqlen: int, dim: int) -> None:
    """Refuse an attention_mask, (batch, seqlen) or with 4 dims, of a part of the sequence."""
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
        return
    if mask.size(dim if mask.ndim == 2 else -1) != seqlen:
        raise ValueError(
            f"attention_mask must cover the whole sequence of {seqlen} rows, got shape "
            f"{tuple(mask.shape)}: pass the whole mask on every rank"
        )


def _documents_of_positions(batch: Mapping[str, object]) -> list[int] | None:
    """Return the boundaries of documents that one row of position_ids describes; None without.

    The rule is that of FlashAttention's path in transformers. Positions of padded rows restart at
    their padding, too, and mark no documents.
    """
    positions, mask = batch.get("position_ids"), batch.get("attention_mask")
    if not isinstance(positions, Tensor) or positions.ndim != 2 or positions.size(0) != 1:
        return None
    if isinstance(mask, Tensor) and not bool((mask != 0).all()):
        return None
    tokens = next((batch[name] for name in ("input_ids", "inputs_embeds") if name in batch), None)
    if isinstance(tokens, Tensor) and tokens.size(0) != 1:
        return None
    row = positions[0].cpu()
    starts = (row == row.min()).nonzero().flatten() if row.numel() else row
    if len(starts) < 2:
        return None
    expected = torch.arange(len(row)) + row.min()
    expected -= starts[torch.searchsorted(starts, torch.arange(len(row)), right=True) - 1]
    if starts[0] != 0 or not torch.equal(row, expected.to(row.dtype)):
        return None  # other positions, such as of a tree of drafts
    return [*starts.tolist(), len(row)]


def _check_same_documents(
    packed: list[int], cu_seqlens: Tensor | Sequence[int] | None, seqlen: int
) -> None:
    """Refuse boundaries that are not those of packed positions."""
    if cu_seqlens is None:
        return
    given = sorted({*_boundaries(cu_seqlens, seqlen)})
    if given != packed:
        raise ValueError(
            f"position_ids restart at {packed[:-1]}, but cu_seqlens has the boundaries {given}: "
            "pass only one of them"
        )


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
