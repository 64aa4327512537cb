"""Rows of a tensor, each for some rank, in one message a rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ring_attn.core.program import Collective
from ring_attn.transport.base import Transport


def exchange_rows(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], transport: Transport, step: int = 0
) -> Tensor:
    """Exchange rows with all ranks.

    Args:
        rows: (rows, features), in the order of the receivers.
        sent: number of rows for each rank.
        received: number of rows from each rank.
        transport: the transport.
        step: number of the step, for errors.

    Returns:
        The received rows, in the order of the senders.
    """
    got = rows.new_empty(sum(received), rows.size(1))
    if rows.size(1):
        row_bytes = rows.size(1) * rows.element_size()
        route = Collective(
            "all_to_all",
            send_counts=tuple(row_bytes * count for count in sent),
            recv_counts=tuple(row_bytes * count for count in received),
        )
        send = rows.contiguous().view(-1).view(torch.uint8)
        recv = got.view(-1).view(torch.uint8)
        transport.post("shards", step, route, send, recv)
        transport.wait("shards")
    return got
