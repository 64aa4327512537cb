"""Speeds of devices and of the links between them; a `Cluster` combines both.

    time of a tile     launch + (area + row_columns * rows + edge_columns * edge) * FLOP / rate
                       + bytes of the state / memory bandwidth
    time of a message  latency + bytes / bandwidth
    nothing begins     before the host has launched it

`backends.rates` has the rates and explains their columns, `planning.devices` built-in clusters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from types import NoneType
from typing import TypeVar

import torch

from ring_attn.backends.rates import Rate
from ring_attn.transport.options import MAX_CTAS
from ring_attn.values.checks import (
    check_cost,
    check_flag,
    check_size,
    check_speed,
    check_types,
)


@dataclass(frozen=True)
class Device:
    """A rank's processor.

    Attributes:
        forward, backward: rates of attention.
        memory_bandwidth: bytes/s of passes that copy or add.
        memory_bytes: size of its memory; 0 if unknown.
        window_forward, window_backward: rates with a window, if measured: a backend may split its
            tiles into strips.
        architecture: key of `backends.rates`, for each backend's rates; "" uses only those above.
        speed: share of the rates of `backends.rates` that this device has.
        multiprocessors: their number; 0 if unknown, and then no kernel is modelled as leaving some
            of them to copies.
        source: where the rates come from: "measured", "published: ..", "estimate: .." or "given".
    """

    name: str
    forward: Rate
    backward: Rate
    memory_bandwidth: float
    memory_bytes: float = 0.0
    window_forward: Rate | None = None
    window_backward: Rate | None = None
    architecture: str = ""
    source: str = "given"
    speed: float = 1.0
    multiprocessors: int = 0

    def __post_init__(self) -> None:
        check_types(self, str, "name", "architecture", "source")
        check_types(self, Rate, "forward", "backward")
        check_types(self, (Rate, NoneType), "window_forward", "window_backward")
        check_speed(self, "memory_bandwidth", "speed")
        check_size(self, "memory_bytes")
        check_types(self, int, "multiprocessors")
        check_cost(self, "multiprocessors")

    def rate(self, *, backward: bool, window: bool = False) -> Rate:
        usual = self.backward if backward else self.forward
        windowed = self.window_backward if backward else self.window_forward
        return windowed if window and windowed is not None else usual


@dataclass(frozen=True)
class Link:
    """Connection between two ranks, in one direction.

    The latency is in seconds, of an empty message; the bandwidth is attained bytes/s of large ones.
    """

    name: str
    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        check_types(self, str, "name")
        check_cost(self, "latency")
        check_speed(self, "bandwidth")


@dataclass(frozen=True)
class Host:
    """Seconds that a rank's Python takes for each thing that it issues; all are 0 for CPU ranks.

    Attributes:
        launch: to launch a kernel over a step's tiles; a backward launches two.
        copy: to launch a pass over memory.
        post: to post an exchange.
        wait: to make the device wait for an exchange.
    """

    launch: float = 0.0
    copy: float = 0.0
    post: float = 0.0
    wait: float = 0.0

    def __post_init__(self) -> None:
        check_cost(self, "launch", "copy", "post", "wait")


@dataclass(frozen=True)
class Cluster:
    """Nodes of devices.

    Attributes:
        device: device of each rank.
        node_size: number of consecutive ranks that form a node.
        inside: link of a device to the others of its node, in each direction.
        between: the network port of each device, in each direction.
        off_rail_latency: seconds that a message between nodes takes longer if its devices have
            different places in their nodes. Switches join the ports of one place (a rail); others
            are reached through another device of the node, or through further switches.
        slowdown: the share of its speed that compute loses during a transfer: to the SMs, on CPUs
            the cores, that copies take. With `channel_bandwidth`, copies on `max_ctas` channels.
        collectives: measured collectives by name, with all ranks taking part; bytes are those that
            leave a rank. The times of all others follow from the links.
        host: host times of each rank.
        channel_bandwidth: bytes/s of one of NCCL's channels, of which a message has as many as
            `transport.nccl_channels` says; None if the links have their bandwidth for any message,
            as measured links.
        max_ctas: most channels of a communicator, `TransportOptions.max_ctas`.
        over_pcie: whether PCIe joins the devices of a node, not NVLink: NCCL then has another rule.
        each: number of ranks for which a device stands, see `merged`.
        stream_latency: seconds between the end of an operator and the start of the next on another
            stream that the links' latencies lack (those of a small send and receive include them);
            None is a device without streams, whose exchanges start when they are posted.
    """

    device: Device
    node_size: int
    inside: Link
    between: Link
    slowdown: float = 0.0
    collectives: Mapping[str, Link] = field(default_factory=dict)
    host: Host = field(default_factory=Host)
    stream_latency: float | None = None
    channel_bandwidth: float | None = None
    max_ctas: int = MAX_CTAS
    over_pcie: bool = False
    off_rail_latency: float = 0.0
    each: float = 1.0

    def __post_init__(self) -> None:
        check_types(self, Device, "device")
        check_types(self, Link, "inside", "between")
        check_types(self, Host, "host")
        check_types(self, int, "node_size", "max_ctas")
        check_flag("over_pcie", self.over_pcie)
        check_cost(self, "slowdown", "off_rail_latency")
        if self.stream_latency is not None:
            check_cost(self, "stream_latency")
        if self.channel_bandwidth is not None:
            check_speed(self, "channel_bandwidth")
        for operation, link in self.collectives.items():
            if not isinstance(link, Link):
                raise TypeError(f"collectives must be links, got {link!r} for {operation!r}")
        if self.node_size < 1:
            raise ValueError(f"node_size must be at least 1, got {self.node_size}")
        if self.max_ctas < 1:
            raise ValueError(f"max_ctas must be at least 1, got {self.max_ctas}")
        if self.slowdown >= 1.0:
            raise ValueError(f"slowdown must be at least 0 and less than 1, got {self.slowdown}")


def merged(cluster: Cluster, each: float) -> Cluster:
    """Return the cluster of devices that each stand for `each` devices (`planning.scale`)."""

    def rate(one: Rate) -> Rate:
        return Rate(*(each * cost for cost in astuple(one)))

    def later(link: Link) -> Link:
        return replace(link, latency=link.latency * each)

    device, latency = cluster.device, cluster.stream_latency
    window_forward, window_backward = device.window_forward, device.window_backward
    return replace(
        cluster,
        device=replace(
            device,
            forward=rate(device.forward),
            backward=rate(device.backward),
            window_forward=None if window_forward is None else rate(window_forward),
            window_backward=None if window_backward is None else rate(window_backward),
        ),
        inside=later(cluster.inside),
        between=later(cluster.between),
        collectives={name: later(link) for name, link in cluster.collectives.items()},
        host=Host(*(each * seconds for seconds in astuple(cluster.host))),
        stream_latency=None if latency is None else latency * each,
        off_rail_latency=cluster.off_rail_latency * each,
        each=cluster.each * each,
    )


Number = TypeVar("Number", float, torch.Tensor)


def compute_seconds(
    rate: Rate, area: Number, rows: Number, edge: Number, per_pair: float
) -> Number:
    """Return the seconds of tiles, which are 0 for tiles without visible pairs.

    Sizes are numbers, or float64 tensors: `rows` take part, the mask cuts `edge` of them, and
    `per_pair` is the FLOPs of a pair in all heads.

    Example:
        >>> compute_seconds(Rate(1e9, 0.5, 10.0), 990, 1, 0, 10**6)
        1.5
    """
    columns = area + rate.row_columns * rows + rate.edge_columns * edge
    return (rate.launch + columns * per_pair / rate.flops) * (area > 0)
