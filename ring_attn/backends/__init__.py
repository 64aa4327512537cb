"""The backends by name, and the choice among them.

`auto` takes the fastest backend that supports the call, by the `rates` of the GPU's architecture.
Without rates, as on CPUs, it takes the first of `PREFERENCE`. The choice depends on the call, the
architecture and the packages, and not on the number of ranks. Ranks compare their choices, and
raise an error if these differ. A named backend runs, or raises an error with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from ring_attn.backends.base import Backend, architecture, cached_by_gpu
from ring_attn.backends.rates import GLUON_HEADDIMS, PORTABLE, attained, rates_of
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.sizes import merged_bytes
from ring_attn.core.spec import AttentionSpec

# name -> (module, class), in order of preference.
PREFERENCE = {
    "triton": ("triton", "TritonBackend"),
    "aten": ("aten", "AtenBackend"),
    "cudnn": ("aten", "CudnnBackend"),
    "flash_attn": ("flash_attn", "FlashAttnBackend"),
    "flash_attn_3": ("flash_attn", "FlashAttn3Backend"),
    "flash_attn_4": ("flash_attn", "FlashAttn4Backend"),
    "reference": ("reference", "ReferenceBackend"),
}

# A multiple of the block sizes of all kernels, in rows.
BLOCK_ROWS = 256


class Purpose(NamedTuple):
    """Properties of a call, in addition to its spec, on which the choice of a backend depends."""

    backward: bool = False  # a backward may follow
    same_bits: bool | None = None
    window: bool = False  # the mask has a lower bound
    several: bool = False  # the mask has several slices, such as documents
    decoding: bool = False  # a few queries attend to a cache, which is bound by memory
    # The kernels depend on these, but the choice does not.
    causal: bool = False  # the mask has an upper bound
    ragged: bool = False  # shards, or slices of the mask, end within blocks

    @classmethod
    def of(
        cls,
        mask: Mask,
        *,
        backward: bool,
        same_bits: bool | None,
        layouts: Sequence[SequenceLayout] = (),
    ) -> Purpose:
        """Return the purpose of a call of `ring_attention`."""
        several = len(mask.slices) > 1
        lens = {length for layout in layouts for length in layout.shard_lens}
        return cls(
            backward=backward,
            same_bits=same_bits,
            window=mask.has_windows,
            several=several,
            decoding=False,
            causal=mask.has_upper_bounds,
            ragged=several or any(length % BLOCK_ROWS for length in lens),
        )


FORWARD = Purpose()


@dataclass(frozen=True)
class BackendChoice:
    """The chosen backend, and why the other backends were not chosen.

    Attributes:
        name: the backend that runs.
        reasons: for every backend, the reason why it cannot run the call, or None if it can.
        why: why this backend was chosen among the usable ones, in a sentence.
        tflops: the speeds by which backends were compared, if they were: TFLOP/s in steps of a ring
            with 8k rows, from published figures (`ring_attn.backends.rates`), not measured here.
    """

    name: str
    reasons: dict[str, str | None]
    why: str = ""
    tflops: Mapping[str, float] = field(default_factory=dict)


@lru_cache
def get_backend(name: str) -> Backend:
    """Return the backend of a name.

    Raises:
        ValueError: an unknown name; the error lists the valid names.
    """
    if name not in PREFERENCE:
        raise ValueError(f"backend must be 'auto' or one of {list(PREFERENCE)}, got {name!r}")
    module, cls = PREFERENCE[name]
    backend: Backend = getattr(import_module(f"ring_attn.backends.{module}"), cls)()
    return backend


@cached_by_gpu(maxsize=1024)
def choose_backend(
    spec: AttentionSpec,
    backend: str = "auto",
    purpose: Purpose = FORWARD,
    wrong: tuple[tuple[str, str], ...] = (),
) -> BackendChoice:
    """Return the backend for a call.

    Args:
        spec: the sizes, dtypes and options of the call.
        backend: a name of `PREFERENCE`, or "auto".
        purpose: further properties of the call.
        wrong: (name, reason) of backends that may not run on this machine.

    Raises:
        ValueError: an unknown name.
        NotImplementedError: the named backend cannot run the call; the error has the reason.
        ImportError: the package of the named backend is not installed.
    """
    if backend != "auto":
        get_backend(backend)  # refuses an unknown name
    reasons = {
        name: get_backend(name).supports(spec, explicit=name == backend, decoding=purpose.decoding)
        for name in PREFERENCE
    } | dict(wrong)
    usable = [name for name, why in reasons.items() if why is None]
    here = architecture() if spec.device_type == "cuda" else spec.device_type
    no_gluon = _why_portable(here) if here in GLUON_HEADDIMS else None
    if backend == "auto":
        return _fastest(spec, usable, purpose, here, reasons, portable=no_gluon)
    reason = reasons[backend]
    if reason is not None:
        kind = ImportError if "not installed" in reason else NotImplementedError
        raise kind(f"backend={backend!r} cannot run this: {reason}; usable here: {usable}")
    why = ["requested by name"]
    if no_gluon is not None and backend == "triton":
        why.append(no_gluon)
    return BackendChoice(backend, reasons, "; ".join(why))


def _why_portable(here: str) -> str | None:
    """Return the reason why this machine runs portable kernels instead of Gluon ones, or None."""
    if find_spec("triton") is None:
        return None
    from ring_attn.kernels.gluon_guard import gluon_missing

    missing = gluon_missing(here)
    return missing and f"triton runs its portable kernels, because {missing}"


def backend_elsewhere(spec: AttentionSpec, purpose: Purpose, there: str) -> str:
    """Return the choice of "auto" on another architecture that has only torch and triton."""
    from ring_attn.backends.aten import cudnn_reason
    from ring_attn.backends.triton_support import kernels_reason

    fits = kernels_reason(spec, decoding=purpose.decoding)
    reasons = {"triton": fits, "cudnn": cudnn_reason(spec), "reference": None}
    usable = [name for name, why in reasons.items() if why is None]
    return _fastest(spec, usable, purpose, there, reasons).name


def _fastest(
    spec: AttentionSpec,
    usable: Sequence[str],
    purpose: Purpose,
    where: str,
    reasons: dict[str, str | None],
    portable: str | None = None,
) -> BackendChoice:
    """Return the choice of the fastest usable backend.

    `portable` is the reason why Triton cannot run its Gluon kernels, or None.
    """
    # The dense backend only if nothing else runs.
    names = [name for name in usable if name != "reference"] or list(usable)
    notes = [portable] if portable and "triton" in names else list[str]()
    for unfit, words in _exclusions(spec, purpose):
        fit = [name for name in names if not unfit(get_backend(name))]
        if fit and fit != names:
            removed = ", ".join(name for name in names if name not in fit)
            notes.append(f"left out, because {words}: {removed}")
            names = fit
    tflops = dict[str, float]()
    for name in () if purpose.decoding else names:
        kernels = PORTABLE if portable and name == "triton" else name
        rates = rates_of(where, kernels, spec, window=purpose.window)
        if rates is not None:
            carries = get_backend(name).carries_state
            state_bytes = 2 * spec.accum_dtype.itemsize if carries else merged_bytes(spec)
            speed = attained(where, rates, state_bytes=state_bytes, backward=purpose.backward)
            tflops[name] = round(speed / 1e12, 1)
    best = max(tflops, key=lambda name: tflops[name]) if tflops else names[0]
    if len(tflops) > 1:
        direction = "forward and backward" if purpose.backward else "forward"
        why = f"the fastest {direction} on {where} by published rates and estimates"
    elif len(names) == 1:
        why = f"the only one on {where}"
    else:
        why = f"the first in the order of preference on {where}"
    return BackendChoice(best, reasons, "; ".join([why, *notes]), tflops)


def _exclusions(
    spec: AttentionSpec, purpose: Purpose
) -> Iterator[tuple[Callable[[Backend], bool], str]]:
    """Yield rules (unfit, why) that exclude backends, unless no backend would remain."""
    if purpose.same_bits:
        yield lambda backend: not backend.in_order, "it has no fixed order of summation"
    if purpose.decoding:
        yield lambda backend: not backend.decodes, "it has no kernel for decoding"
    if purpose.several:
        # Documents make hundreds of tiles per step, each with its own launch and merge.
        yield lambda backend: backend.tile_by_tile, "it takes slices one by one"
    if purpose.backward and purpose.same_bits is not False and spec.device_type == "cuda":
        yield lambda backend: not backend.deterministic, "no two runs of its backward are equal"
