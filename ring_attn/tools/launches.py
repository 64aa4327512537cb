"""Our kernels one by one, in configs of choice: what `tune` times and `profile_kernels` looks at.

A case is one kernel over one rectangle of q rows and kv rows. `Bed` has what all launches of a case
share, so that configs differ in nothing else; `Kernels` is the whole attention made of them, for
the judge; `build` compiles a launch and runs it once, in a process that may break.

    fwd     alone: one launch does all      middle: a step of a ring, state carried in and out
    dkdv    dk and dv are continued, always
    dq      so is dq

Operations are counted as done: 2 matrix products forward, 4 for dk and dv, 3 for dq.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ring_attn.arguments import dtype_name, format_size, parse_size
from ring_attn.backends import get_backend
from ring_attn.bench.implementations import Data, Problem, reason
from ring_attn.bench.one_device import (
    OneDevice,
    add_device_arguments,
    chosen_of,
    one_device,
)
from ring_attn.kernels.launch import Launch
from ring_attn.testing import Inputs

if TYPE_CHECKING:
    from ring_attn.kernels.configs import Config
    from ring_attn.kernels.flash_fwd import Carried
    from ring_attn.kernels.step_table import Rectangle, StepTable

# Matrix products of a kernel, of 2 x pairs x head_dim operations each.
PRODUCTS = {"fwd": 2, "dkdv": 4, "dq": 3}

# Forwards in Gluon, by what `hopper_launch` is told.
GLUON_KIND = "gluon"
GLUON: dict[str, dict[str, Any]] = {
    "gluon": {"ping_pong": False},
    "gluon-ping-pong": {"ping_pong": True},
}

# Their tiles and stages beside those of `hopper_fwd.CONFIGS`, whose first one is tried in other
# orders of its tasks, too; what does not fit says so.
GLUON_TILES = ((128, 64, 3), (128, 64, 4), (128, 128, 3), (192, 64, 3), (192, 128, 2))

# A kernel that breaks the device's context should do so in a process that is there to break.
BUILD_RUNS = 3

# The frozen config of a kind.
Frozen = Callable[[str], "Config"]


@dataclass(frozen=True)
class Case:
    """One kernel over one rectangle.

    Attributes:
        kernel: of PRODUCTS.
        causal: a row sees keys up to its own position.
        rows: of q.
        cols: of k and v.
        middle: of the forward: the state is loaded and stored.
        variant: of GLUON, the forward of `hopper_fwd`; "" is `flash_fwd`'s.
    """

    kernel: str
    causal: bool
    rows: int
    cols: int
    middle: bool = False
    variant: str = ""

    @property
    def kind(self) -> str:
        """Its kind in the table of configs; forwards in Gluon are not in there."""
        if self.variant:
            return GLUON_KIND
        return self.kernel if self.causal else f"{self.kernel}_whole"

    @property
    def area(self) -> int:
        """Visible pairs of one head."""
        return self.rows * (self.rows + 1) // 2 if self.causal else self.rows * self.cols

    def flops(self, problem: Problem) -> int:
        """Operations of all its matrix products."""
        products = PRODUCTS[self.kernel] * problem.batch * problem.heads
        return 2 * products * self.area * problem.head_dim

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        cols = "" if self.cols == self.rows else f" x {format_size(self.cols)}"
        form = ", middle of a ring" if self.middle else ""
        name = " ".join(filter(None, (self.variant, self.kernel)))
        return f"{name} {mask} {format_size(self.rows)}{cols}{form}"


@dataclass(frozen=True, kw_only=True)
class CaseSetting(OneDevice):
    """Which kernels, over which sizes."""

    kernels: tuple[str, ...]
    full_rows: int
    causal_rows: int
    batch: int

    def rows(self, causal: bool) -> int:
        """Length of the sequence with a mask."""
        return self.causal_rows if causal else self.full_rows

    def cases(self) -> list[Case]:
        """Single kernels over whole sequences, the most valuable first."""
        order = (
            *(("fwd", False), ("fwd", True), ("dkdv", True), ("dkdv", False), ("dq", True)),
            ("dq", False),
        )
        return [
            Case(kernel, causal, self.rows(causal), self.rows(causal))
            for kernel, causal in order
            if kernel in self.kernels
        ]

    @property
    def words(self) -> tuple[str, ...]:
        """The options that describe it."""
        options = {
            "--kernels": ",".join(self.kernels),
            "--full-rows": format_size(self.full_rows),
            "--causal-rows": format_size(self.causal_rows),
            "--batch": str(self.batch),
            "--heads": f"{self.heads}/{self.kv_heads}",
            "--head-dim": str(self.head_dim),
            "--dtype": dtype_name(self.dtype),
            "--device": self.device.type,
        }
        return tuple(word for option in options.items() for word in option)

    def problem_of(self, causal: bool, rows: int) -> Problem:
        """The square problem of a case."""
        return Problem(
            self.batch, rows, self.heads, self.kv_heads, self.head_dim, causal, self.dtype,
            self.device,
        )  # fmt: skip


def add_case_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `case_setting`, and those of every command."""
    add = parser.add_argument
    add("--kernels", default=",".join(PRODUCTS), help=f"of {','.join(PRODUCTS)} (all)")
    add("--full-rows", type=parse_size, help="without a mask (16k; with --quick 4k, on a CPU 128)")
    add("--causal-rows", type=parse_size, help="causal (32k; with --quick 8k, on a CPU 128)")
    add("--batch", type=parse_size, default=1, help="sequences (1: these lengths fill a GPU)")
    add_device_arguments(parser)


