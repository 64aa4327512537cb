"""Attention over a split sequence: ours, dense attention, and what all implementations share.

`bench.ring_peers` has the implementations of other packages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ring_attn
from ring_attn.backends.base import Backend
from ring_attn.bench.implementations import Differentiable, Shape
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.strategy import Strategy
from ring_attn.testing import Inputs
from ring_attn.testing.launch import num_threads, rank_device

Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class RingCase:
    """A problem that ranks share.

    Attributes:
        shape: the whole problem.
        world_size: number of ranks.
        layout: name of the layout of ours.
        threads: CPU threads of each rank.
        backward: whether a backward follows each forward.
    """

    shape: Shape
    world_size: int
    layout: str
    threads: int
    backward: bool

    def shortened(self, rows: int) -> RingCase:
        """Return the case with about `rows` rows, which zigzag shards evenly, if it has more."""
        chunks = 2 * self.world_size
        rows = max(rows // chunks, 1) * chunks
        return replace(self, shape=self.shape.shortened(self.shape.batch, rows))


class RingImpl(Differentiable):
    """An implementation on the ranks of a group, under autograd."""

    name: str
    # Whether tensors are (batch, heads, rows, dim); otherwise they are (batch, rows, heads, dim).
    heads_first = False

    def __init__(
        self,
        case: RingCase,
        group: dist.ProcessGroup,
        whole: Inputs | None = None,
        drawn: dict[int, Inputs] | None = None,
    ) -> None:
        """Set the package up, and take this rank's rows.

        Args:
            case: the problem.
            group: the ranks.
            whole: q, k, v and dout of the whole sequence, the same on every rank; None draws
                this rank's rows only, which is enough for times.
            drawn: rows that were drawn, by their number, to which those of this one are added.
                Implementations that share them need the memory of one.
        """
        self.case, self.group = case, group
        self._shared = {} if drawn is None else drawn
        self.rank = dist.get_rank(group)
        self.layout = self.own_layout()
        attend = self.set_up()
        inputs = self._drawn() if whole is None else Inputs(*(self.take(x) for x in whole))
        arranged = [self.arrange(x).contiguous() for x in inputs]
        super().__init__(attend, arranged, backward=case.backward)

    @classmethod
    def reason_against(cls, case: RingCase) -> str | None:
        """Return the reason why the implementation cannot run the case, or None."""
        return None

    @property
    def label(self) -> str:
        """How it shares the work, for the column of strategies."""
        return "-"

    def own_layout(self) -> SequenceLayout:
        """Return the layout of this implementation."""
        return self.named_layout(self.case.layout)

    def named_layout(self, name: str) -> SequenceLayout:
        return SequenceLayout.from_name(name, self.case.shape.seqlen, self.case.world_size)

    def set_up(self) -> Attend:
        """Set the package up; return its function of q, k and v."""
        raise NotImplementedError

    def num_rows(self) -> int:
        """Return the number of this rank's rows."""
        return self.layout.shard_len(self.rank)

    def take(self, x: Tensor) -> Tensor:
        """Return this rank's rows of a whole tensor (batch, rows, heads, dim)."""
        return self.layout.shard(x, self.rank)

    def arrange(self, x: Tensor) -> Tensor:
        """Return rows (batch, rows, heads, dim) as the package takes them."""
        return x.transpose(1, 2) if self.heads_first else x

    def restore(self, x: Tensor) -> Tensor:
        """Return a result of the package as (batch, rows, heads, dim)."""
        return x.transpose(1, 2) if self.heads_first else x

    def gather(self, x: Tensor) -> Tensor:
        """Return the whole of a result (batch, rows, heads, dim) on every rank."""
        return ring_attn.unshard(x.contiguous(), self.layout, group=self.group)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Hold what a call needs around it, such as a patch; entering it is not timed."""
        yield

    def run(self) -> None:
        """Run a forward, and its backward if there is one."""
        self.forward()
        if self.case.backward:
            self.backward()

    def whole(self) -> list[Tensor]:
        """Return out, dq, dk and dv of the whole sequence, on rank 0 at least."""
        return [self.gather(self.restore(x)) for x in self.results()]

    def _drawn(self) -> Inputs:
        """Return this rank's rows of q, k, v and dout on its device, drawn if nobody has."""
        shape, device = self.case.shape, rank_device()
        generator = torch.Generator(device).manual_seed(self.rank)
        rows = self.num_rows()
        if rows in self._shared:
            return self._shared[rows]

        def draw(heads: int, dim: int) -> Tensor:
            size = (shape.batch, rows, heads, dim)
            return torch.randn(size, generator=generator, device=device, dtype=shape.dtype)

        self._shared[rows] = Inputs(
            q=draw(shape.heads, shape.head_dim),
            k=draw(shape.kv_heads, shape.head_dim),
            v=draw(shape.kv_heads, shape.dim_v),
            dout=draw(shape.heads, shape.dim_v),
        )
        return self._shared[rows]


