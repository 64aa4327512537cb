"""Every pair of options together, through the backend and a ring in this process; and any shape.

`pairwise` makes few cases in which every two values of two options meet; each is forward and
backward against float64, with all memory that is not an input starting as NaN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.testing import Layouts, layouts_of, random_qkv, random_sinks
from tests.bounds import MASKS, assert_holds, expect
from tests.kernels.calls import DEVICE, DTYPES, attend, blocks, cut_keys, inputs_for, patched_select
from tests.kernels.rings import ring

pytestmark = [
    pytest.mark.filterwarnings("ignore:backend='triton' on CPU:UserWarning"),
    # Of numpy, in the interpreter: branches that are not taken, and pairs that are masked later.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]

DOCUMENTS = (0, 20, 20, 21, 65)
KEYS = (0, 0, 5, 20, 47)

SMALL_BLOCKS = ((32, 32), (16, 64))

OPTIONS: dict[str, Sequence[Any]] = {
    "mask": (
        Mask(65, 65, True),
        Mask(65, 65),
        Mask(65, 65, True, (20, -1)),
        Mask(65, 65, False, (40, 3)),
        Mask(33, 80, True),
        Mask(80, 33, True),
        Mask(65, 65, True, (-1, -1), DOCUMENTS, DOCUMENTS),
        Mask(65, 47, False, (20, -1), DOCUMENTS, KEYS),
    ),
    "headdim": (16, 40, 128, 256),
    "headdim_v": ("same", "half", "other"),
    "heads": ((1, 1), (2, 1), (4, 2)),
    "ring": (
        ("contiguous", 1),
        ("contiguous", 2),
        ("zigzag", 2),
        ("striped", 2),
        ("boundaries", 3),
    ),
    "dtype": DTYPES,
    "blocks": ((64, 64), (128, 32), *SMALL_BLOCKS),
    "scale": (None, 0.3),
    "softcap": (0.0, 2.0),
    "sinks": (False, True),
    "travels": ("kv", "q", None),  # None: as `make_call` has it, gradients continued in place
    "strided": (False, True),
    "batch": (1, 2),
}


def is_possible(case: Mapping[str, Any]) -> bool:
    """Large heads in small blocks alone, which fit into a GPU; not many heads and batches."""
    if case.get("headdim", 0) >= 128 and case.get("blocks", SMALL_BLOCKS[0]) not in SMALL_BLOCKS:
        return False
    return case.get("batch") != 2 or case.get("heads") != (4, 2)


Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(case: Mapping[str, Any]) -> set[Pair]:
    """Every two of the case's values, by option."""
    return set(combinations(sorted(case.items(), key=lambda item: item[0]), 2))


def all_pairs() -> set[Pair]:
    """Every two values of two options that a case may have."""
    found = set()
    for a, b in combinations(sorted(OPTIONS), 2):
        for x, y in product(OPTIONS[a], OPTIONS[b]):
            if is_possible({a: x, b: y}):
                found.add(((a, x), (b, y)))
    return found


def pairwise() -> Iterator[dict[str, Any]]:
    """Cases in which all pairs meet: each begins with one that is missing and is then filled up.

    An option gets the value that adds most pairs; of several the one that was used least.
    """
    missing = sorted(all_pairs(), key=str)
    used: Counter[tuple[str, Any]] = Counter()
    while missing:
        case, wanted = dict(missing[0]), set(missing)

        def worth(option: str, value: Any, case: Any = case, wanted: Any = wanted) -> Any:
            added = pairs_of({**case, option: value}) & wanted
            return len(added), -used[option, value]

        for option, values in OPTIONS.items():
            if option not in case:
                fitting = [v for v in values if is_possible({**case, option: v})]
                case[option] = max(fitting, key=partial(worth, option))
        used.update(case.items())
        yield {option: case[option] for option in OPTIONS}
        missing = [pair for pair in missing if pair not in pairs_of(case)]


ALL_CASES = list(pairwise())
CASES = ALL_CASES if DEVICE == "cpu" else ALL_CASES[::3]  # a GPU's compiler takes its time for each


def name_of(case: Mapping[str, Any]) -> str:
    values = {**case, "mask": OPTIONS["mask"].index(case["mask"])}
    return "-".join(f"{k}={v}" for k, v in values.items()).replace("torch.", "")


