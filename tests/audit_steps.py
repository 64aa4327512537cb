"""Training steps as users write them, right and with bugs planted, for the tests of `audit`."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

import ring_attn
from common import Layer, Transformer, dense_attention
from ring_attn import SequenceLayout

SEQLEN = 29


def model_with(attention: Any, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(2, 32)
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):  # at ones its gradient says little
            nn.init.normal_(module.weight, 1.0, 0.1)
        if isinstance(module, Layer):
            module.attention = attention
    return model


def tokens(num: int = 2, seqlen: int = SEQLEN, seed: int = 0) -> Tensor:
    return torch.randint(256, (num, seqlen), generator=torch.Generator().manual_seed(seed))


def ring_of(layout: SequenceLayout) -> Any:
    return partial(ring_attn.ring_attention, causal=True, layout=layout)


def plain(bug: str = "", layout_name: str = "zigzag", seqlen: int = SEQLEN) -> Any:
    """A loop with sync_gradients, as in examples/train.py."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.from_name(layout_name, seqlen, world_size)
    local = bug == "local attention" or world_size == 1
    attention = dense_attention if local else ring_of(layout)
    model = model_with(attention, rank if bug == "seed of the rank" else 0)
    ids = tokens(seqlen=seqlen, seed=rank if bug == "batch of the rank" else 0)
    labels = ids.clone()
    labels[:, : seqlen // 2] = -100  # so that ranks have different numbers of targets
    part = ring_attn.shard_batch({"input_ids": ids, "labels": labels}, layout, rank)
    targets, positions = part["shift_labels"], part["position_ids"]
    if bug == "labels shifted after the cut":
        targets = F.pad(layout.shard(labels, rank)[:, 1:], (0, 1), value=-100)
    if bug == "labels shifted twice":
        targets = F.pad(targets[:, 1:], (0, 1), value=-100)
    if bug == "local positions":
        positions = torch.arange(positions.size(1))[None]
    count = int((labels[:, 1:] != -100).sum())
    logits = model(part["input_ids"], positions)
    losses = F.cross_entropy(logits.mT, targets, reduction="none")
    loss = losses.sum() / count
    if bug == "own count":
        loss = losses.sum() / (targets != -100).sum().clamp(min=1) / world_size
    if bug == "whole loss on each rank":
        loss = loss * world_size
    loss.backward()
    if bug == "norms not summed":
        ring_attn.sync_gradients([x for n, x in model.named_parameters() if "norm" not in n])
    elif bug == "averaged":
        ring_attn.sync_gradients(model, op="mean")
    elif bug == "summed twice":
        ring_attn.sync_gradients(model)
        ring_attn.sync_gradients(model)
    elif bug not in ("not summed", "clipped before the sum"):
        ring_attn.sync_gradients(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    if bug == "clipped before the sum":
        ring_attn.sync_gradients(model)
    torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank * (bug == "rate of the rank"))).step()
    del norm
    total = loss.detach().clone()
    dist.all_reduce(total)
    if bug == "loss averaged":
        total /= world_size
    with torch.no_grad():
        losses = F.cross_entropy(
            model(part["input_ids"], part["position_ids"]).mT,
            part["shift_labels"],
            reduction="none",
        )
        evaluation = losses.sum() / count
        dist.all_reduce(evaluation)
    if bug == "evaluation counts ranks":
        evaluation = evaluation * world_size
    return model, total, evaluation


