"""The used part of torch's ProcessGroupNCCL, for communicators that stand in NCCL's place."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Parts = Sequence[tuple[Tensor, int]]  # tensors, and the members to send them to or receive from


class StandIn:
    """Hands every operation to `start`, as parts to send and to receive."""

    Options = staticmethod(lambda: SimpleNamespace(config=SimpleNamespace()))

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.rank, self.size, self.options = rank, size, options

    def start(self, sends: Parts, receives: Parts, total: Tensor | None = None) -> Any:
        """Starts an operation; `total` becomes the sum of the received parts, if it is given."""
        raise NotImplementedError

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Does nothing: there is nothing to connect to."""

    def shutdown(self) -> None:
        """Does nothing: there is nothing to release."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self.start([(tensors[0], peer)], [])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self.start([], [(tensors[0], peer)])

    def _allgather_base(self, recv: Tensor, send: Tensor) -> Any:
        return self._exchange(self.size * [send], recv.chunk(self.size))

    def alltoall_base(
        self, recv: Tensor, send: Tensor, recv_counts: list[int], send_counts: list[int]
    ) -> Any:
        return self._exchange(send.split(send_counts), recv.split(recv_counts))

    def _reduce_scatter_base(self, recv: Tensor, send: Tensor) -> Any:
        return self._exchange(send.chunk(self.size), torch.empty_like(send).chunk(self.size), recv)

    def _exchange(
        self, sends: Sequence[Tensor], receives: Sequence[Tensor], total: Tensor | None = None
    ) -> Any:
        everyone = range(self.size)
        return self.start(
            [*zip(sends, everyone, strict=True)], [*zip(receives, everyone, strict=True)], total
        )
