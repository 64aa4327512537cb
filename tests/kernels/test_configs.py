"""The tables of configs: what may stand in them, and what is searched, in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ring_attn.kernels import configs
from ring_attn.kernels.configs import Config

HEADDIMS = (64, 128, 256)
KINDS = ("fwd", "fwd_whole", "dkdv", "dkdv_whole", "dkdv_softcap", "dq", "dq_whole", "dq_softcap")

# Columns of the kernel's blocks, on whose size the order of its sums depends.
COLUMNS = {"fwd": "BLOCK_N", "dq": "BLOCK_N", "dkdv": "BLOCK_M"}
ROWS = {"fwd": "BLOCK_M", "dq": "BLOCK_M", "dkdv": "BLOCK_N"}


def base(kind: str) -> str:
    return kind.partition("_")[0]


@pytest.mark.parametrize("arch", configs.ARCHITECTURES)
@pytest.mark.parametrize("kernel", COLUMNS)
def test_whole_steps_have_the_columns_of_any_other(arch: str, kernel: str) -> None:
    """Or a ring, most of whose steps are whole, would not add up as one rank does."""
    for headdim in HEADDIMS:
        for dtype in (torch.bfloat16, torch.float32):
            kinds = (kernel, f"{kernel}_whole")
            found = [configs.frozen(kind, arch, headdim, dtype) for kind in kinds]
            assert len({getattr(config, COLUMNS[kernel]) for config in found}) == 1


def test_specialised_candidates_have_rows_for_two_groups() -> None:
    """Of fewer rows than 128 the compiler gives all to both groups, and the work is done twice."""
    found = [(kind, c) for (_, kind, _), many in configs.WHOLE_CANDIDATES.items() for c in many]
    assert {kind for kind, _ in found} == {"fwd_whole", "dkdv_whole", "dq_whole"}
    for kind, config in found:
        assert config.warp_specialize and config.num_warps == 4
        assert getattr(config, ROWS[base(kind)]) == 128


def test_a_specialised_program_does_one_task() -> None:
    with pytest.raises(ValueError, match="does one task, got programs_per_sm=2"):
        Config(128, 128, 4, 2, warp_specialize=True, programs_per_sm=2)


def test_four_warps_stand_for_all_that_have_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "TABLE", dict(configs.TABLE))

    def warps() -> dict[tuple[str, int], int]:
        return {
            (kind, headdim): configs.frozen(kind, "sm_90", headdim, torch.bfloat16).num_warps
            for kind in KINDS
            for headdim in HEADDIMS
        }

    assert max(warps().values()) > 4
    configs.TABLE.update(configs.FOUR_WARPS)
    assert set(warps().values()) == {4}
    assert set(configs.FOUR_WARPS) <= set(configs.TABLE), "each in the place of another"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("headdim", HEADDIMS)
def test_what_is_searched_on_hopper(kind: str, headdim: int) -> None:
    args = ("sm_90", headdim, torch.bfloat16)
    found = configs.search_space(kind, *args)
    assert found[: len(configs.candidates(kind, *args))] == configs.candidates(kind, *args)
    assert len({replace(config, note="") for config in found}) == len(found) <= 16
    # Tiles first, then the orders of their tasks.
    plain = [not (config.l2_bytes or config.programs_per_sm) for config in found]
    assert plain == sorted(plain, reverse=True)
    orders = {(config.l2_bytes > 0, config.programs_per_sm > 0) for config in found}
    assert len(orders) == 4
    for config in found:
        places = {0} if config.warp_specialize else {0, 8 // config.num_warps}
        assert config.programs_per_sm in places
        assert config.l2_bytes in (0, configs.L2_BYTES)
    four = configs.FOUR_WARPS.get(("sm_90", base(kind), headdim))
    assert four is not None, "one that cannot race"
    assert replace(four, note="") in {replace(config, note="") for config in found}


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
