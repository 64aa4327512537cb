"""The reasons why Triton's kernels cannot run a call on its device."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from importlib.util import find_spec

import torch

from ring_attn.core.dtypes import HALF_DTYPES
from ring_attn.core.spec import AttentionSpec

MAX_HEADDIM = 256

# Older versions leave out fences: products may read memory before copies are visible (`make aot`).
TRITON_OF_SM_100 = (3, 7)

# The largest head dims of q and of v in decoding, for the absorbed form of MLA.
DECODED_HEADDIMS = 576, 512


def why_not(spec: AttentionSpec, *, explicit: bool, decoding: bool) -> str | None:
    """Return the reason why the kernels cannot run the call on this machine, or None."""
    if find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if (reason := kernels_reason(spec, decoding=decoding)) is not None:
        return reason
    if spec.device_type == "cpu":
        return _why_not_interpreted(spec, explicit)
    if spec.device_type != "cuda":
        return f"runs on cuda, and in the interpreter on cpu, not on {spec.device_type}"
    if not torch.cuda.is_available():
        return "needs a GPU that torch can use"
    if torch.version.hip is None:
        capability = torch.cuda.get_device_capability()
        if capability < (8, 0):
            return "needs a GPU of compute capability 8.0 or newer"
        if capability[0] == 10 and _release("triton") < TRITON_OF_SM_100:
            return "needs triton 3.7 or newer on compute capability 10: 3.6 leaves out proxy fences"
    if not explicit and os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set: kernels are interpreted only when requested by name"
    _check_tuned(spec.device_type)
    return None


def kernels_reason(spec: AttentionSpec, *, decoding: bool) -> str | None:
    """Return the reason why the kernels do not support the call on any GPU, or None."""
    if spec.dtype not in (*HALF_DTYPES, torch.float32):
        return f"takes float16, bfloat16 and float32, not {spec.dtype}"
    # In float32 on GPUs, whose products are unrolled, no such block would fit the registers.
    wide = decoding and (spec.dtype in HALF_DTYPES or spec.device_type == "cpu")
    limit, limit_v = DECODED_HEADDIMS if wide else (MAX_HEADDIM, MAX_HEADDIM)
    if spec.headdim > limit or spec.headdim_v > limit_v:
        what = f"decodes {spec.dtype} with" if decoding else "takes"
        limits = f"{limit}" if limit == limit_v else f"{limit} and {limit_v}"
        return f"{what} head dims up to {limits}, got {spec.headdim} and {spec.headdim_v}"
    return None


def _why_not_interpreted(spec: AttentionSpec, explicit: bool) -> str | None:
    if not explicit:
        return "runs on a CPU only in Triton's interpreter, and so only when requested by name"
    if find_spec("numpy") is None:
        return "Triton's interpreter needs numpy, which is not installed"
    if spec.dtype == torch.bfloat16:
        return "bfloat16 arithmetic is wrong in Triton's interpreter: use float16 or float32"
    if not _use_interpreter():
        return (
            "Triton's interpreter is off, and triton is in use or there is a GPU to compile "
            "for: set TRITON_INTERPRET=1 before the program starts to run on a CPU"
        )
    _check_tuned(spec.device_type)
    return None


def _check_tuned(device_type: str) -> None:
    """Refuse a file of RING_ATTN_CONFIGS for another device, before any message is sent."""
    if os.environ.get("RING_ATTN_CONFIGS"):
        from ring_attn.kernels.tuned import check_file

        check_file(torch.device(device_type))


def _release(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version(package).split(".")[:2])


def _use_interpreter() -> bool:
    """Return whether kernels run in the interpreter, which is decided when triton is imported.

    If triton is not imported yet and there is no GPU, turn the interpreter on, since no other code
    is affected.
    """
    if "triton" not in sys.modules and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    from triton import knobs

    return bool(knobs.runtime.interpret)
