"""Cache, on disk, of the proofs of kernels that have passed.

A proof (see `first_use`) takes one or two seconds, and a job whose processes are often restarted
would spend hours on proofs. Each proof that has passed is a small file in the user's cache folder,
`$XDG_CACHE_HOME/ring_attn/first_use`, by default `~/.cache/ring_attn/first_use`. The name of the
file is a hash of everything on which the result depends, so that a new driver, version or source
needs a new proof and no file is ever out of date. Proofs that have failed are not stored: each
process shows its own error.

Among processes that start at the same time, one holds a lock and proves, and the others wait. If
the folder cannot be read, written or locked, processes repeat the proof; results do not change.
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

# Files with the version of the GPU's driver, of NVIDIA and of AMD.
DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))

# Seconds for which a process waits for the proof of another process, which may have to compile.
PATIENCE_S = 120.0

# Pauses between two attempts to get the lock.
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0

# Packages that have kernels, or the compiler of our kernels.
PACKAGES = ("torch", "triton", "flash-attn", "flash-attn-3", "flash-attn-4")


def facts_of(use: str, gpu: str) -> Facts:
    """Return everything on which the proof of a use depends, for one model of GPU."""
    return {"use": use, "gpu": gpu, "configs": _hash_of_configs(), **software()}


def has_passed(facts: Facts) -> bool:
    """Return whether a proof with these facts has passed, in this process or another one."""
    path = _file_of(facts)
    if path is None:
        return False
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is no file, no permission, or no complete JSON
        return False
    return isinstance(note, dict) and note.get("facts") == facts and bool(note.get("passed"))


def remember(facts: Facts, verdicts: Sequence[str]) -> None:
    """Store a proof that has passed, with its verdicts for people who read the file.

    Several processes may write the same file. Each writes a file of its own and renames it, so that
    a reader always finds a complete file.
    """
    path = _file_of(facts)
    if path is None:
        warn_once("there is no home folder")
        return
    text = json.dumps({"facts": facts, "passed": list(verdicts)}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(path, text)
    except OSError as error:
        warn_once(f"{path.parent}: {error.strerror}")


@contextmanager
def one_at_a_time(facts: Facts) -> Iterator[None]:
    """Let one process at a time run the block, among the processes with these facts.

    A process waits for at most PATIENCE_S, since the process that proves may hang. The system
    releases the lock of a process that ends.
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
    deadline = time.monotonic() + PATIENCE_S
    pause = FIRST_PAUSE_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return
        except OSError:
            return
        time.sleep(pause)
        # Longer pauses, because a thousand processes may use one file server.
        pause = min(2 * pause, LONGEST_PAUSE_S)


def folder() -> Path | None:
    """Return the folder of the files, by the rules of XDG; None without a home folder."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # By the rules of XDG a relative path is ignored.
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
def warn_once(why: str) -> None:
    warnings.warn(
        f"proofs of kernels cannot be stored ({why}), so each process repeats them: set "
        "XDG_CACHE_HOME to a writable folder, or RING_ATTN_FIRST_USE=always to store no proofs",
        stacklevel=2,
    )


@cache
def software() -> Facts:
    """Return versions of driver and packages, and a hash of this package's sources."""
    drivers = [_text_of(path) for path in DRIVER_FILES]
    return {
        "driver": " ".join(text.strip() for text in drivers if text),
        "cuda": str(torch.version.cuda or torch.version.hip),
        "cudnn": str(torch.backends.cudnn.version()),
        "ring_attn": __version__,
        **{name: str(installed_version(name)) for name in PACKAGES},
        "sources": _hash_of(sources()),
    }


def _hash_of_configs() -> str:
    """Return a hash of the file of `ring-attn tune`, from which kernels may have their configs."""
    path = os.environ.get("RING_ATTN_CONFIGS")
    return _hash_of([Path(path)]) if path else "none"


def sources() -> Iterator[Path]:
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
