"""The help and the options of each command. They do not import torch; other modules run."""

from __future__ import annotations

import argparse
from pathlib import Path

from ring_attn.cli.arguments import (
    add_common,
    add_plot,
    add_switch,
    format_size,
    names_of,
    parse_dtype,
    parse_size,
    parse_sizes,
)
from ring_attn.core.names import (
    AUDITED_SIZES,
    DEVICES,
    LAYOUTS,
    STRATEGIES,
    TESTED_LAYOUTS,
    TESTED_STRATEGIES,
)

VERIFIED_WORLD_SIZE = 4

# Default sizes of `plan`: a layer of Llama 3 8B.
HEADS, HEADDIM = 32, 128

# Length and repetitions of `bench ring`.
SEQLEN, RING_ITERS = 8192, 9
BASELINES = ("dense", "torch-template")

# Sizes of `bench kernel` on a GPU.
KERNEL_SEQLENS, KERNEL_ITERS = tuple(1024 << n for n in range(8)), 15
KERNEL_HEADS = ((32, 8), (64, 8))

# The figures of each mode of a benchmark.
MODES = {"fwd": ("fwd",), "fwd_bwd": ("fwd", "bwd", "fwd_bwd")}

# The kernels that `tune` times.
KERNELS = ("fwd", "dkdv", "dq")


def doctor(parser: argparse.ArgumentParser) -> None:
    """`ring-attn doctor`: check whether this machine is ready, and show how to repair it.

        ring-attn doctor
        torchrun --nproc-per-node 8 -m ring_attn doctor    names ranks that differ

    It runs a ring of two ranks and compares it with attention in float64, shows which backend
    runs each kind of call and why, and checks files and settings of NCCL. Under torchrun, the ring
    has torchrun's ranks. With --quick it runs no ring. The exit status is 1 if something is wrong.
    """
    add_common(parser)


def env(parser: argparse.ArgumentParser) -> None:
    """`ring-attn env`: show installed versions, hardware, and the backends that can run.

    The output is JSON. null means that a backend can run, that a package is not installed, or that
    a variable is not set. The output has no names of hosts, users or paths, except in variables.
    """
    add_common(parser)


# More than 60 lines, one argument a line.
def verify(parser: argparse.ArgumentParser) -> None:
    """`ring-attn verify`: compare ring attention on this machine with dense attention in float64.

    A case is one call: strategy, backend, layout, mask, dtype, heads, length, softcap and sinks.
    Each rank computes its shard. Rank 0 checks out, lse and every gradient against the bound of
    `ring_attn.testing`, which follows from plain PyTorch's error in the same dtype. The output
    shows error / bound; a case fails if this is above 1. All buffers start as NaN.

        ring-attn verify                          a sample of the table, in a minute
        ring-attn verify --all --world-size 3 --strategy ring hybrid
        torchrun --nproc-per-node 4 -m ring_attn verify

    A sample has every strategy with every layout, mask, backend and dtype; `--seed` draws another
    sample. The exit status is 1 if a case failed or none passed. Cases that a backend refuses are
    listed with the reason; they neither fail nor pass.
    """
    add = parser.add_argument
    add(
        "--world-size",
        type=parse_size,
        metavar="N",
        help=f"ranks to start (default: {VERIFIED_WORLD_SIZE}, or as many as torchrun started)",
    )
    add(
        "--strategy",
        nargs="+",
        metavar="NAME",
        choices=(*TESTED_STRATEGIES, "all"),
        default=["all"],
        help=f"some of {', '.join(TESTED_STRATEGIES)} (default: all)",
    )
    add(
        "--backend",
        nargs="+",
        metavar="NAME",
        help="names of backends (default: all that can run)",
    )
    add(
        "--layout",
        nargs="+",
        choices=TESTED_LAYOUTS,
        metavar="NAME",
        help=f"some of {', '.join(TESTED_LAYOUTS)} (default: all)",
    )
    add(
        "--all",
        action="store_true",
        help="run every case of the table; a run of a sample prints how long this takes",
    )
    add(
        "--seed",
        type=int,
        metavar="N",
        help="seed of the sample (default: random, and printed)",
    )
    add(
        "--device",
        choices=DEVICES,
        help="where to run (default: cuda if every rank can have a GPU)",
    )
    add(
        "--threads",
        type=parse_size,
        metavar="N",
        help="CPU threads of each rank (default: cores / ranks)",
    )
    add_common(parser)


