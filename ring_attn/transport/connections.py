"""Connect the ranks of a group before their first call, and compare calls: `prepare`, `check`."""

from __future__ import annotations

from ring_attn.core.program import Channel
from ring_attn.transport import groups
from ring_attn.transport.base import Agreement
from ring_attn.transport.groups import Group
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.p2p import check_calls, group_device, new_p2p

# Channels that most strategies use among all ranks of a group.
CHANNELS: tuple[Channel, ...] = ("shards", "gradients")


def prepare(group: Group = None, *, transport: TransportOptions | None = None) -> None:
    """Connect the ranks of a group; all ranks call `prepare` together.

    Optional, since the first call of `ring_attention` also connects. `prepare` finds missing ranks
    before any computing; on NCCL it makes a communicator of the group for each channel. All calls
    on the group share its connections, which close with the group.

    Args:
        group: as in `ring_attention`.
        transport: as in the calls that follow.

    Raises:
        RuntimeError: naming the ranks that did not arrive within the timeout.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> prepare()
        >>> dist.destroy_process_group()
    """
    process_group = groups.check_group(group)
    options = groups.check_transport(transport or TransportOptions())
    device = group_device(process_group)
    opened = new_p2p(process_group, options)
    with opened.call("prepare", Agreement({}), device):
        for channel in CHANNELS:
            opened.join(channel, device)


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
