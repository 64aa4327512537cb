"""The folder `.carry`: what a machine with a GPU lacks, made on a machine without one.

    kernels.tar.xz      kernels of the stages, compiled for sm_90, and their launchers, as a cache
                        of triton
    libraries/          FlashAttention 3 to compare with; NCCL for several ranks on one GPU
    manifest.json       hashes of the kernels' sources and of these files, and triton's version

Nothing else is in it, so that it can be sent as it is: `.carry-work` has triton's cache here, which
is much larger.

A kernel's key in the cache has a hash of its source: after a change nothing would be found, and the
time on the GPU would be spent on the compiler. So a folder of other sources is refused.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from dev.gpu import device, triton_key
from dev.gpu.cells import Stage
from dev.gpu.nccl_library import VERSION as NCCL_VERSION
from dev.gpu.nccl_library import only_for
from dev.gpu.ranks import LIBRARY
from dev.gpu.results import FILE, Results, Row, counts, last_rows, read_rows
from dev.gpu.schedule import Run
from dev.gpu.watch import ROOT

MANIFEST, KERNELS, LIBRARIES = "manifest.json", "kernels.tar.xz", "libraries"
FA3_NAME, NCCL_NAME = "fa3.tar.xz", "libnccl.so.2.xz"
FA3 = "fa3-fwd==0.0.3"
NCCL = f"nvidia-nccl-cu13=={NCCL_VERSION}"
ARCHITECTURE = 90

# The most bytes that a lent machine takes beside a checkout.
MAX_BYTES = 56 << 20

# Of a kernel, a machine with a GPU reads only these files.
SUFFIXES = (".cubin", ".json")

# Of modules that Triton compiles in C.
LAUNCHER = ".so"

# States of cells whose kernels are compiled.
DONE = ("launched", "not here")

# A file in which triton lists those of a kernel, by their paths.
GROUP = "__grp__"


# -- here, without a GPU


def prepare(folder: Path, stages: Sequence[Stage], seconds: float, python: str) -> int:
    """Compile what stages launch for at most so many seconds; pack it with the libraries.

    `python` is the version of Python of the machine with the GPU.
    """
    work = folder.resolve().with_name(f"{folder.name}-work")
    for made in (folder, work):
        made.mkdir(parents=True, exist_ok=True)
    cache = work / "cache"
    library = triton_key.library_hash(python, work)
    rows = compile_kernels(work, cache, stages, seconds, library)
    unfinished = [row for row in last_rows(rows).values() if row["state"] not in DONE]
    same_python = python == triton_key.python_here()
    packed = pack_kernels(cache, folder / KERNELS, with_launchers=same_python)
    missing = add_libraries(folder / LIBRARIES, python)
    write_manifest(folder, python, library)
    size = sum(path.stat().st_size for path in _files(folder).values())
    print(
        f"{folder}: {packed.kernels} kernels, {packed.launchers} launchers, "
        f"{size / 2**20:.1f} MiB, {dict(counts(rows))}"
    )
    if not same_python:
        print(
            f"left out: launchers, as this is Python {triton_key.python_here()}, so each kernel's "
            f"first launch needs a C compiler there; prepare with Python {python} to carry them"
        )
    for reason in missing:
        print("left out:", reason)
    if size > MAX_BYTES:
        raise ValueError(
            f"{folder} has {size / 2**20:.1f} MiB, at most {MAX_BYTES >> 20} may travel"
        )
    return int(bool(unfinished))


def compile_kernels(
    work: Path, cache: Path, stages: Sequence[Stage], seconds: float, library: str
) -> list[Row]:
    """Compile what each cell launches; cells with a verdict are left out.

    A change of a kernel's source begins anew.
    """
    import triton

    log = work / "log"
    sources = _hashes_of_sources() | {"triton": triton.__version__, "library": library}
    manifest = work / "compiling.json"
    if not manifest.exists() or json.loads(manifest.read_text()) != sources:
        shutil.rmtree(log, ignore_errors=True)
        shutil.rmtree(cache, ignore_errors=True)
    manifest.write_text(json.dumps(sources))
    before = read_rows(log / FILE) if (log / FILE).exists() else []
    results = Results(log)
    key = triton_key.key_of(library)
    variables = {"TRITON_CACHE_DIR": str(cache), triton_key.VARIABLE: key}
    run = Run(results, log, seconds, device.environment(device.COMPILER) | variables)
    try:
        run.run(stages, _compiled(before))
    finally:
        run.close()
    return [*before, *results.rows]


def _compiled(rows: list[Row]) -> set[str]:
    """Labels of the cells whose kernels are in the cache."""
    return {label for label, row in last_rows(rows).items() if row["state"] in DONE}


class Packed(NamedTuple):
    kernels: int
    launchers: int


def pack_kernels(cache: Path, target: Path, *, with_launchers: bool) -> Packed:
    """Pack the machine code of a cache, with paths within it.

    Launchers are modules in C of this version of Python, which Triton compiles for each signature
    of a kernel.
    """
    kernels = launchers = 0
    with tarfile.open(target, "w:xz", preset=6) as tar:
        for name, content in _cached(cache, with_launchers):
            kernels += name.split("/")[-1].startswith(GROUP)
            launchers += name.endswith(LAUNCHER)
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return Packed(kernels, launchers)


def _cached(cache: Path, with_launchers: bool) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files to pack."""
    for entry in sorted(cache.glob("*")):
        for launcher in entry.glob(f"*{LAUNCHER}") if with_launchers else ():
            yield f"{entry.name}/{launcher.name}", launcher.read_bytes()
        for group in entry.glob(f"{GROUP}*"):
            children = json.loads(group.read_text())["child_paths"]
            kept = [name for name in children if name.endswith(SUFFIXES)]
            for name in kept:
                yield f"{entry.name}/{name}", (entry / name).read_bytes()
            names = {name: f"{entry.name}/{name}" for name in kept}
            yield f"{entry.name}/{group.name}", json.dumps({"child_paths": names}).encode()


