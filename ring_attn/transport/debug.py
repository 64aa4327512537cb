"""RING_ATTN_DEBUG=1: compares the arguments of all ranks before a call, and names what differs.

Costs two small exchanges a call, over the ring's own connections and within its timeout.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import check
from ring_attn.core.spec import TransportOptions
from ring_attn.transport.base import Agreement, gather_texts
from ring_attn.transport.p2p import group_device, new_p2p
from ring_attn.transport.ranks.group import refused, was_counted

_COMPARING = Agreement({"RING_ATTN_DEBUG": "1"})


def debug_enabled() -> bool:
    """Whether RING_ATTN_DEBUG is set to anything but 0."""
    return os.environ.get("RING_ATTN_DEBUG", "0") not in ("", "0")


def check_agreement(
    described: Mapping[str, object], group: dist.ProcessGroup, options: TransportOptions
) -> None:
    """Compares what every rank of the group is about to do.

    Args:
        described: name -> value of everything that must be equal on all ranks.
        group: the ring's group; all its ranks take part.
        options: whose timeout counts.

    Raises:
        ValueError: on every rank, naming what differs, on which ranks, and how.
        RuntimeError: a rank did not take part in time.
    """
    gathered = _gather({name: repr(value) for name, value in described.items()}, group, options)
    differences = [
        f"rank {rank} raised {one['error']}" for rank, one in enumerate(gathered) if "error" in one
    ]
    names = set() if differences else {name for one in gathered for name in one}
    for name in sorted(names):
        values = [one.get(name) for one in gathered]
        usual, count = Counter(values).most_common(1)[0]
        if count == len(values):
            continue
        odd = ", ".join(
            f"rank {rank} has {value}" for rank, value in enumerate(values) if value != usual
        )
        differences.append(f"{name}: {odd}, the other {count} have {usual}")
    if differences:
        raise ValueError("ranks disagree on the call; " + "; ".join(differences))


def values_of(**tensors: Tensor | None) -> dict[str, object]:
    """Weighted sums of tensors whose values must be equal on all ranks, to compare and to show."""
    sums: dict[str, object] = {}
    for name, x in tensors.items():
        if x is not None:
            flat = x.detach().double().flatten()
            weights = torch.arange(1.0, flat.numel() + 1, dtype=flat.dtype, device=x.device)
            sums[f"values of {name}"] = (flat @ weights).item()
    return sums


def tell_refusal(error: BaseException, group: object, options: object = None) -> None:
    """Tells the other ranks of a call that this rank has refused.

    The call is counted, so that this rank's next one cannot pass for it. Under RING_ATTN_DEBUG this
    rank takes part in the comparison: the others then raise at once, and name it. Nothing is done
    for an error that was told before.

    Args:
        error: what refused the call.
        group: as it was given; nothing is done where it names no ranks.
        options: of the transport, as they were given.
    """
    process_group = None
    with suppress(Exception):
        process_group = check.check_group(cast(Any, group))
    if process_group is None or was_counted(error):
        return
    if debug_enabled() and isinstance(error, Exception):
        known = options if isinstance(options, TransportOptions) else TransportOptions()
        _gather({"error": f"{type(error).__name__}: {error}"}, process_group, known)
    refused(process_group, error)


def _gather(
    described: Mapping[str, str], group: dist.ProcessGroup, options: TransportOptions
) -> list[dict[str, str]]:
    if dist.get_world_size(group) == 1:
        return [dict(described)]
    # Without nccl_max_ctas, so that ranks that differ in it can compare their arguments too.
    transport = new_p2p(group, replace(options, nccl_max_ctas=None))
    device = group_device(group)
    with transport.call("compare arguments", _COMPARING, device):
        texts = gather_texts(transport, json.dumps(dict(described)), device)
    return [json.loads(text) for text in texts]
