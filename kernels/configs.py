"""Tile sizes, warps and stages of the kernels, frozen per architecture, head dim and kernel.

Nothing is tuned at run time, since ranks that tune separately could choose differently. A file
holds the configs that `ring-attn tune` has found on a GPU: see `tuned.py`.

Full and masked tiles have one forward config: with the same BLOCK_N on and off the diagonal, a
ring's sums are those of a single pass. The kinds are

    fwd     fwd_whole                      out and lse
    dkdv    dkdv_whole    dkdv_softcap     dk and dv
    dq      dq_whole      dq_softcap       dq
    delta                                  rowsum(out * dout)
    gluon                                  out and lse, where `tuned.takes_gluon`
    one_pass                               dq, dk and dv, where `tuned.takes_one_pass`
    decode                                 out and lse of a few queries

A kind without a config takes the first kind's in its line. Steps without a mask or a ragged
end ("whole") need fewer registers, softcap's tanh needs more.

The configs are chosen by their registers, shared memory and spills, which `make aot` reports
(bench/results/aot_*.json); no GPU has timed them yet. Comments name every spill of a 16-bit config.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .triton_release import RELEASE


@dataclass(frozen=True)
class Config:
    """Tiling of a kernel."""

    BLOCK_M: int  # q rows of a tile
    BLOCK_N: int  # kv rows of a tile
    num_warps: int
    num_stages: int
    # Most bytes of the columns of heads computed together; 0 means all heads together.
    l2_bytes: int = 0
    # Programs of a persistent grid per multiprocessor, for the forward in Gluon; 0 means one
    # program for each task, as in all other kernels.
    programs_per_sm: int = 0

    @property
    def options(self) -> dict[str, int]:
        """Options of the kernel's compilation."""
        # Triton 3.9 warns where fusion is left to its default, which will change: other bits.
        fusion = {"enable_fp_fusion": True}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **fusion}


# Architecture -> column of the table. Others use sm_86, for GPUs with 99 KiB of shared memory
# per program (sm_86, sm_89, sm_120). sm_80 and sm_87 have 163 KiB, sm_90 and sm_100 have 227 KiB.
CAPABILITIES = {
    "sm_80": "sm_80",
    "sm_87": "sm_80",
    "sm_90": "sm_90",
    "sm_100": "sm_100",
    "sm_103": "sm_100",
}
ARCHITECTURES = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942")

# Head dims of the tables; other head dims are rounded up.
BUCKETS = (64, 128, 256)


