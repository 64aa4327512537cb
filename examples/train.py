"""Train a small transformer on sharded sequences, and its twin in one process on whole sequences.

    torchrun --nproc-per-node 2 examples/train.py

Each rank has the whole model and some rows of every sequence. Only attention needs the other rows:
K and V are sent around the ring. A training loop needs only (1) to (6) for it.

Afterwards rank 0 trains the twin, in float64 and several times in float32 with random roundings.
The exit status is 1 if the first losses are farther from float64 than the twin's losses
(`ring_attn.testing.check_rounded`). Later losses are not compared, because the optimizer amplifies
roundings.
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
    """Return a transformer whose attention is a ring; without a group, of all ranks."""
    # (2) One function replaces attention.
    ring = partial(ring_attn.ring_attention, causal=True, layout=layout, group=group)
    model = Transformer()
    for module in model.modules():
        if isinstance(module, Layer):
            module.attention = ring
    return model


def parts_of_loss(logits: Tensor, labels: Tensor, num_targets: int) -> Tensor:
    """Return each row's part of a mean over `num_targets` rows of all ranks, (batch, rows)."""
    # (4) This is not the mean of this rank's rows: ranks may have different numbers of targets.
    return F.cross_entropy(logits.mT, labels, reduction="none").double() / num_targets


class Trainer:
    """A model and its optimizer; with a layout of one rank, in one process."""

    def __init__(self, model: Transformer, layout: SequenceLayout) -> None:
        self.model, self.layout = model, layout
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def step(self, batch: Batch) -> float:
        """Update the weights, equally on all ranks; return the mean loss before."""
        layout = self.layout
        is_sharded = layout.world_size > 1
        # (3) This rank's rows, their positions, and labels that are shifted before sharding.
        part = ring_attn.shard_batch(batch, layout, dist.get_rank() if is_sharded else 0)
        logits = self.model(part["input_ids"], part["position_ids"])
        num_targets = len(logits) * (layout.seqlen - 1)
        loss = parts_of_loss(logits, part["shift_labels"], num_targets).sum()
        self.optimizer.zero_grad()
        loss.backward()
        if is_sharded:
            # (5) Gradients are sums over the ranks. Sum first, then clip.
            ring_attn.sync_gradients(self.model)
            dist.all_reduce(loss.detach())  # only to print it
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def main(args: argparse.Namespace, device: torch.device) -> bool:
    # (1) The rows of each rank: with zigzag all ranks have the same work under a causal mask.
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
    """Train on sharded sequences; return whether the losses equal the losses of one process."""
    device = next(model.parameters()).device
    ring, losses = Trainer(model, layout), []
    five_steps = {(num_steps - 1) * i // 4 for i in range(5)}  # the first, the last, and between
    shown = range(num_steps) if verbose else five_steps
    for step, batch in enumerate(islice(batches(layout.seqlen, device), num_steps)):
        # (6) If a rank skips a step, all ranks raise an error.
        ring_attn.set_step(step)
        losses.append(ring.step(batch))
        if dist.get_rank() == 0 and step in shown:
            print(f"step {step:2}: loss {losses[-1]:.6f} on {layout.world_size} ranks", flush=True)
    return is_as_one_process(torch.tensor(losses), batches(layout.seqlen, device), make_twin)


def is_as_one_process(
    losses: Tensor, data: Iterator[Batch], make_twin: Callable[[], Transformer] = Transformer
) -> bool:
    """Compare the first losses with the losses of one process; print the verdict on rank 0."""
    if dist.get_rank() != 0:
        return True
    losses = losses[:3]
    first_batches = [*islice(data, len(losses))]
    ids = first_batches[0]["input_ids"]

    def losses_of_twin(dtype: torch.dtype = torch.float32) -> Tensor:
        model = make_twin().to(ids.device, dtype)
        twin = Trainer(model, SequenceLayout.contiguous(ids.size(1), 1))
        return torch.tensor([twin.step(batch) for batch in first_batches], dtype=dtype)

    exact = losses_of_twin(torch.float64)
    for step, (got, expected) in enumerate(zip(losses, exact, strict=True)):
        error = abs(got - expected)
        print(f"step {step}: loss {got:.6f} on ranks, {expected:.6f} in one process, {error:.1e}")
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
