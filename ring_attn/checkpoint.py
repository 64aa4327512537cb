"""Tensors of a safetensors checkpoint, of which the disk reads only what is asked for.

safetensors maps a file and gives views of it. Left to itself the system reads around each page that
is looked at, as much as the disk's read-ahead says: megabytes on some, several times the shard of a
matrix. So the pages of a view are asked for by name before anyone looks at them; then they are
there, and nothing around them is.
"""

from __future__ import annotations

import difflib
import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

#: (start, length) in bytes of a file.
Piece: TypeAlias = tuple[int, int]


class Checkpoint:
    """The tensors of a checkpoint by their names; each file is opened once, when it is needed.

    Args:
        source: a `.safetensors` file, a `model.safetensors.index.json`, or the folder of either.
        outside_folder: whether an index may name files outside of its folder.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a source that is no safetensors checkpoint, is damaged, or whose index names
            files outside of its folder.
        ImportError: safetensors is not installed.
    """

    def __init__(self, source: str | os.PathLike[str], *, outside_folder: bool = False) -> None:
        """Finds out which tensor is in which file."""
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError(
                "reading safetensors files needs safetensors: pip install 'ring-attn[hf]'"
            ) from error
        if not isinstance(source, (str, os.PathLike)):
            raise TypeError(f"source must be a path, got {type(source).__name__}")
        self._safe_open = safe_open
        self._opened: dict[Path, _SafetensorsFile] = {}
        self._source = _index_or_file(Path(source))
        with ExitStack() as self._stack:  # closes the file where it is none of safetensors
            if self._source.suffix == ".json":
                self.files = _weight_map(self._source, outside_folder)
            else:
                self.files = dict.fromkeys(self._file(self._source).names, self._source)
            self._stack = self._stack.pop_all()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def tensor(self, name: str) -> FileTensor:
        """One of them.

        Raises:
            KeyError: no tensor of that name; the message has the nearest ones.
            FileNotFoundError: the index names a file that is not there.
            ValueError: a file that is damaged, or has no tensor of that name.
        """
        if name not in self.files:
            near = difflib.get_close_matches(name, self.files, n=3, cutoff=0.0)
            raise KeyError(f"{self._source} has no tensor {name!r}; the nearest are {near}")
        return self._file(self.files[name]).tensor(name)

    def _file(self, path: Path) -> _SafetensorsFile:
        if path not in self._opened:
            if not path.is_file():
                named = "" if path == self._source else f", which {self._source} names"
                raise FileNotFoundError(f"there is no file {path}{named}")
            with _naming(path):
                self._opened[path] = _SafetensorsFile(path, self._safe_open, self._stack)
        return self._opened[path]


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raises what is wrong with the content of a file as ValueError with its name."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a file of a safetensors checkpoint, or is damaged: {error}"
        ) from None


class _SafetensorsFile:
    """One file, of which only what is asked for is read from the disk."""

    def __init__(self, path: Path, safe_open: Any, stack: ExitStack) -> None:
        """Reads the header; the file stays open until the stack is closed."""
        self._path = path
        self._fd = os.open(path, os.O_RDONLY)
        stack.callback(os.close, self._fd)
        # Once here, the header is not looked for on the disk with megabytes around it.
        _advise(self._fd, "RANDOM", [(0, 0)])
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        header = os.pread(self._fd, min(length, _MAX_HEADER), 8)
        # It says so where this is no such file.
        self._file = stack.enter_context(safe_open(path, framework="pt"))
        self._start = 8 + length
        self._entries = json.loads(header)

    @property
    def names(self) -> list[str]:
        """Of the tensors."""
        return [*self._file.keys()]

    def tensor(self, name: str) -> FileTensor:
        """One of them."""
        with _naming(self._path):
            x = self._file.get_slice(name)
        start, end = self._entries[name]["data_offsets"]
        shape = tuple(x.get_shape())
        return FileTensor(x, shape, self._path, self._fd, self._start + start, end - start)


# The most that the format allows.
_MAX_HEADER = 100_000_000

