"""A custom mask: a long document, and questions about parts of it, in one sequence.

    torchrun --nproc-per-node 2 examples/own_mask.py

    queries in           see
    the document         earlier rows of the document: a window, and the first rows
    each question        its part of the document, and the question itself causally

`ring_attn.masks` has no function for this mask, so it is made of slices: a range of queries, a
range of keys, and a band of `key - query`. Keys that no query of a rank sees are neither sent to it
nor computed. A layout by the mask's area gives all ranks equal work. Afterwards rank 0 computes
dense attention with the same mask. The exit status is 1 if out or a gradient is farther from
float64 than the tests allow.
"""

import argparse
from functools import partial

import torch
import torch.distributed as dist

import ring_attn
from common import start
from ring_attn import Mask, masks, testing


def document_with_questions(
    document: int, questions: list[tuple[int, int, int]], *, window: int = 128, first: int = 16
) -> Mask:
    """Return the mask. A question is (start, stop, length): its part of the document, its rows."""
    end = document + sum(length for _, _, length in questions)
    slices: list[tuple[int | None, ...]] = [
        # (queries from, to, keys from, to, lowest and highest key - query; None: unbounded)
        (0, document, 0, first, None, 0),  # the document sees its first rows, causally,
        (0, document, first, document, -window, 0),  # and a causal window
    ]
    question_start = document
    for part_start, part_stop, length in questions:
        question_stop = question_start + length
        # All of its part of the document, and the question itself causally.
        slices.append((question_start, question_stop, part_start, part_stop))
        slices.append((question_start, question_stop, question_start, question_stop, None, 0))
        question_start = question_stop
    return masks.from_slices(end, end, slices)


def main(args: argparse.Namespace, device: torch.device) -> bool:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    third = args.document // 3
    parts = [(0, third, 40), (third, 2 * third, 25), (2 * third, args.document, 61)]
    mask = document_with_questions(args.document, parts)

    # Equal work for all ranks: the boundaries of this layout depend on the mask.
    layout = ring_attn.balance.by_area(mask, world_size)
    if rank == 0:
        print(f"{mask.area} of {mask.seqlen_q**2} pairs are visible")
        print(f"rows on each rank {layout.shard_lens}, pairs {layout.mask_area(mask)}")

    inputs = testing.random_qkv(seqlen_q=mask.seqlen_q, nheads=8, nheads_kv=2, headdim=64)
    q, k, v, dout = (x.to(device) for x in inputs)
    shards = [layout.shard(x, rank).requires_grad_() for x in (q, k, v)]
    out = ring_attn.ring_attention(*shards, mask=mask, layout=layout)  # pass it to every layer
    out.backward(layout.shard(dout, rank))

    results = [out.detach(), *(x.grad for x in shards if x.grad is not None)]
    whole = [ring_attn.unshard(x, layout) for x in results]
    if rank != 0:
        return True
    exact = testing.dense_gradients(q, k, v, dout, mask)
    plain = testing.plain_gradients(q, k, v, dout, mask)
    ok = True
    for name, got in zip(("out", "dq", "dk", "dv"), whole, strict=True):
        verdict = testing.check(
            name, got, getattr(exact, name), getattr(plain, name), exact.terms.get(name)
        )
        print(verdict)
        ok = ok and verdict.ok
    print("ok" if ok else "FAILED")
    return ok


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--document", type=int, default=1000, help="rows of the document")
    start(partial(main, parser.parse_args()))
