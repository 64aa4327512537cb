"""Masks on the command line: causal, full, window:4k, chunked:8k, prefix:1k, docs:FILE."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from ring_attn.cli.arguments import format_size, parse_size, shortened
from ring_attn.values.outside import regular_file

if TYPE_CHECKING:
    from ring_attn.core.mask import Mask

# The names of masks, by the text after the colon: none, a size, or a file of lengths.
PLAIN = ("causal", "full")
SIZED = ("window", "chunked", "prefix")
FORMS = "causal, full, window:4k, chunked:8k, prefix:1k or docs:FILE"

# Most documents of a file, each of which becomes a slice of the mask.
MAX_DOCUMENTS = 1 << 16


@dataclass(frozen=True)
class MaskChoice:
    """A mask for a sequence of any length. All masks but "full" are causal.

    Attributes:
        kind: "causal", "full", "window", "chunked", "prefix" or "docs".
        size: keys before a query that it sees, positions of a chunk, or length of the prefix; 0 for
            the other kinds.
        lengths: lengths of documents, repeated until the sequence is full; empty for other kinds.
        source: the file of the documents; empty for other kinds.
    """

    kind: str
    size: int = 0
    lengths: tuple[int, ...] = ()
    source: str = ""

    def __str__(self) -> str:
        if self.kind == "docs":
            return f"docs:{self.source}"
        return f"{self.kind}:{format_size(self.size)}" if self.size else self.kind

    @property
    def causal(self) -> bool:
        return self.kind != "full"

    def cuts(self, seqlen: int) -> tuple[int, ...]:
        """Return the boundaries of the documents, from 0 to `seqlen`."""
        starts = takewhile(lambda start: start < seqlen, accumulate(cycle(self.lengths)))
        return (0, *starts, seqlen)

    def mask(self, seqlen: int) -> Mask:
        """Return the mask of `seqlen` queries and keys."""
        from ring_attn.core import masks  # needs torch
        from ring_attn.core.mask import Mask

        match self.kind:
            case "window":
                return masks.window(seqlen, min(self.size, seqlen))
            case "chunked":
                return masks.chunked(seqlen, self.size)
            case "prefix":
                return masks.prefix([min(self.size, seqlen)], [0, seqlen])
            case "docs":
                return masks.documents(self.cuts(seqlen), causal=True)
        return Mask(seqlen, seqlen, self.causal)

    def scaled(self, seqlen: int, rows: int) -> MaskChoice:
        """Return the mask for `rows` positions that looks like this one for `seqlen` positions."""
        if rows >= seqlen:
            return self
        size = max(1, self.size * rows // seqlen) if self.size else 0
        lengths = tuple(max(1, length * rows // seqlen) for length in self.lengths)
        return replace(self, size=size, lengths=lengths)


def parse_masks(text: str) -> tuple[MaskChoice, ...]:
    """Parse comma-separated masks: "causal,window:4k,docs:lengths.txt"."""
    return tuple(dict.fromkeys(parse_mask(part.strip()) for part in text.split(",")))


def parse_mask(text: str) -> MaskChoice:
    kind, colon, rest = text.partition(":")
    if kind in PLAIN and not colon:
        return MaskChoice(kind)
    if kind in SIZED and rest:
        return MaskChoice(kind, size=parse_size(rest))
    if kind == "docs" and rest:
        return MaskChoice(kind, lengths=read_lengths(rest), source=rest)
    raise argparse.ArgumentTypeError(f"{shortened(text)} is not a mask: pass {FORMS}")


def read_lengths(path: str) -> tuple[int, ...]:
    """Read the lengths of documents: sizes between spaces, commas or lines, or a list of JSON."""
    try:
        content = regular_file(Path(path)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise argparse.ArgumentTypeError(
            f"docs:{path} cannot be read ({why}): pass a file with the lengths of documents"
        ) from None
    words: Sequence[str] = content.replace(",", " ").split()
    if content.lstrip().startswith("["):
        words = _listed(path, content)
    if not 1 <= len(words) <= MAX_DOCUMENTS:
        raise argparse.ArgumentTypeError(
            f"docs:{path} has {len(words)} lengths: pass a file with 1 to {MAX_DOCUMENTS}, such as "
            "'8k 1k 300'"
        )
    try:
        return tuple(parse_size(word) for word in words)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"docs:{path}: {error}") from None


def _listed(path: str, content: str) -> Sequence[str]:
    """Return the entries of a list of JSON as texts."""
    try:
        return [str(entry) for entry in json.loads(content)]
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(
            f"docs:{path} is not a list of JSON ({error}): pass lengths such as [8192, 300]"
        ) from None
