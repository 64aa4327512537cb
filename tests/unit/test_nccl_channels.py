"""NCCL's channels per message, against tables worked out by hand from its sources."""

from __future__ import annotations

import pytest

from ring_attn.planning.devices import builtin_cluster
from ring_attn.transport import nccl_channels
from ring_attn.transport.nccl_channels import Communicator, communicator_of

MIB = 2**20
SIZES = (16 * MIB, 32 * MIB, 64 * MIB, 64 * MIB + 8)


@pytest.mark.parametrize(
    ("num_ranks", "num_nodes", "expected"),
    [
        (2, 1, (4, 4, 4, 8)),
        (4, 1, (2, 2, 4, 8)),
        (8, 1, (1, 2, 4, 8)),
        # 2 to the network; one for 8 channels and 16 ranks, doubled beyond 128 KiB.
        (16, 2, (2, 2, 2, 2)),
        # 2 x 17 ranks are more than 4 x 8 channels.
        (17, 3, (1, 1, 1, 1)),
        (64, 8, (1, 1, 1, 1)),
        (4, 4, (2, 2, 2, 2)),
    ],
)
def test_channels_of_nccl_2_28(num_ranks: int, num_nodes: int, expected: tuple[int, ...]) -> None:
    communicator = Communicator(num_ranks, num_nodes)
    assert tuple(communicator.channels(size) for size in SIZES) == expected


def test_peers_over_pcie_have_two_channels() -> None:
    """One for 8 channels and 8 ranks, doubled beyond 32 x 128 KiB; parts of at least 16 KiB."""
    two = Communicator(2, 1, over_pcie=True)
    assert [two.channels(size) for size in (2**14, 2**14 + 1, *SIZES)] == [1, 2, 2, 2, 2, 2]
    eight = Communicator(8, 1, over_pcie=True)
    assert [eight.channels(size) for size in (4 * MIB, 4 * MIB + 1)] == [1, 2]
    assert [Communicator(2, 1, over_pcie=True).channels(size) for size in (2**14, 2**14 + 1)] == [
        1,
        2,
    ]
    # Between nodes, the network's peers have no more.
    assert Communicator(64, 8, over_pcie=True).channels_per_peer == 1


def test_small_messages_have_few_channels() -> None:
    alone = Communicator(2, 1)
    # A part has at least 64 KiB over NVLink, and a message without bytes one channel.
    assert [alone.channels(size) for size in (0, 1, 2**16, 2**16 + 1, 2**18)] == [1, 1, 1, 2, 4]
    between = Communicator(4, 4)
    assert [between.channels(size) for size in (1, 2**16, 2**16 + 1, 2**18 + 1)] == [1, 1, 2, 2]


@pytest.mark.parametrize(("num_ranks", "expected"), [(16, 4), (17, 2), (32, 2), (33, 1), (64, 1)])
def test_channels_per_peer_between_nodes_since_nccl_2_29(num_ranks: int, expected: int) -> None:
    """ceil(50 / 14) = 4, halved while channels x ceil(ranks / 8) are more than 8."""
    for version in ((2, 29, 7), (2, 30, 7)):
        communicator = Communicator(num_ranks, num_ranks // 8 + 1, version=version)
        assert communicator.channels_per_peer == expected


def test_the_config_sets_channels_to_the_network() -> None:
    for version in ((2, 28, 9), (2, 30, 7)):
        communicator = Communicator(64, 8, channels_per_net_peer=4, version=version)
        assert communicator.channels_per_peer == 4
        # Half of the work starts at one channel and is doubled to the limit.
        assert communicator.channels(64 * MIB) == 4
    assert Communicator(64, 8, channels_per_net_peer=32).channels_per_peer == 8


def test_more_ctas_give_more_channels() -> None:
    """With 32 channels, 2 to the network hold up to 64 ranks."""
    assert Communicator(64, 8, max_ctas=32).channels_per_peer == 2
    assert Communicator(65, 9, max_ctas=32).channels_per_peer == 1
    assert Communicator(8, 1, max_ctas=32).channels(64 * MIB) == 4
    assert Communicator(2, 1, max_ctas=6).num_channels == 8


def test_the_variables_of_nccl_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert communicator_of(64, 8) == Communicator(64, 8)
    monkeypatch.setenv("NCCL_MAX_CTAS", "16")
    monkeypatch.setenv("NCCL_NCHANNELS_PER_NET_PEER", "4")
    cluster = builtin_cluster("H100")
    assert (cluster.max_ctas, cluster.slowdown) == (16, 16 / 132)
    communicator = communicator_of(64, 8, cluster.max_ctas)
    assert communicator == Communicator(64, 8, max_ctas=16, channels_per_net_peer=4)


def test_the_installed_nccl_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_channels, "installed_nccl", lambda: (2, 30, 7))
    assert communicator_of(16, 2) == Communicator(16, 2, version=(2, 30, 7))
    assert communicator_of(16, 2).channels_per_peer == 4


def test_several_network_ports_have_a_channel_each() -> None:
    assert Communicator(64, 8, num_nics=4).channels_per_peer == 4
