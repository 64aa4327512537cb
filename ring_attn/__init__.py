"""Exact attention over a sequence that is split across ranks: a drop-in function for PyTorch."""

from ring_attn import balance
from ring_attn.api import ring_attention, select_backend, unshard
from ring_attn.decode import next_rank, tree_decode
from ring_attn.gradients import sync_gradients
from ring_attn.layout import SequenceLayout, shard_batch
from ring_attn.planning.planner import explain
from ring_attn.spec import TransportOptions
from ring_attn.strategy import Strategy

__version__ = "0.1.0"

__all__ = [
    "SequenceLayout",
    "Strategy",
    "TransportOptions",
    "__version__",
    "balance",
    "explain",
    "next_rank",
    "ring_attention",
    "select_backend",
    "shard_batch",
    "sync_gradients",
    "tree_decode",
    "unshard",
]
