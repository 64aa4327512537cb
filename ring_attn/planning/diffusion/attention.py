"""The attention of a transformer's blocks: strategy, time and buffers of each kind of call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ring_attn.planning.choice import Choice
from ring_attn.planning.diffusion.job import DiffusionJob
from ring_attn.planning.diffusion.sizes import Call
from ring_attn.planning.planner import explain


@dataclass(frozen=True)
class Direction:
    """Seconds of one direction of a call: all of them, and those that wait for messages."""

    seconds: float
    exposed: float


@dataclass(frozen=True)
class SplitAttention:
    """A call of attention over the rows of all ranks, with the exchange of the text's rows.

    Attributes:
        call: the call.
        count: how many such calls all blocks make.
        choice: its strategy.
    """

    call: Call
    count: int
    choice: Choice

    @property
    def forward(self) -> Direction:
        prediction = self.choice.best.prediction
        assert prediction is not None, "the best candidate has been simulated"
        exchanges = [cost.seconds for cost in self.choice.replicated[:1]]
        cost = prediction.forward
        return Direction(cost.seconds + sum(exchanges), cost.exposed + sum(exchanges))

    @property
    def backward(self) -> Direction:
        prediction = self.choice.best.prediction
        assert prediction is not None, "the best candidate has been simulated"
        cost = prediction.backward
        if cost is None:
            return Direction(0.0, 0.0)
        exchanges = [cost.seconds for cost in self.choice.replicated[1:]]
        return Direction(cost.seconds + sum(exchanges), cost.exposed + sum(exchanges))

    @property
    def flops(self) -> float:
        """FLOPs of all ranks of a forward, over visible pairs only."""
        spec, mask = self.choice.problem.spec, self.choice.problem.mask
        return 2.0 * spec.batch * self.call.nheads * _dims(self.call) * mask.area


@dataclass(frozen=True)
class BlockAttentionPlan:
    """The attention of all blocks over one layout.

    Attributes:
        layout: name of the layout of the video.
        kinds: the kinds of calls over the rows of all ranks.
    """

    layout: str
    kinds: tuple[SplitAttention, ...]

    def of(self, call: Call) -> SplitAttention:
        return next(kind for kind in self.kinds if kind.call == call)

    def buffer_bytes(self, job: DiffusionJob) -> int:
        """Return the most bytes that a call holds beyond tensors that are counted elsewhere.

        Its results, and the gradients of its inputs, are activations of the block.
        """
        return max((_buffers(kind, job) for kind in self.kinds), default=0)

    @property
    def communicator_bytes(self) -> int:
        return max((kind.choice.best.communicator_bytes for kind in self.kinds), default=0)

    @property
    def strategies(self) -> list[str]:
        """Labels of the strategies of all kinds, without repetition."""
        return list(dict.fromkeys(kind.choice.best.full_name for kind in self.kinds))


def _dims(call: Call) -> int:
    return call.headdim + call.headdim_v


def _buffers(kind: SplitAttention, job: DiffusionJob) -> int:
    call, size = kind.call, job.dtype.itemsize
    counted = result_bytes(call, size)
    if job.is_training:
        counted += input_bytes(call, size)  # their gradients
        if kind.choice.problem.replicated:
            # The block counts q, k and v of its rows; instead, the call keeps copies of own rows.
            counted += input_bytes(call, size)
    rows = job.own_video + (job.text if call.has_text else 0)
    return max(kind.choice.best.peak_bytes - job.batch * rows * counted, 0)


def input_bytes(call: Call, itemsize: int = 2) -> int:
    """Return the bytes of q, k and v for each row."""
    return call.nheads * (2 * call.headdim + call.headdim_v) * itemsize


def result_bytes(call: Call, itemsize: int = 2) -> int:
    """Return the bytes of out and lse for each row."""
    return call.nheads * call.headdim_v * itemsize + lse_bytes(call)


def lse_bytes(call: Call) -> int:
    """Return the bytes of lse for each row."""
    return 4 * call.nheads


def plan_attention(job: DiffusionJob) -> BlockAttentionPlan:
    """Return the plan of each kind of call over the rows of all ranks.

    Raises:
        ValueError: no strategy can run a call.
    """
    kinds = tuple(_planned_kinds(job))
    layout = kinds[0].choice.best.layout_name if kinds else job.layout
    return BlockAttentionPlan(layout, kinds)


def _planned_kinds(job: DiffusionJob) -> Iterator[SplitAttention]:
    for call, count in job.model.calls.items():
        if call.is_split:
            yield SplitAttention(call, count, _choice(job, call))


def _choice(job: DiffusionJob, call: Call) -> Choice:
    """Return the best strategy for a call."""
    text = job.text if call.has_text else 0
    return explain(
        seqlen=job.video + text,
        world_size=job.degrees.cp,
        batch=job.batch,
        nheads=call.nheads,
        headdim=call.headdim,
        headdim_v=call.headdim_v,
        dtype=job.dtype,
        causal=False,
        layout=job.layout,
        backward=job.is_training,
        cluster=job.cluster,
        memory_bytes=job.memory_bytes,
        replicated=text,
        **{"effort": "best", **job.explained},
    )
