"""The ring whose ranks take turns on one device: its results, bytes and memory; both commands."""

import argparse
import json
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attn.bench import decode, gpu, length, profile_kernels, ring_cost, tune, turns
from ring_attn.bench.implementations import Problem
from ring_attn.bench.length import digest, judge, longest
from ring_attn.bench.local_ring import Times
from ring_attn.bench.timing import HostWatch
from ring_attn.bench.turns import (
    GRADIENTS,
    INPUTS_BACK,
    RESULTS,
    Copies,
    Offload,
    Shards,
    Turns,
    TurnTransport,
    calls_in_order,
    drawn,
    predicted_bytes,
)
from ring_attn.mask import Mask
from ring_attn.profiling import peak_bytes
from ring_attn.strategies.ring import RingCall, ring_backward, ring_forward
from ring_attn.transport.local import LocalTransport, run_local

CPU = torch.device("cpu")
ALL = (*RESULTS, *GRADIENTS)
RANKS = 4


def calls_of(
    seqlen: int, dtype: torch.dtype = torch.float32, left: int = -1, backend: str = "aten"
) -> list[RingCall]:
    problem = Problem(1, seqlen, 4, 2, 16, True, dtype, CPU)
    return calls_in_order(problem, Mask(seqlen, seqlen, True, (left, 0)), RANKS, backend)


def taken(calls: list[RingCall], offload: Offload, **options: Any) -> Shards:
    """What ranks have that have taken turns."""
    shards = drawn(calls, CPU, offload, backward=True)
    Turns(calls, shards, **options).run(backward=True)
    return shards


def all_of(shards: Shards) -> list[Tensor]:
    return [shards.at(name, rank) for name in ALL for rank in range(RANKS)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("seqlen", "dtype", "left"),
    [(512, torch.float32, -1), (301, torch.bfloat16, -1), (301, torch.float32, 40)],
    ids=["even", "ragged", "window"],
)
def test_turns_give_the_bits_of_the_ring(seqlen: int, dtype: torch.dtype, left: int) -> None:
    calls = calls_of(seqlen, dtype, left)
    shards = taken(calls, "none")

    def work(rank: int, transport: LocalTransport) -> list[Tensor]:
        q, k, v, dout = (shards.at(name, rank) for name in INPUTS_BACK)
        out, lse = ring_forward(q, k, v, calls[rank], transport)
        grads = ring_backward(q, k, v, out, lse, dout, calls[rank], transport)
        return [out, lse, *grads[:3]]

    ring = run_local(RANKS, work)
    assert equal(all_of(shards), [ring[rank][i] for i in range(len(ALL)) for rank in range(RANKS)])
    for offload in ("kv", "all"):
        assert equal(all_of(taken(calls, offload)), all_of(shards))
    assert equal(all_of(taken(calls, "kv", copies=Copies(hidden=False))), all_of(shards))


def test_offloaded_tensors_are_not_those_of_the_device() -> None:
    """On a CPU too a copy is made, so that what is equal above was copied."""
    shards = Shards(CPU, "kv")
    x = torch.randn(1, 8, 2, 16)
    for name in ("q", "k"):
        shards.put(name, 0, x)
    places = {name: shards.at(name, 0).data_ptr() for name in ("q", "k")}
    assert places["q"] == x.data_ptr() != places["k"]
    assert shards.get("k", 0).data_ptr() != places["k"] and torch.equal(shards.get("k", 0), x)
    assert shards.get("q", 0).data_ptr() == x.data_ptr()


def test_gradients_out_of_order_are_refused() -> None:
    calls = [replace(call, in_order=False) for call in calls_of(64)]
    with pytest.raises(NotImplementedError, match="whole for a causal mask over contiguous"):
        taken(calls, "none")


def test_what_does_not_take_turns_is_refused() -> None:
    call = replace(calls_of(64)[0], travels_back="q", in_order=False)
    with pytest.raises(NotImplementedError, match="'q' travelling: give fewer kv heads"):
        TurnTransport(call, call.plan(backward=True), Shards(CPU, "none"), Copies())


@pytest.mark.parametrize("backward", [False, True], ids=["fwd", "fwd_bwd"])
@pytest.mark.parametrize("offload", ["none", "kv"])
def test_memory_is_what_is_predicted(offload: Offload, backward: bool) -> None:
    calls = calls_of(2048)
    held = predicted_bytes(calls, offload, backward=backward)
    assert (held.host > 0) == (offload == "kv")

    def run() -> Shards:
        shards = drawn(calls, CPU, offload, backward=backward)
        Turns(calls, shards).run(backward=backward)
        return shards

    measured = peak_bytes(run)
    assert abs(measured - held.device - held.host) <= 0.02 * measured


