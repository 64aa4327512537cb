"""Finds the fastest configs of the kernels on one device: built, checked, then timed in turn.

    ring-attn tune --json DIR/tune.json        on a GPU
    ring-attn tune --device cpu                in the interpreter: it works, no more

Case by case, the most valuable first, as far as --budget goes:

    fwd full, fwd causal, dkdv, dq causal and full      all configs of `configs.search_space`, the
                                                        fastest in more orders of its tasks, and
                                                        forwards of `hopper_fwd` on sm_90
    backward causal, full                               whole, with frozen configs and the best
    a step of a ring                                    alone, and with the state carried in and out

The candidates of a case are

    built      by --jobs processes, which fill triton's cache on disk and run each once: what does
               not compile, does not fit, hangs or breaks the device costs its own row alone
    checked    against float64 (`judge`), beside the other kernels in their frozen configs; and runs
               of a shorter sequence, --repeats of them, must be equal bit for bit
    timed      in turn within every repetition, beside cuDNN's and torch's flash attention (whole
               backwards beside dkdv and dq); more often, the closer they are to the best

What is wrong, or differs between two runs, is said and never recommended. Operations are counted
as done (`launches`); of a whole backward as FlashAttention's papers do, 2.5 times the forward's.

The last lines are ready for the table of `kernels/configs.py`. One config serves all cases of its
kind, by the geometric mean (`tune_report`). Exit status 1 if a frozen config is wrong.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ring_attn.arguments import command_line, format_size, parse_size
from ring_attn.bench.implementations import Attention, Data, Problem, make, reason, unavailable
from ring_attn.bench.judge import Judge
from ring_attn.bench.one_device import Findings, finish
from ring_attn.bench.timing import Watch, head_start_ms, watch_for
from ring_attn.env import machine
from ring_attn.launch import num_cores
from ring_attn.testing import Verdict
from ring_attn.tools.launches import (
    GLUON,
    PRODUCTS,
    Bed,
    Built,
    Case,
    CaseSetting,
    Kernels,
    Task,
    add_case_arguments,
    alive,
    build,
    case_setting,
    frozen_of,
    gluon_configs,
    label,
    no_device,
)
from ring_attn.tools.tune_report import (
    BEST_SET,
    FROZEN_SET,
    YARDSTICK,
    TuneRow,
    base_of,
    best,
    config_of,
    fastest,
    summary,
    table,
    with_speeds,
    with_times,
)
from ring_attn.tools.workers import NO_TIME, Workers

if TYPE_CHECKING:
    from ring_attn.kernels.configs import Config

PEERS = ("cudnn", "torch-flash")

# Of all candidates a sample is taken, HEATS of those that take at most twice what the best takes,
# and ITERS of those that are close to it.
HEATS, HEAT_MARGIN, FINAL_MARGIN = 3, 2.0, 1.15
ITERS, REPEATS = 12, 20

# Bits are compared over that many rows, which take a kernel about a millisecond.
REPEAT_ROWS = 4096

# Bytes that a digest takes at once.
DIGEST_BYTES = 1 << 26

# A candidate may take so long to be built, the start of its process included. Of the time of a
# case, when no more are built, and when no more are checked.
BUILD_SECONDS = 90.0
BUILD_SHARE, CHECK_SHARE = 0.6, 0.85

# Of the time of a case, what the search takes before the fastest tile is tried in other orders.
SEARCH_SHARE = 0.8

# So many processes build at once; each has a context of its own on the GPU.
MOST_JOBS = 12

# The fastest so many are timed as steps of a ring, too.
STEP_CONFIGS = 4

# What a kernel writes, as the judge names it.
RESULTS = {"fwd": ("out",), "dkdv": ("dk", "dv"), "dq": ("dq",)}

# What is searched: kind, architecture, head dim, dtype -> configs, the frozen one among them.
Space = Callable[[str, str, int, torch.dtype], "Sequence[Config]"]


@dataclass(frozen=True, kw_only=True)
class Setting(CaseSetting):
    """What is searched, over which sizes."""

    step_rows: int
    iters: int
    repeats: int
    jobs: int

    def steps(self) -> list[Case]:
        """A whole step of a zigzag ring: all rows of a rank, half of another's keys."""
        alone = Case("fwd", False, self.step_rows, max(1, self.step_rows // 2))
        return [alone, replace(alone, middle=True)] if "fwd" in self.kernels else []


class Timed(Protocol):
    """What is timed: one of our launches (`launches.Trial`), or `Whole`."""

    @property
    def results(self) -> Sequence[Tensor]:
        """What must have the same bits after every run."""
        ...

    def prepare(self) -> None:
        """Enqueues what comes before the clock starts."""
        ...

    def run(self) -> Any:
        """Enqueues what is timed."""
        ...


@dataclass(frozen=True)
class Whole:
    """A whole forward or backward."""

    attention: Attention
    backward: bool
    results: tuple[Tensor, ...] = ()

    def prepare(self) -> None:
        """Every backward has a forward of its own."""
        self.attention.release()
        if self.backward:
            self.attention.forward()

    def run(self) -> None:
        """Enqueues what is timed."""
        if self.backward:
            self.attention.backward()
        else:
            self.attention.forward()


class Race:
    """Times runs in turn, and holds the bits of each against those of its first run.

    Attributes:
        samples: ms by run.
        bits: of the results.
        notes: why a run was left out.
        broken_by: the run that has broken the device's context, which ended the race.
    """

    def __init__(self, watch: Watch, device: torch.device) -> None:
        self.samples: dict[str, list[float]] = {}
        self.bits: dict[str, int] = {}
        self.notes: dict[str, str] = {}
        self.broken_by = ""
        self._watch, self._device = watch, device
        self._host_ms: dict[str, float] = {}

    def run(
        self, runs: Mapping[str, Timed], iters: int, always: Iterable[str], deadline: float
    ) -> None:
        """All runs in turn within every repetition; the first repetition only warms up, and only
        those that are near the best take part in the later ones.

        Args:
            runs: by name.
            iters: repetitions.
            always: who takes part in all of them, however slow.
            deadline: by `time.monotonic`: no repetition begins later, but for the first HEATS.
        """
        self.samples = {name: [] for name in runs}
        for repetition in range(-1, iters):
            if repetition >= HEATS and time.monotonic() > deadline:
                break
            margin = FINAL_MARGIN if repetition >= HEATS else HEAT_MARGIN
            running = self._within(margin, {*always}) if repetition > 0 else [*self.samples]
            turn = repetition % max(len(running), 1)
            for name in [*running[turn:], *running[:turn]]:
                ms = self._sample(name, runs[name])
                if self.broken_by:
                    return
                if ms is None:
                    del self.samples[name]
                elif repetition >= 0:
                    self.samples[name].append(ms)

    def fill(
        self, row: TuneRow, name: str, flops: int, references: tuple[str, str] = ("", "")
    ) -> TuneRow:
        """The row with the times of a run, or why there are none.

        Args:
            row: with what is known before.
            name: of the run.
            flops: that it does.
            references: the runs that its speeds are over, ours and cuDNN's; "" is none.
        """
        row = replace(row, note=row.note or self.notes.get(name, ""))
        row = with_times(row, self.samples.get(name, []), flops)
        ours, cudnn = (self.samples.get(reference) for reference in references)
        return with_speeds(row, ours, cudnn)

    def _within(self, margin: float, always: set[str]) -> list[str]:
        """Runs that are so close to the best of ours, and those that always take part."""
        shortest = {name: min(taken) for name, taken in self.samples.items()}
        ours = [ms for name, ms in shortest.items() if name in self.bits]
        limit = margin * min(ours, default=math.inf)
        return [name for name, ms in shortest.items() if ms <= limit or name in always]

    def _sample(self, name: str, run: Timed) -> float | None:
        """ms of one run; None, with a note, if it failed or has other bits than before."""
        try:
            self._watch.ready(head_start_ms(self._host_ms.get(name, 0.0)))
            host = time.perf_counter()
            run.prepare()
            start = self._watch.mark()
            run.run()
            stop = self._watch.mark()
            self._host_ms[name] = 1e3 * (time.perf_counter() - host)
            self._watch.done()
            bits = bits_of(run.results, self._device) if run.results else None
        except Exception as error:
            self.notes[name] = f"cannot run: {reason(error)}"
            self.broken_by = "" if alive(self._device) else name
            return None
        if bits is not None and self.bits.setdefault(name, bits) != bits:
            self.notes[name] = "other bits than in the run before"
            return None
        return self._watch.ms(start, stop)


def bits_of(results: Sequence[Tensor], device: torch.device) -> int:
    """A number that every bit goes into."""
    return hash(tuple(digest(x, device) for x in results))


def digest(x: Tensor, device: torch.device) -> int:
    """A number that every bit and its place go into, computed on the device piece by piece."""
    numbers = x.contiguous().view(torch.uint8).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for piece in numbers.split(DIGEST_BYTES):
        whole = piece.to(device)
        whole = torch.nn.functional.pad(whole, (0, -whole.numel() % 8)).view(torch.int64)
        places = torch.arange(1, 2 * whole.numel(), 2, dtype=torch.int64, device=device)
        total = total * 1000003 + (whole * places).sum()  # int64 wraps around
    return int(total)


@dataclass
class Entry:
    """A config in a case, and what is known of it so far."""

    case: Case
    config: Config
    row: TuneRow

    @property
    def key(self) -> str:
        """Its name among all runs."""
        return f"{self.case}: {self.row.name}"


class Tuning(Findings[Setting, TuneRow]):
    """One run: searches case by case."""

    def __init__(
        self,
        setting: Setting,
        command: str = "",
        json: Path | None = None,
        space: Space | None = None,
    ) -> None:
        """As `Findings`; it is saved after every case.

        Args:
            setting: what is searched.
            command: the words that search it again.
            json: where the report goes.
            space: in the place of `configs.search_space`.
        """
        from ring_attn.kernels import configs

        super().__init__(setting, command, json)
        self._space = space or configs.search_space
        self._arch = configs.architecture(setting.device)
        self._watch = watch_for(setting.device)
        self._workers = Workers(build, lambda task, why: Built(note=why), setting.jobs)
        self._datas: dict[tuple[bool, int], Data] = {}
        self._judges: dict[tuple[bool, int], Judge] = {}
        self._beds: dict[Case, Bed] = {}
        self._dead = False

    def run(self) -> None:
        """Every case that there is time for; what a case leaves of its share goes to the next."""
        stages: list[tuple[float, Callable[[float], None]]] = [
            (1.0, partial(self._search, case)) for case in self.setting.cases()
        ]
        if {"dkdv", "dq"} <= {*self.setting.kernels}:
            stages += [(0.2, partial(self._backward, causal)) for causal in (True, False)]
        stages.append((0.4, self._steps))
        try:
            for index, (weight, stage) in enumerate(stages):
                left = self.left()
                if left <= 0.0 or self._dead:
                    break
                share = weight / sum(other for other, _ in stages[index:])
                self._attempt(stage, time.monotonic() + share * left)
                self.save()
        finally:
            self._workers.close()
        self.save(last=True)

    def summary(self) -> list[str]:
        """What was found, what failed, and lines for the table of configs; the last counts."""
        setting, versions = self.setting, machine()["versions"]
        gpu = setting.device.type == "cuda"
        name = torch.cuda.get_device_name(setting.device) if gpu else "interpreter"
        where = f"{name}, triton {versions['triton']}"
        lines = summary(self.rows, KINDS, self._arch, setting.head_dim, where)
        ours = [row for row in self.rows if row.config is not None]
        timed, wrong = sum(row.samples > 0 for row in ours), sum(row.wrong for row in ours)
        late = sum(row.note.endswith(NO_TIME) for row in ours)
        cases, seconds = len({row.case for row in self.rows}), self.seconds
        counts = f"{len(ours)} configs, {timed} timed, {wrong} wrong, {late} had no time"
        return [*lines, f"{cases} cases, {counts}; {seconds:.0f} s, {len(self.failures)} failures"]

    def _attempt(self, stage: Callable[[float], None], deadline: float) -> None:
        """Runs a stage; what it raises past its own configs costs no other stage."""
        try:
            stage(deadline)
        except Exception as error:
            traceback.print_exc()
            self.failures.append(f"a stage failed: {reason(error)}")
            self._look_alive("that stage")
            self._free()

    def more(self) -> dict[str, Any]:
        """What its report says beside."""
        return {"summary": self.summary()}

    # -- stages

    def _search(self, case: Case, deadline: float) -> None:
        """All candidates of a kind, and of a forward those in Gluon beside them; then the fastest
        tile in the orders of tasks that other tiles were tried in."""
        candidates = self._candidates(case.kind)
        configs = [(case, config) for config in candidates]
        if case.kernel == "fwd":
            found = gluon_configs(self._arch, self.setting.head_dim, self.setting.dtype)
            configs += [
                (replace(case, variant=variant), config) for config in found for variant in GLUON
            ]
        now = time.monotonic()
        self._measure(configs, now + SEARCH_SHARE * (deadline - now), decides=True)
        timed = [row for row in self.rows if row.case == str(case) and row.decides]
        if self._dead or not any(row.median_ms for row in timed):
            return
        best_tile = config_of(min(timed, key=_ms))
        orders = [x for x in orders_of(candidates, best_tile) if x not in candidates]
        if orders:
            again = dict.fromkeys([candidates[0], best_tile, *orders])
            self._measure([(case, config) for config in again], deadline, decides=True)

    def _candidates(self, kind: str) -> list[Config]:
        """The frozen one, then those that were fast with another mask, then the rest."""
        setting = self.setting
        frozen = self._frozen(kind)
        space = self._space(kind, self._arch, setting.head_dim, setting.dtype)
        # Two that differ in their notes are one.
        configs = dict.fromkeys(replace(config, note="") for config in (frozen, *space))
        speeds = {
            config_of(row): row.speed
            for row in self.rows
            if base_of(row.kind) == base_of(kind) and row.speed
        }
        known = sorted(speeds, key=lambda config: -speeds[config])
        return [*dict.fromkeys([frozen, *(x for x in known if x in configs), *configs])]

    def _steps(self, deadline: float) -> None:
        """A step of a ring in both forms, by the frozen config and the fastest ones."""
        cases = self.setting.steps()
        if not cases:
            return
        timed = [row for row in self.rows if row.kind == cases[0].kind and row.median_ms]
        timed.sort(key=_ms)
        fast = [config_of(row) for row in timed[:STEP_CONFIGS]]
        chosen = dict.fromkeys([self._frozen(cases[0].kind), *fast])
        configs = [(case, config) for case in cases for config in chosen]
        self._measure(configs, deadline, decides=False)

    def _backward(self, causal: bool, deadline: float) -> None:
        """The whole backward with frozen configs and with the best so far, beside the others'."""
        rows = self.setting.rows(causal)
        problem, data = self.setting.problem_of(causal, rows), self._data(causal, rows)
        case = f"backward {'causal' if causal else 'full'} {format_size(rows)}"
        kinds = kinds_of(causal)
        frozen = {kernel: self._frozen(kind) for kernel, kind in kinds.items()}
        found = best(self.rows, KINDS)
        chosen = {
            kernel: found[kind].config if kind in found else frozen[kernel]
            for kernel, kind in kinds.items()
        }
        runs: dict[str, Timed] = {
            name: Whole(Kernels(data.rows_first, causal, configs), backward=True)
            for name, configs in ((FROZEN_SET, frozen), (BEST_SET, chosen))
        }
        runs |= self._peers(causal, rows, backward=True)
        race = self._race(runs, [*runs], deadline)
        flops, references = problem.flops("bwd"), (FROZEN_SET, YARDSTICK)
        self.rows += [race.fill(TuneRow(case, "", name), name, flops, references) for name in runs]
        self._free()

    # -- one case

    def _measure(
        self, configs: Sequence[tuple[Case, Config]], deadline: float, *, decides: bool
    ) -> None:
        """Builds, checks and times configs in cases that are of one problem."""
        first = configs[0][0]
        entries = [
            Entry(
                case,
                config,
                TuneRow(
                    str(case), case.kind, label(config), asdict(config),
                    frozen=not case.variant and config == self._frozen(case.kind),
                    decides=decides and not case.variant,
                ),
            )
            for case, config in configs
        ]  # fmt: skip
        now = time.monotonic()
        self._build(entries, now + BUILD_SHARE * (deadline - now))
        for entry in entries:
            if not entry.row.note:
                self._check(entry, now + CHECK_SHARE * (deadline - now))
        runs: dict[str, Timed] = {}
        peers: dict[str, Timed] = {}
        if not self._dead:
            fit = [entry for entry in entries if not entry.row.note]
            runs = {entry.key: self._bed(entry.case).trial(entry.config) for entry in fit}
            if decides:
                peers = self._peers(first.causal, first.rows, backward=first.kernel != "fwd")
        always = [entry.key for entry in entries if entry.row.frozen] + [*peers]
        self._add(entries, [*peers], self._race({**runs, **peers}, always, deadline))
        self._free()

    def _build(self, entries: Sequence[Entry], deadline: float) -> None:
        """Fills in what came of building them, in processes of their own."""
        problem = self.setting.problem_of(entries[0].case.causal, entries[0].case.rows)
        tasks = [Task(entry.case, problem, entry.config) for entry in entries]
        if self.setting.jobs:
            found = self._workers.map(tasks, BUILD_SECONDS, deadline)
        else:
            found = [build(task)[0] for task in tasks]
        for entry, built in zip(entries, found, strict=True):
            note = f"not built: {built.note}" if built.note else ""
            entry.row = replace(entry.row, built=built, note=note)

    def _check(self, entry: Entry, deadline: float) -> None:
        """Fills in how it compares with float64, and whether its bits are the same every time."""
        late = time.monotonic() > deadline and not entry.row.frozen
        if self._dead or late:
            note = "the device failed before" if self._dead else f"not checked: {NO_TIME}"
            entry.row = replace(entry.row, note=note)
            return
        case = entry.case
        try:
            verdicts = self._verdicts(case, {case.kernel: entry.config})
            if not all(verdict.ok for verdict in verdicts):
                verdicts = self._own(case, verdicts)
            repeats = self._repeats(case, entry.config)
        except Exception as error:
            entry.row = replace(entry.row, note=f"cannot run: {reason(error)}")
            self._look_alive(entry.key)
            return
        wrong = [str(verdict) for verdict in verdicts if not verdict.ok]
        note = f"{wrong[0]}, and {len(wrong) - 1} more" if len(wrong) > 1 else "".join(wrong)
        if repeats < self.setting.repeats:
            note = f"other bits after {repeats} equal runs of {self.setting.repeats}"
        ratio = max(math.inf if math.isnan(v.ratio) else v.ratio for v in verdicts)
        entry.row = replace(entry.row, max_ratio=ratio, repeats=repeats, note=note)

    def _own(self, case: Case, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Without what other kernels get wrong by themselves: it says nothing of this one."""
        others = {verdict.name for verdict in self._verdicts(case, {}) if not verdict.ok}
        return [
            verdict
            for verdict in verdicts
            if verdict.name not in others or verdict.name.split()[0] in RESULTS[case.kernel]
        ]

    def _verdicts(self, case: Case, configs: Mapping[str, Config]) -> list[Verdict]:
        """Of a whole attention with these configs, and those of `_trusted` for other kernels."""
        trusted = {kernel: self._trusted(kind) for kernel, kind in kinds_of(case.causal).items()}
        chosen = {**trusted, **configs}
        ends = trusted["fwd"] if case.middle else None

        def make_kernels(problem: Problem, data: Data) -> Attention:
            inputs, variant = data.rows_first, case.variant if configs else ""
            return Kernels(inputs, problem.causal, chosen, ends=ends, variant=variant)

        judge = self._judge(case.causal, case.rows)
        return judge.whole(make_kernels) + judge.sampled(make_kernels)

    def _repeats(self, case: Case, config: Config) -> int:
        """Runs of a shorter sequence that had the bits of the first one."""
        rows, cols = (min(n, REPEAT_ROWS) for n in (case.rows, case.cols))
        trial = self._bed(replace(case, rows=rows, cols=cols)).trial(config)
        bits: set[int] = set()
        for repeat in range(self.setting.repeats):
            trial.prepare()
            trial.run()
            bits.add(bits_of(trial.results, self.setting.device))
            if len(bits) > 1:
                return repeat
        return self.setting.repeats

    def _race(self, runs: Mapping[str, Timed], always: Iterable[str], deadline: float) -> Race:
        """Times them in turn."""
        race = Race(self._watch, self.setting.device)
        race.run(runs, self.setting.iters, always, deadline)
        if race.broken_by:
            self._look_alive(race.broken_by)
        return race

    def _add(self, entries: Sequence[Entry], peers: Sequence[str], race: Race) -> None:
        """New rows of all entries and other implementations, with what the race says."""
        known = {(row.case, row.name) for row in self.rows}
        found: list[TuneRow] = []
        first = entries[0].case
        problem = self.setting.problem_of(first.causal, first.rows)
        forward = first.kernel == "fwd"
        for case in dict.fromkeys(entry.case for entry in entries):
            mine = [entry for entry in entries if entry.case == case]
            reference = _reference([*mine, *entries], race)
            references = (reference, YARDSTICK if forward else "")
            for entry in mine:
                row = race.fill(entry.row, entry.key, case.flops(problem), references)
                if entry.key in race.bits and reference in race.bits:
                    row = replace(row, same_bits=race.bits[entry.key] == race.bits[reference])
                if row.frozen and row.note:
                    self.failures.append(f"{case}, the frozen config: {row.note}")
                found.append(row)
        references = (_reference(entries, race), YARDSTICK) if forward else ("", "")
        flops = problem.flops("fwd" if forward else "bwd")
        for name in peers:
            shown = name if forward else f"{name}, whole backward"
            found.append(race.fill(TuneRow(str(first), "", shown), name, flops, references))
        self.rows += [row for row in found if (row.case, row.name) not in known]

    # -- what cases share

    def _frozen(self, kind: str) -> Config:
        """The table's, without its note."""
        return replace(frozen_of(self.setting.problem_of(True, 1))(kind), note="")

    def _trusted(self, kind: str) -> Config:
        """The frozen config; where that was found to be wrong, the fastest that is not."""
        wrong = any(row.frozen and row.wrong and row.kind == kind for row in self.rows)
        choice = fastest(self.rows, kind) if wrong else None
        return self._frozen(kind) if choice is None else choice.config

    def _data(self, causal: bool, rows: int) -> Data:
        if (causal, rows) not in self._datas:
            self._datas[causal, rows] = self.setting.problem_of(causal, rows).data()
        return self._datas[causal, rows]

    def _judge(self, causal: bool, rows: int) -> Judge:
        if (causal, rows) not in self._judges:
            problem = self.setting.problem_of(causal, rows)
            judge = Judge(problem, self._data(causal, rows), backward=True)
            judge.prepare()
            self._judges[causal, rows] = judge
        return self._judges[causal, rows]

    def _bed(self, case: Case) -> Bed:
        if case not in self._beds:
            self._beds[case] = Bed(case, self._data(case.causal, case.rows), self._trusted)
        return self._beds[case]

    def _peers(self, causal: bool, rows: int, *, backward: bool) -> dict[str, Timed]:
        """The other implementations that can run here."""
        problem, data = self.setting.problem_of(causal, rows), self._data(causal, rows)
        return {
            name: Whole(make(name, problem, data, backend="triton", backward=backward), backward)
            for name in PEERS
            if unavailable(name, self.setting.device) is None
        }

    def _look_alive(self, after: str) -> None:
        """Ends the run where a kernel has broken the device's context."""
        if not self._dead and not alive(self.setting.device):
            self._dead = True
            self.failures.append(f"the device failed while this ran: {after}")

    def _free(self) -> None:
        """Gives back what a case has taken, but for the inputs."""
        self._beds = {}
        gc.collect()
        if self.setting.device.type == "cuda" and not self._dead:
            torch.cuda.empty_cache()


def _reference(entries: Sequence[Entry], race: Race) -> str:
    """The key of the first frozen config that was timed; else that of the fastest config."""
    timed = [entry for entry in entries if race.samples.get(entry.key)]
    frozen = [entry.key for entry in timed if entry.row.frozen]
    fastest_first = sorted((entry.key for entry in timed), key=lambda key: min(race.samples[key]))
    return next(iter([*frozen, *fastest_first]), "")


def _ms(row: TuneRow) -> float:
    return row.median_ms or math.inf


def orders_of(configs: Iterable[Config], config: Config) -> list[Config]:
    """A config in all orders of tasks that others of as many warps are in."""
    orders = dict.fromkeys(
        (other.l2_bytes, other.programs_per_sm)
        for other in configs
        if other.num_warps == config.num_warps
    )
    return [
        replace(config, l2_bytes=l2_bytes, programs_per_sm=programs)
        for l2_bytes, programs in orders
    ]


def kinds_of(causal: bool) -> dict[str, str]:
    """The kind of every kernel of an attention with a mask."""
    return {kernel: Case(kernel, causal, 1, 1).kind for kernel in PRODUCTS}


# All that are searched.
KINDS = [*kinds_of(causal=True).values(), *kinds_of(causal=False).values()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ring-attn tune`."""
    add = parser.add_argument
    add("--step-rows", type=parse_size, help="of a rank of a ring (8k; on a CPU 192)")
    add("--iters", type=parse_size, help=f"samples of the fastest ({ITERS}; on a CPU 1)")
    add("--repeats", type=parse_size, help=f"runs with the same bits ({REPEATS}; on a CPU 2)")
    add("--jobs", type=int, help="processes that compile; 0: this one alone (a core each)")
    add_case_arguments(parser)


def setting_of(args: argparse.Namespace) -> Setting:
    """What the options describe.

    Raises:
        ValueError: options that cannot be, or kernels that cannot run here.
    """
    shared = case_setting(args)
    jobs = min(MOST_JOBS, num_cores()) if args.jobs is None else args.jobs
    if jobs < 0:
        raise ValueError(f"--jobs must be at least 0, got {jobs}")
    gpu = shared.device.type == "cuda"
    return Setting(
        **vars(shared),
        step_rows=args.step_rows or (8192 if gpu else 192),
        iters=args.iters or (ITERS if gpu else 1),
        repeats=args.repeats or (REPEATS if gpu else 2),
        jobs=jobs,
    )


def run(args: argparse.Namespace) -> int:
    """Searches, writes the JSON as it goes, prints the table; 1 if a frozen config is wrong."""
    if no_device(args, "tune"):
        return 2
    setting = setting_of(args)
    bench = Tuning(setting, command_line(), args.json)
    bench.run()
    shown = None if args.quiet else table(bench.rows, str(setting))
    return finish(bench, shown, bench.summary())