def two_steps(bug: str = "", layout_name: str = "zigzag") -> Any:
    """Two steps of AdamW; the sign of one gradient near zero depends on the number of ranks."""
    rank, world_size, model, (part, next_part) = sharded(bug, layout_name, 2)
    rate = 1e-3 * (1 + rank * (bug == "rate of the rank"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, eps=1e-15)
    losses = []
    for one in (part, next_part):
        optimizer.zero_grad()
        own = bug == "own count"
        losses.append(loss_of(model, one, own) / (world_size if own else 1))
        losses[-1].backward()
        ring_attn.sync_gradients(model)
        model.norm.weight.grad[0] = 3e-10 if world_size == 1 else -3e-10
        optimizer.step()
    return model, reported(losses[1 if not bug else 0])


def sharded(bug: str = "", layout_name: str = "contiguous", accumulate: int = 1) -> Any:
    """This rank's shards of micro-batches, the whole batch's count, a model on a ring."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.from_name(layout_name, SEQLEN, world_size)
    model = model_with(dense_attention if world_size == 1 else ring_of(layout))
    batches = []
    for index in range(accumulate):
        ids = tokens(seed=index)
        labels = ids.clone()
        labels[:, : SEQLEN // 2 + index] = -100
        batches.append(
            ring_attn.shard_batch({"input_ids": ids, "labels": labels}, layout, rank)
            | {"count": (labels[:, 1:] != -100).sum() * accumulate}
        )
    return rank, world_size, model, batches


def loss_of(model: nn.Module, part: dict[str, Tensor], own: bool = False) -> Tensor:
    logits, targets = model(part["input_ids"], part["position_ids"]), part["shift_labels"]
    if own:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return F.cross_entropy(logits.mT, targets, reduction="sum") / part["count"]


def reported(loss: Tensor) -> Tensor:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total


def ddp(bug: str = "", layout_name: str = "contiguous") -> Any:
    """DistributedDataParallel over the ranks of the sequence, which averages gradients."""
    _, world_size, model, (part,) = sharded(bug, layout_name)
    wrapped = nn.parallel.DistributedDataParallel(model)
    loss = loss_of(wrapped, part, own=bug == "own mean")
    (loss if bug in ("own mean", "averaged by DDP") else loss * world_size).backward()
    torch.optim.AdamW(wrapped.parameters(), lr=1e-2).step()
    return wrapped, reported(loss) / (world_size if bug == "own mean" else 1)


def fsdp(bug: str = "", layout_name: str = "contiguous") -> Any:
    """FSDP2 over the ranks of the sequence."""
    _, world_size, model, (part,) = sharded(bug, layout_name)
    mesh = init_device_mesh("cpu", (world_size,))
    for module in (*model.layers.values(), model):
        shard = fully_shard(module, mesh=mesh)
        if bug != "averaged by FSDP":
            shard.set_gradient_divide_factor(1.0)
            shard.set_force_sum_reduction_for_comms(True)
    loss = loss_of(model, part, own=bug == "own mean")
    loss.backward()
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    return model, reported(loss) / (world_size if bug == "own mean" else 1)


def accumulated(bug: str = "", layout_name: str = "contiguous") -> Any:
    """Two micro-batches, and one sum of gradients."""
    _, world_size, model, batches = sharded(bug, layout_name, 2)
    whole = []
    for part in batches:
        loss = loss_of(model, part)
        loss.backward()
        whole.append(reported(loss))
        if bug == "summed in each micro-batch":
            ring_attn.sync_gradients(model)
    if bug == "averaged":
        ring_attn.sync_gradients(model, op="mean")
    elif not bug:
        ring_attn.sync_gradients(model)
    return model, torch.stack(whole).sum()


def parallelized(bug: str = "", layout_name: str = "contiguous") -> Any:
    """`parallelize` makes the attention of a module a ring."""
    rank, world_size, model, (part,) = sharded(bug, layout_name)
    layout = SequenceLayout.from_name(layout_name, SEQLEN, world_size)
    for module in model.modules():
        if isinstance(module, Layer):
            module.attention = Core()
    if world_size > 1 and bug != "not parallelized":
        style = ring_attn.ContextParallel(layout=layout, inside="local")
        mesh = init_device_mesh("cpu", (world_size,))
        ring_attn.parallelize(model, mesh, {"layers.*.attention": style})
    loss = loss_of(model, part)
    loss.backward()
    norms = [x for name, x in model.named_parameters() if "norm" in name]
    rest = [x for name, x in model.named_parameters() if "norm" not in name]
    ring_attn.sync_gradients(rest)
    if bug != "norms left out":
        ring_attn.sync_gradients(norms)
    return model, reported(loss)


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense_attention(q, k, v)


def low_precision(bug: str = "", layout_name: str = "contiguous") -> Any:
    """Weights in bfloat16, compiled, with adapters that alone are trained."""
    _, world_size, model, (part,) = sharded(bug, layout_name)
    model = model.to(torch.bfloat16)
    model.requires_grad_(False)
    torch.manual_seed(1)
    for layer in model.layers.values():
        layer.o_proj = Adapter(layer.o_proj)
    logits = model(part["input_ids"], part["position_ids"]).float()
    loss = F.cross_entropy(logits.mT, part["shift_labels"], reduction="sum") / part["count"]
    loss.backward()
    if bug != "not summed":
        ring_attn.sync_gradients(model, op="mean" if bug == "averaged" else "sum")
    return model, reported(loss)


class Adapter(nn.Module):
    """A low-rank adapter, as LoRA's."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(4, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def hugging_face(bug: str = "", layout_name: str = "zigzag") -> Any:
    """A Llama with padded rows on our registration; labels are shifted outside of the model."""
    from ring_attn.integrations.transformers import register
    from tests.hf_models import VOCAB, make_model

    rank, world_size = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.from_name(layout_name, SEQLEN, world_size)
    ids = tokens() % VOCAB
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    part = ring_attn.shard_batch({"input_ids": ids, "labels": labels}, layout, rank)
    count = (labels[:, 1:] != -100).sum()
    if bug == "labels shifted after the cut":
        part["shift_labels"] = F.pad(layout.shard(labels, rank)[:, 1:], (0, 1), value=-100)
    if bug == "own count":
        count = (part["shift_labels"] != -100).sum() * world_size
    with register(layout=layout_name):
        model = make_model("llama", "sdpa" if world_size == 1 else "ring_attn")
        given = {} if world_size == 1 else {"sequence_layout": layout}
        logits = model(
            input_ids=part["input_ids"],
            position_ids=part["position_ids"],
            attention_mask=mask,
            **given,
        ).logits
        loss = F.cross_entropy(logits.mT, part["shift_labels"], reduction="sum") / count
        loss.backward()
    ring_attn.sync_gradients(model)
    return model, reported(loss)


class Padded(nn.Module):
    """A transformer whose attention gathers keys by torch, and hides padding."""

    def __init__(self, layout: SequenceLayout, differentiable: bool, doubles: bool = False) -> None:
        super().__init__()
        self.model = model_with(self.attend)
        self.layout, self.differentiable, self.doubles = layout, differentiable, doubles
        self.seen = torch.empty(0)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None
    ) -> Tensor:
        rows = self.layout.position_ids(dist.get_rank())
        seen = torch.arange(self.layout.seqlen) <= rows[:, None]
        self.seen = seen if attention_mask is None else seen & attention_mask.bool()[:, None, None]
        return self.model(input_ids, position_ids)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (self.gather(x) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        seen = self.seen | ~self.seen.any(-1, keepdim=True)
        return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).transpose(1, 2)

    def gather(self, x: Tensor) -> Tensor:
        if self.doubles:  # the gradients of keys and values
            x = 2.0 * x - x.detach()
        if self.differentiable:
            return self.layout.unshard(all_gather(x.contiguous()))
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        parts[dist.get_rank()] = x
        return self.layout.unshard(parts)


