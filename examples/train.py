"""Trains a small transformer on split sequences, and its twin in one process on whole ones.

    python examples/train.py                                        2 ranks on this machine
    torchrun --nproc-per-node 4 examples/train.py --seqlen 8192     any number of ranks

Each rank has the whole model and some rows of every sequence. Only attention needs the other rows:
K and V travel around the ring. (1) to (6) are all that a training loop needs for it.

The optimizer amplifies roundings, so two float32 trainings drift apart. The verdict is about one
more batch at the trained weights: losses and gradients may be twice as far from float64 as those of
one process in float32, plus a rounding (`ring_attn.testing.check`); else the exit status is 1.
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import ring_attn
from common import Layer, Transformer, batches, start
from ring_attn import SequenceLayout, testing

Batch = dict[str, Tensor]


def make_ring(
    layout: SequenceLayout, strategy: str = "ring", group: DeviceMesh | None = None
) -> Transformer:
    # (2) One function takes the place of attention. A group of None is all ranks.
    ring = partial(
        ring_attn.ring_attention, causal=True, layout=layout, strategy=strategy, group=group
    )
    model = Transformer()
    for module in model.modules():
        if isinstance(module, Layer):
            module.attention = ring
    return model


def parts_of_loss(logits: Tensor, labels: Tensor, num_targets: int) -> Tensor:
    """The part that each row, of any rank, has of a mean over `num_targets` rows."""
    # (4) Not the mean of this rank's rows: ranks may have different numbers of targets.
    return F.cross_entropy(logits.mT, labels, reduction="none").double() / num_targets


def backward(model: Transformer, batch: Batch, layout: SequenceLayout) -> Tensor:
    """Writes the gradients of this rank's parts of the loss; returns the parts, (batch, rows)."""
    model.zero_grad()
    # (3) This rank's rows, their positions, and labels that are shifted before they are cut.
    part = ring_attn.shard_batch(batch, layout, dist.get_rank() if layout.world_size > 1 else 0)
    logits = model(part["input_ids"], part["position_ids"])
    parts = parts_of_loss(logits, part["shift_labels"], len(logits) * (layout.seqlen - 1))
    parts.sum().backward()
    return parts.detach()


class Trainer:
    """A model and its optimizer; with a layout of one rank, in one process."""

    def __init__(self, model: Transformer, layout: SequenceLayout) -> None:
        self.model, self.layout = model, layout
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def step(self, batch: Batch) -> float:
        """Updates the weights, on all ranks alike; returns the mean loss before."""
        loss = backward(self.model, batch, self.layout).sum()
        if self.layout.world_size > 1:
            # (5) Gradients are sums over the ranks. Sum first, then clip.
            ring_attn.sync_gradients(self.model)
            dist.all_reduce(loss)  # only to print it
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def main(args: argparse.Namespace, device: torch.device) -> bool:
    # (1) Who holds which rows: with zigzag all ranks have the same work under a causal mask.
    layout = SequenceLayout.zigzag(args.seqlen, dist.get_world_size())
    return train(make_ring(layout, args.strategy).to(device), layout, args.steps)


def train(
    model: Transformer,
    layout: SequenceLayout,
    num_steps: int,
    make_twin: Callable[[], Transformer] = Transformer,
) -> bool:
    device = next(model.parameters()).device
    ring = Trainer(model, layout)
    twin = Trainer(make_twin().to(device), SequenceLayout.contiguous(layout.seqlen, 1))
    data = batches(layout.seqlen, device)
    for step, batch in enumerate(islice(data, num_steps)):
        # (6) If a rank leaves out a step, all raise.
        ring_attn.set_step(step)
        loss = ring.step(batch)
        if dist.get_rank() == 0:
            of_twin = twin.step(batch)
            print(
                f"step {step:2}: loss {loss:.6f} on {layout.world_size} ranks, {of_twin:.6f} in "
                f"one process, difference {abs(loss - of_twin):.1e}", flush=True,
            )  # fmt: skip
    return judge(model, layout, next(data), make_twin)


def judge(
    model: Transformer,
    layout: SequenceLayout,
    batch: Batch,
    make_twin: Callable[[], Transformer] = Transformer,
) -> bool:
    """Compares losses and gradients at the model's weights; prints the verdict on rank 0."""
    losses = ring_attn.unshard(backward(model, batch, layout), layout)
    ring_attn.sync_gradients(model)
    if dist.get_rank() != 0:
        return True
    results = [named(losses.float(), model)]
    for dtype in (torch.float64, torch.float32):
        twin = make_twin().to(losses.device, dtype)
        twin.load_state_dict(model.state_dict())
        losses = backward(twin, batch, SequenceLayout.contiguous(layout.seqlen, 1))
        results.append(named(losses.to(dtype), twin))
    ranks, exact, plain = results
    verdicts = [testing.check(name, x, exact[name], plain[name]) for name, x in ranks.items()]
    worst = max(verdicts, key=lambda verdict: verdict.ratio)
    print(f"of {len(verdicts)} results compared with float64 the worst is {worst}")
    print("ok" if worst.ok else "FAILED")
    return worst.ok


def named(losses: Tensor, model: Transformer) -> Batch:
    weights = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {"losses": losses} | weights


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seqlen", type=int, default=2048, help="bytes of each sequence")
    parser.add_argument("--strategy", default="ring", help="how attention is split: see README")
    start(partial(main, parser.parse_args()), num_ranks=2)
