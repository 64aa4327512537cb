"""Numbers of weights of a model, and bytes of its activations for each row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerWeights:
    """Numbers of weights of a layer: of its experts, and of everything else."""

    dense: int
    experts: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True)
class Weights:
    """Numbers of weights of a model.

    Attributes:
        embedding: of the embedding of tokens.
        head: of the projection to logits; 0 if it shares the embedding's.
        others: of the last norm and other parts outside of layers.
        layers: of each layer.
    """

    embedding: int
    head: int
    others: int
    layers: tuple[LayerWeights, ...]

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.others + sum(x.total for x in self.layers)

    @property
    def projection(self) -> int:
        """Weights of the projection to logits, shared or not."""
        return self.head or self.embedding

    def visited(self, share: float) -> float:
        """Return the weights with which a row is multiplied, with a share of the experts."""
        return self.projection + sum(x.dense + share * x.experts for x in self.layers)


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of a layer for each row of a rank.

    Attributes:
        kept: kept by the forward for the backward, with the layer's output.
        forward: the most that the forward holds, beyond what was held before it.
        backward: the most that the backward holds, beyond what was held before the forward.
        moved_forward, moved_backward: bytes that operators other than products read and write.
    """

    kept: float
    forward: float
    backward: float
    moved_forward: float
    moved_backward: float


@dataclass(frozen=True)
class HeadBytes:
    """Bytes outside of layers for each row of a rank.

    Attributes:
        before: held before the first layer: the embedded tokens.
        peak: the most that the last norm, the logits and the loss hold, beyond what was held
            before them, forward and backward.
        moved: bytes that their operators read and write, in both directions.
    """

    before: float
    peak: float
    moved: float


@dataclass(frozen=True)
class Activations:
    """Bytes of the activations of a model for each row of a rank.

    Attributes:
        kinds: the index in `layers` of each layer of the model.
        layers: bytes of each kind of layer.
        head: bytes outside of layers.
        source: where the bytes come from: "traced: .." or "estimate: ..".
    """

    kinds: tuple[int, ...]
    layers: tuple[LayerBytes, ...]
    head: HeadBytes
    source: str

    def of_layer(self, index: int) -> LayerBytes:
        return self.layers[self.kinds[index]]
