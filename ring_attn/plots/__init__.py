"""Pictures of layouts, masks, tiles, rings, plans and measurements, by matplotlib.

Each function takes plain data of the package and returns a `matplotlib.figure.Figure`, light or
dark; `save` writes it as SVG or PNG. matplotlib is an extra: `pip install 'ring-attn[plot]'`.

    layouts      which rank holds which positions
    mask, masks  which keys each query sees
    tiles        what each rank computes in each step of a ring
    ring         whose keys and values each rank has in each step
    timeline     what a rank does when
    memory       what a rank holds when
    strategies   the time of each strategy of a plan
    scaling      costs against the number of ranks, or the length
    bench        measured times
"""

from ring_attn.plots.benches import bench
from ring_attn.plots.plans import moments_of, plan, scaling, strategies, timelines_of
from ring_attn.plots.positions import layouts, mask, masks, tiles
from ring_attn.plots.rings import ring
from ring_attn.plots.runs import memory, timeline
from ring_attn.plots.style import save

__all__ = [
    "bench",
    "layouts",
    "mask",
    "masks",
    "memory",
    "moments_of",
    "plan",
    "ring",
    "save",
    "scaling",
    "strategies",
    "tiles",
    "timeline",
    "timelines_of",
]
