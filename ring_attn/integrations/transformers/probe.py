"""Find parts of a model, other than attention, that mix rows.

Before a model's first forward on several ranks, the probe runs the model in evaluation mode and
without gradients. Attention and known recurrent layers are replaced by functions that mix no rows
(attention returns the values). So a change of one row may change no other row of the outputs. If it
does, some part pools rows, computes statistics of the sequence, or combines neighbouring rows.

    this file                 which parts mix rows?               few random tokens
    `probe_ranks`             do they see rows of other ranks?    the inputs of the forward

The first stage takes `len(rows_to_change(ROWS)) + 1` forwards of `ROWS` rows. A part that mixes
rows is kept from mixing them, and the stage is repeated, until no other part does.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ring_attn.integrations.transformers.untyped import Keywords, Model, Value
from ring_attn.models.recurrent import current, has_own_kind
from ring_attn.torch_private import tree_leaves, tree_map_only
from ring_attn.values.probing import probing

# Number of random tokens; a prime number that is not the size of something else in a model.
ROWS = 23

# Number of sums with random signs that represent a row's values.
SUMS = 8

# The keywords of a forward without which a probe runs: labels, from which losses of all rows are
# computed, and caches.
LEFT_OUT = {
    "labels",
    "shift_labels",
    "num_items_in_batch",
    "past_key_values",
    "cache_params",
    "use_cache",
    "return_dict",
}

# (batch, rows) of a probe's inputs.
Shape = tuple[int, int]
Inputs = dict[str, Value]

# Rows of a tensor that may have changed.
Moved = slice
ALL_ROWS, NO_ROWS = slice(None), slice(0, 0)


class Finding(NamedTuple):
    """A part of a model that a rank has found, in numbers that ranks exchange.

    Attributes:
        part: index of a part that mixes rows among the modules of the model, 0 for the model
            itself; or `NOTHING`, or `FAILED`.
        output: index of an output of the model that shows it.
        row: the row that was changed.
        others: number of other rows that have changed with it; 0 if the output has no rows.
        everywhere: 1 if all rows depend on the first one, as with statistics of the sequence.
    """

    part: int
    output: int = 0
    row: int = 0
    others: int = 0
    everywhere: int = 0


NOTHING, FAILED = -1, -2


# -- the inputs of a probe


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


def random_inputs(model: Model, given: Keywords, first: int) -> Inputs:
    """Return few random tokens, or embeddings if the forward got these.

    `given` are the keywords of the forward, `first` is the position_id of a sequence's first token.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    inputs: Inputs = {"use_cache": False}
    if given.get("inputs_embeds") is not None:
        embeds = given["inputs_embeds"]
        drawn = torch.randn(1, ROWS, embeds.size(-1), generator=generator)
        inputs["inputs_embeds"] = drawn.to(embeds.device, embeds.dtype)
    else:
        # Small ids are often those of special tokens.
        vocab_size = model.get_input_embeddings().weight.size(0)
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
    if _has_choices(given):
        for name in {"input_ids", "inputs_embeds", "token_type_ids"} & inputs.keys():
            inputs[name] = inputs[name][:, None]
    return _accepted(model, inputs)


def own_inputs(model: Model, given: Keywords) -> Inputs:
    """Return the inputs of the user's forward, without labels and caches."""
    inputs = {name: x for name, x in given.items() if name not in LEFT_OUT}
    return _accepted(model, {**inputs, "use_cache": False})


def forward_of(model: Model) -> Callable[..., Value]:
    """Return the forward of the model's class.

    A function with which a user has wrapped the model's forward may need what a probe leaves out,
    such as the loss.
    """
    return partial(type(model).forward, model)


def _accepted(model: Model, inputs: Inputs) -> Inputs:
    """Return the inputs that the model's forward accepts."""
    accepted = inspect.signature(forward_of(model)).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    return {name: x for name, x in inputs.items() if takes_any or name in accepted}


def shape_of(inputs: Inputs) -> Shape:
    """Return (batch, rows) of the inputs, in which each choice of a question is a sample."""
    x = inputs[_name_of_tokens(inputs)]
    batch, rows = (x.flatten(0, 1) if _has_choices(inputs) else x).shape[:2]
    return batch, rows


def _name_of_tokens(inputs: Keywords) -> str:
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(inputs.get(name), Tensor):
            return name
    raise ValueError("the forward got neither input_ids nor inputs_embeds")


