"""A call that is watched: its transport, backend and steps tell the call's observer what they do.

The transport carries the observer, so a call within a call is seen by the same one, and several
ranks in one process each have their own. A call that nobody watches goes on with the transport,
backend and steps that it has, after one look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar, cast

from ring_attn.backends.base import Backend
from ring_attn.profiling import Direction, Observer, is_observed, observe
from ring_attn.transport.base import PointToPoint
from ring_attn.transport.observed import ObservedTransport

P = ParamSpec("P")
T = TypeVar("T")
B = TypeVar("B", bound=Backend)

# The calls of a backend that are parts of their own, and which argument has the tiles.
PARTS: dict[str, tuple[str, int | None]] = {
    "forward": ("attend", 3),
    "decode": ("attend", 3),
    "backward": ("attend", 6),
    "backward_q": ("attend", 6),
    "backward_kv": ("attend", 6),
    "delta": ("delta", None),
    "finalize": ("finalize", None),
}


def observed(direction: Direction) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates one direction of a call: it is watched, unless it is a part of one that is.

    The function has a parameter `transport`, and `q` in the forward, `dout` in the backward.
    """

    def decorate(run: Callable[P, T]) -> Callable[P, T]:
        parameters = signature(run)

        @wraps(run)
        def run_observed(*args: P.args, **options: P.kwargs) -> T:
            if not is_observed():
                return run(*args, **options)
            bound = parameters.bind(*args, **options)
            given = bound.arguments
            transport = given["transport"]
            if isinstance(transport, ObservedTransport):
                return run(*args, **options)
            device = given["q" if direction == "forward" else "dout"].device
            with observe(direction, device, transport) as observer:
                given["transport"] = ObservedTransport(transport, observer)
                return run(*bound.args, **bound.kwargs)

        return run_observed

    return decorate


def observed_backend(backend: B, transport: PointToPoint) -> B:
    """The backend, watched where the transport is."""
    if not isinstance(transport, ObservedTransport):
        return backend
    return cast(B, _ObservedBackend(backend, transport.observer))


def observed_steps(steps: Iterable[T], transport: PointToPoint) -> Iterable[T]:
    """The steps of a call, counted and numbered where the transport is watched."""
    return (
        _counted(steps, transport.observer) if isinstance(transport, ObservedTransport) else steps
    )


def observed_merge(transport: PointToPoint, count: int) -> AbstractContextManager[None]:
    """A merge of so many partial results into one."""
    if not isinstance(transport, ObservedTransport):
        return nullcontext()
    transport.observer.merges += count
    return transport.observer.span("merge")


def _counted(steps: Iterable[T], observer: Observer) -> Iterator[T]:
    for index, step in enumerate(steps):
        observer.step, observer.steps = index, observer.steps + 1
        yield step
    observer.step = None


class _ObservedBackend:
    """A backend whose `PARTS` an observer sees; everything else is the backend's own."""

    def __init__(self, backend: Backend, observer: Observer) -> None:
        self._backend, self._observer = backend, observer

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        return self._part(found, *PARTS[name]) if name in PARTS else found

    def _part(self, fn: Callable[..., T], what: str, tiles_at: int | None) -> Callable[..., T]:
        def call(*args: Any, **options: Any) -> T:
            if tiles_at is not None:
                self._observer.merges += len(args[tiles_at])
            with self._observer.span(what):
                return fn(*args, **options)

        return call