def audit(parser: argparse.ArgumentParser) -> None:
    """`ring-attn audit FILE:FUNCTION`: find mistakes of a training step on several ranks.

    The function makes a model and a batch from a seed, runs forward and backward, sums gradients,
    and returns model, loss and evaluation loss, as described for `ring_attn.audit`. The exit status
    is 1 if a result of the ranks differs from the result of one process with all batches.

        ring-attn audit train.py:step --world-size 2 4
    """
    add = parser.add_argument
    add("step", metavar="FILE:FUNCTION", help="the training step of a rank")
    sizes = " ".join(str(size) for size in AUDITED_SIZES)
    add(
        "--world-size",
        nargs="+",
        type=parse_size,
        metavar="N",
        help=f"numbers of ranks (default: {sizes}; with --quick 2)",
    )
    add(
        "--timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="time limit of a run in seconds (default: 120)",
    )
    add_common(parser)


def plan(parser: argparse.ArgumentParser) -> None:
    """`ring-attn plan`: predict how ranks would best share a call on a cluster; nothing runs.

    The table has every strategy's times, bytes, exposed communication and memory. Times come from a
    simulation of the cluster, which is built in or was measured by `ring-attn calibrate`. The
    command needs no process group and no GPU.

        ring-attn plan --seqlen 1M --world-size 64 --kv-heads 8 --cluster h200
    """
    _add_call(parser)
    _add_candidates(parser)
    _add_cluster(parser)
    add_plot(parser, "the times of strategies, and the best one's timeline and memory,")
    add_common(parser)


