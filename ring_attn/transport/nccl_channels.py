"""NCCL's rule for the channels of a send and receive: how many copy a message at the same time.

A channel is one CTA that copies; one moves 20 to 25 GB/s over NVLink, an estimate. A communicator
has as many channels per peer as its *slowest* kind of peer allows. So a group with ranks on several
nodes has few channels within a node, too:

    at most 8 CTAs, NCCL 2.28         up to 16 MiB   32 MiB   64 MiB   more
    2 ranks on one node                     4           4        4      8
    4 ranks on one node                     2           2        4      8
    8 ranks on one node                     1           2        4      8
    16 ranks on 2 nodes                     2           2        2      2
    more ranks on several nodes             1           1        1      1
    2 ranks on one node, over PCIe          2           2        2      2

The rule is read from NCCL's sources, 2.26 to 2.30: `ncclTopoGetNchannels`,
`ncclTopoComputeP2pChannels` (src/graph/paths.cc), `scheduleP2pTasksToPlan` and `addP2pToPlan`
(src/enqueue.cc). No GPU has confirmed it here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from ring_attn.torch_private import installed_nccl
from ring_attn.transport.options import MAX_CTAS
from ring_attn.values.outside import env_int

# Operations that NCCL runs side by side on one channel (NCCL_MAX_DEV_WORK_P2P_PER_BATCH).
OPERATIONS_PER_BATCH = 8
# Bytes of a step of a copy, between nodes, over NVLink and over PCIe (P2P_NET_CHUNKSIZE,
# P2P_NVL_CHUNKSIZE, P2P_PCI_CHUNKSIZE).
NET_STEP, NVLINK_STEP, PCIE_STEP = 128 * 1024, 512 * 1024, 128 * 1024
# GB/s that NCCL 2.29 expects of a channel to the network (P2P_PER_CHANNEL_NET_BW).
NET_CHANNEL_GBYTE_PER_S = 14
# The version that counts channels by the network's bandwidth, not by ranks.
BY_BANDWIDTH = (2, 29)
# The version of torch 2.11.
PLANNED_VERSION = (2, 28, 9)
# Channels per peer over NVLink before all other limits: twice the links of a GPU. NCCL's source
# assumes for an H100 18 links, 371 GB/s at 20.6 each.
NVLINK_CHANNELS = 36
# Channels per peer over PCIe.
PCIE_CHANNELS = 2


@dataclass(frozen=True)
class Communicator:
    """A communicator of NCCL, as far as its channels depend on it.

    Attributes:
        num_ranks: number of its ranks.
        num_nodes: number of nodes on which they are; a node is what NVLink joins.
        max_ctas: `max_ctas` of its config, or NCCL_MAX_CTAS.
        channels_per_net_peer: `nChannelsPerNetPeer` of its config (NCCL 2.28), or
            NCCL_NCHANNELS_PER_NET_PEER; None leaves the number to NCCL.
        version: NCCL's version, such as (2, 28, 9).
        net_gbyte_per_s: bandwidth of a GPU's network ports together, in GB/s.
        num_nics: number of a GPU's network ports.
        over_pcie: whether the ranks of a node are joined by PCIe, not by NVLink.
    """

    num_ranks: int
    num_nodes: int
    max_ctas: int = MAX_CTAS
    channels_per_net_peer: int | None = None
    version: tuple[int, ...] = PLANNED_VERSION
    net_gbyte_per_s: float = 50.0
    num_nics: int = 1
    over_pcie: bool = False

    @property
    def num_channels(self) -> int:
        """The number of all channels for sends and receives, a power of 2."""
        return _power_of_2_up_to(self.max_ctas)

    @property
    def channels_per_peer(self) -> int:
        """The most channels that a message may have: the least over all kinds of peers."""
        kinds = []
        if self.num_ranks > self.num_nodes:
            kinds.append(PCIE_CHANNELS if self.over_pcie else NVLINK_CHANNELS)
        if self.num_nodes > 1:
            kinds.append(self._channels_to_network())
        channels = _power_of_2_up_to(min(kinds, default=1))
        if self.num_nodes > 1 and self._counts_by_bandwidth:
            # NCCL reduces them until all peers fit into one round.
            batches = -(-self.num_ranks // OPERATIONS_PER_BATCH)
            while channels * batches > self.num_channels and channels > 1:
                channels //= 2
        return min(channels, self.num_channels)

    @property
    def _counts_by_bandwidth(self) -> bool:
        return self.channels_per_net_peer is None and self.version >= BY_BANDWIDTH

    def _channels_to_network(self) -> int:
        if self.channels_per_net_peer is not None:
            return self.channels_per_net_peer
        if self._counts_by_bandwidth:
            by_bandwidth = -(-int(self.net_gbyte_per_s) // NET_CHANNEL_GBYTE_PER_S)
            return max(2, self.num_nics, by_bandwidth)
        channels = 2
        while channels * self.num_ranks > 4 * self.num_channels and channels > 1:
            channels //= 2
        return max(self.num_nics, channels)

    @cached_property
    def _known(self) -> dict[int, int]:
        """Bytes of a message -> its channels, as far as they were computed."""
        return {}

    def channels(self, nbytes: int) -> int:
        """Return the number of channels that copy a message of `nbytes`."""
        if nbytes not in self._known:
            self._known[nbytes] = self._channels(nbytes)
        return self._known[nbytes]

    def _channels(self, nbytes: int) -> int:
        if nbytes == 0:
            return 1
        largest = self.channels_per_peer
        channels = largest
        while channels * self.num_ranks > self.num_channels and channels > 1:
            channels //= 2
        if self.num_nodes > 1:
            least_part, largest_part = NET_STEP // 2, NET_STEP
        else:
            step = PCIE_STEP if self.over_pcie else NVLINK_STEP
            least_part, largest_part = step // 8, step * 32
        channels = min(channels, -(-nbytes // least_part))
        part = max(least_part, -(-nbytes // channels))
        while part > largest_part and channels <= largest // 2:
            channels *= 2
            part = -(-nbytes // channels)
        return channels


def communicator_of(
    num_ranks: int, num_nodes: int, max_ctas: int = MAX_CTAS, *, over_pcie: bool = False
) -> Communicator:
    """Return a communicator of this package, by the installed NCCL and its variables.

    Without NCCL, as on a laptop that plans for GPUs, the version is PLANNED_VERSION. `max_ctas` is
    `TransportOptions.max_ctas`.
    """
    channels_per_net_peer = env_int("NCCL_NCHANNELS_PER_NET_PEER", 0) or None
    version = installed_nccl() or PLANNED_VERSION
    return _communicator(
        num_ranks, num_nodes, max_ctas, channels_per_net_peer, version, over_pcie=over_pcie
    )


# Cached: a simulation makes thousands of equal ones, each of which caches its channels.
@lru_cache(maxsize=1024)
def _communicator(
    num_ranks: int,
    num_nodes: int,
    max_ctas: int,
    channels_per_net_peer: int | None,
    version: tuple[int, ...],
    *,
    over_pcie: bool,
) -> Communicator:
    return Communicator(
        num_ranks,
        num_nodes,
        max_ctas=max_ctas,
        channels_per_net_peer=channels_per_net_peer,
        version=version,
        over_pcie=over_pcie,
    )


def _power_of_2_up_to(number: int) -> int:
    """Return the least power of 2 that is not below a number, as NCCL's `pow2Up`."""
    return 1 << (number - 1).bit_length()
