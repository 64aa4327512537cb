"""The choice of a strategy: obvious on special clusters, deterministic, and explained."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ring_attn.core.joint import JointLayout
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import NAMES, Strategy
from ring_attn.machines.cluster import Cluster
from ring_attn.planning import devices, planner
from ring_attn.planning.agreement import agreed_strategy
from ring_attn.planning.calls import core_of
from ring_attn.planning.candidates import strategies_for
from ring_attn.planning.choice import TIE, Candidate, Choice, Problem
from ring_attn.planning.devices import builtin_cluster, cpu_cluster, find_cluster
from ring_attn.planning.planner import choose, explain
from ring_attn.planning.scale import estimates_of, walks
from ring_attn.strategies.registry import code_of, make_call, why_not_same_bits
from ring_attn.testing import LAYOUTS, layouts_of, masks
from ring_attn.transport.local import LocalTransport, run_local
from tests.counts import counted
from tests.refusals import refused
from tests.unit.test_time import cluster as made_cluster

MASKS = masks(61)


cluster = partial(made_cluster, speed=1e14, node_size=64, inside=1e15, between=1e15)


def plan(**options: Any) -> Choice:
    """8 ranks, 16 heads of 64, causal."""
    usual: dict[str, Any] = {
        "seqlen": 1 << 14,
        "world_size": 8,
        "nheads": 16,
        "headdim": 64,
        "causal": True,
        "device_type": "cuda",
        "backend": "triton",
        "cluster": cluster(),
    }
    return explain(**{**usual, **options})


def found(choice: Choice, name: str, layout: str | None = None) -> Candidate:
    return next(
        c for c in choice.candidates if c.full_name == name and layout in (None, c.layout_name)
    )


# -- obvious choices


SLOW_BETWEEN_NODES = cluster(node_size=4, between=2e9, inside=1e12)
CONTIGUOUS, ZIGZAG = {"layout": "contiguous"}, {"layout": "zigzag"}

# The options to choose from, and the best: its name, its layout, and why it is better.
OBVIOUS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "equal work": (
        {"strategies": ["ring"]},
        "ring",
        "zigzag",
        "as fast as ring over striped shards",
    ),
    "equal work after an exchange": (
        {**CONTIGUOUS, "strategies": ["ring", "q_exchange"]},
        "q_exchange + all_gather",
        "contiguous",
        "8. % faster than ring, whose busiest rank comp",
    ),
    "too much work by a bound": (
        {**CONTIGUOUS, "strategies": ["ring", "q_exchange"], "effort": "best"},
        "q_exchange + all_gather",
        "contiguous",
        "every other candidate takes at least 62 % longer",
    ),
    **{
        f"a slow link between nodes, {name}": (
            {**ZIGZAG, "strategies": ["ring", name], "cluster": SLOW_BETWEEN_NODES},
            best,
            "zigzag",
            r"faster than ring, which waits .* for bytes",
        )
        for name, best in (("hybrid", "hybrid 4 x ring"), ("double_ring", "double_ring 4"))
    },
    "a window's halo": (
        {
            **CONTIGUOUS,
            "seqlen": 1 << 16,
            "window_size": (512, 0),
            "strategies": ["ring", "all_gather"],
            "cluster": cluster(inside=1e10),
        },
        "ring",
        "contiguous",
        "faster than all_gather by 4 heads, which waits .* longer for",
    ),
    "one kv head is gathered at once": (
        {
            **ZIGZAG,
            "seqlen": 1 << 12,
            "nheads_kv": 1,
            "strategies": ["ring", "all_gather"],
            "cluster": cluster(latency=2e-4, inside=1e9),
        },
        "all_gather",
        "zigzag",
        "faster than ring, which waits .* longer for bytes",
    ),
    "one rank": ({**CONTIGUOUS, "world_size": 1}, "ring", "contiguous", "the only candidate"),
}


@pytest.mark.parametrize("name", OBVIOUS)
def test_obvious_choices(name: str) -> None:
    options, best, layout, why = OBVIOUS[name]
    choice = plan(**{"effort": "all", **options})
    assert (choice.best.full_name, choice.best.layout_name) == (best, layout), str(choice)
    assert re.match(f"{re.escape(best)}: .*{why}", choice.reason), choice.reason
    text = str(choice).splitlines()
    assert text[2].startswith("*") and best in text[2] and text[-1] == choice.reason


@pytest.mark.parametrize(
    ("few", "many", "short"),
    # Launches with 2 kv heads and so many rows, in zigzag of 2 groups half of a shard: 128 programs
    # on 132 multiprocessors; with twice the rows 256.
    [
        ("all_gather by 2 heads", "all_gather by 4 heads", 1 << 13),
        ("hybrid 4 x ring", "hybrid 2 x ring", 1 << 15),
    ],
)
def test_launches_of_few_kv_heads_have_the_rate_of_their_kernel(
    few: str, many: str, short: int
) -> None:
    """On an H100, short launches of few kv heads run the portable backward, half as fast."""
    ratios = []
    for seqlen in (short, 2 * short):
        choice = plan(
            seqlen=seqlen,
            nheads_kv=8,
            layout="zigzag",
            effort="all",
            strategies=["all_gather", "hybrid"],
            cluster=builtin_cluster("H100"),
        )
        seconds = [found(choice, label).prediction.backward.compute for label in (few, many)]
        ratios.append(seconds[0] / seconds[1])
    assert ratios[0] > 1.3 and ratios[1] < 1.1, ratios


def test_same_bits_keeps_the_backward_that_does_not_depend_on_the_rows() -> None:
    args: dict[str, Any] = {
        "seqlen": 1 << 17,
        "nheads_kv": 2,
        "layout": "contiguous",
        "strategies": ["ring"],
        "cluster": builtin_cluster("H100"),
    }
    compute = {
        same_bits: plan(**args, same_bits=same_bits).best.prediction.backward.compute
        for same_bits in (None, True, False)
    }
    assert compute[None] == compute[True] > 1.3 * compute[False]


def test_too_little_memory_leaves_the_ring() -> None:
    args: dict[str, Any] = {"layout": "zigzag", "nheads_kv": 1, "effort": "all"}
    roomy = plan(**args)
    # Our kernels write into the ring's tensors, torch's operator into its own.
    operator = plan(**args, backend="aten", strategies=["ring"])
    assert operator.best.peak_bytes > found(roomy, "ring").peak_bytes
    need = {c.full_name: c.peak_bytes + c.communicator_bytes for c in roomy.candidates}
    inputs = (2 * 16 + 2 * 1) * (1 << 14) // 8 * 64 * 2
    tight = min(size for name, size in need.items() if name != "ring" and size) - 1
    choice = plan(**args, memory_bytes=float(tight + inputs))
    assert [c.full_name for c in choice.candidates if c.prediction] == ["ring"]
    gathered = found(choice, "all_gather")
    assert re.search(r"needs .*B .* of inputs and .*B of NCCL's, a rank has", str(gathered.reason))
    assert choice.reason == "ring: the only candidate"
    with pytest.raises(ValueError, match="no strategy can run .* needs"):
        plan(**args, memory_bytes=1.0)


def test_of_those_as_fast_as_the_fastest_the_first_is_taken() -> None:
    choice = plan(layout="zigzag", effort="all")
    seconds = [c.seconds for c in choice.candidates if c.prediction]
    tied = [c for c in choice.candidates if c.seconds <= (1.0 + TIE) * min(seconds)]
    order = [strategy.full_name(8) for strategy in strategies_for(choice.problem.spec, 8, 64)]
    assert len(tied) > 1 and choice.best is tied[0]
    assert [c.full_name for c in tied] == sorted((c.full_name for c in tied), key=order.index)
    assert seconds[len(tied) :] == sorted(seconds[len(tied) :])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "on",
    [cluster(), cpu_cluster(4), builtin_cluster("H100", node_size=4)],
    ids=["made", "cpu", "h100"],
)
@pytest.mark.sweep(2)
def test_a_bound_is_one_and_misses_nothing(causal: bool, on: Cluster) -> None:
    args: dict[str, Any] = {"cluster": on, "causal": causal, "nheads_kv": 4, "world_size": 4}
    args["seqlen"] = 1 << 13
    every = plan(**args, effort="all")
    for effort in ("names", "best"):
        quick = plan(**args, effort=effort)
        assert (quick.strategy, quick.layouts) == (every.strategy, every.layouts)
        assert quick.best.seconds == every.best.seconds
    for uneven in (
        {"cu_seqlens": [0, 2872, 2915, 3077, 3799, 4096], "causal": False, "seqlen": 4096},
        {"window_size": (0, 0), "seqlen": 257},
        {"seqlen": 256, "seqlen_k": 4096, "world_size": 3},
    ):
        given = {**args, "layout": "contiguous", **uneven}
        every, quick = (plan(**given, effort=effort) for effort in ("all", "best"))
        assert quick.strategy == every.strategy
        for candidate in every.candidates:
            assert candidate.at_least <= candidate.seconds * (1 + 1e-9)
            other = found(quick, candidate.full_name)
            assert other.refused or other.at_least <= candidate.seconds * (1 + 1e-9)


def test_every_name_is_simulated_where_it_is_asked_for() -> None:
    args: dict[str, Any] = {"layout": "contiguous", "effort": "names"}
    choice = plan(**args, cluster=builtin_cluster("A100"))
    assert choice.to_dict() == plan(**args, cluster=builtin_cluster("A100")).to_dict()
    reported = {c.name for c in choice.candidates if c.prediction is not None}
    assert reported == {*NAMES}
    left = [c for c in choice.candidates if c.prediction is None]
    assert "\nleft out: slower: " in str(choice)
    assert left and all(c.ruled_out and "takes at least" in str(c.reason) for c in left)


def test_every_refusal_has_its_reason() -> None:
    choice = plan(effort="all", strategies=["q_exchange", "ring"], layout="auto")
    for candidate in choice.candidates:
        assert (candidate.prediction is None) == candidate.refused == bool(candidate.reason)
    assert "\nrefused: " in str(choice)
    assert "contiguous layout" in str(found(choice, "q_exchange + ring", "zigzag").reason)
    assert not found(choice, "q_exchange + ring", "contiguous").refused

    named = plan(strategies=[Strategy(ulysses_degree=3), "ring"])
    assert "must divide the world size, got 3 x 1 and" in str(
        found(named, "hybrid 3 x ring").reason
    )
    pair = SequenceLayout.striped(64, 8), SequenceLayout.contiguous(64, 8)
    with pytest.raises(ValueError, match="must both be striped, or neither"):
        plan(seqlen=64, layout=pair)


def test_same_bits_leaves_what_has_them() -> None:
    choice = plan(layout="contiguous", same_bits=True, effort="all", nheads_kv=2)
    assert {c.name for c in choice.candidates if not c.refused} >= {"ring", "all_gather"}
    for candidate in choice.candidates:
        assert candidate.same_bits != candidate.refused
        if candidate.refused:
            assert "same_bits=True is not possible here" in str(candidate.reason)
    with pytest.raises(ValueError, match="does not fold in one order"):
        plan(same_bits=True, backend="aten")


@pytest.mark.parametrize(
    ("name", "kind"),
    [pair for turn, name in enumerate(MASKS) for pair in product([name], LAYOUTS[turn % 2 :: 2])],
)
def test_a_candidate_is_the_call_that_is_made(name: str, kind: str) -> None:
    mask = MASKS[name]
    layouts = layouts_of(kind, mask, 4)
    spec = AttentionSpec("cpu", torch.float32, 1, 6, 2, 8, 8)
    problem = Problem(spec, mask, 4, cpu_cluster(4), "aten")
    choice = choose(problem, {"given": layouts}, effort="all")
    for candidate in choice.candidates:
        args = (candidate.strategy, spec, layouts, mask, 3)
        if candidate.refused:
            with pytest.raises((ValueError, NotImplementedError)):
                make_call(*args, backend="aten")
            continue
        call: Any = make_call(*args, backend="aten")
        assert (why_not_same_bits(call) is None) == candidate.same_bits
        if candidate.sent_side is not None:
            core = core_of(call)
            plan = code_of(core.strategy).gradients(core)
            assert plan.sent_side == candidate.sent_side


def test_auto_layout_has_four() -> None:
    """A balanced layout is aligned, and leaves padding without work."""
    choice = plan(effort="all", strategies=["ring"])
    assert {c.layout_name for c in choice.candidates} == {
        "contiguous",
        "zigzag",
        "striped",
        "balanced",
    }
    # Two products forward and five backward, for half of all pairs.
    flops = 7 * 2 * 64 * 16 * (1 << 14) * ((1 << 14) + 1) / 2
    assert choice.best.seconds == pytest.approx(flops / 8 / 1e14, rel=0.02)
    balanced = found(choice, "ring", "balanced").layouts[0]
    assert all(cut % 128 == 0 for cut in balanced.cuts or ())
    documents = plan(cu_seqlens=[0, 4096, 12000], layout="balanced", strategies=["ring"])
    assert "2 documents, 4384 rows of padding" in str(documents)
    for layout, problem in ((balanced, choice.problem), (documents.layout, documents.problem)):
        mask = problem.mask
        areas = layout.mask_area(mask)
        assert max(areas) <= 1.1 * sum(areas) / len(areas) and sum(areas) == mask.area
    longer = plan(seqlen=1000, seqlen_k=3000, layout="balanced", strategies=["ring"])
    assert [layout.seqlen for layout in longer.layouts] == [1000, 3000]


def test_a_choice_simulates_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MAX_RANK_STEPS", 16)
    choice = plan(effort="names")
    simulated = [c for c in choice.candidates if c.prediction is not None]
    assert 0 < sum(8 * c.steps for c in simulated) <= 16
    assert any("not simulated" in str(c.reason) for c in choice.candidates)


def test_the_cluster_is_that_of_the_file_or_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, path = builtin_cluster("A100"), tmp_path / "machine.json"
    monkeypatch.setenv(devices.CLUSTER_VARIABLE, str(path))
    path.write_text(json.dumps({"cluster": asdict(mine)}))
    assert find_cluster("cpu", 2) == mine
    monkeypatch.delenv(devices.CLUSTER_VARIABLE)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert find_cluster("cpu", 4) == cpu_cluster(4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert find_cluster(None, 64) == builtin_cluster("H200")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert find_cluster("cuda", 64).node_size == 4
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Unheard 9000")
    with pytest.raises(ValueError, match="no built-in description of this machine .Unheard 9000"):
        find_cluster("cuda", 64)


def test_ranks_that_differ_are_all_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The busiest rank is, of more than MAX_EXACT: here between the first and the last node."""
    cuts = [0, 30_000, 70_000, 24 * 4096]
    for options in ({"cu_seqlens": cuts}, {"layout": "balanced"}, {"window_size": (4096, 0)}):
        given = {"seqlen": 24 * 4096, "world_size": 24, "layout": "contiguous", **options}
        choice = plan(**given, strategies=["ring"], cluster=builtin_cluster("H100"))
        assert len(walks.walked_calls(choice.problem, choice.best)) == 24
    given = {"seqlen": 40 * 4096, "world_size": 40, "layout": "contiguous", "strategies": ["ring"]}
    given |= {"cu_seqlens": [0, 60_000, 110_000, 120_000], "cluster": builtin_cluster("H100")}
    every = plan(**given)
    monkeypatch.setattr(walks, "MAX_EXACT", 16)
    some = plan(**given)
    walked = [call.rank for call in walks.walked_calls(some.problem, some.best)]
    assert some.best.busiest in walked and len(walked) == 24
    assert some.best.seconds == pytest.approx(every.best.seconds, rel=0.02)


