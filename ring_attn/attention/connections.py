"""Connect the ranks of a group before their first call, and compare calls: `prepare`, `check`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.program import Channel, Program
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy, resolve_strategy
from ring_attn.machines.rehearse import connect
from ring_attn.strategies.registry import make_call, program_of
from ring_attn.transport import groups
from ring_attn.transport.base import Agreement
from ring_attn.transport.groups import Group
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.p2p import check_calls, group_device, new_p2p

# Channels that most strategies use among all ranks of a group.
CHANNELS: tuple[Channel, ...] = ("shards", "gradients")


def prepare(
    group: Group = None,
    strategy: str | Strategy | None = None,
    *,
    transport: TransportOptions | None = None,
) -> None:
    """Connect the ranks of a group; all ranks call `prepare` together.

    Optional, since the first call of `ring_attention` also connects. `prepare` finds missing ranks
    before any computing; on NCCL it makes a communicator of the group for each channel. All calls
    on the group share its connections, which close with the group.

    Args:
        group: as in `ring_attention`.
        strategy: as in `ring_attention`, but not "auto". Each message of the strategy, forward and
            backward, is then sent once, with a few bytes, so that communicators among some of the
            ranks are made, too, and broken links are found. None connects the whole group only.
        transport: as in the calls that follow.

    Raises:
        RuntimeError: ranks did not arrive within the timeout, or prepare for other strategies; the
            error names them.
        ValueError: an unknown strategy, "auto", or degrees that do not fit the ranks.
        TypeError: `strategy` is neither a name nor a `Strategy`.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> prepare(strategy="ring")
        >>> dist.destroy_process_group()
    """
    process_group = groups.check_group(group)
    options = groups.check_transport(transport or TransportOptions())
    if strategy == "auto":
        raise ValueError(
            "strategy must be known before the first call, got 'auto': pass the strategy that "
            "ring_attn.explain(...) returns, or leave strategy out"
        )
    device = group_device(process_group)
    world_size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    resolved = None
    if strategy is not None:
        resolved = resolve_strategy(strategy, world_size, groups.mesh_shape(group))
    opened = new_p2p(process_group, options)
    with opened.call("prepare", Agreement({"strategy": resolved}), device):
        for channel in CHANNELS:
            opened.join(channel, device)
        if resolved is not None:
            for program in _small_programs(resolved, device, world_size, rank):
                connect(program, opened, device)


def _small_programs(
    strategy: Strategy, device: torch.device, world_size: int, rank: int
) -> tuple[Program, Program]:
    """Return a rank's programs of a small call, forward and backward, with all its messages."""
    seqlen = 2 * world_size
    layout, mask = SequenceLayout.contiguous(seqlen, world_size), Mask(seqlen, seqlen)
    spec = AttentionSpec(
        device_type=device.type,
        dtype=torch.float32,
        batch=1,
        nheads=world_size,
        nheads_kv=world_size,
        headdim=16,
        headdim_v=16,
    )
    call = make_call(strategy, spec, (layout, layout), mask, rank, backend="reference")
    return program_of(call, backward=False), program_of(call, backward=True)


def check(group: Group = None) -> None:
    """Compare the ranks' calls on a group so far; all ranks call `check` together.

    On NCCL the host does not wait for a call, so an error of a call is raised by a later call: the
    results of the last ones are known to be right once `check` has returned, and so has every rank
    of the group. `check` waits for the device. Call it before results are used where they cannot
    be taken back: before the optimizer's step, unless `sync_gradients` or our Trainer does this,
    and before a checkpoint or the end of the program. On gloo a call itself raises; `check` only
    compares how many calls there were.

    Args:
        group: as in `ring_attention`.

    Raises:
        RuntimeError: calls differed, or a rank has failed or did not arrive within the timeout;
            then results since the last `check` may be wrong, on every rank.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> check()
        >>> dist.destroy_process_group()
    """
    check_calls(groups.check_group(group))
