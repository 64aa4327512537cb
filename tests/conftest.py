"""Fixtures of all tests: processes for the distributed ones; and Triton's interpreter."""

from __future__ import annotations

import gc
import itertools
import operator
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from inspect import signature
from itertools import compress
from pathlib import Path

import pytest
import torch

# Triton decides between interpreter and compiler when it is imported, and parts of torch import
# it silently: so the variable is set before any test module. Child processes inherit it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # A GPU that a test pretends to have runs no kernel.
    os.environ["RING_ATTN_FIRST_USE"] = "off"

# A shell ignores SIGINT for what it starts in the background (`make test &`), and `nohup`
# ignores SIGHUP. So would all processes that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Every client of torch's store looks up its host's name. A name server that drops the query costs
# 5 s, longer than the timeouts of these tests: so only /etc/hosts is used, and torch's warning
# about an unknown name is hidden.
os.environ["RES_OPTIONS"] = "attempts:0"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"

from ring_attn.cli import arguments
from ring_attn.core.strategy import CORES
from ring_attn.models.recurrent import SPLITS
from ring_attn.testing import launch
from ring_attn.testing.one_gpu import WAYS, sharing_refusal
from ring_attn.transport import nccl_channels
from tests.distributed.pool import MANY_GROUPS, Pool, Pools, forkserver
from tests.parts import part_of

# Names of tests that `make test-slow` runs, since each takes a second of CPU or more, and others
# show most of what they show in less. `tests/cpu_seconds.py` measures.
COSTLY = Path(__file__).with_name("costly.txt")

# When the first test could begin, by time.monotonic().
START = pytest.StashKey[float]()


def pytest_report_header() -> str:
    return f"torch {torch.__version__}, triton {version('triton')}"


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "start no test after this time; the first case of each test comes first, then the second"
    parser.addoption("--budget", type=float, metavar="SECONDS", help=text)
    text = (
        "run only the tests marked `nccl`, on ranks that share one GPU over NCCL: each as a node "
        "(hostid), or all as one node (multi, NCCL 2.30 or newer preloaded)"
    )
    parser.addoption("--nccl", choices=WAYS, help=text)
    text = "of the slow tests run only part K of N; all parts together are all slow tests"
    parser.addoption("--part", type=part_of, metavar="K/N", help=text)


