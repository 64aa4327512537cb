"""Launches that are repeated, against the same ones made anew: run by test_repeats.py.

Kernels are compiled and launched to nowhere (stub_driver.py), so this runs in a process without
TRITON_INTERPRET: `python -m tests.kernels.repeats FOLDER` prints what was found as JSON.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

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
from tests.bounds import whole
from tests.kernels.stub_driver import StubDriver, install

ROWS, HEADS, KV_HEADS, DIM = 97, 4, 2, 16
SCORES = Scores(0.25)

# By the backend, with tensors; gives those that the backend has made for it.
Call = Callable[[TritonBackend, "Tensors"], dict[str, Tensor | None]]


CAUSAL, FULL = (whole(Mask(ROWS, ROWS, causal=causal)) for causal in (True, False))
WHOLE_BLOCKS = whole(Mask(256, 256))


@dataclass
class Tensors:
    """What the calls take; the addresses of no two are alike."""

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
        # The last step lets go of what the first one made.
        made = vars(state.carried).items()
        return {name: before[name] if y is None else y for name, y in made}

    return call


def grad_q(tiles: tuple[Tile, ...] = CAUSAL) -> Call:
    def call(backend: TritonBackend, x: Tensors) -> dict[str, Tensor | None]:
        backend.backward(x.inputs, tiles, (x.dq, None, None), scores=SCORES)
        return {}

    return call


def grad_kv(tiles: tuple[Tile, ...] = CAUSAL) -> Call:
    def call(backend: TritonBackend, x: Tensors) -> dict[str, Tensor | None]:
        backend.backward(x.inputs, tiles, (None, x.dk, x.dv), scores=SCORES)
        return {}

    return call


def grad(backend: TritonBackend, x: Tensors) -> dict[str, Tensor | None]:
    """All gradients in one launch, with turns that are made for it."""
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
    """Of one query's results of 5 ranks, as they are gathered: out and lse in one message."""
    spec = AttentionSpec.of(x.q, x.k, x.v)
    everyone = Gathered(decode_packet(spec, 1), 5)
    out, lse = everyone.views(torch.zeros(everyone.nbytes, dtype=torch.uint8))
    sinks = torch.zeros(HEADS)
    with profile(activities=[ProfilerActivity.CPU]) as operators:
        root_out, root_lse = backend.merge(out, lse, sinks, x.dtype)
    names = {event.name for event in operators.events()}
    assert names == {"aten::new_empty", "aten::empty"}, names
    return {"out": out, "lse": lse, "root_out": root_out, "root_lse": root_lse, "sinks": sinks}


CALLS: dict[str, Call] = {
    "forward, only": forward(True),
    "forward, only, sinks": forward(True, sinks=True),
    "forward, first": forward(False),
    "forward, first and middle": forward(False, False),
    "forward, last": forward(False, True),
    "forward, no mask": forward(True, tiles=FULL),
    "dq": grad_q(),
    "dkdv": grad_kv(),
    "delta": delta,
    "merge": merge,
}


class Watched:
    """A backend whose launches are looked at."""

    def __init__(self, stub: StubDriver) -> None:
        self._stub, self.backend = stub, TritonBackend()

    def seen(self, call: Call, x: Tensors) -> tuple[list[Any], int]:
        """The last launch of a call, addresses by name, and how many launches were made anew."""
        made = list[Launch]()
        run = Launch.run
        with mock.patch.object(Launch, "run", lambda launch: made.append(launch) or run(launch)):
            results = call(self.backend, x)
        tensors = {**vars(x), **results}
        named = {y.data_ptr(): name for name, y in tensors.items() if isinstance(y, Tensor)}
        for _, table in self.backend._launches.tables.values():
            names = ("blocks", "runs", "pieces")
            named |= {getattr(table, x).data_ptr(): x for x in names if hasattr(table, x)}
        grid, function, args = self._stub.last()
        return [grid, function, [named.get(arg, arg) for arg in args]], len(made)


def last_compiled(call: Call, x: Tensors) -> Any:
    """The compiled kernel of a call's last launch."""
    compiled, run = list[Any](), Launch.run
    with mock.patch.object(Launch, "run", lambda launch: compiled.append(run(launch))):
        call(TritonBackend(), x)
    return compiled[-1]


