"""The `ring-attn` command: a table of subcommands, each with its options and the module that runs.

Help and errors about options need only the options, which do not import torch. An error of the user
prints one line to stderr and exits with status 2; RING_ATTN_DEBUG=1 shows the traceback. ^C also
prints one line, and exits with status 130.
"""

from __future__ import annotations

import argparse
import inspect
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from importlib import import_module
from typing import NamedTuple, NoReturn

from ring_attn.cli.arguments import is_first_rank, narrow, signs_of_life
from ring_attn.version import __version__

PROG = "ring-attn"

EXIT_USAGE = 2


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line that mentions --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


class Command(NamedTuple):
    """A subcommand.

    Attributes:
        name: the words of the command, such as "bench ring".
        options: "module:function", or a module with `add_arguments`. The function adds the options;
            its docstring is the text of the help.
        module: the module whose function `run` runs the command.
        help: one line for the list of commands.
        loads: whether `run` needs the package's `__init__`.
    """

    name: str
    options: str
    module: str
    help: str
    loads: bool = True

    @property
    def words(self) -> list[str]:
        return self.name.split()

    def parser(self, prog: str) -> Parser:
        """Return the parser of the command's options."""
        name, _, function = self.options.partition(":")
        if self.loads and name == self.module:
            # It has options and what the command does in one module, which imports the package.
            load()
        module = import_module(name)
        add_arguments = getattr(module, function or "add_arguments")
        text = inspect.getdoc(add_arguments) or module.__doc__ or ""
        parser = Parser(
            prog=f"{prog} {self.name}",
            description="\n\n".join(narrow(paragraph) for paragraph in text.split("\n\n")),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_arguments(parser)
        return parser


def _ours(name: str, module: str, help: str, options: str = "options") -> Command:
    """Return a command whose options are in a module of `cli`."""
    function = f"ring_attn.cli.{options}:{name.replace(' ', '_')}"
    return Command(name, function, f"ring_attn.{module}", help)


def _bench(name: str, module: str, help: str) -> Command:
    return _ours(name, module, help, "bench_options")


COMMANDS = (
    _ours("doctor", "cli.doctor", "check that this machine is ready"),
    _ours("env", "cli.env", "show what is installed and which backends can run"),
    _ours("verify", "cli.verify", "check every result against dense attention in float64"),
    _ours("audit", "cli.audit", "find mistakes of a training step on several ranks"),
    _ours("plan", "cli.plan", "predict the best strategy and the costs of each step"),
    _bench("bench ring", "bench.ring", "measure strategies and other packages on several ranks"),
    _bench("bench kernel", "bench.kernel", "measure attention on one device, in TFLOP/s and GB/s"),
    _bench("bench decode", "bench.decode", "measure decoding from a KV cache, in GB/s"),
    _bench("bench comm", "bench.comm", "measure messages between ranks, in GB/s"),
    _bench("bench", "bench.overview", "measure this machine, in a minute and on one screen"),
    _ours("calibrate", "cli.calibrate", "measure this machine for the simulator"),
    _ours("tune", "cli.tune", "find the fastest configs of the kernels on a GPU"),
)

# Errors that the package raises for wrong arguments; all others keep their traceback.
USER_ERRORS = (ValueError, TypeError, NotImplementedError, ImportError, OSError)


def main(
    argv: Sequence[str] | None = None, prog: str = PROG, commands: Sequence[Command] = COMMANDS
) -> int:
    """Run one subcommand; return 0, 1 if a check failed, or 2 if it cannot run with its options."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((each for each in commands if each.words == words[: len(each.words)]), None)
    if command is None or _is_unknown(words, command, commands):
        _without_command(words, prog, commands)
    try:
        return _run(prog, command, words[len(command.words) :])
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second ^C
        if is_first_rank():
            print(f"{prog} {command.name}: interrupted", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(128 + signal.SIGINT)  # does not wait for threads and libraries


def _run(prog: str, command: Command, options: list[str]) -> int:
    """Run a subcommand with its options; print an error of the user in one line."""
    parser = command.parser(prog)
    try:
        for word in options:
            if word.endswith("=--"):
                # argparse would ignore the value.
                parser.error(f"argument {word.removesuffix('=--')}: '--' is not a value")
        args = parser.parse_args(options)
        check_files_differ(args)
        if command.loads:
            load()
        module = import_module(command.module)
        with ExitStack() as stack:
            if not is_first_rank():
                # Under torchrun every rank runs the command; only rank 0 prints.
                nothing = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(redirect_stdout(nothing))
            if not getattr(args, "quiet", False):
                stack.enter_context(signs_of_life(parser.prog))
            status: int = module.run(args)
    except USER_ERRORS as error:
        if os.environ.get("RING_ATTN_DEBUG", "") not in ("", "0"):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"{parser.prog}: {text}", file=sys.stderr)
        return EXIT_USAGE
    return status


def check_files_differ(args: argparse.Namespace) -> None:
    """Refuse one file for two outputs, of which the second would replace the first."""
    written: dict[str, str] = {}
    for option in ("json", "csv", "plot"):
        path = getattr(args, option, None)
        if path is None or (path.exists() and not path.is_file()):  # such as /dev/stdout
            continue
        other = written.setdefault(os.path.realpath(path), option)
        if other != option:
            raise ValueError(
                f"--{other} and --{option} must be different files, got {str(path)!r} for both"
            )


def load() -> None:
    """Run the `__init__` of the package, if `ring_attn_cli` has left it out."""
    package = sys.modules["ring_attn"]
    if not hasattr(package, "__all__"):
        assert package.__spec__ is not None and package.__spec__.loader is not None
        package.__spec__.loader.exec_module(package)


def _is_unknown(words: list[str], command: Command, commands: Sequence[Command]) -> bool:
    """Return whether a command that begins others, such as "bench", has an unknown second word."""
    num = len(command.words)
    begins_others = any(each.words[:num] == command.words != each.words for each in commands)
    return begins_others and any(not word.startswith("-") for word in words[num : num + 1])


def _without_command(words: list[str], prog: str, commands: Sequence[Command]) -> NoReturn:
    """Print help or the version, otherwise an error that lists the commands.

    The first word of commands with two words has its own help: "bench --help".
    """
    of_word = [command for command in commands if command.words[:-1] == words[:1]]
    if words and of_word:
        prog, words = f"{prog} {words[0]}", words[1:]
        commands = [command._replace(name=command.words[-1]) for command in of_word]
    parser = Parser(
        prog=prog,
        description="Exact attention for sequences sharded across ranks.",
        usage=f"{prog} COMMAND [options]",
        epilog=f"{prog} COMMAND --help shows a command's options.",
    )
    parser.add_argument("--version", action="version", version=f"{prog} {__version__}")
    named = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in commands:
        named.add_parser(command.name, help=command.help)
    parser.parse_args(words)
    parser.error(f"needs a command: one of {', '.join(command.name for command in commands)}")
