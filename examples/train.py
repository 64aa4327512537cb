"""Trains a small transformer on split sequences, and its twin in one process on whole ones.

    torchrun --nproc-per-node 2 examples/train.py

Each rank has the whole model and some rows of every sequence. Only attention needs the other rows:
K and V travel around the ring. (1) to (6) are all that a training loop needs for it.

Afterwards rank 0 trains the twin, in float64 and several times in float32 with random roundings.
The first losses must be as near to float64 as the twin's (`ring_attn.testing.check_rounded`); else
the exit status is 1. Later losses prove nothing, as the optimizer amplifies roundings.
"""

import argparse
from collections.abc import Callable, Iterator
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


def make_ring(layout: SequenceLayout, group: DeviceMesh | None = None) -> Transformer:
    # (2) One function takes the place of attention. A group of None is all ranks.
    ring = partial(ring_attn.ring_attention, causal=True, layout=layout, group=group)
    model = Transformer()
    for module in model.modules():
        if isinstance(module, Layer):
            module.attention = ring
    return model


def parts_of_loss(logits: Tensor, labels: Tensor, num_targets: int) -> Tensor:
    """The part that each row, of any rank, has of a mean over `num_targets` rows."""
    # (4) Not the mean of this rank's rows: ranks may have different numbers of targets.
    return F.cross_entropy(logits.mT, labels, reduction="none").double() / num_targets


class Trainer:
    """A model and its optimizer; with a layout of one rank, in one process."""

    def __init__(self, model: Transformer, layout: SequenceLayout) -> None:
        self.model, self.layout = model, layout
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def step(self, batch: Batch) -> float:
        """Updates the weights, on all ranks alike; returns the mean loss before."""
        layout, split = self.layout, self.layout.world_size > 1
        # (3) This rank's rows, their positions, and labels that are shifted before they are cut.
        part = ring_attn.shard_batch(batch, layout, dist.get_rank() if split else 0)
        logits = self.model(part["input_ids"], part["position_ids"])
        num_targets = len(logits) * (layout.seqlen - 1)
        loss = parts_of_loss(logits, part["shift_labels"], num_targets).sum()
        self.optimizer.zero_grad()
        loss.backward()
        if split:
            # (5) Gradients are sums over the ranks. Sum first, then clip.
            ring_attn.sync_gradients(self.model)
            dist.all_reduce(loss.detach())  # only to print it
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def main(args: argparse.Namespace, device: torch.device) -> bool:
    # (1) Who holds which rows: with zigzag all ranks have the same work under a causal mask.
    layout = SequenceLayout.zigzag(args.seqlen, dist.get_world_size())
    return train(make_ring(layout).to(device), layout, args.steps, verbose=args.verbose)


def train(
    model: Transformer,
    layout: SequenceLayout,
    num_steps: int,
    make_twin: Callable[[], Transformer] = Transformer,
    *,
    verbose: bool = False,
) -> bool:
    device = next(model.parameters()).device
    ring, losses = Trainer(model, layout), []
    shown = range(num_steps) if verbose else {(num_steps - 1) * i // 4 for i in range(5)}
    for step, batch in enumerate(islice(batches(layout.seqlen, device), num_steps)):
        # (6) If a rank leaves out a step, all raise.
        ring_attn.set_step(step)
        losses.append(ring.step(batch))
        if dist.get_rank() == 0 and step in shown:
            print(f"step {step:2}: loss {losses[-1]:.6f} on {layout.world_size} ranks", flush=True)
    return is_as_one_process(torch.tensor(losses), batches(layout.seqlen, device), make_twin)


def is_as_one_process(
    losses: Tensor, data: Iterator[Batch], make_twin: Callable[[], Transformer] = Transformer
) -> bool:
    """Compares the first losses with those of one process; prints the verdict on rank 0."""
    if dist.get_rank() != 0:
        return True
    losses = losses[:3]
    first = [*islice(data, len(losses))]
    ids = first[0]["input_ids"]

    def losses_of_twin(dtype: torch.dtype = torch.float32) -> Tensor:
        model = make_twin().to(ids.device, dtype)
        twin = Trainer(model, SequenceLayout.contiguous(ids.size(1), 1))
        return torch.tensor([twin.step(batch) for batch in first], dtype=dtype)

    exact = losses_of_twin(torch.float64)
    for step, (x, y) in enumerate(zip(losses, exact, strict=True)):
        print(f"step {step}: loss {x:.6f} on ranks, {y:.6f} in one process, {abs(x - y):.1e}")
    noisy = testing.noisy_runs(losses_of_twin, num=8)
    verdict = testing.check_rounded("losses", losses.float(), exact, noisy)
    print(f"{'ok' if verdict.ok else 'FAILED'}: {verdict}, compared with float64")
    return verdict.ok


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seqlen", type=int, default=2048, help="bytes of each sequence")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the loss of each step")
    start(partial(main, parser.parse_args()))