@pytest.mark.parametrize("backward", [False, True], ids=["fwd", "fwd_bwd"])
@pytest.mark.parametrize("offload", ["none", "kv"])
def test_without_kernels_the_same_is_held(offload: Offload, backward: bool) -> None:
    """To the byte: what a call of the kernels has held is free when its last reference goes."""
    calls = calls_of(1024, torch.float16, backend="triton")

    def run() -> Shards:
        shards = drawn(calls, CPU, offload, backward=backward, dry=True)
        Turns(calls, shards).run(backward=backward)
        return shards

    run()  # makes the steps' tables
    held = predicted_bytes(calls, offload, backward=backward)
    assert peak_bytes(run) == held.device + held.host


def test_predicted_bytes_by_hand() -> None:
    calls = calls_of(4096, torch.bfloat16, backend="reference")
    rows = 1024 * 16 * 2  # bytes of a rank and head
    host = predicted_bytes(calls, "kv", backward=True).host
    # k, v, dk, dv of all ranks, and float32 sums of all but the last, whose rows nobody else needs.
    assert host == 4 * 4 * 2 * rows + 3 * 2 * 2 * 2 * rows
    odd = calls_of(4 * 1025, torch.bfloat16, backend="reference")
    assert predicted_bytes(odd, "kv", backward=False, pinned=True).host == 4 * 2 * 2 * 2 * rows


# -- the ring's cost


def cost_report(tmp_path: Path, words: str, status: int = 0) -> dict[str, Any]:
    path = tmp_path / "cost.json"
    common = "--device cpu --quick --quiet --iters 1"
    assert ring_cost.main([*shlex.split(f"{common} {words}"), "--json", str(path)]) == status
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def test_ring_cost(tmp_path: Path) -> None:
    report = cost_report(tmp_path, "--ranks 2,4 --rows 64 --backend aten")
    rows = {
        (row["world_size"], row["layout"], row["mode"], row["copies"]): row
        for row in report["rows"]
    }
    assert len(rows) == 2 * 2 * 2 * 4 and report["failures"] == []
    for row in rows.values():
        assert row["bytes_brought"] == row["bytes_planned"] and row["same_bits"]
        assert 0 <= row["distance"] < 1e-6 and row["note"] == ""
        assert row["steps"] == row["world_size"]
        assert row["ranks"] == sorted({0, row["world_size"] // 2, row["world_size"] - 1})
        assert row["efficiency"] == pytest.approx(row["share_ms"] / max(row["kernels_ms"]))
        assert len(row["waiting_ms"]) == len(row["copy_ms"]) == len(row["ranks"])
        pairs = zip(row["kernels_ms"], row["rank_ms"], strict=True)
        assert all(0 < kernels < rank for kernels, rank in pairs)
        assert (row["host_us"] is not None) == (row["copies"] in ("none", "device"))
    # K and V of 64 rows, 2 heads of 16 in float32, from each of the others; the last rank's rows
    # are needed by nobody, and a message of none has 16 bytes.
    message = 64 * 2 * 2 * 16 * 4
    forward = rows[4, "contiguous", "fwd", "device"]
    assert forward["bytes_brought"] == [2 * message + 16, 2 * message + 16, 3 * message]
    assert rows[4, "zigzag", "fwd", "none"]["slowdown"] == 0.0
    assert report["command"].startswith("python -m ring_attn.bench.ring_cost --device cpu")


@pytest.mark.parametrize("copies", ["none", "device"])
def test_messages_that_are_not_brought_are_seen(
    copies: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(self: TurnTransport, jobs: list[tuple[Tensor, Tensor | None]]) -> None:
        if self.copies.hidden == (copies == "device"):
            for into, _ in jobs:
                into.zero_()

    copy = TurnTransport._copy
    monkeypatch.setattr(
        TurnTransport, "_copy", lambda self, jobs: (copy(self, jobs), lost(self, jobs))
    )
    report = cost_report(tmp_path, "--ranks 2 --rows 64 --copies device", status=1)
    text = "of its norm from" if copies == "none" else "copies beside the kernels change"
    assert any(text in failure for failure in report["failures"])


def test_bytes_beside_the_plan_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_cost, "bytes_to_bring", lambda call, mode: 1)
    report = cost_report(tmp_path, "--ranks 2 --rows 64 --copies none", status=1)
    assert "bytes were brought, planned (1, 1)" in report["failures"][0]


def test_a_budget_leaves_rings_out(tmp_path: Path) -> None:
    report = cost_report(tmp_path, "--ranks 2 --rows 64 --copies none --budget 1e-9")
    assert {row["note"] for row in report["rows"]} == {"not measured: beyond the budget of 1e-09 s"}


def test_targets_come_first() -> None:
    found = ring_cost.cases((2, 4, 8, 16), (8192, 16384))
    assert [str(case) for case in found[:3]] == ["8 x 8k, zigzag", "8 x 8k, contiguous",
                                                "8 x 16k, zigzag"]  # fmt: skip
    assert len(set(found)) == 16
    assert ring_cost.timed_ranks(16) == (0, 8, 15) and ring_cost.timed_ranks(2) == (0, 1)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--copies often", "--copies must be of"),
        ("--gbps 0", "--gbps must be positive"),
        ("--ranks 1", "--ranks must be at least 2"),
        ("--heads 4/2,8/2", "--heads must be one pair"),
    ],
)
def test_options_of_ring_cost(words: str, text: str) -> None:
    parser = argparse.ArgumentParser()
    ring_cost.add_arguments(parser)
    with pytest.raises(ValueError, match=text):
        ring_cost.setting_of(parser.parse_args(["--device", "cpu", *words.split()]))


