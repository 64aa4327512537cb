"""Exact attention over a sequence that is split across ranks: a drop-in function for PyTorch."""

from ring_attn.api import ring_attention, select_backend, unshard
from ring_attn.layout import SequenceLayout, shard_batch
from ring_attn.spec import TransportOptions

__version__ = "0.1.0"

__all__ = [
    "SequenceLayout",
    "TransportOptions",
    "__version__",
    "ring_attention",
    "select_backend",
    "shard_batch",
    "unshard",
]
