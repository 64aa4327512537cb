"""Options of the transport."""

from __future__ import annotations

from dataclasses import dataclass

# Default number of thread blocks for NCCL's copies. In a model of 8 steps of 1 ms, 8 blocks cost
# 0 % of the time if a copy takes 0.15 ms, and 4 % if it takes 0.75 ms; NCCL's default of 32 costs
# 6 % and 40 %.
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

    On NCCL the identity travels as 64 bytes beside each message. The device compares it, and the
    host raises at the start of a later call. Before the first call of a kind all ranks connect,
    compile their kernels and wait for each other: an error names a missing rank, and no exchange
    waits for a compiler. Afterwards no host waits. If an exchange exceeds the timeout, the logger
    "ring_attn" gets an error with step, peer and channel, here and on the other ranks. 10 s later
    torch's watchdog ends the process, since its device would continue with missing data. A
    rank that leaves a call by an exception aborts its exchanges: its later messages belong to no
    call, and the receiver raises. That rank's results of earlier calls are valid only if its device
    had finished them: restart from a checkpoint. None of this has run on a GPU.

    Attributes:
        timeout: seconds, from 0.001 to 1e9, that a rank waits for a peer before it raises, or on
            NCCL logs the error; None is the timeout of the process group.
        nccl_max_ctas: most thread blocks (each takes an SM) for NCCL's copies, so that they do not
            starve the attention kernel; None is 8. Refused on other backends.
    """

    timeout: float | None = None
    nccl_max_ctas: int | None = None
