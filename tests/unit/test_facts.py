"""The facts on which ranks agree: every field of every argument, by what it means."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch

from ring_attn import Mask, SequenceLayout, Strategy, TransportOptions, masks
from ring_attn.attention.decode import planned_call
from ring_attn.attention.operators import requested_call
from ring_attn.call import checked_options
from ring_attn.core.facts import details, digest, facts, places_of_difference, shown
from ring_attn.core.mask import Slice
from ring_attn.core.segments import Segment
from ring_attn.core.spec import AttentionSpec
from ring_attn.transport.ranks.errors import Disagreement
from ring_attn.transport.ranks.identity import Identity, checksum, set_step
from tests.drawn import scattered
from tests.refusals import refused

SPEC = AttentionSpec("cpu", torch.float32, 1, 4, 2, 16, 16)
OPTIONS = TransportOptions()
# Arguments of `checked_options`.
REQUEST: dict[str, Any] = {
    "causal": False,
    "left": -1,
    "right": -1,
    "softmax_scale": None,
    "softcap": 0.0,
    "group": "",
    "backend": "reference",
    "transport": OPTIONS,
    "mesh_shape": (),
    "layout": "contiguous",
    "strategy": "ring",
    "same_bits": None,
    "differentiated": False,
    "max_logits": False,
}

# A value, and for each of its fields another value.
OTHERS: list[tuple[Any, Mapping[str, Any]]] = [
    (
        SPEC,
        {
            "device_type": "cuda",
            "dtype": torch.float64,
            "batch": 2,
            "nheads": 8,
            "nheads_kv": 4,
            "headdim": 32,
            "headdim_v": 32,
            "softcap": 2.0,
            "sinks": True,
            "max_logits": True,
        },
    ),
    (
        Strategy("all_gather"),
        {
            "core": "exchange",
            "ulysses_degree": 2,
            "inner_degree": 1,
            "exchange_q": True,
            "heads_per_chunk": 2,
        },
    ),
    (
        OPTIONS,
        {"timeout": 2.0, "nccl_max_ctas": 4, "spare_sms": 1, "one_communicator": True},
    ),
    (Segment(0, 2), {"start": 1, "length": 3, "stride": 2}),
    (Slice(0, 2, 0, 2), {"q_start": 1, "q_end": 3, "k_start": 1, "k_end": 3, "lo": 0, "hi": 0}),
]
# Another value of each field, or why ranks need not agree on it.
REQUESTS: dict[str, Any] = {
    "causal": True,
    "left": 2,
    "right": 1,
    "softmax_scale": 0.5,
    "softcap": "it is a field of the spec, too",
    "group": "a call is on one group",
    "backend": "aten",
    "transport": TransportOptions(timeout=3.0),
    "mesh_shape": "it shapes the strategy, on which ranks agree",
    "layout": "zigzag",
    "strategy": "all_gather",
    "same_bits": "it chooses backend and strategy, on which ranks agree",
    "differentiated": True,
    "max_logits": "it is a field of the spec, too",
}


def agreed(request: dict[str, Any] = REQUEST, spec: AttentionSpec = SPEC, **others: Any) -> bytes:
    given = {"documents": (None, None), "given_mask": None, "numbers": ((), ())} | others
    q, kv = (spec.batch, 4, spec.nheads), (spec.batch, 4, spec.nheads_kv)
    shapes = (*q, spec.headdim), (*kv, spec.headdim), (*kv, spec.headdim_v)
    tensors = torch.device(spec.device_type), spec.dtype, *shapes, spec.sinks
    options = checked_options(**request | {"softcap": spec.softcap, "max_logits": spec.max_logits})
    return requested_call(options.text, 0, 2, tensors, *given.values())[1].digest


def with_field(value: Any, name: str, other: Any) -> Any:
    names = [f.name for f in fields(value)] if is_dataclass(value) else value._fields
    return type(value)(**{n: other if n == name else getattr(value, n) for n in names})


@pytest.mark.parametrize(("value", "others"), OTHERS, ids=lambda x: type(x).__name__)
def test_every_field_is_a_fact(value: Any, others: Mapping[str, Any]) -> None:
    names = [f.name for f in fields(value)] if is_dataclass(value) else value._fields
    assert [*others] == [*names]
    for name, other in others.items():
        if other != getattr(value, name):
            assert digest(with_field(value, name, other)) != digest(value), name


def test_every_field_of_a_request_is_agreed_on_or_excused() -> None:
    assert {*REQUESTS} == {*REQUEST} == {*signature(checked_options).parameters}
    excused = [
        name for name, other in REQUESTS.items() if " " in str(other) and name != "transport"
    ]
    for name, other in REQUESTS.items():
        if name not in excused:
            assert agreed(REQUEST | {name: other}) != agreed(), name
    for name, other in OTHERS[0][1].items():
        if name not in ("device_type", "max_logits"):  # no backend here runs such calls
            assert agreed(spec=with_field(SPEC, name, other)) != agreed(), name


def test_every_field_of_a_request_to_decode_is_agreed_on_or_excused() -> None:
    def decoded(
        request: dict[str, Any] = REQUEST,
        spec: AttentionSpec = SPEC,
        rows: tuple[int, int] = (1, 4),
    ) -> bytes:
        layout = SequenceLayout.contiguous(8, 2)
        values = {"seqlen_q": rows[0], "mask": None, "layout": layout}
        return planned_call(spec, checked_options(**request), several=False, **values)[1].digest

    excused = {
        "softcap": "it is a field of the spec, too",
        "group": "a call is on one group",
        "mesh_shape": "decoding has no strategy",
        "layout": "it is an argument of its own",
        "strategy": "decoding has no strategy",
        "same_bits": "decoding has no choice of it",
        "differentiated": "decoding has no gradients",
        "max_logits": "decoding returns none",
    }
    others = {name: other for name, other in REQUESTS.items() if name not in excused}
    for name, other in others.items():
        assert decoded(REQUEST | {name: other}) != decoded(), name
    for name, other in OTHERS[0][1].items():
        if name not in ("device_type", "max_logits"):  # no backend here runs such calls
            assert decoded(spec=with_field(SPEC, name, other)) != decoded(), name
    assert decoded(rows=(2, 4)) != decoded()


def test_arguments_by_value_are_facts() -> None:
    usual = agreed()
    whole = Mask(8, 8)
    for others in (
        {"documents": ((0, 3, 8), (0, 3, 8))},
        {"given_mask": masks.from_slices(8, 8, [(0, 8, 0, 7)])},
        {"given_mask": masks.causal(8) & whole},
    ):
        assert agreed(**others) != usual
    long = [masks.from_slices(8, 8, [(0, 8, 0, 3), (0, 8, 4, end)]) for end in (6, 7)]
    assert len({agreed(given_mask=mask) for mask in long}) == 2


def test_layouts_are_compared_by_the_positions_of_each_rank() -> None:
    """Not by their text, which shortens layouts of many segments."""
    one, other = (scattered(*last) for last in ((0, 1, 2, 3), (1, 0, 2, 3)))
    assert digest(one) != digest(other)
    made = SequenceLayout.boundaries([0, 4, 8])
    assert digest(made) == digest(SequenceLayout.contiguous(8, 2))
    assert digest(SequenceLayout.zigzag(8, 2)) == digest(
        SequenceLayout.from_segments([[Segment(0, 2), Segment(6, 2)], [Segment(2, 4)]])
    )
    # A single position has no stride.
    assert digest(SequenceLayout.striped(2, 2)) == digest(SequenceLayout.contiguous(2, 2))
    # Positions 3 and 4 are segments of their own there.
    assert facts(SequenceLayout.striped(2, 2).appended(0, 3))[0] == [[0, 2, 2], [3, 2, 1]]
    # Runs with gaps are not joined, though the second one starts at 0 + 3.
    apart = [Segment(0, 3, 2), Segment(3, 2, 2)], [Segment(n, 1, 2) for n in (1, 6, 7)]
    assert facts(SequenceLayout.from_segments(apart))[0] == [[0, 3, 2], [3, 2, 2]]
    swapped = [[Segment(6, 2), Segment(0, 2)], [Segment(2, 4)]]
    turned = SequenceLayout.from_segments(swapped)
    assert digest(turned) != digest(SequenceLayout.zigzag(8, 2))


def test_every_slice_of_a_mask_is_a_fact() -> None:
    rows = [[(2 * i, 2 * i + 1, 0, 1 + (i == 70)) for i in range(last)] for last in (80, 81)]
    made = [masks.from_slices(200, 200, slices) for slices in rows]
    moved = masks.from_slices(200, 200, [(a, b, 0, 1) for a, b, *_ in rows[0]])
    assert len({digest(mask) for mask in (*made, moved)}) == 3


def test_equal_numbers_are_equal_facts() -> None:
    assert digest((1, 0.5, None, True)) == digest((np.int64(1), np.float64(0.5), None, True))
    assert digest((0.0,)) == digest((-0.0,)) and digest((0.0,)) != digest((5e-324,))
    assert digest((0.1,)) != digest((np.nextafter(0.1, 1),)) and digest((1,)) != digest((1.0,))
    with refused(TypeError, "set"):
        digest({1})
    assert len(shown(tuple(range(10_000)))) < 400


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_checksum_is_of_bits_in_their_places(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=dtype)
    others = (
        -values,
        values.flip(0).neg(),
        values.roll(1),
        values[:3],
        values.index_fill(0, torch.tensor([2]), 0.0),
    )
    sums = {int(checksum(x)) for x in (values, *others)}
    assert len(sums) == len({tuple(x.tolist()) for x in (values, *others)})
    for seed in range(200):  # no two of many draws, and none of their sign changes
        torch.manual_seed(seed)
        drawn = torch.randint(0, 2, (6,)).to(dtype) * 2 - 1
        signs = torch.randint(0, 2, (6,)).to(dtype) * 2 - 1
        assert (int(checksum(drawn)) == int(checksum(drawn * signs))) == bool((signs == 1).all())


def test_a_step_is_part_of_an_identity() -> None:
    from ring_attn.transport.ranks.calls import NOTHING

    seeds, words = set(), set()
    try:
        for step in (None, 0, 1, 2**40):
            set_step(step)
            call = Identity(3, 2, "forward", NOTHING)
            seeds.add(call.seed)
            words.add(call.words())
            assert call.report().get("step", ("None",))[0] == str(step)
    finally:
        set_step(None)
    assert len(seeds) == len(words) == 4
    for wrong, error in ((-1, ValueError), (1.5, TypeError), ("1", TypeError), (True, TypeError)):
        with refused(error, "step must"):
            set_step(wrong)  # type: ignore[arg-type]


def test_the_first_position_or_slice_that_differs() -> None:
    one, other = SequenceLayout.zigzag(16, 2), SequenceLayout.contiguous(16, 2)
    shorter = SequenceLayout.contiguous(15, 2)
    spans = [masks.spans(16, [(3, end)]) for end in (9, 10)]

    def places(a: dict[str, object], b: dict[str, object]) -> dict[str, str]:
        return places_of_difference({"rank 0": details(a), "rank 1": details(b)})

    assert places({"layout": (one, one)}, {"layout": (one, other)}) == {
        "layout": "position 4 is row 0 of the group's rank 1 on rank 0, "
        "row 4 of the group's rank 0 on rank 1"
    }
    assert "position 15 is row 7 of the group's rank 1 on rank 0, on no rank on rank 1" in str(
        places({"layout": other}, {"layout": shorter})
    )
    assert places({"mask": spans[0]}, {"mask": spans[1]}) == {
        "mask": "slice 1 is (q 3:9, k 0:9) on rank 0, (q 3:10, k 0:10) on rank 1"
    }
    assert places({"layout": one, "mask": spans[0]}, {"layout": one, "mask": spans[0]}) == {}


@pytest.mark.parametrize(
    ("calls", "head", "remedy"),
    [
        (("forward 4", "backward 3"), "global rank 0 skipped a backward", "0 \\* out.sum"),
        (("backward 2", "backward 3"), "ranks run their backwards in different", "same order"),
        (("prepare 1", "forward 1"), "ranks are in different calls", "same calls in the same"),
    ],
)
def test_ranks_in_different_calls(calls: tuple[str, str], head: str, remedy: str) -> None:
    reports = {rank: {"call": (call, call)} for rank, call in enumerate(calls)}
    found = Disagreement.of(reports)
    assert found is not None and re.match(f"{head}.*; call: .*{remedy}", found.text()), found


def test_the_error_of_a_rank_that_refused_the_call_comes_first() -> None:
    calls = ["forward 3", "refused it: ValueError: x", "forward 3", "backward 2"]
    found = Disagreement.of({rank: {"call": (call, call)} for rank, call in enumerate(calls)})
    assert found is not None
    assert found.text() == (
        "global rank 1 refused the call: ValueError: x; global ranks [0, 2] are in forward 3, "
        "global rank 3 is in backward 2. Correct these arguments; if a rank skips a call, all "
        "ranks must skip it"
    )


def test_remedies_follow_from_what_differs() -> None:
    def text(*names: str) -> str:
        values = {rank: {name: (str(rank), str(rank)) for name in names} for rank in range(3)}
        found = Disagreement.of(values)
        assert found is not None
        return found.text()

    assert text("layout").endswith("Pass the same layout on every rank")
    assert text("causal", "nheads").endswith("Pass the same causal on every rank")
    assert "torch.no_grad" in text("requires_grad") and "SequenceLayout" in text("seqlen_q")
    assert "skipped or repeated a step" in text("step")
    # The default of softmax_scale follows from the head dim.
    assert "the same sizes and dtype" in text("headdim", "headdim_v", "softmax_scale")
