"""Devices and links as values: names, refusals, the cost of a tile, and JSON there and back."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from ring_attn.backends.rates import FA3
from ring_attn.cli.calibrate import TileSample, fit_rate, largest_error
from ring_attn.core.spec import AttentionSpec
from ring_attn.machines.cluster import Cluster, compute_seconds
from ring_attn.planning.devices import (
    DEVICES,
    INSIDE,
    REPORTED_NAMES,
    Rate,
    builtin_cluster,
    find_cluster,
    load_cluster,
    with_backend,
)

# FlashAttention 3 on an H100, bf16, 64:8 heads of 128, TFLOP/s by mask area: 2k to 32k rows.
PUBLISHED = {
    (False, True): (584, 662, 657, 672, 680),
    (True, False): (453, 517, 556, 587, 601),
}


@pytest.mark.parametrize(("backward", "causal"), PUBLISHED)
def test_one_rate_meets_the_published_kernel_at_every_size(backward: bool, causal: bool) -> None:
    rate = FA3.backward if backward else FA3.forward
    per_pair = 64 * 128 * (10 if backward else 4)
    rows = (2048 << torch.arange(5)).double()
    area = rows * (rows + 1) / 2 if causal else rows * rows
    seconds = compute_seconds(rate, area, rows, rows * causal, per_pair)
    found = (area * per_pair / seconds / 1e12).tolist()
    assert found == pytest.approx(PUBLISHED[backward, causal], rel=0.03)


def test_tiles_cost_a_launch_and_rows_and_edges_columns() -> None:
    """An empty tile costs nothing."""
    rate = Rate(10.0, 7.0, row_columns=3.0, edge_columns=5.0)
    assert compute_seconds(rate, 0, 4, 2, 10) == 0
    assert compute_seconds(rate, 100, 4, 2, 10) == 7 + 100 + 3 * 4 + 5 * 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "H300"}, "device must be one of .*got 'H300'"),
        ({"device": "H100", "node_size": 0}, "node_size must be at least 1, got 0"),
    ],
)
def test_what_is_not_built_in_is_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        builtin_cluster(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIE"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H20-3e", "H20"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200-NVL72"),
        ("NVIDIA B300 SXM6 AC", "B300"),
    ],
)
def test_devices_are_found_by_the_names_that_torch_reports(
    reported: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.delenv("RING_ATTN_CLUSTER", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: reported)
    cluster = find_cluster("cuda")
    # A node is what NVLink joins, where hosts are parts of it.
    assert cluster == builtin_cluster(name, node_size=72 if name == "GB200-NVL72" else 4)
    assert {*REPORTED_NAMES.values()} == {*DEVICES} == {*INSIDE}


def test_a_device_has_its_share_of_the_speed_with_every_backend() -> None:
    whole, part = builtin_cluster("H100"), builtin_cluster("H20")
    spec = AttentionSpec("cuda", torch.bfloat16, 1, 32, 8, 128, 128)
    for backend in ("triton", "flash_attn_3"):
        usual, slower = (with_backend(each, backend, spec).device for each in (whole, part))
        assert slower.forward.flops == pytest.approx(usual.forward.flops * 148 / 989)
        assert slower.backward.flops == pytest.approx(usual.backward.flops * 148 / 989)
        assert "datasheets (estimate)" in slower.source


def calibrated() -> Cluster:
    cluster = builtin_cluster("A100", node_size=4)
    device = replace(cluster.device, window_forward=Rate(1.0))
    return replace(cluster, device=device, collectives={"all_gather": cluster.between})


def test_a_calibration_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    for cluster in (calibrated(), replace(calibrated(), stream_latency=None)):
        path.write_text(json.dumps({"cluster": asdict(cluster)}))
        assert load_cluster(path) == cluster


def described(**changes: object) -> str:
    """A calibration as JSON; a change is keyed like "device.forward.flops"."""
    found = json.loads(json.dumps({"cluster": asdict(calibrated())}))
    for path, value in changes.items():
        *parents, last = path.split(".")
        at = found["cluster"]
        for parent in parents:
            at = at[parent]
        at[last] = value
    return json.dumps(found)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "JSONDecodeError"),
        ('{"clusters": {}}', "KeyError"),
        ("[" * 20_000, "RecursionError"),
        (described(**{"device.forward": None}), "forward of a Device must be Rate, got None"),
        (described(**{"device.forward.flops": 0}), "flops of a Rate must be positive, got 0"),
        (described(**{"device.forward.flops": float("nan")}), "flops of a Rate must be positive"),
        (described(**{"between": "slow"}), "TypeError"),
        (described(**{"collectives": []}), "AttributeError"),
        (described(slowdown=1), "slowdown"),
        (described(stream_latency=-1.0), "stream_latency of a Cluster"),
        (described().encode("utf-16"), "UnicodeDecodeError"),
    ],
)
def test_another_file_is_no_calibration(tmp_path: Path, text: str | bytes, says: str) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match="other.json is not a calibration") as raised:
        load_cluster(path)
    assert says in str(raised.value)


def test_a_rate_is_found_again_in_noise() -> None:
    rate, per_pair = Rate(5e10, 2e-4, 40.0, 150.0), 2048
    noise = torch.Generator().manual_seed(0)
    samples = []
    for rows in (512, 1024, 2048, 4096):
        for area, edge in ((rows * rows, 0), (rows * rows // 2, 0), (rows * rows // 2, rows)):
            sample = TileSample(False, "", area, rows, edge, per_pair, 0.0)
            error = 1 + 0.01 * float(torch.randn(1, generator=noise))
            samples.append(replace(sample, seconds=sample.predicted(rate) * error))
    found = fit_rate(samples)
    assert found.flops == pytest.approx(rate.flops, rel=0.03)
    assert largest_error(found, samples) < 0.03
