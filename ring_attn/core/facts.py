"""Facts of a value: numbers, flags and names that are equal on two ranks iff the values are equal.

The facts of a layout are the positions that each rank holds, and the facts of a mask are its
slices. They do not depend on the constructors, or on the texts, which may be shortened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import product, zip_longest
from numbers import Integral, Real

import torch
from torch.nn.functional import pad

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask, Slice
from ring_attn.values.outside import Json

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


# The longest text of the facts of layouts and masks that ranks exchange after a difference.
MAX_DETAILS = 1 << 20


def details(values: Mapping[str, object]) -> str:
    """Return the facts of a call's layouts and mask as JSON, to find where they differ.

    Facts that are too long are left out.
    """
    known = {}
    for name in ("layout", "mask"):
        value = values.get(name)
        each = value if isinstance(value, tuple) else (value,)
        known[name] = [facts(x) for x in each if isinstance(x, (SequenceLayout, Mask))]
    text = json.dumps(known)
    return text if len(text) <= MAX_DETAILS else "{}"


def places_of_difference(of_ranks: Mapping[str, str]) -> dict[str, str]:
    """Return where layouts and masks first differ, by "layout" or "mask".

    `of_ranks` has the `details` of each rank, by the rank's name; the first rank is compared with
    the others.
    """
    parsed = {name: json.loads(text) for name, text in of_ranks.items()}
    first, *others = parsed
    places: dict[str, str] = {}
    for kind, other in product(("layout", "mask"), others):
        pairs = zip(parsed[first].get(kind, ()), parsed[other].get(kind, ()), strict=False)
        found = [_first_difference(kind, one, another) for one, another in pairs]
        where = next((text for text in found if text is not None), None)
        if where is not None and kind not in places:
            of_first, of_other = where
            places[kind] = f"{of_first} on {first}, {of_other} on {other}"
    return places


def _first_difference(kind: str, one: Json, other: Json) -> tuple[str, str] | None:
    """Return the first position or slice in which two layouts or masks differ, and its values."""
    if one == other:
        return None
    if kind == "mask":
        pairs = enumerate(zip_longest(one[2], other[2]))
        return next(
            ((f"slice {i} is {_shown_slice(a)}", _shown_slice(b)) for i, (a, b) in pairs if a != b),
            (f"{one[0]} queries and {one[1]} keys", f"{other[0]} and {other[1]}"),
        )
    holders, others = _holders(one), _holders(other)
    seqlen = max(holders.size(1), others.size(1))
    holders, others = (
        pad(each, (0, seqlen - each.size(1)), value=-1) for each in (holders, others)
    )
    position = int((holders != others).any(0).nonzero()[0])
    of_one, of_other = (_place(each[:, position].tolist()) for each in (holders, others))
    return f"position {position} is {of_one}", of_other


def _holders(layout: Json) -> torch.Tensor:
    """Return (2, seqlen): the rank that holds each position, and its row there."""
    ends = [start + (length - 1) * stride + 1 for runs in layout for start, length, stride in runs]
    holders = torch.full((2, max(ends, default=0)), -1)
    for rank, runs in enumerate(layout):
        row = 0
        for start, length, stride in runs:
            positions = slice(start, start + (length - 1) * stride + 1, stride)
            holders[0, positions] = rank
            holders[1, positions] = torch.arange(row, row + length)
            row += length
    return holders


def _place(place: Sequence[int]) -> str:
    rank, row = place
    return "on no rank" if rank < 0 else f"row {row} of the group's rank {rank}"


def _shown_slice(numbers: Json) -> str:
    return "missing" if numbers is None else str(Slice._make(numbers))


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
