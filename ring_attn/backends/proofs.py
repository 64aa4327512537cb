"""Proofs of kernels that passed, remembered across processes.

A proof (see `first_use`) takes a second or two, so that a job whose processes start again and again
would spend hours on it. Each proof that passed is a small file in the user's cache folder,
`$XDG_CACHE_HOME/ring_attn/first_use`, by default `~/.cache/ring_attn/first_use`. Its name is a hash
of everything on which the result depends, so that a new driver, version or source needs a new proof
and no file is ever out of date. Proofs that failed are not kept: each process shows its own error.

Processes that start together prove once: one of them holds a lock, for which the others wait. A
folder that cannot be read, written or locked costs proofs, never a result.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

from ring_attn.version import __version__, installed_version

Facts = Mapping[str, str]

# Files with the version of a GPU's driver, of NVIDIA's and AMD's.
DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))

# Seconds for which a process waits for another one that proves the same, which may compile first.
PATIENCE_S = 120.0

# Pauses between two looks at the lock.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0

# Packages with kernels, or with the compiler of ours.
PACKAGES = ("torch", "triton", "flash-attn", "flash-attn-3", "flash-attn-4")


def facts_of(use: str, gpu: str) -> Facts:
    """Return everything on which the proof of a use depends, for one model of GPU."""
    return {"use": use, "gpu": gpu, "configs": _hash_of_configs(), **_software()}


def has_passed(facts: Facts) -> bool:
    """Tell whether a proof with these facts has passed in this or another process."""
    path = _file_of(facts)
    if path is None:
        return False
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no file, no permission, or no whole JSON
        return False
    return isinstance(note, dict) and note.get("facts") == facts and bool(note.get("passed"))


def remember(facts: Facts, verdicts: Sequence[str]) -> None:
    """Keep a proof that has passed, with its verdicts for whoever reads the file.

    Several processes may write the same file: each writes its own and renames it, so that a reader
    finds a whole file at every moment.
    """
    path = _file_of(facts)
    if path is None:
        _warn_once("there is no home folder")
        return
    text = json.dumps({"facts": facts, "passed": list(verdicts)}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(path, text)
    except OSError as error:
        _warn_once(f"{path.parent}: {error.strerror}")


@contextmanager
def one_at_a_time(facts: Facts) -> Iterator[None]:
    """Run the block in one process after the other, among those with these facts.

    Waits for at most PATIENCE_S: the process that proves may hang. The system releases the lock of
    a process that ends.
    """
    path = _file_of(facts)
    try:
        if path is None:
            raise FileNotFoundError
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_suffix(".lock").open("w")
    except OSError:  # `remember` warns
        yield
        return
    with file:
        _lock(file.fileno())
        yield


def _lock(file: int) -> None:
    """Lock an open file, unless that takes too long or its file system has no locks."""
    deadline, pause = time.monotonic() + PATIENCE_S, FIRST_PAUSE_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return
        except OSError:
            return
        time.sleep(pause)
        # A thousand processes may ask one file server.
        pause = min(2 * pause, LONGEST_PAUSE_S)


def folder() -> Path | None:
    """Return the folder of the files, by the rules of XDG; None without a home folder."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # XDG asks to ignore a relative path.
    cache_home = given if os.path.isabs(given) else os.path.expanduser("~/.cache")
    return Path(cache_home, "ring_attn", "first_use") if os.path.isabs(cache_home) else None


def _file_of(facts: Facts) -> Path | None:
    where = folder()
    if where is None:
        return None
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return where / f"{key}.json"


def _write_whole(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix="writing-", delete=False
    ) as file:
        try:
            file.write(text)
            file.close()
            os.replace(file.name, path)
        except OSError:
            with suppress(OSError):
                os.unlink(file.name)
            raise


@cache
def _warn_once(why: str) -> None:
    warnings.warn(
        f"proofs of kernels cannot be kept ({why}), so each process proves again: set "
        "XDG_CACHE_HOME to a folder that can be written, or RING_ATTN_FIRST_USE=always to keep "
        "no proofs",
        stacklevel=2,
    )


@cache
def _software() -> Facts:
    """Return versions of driver and packages, and a hash of this package's sources."""
    drivers = [_text_of(path) for path in DRIVER_FILES]
    return {
        "driver": " ".join(text.strip() for text in drivers if text),
        "cuda": str(torch.version.cuda or torch.version.hip),
        "cudnn": str(torch.backends.cudnn.version()),
        "ring_attn": __version__,
        **{name: str(installed_version(name)) for name in PACKAGES},
        "sources": _hash_of(_sources()),
    }


def _hash_of_configs() -> str:
    """Return a hash of the file of `ring-attn tune`, from which kernels may have their configs."""
    path = os.environ.get("RING_ATTN_CONFIGS")
    return _hash_of([Path(path)]) if path else "none"


def _sources() -> Iterator[Path]:
    """Yield the package's sources, also in a checkout, where `kernels` is a link to a folder."""
    for parent, folders, names in os.walk(Path(__file__).parents[1], followlinks=True):
        folders.sort()
        yield from (Path(parent, name) for name in sorted(names) if name.endswith(".py"))


def _hash_of(paths: Iterator[Path] | Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with suppress(OSError):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
