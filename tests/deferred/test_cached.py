"""Tensors made on one stream of the deferred device, cached, and used on other streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ring_attn import SequenceLayout, halo
from ring_attn.backends.kept_launches import KeptLaunches
from ring_attn.kernels.launch import Launch
from ring_attn.kernels.step_table import StepTable, make_step_table
from ring_attn.sequence import halo as neighbours
from ring_attn.transport import streams
from ring_attn.transport.cached import Cached
from tests.deferred.device import Node, Recorder
from tests.deferred.ranks import record

TILES = ((0, 8, 0, 8, None, 0),)
DEVICE = torch.device("cpu")


class Kernel:
    """A kernel that reads a table by its address, and writes x."""

    arg_names = ("x_ptr", "table_ptr")

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __getitem__(self, grid: object) -> Callable[..., Any]:
        return self.launch

    def launch(self, *addresses: int, **args: Tensor) -> Any:
        """Launches with tensors as triton does, or repeats with addresses."""
        x, table = addresses or (args[name].data_ptr() for name in self.arg_names)
        refs = (self.recorder.whole(self.recorder.ids[address]) for address in (x, table))
        x, table = refs
        self.recorder.queue(Node("kernel", (), [table], [x], lambda memories: None))
        return self


def made_table() -> StepTable:
    table = make_step_table(TILES, 4, 4, DEVICE, descending=True)
    return replace(table, blocks=table.blocks.clone(), runs=table.runs.clone())


def launches(repeated: bool) -> Callable[[int, Recorder], None]:
    """Launches with one table on three streams; the host drops the table before they end."""

    def work(_: int, recorder: Recorder) -> None:
        kept, kernel = KeptLaunches(), Kernel(recorder)

        def table() -> Tensor:
            return kept.table(TILES, ("blocks",), DEVICE, made_table).blocks

        def launch(x: Tensor) -> Launch:
            return Launch(kernel, (1,), {"x_ptr": x, "table_ptr": table()}, {}, {})

        for _ in range(3):
            with streams.use(streams.new(DEVICE)):
                x = torch.zeros(1, 1, 1, 1)
                recorder.given(x)
                if repeated:
                    kept.run((TILES, "kernel"), (x,), (), lambda x=x: launch(x))
                else:
                    launch(x).run()
        kept.tables.clear()
        kept.repeats.clear()

    return work


def halos(_: int, recorder: Recorder) -> None:
    layout = SequenceLayout.contiguous(12, 3)
    neighbours.halo_plan.cache_clear()
    for _ in range(2):
        with streams.use(streams.new(DEVICE)):
            x = torch.ones(1, 4, 2)
            recorder.given(x)
            halo(x, layout, 1)
    neighbours.halo_plan.cache_clear()


CALLS = {"tables": launches(False), "kept launches": launches(True), "halo": halos}


@pytest.mark.filterwarnings("ignore:backend='triton' on CPU")
@pytest.mark.parametrize("name", CALLS)
def test_other_streams_wait_for_what_is_cached(name: str) -> None:
    assert record(3, CALLS[name]).races() == []
    faults = (Cached, "get", lambda self: self.value), (Recorder, "lend", lambda *_: None)
    for fault in faults:
        with mock.patch.object(*fault):
            assert record(3, CALLS[name]).races()