def gathered(bug: str = "", layout_name: str = "contiguous") -> Any:
    """Context parallelism of the user's own making, with rows that are padded in front."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.from_name(layout_name, 24, world_size)
    ids, mask = tokens(seqlen=24), torch.ones(2, 24, dtype=torch.int64)
    mask[0, :7] = 0
    labels = ids.masked_fill(mask == 0, -100)
    part = ring_attn.shard_batch({"input_ids": ids, "labels": labels}, layout, rank)
    part["count"] = (part["shift_labels"] != -100).sum()
    dist.all_reduce(part["count"])
    if bug.startswith("local positions"):
        part["position_ids"] = torch.arange(24 // world_size)[None]
    given = None if bug == "mask dropped" and world_size > 1 else mask
    doubles = bug.startswith("keys with double gradients") and world_size > 1
    model = Padded(layout, not bug.startswith("keys without gradients"), doubles)
    logits = model(part["input_ids"], part["position_ids"], given)
    loss = F.cross_entropy(logits.mT, part["shift_labels"], reduction="sum") / part["count"]
    loss.backward()
    left_out = "model.norm.weight" if bug.endswith("and one left out") else ""
    if not bug.endswith("not summed"):
        ring_attn.sync_gradients([x for name, x in model.named_parameters() if name != left_out])
    return model, reported(loss)


def compiled(bug: str = "", layout_name: str = "contiguous") -> Any:
    """A compiled model."""
    _, _, model, (part,) = sharded(bug, layout_name)
    loss = loss_of(torch.compile(model, backend="aot_eager"), part)
    loss.backward()
    if bug != "not summed":
        ring_attn.sync_gradients(model)
    return model, reported(loss)


def tensor_parallel(bug: str = "", layout_name: str = "contiguous") -> Any:
    """torch's tensor parallelism over all ranks, whose batches are the same."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = model_with(dense_attention)
    mesh = init_device_mesh("cpu", (world_size,))
    plan: dict[str, Any] = {f"layers.*.{x}_proj": ColwiseParallel() for x in ("gate", "up")}
    plan["layers.*.down_proj"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    ids = tokens().roll(rank if bug == "batch of the rank" else 0, 1)
    part = ring_attn.shard_batch(
        {"input_ids": ids, "labels": ids}, SequenceLayout.contiguous(SEQLEN, 1), 0
    )
    part["count"] = (part["shift_labels"] != -100).sum()
    loss = loss_of(model, part)
    loss.backward()
    if bug == "summed over tp":
        plain = [x for x in model.parameters() if not isinstance(x, DTensor)]
        ring_attn.sync_gradients(plain)
    return model, loss


def trainer(layout_name: str = "zigzag") -> Any:
    """Our Trainer, on padded rows, with accumulation, clipping and evaluation."""
    from ring_attn.integrations.trainer import split_sequence
    from tests import hf_trainers
    from tests.hf_models import make_model

    with tempfile.TemporaryDirectory() as out:
        args = hf_trainers.arguments(out, max_steps=2)
        if dist.get_world_size() == 1:
            plainly = make_model("llama", "sdpa"), args, transformers.Trainer, "padded"
            with hf_trainers.as_torchrun():
                return run_trainer(hf_trainers.make_trainer(*plainly))
        with hf_trainers.split_model(layout_name) as model:
            split = split_sequence(transformers.Trainer)
            return run_trainer(hf_trainers.make_trainer(model, args, split, "padded"))


def run_trainer(made: Any) -> Any:
    loss = made.train().training_loss
    return made.model, loss, made.evaluate()["eval_loss"]
