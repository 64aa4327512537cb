"""The figures that the package assumes and that a GPU must measure, each with its place.

`python -m dev.gpu.estimates` writes their table, bench/results/GPU.md, anew. A test compares the
table with this list, and the list with the code: a new estimate in `backends/rates.py` or
`planning/devices.py` without a row fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from dev.gpu.cells import Figures
from dev.gpu.results import Row
from dev.gpu.screen import figures_of
from ring_attn.backends import rates
from ring_attn.backends.rates import Rate, Rates
from ring_attn.machines import count
from ring_attn.machines.cluster import Host, Link
from ring_attn.planning import devices
from ring_attn.planning.model import attention, memory, step
from ring_attn.transport import options

RESULTS = Path(__file__).parents[2] / "bench/results"
TABLE, MEASURED = RESULTS / "GPU.md", RESULTS / "gpu_measured.json"

Cells = dict[str, Row]

# Cards of the built-in architectures.
CARDS = {"sm_80": "A100", "sm_90": "H100 or H200", "sm_100": "B200"}

OTHER_CARD = "`speed` and `sizes` on that card"
TWO_GPUS = "`ring-attn calibrate` on two GPUs"
BY_HAND = "by hand: `ring-attn bench kernel`"
TWO_NODES = "by hand: `sendrecv_perf` of nccl-tests on two nodes"
NO_STAGE = (OTHER_CARD, TWO_GPUS, BY_HAND, TWO_NODES)

# Implementations of the stage `speed` by the names of their backends.
BACKENDS = {
    "triton": "ours",
    rates.PORTABLE: "portable",
    "cudnn": "cudnn",
    "aten": "torch flash",
}


@dataclass(frozen=True)
class Estimate:
    """A figure that is assumed.

    Attributes:
        key: unique, by which a measured figure is stored.
        what: the figure and its unit.
        assumed: as the code has it now.
        file: where it is used.
        stage: where it is measured.
        measured: the figure, of the cells of a run; None if these lack it.
    """

    key: str
    what: str
    assumed: float
    file: str
    stage: str
    measured: Callable[[Cells], float | None] = lambda cells: None


def estimates() -> list[Estimate]:
    """Return all estimates, in the order of the table."""
    return [
        *_rates(),
        *_bandwidths(),
        *_hosts(),
        *_posts_of_second_class(),
        *_links(),
        *_others(),
        *_of_models(),
    ]


def _rates() -> Iterator[Estimate]:
    """Rates whose source is not a published figure alone."""
    for architecture, backends in rates.RATES.items():
        for backend, of_backend in backends.items():
            if not is_open(of_backend):
                continue
            for direction in ("forward", "backward"):
                rate: Rate = getattr(of_backend, direction)
                here = architecture == "sm_90" and backend in BACKENDS
                other = BY_HAND if architecture == "sm_90" else OTHER_CARD
                yield Estimate(
                    key=f"{architecture} {backend} {direction}",
                    what=f"{CARDS[architecture]}, {backend}, {direction}: TFLOP/s",
                    assumed=rate.flops / 1e12,
                    file="ring_attn/backends/rates.py",
                    stage="`speed`, `sizes`" if here else other,
                    measured=_rate_of(backend, direction) if here else lambda cells: None,
                )


def is_open(of_backend: Rates) -> bool:
    """Whether rates are estimates, or were until a GPU measured them."""
    return "estimate" in of_backend.source or of_backend.source.startswith("measured")


def _rate_of(backend: str, direction: str) -> Callable[[Cells], float | None]:
    """TFLOP/s of large tiles, fitted to the cells of the speeds."""

    def measured(cells: Cells) -> float | None:
        from dev.gpu.fits import fitted_rate

        rate = fitted_rate(cells, BACKENDS[backend], direction)
        return None if rate is None else rate.flops / 1e12

    return measured


def _bandwidths() -> Iterator[Estimate]:
    for architecture, bandwidth in rates.MEMORY_BANDWIDTH.items():
        here = architecture == "sm_90"
        yield Estimate(
            key=f"{architecture} memory bandwidth",
            what=f"{CARDS[architecture]}, passes over memory: TB/s",
            assumed=bandwidth / 1e12,
            file="ring_attn/backends/rates.py",
            stage="`environment`" if here else OTHER_CARD,
            measured=_figure("environment: ceilings", "copy_TBs") if here else lambda cells: None,
        )


def _hosts() -> Iterator[Estimate]:
    for field in fields(Host):
        yield Estimate(
            key=f"host {field.name}",
            what=f"host time of a {field.name}: us",
            assumed=getattr(devices.HOST, field.name) * 1e6,
            file="ring_attn/planning/devices.py",
            stage="`costs`",
            measured=_figure("costs: host", f"{field.name}_us"),
        )


def _posts_of_second_class() -> Iterator[Estimate]:
    yield Estimate(
        key="host post nccl2",
        what="host time of a post over torch's second class, nccl2: us",
        assumed=devices.HOST.post * 1e6,
        file="ring_attn/planning/devices.py",
        stage="`graphs`",
        measured=_figure("graphs: nccl2 to itself", "post_us"),
    )


def _links() -> Iterator[Estimate]:
    links: dict[str, Link] = {**devices.INSIDE, "between nodes": devices.BETWEEN}
    for name, link in links.items():
        figures = {"latency: us": link.latency * 1e6, "bandwidth: GB/s": link.bandwidth / 1e9}
        for what, assumed in figures.items():
            yield Estimate(
                key=f"link {name} {what.split(':')[0]}",
                what=f"{name}, {link.name}, {what}",
                assumed=assumed,
                file="ring_attn/planning/devices.py",
                stage=TWO_GPUS,
            )


def _others() -> Iterator[Estimate]:
    # Longer than a screen: a table, whose rows are independent.
    yield Estimate(
        "off-rail latency",
        "time that a message between nodes takes longer to a port on another rail: us",
        devices.OFF_RAIL_LATENCY * 1e6,
        "ring_attn/planning/devices.py",
        TWO_NODES,
    )
    fa3 = rates.RATES["sm_90"]["triton"].forward
    yield Estimate(
        "launch",
        "time before a step's tiles start: us",
        fa3.launch * 1e6,
        "ring_attn/backends/rates.py",
        "`speed`, `sizes`",
        _launch_us,
    )
    yield Estimate(
        "slowdown",
        "share of its speed that attention loses beside messages",
        devices.builtin_cluster("H100").slowdown,
        "ring_attn/planning/devices.py",
        "`costs`",
        _figure("costs: slowdown", "share"),
    )
    yield Estimate(
        "one-pass kv heads",
        "batch x kv heads from which one kernel computes dq, dk and dv",
        rates.ONE_PASS_KV_HEADS,
        "ring_attn/backends/rates.py",
        BY_HAND,
    )
    yield Estimate(
        "one-pass programs",
        "programs for each SM from which one kernel computes dq, dk and dv of fewer kv heads",
        rates.ONE_PASS_PROGRAMS_PER_SM,
        "ring_attn/backends/rates.py",
        BY_HAND,
    )
    yield Estimate(
        "channels",
        "most channels of a communicator, each of which takes an SM",
        options.MAX_CTAS,
        "ring_attn/transport/options.py",
        "`multi`",
        _figure("multi: 2 ranks: channels", "channels"),
    )
    yield Estimate(
        "channel bandwidth",
        "bytes that one of NCCL's channels copies over NVLink: GB/s",
        devices.CHANNEL_BANDWIDTH / 1e9,
        "ring_attn/planning/devices.py",
        TWO_GPUS,
    )
    yield Estimate(
        "connection bytes",
        "memory of a channel that receives from a rank: MiB",
        count.CONNECTION_BYTES / 2**20,
        "ring_attn/machines/count.py",
        "`multi`",
        _figure("multi: 2 ranks: connection_memory", "MiB"),
    )
    yield Estimate(
        "first use",
        "time of the case of a first use, at most: s",
        2.0,
        "ring_attn/attention/first_use.py",
        "`costs`",
        _figure("costs: first use", "seconds"),
    )
    yield Estimate(
        "decode",
        "one token, 64k rows of 8 kv heads of 128, as bandwidth: TB/s",
        rates.MEMORY_BANDWIDTH["sm_90"] / 1e12,
        "ring_attn/strategies/tree_decode.py",
        "`costs`",
        _figure("costs: decode", "TBs"),
    )
    yield Estimate(
        "exposed time",
        "communication of two ranks that is not hidden: share of the time",
        0.0,
        "ring_attn/machines/time.py",
        "`ring-attn bench ring` on two GPUs",
    )


def _of_models() -> Iterator[Estimate]:
    """Yield what plans of whole models assume."""
    assumed = {
        **{
            f"products of a model on an {CARDS[name]}: share of the peak": (step, share)
            for name, share in step.PRODUCT_SHARES.items()
        },
        "recurrences of a model: share of the speed of products": (
            attention,
            attention.RECURRENCE_SHARE,
        ),
        "memory of CUDA and its libraries: GB": (memory, memory.CONTEXT_BYTES / 1e9),
        "memory lost to fragmentation: share of what comes and goes": (
            memory,
            memory.FRAGMENTATION,
        ),
        "channels of a communicator of FSDP, TP, PP or EP": (memory, memory.NCCL_CHANNELS),
    }
    for what, (module, value) in assumed.items():
        yield Estimate(
            key=f"model {what.partition(':')[0]}",
            what=what,
            assumed=value,
            file=module.__name__.replace(".", "/") + ".py",
            stage="a training step, beside `ring-attn plan --model`",
        )


def _figure(cell: str, name: str) -> Callable[[Cells], float | None]:
    """A figure of a cell; that of several ranks is rank 0's."""

    def measured(cells: Cells) -> float | None:
        figures = figures_of(cells, cell)
        if "ranks" in figures:
            figures = figures["ranks"][0]
        value = figures.get(name)
        return None if value is None else float(value)

    return measured


