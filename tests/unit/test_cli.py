"""The command line: its output, its exit codes, and the parsing that subcommands share."""

import argparse
import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ring_attn
from dev.__main__ import COMMANDS as dev_commands
from ring_attn import testing
from ring_attn.bench import benchmark
from ring_attn.cli import env, plan_model, verify
from ring_attn.cli import main as cli
from ring_attn.cli.arguments import (
    command_line,
    format_size,
    parse_dtype,
    parse_size,
    write_json,
)
from ring_attn.testing import RESULTS, RESULTS_WITH_SINKS
from ring_attn.testing.cases import sample
from ring_attn.testing.launch import map_in_processes, run_ranks

ROOT = Path(__file__).parents[2]

# Modules that read options of several commands.
SHARED = (benchmark, plan_model)


def test_sizes_and_dtypes() -> None:
    sizes = {
        "113": 113,
        "8K": 8192,
        " 2g ": 2 << 30,
        "1.5k": 1536,
        "0.5M": 1 << 19,
        "80GB": 80 << 30,
        "4KiB": 4096,
    }
    for text, size in sizes.items():
        assert parse_size(text) == size == parse_size(format_size(size))
    wrong = ["", "0", "-1", "8kx", "1.3", "1.0001k", ".5k", "1e3", "8 192", "nan", 400 * "9"]
    for text in (*wrong, "80gbb", "1125899906842625"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
            parse_size(text)
    assert parse_dtype("bf16") is parse_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(argparse.ArgumentTypeError, match="float16, bfloat16"):
        parse_dtype("int8")


def test_a_report_has_no_infinities_and_a_line_for_each_row(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json(path, {"a": (1, math.inf), "b": {"c": math.nan}, "rows": [{"x": [1, 2]}], "d": []})
    text = path.read_text()
    assert json.loads(text) == {"a": [1, None], "b": {"c": None}, "rows": [{"x": [1, 2]}], "d": []}
    assert '{"x": [1, 2]}' in map(str.strip, text.splitlines())


def test_a_report_is_whole_though_writing_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "report.json", Path.write_text
    write_json(path, {"rows": [1]})

    def interrupted(part: Path, text: str, **options: Any) -> int:
        write(part, text[:5], **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, {"rows": [1, 2]})
    assert json.loads(path.read_text()) == {"rows": [1]}


def test_a_command_can_be_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["bench", "ring", "--json", "a.json", "--layout", "a b", "--quick"]
    monkeypatch.setattr(sys, "argv", ["/some/bin/ring-attn", *words])
    assert command_line() == "ring-attn bench ring --layout 'a b' --quick"


# Runs `ring-attn` with words, then says which modules it took that help must not wait for.
HELP = """
import sys
import ring_attn_cli
try:
    ring_attn_cli.main()
finally:
    print(sorted({"torch", "numpy", "rich", "triton"} & set(sys.modules)))
"""


def without_torch(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HELP, *words]
    done = subprocess.run(command, cwd=ROOT, timeout=600, capture_output=True, text=True)
    assert done.stdout.endswith("[]\n"), done.stdout + done.stderr
    return done


@pytest.mark.parametrize("command", ["", *(c.name for c in cli.COMMANDS)])
def test_help_does_not_wait_for_torch(command: str) -> None:
    done = without_torch(*command.split(), "--help")
    assert done.returncode == 0 and f"usage: ring-attn {command}" in done.stdout
    if not command:
        assert all(c.name in done.stdout and c.help in done.stdout for c in cli.COMMANDS)


def test_the_version_and_a_wrong_option_do_not_wait_for_torch() -> None:
    assert without_torch("--version").stdout.startswith(f"ring-attn {ring_attn.__version__}")
    done = without_torch("plan", *PLAN, "--layout", "spiral")
    assert done.returncode == cli.EXIT_USAGE and "spiral" in done.stderr


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_every_option_says_what_it_is_and_its_default(
    command: cli.Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags are off by default; words that must be given have none; all in 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    parser = command.parser(cli.PROG)
    assert max(map(len, parser.format_help().splitlines())) <= 80
    silent = [
        (action.option_strings or [action.dest])[0]
        for action in parser._actions
        if not action.help
        or not (action.required or action.nargs == 0 or "default:" in action.help)
        and not isinstance(action, argparse._HelpAction)
    ]
    switches = [x for x in parser._actions if isinstance(x, argparse.BooleanOptionalAction)]
    silent += [x.dest for x in switches if "default: " not in str(x.help)]
    assert not silent


PLAN = ["--seqlen", "1M", "--world-size", "8"]

# Words of a command, and a part of the error.
MISTAKES: list[tuple[list[str], str]] = [
    ([], "needs a command: one of doctor, env"),
    (["doctor", "--world-size", "2"], "unrecognized arguments: --world-size 2"),
    (["env", "--nope"], "unrecognized arguments: --nope"),
    (["env", "--quick"], "unrecognized arguments: --quick"),
    (["verify", "--world-size", "0"], "'0' is not a number of ranks: pass 1 or more, such as"),
    (["verify", "--threads", "-1"], "'-1' is not a number of threads: pass 1 or more"),
    (["verify", "--seed", "x"], "'x' is not a seed: pass a number from 0"),
    (["verify", "--strategy", "spiral"], "invalid choice: 'spiral' (choose from"),
    (["audit"], "the following arguments are required: FILE:FUNCTION"),
    (["audit", "nope.py:step"], "there is no file 'nope.py', of which 'step'"),
    (["audit", "README.md"], "such as 'train.py:step', got 'README.md'"),
    (["audit", "a.py:f", "--world-size", "0"], "'0' is not a number of ranks"),
    (["audit", "a.py:f", "--timeout", "0"], "'0' is not a number of seconds"),
    (["plan", "--seqlen", "1k"], "--world-size"),
    (["plan", "--seqlen", "1k", "--world-size", "0"], "'0' is not a number of ranks"),
    (["plan", *PLAN, "--seqlen", "1.3k"], "'1.3k' is not a size: pass a positive whole number"),
    (["plan", *PLAN, "--heads", "0"], "'0' is not a number of heads"),
    (["plan", *PLAN, "--strategy", "spiral"], "--strategy must be some of ring, all_gather"),
    (["plan", *PLAN, "--window", "3"], "'3' is not a window: pass LEFT,RIGHT such as 4k,0"),
    (["calibrate", "--world-size", "0"], "'0' is not a number of ranks"),
    (["calibrate", "--backend", "magic"], "backend must be 'auto' or one of ['triton'"),
    (["calibrate", "--dtype", "int8"], "'int8' is not a dtype: pass one of"),
    (["verify", "--backend", "magic"], "--backend must be one of"),
    (["verify", "--all", "--seed", "1"], "--all runs every case"),
    (["verify", "--world-size", "100000"], "100000 ranks need at least 1.465e+04 GiB"),
    (["verify", "--world-size", "2", "--threads", "1G"], "threads must be at least 1 and at m"),
    (["env", "--json", "/"], "argument --json: '/' is not a file"),
    (["verify", "--device=--"], "argument --device: '--' is not a value"),
    (["plan", *PLAN, "--world-size", "4097"], "--world-size must be at most 4k"),
    (["plan", *PLAN, "--load", "nope.py"], "--load: there is no file 'nope.py'"),
    (["plan", *PLAN, "--cluster", "h999"], "must be one of a100, l40s, h100-pcie, h100"),
    (["plan", *PLAN, "--seqlen", "3G"], "--seqlen must be at most 2G"),
    (["plan", *PLAN, "--batch", "1G"], "--batch x heads x head dim must be at most 64M"),
    (["plan", *PLAN, "--documents", "1k", "--world-size", "512"], "pass --layout zigzag"),
    (["bench", "rings"], "invalid choice: 'rings' (choose from"),
    (["bench", "--seqlen", "1k"], "unrecognized arguments: --seqlen"),
    (["bench", "ring", "--baseline", "sparse"], "--peer/--baseline: must be some of dense"),
    (["bench", "ring", "--world-size", "0"], "'0' is not a number of ranks: pass 1 or more"),
    (["bench", "ring", "--world-size", "2,x"], "'x' is not a number of ranks"),
    (["bench", "ring", "--strategy", "spiral"], "--strategy: must be some of ring, all_gather"),
    (["bench", "ring", "--mode", ""], "--mode: must be some of fwd, bwd, fwd_bwd, got ''"),
    (["bench", "ring", "--mask", "window"], "'window' is not a mask: pass causal, full, win"),
    (["bench", "ring", "--mask", "docs:nope"], "docs:nope cannot be read (No such file"),
    (["bench", "ring", "--mask", "full", "--causal"], "--causal and --mask exclude each other"),
    (["bench", "ring", "--heads", "4", "--kv-heads", "3"], "must be a multiple of --kv-heads"),
    (["bench", "ring", "--cluster", "h999"], "--cluster must be one of a100"),
    (["bench", "ring", "--compare", "nope.json"], "--compare: nope.json cannot be read"),
    (["bench", "ring", "--threshold", "5"], "--threshold needs --compare OLD.json"),
    (["bench", "ring", "--threshold", "-5"], "'-5' is not a percentage: pass a number above 0"),
    (["bench", "ring", "--device", "cuda"], "need as many GPUs, this machine has 0"),
    (["bench", "kernel", "--impl", "fa9"], "--impl: must be some of ours, cudnn"),
    (["bench", "kernel", "--mask", "chunked:0"], "'0' is not a size"),
    (["bench", "decode", "--mla", "--heads", "8"], "--mla sets heads and head dims"),
    (["bench", "decode", "--seqlen", "8", "--queries", "9"], "--queries must be at most"),
    (["bench", "comm", "--world-size", "1"], "--world-size must be at least 2, because one"),
    (["bench", "comm", "--size", "many"], "'many' is not a size"),
    (["tune"], "has no GPU that torch can use"),
    (["tune", "--budget", "one"], "'one' is not a number of seconds: pass a number above 0"),
    (["tune", "--kernels", "spiral"], "must be some of fwd, dkdv, dq, got 'spiral'"),
    (["tune", "--device", "cpu", "--dtype", "bfloat16"], "bfloat16"),
]


# Files that commands of the next table are given.
FILES = {
    "text.txt": "no JSON, no Python",
    "list.json": "[1, 2]",
    "empty.json": "{}",
    "other.json": json.dumps({"bench": "kernel", "rows": [], "machine": {}}),
    "sizes.json": json.dumps({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": "x"}),
    "lengths.txt": "8k many",
    "good.py": "number = 3\ndef step(): pass\n",
    "broken.py": "a = 1\nthis is no Python\n",
    "other.py": """
def step(): pass
class Model:
    def forward(self): pass
def of_batch(batch, rate=1): pass
async def later(): pass
step, kept = 1, step
step = [1]
""",
}
MODEL = ["plan", "--model", "llama-3-8b"]
MISTAKES += [
    (["audit", "broken.py:step"], "broken.py is not a file of Python: invalid syntax in line 2"),
    (["audit", "good.py:other"], "good.py has no function 'other': pass one of step"),
    (["audit", "good.py:number"], "'number' of good.py is not a function: pass one of step"),
    (["audit", "other.py:forward"], "other.py has no function 'forward': pass one of step, of_"),
    (["audit", "other.py:of_batch"], "needs the arguments batch, and a step is called without"),
    (["audit", "other.py:later"], "'later' of other.py is an async function"),
    (["audit", "other.py:step"], "'step' of other.py is not a function: pass one of of_batch"),
    (["audit", "good.py:step", "--world-size", "100000"], "100000 ranks need at least"),
    (["audit", "good.py:step", "--world-size", "1"], "numbers of at least 2 ranks, got [1]"),
    (["plan", *PLAN, "--cluster", "text.txt"], "text.txt is not a calibration"),
    (["plan", *PLAN, "--cluster", "list.json"], "list.json is not a calibration"),
    (["plan", *PLAN, "--cluster", "."], "--cluster must not be a folder"),
    (["plan", *PLAN, "--load", "text.txt"], "--load: text.txt is not a file of Python"),
    (["plan", *PLAN, "--load", "good.py"], "good.py has no variable that is a strategy"),
    (["plan", *PLAN, "--world-size", "512", "--exact"], "--exact works for at most 256 ranks"),
    (["plan", *PLAN, "--plot", "a.gif"], "a picture must be a file that ends in .svg or .png"),
    (["plan", *PLAN, "--plot", "a.svg", "--json", "a.svg"], "--json and --plot must be different"),
    (["plan", *PLAN, "--replicated", "2M"], "replicated=2097152 rows must be the first of"),
    (["plan", *PLAN, "--kv-heads", "5"], "must be a multiple of nheads_kv, got 32 and 5"),
    (["plan", *PLAN, "--fits"], "--fits needs --model"),
    (["plan", "--model", "text.txt", *PLAN], "text.txt is not a config.json of a model"),
    (["plan", "--model", "list.json", *PLAN], "list.json is not a config.json of a model"),
    ([*MODEL, *PLAN, "--microbatches", "0"], "'0' is not a number of batches"),
    ([*MODEL, *PLAN, "--replicated", "8"], "--replicated is not used with --model"),
    ([*MODEL, *PLAN[2:], "--fits", "--quick"], "--quick is not used with --fits"),
    ([*MODEL, *PLAN, "--heads", "4"], "--heads is not used with --model, whose config gives it"),
    (["bench", "ring", "--mask", "docs:lengths.txt"], "docs:lengths.txt: 'many' is not a size"),
    (["bench", "ring", "--compare", "text.txt"], "--compare: text.txt cannot be read as JSON"),
    (["bench", "ring", "--compare", "empty.json"], "empty.json is not the report of a benchmark"),
    (["bench", "ring", "--compare", "other.json"], "other.json is of `ring-attn bench kernel`"),
    (["bench", "ring", "--seqlen", "1T"], "q, k, v and out of 1 x 1T rows need at least"),
    (["bench", "ring", "--batch", "1G"], "1073741824 x 8k rows need at least"),
    (["bench", "ring", "--world-size", "100000"], "100000 ranks need at least"),
    (["bench", "kernel", "--seqlen", "1T"], "q, k, v and out of 1 x 1T rows need at least"),
    (["bench", "kernel", "--head-dim", "64,7G"], "GiB: pass smaller sizes"),
    (["bench", "kernel", "--head-dim", "128/"], "'' is not a size"),
    (["bench", "kernel", "--heads", "8/"], "'' is not a size"),
    (["bench", "decode", "--seqlen", "1T"], "caches of 1 x 1T rows need at least"),
    (["bench", "comm", "--size", "1T"], "messages of 1T bytes need at least"),
    (["bench", "comm", "--size", "1"], "--size must be at least 128, because a rank sends at"),
    (["calibrate", "--head-dim", "1G"], "rows on each rank need at least"),
    (["tune", "--device", "cpu", "--heads", "1G"], "q, k, v and out of 128 rows need at least"),
    (["tune", "--device", "cpu", "--kernels", ""], "must be some of fwd, dkdv, dq, got ''"),
    (["bench", "ring", "--csv", "a", "--json", "./a"], "--json and --csv must be different files"),
]


@pytest.mark.parametrize(("words", "text"), MISTAKES, ids=lambda value: str(value)[:60])
def test_a_mistake_is_one_line_and_status_2(
    words: list[str],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is printed as a result, and no file is written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    if words and "--json" not in words:
        words = [*words, "--json", "report.json"]
    try:
        status: object = cli.main(words)
    except SystemExit as stop:
        status = stop.code
    output = capsys.readouterr()
    assert status == 2
    lines = output.err.splitlines()
    errors = [line for line in lines if ": running for " not in line]  # signs of life
    assert text in output.err and len(errors) == 1, output.err
    assert not output.out and {path.name for path in tmp_path.iterdir()} == {*FILES}


def test_mistakes_of_every_command_are_tried() -> None:
    tried = {" ".join(words[:size]) for words, _ in MISTAKES for size in (1, 2)}
    assert {command.name for command in cli.COMMANDS} <= tried


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_no_option_is_ignored(command: cli.Command) -> None:
    """The name of each option is an attribute that the command reads, or a parameter it fills."""
    parser = command.parser(cli.PROG)
    sources = [inspect.getsource(import_module(command.module)), *map(inspect.getsource, SHARED)]
    read = {name for source in sources for name in re.findall(r"\bargs\.(\w+)", source)}
    for setting in re.findall(r"\bfields\((\w+)\)", sources[0]):
        # Options with the names of a setting's fields are read with getattr.
        read |= {field.name for field in fields(getattr(import_module(command.module), setting))}
    for source in sources[:1]:
        for function in re.findall(r"with_options\(\s*(\w+)", source):
            parameters = inspect.signature(getattr(import_module(command.module), function))
            read |= {*parameters.parameters}
    offered = {action.dest for action in parser._actions} - {"help"}
    assert offered <= read, offered - read


def test_a_failure_is_not_taken_for_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    run = mock.Mock(side_effect=RuntimeError("rank 1 of 2 failed"))
    monkeypatch.setattr(env, "run", run)
    with pytest.raises(RuntimeError, match="rank 1 of 2"):
        cli.main(["env"])
    monkeypatch.setenv("RING_ATTN_DEBUG", "1")
    with pytest.raises(ValueError, match="--backend must be one of"):
        cli.main(["verify", "--backend", "magic"])


def test_env(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "env.json"
    assert cli.main(["env", "--json", str(path)]) == 0
    shown, report = capsys.readouterr().out, json.loads(path.read_text())
    assert report["machine"]["versions"]["torch"] == str(torch.__version__)
    assert report["machine"]["cores"] >= 1
    assert report["backends"]["reference"]["cpu bfloat16"] is None
    assert set(env.VARIABLES) == set(report["variables"])
    for word in ("ring_attn", "reference", "gloo", "RING_ATTN_DEBUG"):
        assert word in shown


@pytest.mark.dist
def test_verify_in_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "verify.json"
    words = ["--world-size", "2", "--quick", "--layout", "zigzag", "--json", str(path)]
    words += ["--strategy", "all_gather", "hybrid", "--backend", "reference", "--seed", "3"]
    assert cli.main(["verify", *words]) == 0
    report = json.loads(path.read_text())
    # Two ranks have no divisor besides 1 and 2. One case shows that all ranks refuse a hybrid.
    refused = sum(case["strategy"] == "hybrid" for case in report["cases"])
    passed = len(report["cases"]) - refused
    assert report["summary"] == {"passed": passed, "failed": 0, "refused": refused}
    assert refused == 1 and passed == 40 and report["seed"] == 3
    ((reason, count),) = report["refusals"].items()
    assert "needs ranks in two factors" in reason and count > 40
    for case in report["cases"]:
        assert (case["status"] == "refused") == (case["strategy"] == "hybrid")
        if case["strategy"] == "all_gather":
            assert set(case["results"]) == set(RESULTS_WITH_SINKS if case["sinks"] else RESULTS)
    said = capsys.readouterr().out
    assert "0 failed" in said and "--seed 3" in said and "1 case of hybrid reference: " in said
    assert f"left out: {count} cases of the table: a hybrid needs ranks" in said


def test_the_sample_of_two_ranks_has_no_case_that_is_refused() -> None:
    """Every strategy, layout and mask that two ranks can run stays in the sample."""
    table = testing.cases(backends=["aten", "reference"])
    every, refusals = verify.without_refused(table, 2, "cpu")
    wanted = sample(every, verify.SAMPLE, seed=0)
    assert sum(map(len, refusals.values())) + len(every) == len(table)
    strategies = {*testing.STRATEGIES} - {"hybrid", "double_ring", "hybrid all_gather"}
    assert {case.strategy for case in wanted} == strategies
    assert {case.layout for case in wanted} == {*testing.LAYOUTS}


@pytest.mark.dist
def test_verify_of_a_backend_that_cannot_run_is_no_success(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["verify", "--world-size", "1", "--quick", "--device", "cpu", "--strategy", "ring"]
    assert cli.main([*words, "--backend", "flash_attn"]) == 1
    assert "case of ring flash_attn: " in capsys.readouterr().out
    assert cli.main(words) == 0
    assert "not tried: flash_attn: " in capsys.readouterr().out


def wrong_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Ring attention in which rank 0's values are a thousandth too large."""
    q, k, v = args
    out, lse = ring_attn.ring_attention(
        q, k, v * (1.001 if dist.get_rank() == 0 else 1.0), **kwargs
    )
    return out, lse


def run_wrong_cases() -> list[tuple[str, str | None]]:
    case = testing.Case("causal", backend="reference")
    results = []
    for effect in (wrong_attention, ArithmeticError("made to fail")):
        with mock.patch("ring_attn.testing.ranks.ring_attention", side_effect=effect):
            results.append(verify.run_case(case))
    return [(result.status, result.error) for result in results]


@pytest.mark.dist
def test_verify_sees_a_wrong_rank_and_an_error() -> None:
    for rank_results in run_ranks(run_wrong_cases, 2, threads=1, device="cpu"):
        (wrong, _), (raised, text) = rank_results
        assert wrong == raised == "failed"
        assert text is not None and "rank 0" in text and "made to fail" in text


def facts_of_rank() -> tuple[int, int, int, str]:
    order = os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"]
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), order


def fail_in_rank_1(signum: int) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signum)
        raise ValueError("the shard of rank 1 is wrong")
    time.sleep(60 if signum else 0)
    dist.barrier()  # raises, too, as rank 1 is gone


@pytest.mark.dist
@pytest.mark.slow
def test_run_ranks_returns_results_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launches keep their order unless the environment says otherwise."""
    monkeypatch.undo()  # in spawned processes, as outside of tests
    for reported, order in ((None, "1"), ("0", "0")):
        if reported is None:
            monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
        else:
            monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", reported)
        results = run_ranks(facts_of_rank, 2, threads=1, device="cpu")
        assert results == [(0, 2, 1, order), (1, 2, 1, order)]


@pytest.mark.dist
@pytest.mark.slow
def test_run_ranks_calls_one_function_after_another_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "twice.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "from ring_attn.testing.launch import run_ranks\n"
        "print([run_ranks(dist.get_rank, 1) for _ in range(2)] == [[0]] * 2)\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    done = subprocess.run([*torchrun, script], capture_output=True, text=True, timeout=600)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.dist
@pytest.mark.parametrize(
    ("signum", "text"), [(0, "of rank 1 is wrong"), (15, "with signal SIGTERM")]
)
def test_run_ranks_tells_which_rank_failed(signum: int, text: str) -> None:
    with pytest.raises(RuntimeError, match=rf"(?s)rank 1 of 2 failed.*{text}"):
        run_ranks(partial(fail_in_rank_1, signum), 2, threads=1, device="cpu")


def die_at_3(item: int) -> int:
    if item == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return item * item


@pytest.mark.dist
def test_a_process_that_dies_loses_its_item_alone() -> None:
    results = map_in_processes(die_at_3, range(7), 2, lambda item: -item)
    assert list(results) == [0, 1, 4, -3, 16, 25, 36]
    assert list(map_in_processes(die_at_3, [], 2, lambda item: -item)) == []


def test_run_ranks_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="nproc must be at least 1"):
        run_ranks(facts_of_rank, 0)
    with pytest.raises(ValueError, match="device must be one of"):
        run_ranks(facts_of_rank, 1, device="tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="need as many GPUs"):
        run_ranks(facts_of_rank, 2, device="cuda")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="ranks that torchrun started, 2, got 3"):
        run_ranks(facts_of_rank, 3)


@pytest.mark.slow
@pytest.mark.parametrize("command", [command.name for command in dev_commands])
def test_each_command_of_dev_has_its_help(command: str) -> None:
    """`python -m dev` begins without the package's `__init__`, which most commands import."""
    ran = subprocess.run(
        [sys.executable, "-m", "dev", command, "--help"],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[2],
    )
    assert ran.returncode == 0 and f"dev {command}" in ran.stdout, ran.stderr
