"""The time of a step, by what takes it: a model of the device, except for attention's simulation.

Products take their FLOPs at a share of the device's peak, other operators their bytes at the
memory's bandwidth, attention what `explain` simulates. Weights that FSDP gathers are hidden behind
the layer before; messages of TP and EP are not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2

from ring_attn.planning.model.architecture import Attention, Recurrence
from ring_attn.planning.model.attention import AttentionPlan, recurrence_seconds
from ring_attn.planning.model.degrees import stages_of
from ring_attn.planning.model.job import AnyJob, Job, optimizer_bytes
from ring_attn.planning.model.memory import layer_weights, sharded_weights

# Peak FLOP/s of 16-bit products without sparsity, of the device whose rates an architecture has:
# A100, H100 SXM and B200, by their datasheets.
PEAK_FLOPS = {"sm_80": 312e12, "sm_90": 989e12, "sm_100": 2250e12}

# Share of the peak that a model's products reach: an estimate, with which plans have the tokens/s
# that torchtitan has published for Llama 3 on A100 and H100 within a tenth (docs/fits.md). A B200
# is assumed to have the share of an H100.
PRODUCT_SHARES = {"sm_80": 0.7, "sm_90": 0.6, "sm_100": 0.6}

# Gradients are summed in float32.
GRADIENT_BYTES = 4


def product_speed(job: AnyJob) -> float:
    """Return the FLOP/s of products; of unknown devices, that of attention."""
    peak = peak_flops(job)
    if peak is None:
        return job.cluster.device.forward.flops
    return PRODUCT_SHARES[job.cluster.device.architecture] * peak


def peak_flops(job: AnyJob) -> float | None:
    """Return the peak of a device's products, or None if it is not known.

    Products in float32 run as TF32, at half the peak of 16 bits.
    """
    device = job.cluster.device
    peak = PEAK_FLOPS.get(device.architecture)
    if peak is None or job.dtype.itemsize > 4:
        return None
    return peak * device.speed * 2 / job.dtype.itemsize


class AnyStep(ABC):
    """The figures of any step that follow from its seconds; `Step` describes the fields."""

    exposed: dict[str, float]
    world_size: int
    flops: float
    peak: float | None

    @property
    @abstractmethod
    def seconds(self) -> float: ...

    @property
    @abstractmethod
    def tokens_per_second(self) -> float: ...

    @property
    def mfu(self) -> float | None:
        """Share of the peak that the model's FLOPs reach; None if the peak is unknown."""
        if self.peak is None:
            return None
        return self.flops / self.seconds / self.world_size / self.peak


def waits_of(exposed: Mapping[str, float]) -> float:
    """Return the seconds of all waits, except those of attention, which are a part of its time."""
    return sum(x for name, x in exposed.items() if name != "attention")


