"""Weights and activations by the sizes of a model alone.

They are used where the real module cannot be traced. The weights are exact for the usual layers;
the activations follow what transformers' Llama, Mixtral, DeepSeek, Qwen3-Next and Jamba keep, and
are an estimate for others.
"""

from __future__ import annotations

from ring_attn.planning.model.architecture import (
    Architecture,
    Attention,
    Feedforward,
    Layer,
    Recurrence,
)
from ring_attn.planning.model.sizes import (
    Activations,
    HeadBytes,
    LayerBytes,
    LayerWeights,
    Weights,
)

# Bytes that operators other than products move, as multiples of the bytes that a layer keeps:
# traced in Llama 3 8B, within a fifth in the other models of the table.
MOVED_FORWARD, MOVED_BACKWARD = 3.0, 6.5

# A norm keeps its input in float32, and twice a 16-bit result.
NORM_BYTES = 8
SOURCE = "estimate: by formula"


def weights_of(architecture: Architecture) -> Weights:
    """Return the numbers of weights of a model.

    Example:
        >>> from ring_attn.planning.model.config import read_model
        >>> f"{weights_of(read_model('llama-3-8b').architecture).total:,}"
        '8,030,261,248'
    """
    hidden, table = architecture.hidden, architecture.vocab * architecture.hidden
    return Weights(
        embedding=table,
        head=0 if architecture.is_tied else table,
        others=hidden,
        layers=tuple(_of_layer(layer, hidden) for layer in architecture.layers),
    )


def _of_layer(layer: Layer, hidden: int) -> LayerWeights:
    dense, experts = layer.num_norms * hidden, 0
    match layer.mixer:
        case Attention() as attention:
            dense += _of_attention(attention, hidden)
        case Recurrence() as recurrence:
            dense += _of_recurrence(recurrence, hidden)
    part = layer.feedforward
    if part is not None and part.experts:
        of_one = part.products * hidden * part.width
        dense += hidden * part.experts + part.products * hidden * part.shared_width
        dense += hidden if part.has_shared_gate else 0
        if part.has_bias:
            of_one += (part.products - 1) * part.width + hidden
            dense += part.experts
        experts = part.experts * of_one
    elif part is not None:
        dense += part.products * hidden * part.width
    return LayerWeights(dense, experts)


def _of_attention(attention: Attention, hidden: int) -> int:
    out = attention.nheads * attention.headdim_v * hidden
    q = attention.nheads * attention.headdim
    if attention.kv_rank is not None:
        # The latents have norms, and k and v follow from one latent and the shared part of k.
        rank, rope = attention.kv_rank, attention.rope_dim
        kv = attention.nheads * (attention.headdim - rope + attention.headdim_v)
        latents = hidden * (rank + rope) + rank + rank * kv
        if attention.q_rank:
            return out + latents + (hidden + 1 + q) * attention.q_rank
        return out + latents + hidden * q
    kv = attention.nheads_kv * (attention.headdim + attention.headdim_v)
    projected = q * (2 if attention.gated else 1) + kv
    total = out + hidden * projected
    total += projected if attention.has_bias else 0
    total += hidden if attention.has_out_bias else 0
    total += 2 * attention.headdim if attention.has_qk_norm else 0
    return total + (attention.nheads if attention.has_sinks else 0)


def _of_recurrence(recurrence: Recurrence, hidden: int) -> int:
    heads, channels = recurrence.nheads, recurrence.channels
    qk, width = recurrence.nheads_qk * recurrence.dim_qk, recurrence.conv_width
    match recurrence.kind:
        case "delta rule":
            mixed = 2 * qk + channels
            projections = hidden * (mixed + channels + 2 * heads) + channels * hidden
            return projections + mixed * width + 2 * heads + recurrence.dim_v
        case "mamba":
            state, rank = recurrence.dim_qk, recurrence.dt_rank
            projections = 3 * hidden * channels + channels * (rank + 2 * state) + rank * channels
            return projections + channels * (width + 3 + state) + rank + 2 * state
        case "mamba 2":
            mixed = channels + 2 * qk
            projections = hidden * (mixed + channels + heads) + channels * hidden
            return projections + mixed * (width + 1) + 3 * heads + channels
        case "convolution":
            return 4 * hidden * hidden + hidden * width


