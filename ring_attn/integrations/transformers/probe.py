"""Find parts of a model, other than attention, that mix rows: they would see one rank's rows only.

Before a model's first forward on several ranks, the probe runs the model on a few random tokens, on
each rank by itself. Attention and known recurrent layers are replaced by functions that mix no rows
(attention returns the values). So a change of one token may change no other row of the outputs. If
it does, some part pools rows, computes statistics of the sequence, or combines neighbouring tokens.

The probe takes `len(CHANGED) + 1` forwards of `ROWS` rows. It sends nothing.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ring_attn.integrations.transformers.untyped import Keywords, Model, Value
from ring_attn.models.recurrent import current
from ring_attn.values.probing import probing

logger = logging.getLogger("ring_attn")

# Number of tokens; a prime number that is not the size of something else in a model.
ROWS = 23

# Rows that are changed, one at a time. One of them becomes a mask token, if the model has any.
CHANGED = (0, 9, 22)
MASKED = 9


class Mixed(NamedTuple):
    """A part of a model that mixes rows.

    Attributes:
        part: its name and class; the model's class if no part is known.
        row: the row that was changed.
        others: the rows that have changed with it; empty if the output has no rows.
    """

    part: str
    row: int
    others: tuple[int, ...]


def find_mixing(model: Model, given: Keywords, first: int, pools: bool) -> Mixed | None:
    """Return a part of the model that mixes rows; None if there is none.

    Args:
        model: a model whose attention is ours.
        given: the keywords of its forward.
        first: the position_id of a sequence's first token.
        pools: whether outputs without rows are pooled over the ranks.

    A model that cannot run on the probe's tokens is not judged, and a warning is logged.
    """
    try:
        with probe_mode(model):
            inputs = _inputs(model, given, first)
            usual = _run(model, inputs)
            for row in CHANGED:
                changed = _run(model, _changed(model, inputs, row))
                found = _compared(usual, changed, row, pools, type(model).__name__)
                if found is not None:
                    return found
    except Exception as error:
        logger.warning(
            "%s could not be probed for parts that mix rows outside of attention: %s: %s",
            type(model).__name__,
            type(error).__name__,
            error,
        )
    return None


@contextmanager
def probe_mode(model: nn.Module) -> Iterator[None]:
    """Run inside without gradients, in evaluation mode, and without mixing in attention."""
    training = [part for part in model.modules() if part.training]
    probing.on = current.by_row = True
    try:
        for part in training:
            part.training = False
        with torch.no_grad():
            yield
    finally:
        probing.on = current.by_row = False
        for part in training:
            part.training = True


def _inputs(model: Model, given: Keywords, first: int) -> dict[str, Value]:
    """Return the inputs of the probe, like those of the forward."""
    embedding = model.get_input_embeddings()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    inputs: dict[str, Value] = {"use_cache": False}
    if given.get("inputs_embeds") is not None:
        embeds = given["inputs_embeds"]
        drawn = torch.randn(1, ROWS, embeds.size(-1), generator=generator)
        inputs["inputs_embeds"] = drawn.to(embeds.device, embeds.dtype)
    else:
        # Small ids are often those of special tokens.
        vocab_size = embedding.weight.size(0)
        ids = torch.randint(min(3, vocab_size - 1), vocab_size, (1, ROWS), generator=generator)
        inputs["input_ids"] = ids.to(device)
    positions = torch.arange(ROWS, device=device)[None] + first
    of_forward = given.get("position_ids")
    if isinstance(of_forward, Tensor):
        several = of_forward.ndim == 3
        inputs["position_ids"] = (
            positions.expand(of_forward.size(0), 1, -1) if several else positions
        )
    if given.get("token_type_ids") is not None:
        inputs["token_type_ids"] = torch.zeros_like(positions)
    accepted = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    return {name: x for name, x in inputs.items() if takes_any or name in accepted}


def _changed(model: Model, inputs: dict[str, Value], row: int) -> dict[str, Value]:
    """Return the inputs with another token in a row."""
    changed = dict(inputs)
    if "inputs_embeds" in inputs:
        changed["inputs_embeds"] = inputs["inputs_embeds"].clone()
        changed["inputs_embeds"][:, row] = -inputs["inputs_embeds"][:, row] - 1
        return changed
    ids = changed["input_ids"] = inputs["input_ids"].clone()
    vocab_size = model.get_input_embeddings().weight.size(0)
    mask_token = getattr(model.config, "mask_token_id", None)
    if row == MASKED and mask_token is not None and mask_token < vocab_size:
        ids[:, row] = mask_token
    else:
        ids[:, row] = vocab_size - 1 - ids[:, row] if vocab_size > 2 * ids[0, row] + 1 else 3
    return changed


class _Outputs(NamedTuple):
    """The outputs of a run by name, and the outputs of all parts in the order in which they end."""

    named: dict[str, Tensor]
    parts: dict[str, Tensor]


def _run(model: Model, inputs: dict[str, Value]) -> _Outputs:
    """Run the model's forward, without the hooks of the model itself."""
    parts: dict[str, Tensor] = {}
    handles = []

    def remember(name: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: object, output: object) -> None:
            x = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(x, Tensor) and x.is_floating_point() and x.shape[:2] == (1, ROWS):
                parts[f"{name} ({type(part).__name__})"] = x

        return hook

    for name, part in model.named_modules():
        if name:
            handles.append(part.register_forward_hook(remember(name)))
    try:
        output = model.forward(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    items = output.items() if hasattr(output, "items") else enumerate(output)
    named = {str(name): x for name, x in items if isinstance(x, Tensor) and x.is_floating_point()}
    return _Outputs(named, parts)


def _compared(usual: _Outputs, changed: _Outputs, row: int, pools: bool, name: str) -> Mixed | None:
    """Return the part that mixes rows, as a change of one row shows it."""
    for key, before in usual.named.items():
        after = changed.named.get(key)
        if after is None or after.shape != before.shape:
            continue
        if before.ndim == 0:  # such as the auxiliary loss of experts
            if bool(after != before):
                return Mixed(f"{name} (its output {key})", row, ())
            continue
        if before.shape[:2] == (1, ROWS):
            others = other_rows(before[0], after[0], row)
        elif before.size(0) == ROWS:  # tokens of all sequences, such as the logits of routers
            others = other_rows(before, after, row)
        else:
            if pools:
                continue
            return Mixed(f"{name} (its output {key} of shape {tuple(before.shape)})", row, ())
        if others:
            return Mixed(_first_part(usual, changed, row) or name, row, others)
    return None


def _first_part(usual: _Outputs, changed: _Outputs, row: int) -> str | None:
    """Return the part that ends first among those whose other rows have changed."""
    for name, before in usual.parts.items():
        after = changed.parts.get(name)
        if after is None or after.shape != before.shape:
            continue
        if other_rows(before[0], after[0], row):
            return name
    return None


def other_rows(before: Tensor, after: Tensor, row: int) -> tuple[int, ...]:
    """Return the rows other than the changed one whose values have changed beyond rounding.

    Equal rows of one matrix product have equal bits. Experts multiply other numbers of rows after a
    change, which rounds differently: by about eps of the dtype, while mixing changes a row by a
    share of the change itself. The limit is between both, the square root of eps.
    """
    difference = after.double() - before.double()
    moved = difference.reshape(len(difference), -1).abs().amax(1)  # (rows,)
    limit = moved[row] * torch.finfo(before.dtype).eps ** 0.5
    moved[row] = 0
    return tuple((moved > limit).nonzero().flatten().tolist())


# -- functions without mixing


def values_of(query: Tensor, value: Tensor) -> Tensor:
    """Return the values of each row, in the shape of attention's output.

    `query` and `value` are (batch, heads, rows, dim); the result is (batch, rows, heads, dim).
    """
    groups = query.size(1) // value.size(1)
    return value.repeat_interleave(groups, 1).transpose(1, 2).contiguous()
