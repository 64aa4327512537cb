"""Options of the transport."""

from __future__ import annotations

from dataclasses import dataclass

from ring_attn.values.outside import env_int

# Number of thread blocks (each takes an SM) for NCCL's copies, so that they do not starve the
# attention kernel. In a model of 8 steps of 1 ms, 8 blocks cost 0 % of the time if a copy takes
# 0.15 ms, and 4 % if it takes 0.75 ms; NCCL's default of 32 costs 6 % and 40 %.
MAX_CTAS = 8
# NCCL's own variable, which goes before the config of a communicator.
MAX_CTAS_VARIABLE = "NCCL_MAX_CTAS"


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
        nccl_max_ctas: most thread blocks of NCCL for an exchange, from 1 to 64, each of which takes
            a multiprocessor. Exchanges are faster with more, and attention is slower. The variable
            NCCL_MAX_CTAS goes before it.
        spare_sms: multiprocessors that our persistent attention kernels always leave free, in
            addition to those for our own exchanges. Kernels of others, such as the all-gathers of
            FSDP, would otherwise wait for the end of a step's kernel: set the number of their
            blocks. The last step and a single rank have no exchange of ours, and so no free
            multiprocessors.
        one_communicator: whether the backward of a ring sends the next shard and the gradients of
            the last step in one group, on one communicator of NCCL. This halves the communicators
            of the ring, their memory and threads, and the time to connect. But the shard then waits
            for the gradients, and the two messages follow one another. None chooses it for steps
            that are long enough to hide both messages, by the planner's model, and never on gloo.
            Other strategies are the same with either value.
    """

    timeout: float | None = None
    nccl_max_ctas: int = MAX_CTAS
    spare_sms: int = 0
    one_communicator: bool | None = None

    @property
    def max_ctas(self) -> int:
        """The number of thread blocks that NCCL takes: its variable's, else `nccl_max_ctas`."""
        return env_int(MAX_CTAS_VARIABLE, self.nccl_max_ctas)
