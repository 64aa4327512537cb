"""More steps with planted bugs, as threads report them.

They were written before the diagnoses were read.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ring_attn
from common import Transformer, dense_attention
from ring_attn import SequenceLayout
from ring_attn.integrations.context_parallel import context_parallel
from tests.audit_steps import SEQLEN, loss_of, model_with, reported, ring_of, sharded, tokens

DOCUMENTS = (0, 7, 20, SEQLEN)


def packed(bug: str = "", layout_name: str = "contiguous") -> Any:
    """Documents in one sequence, kept apart by cu_seqlens."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.from_name(layout_name, SEQLEN, world_size)
    dropped = bug == "documents not kept apart" and world_size > 1
    ends = (0, SEQLEN) if dropped else DOCUMENTS
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)

    document = torch.arange(SEQLEN)[:, None].ge(torch.tensor(DOCUMENTS[1:])).sum(1)
    seen = (document[:, None] == document).tril()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if world_size == 1:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
            return out.transpose(1, 2)
        rows = (x[0] for x in (q, k, v))
        return ring_attn.ring_attention(*rows, causal=True, layout=layout, cu_seqlens=cu_seqlens)[
            None
        ]

    model = model_with(attention)
    ids = tokens(1)
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(DOCUMENTS)])[None]
    labels = ids.clone()
    labels[:, list(DOCUMENTS[:-1])] = -100
    part = ring_attn.shard_batch({"input_ids": ids, "labels": labels}, layout, rank)
    part["position_ids"] = layout.shard(positions, rank)
    part["count"] = (labels[:, 1:] != -100).sum()
    if bug == "documents begin anew on each rank":
        part["position_ids"] = part["position_ids"] - part["position_ids"][:, :1]
        part["position_ids"] = part["position_ids"].clamp(min=0)
    if bug == "targets across documents":
        whole = ids if world_size > 1 else labels
        part |= ring_attn.shard_batch({"labels": whole}, layout, rank)
        part["count"] = (whole[:, 1:] != -100).sum()
    loss = loss_of(model, part)
    loss.backward()
    ring_attn.sync_gradients(model)
    return model, reported(loss)


