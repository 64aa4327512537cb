"""Linear recurrences over split sequences, for layers and models of your own."""

from ring_attn.sequence.recurrence import (
    Part,
    Piece,
    causal_conv,
    linear_attention,
    recurrence,
)

__all__ = ["Part", "Piece", "causal_conv", "linear_attention", "recurrence"]