def test_the_hosts_time_without_a_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """Posts count where they are the rank's own, and not where the transport is left out."""
    calls = calls_of(256)
    shards = drawn(calls, CPU, "none", backward=False)
    post, slow = TurnTransport.post, 0.05

    def posted(self: TurnTransport, *args: Any) -> None:
        time.sleep(slow)
        post(self, *args)

    monkeypatch.setattr(TurnTransport, "post", posted)
    own, without = (Times(HostWatch(), counts_posts=counts) for counts in (True, False))
    for times in (own, without):
        Turns(calls, shards).forward(2, times)
    assert own.host_s > 3 * slow > without.host_s
    assert sum(stop - start for start, stop in without.waits) > 3 * slow


# -- length


def length_report(tmp_path: Path, words: str, status: int = 0) -> dict[str, Any]:
    path = tmp_path / "length.json"
    common = "--device cpu --quick --quiet --seqlen 512 --backend aten --ranks 2"
    assert length.main([*shlex.split(f"{common} {words}"), "--json", str(path)]) == status
    report: dict[str, Any] = json.loads(path.read_text())
    return report


@pytest.mark.slow
def test_length(tmp_path: Path) -> None:
    report = length_report(tmp_path, "--offload none,kv --limit 2M")
    runs = [row for row in report["rows"] if row["what"] == "run"]
    bounds = [row for row in report["rows"] if row["what"] == "longest"]
    assert [(row["mode"], row["offload"]) for row in bounds] == [
        ("fwd_bwd", "none"), ("fwd_bwd", "kv"), ("fwd", "none"), ("fwd", "kv"),
    ]  # fmt: skip
    assert [(row["mode"], row["offload"], row["window"]) for row in runs[:2]] == [
        ("fwd", "none", None), ("fwd", "kv", None),
    ]  # fmt: skip
    for row in bounds:
        assert row["device_bytes"] <= 2 << 20 and row["seqlen"] % 256 == 0
        assert abs(row["seqlen"] - row["predicted_seqlen"]) <= 256
        assert row["predicted_bytes"] == pytest.approx(row["device_bytes"], rel=0.03)
        assert row["predicted_bytes"] * (1 + 256 / row["seqlen"]) > 2 << 20  # no longer one fits
    for row in runs:
        assert 0 < row["max_ratio"] <= 1 and row["seconds"] > 0 and row["note"] == ""
    assert [row["same_bits"] for row in runs if row["seqlen"] == 512 and row["window"] is None] == [
        None, True, None, True,
    ]  # fmt: skip
    assert {row["window"] for row in runs if row["mode"] == "fwd_bwd"} == {None, 48}
    assert report["failures"] == []


def test_other_bits_when_offloaded_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    put = Shards.put

    def wrong(self: Shards, name: str, rank: int, x: Tensor) -> None:
        put(self, name, rank, x)
        if (name, rank) == ("k", 2) and self.at(name, rank).data_ptr() != x.data_ptr():
            self.at(name, rank)[0, 17, 1, 3] += 1.0

    monkeypatch.setattr(Shards, "put", wrong)
    parser = argparse.ArgumentParser()
    length.add_arguments(parser)
    words = "--device cpu --seqlen 512 --backend aten"
    bench = length.Lengths(length.setting_of(parser.parse_args(words.split())))
    alone, offloaded = (bench._run("fwd", offload, 512) for offload in ("none", "kv"))
    assert alone.same_bits is None and alone.note == "" and offloaded.same_bits is False
    assert bench.failures == ["fwd of 512, kv: other bits than without offloading"]


def test_what_the_host_has_no_room_for_is_not_run(tmp_path: Path) -> None:
    report = length_report(tmp_path, "--offload kv --host-memory 1k --budget 100")
    assert {row["note"] for row in report["rows"]} == {
        "not run: more host memory than there is", "nothing fits",
    }  # fmt: skip


