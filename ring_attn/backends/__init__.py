"""The backends by name, and the choice among them.

`auto` takes the fastest that supports the call, by the rates of `core.rates` for the GPU's
architecture; where there are none, as on CPUs, the first of `PREFERENCE`. What is chosen follows
from the call, the architecture and the packages, not from the number of ranks, and is among the
values that ranks compare: ranks that chose otherwise raise. A named backend runs or raises with its
reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

from ring_attn.backends.base import (
    Backend,
    TileBackend,
    architecture,
    decodes,
    folds_in_order,
)
from ring_attn.core.mask import Mask
from ring_attn.core.rates import attained, rates_of
from ring_attn.core.sizes import merged_bytes
from ring_attn.core.spec import AttentionSpec

# name -> (module, class), the preferred first.
PREFERENCE = {
    "triton": ("triton", "TritonBackend"),
    "aten": ("aten", "AtenBackend"),
    "cudnn": ("aten", "CudnnBackend"),
    "flash_attn": ("flash_attn", "FlashAttnBackend"),
    "flash_attn_3": ("flash_attn", "FlashAttn3Backend"),
    "flash_attn_4": ("flash_attn", "FlashAttn4Backend"),
    "reference": ("reference", "ReferenceBackend"),
}


class Purpose(NamedTuple):
    """Circumstances of a call, beside the spec, on which the choice among backends depends.

    Attributes:
        backward: a backward may follow.
        same_bits: as for `ring_attention`.
        window: the mask has a lower bound.
        several: the mask has several slices, as those of documents.
        decoding: a few queries against a cache, bound by memory.
    """

    backward: bool = False
    same_bits: bool | None = None
    window: bool = False
    several: bool = False
    decoding: bool = False

    @classmethod
    def of(cls, mask: Mask, *, backward: bool, same_bits: bool | None) -> Purpose:
        """The purpose of a call of `ring_attention`."""
        return cls(backward, same_bits, mask.has_windows, len(mask.slices) > 1)


FORWARD = Purpose()


@dataclass(frozen=True)
class BackendChoice:
    """The chosen backend, and why the others were not.

    Attributes:
        name: the backend that runs.
        reasons: for every backend, None where it could run the call, else the reason why not.
        why: why this one of those that could, in a sentence.
        tflops: at which speed backends were compared, where that was done: TFLOP/s in a ring's
            steps of 8k rows, by figures of others (`ring_attn.core.rates`), not measured here.
    """

    name: str
    reasons: dict[str, str | None]
    why: str = ""
    tflops: Mapping[str, float] = field(default_factory=dict)


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


@lru_cache(maxsize=1024)
def choose_backend(
    spec: AttentionSpec, backend: str = "auto", purpose: Purpose = FORWARD
) -> BackendChoice:
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
    usable = [name for name, why in reasons.items() if why is None]
    if backend == "auto":
        here = architecture() if spec.device_type == "cuda" else spec.device_type
        return _fastest(spec, usable, purpose, here, reasons)
    reason = reasons[backend]
    if reason is not None:
        kind = ImportError if "not installed" in reason else NotImplementedError
        raise kind(f"backend={backend!r} cannot run this: {reason}; usable here: {usable}")
    return BackendChoice(backend, reasons, "asked for by name")


def backend_elsewhere(spec: AttentionSpec, purpose: Purpose, there: str) -> str:
    """The backend of "auto" on a GPU that is not here, without packages beside torch and triton."""
    from ring_attn.backends.aten import cudnn_reason
    from ring_attn.backends.triton_support import kernels_reason

    reasons = {"triton": kernels_reason(spec), "cudnn": cudnn_reason(spec), "reference": None}
    usable = [name for name, why in reasons.items() if why is None]
    return _fastest(spec, usable, purpose, there, reasons).name


def _fastest(
    spec: AttentionSpec,
    usable: Sequence[str],
    purpose: Purpose,
    where: str,
    reasons: dict[str, str | None],
) -> BackendChoice:
    # Dense: only where nothing else runs.
    names = [name for name in usable if name != "reference"] or list(usable)
    said = list[str]()
    for unfit, words in _unfit(spec, purpose):
        left = [name for name in names if not unfit(get_backend(name))]
        if left and left != names:
            gone = ", ".join(name for name in names if name not in left)
            said.append(f"left out, since {words}: {gone}")
            names = left
    tflops = dict[str, float]()
    for name in () if purpose.decoding else names:
        rates = rates_of(where, name, spec, window=purpose.window)
        if rates is not None:
            carries = get_backend(name).carries_state
            state_bytes = 2 * spec.accum_dtype.itemsize if carries else merged_bytes(spec)
            speed = attained(where, rates, state_bytes=state_bytes, backward=purpose.backward)
            tflops[name] = round(speed / 1e12, 1)
    best = max(tflops, key=lambda name: tflops[name]) if tflops else names[0]
    direction = "forward and backward" if purpose.backward else "forward"
    first = f"the first in the order of preference on {where}"
    if len(tflops) > 1:
        first = f"the fastest {direction} on {where} by published rates and estimates"
    elif len(names) == 1:
        first = f"the only one on {where}"
    return BackendChoice(best, reasons, "; ".join([first, *said]), tflops)


def _unfit(
    spec: AttentionSpec, purpose: Purpose
) -> Iterator[tuple[Callable[[Backend], bool], str]]:
    """Rules that leave a backend out, as long as another one is left."""
    if purpose.same_bits:
        yield lambda backend: not folds_in_order(backend), "it folds in no one order"
    if purpose.decoding:
        yield lambda backend: not decodes(backend), "it has no kernel for decoding"
    if purpose.several:
        # Documents are hundreds of tiles a step, each a launch and a merge.
        yield lambda backend: isinstance(backend, TileBackend), "it takes slices one by one"
    if purpose.backward and purpose.same_bits is not False and spec.device_type == "cuda":
        yield lambda backend: not backend.deterministic, "no two runs of its backward are equal"
