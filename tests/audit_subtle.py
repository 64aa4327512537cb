"""Steps with planted bugs that a search for wrong steps found: losses, states, parts of models."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import ring_attn
from common import Layer, Transformer, dense_attention
from ring_attn import SequenceLayout
from tests.audit_steps import SEQLEN, loss_of, model_with, reported, ring_of, tokens


def whole_step(layout_name: str) -> tuple[SequenceLayout, Transformer, dict[str, Tensor], Tensor]:
    """Layout, model on a ring, this rank's shard of a batch, and the labels of the whole batch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.from_name(layout_name, SEQLEN, world_size)
    model = model_with(dense_attention if world_size == 1 else ring_of(layout))
    ids = tokens()
    labels = ids.clone()
    labels[:, : SEQLEN // 2] = -100
    labels[0, : SEQLEN // 2 + 5] = -100
    part = ring_attn.shard_batch({"input_ids": ids, "labels": labels}, layout, rank)
    part["count"] = (labels[:, 1:] != -100).sum()
    return layout, model, part, labels


class Summed(torch.autograd.Function):
    """The sum over ranks, whose backward sums the gradients of the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


def finished(model: nn.Module, loss: Tensor) -> Any:
    loss.backward()
    ring_attn.sync_gradients(model)
    return model, reported(loss)


def penalized(bug: str = "", layout_name: str = "contiguous") -> Any:
    """A penalty of weights, and a loss of sums over all ranks."""
    world_size = dist.get_world_size()
    _, model, part, _ = whole_step(layout_name)
    logits = model(part["input_ids"], part["position_ids"])
    loss = F.cross_entropy(logits.mT, part["shift_labels"], reduction="sum") / part["count"]
    penalty = 0.01 * torch.stack([x.square().sum() for x in model.parameters()]).sum()
    shares = Summed.apply(logits[..., :4].softmax(-1).sum((0, 1))) / (2 * SEQLEN)
    balance = shares.square().sum()
    if bug == "penalty on each rank":
        loss = loss + penalty
    elif bug == "balance on each rank":
        loss = loss + balance
    else:
        loss = loss + (penalty + balance) / world_size
    return finished(model, loss)


def policy(bug: str = "", layout_name: str = "contiguous") -> Any:
    """Losses of log-probabilities, as those of reinforcement learning, and of a value."""
    world_size = dist.get_world_size()
    layout, model, part, _ = whole_step(layout_name)
    logits, targets = model(part["input_ids"], part["position_ids"]), part["shift_labels"]
    logps = logits.log_softmax(-1)
    chosen = logps.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    mask = targets != -100
    sums = (chosen * mask).sum(1)
    if bug == "mean of own rows":
        loss = -sums.sum() / mask.sum().clamp(min=1) / world_size
    elif bug == "mean of own rows, by a number":
        loss = -sums.sum() / max(1, int(mask.sum())) / world_size
    elif bug == "mean of own rows of each sequence":
        loss = -(sums / mask.sum(1).clamp(min=1)).mean() / world_size
    elif bug == "mean of chosen rows":
        loss = -chosen[mask].mean().nan_to_num() / world_size
    elif bug == "nll_loss":
        loss = F.nll_loss(logps.mT, targets, reduction="sum")
        loss = loss / (targets != -100).sum().clamp(min=1) / world_size
    elif bug == "preference of own rows":
        loss = -F.logsigmoid(0.3 * (sums[0] - sums[1])) / world_size
    elif bug == "advantages of own rows":
        gains = chosen.detach() * mask
        loss = -(chosen * (gains - gains.mean()) / gains.std() * mask).sum() / part["count"]
    else:
        loss = -sums.sum() / part["count"]
    generator = torch.Generator().manual_seed(9)
    returns = layout.shard(torch.randn(2, SEQLEN, generator=generator), dist.get_rank())
    error = F.mse_loss(logits[..., 0], returns, reduction="sum") / (2 * SEQLEN)
    if bug == "value of own rows":
        error = F.mse_loss(logits[..., 0], returns) / world_size
    return finished(model, loss + error)


def two_targets(bug: str = "", layout_name: str = "contiguous") -> Any:
    """A second head that predicts the token after the next, as multi-token prediction has."""
    layout, model, part, labels = whole_step(layout_name)
    torch.manual_seed(3)
    both = nn.ModuleDict({"model": model, "second": nn.Linear(32, 256, bias=False)})
    targets, rank = part["shift_labels"], dist.get_rank()
    later = layout.shard(F.pad(labels[:, 2:], (0, 2), value=-100), rank)
    if bug == "second targets of own rows":
        later = F.pad(targets[:, 1:], (0, 1), value=-100)
    logits = model(part["input_ids"], part["position_ids"])
    following = layout.shard(tokens().roll(-1, 1), rank)
    if bug == "second tokens of own rows":
        following = part["input_ids"].roll(-1, 1)
    second = both["second"](model.embed(following))
    loss = F.cross_entropy(logits.mT, targets, reduction="sum")
    loss = loss + 0.3 * F.cross_entropy(second.mT, later, reduction="sum")
    return finished(both, loss / part["count"])


def partly_local(bug: str = "", layout_name: str = "contiguous") -> Any:
    """Attention of several layers, and of a teacher."""
    layout, model, part, _ = whole_step(layout_name)
    if bug == "one layer":
        model.layers["1"].attention = dense_attention
    is_local = bug == "teacher" or layout.world_size == 1
    teacher = model_with(dense_attention if is_local else ring_of(layout), seed=7)
    with torch.no_grad():
        expected = teacher(part["input_ids"], part["position_ids"]).log_softmax(-1)
    found = model(part["input_ids"], part["position_ids"]).log_softmax(-1)
    loss = F.kl_div(found, expected, log_target=True, reduction="sum") / (2 * SEQLEN)
    return finished(model, loss)


def changed_gradients(bug: str = "", layout_name: str = "contiguous") -> Any:
    """Gradients that are clipped by value, and summed by the user's own code."""
    _, model, part, _ = whole_step(layout_name)
    loss = loss_of(model, part)
    loss.backward()
    if bug == "clipped by value before the sum":
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    for x in model.parameters():
        dtype = torch.bfloat16 if bug == "summed in bfloat16" else torch.float32
        grad = x.grad.to(dtype) if dist.get_world_size() > 1 else x.grad
        dist.all_reduce(grad)
        x.grad.copy_(grad)
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model, reported(loss)


class Stateful(nn.Module):
    """A transformer with states that the step changes: of a router, of its input, of its output."""

    def __init__(self, model: Transformer, bug: str) -> None:
        super().__init__()
        self.model, self.bug = model, bug
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.model.embed(input_ids)
        total = x.detach().sum((0, 1))
        num = 2 * input_ids.size(1)
        if not self.bug.startswith("mean"):
            dist.all_reduce(total)
            num = 2 * SEQLEN
        x = x - self.mean
        self.mean.lerp_(total / num, 0.1)
        for layer in self.model.layers.values():
            x = layer(x, position_ids)
        logits = self.model.head(self.model.norm(x))
        chosen = F.one_hot(logits[..., :4].argmax(-1), 4).sum((0, 1)).float()
        self.seen += chosen  # a rank's part, which a later step sums
        if not self.bug.startswith("bias"):
            dist.all_reduce(chosen)
        self.bias += 1e-3 * (chosen.mean() - chosen).sign()
        return logits


def stateful(bug: str = "", layout_name: str = "contiguous") -> Any:
    """Buffers and averaged weights, which no gradient of this step shows."""
    _, transformer, part, _ = whole_step(layout_name)
    model = Stateful(transformer, bug)
    average = copy.deepcopy(transformer).requires_grad_(False)
    both = nn.ModuleDict({"model": model, "average": average})
    loss = loss_of(_Averaged(both), part)
    loss.backward()
    if not bug.startswith("average"):
        ring_attn.sync_gradients(both)
    with torch.no_grad():
        for mean, x in zip(average.parameters(), transformer.parameters(), strict=True):
            mean.lerp_(x - 0.1 * x.grad, 0.5)
    if bug.startswith("average"):
        ring_attn.sync_gradients(both)
    return both, reported(loss)


class _Averaged(nn.Module):
    """A model beside the average of its weights."""

    def __init__(self, both: nn.ModuleDict) -> None:
        super().__init__()
        self.both = both

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        logits: Tensor = self.both["model"](input_ids, position_ids)
        return logits


class Shifting(Layer):
    """A layer that mixes rows in the module that calls attention."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        return super().forward(x + 0.5 * self.mixed(x), position_ids)

    def mixed(self, x: Tensor) -> Tensor:
        """Return the row before each row, by the functions of ring_attn."""
        layout = SequenceLayout.contiguous(SEQLEN, dist.get_world_size())
        runs = ring_attn.halo(x, layout, 1)
        return torch.cat([run[:, :-1] for run in runs], 1)


class Padding(Shifting):
    def mixed(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 1, -1))


class Summing(Shifting):
    def mixed(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / SEQLEN


def shifting(bug: str = "", layout_name: str = "contiguous") -> Any:
    """Tokens that are shifted by a row in the layers of a transformer."""
    _, model, part, _ = whole_step("contiguous")
    kind = {"padded": Padding, "summed": Summing}.get(bug, Shifting)
    for layer in model.layers.values():
        layer.__class__ = kind
    return finished(model, loss_of(model, part))
