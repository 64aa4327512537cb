"""Several ranks on one GPU over NCCL, which otherwise requires a GPU for each rank."""

from __future__ import annotations

import os
from typing import Literal, get_args

import torch
import torch.distributed as dist

from ring_attn.values.checks import check_one_of
from ring_attn.values.outside import env_int

Way = Literal["hostid", "multi"]
WAYS: tuple[Way, ...] = get_args(Way)

# The first NCCL that permits several ranks of a host on one GPU.
MULTI_RANK_VERSION = (2, 30)


def share_gpu(way: Way = "hostid") -> torch.device:
    """Let all ranks of a launcher on this machine use one GPU, torch's current one, over NCCL.

    Call it in each rank before `init_process_group`. The ranks then exchange over NCCL as on
    several GPUs, with its communicators, streams and errors, so one GPU is enough to test a
    program. Measured speeds are meaningless, since the processes take turns on the GPU.

    This sets environment variables of this process: variables of NCCL, and LOCAL_RANK and
    LOCAL_WORLD_SIZE as if each rank were the only one on its node. NCCL_NET and NCCL_SOCKET_IFNAME
    are kept if they are set.

    Args:
        way: "hostid" works with every NCCL. Each rank has a different host name, so messages take
            NCCL's path between nodes, over TCP. "multi" takes the path within a node, and needs
            NCCL 2.30 or newer; if torch has an older one, load the newer one by LD_PRELOAD.

    Returns:
        The GPU, for `init_process_group(device_id=)` and for the tensors.

    Raises:
        ValueError: an unknown `way`.
        RuntimeError: no launcher has started this process, there is no GPU, the process group
            exists already, or NCCL is too old for "multi".

    Example, a program that torchrun starts on a machine with one GPU::

        device = share_gpu()
        dist.init_process_group("nccl", device_id=device)
    """
    check_one_of("way", way, WAYS)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise RuntimeError(
            "share_gpu is for the ranks of a launcher, but RANK and WORLD_SIZE are not set: start "
            "the program by torchrun --nproc-per-node 2"
        )
    if dist.is_initialized():
        raise RuntimeError(
            "share_gpu must be called before init_process_group, which exists already: NCCL reads "
            "its variables once"
        )
    why_not = sharing_refusal(way)
    if why_not is not None:
        raise RuntimeError(why_not)
    os.environ.update(sharing_environment(way, env_int("RANK", 0)))
    return torch.device("cuda", torch.cuda.current_device())


def sharing_refusal(way: Way) -> str | None:
    """Return the reason why ranks cannot share a GPU of this machine that way, or None."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "several ranks can share only an NVIDIA GPU, and torch finds none on this machine"
    version = torch.cuda.nccl.version()
    if way == "multi" and version < MULTI_RANK_VERSION:
        found, needed = (".".join(map(str, x)) for x in (version, MULTI_RANK_VERSION))
        return (
            f"way 'multi' needs NCCL {needed} or newer, but NCCL {found} is loaded: set LD_PRELOAD "
            "to the file libnccl.so.2 of a newer one (package nvidia-nccl-cu13), or use 'hostid'"
        )
    return None


def sharing_environment(way: Way, rank: int) -> dict[str, str]:
    """Return the environment variables of one of the ranks that share a GPU."""
    # As if each rank were the only one on its node: launchers and plans require a GPU for each
    # local rank.
    variables = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    variables["NCCL_LAUNCH_ORDER_IMPLICIT"] = os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    if way == "multi":
        return variables | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    # NCCL rejects two ranks with the same GPU on one host, which it identifies by this name.
    return variables | {
        "NCCL_HOSTID": f"ring{rank}",
        "NCCL_NET": os.environ.get("NCCL_NET", "Socket"),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
    }
