"""Tiny transformers of diffusers, and what becomes of them on a split sequence.

    torchrun --nproc-per-node 2 -m tests.diffusers_models docs/diffusers_models.md

writes the table of the documentation.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from diffusers.models import transformers
from torch import Tensor, nn

from ring_attn.integrations.diffusers import parallelize
from ring_attn.testing import check_rounded, noisy_runs
from tests.diffusers_tiny import TINY
from tests.hf_models import all_in_float64


def classes() -> list[str]:
    """Return the names of the transformers that diffusers exports."""
    return sorted(
        name
        for name, value in vars(transformers).items()
        if isinstance(value, type) and issubclass(value, nn.Module)
    )


def make(name: str, **config: Any) -> nn.Module:
    """Return a tiny model with the same random weights each time, none of which is zero."""
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, name)(**TINY[name].config | config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.eval()


def inputs_of(
    name: str, dtype: torch.dtype = torch.float32, replaced: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the same random inputs each time; `replaced` are other values of some of them."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).float()

    def as_dtype(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point():
            return x.to(dtype)
        return type(x)(map(as_dtype, x)) if isinstance(x, (tuple, list)) else x

    inputs = TINY[name].inputs(randn) | dict(replaced or {})
    return {key: as_dtype(x) for key, x in inputs.items()}


def run(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the sample, and the gradients of all parameters of a weighted sum of it."""
    model.zero_grad()
    # Some classes return a sample for each batch entry, or of each medium.
    samples = list(_tensors(model(**inputs, return_dict=False)))
    sample = torch.cat([x.flatten() for x in samples])
    weights = torch.randn(sample.shape, generator=torch.Generator().manual_seed(2))
    (sample * weights.to(sample.dtype)).sum().backward()
    gradients = {
        f"gradient of {name}": p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return {"sample": sample.detach(), **gradients}


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in the result of a model."""
    if isinstance(value, Tensor):
        yield value
    else:
        for x in value:
            yield from _tensors(x)


def compared(
    name: str,
    group: dist.ProcessGroup,
    replaced: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[str]:
    """Return what differs on this rank from one process by more than rounding.

    `replaced` are other values of some inputs, and `options` are those of `parallelize`.
    """
    model, inputs = make(name), inputs_of(name, replaced=replaced)
    with all_in_float64():
        oracle = run(copy.deepcopy(model).double(), inputs_of(name, torch.float64, replaced))
    noisy = noisy_runs(lambda: run(model, inputs))
    handle = parallelize(model, group, **options)
    got = run(model, inputs)
    handle.remove()
    wrong = [] if got.keys() == oracle.keys() else ["parameters without gradients"]
    for key in sorted(got.keys() & oracle.keys()):
        if key != "sample":
            dist.all_reduce(got[key], group=group)
        if not check_rounded(key, got[key], oracle[key], [x[key] for x in noisy]).ok:
            wrong.append(key)
    return sorted(wrong)


def outcome(name: str) -> str:
    """Return what becomes of a class on all ranks: "right", "refused", "WRONG", ..."""
    if name not in TINY:
        try:
            parallelize(type(name, (nn.Module,), {})())
        except NotImplementedError as error:
            return "refused: " + str(error).partition(":")[0].replace(name, "it")
    group = dist.new_group()
    try:
        wrong = compared(name, group)
    except (NotImplementedError, ValueError) as error:
        return "refused: " + str(error).partition(": ")[0].replace(name, "it")
    finally:
        dist.destroy_process_group(group)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, wrong)
    return "right" if not any(of_ranks) else f"WRONG: {of_ranks}"


def table(outcomes: dict[str, str]) -> Iterator[str]:
    """Yield the lines of docs/diffusers_models.md."""
    yield f"""# Transformers of diffusers on split sequences

Made by `tests/diffusers_models.py` with diffusers {diffusers.__version__}: a tiny random model of
each class on 2 ranks, forward and backward.

- right: the sample, and the gradients of all parameters summed over the ranks, are those of one
  process, within the bound of the tests
- refused: an error names the class and the reason

| model | on a split sequence |
|---|---|"""
    for name, word in outcomes.items():
        yield f"| {name} | {word} |"
    yield ""


def outcomes_of(page: str) -> dict[str, str]:
    """Return the outcome of each class on a page that `table` has made."""
    words: dict[str, str] = {}
    for line in page.splitlines():
        if line.startswith("| "):
            name, word = line.strip("| ").split(" | ", maxsplit=1)
            words[name] = word
    return {name: words.get(name, "no row") for name in classes()}


def main(path: str) -> None:
    diffusers.utils.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    outcomes = {name: outcome(name) for name in classes()}
    if dist.get_rank() == 0:
        Path(path).write_text("\n".join(table(outcomes)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
