"""Cells of a GPU that no CPU can run, on an H100 that does not exist.

Nothing is compiled, launched or computed: what is checked are the calls of torch, whose arguments
must fit the signatures of the installed torch (`fake_torch`), and the code around them. It runs in
a process without TRITON_INTERPRET, of test_gpu_plans.py: `python -m tests.kernels.pretended_cells`.
"""

from __future__ import annotations

import os
from importlib import import_module
from unittest import mock

import torch

from dev.gpu import device, graphs

CELLS = (
    ("dev.gpu.environment:versions",),
    ("dev.gpu.environment:ceilings",),
    ("dev.gpu.graphs:capture", "ring"),
    ("dev.gpu.graphs:capture", "all_gather"),
    ("dev.gpu.graphs:messages_to_itself",),
    ("dev.gpu.costs:host",),
    ("dev.gpu.costs:decode", 65536),
    ("dev.gpu.rank_program:first_contact",),
    ("dev.gpu.rank_program:connection_memory",),
    ("dev.gpu.rank_program:graph", 2),
    ("dev.gpu.rank_program:late_ranks", 2),
)


def run(target: str, *arguments: object) -> None:
    """Run a cell; one of ranks runs on a single rank, whose messages go to itself."""
    from dev.gpu.launching import on_h100

    module_name, _, function = target.partition(":")
    module = import_module(module_name)
    with on_h100(module):
        graphs.alone()
        getattr(module, function)(*arguments)


def check_wrong_calls_are_found() -> None:
    """A method that no CUDA graph has, and an argument that no event takes."""
    wrong_calls = {
        "replays": lambda: torch.cuda.CUDAGraph().replays(),  # type: ignore[attr-defined]
        "timing": lambda: torch.cuda.Event(timing=True),  # type: ignore[call-arg]
    }
    for word, wrong in wrong_calls.items():
        with mock.patch.object(graphs, "alone", wrong):
            try:
                run("dev.gpu.graphs:capture", "ring")
            except (AttributeError, TypeError) as error:
                assert word in str(error), error
            else:
                raise AssertionError(f"not found: {word}")


def main() -> None:
    os.environ |= device.environment(device.STUB)
    for cell in CELLS:
        run(*cell)
        print(*cell)
    check_wrong_calls_are_found()


if __name__ == "__main__":
    main()
