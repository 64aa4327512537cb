"""Train a small transformer on a mesh: ring attention together with torch's parallelism.

    torchrun --nproc-per-node 8 examples/mesh.py dp=2,cp=2,tp=2

     axis  shards                parameters along the axis   gradients along the axis
     pp    layers, into stages   different                   not exchanged
     dp    sequences             equal                       summed by sync_gradients
     cp    rows of sequences     as along dp                 as along dp
     tp    heads, MLP columns    a shard of each matrix      complete on every rank

Mistakes to avoid:
  - passing the whole mesh or the default group to ring_attention: pass one axis, mesh["cp"]
  - averaging gradients: each rank has its part of one mean over the whole batch's targets, so the
    schedule has scale_grads=False (for FSDP see fsdp2.py)
  - passing position_ids of shape (1, rows) to the schedule, which splits them into microbatches
  - running microbatches, layers or recomputation in different orders on the ranks of a ring: they
    communicate in every layer, forward and backward, and would deadlock
  - shifting labels within a shard, or clipping by the gradients of one rank

Afterwards rank 0 trains the same model in one process, in float32 and in float64. The exit status
is 1 if the losses are farther from float64 than twice the error of float32, plus a rounding.
"""

import argparse
import math
import sys
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import parallel as tp
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import ring_attn
from common import Transformer, batches, start
from ring_attn import SequenceLayout
from train import is_as_one_process, make_ring, parts_of_loss

AXES = ("pp", "dp", "cp", "tp")


def axes_of(text: str) -> tuple[int, ...]:
    """Parse sizes such as "cp=2,tp=2"; return them in the order of `AXES`."""
    parts = [part.split("=") for part in text.split(",")]
    sizes = {name: int(size) for name, size in parts}
    if not sizes.keys() <= set(AXES):
        raise ValueError(f"axes must be some of {', '.join(AXES)}, got {text}")
    return tuple(sizes.get(name, 1) for name in AXES)


def make_stage(mesh: DeviceMesh, layout: SequenceLayout) -> Transformer:
    """Return this rank's part of the model."""
    model = make_ring(layout, group=mesh["cp"])
    stage, num_stages = mesh.get_local_rank("pp"), mesh["pp"].size()
    if stage > 0:
        model.embed = nn.Identity()
    if stage < num_stages - 1:
        model.norm = model.head = nn.Identity()
    num_layers = len(model.layers)
    for index in range(num_layers):
        stage_of_layer = index * num_stages // num_layers
        if stage_of_layer != stage:
            del model.layers[str(index)]
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    plan: dict[str, tp.ParallelStyle] = {name: tp.ColwiseParallel() for name in columns}
    plan |= {name: tp.RowwiseParallel() for name in ("o_proj", "down_proj")}
    for layer in model.layers.values():
        tp.parallelize_module(layer, mesh["tp"], plan)
    return model


def main(args: argparse.Namespace, device: torch.device) -> bool:
    num_ranks = dist.get_world_size()
    if math.prod(args.axes) != num_ranks:
        sizes = ",".join(f"{name}={size}" for name, size in zip(AXES, args.axes, strict=True))
        sys.exit(
            f"the axes {sizes} need {math.prod(args.axes)} ranks, but torchrun started "
            f"{num_ranks}: pass, for example, cp={num_ranks}"
        )
    mesh = init_device_mesh(device.type, args.axes, mesh_dim_names=AXES)
    num_stages, dp, cp, _ = args.axes
    stage, dp_rank, cp_rank = (mesh.get_local_rank(axis) for axis in ("pp", "dp", "cp"))
    layout = SequenceLayout.zigzag(args.seqlen, cp)
    num_targets = args.batch * (args.seqlen - 1)
    model = make_stage(mesh, layout).to(device)
    # One foreach operator cannot take plain parameters and DTensors.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), foreach=False)
    schedule = Schedule1F1B(
        PipelineStage(model, stage, num_stages, device, group=mesh.get_group("pp")),
        n_microbatches=args.batch // dp,
        loss_fn=lambda logits, labels: parts_of_loss(logits, labels, num_targets).sum(),
        scale_grads=False,
    )
    means = []
    for step, batch in enumerate(islice(batches(args.seqlen, device, args.batch), args.steps)):
        ring_attn.set_step(step)
        sequences = {name: x.chunk(dp)[dp_rank] for name, x in batch.items()}
        part = ring_attn.shard_batch(sequences, layout, cp_rank)
        positions = part["position_ids"].expand(args.batch // dp, -1)
        ids = [part["input_ids"]] if stage == 0 else []
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(*ids, position_ids=positions, target=part["shift_labels"], losses=losses)
        ring_attn.sync_gradients(model, mesh["dp", "cp"])
        # On NCCL, this raises an error if the ranks' calls differed, before gradients are used.
        ring_attn.check(mesh["cp"])
        clip(model, mesh)
        optimizer.step()
        loss = sum(losses, torch.zeros((), dtype=torch.float64, device=device)).detach()
        for axis in ("pp", "dp", "cp"):
            dist.all_reduce(loss, group=mesh.get_group(axis))
        means.append(loss.cpu())
    return is_as_one_process(torch.stack(means), batches(args.seqlen, device, args.batch))


def clip(model: Transformer, mesh: DeviceMesh) -> None:
    """Clip by the norm of all gradients; torch combines shards of a DTensor, the sum stages."""
    norms = [get_total_norm([x.grad]) for x in model.parameters() if x.grad is not None]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    square = torch.stack(whole).square().sum()
    dist.all_reduce(square, group=mesh.get_group("pp"))
    clip_grads_with_norm_(model.parameters(), 1.0, square.sqrt(), foreach=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("axes", nargs="?", type=axes_of, default="pp=2,cp=2", help="sizes of pp, dp, cp and tp")
    add("--steps", type=int, default=5)
    add("--seqlen", type=int, default=256, help="bytes of each sequence")
    add("--batch", type=int, default=8, help="sequences; a microbatch has dp of them")
    start(partial(main, parser.parse_args()))
