"""Parses the options of a subcommand without running it; calls a function as torchrun does."""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from unittest import mock

import torch.distributed as dist

from ring_attn.cli import main as cli


def parser_of(name: str) -> cli.Parser:
    (command,) = (one for one in cli.COMMANDS if one.name == name)
    return command.parser(cli.PROG)


def options_of(name: str, words: str) -> argparse.Namespace:
    """Parses words by the options of a subcommand."""
    return parser_of(name).parse_args(words.split())


@contextmanager
def as_torchrun(port: int = 1) -> Iterator[None]:
    """Sets the variables by which torchrun tells a process its rank, and where the store is."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    names |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with mock.patch.dict(os.environ, names | {"TORCHELASTIC_USE_AGENT_STORE": "True"}):
        yield


def printed_by(port: int, fn: Callable[..., object], args: tuple[object, ...]) -> str:
    """The text that a call prints, in a rank without a group whose store is at `port`."""
    with as_torchrun(port), redirect_stdout(io.StringIO()) as out:
        dist.destroy_process_group()
        fn(*args)
    return out.getvalue()
