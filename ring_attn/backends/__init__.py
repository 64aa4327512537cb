"""The backends by name, and the choice among them.

`auto` takes the first of `PREFERENCE` that supports the call, the same on every rank because it
depends on the call alone. A named backend runs or raises with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module

from ring_attn.backends.base import Backend, InOrderBackend, folds_in_order
from ring_attn.core.spec import AttentionSpec

# name -> (module, class), the preferred first.
PREFERENCE = {
    "triton": ("triton", "TritonBackend"),
    "aten": ("aten", "AtenBackend"),
    "cudnn": ("aten", "CudnnBackend"),
    "flash_attn": ("flash_attn", "FlashAttnBackend"),
    "reference": ("reference", "ReferenceBackend"),
}


@dataclass(frozen=True)
class BackendChoice:
    """The chosen backend, and why the others were not.

    Attributes:
        name: the backend that runs.
        reasons: for every backend, None where it could run the call, else the reason why not.
    """

    name: str
    reasons: dict[str, str | None]


@lru_cache
def get_backend(name: str) -> Backend:
    """The backend of that name; ValueError names the valid ones."""
    if name not in PREFERENCE:
        raise ValueError(f"backend must be 'auto' or one of {list(PREFERENCE)}, got {name!r}")
    module, cls = PREFERENCE[name]
    backend: Backend = getattr(import_module(f"ring_attn.backends.{module}"), cls)()
    return backend


def bits_unit(name: str) -> int | None:
    """Positions of a block on whose grid the backend folds in one order; None where it does not."""
    backend = get_backend(name)
    return backend.bits_unit if folds_in_order(backend) else None


def folding_backend(name: str) -> InOrderBackend:
    """The backend of a call whose sums are to be made in order.

    Raises:
        NotImplementedError: it folds in no one order.
    """
    backend = get_backend(name)
    if not folds_in_order(backend):
        raise NotImplementedError(
            f"same_bits=True needs a backend that folds in one order, as triton does, got {name!r}"
        )
    return backend


@lru_cache(maxsize=1024)
def choose_backend(spec: AttentionSpec, backend: str = "auto") -> BackendChoice:
    """The backend for a call.

    Raises:
        ValueError: no backend of that name.
        ImportError: the named backend's package is not installed.
        NotImplementedError: the named backend does not support the call.
    """
    if backend != "auto":
        get_backend(backend)
    reasons = {
        name: get_backend(name).supports(spec, explicit=name == backend) for name in PREFERENCE
    }
    if backend == "auto":
        return BackendChoice(next(n for n, reason in reasons.items() if reason is None), reasons)
    reason = reasons[backend]
    if reason is not None:
        usable = [name for name, why in reasons.items() if why is None]
        kind = ImportError if "not installed" in reason else NotImplementedError
        raise kind(f"backend={backend!r} cannot run this: {reason}; usable here: {usable}")
    return BackendChoice(backend, reasons)
