"""Speeds of attention kernels by architecture and backend, for `backend="auto"` and the planner.

A rate is the speed for large tiles. Two costs extend it to 1k to 32k rows: each row costs some
extra columns (loading, storing, filling the pipeline), and each row that the mask cuts costs some
more (partly masked blocks). All rates are for bfloat16 and head dim 128. The source of each says
whether it is published, estimated or measured. The rates in `measured` replace others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ring_attn.backends.measured import MEASURED
from ring_attn.core.dtypes import HALF_DTYPES
from ring_attn.core.spec import AttentionSpec
from ring_attn.values.checks import check_cost, check_speed


@dataclass(frozen=True)
class Rate:
    """Speed of one direction of attention.

    Attributes:
        flops: FLOP/s of large tiles, counted by `core.sizes.flops`.
        launch: seconds before the tiles of a step start.
        row_columns: extra columns that each row costs.
        edge_columns: extra columns that each row cut by the mask costs.
    """

    flops: float
    launch: float = 0.0
    row_columns: float = 0.0
    edge_columns: float = 0.0

    def __post_init__(self) -> None:
        check_speed(self, "flops")
        check_cost(self, "launch", "row_columns", "edge_columns")


class Rates(NamedTuple):
    """Speed of the kernels of a backend on an architecture, with the options that we use.

    The backward is deterministic if the kernels have that option. The source is "published: ..",
    "estimate: .." or "measured: ..".
    """

    forward: Rate
    backward: Rate
    source: str

    def scaled_to(self, speed: float) -> Rates:
        """Return the rates of a device with another peak, as a share of this one's."""
        if speed == 1.0:
            return self
        source = f"{self.source}; times {speed:.2f}, by the peaks of datasheets (estimate)"
        return self.scaled(speed, speed, source)

    def scaled(self, forward: float, backward: float, source: str) -> Rates:
        """Return the rates with FLOP/s scaled by a factor for each direction."""
        return Rates(
            replace(self.forward, flops=self.forward.flops * forward),
            replace(self.backward, flops=self.backward.flops * backward),
            source,
        )


# Fitted to MagiAttention's kernel benchmark (v1.1): an H100, 2k to 32k rows, 64 heads and 8 kv
# heads, causal and not. The fit is within 3 % for FlashAttention 3, 4 % for cuDNN and
# FlashAttention 2, and 3 % forward and 11 % backward for FlexAttention, the best published Triton
# kernel. At 1k rows kernels are up to twice as slow as the fit.
_MAGI = "published: MagiAttention's kernel benchmark"
FA3 = Rates(Rate(685e12, 8e-6, 0.0, 80.0), Rate(615e12, 8e-6, 700.0), _MAGI)
_FA2 = Rates(Rate(380e12, 8e-6, 80.0, 265.0), Rate(343e12, 8e-6, 510.0, 110.0), _MAGI)
_CUDNN = Rates(Rate(630e12, 8e-6, 0.0, 285.0), Rate(541e12, 8e-6, 510.0, 235.0), _MAGI)
_UNTRIED = "no GPU has run these kernels"
_PORTABLE = Rates(
    forward=Rate(400e12, 8e-6, 220.0, 200.0),
    backward=Rate(285e12, 8e-6, 980.0, 360.0),
    source=f"estimate: as FlexAttention in MagiAttention's kernel benchmark, {_UNTRIED}",
)
# Our Gluon kernels, estimated at 16k rows: forward 590 TFLOP/s, causal 540; backward 450 to 500,
# of which we take the middle. The extra columns of the backward are the portable kernel's.
_GLUON = Rates(
    forward=Rate(598e12, 8e-6, 220.0, 660.0),
    backward=Rate(503e12, 8e-6, 980.0, 360.0),
    source=f"estimate: from their instructions, {_UNTRIED}",
)
# FlashAttention 2 on an A100, one size only: ring-flash-attention's benchmark on one GPU (8k rows,
# 32 heads, causal) is 205 TFLOP/s forward and 182 with the backward. Columns as for FlexAttention.
_FA2_A100 = Rates(
    forward=Rate(226e12, 8e-6, 220.0, 200.0),
    backward=Rate(195e12, 8e-6, 220.0, 200.0),
    source="published: ring-flash-attention's benchmark, one size",
)
# Our kernels on an A100, by the clocks of their machine code. The forward and the backward of five
# products have the structure of FlashAttention 2; we take 0.9 of its rates. The traffic of shared
# memory limits the backward in two kernels, of seven products, to 175 TFLOP/s, of which we take
# 0.77. (The limit of five products is 250, and 0.77 of it is 193.)
_AMPERE = Rates(
    forward=Rate(203e12, 8e-6, 220.0, 200.0),
    backward=Rate(175e12, 8e-6, 220.0, 200.0),
    source=f"estimate: from their instructions, {_UNTRIED}",
)
# Deterministic backwards (flash-attention pull request 1893, H100, 8k rows, causal) have 474 of 575
# TFLOP/s in FlashAttention 3. In FlashAttention 2 they have 166, where MagiAttention's benchmark
# has 302 at that size.
_FA3_SURE = 474 / 575
_FA2_SURE = 166 / 302
# FlashAttention 4 on a B200 (arXiv 2603.05451): 1613 TFLOP/s forward, at most 1.3 times cuDNN and
# 2.1 to 2.7 times Triton; backward 1360, deterministic 1167 (flash-attention issue 2280).
_FA4 = Rates(Rate(1613e12, 8e-6), Rate(1167e12, 8e-6), "published: arXiv 2603.05451, issue 2280")

