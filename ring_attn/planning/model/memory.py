"""The memory of a rank in a step, by what holds it."""

from __future__ import annotations

from dataclasses import dataclass

from ring_attn.core.dtypes import dtype_name
from ring_attn.machines.count import CONNECTION_BYTES, SHARED_NET_BYTES
from ring_attn.planning.model.architecture import Attention
from ring_attn.planning.model.degrees import stages_of
from ring_attn.planning.model.formulas import result_bytes
from ring_attn.planning.model.job import AnyJob, Job, device_type, optimizer_bytes

# Estimates: what CUDA and its libraries take; the share of what comes and goes in a step that the
# allocator cannot use again; channels of an NCCL communicator with its defaults.
CONTEXT_BYTES = 800_000_000
FRAGMENTATION = 0.05
NCCL_CHANNELS = 16

# FSDP gathers the weights of the next layer while one computes.
GATHERED_LAYERS = 2
# Bytes of a weight's gradient before it is reduced, in addition to the 16 bits: in float32.
REDUCED_BYTES = 4


@dataclass(frozen=True)
class Part:
    """What holds memory of a rank.

    Attributes:
        name: what it is.
        nbytes: its bytes.
        words: what they are, in words.
        is_estimate: whether the number is assumed.
        at_peak: whether they are held at the moment at which a rank holds most.
    """

    name: str
    nbytes: float
    words: str = ""
    is_estimate: bool = False
    at_peak: bool = True


@dataclass(frozen=True)
class Memory:
    """The memory of the rank that holds most.

    Attributes:
        parts: bytes by what holds them.
        stage: the stage of the pipeline that holds most.
    """

    parts: tuple[Part, ...]
    stage: int = 0

    @property
    def total(self) -> float:
        return sum(part.nbytes for part in self.parts if part.at_peak)

    @property
    def fixed(self) -> float:
        """Bytes that do not depend on the length of sequences."""
        return sum(part.nbytes for part in self.parts if part.name in FIXED)


def memory_of(job: Job, attention_bytes: float, communicator_bytes: float) -> Memory:
    """Return the memory of the rank that holds most, over the stages of a pipeline.

    `attention_bytes` and `communicator_bytes` are of `AttentionPlan`.
    """
    stages = stages_of(len(job.model.architecture.layers), job.degrees.pp)
    every = [
        Memory(tuple(_parts(job, stage, attention_bytes, communicator_bytes)), stage)
        for stage in range(len(stages))
    ]
    return max(every, key=lambda memory: memory.total)


def _parts(job: Job, stage: int, attention_bytes: float, communicator_bytes: float) -> list[Part]:
    kept, working = _activations(job, stage)
    head = _head(job, stage)
    # The loss comes before the backward of the last layer.
    in_layer = working + attention_bytes >= head
    parts = [
        *of_weights(job, stage),
        Part("activations", kept, f"kept for the backward, recomputation: {job.recompute}"),
        Part("one layer", working, "the most that a layer holds", at_peak=in_layer),
        Part(
            "attention's buffers", attention_bytes, "messages and sums of a call", at_peak=in_layer
        ),
        Part("logits and loss", head, job.loss, job.loss == "fused", at_peak=not in_layer),
    ]
    moving = kept + max(working + attention_bytes, head)
    return [*parts, *of_device(job, moving, communicator_bytes)]


def of_device(job: AnyJob, moving: float, communicator_bytes: float) -> list[Part]:
    """Return what a GPU and its libraries take; `moving` are the bytes that come and go."""
    if device_type(job) != "cuda":
        return []
    return [
        Part("NCCL", communicator_bytes + _nccl(job), "buffers of communicators", True),
        Part("CUDA", CONTEXT_BYTES, "its context and libraries", True),
        Part("fragmentation", FRAGMENTATION * moving, "5 % of what comes and goes", True),
    ]


# Names of the parts that do not depend on the length of sequences.
FIXED = {"weights", "gathered weights", "gradients", "optimizer", "NCCL", "CUDA"}


# -- weights


def sharded_weights(job: AnyJob, stage: int) -> float:
    """Return the weights that a rank of a stage holds between uses."""
    weights, degrees = job.weights, job.degrees
    layers = stages_of(len(weights.layers), degrees.pp)[stage]
    dense = sum(weights.layers[i].dense for i in layers) + _outside(job, stage)
    experts = sum(weights.layers[i].experts for i in layers)
    return (dense / degrees.fsdp + experts / degrees.expert_ways) / degrees.tp


def _outside(job: AnyJob, stage: int) -> int:
    """Return the weights outside of layers in a stage: the embedding, and the head."""
    weights, last = job.weights, job.degrees.pp - 1
    first = weights.embedding if stage == 0 else 0
    if stage != last:
        return first
    shared = weights.embedding if weights.head == 0 and last > 0 else 0
    return first + weights.head + shared + weights.others


def layer_weights(job: AnyJob, index: int) -> float:
    """Return the weights of a layer that a rank has while the layer runs."""
    layer = job.weights.layers[index]
    return (layer.dense + layer.experts / job.degrees.ep) / job.degrees.tp


