"""Opens safetensors checkpoints: one file, or several with an index."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ring_attn.values.outside import regular_file

INDEX = "model.safetensors.index.json"


@contextmanager
def open_checkpoint(source: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """safetensors' slice object of each tensor, by name: it maps the file, and reads what it gives.

    Args:
        source: a `.safetensors` file, a `model.safetensors.index.json`, or the folder of either.
    """
    if find_spec("safetensors") is None:
        raise ImportError("safetensors is not installed: pip install 'ring-attn[hf]'")
    from safetensors import SafetensorError, safe_open

    path = _index_or_file(Path(source))
    weight_map = _weight_map(path) if path.suffix == ".json" else {}
    tensors: dict[str, Any] = {}
    with ExitStack() as stack:
        for file in dict.fromkeys(weight_map.values()) or [path]:
            try:
                opened = stack.enter_context(safe_open(regular_file(file), framework="pt"))
            except SafetensorError as error:
                raise ValueError(f"{file} is no safetensors file, or is damaged: {error}") from None
            for name in opened.keys():  # noqa: SIM118 - not a dict
                if not weight_map or weight_map.get(name) == file:
                    tensors[name] = opened.get_slice(name)
        for name, file in weight_map.items():
            if name not in tensors:
                raise ValueError(f"{path} names {name} of {file}, which has no such tensor")
        yield tensors


def _index_or_file(source: Path) -> Path:
    if source.is_dir():
        usual = (source / INDEX, source / "model.safetensors")
        files = [*filter(Path.is_file, usual)][:1] or sorted(source.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"there is no safetensors file in {source}")
        if len(files) > 1:
            raise ValueError(f"{source} has {len(files)} safetensors files and no {INDEX}")
        return files[0]
    return source


def _weight_map(index: Path) -> dict[str, Path]:
    """The file of each tensor, by the tensor's name; the files lie beside the index."""
    try:
        files = json.loads(regular_file(index).read_text(encoding="utf-8"))["weight_map"]
        return {name: index.parent / Path(file).name for name, file in files.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} has no weight_map of names to files: {error!r}") from None