def case_setting(args: argparse.Namespace) -> CaseSetting:
    """What the options describe.

    Raises:
        ValueError: options that cannot be, or kernels that cannot run here.
    """
    shared = one_device(args)
    if args.backend not in (None, "triton"):
        raise ValueError(f"these are the kernels of backend triton, got --backend {args.backend}")
    chosen = chosen_of("--kernels", args.kernels, PRODUCTS)
    gpu, quick = shared.device.type == "cuda", args.quick
    setting = CaseSetting(
        **{**vars(shared), "backend": "triton"},
        kernels=tuple(kernel for kernel in PRODUCTS if kernel in chosen),
        full_rows=args.full_rows or ((4096 if quick else 16384) if gpu else 128),
        causal_rows=args.causal_rows or ((8192 if quick else 32768) if gpu else 128),
        batch=args.batch,
    )
    spec = setting.problem_of(True, setting.causal_rows).spec
    refused = get_backend("triton").supports(spec, named=True)
    if refused is not None:
        raise ValueError(f"backend triton {refused}")
    return setting


def no_device(args: argparse.Namespace, name: str) -> bool:
    """Says so where there is no GPU, and nothing else was asked for."""
    if args.device is not None or torch.cuda.is_available():
        return False
    print(
        f"{name}: this machine has no GPU that torch can use; --device cpu takes tiny sizes and "
        "Triton's interpreter",
        file=sys.stderr,
    )
    return True


def label(config: Config) -> str:
    """A config by its tile, warps and stages, and what else is not as by default."""
    tile = f"{config.BLOCK_M}x{config.BLOCK_N} {config.num_warps}w {config.num_stages}s"
    sizes = ((name, format_size(x) if x >= 1024 else x) for name, x in extras(config).items())
    return " ".join([tile, *(f"{name}={size}" for name, size in sizes)])


def extras(config: Config) -> dict[str, Any]:
    """The optional fields of a config that differ from their defaults, but for its note."""
    return {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name not in ("note", *_required(config))
        and getattr(config, field.name) != field.default
    }


def table_line(arch: str, kind: str, head_dim: int, config: Config, note: str) -> str:
    """The line that puts a config into the table of `kernels/configs.py`."""
    words = [repr(getattr(config, name)) for name in _required(config)] + [repr(note)]
    words += [f"{name}={value!r}" for name, value in extras(config).items()]
    text = ", ".join(words).replace("'", '"')
    return f'("{arch}", "{kind}", {head_dim}): Config({text}),'


def _required(config: Config) -> list[str]:
    return [field.name for field in fields(config) if field.default is MISSING]


