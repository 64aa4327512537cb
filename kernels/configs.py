"""Tile sizes, warps and stages of the kernels, frozen per architecture, head dim and kernel.

Nothing is tuned at run time by default: ranks that timed their kernels apart could pick apart. With
RING_ATTN_AUTOTUNE=1 the candidates are timed at the first call of each kind, once a process, and
the fastest is taken; ranks may then differ in their last bits.

A forward config serves full and masked tiles alike: with one BLOCK_N on and off the diagonal, a
ring's sums are those of a single pass. The kinds are

    fwd          any step                            dkdv   dkdv_softcap   dk and dv
    fwd_whole    without a mask and ragged ends      dq     dq_softcap     dq
    delta        rowsum(out * dout)

where the second name falls back to the first: softcap's tanh takes registers that some tiles lack.

Notes give registers a thread and shared memory as compiled for bfloat16 with triton 3.7.1, for the
variant that takes most. No 16-bit config spills with triton 3.6.0 and 3.7.1; what does with 3.9.0
is said. "not measured" says that no GPU has timed it yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

if TYPE_CHECKING:
    from .launch import Launch


@dataclass(frozen=True)
class Config:
    """How a kernel is tiled.

    Attributes:
        BLOCK_M: q rows of a tile.
        BLOCK_N: kv rows of a tile.
        num_warps: warps of a program.
        num_stages: depth of the pipeline of loads.
        note: where the choice comes from.
        warp_specialize: one warp group loads while two compute; only of kind fwd_whole, on sm_90.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    note: str = ""
    warp_specialize: bool = False


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
    ("sm_80", "dq", 64): Config(64, 64, 8, 1, "255 regs, 33 KB; not measured"),
    ("sm_80", "dq", 128): Config(64, 64, 8, 2, "193 regs, 74 KB; not measured"),
    ("sm_80", "dq", 256): Config(64, 64, 8, 1, "252 regs, 131 KB; not measured"),
    ("sm_86", "fwd", 64): Config(128, 64, 8, 3, "222 regs, 66 KB; not measured"),
    ("sm_86", "fwd", 128): Config(128, 64, 8, 2, "246 regs, 82 KB; not measured"),
    ("sm_86", "fwd", 256): Config(64, 64, 8, 1, "246 regs, 74 KB; not measured"),
    ("sm_86", "dkdv", 64): Config(32, 128, 8, 2, "240 regs, 49 KB; not measured"),
    ("sm_86", "dkdv", 128): Config(64, 64, 8, 2, "240 regs, 74 KB; not measured"),
    ("sm_86", "dkdv", 256): Config(16, 64, 8, 2, "247 regs, 84 KB; not measured"),
    ("sm_86", "dq", 64): Config(64, 64, 8, 1, "239 regs, 29 KB; not measured"),
    ("sm_86", "dq", 128): Config(64, 64, 8, 2, "166 regs, 74 KB; not measured"),
    ("sm_86", "dq", 256): Config(64, 32, 8, 1, "221 regs, 98 KB; not measured"),
    ("sm_90", "fwd", 64): Config(128, 128, 8, 3, "242 regs, 115 KB; not measured"),
    ("sm_90", "fwd", 128): Config(
        128, 128, 8, 2, "255 regs, 164 KB; 48 bytes spilled outside the loop by 3.9.0; not measured"
    ),
    ("sm_90", "fwd", 256): Config(128, 32, 8, 2, "244 regs, 131 KB; not measured"),
    ("sm_90", "dkdv", 64): Config(64, 128, 8, 2, "225 regs, 66 KB; not measured"),
    ("sm_90", "dkdv", 128): Config(
        64, 128, 8, 2, "255 regs, 132 KB; 8 bytes spilled outside the loop by 3.9.0; not measured"
    ),
    ("sm_90", "dkdv", 256): Config(32, 32, 8, 2, "184 regs, 68 KB; not measured"),
    ("sm_90", "dkdv_softcap", 128): Config(32, 128, 8, 2, "220 regs, 99 KB; not measured"),
    ("sm_90", "dq", 64): Config(128, 128, 8, 2, "225 regs, 98 KB; not measured"),
    ("sm_90", "dq", 128): Config(128, 64, 8, 2, "202 regs, 131 KB; not measured"),
    ("sm_90", "dq", 256): Config(64, 32, 8, 2, "207 regs, 135 KB; not measured"),
    ("sm_90", "dq_softcap", 64): Config(128, 64, 8, 2, "164 regs, 66 KB; not measured"),
    ("sm_100", "fwd", 64): Config(128, 64, 8, 2, "185 regs, 50 KB; not measured"),
    ("sm_100", "fwd", 128): Config(128, 64, 8, 3, "246 regs, 139 KB; not measured"),
    ("sm_100", "fwd", 256): Config(64, 32, 4, 1, "250 regs, 49 KB; not measured"),
    ("sm_100", "fwd_whole", 64): Config(128, 64, 8, 1, "75 regs, 29 KB; not measured"),
    ("sm_100", "dkdv", 64): Config(64, 128, 8, 1, "239 regs, 49 KB; not measured"),
    ("sm_100", "dkdv", 128): Config(64, 64, 8, 2, "242 regs, 132 KB; not measured"),
    ("sm_100", "dkdv", 256): Config(32, 32, 8, 1, "170 regs, 82 KB; not measured"),
    ("sm_100", "dkdv_softcap", 128): Config(64, 64, 8, 1, "150 regs, 66 KB; not measured"),
    ("sm_100", "dq", 64): Config(64, 64, 4, 2, "226 regs, 57 KB; not measured"),
    ("sm_100", "dq", 128): Config(128, 64, 8, 2, "253 regs, 148 KB; not measured"),
    ("sm_100", "dq", 256): Config(64, 32, 8, 1, "197 regs, 98 KB; not measured"),
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
}

