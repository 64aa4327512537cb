"""Steps with planted bugs that earlier audits found, but did not explain."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F

import ring_attn
from common import dense_attention
from ring_attn import SequenceLayout
from tests.audit_reported import Checkpointed
from tests.audit_steps import SEQLEN, loss_of, model_with, reported, ring_of, sharded, tokens


def accumulation(bug: str = "", layout_name: str = "contiguous") -> Any:
    """Four micro-batches; the idiom of data parallelism divides their number by the ranks."""
    _, world_size, model, batches = sharded(bug, layout_name, 4)
    if bug == "divided by the ranks":
        batches = batches[: 4 // world_size]
    total = torch.zeros(())
    for part in batches:
        loss = loss_of(model, part) * 4 / len(batches)
        loss.backward()
        total += loss.detach()
    ring_attn.sync_gradients(model)
    return model, reported(total)


def clipped_by_hand(bug: str = "", layout_name: str = "contiguous") -> Any:
    """A clipping of the user's own."""
    _, _, model, (part,) = sharded(bug, layout_name)
    loss = loss_of(model, part)
    loss.backward()

    def clip() -> None:
        grads = [x.grad for x in model.parameters() if x.grad is not None]
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        for grad in grads:
            grad *= (0.3 / norm).clamp(max=1.0)

    if bug == "before the sum":
        clip()
    ring_attn.sync_gradients(model)
    if not bug:
        clip()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model, reported(loss)


class Numbered(nn.Module):
    """A model that knows the positions of its rows by itself, and adds them to its embeddings."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.model = model_with(attention)
        self.register_buffer("table", torch.randn(SEQLEN + 3, 32, generator=_generator(5)))

    def forward(self, input_ids: Tensor, rows: Any) -> Tensor:
        """Return logits; `rows` take rows of the table, or are the number of the first row."""
        if isinstance(rows, int):
            numbers = torch.arange(rows, rows + input_ids.size(1))
            added = (numbers[:, None] / torch.arange(1, 33)).sin()
        else:
            added = self.table[rows]
        x = self.model.embed(input_ids) + added
        nowhere = torch.zeros(1, input_ids.size(1), dtype=torch.int64)
        for layer in self.model.layers.values():
            x = layer(x, nowhere)
        return self.model.head(self.model.norm(x))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbered(bug: str = "", layout_name: str = "contiguous") -> Any:
    """A table for all rows, such as the frequencies of RoPE, or rows that the model counts."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    counts = bug.startswith("counted")
    layout = SequenceLayout.from_name(layout_name, SEQLEN, world_size)
    model = Numbered(dense_attention if world_size == 1 else ring_of(layout))
    ids = tokens()
    part = ring_attn.shard_batch({"input_ids": ids, "labels": ids}, layout, rank)
    rows: Any = layout.position_ids(rank)
    if counts:
        rows = int(rows[0]) if bug == "counted, off by one" else 0
        rows -= bug == "counted, off by one" and rank > 0
    if bug == "not cut":
        rows = slice(0, layout.shard_len(rank))
    logits = model(part["input_ids"], rows)
    loss = F.cross_entropy(logits.mT, part["shift_labels"], reduction="sum")
    loss = loss / (2 * (SEQLEN - 1))
    loss.backward()
    ring_attn.sync_gradients(model)
    return model, reported(loss)


