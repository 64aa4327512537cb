"""The boundaries of whole sequences, for the calls that get only a rank's part of them.

`llama3_flash_attn_prepare_cu_seqlens` remembers them here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Boundaries = tuple[int, ...]

# Results of `llama3_flash_attn_prepare_cu_seqlens`, with the boundaries of the whole sequence, by
# the tensor of the queries' documents: other sequences can have the same values on this rank.
_prepared: MutableMapping[Tensor, tuple[Hashable, Boundaries]] = WeakTensorKeyDictionary()

# The same by value, the newest last, for copies of these tensors: all boundaries that fit, up to 2.
_prepared_values: OrderedDict[Hashable, tuple[Boundaries, ...]] = OrderedDict()
MAX_PREPARED_VALUES = 4096


def remember(cu_q: Tensor, prepared: Hashable, boundaries: Boundaries) -> None:
    """Keep the boundaries of the whole sequence, for the call that gets the rank's arguments."""
    _prepared[cu_q] = prepared, boundaries
    known = _prepared_values.get(prepared, ())
    if boundaries not in known:
        # Two are enough to know that the values fit several sequences.
        _prepared_values[prepared] = (*known[:1], boundaries)
    _prepared_values.move_to_end(prepared)
    if len(_prepared_values) > MAX_PREPARED_VALUES:
        _prepared_values.popitem(last=False)


def all_documents(given: Hashable, cu_q: Tensor) -> Tensor:
    """Return the global boundaries of all non-empty documents, from this rank's arguments.

    Nothing is sent: if ranks exchanged boundaries for new arguments only, they would wait for ranks
    that know their arguments already. The call itself compares the boundaries of all ranks.
    """
    prepared, boundaries = _prepared.get(cu_q, (None, ()))
    if prepared != given:
        of_values = _prepared_values.get(given, ())
        if len(of_values) != 1:
            problem = "fit several sequences" if of_values else "are not its results"
            raise ValueError(
                "cu_seqlens_q, cu_seqlens_k and local_k_slice must be the results of ring_attn's "
                "llama3_flash_attn_prepare_cu_seqlens for this rank, world size and causal, got "
                f"values that {problem}: {given}; pass the tensors that it returned"
            )
        (boundaries,) = of_values
    return torch.tensor(sorted({*boundaries}))
