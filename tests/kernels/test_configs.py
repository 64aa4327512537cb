"""The tables of configs: their limits, the search space, and what a launch makes of a config."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ring_attn.backends import choose_backend
from ring_attn.backends.triton import TritonBackend
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.kernels import configs, tasks, tuned
from ring_attn.kernels.configs import Config
from ring_attn.kernels.tasks import Schedule, step_schedule
from tests.bounds import whole
from tests.kernels.calls import DEVICE, Step, blocks

HEADDIMS = (16, 64, 80, 128, 256)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
KINDS = ("fwd", "fwd_whole", "dkdv", "dkdv_whole", "dkdv_softcap", "dq", "dq_whole", "dq_softcap")


@pytest.mark.parametrize("arch", [*configs.ARCHITECTURES, "interpreter"])
def test_blocks_keep_the_order_of_sums(arch: str) -> None:
    """Blocks divide the unit of bits. Whole steps, most of a ring's, fold blocks as others do."""
    unit = TritonBackend.bits_unit
    for headdim, dtype, kind in product(HEADDIMS, DTYPES, (*KINDS, "delta")):
        config = configs.frozen(kind, arch, headdim, dtype)
        sizes = [config.BLOCK_M] if kind == "delta" else [config.BLOCK_M, config.BLOCK_N]
        assert all(16 <= size <= unit and unit % size == 0 for size in sizes), config
        kernel = kind.removesuffix("_whole")
        if kernel in configs.FOLDED:
            other = configs.frozen(kernel, arch, headdim, dtype)
            assert len({getattr(x, configs.FOLDED[kernel]) for x in (config, other)}) == 1


def test_kernels_for_few_programs_or_in_gluon_have_the_same_columns() -> None:
    """Equal columns give equal bits (test_hopper.py)."""
    for headdim, (config, *_) in configs.GLUON.items():
        assert config.BLOCK_N == configs.frozen("fwd", "sm_90", headdim, torch.float16).BLOCK_N
    for (arch, headdim), few in configs.FEW_PROGRAMS.items():
        config = configs.frozen("dkdv", arch, headdim, torch.bfloat16)
        assert configs.filling(config, 131, 132, few) == few != config
        assert few.BLOCK_M == config.BLOCK_M and few.num_warps <= config.num_warps
        assert few.BLOCK_N * 2 == config.BLOCK_N
        for programs, other in ((132, few), (1, None)):
            assert configs.filling(config, programs, 132, other) == config
    config = configs.frozen("dkdv_softcap", "sm_90", 128, torch.bfloat16)
    assert configs.filling(config, 1, 132, configs.FEW_PROGRAMS["sm_90", 64]) == config


# -- the file of `ring-attn tune`

