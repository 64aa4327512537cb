"""Exact attention over a sequence that is split across ranks: a drop-in function for PyTorch.

`dir(ring_attn)` is the public names. Modules of their own have the names of other packages
(`ring_attn.integrations`), shards of weights (`tensor_parallel`), layouts from content (`balance`),
and an oracle in float64 with all ranks in one process (`testing`).
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ring_attn import profiling, recurrence
from ring_attn.api import ring_attention, select_backend, tree_decode
from ring_attn.attention.connections import check, prepare
from ring_attn.core import masks
from ring_attn.core.cache import next_rank
from ring_attn.core.joint import JointLayout
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.segments import Segment
from ring_attn.core.strategy import Strategy
from ring_attn.models import tensor_parallel
from ring_attn.models.batch import shard_batch, unshard
from ring_attn.models.gradients import sync_gradients
from ring_attn.models.logprobs import token_logprobs
from ring_attn.models.pooling import pool
from ring_attn.planning import balance
from ring_attn.planning.placement import pack
from ring_attn.planning.planner import explain
from ring_attn.profiling import stats
from ring_attn.sequence.halo import halo, roll
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.ranks.identity import set_step
from ring_attn.version import __version__ as __version__

if TYPE_CHECKING:
    from ring_attn import integrations, plots, testing
    from ring_attn.models.parallelize import parallelize
    from ring_attn.models.recurrent import RecurrentParallel, register_recurrence
    from ring_attn.models.style import ContextParallel
    from ring_attn.testing.audit import audit

__all__ = [
    "ContextParallel",
    "JointLayout",
    "Mask",
    "RecurrentParallel",
    "Segment",
    "SequenceLayout",
    "Strategy",
    "TransportOptions",
    "audit",
    "balance",
    "check",
    "explain",
    "halo",
    "integrations",
    "masks",
    "next_rank",
    "pack",
    "parallelize",
    "plots",
    "pool",
    "prepare",
    "profiling",
    "recurrence",
    "register_recurrence",
    "ring_attention",
    "roll",
    "select_backend",
    "set_step",
    "shard_batch",
    "stats",
    "sync_gradients",
    "tensor_parallel",
    "testing",
    "token_logprobs",
    "tree_decode",
    "unshard",
]


_LATE = {
    "ContextParallel": "models.style",
    "RecurrentParallel": "models.recurrent",
    "audit": "testing.audit",
    "parallelize": "models.parallelize",
    "register_recurrence": "models.recurrent",
}

if not TYPE_CHECKING:  # a type checker would take every name for an object

    def __getattr__(name: str) -> object:
        """Imports, at their first use, what takes long or needs other packages."""
        if name in _LATE:
            return getattr(import_module(f"ring_attn.{_LATE[name]}"), name)
        if name in ("integrations", "plots", "testing"):
            return import_module(f"ring_attn.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