class TwoHeads(nn.Module):
    """A transformer with a second head, as multi-token prediction has."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model
        torch.manual_seed(3)
        self.second = nn.Linear(32, 256, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(input_ids, position_ids), self.second(self.model.embed(input_ids))


def two_losses(bug: str = "", layout_name: str = "contiguous") -> Any:
    """A loss with an auxiliary one beside it."""
    _, world_size, model, (part,) = sharded(bug, layout_name)
    both = TwoHeads(model)
    logits, second = both(part["input_ids"], part["position_ids"])
    targets = part["shift_labels"]
    loss = F.cross_entropy(logits.mT, targets, reduction="sum") / part["count"]
    more = F.cross_entropy(second.mT, targets, reduction="sum")
    if bug == "second loss by own count":
        more = more / (targets != -100).sum().clamp(min=1) / world_size
    else:
        more = more / part["count"]
    (loss + 0.3 * more).backward()
    ring_attn.sync_gradients(both)
    return both, reported(loss + 0.3 * more)


def grouped(bug: str = "", layout_name: str = "contiguous") -> Any:
    """DDP over the ranks of a mesh, with accumulation."""
    rank, world_size, model, batches = sharded(bug, layout_name, 2)
    own = [dist.new_group([i]) for i in range(world_size)][rank]
    group = own if bug == "group of one rank" else None
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=group)
    total = torch.zeros(())
    for index, part in enumerate(batches):
        last = index == len(batches) - 1 and bug != "never synchronized"
        wrapped.require_backward_grad_sync = last
        loss = loss_of(wrapped, part)
        (loss * world_size).backward()
        total += loss.detach()
    return wrapped, reported(total)


def plainly(bug: str = "", layout_name: str = "contiguous") -> Any:
    """A plain loop with an evaluation."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    cut = SEQLEN // world_size * world_size if bug == "last tokens dropped" else SEQLEN
    ids = tokens()
    labels = ids.clone()
    labels[:, : SEQLEN // 2] = -100
    count = (labels[:, 1:] != -100).sum()
    ids, labels = ids[:, :cut], labels[:, :cut]
    layout = SequenceLayout.from_name(layout_name, cut, world_size)
    model = model_with(ring_of(layout) if world_size > 1 else dense_attention)
    if bug == "tied weights summed twice":
        model.head.weight = model.embed.weight
    part = ring_attn.shard_batch({"input_ids": ids, "labels": labels}, layout, rank)
    targets = part["shift_labels"]
    if bug == "labels rolled after the cut":
        targets = layout.shard(labels, rank).roll(-1, 1)
    logits = model(part["input_ids"], part["position_ids"])
    if bug == "mean of no target":
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / world_size
    elif bug == "divided by no target":
        own_count = (targets != -100).sum()
        loss = F.cross_entropy(logits.mT, targets, reduction="sum") / own_count / world_size
    else:
        loss = F.cross_entropy(logits.mT, targets, reduction="sum") / count
    loss.backward()
    if bug == "tied weights summed twice":
        weights = [
            x
            for name in ("embed", "layers", "norm", "head")
            for x in getattr(model, name).parameters()
        ]
        for weight in weights:
            dist.all_reduce(weight.grad)
    else:
        ring_attn.sync_gradients(model)
    with torch.no_grad():
        logits = model(part["input_ids"], part["position_ids"])
        summed = F.cross_entropy(logits.mT, part["shift_labels"], reduction="sum")
        dist.all_reduce(summed)
        evaluation = summed / count
    return model, reported(loss), evaluation


def fsdp_clipped(bug: str = "", layout_name: str = "contiguous") -> Any:
    """FSDP2 with a clipping of the user's own."""
    _, world_size, model, (part,) = sharded(bug, layout_name)
    mesh = init_device_mesh("cpu", (world_size,))
    for module in (*model.layers.values(), model):
        shard = fully_shard(module, mesh=mesh)
        shard.set_gradient_divide_factor(1.0)
        shard.set_force_sum_reduction_for_comms(True)
    loss = loss_of(model, part)
    loss.backward()
    grads = [x.grad.to_local() for x in model.parameters()]
    square = torch.stack([x.square().sum() for x in grads]).sum()
    if bug != "clipped by the shard's norm":
        dist.all_reduce(square)
    for x in grads:
        x *= (0.5 / square.sqrt()).clamp(max=1)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model, reported(loss)


def cp_tp(bug: str = "", layout_name: str = "contiguous") -> Any:
    """A ring beside torch's tensor parallelism."""
    world_size = dist.get_world_size()
    tp = 2 if world_size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (world_size // tp, tp), mesh_dim_names=("cp", "tp"))
    layout = SequenceLayout.from_name(layout_name, SEQLEN, world_size // tp)
    model = model_with(partial(ring_of(layout), group=mesh["cp"]))
    plan: dict[str, Any] = {f"layers.*.{x}_proj": ColwiseParallel() for x in ("gate", "up")}
    plan["layers.*.down_proj"] = RowwiseParallel()
    parallelize_module(model, mesh["tp"], plan)
    ids = tokens()
    part = ring_attn.shard_batch(
        {"input_ids": ids, "labels": ids}, layout, mesh.get_local_rank("cp")
    )
    part["count"] = torch.tensor(2 * (SEQLEN - 1))
    loss = loss_of(model, part)
    loss.backward()
    if bug == "summed over all ranks":
        whole = [x for x in model.parameters() if not isinstance(x, DTensor)]
        shards = [x for x in model.parameters() if isinstance(x, DTensor)]
        ring_attn.sync_gradients(whole)
        ring_attn.sync_gradients(shards, mesh["cp"])
    else:
        ring_attn.sync_gradients(model, mesh["cp"])
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh.get_group("cp"))
    return model, total


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Tensor) -> Tensor:
        return checkpoint(self.layer, *args, use_reentrant=False)


def checkpointed(bug: str = "", layout_name: str = "contiguous") -> Any:
    """Activation checkpointing and accumulation."""
    _, _, model, batches = sharded(bug, layout_name, 2)
    for name, layer in model.layers.items():
        if bug == "local attention":
            layer.attention = dense_attention
        model.layers[name] = Checkpointed(layer)
    total = torch.zeros(())
    for part in batches:
        loss = loss_of(model, part)
        loss.backward()
        total += loss.detach()
    ring_attn.sync_gradients(model)
    return model, reported(total)


def lora(bug: str = "", layout_name: str = "contiguous") -> Any:
    """peft's adapters on a Llama."""
    import peft

    from ring_attn.integrations.transformers import register
    from tests.hf_models import VOCAB, make_model

    rank, world_size = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.from_name(layout_name, SEQLEN, world_size)
    ids = tokens() % VOCAB
    part = ring_attn.shard_batch({"input_ids": ids, "labels": ids}, layout, rank)
    with register(layout=layout_name):
        base = make_model("llama", "sdpa" if world_size == 1 else "ring_attn")
        torch.manual_seed(1)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
        model = peft.get_peft_model(base, config)
        given = {} if world_size == 1 else {"sequence_layout": layout}
        logits = model(
            input_ids=part["input_ids"], position_ids=part["position_ids"], **given
        ).logits
        loss = F.cross_entropy(logits.mT, part["shift_labels"], reduction="sum")
        loss = loss / (2 * (SEQLEN - 1))
        loss.backward()
    left_out = "lora_A" if bug == "lora_A left out" else "-"
    ring_attn.sync_gradients([x for n, x in model.named_parameters() if left_out not in n])
    return model, reported(loss)


class TorchRing(torch.autograd.Function):
    """torch's own ring, whose public entry has no operator on a CPU."""

    @staticmethod
    def forward(ctx: Any, *qkv: Tensor) -> Tensor:
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        group = dist.group.WORLD
        out, lse = _attention._templated_ring_attention(group, 2, operator, *qkv, is_causal=True)
        ctx.save_for_backward(*qkv, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return _attention._templated_ring_attention_backward(
            dist.group.WORLD,
            2,
            operator,
            grad.contiguous(),
            "grad_out",
            *ctx.saved_tensors,
            is_causal=True,
            dropout_p=0.0,
        )[:3]


def torch_ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.size(2) // x.size(2), 2) for x in (k, v))
    return TorchRing.apply(*(x.transpose(1, 2).contiguous() for x in (q, k, v))).transpose(1, 2)


def of_torch(bug: str = "", layout_name: str = "") -> Any:
    """torch's ring, which takes rows as its load balancer cuts them: head and tail."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    cut = SequenceLayout.contiguous if bug == "cut without the balancer" else SequenceLayout.zigzag
    layout = cut(24, world_size)
    model = model_with(dense_attention if world_size == 1 else torch_ring)
    ids = tokens(seqlen=24)
    part = ring_attn.shard_batch({"input_ids": ids, "labels": ids}, layout, rank)
    part["count"] = torch.tensor(2 * 23)
    loss = loss_of(model, part)
    loss.backward()
    ring_attn.sync_gradients(model)
    return model, reported(loss)


def by_buffers(bug: str = "", layout_name: str = "") -> Any:
    """`context_parallel` by torch's parameters, which shards buffers in place."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    model = model_with(dense_attention)
    ids = tokens(seqlen=24)
    part = ring_attn.shard_batch(
        {"input_ids": ids, "labels": ids}, SequenceLayout.contiguous(24, 1), 0
    )
    buffers = [part["input_ids"], part["position_ids"], part["shift_labels"]]
    part["count"] = torch.tensor(2 * 23)
    if bug == "labels left out of the buffers":
        part["shift_labels"] = buffers.pop().chunk(world_size, 1)[rank]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
        loss = loss_of(model, part)
        loss.backward()
    ring_attn.sync_gradients(model)
    return model, reported(loss)
