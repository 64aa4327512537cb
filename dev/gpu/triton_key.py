"""Triton's own part of its keys, as another machine's Python makes it.

A kernel's key in Triton's cache contains a hash of Triton's compiled library, which differs between
Python versions. So kernels that are compiled here are found there only if their keys are made with
the hash of that machine's library, which is read from its wheel.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

# Triton's key for workers, which then need not hash its library of several hundred MB.
VARIABLE = "RING_ATTN_GPU_TRITON_KEY"

LIBRARY = "triton/_C/libtriton.so"

# Tags of wheels that a machine with a GPU can install, by its version of glibc: pip takes all of
# them in turn only if each is named.
PLATFORMS = ("linux", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(17, 36)))


def python_here() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def library_hash(python: str, kept_in: Path) -> str:
    """Return the hash of Triton's library for a version of Python, such as "3.12".

    The wheel of this environment's version of Triton is downloaded once, and its hash is kept.
    """
    import triton

    if python == python_here():
        return _hash_here()
    kept = kept_in / f"libtriton-{triton.__version__}-{python}.sha256"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            wheel = download(f"triton=={triton.__version__}", Path(folder), python)
            library = zipfile.ZipFile(wheel).read(LIBRARY)
        kept.write_text(hashlib.sha256(library).hexdigest())
    return kept.read_text()


def download(requirement: str, folder: Path, python: str) -> Path:
    """Download the wheel of a package for a version of Python."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
    for tag in PLATFORMS:
        command += ["--platform", f"{tag}_{platform.machine()}"]
    subprocess.run([*command, "--dest", str(folder), requirement], check=True)
    return next(folder.glob("*.whl"))


def key_of(library: str) -> str:
    """Return Triton's key, as it is with a library of that hash.

    Raises:
        RuntimeError: this version of Triton makes its key in another way.
    """
    from triton.runtime import cache

    key: str = cache.triton_key()
    if library in key:
        return key
    here = _hash_here()
    if here not in key:
        raise RuntimeError("the key of this version of triton has no hash of its library")
    return key.replace(here, library)


def use_key_of_variable() -> None:
    """Make this process use the key that the environment has, if it has one."""
    key = os.environ.get(VARIABLE)
    if key is None:
        return
    from triton.runtime import cache

    cache.triton_key = lambda: key


def short(key: str) -> str:
    """Return a key in few characters, as the results and the manifest have it."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


@cache
def _hash_here() -> str:
    import triton

    library = Path(triton.__file__).parents[1] / LIBRARY
    return hashlib.sha256(library.read_bytes()).hexdigest()
