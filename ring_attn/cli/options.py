"""The help and the options of each command; they need no torch, and what runs is elsewhere."""

from __future__ import annotations

import argparse
from pathlib import Path

from ring_attn.cli.arguments import (
    add_common,
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

# Sizes of `plan`, of a layer as Llama 3 8B's.
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
    """`ring-attn doctor`: whether this machine is ready, on one screen, and what mends what is not.

        ring-attn doctor
        torchrun --nproc-per-node 8 -m ring_attn doctor    names ranks that differ

    It runs a ring of two ranks here and compares it with attention in float64, says which backend
    takes each kind of call and why, and looks at files and settings of NCCL. Under torchrun its
    ranks are the ring; --quick leaves the ring out. The exit status is 1 if something is wrong.
    """
    add_common(parser)


def env(parser: argparse.ArgumentParser) -> None:
    """`ring-attn env`: installed versions, hardware, and the backends that can run.

    A JSON text; null is said of a backend that can run, of a package that is not installed, and of
    a variable that is not set. It names no host, user or path, except in variables.
    """
    add_common(parser)


def verify(parser: argparse.ArgumentParser) -> None:
    """`ring-attn verify`: compares ring attention on this machine with dense attention in float64.

    A case is one call: strategy, backend, layout, mask, dtype, heads, length, softcap and sinks.
    Each rank computes its shard; rank 0 checks out, lse and every gradient against the bound of
    `ring_attn.testing`, which follows from plain PyTorch's error in the same dtype. The figures are
    error / bound: above 1 a case fails. All buffers start as NaN.

        ring-attn verify                          a sample of the table, in a minute
        ring-attn verify --all --world-size 3 --strategy ring hybrid
        torchrun --nproc-per-node 4 -m ring_attn verify

    A sample has every strategy with every layout, mask, backend and dtype; `--seed` draws another
    one. The exit status is 1 if a case failed or none passed. Cases that a backend refuses are
    listed with the reason; they neither fail nor pass.
    """
    add = parser.add_argument
    add(
        "--world-size", type=parse_size, metavar="N",
        help=f"ranks to start (default: {VERIFIED_WORLD_SIZE}, or as many as torchrun started)",
    )  # fmt: skip
    add(
        "--strategy", nargs="+", metavar="NAME", choices=(*TESTED_STRATEGIES, "all"),
        default=["all"], help=f"some of {', '.join(TESTED_STRATEGIES)} (default: all)",
    )  # fmt: skip
    add("--backend", nargs="+", metavar="NAME", help="some by name (default: all that can run)")
    layouts = f"some of {', '.join(TESTED_LAYOUTS)} (default: all)"
    add("--layout", nargs="+", choices=TESTED_LAYOUTS, metavar="NAME", help=layouts)
    every = "every case of the table; a sample says how long they take"
    add("--all", action="store_true", help=every)
    add("--seed", type=int, metavar="N", help="of the sample (default: drawn, and printed)")
    add("--device", choices=DEVICES, help="default: cuda if every rank can have a GPU")
    threads = "CPU threads of each rank (default: cores / ranks)"
    add("--threads", type=parse_size, metavar="N", help=threads)
    add_common(parser)


def audit(parser: argparse.ArgumentParser) -> None:
    """`ring-attn audit FILE:FUNCTION`: says what a training step does wrong on several ranks.

    The function makes a model and a batch from a seed, runs forward and backward, sums gradients,
    and returns model, loss and evaluation loss, as `ring_attn.audit` says. The exit status is 1 if
    a result of ranks differs from that of one process with the batches of all.

        ring-attn audit train.py:step --world-size 2 4
    """
    add = parser.add_argument
    add("step", metavar="FILE:FUNCTION", help="the training step of a rank")
    sizes = f"numbers of ranks (default: {' '.join(map(str, AUDITED_SIZES))}; with --quick 2)"
    add("--world-size", nargs="+", type=parse_size, metavar="N", help=sizes)
    add("--timeout", type=float, default=120.0, metavar="S", help="seconds of a run (default: 120)")
    add_common(parser)


def plan(parser: argparse.ArgumentParser) -> None:
    """`ring-attn plan`: predicts how ranks would best share a call on a cluster; nothing runs.

    The table has every strategy's times, bytes, exposed communication and memory. Times come from a
    simulation of the cluster, which is built in or was measured by `ring-attn calibrate`. No
    process group and no GPU is needed.

        ring-attn plan --seqlen 1M --world-size 64 --kv-heads 8 --cluster h200
    """
    add = parser.add_argument
    add("--seqlen", type=parse_size, required=True, help="global length, such as 1M")
    add("--world-size", type=parse_size, required=True, help="number of ranks")
    add("--batch", type=parse_size, default=1, help="sequences at a time (default: 1)")
    add(
        "--heads", dest="nheads", type=parse_size, metavar="N", default=HEADS,
        help=f"heads of q (default: {HEADS})",
    )  # fmt: skip
    kv_heads = "default: as many as heads"
    add("--kv-heads", dest="nheads_kv", type=parse_size, metavar="N", help=kv_heads)
    add(
        "--head-dim", dest="headdim", type=parse_size, metavar="N", default=HEADDIM,
        help=f"of q and k (default: {HEADDIM})",
    )  # fmt: skip
    dim_v = "head dim of v (default: as of q and k)"
    add("--head-dim-v", dest="headdim_v", type=parse_size, metavar="N", help=dim_v)
    add("--dtype", type=parse_dtype, default="bfloat16", help="of q, k and v (default: bfloat16)")
    add_switch(parser, "--causal", "queries see no later keys")
    add(
        "--window", dest="window_size", type=parse_window, default=(-1, -1), metavar="LEFT,RIGHT",
        help="sizes such as 4k,0; -1 is open (default: --window=-1,-1)",
    )  # fmt: skip
    documents = (
        "lengths of documents, repeated until the sequence is full: 8k, or 1k,30k,500 "
        "(default: one)"
    )
    add("--documents", type=parse_sizes, metavar="LENGTHS", help=documents)
    layouts = ("auto", *LAYOUTS, "balanced")
    add("--layout", choices=layouts, default="auto", help="of all ranks (default: auto, the best)")
    names = f"consider only some of {', '.join(STRATEGIES)} (default: all)"
    add("--strategy", dest="strategies", nargs="+", metavar="NAME", help=names)
    load = (
        "a Python file whose strategies are registered first, as examples/own_strategy.py "
        "(default: no file)"
    )
    add("--load", type=Path, metavar="FILE", help=load)
    cluster = (
        "h100, h200, a100, b200, or a file of ring-attn calibrate (default: the file "
        "RING_ATTN_CLUSTER, or this machine's GPU; h100 without a GPU)"
    )
    add("--cluster", metavar="NAME|FILE", help=cluster)
    add("--node-size", type=parse_size, help="devices of a node (default: 8)")
    same_bits = "consider only strategies with the same bits at every world size"
    add_switch(parser, "--same-bits", same_bits, default=None)
    add_switch(parser, "--backward", "plan the backward too")
    exact = "simulate every rank, up to 256; else some of many equal ranks stand for all"
    add("--exact", action="store_true", help=exact)
    memory = "memory of a rank, such as 80G (default: its device's)"
    add("--memory", dest="memory_bytes", type=parse_size, metavar="BYTES", help=memory)
    check = "check the best strategy's programs of all ranks against each other, draw rank 0's"
    add("--check", action="store_true", help=check)
    add("--verbose", action="store_true", help="also list what was left out, and why")
    add_common(parser)


def parse_window(text: str) -> tuple[int, int]:
    """ "4k,0" -> (4096, 0); -1 is unbounded."""
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a window: give LEFT,RIGHT such as 4k,0")
    sizes = [int(p) if p.strip() in ("-1", "0") else parse_size(p) for p in parts]
    return sizes[0], sizes[1]


def bench_ring(parser: argparse.ArgumentParser) -> None:
    """Time, waits, bytes and memory of a ring, compared with dense attention and torch's own ring.

    All implementations alternate within every repetition, so that drift of the machine affects all
    alike. A time is the slowest rank's; medians, p20 and p80 are over the repetitions. `wait_ms` is
    the host's time in waits for transfers, `peak_bytes` the most bytes that a call holds beyond its
    inputs, `max_error` the greatest difference of out, dq, dk, dv from attention in float64.

        ours             ring_attn.ring_attention on the ranks
        dense            torch's, in one process with all the ranks' threads
        torch-template   torch's private ring and its backward, of ranks on CPUs
    """
    add = parser.add_argument
    add("--world-size", type=parse_size, default=2, help="number of ranks (default: 2)")
    add("--seqlen", type=parse_size, help=f"whole length (default: {SEQLEN})")
    add("--heads", type=parse_size, default=8, help="heads of q (default: 8)")
    add("--kv-heads", type=parse_size, help="heads of k and v (default: as many as --heads)")
    add("--head-dim", type=parse_size, default=64, help="head dim of q, k and v (default: 64)")
    add("--dtype", type=parse_dtype, default="float32", help="default: float32")
    add_switch(parser, "--causal", "queries see no later keys")
    add("--layout", choices=LAYOUTS, default="zigzag", help="how rows are split (default: zigzag)")
    mode = "forward alone, or backward too (default: fwd_bwd)"
    add("--mode", choices=MODES, default="fwd_bwd", help=mode)
    add("--threads", type=parse_size, default=1, help="CPU threads of each rank (default: 1)")
    add("--device", choices=DEVICES, help="default: cuda if every rank can have a GPU")
    add("--iters", type=parse_size, help=f"timed repetitions (default: {RING_ITERS})")
    names = f"comma-separated, some of {', '.join(BASELINES)} (default: all); empty for none"
    add("--baseline", type=names_of(BASELINES), default=",".join(BASELINES), help=names)
    add_common(parser)


def bench_kernel(parser: argparse.ArgumentParser) -> None:
    """Time of our attention kernels on one device, beside torch's.

    Both implementations alternate within every repetition, so that clock drift affects them alike;
    each is checked against float64 before the timing, on at most 1024 rows. As in FlashAttention's
    papers, the batch is 16k / length, at least 1. Times are the device's, between events, with a
    cold L2 and the host ahead; medians, p20 and p80 are over the repetitions. A forward saves
    tensors for its backward. FLOPs are 4 x visible pairs x head_dim per head forward, 2.5 times
    that backward.

        ours           triton (on a CPU auto), deterministic, as a ring of one rank
        torch-flash    scaled_dot_product_attention with FlashAttention 2

    The exit status is 1 if a result of ours is wrong or a call of ours failed.
    """
    add = parser.add_argument
    lens = ",".join(map(format_size, KERNEL_SEQLENS))
    add("--seqlen", dest="seqlens", type=parse_sizes, help=f"lengths, as 1k,8k (default: {lens})")
    add("--iters", type=parse_size, help=f"most repetitions of a cell (default: {KERNEL_ITERS})")
    add_device_arguments(parser, ",".join(f"{q}/{kv}" for q, kv in KERNEL_HEADS))


def calibrate(parser: argparse.ArgumentParser) -> None:
    """Measure this machine for the simulator: attention, copies and messages, on all ranks at once.

        ring-attn calibrate --world-size 4 --json machine.json    one thread each
        ring-attn plan --cluster machine.json ...

    All ranks work at the same time, so the figures include contention (cores, memory, the
    loopback). Messages and copies go into new memory, as in a call; on a CPU its page faults may
    take longer than the copy. `devices.Rate` is fitted to the times of tiles, `devices.Link` to the
    times of messages.
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
    """Finds the fastest configs of the kernels on one device: builds, checks and times them.

        ring-attn tune --json tune.json            on a GPU, in 10 minutes
        RING_ATTN_CONFIGS=tune.json torchrun ...   uses the file, one for all ranks
        RING_ATTN_CONFIGS=tune.json ring-attn bench kernel         compares
        ring-attn tune --device cpu                only tests the search

    Searches the kinds of `kernels/configs.py`, the most valuable first, until --budget is spent:
    all configs of `configs.search_space`, and on sm_90 of the forward in Gluon. The configs are

        built      by a process per core, which run each config once and so fill
                   triton's cache; one that crashes loses only its own row
        checked    against float64 on at most 1024 rows; runs are equal bit for bit
        timed      alternately within every repetition

    A config that is wrong, or differs between two runs, is reported, never recommended. Kernels
    take 32k causal rows or 16k without a mask (--quick a quarter, on a CPU 128).
    The exit status is 1 if a frozen config is wrong.
    """
    add = parser.add_argument
    names = f"some of {','.join(KERNELS)} (default: all)"
    add("--kernels", type=names_of(KERNELS), default=",".join(KERNELS), help=names)
    add_device_arguments(parser)


def add_device_arguments(parser: argparse.ArgumentParser, heads: str = "32/8") -> None:
    """Adds the options of every benchmark on one device; `heads` are those on a GPU."""
    add = parser.add_argument
    pairs = f"query heads / kv heads, as 32/8 (default: {heads}; on a CPU 4/2)"
    add("--heads", type=parse_heads, help=pairs)
    add("--head-dim", dest="head_dims", type=parse_sizes, help="default: 128; on a CPU 16 or 64")
    add("--dtype", type=parse_dtype, help="default: bfloat16; on a CPU float32")
    budget = "start no measurement after this time (default: no limit)"
    add("--budget", type=float, metavar="SECONDS", help=budget)
    add("--device", choices=DEVICES, help="default: cuda if there is a GPU")
    add_common(parser)


def parse_heads(text: str) -> tuple[tuple[int, int], ...]:
    """Query and kv heads: "32/8,16" is ((32, 8), (16, 16))."""
    pairs = []
    for part in text.split(","):
        q, _, kv = part.partition("/")
        heads, kv_heads = parse_size(q), parse_size(kv or q)
        if heads % kv_heads:
            raise argparse.ArgumentTypeError(f"{part!r}: kv heads must divide the query heads")
        pairs.append((heads, kv_heads))
    return tuple(pairs)
