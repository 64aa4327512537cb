"""The tables of configs: what may stand in them, and what is searched, in which order."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from ring_attn.backends.triton import TritonBackend
from ring_attn.kernels import configs

HEADDIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
KINDS = ("fwd", "fwd_whole", "dkdv", "dkdv_whole", "dkdv_softcap", "dq", "dq_whole", "dq_softcap")

# Columns of the kernel's blocks, on whose size the order of its sums depends.
COLUMNS = {"fwd": "BLOCK_N", "dq": "BLOCK_N", "dkdv": "BLOCK_M"}


@pytest.mark.parametrize("arch", configs.ARCHITECTURES)
@pytest.mark.parametrize("kernel", COLUMNS)
def test_whole_steps_have_the_columns_of_any_other(arch: str, kernel: str) -> None:
    """Or a ring, most of whose steps are whole, would not add up as one rank does."""
    for headdim, dtype in product((16, 80, *HEADDIMS), DTYPES):
        kinds = (kernel, f"{kernel}_whole")
        found = [configs.frozen(kind, arch, headdim, dtype) for kind in kinds]
        assert len({getattr(config, COLUMNS[kernel]) for config in found}) == 1


@pytest.mark.parametrize("arch", [*configs.ARCHITECTURES, "interpreter"])
@pytest.mark.parametrize("kind", ["fwd", "fwd_whole", "dkdv", "dq", "delta"])
def test_blocks_divide_the_unit_of_the_bits(kind: str, arch: str) -> None:
    unit = TritonBackend.bits_unit
    for headdim, dtype in product((16, 80, *HEADDIMS), DTYPES):
        config = configs.frozen(kind, arch, headdim, dtype)
        sizes = [config.BLOCK_M] if kind == "delta" else [config.BLOCK_M, config.BLOCK_N]
        assert all(16 <= size <= unit and unit % size == 0 for size in sizes), config


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("headdim", HEADDIMS)
def test_what_is_searched_on_hopper(kind: str, headdim: int) -> None:
    args = ("sm_90", headdim, torch.bfloat16)
    found = configs.search_space(kind, *args)
    assert found[0] == configs.frozen(kind, *args)
    assert len({replace(config, note="") for config in found}) == len(found) <= 16
    # Tiles first, then the orders of their tasks.
    plain = [not (config.l2_bytes or config.programs_per_sm) for config in found]
    assert plain == sorted(plain, reverse=True)
    orders = {(config.l2_bytes > 0, config.programs_per_sm > 0) for config in found}
    assert len(orders) == 4
    for config in found:
        assert config.programs_per_sm in {0, 8 // config.num_warps}
        assert config.l2_bytes in (0, configs.L2_BYTES)


def test_what_is_searched_elsewhere() -> None:
    for arch in configs.ARCHITECTURES:
        found = configs.search_space("dkdv_whole", arch, 80, torch.float16)
        assert found[0] == configs.frozen("dkdv", arch, 128, torch.float16)
        assert len(found) > 5
        assert arch == "sm_90" or not any(x.l2_bytes or x.programs_per_sm for x in found)
        for kind, dtype in (("fwd", torch.float32), ("delta", torch.float16)):
            alone = configs.search_space(kind, arch, 128, dtype)
            assert alone == (configs.frozen(kind, arch, 128, dtype),)
    assert configs.search_space("dq", "interpreter", 128, torch.float16) == (configs.INTERPRETER,)
