"""Clusters: of built-in devices and links, of a file, or of this machine.

The figures of the built-in devices are from datasheets and published kernel measurements.
`ring-attn calibrate` measures the machine at hand; `load_cluster` reads its file.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch

from ring_attn.backends.rates import RATES, Rate, rates_of
from ring_attn.core.spec import AttentionSpec
from ring_attn.machines.cluster import Cluster as Cluster  # the type of what this module returns
from ring_attn.machines.cluster import Device, Host, Link
from ring_attn.transport.options import TransportOptions
from ring_attn.values.checks import check_one_of
from ring_attn.values.outside import Json, env_int, regular_file

GB = 1e9

# Names the machine's calibration file, used if no cluster is passed.
CLUSTER_VARIABLE = "RING_ATTN_CLUSTER"

# Number of ranks of a node, set by torchrun.
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"


def _device(
    name: str,
    architecture: str,
    bandwidth: float,
    memory_bytes: float,
    multiprocessors: int,
    speed: float = 1.0,
) -> Device:
    """Return a GPU with the rates of our kernels, times `speed`; `with_backend` replaces them."""
    rates = RATES[architecture]["triton"].scaled_to(speed)
    return Device(
        name=name,
        forward=rates.forward,
        backward=rates.backward,
        memory_bandwidth=bandwidth,
        memory_bytes=memory_bytes,
        architecture=architecture,
        speed=speed,
        multiprocessors=multiprocessors,
        source=rates.source,
    )


# Memories and multiprocessors: NVIDIA's datasheets and white papers. `speed` is the peak of
# bfloat16 products without sparsity in the datasheets, as a share of the device whose rates an
# architecture has: A100 312 TFLOP/s, H100 SXM 989, B200 2250.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _device("A100", "sm_80", 1.6e12, 80 * GB, 108),
        # Ada: our kernels for sm_80 run there.
        _device("L40S", "sm_80", 0.86e12, 48 * GB, 142, speed=362 / 312),
        _device("H100-PCIE", "sm_90", 2.0e12, 80 * GB, 114, speed=756 / 989),
        _device("H100", "sm_90", 2.7e12, 80 * GB, 132),
        # The same processor with faster memory.
        _device("H200", "sm_90", 3.9e12, 141 * GB, 132),
        _device("H20", "sm_90", 4.0e12, 96 * GB, 78, speed=148 / 989),
        _device("GB200-NVL72", "sm_100", 6.4e12, 186 * GB, 148),
        _device("B200", "sm_100", 6.4e12, 180 * GB, 148),
        _device("B300", "sm_100", 6.4e12, 270 * GB, 148),
    )
}

# What torch calls a device, as a pattern -> its name here; the first that is found.
REPORTED_NAMES = {
    r"A100": "A100",
    r"L40S": "L40S",
    r"H100 PCIe": "H100-PCIE",
    r"H100": "H100",
    r"H200": "H200",
    r"H20\b": "H20",
    r"GB200": "GB200-NVL72",
    r"B200": "B200",
    r"B300": "B300",
}

# Attained speed of one direction: 0.9 of the datasheet's. Latencies are of a small NCCL send and
# receive, over PCIe an estimate.
_NVLINK_4 = Link("NVLink 4", 8e-6, 0.9 * 450 * GB)
_NVLINK_5 = Link("NVLink 5", 8e-6, 0.9 * 900 * GB)
INSIDE = {
    "A100": Link("NVLink 3", 8e-6, 0.9 * 300 * GB),
    "L40S": Link("PCIe 4", 12e-6, 0.9 * 32 * GB),
    # Without bridges, which join two devices.
    "H100-PCIE": Link("PCIe 5", 12e-6, 0.9 * 64 * GB),
    "H100": _NVLINK_4,
    "H200": _NVLINK_4,
    "H20": _NVLINK_4,
    "GB200-NVL72": _NVLINK_5,
    "B200": _NVLINK_5,
    "B300": _NVLINK_5,
}
# Devices that NVLink joins, where they are not those of a host: a rack of 18 hosts with 4 each.
NVLINK_DOMAIN = {"GB200-NVL72": 72}
BETWEEN = Link("400 Gb/s", 15e-6, 0.9 * 50 * GB)
# Seconds that a message to another rail takes longer, through NVLink to the device whose port is on
# that rail (NCCL's PXN): an estimate, as NVLink's latency of a step.
OFF_RAIL_LATENCY = 5e-6

# Bytes/s of one of NCCL's channels: an estimate, 20 to 25 GB/s over NVLink.
CHANNEL_BANDWIDTH = 22e9

# Measured with a stub driver (bench/results/NOTES.md), for Python, Triton's launcher and torch's
# operators: 28 us for a forward step (one launch, one wait), 67 us for a backward step (two
# launches, two sums); measured without NCCL and driver: 6 us for a post. Assumed: 25 us for NCCL's
# group of two.
HOST = Host(launch=25e-6, copy=8e-6, post=31e-6, wait=3e-6)


def builtin_cluster(device: str, *, node_size: int | None = None) -> Cluster:
    """Return nodes of a built-in device, and between nodes a port of 400 Gb/s for each device.

    A node has 8 devices, or those that NVLink joins.

    `dataclasses.replace` gives it other links.

    Raises:
        ValueError: an unknown name, or values that `Cluster` refuses.

    Example:
        >>> slow = Link("100 Gb/s", latency=15e-6, bandwidth=11e9)
        >>> replace(builtin_cluster("A100"), between=slow).inside.name
        'NVLink 3'
    """
    check_one_of("device", device, [*DEVICES])
    if node_size is None:
        node_size = NVLINK_DOMAIN.get(device, 8)
    inside = INSIDE[device]
    cluster = Cluster(
        device=DEVICES[device],
        node_size=node_size,
        inside=inside,
        between=BETWEEN,
        host=HOST,
        stream_latency=0.0,
        channel_bandwidth=CHANNEL_BANDWIDTH,
        over_pcie=inside.name.startswith("PCIe"),
        off_rail_latency=OFF_RAIL_LATENCY,
    )
    return with_ctas(cluster, TransportOptions().max_ctas)


def with_ctas(cluster: Cluster, max_ctas: int) -> Cluster:
    """Return the cluster whose exchanges take at most `max_ctas` multiprocessors.

    Compute loses their share of its speed to a transfer: MagiAttention reserves 4 to 8 for them. A
    calibration has measured the loss, with the number that was set then.
    """
    slowdown = cluster.slowdown
    if cluster.channel_bandwidth is not None:
        slowdown = min(max_ctas / cluster.device.multiprocessors, 0.5)
    return replace(cluster, max_ctas=max_ctas, slowdown=slowdown)


def with_backend(
    cluster: Cluster, backend: str, spec: AttentionSpec, kv_rows: int | None = None
) -> Cluster:
    """Return the cluster with the backend's rates for calls of this spec, if any are known.

    `kv_rows` is as for `fills_one_pass`.
    """
    device = cluster.device
    rates = rates_of(device.architecture, backend, spec, kv_rows=kv_rows)
    window = rates_of(device.architecture, backend, spec, window=True, kv_rows=kv_rows)
    if rates is None or window is None:
        return cluster
    rates, window = rates.scaled_to(device.speed), window.scaled_to(device.speed)
    return replace(
        cluster,
        device=replace(
            device,
            forward=rates.forward,
            backward=rates.backward,
            window_forward=window.forward,
            window_backward=window.backward,
            source=rates.source,
        ),
    )


def load_cluster(path: Path | str) -> Cluster:
    """Reads a cluster that `ring-attn calibrate` wrote.

    Raises:
        ValueError: the file is not a calibration.
        OSError: the file cannot be read.
    """
    try:
        content = json.loads(regular_file(path).read_text(encoding="utf-8"))["cluster"]
        # Wrong types raise the errors below.
        device: dict[str, Json] = {
            name: Rate(**value) if value and name.endswith("ward") else value
            for name, value in content["device"].items()
        }
        parts: dict[str, Json] = {
            "device": Device(**device),
            "inside": Link(**content["inside"]),
            "between": Link(**content["between"]),
            "collectives": {op: Link(**link) for op, link in content["collectives"].items()},
            "host": Host(**content["host"]),
        }
        return Cluster(**(content | parts))
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a calibration; write one with `ring-attn calibrate --json {path}` "
            f"({type(error).__name__}: {error})"
        ) from None


def find_cluster(device_type: str | None = None, world_size: int | None = None) -> Cluster:
    """The cluster of this machine: from the file RING_ATTN_CLUSTER, else the built-in one.

    Built-in GPUs are in nodes of LOCAL_WORLD_SIZE (8 without a launcher) with NVLink inside, or in
    racks that NVLink joins (GB200 NVL72), with 400 Gb/s between. The figures for CPUs are rough;
    `ring-attn calibrate` measures them.

    Args:
        device_type: "cuda" or "cpu"; None is "cuda" if torch has a GPU.
        world_size: number of ranks, of a CPU's node without a launcher.

    Raises:
        ValueError: the GPU is not built in, or the file is not a calibration.
        OSError: the file cannot be read.
    """
    path = os.environ.get(CLUSTER_VARIABLE)
    if path:
        try:
            return load_cluster(path)
        except OSError as error:
            raise type(error)(
                error.errno, f"{error.strerror}, named by {CLUSTER_VARIABLE}", path
            ) from None
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    local = env_int(LOCAL_WORLD_SIZE, 0)
    if device_type == "cpu":
        return cpu_cluster(local or world_size or 1)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    for pattern, known in REPORTED_NAMES.items():
        if re.search(pattern, name):
            return builtin_cluster(known, node_size=NVLINK_DOMAIN.get(known) or local or 8)
    raise ValueError(
        f"there is no built-in description of this machine ({name}): pass cluster=, or run "
        f"`ring-attn calibrate --json PATH` and set {CLUSTER_VARIABLE}=PATH"
    )


def node_size_of(global_ranks: Sequence[int], ranks_per_node: int) -> int:
    """The largest n such that each aligned run of n ranks of a group shares a node.

    Nodes have `ranks_per_node` consecutive global ranks.

    Example:
        >>> node_size_of(range(16), 8), node_size_of(range(0, 16, 4), 8), node_size_of([0, 8, 1], 8)
        (8, 2, 1)
    """
    runs = groupby(rank // ranks_per_node for rank in global_ranks)
    return math.gcd(*(len(list(run)) for _, run in runs))


def cpu_cluster(node_size: int = 1) -> Cluster:
    """Ranks of one core each, connected by gloo; the figures are right within a factor of two."""
    # torch's operator on one core with AVX512 (bench/results/NOTES.md): 83 and 77 GFLOP/s.
    forward, backward = Rate(83e9, 1e-4, 30.0, 300.0), Rate(77e9, 1e-4, 60.0, 300.0)
    source = "measured: a core with AVX512"
    core = Device("CPU core", forward, backward, 4e9, source=source)
    return Cluster(core, node_size, Link("gloo", 4e-4, 1.5e9), Link("gloo between", 5e-4, 1.1e9))