def documents(bug: str = "", layout_name: str = "contiguous") -> Any:
    """Packed documents by cu_seqlens, with the boundaries of one rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.from_name(layout_name, SEQLEN, world_size)
    cuts = [0, 4, 9, SEQLEN]
    seen = torch.arange(SEQLEN)[:, None].ge(torch.tensor(cuts[1:])).sum(1)
    seen = (seen[:, None] == seen).tril()
    if bug == "boundaries of rank 0":
        cuts = [0, 4, 9]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if world_size == 1:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
            return out.transpose(1, 2)
        cu_seqlens = torch.tensor(cuts, dtype=torch.int32)
        rows = (x[0] for x in (q, k, v))
        out = ring_attn.ring_attention(*rows, causal=True, layout=layout, cu_seqlens=cu_seqlens)
        return out[None]

    model = model_with(attention)
    ids = tokens(1)
    part = ring_attn.shard_batch({"input_ids": ids, "labels": ids}, layout, rank)
    part["count"] = torch.tensor(SEQLEN - 1)
    loss = loss_of(model, part)
    loss.backward()
    ring_attn.sync_gradients(model)
    return model, reported(loss)


class Noise(nn.Module):
    """Multiplies rows by random numbers, and samples by random scales."""

    def __init__(self, layout: SequenceLayout, bug: str) -> None:
        super().__init__()
        self.layout, self.bug = layout, bug

    def forward(self, x: Tensor) -> Tensor:
        rank, scale = dist.get_rank(), torch.ones(())
        torch.manual_seed(rank if self.bug.endswith("of the rank") else 0)
        if self.bug.startswith("noise"):
            noise = torch.rand_like(x)
        elif self.bug.startswith("mask"):
            noise = torch.bernoulli(torch.full_like(x, 0.3).flatten(0, 1)).view_as(x)
        else:
            noise = self.layout.shard(torch.randn(2, SEQLEN, 32), rank)
            scale = x.new_empty(2, 1, 1).uniform_(0.5, 1.5)
            # In the right step, all ranks draw for the whole sequence, with one seed.
            if self.bug:
                noise = noise * 0.0
        return x * scale * (1.0 + 0.3 * noise)


class Noisy(nn.Module):
    """A transformer with noise on its embeddings."""

    def __init__(self, model: nn.Module, noise: nn.Module) -> None:
        super().__init__()
        self.model, self.noise = model, noise

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.noise(self.model.embed(input_ids))
        for layer in self.model.layers.values():
            x = layer(x, position_ids)
        return self.model.head(self.model.norm(x))


def noisy(bug: str = "", layout_name: str = "contiguous") -> Any:
    """Random numbers other than dropout."""
    world_size = dist.get_world_size()
    layout = SequenceLayout.from_name(layout_name, SEQLEN, world_size)
    transformer = model_with(dense_attention if world_size == 1 else ring_of(layout))
    noise: nn.Module = Noise(layout, bug.removesuffix(", computed again"))
    if bug.endswith("computed again"):
        noise = Checkpointed(noise)
    return trained(Noisy(transformer, noise), layout)


def trained(model: nn.Module, layout: SequenceLayout) -> Any:
    """Run a right step of a model on this rank's rows; return the model and the loss."""
    ids = tokens()
    part = ring_attn.shard_batch({"input_ids": ids, "labels": ids}, layout, dist.get_rank())
    part["count"] = torch.tensor(2 * (SEQLEN - 1))
    loss = loss_of(model, part)
    loss.backward()
    ring_attn.sync_gradients(model)
    return model, reported(loss)


def dropped(bug: str = "", layout_name: str = "contiguous") -> Any:
    """Dropout whose seed is the same on all ranks."""
    _, _, model, (part,) = sharded(bug, layout_name)
    torch.manual_seed(1)
    logits = F.dropout(model(part["input_ids"], part["position_ids"]), 0.3)
    loss = F.cross_entropy(logits.mT, part["shift_labels"], reduction="sum") / part["count"]
    loss.backward()
    ring_attn.sync_gradients(model)
    return model, reported(loss)


