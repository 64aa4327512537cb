"""Parts of the slow tests."""

from __future__ import annotations

import argparse

import pytest

from tests.parts import Part, part_of


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_test_is_in_one_part(count: int) -> None:
    parts = [part_of(f"{number}/{count}") for number in range(1, count + 1)]
    for index in range(7):
        assert sum(part.has(index) for part in parts) == 1


def test_parts_have_about_as_many_tests() -> None:
    sizes = [sum(Part(number, 3).has(index) for index in range(8)) for number in (1, 2, 3)]
    assert sizes == [3, 3, 2]


@pytest.mark.parametrize("text", ["", "0/2", "3/2", "1", "1/0", "-1/2", "1/2/3"])
def test_a_text_that_is_no_part(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no part: pass K/N"):
        part_of(text)
