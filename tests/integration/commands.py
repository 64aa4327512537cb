"""Parses the options of a subcommand without running it."""

from __future__ import annotations

import argparse
from types import ModuleType


def options_of(command: ModuleType, words: str) -> argparse.Namespace:
    """Parses words by the options of a subcommand's module."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words.split())