def add_libraries(folder: Path, python: str) -> list[str]:
    """Get the libraries that are not there yet; return why some are left out."""
    folder.mkdir(exist_ok=True)
    makers: dict[str, Callable[[Path, str], None]] = {FA3_NAME: _pack_fa3, NCCL_NAME: _pack_nccl}
    missing = []
    for name, make in makers.items():
        if (folder / name).exists():
            continue
        try:
            make(folder / name, python)
        except (subprocess.CalledProcessError, OSError, zipfile.BadZipFile) as error:
            missing.append(f"{name}: {type(error).__name__}: {error}")
            (folder / name).unlink(missing_ok=True)
    return missing


def _pack_fa3(target: Path, python: str) -> None:
    """The modules of the wheel, with shared objects without symbols."""
    with tempfile.TemporaryDirectory() as temporary, tarfile.open(target, "w:xz") as tar:
        wheel = zipfile.ZipFile(triton_key.download(FA3, Path(temporary), python))
        for name in wheel.namelist():
            if ".dist-info/" not in name and not name.endswith("/"):
                tar.add(wheel.extract(name, temporary), name)


def _pack_nccl(target: Path, python: str) -> None:
    """The library, with the code of one architecture."""
    with tempfile.TemporaryDirectory() as temporary:
        wheel = zipfile.ZipFile(triton_key.download(NCCL, Path(temporary), python))
        data = bytearray(wheel.read("nvidia/nccl/lib/libnccl.so.2"))
        only_for(ARCHITECTURE, data)
        library = Path(temporary) / "libnccl.so.2"
        library.write_bytes(data)
        subprocess.run(["strip", "--strip-debug", library], check=True)
        target.write_bytes(lzma.compress(library.read_bytes(), preset=6))