# Configs of kind fwd_whole that may enter the table once a device has measured them faster.
WHOLE_CANDIDATES: dict[tuple[str, int], tuple[Config, ...]] = {
    ("sm_90", 64): (
        Config(128, 128, 4, 2, "168 regs, 115 KB, warp-specialised; not measured", True),
    ),
    ("sm_90", 128): (
        Config(128, 128, 4, 2, "168 regs, 230 KB, warp-specialised; not measured", True),
        Config(128, 64, 4, 2, "168 regs, 164 KB, warp-specialised; not measured", True),
    ),
}

# float32 has no tensor cores in ieee precision: its products are unrolled into registers, so that
# only small tiles fit. For every architecture and kernel.
FLOAT32 = {
    64: Config(32, 32, 8, 1, "128 regs, 37 KB; not measured"),
    128: Config(16, 16, 8, 1, "189 regs, 34 KB; not measured"),
    256: Config(16, 16, 8, 1, "255 regs and 240 bytes spilled, 68 KB; not measured"),
}

# What is tried beside the candidates; what does not fit a device is left out there.
SEARCHED: dict[str, tuple[Config, ...]] = {
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
    "delta": (),
}

# One pass over memory: as many rows as keep a few loads of 16 bytes in flight for every thread.
DELTA = Config(32, 0, 4, 1, "bound by memory")

# Large enough that the interpreter's cost per block is spread, small enough for short tests.
INTERPRETER = Config(64, 64, 4, 1, "interpreter")

_searched: dict[tuple[object, ...], Config] = {}


def select(kind: str, x: Tensor, headdim_v: int) -> Config:
    """The frozen config of a kernel.

    Args:
        kind: "fwd", "fwd_whole", "dkdv", "dkdv_softcap", "dq", "dq_softcap" or "delta".
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
    bucket = _bucket(headdim)
    if dtype == torch.float32:
        return FLOAT32[bucket]
    return TABLE.get((arch, kind, bucket)) or TABLE[arch, _base(kind), bucket]


def candidates(kind: str, arch: str, headdim: int, dtype: torch.dtype) -> tuple[Config, ...]:
    """The frozen config and those that wait to be measured in its place; all compile clean."""
    first = frozen(kind, arch, headdim, dtype)
    if dtype == torch.float32 or kind != "fwd_whole":
        return (first,)
    return (first, *WHOLE_CANDIDATES.get((arch, _bucket(headdim)), ()))


def search_space(kind: str, arch: str, headdim: int, dtype: torch.dtype) -> tuple[Config, ...]:
    """What `search` tries: the candidates, and tiles that may or may not suit the device."""
    first = candidates(kind, arch, headdim, dtype)
    alone = dtype == torch.float32 or arch == "interpreter"
    others = () if alone else SEARCHED[_base(kind)]
    return tuple(dict.fromkeys((*first, *others)))


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
        key: what else makes a difference: sizes and options of the call.
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
    """Which column of the table a device takes."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip is not None:
        return "gfx942"
    return CAPABILITIES.get(torch.cuda.get_device_capability(device), "sm_86")


def _base(kind: str) -> str:
    return kind.partition("_")[0]


def _bucket(headdim: int) -> int:
    return max(64, triton.next_power_of_2(headdim))


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
