"""Reads slices of a safetensors checkpoint, and nothing else, from the disk.

safetensors returns views of a mapped file. At each page fault the system would read ahead, on some
disks megabytes, several times the shard of a matrix. So the pages of a view are requested first.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ring_attn.core.values import regular_file

# Linux truncates a larger request to its default readahead.
_AT_ONCE = 128 * 1024


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file, not yet read: safetensors' slice object, and the place of its bytes."""

    x: Any
    shape: tuple[int, ...]
    path: Path
    fd: int
    start: int
    nbytes: int
    device: torch.device | str

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor:
        """Requests the pages of a slice and returns a view of them; only the last index may cut."""
        # safetensors reads the tensor's first byte too.
        for start, length in [(self.start, 1), *self._runs_of_bytes(index)]:
            for at in range(start, start + length, _AT_ONCE):
                size = min(_AT_ONCE, start + length - at)
                os.posix_fadvise(self.fd, at, size, os.POSIX_FADV_WILLNEED)
        with _naming(self.path):
            part: Tensor = self.x[index]
        return part.to(self.device)

    def _runs_of_bytes(self, index: tuple[slice, ...]) -> Iterator[tuple[int, int]]:
        """Start and length in the file of each run of bytes of a slice."""
        if not index:
            yield self.start, self.nbytes
        elif self.nbytes:
            dim = len(index) - 1
            first, last, _ = index[dim].indices(self.shape[dim])
            row = self.nbytes // math.prod(self.shape[:dim])
            item = row // self.shape[dim]
            for start in range(self.start, self.start + self.nbytes, row):
                yield start + first * item, (last - first) * item


@contextmanager
def open_checkpoint(
    source: str | os.PathLike[str], device: torch.device | str = "cpu"
) -> Iterator[dict[str, FileTensor]]:
    """The tensors of a safetensors checkpoint by name; they can be read inside the context.

    Args:
        source: a `.safetensors` file, a `model.safetensors.index.json`, or the folder of either.
        device: device of what is read.

    Raises:
        ValueError: the source is not a safetensors checkpoint, is damaged, or has files that
            are not beside its index.
        FileNotFoundError: the source, or a file that its index names, does not exist.
        ImportError: safetensors is not installed.
    """
    if find_spec("safetensors") is None:
        raise ImportError("safetensors is not installed: pip install 'ring-attn[hf]'")
    path = _index_or_file(Path(source))
    with ExitStack() as stack:
        if path.suffix != ".json":
            yield _open(path, device, stack)
            return
        tensors, files = {}, {}
        for name, file in _weight_map(path).items():
            if file not in files:
                files[file] = _open(file, device, stack)
            if name not in files[file]:
                raise ValueError(f"{path} names {name} of {file}, which has no such tensor")
            tensors[name] = files[file][name]
        yield tensors


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turns errors in a file's content into a ValueError with the file's name."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a file of a safetensors checkpoint, or is damaged: {error}"
        ) from None


def _open(path: Path, device: torch.device | str, stack: ExitStack) -> dict[str, FileTensor]:
    from safetensors import safe_open

    fd = os.open(regular_file(path), os.O_RDONLY)
    stack.callback(os.close, fd)
    with _naming(path):
        # RANDOM reads the header without readahead; safetensors then finds it in memory.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        header = os.pread(fd, min(length, os.fstat(fd).st_size), 8)
        file = stack.enter_context(safe_open(path, framework="pt"))  # checks the header
        tensors = {}
        entries = json.loads(header)
        for name in file.keys():  # noqa: SIM118 - not a dict
            start, end = (8 + length + at for at in entries[name]["data_offsets"])
            x = file.get_slice(name)
            shape = tuple(x.get_shape())
            tensors[name] = FileTensor(x, shape, path, fd, start, end - start, device)
        return tensors


def _index_or_file(source: Path) -> Path:
    if source.is_dir():
        usual = (source / "model.safetensors.index.json", source / "model.safetensors")
        files = [*filter(Path.is_file, usual)][:1] or sorted(source.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"there is no safetensors file in {source}")
        if len(files) > 1:
            raise ValueError(f"{source} has {len(files)} safetensors files and no {usual[0].name}")
        return files[0]
    if source.suffix not in (".safetensors", ".json"):
        raise ValueError(
            "source must be a .safetensors file, a model.safetensors.index.json or the folder of "
            f"either, got {source}"
        )
    return source


def _weight_map(index: Path) -> dict[str, Path]:
    """The file of each tensor, by the tensor's name."""
    with _naming(index):
        content = json.loads(regular_file(index).read_text(encoding="utf-8"))
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map: it is not the index of a checkpoint")
    for file in weight_map.values():
        plain = isinstance(file, str) and file.isprintable() and Path(file).name == file
        if not plain or not file.endswith(".safetensors"):
            raise ValueError(f"{index} names {file!r}, which is no safetensors file beside it")
        if not (index.parent / file).is_file():
            raise FileNotFoundError(f"there is no file {file}, which {index} names")
    return {name: index.parent / file for name, file in weight_map.items()}
