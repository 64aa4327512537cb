"""Options of the transport."""

from __future__ import annotations

from dataclasses import dataclass

# Number of thread blocks (each takes an SM) for NCCL's copies, so that they do not starve the
# attention kernel; NCCL's own variable, NCCL_MAX_CTAS, goes before it. In a model of 8 steps of
# 1 ms, 8 blocks cost 0 % of the time if a copy takes 0.15 ms, and 4 % if it takes 0.75 ms; NCCL's
# default of 32 costs 6 % and 40 %.
MAX_CTAS = 8


@dataclass(frozen=True)
class TransportOptions:
    """Options of the transport, and what happens on errors; equal on every rank.

    Every message identifies its call: by number, direction, and a digest of everything on which
    ranks must agree, including the values of sinks.

    On gloo no rank accepts a message of another call. Ranks that skipped a call, passed other
    arguments or run their backwards in another order all raise, mostly within a second, with the
    argument that differs. A rank that leaves a call by an exception notifies the others, which
    raise. If a rank dies or stalls, the error names step, peer and timeout; if a rank misses the
    first call, the error names the rank. Afterwards the process group refuses every further call.

    On NCCL the device compares identities, and the host raises at the start of a later call. Before
    the first call of a kind all ranks connect, compile their kernels and wait for each other.
    Afterwards no host waits: if an exchange exceeds the timeout, the logger "ring_attn" gets an
    error with step, peer and channel, and torch's watchdog ends the process 10 s later. After an
    error, restart from a checkpoint. None of this has run on a GPU.

    Attributes:
        timeout: seconds, from 0.001 to 1e9, that a rank waits for a peer before it raises, or on
            NCCL logs the error; None is the timeout of the process group.
    """

    timeout: float | None = None
