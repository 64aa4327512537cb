"""Values from outside the process: files and environment variables."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def regular_file(path: str | Path) -> Path:
    """Return the path of a file; refuse pipes and devices, which may have no end."""
    path = Path(path)
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} must be a regular file, but is a folder, a pipe or a device")
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
