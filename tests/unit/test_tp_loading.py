"""Shards from safetensors files: right values and dtypes; only the shards' bytes are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ring_attn.models import tensor_parallel
from ring_attn.models.checkpoint import open_checkpoint
from ring_attn.models.tensor_parallel import (
    Kind,
    TensorParallelConfig,
    load_tp_state_dict,
    shard_parameter,
    shard_state_dict,
)
from tests.bounds import same_bits
from tests.refusals import refused
from tests.unit.test_tensor_parallel import config_of, layer_of

CONFIG = config_of(3, 6, rank=1)


def model_of() -> dict[str, Tensor]:
    """A block in bfloat16, and a tensor without dims."""
    torch.manual_seed(0)
    return {name: x.bfloat16() for name, x in (layer_of(6) | {"scale": torch.randn(())}).items()}


def save_in_two(model: dict[str, Tensor], folder: Path) -> Path:
    """Saves two files and an index, as Hugging Face saves a large model."""
    weight_map = {}
    for number, names in enumerate((list(model)[::2], list(model)[1::2]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: model[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


# -- the shards are those of the whole tensors


@pytest.mark.parametrize("where", ["file", "folder", "index", "folder with index", "the hub"])
def test_a_model_from_files(where: str, tmp_path: Path) -> None:
    model, source = model_of(), tmp_path
    if where == "the hub":
        # In Hugging Face's cache the index and files are links to blobs in one folder.
        source, blobs = tmp_path / "snapshots" / "main", tmp_path / "blobs"
        source.mkdir(parents=True)
        blobs.mkdir()
        save_in_two(model, source)
        for number, path in enumerate(sorted(source.iterdir())):
            path.rename(blobs / str(number))
            path.symlink_to(Path("..", "..", "blobs", str(number)))
    elif "index" in where:
        index = save_in_two(model, tmp_path)
        source = index if where == "index" else tmp_path
    else:
        save_file(model, tmp_path / "model.safetensors")
        source = tmp_path / "model.safetensors" if where == "file" else tmp_path
    for rank in range(3):
        config = replace(CONFIG, rank=rank)
        expected = shard_state_dict(model, config, otherwise="replicated")
        got = load_tp_state_dict(str(source), config, otherwise="replicated")
        assert {*got} == {*expected}
        assert all(same_bits(got[name], x) for name, x in expected.items())
    got = load_tp_state_dict(source, CONFIG, otherwise="replicated", device="meta")
    assert {x.device.type for x in got.values()} == {"meta"}


def test_a_shard_outlives_its_file(tmp_path: Path) -> None:
    """A shard is no view of the mapped file, which may be rewritten."""
    path, model = tmp_path / "x.safetensors", {"w": torch.randn(48, 40)}
    save_file(model, path)
    for kind in ("q", "replicated"):
        shard = load_tp_state_dict(path, CONFIG, {"w": kind})["w"]
        before = shard.clone()
        size = path.stat().st_size
        with open(path, "r+b") as file:
            file.seek(size - 48 * 40 * 4)
            file.write(bytes(48 * 40 * 4))
        assert torch.equal(shard, before) and before.any()
        save_file(model, path)


# -- only the shard is read


# At a fault, Linux maps the page's folio, of at most 2 MiB; a run of bytes has two ends.
AROUND = 2 * 2 << 20


def mapped_bytes(path: Path) -> int:
    """Bytes of a file in the memory of this process."""
    nbytes, of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            of_file = rest[-1:] == [str(path)]
        elif of_file and first == "Rss:":
            nbytes += int(rest[0]) * 1024
    return nbytes


@pytest.mark.parametrize(
    ("kind", "shape", "runs"),
    [
        ("column", (8196, 4096), 1),
        ("qkv", (4096 + 2 * 1024, 4096), 3),
        ("row", (4, 8 << 20), 4),
    ],
)
def test_only_the_shard_is_read(
    kind: Kind, shape: tuple[int, int], runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the pages of the file that the process has touched when a shard is made."""
    path = tmp_path / "model.safetensors"
    config = TensorParallelConfig(3, 8, 4096, 4096, num_heads=32, num_kv_heads=8, headdim=128)
    w = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)
    save_file({"w": w}, path)
    expected = shard_parameter(w, kind, config)
    touched: list[int] = []

    @contextmanager
    def watched(source: Path) -> Iterator[dict[str, Any]]:
        with open_checkpoint(source) as tensors:
            touched.append(mapped_bytes(path))
            yield tensors
            touched.append(mapped_bytes(path))
            tensors["w"][:].clone()
            touched.append(mapped_bytes(path))

    monkeypatch.setattr(tensor_parallel, "open_checkpoint", watched)
    got = load_tp_state_dict(path, config, {"w": kind})
    assert same_bits(got["w"], expected)
    before, shard, whole = touched
    assert expected.nbytes <= shard - before <= expected.nbytes + runs * AROUND < w.nbytes / 2
    assert whole >= w.nbytes


# -- errors name the fault


def lost_file(folder: Path) -> Path:
    index = save_in_two(model_of(), folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    return index


def wrong_file(folder: Path) -> Path:
    """An index that lists every tensor in the second file."""
    index = save_in_two(model_of(), folder)
    file = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(model_of(), file)}))
    return index


def index(text: str) -> Callable[[Path], Path]:
    """Makes an index with given text, beside two files that it does not name."""

    def make(folder: Path) -> Path:
        for name in ("a", "b"):
            save_file({name: torch.zeros(2)}, folder / f"{name}.safetensors")
        (folder / "i.json").write_text(text, encoding="latin-1")
        return folder / "i.json"

    return make


@pytest.mark.parametrize("content", [b"", b"x" * 100, bytes(8), None])
def test_a_damaged_file_is_named(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(6, 5)}, path)
    path.write_bytes(path.read_bytes()[:-1] if content is None else content)
    with refused(ValueError, f"{path}|damaged"):
        load_tp_state_dict(path, CONFIG, {}, otherwise="replicated")


def index_of(file: object) -> Callable[[Path], Path]:
    return index(json.dumps({"weight_map": {"w": file}}))


@pytest.mark.parametrize(
    ("make", "error", "facts"),
    [
        (lambda folder: folder, FileNotFoundError, "safetensors"),
        (lambda folder: folder / "no.safetensors", FileNotFoundError, "no.safetensors"),
        (lambda folder: folder / "no.json", FileNotFoundError, "no.json"),
        (lambda folder: index("{}")(folder).parent, ValueError, "2 .*model.safetensors.index.json"),
        (lost_file, FileNotFoundError, "00001-of-00002.safetensors"),
        (lambda folder: folder / "model.bin", FileNotFoundError, "model.bin"),
        (index("[]"), ValueError, "i.json .*weight_map"),
        (index('{"\xff": 0}'), ValueError, "i.json"),
        (index("[" * 20_000), ValueError, "i.json"),
        (index_of(1), ValueError, "i.json"),
        (index_of("../w.safetensors"), FileNotFoundError, "w.safetensors"),
        (wrong_file, ValueError, "self_attn.q_proj.weight .*00002-of-00002.safetensors"),
        (lambda folder: 3, TypeError, "int"),
    ],
)
def test_a_source_that_cannot_be_read(
    make: Callable[[Path], Path], error: type[Exception], facts: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=facts):
        load_tp_state_dict(make(tmp_path), CONFIG, otherwise="replicated")


def test_safetensors_is_optional(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'ring-attn\[hf\]'"):
        load_tp_state_dict(tmp_path, CONFIG)