class Launches:
    """Launches over given tensors; the mask is causal or none."""

    def __init__(self, inputs: Inputs, causal: bool) -> None:
        self._inputs, self._causal = inputs, causal
        self._scale = inputs.q.size(-1) ** -0.5

    def forward(
        self,
        config: Config,
        state: Carried,
        cols: tuple[int, int],
        *,
        first: bool,
        last: bool,
        variant: str = "",
    ) -> Launch:
        """The launch that folds some columns; NotImplementedError where the config cannot."""
        from ring_attn.kernels.flash_fwd import forward_launch

        q, k, v, _ = self._inputs
        table = self._table(config, cols, num_rows=q.size(1) if first or last else 0)
        if variant:
            from ring_attn.kernels.hopper_fwd import can_run, hopper_launch

            if not can_run(q, k, v, table, softcap=0.0):
                raise NotImplementedError("the forward in Gluon does not take these tensors")
            return hopper_launch(
                q, k, v, state, table, config, softmax_scale=self._scale, first=first, last=last,
                **GLUON[variant],
            )  # fmt: skip
        return forward_launch(
            q, k, v, state, table, config, softmax_scale=self._scale, first=first, last=last
        )

    def delta(self, out: Tensor, delta: Tensor) -> Launch:
        """The launch that writes rowsum(dout * out)."""
        from ring_attn.kernels.configs import select
        from ring_attn.kernels.flash_bwd import delta_launch

        return delta_launch(out, self._inputs.dout, delta, select("delta", out, out.size(-1)))

    def dkdv(self, config: Config, stats: Sequence[Tensor], dk: Tensor, dv: Tensor) -> Launch:
        """The launch that adds dk and dv; `stats` are lse and delta. May raise as `forward`."""
        from ring_attn.kernels.flash_bwd import dkdv_launch

        table = self._backward_table(config, kv_rows=True)
        return dkdv_launch(
            *self._inputs, stats[0], stats[1], dk, dv, table, config, softmax_scale=self._scale
        )

    def dq(self, config: Config, stats: Sequence[Tensor], dq: Tensor) -> Launch:
        """The launch that adds dq, likewise."""
        from ring_attn.kernels.flash_bwd import dq_launch

        table = self._backward_table(config, kv_rows=False)
        return dq_launch(
            *self._inputs, stats[0], stats[1], dq, table, config, softmax_scale=self._scale
        )

    def _backward_table(self, config: Config, *, kv_rows: bool) -> StepTable:
        return self._table(config, (0, self._inputs.k.size(1)), kv_rows=kv_rows)

    def _table(
        self, config: Config, cols: tuple[int, int], *, kv_rows: bool = False, num_rows: int = 0
    ) -> StepTable:
        from ring_attn.kernels.step_table import make_step_table, transposed

        q, (start, stop) = self._inputs.q, cols
        rectangles: list[Rectangle] = []
        if start < stop:
            rectangles = [(0, q.size(1), start, stop, None, 0 if self._causal else None)]
        blocks = (config.BLOCK_M, config.BLOCK_N)
        if kv_rows:
            rectangles, blocks = transposed(rectangles), (config.BLOCK_N, config.BLOCK_M)
        return make_step_table(
            rectangles, *blocks, q.device, descending=not kv_rows, num_rows=num_rows
        )


