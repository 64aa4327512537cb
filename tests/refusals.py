"""Calls that are refused: an error of the right type, whose message names the facts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def says(text: str, words: str) -> bool:
    """Whether a message has all words, which stand between bars."""
    return all(word in text for word in words.split("|"))


@contextmanager
def refused(error: type[Exception], words: str) -> Iterator[None]:
    """Asserts that the block raises that error, with all words in its message."""
    with pytest.raises(error) as caught:
        yield
    assert caught.type is error and says(str(caught.value), words), (words, caught.value)