def _launch_us(cells: Cells) -> float | None:
    from dev.gpu.fits import fitted_rate

    rate = fitted_rate(cells, "ours", "forward")
    return None if rate is None else rate.launch * 1e6


# -- the table

HEAD = """# What a GPU must measure

Each row is a figure that the package assumes. No row without a card was measured.
`python -m dev gpu` measures those with a stage, `python -m dev gpu --record FILE` writes them here,
and `python -m dev.gpu.estimates` writes this table anew from `dev/gpu/estimates.py`.

| figure | assumed | used in | measured by | measured | card, date |
|---|---|---|---|---|---|
"""


def table() -> str:
    """Return the text of bench/results/GPU.md."""
    found = measured()
    lines = []
    for one in estimates():
        of_one = found.get(one.key)
        value = "" if of_one is None else f"{of_one['value']:.4g}"
        where = "" if of_one is None else f"{of_one['card']}, {of_one['date']}"
        assumed = one.assumed if of_one is None else of_one["assumed"]
        cells = (one.what, f"{assumed:.4g}", f"`{one.file}`", one.stage, value, where)
        lines.append("| " + " | ".join(cells) + " |\n")
    return HEAD + "".join(lines)


def measured() -> dict[str, Figures]:
    """Return the recorded figures by the keys of their estimates."""
    found: dict[str, Figures] = json.loads(MEASURED.read_text())
    return found


if __name__ == "__main__":
    TABLE.write_text(table())