CPU, WIDE = torch.device("cpu"), Config(64, 128, 8, 2)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`written(chosen, **changes)` makes a file, and RING_ATTN_CONFIGS names it."""

    def write(chosen: dict[str, Config], **changes: Any) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        found = tuned.section(CPU, 16, torch.float32, chosen) | changes
        path.write_text(json.dumps({"rows": [], "configs": found}))
        monkeypatch.setenv(tuned.VARIABLE, str(path))
        return path

    return write


def test_a_file_takes_the_place_of_the_frozen_configs(written: Callable[..., Path]) -> None:
    x = torch.empty(1, 4, 2, 16)
    assert tuned.select("dq", x, 16) == configs.INTERPRETER
    chosen = {"dq": WIDE, "dq_whole": Config(128, 128, 8, 2), "decode": Config(16, 32, 2, 4)}
    written(chosen)
    tuned.check_file(CPU)
    assert {kind: tuned.select(kind, x, 16) for kind in chosen} == chosen
    assert tuned.select("fwd", x, 16) == tuned.select("dq_softcap", x, 16) == configs.INTERPRETER
    assert tuned.select("dq", torch.empty(1, 4, 2, 80), 80) == configs.INTERPRETER  # another bucket
    # Of float32 a file names nothing on a GPU.
    assert tuned.stays_frozen(torch.device("cuda"), torch.float32)
    assert not tuned.stays_frozen(torch.device("cuda"), torch.bfloat16)
    backend: Any = TritonBackend()
    assert backend.config_of("dq", x, 16) == WIDE
    assert TritonBackend({"dq": configs.DELTA}).config_of("dq", x, 16) == configs.DELTA


def test_a_forward_in_gluon_is_used_where_the_file_has_it(
    written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.empty(1, 4, 2, 64, dtype=torch.bfloat16)
    assert not tuned.takes_gluon(x, 64)
    monkeypatch.setattr(configs, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(tuned, "exact_architecture", lambda device: "interpreter")
    for taken in (x, torch.empty(1, 4, 2, 128, dtype=torch.float16), x[1:], x[:, ::2, :1]):
        assert tuned.takes_gluon(taken, 64)
    for other in (x.float(), x[..., :48]):
        assert not tuned.takes_gluon(other, 64)
    assert tuned.select("gluon", x, 64) == configs.GLUON[64][0]
    for gluon in configs.GLUON[64]:
        written({"gluon": gluon}, architecture="interpreter")
        assert tuned.takes_gluon(x, 64) and tuned.select("gluon", x, 64) == gluon
    written({"dq": WIDE, "dq_whole": WIDE}, architecture="interpreter")
    assert tuned.takes_gluon(x, 64)
    frozen = configs.frozen("fwd", "sm_90", 64, torch.float16)
    written({"fwd": frozen, "fwd_whole": frozen}, architecture="interpreter")
    monkeypatch.setattr(tuned.configs, "frozen", lambda *_: frozen)
    assert not tuned.takes_gluon(x, 64)


def test_a_file_of_portable_gradients_rules_out_one_pass(
    written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, empty = AttentionSpec("cuda", torch.bfloat16, 1, 8, 8, 64, 64), torch.empty
    monkeypatch.setattr("ring_attn.backends.triton.architecture", lambda: "sm_90")
    monkeypatch.setattr(configs, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(tuned, "exact_architecture", lambda device: "interpreter")
    monkeypatch.setattr(torch, "empty", lambda *sizes, device, dtype: empty(*sizes, dtype=dtype))
    assert TritonBackend().in_one_pass(spec)
    assert not TritonBackend().in_one_pass(replace(spec, nheads_kv=2))
    written({"dq": WIDE, "dq_whole": WIDE}, architecture="interpreter")
    assert not TritonBackend().in_one_pass(spec)


ENTRY = {"kind": "dq", "headdim": 64, "BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": 2}, "another version, 2, here it is 1"),
        ({"architecture": "sm_90"}, "another architecture, 'sm_90', here it is 'interpreter'"),
        ({"triton": "3.0.0"}, "another triton, '3.0.0'"),
        ({"table": {}}, "no file of ring-attn tune"),
        ({"table": [ENTRY | {"kind": "dp"}]}, "broken entry.*kind must be of"),
        ({"table": [ENTRY | {"headdim": 80}]}, "broken entry.*headdim"),
        ({"table": [ENTRY | {"BLOCK_M": 48}]}, r"BLOCK_M must be of \[64, 128\]"),
        ({"table": [ENTRY | {"num_stages": "1"}]}, "num_stages must be of"),
        ({"table": [ENTRY | {"num_stages": 3}]}, "broken entry.*dq has the configs"),
        ({"table": [ENTRY | {"kind": "gluon"}]}, r"broken entry.*BLOCK_M must be of \[128, 192\]"),
        ({"table": [ENTRY | {"colour": 1}]}, "broken entry.*colour"),
        ({"table": ["dq"]}, "broken entry"),
        ({"table": [ENTRY | {"programs_per_sm": 1}]}, r"programs_per_sm must be of \[0\]"),
        ({"table": [ENTRY | {"BLOCK_N": 128}]}, "several lengths.*'dq': 128, 'dq_whole': 64"),
    ],
)
def test_files_that_are_refused(
    written: Callable[..., Path], changes: dict[str, Any], text: str
) -> None:
    path = written({}, **changes)
    with pytest.raises(ValueError, match=text) as caught:
        tuned.check_file(CPU)
    assert str(path) in str(caught.value) and "run ring-attn tune" in str(caught.value)


def test_what_is_no_file_is_refused_before_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: Callable[..., Path]
) -> None:
    """Choosing the backend fails, rather than falling back to another backend."""
    spec = AttentionSpec("cpu", torch.float32, 1, 2, 2, 16, 16)
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    unreadable = "cannot be read"
    for name, reason in (
        ("text.json", unreadable),
        ("", unreadable),
        ("none.json", unreadable),
        ("list.json", "no file of ring-attn tune"),
    ):
        choose_backend.cache_clear()
        monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / name))
        with pytest.raises(ValueError, match=f"{tmp_path / name}.* {reason}"):
            choose_backend(spec, "triton")
    written({})
    assert choose_backend(spec, "triton").name == "triton"


def test_columns_of_architectures() -> None:
    assert [configs.column(arch) for arch in ("sm_80", "sm_89", "sm_90", "sm_103", "sm_120")] == [
        "sm_80",
        "sm_86",
        "sm_90",
        "sm_100",
        "sm_86",
    ]
    assert [configs.column(arch) for arch in ("interpreter", "gfx942")] == ["interpreter", "gfx942"]


# -- which heads run together, and how many programs a persistent grid has

MASK = Mask(40, 97)


def schedule(
    tiles: Step, num_heads: int, heads_per_kv: int, *, spare_sms: int = 0, **changes: int
) -> Schedule:
    config, device = replace(blocks(32, 32), **changes), torch.device(DEVICE)
    # 100 bytes of a column.
    q = torch.empty(1, 1, num_heads, 25, dtype=torch.float16, device=device)
    k = torch.empty(1, 1, num_heads // heads_per_kv, 25, dtype=torch.float16, device=device)
    table = TritonBackend().step_table(tiles, config, device)
    return step_schedule(q, k, k, table, config, spare_sms=spare_sms)


@pytest.mark.parametrize(
    ("kilobytes", "num_heads", "heads_per_kv", "together"),
    [
        (0, 32, 4, 32),  # no grouping requested
        (1, 32, 4, 4),  # no kv head fits: one kv head, with all its query heads
        (9.7, 32, 4, 4),
        (19.4, 32, 4, 8),
        (30, 32, 4, 8),  # 3 of 8 kv heads would leave groups of 3, 3 and 2
        (1000, 32, 4, 32),
        (67, 7, 1, 1),
        (68, 7, 1, 7),
    ],
)
def test_a_group_is_what_fits(
    kilobytes: float, num_heads: int, heads_per_kv: int, together: int
) -> None:
    got = schedule(whole(MASK), num_heads, heads_per_kv, l2_bytes=int(kilobytes * 1000))
    assert got == (2 * num_heads, 2, num_heads, together)
    # Without columns the schedule avoids a division by zero.
    assert schedule((), 4, 2, l2_bytes=1000, programs_per_sm=1) == (0, 0, 4, 4)


def test_a_persistent_grid_leaves_multiprocessors_to_copies_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "num_sms", lambda device: 132)
    mask, sizes = Mask(8192, 8192), []
    for spare in (0, 8, 16, 100):
        one = schedule(whole(mask), 32, 4, spare_sms=spare, programs_per_sm=1)
        sizes.append(one.num_programs)
    assert sizes == [132, 124, 116, 66]
