"""Attention over a sequence that two ranks share, compared with dense attention.

    python examples/quickstart.py                                 2 ranks on this machine
    torchrun --nproc-per-node 4 examples/quickstart.py            any number of ranks

This needs only ring_attn, and no GPU. The exit status is 1 if the output or a gradient is farther
from float64 than twice the error of torch's attention in float32, plus a rounding.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

import ring_attn
from ring_attn import testing

SEQLEN = 1001  # any length


def main() -> bool:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # one sequence, the same on every rank
    q, dout = torch.randn(2, 1, SEQLEN, 8, 64)  # (batch, rows, heads, headdim)
    k, v = torch.randn(2, 1, SEQLEN, 2, 64)  # 2 KV heads: GQA

    # The positions of each rank: zigzag gives every rank the same work under a causal mask.
    layout = ring_attn.SequenceLayout.zigzag(seqlen=SEQLEN, world_size=world_size)
    shards = [layout.shard(x, rank).requires_grad_() for x in (q, k, v)]

    # This replaces flash_attn_func(q, k, v, causal=True): inputs and output are this rank's rows.
    out = ring_attn.ring_attention(*shards, causal=True, layout=layout)
    out.backward(layout.shard(dout, rank))

    # Only for the comparison: gather all ranks' rows, and compute dense attention in float64.
    results = [out.detach(), *(x.grad for x in shards if x.grad is not None)]
    whole = [ring_attn.unshard(x, layout) for x in results]
    mask = ring_attn.masks.causal(SEQLEN)
    exact = testing.dense_gradients(q, k, v, dout, mask)
    plain = testing.plain_gradients(q, k, v, dout, mask)
    ok = True
    for name, got in zip(("out", "dq", "dk", "dv"), whole, strict=True):
        verdict = testing.check(
            name, got, getattr(exact, name), getattr(plain, name), exact.terms.get(name)
        )
        ok = ok and verdict.ok
        if rank == 0:
            print(f"{name:4} error {verdict.error:.1e}, allowed {verdict.bound:.1e}")
    if rank == 0:
        print(f"{'ok' if ok else 'FAILED'}: {layout.shard_lens} rows on {world_size} ranks")
    return ok


if __name__ == "__main__":
    if "RANK" not in os.environ:
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
        sys.exit()
    dist.init_process_group("gloo")  # "nccl" on GPUs
    ok = main()
    dist.destroy_process_group()
    sys.exit(0 if ok else 1)