def cases(stub: StubDriver) -> dict[str, Any]:
    """Of each call: what a repetition launched, what a new backend launches, how many are new."""
    found = {name: case(stub, call) for name, call in CALLS.items()}
    sizes = {"rows": 256, "dim": 64}
    call = forward(True, tiles=WHOLE_BLOCKS)
    with mock.patch.object(configs, "architecture", lambda device: "sm_90"):
        found["forward, gluon"] = case(stub, call, **sizes)
        found["backward, gluon"] = case(stub, grad, **sizes)
    return found


def case(stub: StubDriver, call: Call, **sizes: int) -> dict[str, Any]:
    first, second = Tensors(**sizes), Tensors(**sizes)
    stub.watch(None)
    stub.watch(last_compiled(call, first))
    again = Watched(stub)
    again.seen(call, first)
    got, made = again.seen(call, second)
    expected, made_anew = Watched(stub).seen(call, second)
    return {"got": got, "expected": expected, "made": made, "made_anew": made_anew}


def changes(stub: StubDriver) -> dict[str, int]:
    """How many launches are made anew when a call differs from the one before."""
    stub.watch(None)
    watched, x = Watched(stub), Tensors()
    watched.seen(grad_q(), x)
    made = {
        "nothing": watched.seen(grad_q(), Tensors())[1],
        "tiles": watched.seen(grad_q(FULL), x)[1],
        "strides": watched.seen(grad_q(), Tensors(heads_first=True))[1],
        "type": watched.seen(grad_q(), Tensors(torch.float16))[1],
        "alignment": watched.seen(grad_q(), Tensors(offset=1))[1],
        "alignment again": watched.seen(grad_q(), Tensors(offset=1))[1],
        "back again": watched.seen(grad_q(), x)[1],
    }
    with mock.patch.dict(globals(), SCORES=Scores(0.5)):
        made["scale"] = watched.seen(grad_q(), x)[1]
    return made


def decoding(stub: StubDriver) -> dict[str, list[Any]]:
    """Operators of torch and launches for a second token, whose cache is longer."""
    stub.watch(None)
    backend, found = TritonBackend(), {}
    for queries in (1, 2):
        for rows in (300, 301):
            x = Tensors(rows=rows)
            tiles = whole(Mask(queries, rows, causal=True))
            before = stub.count
            with profile(activities=[ProfilerActivity.CPU]) as operators:
                backend.decode(x.q[:, :queries], x.k, x.v, tiles, scores=SCORES)
        names = sorted({event.name for event in operators.events()})
        found[f"{queries}"] = [names, stub.count - before]
    return found


def bound(stub: StubDriver) -> list[int]:
    """How many are kept, call by call, where at most 3 are."""
    backend, x, kept = TritonBackend(), Tensors(), []
    with mock.patch("ring_attn.backends.kept_launches.MOST_KEPT", 3):
        for n in range(1, 8):
            grad_q(whole(Mask(ROWS, ROWS, window_size=(n, 0))))(backend, x)
            kept.append(len(backend._launches.repeats))
    return kept


def freed() -> bool:
    """Whether nothing holds a call's tensors when it is over."""
    backend, x = TritonBackend(), Tensors()
    held = weakref.ref(x.dout)
    grad_q()(backend, x)
    del x
    return len(backend._launches.repeats) == 1 and held() is None


def host_us(stub: StubDriver) -> dict[str, float]:
    """Least time of the host for a backward step: dq, dk and dv, made anew and repeated."""
    stub.watch(None)
    x, backend = Tensors(), TritonBackend()

    def least(count: int, backend_of: Callable[[], TritonBackend]) -> float:
        taken = []
        for _ in range(count):
            one = backend_of()
            start = time.perf_counter()
            grad_q()(one, x)
            grad_kv()(one, x)
            taken.append(1e6 * (time.perf_counter() - start))
        return min(taken)

    return {"anew": least(20, TritonBackend), "repeated": least(100, lambda: backend)}


def main() -> None:
    stub = install(Path(sys.argv[1]))
    warnings.simplefilter("ignore")
    found = {
        "cases": cases(stub),
        "changes": changes(stub),
        "bound": bound(stub),
        "decoding": decoding(stub),
        "freed": freed(),
        "host_us": host_us(stub),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