def _has_choices(inputs: Keywords) -> bool:
    """Return whether tokens are (batch, choices, rows), as those of heads for multiple choice.

    In other models, (batch, rows, codes), each row has several codes.
    """
    ids, embeds, positions = map(inputs.get, ("input_ids", "inputs_embeds", "position_ids"))
    if isinstance(ids, Tensor) and ids.ndim == 3 and isinstance(positions, Tensor):
        return ids.size(1) != positions.size(-1) == ids.size(2)
    return isinstance(embeds, Tensor) and embeds.ndim == 4


def rows_to_change(rows: int) -> tuple[int, int, int]:
    """Return the rows that are changed, one at a time."""
    return 0, rows * 2 // 5, rows - 1


def changed_inputs(model: Model, inputs: Inputs, moved: Moved) -> Inputs:
    """Return the inputs with other tokens in some rows."""
    name = _name_of_tokens(inputs)
    x = inputs[name]
    by_sample = x.flatten(0, 1) if _has_choices(inputs) else x
    return {**inputs, name: changed_rows(model, by_sample, moved).view_as(x)}


def changed_rows(model: Model, x: Tensor, moved: Moved) -> Tensor:
    """Return other values in some rows of ids or embeddings, (batch, rows, ...)."""
    changed = x.clone()
    if x.is_floating_point():
        changed[:, moved] = -x[:, moved] - 1
        return changed
    vocab_size, mask_token = _vocab_size(model, x), getattr(model.config, "mask_token_id", None)
    mirrored = vocab_size - 1 - x
    # Small ids are often those of special tokens.
    others = torch.where(mirrored > x, mirrored, min(3, vocab_size - 1))
    if mask_token is not None and mask_token < vocab_size:
        # Not every row that is changed, so that masks and other tokens are changed.
        middle = rows_to_change(x.size(1))[1]
        is_masked = torch.arange(x.size(1), device=x.device) % 5 == middle % 5
        others[:, is_masked] = mask_token
    changed[:, moved] = others[:, moved]
    return changed


def _vocab_size(model: Model, ids: Tensor) -> int:
    """Return the number of ids that the model takes, or at least as many as these are."""
    try:
        return int(model.get_input_embeddings().weight.size(0))
    except (AttributeError, NotImplementedError):
        return int(ids.max()) + 1


# -- values of rows


class _Values(NamedTuple):
    """A few sums of a tensor's values, (rows, sums), or (1, sums) if it has no rows.

    Attributes:
        sums: the sums, in which a change of any value shows.
        has_rows: whether the tensor has rows.
        is_scalar: whether it has no dims.
        shape: the tensor's shape.
        eps: the eps of its dtype.
    """

    sums: Tensor
    has_rows: bool
    is_scalar: bool
    shape: tuple[int, ...]
    eps: float


def _values_of(x: Tensor, shape: Shape, flat: bool = False) -> _Values:
    """Return sums of the values of a tensor, (batch, rows, ...).

    With `flat`, (batch * rows, ...) has rows, too, such as the logits of routers.
    """
    original, (batch, rows) = x, shape
    if x.is_complex():
        x = torch.view_as_real(x)
    if flat and x.ndim and x.shape[:2] != shape and x.size(0) == batch * rows:
        x = x.unflatten(0, shape)
    has_rows = x.shape[:2] == shape
    by_row = x.transpose(0, 1).flatten(1) if has_rows else x.reshape(1, -1)
    eps = torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0
    return _Values(_sums(by_row), has_rows, original.ndim == 0, tuple(original.shape), eps)


