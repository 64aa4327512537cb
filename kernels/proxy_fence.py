"""The proxy fence between a copy into shared memory and the wgmma that reads it."""

import triton
import triton.language as tl
from triton import knobs
from triton.language.target_info import cuda_capability_geq


@triton.constexpr_function
def _has_wgmma():
    """Tells whether products are wgmma, which reads shared memory by the asynchronous proxy."""
    if knobs.runtime.interpret:
        return False
    return cuda_capability_geq(9) and not cuda_capability_geq(10)


@triton.jit
def proxy_fence():
    """Makes loads by cp.async visible to the wgmma that follows.

    Triton 3.6 and 3.7 leave this fence out of some loops; `make aot` checks for it. Not for
    sm_100, where triton refuses to pipeline the loads of a loop with inline assembly.
    """
    if _has_wgmma():
        tl.inline_asm_elementwise(
            "fence.proxy.async.shared::cta; mov.b32 $0, 0;",
            "=r",
            [],
            tl.int32,
            is_pure=False,
            pack=1,
        )
