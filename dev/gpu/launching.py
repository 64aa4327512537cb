"""The devices "stub" and "compiler": Triton launches kernels over a stub of libcuda.

As a plugin of pytest it comes after `tests.kernels.fake_h100`, which pretends that there is a GPU.
Launches, tensor maps and repeats of launches are checked (stub_driver.py), and a launch fills its
results with ones. Calls of torch's functions for a GPU must fit their signatures (fake_torch.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from dev.gpu import device, speed
from dev.gpu.cells import Figures, Launched, NotHere
from dev.gpu.device import Compilations
from ring_attn.backends import kept_launches
from ring_attn.backends.kept_launches import KeptLaunches
from ring_attn.bench.implementations import Shape
from ring_attn.bench.judge import Make
from ring_attn.kernels import configs
from ring_attn.kernels.launch import Launch
from tests.kernels.fake_h100 import alike, faking, fill, shapes
from tests.kernels.stub_driver import Kernels, StubDriver, launching

ARCHITECTURE = "sm_90"

# Before anything stands for it.
REAL_RUN = Launch.run

REAL_PROBLEM = speed.problem_of

# Rows of the problems of `speed`. 16,384 and 65,536 rows were tried: they have the same kernels.
MOST_ROWS = 2048

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
        launching(_kernels()) as driver,
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        driver.forget()
        _drivers[:] = [driver]
        monkeypatch.setattr(Launch, "run", launch_and_fill)
        monkeypatch.setattr(KeptLaunches, "run", run_and_compare)
        # A new launch would get a new table if the table of its repeat had been dropped.
        monkeypatch.setattr(kept_launches, "MAX_KEPT", sys.maxsize)
        yield


def _kernels() -> Kernels:
    """The code that the driver gets: a kernel of a GPU, or only the facts that the stub needs."""
    if device.name() == device.COMPILER:
        return "compiled"
    return "prepared" if device.is_carried() else "described"


def launch_and_fill(launch: Any) -> Any:
    """Launch the kernel as `Launch.run` does, and fill its results with ones."""
    compiled = REAL_RUN(launch)
    fill(launch)
    return compiled


def check_repeat(driver: StubDriver, new: Any) -> None:
    """Compare the last launch, a repeat, with a new launch of the same call; fill its results."""
    new.run()
    repeated, expected = driver.last(2)
    differing = [
        name for name in expected._fields if getattr(repeated, name) != getattr(expected, name)
    ]
    if differing:
        bytes_ = zip(repeated.params, expected.params, strict=False)
        places = [place for place, (one, other) in enumerate(bytes_) if one != other]
        raise AssertionError(
            f"a repeat is not as a new launch of {expected.kernel}: other {', '.join(differing)}; "
            f"bytes {places} of the parameters differ"
        )


@contextmanager
def on_h100(module: ModuleType) -> Iterator[None]:
    """Pretend that there is a GPU, outside of pytest, for a module with cells."""
    # The pretended torch makes devices of the CPU, whose architecture is the interpreter.
    card = mock.patch.object(configs, "architecture", lambda device: ARCHITECTURE)
    with faking(module, INSTEAD.get(module.__name__, {})), card:
        yield


def launch(target: str, *arguments: Any) -> Figures:
    """Run a cell on the pretended H100; its results are compared by shapes, if at all."""
    module_name, _, function = target.partition(":")
    module = import_module(module_name)
    with Compilations() as compilations, on_h100(module), recorded():
        getattr(module, function)(*arguments)
    return Launched(compilations.figures | figures_of_launches())


class OnlyRuns:
    """In place of the judge of `speed`: runs what would be compared with the oracle."""

    def __init__(self, problem: Shape) -> None:
        self._problem = replace(problem, seqlen=min(problem.seqlen, MOST_ROWS))

    def verdict(self, make: Make) -> tuple[float, str]:
        attention = make(self._problem, self._problem.data())
        attention.forward()
        attention.backward()
        return 0.0, ""


def problem_of_few_rows(rows: int, *others: Any) -> Shape:
    return REAL_PROBLEM(min(rows, MOST_ROWS), *others)


def judged_by_shapes(got: Mapping[str, Tensor], oracle: Any, plain: Any) -> Figures:
    alike(got, oracle)
    return {}


# By module, values of names while a cell of it runs: little work, as nothing is measured.
INSTEAD: Mapping[str, Mapping[str, Any]] = {
    "dev.gpu.contact": {"expect": shapes, "judged": judged_by_shapes},
    "dev.gpu.costs": {"WARM_UPS": 1, "REPEATS": 2},
    "dev.gpu.environment": {"PRODUCT": 256, "COPY_BYTES": 1 << 20},
    "dev.gpu.graphs": {"REPLAYS": 2, "REPEATS": 2, "MESSAGES": (64, 1 << 20)},
    "dev.gpu.rank_program": {"on_cuda": lambda: True},
    "dev.gpu.speed": {
        "ITERS": 1,
        "SECONDS": 0.0,
        "OracleJudge": OnlyRuns,
        "problem_of": problem_of_few_rows,
    },
}


def figures_of_launches() -> dict[str, int]:
    """Counts of the last cell.

    Raises:
        NotHere: it has launched no kernel.
    """
    driver = _drivers[-1]
    if not driver.num_launches:
        raise NotHere("no kernel of this package is launched; calls of torch fit its signatures")
    return {"launches": driver.num_launches, "maps": driver.num_maps}
