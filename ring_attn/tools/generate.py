"""Greedy generation with the demo's model: from a KV cache split over ranks, and from a whole one.

    prompt   in uneven chunks, each split over the ranks        ring_attention, chunk against cache
    token    the same on all ranks; one of them keeps its KV    tree_decode, token against cache

The cache grows where it is least full, and no rank ever has all of it. `generate` is the same loop
for both caches: what differs is who computes which rows, and how rows meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import SequenceLayout, next_rank, ring_attention, tree_decode, unshard
from ring_attn.tools.model import Attention, Transformer, dense_attention

# Tokens that a rank takes at a time: so few that short runs have several such blocks.
BLOCK = 16

# Bytes of the prompt's end that are shown.
CONTEXT = 40

# Parts of a prompt, on purpose not equal: the chunks are ragged against ranks, blocks and kernels.
CHUNKS = (0.5, 0.85, 1.0)


@dataclass(frozen=True)
class Generated:
    """A generated continuation.

    Attributes:
        tokens: the greedy choice after each logits.
        logits: (num_tokens, vocab_size) float32 on the CPU.
        rows: of the cache, on every rank.
    """

    tokens: list[int]
    logits: Tensor
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """A generation from a sharded cache beside that of one process.

    Attributes:
        context: the end of the prompt.
        text: the bytes generated from the sharded cache.
        equal: all tokens are, and all logits are finite.
        first_difference: the first token that is not; None if all are.
        greatest_difference: of two logits, up to that token: after it the contexts differ.
        smallest_margin: between the best and second best logit of one process: a choice is safe
            where differences are less than half of it.
        rows: of the cache, on every rank, at the end.
    """

    context: str
    text: str
    equal: bool
    first_difference: int | None
    greatest_difference: float
    smallest_margin: float
    rows: tuple[int, ...]

    def lines(self) -> list[str]:
        """The comparison in words."""
        first = self.first_difference
        where = "" if first is None else f", from byte {first} on"
        return [
            f"after     {self.context!r}",
            f"generated {self.text!r}",
            f"equal to one process: {'yes' if self.equal else 'no'}{where}; greatest logit "
            f"difference {self.greatest_difference:.1e}, closest choice by "
            f"{self.smallest_margin:.1e}, KV rows on the ranks {', '.join(map(str, self.rows))}",
        ]


class WholeCache:
    """Everything in this process, with dense attention: no line of `ring_attn` takes part."""

    def __init__(self, num_layers: int) -> None:
        self._layers = [_Layer() for _ in range(num_layers)]

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of the only rank."""
        return (self._layers[0].num_rows,)

    def prefill(self, model: Transformer, ids: Tensor, start: int) -> Tensor:
        """(1, n) ids at positions start, start + 1, ... -> (vocab_size,) logits after the last."""
        positions = torch.arange(start, start + ids.size(1), device=ids.device)
        attentions = [partial(self._attend, layer) for layer in self._layers]
        return model(ids, positions[None], attentions)[0, -1]

    decode = prefill

    @staticmethod
    def _attend(layer: _Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense_attention(q, *layer.extended(k, v))


class ShardedCache:
    """Each rank of a group has the rows that the layout says, and no more."""

    def __init__(self, num_layers: int, group: dist.ProcessGroup, kind: str) -> None:
        """No rows yet; chunks of a prompt are split in that kind of layout."""
        self._layers = [_Layer() for _ in range(num_layers)]
        self._group, self._kind = group, kind
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self.layout = SequenceLayout.from_name(kind, 0, self._world_size)

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of every rank."""
        return self.layout.shard_lens

    def prefill(self, model: Transformer, ids: Tensor, start: int) -> Tensor:
        """(1, n) ids at positions start, start + 1, ... -> (vocab_size,) logits after the last."""
        chunk = SequenceLayout.from_name(self._kind, ids.size(1), self._world_size)
        self.layout = self.layout.followed_by(chunk)
        positions = start + chunk.position_ids(self._rank, ids.device)
        attend = partial(
            ring_attention, causal=True, group=self._group, layout=(chunk, self.layout)
        )
        attentions = [partial(_attend_to, layer, attend) for layer in self._layers]
        logits = model(chunk.shard(ids, self._rank), positions[None], attentions)
        return unshard(logits, chunk, group=self._group)[0, -1]

    def decode(self, model: Transformer, ids: Tensor, start: int) -> Tensor:
        """Continues by few tokens, which every rank computes and one rank keeps."""
        taker = next_rank(self.layout, block=BLOCK)
        self.layout = self.layout.appended(taker, ids.size(1))
        positions = torch.arange(start, start + ids.size(1), device=ids.device)
        attend = partial(tree_decode, group=self._group, layout=self.layout)
        attentions = [
            partial(_attend_to, layer, attend, keeps=taker == self._rank) for layer in self._layers
        ]
        return model(ids, positions[None], attentions)[0, -1]


class _Layer:
    """This process's keys and values of one layer."""

    def __init__(self) -> None:
        self._kv: tuple[Tensor, Tensor] | None = None

    @property
    def num_rows(self) -> int:
        return 0 if self._kv is None else self._kv[0].size(1)

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All of them, (batch, rows, nheads_kv, headdim) each, with the new ones behind."""
        if self._kv is not None:
            k, v = (torch.cat(pair, 1) for pair in zip(self._kv, (k, v), strict=True))
        self._kv = k, v
        return self._kv


def _attend_to(
    layer: _Layer, attend: Attention, q: Tensor, k: Tensor, v: Tensor, *, keeps: bool = True
) -> Tensor:
    """Attention to the cache of a layer and the new rows, of which this rank keeps all or none."""
    if not keeps:
        k, v = k[:, :0], v[:, :0]
    return attend(q, *layer.extended(k, v))


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: Tensor,
    num_tokens: int,
    cache: WholeCache | ShardedCache,
    chunks: Sequence[float] = (1.0,),
) -> Generated:
    """Continues a prompt greedily.

    Args:
        model: the same on every rank.
        prompt: (1, n) int64, the same on every rank.
        num_tokens: how many to generate.
        cache: empty; of this process, or of this rank.
        chunks: where the parts of the prompt end that are computed one after another.
    """
    cuts = [0, *(round(prompt.size(1) * end) for end in chunks)]
    for start, stop in zip(cuts, cuts[1:], strict=False):
        if start < stop:
            logits = cache.prefill(model, prompt[:, start:stop], start)
    steps: list[Tensor] = []
    for position in range(prompt.size(1), prompt.size(1) + num_tokens):
        if steps:
            logits = cache.decode(model, steps[-1].argmax().view(1, 1), position - 1)
        steps.append(logits.float())
    all_logits = torch.stack(steps).cpu()
    return Generated(all_logits.argmax(-1).tolist(), all_logits, cache.rows)


def generate_twice(
    model: Transformer, prompt: Tensor, num_tokens: int, group: dist.ProcessGroup, layout: str
) -> Comparison:
    """Continues a prompt from a cache that is split over the group, and from a whole one.

    The type of the weights must be float32: with bfloat16 a choice between two bytes would often
    hang on a rounding. Every rank calls it, with the same arguments, and gets the result.
    """
    num_layers = len(model.layers)
    cache = ShardedCache(num_layers, group, layout)
    sharded = generate(model, prompt, num_tokens, cache, CHUNKS)
    return compare(prompt, sharded, generate(model, prompt, num_tokens, WholeCache(num_layers)))


def compare(prompt: Tensor, sharded: Generated, whole: Generated) -> Comparison:
    """Compares what a sharded cache generated after a prompt (1, n) with one process."""
    pairs = enumerate(zip(sharded.tokens, whole.tokens, strict=True))
    first = next((step for step, (ours, other) in pairs if ours != other), None)
    same = slice(0, len(whole.tokens) if first is None else first + 1)
    best = whole.logits.topk(2).values
    finite = bool(sharded.logits.isfinite().all() and whole.logits.isfinite().all())
    return Comparison(
        _text(prompt[0, -CONTEXT:].tolist()),
        _text(sharded.tokens),
        first is None and finite,
        first,
        (sharded.logits - whole.logits)[same].abs().max().item(),
        (best[:, 0] - best[:, 1])[same].min().item(),
        sharded.rows,
    )


def _text(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")
