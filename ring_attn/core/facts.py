"""Facts of a value: numbers, flags and names that are equal on two ranks iff the values are equal.

The facts of a layout are the positions that each rank holds, and the facts of a mask are its
slices. They do not depend on the constructors, or on the texts, which may be shortened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from numbers import Integral, Real

import torch

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask

# The values that JSON keeps as they are.
Plain = None | bool | int | str | Sequence["Plain"] | Mapping[str, "Plain"]

# A text and a digest of each argument of a call, by name.
Facts = dict[str, tuple[str, str]]

# Differing values are shown up to this many characters.
SHOWN = 300


def facts(value: object) -> Plain:
    """Return the facts of a value.

    Raises:
        TypeError: the value has a type of which no facts are known.
    """
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
    raise TypeError(
        f"{type(value).__name__} cannot be compared across ranks: pass numbers, texts, layouts, "
        "masks, or dataclasses of these"
    )


def digest(value: object) -> str:
    """Return a hash of a value's facts."""
    if isinstance(value, (SequenceLayout, Mask)):
        # Stored with the value, which many calls share.
        attributes = vars(value)
        if "_digest" not in attributes:
            attributes["_digest"] = _hashed(facts(value))
        return str(attributes["_digest"])
    if isinstance(value, Mapping):
        return _hashed({name: digest(one) for name, one in value.items()})
    if isinstance(value, tuple):
        return _hashed([digest(element) for element in value])
    return _hashed(facts(value))


def shown(value: object) -> str:
    """Return the value as a text for messages; a long text is cut."""
    if isinstance(value, SequenceLayout):
        text = str(value)
    elif isinstance(value, tuple) and any(isinstance(x, SequenceLayout) for x in value):
        text = str(tuple(str(x) for x in value))
    else:
        text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 20]}... ({len(text)} characters)"


def _runs(layout: SequenceLayout, rank: int) -> list[list[int]]:
    """Return (start, length, stride) of the rank's runs, with adjacent runs joined."""
    runs: list[list[int]] = []
    for s in layout.segments(rank):
        stride = s.stride if s.length > 1 else 1
        if runs and runs[-1][2] == stride == 1 and runs[-1][0] + runs[-1][1] == s.start:
            runs[-1][1] += s.length
        else:
            runs.append([s.start, s.length, stride])
    return runs


def _hashed(plain: Plain) -> str:
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
