"""The help and the options of `ring-attn bench` and its benchmarks; they do not import torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from ring_attn.cli.arguments import (
    add_common,
    add_plot,
    count_of,
    format_size,
    names_of,
    parse_dtype,
    parse_head_dims,
    parse_heads,
    parse_percent,
    parse_rank_counts,
    parse_ranks,
    parse_report,
    parse_seconds,
    parse_size,
    parse_sizes,
)
from ring_attn.cli.masks import FORMS, parse_masks
from ring_attn.core.names import DEVICES, LAYOUTS, STRATEGIES

# The stages of a call: a forward, its backward, and both.
MODES = ("fwd", "bwd", "fwd_bwd")

# Length and repetitions of `bench ring`.
SEQLEN, RING_ITERS = 8192, 9
RING_PEERS = (
    "dense",
    "torch-template",
    "torch-context-parallel",
    "ring-flash-attn",
    "ring-attention-pytorch",
    "yunchang",
    "transformer-engine",
    "magi-attention",
)
DEFAULT_PEERS = ("dense", "torch-template")

# Sizes of `bench kernel` on a GPU.
KERNEL_SEQLENS, KERNEL_ITERS = tuple(1024 << n for n in range(8)), 15
KERNEL_HEADS = ((32, 8), (64, 8))
IMPLEMENTATIONS = ("ours", "cudnn", "torch-flash", "fa2", "fa3", "fa4", "flex", "xformers")

# Sizes of `bench decode` on a GPU.
DECODE_BATCHES, DECODE_SEQLENS, DECODE_ITERS = (1, 16), (8192, 65536), 15
DECODE_IMPLEMENTATIONS = ("ours", "torch", "fa2", "fa3")

# Operations and messages of `bench comm`.
COMM_OPS = ("hop", "all_gather", "reduce_scatter", "all_to_all", "all_reduce")
COMM_SIZES, COMM_ITERS = tuple(1 << n for n in range(14, 29, 2)), 15


def bench(parser: argparse.ArgumentParser) -> None:
    """`ring-attn bench`: measure this machine, in a minute and on one screen.

        ring-attn bench          all of the following, with small sizes
        ring-attn bench kernel   attention on one device: TFLOP/s and GB/s
        ring-attn bench ring     strategies and other packages on several ranks
        ring-attn bench decode   attention of one token to a KV cache: GB/s
        ring-attn bench comm     hops and collectives between ranks: GB/s

    Each benchmark has its own options: `ring-attn bench ring --help`. Without a name, all four run
    with small sizes, on the GPUs if there are any, otherwise on two CPU ranks. The exit status is 1
    if a result of ring_attn is wrong.
    """
    add = parser.add_argument
    add("--device", choices=DEVICES, help="where to run (default: cuda if there is a GPU)")
    add(
        "--json",
        metavar="PATH",
        type=parse_report,
        help="write all results to this file (default: no file)",
    )


def bench_ring(parser: argparse.ArgumentParser) -> None:
    """Measure attention over a sharded sequence, with our strategies and other packages.

        ring-attn bench ring --world-size 2,4 --strategy all --seqlen 4k,16k
        ring-attn bench ring --peer ring-attention-pytorch --mask full
        torchrun --nnodes 2 --nproc-per-node 8 ... -m ring_attn bench ring

    For each length, mask and number of ranks, the strategies and packages take turns within every
    repetition, so that drift of the machine affects all of them in the same way. A time is the time
    of the slowest rank. Under torchrun, a smaller number of ranks means the first ranks.

        TFLOP/s     speed of one device: all FLOPs / time / number of ranks
        of alone    this speed relative to one rank without other ranks
        exposed     time in which ranks wait for messages
        hidden      time of messages that computation hides: the time of the
                    call without its computation, minus exposed
        sent, peak  bytes that a rank sends; most bytes that it holds during
                    a call, in addition to the inputs
        predicted   time that the planner predicts; off: predicted / measured - 1
        error       largest difference of out, dq, dk, dv from attention in
                    float64, for at most 1k rows with the same mask and heads

    The forward has 4 x visible pairs x head_dim FLOPs per head, and the backward 2.5 times as many.
    The exit status is 1 if a result of ring_attn is wrong, or with --compare if a row is slower.

        dense                   torch's attention in one process, with the
                                ranks' threads, or on one GPU
        torch-template          torch's private ring and its backward
        torch-context-parallel  torch's context_parallel, which patches
                                scaled_dot_product_attention
        others                  the packages of that name

    If a package is not installed or cannot run on this machine, a line states the reason.
    """
    # Longer than a screen: a list of options, in the order of the help text.
    add = parser.add_argument
    add(
        "--world-size",
        type=parse_rank_counts,
        metavar="LIST",
        help="numbers of ranks, such as 2,4,8 (default: 2, or as many as torchrun started)",
    )
    add(
        "--seqlen",
        type=parse_sizes,
        metavar="LIST",
        help=f"global lengths, such as 4k,16k (default: {format_size(SEQLEN)})",
    )
    add(
        "--strategy",
        type=names_of((*STRATEGIES, "all", "auto"), may_be_empty=False),
        default="ring",
        metavar="LIST",
        help=f"some of {', '.join(STRATEGIES)}; all: each with every degree; auto: the planner's "
        "choice (default: ring)",
    )
    add(
        "--layout",
        choices=(*LAYOUTS, "auto"),
        default="zigzag",
        help="layout of our strategies; auto: the planner's choice for each strategy; other "
        "packages have their own layouts (default: zigzag)",
    )
    add_masks(parser, "causal")
    add(
        "--causal",
        action=argparse.BooleanOptionalAction,
        help="--causal is short for --mask causal, and --no-causal for --mask full (default: see "
        "--mask)",
    )
    add_modes(parser)
    add("--batch", type=count_of("sequences"), default=1, help="sequences at a time (default: 1)")
    add("--heads", type=count_of("heads"), default=8, help="heads of q (default: 8)")
    add("--kv-heads", type=count_of("heads"), help="heads of k and v (default: as many as --heads)")
    add("--head-dim", type=parse_size, default=64, help="head dim of q, k and v (default: 64)")
    add(
        "--dtype",
        type=parse_dtype,
        help="dtype of q, k and v (default: float32; on a GPU bfloat16)",
    )
    add(
        "--peer",
        "--baseline",
        dest="peers",
        type=names_of((*RING_PEERS, "all")),
        default=",".join(DEFAULT_PEERS),
        metavar="LIST",
        help=f"some of {', '.join(RING_PEERS)}, or all; '' for none "
        f"(default: {','.join(DEFAULT_PEERS)})",
    )
    add(
        "--threads",
        type=count_of("threads"),
        default=1,
        help="CPU threads of each rank (default: 1)",
    )
    add(
        "--device",
        choices=DEVICES,
        help="where to run (default: cuda if every rank can have a GPU)",
    )
    add(
        "--cluster",
        metavar="NAME|FILE",
        help="for predictions: h100, h200, a100, b200, or a file of ring-attn calibrate (default: "
        "the file RING_ATTN_CLUSTER, or this machine's devices)",
    )
    add("--iters", type=count_of("repetitions"), help=f"timed repetitions (default: {RING_ITERS})")
    add_report(parser)


def bench_kernel(parser: argparse.ArgumentParser) -> None:
    """Measure our attention kernels on one device, next to kernels of other packages.

        ring-attn bench kernel --seqlen 4k,16k --impl ours,fa3 --mask window:4k
        ring-attn bench kernel --head-dim 128,192/128 --heads 32/8,16 --mode fwd

    The implementations take turns within every repetition, so that drift of the clock affects all
    of them in the same way. Before the timing, each one is compared with float64, on at most 1024
    rows. As in FlashAttention's papers, the batch is 16k / length, at least 1. Times are measured
    on the device, between events, with a cold L2 cache, while the host runs ahead. The forward has
    4 x visible pairs x head_dim FLOPs per head, and the backward 2.5 times as many. The bytes are
    the sizes of all tensors that a call must read and write. The table also shows TFLOP/s relative
    to a matrix product in the same dtype, and GB/s relative to a copy.

        ours           triton (on a CPU auto), deterministic, as a ring of one rank
        cudnn          scaled_dot_product_attention by cuDNN
        torch-flash    scaled_dot_product_attention by FlashAttention 2
        fa2, fa3, fa4  the packages flash_attn, flash_attn_interface,
                       flash_attn.cute
        flex           torch.compile of FlexAttention
        xformers       memory_efficient_attention

    If an implementation is not installed, or cannot run a mask or size, a line states the reason.
    The exit status is 1 if a result of ring_attn is wrong, a call of it fails, or with --compare if
    a row is slower.
    """
    add = parser.add_argument
    lengths = ",".join(format_size(length) for length in KERNEL_SEQLENS)
    add(
        "--impl",
        dest="impls",
        type=names_of(IMPLEMENTATIONS, may_be_empty=False),
        metavar="LIST",
        help=f"some of {', '.join(IMPLEMENTATIONS)} (default: all; on a CPU ours,torch-flash)",
    )
    add(
        "--seqlen",
        dest="seqlens",
        type=parse_sizes,
        metavar="LIST",
        help=f"lengths, such as 1k,8k (default: {lengths}; on a CPU 256,512)",
    )
    add(
        "--batch",
        type=count_of("sequences"),
        help="sequences at a time (default: 16k / length; on a CPU 512 / length)",
    )
    add_masks(parser, "causal,full")
    add_modes(parser)
    heads = ",".join(f"{q}/{kv}" for q, kv in KERNEL_HEADS)
    add(
        "--heads",
        type=parse_heads,
        metavar="LIST",
        help=f"query heads / kv heads, such as 32/8,16 (default: {heads}; on a CPU 4/2)",
    )
    add(
        "--head-dim",
        dest="head_dims",
        type=parse_head_dims,
        metavar="LIST",
        help="head dim, or head dim of q and k / head dim of v, such as 128,192/128 (default: "
        "128,64,256; on a CPU 64)",
    )
    add(
        "--dtype",
        type=parse_dtype,
        help="dtype of q, k and v (default: bfloat16; on a CPU float32)",
    )
    add(
        "--iters",
        type=count_of("repetitions"),
        help=f"maximum repetitions of a cell (default: {KERNEL_ITERS})",
    )
    add_budget(parser)
    add("--device", choices=DEVICES, help="where to run (default: cuda if there is a GPU)")
    add_report(parser)


def bench_decode(parser: argparse.ArgumentParser) -> None:
    """Measure decoding: new tokens that attend to a KV cache, on one rank or several.

        ring-attn bench decode --batch 1,16,64 --seqlen 8k,128k --pages 16
        ring-attn bench decode --mla --batch 1,32
        torchrun --nproc-per-node 8 -m ring_attn bench decode --seqlen 1M

    Memory bandwidth limits decoding. So the table shows the GB/s with which a rank reads its part
    of K and V, next to the GB/s of a copy. The cache of a sequence is split evenly over the ranks.
    Other packages run only on one rank.

        ours     tree_decode
        torch    scaled_dot_product_attention, without pages
        fa2,fa3  flash_attn_with_kvcache of flash_attn and flash_attn_interface

    --mla decodes as DeepSeek's multi-head latent attention, with absorbed weights: one kv head of
    576 dims, of which v is the first 512, and 128 query heads.
    """
    # Longer than a screen: a list of options, in the order of the help text.
    add = parser.add_argument
    batches = ",".join(map(str, DECODE_BATCHES))
    lengths = ",".join(map(format_size, DECODE_SEQLENS))
    add(
        "--impl",
        dest="impls",
        type=names_of(DECODE_IMPLEMENTATIONS, may_be_empty=False),
        metavar="LIST",
        help=f"some of {', '.join(DECODE_IMPLEMENTATIONS)} (default: all; on a CPU ours,torch)",
    )
    add(
        "--batch",
        dest="batches",
        type=parse_sizes,
        metavar="LIST",
        help=f"numbers of sequences (default: {batches}; on a CPU 1,4)",
    )
    add(
        "--seqlen",
        dest="seqlens",
        type=parse_sizes,
        metavar="LIST",
        help=f"lengths of each sequence's cache (default: {lengths}; on a CPU 1k,4k)",
    )
    add(
        "--pages",
        type=parse_sizes,
        metavar="LIST",
        help="page sizes of a paged cache, in rows, such as 16,256 (default: a contiguous cache)",
    )
    add(
        "--queries",
        type=parse_size,
        metavar="N",
        help="new tokens of each sequence (default: 1)",
    )
    add("--mla", action="store_true", help="decode with multi-head latent attention")
    add(
        "--heads",
        type=parse_heads,
        metavar="LIST",
        help="query heads / kv heads (default: 32/8; on a CPU 8/2; with --mla 128/1)",
    )
    add(
        "--head-dim",
        dest="head_dims",
        type=parse_head_dims,
        metavar="LIST",
        help="head dim (default: 128; on a CPU 64; with --mla 576/512)",
    )
    add("--dtype", type=parse_dtype, help="dtype (default: bfloat16; on a CPU float32)")
    add(
        "--world-size",
        type=parse_ranks,
        metavar="N",
        help="number of ranks (default: 1, or as many as torchrun started)",
    )
    add(
        "--threads",
        type=count_of("threads"),
        default=1,
        help="CPU threads of each rank (default: 1)",
    )
    add(
        "--device",
        choices=DEVICES,
        help="where to run (default: cuda if every rank can have a GPU)",
    )
    add(
        "--iters", type=count_of("repetitions"), help=f"timed repetitions (default: {DECODE_ITERS})"
    )
    add_report(parser)


def bench_comm(parser: argparse.ArgumentParser) -> None:
    """Measure messages between ranks: a hop of a ring, and each collective, by size.

        ring-attn bench comm --world-size 4 --size 64k,1M,16M
        torchrun --nnodes 2 --nproc-per-node 8 ... -m ring_attn bench comm --op hop

    A size is the number of bytes that a rank sends in a hop, or the size of the whole buffer of a
    collective. "GB/s" is size / time. "bus GB/s" is the rate of a link, with the factors of
    nccl-tests: GB/s x (n - 1) / n for all_gather, reduce_scatter and all_to_all, and twice as much
    for all_reduce. Each message is timed twice: without other work, and during a matrix product on
    the same device. "slower" says by how much longer the product takes with the message.
    """
    add = parser.add_argument
    sizes = f"{format_size(COMM_SIZES[0])} to {format_size(COMM_SIZES[-1])}"
    add(
        "--op",
        dest="ops",
        type=names_of(COMM_OPS, may_be_empty=False),
        default=",".join(COMM_OPS),
        metavar="LIST",
        help=f"some of {', '.join(COMM_OPS)} (default: all)",
    )
    add(
        "--size",
        dest="sizes",
        type=parse_sizes,
        metavar="LIST",
        help=f"bytes, such as 64k,1M (default: {sizes}; with --quick, and on a CPU, up to 4M)",
    )
    add(
        "--world-size",
        type=parse_ranks,
        metavar="N",
        help="number of ranks (default: 2, or as many as torchrun started)",
    )
    add(
        "--threads",
        type=count_of("threads"),
        default=1,
        help="CPU threads of each rank (default: 1)",
    )
    add(
        "--device",
        choices=DEVICES,
        help="where to run (default: cuda if every rank can have a GPU)",
    )
    add("--iters", type=count_of("repetitions"), help=f"timed repetitions (default: {COMM_ITERS})")
    add_report(parser)


def add_masks(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--mask",
        dest="masks",
        type=parse_masks,
        metavar="LIST",
        help=f"some of {FORMS}; FILE lists lengths of causal documents, which are repeated until "
        f"the sequence is full (default: {default})",
    )


def add_modes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mode",
        dest="modes",
        type=names_of(MODES, may_be_empty=False),
        metavar="LIST",
        default=",".join(MODES),
        help=f"some of {', '.join(MODES)}; with only fwd, no backward runs (default: all)",
    )


def add_budget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--budget",
        type=parse_seconds,
        metavar="SECONDS",
        help="start no measurement after this time (default: no limit)",
    )


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the options for the files that a benchmark writes or compares with."""
    add = parser.add_argument
    add(
        "--csv",
        metavar="PATH",
        type=parse_report,
        help="write all rows to this file as CSV (default: no file)",
    )
    add_plot(parser, "the rows")
    add(
        "--compare",
        metavar="OLD.json",
        type=Path,
        help="compare with the --json file of an earlier run (default: no comparison)",
    )
    add(
        "--threshold",
        metavar="PERCENT",
        type=parse_percent,
        help="the exit status is 1 if a median is longer by more than this percentage, and the "
        "ranges from 20 %% to 80 %% of the repetitions do not overlap (default: 10)",
    )
    add_common(parser)