class Ours(RingImpl):
    """`ring_attention` with a strategy.

    `layout`: a layout by value, such as the planner's; None is the case's.
    """

    name = "ours"

    def __init__(
        self,
        case: RingCase,
        group: dist.ProcessGroup,
        whole: Inputs | None = None,
        drawn: dict[int, Inputs] | None = None,
        *,
        strategy: str | Strategy = "ring",
        layout_of: Callable[[RingCase], SequenceLayout] | None = None,
    ) -> None:
        self._strategy = strategy
        self._layout_of = layout_of
        super().__init__(case, group, whole, drawn)

    @property
    def label(self) -> str:
        if isinstance(self._strategy, str):
            return self._strategy
        return self._strategy.full_name(self.case.world_size)

    def own_layout(self) -> SequenceLayout:
        if self._layout_of is not None:
            return self._layout_of(self.case)
        return super().own_layout()

    def set_up(self) -> Attend:
        shape = self.case.shape
        masked: dict[str, Any] = {"causal": shape.choice.causal}
        if shape.choice.kind == "window":
            masked["window_size"] = (shape.choice.size, 0)
        elif shape.choice.kind not in ("causal", "full"):
            masked = {"mask": shape.mask}  # made once
        return partial(
            ring_attn.ring_attention,
            **masked,
            layout=self.layout,
            strategy=self._strategy,
            group=self.group,
        )


@contextmanager
def without_compute(backend: Backend) -> Iterator[None]:
    """Let a backend compute nothing, so that a call consists of its transfers. Results are lost."""

    def forward(*args: Any, **options: Any) -> Any:
        # q, k, v, the tiles, and the state that a step returns.
        return args[4]

    kind = type(backend)
    with (
        mock.patch.object(kind, "forward", staticmethod(forward)),
        mock.patch.object(kind, "backward", staticmethod(lambda *args, **options: None)),
    ):
        yield


class Dense(RingImpl):
    """torch's attention of the whole sequence on rank 0; the other ranks wait in a barrier.

    On CPUs it has the threads of all ranks.
    """

    name = "dense"
    heads_first = True

    @classmethod
    def reason_against(cls, case: RingCase) -> str | None:
        kind = case.shape.choice.kind
        if kind not in ("causal", "full"):
            return f"scaled_dot_product_attention has no mask {kind!r} without storing it"
        return None

    def set_up(self) -> Attend:
        self._is_first = self.rank == 0
        self._threads = self.case.threads * self.case.world_size
        shape = self.case.shape
        attend: Attend = partial(
            F.scaled_dot_product_attention,
            is_causal=shape.choice.causal,
            enable_gqa=shape.kv_heads != shape.heads,
        )
        return attend

    def own_layout(self) -> SequenceLayout:
        return self.named_layout("contiguous")  # unused: one rank has all rows

    def num_rows(self) -> int:
        return self.case.shape.seqlen if self._is_first else 0

    def take(self, x: Tensor) -> Tensor:
        return x[:, : self.num_rows()]

    def forward(self) -> None:
        self._alone(super().forward)

    def backward(self) -> None:
        self._alone(super().backward)

    def _alone(self, stage: Callable[[], None]) -> None:
        if self._is_first:
            with num_threads(self._threads):
                stage()

    def whole(self) -> list[Tensor]:
        return [self.restore(x) for x in self.results()] if self._is_first else []
