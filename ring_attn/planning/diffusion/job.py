"""A job of a diffusion transformer as data: the model, the rows, the ranks and the options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ring_attn.machines.cluster import Cluster
from ring_attn.planning.diffusion import formulas
from ring_attn.planning.diffusion.config import TransformerConfig
from ring_attn.planning.diffusion.sizes import SizedTransformer
from ring_attn.planning.diffusion.traced import count_weights, trace
from ring_attn.planning.model.degrees import Degrees
from ring_attn.planning.model.job import Recompute
from ring_attn.planning.model.sizes import Weights
from ring_attn.planning.model.traced import NotTraceableError


def sized(
    config: TransformerConfig, dtype: torch.dtype = torch.bfloat16, *, training: bool = True
) -> SizedTransformer:
    """Return a transformer with its sizes: of the real module where it can be traced.

    Else they are estimates, except for the weights if diffusers can build the module.
    """
    try:
        return trace(config, dtype, training=training)
    except NotTraceableError as error:
        estimated = formulas.estimate(config, dtype.itemsize, training=training, note=str(error))
    try:
        weights = count_weights(config)
    except NotTraceableError:
        return estimated
    has_same_blocks = len(weights.layers) == len(estimated.kinds)
    return replace(estimated, weights=weights) if has_same_blocks else estimated


@dataclass(frozen=True)
class DiffusionJob:
    """The training of a diffusion transformer, or its inference.

    Attributes:
        model: the transformer.
        seqlen: rows of a sample: its text and its video.
        text: rows of text, which every rank holds.
        degrees: how the ranks share weights and samples.
        cluster: the ranks.
        memory_bytes: memory of a rank.
        batch: samples that a group of cp ranks has at a time.
        microbatches: batches of a training step.
        steps: denoising steps of a generation; None is training.
        recompute: what the backward computes again.
        optimizer: a name in `OPTIMIZERS`.
        dtype: of activations and products.
        weight_dtype: of weights and gradients.
        layout: layout of the video; "auto" is the best.
        explained: further options of `explain`, such as strategies.
    """

    model: SizedTransformer
    seqlen: int
    text: int
    degrees: Degrees
    cluster: Cluster
    memory_bytes: float
    batch: int = 1
    microbatches: int = 1
    steps: int | None = None
    recompute: Recompute = "full"
    optimizer: str = "adamw"
    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    explained: Mapping[str, Any] = field(default_factory=dict)  # each option has its own type

    @property
    def weights(self) -> Weights:
        return self.model.weights

    @property
    def is_training(self) -> bool:
        return self.steps is None

    @property
    def video(self) -> int:
        """Rows of the video."""
        return self.seqlen - self.text

    @property
    def own_video(self) -> int:
        """Rows of the video that a rank has at most."""
        return -(-self.video // self.degrees.cp)

    @property
    def own_text(self) -> int:
        """Rows of the text of which a rank computes the attention at most."""
        return -(-self.text // self.degrees.cp)

    @property
    def samples(self) -> int:
        """Samples of a step of all ranks."""
        return self.batch * self.degrees.dp * self.microbatches
