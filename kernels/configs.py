"""Tile sizes, warps and stages of the kernels, frozen per architecture, head dim and kernel.

Nothing is tuned at run time by default: ranks that timed their kernels apart could pick apart. What
`ring-attn tune` has found on a GPU is used by way of a file: see `tuned.py`. With
RING_ATTN_AUTOTUNE=1 the candidates are timed at the first call of each kind, once a process, and
the fastest is taken; ranks may then differ in their last bits.

A forward config serves full and masked tiles alike: with one BLOCK_N on and off the diagonal, a
ring's sums are those of a single pass. The kinds are

    fwd     fwd_whole                      out and lse
    dkdv    dkdv_whole    dkdv_softcap     dk and dv
    dq      dq_whole      dq_softcap       dq
    delta                                  rowsum(out * dout)
    gluon                                  out and lse, where `takes_gluon`
    gluon_bwd                              dq, dk and dv, where `takes_gluon_bwd`

where the others of a line fall back to its first: steps without a mask or a ragged end need fewer
registers, and softcap's tanh more.

Notes give registers a thread and shared memory as compiled for bfloat16 with triton 3.7.1, for the
variant that takes most. What a 16-bit config spills is said, and of 3.6.0 and 3.9.0 what was seen.
"not measured" says that no GPU has timed it yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from .gluon_guard import gluon_missing

if TYPE_CHECKING:
    from .launch import Launch


@dataclass(frozen=True)
class Config:
    """Tiling of a kernel.

    Attributes:
        BLOCK_M: q rows of a tile.
        BLOCK_N: kv rows of a tile.
        num_warps: warps of a program.
        num_stages: depth of the pipeline of loads.
        note: where the choice comes from.
        l2_bytes: heads are done in groups whose columns take no more than this; 0 is all at once.
        programs_per_sm: of the forward in Gluon, whose programs do several tasks; 0 is a program
            for each task, as all other kernels have.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    note: str = ""
    l2_bytes: int = 0
    programs_per_sm: int = 0


# Compute capability -> the architecture of the table. All others take sm_86, which stands for GPUs
# with 99 KiB of shared memory a program: sm_86, sm_89, sm_120. sm_80 and sm_87 have 163 KiB, sm_90
# and sm_100 227.
CAPABILITIES = {
    (8, 0): "sm_80",
    (8, 7): "sm_80",
    (9, 0): "sm_90",
    (10, 0): "sm_100",
    (10, 3): "sm_100",
}
ARCHITECTURES = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942")

