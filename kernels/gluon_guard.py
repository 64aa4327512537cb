"""Tells whether the installed triton has all names that the Gluon kernels use.

Gluon is experimental in triton: its names change. The kernels are known to compile, without a GPU,
with triton 3.6.0, 3.7.1 and 3.9.0, and those of sm_90 with 3.8.0. Importing this module needs no
triton.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from types import ModuleType

KERNELS = {
    "sm_90": ("hopper_blocks", "hopper_tasks", "hopper_add", "hopper_fwd", "hopper_bwd"),
    "sm_100": (
        "hopper_blocks",
        "hopper_tasks",
        "hopper_add",
        "hopper_fwd",
        "hopper_bwd",
        "blackwell_blocks",
        "blackwell_fwd",
        "blackwell_bwd",
    ),
}

# This version refuses to view a slice of tensor memory as another dtype, as
# `blackwell_blocks.as_operand` does: "source and result must not be subviews".
RELEASE_WITHOUT_VIEWS = (3, 8)


@cache
def gluon_missing(arch: str = "sm_90") -> str | None:
    """Return a sentence about what triton lacks for an architecture's kernels, or None.

    A missing name outside of functions fails the import; within kernels, only their compilation.
    """
    if arch == "sm_100" and _release() == RELEASE_WITHOUT_VIEWS:
        return "triton 3.8 cannot view slices of tensor memory as another dtype"
    for kernel in KERNELS.get(arch, ()):
        try:
            module = import_module(f".{kernel}", __package__)
        except (ImportError, AttributeError) as error:
            return f"triton lacks a name that {kernel} imports ({error})"
        for owner, name in used_names(module):
            if not hasattr(owner, name):
                return f"triton's {owner.__name__} has no {name}"
    return None


def _release() -> tuple[int, ...] | None:
    """Return major and minor number of triton; None without triton."""
    try:
        from .triton_release import RELEASE
    except ImportError:
        return None
    return RELEASE


def used_names(kernel: ModuleType) -> Iterator[tuple[ModuleType, str]]:
    """Yields modules of triton, and the names in them that the functions of a kernel file use."""
    tree = ast.parse(inspect.getsource(kernel))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for statement in (statement for function in functions for statement in function.body):
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = getattr(kernel, node.value.id, None)
                if isinstance(owner, ModuleType) and owner.__name__.startswith("triton."):
                    yield owner, node.attr
