"""ring-flash-attn's adapters: steps in the manner of the frameworks that enter by them alone.

OpenRLHF pads the packed sequence, and gives its padding a boundary, a mask and position 0; slime
cuts a padded sequence without a mask; axolotl derives the boundaries from positions; forks of
verl pass no mask, and continue the last sequence over its padding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from ring_attn.integrations.ring_flash_attn import (
    adapters,
    substitute_hf_flash_attn,
    update_ring_flash_attn_params,
)
from ring_attn.integrations.transformers.models import registered
from ring_attn.testing import noisy_runs
from tests.bounds import assert_close, named
from tests.distributed.pool import on_ranks
from tests.hf_models import VOCAB, all_in_float64, make_model, yardstick
from tests.hf_own_rows import FAMILIES as FAMILIES_WITH_OWN_ROWS
from tests.hf_own_rows import make as make_with_own_rows
from tests.refusals import refused

LENGTHS = (17, 1, 29, 10)  # of packed sequences
FAMILY = "llama"


@contextmanager
def with_flash_attn() -> Iterator[None]:
    """transformers as on a machine with flash-attn."""
    found = mock.patch.object(
        transformers.PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True
    )
    loads = mock.patch("transformers.modeling_utils.lazy_import_flash_attention")
    with found, loads:
        yield


def packed() -> Tensor:
    return torch.randint(VOCAB, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(3))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def whole_step(model: Any) -> dict[str, Tensor]:
    """Gradients of all packed sequences, one after another, in one process."""
    ids = packed()
    logits = torch.cat([model(part).logits for part in ids.split(LENGTHS, 1)], 1)
    return gradients(model, loss_of(logits.to(torch.float64), ids))


def restarting(lengths: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def openrlhf(world_size: int) -> tuple[Tensor, dict[str, Tensor], int]:
    """Boundaries, tensors of the whole padded sequence, and the padding's length."""
    padding = -sum(LENGTHS) % world_size + world_size
    ids, positions = pad(packed(), (0, padding)), pad(restarting(LENGTHS), (0, padding))
    mask = pad(torch.ones_like(packed()), (0, padding))
    cuts = pad(torch.tensor(LENGTHS).cumsum(0), (1, 0))
    cu_seqlens = pad(cuts, (0, 1), value=ids.size(1)).int()
    batch = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
    return cu_seqlens, batch, padding


def slime(world_size: int) -> tuple[Tensor, dict[str, Tensor], int]:
    cu_seqlens, batch, padding = openrlhf(world_size)
    batch["position_ids"] = restarting((*LENGTHS, padding))
    del batch["attention_mask"]
    return cu_seqlens, batch, padding


def axolotl(world_size: int) -> tuple[Tensor, dict[str, Tensor], int]:
    _, batch, padding = slime(world_size)
    starts = (batch["position_ids"][0] == 0).nonzero().flatten()
    return pad(starts, (0, 1), value=batch["input_ids"].size(1)).int(), batch, padding


def verl(world_size: int) -> tuple[Tensor, dict[str, Tensor], int]:
    _, batch, padding = slime(world_size)
    lengths = *LENGTHS[:-1], LENGTHS[-1] + padding
    batch["position_ids"] = restarting(lengths)
    return pad(torch.tensor(lengths).cumsum(0), (1, 0)).int(), batch, padding


FRAMEWORKS = {"openrlhf": openrlhf, "slime": slime, "axolotl": axolotl, "verl": verl}


def sharded_step(model: Any, framework: str) -> dict[str, Tensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    cu_seqlens, batch, padding = FRAMEWORKS[framework](world_size)
    update_ring_flash_attn_params(cu_seqlens, dist.group.WORLD)
    mine = {name: x.chunk(world_size, 1)[rank] for name, x in batch.items()}
    logits = model(**mine).logits
    real = batch["input_ids"].size(1) - padding
    rows = torch.arange(batch["input_ids"].size(1)).chunk(world_size)[rank]
    kept = rows < real
    loss = loss_of(logits[:, kept].to(torch.float64), mine["input_ids"][:, kept])
    found = gradients(model, loss + 0.0 * logits.sum())
    for x in found.values():
        dist.all_reduce(x)
    return found


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_of_each_framework(ranks: Any, framework: str, world_size: int) -> None:
    exact, noisy = results_of_one_process()
    for got in ranks(world_size).run(substituted_step, framework):
        assert got.keys() == exact.keys()
        for name, x in got.items():
            assert_close(name, x, exact[name], named(noisy, name))


@cache
def results_of_one_process() -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Gradients in float64, and in noisy runs."""
    model = yardstick(FAMILY)
    noisy = noisy_runs(lambda: whole_step(copy.deepcopy(model)))
    with all_in_float64():
        return whole_step(model.double()), noisy


def substituted_step(framework: str) -> dict[str, Tensor]:
    with with_flash_attn(), substitute_hf_flash_attn(dist.group.WORLD, heads_k_stride=1):
        return sharded_step(make_model(FAMILY, adapters.NAME), framework)


@on_ranks(2)
def test_what_contradicts_the_documents_is_refused() -> None:
    group = dist.new_group()
    rank = dist.get_rank()
    with with_flash_attn(), substitute_hf_flash_attn(group, 1):
        model = make_model(FAMILY, adapters.NAME)
        ids, positions = packed()[:, :20], torch.arange(20 * rank, 20 * rank + 20)[None]
        with refused(RuntimeError, "update_ring_flash_attn_params|not set"):
            model(input_ids=ids, position_ids=positions)
    for boundaries, changes, error, words in (
        ([0, 40], {"position_ids": torch.arange(20)[None]}, ValueError, "position_ids of rank 1"),
        ([0, 39], {}, ValueError, "2 x 20, got 39"),
        ([0, 40], {"attention_mask": pad(torch.ones(1, 15), (0, 5))}, NotImplementedError, "part"),
        (
            [0, 40],
            {"cu_seq_lens_q": torch.tensor([0, 40])},
            ValueError,
            "leave cu_seq_lens_q out",
        ),
    ):
        with with_flash_attn(), substitute_hf_flash_attn(dist.new_group(), 1) as substitution:
            update_ring_flash_attn_params(torch.tensor(boundaries).int(), substitution.group)
            if rank == 1:
                with refused(error, words):
                    model(**{"input_ids": ids, "position_ids": positions, **changes})


@on_ranks(2)
def test_models_that_number_their_own_rows_are_refused() -> None:
    with with_flash_attn(), substitute_hf_flash_attn(dist.new_group(), 1):
        model = make_with_own_rows("vit", adapters.NAME)
        with refused(NotImplementedError, "number their own rows|substitute_hf_flash_attn"):
            model(**FAMILIES_WITH_OWN_ROWS["vit"].inputs())


def test_a_substitution_is_undone_and_replaced() -> None:
    functions = transformers.AttentionInterface._global_mapping
    before = functions[adapters.NAME]
    first = substitute_hf_flash_attn(None, 1)
    with substitute_hf_flash_attn(None, 2) as second:
        assert functions[adapters.NAME] == second.attend and registered[adapters.NAME] is second
        first.undo()  # not in place any more
        assert functions[adapters.NAME] == second.attend
        adapters.use_ring_attn(False)
        assert adapters.NAME not in registered
        adapters.use_ring_attn(True)
        assert registered[adapters.NAME] is second
    assert functions[adapters.NAME] is before and adapters.NAME not in registered