# Our portable and Gluon kernels on a B200. The Gluon forward is as fast as the kernel in TLX (950
# TFLOP/s), which has the same warps; FlashAttention 4 also computes some exponentials without the
# special function unit, and leaves out most corrections. The backward has 0.67 of its limit by
# shared memory, 1406 TFLOP/s, as the deterministic backward of FlashAttention 4 has of its limit,
# 1731.
_PORTABLE_B200 = _PORTABLE.scaled(
    1613 / 2.4 / 395, 1613 / 2.4 / 395, f"estimate: FlashAttention 4's / 2.4, {_UNTRIED}"
)
_GLUON_B200 = Rates(
    forward=Rate(975e12, 8e-6, 220.0, 660.0),
    backward=Rate(950e12, 8e-6, 980.0, 360.0),
    source=f"estimate: forward as TLX's, backward from its instructions, {_UNTRIED}",
)

# Our kernels for calls that neither the Gluon kernels nor the backward of five products support.
PORTABLE = "triton, portable"

# Architecture -> backend -> rates. A missing backend has no known rate.
RATES: dict[str, dict[str, Rates]] = {
    "sm_80": {
        "triton": _AMPERE,
        PORTABLE: _AMPERE.scaled(1.0, 135 / 175, _AMPERE.source),
        "flash_attn": _FA2_A100.scaled(
            1.0, _FA2_SURE, f"{_FA2_A100.source}; deterministic as on an H100 (estimate)"
        ),
        "aten": _FA2_A100._replace(source="estimate: FlashAttention 2's, which torch has"),
    },
    "sm_90": {
        "triton": _GLUON,
        PORTABLE: _PORTABLE,
        "flash_attn_3": FA3.scaled(1.0, _FA3_SURE, f"{_MAGI}; pull request 1893"),
        "flash_attn_4": FA3.scaled(1.0, _FA3_SURE, "estimate: FlashAttention 3's"),
        "cudnn": _CUDNN,
        "flash_attn": _FA2.scaled(1.0, _FA2_SURE, f"{_MAGI}; pull request 1893"),
        "aten": _FA2._replace(source="estimate: FlashAttention 2's, which torch has"),
    },
    "sm_100": {
        "triton": _GLUON_B200,
        PORTABLE: _PORTABLE_B200,
        "flash_attn_4": _FA4,
        "cudnn": Rates(
            forward=Rate(1613e12 / 1.3, 8e-6),
            backward=Rate(1360e12 / 1.3, 8e-6),
            source="estimate: FlashAttention 4's / 1.3",
        ),
    },
}

for (_architecture, _backend), (_forward, _backward, _source) in MEASURED.items():
    RATES[_architecture][_backend] = Rates(Rate(*_forward), Rate(*_backward), _source)

# Head dims that our Gluon forward supports, with 16-bit inputs, by architecture.
GLUON_HEADDIMS = {"sm_90": frozenset((64, 128, 256)), "sm_100": frozenset((64, 128))}
# Head dims that our backward of five products supports.
ONE_PASS_HEADDIMS = {
    "sm_80": frozenset((128,)),
    "sm_90": frozenset((64, 128)),
    "sm_100": frozenset((64, 128)),
}
# It is used from this batch x kv heads on, at any length, so that the kernel does not depend on the
# number of ranks. On sm_90 each program has 128 kv rows of one head: in simulated launches of 8k
# rows on 132 SMs, 8 / 1 heads use 25 to 47 % of the SMs' time, and 32 / 8 heads 79 to 96 %. Waits
# for turns take at most 1 %.
ONE_PASS_KV_HEADS = 4
# Fewer heads use it, too, where no order of sums depends on it and a launch has this many programs
# for each multiprocessor. By the rates, two passes are faster if one pass uses less than 57 % of
# the SMs' time (sm_90). With 1.5 programs for each SM, it uses 75 % if all are equally long, and
# as much if a causal mask leaves the longest twice the mean.
ONE_PASS_BLOCK = 128
ONE_PASS_PROGRAMS_PER_SM = 1.5
# Multiprocessors of an architecture's largest device. All ranks take this number, not their own,
# and so does the planner.
MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148}
# Plans on a machine without a GPU have this one's kernels.
PLANNED_ARCHITECTURE = "sm_90"

