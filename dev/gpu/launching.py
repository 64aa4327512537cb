"""The device "stub": cells whose kernels Triton launches over a stub of libcuda (stub_driver.py).

As a plugin of pytest it comes after `tests.kernels.fake_h100`, which pretends that there is a GPU.
Launches, tensor maps and repeats of launches are checked; a launch fills its results with ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from dev.gpu import device
from dev.gpu.cells import Launched, NotHere
from dev.gpu.device import Compilations
from ring_attn.backends.kept_launches import KeptLaunches
from ring_attn.kernels import configs
from ring_attn.kernels.launch import Launch
from tests.kernels.fake_h100 import alike, faking, fill, shapes
from tests.kernels.stub_driver import StubDriver, launching

ARCHITECTURE = "sm_90"

# Before anything stands for it.
REAL_RUN = Launch.run

# The driver of the cell that ran last.
_drivers = list[StubDriver]()


@pytest.fixture(autouse=True)
def launching_kernels(fake: None) -> Iterator[None]:
    with recorded():
        yield


@contextmanager
def recorded() -> Iterator[None]:
    """Launch kernels over the stub; compare each repeat of a launch with a new launch."""
    kept_run = KeptLaunches.run

    def run_and_compare(
        kept: KeptLaunches,
        call: Any,
        inputs: Sequence[Tensor],
        others: Sequence[Tensor | None],
        make: Callable[[], Launch],
    ) -> None:
        made = list[Launch]()

        def make_noted() -> Launch:
            made.append(make())
            return made[-1]

        kept_run(kept, call, inputs, others, make_noted)
        if not made:
            check_repeat(driver, make())

    with (
        launching(prepared=device.is_carried()) as driver,
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        driver.forget()
        _drivers[:] = [driver]
        monkeypatch.setattr(Launch, "run", launch_and_fill)
        monkeypatch.setattr(KeptLaunches, "run", run_and_compare)
        yield


def launch_and_fill(launch: Any) -> Any:
    """Launch the kernel as `Launch.run` does, and fill its results with ones."""
    compiled = REAL_RUN(launch)
    fill(launch)
    return compiled


def check_repeat(driver: StubDriver, new: Any) -> None:
    """Compare the last launch, a repeat, with a new launch of the same call; fill its results."""
    new.run()
    repeated, expected = driver.last(2)
    if repeated != expected:
        raise AssertionError(f"a repeat is not as a new launch: {repeated}, but {expected}")


@contextmanager
def on_h100(module: ModuleType, instead: Mapping[str, Any]) -> Iterator[None]:
    """Pretend and launch outside of pytest; the module has other values of some names."""
    # The pretended torch makes devices of the CPU, whose architecture is the interpreter.
    card = mock.patch.object(configs, "architecture", lambda device: ARCHITECTURE)
    with faking(module, instead), recorded(), card:
        yield


def launch(target: str, *arguments: Any) -> dict[str, Any]:
    """Run a cell of `contact` on the pretended H100, whose results are compared by shapes."""
    module_name, _, function = target.partition(":")
    module = import_module(module_name)
    instead = {"expect": shapes, "_judged": judged_by_shapes}
    with Compilations() as compilations, on_h100(module, instead):
        getattr(module, function)(*arguments)
    return Launched(compilations.figures | figures_of_launches())


def judged_by_shapes(got: Mapping[str, Tensor], oracle: Any, plain: Any) -> dict[str, Any]:
    alike(got, oracle)
    return {}


def figures_of_launches() -> dict[str, int]:
    """Counts of the last cell.

    Raises:
        NotHere: it has launched no kernel.
    """
    driver = _drivers[-1]
    if not driver.num_launches:
        raise NotHere("the cell launches no kernel of this package, so the stub checks nothing")
    return {"launches": driver.num_launches, "maps": driver.num_maps}
