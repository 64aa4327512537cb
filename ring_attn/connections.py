"""Connects the ranks of a group before their first call: `prepare`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ring_attn import check
from ring_attn.call import Group
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec, TransportOptions
from ring_attn.core.strategy import Strategy, resolve_strategy
from ring_attn.machines.rehearse import connect
from ring_attn.strategies.registry import make_call, program_of
from ring_attn.transport.base import Agreement
from ring_attn.transport.p2p import group_device, new_p2p


def prepare(
    group: Group = None,
    strategy: str | Strategy = "ring",
    *,
    transport: TransportOptions | None = None,
) -> None:
    """Connects the ranks of a group for a strategy; all of them call this together.

    The first call of `ring_attention` does so by itself. To prepare says at once, and before
    anything is computed, which ranks are missing: on NCCL each channel of the strategy gets its
    communicator, and every message that goes between two ranks is sent once, with a few bytes.
    Connections are made once, shared by all calls on the group, and go with it.

    Args:
        group: as of `ring_attention`.
        strategy: as of `ring_attention`; "auto" has no connections of its own, prepare for the
            strategy that `explain` names.
        transport: as of the calls that follow.

    Raises:
        RuntimeError: naming the ranks that did not come within the timeout, or ranks that prepare
            for another strategy.
        ValueError: no such strategy, or one whose degree is open.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> prepare(strategy="ring")
        >>> dist.destroy_process_group()
    """
    process_group = check.check_group(group)
    options = check.check_transport(transport or TransportOptions())
    check.check_max_ctas(options, process_group)
    if strategy == "auto":
        raise ValueError(
            "prepare needs a strategy, got 'auto': pass the one that explain(...) names, or leave "
            "the connections to the first call"
        )
    world_size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    known = resolve_strategy(strategy, world_size, check.mesh_shape(group))
    device = group_device(process_group)
    seqlen = 2 * world_size
    layout, mask = SequenceLayout.contiguous(seqlen, world_size), Mask(seqlen, seqlen)
    spec = AttentionSpec(device.type, torch.float32, 1, world_size, world_size, 16, 16)
    call = make_call(known, spec, (layout, layout), mask, rank, backend="reference")
    opened = new_p2p(process_group, options)
    with opened.call("prepare", Agreement({"strategy": str(known)}), device):
        for backward in (False, True):
            connect(program_of(call, backward=backward), opened, device)
