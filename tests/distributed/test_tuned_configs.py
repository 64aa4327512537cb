"""RING_ATTN_CONFIGS over gloo: a file shared by all ranks is used; ranks that differ are named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ring_attn import ring_attention
from ring_attn.testing import Case, Heads, RankResult, put_together, run_rank
from ring_attn.transport.ranks.configs import CONFIGS_VARIABLE
from tests.refusals import refused

CASE = Case("causal", backend="triton", heads=Heads(2, 1, 16, 16), seqlen=90, batch=1)


@contextmanager
def configs(path: Path | None) -> Iterator[None]:
    """Gives this rank that file, and makes it choose backends anew."""
    from ring_attn.backends import choose_backend

    choose_backend.cache_clear()
    with mock.patch.dict("os.environ", {} if path is None else {CONFIGS_VARIABLE: str(path)}):
        yield
    choose_backend.cache_clear()


def file_of(folder: Path, block: int) -> Path:
    from ring_attn.kernels import tuned
    from ring_attn.kernels.configs import SEARCHED, Config

    config = next(Config(*sizes) for sizes in SEARCHED["fwd"] if sizes[1] == block)
    chosen = dict.fromkeys(("fwd", "fwd_whole"), config)
    found = tuned.section(torch.device("cpu"), 16, torch.float32, chosen)
    path = folder / f"{block}.json"
    path.write_text(json.dumps({"configs": found}))
    return path


def run_in_configs(path: Path) -> tuple[set[tuple[str, int]], RankResult]:
    from ring_attn.backends.triton import TritonBackend

    used, choose = set[tuple[str, int]](), TritonBackend.config_of

    def noted(self: TritonBackend, kind: str, *args: Any) -> Any:
        config = choose(self, kind, *args)
        used.add((kind, config.BLOCK_N))
        return config

    with configs(path), mock.patch.object(TritonBackend, "config_of", noted):
        return used, run_rank(CASE)


def test_all_ranks_use_the_file(ranks: Any, tmp_path: Path, one_thread: None) -> None:
    found = ranks(2).run(run_in_configs, file_of(tmp_path, 32))
    for used, _ in found:
        blocks = {kind.partition("_")[0]: block for kind, block in used}
        assert blocks == {"fwd": 32, "dq": 64, "dkdv": 64} and len(used) >= 3
    assert not put_together(CASE, [results for _, results in found]).failures


def with_another_file(paths: list[Path | None], words: str) -> None:
    x, group = torch.randn(1, 8, 2, 16), dist.new_group()
    with (
        configs(paths[dist.get_rank()]),
        mock.patch("ring_attn.machines.run.execute", side_effect=AssertionError),
        refused(RuntimeError, words),
    ):
        ring_attention(x, x, x, group=group)


def test_ranks_with_other_files_are_named(ranks: Any, tmp_path: Path) -> None:
    files = [file_of(tmp_path, block) for block in (32, 128)]
    a, b = (hashlib.sha256(x.read_bytes()).hexdigest()[:16] for x in files)
    named = f"RING_ATTN_CONFIGS|rank 1 has {b}|rank 2 has none|has {a}"
    ranks(3).run(with_another_file, [*files, None], named)
    gone = [files[0], files[0], tmp_path / "gone.json"]
    ranks(3).run(with_another_file, gone, "RING_ATTN_CONFIGS|rank 2 has unreadable|the other 2")