# Wrong types are tested in tests/unit/test_wrong_values.py.
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seqlen": 0}, "seqlen must be at least 1, got 0"),
        ({"nheads": 6, "nheads_kv": 4}, "multiple of nheads_kv, got 6 and 4"),
        ({"layout": SequenceLayout.zigzag(8, 2)}, "layout of q must be over 16384"),
        ({"strategies": ["spiral"]}, "strategies must be one of .* got 'spiral'"),
        ({"strategies": []}, "none was requested"),
        ({"strategies": ["hybrid"], "world_size": 7}, "no degree for 7 ranks"),
        ({"cu_seqlens": [0, 16385]}, "must end at most at the global length 16384"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan(**options)


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    layout, spec = SequenceLayout.zigzag(256, 3), AttentionSpec("cpu", torch.float32, 1, 4, 2, 8, 8)

    def fail_to_agree(rank: int, transport: LocalTransport) -> None:
        mine = replace(spec, nheads=8) if rank == 1 else spec
        with pytest.raises(ValueError, match=r"ranks \[1\] have others than global rank 0"):
            agreed_strategy(
                mine,
                (layout, layout),
                Mask(256, 256, True),
                transport,
                backend="aten",
                same_bits=None,
                backward=True,
            )

    run_local(3, fail_to_agree)


@pytest.mark.parametrize("seqlen", [1, 2, 7])
def test_a_few_rows_are_planned_after_little_work(seqlen: int) -> None:
    """With fewer rows than ranks no strategy is ruled out by its compute: all are simulated."""
    planned = partial(
        explain,
        seqlen=seqlen,
        world_size=8,
        nheads=32,
        nheads_kv=8,
        headdim=128,
        cluster=builtin_cluster("H100"),
    )
    choice, calls = counted(planned)
    assert len(choice.candidates) > 10
    assert calls < 3e6  # 0.7 million were counted


def test_recurrent_layers_have_a_line_and_auto_takes_no_striped_shards() -> None:
    problem: Any = {
        "seqlen": 64,
        "world_size": 2,
        "nheads": 2,
        "headdim": 16,
        "batch": 3,
        "causal": True,
        "cu_seqlens": [0, 20, 64],
        "recurrent": 48,
        "cluster": cpu_cluster(2),
    }
    choice = explain(**problem, layout="contiguous")
    # Rank 0 sends the map of its only run.
    line = f"each recurrent layer: a rank sends at most {3 * 48} B forward, by gather in 1 rounds"
    assert choice.traffic == [line] and line in str(choice)
    assert "striped" not in {c.layout_name for c in explain(**problem).candidates}


def test_a_cluster_by_the_name_of_a_device() -> None:
    """As the command `ring-attn plan --cluster h100` takes it."""
    call: Any = partial(explain, seqlen=4096, world_size=2, nheads=8, headdim=64)
    assert str(call(cluster="h100")) == str(call(cluster=builtin_cluster("H100")))
    with refused(ValueError, "cluster must be one of|'H100'|'NO_CARD'"):
        call(cluster="no_card")


# -- rows that every rank holds


def test_replicated_rows_are_in_the_plan() -> None:
    """16 heads of 64 in bfloat16: 2 KiB a row of out, of which a rank owns 64 of 512."""
    options: dict[str, Any] = {"seqlen": 8192 + 512, "causal": False, "layout": "contiguous"}
    choice = plan(replicated=512, **options)
    forward, backward = choice.replicated
    assert forward.bytes_sent == 7 * 64 * 2048, "own rows to 7 ranks"
    assert backward.bytes_sent == 7 * 64 * 2048, "shares of the rows that 7 ranks own"
    assert forward.messages == backward.messages == 1
    joint = JointLayout([512, SequenceLayout.contiguous(8192, 8)])
    assert choice.layouts == (joint.owners, joint.owners)
    assert "512 rows on every rank" in str(choice)
    given = plan(**{**options, "layout": joint})
    assert given.replicated == choice.replicated and given.best.seconds == choice.best.seconds
    assert plan(**options).replicated == ()
    assert len(plan(replicated=512, backward=False, **options).replicated) == 1


@pytest.mark.parametrize("backward", [False, True])
def test_replicated_rows_take_memory(backward: bool) -> None:
    """Each rank owns 1024 + 64 rows of q, k, v and out, and holds all 512 of the text."""
    options: dict[str, Any] = {
        "seqlen": 8192 + 512,
        "causal": False,
        "layout": "contiguous",
        "strategies": ["ring"],
        "backward": backward,
    }
    alone, joint = plan(**options).best, plan(replicated=512, **options).best
    nbytes = 2 * 16 * 64  # of a row of each
    copies, more = 3 * (1024 + 64), 512 - 64
    # The own rows are copied. In the backward, out and dout are held for own and for all rows.
    of_results = 2 * (1024 + 64) + more if backward else 0
    assert joint.peak_bytes - alone.peak_bytes == nbytes * (copies + of_results)
    # The inputs of a rank are larger by the rows of the text that it does not own, as is the sum.
    inputs = (1024 + 64 + more) * nbytes * (4 if backward else 3)
    fitting = inputs + joint.peak_bytes + joint.communicator_bytes
    assert plan(replicated=512, memory_bytes=fitting, **options).best.name == "ring"
    with pytest.raises(ValueError, match="no strategy can run"):
        plan(replicated=512, memory_bytes=fitting - 1, **options)


@pytest.mark.parametrize("strategies", [None, ["ulysses"]])
def test_the_plan_of_rows_that_all_ranks_hold_is_what_runs(strategies: Any) -> None:
    """A rank computes the rows of q that it owns with its copy of all keys: no key is sent."""
    options: dict[str, Any] = {"seqlen": 512, "layout": "zigzag", "strategies": strategies}
    choice = plan(replicated=512, **options)
    joint = JointLayout([512], world_size=8)
    assert [c.full_name for c in choice.candidates] == ["ring"] and choice.reason in str(choice)
    assert "no key is sent" in choice.reason and "512 rows on 8 x" in str(choice)
    prediction = choice.best.prediction
    assert prediction is not None and prediction.backward is not None
    assert prediction.total.bytes_sent == prediction.total.messages == 0
    assert choice.problem.mask.area == Mask(512, 512, causal=True).area, "each query once"
    # A row has 2 KiB; the exchange is that of rows beside a video, for a rank owns 64.
    assert [cost.bytes_sent for cost in choice.replicated] == 2 * [7 * 64 * 2048]
    found = choice.to_dict()["mask"]
    assert isinstance(found, dict) and found["seqlen_k"] == 512
    given = plan(**{**options, "layout": joint})
    assert given.best.seconds == choice.best.seconds and given.best.layout_name == "given"
    assert given.best.peak_bytes == choice.best.peak_bytes
    with refused(ValueError, "each of strategies must be one of"):
        plan(replicated=512, **{**options, "strategies": ["rings"]})


def test_inputs_of_rows_that_all_ranks_hold_count_once() -> None:
    options: dict[str, Any] = {"seqlen": 512, "layout": "contiguous", "replicated": 512}
    best = plan(**options).best
    fitting = 4 * 512 * 2048 + best.peak_bytes + best.communicator_bytes
    assert plan(memory_bytes=fitting, **options).best == best
    with pytest.raises(ValueError, match="no strategy can run"):
        plan(memory_bytes=fitting - 1, **options)


def test_a_plan_of_many_ranks_that_hold_all_rows_walks_one() -> None:
    """Each of 64 ranks has a slice of the mask, and as many steps."""
    options: dict[str, Any] = {"seqlen": 512, "causal": True, "replicated": 512}
    choice = plan(world_size=64, **options)
    timelines = estimates_of(choice.problem, choice.best).timelines(backward=False)
    assert len(timelines) == 1
    exact = plan(world_size=64, exact=True, **options)
    assert choice.best.seconds == pytest.approx(exact.best.seconds, rel=1e-12)


def test_rows_of_which_no_rank_has_a_copy_take_nothing() -> None:
    options: dict[str, Any] = {"seqlen": 8192, "causal": False}
    joint = JointLayout([SequenceLayout.contiguous(8192, 8)])
    expected = plan(**options, layout=joint.owners)
    assert plan(**options, layout=joint).best == expected.best
    one = plan(**options, world_size=1, layout="contiguous")
    assert plan(**options, world_size=1, layout="contiguous", replicated=512).best == one.best


def test_the_exchange_holds_most_where_many_ranks_have_few_rows() -> None:
    """128 ranks have 100 rows of the video each, and 1024 of the text: gathered, in order, in out.

    A quick plan, which takes other figures from fewer ranks, counts them on these ranks.
    """
    options: dict[str, Any] = {
        "seqlen": 12_800 + 1024,
        "world_size": 128,
        "causal": False,
        "layout": "contiguous",
        "strategies": ["ring"],
        "backward": False,
        "effort": "best",
        "replicated": 1024,
    }
    own, out = 100 + 8, 2 * 16 * 64
    best = plan(**options).best
    assert best.peak_bytes == out * (3 * own + own + 2 * 1024 + (own - 8 + 1024))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replicated": -1}, "at least 0"),
        ({"replicated": 1 << 20}, "must be the first of seqlen"),
        ({"replicated": 3, "seqlen_k": 64}, "as many keys"),
        ({"replicated": 3, "layout": SequenceLayout.zigzag(1 << 14, 8)}, "the name of a layout"),
    ],
)
def test_wrong_replicated_rows(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(**options)
