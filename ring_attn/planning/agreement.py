"""`strategy="auto"` in a call: rank 0 chooses, and tells the others, once for each kind of call.

What the planner finds is a function of its arguments, but files and devices may differ between
ranks. So one small exchange follows the first choice; after it there is neither work nor
communication.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from ring_attn.core.layout import Layouts
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.planning import planner
from ring_attn.planning.choice import Problem
from ring_attn.planning.devices import LOCAL_WORLD_SIZE, find_cluster, node_size_of, with_backend
from ring_attn.transport.base import Agreement, Transport

# Bytes of a rank's message about a choice.
MESSAGE_BYTES = 1024

# By transport, so that it goes with its group: what was agreed on for which arguments. With other
# documents in every batch there are ever new ones: the oldest are forgotten, on all ranks alike.
_agreed: weakref.WeakKeyDictionary[Any, OrderedDict[object, Strategy]] = weakref.WeakKeyDictionary()
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
    """The strategy of `strategy="auto"`: rank 0's choice, the same on every rank.

    At the first call with new arguments rank 0 chooses, and every rank gathers 1 KiB of every other
    over the transport; later ones are looked up, without work or communication. Ranks can differ in
    RING_ATTN_CLUSTER, in their files and in their devices; in the arguments they cannot.

    Args:
        spec: of the call, likewise the next two.
        layouts: of the queries and of the keys.
        mask: over the whole sequence.
        transport: of this rank among all ranks of the call.
        backend: the name that was chosen, not "auto".
        same_bits: as for `ring_attention`.
        backward: whether gradients are wanted.
        node_size: consecutive ranks that are a node, where a mesh tells it.
        global_ranks: of all ranks of the call, where they are not consecutive: those of a ring
            between which other axes of a mesh lie are spread over more nodes.

    Raises:
        ValueError: ranks with different arguments, by number; or what rank 0 raised, on all alike.
        RuntimeError: a rank did not take part in time.
    """
    if transport.world_size == 1:
        return Strategy()
    key = (spec, layouts, mask, backend, same_bits, backward, node_size)
    known = _agreed.setdefault(transport, OrderedDict())
    if key not in known:

        def chosen() -> Strategy:
            cluster = find_cluster(spec.device_type, transport.world_size)
            cluster = with_backend(cluster, backend, spec)
            size = node_size
            if size is None and global_ranks is not None and LOCAL_WORLD_SIZE in os.environ:
                size = node_size_of(global_ranks, cluster.node_size)
            if size is not None and size != cluster.node_size:
                # A node's ports are those of the cluster's own nodes.
                cluster = replace(cluster, node_size=size, ports=None)
            problem = Problem(
                spec, mask, transport.world_size, cluster, backend, same_bits, backward,
                planner.memory_of(cluster),
            )  # fmt: skip
            return planner.choose(problem, {"given": layouts}).strategy

        device = torch.device(spec.device_type)
        known[key] = _told_by_first(repr(key), chosen, transport, device)
        if len(known) > AGREEMENTS_KEPT:
            known.popitem(last=False)
    return known[key]


def _told_by_first(
    arguments: str, chosen: Callable[[], Strategy], transport: Transport, device: torch.device
) -> Strategy:
    """Runs `chosen` on rank 0, and gives its result or its error on every rank."""
    mine: dict[str, Any] = {"arguments": hashlib.sha256(arguments.encode()).hexdigest()}
    if transport.rank == 0:
        try:
            mine["strategy"] = asdict(chosen())
        except Exception as error:
            mine["error"] = [type(error).__name__, str(error)]
    told = _gathered(mine, transport, device)
    odd = [rank for rank, one in enumerate(told) if one["arguments"] != told[0]["arguments"]]
    if odd:
        raise ValueError(
            f"strategy='auto' needs the same arguments on every rank: ranks {odd} have others than "
            "rank 0; RING_ATTN_DEBUG=1 says which"
        )
    if "error" in told[0]:
        name, text = told[0]["error"]
        raise _ERRORS.get(name, ValueError)(f"strategy='auto', chosen by rank 0: {text}")
    return Strategy(**told[0]["strategy"])


def _gathered(
    mine: Mapping[str, Any], transport: Transport, device: torch.device
) -> list[dict[str, Any]]:
    """Every rank's text, as JSON in messages of one length."""
    text = json.dumps(mine)
    if len(text) > MESSAGE_BYTES:  # a long error; in JSON a character takes up to 6 bytes
        name, words = mine["error"]
        text = json.dumps({**mine, "error": [name, words[: MESSAGE_BYTES // 8] + " ..."]})
    message = bytearray(text.encode().ljust(MESSAGE_BYTES))
    send = torch.frombuffer(message, dtype=torch.uint8).to(device)
    recv = torch.empty(transport.world_size * MESSAGE_BYTES, dtype=torch.uint8, device=device)
    try:
        with transport.call("choose a strategy", _CHOOSING, device):
            transport.all_gather("shards", 0, send, recv)
            transport.wait("shards")
    except RuntimeError as error:
        raise RuntimeError(
            "strategy='auto': the ranks choose together at the first call with new arguments, and "
            f"not all of them came: {error}"
        ) from error
    parts = bytes(recv.cpu().tolist())
    return [
        json.loads(parts[start : start + MESSAGE_BYTES])
        for start in range(0, len(parts), MESSAGE_BYTES)
    ]
