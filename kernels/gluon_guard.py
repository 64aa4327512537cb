"""Tells whether the installed triton has all names that the Gluon kernels use.

Gluon is experimental in triton: its names change. The kernels are known to compile, without a GPU,
with triton 3.6.0 (those of sm_90), 3.7.1, 3.8.0 and 3.9.0. Importing this module needs no triton.
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


@cache
def gluon_missing(arch: str = "sm_90") -> str | None:
    """Return a sentence about what triton lacks for an architecture's kernels, or None.

    A missing name outside of functions fails the import; within kernels, only their compilation.
    """
    for kernel in KERNELS.get(arch, ()):
        try:
            module = import_module(f".{kernel}", __package__)
        except (ImportError, AttributeError) as error:
            return f"triton lacks a name that {kernel} imports ({error})"
        for owner, name in used_names(module):
            if not hasattr(owner, name):
                return f"triton's {owner.__name__} has no {name}"
    return None


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
