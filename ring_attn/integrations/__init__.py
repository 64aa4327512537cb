"""Other packages' names and interfaces over ring_attention: one module per package."""

from importlib import import_module
from pkgutil import iter_modules


def __getattr__(name: str) -> object:
    """Imports a module at its first use, since it may need its package."""
    if name in {module.name for module in iter_modules(__path__)}:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
