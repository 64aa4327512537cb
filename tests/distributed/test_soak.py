"""A short soak; and that its judge finds what grows."""

from __future__ import annotations

import pytest

from dev.soak import Sample, judged, soak

FLAT = [Sample(1000 * n, 1.0, 300.0, 20, 9) for n in range(1, 21)]


def too_much(samples: list[Sample]) -> list[str]:
    return [name for name, (grown, most) in judged(samples).items() if grown > most]


@pytest.mark.parametrize(
    ("field", "step", "word"),
    [
        ("mib", 1.1, "MiB"),
        ("descriptors", 1, "descriptors"),
        ("threads", 1, "threads"),
        ("seconds", 0.2, "time"),
    ],
)
def test_what_grows_is_found(field: str, step: float, word: str) -> None:
    grown = [x._replace(**{field: getattr(x, field) + n * step}) for n, x in enumerate(FLAT)]
    assert too_much(FLAT) == []
    assert word in "".join(too_much(grown))


@pytest.mark.slow
def test_nothing_grows() -> None:
    """Two thousand calls: neither threads nor descriptors.

    Memory grows until caches of 1,024 calls are full, which `python -m dev soak` waits for; time of
    the CPU drifts on a busy machine.
    """
    found = [name for samples in soak(2000) for name in too_much(samples)]
    assert not {"threads", "descriptors"} & {*found}, found
