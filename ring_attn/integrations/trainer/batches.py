"""Batches of a Trainer as one sequence of documents, to be split over ranks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attn.integrations.transformers.masks import IGNORED, real_tokens, tokens_of
from ring_attn.transport.ranks.identity import checksum

# Tensors (batch, rows, ...) to split over the ranks.
ROWS = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids", "labels", "shift_labels")
CUTS = ("cu_seq_lens_q", "cu_seq_lens_k")
# Dropped: attention and recurrent layers take the documents from `CUTS`.
DERIVED = ("max_length_q", "max_length_k", "seq_idx")


class Documents(NamedTuple):
    """A batch as one sequence, whose rows are documents.

    Attributes:
        rows: tensors to split, (1, seqlen, ...): the batch's rows one after another, unpadded.
        others: the other keywords of the model; `CUTS` mark the boundaries of the rows.
        kept: (batch, columns) False for padding of the batch.
    """

    rows: dict[str, Tensor]
    others: dict[str, Any]
    kept: Tensor

    def batch(self, x: Tensor) -> Tensor:
        """(1, seqlen, ...) -> (batch, columns, ...), as the batch's rows were; padding is -100."""
        whole = x.new_full((*self.kept.shape, *x.shape[2:]), IGNORED)
        whole[self.kept] = x[0]
        return whole


def as_documents(inputs: Mapping[str, Any]) -> Documents:
    others = {name: x for name, x in inputs.items() if x is not None and name not in DERIVED}
    rows = {name: others.pop(name) for name in ROWS if name in others}
    shape, device = tokens_of(rows).shape[:2], tokens_of(rows).device
    _check_shapes(rows, others, shape)
    if "shift_labels" in rows:
        rows.pop("labels", None)
    real = _real(others.pop("attention_mask", None), rows, shape)
    if any(name in others for name in CUTS):
        if shape[0] != 1 or real is not None:
            raise ValueError(
                f"cu_seq_lens_q goes with one row without padding, got {shape[0]} rows"
                f"{'' if real is None else ' and an attention_mask that hides some'}"
            )
        return Documents(rows, others, torch.ones(shape, dtype=torch.bool, device=device))
    kept = torch.ones(shape, dtype=torch.bool, device=device) if real is None else real
    positions = rows.get("position_ids", kept.cumsum(1) - 1)
    starts = torch.ones_like(kept)
    starts[:, 1:] = positions.diff(dim=1) != 1
    begins = starts[kept].nonzero().flatten()
    if len(begins) > 1:
        total = begins.new_tensor([int(kept.sum())])
        others["cu_seq_lens_q"] = others["cu_seq_lens_k"] = torch.cat([begins, total]).int()
    if "position_ids" in rows or len(begins) > 1:
        rows["position_ids"] = positions.expand(shape)
    if "labels" in rows:  # nothing predicts the first token of a row
        rows["labels"] = rows["labels"].clone()
        rows["labels"][:, :1] = IGNORED
    return Documents({name: x[kept][None] for name, x in rows.items()}, others, kept)


def _real(mask: Tensor | None, rows: Mapping[str, Tensor], shape: torch.Size) -> Tensor | None:
    """(batch, seqlen), False for padding at the end of the rows; None without padding."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.shape != shape:
        raise NotImplementedError(
            f"attention_mask must be {tuple(shape)}, as the tokens, got "
            f"{tuple(getattr(mask, 'shape', ()))}: other masks are not built; mark documents by "
            "cu_seq_lens_q, or by position_ids that restart"
        )
    real = real_tokens(mask)
    if real is None:
        return None
    for name in ("labels", "shift_labels"):
        if name in rows and bool((rows[name][~real] != IGNORED).any()):
            raise ValueError(
                f"{name} must be {IGNORED} where attention_mask hides tokens: the loss would count "
                "padding"
            )
    return real


def _check_shapes(rows: Mapping[str, Any], others: Mapping[str, Any], shape: torch.Size) -> None:
    """Refuses rows whose shape differs from the tokens', and unknown tensors."""
    tokens = tuple(shape)
    for name, x in rows.items():
        allowed = {tokens, (1, tokens[1])} if name == "position_ids" else {tokens}
        got = tuple(getattr(x, "shape", ()))
        if (got[:2] if name == "inputs_embeds" else got) not in allowed:
            raise ValueError(
                f"{name} must be {tokens}, as the tokens, got {got} (some collators make unlike "
                "shapes of samples without tokens: leave such samples out)"
            )
    for name, x in others.items():
        if isinstance(x, Tensor) and name not in {"attention_mask", *CUTS}:
            raise NotImplementedError(
                f"{name} of shape {tuple(x.shape)} is not known: only {', '.join(ROWS)} are split; "
                "leave it out of the batch"
            )


def num_targets(batch: Mapping[str, Any]) -> Tensor:
    """Number of predicted labels: all that count, except the first of each row."""
    if isinstance(batch.get("shift_labels"), Tensor):
        labels = batch["shift_labels"]
    elif isinstance(batch.get("labels"), Tensor):
        labels = batch["labels"][:, 1:]
    else:
        raise ValueError(
            f"a batch needs labels, got {sorted(batch)}: a collator such as "
            "DataCollatorForLanguageModeling(tokenizer, mlm=False) makes them"
        )
    return (labels != IGNORED).sum()


def fingerprint(batches: Sequence[Mapping[str, Any]], device: torch.device) -> Tensor:
    """An int64 hash of the names, shapes and values of all tensors in batches."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for batch in batches:
        for name, x in sorted(batch.items()):
            if isinstance(x, Tensor):
                about = zlib.crc32(f"{name} {tuple(x.shape)} {x.dtype}".encode())
                # An odd factor is invertible modulo 2^64, so it loses nothing.
                total = (total + about + checksum(x.to(device))) * 0x9E3779B97F4A7C1
    return total
