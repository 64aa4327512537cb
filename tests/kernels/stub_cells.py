"""Cells with planted faults for `python -m dev gpu --device stub`, which share a kernel in Gluon.

`tests.gpu_cells.over_the_stub` lists them. This module pretends that there is a GPU.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from dev.gpu import contact, launching
from dev.gpu.cells import Launched
from ring_attn.core.spec import Scores
from ring_attn.kernels import launch as launch_module
from ring_attn.kernels.launch import Launch
from tests.bounds import whole
from tests.gpu_cells import FORWARD, FORWARD_OF
from tests.kernels.stub_launches import with_descriptor


def with_a_wrong_stride() -> dict[str, Any]:
    """CUDA refuses a stride of q that is no multiple of 16 bytes."""

    def run(launch: Launch) -> Any:
        batch, rows, heads, one = launch.args["q_desc"].strides
        return real_run(with_descriptor(launch, strides=[batch, rows + 4, heads, one]))

    real_run = launching.REAL_RUN
    with mock.patch.object(launching, "REAL_RUN", run):
        return launching.launch(FORWARD, *FORWARD_OF)


def with_stale_pointers() -> dict[str, Any]:
    """A repeat has the tensor maps of the first call."""
    with mock.patch.object(launch_module, "moved", lambda descriptor, base: descriptor):
        return call_twice()


def call_twice() -> dict[str, Any]:
    """The second call, for tensors at other addresses, repeats the launch of the first."""
    with launching.on_h100(contact), launching.recorded():
        backend, _, bounds = contact.prepared(*FORWARD_OF)
        tiles, alive = whole(bounds), []
        for _ in range(2):
            inputs = contact.inputs_of(bounds, headdim=64)
            q, k, v, _ = inputs
            state = backend.new_state(q, 64)
            backend.forward(q, k, v, tiles, state, scores=Scores(0.125), last=True)
            alive.append((inputs, state))
        return Launched(launching.figures_of_launches())