def _sums(x: Tensor) -> Tensor:
    """Return sums with random signs: (rows, n) -> (rows, at most `SUMS`)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    finite = torch.nan_to_num(x.to(wide), nan=0.0, posinf=0.0, neginf=0.0)
    if x.size(1) <= SUMS:
        return finite
    generator = torch.Generator().manual_seed(x.size(1))
    signs = torch.randint(2, (x.size(1), SUMS), generator=generator) * 2 - 1
    return finite @ signs.to(x.device, wide)


def other_rows(
    before: Tensor, after: Tensor, row: int, eps: float | None = None
) -> tuple[int, ...]:
    """Return the rows other than the changed one whose values have changed beyond rounding.

    Equal rows of one matrix product have equal bits. Experts multiply other numbers of rows after a
    change, which rounds differently: by about eps of the dtype, while mixing changes a row by a
    share of the change itself. The limit is between both, the square root of eps.
    """
    if not before.numel():
        return ()
    difference = after.double() - before.double()
    moved = difference.reshape(len(difference), -1).abs().amax(1)  # (rows,)
    eps = torch.finfo(before.dtype).eps if eps is None else eps
    limit = moved[row] * eps**0.5
    moved[row] = 0
    return tuple((moved > limit).nonzero().flatten().tolist())


def _num_changed(before: _Values, after: _Values | None, row: int) -> int:
    """Return the number of other rows that have changed."""
    if after is None or after.shape != before.shape or not before.has_rows:
        return 0
    return len(other_rows(before.sums, after.sums, row, before.eps))


def _changed_elsewhere(before: _Values, after: _Values, row: int) -> bool:
    """Return whether an argument of a part has changed in more than the changed row."""
    if before.shape != after.shape:
        return True
    if before.has_rows:
        return _num_changed(before, after, row) > 0
    return not torch.equal(before.sums, after.sums)


def tensors_of(values: Value) -> list[Tensor]:
    """Return the tensors in nested tuples, lists, dicts and outputs of models."""
    leaves = tree_leaves(values)
    return [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, DTensor)]


# -- parts that are kept from mixing rows


class Splice:
    """Keeps parts from mixing rows: rows that have not changed keep the values of the usual run.

    Attributes:
        parts: the names of these parts.
        moved: the rows that have changed; None during the usual run.
    """

    def __init__(self, parts: Collection[str], shape: Shape) -> None:
        self.parts = parts
        self.moved: Moved | None = None
        self._shape = shape
        self._usual: dict[tuple[str, int], Value] = {}
        self._calls: Counter[str] = Counter()

    def begin(self, moved: Moved | None) -> None:
        """Begin a run in which these rows have changed, or the usual run."""
        self.moved = moved
        self._calls.clear()
        if moved is None:
            self._usual.clear()

    def output(self, name: str, output: Value) -> Value:
        """Return the output of a part, with the usual values in rows that have not changed."""
        if name not in self.parts:
            return output
        call = (name, self._calls[name])
        self._calls[name] += 1
        if self.moved is None:
            self._usual[call] = output
            return output
        usual = iter([x for x in tree_leaves(self._usual[call]) if isinstance(x, Tensor)])
        return tree_map_only(Tensor, lambda x: self._spliced(next(usual), x), output)

    def _spliced(self, usual: Tensor, x: Tensor) -> Tensor:
        if usual.shape != x.shape or x.shape[:2] != self._shape or self.moved is None:
            return usual
        spliced = usual.clone()
        spliced[:, self.moved] = x[:, self.moved]
        return spliced


# -- the search


class _Run(NamedTuple):
    """The values of a run: outputs by name, and arguments and outputs of the calls of parts.

    Calls are in the order in which they end.
    """

    named: dict[str, _Values]
    arguments: dict[tuple[str, int], list[_Values]]
    outputs: dict[tuple[str, int], _Values]


class Search:
    """The search for parts of a model that mix rows, on this rank.

    Attributes:
        model: a model whose attention is ours.
        names: the names of its modules; "" for the model itself.
        pools: whether outputs without rows are pooled over the ranks.
        kept: the names of parts that are known, which are kept from mixing rows.
        kept_outputs: the indices of outputs that are known to mix rows in the model's own code.
    """

    def __init__(self, model: Model, pools: bool, trusted: Collection[str]) -> None:
        self.model, self.pools = model, pools
        self.names = [name for name, _ in model.named_modules()]
        # A recurrence that a user has registered mixes rows, over the ranks, too.
        self.kept = {
            name
            for name, part in model.named_modules()
            if name and (type(part).__name__ in trusted or has_own_kind(part))
        }
        self.kept_outputs: set[int] = set()
        self.output_names: list[str] = []  # with the shapes of outputs without rows

    def keep(self, finding: Finding) -> None:
        """Note a part that mixes rows, so that the next search finds others."""
        if finding.part:
            self.kept.add(self.names[finding.part])
        else:
            self.kept_outputs.add(finding.output)

    def find(self, inputs: Inputs) -> Finding:
        """Return a part that mixes rows and is not known yet."""
        shape = shape_of(inputs)
        splice = Splice(self.kept, shape)
        usual = self._run(inputs, splice, None)
        for row in rows_to_change(shape[1]):
            moved = slice(row, row + 1)
            changed = self._run(changed_inputs(self.model, inputs, moved), splice, moved)
            finding = self._compared(usual, changed, row, shape[1])
            if finding is not None:
                return finding
        return Finding(NOTHING)

    def _run(self, inputs: Inputs, splice: Splice, moved: Moved | None) -> _Run:
        """Run the model's forward, without the hooks of the model itself."""
        run = _Run({}, {}, {})
        shape, calls = shape_of(inputs), Counter[str]()
        handles = []

        def enter(name: str) -> Callable[..., None]:
            def hook(part: nn.Module, args: Value, kwargs: Value) -> None:
                found = [_values_of(x, shape) for x in tensors_of((args, kwargs))]
                run.arguments[name, calls[name]] = found

            return hook

        def leave(name: str) -> Callable[..., Value]:
            def hook(part: nn.Module, args: Value, output: Value) -> Value:
                output = splice.output(name, output)
                first = next(iter(tensors_of(output)), None)
                if (
                    first is not None
                    and first.is_floating_point()
                    and tuple(first.shape[:2]) == shape
                ):
                    run.outputs[name, calls[name]] = _values_of(first, shape)
                calls[name] += 1
                return output

            return hook

        splice.begin(moved)
        for name, part in self.model.named_modules():
            if name:
                handles.append(part.register_forward_pre_hook(enter(name), with_kwargs=True))
                handles.append(part.register_forward_hook(leave(name)))
        try:
            output = forward_of(self.model)(**inputs)
        finally:
            for handle in handles:
                handle.remove()
        for name, x in named_outputs(output).items():
            run.named[name] = _values_of(x, shape, flat=True)
        self.output_names = [
            name if x.is_scalar else f"{name} of shape {x.shape}" for name, x in run.named.items()
        ]
        return run

    def _compared(self, usual: _Run, changed: _Run, row: int, rows: int) -> Finding | None:
        """Return a part that mixes rows, as a change of one row shows it."""

        def found(part: int, output: int, others: int) -> Finding:
            # An output without rows depends on all of them.
            everywhere = others in (0, rows - 1) and (row == 0 or not others)
            return Finding(part, output, row, others, int(everywhere))

        for index, (key, before) in enumerate(usual.named.items()):
            after = changed.named.get(key)
            if index in self.kept_outputs or after is None or after.shape != before.shape:
                continue
            if before.is_scalar:  # such as the auxiliary loss of experts
                if not torch.equal(after.sums, before.sums):
                    return found(0, index, others=0)
            elif before.has_rows:
                others = _num_changed(before, after, row)
                if others:
                    part, of_part = self._first_part(usual, changed, row) or (0, others)
                    return found(part, index, of_part)
            elif not self.pools:
                return found(0, index, others=0)
        if self.pools:
            blamed = self._first_part(usual, changed, row)
            if blamed is not None:
                return found(blamed[0], 0, blamed[1])
        return None

    def _first_part(self, usual: _Run, changed: _Run, row: int) -> tuple[int, int] | None:
        """Return the first part to end of which only the outputs have changed in other rows.

        Return its index, and the number of these rows.
        """
        for call, before in usual.outputs.items():
            others = _num_changed(before, changed.outputs.get(call), row)
            if not others or call[0] in self.kept:
                continue
            arguments = zip(usual.arguments[call], changed.arguments[call], strict=False)
            if not any(_changed_elsewhere(*pair, row) for pair in arguments):
                return self.names.index(call[0]), others
        return None


def named_outputs(output: Value) -> dict[str, Tensor]:
    """Return the outputs of a model that are tensors of floating point, by name."""
    items = output.items() if hasattr(output, "items") else enumerate(output)
    return {str(name): x for name, x in items if isinstance(x, Tensor) and x.is_floating_point()}


# -- functions without mixing


def values_of(query: Tensor, value: Tensor) -> Tensor:
    """Return the values of each row, in the shape of attention's output.

    `query` and `value` are (batch, heads, rows, dim); the result is (batch, rows, heads, dim).
    """
    groups = query.size(1) // value.size(1)
    return value.repeat_interleave(groups, 1).transpose(1, 2).contiguous()