@dataclass(frozen=True)
class Step(AnyStep):
    """Seconds of a step on the busiest stage, by what takes them; `exposed` lets nothing run.

    Attributes:
        attention, products, operators, recurrences: compute of all batches.
        exposed: waits for messages, by what sends them; those of attention are a part of its time.
        bubble: time in which a stage of a pipeline waits for others.
        optimizer: update of the weights.
        tokens: tokens of a step, of all ranks.
        world_size: number of ranks.
        flops: FLOPs of the model in a step, without recomputation.
        peak: peak FLOP/s of a rank; None if unknown.
    """

    attention: float
    products: float
    operators: float
    recurrences: float
    exposed: dict[str, float]
    bubble: float
    optimizer: float
    tokens: int
    world_size: int
    flops: float
    peak: float | None

    @cached_property
    def seconds(self) -> float:
        compute = self.attention + self.products + self.operators + self.recurrences
        return compute + waits_of(self.exposed) + self.bubble + self.optimizer

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and rank."""
        return self.tokens / self.seconds / self.world_size


def step_of(job: Job, attention: AttentionPlan) -> Step:
    """Return the time of a step."""
    stages = stages_of(len(job.model.architecture.layers), job.degrees.pp)
    every = [_Stage(job, attention, stage, layers) for stage, layers in enumerate(stages)]
    busiest = max(every, key=lambda stage: stage.seconds)
    batches, pp = job.microbatches, job.degrees.pp
    return Step(
        attention=batches * busiest.attention,
        products=batches * busiest.products,
        operators=batches * busiest.operators,
        recurrences=batches * busiest.recurrences,
        exposed={name: batches * x for name, x in busiest.exposed.items()},
        bubble=(pp - 1) * busiest.seconds,
        optimizer=update_seconds(job),
        tokens=job.tokens,
        world_size=job.degrees.world_size,
        flops=model_flops(job, attention),
        peak=peak_flops(job),
    )


def model_flops(job: Job, attention: AttentionPlan) -> float:
    """Return the FLOPs of a step in all ranks: 6 for each token and weight, and attention's.

    Attention counts visible pairs only, and nothing is counted twice for recomputation.
    """
    architecture = job.model.architecture
    share = architecture.experts_per_token / max(architecture.experts, 1)
    products = 6.0 * job.tokens * job.model.weights.visited(share)
    calls = job.degrees.dp * job.microbatches
    pairs = 3.0 * calls * sum(kind.count * kind.flops for kind in attention.kinds)
    return products + pairs


def update_seconds(job: AnyJob) -> float:
    """Return the seconds in which the weights are updated: each is read and written once."""
    if job.optimizer == "none":
        return 0.0
    size, states = job.weight_dtype.itemsize, optimizer_bytes(job)
    held = max(sharded_weights(job, stage) for stage in range(job.degrees.pp))
    return held * (3 * size + 2 * states) / job.cluster.device.memory_bandwidth


class _Stage:
    """Seconds of one batch, forward and backward, on a stage of the pipeline."""

    def __init__(self, job: Job, plan: AttentionPlan, stage: int, layers: range) -> None:
        self._job, self._plan = job, plan
        self._again = job.recompute != "none"
        self.attention = self.products = self.operators = self.recurrences = 0.0
        self.exposed = {"attention": 0.0, "fsdp": 0.0, "tp": 0.0, "ep": 0.0, "states": 0.0}
        for index in layers:
            self._add_layer(index)
        if stage == job.degrees.pp - 1:
            self._add_head()
        if job.degrees.tp == 1:
            del self.exposed["tp"]
        if job.degrees.ep == 1:
            del self.exposed["ep"]
        if not job.model.architecture.recurrences:
            del self.exposed["states"]

    @property
    def seconds(self) -> float:
        compute = self.attention + self.products + self.operators + self.recurrences
        return compute + waits_of(self.exposed)

    def _add_layer(self, index: int) -> None:
        job = self._job
        layer = job.model.architecture.layers[index]
        forward, backward = self._row_seconds(index)
        mixed = self._mixer(layer.mixer)
        before, after = forward + mixed[0], backward + mixed[1]
        self.exposed["fsdp"] += unhidden_gather(job, index, before)
        self.exposed["fsdp"] += unhidden_sums(job, index, after)
        hidden = job.rows * job.model.architecture.hidden * job.dtype.itemsize
        passes = 3 if self._again else 2
        if job.degrees.tp > 1:
            # Rows are gathered, and sums scattered, around attention and the feedforward part.
            each = hidden / job.degrees.tp
            of_pass = 4 * collective_seconds(job, each, job.degrees.tp, 1)
            self.exposed["tp"] += passes * of_pass
        part = layer.feedforward
        if job.degrees.ep > 1 and part is not None and part.experts:
            tokens = hidden * part.per_token / job.degrees.tp / job.degrees.ep
            of_pass = 2 * all_to_all_seconds(job, tokens, job.degrees.ep, job.degrees.tp)
            self.exposed["ep"] += passes * of_pass

    def _row_seconds(self, index: int) -> tuple[float, float]:
        """Add products and other operators of a layer; return the seconds of both directions."""
        job = self._job
        weights, part = job.model.weights.layers[index], job.model.architecture.layers[index]
        experts = part.feedforward
        share = experts.per_token / experts.experts if experts and experts.experts else 0.0
        rows = job.rows / job.degrees.tp
        product = 2.0 * rows * (weights.dense + share * weights.experts) / product_speed(job)
        moved, bandwidth = (
            job.model.activations.of_layer(index),
            job.cluster.device.memory_bandwidth,
        )
        operators = moved.moved_forward * rows / bandwidth
        back_products = (3 if self._again else 2) * product
        back_operators = moved.moved_backward * rows / bandwidth + self._again * operators
        self.products += product + back_products
        self.operators += operators + back_operators
        return product + operators, back_products + back_operators

    def _mixer(self, mixer: Attention | Recurrence | None) -> tuple[float, float]:
        """Add what mixes the rows of a layer; return the seconds of both directions."""
        if mixer is None:
            return 0.0, 0.0
        if isinstance(mixer, Attention):
            kind = self._plan.of(mixer)
            again = self._job.recompute == "full"
            forward, backward = kind.forward, kind.backward + again * kind.forward
            self.attention += forward + backward
            self.exposed["attention"] += (1 + again) * kind.exposed_forward + kind.exposed_backward
            return forward, backward
        forward = recurrence_seconds(self._job, mixer, product_speed(self._job))
        states = self._plan.seconds_of_states[mixer]
        self.recurrences += (4 if self._again else 3) * forward
        self.exposed["states"] += (3 if self._again else 2) * states
        return forward, (3 if self._again else 2) * forward

    def _add_head(self) -> None:
        job = self._job
        rows = job.rows / job.degrees.tp
        product = 2.0 * rows * job.model.weights.projection / product_speed(job)
        # A fused loss computes the gradients with the logits; neither is computed twice.
        self.products += 3 * product
        moved = job.model.activations.head.moved * rows
        self.operators += moved / job.cluster.device.memory_bandwidth


# -- FSDP


def unhidden_gather(job: AnyJob, index: int, forward: float) -> float:
    """Return the seconds of the gather of a layer's weights that its forward does not hide."""
    return max(gather_seconds(job, index) - forward, 0.0)


