"""How far a warm call goes through the package: Python calls, files, and climbs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

import torch

from ring_attn import SequenceLayout, ring_attention
from ring_attn.transport import streams
from tests.distributed.pool import on_ranks
from tests.unit.test_imports import MODULES, ROW, unit_of

# The real paths: kernels and bench are links.
NAMES = {os.path.realpath(path): name for name, path in MODULES.items()}


class Path(NamedTuple):
    """Modules of the package in the order in which a call enters their functions.

    A climb is a call from a unit to one of a higher row of `test_imports`, through a method that
    is overridden there or a function that was handed down.
    """

    modules: list[str]
    climbs: list[tuple[str, str]]


def path_of(call: Callable[[], object]) -> Path:
    path = Path([], [])
    known = dict[str, str | None]()

    def module(frame: FrameType) -> str | None:
        file = frame.f_code.co_filename
        if file not in known:
            known[file] = NAMES.get(os.path.realpath(file))
        return known[file]

    def note(frame: FrameType, event: str, _: object) -> None:
        name = module(frame) if event == "call" else None
        if name is None:
            return
        caller = frame.f_back
        while caller is not None and module(caller) is None:
            caller = caller.f_back
        above = None if caller is None else module(caller)
        path.modules.append(name)
        if above is not None and ROW[unit_of(name)] > ROW[unit_of(above)]:
            path.climbs.append((above, name))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return path


@on_ranks(2)
def test_a_warm_call_is_short_and_goes_down() -> None:
    if streams.are_used(torch.device("cpu")):
        return  # headers and streams are further files
    layout = SequenceLayout.zigzag(128, 2)
    q, k, v = (torch.randn(1, 64, 4, 16, requires_grad=True) for _ in range(3))
    outs = [ring_attention(q, k, v, causal=True, layout=layout) for _ in range(2)]
    forward = path_of(lambda: outs.append(ring_attention(q, k, v, causal=True, layout=layout)))
    assert len(forward.modules) <= 175
    assert len(set(forward.modules)) <= 20, sorted(set(forward.modules))
    assert len(forward.climbs) <= 4, forward.climbs
    # In this thread, where it is seen; the last one is warm.
    with torch.autograd.set_multithreading_enabled(False):
        outs[0].sum().backward()
        outs[1].sum().backward()
        backward = path_of(lambda: outs[2].sum().backward())
    assert len(backward.modules) <= 260
    assert len(set(backward.modules)) <= 19, sorted(set(backward.modules))
    assert len(backward.climbs) <= 4, backward.climbs
