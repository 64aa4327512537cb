"""Exact attention over a sequence that is split across ranks: a drop-in function for PyTorch."""

from typing import TYPE_CHECKING

# isort: off
from ring_attn.tools import interrupt

# Before torch, whose import takes seconds.
if interrupt.is_command():
    interrupt.install()
# isort: on

from ring_attn import profiling
from ring_attn.api import ring_attention, select_backend, tree_decode, unshard
from ring_attn.core.layout import SequenceLayout, shard_batch
from ring_attn.core.spec import TransportOptions
from ring_attn.core.strategy import Strategy
from ring_attn.decode import next_rank
from ring_attn.models import tensor_parallel
from ring_attn.models.gradients import sync_gradients
from ring_attn.planning import balance
from ring_attn.planning.planner import explain
from ring_attn.profiling import stats

if TYPE_CHECKING:
    from ring_attn.models.style import ContextParallel, parallelize

__version__ = "0.1.0"

__all__ = [
    "ContextParallel",
    "SequenceLayout",
    "Strategy",
    "TransportOptions",
    "__version__",
    "balance",
    "explain",
    "next_rank",
    "parallelize",
    "profiling",
    "ring_attention",
    "select_backend",
    "shard_batch",
    "stats",
    "sync_gradients",
    "tensor_parallel",
    "tree_decode",
    "unshard",
]


def __getattr__(name: str) -> object:
    """Those that need DTensor, whose import takes longer than all the rest."""
    if name in ("ContextParallel", "parallelize"):
        from ring_attn.models import style as parallel_style

        return getattr(parallel_style, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
