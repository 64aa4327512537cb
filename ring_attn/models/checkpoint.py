"""Open safetensors checkpoints: one file, or several with an index."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from torch import Tensor

from ring_attn.values.outside import regular_file

INDEX = "model.safetensors.index.json"


class TensorSlice(Protocol):
    """A tensor in a safetensors file. Indexing it reads only the indexed part of the file."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor: ...


@contextmanager
def open_checkpoint(source: str | os.PathLike[str]) -> Iterator[dict[str, TensorSlice]]:
    """Open a checkpoint, and yield the slice object of each tensor by the tensor's name.

    Files are mapped into memory, so that only the parts that are indexed are read.

    Args:
        source: a `.safetensors` file, a `model.safetensors.index.json`, or the folder of either.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: the folder has no safetensors file.
        ValueError: a file is damaged, the folder has several files without an index, or the index
            names a tensor that its file does not have.
    """
    if find_spec("safetensors") is None:
        raise ImportError("safetensors is not installed: pip install 'ring-attn[hf]'")
    from safetensors import SafetensorError, safe_open

    path = _index_or_file(Path(source))
    weight_map = _weight_map(path) if path.suffix == ".json" else {}
    files = list(dict.fromkeys(weight_map.values())) or [path]
    tensors: dict[str, TensorSlice] = {}
    with ExitStack() as stack:
        for file in files:
            try:
                opened = stack.enter_context(safe_open(regular_file(file), framework="pt"))
            except SafetensorError as error:
                raise ValueError(
                    f"{file} is not a safetensors file, or it is damaged: {error}"
                ) from None
            for name in opened.keys():  # noqa: SIM118 - not a dict
                if not weight_map or weight_map.get(name) == file:
                    tensors[name] = opened.get_slice(name)
        for name, file in weight_map.items():
            if name not in tensors:
                raise ValueError(f"{path} says that {name} is in {file}, which has no such tensor")
        yield tensors


def _index_or_file(source: Path) -> Path:
    """Return `source`; for a folder, its index if it has one, or its only safetensors file."""
    if not source.is_dir():
        return source
    for usual in (source / INDEX, source / "model.safetensors"):
        if usual.is_file():
            return usual
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"there is no safetensors file in {source}")
    if len(files) > 1:
        raise ValueError(
            f"{source} has {len(files)} safetensors files but no {INDEX}: add the index, or pass "
            "one of the files"
        )
    return files[0]


def _weight_map(index: Path) -> dict[str, Path]:
    """Return the file of each tensor by the tensor's name; the files are next to the index."""
    try:
        files = json.loads(regular_file(index).read_text(encoding="utf-8"))["weight_map"]
        return {name: index.parent / Path(file).name for name, file in files.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{index} must have a weight_map from names of tensors to files: {error!r}"
        ) from None
