"""RING_ATTN_DEBUG=1: compares the arguments of all ranks before each call, and names differences.

Costs two small exchanges per call, over the ring's connections and within its timeout.
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
    """Compares everything that must be equal on all ranks of the group; all its ranks take part.

    Raises:
        ValueError: on every rank, naming each differing argument, its ranks and their values.
        RuntimeError: a rank did not take part in time.
    """
    gathered = _gather({name: repr(value) for name, value in described.items()}, group, options)
    differences = [
        f"rank {rank} raised {report['error']}"
        for rank, report in enumerate(gathered)
        if "error" in report
    ]
    names = set() if differences else {name for report in gathered for name in report}
    for name in sorted(names):
        values = [report.get(name) for report in gathered]
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
    """Weighted sums of tensors whose values must be equal on all ranks."""
    sums: dict[str, object] = {}
    for name, x in tensors.items():
        if x is not None:
            flat = x.detach().double().flatten()
            weights = torch.arange(1.0, flat.numel() + 1, dtype=flat.dtype, device=x.device)
            sums[f"values of {name}"] = (flat @ weights).item()
    return sums


def tell_refusal(error: BaseException, group: object, options: object = None) -> None:
    """Tells the other ranks that this rank has refused a call; group and options are unchecked.

    Counts the call, so that this rank's next call cannot be mistaken for it. With RING_ATTN_DEBUG,
    takes part in the comparison: then all other ranks raise at once, and name this rank. Does
    nothing for an error that was counted before, or without a group.
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
    # Without nccl_max_ctas: ranks that differ in it could not even connect to compare.
    transport = new_p2p(group, replace(options, nccl_max_ctas=None))
    device = group_device(group)
    with transport.call("compare arguments", _COMPARING, device):
        texts = gather_texts(transport, json.dumps(dict(described)), device)
    return [json.loads(text) for text in texts]
