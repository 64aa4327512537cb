"""A program for torchrun, in which some ranks die in the first start; see `test_restarts`.

Its words: before the first call, or as it is refused; the ranks that die; a folder for marks.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ring_attn import SequenceLayout, ring_attention
from tests.bounds import assert_computes


def main(when: str, victims: str, folder: str) -> None:
    # torch's own connections may use addresses of the first start, which the store still has.
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=200))
    del os.environ["TORCH_GLOO_LAZY_INIT"]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    started = Path(folder, f"started.{rank}")
    again = started.exists()
    dies = str(rank) in victims.split(",") and not again
    started.touch()
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 31, 4, 8, generator=generator)
    layout = SequenceLayout.zigzag(31, world_size)
    shards = [layout.shard(x, rank).requires_grad_() for x in (q, k, v)]
    # A victim that torchrun ends before its mark would die again in the second start.
    marks = [Path(folder, f"started.{victim}") for victim in victims.split(",")]
    while dies and not all(mark.exists() for mark in marks):
        time.sleep(0.01)
    if dies and when == "before":
        time.sleep(1.0)  # the others wait for this rank by now
        os._exit(7)
    if dies and when == "refused":
        time.sleep(3.0)  # the lead looks about once a second by now
        with suppress(ValueError):
            ring_attention(*shards, softcap=-1.0, layout=layout)
        os._exit(7)
    if when == "refused" and rank == 0 and again:
        time.sleep(1.0)  # the others find the old notes

    def rows_of_whole(*whole: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in whole)
        attended = scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
        return layout.shard(attended, rank)

    out = ring_attention(*shards, causal=True, layout=layout)
    out.sum().backward()
    repeated = ring_attention(*shards, causal=True, layout=layout)
    assert torch.equal(out, repeated)
    assert_computes(out, rows_of_whole, q, k, v)
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    Path(folder, f"formed.{rank}").write_text(count)


if __name__ == "__main__":
    main(*sys.argv[1:])
