"""Functions and classes of torch for a GPU: they check their arguments, and compute nothing.

A call must fit the signature that the installed torch has, and a name must exist there. So a cell
of `python -m dev gpu` that has passed here does not fail on a GPU by a wrong name or argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist

GIB = 1 << 30

# Results of functions of torch.cuda.
FUNCTIONS: Mapping[str, Any] = {
    "_sleep": None,
    "empty_cache": None,
    "mem_get_info": (40 * GIB, 80 * GIB),
    "set_device": None,
    "synchronize": None,
}

# Classes of torch.cuda, and context managers, with results of their methods.
CLASSES: Mapping[str, Mapping[str, Any]] = {
    "CUDAGraph": {},
    "Event": {"elapsed_time": 1.0, "query": True},
    "Stream": {},
    "device": {},
    "graph": {},
    "stream": {},
}

NCCL_VERSION = (2, 28, 9)


def checked(real: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """Return `instead` with a check that its arguments fit the signature of `real`.

    A function in C may have no signature; then any arguments fit.
    """
    try:
        signature = inspect.signature(real)
    except ValueError:
        return instead

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{error}: {real} takes {signature}") from None
        return instead(*args, **kwargs)

    return call


class Pretended:
    """An object in place of one of a class, with methods that check their arguments."""

    def __init__(self, real: Any, results: Mapping[str, Any]) -> None:
        self._real, self._results = real, results

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._real, name)
        return checked(partial(method, self), lambda *_, **__: self._results.get(name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def pretended_class(real: Any, results: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function in place of a class, which checks the arguments of a new object."""
    return checked(real, lambda *_, **__: Pretended(real, results))


def init_process_group(backend: str | None = None, *args: Any, **given: Any) -> None:
    """Make a group of gloo in place of NCCL."""
    given.pop("device_id", None)
    REAL_INIT("gloo", *args, **given)


def batch_isend_irecv(p2p_op_list: Sequence[Any]) -> list[Any]:
    """Deliver the messages that the only rank sends to itself, in their order."""
    sent = [one.tensor for one in p2p_op_list if one.op is dist.isend]
    received = [one.tensor for one in p2p_op_list if one.op is dist.irecv]
    for source, target in zip(sent, received, strict=True):
        target.copy_(source)
    return [Pretended(dist.Work, {}) for _ in p2p_op_list]


REAL_INIT = dist.init_process_group


@contextmanager
def fake_torch() -> Iterator[None]:
    """Put these functions into torch.cuda and torch.distributed."""
    with ExitStack() as stack:

        def put(module: Any, name: str, instead: Any) -> None:
            stack.enter_context(mock.patch.object(module, name, instead))

        for name, result in FUNCTIONS.items():
            instead = partial(_return, result)
            put(torch.cuda, name, checked(getattr(torch.cuda, name), instead))
        for name, results in CLASSES.items():
            put(torch.cuda, name, pretended_class(getattr(torch.cuda, name), results))
        put(torch.cuda.nccl, "version", checked(torch.cuda.nccl.version, lambda: NCCL_VERSION))
        put(dist, "init_process_group", checked(dist.init_process_group, init_process_group))
        put(dist, "batch_isend_irecv", checked(dist.batch_isend_irecv, batch_isend_irecv))
        yield


def _return(result: Any, *_: Any, **__: Any) -> Any:
    return result
