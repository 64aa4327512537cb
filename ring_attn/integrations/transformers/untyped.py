"""Names for the objects of transformers, which have no types here: mypy skips that package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

# A model, a layer, a config, a cache: the attributes differ from class to class.
Model: TypeAlias = Any
Config: TypeAlias = Any
Cache: TypeAlias = Any

# A value that the forward of a model or layer takes or returns: tensors, caches, flags, layouts,
# and classes of transformers that hold them.
Value: TypeAlias = Any

# Keywords of a forward.
Keywords: TypeAlias = Mapping[str, Value]
