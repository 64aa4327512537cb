"""Rehearse a program before the first call of its kind: connect ranks and compile kernels.

Once a rank has posted an exchange, its peers' timeouts run. So all ranks connect and compile, and
wait for each other, before the call.
"""

from __future__ import annotations

import torch

from ring_attn.core import program as ops
from ring_attn.core.program import Program
from ring_attn.transport.base import Ranks, Transport

# Bytes of a message that only opens a connection.
NBYTES = 16


def connect(program: Program, transport: Transport, device: torch.device) -> None:
    """Run every exchange of a program, with messages of a few bytes."""
    for op in program.ops:
        if isinstance(op, ops.Join):
            transport.join(op.channel, device)
        elif isinstance(op, ops.Inner | ops.Post | ops.PostTogether):
            among = transport if op.ranks is None else transport.sub(op.ranks)
            if isinstance(op, ops.Inner):
                connect(op.program, among, device)
                continue
            for post in ops.on_channel(op):
                _exchange(post, among, device)


def _exchange(op: ops.Post, transport: Transport, device: torch.device) -> None:
    route = op.route
    if isinstance(route, ops.Collective):
        of_all_ranks = transport.world_size * NBYTES
        counts = transport.world_size * (NBYTES,)
        route = route._replace(send_counts=counts, recv_counts=counts)
        send_bytes = NBYTES if route.op == "all_gather" else of_all_ranks
        recv_bytes = NBYTES if route.op == "reduce_scatter" else of_all_ranks
    else:
        send_bytes = recv_bytes = NBYTES + transport.pool(device).header
    # Both buffers must live until the wait.
    send = torch.zeros(send_bytes, dtype=torch.uint8, device=device)
    recv = torch.zeros(recv_bytes, dtype=torch.uint8, device=device)
    transport.post(op.channel, op.step, route, send, recv)
    transport.wait(op.channel)


class Silent(Transport):
    """A transport that exchanges nothing, for runs whose results are not used."""

    def post(self, *_: object, **__: object) -> None:
        """Send nothing."""

    def post_together(self, *_: object, **__: object) -> None:
        """Send nothing."""

    def wait(self, *_: object) -> None:
        """Return at once."""

    def _among(self, members: Ranks) -> Silent:
        return Silent(members, self.members[self.rank])