def test_every_pair_of_options_is_among_the_cases() -> None:
    assert set().union(*map(pairs_of, ALL_CASES)) == all_pairs()
    assert len(ALL_CASES) < 50


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name_of(case), marks=[pytest.mark.slow] if turn % 4 else [])
        for turn, case in enumerate(CASES)
    ],
)
@pytest.mark.sweep(2)
def test_options(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    patched_select(monkeypatch, blocks(*case["blocks"]))
    mask, headdim, (nheads, nheads_kv) = case["mask"], case["headdim"], case["heads"]
    other = headdim + 24 if headdim < 128 else 40
    headdim_v = {"same": headdim, "half": headdim // 2, "other": other}[case["headdim_v"]]
    inputs = random_qkv(
        batch=case["batch"], seqlen_q=mask.seqlen_q, seqlen_k=mask.seqlen_k, nheads=nheads,
        nheads_kv=nheads_kv, headdim=headdim, headdim_v=headdim_v, dtype=case["dtype"],
        device=DEVICE,
    )  # fmt: skip
    sinks = random_sinks(nheads, device=DEVICE) if case["sinks"] else None
    scores = {"scale": case["scale"], "softcap": case["softcap"], "sinks": sinks}
    got = ring(
        inputs, mask, layouts_of(case["ring"][0], mask, case["ring"][1]), travels=case["travels"],
        strided=case["strided"], **scores,
    )  # fmt: skip
    assert_holds(got, *expect(inputs, mask, **scores))


# -- any shape


SHAPES = ((16, 64), (64, 16), (32, 32), (64, 32), (64, 64))


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes, mask, options, blocks, and where the call is cut into launches."""
    seqlen_q, seqlen_k = draw(st.integers(1, 80)), draw(st.integers(0, 80))
    sides = st.sampled_from((-1, -1, 0, 1, 7, 40))
    window = (draw(sides), draw(sides))
    cu: list[tuple[int, ...] | None] = [None, None]
    if draw(st.booleans()):
        documents = draw(st.integers(1, 4))
        for side, seqlen in enumerate((seqlen_q, seqlen_k)):
            size = documents - 1
            cuts = draw(st.lists(st.integers(0, seqlen), min_size=size, max_size=size))
            cu[side] = (0, *sorted(cuts), seqlen)
    nheads, nheads_kv = draw(st.sampled_from(((1, 1), (2, 1), (2, 2))))
    return {
        "mask": Mask(seqlen_q, seqlen_k, draw(st.booleans()), window, *cu),
        "sizes": {
            "nheads": nheads,
            "nheads_kv": nheads_kv,
            "headdim": draw(st.integers(1, 40)),
            "headdim_v": draw(st.integers(1, 40)),
            "dtype": draw(st.sampled_from(DTYPES)),
            "large_logits": draw(st.booleans()),
        },
        "config": blocks(*draw(st.sampled_from(SHAPES))),
        "cuts": sorted(draw(st.lists(st.integers(0, seqlen_k), max_size=2))),
        "scale": draw(st.sampled_from((None, 0.01, 0.5, 2.0))),
        "softcap": draw(st.sampled_from((0.0, 0.0, 0.5, 30.0))),
    }


def exercise(call: dict[str, Any]) -> None:
    mask, scores = call["mask"], {name: call[name] for name in ("scale", "softcap")}
    inputs = inputs_for(mask, **call["sizes"])
    got = attend(inputs, cut_keys(mask, *call["cuts"]), call["config"], **scores)
    assert_holds(got, *expect(inputs, mask, **scores))


@settings(max_examples=8 if DEVICE == "cpu" else 3, deadline=None, derandomize=True)
@given(calls())
def test_any_shape(call: dict[str, Any]) -> None:
    exercise(call)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(calls())
def test_many_shapes(call: dict[str, Any]) -> None:
    exercise(call)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_in_every_shape_of_blocks(name: str, shape: tuple[int, int]) -> None:
    """The dtypes in turn."""
    mask = MASKS[name]
    dtype = DTYPES[(list(MASKS).index(name) + SHAPES.index(shape)) % len(DTYPES)]
    inputs = inputs_for(mask, nheads=2, nheads_kv=1, headdim=20, dtype=dtype)
    cuts = (mask.seqlen_k // 3, mask.seqlen_k // 2)
    got = attend(inputs, cut_keys(mask, *cuts), blocks(*shape))
    assert_holds(got, *expect(inputs, mask))


@st.composite
def layouts(draw: st.DrawFn, mask: Mask) -> Layouts:
    """Any two of one number of ranks."""
    world_size = draw(st.integers(1, 4))
    if draw(st.booleans()):
        q, k = (SequenceLayout.striped(n, world_size) for n in (mask.seqlen_q, mask.seqlen_k))
        return q, k
    found = []
    for seqlen in (mask.seqlen_q, mask.seqlen_k):
        size = world_size - 1
        cuts = draw(st.lists(st.integers(0, seqlen), min_size=size, max_size=size))
        uneven = SequenceLayout.boundaries([0, *sorted(cuts), seqlen])
        zigzag = SequenceLayout.zigzag(seqlen, world_size)
        found.append(draw(st.sampled_from((uneven, zigzag))))
    return found[0], found[1]


@pytest.mark.slow
@settings(
    max_examples=75, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(data=st.data())
def test_many_rings(data: st.DataObject) -> None:
    call = data.draw(calls())
    mask, scores = call["mask"], {name: call[name] for name in ("scale", "softcap")}
    inputs = inputs_for(mask, **call["sizes"])
    travels = data.draw(st.sampled_from(("kv", "q")))
    with pytest.MonkeyPatch.context() as monkeypatch:
        patched_select(monkeypatch, call["config"])
        got = ring(inputs, mask, data.draw(layouts(mask)), travels=travels, **scores)
    assert_holds(got, *expect(inputs, mask, **scores))
