"""The help and the options of each command. They do not import torch; other modules run."""

from __future__ import annotations

import argparse
from pathlib import Path

from ring_attn.cli.arguments import (
    add_common,
    add_plot,
    add_switch,
    count_of,
    names_of,
    parse_dtype,
    parse_heads,
    parse_ranks,
    parse_seconds,
    parse_seed,
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

# The kernels that `tune` times.
KERNELS = ("fwd", "dkdv", "dq")


def doctor(parser: argparse.ArgumentParser) -> None:
    """`ring-attn doctor`: check whether this machine is ready, and show how to repair it.

        ring-attn doctor
        torchrun --nproc-per-node 8 -m ring_attn doctor    names ranks that differ

    It runs a ring of two ranks and compares it with attention in float64, shows which backend
    runs each kind of call and why, and checks files and settings of NCCL. Under torchrun, all ranks
    form one ring. With --quick, it runs no ring. The exit status is 1 if something is wrong.
    """
    add_common(parser)


def env(parser: argparse.ArgumentParser) -> None:
    """`ring-attn env`: show installed versions, hardware, and the backends that can run.

    The output is JSON. null means that a backend can run, that a package is not installed, or that
    a variable is not set. The output has no names of hosts, users or paths, except in variables.
    """
    add_common(parser, quick=False)


# More than 60 lines, one argument a line.
def verify(parser: argparse.ArgumentParser) -> None:
    """`ring-attn verify`: compare ring attention on this machine with dense attention in float64.

    A case is one call, with its strategy, backend, layout, mask, dtype, heads, length, softcap and
    sinks. Each rank computes its shard. Rank 0 compares `out`, `lse` and every gradient with the
    bound of `ring_attn.testing`, which follows from the error of plain PyTorch in the same dtype.
    The output shows error / bound; a case fails if this ratio is above 1. All buffers are filled
    with NaN before the call.

        ring-attn verify                          a sample of the table, in a minute
        ring-attn verify --all --world-size 3 --strategy ring hybrid
        torchrun --nproc-per-node 4 -m ring_attn verify

    A sample has every strategy with every layout, mask, backend and dtype; `--seed` draws another
    sample. The exit status is 1 if a case failed or none passed. Some cases are not possible with
    this number of ranks, because the strategy or the backend does not support them. The command
    skips these cases, except for a few, for which it checks that all ranks raise an error.
    """
    add = parser.add_argument
    add(
        "--world-size",
        type=parse_ranks,
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
        type=parse_seed,
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
        type=count_of("threads"),
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
        type=parse_ranks,
        metavar="N",
        help=f"numbers of ranks (default: {sizes}, and one more if these have equally many rows; "
        "with --quick 2)",
    )
    add(
        "--timeout",
        type=parse_seconds,
        default=120.0,
        metavar="S",
        help="time limit of a run in seconds (default: 120)",
    )
    tiny = "shrink models of transformers to 2 layers, few heads and random weights"
    add("--tiny", action="store_true", help=f"{tiny} (default: leave the models as they are)")
    add_common(parser)


def plan(parser: argparse.ArgumentParser) -> None:
    """`ring-attn plan`: predict the best strategy for a call on a cluster, without running it.

    The table has every strategy's times, bytes, exposed communication and memory. Times come from a
    simulation of the cluster, which is built in or was measured by `ring-attn calibrate`. The
    command needs no process group and no GPU.

        ring-attn plan --seqlen 1M --world-size 64 --kv-heads 8 --cluster h200

    With --model, the command plans a whole training step: the memory of a rank, the time of a step,
    and the settings for trainers. The exit status is 1 if the model does not fit.

        ring-attn plan --model llama-3-8b --seqlen 1M --world-size 64
        ring-attn plan --model config.json --world-size 8 --fits    how long?
        ring-attn plan --model config.json --target 1M --tp 2       how many GPUs?

    Of a transformer of diffusers, the command plans a training step, or with --steps its inference.
    Its rows are those of the text, which --replicated gives, and of the video.

        ring-attn plan --model wan-2.1-14b --seqlen 76k --replicated 512 \\
            --world-size 8 --steps 50
    """
    _add_call(parser)
    _add_model(parser)
    _add_candidates(parser)
    _add_cluster(parser)
    add_plot(parser, "the times of strategies, and the timeline and memory of the best one,")
    add_common(parser)


def _add_call(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan` that describe the call."""
    # Longer than a screen: a list of options, in the order of the help text.
    add = parser.add_argument
    add(
        "--seqlen",
        type=parse_size,
        help="length of the whole sequence, such as 1M (default: none; required, except with "
        "--fits or --target)",
    )
    add(
        "--world-size",
        type=parse_ranks,
        help="number of ranks (default: none; required, except with --target)",
    )
    add("--batch", type=count_of("sequences"), default=1, help="sequences at a time (default: 1)")
    add(
        "--heads",
        dest="nheads",
        type=count_of("heads"),
        metavar="N",
        help=f"heads of q (default: {HEADS})",
    )
    add(
        "--kv-heads",
        dest="nheads_kv",
        type=count_of("heads"),
        metavar="N",
        help="heads of k and v (default: as many as --heads)",
    )
    add(
        "--head-dim",
        dest="headdim",
        type=parse_size,
        metavar="N",
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
    parser.set_defaults(causal=None)  # transformers of diffusers have another default
    add(
        "--window",
        dest="window_size",
        type=parse_window,
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
        help="number of positions that every rank holds, such as text; they are the first of "
        "--seqlen (default: 0)",
    )
    add_switch(parser, "--backward", "plan the backward too")


# Options of `plan` that are for a model only, by their attributes.
MODEL_OPTIONS = (
    "fits",
    "target",
    "cp",
    "tp",
    "pp",
    "ep",
    "fsdp",
    "microbatches",
    "recompute",
    "loss",
    "optimizer",
    "weights",
    "steps",
)


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan` that describe the training of a model."""
    add = parser.add_argument
    add(
        "--model",
        metavar="NAME|FILE",
        help="plan the training of a model: a config.json of Hugging Face, a folder with one, or a "
        "name such as llama-3-8b or wan-2.1-14b; an unknown name lists all names. Also the config "
        "of a transformer of diffusers (default: plan one call of attention)",
    )
    add("--fits", action="store_true", help="find the longest sequence that fits")
    add(
        "--target",
        type=parse_size,
        metavar="SEQLEN",
        help="find the fewest ranks for this length, such as 1M (default: use --world-size)",
    )
    _add_degrees(parser)
    add(
        "--recompute",
        choices=("none", "attention", "full"),
        help="what the backward computes again: nothing, all except attention, or all (default: "
        "the fastest choice that fits)",
    )
    add(
        "--loss",
        choices=("logits", "fused"),
        help="logits: compute all logits at once; fused: compute projection and loss in chunks, as "
        "Liger does (default: the fastest choice that fits)",
    )
    add(
        "--optimizer",
        choices=("adamw", "adamw-8bit", "sgd", "momentum", "none"),
        help="optimizer; its states need memory (default: adamw)",
    )
    add(
        "--weights",
        type=parse_dtype,
        metavar="DTYPE",
        help="dtype of weights and gradients (default: float32, with products in --dtype; in "
        "inference that of --dtype)",
    )
    add(
        "--steps",
        type=count_of("steps"),
        metavar="N",
        help="denoising steps of a generation: plan the inference of a transformer of diffusers "
        "(default: plan training; with --no-backward one step)",
    )


def _add_degrees(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan` that say how ranks share a model."""
    for name, noun, text in (
        ("cp", "ranks", "ranks that share each sequence (default: all ranks / (tp x pp))"),
        ("tp", "ranks", "ranks that share each layer (tensor parallelism; default: 1)"),
        ("pp", "stages", "stages of a pipeline (default: 1)"),
        ("ep", "ranks", "ranks that share the experts (default: 1)"),
        (
            "fsdp",
            "ranks",
            "ranks that share weights and optimizer (default: all ranks / (tp x pp), or 1 with "
            "--steps)",
        ),
        ("microbatches", "batches", "batches of a step (default: the number of stages)"),
    ):
        parser.add_argument(f"--{name}", type=count_of(noun), metavar="N", help=text)


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
        "consider only strategies whose results are bitwise identical at every world size",
        default=None,
    )
    add(
        "--check",
        action="store_true",
        help="compare the programs of all ranks of the best strategy with each other, and draw "
        "the program of rank 0",
    )
    add(
        "--verbose",
        action="store_true",
        help="also list the candidates that were not simulated, with the reasons",
    )


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan` that describe the cluster and its simulation."""
    add = parser.add_argument
    add(
        "--cluster",
        metavar="NAME|FILE",
        help="h100, h200, a100, b200, or a file of ring-attn calibrate (default: the file "
        "RING_ATTN_CLUSTER, or this machine's GPU; h100 without a GPU)",
    )
    add("--node-size", type=count_of("devices"), help="devices of a node (default: 8)")
    add(
        "--exact",
        action="store_true",
        help="simulate every rank, up to 256 ranks (default: simulate only a few of the ranks that "
        "do the same work)",
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
    add("--world-size", type=parse_ranks, default=2, help="number of ranks (default: 2)")
    add("--heads", type=count_of("heads"), default=8, help="heads of q, k and v (default: 8)")
    add("--head-dim", type=parse_size, default=64, help="head dim of q, k and v (default: 64)")
    add("--dtype", type=parse_dtype, default="float32", help="of q, k and v (default: float32)")
    add("--backend", default="auto", help="as for ring_attention (default: auto)")
    add(
        "--threads",
        type=count_of("threads"),
        default=1,
        help="CPU threads of each rank (default: 1)",
    )
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
        type=names_of(KERNELS, may_be_empty=False),
        default=",".join(KERNELS),
        help=f"some of {','.join(KERNELS)} (default: all)",
    )
    add_device_arguments(parser)


def add_device_arguments(parser: argparse.ArgumentParser, heads: str = "32/8") -> None:
    """Add the options of a search on one device; `heads` is the default on a GPU."""
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
        type=parse_seconds,
        metavar="SECONDS",
        help="start no measurement after this time (default: no limit)",
    )
    add("--device", choices=DEVICES, help="where to run (default: cuda if there is a GPU)")
    add_common(parser)