TABLE: dict[tuple[str, str, int], Config] = {
    ("sm_80", "fwd", 64): Config(128, 128, 8, 3, "255 regs, 115 KB; not measured"),
    ("sm_80", "fwd", 128): Config(128, 64, 8, 3, "245 regs, 115 KB; not measured"),
    ("sm_80", "fwd", 256): Config(64, 64, 8, 2, "255 regs, 107 KB; not measured"),
    ("sm_80", "dkdv", 64): Config(32, 128, 8, 2, "255 regs, 49 KB; not measured"),
    ("sm_80", "dkdv", 128): Config(64, 64, 8, 2, "246 regs, 74 KB; not measured"),
    ("sm_80", "dkdv", 256): Config(32, 64, 8, 2, "255 regs, 103 KB; not measured"),
    ("sm_80", "dkdv_softcap", 256): Config(16, 64, 8, 2, "255 regs, 84 KB; not measured"),
    ("sm_80", "dq", 64): Config(
        64, 64, 8, 2, "255 regs, 41 KB; 8 bytes spilled outside the loop by 3.9.0; not measured"
    ),
    ("sm_80", "dq_softcap", 64): Config(64, 64, 8, 1, "238 regs, 29 KB; not measured"),
    ("sm_80", "dq", 128): Config(64, 64, 8, 2, "193 regs, 74 KB; not measured"),
    ("sm_80", "dq", 256): Config(64, 64, 8, 1, "252 regs, 131 KB; not measured"),
    ("sm_80", "decode", 64): Config(16, 64, 4, 3, "128 regs, 37 KB; not measured"),
    ("sm_80", "decode", 128): Config(16, 64, 4, 3, "168 regs, 72 KB; not measured"),
    ("sm_80", "decode", 256): Config(16, 32, 4, 3, "168 regs, 75 KB; not measured"),
    ("sm_86", "fwd", 64): Config(128, 64, 8, 3, "218 regs, 66 KB; not measured"),
    ("sm_86", "fwd", 128): Config(128, 64, 8, 2, "236 regs, 82 KB; not measured"),
    ("sm_86", "fwd", 256): Config(64, 64, 8, 1, "230 regs, 74 KB; not measured"),
    ("sm_86", "dkdv", 64): Config(32, 128, 8, 2, "251 regs, 49 KB; not measured"),
    ("sm_86", "dkdv", 128): Config(64, 64, 8, 2, "242 regs, 74 KB; not measured"),
    ("sm_86", "dkdv", 256): Config(16, 64, 8, 2, "254 regs, 84 KB; not measured"),
    ("sm_86", "dq", 64): Config(64, 32, 8, 2, "201 regs, 29 KB; not measured"),
    ("sm_86", "dq", 128): Config(64, 64, 8, 2, "165 regs, 74 KB; not measured"),
    ("sm_86", "dq", 256): Config(64, 32, 8, 1, "223 regs, 98 KB; not measured"),
    ("sm_86", "decode", 64): Config(16, 64, 4, 2, "118 regs, 20 KB; not measured"),
    ("sm_86", "decode", 128): Config(16, 64, 8, 2, "98 regs, 39 KB; not measured"),
    ("sm_86", "decode", 256): Config(16, 32, 4, 2, "168 regs, 42 KB; not measured"),
    ("sm_90", "fwd", 64): Config(128, 128, 8, 3, "242 regs, 115 KB; not measured"),
    # By 3.6.0 spills 40 bytes with softcap, by 3.9.0 48 without a mask, outside the loop.
    ("sm_90", "fwd", 128): Config(128, 128, 8, 3, "255 regs, 229 KB; not measured"),
    ("sm_90", "fwd", 256): Config(128, 32, 8, 3, "237 regs, 164 KB; not measured"),
    ("sm_90", "dkdv", 64): Config(64, 128, 8, 3, "229 regs, 83 KB; not measured"),
    ("sm_90", "dkdv", 128): Config(
        64, 128, 8, 3, "254 regs, 165 KB; 96 bytes spilled in windows by 3.6.0; not measured"
    ),
    ("sm_90", "dkdv", 256): Config(16, 64, 8, 2, "245 regs, 103 KB; not measured"),
    ("sm_90", "dkdv_softcap", 128): Config(32, 128, 8, 3, "227 regs, 115 KB; not measured"),
    ("sm_90", "dq", 64): Config(128, 128, 8, 3, "244 regs, 131 KB; not measured"),
    ("sm_90", "dq", 128): Config(128, 64, 8, 3, "218 regs, 164 KB; not measured"),
    ("sm_90", "dq", 256): Config(128, 32, 8, 2, "255 regs, 197 KB; not measured"),
    ("sm_90", "dq_softcap", 64): Config(128, 64, 8, 3, "180 regs, 82 KB; not measured"),
    ("sm_90", "decode", 64): Config(16, 64, 4, 3, "128 regs, 37 KB; not measured"),
    ("sm_90", "decode", 128): Config(16, 64, 4, 3, "168 regs, 72 KB; not measured"),
    ("sm_90", "decode", 256): Config(16, 32, 4, 3, "168 regs, 75 KB; not measured"),
    ("sm_100", "fwd", 64): Config(128, 64, 8, 2, "185 regs, 50 KB; not measured"),
    ("sm_100", "fwd", 128): Config(128, 64, 8, 3, "246 regs, 139 KB; not measured"),
    ("sm_100", "fwd", 256): Config(64, 32, 4, 1, "248 regs, 49 KB; not measured"),
    ("sm_100", "fwd_whole", 64): Config(128, 64, 8, 1, "75 regs, 29 KB; not measured"),
    ("sm_100", "dkdv", 64): Config(64, 128, 8, 1, "241 regs, 49 KB; not measured"),
    ("sm_100", "dkdv", 128): Config(64, 64, 8, 2, "242 regs, 132 KB; not measured"),
    ("sm_100", "dkdv", 256): Config(16, 64, 8, 1, "255 regs, 82 KB; not measured"),
    ("sm_100", "dkdv_softcap", 128): Config(64, 64, 8, 1, "150 regs, 66 KB; not measured"),
    # With two stages triton 3.7.1 leaves proxy fences out of dq.
    ("sm_100", "dq", 64): Config(128, 64, 8, 1, "162 regs, 49 KB; not measured"),
    ("sm_100", "dq", 128): Config(128, 64, 8, 1, "174 regs, 98 KB; not measured"),
    ("sm_100", "dq", 256): Config(64, 32, 8, 1, "197 regs, 98 KB; not measured"),
    ("sm_100", "decode", 64): Config(16, 64, 4, 3, "113 regs, 37 KB; not measured"),
    ("sm_100", "decode", 128): Config(16, 64, 4, 3, "181 regs, 72 KB; not measured"),
    ("sm_100", "decode", 256): Config(16, 32, 4, 3, "176 regs, 75 KB; not measured"),
    # Vector registers on AMD, of 512.
    ("gfx942", "fwd", 64): Config(128, 64, 4, 1, "203 regs, 33 KB; not measured"),
    ("gfx942", "fwd", 128): Config(128, 64, 4, 1, "284 regs, 66 KB; not measured"),
    ("gfx942", "fwd", 256): Config(64, 32, 4, 1, "268 regs, 66 KB; not measured"),
    ("gfx942", "dkdv", 64): Config(64, 64, 4, 1, "278 regs, 16 KB; not measured"),
    ("gfx942", "dkdv", 128): Config(32, 64, 4, 1, "284 regs, 33 KB; not measured"),
    ("gfx942", "dkdv", 256): Config(16, 64, 4, 1, "311 regs, 66 KB; not measured"),
    ("gfx942", "dq", 64): Config(64, 64, 4, 1, "231 regs, 16 KB; not measured"),
    ("gfx942", "dq", 128): Config(64, 64, 4, 1, "334 regs, 33 KB; not measured"),
    ("gfx942", "dq", 256): Config(32, 32, 4, 1, "402 regs, 33 KB; not measured"),
    ("gfx942", "decode", 64): Config(16, 64, 4, 2, "93 regs, 18 KB; not measured"),
    ("gfx942", "decode", 128): Config(16, 64, 4, 2, "128 regs, 35 KB; not measured"),
    ("gfx942", "decode", 256): Config(16, 32, 4, 2, "156 regs, 33 KB; not measured"),
}