class Kernels:
    """The whole attention by kernels of our own choice of configs; an `Attention`."""

    name = "ours"

    def __init__(
        self,
        inputs: Inputs,
        causal: bool,
        configs: Mapping[str, Config],
        *,
        ends: Config | None = None,
        variant: str = "",
    ) -> None:
        """
        Args:
            inputs: q, k, v, dout.
            causal: the mask.
            configs: of "fwd", "dkdv" and "dq".
            ends: if given, the forward takes three steps as a ring does: the first and the last
                with this config, the one in the middle with that of "fwd".
            variant: of the forward that "fwd" is the config of.
        """
        self._inputs, self._launches = inputs, Launches(inputs, causal)
        self._configs, self._ends, self._variant = configs, ends, variant
        self._results: list[Tensor] = []
        self.lse: Tensor | None = None

    def forward(self) -> None:
        """Computes `out` and lse."""
        from ring_attn.kernels.flash_fwd import Carried

        state, config, variant = Carried(), self._configs["fwd"], self._variant
        last = self._empty_results(state)
        if self._ends is None:
            everything = (0, self._inputs.k.size(1))
            self._launches.forward(
                config, state, everything, first=True, last=True, variant=variant
            ).run()
        else:
            start = empty_state(self._inputs)
            state.acc, state.m, state.l = start.acc, start.m, start.l
            # From the last columns down, as kernels fold them.
            runs = thirds(self._inputs.k.size(1), config.BLOCK_N)
            for index, cols in enumerate(reversed(runs)):
                step, which = (config, variant) if index == 1 else (self._ends, "")
                self._launches.forward(
                    step, state, cols, first=index == 0, last=index == 2, variant=which
                ).run()
        out, self.lse = last
        self._results = [out]

    def backward(self) -> None:
        """Computes the gradients of the last forward."""
        q, k, v, _ = self._inputs
        assert self.lse is not None, "forward comes first"
        out, delta = self._results[0], torch.empty_like(self.lse)
        self._launches.delta(out, delta).run()
        dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
        stats = (self.lse, delta)
        self._launches.dq(self._configs["dq"], stats, dq).run()
        self._launches.dkdv(self._configs["dkdv"], stats, dk, dv).run()
        scale = q.size(-1) ** -0.5  # kernels leave it out
        self._results = [out, *(x.to(q.dtype) for x in (dq.mul_(scale), dk.mul_(scale), dv))]

    def results(self) -> list[Tensor]:
        """out, and after a backward dq, dk, dv."""
        return self._results

    def release(self) -> None:
        """Lets go of the gradients."""
        self._results = self._results[:1]

    def _empty_results(self, state: Carried) -> tuple[Tensor, Tensor]:
        """NaN, so that what no kernel writes is seen."""
        q, _, v, _ = self._inputs
        state.out = q.new_full((*q.shape[:3], v.size(3)), float("nan"))
        state.lse = q.new_full((q.size(0), q.size(2), q.size(1)), float("nan"), dtype=torch.float32)
        return state.out, state.lse


