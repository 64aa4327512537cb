"""Public names and signatures, as text; `python -m tests.public_names` writes them to the file.

A name or parameter that vanishes from the file needs a line in CHANGELOG.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import GenericAlias, ModuleType

FILE = Path(__file__).with_name("public_names.txt")

# The package lists names of other modules; each of the others defines its own.
MODULES = (
    "ring_attn",
    "ring_attn.core.masks",
    "ring_attn.planning.balance",
    "ring_attn.profiling",
    "ring_attn.testing",
    "ring_attn.models.sdpa",
    "ring_attn.models.dtensors",
    "ring_attn.models.tensor_parallel",
    "ring_attn.integrations.context_parallel",
    "ring_attn.integrations.flash_attn",
    "ring_attn.integrations.ring_flash_attn",
    "ring_attn.integrations.trainer",
    "ring_attn.integrations.transformers",
    "ring_attn.models.recurrent",
    "ring_attn.plots",
    "ring_attn.recurrence",
)


def lines() -> Iterator[str]:
    for name in MODULES:
        module = import_module(name)
        for attribute, value in sorted(public(module).items()):
            yield from described(f"{name}.{attribute}", value)


def public(module: ModuleType) -> dict[str, object]:
    """The names of `__all__`, or else the functions and classes."""
    names = set(getattr(module, "__all__", ()))
    if not names:
        names = {n for n, x in vars(module).items() if is_defined_in(module, x)}
    return {name: getattr(module, name) for name in names if not name.startswith("_")}


def is_defined_in(module: ModuleType, value: object) -> bool:
    if isinstance(value, GenericAlias) or not (inspect.isclass(value) or inspect.isroutine(value)):
        return False
    return value.__module__ == module.__name__


def described(name: str, value: object) -> Iterator[str]:
    yield name + signature(value)
    if inspect.isclass(value):
        for attribute in sorted(vars(value)):
            if not attribute.startswith("_"):
                yield f"{name}.{attribute}{signature(getattr(value, attribute))}"


def signature(value: object) -> str:
    """The parameters and defaults of a function or class, without types."""
    if not callable(value) or isinstance(value, GenericAlias):
        return ""
    found = inspect.signature(value)
    parameters = [x.replace(annotation=x.empty) for x in found.parameters.values()]
    return str(found.replace(parameters=parameters, return_annotation=found.empty))


if __name__ == "__main__":
    FILE.write_text("".join(f"{line}\n" for line in lines()))