class Sizes(NamedTuple):
    """The sizes of a `Config`."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


# Sizes by architecture and kind, and then by head dim, one of BUCKETS. Where a kind has none for a
# head dim, it takes those of the first kind of its line.
TABLE: dict[tuple[str, str], dict[int, Sizes]] = {
    # On sm_80 4 warps, each with 32 rows, read K and V half as often as 8 do. With 8, shared memory
    # took longer than the products. Two programs of 4 fit a multiprocessor. What 128 dims spill
    # (`aot.compile_cell`) costs 2 % of a block of dk and dv, and nothing in a forward's blocks.
    ("sm_80", "fwd"): {
        64: Sizes(BLOCK_M=128, BLOCK_N=64, num_warps=4, num_stages=2),
        128: Sizes(BLOCK_M=128, BLOCK_N=32, num_warps=4, num_stages=2),
        256: Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=2),
    },
    ("sm_80", "dkdv"): {
        64: Sizes(BLOCK_M=32, BLOCK_N=128, num_warps=8, num_stages=2),
        128: Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2),
        256: Sizes(BLOCK_M=32, BLOCK_N=64, num_warps=8, num_stages=2),
    },
    ("sm_80", "dkdv_softcap"): {
        128: Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=2),
        256: Sizes(BLOCK_M=16, BLOCK_N=64, num_warps=8, num_stages=2),
    },
    ("sm_80", "dkdv_whole"): {
        64: Sizes(BLOCK_M=32, BLOCK_N=128, num_warps=4, num_stages=2),
    },
    ("sm_80", "dq"): {
        64: Sizes(BLOCK_M=128, BLOCK_N=32, num_warps=4, num_stages=2),
        128: Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2),
        256: Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=1),
    },
    ("sm_80", "dq_softcap"): {
        64: Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=1),
        128: Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=2),
    },
    ("sm_80", "decode"): {
        64: Sizes(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=3),
        128: Sizes(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=3),
        256: Sizes(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=3),
    },
    ("sm_86", "fwd"): {
        64: Sizes(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3),
        128: Sizes(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2),
        256: Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=1),
    },
    ("sm_86", "dkdv"): {
        64: Sizes(BLOCK_M=32, BLOCK_N=128, num_warps=8, num_stages=2),
        128: Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=2),
        256: Sizes(BLOCK_M=16, BLOCK_N=64, num_warps=8, num_stages=2),
    },
    ("sm_86", "dq"): {
        64: Sizes(BLOCK_M=64, BLOCK_N=32, num_warps=8, num_stages=2),
        128: Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=2),
        256: Sizes(BLOCK_M=64, BLOCK_N=32, num_warps=8, num_stages=1),
    },
    ("sm_86", "decode"): {
        64: Sizes(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=2),
        128: Sizes(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=2),
        256: Sizes(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=2),
    },
    # With 128 dims triton 3.9.0 spills 48 bytes without a mask, outside the loop.
    ("sm_90", "fwd"): {
        64: Sizes(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=2),
        128: Sizes(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=2),
        256: Sizes(BLOCK_M=128, BLOCK_N=32, num_warps=8, num_stages=3),
    },
    ("sm_90", "dkdv"): {
        64: Sizes(BLOCK_M=64, BLOCK_N=128, num_warps=8, num_stages=3),
        128: Sizes(BLOCK_M=64, BLOCK_N=128, num_warps=8, num_stages=3),
        256: Sizes(BLOCK_M=16, BLOCK_N=64, num_warps=8, num_stages=2),
    },
    ("sm_90", "dkdv_softcap"): {
        128: Sizes(BLOCK_M=32, BLOCK_N=128, num_warps=8, num_stages=3),
    },
    ("sm_90", "dq"): {
        64: Sizes(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=3),
        128: Sizes(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3),
        256: Sizes(BLOCK_M=128, BLOCK_N=32, num_warps=8, num_stages=2),
    },
    ("sm_90", "dq_softcap"): {
        64: Sizes(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3),
    },
    ("sm_90", "decode"): {
        64: Sizes(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=3),
        128: Sizes(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=3),
        256: Sizes(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=3),
    },
    ("sm_100", "fwd"): {
        64: Sizes(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2),
        128: Sizes(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3),
        256: Sizes(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=1),
    },
    ("sm_100", "fwd_whole"): {
        64: Sizes(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=1),
    },
    ("sm_100", "dkdv"): {
        64: Sizes(BLOCK_M=64, BLOCK_N=128, num_warps=8, num_stages=1),
        128: Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=2),
        256: Sizes(BLOCK_M=16, BLOCK_N=64, num_warps=8, num_stages=1),
    },
    ("sm_100", "dkdv_softcap"): {
        128: Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=1),
    },
    # With two stages triton 3.7.1 leaves proxy fences out of dq.
    ("sm_100", "dq"): {
        64: Sizes(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=1),
        128: Sizes(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=1),
        256: Sizes(BLOCK_M=64, BLOCK_N=32, num_warps=8, num_stages=1),
    },
    ("sm_100", "decode"): {
        64: Sizes(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=3),
        128: Sizes(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=3),
        256: Sizes(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=3),
    },
    ("gfx942", "fwd"): {
        64: Sizes(BLOCK_M=128, BLOCK_N=64, num_warps=4, num_stages=1),
        128: Sizes(BLOCK_M=128, BLOCK_N=64, num_warps=4, num_stages=1),
        256: Sizes(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=1),
    },
    ("gfx942", "dkdv"): {
        64: Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=1),
        128: Sizes(BLOCK_M=32, BLOCK_N=64, num_warps=4, num_stages=1),
        256: Sizes(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=1),
    },
    ("gfx942", "dq"): {
        64: Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=1),
        128: Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=1),
        256: Sizes(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=1),
    },
    ("gfx942", "decode"): {
        64: Sizes(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=2),
        128: Sizes(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=2),
        256: Sizes(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=2),
    },
}

# Decoding with head dims above 256, MLA's 576 and 512: on triton 3.7.1 nothing spills.
WIDE_DECODE: dict[str, Sizes] = {
    "sm_80": Sizes(BLOCK_M=32, BLOCK_N=32, num_warps=8, num_stages=2),
    "sm_86": Sizes(BLOCK_M=32, BLOCK_N=32, num_warps=8, num_stages=2),
    "sm_90": Sizes(BLOCK_M=64, BLOCK_N=32, num_warps=8, num_stages=2),
    "sm_100": Sizes(BLOCK_M=32, BLOCK_N=32, num_warps=8, num_stages=2),
    "gfx942": Sizes(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=1),
}

# For all architectures and kernels: float32 has no tensor cores in ieee precision. Its products are
# unrolled into registers, so that only small tiles fit; with 256 dims 240 bytes are spilled.
FLOAT32: dict[int, Sizes] = {
    64: Sizes(BLOCK_M=32, BLOCK_N=32, num_warps=8, num_stages=1),
    128: Sizes(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1),
    256: Sizes(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=1),
}

# Configs of dk and dv for launches with fewer programs than multiprocessors. With half the kv rows
# they make twice as many programs, mostly of half the warps with the same instructions each. The q
# rows are the same, and so are the bits. On sm_90 128 dims spill 16 to 36 bytes: with a mask two
# loads a block.
FEW_PROGRAMS: dict[tuple[str, int], Config] = {
    ("sm_80", 64): Config(BLOCK_M=32, BLOCK_N=64, num_warps=4, num_stages=2),
    ("sm_80", 128): Config(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2),
    ("sm_90", 64): Config(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=3),
    ("sm_90", 128): Config(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2),
    ("sm_100", 64): Config(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=1),
}

if RELEASE < (3, 7):
    # Where triton 3.6 spills within the loops with the sizes above (bytes in windows: 72 on sm_90,
    # 108 of few programs, 128 on sm_80), and with these it does not spill.
    TABLE["sm_90", "dkdv"] = {
        64: Sizes(BLOCK_M=64, BLOCK_N=128, num_warps=8, num_stages=3),
        128: Sizes(BLOCK_M=64, BLOCK_N=128, num_warps=8, num_stages=2),
        256: Sizes(BLOCK_M=16, BLOCK_N=64, num_warps=8, num_stages=2),
    }
    FEW_PROGRAMS["sm_90", 128] = Config(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=2)
    TABLE["sm_80", "dkdv"] = {
        64: Sizes(BLOCK_M=32, BLOCK_N=128, num_warps=8, num_stages=2),
        128: Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=2),
        256: Sizes(BLOCK_M=32, BLOCK_N=64, num_warps=8, num_stages=2),
    }
    TABLE["sm_80", "dkdv_whole"] = {
        64: Sizes(BLOCK_M=32, BLOCK_N=128, num_warps=4, num_stages=2),
        128: Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2),
    }

# Bytes of K and V of the heads computed together: the share of sm_90's 50 MB of L2 cache that q,
# out and the state leave.
L2_BYTES = 32 << 20


def _persistent(*, block_m: int, block_n: int, num_stages: int) -> Config:
    return Config(
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
        num_stages=num_stages,
        l2_bytes=L2_BYTES,
        programs_per_sm=1,
    )


# Configs of `hopper_fwd`, the forward of sm_90 in 16 bits, by head dim: the first is the frozen
# one, chosen by its structure; a search tries the others. With triton 3.7.1 nothing spills.
GLUON: dict[int, tuple[Config, ...]] = {
    # Registers leave room for one program only, so more stages cost nothing. With 4 stages the
    # modulus is a bit mask. With 128 x 128 triton 3.9.0 spills 28 bytes if ragged.
    64: (
        _persistent(block_m=128, block_n=128, num_stages=4),
        _persistent(block_m=192, block_n=64, num_stages=2),
        _persistent(block_m=128, block_n=128, num_stages=2),
    ),
    # A block's products take 2048 clocks, so two stages hide more than the latency of a copy.
    128: (
        _persistent(block_m=128, block_n=128, num_stages=2),
        _persistent(block_m=128, block_n=128, num_stages=3),
        _persistent(block_m=128, block_n=64, num_stages=4),
    ),
    # 64 columns spill 60 bytes if ragged.
    256: (_persistent(block_m=128, block_n=32, num_stages=3),),
}

# Configs of `blackwell_fwd`, the forward of sm_100 in 16 bits: two tiles of 128 rows. Shared memory
# leaves room for two stages with 128 dims.
BLACKWELL: dict[int, tuple[Config, ...]] = {
    64: (
        _persistent(block_m=256, block_n=128, num_stages=4),
        _persistent(block_m=256, block_n=128, num_stages=2),
    ),
    128: (_persistent(block_m=256, block_n=128, num_stages=2),),
}

# Configs of the backward of five products in 16 bits, by architecture and head dim: `turns_bwd`, on
# sm_90 `hopper_bwd`. With 64 dims a visit of the latter has 128 rows of q: with 64 rows, by bytes
# of shared memory, copies of dQ would take longer than the products. Its consumers have 232
# registers. On sm_100 `blackwell_bwd`. For spills see the limits in dev/aot.py.
ONE_PASS: dict[str, dict[int, Config]] = {
    "sm_80": {128: Config(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)},
    "sm_86": {128: Config(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=2)},
    "sm_90": {
        64: Config(BLOCK_M=128, BLOCK_N=128, num_warps=4, num_stages=2, l2_bytes=L2_BYTES),
        128: Config(BLOCK_M=64, BLOCK_N=128, num_warps=4, num_stages=2, l2_bytes=L2_BYTES),
    },
    "sm_100": {
        64: Config(BLOCK_M=128, BLOCK_N=128, num_warps=4, num_stages=4, l2_bytes=L2_BYTES),
        128: Config(BLOCK_M=128, BLOCK_N=128, num_warps=4, num_stages=2, l2_bytes=L2_BYTES),
    },
}

# Kinds that differ only in the mask must fold blocks of equal length (of kv rows, or of q rows):
# otherwise a ring would not have the bits of a single pass.
FOLDED = {"fwd": "BLOCK_N", "dkdv": "BLOCK_M", "dq": "BLOCK_N"}

# Sizes that a search tries beside the frozen ones; those too large for the device are skipped.
# With 4 warps a multiprocessor runs two programs at once, and the softmax of one overlaps the
# products of the other.
SEARCHED: dict[str, tuple[Sizes, ...]] = {
    "fwd": (
        Sizes(BLOCK_M=128, BLOCK_N=64, num_warps=4, num_stages=2),
        Sizes(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=2),
        Sizes(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=3),
        Sizes(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2),
        Sizes(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3),
        Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2),
        Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=3),
        Sizes(BLOCK_M=128, BLOCK_N=64, num_warps=4, num_stages=1),
        Sizes(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=1),
    ),
    "dkdv": (
        Sizes(BLOCK_M=64, BLOCK_N=128, num_warps=8, num_stages=2),
        Sizes(BLOCK_M=64, BLOCK_N=128, num_warps=8, num_stages=3),
        Sizes(BLOCK_M=32, BLOCK_N=128, num_warps=8, num_stages=2),
        Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=2),
        Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2),
        Sizes(BLOCK_M=32, BLOCK_N=64, num_warps=4, num_stages=2),
        Sizes(BLOCK_M=32, BLOCK_N=64, num_warps=8, num_stages=2),
    ),
    "dq": (
        Sizes(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=2),
        Sizes(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2),
        Sizes(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3),
        Sizes(BLOCK_M=64, BLOCK_N=128, num_warps=8, num_stages=2),
        Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=2),
        Sizes(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2),
        Sizes(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=1),
    ),
    "decode": (
        Sizes(BLOCK_M=16, BLOCK_N=128, num_warps=4, num_stages=3),
        Sizes(BLOCK_M=16, BLOCK_N=128, num_warps=8, num_stages=3),
        Sizes(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=4),
        Sizes(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=2),
        Sizes(BLOCK_M=16, BLOCK_N=64, num_warps=8, num_stages=3),
        Sizes(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=4),
        Sizes(BLOCK_M=16, BLOCK_N=32, num_warps=2, num_stages=4),
    ),
}

# On sm_90 a search tries this many of the first configs also with heads in groups of L2_BYTES.
REORDERED = 3

# One pass over memory, with enough rows to keep a few loads of 16 bytes per thread in flight.
DELTA = Config(BLOCK_M=32, BLOCK_N=0, num_warps=4, num_stages=1)

# Large enough to amortise the interpreter's cost per block, small enough for short tests.
INTERPRETER = Config(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=1)


def select(kind: str, x: Tensor, headdim_v: int) -> Config:
    """The frozen config of a kernel, for a tensor of the call and the head dim of v."""
    headdim = max(x.size(-1), headdim_v)
    return frozen(kind, architecture(x.device), headdim, x.dtype)


def frozen(kind: str, arch: str, headdim: int, dtype: torch.dtype) -> Config:
    """The frozen config, from plain data; `arch` is one of ARCHITECTURES or "interpreter"."""
    if arch == "interpreter":
        return INTERPRETER
    if kind == "delta":
        return DELTA
    size = bucket(headdim)
    if size > BUCKETS[-1]:
        return Config(*WIDE_DECODE[arch])
    if kind == "gluon":
        return in_gluon(arch)[size][0]
    if kind == "one_pass":
        return ONE_PASS[arch][size]
    if dtype == torch.float32:
        return Config(*FLOAT32[size])
    own = TABLE.get((arch, kind), {})
    # The first kind of a line has all head dims.
    sizes = own[size] if size in own else TABLE[arch, _base(kind)][size]
    return Config(*sizes)


def in_gluon(arch: str) -> dict[int, tuple[Config, ...]]:
    """Configs of the forward in Gluon, by head dim: those of sm_90 but for sm_100."""
    return BLACKWELL if arch == "sm_100" else GLUON


def filling(config: Config, programs: int, sms: int, few: Config | None) -> Config:
    """The config of dk and dv: `few` if `config` would leave multiprocessors without a program.

    `few` is not taken if it folds other blocks of q rows.
    """
    if few is None or programs >= sms or few.BLOCK_M != config.BLOCK_M:
        return config
    return few if few.BLOCK_N < config.BLOCK_N else config


def few_programs(x: Tensor, headdim_v: int) -> Config | None:
    if x.dtype == torch.float32:
        return None
    return FEW_PROGRAMS.get((architecture(x.device), bucket(max(x.size(-1), headdim_v))))


def search_space(kind: str, arch: str, headdim: int, dtype: torch.dtype) -> tuple[Config, ...]:
    """The configs that `ring-attn tune` tries: the frozen one, and others that may suit the device.

    A file of RING_ATTN_CONFIGS has no others.

    On sm_90, except for decoding, tiles come first: another tile can gain 25 %, an estimate. Groups
    of heads gain less, and only if the columns of all heads do not fit into the L2 cache.
    """
    if kind == "gluon":
        return in_gluon(arch)[bucket(headdim)]
    if kind == "one_pass":
        return (ONE_PASS[arch][bucket(headdim)],)
    first = frozen(kind, arch, headdim, dtype)
    others = SEARCHED.get(_base(kind))
    if dtype == torch.float32 or others is None:
        return (first,)
    tiles = tuple(dict.fromkeys((first, *(Config(*sizes) for sizes in others))))
    if arch != "sm_90" or kind == "decode":
        return tiles
    return (*tiles, *(replace(x, l2_bytes=L2_BYTES) for x in tiles[:REORDERED]))


@cache
def architecture(device: torch.device) -> str:
    """The device's architecture, a column of the table."""
    return column(exact_architecture(device))


@cache
def exact_architecture(device: torch.device) -> str:
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip is not None:
        return "gfx942"
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def column(arch: str) -> str:
    """The column of the table for an architecture, such as "sm_89"."""
    return CAPABILITIES.get(arch, "sm_86") if arch.startswith("sm_") else arch


def _base(kind: str) -> str:
    return kind.partition("_")[0]


def bucket(headdim: int) -> int:
    """The head dim of the table for a head dim: the next of `BUCKETS`."""
    return max(64, triton.next_power_of_2(headdim))