def thirds(cols: int, block: int) -> list[tuple[int, int]]:
    """Three runs of columns, none of which cuts a block."""
    cuts = [0, *(part * cols // 3 // block * block for part in (1, 2)), cols]
    return list(zip(cuts, cuts[1:], strict=False))


def empty_state(inputs: Inputs) -> Carried:
    """acc, m and l for a forward in several steps; the first writes them."""
    from ring_attn.kernels.flash_fwd import Carried

    q, _, v, _ = inputs
    stats = (q.size(0), q.size(2), q.size(1))
    acc = q.new_empty((*q.shape[:3], v.size(3)), dtype=torch.float32)
    return Carried(acc, *(q.new_empty(stats, dtype=torch.float32) for _ in range(2)))


@dataclass(frozen=True)
class Trial:
    """A launch that can be run again and again.

    Attributes:
        launch: of one config.
        continued: what it adds to, and what that is before; None is 0.
        results: what it writes.
    """

    launch: Launch
    continued: tuple[tuple[Tensor, Tensor | None], ...]
    results: tuple[Tensor, ...]

    def prepare(self) -> None:
        """Sets what is continued back."""
        for x, before in self.continued:
            x.zero_() if before is None else x.copy_(before)

    def run(self) -> Any:
        """Enqueues it; the compiled kernel, None by the interpreter."""
        return self.launch.run()


class Bed:
    """The inputs of a case and what its launches write to, the same for all configs."""

    def __init__(self, case: Case, data: Data, frozen: Frozen) -> None:
        """
        Args:
            case: one kernel.
            data: of a problem with as many rows.
            frozen: configs of what comes before the kernel.
        """
        from ring_attn.kernels.flash_fwd import Carried

        q, k, v, dout = data.rows_first
        inputs = Inputs(q, k[:, : case.cols], v[:, : case.cols], dout)
        self.case, self._cols = case, (0, case.cols)
        self._launches = Launches(inputs, case.causal)
        whole = Kernels(inputs, case.causal, {"fwd": frozen(case_of_forward(case).kind)})
        if case.middle:
            self._state = empty_state(inputs)
            first = self._launches.forward(
                frozen("fwd_whole"), self._state, self._cols, first=True, last=False
            )
            first.run()
            self._before = self._state.copy()
            return
        whole.forward()
        (out,), lse = whole.results(), whole.lse
        assert lse is not None, "a forward makes both"
        if case.kernel == "fwd":
            self._state = Carried(out=out, lse=lse)
            return
        delta = torch.empty_like(lse)
        self._launches.delta(out, delta).run()
        self._stats = (lse, delta)
        continued = (q,) if case.kernel == "dq" else (inputs.k, inputs.v)
        self._gradients = tuple(
            torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in continued
        )

    def trial(self, config: Config) -> Trial:
        """The case in one config; raises what the launcher raises."""
        if self.case.kernel == "fwd":
            return self._forward(config)
        launch = getattr(self._launches, self.case.kernel)(config, self._stats, *self._gradients)
        return Trial(launch, tuple((x, None) for x in self._gradients), self._gradients)

    def _forward(self, config: Config) -> Trial:
        state, middle = self._state, self.case.middle
        launch = self._launches.forward(
            config, state, self._cols, first=not middle, last=not middle,
            variant=self.case.variant,
        )  # fmt: skip
        if not middle:
            assert state.out is not None and state.lse is not None, "made with the bed"
            return Trial(launch, (), (state.out, state.lse))
        now, before = ((x.acc, x.m, x.l) for x in (state, self._before))
        carried = tuple(x for x in now if x is not None)
        return Trial(launch, tuple(zip(carried, before, strict=True)), carried)


def case_of_forward(case: Case) -> Case:
    """The forward over a case's rectangle."""
    return Case("fwd", case.causal, case.rows, case.cols)


def frozen_of(problem: Problem) -> Frozen:
    """The table's configs for a problem on its device."""
    from ring_attn.kernels import configs

    arch = configs.architecture(problem.device)
    return lambda kind: configs.frozen(kind, arch, problem.head_dim, problem.dtype)


def gluon_configs(arch: str, head_dim: int, dtype: torch.dtype) -> tuple[Config, ...]:
    """Those of the forward in Gluon; none where it does not run, or with a triton without it."""
    if arch != "sm_90" or dtype not in (torch.float16, torch.bfloat16):
        return ()
    try:
        from ring_attn.kernels import hopper_fwd
    except (ImportError, AttributeError) as error:
        print(f"no forward in Gluon: {reason(error)}", file=sys.stderr)
        return ()
    found = [replace(config, note="") for config in hopper_fwd.CONFIGS.get(head_dim, ())]
    others = [
        replace(config, BLOCK_M=block_m, BLOCK_N=block_n, num_stages=stages)
        for config in found[:1]
        for block_m, block_n, stages in GLUON_TILES
    ]
    orders = [
        order
        for config in found[:1]
        for order in (replace(config, programs_per_sm=0), replace(config, l2_bytes=0))
    ]
    return tuple(dict.fromkeys([*found, *others, *orders]))


@dataclass(frozen=True)
class Task:
    """What `build` makes: plain data, which travels between processes."""

    case: Case
    problem: Problem
    config: Config


@dataclass(frozen=True)
class Built:
    """What came of a task; of a kernel that is interpreted there are no figures.

    Attributes:
        registers: per thread.
        spill_bytes: memory per thread that registers did not hold.
        shared_bytes: per program.
        seconds: to compile it, or to find it compiled, and to run it BUILD_RUNS times.
        note: why there is no kernel.
    """

    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    seconds: float = 0.0
    note: str = ""


def build(task: Task) -> tuple[Built, bool]:
    """Compiles a config and runs it, which puts it into triton's cache on disk.

    Returns:
        What came of it, and whether this process can go on: after a kernel has broken the device's
        context it cannot.
    """
    start = time.perf_counter()
    try:
        trial = _bed(task.case, task.problem).trial(task.config)
        for _ in range(BUILD_RUNS):
            trial.prepare()
            compiled = trial.run()
            synchronize(task.problem.device)
    except Exception as error:
        return Built(seconds=time.perf_counter() - start, note=reason(error)), alive(
            task.problem.device
        )
    return figures(compiled, time.perf_counter() - start), True


def figures(compiled: Any, seconds: float) -> Built:
    """Of a compiled kernel that has been loaded; triton counts spilled registers of 4 bytes."""
    if compiled is None:
        return Built(seconds=seconds)
    return Built(compiled.n_regs, 4 * compiled.n_spills, compiled.metadata.shared, seconds)


def synchronize(device: torch.device) -> None:
    """Waits for the device; an error of a kernel is raised here."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def alive(device: torch.device) -> bool:
    """False once a kernel has broken the device's context: nothing runs any more then."""
    try:
        synchronize(device)
    except RuntimeError:
        return False
    return True


@lru_cache(maxsize=1)
def _bed(case: Case, problem: Problem) -> Bed:
    return Bed(case, problem.data(), frozen_of(problem))
