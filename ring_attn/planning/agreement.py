"""`strategy="auto"` in a call: rank 0 chooses and broadcasts, once for each set of arguments.

The planner's choice is a function of its arguments, but files and devices may differ between ranks.
So the ranks exchange small messages at the first call. Later calls look the choice up.
"""

from __future__ import annotations

import json
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch

from ring_attn.core.facts import digest
from ring_attn.core.layout import Layouts
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.planning import planner
from ring_attn.planning.choice import Problem
from ring_attn.planning.devices import (
    LOCAL_WORLD_SIZE,
    find_cluster,
    node_size_of,
    with_backend,
    with_ctas,
)
from ring_attn.transport import capture
from ring_attn.transport.base import Agreement, Transport, gather_texts, rank_name

# Agreed strategies by transport (so that they are freed with its group), then by arguments. Batches
# with ever new documents would fill it: the oldest entry is dropped, the same on all ranks.
_agreed: weakref.WeakKeyDictionary[Transport, OrderedDict[object, Strategy]] = (
    weakref.WeakKeyDictionary()
)
AGREEMENTS_KEPT = 1024

_CHOOSING = Agreement({"strategy": "auto"})

_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, TypeError, NotImplementedError, RuntimeError)
}


def agreed_strategy(
    spec: AttentionSpec,
    layouts: Layouts,
    mask: Mask,
    transport: Transport,
    *,
    backend: str,
    same_bits: bool | None,
    backward: bool,
    node_size: int | None = None,
    global_ranks: Sequence[int] | None = None,
) -> Strategy:
    """Rank 0's choice for `strategy="auto"`, the same on every rank.

    At the first call with new arguments rank 0 chooses, and the ranks gather texts from all.
    Later calls look the choice up, without communication. RING_ATTN_CLUSTER, files and devices may
    differ between ranks; the arguments may not.

    Args:
        backend: name of the chosen backend, not "auto".
        node_size: number of consecutive ranks that form a node, if a mesh defines it.
        global_ranks: global ranks of the call's ranks, if not consecutive: a ring whose ranks are
            strided by other axes of a mesh spans more nodes.

    Raises:
        ValueError: arguments differ between ranks; the text lists these ranks.
        Exception: rank 0's error, on every rank.
        RuntimeError: a rank did not take part in time.
    """
    if transport.world_size == 1:
        return Strategy()
    key = (spec, layouts, mask, backend, same_bits, backward, node_size)
    known = _agreed.setdefault(transport, OrderedDict())
    if key not in known:

        def chosen() -> Strategy:
            cluster = find_cluster(spec.device_type, transport.world_size)
            cluster = with_ctas(cluster, transport.sms_per_exchange)
            cluster = with_backend(cluster, backend, spec)
            size = node_size
            if size is None and global_ranks is not None and LOCAL_WORLD_SIZE in os.environ:
                size = node_size_of(global_ranks, cluster.node_size)
            if size is not None and size != cluster.node_size:
                cluster = replace(cluster, node_size=size)
            problem = Problem(
                spec=spec,
                mask=mask,
                world_size=transport.world_size,
                cluster=cluster,
                backend=backend,
                same_bits=same_bits,
                backward=backward,
                memory_bytes=planner.memory_of(cluster),
            )
            return planner.choose(problem, {"given": layouts}, peaks=False).strategy

        capture.refuse("the ranks would choose a strategy: make the same call once before")
        device = torch.device(spec.device_type)
        known[key] = _from_rank_0(digest(key), chosen, transport, device)
        if len(known) > AGREEMENTS_KEPT:
            known.popitem(last=False)
    return known[key]


def _from_rank_0(
    arguments: str, chosen: Callable[[], Strategy], transport: Transport, device: torch.device
) -> Strategy:
    """Runs `chosen` on rank 0; returns its result, or raises its error, on every rank."""
    message: dict[str, object] = {"arguments": arguments}
    if transport.rank == 0:
        try:
            message["strategy"] = asdict(chosen())
        except Exception as error:
            message["error"] = [type(error).__name__, str(error)]
    try:
        with transport.call("choose a strategy", _CHOOSING, device):
            texts = gather_texts(transport, json.dumps(message), device)
    except RuntimeError as error:
        raise RuntimeError(
            "strategy='auto': the ranks choose together at the first call with new arguments, and "
            f"some did not take part: {error}"
        ) from error
    messages = list(map(json.loads, texts))
    first = messages[0]
    ranks = transport.global_ranks
    odd = [
        rank
        for rank, other in zip(ranks, messages, strict=True)
        if other["arguments"] != first["arguments"]
    ]
    if odd:
        raise ValueError(
            f"strategy='auto' needs the same arguments on every rank: {rank_name(odd)} have others "
            f"than {rank_name(ranks[0])}; RING_ATTN_DEBUG=1 says which"
        )
    if "error" in first:
        name, text = first["error"]
        raise _ERRORS.get(name, ValueError)(
            f"strategy='auto', chosen by {rank_name(ranks[0])}: {text}"
        )
    return Strategy(**first["strategy"])
