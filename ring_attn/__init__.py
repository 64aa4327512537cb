"""Exact attention over a sequence that is split across ranks: a drop-in function for PyTorch.

The names in `__all__` are the front of the package. The rest stands where it belongs, and can be
imported from here too:

    ring_attn.api               select_backend, unshard
    ring_attn.core.layout       Segment, for SequenceLayout.from_segments
    ring_attn.decode            next_rank
    ring_attn.neighbours        halo
    ring_attn.connections       prepare
    ring_attn.profiling         stats, collect
    ring_attn.planning.balance  layouts from content: also ring_attn.balance
    ring_attn.models            tensor_parallel, sdpa, dtensors: shards of weights, modules
    ring_attn.integrations      transformers, trainer, ring_flash_attn, context_parallel
    ring_attn.testing           an oracle in float64, all ranks in one process
"""

from importlib import import_module
from typing import TYPE_CHECKING

# isort: off
from ring_attn.tools import interrupt

# Before torch, whose import takes seconds.
if interrupt.is_command():
    interrupt.install()
# isort: on

from ring_attn import profiling as profiling
from ring_attn.api import ring_attention, tree_decode
from ring_attn.api import select_backend as select_backend
from ring_attn.api import unshard as unshard
from ring_attn.connections import check
from ring_attn.connections import prepare as prepare
from ring_attn.core import masks as masks
from ring_attn.core.batch import shard_batch
from ring_attn.core.layout import Segment as Segment
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import TransportOptions
from ring_attn.decode import next_rank as next_rank
from ring_attn.models import tensor_parallel as tensor_parallel
from ring_attn.models.gradients import sync_gradients
from ring_attn.neighbours import halo as halo
from ring_attn.planning import balance as balance
from ring_attn.planning.placement import pack
from ring_attn.planning.planner import explain
from ring_attn.profiling import stats as stats
from ring_attn.strategies.strategy import Strategy
from ring_attn.transport.step import set_step

if TYPE_CHECKING:
    from ring_attn.models.style import ContextParallel, parallelize

__version__ = "0.1.0"

__all__ = [
    "ContextParallel",
    "Mask",
    "SequenceLayout",
    "Strategy",
    "TransportOptions",
    "check",
    "explain",
    "masks",
    "pack",
    "parallelize",
    "ring_attention",
    "set_step",
    "shard_batch",
    "sync_gradients",
    "tree_decode",
]


def __getattr__(name: str) -> object:
    """Imports, at their first use, what takes long or needs other packages."""
    if name in ("ContextParallel", "parallelize"):
        from ring_attn.models import style

        return getattr(style, name)
    if name in ("integrations", "testing"):
        return import_module(f"ring_attn.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
