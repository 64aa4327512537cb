"""`bench.decode` on a CPU, in the interpreter: timed implementations, and wrong results."""

from typing import Any

import pytest
import torch

from ring_attn.bench import decode
from tests.integration.commands import options_of

TINY = "--device cpu --backend triton --heads 2/1 --seqlen 97,300 --iters 2 --quiet"
RUN = f"bench decode {TINY}"


def test_every_implementation_is_timed_and_checked(report_of: Any) -> None:
    report = report_of(RUN)
    assert report["failures"] == []
    rows = {(row["impl"], row["seqlen"]): row for row in report["rows"]}
    names = ("parts", "whole", "torch-flash")
    assert set(report["unavailable"]) == {"cudnn"}
    assert set(rows) == {(name, seqlen) for name in names for seqlen in (97, 300)}
    for (_, seqlen), row in rows.items():
        assert 0.0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert row["max_ratio"] <= 1.0 and row["share"] is None
        nbytes = 2 * seqlen * 16 * 4  # K and V of one head of dim 16, float32
        assert row["rate"] == pytest.approx(nbytes / row["median_ms"] / 1e6)


@pytest.mark.slow
def test_a_backend_without_parts(report_of: Any) -> None:
    report = report_of(f"{RUN} --backend aten")
    notes = {row["impl"]: row["note"] for row in report["rows"]}
    assert notes["whole"] == notes["torch-flash"] == "" and "aten has no parts" in notes["parts"]


def test_on_a_gpu_there_is_more_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen, quick = (
        decode.setting_of(options_of("bench decode", words)) for words in ("", "--quick")
    )
    assert (chosen.seqlens[-1], chosen.batches, chosen.backend) == (1 << 20, (1, 8), "triton")
    assert (quick.seqlens, quick.batches) == ((8192,), (1,))