@pytest.mark.parametrize("name", [*ALL])
def test_the_judge_sees_one_wrong_row(name: str) -> None:
    calls = calls_of(256)
    shards = taken(calls, "none")
    ratio, wrong = judge(calls, shards, backward=True)
    assert 0 < ratio <= 1 and wrong == []
    x = shards.at(name, RANKS - 1)
    x[(0, 1, -1) if name == "lse" else (0, -1, 1, 5)] += 0.1
    assert judge(calls, shards, backward=True)[1]


@pytest.mark.parametrize("limit", [1, 7, 100, 5000, 100000])
@pytest.mark.parametrize("guess", [10, 640, 51200, 2000000])
def test_the_longest_is_found_from_any_guess(limit: int, guess: int) -> None:
    tried = list[int]()

    def fits(seqlen: int) -> bool:
        tried.append(seqlen)
        return seqlen <= limit * 10

    found = longest(fits, guess, 10)
    assert found % 10 == 0 and found <= limit * 10
    assert limit * 10 - found <= max(0, limit * 10 // length.RESOLUTION + 10)
    assert len(tried) <= 40 and len(set(tried)) == len(tried)
    assert longest(lambda seqlen: False, guess, 10) == 0


def test_a_digest_sees_bits_and_places(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 7, dtype=torch.float32).bfloat16()
    assert digest(x, CPU) == digest(x.clone(), CPU)
    swapped, changed = x.clone(), x.clone()
    swapped[0, 0], swapped[2, 5] = x[2, 5], x[0, 0]
    changed.view(torch.int16)[1, 2] ^= 1
    assert len({digest(y, CPU) for y in (x, swapped, changed)}) == 3
    monkeypatch.setattr(length, "DIGEST_NUMBERS", 1)
    assert len({digest(y, CPU) for y in (x, swapped, changed, x.flip(0))}) == 4


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--offload most", "--offload must be of"),
        ("--seqlen 100", "--seqlen must be a multiple of 512"),
        ("--heads 4/2,8/2", "--heads must be one pair"),
    ],
)
def test_options_of_length(words: str, text: str) -> None:
    parser = argparse.ArgumentParser()
    length.add_arguments(parser)
    with pytest.raises(ValueError, match=text):
        length.setting_of(parser.parse_args(["--device", "cpu", *words.split()]))


# -- in `ring-attn gpu`


def test_each_set_is_a_call_of_its_own(tmp_path: Path) -> None:
    for name in gpu.SETS:
        parts = gpu.parts_of(name, tmp_path)
        assert sum(part.seconds for part in parts if not part.takes_rest) <= gpu.SETS[name] <= 540
    modules = {"tune": tune, "ring": ring_cost, "decode": decode, "length": length}
    modules["profile"] = profile_kernels
    assert modules.keys() == gpu.BENCHMARKS.keys()
    for name, module in modules.items():
        (part,) = gpu.parts_of(name, tmp_path)
        words = list(part.command[part.command.index(module.__name__) + 1 :])
        words[words.index(gpu.BUDGET)] = "100"
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        args = parser.parse_args([*words, "--device", "cpu"])
        assert args.budget == 100
        assert args.json == tmp_path / f"{gpu.BENCHMARKS[name][0].replace(' ', '_')}.json"
        assert module.setting_of(args).budget == 100


def test_a_paced_copy_copies_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = list[int]()
    monkeypatch.setattr(torch.cuda, "_sleep", pauses.append)
    monkeypatch.setattr(turns, "PIECE_BYTES", 64)
    source, into = torch.randn(1, 10, 2, 2), torch.zeros(1, 10, 2, 2)
    turns._copy(into, source, 100.0)
    assert torch.equal(into, source) and len(pauses) == 3
    # 64 bytes at 100 GB/s are 0.64 ns, at two cycles a ns.
    assert pauses == [1, 1, 0]


class FakeStream:
    """Keeps what is asked of it, in one list for all streams and events."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "FakeStream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


def test_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies wait for what was enqueued before, and the next step for its copies."""
    log = list[str]()
    compute = FakeStream("compute", log)
    current = [compute]

    class Event:
        def record(self) -> None:
            log.append(f"{current[-1].name} records")

        def __str__(self) -> str:
            return "its event"

    @contextmanager
    def stream(which: FakeStream) -> Iterator[None]:
        current.append(which)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    calls = calls_of(256)
    shards = drawn(calls, CPU, "none", backward=False)
    expected = Turns(calls, shards).forward(2)
    one = Turns(calls, shards)
    monkeypatch.setattr(one, "_streams", {"shards": FakeStream("copies", log)})
    assert equal([*one.forward(2)], [*expected])
    assert log == (RANKS - 1) * [
        "copies waits for compute",
        "copies records",
        "compute waits for its event",
    ]