# Bytes/s of passes that copy or add.
MEMORY_BANDWIDTH = {"sm_80": 1.6e12, "sm_90": 2.7e12, "sm_100": 6.4e12}

# Size of the step on which backends are compared: rows, columns and head dim.
STEP_ROWS = 8192
STEP_HEADDIM = 128


def is_persistent(architecture: str, backend: str, spec: AttentionSpec) -> bool:
    """Return whether the forward occupies all multiprocessors until the end of a step.

    Such a forward, of our Gluon kernels, leaves some of them free for exchanges in flight.
    """
    headdims = GLUON_HEADDIMS.get(architecture, frozenset())
    is_supported = spec.dtype in HALF_DTYPES and {spec.headdim, spec.headdim_v} <= headdims
    return backend == "triton" and is_supported


def has_one_pass(architecture: str, spec: AttentionSpec) -> bool:
    """Return whether our backward of five products supports the calls of a spec."""
    return (
        spec.dtype in HALF_DTYPES
        and spec.headdim == spec.headdim_v
        and spec.headdim in ONE_PASS_HEADDIMS.get(architecture, ())
        and not spec.softcap
    )


def fills_one_pass(architecture: str, spec: AttentionSpec, kv_rows: int | None = None) -> bool:
    """Return whether a backward of five products keeps a GPU busy, and so is the faster one.

    Args:
        architecture: of the GPU, such as "sm_90".
        spec: the heads of a launch.
        kv_rows: rows of keys of a launch; None if the answer must not depend on them, which would
            change the order of sums with the number of ranks.

    Example:
        >>> import torch
        >>> one_kv_head = AttentionSpec("cuda", torch.bfloat16, 1, 8, 1, 128, 128)
        >>> [fills_one_pass("sm_90", one_kv_head, rows) for rows in (None, 25_000, 26_000)]
        [False, False, True]
    """
    kv_heads = spec.batch * spec.nheads_kv
    if kv_heads >= ONE_PASS_KV_HEADS:
        return True
    if kv_rows is None:
        return False
    programs = kv_heads * -(-kv_rows // ONE_PASS_BLOCK)
    multiprocessors = MULTIPROCESSORS.get(architecture, max(MULTIPROCESSORS.values()))
    return programs >= ONE_PASS_PROGRAMS_PER_SM * multiprocessors


def rates_of(
    architecture: str,
    backend: str,
    spec: AttentionSpec,
    *,
    window: bool = False,
    kv_rows: int | None = None,
) -> Rates | None:
    """Return the rates of a backend for calls of this spec, or None if they are not known.

    With a window, cuDNN has the rates of torch's flash. Calls that the Gluon kernels or the
    backward of five products do not support have the rates of the portable kernels. `kv_rows` is as
    for `fills_one_pass`.
    """
    known = RATES.get(architecture, {})
    rates = known.get("aten" if window and backend == "cudnn" else backend)
    if rates is None or backend != "triton" or PORTABLE not in known:
        return rates
    portable = known[PORTABLE]
    headdims = {spec.headdim, spec.headdim_v}
    if spec.dtype not in HALF_DTYPES or not headdims <= GLUON_HEADDIMS.get(architecture, headdims):
        return portable
    if has_one_pass(architecture, spec) and fills_one_pass(architecture, spec, kv_rows):
        return rates
    source = f"estimate: forward from its instructions, backward {portable.source.split(': ')[1]}"
    return Rates(rates.forward, portable.backward, source)


def attained(architecture: str, rates: Rates, *, state_bytes: float, backward: bool) -> float:
    """Return the FLOP/s of a ring step of 8k rows x 8k columns, with or without a backward.

    A forward step moves `state_bytes` for each element of the state: some kernels load and store
    the state, and the results of the others are merged into it.
    """
    products = [(rates.forward, 2)]
    if backward:
        products.append((rates.backward, 5))
    per_column = 2.0 * STEP_HEADDIM  # FLOP of a product for one row
    seconds = STEP_HEADDIM * state_bytes / MEMORY_BANDWIDTH[architecture]
    for rate, count in products:
        seconds += (STEP_ROWS + rate.row_columns) * count * per_column / rate.flops
    return sum(count for _, count in products) * STEP_ROWS * per_column / seconds