# float32 has no tensor cores in ieee precision: its products are unrolled into registers, so that
# only small tiles fit. For every architecture and kernel.
FLOAT32 = {
    64: Config(32, 32, 8, 1, "128 regs, 37 KB; not measured"),
    128: Config(16, 16, 8, 1, "189 regs, 34 KB; not measured"),
    256: Config(16, 16, 8, 1, "255 regs and 240 bytes spilled, 68 KB; not measured"),
}

# Configs of dk and dv for launches with fewer programs than multiprocessors. They have half the kv
# rows and half the warps: twice as many programs, each of the same instructions a warp. The q rows
# are the same, and with them the bits.
FEW: dict[tuple[str, int], Config] = {
    ("sm_80", 64): Config(32, 64, 4, 2, "253 regs, 25 KB; not measured"),
    ("sm_80", 128): Config(64, 32, 4, 2, "255 regs, 54 KB; not measured"),
    ("sm_90", 64): Config(64, 64, 4, 3, "228 regs, 67 KB; not measured"),
    ("sm_90", 128): Config(
        64, 64, 4, 2, "255 regs, 99 KB; 16 to 20 bytes spilled outside the loop; not measured"
    ),
    ("sm_100", 64): Config(64, 64, 4, 1, "255 regs, 33 KB; not measured"),
}

# K and V of the heads that a persistent grid computes together: the share of the 50 MB of L2 of
# sm_90 that q, out and the state leave.
L2_BYTES = 32 << 20


def _persistent(block_m: int, block_n: int, num_stages: int, note: str) -> Config:
    return Config(block_m, block_n, 4, num_stages, note, l2_bytes=L2_BYTES, programs_per_sm=1)


