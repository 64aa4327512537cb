"""Whether the installed triton has all names that the Gluon kernels use.

Gluon is experimental in triton: its names change. The kernels are known to compile, without a GPU,
with triton 3.6.0, 3.7.1 and 3.9.0. Importing this module needs no triton.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

HOPPER = "triton.experimental.gluon.language.nvidia.hopper"

# Names by module; of names separated by a bar, one is enough.
NEEDED: dict[str, tuple[str, ...]] = {
    "triton.experimental.gluon": ("constexpr_function", "jit"),
    "triton.experimental.gluon.language": (
        "allocate_shared_memory",
        "atomic_add",
        "atomic_xchg",
        "inline_asm_elementwise",
        "shared_memory_descriptor",
        "warp_specialize",
        "BlockedLayout",
        "DistributedLinearLayout",
        "DotOperandLayout",
        "NVMMADistributedLayout",
        "NVMMASharedLayout",
        "SliceLayout",
        "SwizzledSharedLayout",
    ),
    HOPPER: ("fence_async_shared", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait"),
    f"{HOPPER}.tma": ("async_load|async_copy_global_to_shared",),
    f"{HOPPER}.mbarrier": ("MBarrierLayout", "arrive", "expect", "init", "wait"),
    "triton.experimental.gluon.nvidia.hopper": ("TensorDescriptor",),
}


@cache
def gluon_missing() -> str | None:
    """The first name of `NEEDED` that triton lacks, in a sentence; None if it has all names."""
    for path, names in NEEDED.items():
        try:
            module = import_module(path)
        except ImportError as error:
            return f"triton has no {path} ({error})"
        for name in names:
            if not any(hasattr(module, alternative) for alternative in name.split("|")):
                return f"triton's {path} has no {name.replace('|', ' or ')}"
    return None
