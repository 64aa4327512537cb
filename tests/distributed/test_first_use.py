"""A rank on whose GPU a backend is wrong, and which would compute by another one than the rest."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ring_attn import SequenceLayout, TransportOptions, ring_attention
from ring_attn.attention import operators as ops
from ring_attn.backends import choose_backend
from tests.distributed.pool import on_ranks


@pytest.mark.queued
@on_ranks(3)
def test_ranks_compute_by_one_backend() -> None:
    group = dist.new_group()
    left_out = (("aten", "wrong here"),) if dist.get_rank() == 1 else ()

    def proven(spec, backend, purpose):
        return choose_backend(spec, backend, purpose, left_out)

    x = torch.ones(1, 7, 2, 16)
    options = {"layout": SequenceLayout.contiguous(21, 3), "transport": TransportOptions(timeout=9)}
    both = "aten.*reference|reference.*aten"
    patched = mock.patch.object(ops, "proven_backend", proven)
    with patched, pytest.raises(RuntimeError, match=both):
        ring_attention(x, x, x, causal=True, softmax_scale=0.17, group=group, **options)