def activations_of(architecture: Architecture, itemsize: int = 2) -> Activations:
    """Return an estimate of the bytes of activations for each row, by the bytes of an element."""
    hidden = architecture.hidden
    kinds = {layer: index for index, layer in enumerate(dict.fromkeys(architecture.layers))}
    headdim = max((x.headdim for x in architecture.attentions), default=0)
    return Activations(
        kinds=tuple(kinds[layer] for layer in architecture.layers),
        layers=tuple(_bytes_of_layer(layer, hidden, itemsize / 2) for layer in kinds),
        # The embedded tokens with their positions, the logits in 16 bits and twice in 32 bits with
        # gradients, the rows of the last norm.
        head=HeadBytes(
            before=2 * hidden + 4 * headdim,
            peak=12 * architecture.vocab + 4 * hidden,
            moved=44 * architecture.vocab,
        ),
        source=SOURCE,
    )


def _bytes_of_layer(layer: Layer, hidden: int, wider: float) -> LayerBytes:
    """Return the bytes of a layer in 16 bits, times `wider`."""
    kept = (layer.num_norms * NORM_BYTES + 2) * hidden
    more_forward, more_backward = 4 * hidden, 12 * hidden
    match layer.mixer:
        case Attention() as attention:
            kept += _bytes_of_attention(attention)
        case Recurrence() as recurrence:
            kept += _bytes_of_recurrence(recurrence)
    part = layer.feedforward
    if part is not None:
        kept += _bytes_of_feedforward(part, hidden)
        more_forward = max(more_forward, 8 * part.per_token * hidden)
        more_backward += 7 * part.per_token * hidden
    return LayerBytes(
        kept=wider * kept,
        forward=wider * (kept + more_forward),
        backward=wider * (kept + more_backward),
        moved_forward=wider * MOVED_FORWARD * kept,
        moved_backward=wider * MOVED_BACKWARD * kept,
    )


def _bytes_of_attention(attention: Attention) -> int:
    """Return the bytes of q, k, v, out and lse, and of latents."""
    q = attention.nheads * attention.headdim
    kv = attention.nheads_kv * (attention.headdim + attention.headdim_v)
    nbytes = 2 * (q + kv) + result_bytes(attention)
    if attention.kv_rank is not None:
        # v is a part of the projection of its latent, which is kept whole.
        whole = attention.nheads * (attention.headdim - attention.rope_dim)
        nbytes += 2 * whole + NORM_BYTES * (attention.kv_rank + (attention.q_rank or 0))
    if attention.gated:
        nbytes += 6 * q
    if attention.has_qk_norm:
        nbytes += NORM_BYTES * (q + attention.nheads_kv * attention.headdim)
    return nbytes


def result_bytes(attention: Attention, itemsize: int = 2) -> int:
    """Return the bytes of out and lse for each row."""
    return attention.nheads * (attention.headdim_v * itemsize + 4)


def _bytes_of_recurrence(recurrence: Recurrence) -> int:
    channels, qk = recurrence.channels, recurrence.nheads_qk * recurrence.dim_qk
    match recurrence.kind:
        case "delta rule":
            return 4 * (2 * qk + channels) + 24 * channels
        case "mamba 2":
            return 4 * (2 * qk + channels) + 14 * channels
        case "mamba" | "convolution":
            return 10 * channels


def _bytes_of_feedforward(part: Feedforward, hidden: int) -> int:
    """Return the bytes of gate, up, activation and product; of experts, with their tokens."""
    kept = (2 * part.products + 2) * part.visited_width
    if part.experts:
        kept += 4 * part.per_token * hidden + 6 * part.experts
    return kept


def recurrence_flops(recurrence: Recurrence) -> float:
    """Return an estimate of the FLOPs of a row in the forward of a recurrence."""
    state = recurrence.nheads * recurrence.dim_qk * recurrence.dim_v
    # A row updates and reads the state; in chunks it also meets about 64 rows of its chunk.
    return 6.0 * state + 4.0 * 64 * recurrence.channels