def pytest_configure(config: pytest.Config) -> None:
    way = config.getoption("--nccl")
    why_not = None if way is None else sharing_refusal(way)
    if why_not is not None:
        raise pytest.UsageError(f"--nccl {way}: {why_not}")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """With a budget, takes the cases of all tests in turn: else it would be spent on one test's."""
    cases: Counter[tuple[Path, str]] = Counter()
    turns: dict[pytest.Item, int] = {}
    for item in session.items if session.config.getoption("--budget") is not None else ():
        test = item.path, item.originalname  # type: ignore[attr-defined]
        turns[item] = cases[test]
        cases[test] += 1
    session.items.sort(key=lambda item: turns.get(item, 0))
    session.config.stash[START] = time.monotonic()
    # Modules and collected tests stay until the end: the collector need not search them each time.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    budget = item.config.getoption("--budget")
    if budget is not None and time.monotonic() - item.config.stash[START] > budget:
        pytest.skip(f"beyond the budget of {budget:g} s")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests of the folder `distributed` as dist, and cases left out of a sweep as slow.

    Marks tests of the file `costly.txt` as costly. Leaves out tests that do not run on the chosen
    medium, see `--nccl`, and slow ones of other parts, see `--part`.
    """
    cases: Counter[tuple[Path, str]] = Counter()
    keep_only(config, items, [runs_here(item, config.getoption("--nccl")) for item in items])
    costly = set(COSTLY.read_text().splitlines())
    for item in items:
        if item.path.parent.name == "distributed":
            item.add_marker("dist")
        if item.nodeid in costly:
            item.add_marker("costly")
        sweep = item.get_closest_marker("sweep")
        if sweep is not None and item.get_closest_marker("slow") is None:
            test = item.path, item.originalname  # type: ignore[attr-defined]
            if cases[test] % sweep.args[0]:
                item.add_marker("slow")
            cases[test] += 1
    part = config.getoption("--part")
    if part is not None:
        indices = itertools.count()
        keep_only(config, items, [not is_slow(item) or part.has(next(indices)) for item in items])


def is_slow(item: pytest.Item) -> bool:
    """Whether `make test` leaves the test to `make test-slow`."""
    return any(item.get_closest_marker(name) is not None for name in ("slow", "costly"))


def keep_only(config: pytest.Config, items: list[pytest.Item], kept: list[bool]) -> None:
    """Deselects the tests that are not kept."""
    if not all(kept):
        config.hook.pytest_deselected(items=[*compress(items, map(operator.not_, kept))])
        items[:] = compress(items, kept)


def runs_here(item: pytest.Item, nccl: str | None) -> bool:
    """Whether a test is of the chosen medium: with `--nccl` one that is marked so, else any other.

    Those marked `nccl(only=True)` need a GPU.
    """
    mark = item.get_closest_marker("nccl")
    if nccl is not None:
        return mark is not None
    return mark is None or not mark.kwargs.get("only", False)


@pytest.fixture(autouse=True, scope="session")
def no_nccl(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plans are those of a torch without NCCL, whichever torch is installed."""
    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--nccl") is None:
            patch.setattr(nccl_channels, "installed_nccl", lambda: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_signs_of_life() -> Iterator[None]:
    """Commands that run in this process print no line for how long they have been running.

    On a busy machine, such a line would stand in the output that a test expects.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "LINE_S", 1e6)
        yield


@pytest.fixture(autouse=True)
def forked_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes commands fork their processes, which is ten times faster; one test undoes the patch."""
    forkserver(for_cuda=request.config.getoption("--nccl") is not None)
    monkeypatch.setattr(launch, "START_METHOD", "forkserver")


@pytest.fixture(autouse=True)
def registries_as_found() -> Iterator[None]:
    """Fail a test that leaves a recurrence or strategy registered: the next would find it."""
    before = {*SPLITS}, {*CORES}
    yield
    assert ({*SPLITS}, {*CORES}) == before, "the test unregisters what it registers"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test marked `on_ranks` on all its ranks, with the test's arguments."""
    mark = pyfuncitem.get_closest_marker("on_ranks")
    if mark is None:
        return None
    given = [pyfuncitem.funcargs[name] for name in signature(pyfuncitem.obj).parameters]
    pyfuncitem.funcargs["ranks"](*mark.args).run(pyfuncitem.obj, *given, **mark.kwargs)
    return True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs the tests of `ranks` twice: as on a CPU, and as on a device with streams.

    The second run is slow unless the test is marked `queued`; `gloo` tests have only the first.
    With `--nccl` they run once, on a GPU.
    """
    if "ranks" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker
        way = metafunc.config.getoption("--nccl")
        media = [pytest.param("cpu", id="cpu")]
        if way is not None:
            media = [pytest.param(way, id=f"nccl-{way}")]
        elif mark("gloo") is None:
            marks = [] if mark("queued") else [pytest.mark.slow]
            media.append(pytest.param("queued", id="queued", marks=marks))
        metafunc.parametrize("ranks", media, indirect=True, scope="session")


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Pools]:
    """`ranks(world_size).run(fn, *args)` runs fn in so many processes, which the tests share."""
    medium = request.param
    pools = Pools(queued=medium == "queued", nccl=medium if medium in WAYS else None)
    yield pools
    pools.close()


@pytest.fixture(autouse=True)
def _few_groups(request: pytest.FixtureRequest) -> None:
    if "ranks" in request.fixturenames:
        request.getfixturevalue("ranks").close(MANY_GROUPS)


@pytest.fixture
def fresh_ranks() -> Iterator[Callable[..., Pool]]:
    """Makes a pool like those of `ranks` for one test, which may stop or kill its processes."""
    pools: list[Pool] = []

    def start(world_size: int, **options: float) -> Pool:
        pools.append(Pool(world_size, **options))
        return pools[-1]

    yield start
    for pool in pools:
        if not pool.closed:
            pool.close(now=True)


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """One thread for torch, as in the ranks: more threads change the order of sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
