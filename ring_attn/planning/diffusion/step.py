"""The time of a training step, or of a generation: a model of the device.

Products take their FLOPs at a share of the device's peak, other operators their bytes at the
memory's bandwidth, attention what `explain` simulates. Weights that FSDP gathers are hidden behind
the block before. Every rank computes the rows of the text, and everything outside of the blocks
that runs on whole tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ring_attn.planning.diffusion.attention import BlockAttentionPlan
from ring_attn.planning.diffusion.job import DiffusionJob
from ring_attn.planning.diffusion.sizes import Block, Rowwise
from ring_attn.planning.model.step import (
    AnyStep,
    collective_seconds,
    peak_flops,
    product_speed,
    unhidden_gather,
    unhidden_sums,
    update_seconds,
    waits_of,
)


@dataclass(frozen=True)
class DiffusionStep(AnyStep):
    """Seconds of a training step, or of all denoising steps of a generation.

    Attributes:
        attention, products, operators: compute.
        exposed: waits for messages, by what sends them; those of attention are a part of its time.
        optimizer: update of the weights.
        samples: samples of all ranks.
        rows: rows of a sample.
        passes: denoising steps of a sample; 1 in training.
        world_size: number of ranks.
        flops: FLOPs of the model for all samples, without recomputation.
        peak: peak FLOP/s of a rank; None if unknown.
    """

    attention: float
    products: float
    operators: float
    exposed: dict[str, float]
    optimizer: float
    samples: int
    rows: int
    passes: int
    world_size: int
    flops: float
    peak: float | None

    @cached_property
    def seconds(self) -> float:
        compute = self.attention + self.products + self.operators
        return compute + waits_of(self.exposed) + self.optimizer

    @property
    def samples_per_second(self) -> float:
        """Samples per second of all ranks."""
        return self.samples / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Rows per second and rank; in inference those of each denoising step."""
        return self.samples_per_second * self.rows * self.passes / self.world_size


def step_of(job: DiffusionJob, attention: BlockAttentionPlan) -> DiffusionStep:
    """Return the time of a training step, or of a generation."""
    batch = _Batch(job, attention)
    repeats = job.microbatches * (job.steps or 1)
    return DiffusionStep(
        attention=repeats * batch.attention,
        products=repeats * batch.products,
        operators=repeats * batch.operators,
        exposed={name: repeats * x for name, x in batch.exposed.items()},
        optimizer=update_seconds(job) if job.is_training else 0.0,
        samples=job.samples,
        rows=job.seqlen,
        passes=job.steps or 1,
        world_size=job.degrees.world_size,
        flops=model_flops(job, attention),
        peak=peak_flops(job),
    )


def model_flops(job: DiffusionJob, attention: BlockAttentionPlan) -> float:
    """Return the FLOPs of all samples, without what is computed twice.

    Rows of the text count once, though every rank computes them, and so does what runs on whole
    tensors. Attention counts visible pairs only.
    """
    model, rows = job.model, (job.video, job.text)
    directions = 3.0 if job.is_training else 1.0
    outside = model.outside
    per_sample = outside.flops_before.at(*rows) + outside.flops_after.at(*rows)
    for index in range(len(model.kinds)):
        block = model.of_block(index)
        per_sample += block.flops_forward.at(*rows) + block.flops_backward.at(*rows)
        per_sample += directions * _local_flops(block, *rows)
    pairs = directions * sum(kind.count * kind.flops for kind in attention.kinds)
    groups = job.degrees.dp * job.microbatches * (job.steps or 1)
    return groups * (job.batch * per_sample + pairs)


def _local_flops(block: Block, video: float, text: float) -> float:
    """Return the FLOPs of the forward of attention that sends nothing, of a sample."""
    return sum(call.local_flops(video, text) for call in block.calls if not call.is_split)


class _Batch:
    """Seconds of one batch: forward and backward in training, or one denoising step."""

    def __init__(self, job: DiffusionJob, plan: BlockAttentionPlan) -> None:
        self._job, self._plan = job, plan
        self._again = job.is_training and job.recompute != "none"
        self.attention = self.products = self.operators = 0.0
        self.exposed = {"attention": 0.0, "fsdp": 0.0, "output": 0.0}
        for index in range(len(job.model.kinds)):
            self._add_block(index)
        self._add_outside()
        self._add_output()

    def _add_block(self, index: int) -> None:
        job, block = self._job, self._job.model.of_block(index)
        mixed_forward, mixed_backward = self._attention_seconds(block)
        forward = self._rowwise(block.flops_forward, block.moved_forward) + mixed_forward
        backward = mixed_backward
        if self._again:
            backward += self._rowwise(block.flops_forward, block.moved_forward)
        if job.is_training:
            backward += self._rowwise(block.flops_backward, block.moved_backward)
        self.exposed["fsdp"] += unhidden_gather(job, index, forward)
        if job.is_training:
            self.exposed["fsdp"] += unhidden_sums(job, index, backward)

    def _rowwise(self, flops: Rowwise, moved: Rowwise, video: int | None = None) -> float:
        """Add products and other operators of a rank's rows; return their seconds."""
        job = self._job
        rows = job.own_video if video is None else video, job.text
        products = job.batch * flops.at(*rows) / product_speed(job)
        operators = job.batch * moved.at(*rows) / job.cluster.device.memory_bandwidth
        self.products += products
        self.operators += operators
        return products + operators

    def _attention_seconds(self, block: Block) -> tuple[float, float]:
        """Add the calls of attention of a block; return the seconds of both directions."""
        job, device = self._job, self._job.cluster.device
        again = job.is_training and job.recompute == "full"
        forward = backward = 0.0
        for call in block.calls:
            if call.is_split:
                kind = self._plan.of(call)
                forward += kind.forward.seconds
                backward += kind.backward.seconds + again * kind.forward.seconds
                self.exposed["attention"] += (1 + again) * kind.forward.exposed
                self.exposed["attention"] += kind.backward.exposed
                continue
            flops = job.batch * call.local_flops(job.own_video, job.text)
            of_forward = flops / device.forward.flops
            forward += of_forward
            if job.is_training:
                # The backward has five products of the forward's two.
                backward += 2.5 * flops / device.backward.flops + again * of_forward
        self.attention += forward + backward
        return forward, backward

    def _add_outside(self) -> None:
        job, outside = self._job, self._job.model.outside
        after = job.video if outside.ends_whole else job.own_video
        self._rowwise(outside.flops_before, outside.moved_before, job.video)
        self._rowwise(outside.flops_after, outside.moved_after, after)

    def _add_output(self) -> None:
        """Add the time in which the rows of the last block are gathered, and their gradients sent.

        If the output module runs on a rank's rows, it gathers fewer bytes: this is an upper bound.
        """
        job = self._job
        last = job.model.of_block(len(job.model.kinds) - 1)
        nbytes = job.batch * job.own_video * last.inputs.video
        directions = 2 if job.is_training else 1
        self.exposed["output"] = directions * collective_seconds(job, nbytes, job.degrees.cp, 1)