# The forward of sm_90 in 16 bits is that of `hopper_fwd`, by head dim: the first config, chosen by
# its structure, and others for a search. Notes give registers a thread, first all alike and then a
# consumer's (232 of 240 where ragged), and shared memory. With triton 3.7.1 nothing spills.
GLUON: dict[int, tuple[Config, ...]] = {
    # Registers leave room for one program: more stages cost nothing, and 4 are counted by a mask.
    # With 128 x 128 triton 3.9.0 spills 28 bytes where ragged.
    64: (
        _persistent(128, 128, 4, "168, then 240 regs, 148 KB; not measured"),
        _persistent(192, 64, 2, "128, then 160 regs, 58 KB; not measured"),
        _persistent(128, 128, 2, "168, then 240 regs, 82 KB; not measured"),
    ),
    # A block's products take 2048 clocks: two stages are ahead of a copy by more than its latency.
    128: (
        _persistent(128, 128, 2, "168, then 240 regs, 164 KB; not measured"),
        _persistent(128, 128, 3, "168, then 240 regs, 230 KB; not measured"),
        _persistent(128, 64, 4, "168, then 240 regs, 164 KB; not measured"),
    ),
    # 64 columns spill 60 bytes where ragged.
    256: (_persistent(128, 32, 3, "168, then 240 regs, 164 KB; not measured"),),
}

# The backward of sm_90 in 16 bits is that of `hopper_bwd`, by head dim. With 64 dims a visit has
# 128 rows of q: with 64, by bytes of shared memory, copies of dQ would take longer than products.
# Consumers have 232 registers; see `aot.ADDRESSES` for what spills.
GLUON_BWD: dict[int, Config] = {
    64: Config(128, 128, 4, 2, "232 regs, 203 KB; not measured", l2_bytes=L2_BYTES),
    128: Config(64, 128, 4, 2, "232 regs, 202 KB; not measured", l2_bytes=L2_BYTES),
}

# Kinds that differ in the mask alone fold over blocks of one length, of kv rows or of q rows: else
# a ring would not have the bits of a single pass.
FOLDED = {"fwd": "BLOCK_N", "dkdv": "BLOCK_M", "dq": "BLOCK_N"}

# Head dims of the table; others take the next one.
BUCKETS = (64, 128, 256)

# Configs that a search tries beside the frozen ones; a device skips those that do not fit it.
TILES: dict[str, tuple[Config, ...]] = {
    "fwd": (
        Config(128, 128, 8, 2),
        Config(128, 128, 8, 3),
        Config(128, 64, 8, 2),
        Config(128, 64, 8, 3),
        Config(64, 64, 4, 2),
        Config(64, 64, 4, 3),
        Config(128, 64, 4, 1),
        Config(64, 32, 4, 1),
    ),
    "dkdv": (
        Config(64, 128, 8, 2),
        Config(64, 128, 8, 3),
        Config(32, 128, 8, 2),
        Config(64, 64, 8, 2),
        Config(64, 64, 4, 2),
        Config(32, 64, 4, 2),
        Config(32, 64, 8, 2),
    ),
    "dq": (
        Config(128, 128, 8, 2),
        Config(128, 64, 8, 2),
        Config(128, 64, 8, 3),
        Config(64, 128, 8, 2),
        Config(64, 64, 8, 2),
        Config(64, 64, 4, 2),
        Config(64, 32, 4, 1),
    ),
    "decode": (
        Config(16, 128, 4, 3),
        Config(16, 128, 8, 3),
        Config(16, 64, 4, 4),
        Config(16, 64, 4, 2),
        Config(16, 64, 8, 3),
        Config(16, 32, 4, 4),
        Config(16, 32, 2, 4),
    ),
}

