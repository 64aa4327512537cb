"""Shards from safetensors files: right values and dtypes; only the shards' bytes are read."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from ring_attn.models.checkpoint import open_checkpoint
from ring_attn.models.tensor_parallel import (
    Kind,
    TensorParallelConfig,
    load_tp_state_dict,
    shard_parameter,
    shard_state_dict,
)
from tests.bounds import same_bits
from tests.unit.test_tensor_parallel import config_of, layer_of

CONFIG = config_of(3, 6, rank=1)


def model_of() -> dict[str, Tensor]:
    """A block in bfloat16, and a tensor without dims."""
    torch.manual_seed(0)
    return {name: x.bfloat16() for name, x in (layer_of(6) | {"scale": torch.randn(())}).items()}


def load(source: Path, name: str, kind: Kind, config: TensorParallelConfig) -> Tensor | None:
    with open_checkpoint(source) as tensors:
        return shard_parameter(tensors[name], kind, config, name=name)


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
        shard = load(path, "w", kind, CONFIG)
        before = shard.clone()
        size = path.stat().st_size
        with open(path, "r+b") as file:
            file.seek(size - 48 * 40 * 4)
            file.write(bytes(48 * 40 * 4))
        assert torch.equal(shard, before) and before.any()
        save_file(model, path)


# -- only the shard is read


MIB = 1 << 20


def pages_in_memory(path: Path) -> set[int]:
    """Numbers of the file's pages that the system has in its page cache."""
    size = path.stat().st_size
    flags, rights = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, flags, rights) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(start))
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(address, ctypes.c_size_t(size), pages)
        del start
        assert not failed, os.strerror(ctypes.get_errno())
    return {number for number, page in enumerate(pages) if page & 1}


def drop_from_memory(path: Path) -> None:
    """Flushes a file and evicts it from the page cache, so that pages found later were read.

    Skips the test where eviction is impossible, as on a file system in memory.
    """
    with open(path, "r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if pages_in_memory(path):
        pytest.skip("files cannot be taken from the page cache of this file system")


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("q", (4096, 512)),
        ("column", (4100, 512)),
        ("qkv", (4096 + 2 * 1024, 512)),
        ("grouped_qkv", (4096 + 2 * 1024, 512)),
        ("gate_up", (2 * 4096, 512)),
        ("row", (4, MIB)),  # a piece of each long row
        ("o", (512, 4096)),  # rows of two pages; a rank needs one or both
    ],
)
def test_only_the_pages_of_the_shard_are_read(
    kind: Kind, shape: tuple[int, int], tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    config = TensorParallelConfig(3, 8, 512, 4096, num_heads=32, num_kv_heads=8, headdim=128)
    w = torch.arange(shape[0] * shape[1]).view(shape)
    indices = shard_parameter(w, kind, config).flatten()
    w = w.to(torch.int16).view(torch.bfloat16)
    others = {"before": torch.zeros(MIB), "z": torch.zeros(MIB)}
    # A header as long as a large model's.
    save_file({"w": w, **others}, path, metadata={"note": "x" * 300_000})

    drop_from_memory(path)
    shard = load(path, "w", kind, config)
    read = pages_in_memory(path)

    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    start = header + json.loads(content[8:header])["w"]["data_offsets"][0]
    of_shard = {*((start + indices * 2) // mmap.PAGESIZE).unique().tolist()}
    needed = of_shard | {start // mmap.PAGESIZE, *range(-(-header // mmap.PAGESIZE))}
    assert needed <= read
    # Extra pages are less than one usual read-ahead request, 128 KiB.
    assert len(read - needed) * mmap.PAGESIZE < 128 * 1024
    if kind != "o":
        assert len(of_shard) * mmap.PAGESIZE <= shard.nbytes + 8 * mmap.PAGESIZE < w.nbytes // 4
    # The measure works: the whole file, now read, is in the cache.
    assert len(pages_in_memory(path)) * mmap.PAGESIZE >= w.nbytes
    assert same_bits(shard, shard_parameter(w, kind, config))


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


def damaged(content: bytes, random: Random) -> bytes:
    """Damages a file once: cuts it off, or changes a bit, a byte or the length of its header."""
    header = 8 + int.from_bytes(content[:8], "little")
    at = random.randrange(header)
    before, after, byte = content[:at], content[at + 1 :], random.randbytes(1)
    flipped = bytes([content[at] ^ 1 << random.randrange(8)])
    length = random.choice([0, header, 2**63, 2**64 - 1]).to_bytes(8, "little")
    cut_off = content[: random.randrange(len(content))]
    kinds = [before + after, before + byte + content[at:], before + byte + after]
    return random.choice([cut_off, *kinds, before + flipped + after, length + content[8:]])


def test_a_damaged_file_is_named_or_read_as_safetensors_reads_it(tmp_path: Path) -> None:
    path, random = tmp_path / "model.safetensors", Random(0)
    model = {"a": torch.randn(6, 5), "b": torch.randn(7).bfloat16(), "c": torch.arange(3)}
    save_file(model, path, metadata={"format": "pt"})
    whole = path.read_bytes()
    refused, num_open = 0, len(os.listdir("/proc/self/fd"))
    for _ in range(400):
        path.write_bytes(damaged(whole, random))
        try:
            got = load_tp_state_dict(path, CONFIG, {}, otherwise="replicated")
        except ValueError as error:
            assert f"{path} is not a file of" in str(error) and "damaged" in str(error)
            assert len(os.listdir("/proc/self/fd")) == num_open
            refused += 1
            continue
        # No reader can detect a changed letter in a name, or another dtype of equal size.
        with safetensors.safe_open(path, "pt") as file:
            assert {*got} == {*file.keys()}
            for name, x in got.items():
                expected = file.get_tensor(name)
                assert x.dtype == expected.dtype and x.shape == expected.shape
                assert same_bits(x, expected)
    assert 300 < refused < 400


def index_of(file: object) -> Callable[[Path], Path]:
    return index(json.dumps({"weight_map": {"w": file}}))


@pytest.mark.parametrize(
    ("make", "error", "facts"),
    [
        (lambda folder: folder, FileNotFoundError, "safetensors"),
        (lambda folder: folder / "no.safetensors", FileNotFoundError, "no.safetensors"),
        (lambda folder: folder / "no.json", FileNotFoundError, "no.json"),
        (lambda folder: index("{}")(folder).parent, ValueError, "2 .*model.safetensors.index.json"),
        (lost_file, FileNotFoundError, "00001-of-00002.safetensors.*index.json"),
        (lambda folder: folder / "model.bin", ValueError, "model.bin"),
        (index("[]"), ValueError, "i.json .*weight_map"),
        (index('{"weight_map": {}}'), ValueError, "i.json .*weight_map"),
        (index("{"), ValueError, "i.json"),
        (index('{"\xff": 0}'), ValueError, "i.json"),
        (index("[" * 20_000), ValueError, "i.json"),
        (index_of(1), ValueError, "i.json .*1"),
        (index_of("w.bin"), ValueError, "'w.bin'"),
        (index_of("../w.safetensors"), ValueError, "'../w.safetensors'.* beside"),
        (index_of("/w.safetensors"), ValueError, "'/w.safetensors'.* beside"),
        (index_of("sub/w.safetensors"), ValueError, "'sub/w.safetensors'.* beside"),
        (index_of(["w"]), ValueError, r"\['w'\]"),
        (index_of("\0.safetensors"), ValueError, "i.json"),
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
        load(tmp_path, "w", "q", CONFIG)
