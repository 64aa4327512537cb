"""Errors that end calls: their texts, and whether a rank has counted the call."""

from __future__ import annotations


def mark_counted(error: BaseException) -> None:
    """Note that the call which this error ends has been counted."""
    error._ring_attn_counted = True  # type: ignore[attr-defined]


def was_counted(error: BaseException) -> bool:
    return getattr(error, "_ring_attn_counted", False)


def describe_error(error: BaseException) -> str:
    """Return type and first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