def unhidden_sums(job: AnyJob, index: int, backward: float) -> float:
    """Return the seconds of a second gather, and of sums of gradients, that a backward leaves."""
    messages = gather_seconds(job, index) + gradient_seconds(job, index)
    return max(messages - backward, 0.0)


def gather_seconds(job: AnyJob, index: int) -> float:
    """Return the seconds in which ranks gather the weights of a layer."""
    degrees = job.degrees
    shard = layer_weights(job, index) / degrees.fsdp
    return collective_seconds(job, shard * job.dtype.itemsize, degrees.fsdp, degrees.tp)


def gradient_seconds(job: AnyJob, index: int) -> float:
    """Return the seconds in which ranks sum the gradients of a layer's weights.

    Ranks that do not share weights sum the gradients of their shards: a scatter and a gather.
    """
    degrees = job.degrees
    shard = layer_weights(job, index) / degrees.fsdp
    scatter = collective_seconds(job, shard * GRADIENT_BYTES, degrees.fsdp, degrees.tp)
    replicas = degrees.dp * degrees.cp // degrees.fsdp
    part, stride = shard * GRADIENT_BYTES / replicas, degrees.fsdp * degrees.tp
    return scatter + 2 * collective_seconds(job, part, replicas, stride)


# -- collectives, by NCCL's rings


def collective_seconds(job: AnyJob, shard_bytes: float, size: int, stride: int) -> float:
    """Return the seconds of an all-gather or reduce-scatter of a shard from each rank.

    Rings use the ports of all ranks of a node. `stride` is the distance of neighbours of the group.
    """
    if size == 1:
        return 0.0
    cluster = job.cluster
    here = max(min(size, cluster.node_size // stride), 1)
    sent = shard_bytes * (size - 1)
    inside = sent / cluster.inside.bandwidth if here > 1 else 0.0
    if here >= size:
        return cluster.inside.latency * ceil(log2(size)) + inside
    across = sent / (here * cluster.between.bandwidth)
    return cluster.between.latency * ceil(log2(size)) + max(inside, across)


def all_to_all_seconds(job: Job, part_bytes: float, size: int, stride: int) -> float:
    """Return the seconds in which each rank sends a part to each other rank."""
    cluster = job.cluster
    here = max(min(size, cluster.node_size // stride), 1)
    inside = part_bytes * (here - 1) / cluster.inside.bandwidth
    across = part_bytes * (size - here) / cluster.between.bandwidth
    latency = cluster.between.latency if size > here else cluster.inside.latency
    return latency + max(inside, across)