def of_weights(job: AnyJob, stage: int) -> list[Part]:
    """Return the bytes of weights, gradients and optimizer."""
    degrees = job.degrees
    sharded = sharded_weights(job, stage)
    layers = stages_of(len(job.weights.layers), degrees.pp)[stage]
    largest = max(layer_weights(job, i) for i in layers)
    outside = _outside(job, stage) / degrees.tp
    casts = job.weight_dtype.itemsize != job.dtype.itemsize
    gathered = reduced = 0.0
    if degrees.fsdp > 1 or casts:
        gathered = (GATHERED_LAYERS * largest + outside) * job.dtype.itemsize
    if degrees.fsdp > 1:
        # Gradients of one layer's weights before their sum is scattered, and those of the embedding
        # and the head, whose sum is the last.
        reduced = largest * (job.dtype.itemsize + REDUCED_BYTES) + outside * job.dtype.itemsize
    size = job.weight_dtype.itemsize
    ranks = degrees.fsdp * degrees.tp * degrees.pp
    words = dtype_name(job.weight_dtype)
    words += f", shared by {ranks} ranks" if ranks > 1 else ""
    return [
        Part("weights", sharded * size, words),
        Part("gathered weights", gathered, "of two layers, embedding and head"),
        Part("gradients", sharded * size + reduced, "with those that are not yet reduced"),
        Part("optimizer", sharded * optimizer_bytes(job), job.optimizer),
    ]


# -- activations


def _activations(job: Job, stage: int) -> tuple[float, float]:
    """Return the bytes that all layers of a stage keep, and those of one layer while it runs."""
    model, degrees = job.model, job.degrees
    layers = stages_of(len(model.architecture.layers), degrees.pp)[stage]
    kept = sum(_kept(job, i) for i in layers)
    if stage == 0:
        kept += model.activations.head.before
    working = max(model.activations.of_layer(i).backward - _saved(job, i) for i in layers)
    if job.recompute != "none":
        working += _gathered_rows(job)
    # 1F1B: a stage has as many batches under way as stages follow it, and its own.
    under_way = min(job.microbatches, degrees.pp - stage)
    rows = job.rows / degrees.tp
    dispatched = _dispatched(job) if model.architecture.experts and degrees.ep > 1 else 0.0
    return under_way * kept * rows, working * rows + dispatched


def _saved(job: Job, index: int) -> float:
    """Return the bytes of a row that a layer's forward has kept when its backward begins."""
    if job.recompute == "none":
        return job.model.activations.of_layer(index).kept
    return _results(job, index) if job.recompute == "attention" else 0.0


def _kept(job: Job, index: int) -> float:
    """Return the bytes of a row that a layer keeps for its backward, on one of tp ranks."""
    hidden = job.model.architecture.hidden * job.dtype.itemsize
    if job.recompute != "none":
        kept = _results(job, index) if job.recompute == "attention" else 0
        return hidden + kept
    return job.model.activations.of_layer(index).kept + _gathered_rows(job)


def _gathered_rows(job: Job) -> float:
    """Return the bytes of the rows of all tp ranks, which attention and feedforward part keep."""
    tp = job.degrees.tp
    return 2 * job.model.architecture.hidden * job.dtype.itemsize * tp if tp > 1 else 0.0


def _results(job: Job, index: int) -> float:
    """Return the bytes of a row of attention's results; 0 in layers without it."""
    mixer = job.model.architecture.layers[index].mixer
    return result_bytes(mixer, job.dtype.itemsize) if isinstance(mixer, Attention) else 0.0


def _dispatched(job: Job) -> float:
    """Return the bytes of tokens that are sent to experts, and of those that are received."""
    architecture = job.model.architecture
    tokens = job.rows * architecture.experts_per_token / job.degrees.tp
    return 2 * tokens * architecture.hidden * job.dtype.itemsize


def _head(job: Job, stage: int) -> float:
    """Return the bytes of the last norm, logits and loss on the last stage.

    A fused loss has as many logits at a time as the rows have elements, as Liger's, and makes the
    gradient of the projection at once.
    """
    if stage != job.degrees.pp - 1:
        return 0.0
    model, rows = job.model, job.rows / job.degrees.tp
    if job.loss == "logits":
        return model.activations.head.peak * rows
    hidden = model.architecture.hidden
    at_a_time = min(hidden, model.architecture.vocab) * (2 * job.dtype.itemsize + 4)
    gradient = model.weights.projection / job.degrees.tp * job.dtype.itemsize
    return (at_a_time + 4 * hidden * job.dtype.itemsize) * rows + gradient


# -- NCCL


def _nccl(job: AnyJob) -> float:
    """Return an estimate of the bytes of the communicators of FSDP, TP, PP and EP."""
    degrees, node_size = job.degrees, job.cluster.node_size
    groups = {
        "fsdp": (degrees.fsdp, degrees.fsdp * degrees.tp),
        "tp": (degrees.tp, degrees.tp),
        "ep": (degrees.ep, degrees.ep * degrees.tp),
        "pp": (degrees.pp, job.degrees.world_size),
    }
    total = 0.0
    for size, spanned in groups.values():
        if size > 1:
            total += NCCL_CHANNELS * CONNECTION_BYTES
            total += 2 * NCCL_CHANNELS * SHARED_NET_BYTES if spanned > node_size else 0
    return total
