"""`ring-attn calibrate` writes a cluster file that can be read back."""

import json
from pathlib import Path

import pytest

from ring_attn.cli.main import main
from ring_attn.planning.devices import load_cluster


def test_a_calibration_is_written_and_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "machine.json"
    words = "calibrate --quick --world-size 2 --heads 2 --head-dim 16"
    monkeypatch.setattr("sys.argv", ["ring-attn", *words.split(), "--json", str(path)])
    assert main() == 0
    assert "all_gather" in capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["command"] == f"ring-attn {words}"
    kinds = {sample.get("kind", sample.get("op")) for sample in report["samples"]}
    links = {"shift", "all_gather", "reduce_scatter", "all_to_all"}
    assert kinds == {"full", "causal", "window"} | links
    cluster = load_cluster(path)
    assert cluster.node_size == 2
    assert set(cluster.collectives) == {"all_gather", "reduce_scatter", "all_to_all"}
    device = cluster.device
    rates = [device.rate(backward=b, window=w) for b in (False, True) for w in (False, True)]
    measured = (cluster.inside, *cluster.collectives.values())
    assert all(rate.flops > 1e6 for rate in rates)
    assert all(link.bandwidth > 1e4 and link.latency >= 0 for link in measured)
