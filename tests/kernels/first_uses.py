"""First uses of compiled kernels on the stub of libcuda, which computes nothing.

Runs in a process without TRITON_INTERPRET, of test_first_use.py: `python -m
tests.kernels.first_uses`. With the word `remembered` a proof of another process must be found.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from unittest import mock

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.compiler.compiler import max_shared_mem

from ring_attn.attention.first_use import Use, why_wrong
from ring_attn.backends import proofs
from ring_attn.backends.triton import TritonBackend
from ring_attn.core.spec import AttentionSpec
from ring_attn.kernels import flash_fwd
from tests.kernels.stub_driver import launching

SPEC = AttentionSpec("cpu", torch.bfloat16, 1, 2, 1, 16, 16)
FORWARD = Use("triton", "forward", SPEC, ("causal",))
# As in test_first_use.py, in whose process it has passed.
KEPT = Use("triton", "forward", AttentionSpec("cpu", torch.float16, 1, 2, 1, 16, 16), ())


@triton.jit
def broken(acc, m_i, l_i, qk, v, scale, MASKED: tl.constexpr):
    return tl.no_such_function(acc), m_i, l_i


def why() -> str:
    why_wrong.cache_clear()
    reason = why_wrong(FORWARD)
    assert reason is not None
    return reason


def main() -> None:
    if "remembered" in sys.argv:
        assert proofs.has_passed(proofs.facts_of(repr(KEPT), "H100"))
        assert not proofs.has_passed(proofs.facts_of(repr(KEPT), "A100"))
    warnings.simplefilter("ignore")
    supports = mock.patch.object(TritonBackend, "supports", lambda *_, **__: None)
    with tempfile.TemporaryDirectory() as folder, launching() as driver, supports:
        # Triton hashes a kernel once, so that the cache would take the next for the broken one.
        knobs.cache.dir = folder
        with mock.patch.object(flash_fwd, "online_softmax_update", broken):
            reason = why()
            assert "CompilationError" in reason and "no_such_function" in reason, reason
        small = {"get_device_properties": lambda device: {"max_shared_mem": 1000}}
        with mock.patch.multiple(driver.utils, **small):
            reason = why()
        assert "OutOfResources" in reason and "shared memory" in reason, reason
        max_shared_mem.cache_clear()
        reason = why()
        assert "out: error" in reason and "FAILED" in reason, reason


if __name__ == "__main__":
    main()
