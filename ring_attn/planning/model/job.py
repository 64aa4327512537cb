"""A training job as data: the model with its sizes, the sequences, the ranks and the options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import torch

from ring_attn.machines.cluster import Cluster
from ring_attn.planning.model import formulas
from ring_attn.planning.model.architecture import Architecture
from ring_attn.planning.model.config import ModelConfig
from ring_attn.planning.model.degrees import Degrees
from ring_attn.planning.model.sizes import Activations, Weights
from ring_attn.planning.model.traced import NotTraceableError, trace

# What the forward keeps of a layer: everything; its input, and out and lse of attention; its input.
Recompute: TypeAlias = Literal["none", "attention", "full"]
# All logits at once, or projection and loss by chunks of rows.
Loss: TypeAlias = Literal["logits", "fused"]

RECOMPUTE: tuple[Recompute, ...] = ("none", "attention", "full")  # the fastest first
LOSSES: tuple[Loss, ...] = ("logits", "fused")

# The states that an optimizer has for each weight: their number, and the bytes of one; None is as
# many as the weight has.
OPTIMIZERS: dict[str, tuple[int, int | None]] = {
    "adamw": (2, None),
    "adamw-8bit": (2, 1),
    "sgd": (0, None),
    "momentum": (1, None),
    "none": (0, None),
}


@dataclass(frozen=True)
class SizedModel:
    """A model with its weights and activations.

    Attributes:
        architecture: its layers.
        weights: numbers of its weights.
        activations: bytes of its activations.
        note: why the module was not traced; "" if it was.
    """

    architecture: Architecture
    weights: Weights
    activations: Activations
    note: str = ""


def sized(model: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> SizedModel:
    """Return a model with its sizes: of the real module where it can be traced, else by formula.

    Example:
        >>> from ring_attn.planning.model.config import read_model
        >>> sized(read_model("llama-3-8b")).weights.total
        8030261248
    """
    architecture = model.architecture
    try:
        traced = trace(model.values, dtype)
    except NotTraceableError as error:
        weights = formulas.weights_of(architecture)
        activations = formulas.activations_of(architecture, dtype.itemsize)
        return SizedModel(architecture, weights, activations, str(error))
    return SizedModel(architecture, traced.weights, traced.activations)


class AnyJob(Protocol):
    """Fields that the jobs of language models and of diffusion transformers share."""

    @property
    def weights(self) -> Weights: ...
    @property
    def degrees(self) -> Degrees: ...
    @property
    def cluster(self) -> Cluster: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def weight_dtype(self) -> torch.dtype: ...


def optimizer_bytes(job: AnyJob) -> int:
    """Return the bytes of the optimizer's states for each weight."""
    states, size = OPTIMIZERS[job.optimizer]
    if size is None:
        size = job.weight_dtype.itemsize
    return states * size


def device_type(job: AnyJob) -> str:
    """Return the type of the ranks' devices: "cuda" or "cpu"."""
    return "cuda" if job.cluster.device.memory_bytes else "cpu"


@dataclass(frozen=True)
class Job:
    """A training job.

    Attributes:
        model: the model.
        seqlen: length of a sequence.
        degrees: how the ranks share model and sequences.
        cluster: the ranks.
        memory_bytes: memory of a rank.
        batch: sequences that a group of cp ranks has at a time.
        microbatches: batches of a step.
        recompute, loss: see `RECOMPUTE` and `LOSSES`.
        optimizer: a name in `OPTIMIZERS`.
        dtype: of activations and products.
        weight_dtype: of weights and gradients.
        documents: boundaries of the documents of a sequence; None is one document.
        layout: layout of the sequence; "auto" is the best.
        explained: further options of `explain`, such as strategies.
    """

    model: SizedModel
    seqlen: int
    degrees: Degrees
    cluster: Cluster
    memory_bytes: float
    batch: int = 1
    microbatches: int = 1
    recompute: Recompute = "full"
    loss: Loss = "fused"
    optimizer: str = "adamw"
    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype = torch.float32
    documents: tuple[int, ...] | None = None
    layout: str = "auto"
    explained: Mapping[str, Any] = field(default_factory=dict)  # each option has its own type

    @property
    def rows(self) -> int:
        """Rows that a rank has at a time, before tensor parallelism splits them."""
        return self.batch * -(-self.seqlen // self.degrees.cp)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.seqlen * self.batch * self.degrees.dp * self.microbatches

    @property
    def weights(self) -> Weights:
        return self.model.weights
