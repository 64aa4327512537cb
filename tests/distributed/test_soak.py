"""A short soak; and that its judge finds what grows."""

from __future__ import annotations

import pytest

from dev.soak import Sample, judged, soak

FLAT = [Sample(1000 * n, 1.0, 300.0, 20, 9) for n in range(1, 21)]


@pytest.mark.parametrize(
    ("field", "step", "word"),
    [
        ("mib", 1.1, "memory"),
        ("descriptors", 1, "descriptors"),
        ("threads", 1, "threads"),
        ("seconds", 0.2, "time"),
    ],
)
def test_what_grows_is_found(field: str, step: float, word: str) -> None:
    grown = [x._replace(**{field: getattr(x, field) + n * step}) for n, x in enumerate(FLAT)]
    assert not any(judged(FLAT).values())
    assert [text for text, bad in judged(grown).items() if bad and word in text], judged(grown)


@pytest.mark.slow
def test_nothing_grows() -> None:
    """Two thousand calls: neither threads nor descriptors.

    Memory grows until caches of 1,024 calls are full, which `python -m dev soak` waits for; time of
    the CPU drifts on a busy machine.
    """
    found = [text for samples in soak(2000) for text, bad in judged(samples).items() if bad]
    assert not [x for x in found if "threads" in x or "descriptors" in x], found
