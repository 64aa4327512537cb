"""Log-probabilities of whole sequences: those of one process, in order, with its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import SequenceLayout, shard_batch, token_logprobs
from ring_attn.testing import noisy_runs
from tests.bounds import assert_close, named
from tests.distributed.pool import on_ranks
from tests.refusals import refused

BATCH, SEQLEN, VOCAB, DIM = 2, 29, 17, 5


def preference(logprobs: Tensor) -> Tensor:
    """A loss in the manner of DPO: of the difference between two sequences, in one sigmoid."""
    chosen, rejected = logprobs.sum(1)
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected))


def dense(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> Tensor:
    logprobs = (hidden @ weight / temperature).log_softmax(-1)[:, :-1]
    found = logprobs.gather(2, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    return torch.nn.functional.pad(found.where(labels[:, 1:] >= 0, 0.0), (0, 1))


def is_that_of_one_process(kind: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    hidden, weight = torch.randn(BATCH, SEQLEN, DIM), torch.randn(DIM, VOCAB)
    labels = torch.randint(VOCAB, (BATCH, SEQLEN))
    labels[:, :7] = -100

    def whole(dtype: torch.dtype) -> dict[str, Tensor]:
        leaf = weight.to(dtype).requires_grad_()
        logprobs = dense(hidden.to(dtype), leaf, labels, 0.7)
        (gradient,) = torch.autograd.grad(preference(logprobs), leaf)
        return {"logprobs": logprobs.detach(), "gradient": gradient}

    exact, noisy = whole(torch.float64), noisy_runs(lambda: whole(torch.float32))
    layout = SequenceLayout.from_name(kind, SEQLEN, world_size)
    part = shard_batch({"inputs_embeds": hidden, "labels": labels}, layout, rank)
    leaf = weight.clone().requires_grad_()
    logits = part["inputs_embeds"] @ leaf
    logprobs = token_logprobs(logits, part["shift_labels"], layout, temperature=0.7)
    (gradient,) = torch.autograd.grad(preference(logprobs), leaf)
    dist.all_reduce(gradient)
    for name, got in {"logprobs": logprobs, "gradient": gradient}.items():
        assert_close(name, got, exact[name], named(noisy, name))


@pytest.mark.parametrize("kind", ["zigzag", "striped"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_preference_over_whole_sequences(ranks: Any, kind: str, world_size: int) -> None:
    ranks(world_size).run(is_that_of_one_process, kind)


@on_ranks(2)
def test_what_does_not_fit_is_refused() -> None:
    layout = SequenceLayout.contiguous(8, 2)
    labels = torch.zeros(1, 4, dtype=torch.int64)
    for logits, given, temperature, words in (
        (torch.zeros(1, 3, 5), labels, 1.0, "(1, 3, 5) and (1, 4)"),
        (torch.zeros(1, 3, 5), labels[:, :3], 1.0, "4 rows|got 3"),
        (torch.zeros(1, 4, 5), labels, 0.0, "temperature|0.0"),
    ):
        with refused(ValueError, words):
            token_logprobs(logits, given, layout, temperature=temperature, group=dist.new_group())
