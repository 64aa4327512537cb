"""Trains a small transformer on split sequences, and its twin in one process on whole ones.

    python examples/train.py                                        2 ranks on this machine
    torchrun --nproc-per-node 4 examples/train.py --seqlen 8192     any number of ranks

Each rank has the whole model and some rows of every sequence. Only attention needs the other rows:
K and V travel around the ring. (1) to (6) are all that a training loop needs for it.

The twin is the same model on the same bytes with torch's attention. As the optimizer amplifies
roundings, two float32 trainings drift apart. So the verdict is about one more batch at the trained
weights: losses and gradients may be twice as far from float64 as one process' float32, plus a
rounding. If they are farther, the exit status is 1.
"""

import argparse
import math
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import ring_attn
from common import Layer, Transformer, batches, start
from ring_attn import SequenceLayout

Batch = dict[str, Tensor]


def make_ring(seqlen: int, strategy: str) -> tuple[Transformer, SequenceLayout]:
    """The model on this rank, and how its sequences are split."""
    # (1) Who holds which rows: with zigzag all ranks have the same work under a causal mask.
    layout = SequenceLayout.zigzag(seqlen, dist.get_world_size())
    # (2) One function takes the place of attention.
    ring = partial(ring_attn.ring_attention, causal=True, layout=layout, strategy=strategy)
    model = Transformer()
    for module in model.modules():
        if isinstance(module, Layer):
            module.attention = ring
    return model, layout


def backward(model: Transformer, batch: Batch, layout: SequenceLayout, rank: int) -> Tensor:
    """Writes gradients; returns the part of the mean loss that comes from each row, (1, rows)."""
    model.zero_grad()
    # (3) This rank's rows, their positions, and labels that are shifted before they are cut.
    part = ring_attn.shard_batch(batch, layout, rank)
    logits = model(part["input_ids"], part["position_ids"])
    losses = F.cross_entropy(logits.mT, part["shift_labels"], reduction="none")
    # (4) Divide by the targets of the whole sequence: ranks may have different numbers of rows.
    parts = losses.double() / (layout.seqlen - 1)
    parts.sum().backward()
    return parts.detach()


def train_step(
    step: int, model: Transformer, optimizer: torch.optim.Optimizer, batch: Batch,
    layout: SequenceLayout,
) -> float:  # fmt: skip
    """Updates the weights on all ranks alike; returns the mean loss before."""
    # (5) If a rank leaves out a step, all raise.
    ring_attn.set_step(step)
    loss = backward(model, batch, layout, dist.get_rank()).sum()
    # (6) Each rank has the gradient of its rows' part: sum the parts, then clip.
    ring_attn.sync_gradients(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    dist.all_reduce(loss)  # only to print the loss
    return loss.item()


def make_optimizer(model: Transformer) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))


def main(args: argparse.Namespace, device: torch.device) -> bool:
    model, layout = make_ring(args.seqlen, args.strategy)
    optimizer, is_first = make_optimizer(model.to(device)), dist.get_rank() == 0
    twin, whole = Transformer().to(device), SequenceLayout.contiguous(args.seqlen, 1)
    twin_optimizer = make_optimizer(twin)
    if is_first:
        print(f"{layout.world_size} ranks on {device.type}, sequences of {args.seqlen} bytes")
        print("step   loss of ranks   of one process   difference", flush=True)
    data = batches(args.seqlen, device)
    for step, batch in enumerate(islice(data, args.steps)):
        loss = train_step(step, model, optimizer, batch, layout)
        if is_first:
            twin_loss = backward(twin, batch, whole, rank=0).sum().item()
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
            twin_optimizer.step()
            difference = abs(loss - twin_loss)
            print(f"{step:4} {loss:15.6f} {twin_loss:16.6f} {difference:12.1e}", flush=True)
    return judge(model, layout, next(data))


def judge(model: Transformer, layout: SequenceLayout, batch: Batch) -> bool:
    """Compares losses and gradients at the model's weights; prints the verdict on rank 0."""
    parts = backward(model, batch, layout, dist.get_rank())
    ring_attn.sync_gradients(model)
    losses = ring_attn.unshard(parts, layout)
    if dist.get_rank() != 0:
        return True
    results = [[losses, *gradients(model)]]
    for dtype in (torch.float32, torch.float64):
        one = Transformer().to(losses.device, dtype)
        one.load_state_dict(model.state_dict())
        losses = backward(one, batch, SequenceLayout.contiguous(layout.seqlen, 1), rank=0)
        results.append([losses, *gradients(one)])
    ok = True
    for name, chosen in (("losses", slice(1)), ("gradients", slice(1, None))):
        ranks, plain, exact = (tensors[chosen] for tensors in results)
        rounding = torch.finfo(torch.float32).eps / 2 * math.sqrt(len(exact))
        error, bound = distance(ranks, exact), 2 * distance(plain, exact) + rounding
        ok = ok and error <= bound
        print(f"{name} against float64: error {error:.2e}, at most {bound:.2e}")
    print("ok: as exact as one process" if ok else "FAILED: less exact than one process")
    return ok


def gradients(model: Transformer) -> list[Tensor]:
    return [x.grad for x in model.parameters() if x.grad is not None]


def distance(results: list[Tensor], exact: list[Tensor]) -> float:
    """The norm of all errors, each relative to the norm of its tensor."""
    return math.hypot(
        *(float((x - y).norm() / y.norm()) for x, y in zip(results, exact, strict=True))
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seqlen", type=int, default=2048, help="bytes of each sequence")
    parser.add_argument("--strategy", default="ring", help="how attention is split")
    start(partial(main, parser.parse_args()), num_ranks=2)
