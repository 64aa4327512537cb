"""Batches of a Trainer, converted to one sequence of documents, which is then sharded."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attn.integrations.transformers.masks import IGNORED, real_tokens, tokens_of
from ring_attn.integrations.transformers.untyped import Keywords, Value
from ring_attn.transport.ranks.identity import checksum

# Tensors (batch, rows, ...) to shard over the ranks.
ROWS = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids", "labels", "shift_labels")
CUTS = ("cu_seq_lens_q", "cu_seq_lens_k")
# Left out: attention and recurrent layers take the documents from `CUTS`.
DERIVED = ("max_length_q", "max_length_k", "seq_idx")


class Documents(NamedTuple):
    """A batch as one sequence, in which each row of the batch is a document.

    Attributes:
        rows: tensors to shard, (1, seqlen, ...): the batch's rows one after another, unpadded.
        others: the other keywords of the model; `CUTS` mark the boundaries of the rows.
        kept: (batch, columns) False for padding of the batch.
    """

    rows: dict[str, Tensor]
    others: dict[str, Value]
    kept: Tensor

    def batch(self, x: Tensor) -> Tensor:
        """Convert (1, seqlen, ...) to the rows of the batch, (batch, columns, ...).

        Padding is -100.
        """
        whole = x.new_full((*self.kept.shape, *x.shape[2:]), IGNORED)
        whole[self.kept] = x[0]
        return whole


def as_documents(inputs: Keywords) -> Documents:
    """Convert a batch to one sequence of documents; refuse tensors that cannot be sharded."""
    others = {name: x for name, x in inputs.items() if x is not None and name not in DERIVED}
    rows = {name: others.pop(name) for name in ROWS if name in others}
    tokens = tokens_of(rows)
    shape = tokens.shape[:2]  # (batch, columns)
    _check_shapes(rows, others, shape)
    if "shift_labels" in rows:
        rows.pop("labels", None)
    real = _real(others.pop("attention_mask", None), rows, shape)
    all_tokens = torch.ones(shape, dtype=torch.bool, device=tokens.device)
    if any(name in others for name in CUTS):
        if shape[0] != 1 or real is not None:
            hidden = "" if real is None else " and an attention_mask that hides some tokens"
            raise ValueError(
                f"a batch with cu_seq_lens_q must have one row without padding, got {shape[0]} "
                f"rows{hidden}: concatenate the rows without their padding"
            )
        return Documents(rows, others, kept=all_tokens)
    kept = all_tokens if real is None else real
    positions = rows.get("position_ids", kept.cumsum(1) - 1)
    # A document starts at the first column, and where positions do not continue.
    is_start = torch.ones_like(kept)
    is_start[:, 1:] = positions.diff(dim=1) != 1
    # The first token of each row; padding may be before it.
    is_first = kept & (kept.cumsum(1) == 1)
    is_start |= is_first
    starts = is_start[kept].nonzero().flatten()  # in the concatenated rows
    if len(starts) > 1:
        total = starts.new_tensor([int(kept.sum())])
        boundaries = torch.cat([starts, total]).int()
        others["cu_seq_lens_q"] = boundaries
        others["cu_seq_lens_k"] = boundaries
    if "position_ids" in rows or len(starts) > 1:
        rows["position_ids"] = positions.expand(shape)
    if "labels" in rows:
        # No token predicts the first token of a row.
        after_padding = is_first[:, 1:] & (rows["labels"][:, 1:] != IGNORED)
        if bool(after_padding.any()):
            raise ValueError(
                f"labels must be {IGNORED} at the first token of a row with padding before it, got "
                f"other labels in {int(after_padding.any(1).sum())} rows: only padding is before "
                "this token, so nothing predicts it"
            )
        rows["labels"] = rows["labels"].masked_fill(is_first, IGNORED)
    concatenated = {name: x[kept].unsqueeze(0) for name, x in rows.items()}  # (1, seqlen, ...)
    return Documents(concatenated, others, kept)


def _real(mask: Tensor | None, rows: Mapping[str, Tensor], shape: torch.Size) -> Tensor | None:
    """Return (batch, seqlen), False for padding at both ends of rows; None without padding."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.shape != shape:
        raise NotImplementedError(
            f"attention_mask must be {tuple(shape)}, like the tokens, got "
            f"{tuple(getattr(mask, 'shape', ()))}: other masks are not supported; mark documents "
            "with cu_seq_lens_q, or with position_ids that restart"
        )
    real = real_tokens(mask)
    if real is None:
        return None
    for name in ("labels", "shift_labels"):
        if name in rows and bool((rows[name][~real] != IGNORED).any()):
            raise ValueError(
                f"{name} must be {IGNORED} where attention_mask hides tokens, got other labels: "
                f"set them to {IGNORED}, because the loss would count padding"
            )
    return real


def _check_shapes(rows: Mapping[str, Tensor], others: Keywords, shape: torch.Size) -> None:
    """Refuse rows whose shape differs from the tokens' shape, and unknown tensors."""
    tokens = tuple(shape)
    for name, x in rows.items():
        allowed = {tokens, (1, tokens[1])} if name == "position_ids" else {tokens}
        got = tuple(getattr(x, "shape", ()))
        compared = got[:2] if name == "inputs_embeds" else got
        if compared not in allowed:
            raise ValueError(
                f"{name} must be {tokens}, like the tokens, got {got} (some collators make "
                "different shapes for samples without tokens: leave such samples out)"
            )
    for name, x in others.items():
        if isinstance(x, Tensor) and name not in {"attention_mask", *CUTS}:
            raise NotImplementedError(
                f"{name} of shape {tuple(x.shape)} is unknown: only {', '.join(ROWS)} are sharded; "
                "leave it out of the batch"
            )


def num_targets(batch: Keywords, shifts: bool) -> Tensor:
    """Return the number of labels that count; without the first of each row if `shifts`."""
    if isinstance(batch.get("shift_labels"), Tensor):
        labels = batch["shift_labels"]
    elif isinstance(batch.get("labels"), Tensor):
        labels = batch["labels"][:, 1:] if shifts else batch["labels"]
    else:
        raise ValueError(
            f"a batch needs labels, got {sorted(batch)}: use a collator that makes them, such as "
            "DataCollatorForLanguageModeling(tokenizer, mlm=False)"
        )
    return (labels != IGNORED).sum()


def fingerprint(batches: Sequence[Keywords], device: torch.device) -> Tensor:
    """Return an int64 hash of the names, shapes and values of all tensors in batches."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for batch in batches:
        for name, x in sorted(batch.items()):
            if isinstance(x, Tensor):
                header = zlib.crc32(f"{name} {tuple(x.shape)} {x.dtype}".encode())
                # An odd factor is invertible modulo 2^64, so no information is lost.
                total = (total + header + checksum(x.to(device))) * 0x9E3779B97F4A7C1
    return total
