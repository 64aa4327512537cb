"""The names and interfaces of other packages, computed by ring_attention: one module each."""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

__all__ = [
    "context_parallel",
    "diffusers",
    "flash_attn",
    "ring_flash_attn",
    "trainer",
    "transformers",
]

if TYPE_CHECKING:
    from ring_attn.integrations import (
        context_parallel,
        diffusers,
        flash_attn,
        ring_flash_attn,
        trainer,
        transformers,
    )
else:

    def __getattr__(name: str) -> object:
        """Import a module at its first use, since it may need its package."""
        if name in {module.name for module in iter_modules(__path__)}:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