# Linux takes at most so much of one request as it reads ahead by default.
_AT_ONCE = 128 * 1024


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file: where it lies, and safetensors' slices of it."""

    x: Any
    shape: tuple[int, ...]
    path: Path
    fd: int
    start: int
    nbytes: int

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor:
        """A view of the mapped file, whose pages are on their way; the last index is the cut."""
        # The view is made with a look at the tensor's first byte.
        _advise(self.fd, "WILLNEED", [(self.start, 1), *self._pieces(index)])
        with _naming(self.path):
            part: Tensor = self.x[index]
        return part

    def _pieces(self, index: tuple[slice, ...]) -> Iterator[Piece]:
        """(start, length) in the file of what is indexed: pieces that are pages apart."""
        start, length, gap, pieces = self.start, self.nbytes, 0, 1
        if index and length:
            dim = len(index) - 1
            first, last, _ = index[dim].indices(self.shape[dim])
            pieces = math.prod(self.shape[:dim])
            stride = self.nbytes // pieces
            item = stride // self.shape[dim]
            start, length = self.start + first * item, (last - first) * item
            gap = stride - length
        if length and gap < mmap.PAGESIZE:
            length, pieces = pieces * (length + gap) - gap, 1
        for piece in range(pieces):
            at = start + piece * (length + gap)
            for done in range(0, length, _AT_ONCE):
                yield at + done, min(_AT_ONCE, length - done)


def _advise(fd: int, advice: str, ranges: Iterable[Piece]) -> None:
    """Tells the system how (start, length) of a file are used; where it cannot be told, it is not.

    Without it more of a file is read, and the same comes out.
    """
    if hasattr(os, "posix_fadvise"):
        kind = getattr(os, f"POSIX_FADV_{advice}")
        for start, length in ranges:
            os.posix_fadvise(fd, start, length, kind)


def _index_or_file(source: Path) -> Path:
    """The index or the one file that a source is.

    Raises:
        FileNotFoundError: a folder with neither.
        ValueError: a folder with several files and no index, or a file of another kind.
    """
    if source.is_dir():
        found = sorted(source.glob("*.safetensors"))
        for name in ("model.safetensors.index.json", "model.safetensors"):
            if (source / name).is_file():
                return source / name
        if not found:
            raise FileNotFoundError(f"there is no safetensors file in {source}")
        if len(found) > 1:
            raise ValueError(
                f"{source} has {len(found)} safetensors files and no model.safetensors.index.json: "
                "pass the file that is meant"
            )
        return found[0]
    if source.suffix not in (".safetensors", ".json"):
        raise ValueError(
            "source must be a .safetensors file, a model.safetensors.index.json or the folder of "
            f"either, got {source}"
        )
    return source


def _weight_map(index: Path, outside_folder: bool) -> dict[str, Path]:
    """From each tensor's name to its file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not the index of a safetensors checkpoint, or files outside of its folder.
    """
    if not index.is_file():
        raise FileNotFoundError(f"there is no file {index}")
    with _naming(index):
        content = json.loads(index.read_text(encoding="utf-8"))
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{index} has no weight_map, from tensors' names to files: it is not the index of a "
            "checkpoint"
        )
    other = [file for file in weight_map.values() if not _is_safetensors_name(file)]
    if other:
        raise ValueError(f"{index} names files that are not safetensors files: {other[:3]}")
    files = {file: index.parent / file for file in weight_map.values()}
    strays = [] if outside_folder else [f for f, path in files.items() if _strays(path, index)]
    if strays:
        raise ValueError(
            f"{index} names files outside of its folder: {strays[:3]}; pass outside_folder=True if "
            "the index is to be trusted"
        )
    return {name: files[file] for name, file in weight_map.items()}


def _is_safetensors_name(file: object) -> bool:
    return isinstance(file, str) and file.endswith(".safetensors") and file.isprintable()


def _strays(path: Path, index: Path) -> bool:
    """Whether a file lies, behind all links, outside of the folder of the index."""
    # An index that is a link has two: in the cache of the Hugging Face Hub it links to a blob, and
    # the files that it names link to others beside that.
    folders = os.path.realpath(index.parent), os.path.dirname(os.path.realpath(index))
    return not any(Path(os.path.realpath(path)).is_relative_to(folder) for folder in folders)
