"""The layers of a model as plain data, with the sizes that weights and FLOPs follow from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias

RecurrenceKind: TypeAlias = Literal["delta rule", "mamba", "mamba 2", "convolution"]


@dataclass(frozen=True)
class Attention:
    """Softmax attention of a layer.

    Attributes:
        nheads, nheads_kv: numbers of heads of q, and of k and v as the call gets them.
        headdim, headdim_v: sizes of a head of q and k, and of v.
        window: number of keys that a query sees, itself included; None sees all.
        chunk: length of the chunks within which queries see keys; None is the whole sequence.
        softcap: as for `ring_attention`.
        q_rank, kv_rank, rope_dim: of multi-head latent attention (MLA): sizes of the latents of q
            and of k and v (None: no latent), and of the part of k that all heads share.
        gated: whether a projection as wide as q gates the output.
        has_bias, has_out_bias: whether the projections of q, k and v, and of the output, have a
            bias.
        has_qk_norm: whether heads of q and k are normalized.
        has_sinks: whether each head has a sink.
    """

    nheads: int
    nheads_kv: int
    headdim: int
    headdim_v: int
    window: int | None = None
    chunk: int | None = None
    softcap: float = 0.0
    q_rank: int | None = None
    kv_rank: int | None = None
    rope_dim: int = 0
    gated: bool = False
    has_bias: bool = False
    has_out_bias: bool = False
    has_qk_norm: bool = False
    has_sinks: bool = False

    @property
    def words(self) -> str:
        """The kind of attention in words, such as "window of 4096"."""
        kind = "full attention"
        if self.window is not None:
            kind = f"window of {self.window}"
        elif self.chunk is not None:
            kind = f"chunks of {self.chunk}"
        return f"{kind} (MLA)" if self.kv_rank is not None else kind


@dataclass(frozen=True)
class Recurrence:
    """Linear attention, a state space or a causal convolution of a layer.

    Attributes:
        kind: the recurrence.
        nheads: number of heads of the state; channels for a convolution.
        nheads_qk: number of heads of q and k, or groups of B and C.
        dim_qk, dim_v: sizes of a head's state, dim_qk x dim_v elements.
        conv_width: number of rows of its convolution.
        dt_rank: size of the time steps' projection (Mamba 1).
    """

    kind: RecurrenceKind
    nheads: int
    nheads_qk: int = 0
    dim_qk: int = 0
    dim_v: int = 1
    conv_width: int = 1
    dt_rank: int = 0

    @property
    def words(self) -> str:
        return self.kind

    @property
    def channels(self) -> int:
        """Channels of the values, of all heads."""
        return self.nheads * self.dim_v

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's decay and state, float32, which ranks pass on."""
        if self.kind == "convolution":
            return 0
        state = self.nheads * self.dim_qk * self.dim_v
        # Mamba 1 has a decay for each element, the others have one for each head.
        return 4 * (state + (state if self.kind == "mamba" else self.nheads))


@dataclass(frozen=True)
class Feedforward:
    """A feedforward part, or experts (MoE).

    Attributes:
        width: intermediate size, of one expert.
        experts: number of experts; 0 is a dense part.
        per_token: experts that a token visits.
        shared_width: intermediate size of the part that all tokens visit, next to the experts.
        products: products of a token and a part: 3 with a gate, else 2.
        has_bias: whether the experts and their router have biases.
        has_shared_gate: whether a number for each token gates the shared part.
    """

    width: int
    experts: int = 0
    per_token: int = 0
    shared_width: int = 0
    products: int = 3
    has_bias: bool = False
    has_shared_gate: bool = False

    @property
    def words(self) -> str:
        if not self.experts:
            return "dense"
        return f"{self.per_token} of {self.experts} experts"

    @property
    def visited_width(self) -> int:
        """Intermediate size that a token passes through."""
        if not self.experts:
            return self.width
        return self.per_token * self.width + self.shared_width


@dataclass(frozen=True)
class Layer:
    """A decoder layer: what mixes rows, and a feedforward part; each may be missing."""

    mixer: Attention | Recurrence | None
    feedforward: Feedforward | None
    num_norms: int = 2


@dataclass(frozen=True)
class Architecture:
    """A causal language model.

    Attributes:
        name: its name, or the path of its config.
        model_type: transformers' name of the class of models.
        hidden: width of the model.
        vocab: number of tokens of the vocabulary.
        is_tied: whether the head has the weights of the embedding.
        layers: all layers, in order.
        max_positions: length for which the model was made; None if unknown.
    """

    name: str
    model_type: str
    hidden: int
    vocab: int
    is_tied: bool
    layers: tuple[Layer, ...]
    max_positions: int | None = None

    @property
    def attentions(self) -> Counter[Attention]:
        """How many layers have each kind of attention."""
        return Counter(x.mixer for x in self.layers if isinstance(x.mixer, Attention))

    @property
    def recurrences(self) -> Counter[Recurrence]:
        """How many layers have each kind of recurrence."""
        return Counter(x.mixer for x in self.layers if isinstance(x.mixer, Recurrence))

    @property
    def experts(self) -> int:
        """The number of experts of a layer; 0 in a dense model."""
        return max((x.feedforward.experts for x in self.layers if x.feedforward), default=0)

    @property
    def experts_per_token(self) -> int:
        """The number of experts that a token visits in a layer."""
        return max((x.feedforward.per_token for x in self.layers if x.feedforward), default=0)
