"""How shards travel: `p2p` and `symmetric_memory` between processes, `local` within one."""

from __future__ import annotations

import torch.distributed as dist

from ring_attn.spec import TransportOptions
from ring_attn.transport.base import Transport


def open_transport(group: dist.ProcessGroup, options: TransportOptions) -> Transport:
    """The transport of a group, made at its first call: every rank of the group takes part then.

    Raises:
        RuntimeError: a rank did not take part in time, or the ranks are on different nodes, which
            symmetric memory cannot span.
        NotImplementedError: symmetric memory that this torch or driver does not have.
    """
    if options.kind == "symmetric_memory":
        from ring_attn.transport.symmetric_memory import open_symmetric_memory

        return open_symmetric_memory(group, options)
    from ring_attn.transport.p2p import open_p2p

    return open_p2p(group, options)
