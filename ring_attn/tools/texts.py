"""Text that every machine has: the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from pathlib import Path

NOT_TEXT = frozenset(("site-packages", "dist-packages", "test", "tests", "idle_test"))


@lru_cache(maxsize=1)
def standard_library_files() -> list[bytes]:
    """The sources of the running Python's standard library, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    files = [(root / path).read_bytes() for path in paths if NOT_TEXT.isdisjoint(path.parts)]
    if not any(files):
        raise FileNotFoundError(f"no sources of the standard library in {root}")
    return files