# The same for sm_90, the most promising first. Of those with 4 warps two programs run at once on a
# multiprocessor, one's softmax beside the other's products.
HOPPER_TILES: dict[tuple[str, int], tuple[Config, ...]] = {
    ("fwd", 64): (
        Config(128, 64, 4, 2),
        Config(64, 64, 4, 2),
        Config(64, 128, 4, 2),
        Config(128, 64, 4, 3),
        Config(128, 128, 8, 2),
    ),
    ("fwd", 128): (
        Config(64, 64, 4, 2),
        Config(128, 32, 4, 2),
        Config(128, 128, 8, 2),
        Config(128, 64, 8, 3),
        Config(64, 64, 4, 1),
    ),
    ("fwd", 256): (
        Config(64, 16, 4, 2),
        Config(64, 32, 4, 2),
        Config(128, 64, 8, 2),
    ),
    ("dkdv", 64): (
        Config(64, 64, 4, 2),
        Config(128, 128, 8, 2),
        Config(32, 128, 4, 2),
        Config(64, 128, 8, 2),
    ),
    ("dkdv", 128): (
        Config(32, 64, 4, 2),
        Config(64, 128, 8, 2),
        Config(64, 64, 4, 2),
        Config(64, 64, 8, 2),
        Config(32, 128, 8, 2),
    ),
    ("dkdv", 256): (
        Config(32, 32, 4, 1),
        Config(16, 32, 4, 2),
    ),
    ("dq", 64): (
        Config(64, 64, 4, 2),
        Config(64, 128, 4, 2),
        Config(128, 64, 8, 2),
    ),
    ("dq", 128): (
        Config(64, 64, 4, 2),
        Config(128, 128, 8, 2),
        Config(128, 64, 8, 2),
        Config(64, 32, 4, 2),
    ),
    ("dq", 256): (
        Config(64, 16, 4, 2),
        Config(32, 32, 4, 2),
    ),
}

SEARCHED: dict[tuple[str, str, int], tuple[Config, ...]] = {
    (arch, kernel, size): HOPPER_TILES.get((kernel, size), tiles) if arch == "sm_90" else tiles
    for arch in ARCHITECTURES
    for kernel, tiles in TILES.items()
    for size in BUCKETS
}

# On sm_90 the frozen config and the tiles behind it, so many in all, are tried in other orders of
# their tasks, too: in groups of heads whose columns take so much of the 50 MB of L2 cache, which
# holds rows and results besides.
REORDERED = 3

# One pass over memory: as many rows as keep a few loads of 16 bytes in flight for every thread.
DELTA = Config(32, 0, 4, 1, "bound by memory")

# Large enough that the interpreter's cost per block is spread, small enough for short tests.
INTERPRETER = Config(64, 64, 4, 1, "interpreter")

_searched: dict[tuple[object, ...], Config] = {}


def select(kind: str, x: Tensor, headdim_v: int) -> Config:
    """The frozen config of a kernel.

    Args:
        kind: "fwd", "fwd_whole", "gluon", "gluon_bwd", "dkdv", "dkdv_softcap", "dq", "dq_softcap",
            "delta" or "decode".
        x: a tensor of the call: its device, dtype and head dim count.
        headdim_v: of v.
    """
    headdim = max(x.size(-1), headdim_v)
    return frozen(kind, architecture(x.device), headdim, x.dtype)


def frozen(kind: str, arch: str, headdim: int, dtype: torch.dtype) -> Config:
    """`select` from plain data; `arch` is one of ARCHITECTURES or "interpreter"."""
    if arch == "interpreter":
        return INTERPRETER
    if kind == "delta":
        return DELTA
    size = bucket(headdim)
    if kind == "gluon":
        return GLUON[size][0]
    if kind == "gluon_bwd":
        return GLUON_BWD[size]
    if dtype == torch.float32:
        return FLOAT32[size]
    return TABLE.get((arch, kind, size)) or TABLE[arch, _base(kind), size]


def filling(config: Config, programs: int, sms: int, few: Config | None) -> Config:
    """The config of dk and dv, or `few` where that leaves multiprocessors without a program.

    Args:
        config: of launches with many programs.
        programs: of this launch with it.
        sms: multiprocessors.
        few: of `FEW`; not taken if its sums fold over other blocks of q rows.
    """
    if few is None or programs >= sms or few.BLOCK_M != config.BLOCK_M:
        return config
    return few if few.BLOCK_N < config.BLOCK_N else config


def few_programs(x: Tensor, headdim_v: int) -> Config | None:
    """The entry of `FEW` for tensors like x."""
    if x.dtype == torch.float32:
        return None
    return FEW.get((architecture(x.device), bucket(max(x.size(-1), headdim_v))))


