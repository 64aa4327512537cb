"""One key for each kernel in Triton's cache, whichever kernel a process launches first.

A jit function's key has the values of the global constants that it and its callees use. Triton
(3.6.0 and 3.7.1; 3.8.0 and 3.9.0 do not) reads a callee's constants before it looks for them,
unless it has hashed the callee before. So a kernel's key would depend on what its process launched
earlier: a process would compile kernels again that another one has put on disk. If callees are
hashed first, no constant is left out.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any


def fix_cache_key(kernel: Any) -> None:
    """Hash all jit functions that a kernel may call, and then the kernel; later calls are free."""
    _hash_callees_first(kernel.fn.__module__)


@cache
def _hash_callees_first(module: str) -> None:
    """Hash the jit functions of a module in the order of their definitions.

    Functions are defined, or imported from other modules, before their callers. A test compares the
    keys with those of a second pass, which knows the constants of all functions.
    """
    for value in vars(sys.modules[module]).values():
        if not hasattr(type(value), "cache_key"):
            continue
        if value.fn.__module__ != module:
            _hash_callees_first(value.fn.__module__)
        _ = value.cache_key  # triton computes it once
