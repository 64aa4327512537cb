"""Values as facts: numbers, flags and names that are equal on two ranks exactly when values are.

A layout counts by the positions that each rank holds, and a mask by its slices, however they were
made and however their texts shorten them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from typing import Any

import torch

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask

# A call as a text and a digest of each of its arguments, by name.
Facts = dict[str, tuple[str, str]]

# Differing values are shown up to this many characters.
SHOWN = 300


def facts(value: object) -> Any:
    """The value as lists of None, bools, ints and texts, which JSON keeps as they are."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return (float(value) + 0.0).hex()  # -0.0 becomes 0.0
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, SequenceLayout):
        return [_runs(value, rank) for rank in range(value.world_size)]
    if isinstance(value, Mask):
        return [value.seqlen_q, value.seqlen_k, facts(value.slices)]
    if isinstance(value, (tuple, list)):
        return [facts(element) for element in value]
    if is_dataclass(value):
        return {f.name: facts(getattr(value, f.name)) for f in fields(value)}
    raise TypeError(f"ranks cannot compare a {type(value).__name__}: say what its facts are")


def digest(value: object) -> str:
    """A hash of a value's facts."""
    if isinstance(value, (SequenceLayout, Mask)):
        # Kept with the value, which many calls share.
        kept: dict[str, Any] = vars(value)
        if "_digest" not in kept:
            kept["_digest"] = _hashed(facts(value))
        return str(kept["_digest"])
    if isinstance(value, Mapping):
        return _hashed({name: digest(one) for name, one in value.items()})
    if isinstance(value, tuple):
        return _hashed([digest(element) for element in value])
    return _hashed(facts(value))


def shown(value: object) -> str:
    """The value as a text for people; long ones are cut."""
    if isinstance(value, SequenceLayout):
        text = str(value)
    elif isinstance(value, tuple) and any(isinstance(x, SequenceLayout) for x in value):
        text = str(tuple(str(x) for x in value))
    else:
        text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 20]}... ({len(text)} characters)"


def _runs(layout: SequenceLayout, rank: int) -> list[list[int]]:
    """Start, length and stride of the rank's runs, adjacent ones joined."""
    runs: list[list[int]] = []
    for s in layout.segments(rank):
        stride = s.stride if s.length > 1 else 1
        if runs and runs[-1][2] == stride == 1 and runs[-1][0] + runs[-1][1] == s.start:
            runs[-1][1] += s.length
        else:
            runs.append([s.start, s.length, stride])
    return runs


def _hashed(plain: Any) -> str:
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
