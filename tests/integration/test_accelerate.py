"""A loop with accelerate's Accelerator, whose ranks share sequences, trains as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator

from ring_attn import SequenceLayout, shard_batch
from tests.distributed.pool import Pools
from tests.hf_models import VOCAB, yardstick
from tests.hf_trainers import Run, assert_same_run, in_one_process, split_model

NUM_STEPS, ROWS = 3, 41


def stepped(model: Any, _out: Path) -> Run:
    """Steps with clipping, as docs/hugging_face.md does; on ranks, each batch is split."""
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    size, rank = accelerator.num_processes, accelerator.process_index
    layout = SequenceLayout.zigzag(ROWS, size)
    generator = torch.Generator().manual_seed(3)
    losses, norms, gradients = [], [], {}
    for _ in range(NUM_STEPS):
        ids = torch.randint(VOCAB, (1, ROWS), generator=generator)
        part: dict[str, Any] = shard_batch({"input_ids": ids, "labels": ids}, layout, rank)
        if size > 1:
            part["sequence_layout"] = layout
        loss = prepared(**part, labels=part["shift_labels"], num_items_in_batch=ROWS - 1).loss
        optimizer.zero_grad()
        accelerator.backward(loss * size)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
        gradients = gradients or {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), "sum"))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    logged = {"loss": torch.stack(losses), "grad_norm": torch.stack(norms)}
    return Run(logged, gradients, weights)


def on_split(out: Path) -> Run:
    with split_model() as model:
        assert dist.get_world_size() > 1
        return stepped(model, out)


@pytest.mark.gloo
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_accelerate_trains_as_in_one_process(ranks: Pools, tmp_path: Path, world_size: int) -> None:
    oracle, noisy = in_one_process(stepped, tmp_path, yardstick("llama"))
    assert bool((oracle.logged["grad_norm"] > 0.5).all())  # clips
    for got in ranks(world_size).run(on_split, tmp_path):
        assert_same_run(got, oracle, noisy)
