"""The attention of a step: the strategy, the time and the buffers of each kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.runs import plan_states
from ring_attn.planning.choice import Choice
from ring_attn.planning.model.architecture import Attention, Recurrence
from ring_attn.planning.model.formulas import recurrence_flops, result_bytes
from ring_attn.planning.model.job import Job
from ring_attn.planning.planner import explain

# Layouts among which all layers share the best.
LAYOUTS = ("zigzag", "contiguous")

# Share of a device's peak that the kernels of recurrences reach: an estimate.
RECURRENCE_SHARE = 0.15


@dataclass(frozen=True)
class LayerAttention:
    """Attention of the layers of one kind; times are of one layer and one batch."""

    attention: Attention
    count: int
    choice: Choice

    @property
    def forward(self) -> float:
        prediction = self.choice.best.prediction
        assert prediction is not None, "the best candidate has been simulated"
        return prediction.forward.seconds

    @property
    def backward(self) -> float:
        return self.choice.best.seconds - self.forward

    @property
    def exposed_forward(self) -> float:
        prediction = self.choice.best.prediction
        assert prediction is not None, "the best candidate has been simulated"
        return prediction.forward.exposed

    @property
    def exposed_backward(self) -> float:
        prediction = self.choice.best.prediction
        assert prediction is not None and prediction.backward is not None
        return prediction.backward.exposed

    @property
    def flops(self) -> float:
        """FLOPs of all ranks of a forward, over visible pairs only."""
        spec = self.choice.problem.spec
        dims = self.attention.headdim + self.attention.headdim_v
        return 2.0 * spec.batch * self.attention.nheads * dims * self.choice.problem.mask.area


@dataclass(frozen=True)
class AttentionPlan:
    """The attention of all layers, over one layout.

    Attributes:
        layout: name of the layout.
        kinds: the kinds of layers with attention.
        seconds_of_states: exposed seconds in which a recurrent layer passes on its states, forward.
    """

    layout: str
    kinds: tuple[LayerAttention, ...]
    seconds_of_states: Mapping[Recurrence, float]

    def of(self, attention: Attention) -> LayerAttention:
        return next(kind for kind in self.kinds if kind.attention == attention)

    @property
    def seconds(self) -> float:
        return sum(kind.count * kind.choice.best.seconds for kind in self.kinds)

    def buffer_bytes(self, job: Job) -> int:
        """Return the most bytes that a call holds beyond tensors that are counted elsewhere.

        Its results, and the gradients of its inputs, are activations of the layer.
        """
        found = [0]
        for kind in self.kinds:
            one = _of_rank(kind.attention, job.degrees.tp)
            inputs = one.nheads * one.headdim + one.nheads_kv * (one.headdim + one.headdim_v)
            size = job.dtype.itemsize
            counted = job.rows * (result_bytes(one, size) + inputs * size)
            found.append(kind.choice.best.peak_bytes - counted)
        return max(found)

    @property
    def communicator_bytes(self) -> int:
        return max((kind.choice.best.communicator_bytes for kind in self.kinds), default=0)

    @property
    def strategies(self) -> list[str]:
        """Labels of the strategies of all kinds, without repetition."""
        return list(dict.fromkeys(kind.choice.best.full_name for kind in self.kinds))


def plan_attention(job: Job) -> AttentionPlan:
    """Return the plan over the layout in which all layers together take least time.

    Raises:
        ValueError: no strategy can run a kind of attention.
    """
    names = LAYOUTS if job.layout == "auto" else (job.layout,)
    if job.degrees.cp == 1:
        names = names[:1]
    plans = [_over_layout(job, name) for name in names]
    return min(plans, key=lambda plan: plan.seconds)


def _of_rank(attention: Attention, tp: int) -> Attention:
    """Return the heads of a rank."""
    return replace(attention, nheads=attention.nheads // tp, nheads_kv=attention.nheads_kv // tp)


def _over_layout(job: Job, layout: str) -> AttentionPlan:
    architecture = job.model.architecture
    kinds = tuple(
        LayerAttention(attention, count, _choice(job, attention, layout))
        for attention, count in architecture.attentions.items()
    )
    if kinds:
        shards = kinds[0].choice.layout
    else:
        shards = SequenceLayout.from_name(layout, job.seqlen, job.degrees.cp)
    states = {
        recurrence: _seconds_of_states(job, recurrence, shards)
        for recurrence in architecture.recurrences
    }
    return AttentionPlan(layout, kinds, states)


def _choice(job: Job, attention: Attention, layout: str) -> Choice:
    """Return the best strategy for the calls of one kind of layer."""
    one = _of_rank(attention, job.degrees.tp)
    cuts = set(job.documents or (0, job.seqlen))
    if attention.chunk is not None:
        cuts |= set(range(0, job.seqlen, attention.chunk))
    # Ranks of one sequence are neighbours, apart from the ranks of tensor parallelism.
    node_size = max(job.cluster.node_size // job.degrees.tp, 1)
    return explain(
        seqlen=job.seqlen,
        world_size=job.degrees.cp,
        batch=job.batch,
        nheads=one.nheads,
        nheads_kv=one.nheads_kv,
        headdim=one.headdim,
        headdim_v=one.headdim_v,
        dtype=job.dtype,
        causal=True,
        window_size=(-1, -1) if one.window is None else (one.window - 1, 0),
        softcap=one.softcap,
        cu_seqlens=sorted(cuts) if len(cuts) > 2 else None,
        layout=layout,
        cluster=replace(job.cluster, node_size=node_size),
        memory_bytes=job.memory_bytes,
        effort="best",
        **job.explained,
    )


def _seconds_of_states(job: Job, recurrence: Recurrence, layout: SequenceLayout) -> float:
    """Return the seconds in which ranks pass on the states of a layer, which nothing hides."""
    cp, nbytes = job.degrees.cp, recurrence.state_bytes * job.batch // job.degrees.tp
    if cp == 1 or not nbytes:
        return 0.0
    cuts = job.documents or (0, job.seqlen)
    plan = plan_states(layout, tuple(cuts), nbytes)
    link = job.cluster.between if cp > job.cluster.node_size else job.cluster.inside
    sent = max(plan.sent(rank) for rank in range(cp)) * nbytes
    return len(plan.rounds) * link.latency + sent / link.bandwidth


def recurrence_seconds(job: Job, recurrence: Recurrence, peak: float) -> float:
    """Return an estimate of the seconds of a recurrence's forward, for one layer and batch."""
    return recurrence_flops(recurrence) * job.rows / job.degrees.tp / (RECURRENCE_SHARE * peak)
