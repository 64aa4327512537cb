"""Connects the ranks of a group before their first call, and compares calls: `prepare`, `check`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ring_attn import groups
from ring_attn.call import Group
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.machines.rehearse import connect
from ring_attn.strategies.registry import make_call, program_of
from ring_attn.strategies.strategy import Strategy, resolve_strategy
from ring_attn.transport.base import Agreement
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.p2p import check_calls, group_device, new_p2p


def prepare(
    group: Group = None,
    strategy: str | Strategy = "ring",
    *,
    transport: TransportOptions | None = None,
) -> None:
    """Connects the ranks of a group for a strategy; all ranks call `prepare` together.

    Optional, since the first call of `ring_attention` also connects. `prepare` finds missing ranks
    before any computing: on NCCL it makes a communicator for each channel of the strategy, and
    sends each of the strategy's messages once, with a few bytes. All calls on the group share its
    connections, which close with the group.

    Args:
        group: as in `ring_attention`.
        strategy: as in `ring_attention`, but not "auto": pass the strategy that `explain` names.
        transport: as in the calls that follow.

    Raises:
        RuntimeError: naming the ranks that did not come within the timeout, or ranks that prepare
            for another strategy.
        ValueError: no such strategy, or a strategy without a fixed degree.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> prepare(strategy="ring")
        >>> dist.destroy_process_group()
    """
    process_group = groups.check_group(group)
    options = groups.check_transport(transport or TransportOptions())
    groups.check_max_ctas(options, process_group)
    if strategy == "auto":
        raise ValueError(
            "prepare needs a strategy, got 'auto': pass the one that explain(...) names, or leave "
            "the connections to the first call"
        )
    world_size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    known = resolve_strategy(strategy, world_size, groups.mesh_shape(group))
    device = group_device(process_group)
    seqlen = 2 * world_size
    layout, mask = SequenceLayout.contiguous(seqlen, world_size), Mask(seqlen, seqlen)
    spec = AttentionSpec(device.type, torch.float32, 1, world_size, world_size, 16, 16)
    call = make_call(known, spec, (layout, layout), mask, rank, backend="reference")
    opened = new_p2p(process_group, options)
    with opened.call("prepare", Agreement({"strategy": known}), device):
        for backward in (False, True):
            connect(program_of(call, backward=backward), opened, device)


def check(group: Group = None) -> None:
    """Compares the ranks' calls on a group so far; all ranks call `check` together.

    On NCCL the host does not wait for a call, so an error of a call is raised by a later call: the
    results of the last ones are known to be right once `check` has returned, and so has every rank
    of the group. `check` waits for the device. Call it before results are used where they cannot
    be taken back: before the optimizer's step, unless `sync_gradients` or our Trainer does this,
    and before a checkpoint or the end of the program. On gloo a call itself raises; `check` only
    compares how many calls there were.

    Args:
        group: as in `ring_attention`.

    Raises:
        RuntimeError: calls differed, or a rank has failed or did not come within the timeout; then
            results since the last `check` may be wrong, on every rank.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> check()
        >>> dist.destroy_process_group()
    """
    check_calls(groups.check_group(group))
