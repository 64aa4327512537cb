"""Devices and links as values: names, refusals, what a tile costs, and JSON there and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ring_attn.planning.devices import (
    DEVICES,
    LINKS,
    Cluster,
    Device,
    Rate,
    builtin_cluster,
    cluster_from_json,
    compute_seconds,
    load_cluster,
    to_json,
)
from ring_attn.tools.calibrate import MessageSample, TileSample, fit_link, fit_rate, worst_miss

# FlashAttention 3 on an H100, bf16, 64:8 heads of 128, TFLOP/s by mask area: 2k to 32k rows.
FA3 = {
    (False, True): (584, 662, 657, 672, 680),
    (False, False): (672, 677, 673, 686, 702),
    (True, True): (353, 462, 517, 562, 586),
    (True, False): (453, 517, 556, 587, 601),
}


def tflops(rate: Rate, rows: int, *, causal: bool, backward: bool) -> float:
    """Of a square tile of 64 heads of 128."""
    per_pair = 64 * 128 * (10 if backward else 4)
    area = rows * (rows + 1) // 2 if causal else rows * rows
    shape = (torch.tensor(x) for x in (area, rows, rows if causal else 0, per_pair))
    return area * per_pair / float(compute_seconds(rate, *shape)) / 1e12


@pytest.mark.parametrize(("backward", "causal"), FA3)
def test_one_rate_meets_the_published_kernel_at_every_size(backward: bool, causal: bool) -> None:
    device = DEVICES["H100 FA3"]
    rate = device.backward if backward else device.forward
    for index, published in enumerate(FA3[backward, causal]):
        found = tflops(rate, 2048 << index, causal=causal, backward=backward)
        assert found == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize("name", DEVICES)
def test_no_device_is_faster_than_its_peak(name: str) -> None:
    device = DEVICES[name]
    assert 0 < device.backward.flops <= device.forward.flops < device.peak_flops
    assert builtin_cluster(name).inside.bandwidth > builtin_cluster(name).between.bandwidth
    assert device.memory_bandwidth > LINKS["NVLink 5"].bandwidth


def test_a_rank_without_tiles_spends_nothing() -> None:
    area, rows = torch.tensor([0, 100]), torch.tensor([5, 5])
    seconds = compute_seconds(Rate(1e3, launch=1.0), area, rows, rows, torch.tensor([10, 10]))
    assert seconds.tolist() == [0.0, 2.0]


def test_rows_and_edges_cost_columns() -> None:
    one = torch.ones(1, dtype=torch.int64)
    rate = Rate(1.0, 0.0, row_columns=3.0, edge_columns=5.0)
    assert compute_seconds(rate, 10 * one, 2 * one, one, one).item() == 10 + 3 * 2 + 5


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "H300"}, "device must be one of .*got 'H300'"),
        ({"device": "H100", "between": "IB"}, "between must be one of .*got 'IB'"),
        ({"device": "H100", "node_size": 0}, "node_size must be at least 1, got 0"),
        ({"device": "H100", "ports": 9}, "ports must be from 1 to node_size 8, got 9"),
    ],
)
def test_what_is_not_built_in_is_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        builtin_cluster(**options)  # type: ignore[arg-type]


def test_a_slowdown_is_a_share() -> None:
    with pytest.raises(ValueError, match=r"slowdown .* got 1.0"):
        replace(builtin_cluster("H100"), slowdown=1.0)


def calibrated() -> Cluster:
    cluster = builtin_cluster("A100", inside="PCIe 4", node_size=4, ports=2)
    return replace(cluster, collectives={"all_gather": LINKS["PCIe 5"]})


def test_the_nearest_number_of_ranks_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    by_ranks = {n: replace(calibrated(), node_size=n + 1) for n in (1, 4)}
    path.write_text(json.dumps({"clusters": {n: to_json(c) for n, c in by_ranks.items()}}))
    assert load_cluster(path) == by_ranks[4]
    assert load_cluster(path, 2) == by_ranks[1]
    assert load_cluster(path, 3) == by_ranks[4]
    assert cluster_from_json(json.loads(json.dumps(to_json(calibrated())))) == calibrated()


@pytest.mark.parametrize("text", ["{", "[]", '{"clusters": {"1": {}}}', '{"clusters": {}}'])
def test_another_file_is_no_calibration(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a calibration"):
        load_cluster(path)


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
    assert worst_miss(found, samples) < 0.03


def test_no_part_of_a_fit_is_negative() -> None:
    falling = [MessageSample("shift", n, s) for n, s in ((10, 1.0), (1000, 2.0), (10000, 200.0))]
    link = fit_link("shift", falling)
    assert link.latency >= 0
    assert link.bandwidth > 0


def test_windows_have_a_rate_of_their_own() -> None:
    usual, strips = Rate(2.0), Rate(1.0)
    device = Device("made", 0.0, usual, usual, 1.0, window_forward=strips)
    assert device.rate(backward=False) is usual
    assert device.rate(backward=False, window=True) is strips
    assert device.rate(backward=True, window=True) is usual, "one that was not measured"
    cluster = replace(builtin_cluster("H100"), device=device)
    assert cluster_from_json(to_json(cluster)) == cluster