def _add_call(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan` that describe the call."""
    add = parser.add_argument
    add("--seqlen", type=parse_size, required=True, help="global length, such as 1M")
    add("--world-size", type=parse_size, required=True, help="number of ranks")
    add("--batch", type=parse_size, default=1, help="sequences at a time (default: 1)")
    add(
        "--heads",
        dest="nheads",
        type=parse_size,
        metavar="N",
        default=HEADS,
        help=f"heads of q (default: {HEADS})",
    )
    add(
        "--kv-heads",
        dest="nheads_kv",
        type=parse_size,
        metavar="N",
        help="heads of k and v (default: as many as --heads)",
    )
    add(
        "--head-dim",
        dest="headdim",
        type=parse_size,
        metavar="N",
        default=HEADDIM,
        help=f"head dim of q and k (default: {HEADDIM})",
    )
    add(
        "--head-dim-v",
        dest="headdim_v",
        type=parse_size,
        metavar="N",
        help="head dim of v (default: the same as of q and k)",
    )
    add(
        "--dtype",
        type=parse_dtype,
        default="bfloat16",
        help="dtype of q, k and v (default: bfloat16)",
    )
    add_switch(parser, "--causal", "queries see no later keys")
    add(
        "--window",
        dest="window_size",
        type=parse_window,
        default=(-1, -1),
        metavar="LEFT,RIGHT",
        help="sizes such as 4k,0; -1 is unbounded (default: --window=-1,-1)",
    )
    add(
        "--documents",
        type=parse_sizes,
        metavar="LENGTHS",
        help="lengths of documents, repeated until the sequence is full: 8k, or 1k,30k,500 "
        "(default: one document)",
    )
    add(
        "--replicated",
        type=parse_size,
        default=0,
        metavar="N",
        help="positions that every rank holds, such as text: the first of --seqlen (default: 0)",
    )
    add_switch(parser, "--backward", "plan the backward too")


def _add_candidates(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan` that choose candidates, and their checks."""
    add = parser.add_argument
    add(
        "--layout",
        choices=("auto", *LAYOUTS, "balanced"),
        default="auto",
        help="layout of all ranks (default: auto, the best)",
    )
    add(
        "--strategy",
        dest="strategies",
        nargs="+",
        metavar="NAME",
        help=f"consider only some of {', '.join(STRATEGIES)} (default: all)",
    )
    add(
        "--load",
        type=Path,
        metavar="FILE",
        help="register the strategies of a Python file first, such as examples/own_strategy.py "
        "(default: no file)",
    )
    add_switch(
        parser,
        "--same-bits",
        "consider only strategies with the same bits at every world size",
        default=None,
    )
    add(
        "--check",
        action="store_true",
        help="check the programs of all ranks of the best strategy against each other, and draw "
        "the program of rank 0",
    )
    add("--verbose", action="store_true", help="also list candidates that were left out, and why")


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan` that describe the cluster and its simulation."""
    add = parser.add_argument
    add(
        "--cluster",
        metavar="NAME|FILE",
        help="h100, h200, a100, b200, or a file of ring-attn calibrate (default: the file "
        "RING_ATTN_CLUSTER, or this machine's GPU; h100 without a GPU)",
    )
    add("--node-size", type=parse_size, help="devices of a node (default: 8)")
    add(
        "--exact",
        action="store_true",
        help="simulate every rank, up to 256; otherwise a few of many equal ranks stand for all",
    )
    add(
        "--memory",
        dest="memory_bytes",
        type=parse_size,
        metavar="BYTES",
        help="memory of a rank, such as 80G (default: the memory of its device)",
    )


def parse_window(text: str) -> tuple[int, int]:
    """Parse a window: "4k,0" is (4096, 0); -1 is unbounded."""
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a window: pass LEFT,RIGHT such as 4k,0")
    left, right = (int(part) if part.strip() in ("-1", "0") else parse_size(part) for part in parts)
    return left, right


def bench_ring(parser: argparse.ArgumentParser) -> None:
    """Measure time, waits, bytes and memory of a ring, and of dense attention and torch's ring.

    All implementations alternate within every repetition, so that drift of the machine affects them
    in the same way. A time is the time of the slowest rank; medians, p20 and p80 are over the
    repetitions. `wait_ms` is the host's time in waits for transfers, `peak_bytes` the maximum of
    the bytes that a call allocates, without its inputs, and `max_error` the largest difference of
    out, dq, dk, dv from attention in float64.

        ours             ring_attn.ring_attention on the ranks
        dense            torch's attention, in one process with the ranks' threads
        torch-template   torch's private ring and its backward, for ranks on CPUs
    """
    add = parser.add_argument
    add("--world-size", type=parse_size, default=2, help="number of ranks (default: 2)")
    add("--seqlen", type=parse_size, help=f"global length (default: {SEQLEN})")
    add("--heads", type=parse_size, default=8, help="heads of q (default: 8)")
    add("--kv-heads", type=parse_size, help="heads of k and v (default: as many as --heads)")
    add("--head-dim", type=parse_size, default=64, help="head dim of q, k and v (default: 64)")
    add(
        "--dtype",
        type=parse_dtype,
        default="float32",
        help="dtype of q, k and v (default: float32)",
    )
    add_switch(parser, "--causal", "queries see no later keys")
    add(
        "--layout",
        choices=LAYOUTS,
        default="zigzag",
        help="layout of the sequence (default: zigzag)",
    )
    add(
        "--mode",
        choices=MODES,
        default="fwd_bwd",
        help="only the forward, or also the backward (default: fwd_bwd)",
    )
    add("--threads", type=parse_size, default=1, help="CPU threads of each rank (default: 1)")
    add(
        "--device",
        choices=DEVICES,
        help="where to run (default: cuda if every rank can have a GPU)",
    )
    add("--iters", type=parse_size, help=f"timed repetitions (default: {RING_ITERS})")
    add(
        "--baseline",
        type=names_of(BASELINES),
        default=",".join(BASELINES),
        help=f"comma-separated, some of {', '.join(BASELINES)} (default: all); empty for none",
    )
    add_plot(parser, "the times")
    add_common(parser)


def bench_kernel(parser: argparse.ArgumentParser) -> None:
    """Measure the time of our attention kernels on one device, and of torch's kernels.

    Both implementations alternate within every repetition, so that clock drift affects them in the
    same way. Each is checked against float64 before the timing, on at most 1024 rows. As in
    FlashAttention's papers, the batch is 16k / length, at least 1. Times are measured on the
    device, between events, with a cold L2 and the host ahead; medians, p20 and p80 are over the
    repetitions. A forward saves tensors for its backward. FLOPs are 4 x visible pairs x head_dim
    per head forward, and 2.5 times as many backward.

        ours           triton (on a CPU auto), deterministic, as a ring of one rank
        torch-flash    scaled_dot_product_attention with FlashAttention 2

    The exit status is 1 if one of our results is wrong, or one of our calls failed.
    """
    add = parser.add_argument
    lengths = ",".join(format_size(length) for length in KERNEL_SEQLENS)
    add(
        "--seqlen",
        dest="seqlens",
        type=parse_sizes,
        help=f"lengths, such as 1k,8k (default: {lengths})",
    )
    add("--iters", type=parse_size, help=f"maximum repetitions of a cell (default: {KERNEL_ITERS})")
    add_plot(parser, "TFLOP/s by length")
    add_device_arguments(parser, ",".join(f"{q}/{kv}" for q, kv in KERNEL_HEADS))


def calibrate(parser: argparse.ArgumentParser) -> None:
    """Measure this machine for the simulator: attention, copies and messages, on all ranks at once.

        ring-attn calibrate --world-size 4 --json machine.json    one thread each
        ring-attn plan --cluster machine.json ...

    All ranks work at the same time, so the figures include contention (cores, memory, the
    loopback). Messages and copies go into new memory, as in a call; on a CPU its page faults may
    take longer than the copy. `devices.Rate` is fitted to the times of tiles, and `devices.Link` to
    the times of messages.
    """
    add = parser.add_argument
    add("--world-size", type=parse_size, default=2, help="number of ranks (default: 2)")
    add("--heads", type=parse_size, default=8, help="heads of q, k and v (default: 8)")
    add("--head-dim", type=parse_size, default=64, help="head dim of q, k and v (default: 64)")
    add("--dtype", type=parse_dtype, default="float32", help="of q, k and v (default: float32)")
    add("--backend", default="auto", help="as for ring_attention (default: auto)")
    add("--threads", type=parse_size, default=1, help="CPU threads of each rank (default: 1)")
    add("--device", choices=DEVICES, help="where to run (default: cuda if there are enough GPUs)")
    add_common(parser)


def tune(parser: argparse.ArgumentParser) -> None:
    """Find the fastest configs of the kernels on one device: build, check and time them.

        ring-attn tune --json tune.json            on a GPU, in 10 minutes
        RING_ATTN_CONFIGS=tune.json torchrun ...   uses the file on all ranks
        RING_ATTN_CONFIGS=tune.json ring-attn bench kernel         compares
        ring-attn tune --device cpu                only tests the search

    The search goes through the kinds of `kernels/configs.py`, the most valuable first, until
    --budget is spent: all configs of `configs.search_space`, and on sm_90 the configs of the
    forward in Gluon. The configs are

        built      by a process per core, which runs each config once and so fills
                   triton's cache; after a crash, only one config has no result
        checked    against float64 on at most 1024 rows; runs are equal bit for bit
        timed      alternately within every repetition

    A config that is wrong, or differs between two runs, is reported and never recommended. Kernels
    get 32k causal rows or 16k rows without a mask (with --quick a quarter, on a CPU 128).
    The exit status is 1 if a frozen config is wrong.
    """
    add = parser.add_argument
    add(
        "--kernels",
        type=names_of(KERNELS),
        default=",".join(KERNELS),
        help=f"some of {','.join(KERNELS)} (default: all)",
    )
    add_device_arguments(parser)


def add_device_arguments(parser: argparse.ArgumentParser, heads: str = "32/8") -> None:
    """Add the options of every benchmark on one device; `heads` is the default on a GPU."""
    add = parser.add_argument
    add(
        "--heads",
        type=parse_heads,
        help=f"query heads / kv heads, such as 32/8 (default: {heads}; on a CPU 4/2)",
    )
    add(
        "--head-dim",
        dest="head_dims",
        type=parse_sizes,
        help="head dim of q, k and v (default: 128; on a CPU 16 or 64)",
    )
    add(
        "--dtype",
        type=parse_dtype,
        help="dtype of q, k and v (default: bfloat16; on a CPU float32)",
    )
    add(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="start no measurement after this time (default: no limit)",
    )
    add("--device", choices=DEVICES, help="where to run (default: cuda if there is a GPU)")
    add_common(parser)


def parse_heads(text: str) -> tuple[tuple[int, int], ...]:
    """Parse query and kv heads: "32/8,16" is ((32, 8), (16, 16))."""
    pairs = []
    for part in text.split(","):
        q, _, kv = part.partition("/")
        heads, kv_heads = parse_size(q), parse_size(kv or q)
        if heads % kv_heads:
            raise argparse.ArgumentTypeError(
                f"{part!r}: the number of query heads must be a multiple of the kv heads"
            )
        pairs.append((heads, kv_heads))
    return tuple(pairs)
