"""Reads slices of a safetensors checkpoint, and nothing else, from the disk.

safetensors returns views of a mapped file. At each page fault the system also reads ahead, on some
disks megabytes, several times the shard of a matrix. So this module requests the pages of a view
first (posix_fadvise), and the system reads nothing around them.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

# The longest header that the format allows.
_MAX_HEADER = 100_000_000

# Linux truncates a larger request to its default readahead.
_AT_ONCE = 128 * 1024


class Checkpoint:
    """The tensors of a checkpoint by name; opens each file once, at its first use.

    Args:
        source: a `.safetensors` file, a `model.safetensors.index.json`, or the folder of either.
        outside_folder: whether an index may name files outside of its folder.
    """

    def __init__(self, source: str | os.PathLike[str], *, outside_folder: bool = False) -> None:
        try:
            import safetensors  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "reading safetensors files needs safetensors: pip install 'ring-attn[hf]'"
            ) from error
        if not isinstance(source, (str, os.PathLike)):
            raise TypeError(f"source must be a path, got {type(source).__name__}")
        self._opened: dict[Path, _File] = {}
        self._source = _index_or_file(Path(source))
        with ExitStack() as self._stack:  # closes the file if it is damaged
            if self._source.suffix == ".json":
                self.files = _weight_map(self._source, outside_folder)
            else:
                names = self._file(self._source).names
                self.files = dict.fromkeys(names, self._source)
            self._stack = self._stack.pop_all()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> FileTensor:
        """The tensor of that name, not yet read; KeyError lists the nearest names."""
        if name not in self.files:
            near = difflib.get_close_matches(name, self.files, n=3, cutoff=0.0)
            raise KeyError(f"{self._source} has no tensor {name!r}; the nearest are {near}")
        return self._file(self.files[name]).tensor(name)

    def _file(self, path: Path) -> _File:
        if path not in self._opened:
            if not path.is_file():
                by_index = "" if path == self._source else f", which {self._source} names"
                raise FileNotFoundError(f"there is no file {path}{by_index}")
            with _naming(path):
                self._opened[path] = _File(path, self._stack)
        return self._opened[path]


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


class _File:
    """A safetensors file, open until the stack is closed."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        from safetensors import safe_open

        self.path, self.fd = path, os.open(path, os.O_RDONLY)
        stack.callback(os.close, self.fd)
        # RANDOM reads the header without readahead; safetensors then finds it in memory.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
        length = int.from_bytes(os.pread(self.fd, 8, 0), "little")
        header = os.pread(self.fd, min(length, _MAX_HEADER), 8)
        self._opened: Any = stack.enter_context(safe_open(path, framework="pt"))  # checks it
        self._start, self._entries = 8 + length, json.loads(header)
        self.names = [*self._opened.keys()]

    def tensor(self, name: str) -> FileTensor:
        with _naming(self.path):
            x = self._opened.get_slice(name)
        start, end = (self._start + at for at in self._entries[name]["data_offsets"])
        return FileTensor(x, tuple(x.get_shape()), self, start, end - start)


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file: safetensors' slice object `x`, and the position of its bytes."""

    x: Any
    shape: tuple[int, ...]
    file: _File
    start: int
    nbytes: int

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor:
        """Requests the pages of a slice and returns a view of them; only the last index may cut."""
        if hasattr(os, "posix_fadvise"):  # other systems read more of the file
            # safetensors reads the tensor's first byte too.
            for start, length in [(self.start, 1), *self._pieces(index)]:
                for at in range(start, start + length, _AT_ONCE):
                    size = min(_AT_ONCE, start + length - at)
                    os.posix_fadvise(self.file.fd, at, size, os.POSIX_FADV_WILLNEED)
        with _naming(self.file.path):
            part: Tensor = self.x[index]
        return part

    def _pieces(self, index: tuple[slice, ...]) -> Iterator[tuple[int, int]]:
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


def _index_or_file(source: Path) -> Path:
    """The index or the one file of a source."""
    if source.is_dir():
        files = sorted(source.glob("*.safetensors"))
        for name in ("model.safetensors.index.json", "model.safetensors"):
            if (source / name).is_file():
                return source / name
        if not files:
            raise FileNotFoundError(f"there is no safetensors file in {source}")
        if len(files) > 1:
            raise ValueError(
                f"{source} has {len(files)} safetensors files and no model.safetensors.index.json: "
                "pass one of the files"
            )
        return files[0]
    if source.suffix not in (".safetensors", ".json"):
        raise ValueError(
            "source must be a .safetensors file, a model.safetensors.index.json or the folder of "
            f"either, got {source}"
        )
    return source


def _weight_map(index: Path, outside_folder: bool) -> dict[str, Path]:
    """The file of each tensor, by the tensor's name."""
    if not index.is_file():
        raise FileNotFoundError(f"there is no file {index}")
    with _naming(index):
        content = json.loads(index.read_text(encoding="utf-8"))
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map: it is not the index of a checkpoint")
    other = [file for file in weight_map.values() if not _is_safetensors_name(file)]
    if other:
        raise ValueError(f"{index} names files that are not safetensors files: {other[:3]}")
    files = {file: index.parent / file for file in weight_map.values()}
    strays = [] if outside_folder else [f for f, path in files.items() if _strays(path, index)]
    if strays:
        raise ValueError(
            f"{index} names files outside of its folder: {strays[:3]}; pass outside_folder=True if "
            "you trust the index"
        )
    return {name: files[file] for name, file in weight_map.items()}


def _is_safetensors_name(file: object) -> bool:
    return isinstance(file, str) and file.endswith(".safetensors") and file.isprintable()


def _strays(path: Path, index: Path) -> bool:
    """Whether a file, with all links resolved, lies outside of the folder of the index."""
    # An index that is a link has two folders. In the cache of the Hugging Face Hub the index and
    # the files that it names are links to blobs in another folder.
    folders = os.path.realpath(index.parent), os.path.dirname(os.path.realpath(index))
    return not any(Path(os.path.realpath(path)).is_relative_to(folder) for folder in folders)