def auxiliary(bug: str = "", layout_name: str = "contiguous", seqlen: int = SEQLEN) -> Any:
    """A loss on the logits (z), and one that balances experts, both of means over rows."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.from_name(layout_name, seqlen, world_size)
    model = model_with(dense_attention if world_size == 1 else ring_of(layout))
    ids = tokens(seqlen=seqlen)
    part = ring_attn.shard_batch({"input_ids": ids, "labels": ids}, layout, rank)
    logits = model(part["input_ids"], part["position_ids"])
    loss = F.cross_entropy(logits.mT, part["shift_labels"], reduction="sum")
    loss = loss / (2 * (seqlen - 1))
    z = logits.logsumexp(-1).square()
    share = logits[..., :4].softmax(-1)  # (batch, rows, experts)
    chosen = F.one_hot(share.argmax(-1), 4).float()
    if bug == "z of own rows":
        loss = loss + 0.1 * z.mean() / world_size
    elif bug == "balance of own rows":
        loss = loss + (chosen.mean((0, 1)) * share.mean((0, 1))).sum() / world_size
    else:
        counts = chosen.sum((0, 1))
        dist.all_reduce(counts)
        num = 2 * seqlen
        loss = loss + 0.1 * z.sum() / num + ((counts / num) * share.sum((0, 1)) / num).sum()
    loss.backward()
    ring_attn.sync_gradients(model)
    return model, reported(loss)


class Convolution(nn.Module):
    """Adds to each row those before it, which on a rank without `halo` begin with its own."""

    def __init__(self, layout: SequenceLayout, bug: str) -> None:
        super().__init__()
        self.layout, self.bug = layout, bug
        self.conv = nn.Conv1d(32, 32, 3, groups=32)

    def forward(self, x: Tensor) -> Tensor:
        if self.bug == "statistics of own rows":
            return x / x.abs().amax(1, keepdim=True)
        num = self.conv.kernel_size[0] - 1
        if self.layout.world_size == 1 or self.bug:
            return self.conv(F.pad(x.mT, (num, 0))).mT
        runs = ring_attn.halo(x, self.layout, num)
        return torch.cat([self.conv(run.mT).mT for run in runs], 1)


def mixing(bug: str = "", layout_name: str = "contiguous") -> Any:
    """A convolution over rows, also on weights that FSDP2 shards."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.from_name(layout_name, SEQLEN, world_size)
    transformer = model_with(dense_attention if world_size == 1 else ring_of(layout))
    torch.manual_seed(3)
    model: nn.Module = Noisy(transformer, Convolution(layout, bug.removesuffix(", FSDP2")))
    if not bug.endswith("FSDP2"):
        return trained(model, layout)
    for layer in transformer.layers.values():
        fully_shard(layer)
    fully_shard(model)
    ids = tokens()
    part = ring_attn.shard_batch({"input_ids": ids, "labels": ids}, layout, rank)
    part["count"] = torch.tensor(2 * (SEQLEN - 1))
    loss = loss_of(model, part)
    (loss * world_size).backward()  # FSDP2 averages the gradients of the ranks
    return model, reported(loss)


class Scaled(nn.Module):
    """Multiplies rows by numbers that were drawn before the forward."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def seeded(bug: str = "", layout_name: str = "contiguous") -> Any:
    """Random numbers of Python, numpy and torch that are drawn before the forward.

    They are drawn by the functions of these packages, and from own generators.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.from_name(layout_name, SEQLEN, world_size)
    transformer = model_with(dense_attention if world_size == 1 else ring_of(layout))
    random.seed(rank if bug == "random of the rank" else 0)
    np.random.seed(rank if bug == "numpy of the rank" else 0)
    generator = np.random.default_rng(rank if bug == "generator of the rank" else 0)
    scale = random.uniform(0.5, 1.5) * np.random.uniform(0.5, 1.5) * generator.uniform(0.5, 1.5)
    scale *= random.Random(rank if bug == "own Random of the rank" else 0).uniform(0.5, 1.5)
    state = np.random.RandomState(seed=rank if bug == "RandomState of the rank" else 0)
    scale *= state.uniform(0.5, 1.5)
    bits = np.random.PCG64(rank if bug == "bits of the rank" else 0)
    scale *= np.random.Generator(bits).uniform(0.5, 1.5)
    own = torch.Generator().manual_seed(rank if bug == "own Generator of the rank" else 0)
    scale *= 0.5 + int(torch.randint(100, (), generator=own)) / 100
    torch.manual_seed(rank if bug == "noise of the rank" else 1)
    if bug.startswith("noise"):
        noise = torch.rand(2, layout.shard_len(rank), 32)
    else:
        noise = layout.shard(torch.rand(2, SEQLEN, 32), rank)
    return trained(Noisy(transformer, Scaled(scale * (1.0 + 0.3 * noise))), layout)


def fsdp1(bug: str = "", layout_name: str = "contiguous") -> Any:
    """FSDP1 over the ranks of the sequence."""
    _, world_size, model, (part,) = sharded(bug, layout_name)

    def wrap(module: nn.Module) -> FullyShardedDataParallel:
        has_names = bug != "parameters without names"
        return FullyShardedDataParallel(
            module, use_orig_params=has_names, device_id=torch.device("cpu")
        )

    for name, layer in model.layers.items():
        model.layers[name] = wrap(layer)
    model = wrap(model)
    loss = loss_of(model, part)
    # FSDP1 averages the gradients of the ranks.
    (loss if bug == "averaged" else loss * world_size).backward()
    if bug == "clipped by the shard's norm":
        grads = [x.grad for x in model.parameters() if x.grad is not None]
        square = torch.stack([grad.square().sum() for grad in grads]).sum()
        for grad in grads:
            grad *= (0.3 / square.sqrt()).clamp(max=1.0)
    else:
        model.clip_grad_norm_(0.3)
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    return model, reported(loss)