def takes_gluon(x: Tensor, headdim_v: int) -> bool:
    """Whether calls have the forward in Gluon; see `GLUON`.

    What decides is the same at every step, on every rank and at every world size: where the two
    kernels fold blocks of other lengths, a call with both would have other bits than one rank.
    """
    return (
        x.dtype in (torch.float16, torch.bfloat16)
        and {x.size(-1), headdim_v} <= GLUON.keys()
        and architecture(x.device) == "sm_90"
        and gluon_missing() is None
    )


def takes_gluon_bwd(x: Tensor, headdim_v: int, softcap: float) -> bool:
    """Whether calls have the backward in Gluon; the same at every step, as `takes_gluon`.

    With softcap its registers would not do.
    """
    alike = x.size(-1) == headdim_v and x.size(-1) in GLUON_BWD
    return alike and not softcap and takes_gluon(x, headdim_v)


def name_backward(kinds: Iterable[str]) -> bool:
    """Whether some of the kinds are the portable backward's."""
    return any(_base(kind) in ("dq", "dkdv") for kind in kinds)


def search_space(kind: str, arch: str, headdim: int, dtype: torch.dtype) -> tuple[Config, ...]:
    """The configs that `search` tries: the frozen one, and others that may suit the device.

    On sm_90, but for decoding, in the order of what they promise: another tile can be worth a
    quarter; groups of heads less, and only where the columns of all do not fit into the L2 cache.
    """
    if kind == "gluon":
        return GLUON[bucket(headdim)]
    if kind == "gluon_bwd":
        return (GLUON_BWD[bucket(headdim)],)
    first = frozen(kind, arch, headdim, dtype)
    found = SEARCHED.get((arch, _base(kind), bucket(headdim)))
    if dtype == torch.float32 or found is None:
        return (first,)
    tiles = _distinct(first, *found)
    if arch != "sm_90" or kind == "decode":
        return tiles
    return (*tiles, *(replace(x, note="", l2_bytes=L2_BYTES) for x in tiles[:REORDERED]))


def autotune_enabled() -> bool:
    """Whether RING_ATTN_AUTOTUNE=1 is set."""
    return os.environ.get("RING_ATTN_AUTOTUNE") == "1"


def search(
    kind: str, x: Tensor, headdim_v: int, key: object, launch: Callable[[Config], Launch]
) -> Config:
    """The candidate whose launch is fastest, found once a process for all calls of its kind.

    Args:
        kind: as for `select`.
        x: as for `select`.
        headdim_v: of v.
        key: sizes and options of the call on which the best config may depend.
        launch: makes a launch that may be repeated, over scratch results.
    """
    arch, headdim = architecture(x.device), max(x.size(-1), headdim_v)
    call = (kind, arch, headdim, x.dtype, key)
    if call not in _searched:
        tried = search_space(kind, arch, headdim, x.dtype)
        alone = len(tried) == 1
        _searched[call] = tried[0] if alone else min(tried, key=lambda c: _seconds(launch, c))
    return _searched[call]


@cache
def architecture(device: torch.device) -> str:
    """The device's architecture, a column of the table."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip is not None:
        return "gfx942"
    return _column(*torch.cuda.get_device_capability(device))


def column(arch: str) -> str:
    """The column of the table for an architecture, such as "sm_89"."""
    name = arch.removeprefix("sm_")
    return _column(int(name[:-1]), int(name[-1])) if name != arch else arch


def _column(major: int, minor: int) -> str:
    return CAPABILITIES.get((major, minor), "sm_86")


def _base(kind: str) -> str:
    return kind.partition("_")[0]


def bucket(headdim: int) -> int:
    """The head dim of the table that stands for this one."""
    return max(64, triton.next_power_of_2(headdim))


def _distinct(*configs: Config) -> tuple[Config, ...]:
    """Drops configs that differ from an earlier one in the note alone."""
    found: dict[Config, Config] = {}
    for config in configs:
        found.setdefault(replace(config, note=""), config)
    return tuple(found.values())


def _seconds(launch: Callable[[Config], Launch], config: Config) -> float:
    """Median time of a launch; infinite where the tile does not fit or the compiler gives up."""
    try:
        seconds: float = triton.testing.do_bench(launch(config).run, return_mode="median")
    except triton.runtime.errors.OutOfResources:
        return float("inf")
    except RuntimeError as error:
        if "PassManager::run failed" not in str(error):
            raise
        return float("inf")
    return seconds
