"""A repeated launch passes Triton the same grid, function and arguments as a new launch.

Kernels are compiled for sm_90, and launches are written down instead of made, so this runs in a
process without TRITON_INTERPRET, of test_triton_backend.py: `python -m tests.kernels.repeats`. That
Triton takes a repeat's addresses for tensors is seen on a GPU (test_gpu.py).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from triton.runtime import driver as drivers

from ring_attn.backends import triton
from ring_attn.backends.base import BackwardInputs
from ring_attn.backends.triton import TritonBackend
from ring_attn.core.mask import Mask
from ring_attn.core.messages import Gathered
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.tiles import Tile
from ring_attn.kernels import configs
from ring_attn.kernels.launch import Launch
from ring_attn.strategies.tree_decode import decode_packet
from ring_attn.tools.compiled import CompileTarget
from tests.bounds import whole

ROWS, HEADS, KV_HEADS, DIM = 97, 4, 2, 16
SCORES = Scores(0.25)

# Runs a backend on tensors; returns the tensors that the backend made.
Call = Callable[[TritonBackend, "Tensors"], dict[str, Tensor | None]]


CAUSAL, FULL = (whole(Mask(ROWS, ROWS, causal=causal)) for causal in (True, False))
WHOLE_BLOCKS = whole(Mask(256, 256))


@dataclass
class Tensors:
    """The calls' tensors; each has an address of its own."""

    dtype: torch.dtype = torch.bfloat16
    offset: int = 0  # elements from an address that is a multiple of 64 bytes
    heads_first: bool = False
    rows: int = ROWS
    dim: int = DIM

    def __post_init__(self) -> None:
        self.q, self.dout = self._new(HEADS), self._new(HEADS)
        self.k, self.v = self._new(KV_HEADS), self._new(KV_HEADS)
        self.lse, self.delta = (torch.empty(1, HEADS, self.rows) for _ in range(2))
        self.dq = torch.empty(1, self.rows, HEADS, self.dim)
        self.dk, self.dv = (torch.empty(1, self.rows, KV_HEADS, self.dim) for _ in range(2))

    @property
    def inputs(self) -> BackwardInputs:
        return BackwardInputs(self.q, self.k, self.v, self.dout, self.lse, self.delta)

    def _new(self, heads: int) -> Tensor:
        size = self.rows * heads * self.dim
        x = torch.empty(size + 64, dtype=self.dtype)[self.offset : self.offset + size]
        first, second = (heads, self.rows) if self.heads_first else (self.rows, heads)
        x = x.view(1, first, second, self.dim)
        return x.transpose(1, 2) if self.heads_first else x


def forward(*lasts: bool, tiles: tuple[Tile, ...] = CAUSAL, sinks: bool = False) -> Call:

    def call(backend: TritonBackend, x: Tensors) -> dict[str, Tensor | None]:
        state = backend.new_state(x.q, x.dim, torch.zeros(HEADS) if sinks else None)
        for last in lasts:
            before = dict(vars(state.carried))
            backend.forward(x.q, x.k, x.v, tiles, state, scores=SCORES, last=last)
        # The last step drops the tensors that the first step made.
        made = vars(state.carried).items()
        return {name: before[name] if y is None else y for name, y in made}

    return call


def gradients(*names: str, tiles: tuple[Tile, ...] = CAUSAL, scores: Scores = SCORES) -> Call:
    """A backward that computes only the named gradients among dq, dk and dv."""

    def call(backend: TritonBackend, x: Tensors) -> dict[str, Tensor | None]:
        dq, dk, dv = (getattr(x, name) if name in names else None for name in ("dq", "dk", "dv"))
        backend.backward(x.inputs, tiles, (dq, dk, dv), scores=scores)
        return {}

    return call


def grad(backend: TritonBackend, x: Tensors) -> dict[str, Tensor | None]:
    """Computes all gradients in one launch, whose turns the backend makes."""
    made, zeros = list[Tensor](), torch.zeros
    with (
        mock.patch.object(torch, "zeros", lambda *a, **k: made.append(zeros(*a, **k)) or made[-1]),
        mock.patch.object(triton, "GLUON_BWD_KV_HEADS", KV_HEADS),
    ):
        backend.backward(x.inputs, WHOLE_BLOCKS, (x.dq, x.dk, x.dv), scores=SCORES)
    return {"turns": made[0]}


def delta(backend: TritonBackend, x: Tensors) -> dict[str, Tensor | None]:
    lse, delta = backend.row_statistics(x.q, x.dout, x.lse)
    return {"new_lse": lse, "new_delta": delta}


def merge(backend: TritonBackend, x: Tensors) -> dict[str, Tensor | None]:
    """Merges one query's results from 5 ranks, gathered with out and lse in one message."""
    spec = AttentionSpec.of(x.q, x.k, x.v)
    everyone = Gathered(decode_packet(spec, 1), 5)
    out, lse = everyone.views(torch.zeros(everyone.nbytes, dtype=torch.uint8))
    sinks = torch.zeros(HEADS)
    with profile(activities=[ProfilerActivity.CPU]) as operators:
        root_out, root_lse = backend.merge(out, lse, sinks, x.dtype)
    names = {event.name for event in operators.events()}
    assert names == {"aten::new_empty", "aten::empty"}, names
    return {"out": out, "lse": lse, "root_out": root_out, "root_lse": root_lse, "sinks": sinks}