def write_manifest(folder: Path, python: str, library: str) -> None:
    import triton

    manifest = {
        "triton": triton.__version__,
        "python": python,
        "library": library,
        "triton_key": triton_key.short(triton_key.key_of(library)),
        "sources": _hashes_of_sources(),
        "files": {name: _hash(path) for name, path in _files(folder).items()},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _files(folder: Path) -> dict[str, Path]:
    """The files that travel, by their names within the folder."""
    found = [folder / KERNELS, *sorted((folder / LIBRARIES).glob("*"))]
    return {str(path.relative_to(folder)): path for path in found if path.exists()}


def _hashes_of_sources() -> dict[str, str]:
    paths = sorted((ROOT / "kernels").glob("*.py"))
    return {path.name: _hash(path) for path in paths}


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# -- there, on the machine with a GPU


def unpacked(folder: Path, target: Path, name: str, *, needed: bool = False) -> dict[str, str]:
    """Unpack a carried folder for a device; return the variables by which workers use it.

    Without a folder nothing is carried, and kernels are compiled when they are needed. If the
    folder is `needed`, that is an error: its time on the GPU would go into the compiler.

    Raises:
        ValueError: a source of a kernel or a carried file has changed since; or the folder is
            needed, and is not there or is for another version of triton.
    """
    if not (folder / MANIFEST).exists():
        missing = f"there is no {folder / MANIFEST}"
        if needed:
            raise ValueError(f"{missing}: run python -m dev gpu --prepare, or leave out --carry")
        print(f"nothing is carried: {missing}, so every kernel is compiled")
        return {}
    check(folder)
    if name == device.CPU:
        return {}
    parts = [_unpack_kernels, _key]
    if name == device.CUDA:
        parts += [_unpack_fa3, _unpack_nccl]
    with ThreadPoolExecutor() as pool:
        unpacking = [pool.submit(part, folder, target) for part in parts]
    variables = dict[str, str]()
    for unpacked_part in unpacking:
        variables |= unpacked_part.result()
    if device.CARRIED not in variables:
        other = why_not_found(folder)
        if needed:
            raise ValueError(f"{other}: prepare with this triton, or leave out --carry")
        print(f"{other}, so every kernel is compiled")
    if name == device.CUDA:
        drop_launchers_that_do_not_load(Path(variables["TRITON_CACHE_DIR"]))
    return variables


def _unpack_kernels(folder: Path, target: Path) -> dict[str, str]:
    return {"TRITON_CACHE_DIR": str(unpack_kernels(folder / KERNELS, target / "triton"))}


def _key(folder: Path, target: Path) -> dict[str, str]:
    return key_of_kernels(folder)


def _unpack_fa3(folder: Path, target: Path) -> dict[str, str]:
    packed = folder / LIBRARIES / FA3_NAME
    if not packed.exists():
        return {}
    with tarfile.open(packed) as tar:
        tar.extractall(target / "python", filter="data")
    paths = [str(target / "python"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _unpack_nccl(folder: Path, target: Path) -> dict[str, str]:
    packed = folder / LIBRARIES / NCCL_NAME
    if not packed.exists():
        return {}
    target.mkdir(exist_ok=True)
    library = target / "libnccl.so.2"
    library.write_bytes(lzma.decompress(packed.read_bytes()))
    return {LIBRARY: str(library)}


def drop_launchers_that_do_not_load(cache: Path) -> None:
    """Delete carried launchers if they cannot be loaded here; Triton then compiles them anew.

    They are linked with the C library of another machine, and with libcuda.
    """
    launchers = sorted(cache.glob(f"*/*{LAUNCHER}"))
    code = "import ctypes, sys; [ctypes.CDLL(path) for path in sys.argv[1:]]"
    command = [sys.executable, "-c", code, *map(str, launchers)]
    tried = subprocess.run(command, capture_output=True, text=True)
    if tried.returncode:
        reason = tried.stderr.strip().splitlines()[-1]
        print(f"carried launchers do not load, so Triton compiles them here: {reason}")
        for launcher in launchers:
            launcher.unlink()


def key_of_kernels(folder: Path) -> dict[str, str]:
    """Return the variables by which workers find the carried kernels; none for another triton.

    Their keys have the hash of another Python's library, in the same version of triton.
    """
    import triton

    manifest = json.loads((folder / MANIFEST).read_text())
    if manifest["triton"] != triton.__version__:
        return {}
    key = triton_key.key_of(manifest["library"])
    if triton_key.short(key) != manifest["triton_key"]:
        return {}
    return {triton_key.VARIABLE: key, device.CARRIED: "1"}


def why_not_found(folder: Path) -> str:
    import triton

    carried = json.loads((folder / MANIFEST).read_text())["triton"]
    return (
        f"no kernel of {folder} can be found: they are for triton {carried}, and here is triton "
        f"{triton.__version__}, or another build of it"
    )


def check(folder: Path) -> None:
    """Compare a carried folder with its manifest, and with the sources.

    Raises:
        ValueError: naming what has changed.
    """
    manifest = json.loads((folder / MANIFEST).read_text())
    now: Mapping[str, Mapping[str, Any]] = {
        "sources": _hashes_of_sources(),
        "files": {name: _hash(path) for name, path in _files(folder).items()},
    }
    for kind, hashes in now.items():
        then = manifest[kind]
        names = sorted(then.keys() | hashes.keys())
        changed = [name for name in names if then.get(name) != hashes.get(name)]
        if changed:
            raise ValueError(
                f"{folder} is of other {kind}: {', '.join(changed)} changed since it was made, so "
                "no kernel would be found; run python -m dev gpu --prepare again, or delete it"
            )


def unpack_kernels(packed: Path, cache: Path) -> Path:
    """Unpack a cache of triton, whose lists of files get their paths here."""
    with tarfile.open(packed) as tar:
        tar.extractall(cache, filter="data")
    for group in cache.glob(f"*/{GROUP}*"):
        names = json.loads(group.read_text())["child_paths"]
        paths = {name: str(cache / place) for name, place in names.items()}
        group.write_text(json.dumps({"child_paths": paths}))
    return cache
