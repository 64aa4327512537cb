"""The choice of a strategy: obvious on special clusters, deterministic, and explained."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.rates import PORTABLE, RATES
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import NAMES, Strategy
from ring_attn.planning import devices, planner
from ring_attn.planning.agreement import agreed_strategy
from ring_attn.planning.candidates import strategies_for
from ring_attn.planning.choice import Candidate, Choice, Problem, label
from ring_attn.planning.devices import Cluster, builtin_cluster, cpu_cluster, find_cluster, to_json
from ring_attn.planning.planner import choose, explain
from ring_attn.strategies import ring
from ring_attn.strategies.registry import make_call, why_not_same_bits
from ring_attn.testing import LAYOUTS, layouts_of, masks
from ring_attn.transport.local import LocalTransport, run_local

MASKS = masks(61)


def cluster(
    *,
    node_size: int = 64,
    flops: float = 1e14,
    latency: float = 0.0,
    inside: float = 1e15,
    between: float = 1e15,
    memory: float = 0.0,
) -> Cluster:
    """Devices on which only pairs cost time, and links of given speeds in bytes/s."""
    rate = devices.Rate(flops)
    device = devices.Device("made", 1e15, rate, rate, 1e15, memory)
    links = devices.Link("fast", latency, inside), devices.Link("slow", latency, between)
    return Cluster(device, node_size, *links)


def plan(**options: Any) -> Choice:
    """8 ranks, 16 heads of 64, causal."""
    usual: dict[str, Any] = {
        "seqlen": 1 << 14, "world_size": 8, "nheads": 16, "headdim": 64, "causal": True,
        "device_type": "cuda", "backend": "triton", "cluster": cluster(),
    }  # fmt: skip
    return explain(**{**usual, **options})


def found(choice: Choice, label: str, layout: str | None = None) -> Candidate:
    return next(
        c for c in choice.candidates if c.label == label and layout in (None, c.layout_name)
    )


# -- obvious choices


def test_without_a_network_equal_work_wins() -> None:
    choice = plan(effort="all", strategies=["ring", "all_gather", "q_exchange"])
    # Two products forward and five backward, for half of all pairs.
    flops = 7 * 2 * 64 * 16 * (1 << 14) * ((1 << 14) + 1) / 2
    mean = flops / 8 / 1e14
    assert choice.best.seconds == pytest.approx(mean, rel=0.02)
    unequal = found(choice, "ring", "contiguous")
    assert unequal.seconds > 1.5 * choice.best.seconds
    assert found(choice, "q_exchange + all_gather", "contiguous").seconds < 0.7 * unequal.seconds


@pytest.mark.parametrize("names", [["ring", "hybrid"], ["ring", "double_ring"]])
def test_a_slow_link_between_nodes_keeps_the_traffic_inside(names: list[str]) -> None:
    slow = cluster(node_size=4, between=2e9, inside=1e12)
    choice = plan(cluster=slow, layout="zigzag", strategies=names, effort="all")
    assert choice.best.family == names[1]
    assert 4 in (choice.strategy.ulysses_degree, choice.strategy.inner_degree)
    best, plain = choice.best.prediction, found(choice, "ring").prediction
    assert best is not None and plain is not None
    assert best.total.slowest_exposed < plain.total.slowest_exposed
    assert "between nodes" in str(plain.total.slowest_link)


def test_of_a_window_only_the_halo_is_sent() -> None:
    choice = plan(seqlen=1 << 16, window_size=(512, 0), layout="contiguous", effort="all",
                  cluster=cluster(inside=1e10))  # fmt: skip
    assert choice.best.family == "ring"
    sent = {c.label: c.prediction.total.bytes_sent for c in choice.candidates if c.prediction}
    assert sent["ring"] == sent["exchange"]
    others = {name for name in sent if "ring" not in name and "exchange" not in name}
    assert all(sent["ring"] < sent[name] for name in others)


def test_one_kv_head_is_gathered_at_once() -> None:
    waits = cluster(latency=1e-4, inside=1e9)
    choice = plan(seqlen=1 << 12, nheads_kv=1, layout="zigzag", cluster=waits)
    assert choice.best.label == "all_gather", str(choice)
    assert choice.best.prediction is not None and choice.best.prediction.total.messages == 3


def test_strategies_that_leave_few_kv_heads_to_a_launch_have_its_rate() -> None:
    """On an H100, launches of few kv heads run the portable backward, half as fast."""
    choice = plan(
        nheads_kv=8, layout="zigzag", effort="all", cluster=devices.builtin_cluster("H100")
    )
    for name, labels in {
        PORTABLE: ("ulysses", "hybrid 4 x ring", "all_gather", "all_gather by 2 heads"),
        "triton": ("ring", "hybrid 2 x ring", "all_gather by 4 heads"),
    }.items():
        for candidate in (c for c in choice.candidates if c.label in labels):
            device = planner.rated_cluster(choice.problem, candidate).device
            assert device.backward == RATES["sm_90"][name].backward, candidate.label
    computes, gathers = (
        found(choice, x).prediction.backward.compute for x in ("ring", "all_gather")
    )
    assert gathers > 1.4 * computes


def test_too_little_memory_leaves_the_ring() -> None:
    args: dict[str, Any] = {"layout": "zigzag", "nheads_kv": 1, "effort": "all"}
    roomy = plan(**args)
    # Our kernels write into the ring's tensors, torch's operator into its own.
    operator = plan(**args, backend="aten", strategies=["ring"])
    assert operator.best.peak_bytes > found(roomy, "ring").peak_bytes
    need = {c.label: c.peak_bytes for c in roomy.candidates}
    inputs = (2 * 16 + 2 * 1) * (1 << 14) // 8 * 64 * 2
    tight = min(size for name, size in need.items() if name != "ring" and size) - 1
    choice = plan(**args, memory_bytes=float(tight + inputs))
    assert [c.label for c in choice.candidates if c.prediction] == ["ring"]
    gathered = found(choice, "all_gather")
    assert gathered.refused and re.search(
        r"needs .*B .* of inputs, a rank has", str(gathered.reason)
    )
    assert choice.reason == "ring: every other is refused"
    with pytest.raises(ValueError, match="no strategy can run .* needs"):
        plan(**args, memory_bytes=1.0)
    alone = plan(world_size=1, layout="contiguous")
    assert alone.reason == "ring: the only one"
    assert alone.best.prediction is not None and alone.best.prediction.total.bytes_sent == 0


def test_of_those_as_fast_as_the_fastest_the_first_is_taken() -> None:
    choice = plan(layout="zigzag", effort="all")
    seconds = [c.seconds for c in choice.candidates if c.prediction]
    tied = [c for c in choice.candidates if c.seconds <= (1.0 + planner.TIE) * min(seconds)]
    order = [label(strategy, 8) for strategy in strategies_for(choice.problem.spec, 8, 64)]
    assert len(tied) > 1 and choice.best is tied[0]
    assert [c.label for c in tied] == sorted((c.label for c in tied), key=order.index)
    assert seconds[len(tied) :] == sorted(seconds[len(tied) :])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "on",
    [cluster(), cpu_cluster(4), builtin_cluster("H100", node_size=4)],
    ids=["made", "cpu", "h100"],
)
@pytest.mark.sweep(2)
def test_a_bound_is_one_and_misses_nothing(causal: bool, on: Cluster) -> None:
    args: dict[str, Any] = {"cluster": on, "causal": causal, "nheads_kv": 4, "seqlen": 1 << 13}
    args["world_size"] = 4
    every = plan(**args, effort="all")
    quick = plan(**args)
    assert quick.best.seconds == pytest.approx(every.best.seconds, rel=0.01)
    assert (quick.strategy, quick.layouts) == (every.strategy, every.layouts)
    for uneven in (
        {"cu_seqlens": [0, 2872, 2915, 3077, 3799, 4096], "causal": False, "seqlen": 4096},
        {"window_size": (0, 0), "seqlen": 257},
        {"seqlen": 256, "seqlen_k": 4096, "world_size": 3},
    ):
        every = plan(**{**args, "layout": "contiguous", **uneven}, effort="all")
        for candidate in every.candidates:
            assert candidate.at_least <= candidate.seconds * (1 + 1e-9)


def test_every_name_is_simulated_where_it_is_asked_for() -> None:
    args: dict[str, Any] = {"layout": "contiguous", "effort": "names"}
    choice = plan(**args, cluster=builtin_cluster("A100"))
    assert choice.to_dict() == plan(**args, cluster=builtin_cluster("A100")).to_dict()
    told = {c.family for c in choice.candidates if c.prediction is not None}
    assert told == {*NAMES}
    left = [c for c in choice.candidates if c.prediction is None]
    assert "left out: contiguous: " in str(choice)
    assert left and all(c.ruled_out and "computes for at least" in str(c.reason) for c in left)


def test_every_refusal_has_its_reason() -> None:
    choice = plan(effort="all", strategies=["q_exchange", "ring"], layout="auto")
    for candidate in choice.candidates:
        assert (candidate.prediction is None) == candidate.refused == bool(candidate.reason)
    assert "\nrefused: " in str(choice)
    assert "contiguous layout" in str(found(choice, "q_exchange + ring", "zigzag").reason)
    assert not found(choice, "q_exchange + ring", "contiguous").refused

    named = plan(strategies=[Strategy(ulysses_degree=3), Strategy(inner_degree=5), "ring"])
    reasons = {c.label: str(c.reason) for c in named.candidates if c.refused}
    assert "must divide the world size, got 3 and 8" in reasons["hybrid 3 x ring"]
    assert "must divide the world size, got 5 and 8" in reasons["double_ring 5"]

    pair = SequenceLayout.striped(64, 8), SequenceLayout.contiguous(64, 8)
    with pytest.raises(ValueError, match="both be striped or neither"):
        plan(seqlen=64, layout=pair)


def test_same_bits_leaves_what_has_them() -> None:
    choice = plan(layout="contiguous", same_bits=True, effort="all", nheads_kv=2)
    assert {c.family for c in choice.candidates if not c.refused} >= {"ring", "all_gather"}
    for candidate in choice.candidates:
        assert candidate.same_bits != candidate.refused
        if candidate.refused:
            assert "same_bits=True cannot be had here" in str(candidate.reason)
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
        if candidate.travels is not None:
            core = planner.core_of(call)
            assert (candidate.travels, candidate.in_order) == ring.choose_gradients(core)


def test_auto_layout_has_four() -> None:
    """A balanced layout is aligned, and leaves padding without work."""
    choice = plan(effort="all", strategies=["ring"])
    assert {c.layout_name for c in choice.candidates} == {
        "contiguous", "zigzag", "striped", "balanced",
    }  # fmt: skip
    balanced = found(choice, "ring", "balanced").layouts[0]
    assert all(cut % 128 == 0 for cut in balanced.cuts or ())
    documents = plan(cu_seqlens=[0, 4096, 12000], layout="balanced", strategies=["ring"])
    assert "2 documents, 4384 rows of padding" in str(documents)
    for layout, mask in (
        (balanced, choice.problem.mask),
        (documents.layout, documents.problem.mask),
    ):
        areas = layout.mask_area(mask)
        assert max(areas) <= 1.1 * sum(areas) / len(areas) and sum(areas) == mask.area
    longer = plan(seqlen=1000, seqlen_k=3000, layout="balanced", strategies=["ring"])
    assert [layout.seqlen for layout in longer.layouts] == [1000, 3000]


@pytest.mark.parametrize(
    ("fault", "on", "names"),
    [
        ("for bytes (slow between nodes", cluster(node_size=4, between=1e9), ["ring", "hybrid"]),
        ("whose busiest rank computes", cluster(), ["ring", "q_exchange"]),
    ],
)
def test_the_reason_names_the_fault(fault: str, on: Cluster, names: list[str]) -> None:
    choice = plan(cluster=on, layout="contiguous", strategies=names, effort="all")
    assert choice.best.family == names[1]
    assert "faster than ring" in choice.reason and fault in choice.reason
    text = str(choice).splitlines()
    assert text[2].startswith("*") and choice.best.label in text[2] and text[-1] == choice.reason


def test_a_choice_simulates_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MOST_RANK_STEPS", 16)
    choice = plan(effort="names")
    simulated = [c for c in choice.candidates if c.prediction is not None]
    assert 0 < sum(8 * c.num_steps(choice.problem.spec) for c in simulated) <= 16
    assert any("not simulated" in str(c.reason) for c in choice.candidates)


def test_the_cluster_is_that_of_the_file_or_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, path = cluster(flops=123e9), tmp_path / "machine.json"
    monkeypatch.setenv(devices.CLUSTER_VARIABLE, str(path))
    with pytest.raises(OSError, match=r"machine\.json"):
        find_cluster("cpu", 2)
    path.write_text(json.dumps({"clusters": {"4": to_json(mine)}}))
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


# Wrong types are tested in tests/unit/test_wrong_values.py.
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seqlen": 0}, "seqlen must be at least 1, got 0"),
        ({"nheads": 6, "nheads_kv": 4}, "multiple of nheads_kv, got 6 and 4"),
        ({"layout": "spiral"}, "layout must be 'auto', one of .* got 'spiral'"),
        ({"layout": SequenceLayout.zigzag(8, 2)}, "layout of q must be over 16384"),
        ({"strategies": ["spiral"]}, "strategies must be one of .* got 'spiral'"),
        ({"strategies": []}, "none was asked for"),
        ({"strategies": ["hybrid"], "world_size": 7}, "no degree for 7 ranks"),
        ({"effort": "some"}, "effort must be one of"),
        ({"backend": "spiral"}, "backend must be 'auto' or one of"),
        ({"cu_seqlens": [0, 16385]}, "must end at most at the global length 16384"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan(**options)


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    layout, spec = SequenceLayout.zigzag(256, 3), AttentionSpec("cpu", torch.float32, 1, 4, 2, 8, 8)

    def fail_to_agree(rank: int, transport: LocalTransport) -> None:
        mine = replace(spec, nheads=8) if rank == 1 else spec
        with pytest.raises(ValueError, match=r"ranks \[1\] have others than rank 0"):
            agreed_strategy(
                mine, (layout, layout), Mask(256, 256, True), transport, backend="aten",
                same_bits=None, backward=True,
            )  # fmt: skip

    run_local(3, fail_to_agree)