TABLES = "blocks runs"
# Each call with its number of launches, and the tensors of its last launch.
CALLS: list[tuple[Call, int, str]] = [
    (forward(True), 1, f"q k v out lse {TABLES}"),
    (forward(True, sinks=True), 1, f"q k v out lse sinks {TABLES}"),
    (forward(False), 1, f"q k v acc m l {TABLES}"),
    (forward(False, False), 2, f"q k v acc m l {TABLES}"),
    (forward(False, True), 2, f"q k v acc m l out lse {TABLES}"),
    (forward(True, tiles=FULL), 1, f"q k v out lse {TABLES}"),
    (gradients("dq"), 1, f"q k v dout lse delta dq {TABLES}"),
    (gradients("dk", "dv"), 1, f"q k v dout lse delta dk dv {TABLES}"),
    (delta, 1, "q dout lse new_lse new_delta"),
    (merge, 1, "out lse root_out root_lse sinks"),
]
IN_GLUON: list[tuple[Call, int, str]] = [
    (forward(True, tiles=WHOLE_BLOCKS), 1, f"q k v out lse counter {TABLES}"),
    (grad, 1, f"q k v dout lse delta dq dk dv turns {TABLES} pieces"),
]


class Driver(CompileTarget):
    """Replaces Triton's driver of a GPU; keeps grid, function and arguments of each launch."""

    def __init__(self) -> None:
        super().__init__("sm_90")
        self.launches = list[tuple[object, object, list[object]]]()
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            load_binary=lambda name, binary, *_: (None, (name, hash(binary)), 0, 0, 1024),
        )

    def get_current_device(self) -> object:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        kinds = list(source.signature.values())

        def launch(x: int, y: int, z: int, stream: int, function: object, *rest: Any) -> None:
            args = list[object]()
            for kind, arg in zip(kinds, rest[-len(kinds) :], strict=True):
                if kind.startswith("tensordesc"):
                    args += (arg.base.data_ptr(), *arg.shape, *arg.strides)
                elif kind != "constexpr":
                    args.append(arg.data_ptr() if isinstance(arg, Tensor) else arg)
            self.launches.append(((x, y, z), function, args))

        return launch


DRIVER = Driver()


def seen(backend: TritonBackend, call: Call, x: Tensors) -> tuple[list[Any], int]:
    """The last launch of a call, names for addresses, and the number of new launches."""
    made, run = list[Launch](), Launch.run
    with mock.patch.object(Launch, "run", lambda launch: made.append(launch) or run(launch)):
        tensors = vars(x) | call(backend, x)
    named = {y.data_ptr(): name for name, y in tensors.items() if isinstance(y, Tensor)}
    for _, table in backend._launches.tables.values():
        names = ("blocks", "runs", "pieces")
        named |= {getattr(table, x).data_ptr(): x for x in names if hasattr(table, x)}
    grid, function, args = DRIVER.launches[-1]
    return [grid, function, [named.get(arg, arg) for arg in args]], len(made)


def check(call: Call, launches: int, tensors: str, **sizes: int) -> None:
    """Compares a repeated launch with that of a new backend."""
    first, second, again = Tensors(**sizes), Tensors(**sizes), TritonBackend()
    seen(again, call, first)
    got, made = seen(again, call, second)
    expected, made_anew = seen(TritonBackend(), call, second)
    assert (made, made_anew) == (0, launches) and got == expected, (tensors, got, expected)
    assert [arg for arg in got[2] if isinstance(arg, str)] == tensors.split(), got


def check_changes() -> None:
    """A launch is made anew when its call differs from the one before."""
    backend, x, usual = TritonBackend(), Tensors(), gradients("dq")
    for call, tensors, made in (
        (usual, x, 1),
        (usual, Tensors(), 0),
        (gradients("dq", tiles=FULL), x, 1),
        (usual, Tensors(heads_first=True), 1),
        (usual, Tensors(torch.float16), 1),
        # An address that is no multiple of 16 needs another kernel, whose launch is never repeated.
        (usual, Tensors(offset=1), 1),
        (usual, Tensors(offset=1), 1),
        (usual, x, 0),
        (gradients("dq", scores=Scores(0.5)), x, 1),
    ):
        assert seen(backend, call, tensors)[1] == made, tensors


def check_decoding() -> None:
    """Decoding a second token, with a longer cache, copies nothing from the host.

    For one query a launch writes the table; for two queries the host makes it, and copies show.
    """
    from_host = {"aten::lift_fresh", "aten::to", "aten::_to_copy", "aten::_local_scalar_dense"}
    backend = TritonBackend()
    for queries, launches in ((1, 3), (2, 2)):
        for rows in (300, 301):
            x = Tensors(rows=rows)
            tiles = whole(Mask(queries, rows, causal=True))
            before = len(DRIVER.launches)
            with profile(activities=[ProfilerActivity.CPU]) as operators:
                backend.decode(x.q[:, :queries], x.k, x.v, tiles, scores=SCORES)
        names = {event.name for event in operators.events()}
        assert bool(from_host & names) == (queries == 2)
        assert len(DRIVER.launches) - before == launches


def check_kept() -> None:
    """The number of kept launches is bounded, and they hold no tensors of finished calls."""
    backend, x, kept = TritonBackend(), Tensors(), []
    with mock.patch("ring_attn.backends.kept_launches.MOST_KEPT", 3):
        for n in range(1, 6):
            tiles = whole(Mask(ROWS, ROWS, window_size=(n, 0)))
            gradients("dq", tiles=tiles)(backend, x)
            kept.append(len(backend._launches.repeats))
    held = weakref.ref(x.dout)
    del x
    assert kept == [1, 2, 3, 3, 3] and held() is None


def main() -> None:
    drivers.set_active(DRIVER)
    warnings.simplefilter("ignore")
    for case in CALLS:
        check(*case)
    with mock.patch.object(configs, "architecture", lambda device: "sm_90"):
        for case in IN_GLUON:
            check(*case, rows=256, dim=64)
    check_changes()
    check_decoding()
    check_kept()


if __name__ == "__main__":
    main()
