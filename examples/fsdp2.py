"""FSDP2 and a ring: parameters are sharded over all ranks, sequences over the ranks of a ring.

    torchrun --nproc-per-node 4 examples/fsdp2.py --cp 2         2 rings of 2 ranks

     axis of the mesh    its ranks have                  parameters and gradients
     dp                  different sequences             FSDP shards and sums them over all ranks
     cp                  rows of the same sequences

Three things differ from FSDP2 without a ring: `shard_batch` shards the batch, attention is a ring
over mesh["cp"], and FSDP sums over ranks instead of computing a mean, because each rank already has
its part of one mean. Afterwards rank 0 trains the same model in one process. The exit status is 1
if the losses are farther from float64 than twice the error of one process, plus a rounding.
"""

import argparse
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import ring_attn
from common import Transformer, batches, start
from ring_attn import SequenceLayout
from train import is_as_one_process, make_ring, parts_of_loss


def shard_model(model: Transformer, all_ranks: DeviceMesh) -> None:
    for module in (*model.layers.values(), model):
        sharded = fully_shard(module, mesh=all_ranks)
        sharded.set_gradient_divide_factor(1.0)  # a sum, not a mean
        # Otherwise FSDP passes the factor to an operator that only NCCL has.
        sharded.set_force_sum_reduction_for_comms(True)


def main(args: argparse.Namespace, device: torch.device) -> bool:
    dp = dist.get_world_size() // args.cp
    mesh = init_device_mesh(device.type, (dp, args.cp), mesh_dim_names=("dp", "cp"))
    layout = SequenceLayout.zigzag(args.seqlen, args.cp)
    model = make_ring(layout, group=mesh["cp"]).to(device)
    shard_model(model, init_device_mesh(device.type, (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    means = []
    for step, batch in enumerate(islice(batches(args.seqlen, device, args.batch), args.steps)):
        ring_attn.set_step(step)
        # Each ring gets different sequences, and all its ranks the same; then this rank's rows.
        sequences = {name: x.chunk(dp)[mesh.get_local_rank("dp")] for name, x in batch.items()}
        part = ring_attn.shard_batch(sequences, layout, mesh.get_local_rank("cp"))
        logits = model(part["input_ids"], part["position_ids"])
        targets = args.batch * (args.seqlen - 1)  # of the whole batch
        loss = parts_of_loss(logits, part["shift_labels"], targets).sum()
        optimizer.zero_grad()
        loss.backward()  # FSDP sums the gradients here
        # On NCCL, this raises an error if the ranks' calls differed, before gradients are used.
        ring_attn.check(mesh["cp"])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of all shards
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        means.append(mean.cpu())
    return is_as_one_process(torch.stack(means), batches(args.seqlen, device, args.batch))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cp", type=int, default=2, help="ranks of a ring")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seqlen", type=int, default=257, help="bytes of each sequence")
    parser.add_argument("--batch", type=int, default=4, help="number of sequences of all rings")
    start(partial(main, parser.parse_args()))
