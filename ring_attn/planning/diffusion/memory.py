"""The memory of a rank, by what holds it."""

from __future__ import annotations

from dataclasses import replace

from ring_attn.core.dtypes import dtype_name
from ring_attn.planning.diffusion.attention import input_bytes, lse_bytes, result_bytes
from ring_attn.planning.diffusion.job import DiffusionJob
from ring_attn.planning.diffusion.sizes import Block, Call
from ring_attn.planning.model.memory import (
    GATHERED_LAYERS,
    Memory,
    Part,
    layer_weights,
    of_device,
    of_weights,
    sharded_weights,
)

GATHERED = "of two blocks, and those outside of them"


def memory_of(job: DiffusionJob, attention_bytes: float, communicator_bytes: float) -> Memory:
    """Return the memory of a rank.

    `attention_bytes` and `communicator_bytes` are of `BlockAttentionPlan`.
    """
    kept, working = _kept(job), _one_block(job)
    outside = max(_after(job), _before(job) - kept)  # before the first block nothing is kept
    in_block = working + attention_bytes >= outside
    weights = _of_training(job) if job.is_training else _of_inference(job)
    words = f"kept for the backward, recomputation: {job.recompute}"
    parts = [
        *weights,
        Part("activations", kept, words if job.is_training else "held by all blocks"),
        Part("one block", working, "the most that a block holds", at_peak=in_block),
        Part(
            "attention's buffers", attention_bytes, "messages and sums of a call", at_peak=in_block
        ),
        Part("outside of blocks", outside, "embeddings and output", at_peak=not in_block),
    ]
    moving = kept + max(working + attention_bytes, outside)
    return Memory((*parts, *of_device(job, moving, communicator_bytes)))


def _of_training(job: DiffusionJob) -> list[Part]:
    """Return the bytes of weights, gradients and optimizer."""
    return [
        replace(part, words=GATHERED) if part.name == "gathered weights" else part
        for part in of_weights(job, 0)
    ]


def _of_inference(job: DiffusionJob) -> list[Part]:
    """Return the bytes of weights that have no gradients."""
    sharded, ranks = sharded_weights(job, 0), job.degrees.fsdp
    largest = max(layer_weights(job, index) for index in range(len(job.weights.layers)))
    gathered = GATHERED_LAYERS * largest + job.weights.others if ranks > 1 else 0.0
    words = dtype_name(job.weight_dtype) + (f", shared by {ranks} ranks" if ranks > 1 else "")
    return [
        Part("weights", sharded * job.weight_dtype.itemsize, words),
        Part("gathered weights", gathered * job.dtype.itemsize, GATHERED),
    ]


# -- activations


def _kept(job: DiffusionJob) -> float:
    """Return the bytes that all blocks keep, and what is held from before the first one on.

    If blocks are computed again, the first one keeps the rows of all ranks, which it splits.
    """
    model, first = job.model, job.model.of_block(0)
    nbytes = model.outside.kept.at(job.video, job.text)
    video = job.own_video
    if job.is_training:
        blocks = (model.of_block(index) for index in range(len(model.kinds)))
        nbytes += sum(_kept_of_block(job, block) for block in blocks)
        video = job.own_video if job.recompute == "none" else job.video
    nbytes += first.inputs.at(video, job.text)
    return job.batch * nbytes


def _kept_of_block(job: DiffusionJob, block: Block) -> float:
    """Return the bytes that a block keeps of a sample, without the first block's inputs."""
    if job.recompute == "none":
        copies = sum(_copied(job, call) for call in block.calls)
        return block.kept.at(job.own_video, job.text) + copies
    inputs = block.inputs.at(job.own_video, job.text)
    return inputs + _results(job, block) if job.recompute == "attention" else inputs


def _copied(job: DiffusionJob, call: Call) -> float:
    """Return the bytes that a call keeps beyond what its block counts, if other ranks own rows.

    The call keeps copies of the own rows, also of out; the block counts q, k, v and lse of all rows
    of the rank.
    """
    if not (call.is_split and call.has_text and job.text and job.degrees.cp > 1):
        return 0.0
    inputs = input_bytes(call, job.dtype.itemsize)
    own = (job.own_video + job.own_text) * (inputs + result_bytes(call, job.dtype.itemsize))
    return own - (job.own_video + job.text) * (inputs + lse_bytes(call))


def _results(job: DiffusionJob, block: Block) -> float:
    """Return the bytes of the results of a block's attention."""
    nbytes = 0.0
    for call in block.calls:
        has_own_text = call.has_text and call.is_split
        rows = job.own_video + (job.own_text if has_own_text else 0)
        nbytes += rows * result_bytes(call, job.dtype.itemsize)
    return nbytes


def _one_block(job: DiffusionJob) -> float:
    """Return the most bytes that a block holds while it runs, beyond what is kept."""
    rows = job.own_video, job.text
    if not job.is_training:
        return job.batch * max(block.forward.at(*rows) for block in job.model.blocks)
    peak = 0.0
    for block in job.model.blocks:
        saved = 0.0
        if job.recompute == "none":
            saved = _kept_of_block(job, block)
        elif job.recompute == "attention":
            saved = _results(job, block)
        peak = max(peak, block.backward.at(*rows) - saved)
    return job.batch * peak


def _before(job: DiffusionJob) -> float:
    """Return the most bytes that are held before the first block, of the rows of all ranks."""
    return job.batch * job.model.outside.before.at(job.video, job.text)


def _after(job: DiffusionJob) -> float:
    """Return the most bytes that are held after the last block, beyond what is kept.

    If everything after the last block runs on the rows of all ranks, they are gathered first.
    """
    outside, last = job.model.outside, job.model.of_block(len(job.model.kinds) - 1)
    if not outside.ends_whole:
        return job.batch * outside.after.at(job.own_video, job.text)
    gathered = last.inputs.video * job.video if job.degrees.cp > 1 else 0.0
    return job.batch * (outside.after.at(job.video, job.text) + gathered)
