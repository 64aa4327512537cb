"""Values from outside the process: files and environment variables."""

from __future__ import annotations

import os
import stat
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

# A value of JSON, which has no types: the code that reads one checks what it needs.
Json: TypeAlias = Any

# Kinds of files in which pictures are written.
PICTURES = (".svg", ".png")


def regular_file(path: str | Path) -> Path:
    """Return the path of a file; refuse pipes and devices, which may have no end."""
    path = Path(path)
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} must be a regular file, but is a folder, a pipe or a device")
    return path


def check_matplotlib() -> None:
    """Raise ImportError if there is no matplotlib."""
    if find_spec("matplotlib") is None:
        raise ImportError("pictures need matplotlib: pip install 'ring-attn[plot]'")


def picture_path(path: str | Path) -> Path:
    """Return the path of a picture to write.

    Raises:
        ImportError: there is no matplotlib.
        ValueError: the suffix is none of `PICTURES`.
    """
    path = Path(path)
    if path.suffix.lower() not in PICTURES:
        raise ValueError(
            f"a picture must be a file that ends in {' or '.join(PICTURES)}, got {str(path)!r}"
        )
    check_matplotlib()
    return path


def env_int(name: str, default: int) -> int:
    """Return the number in an environment variable; `default` if it is not set or is empty."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        raise ValueError(
            f"the environment variable {name} must be a number from 0, got {text!r}: unset it, or "
            "let torchrun set it"
        )
    return int(text)
