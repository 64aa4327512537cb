"""Split the rows inside of models that number their own rows, after their embeddings.

    vision and audio encoders    pixels or samples become rows in the model itself
    encoders with decoders       both count their rows from 0

Such a model gets its whole inputs on every rank. Its embeddings are computed on every rank. Each
list of layers with attention, a stack, gets the rows of its rank: hooks on the first layer cut the
hidden states, and hooks on the last one gather them. So heads and poolers see all rows.

    pixels -> embeddings -> | cut -> layer -> layer -> ... -> gather | -> head -> loss
              all rows        rows of this rank                          all rows

Parts of a layer other than attention must compute each row from this row and from arguments that
are cut with it (`ROWS`). This is checked before the first forward on several ranks: with attention
replaced by a function of each row, the layers must compute the same values for the rows of this
rank as for the same rows among all rows.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ring_attn.core.layout import SequenceLayout
from ring_attn.integrations.transformers.probe import probe_mode
from ring_attn.integrations.transformers.untyped import Keywords, Model, Value
from ring_attn.models.gathered import gather_rows, of_ranks
from ring_attn.models.pooling import share_of_gradient

# Arguments of layers that have a row for each row of the hidden states, and the dim of these rows.
ROWS = {"position_embeddings": -2, "rotary_pos_emb": -2, "position_ids": -1}

# Arguments of layers with the boundaries of images among the rows.
BOUNDARIES = "cu_seqlens"

# Arguments with the encoder's rows: of layers, and of their modules for cross-attention.
ENCODER_ROWS = "encoder_hidden_states"
CROSS = ("key_value_states", ENCODER_ROWS)

# Outputs of models with the hidden states of all layers.
HIDDEN_STATES = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")

# Positional arguments and keywords of a layer.
Inputs: TypeAlias = tuple[tuple[Value, ...], dict[str, Value]]


class Ring(Protocol):
    """The interface of an attn_implementation for the hooks of a stack."""

    @property
    def layout(self) -> str: ...

    @property
    def gather(self) -> bool: ...


class Place(NamedTuple):
    """The rows of the layer that runs.

    Attributes:
        layout: the layout of the stack's rows.
        layout_k: the layout of the encoder's rows, for layers with cross-attention.
        cu_seqlens: boundaries of images among the rows.
    """

    layout: SequenceLayout
    layout_k: SequenceLayout | None = None
    cu_seqlens: Tensor | None = None


class _Rows(NamedTuple):
    """How rows of a tensor are split."""

    layout: SequenceLayout
    group: dist.ProcessGroup
    dim: int


@dataclass
class _Check:
    """The comparison of this rank's rows with the same rows among all rows.

    Attributes:
        cuts: whether rows are cut, in the second of two forwards.
        inputs: the hidden states that each stack got in the first forward.
        outputs: the hidden states that each stack returned then; the second forward removes them.
        left: how the rows are split that the second forward did not gather.
    """

    cuts: bool = False
    left: _Rows | None = None
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


class _State(threading.local):
    """The stack that runs in this thread.

    Attributes:
        depth: number of models that number their own rows whose forwards run.
        rows: how the rows of the stack that runs are split.
        place: the rows of the layer that runs; None outside of layers.
        cross: whether cross-attention runs.
        attended: whether the layer that runs has called our attention.
        cut: arguments that were cut for the layers of this stack, by their ids.
        check: the comparison that runs.
    """

    depth = 0
    rows: _Rows | None = None
    place: Place | None = None
    cross = False
    attended = False
    cut: dict[tuple[int, int], tuple[Tensor, Tensor]] | None = None
    check: _Check | None = None


state = _State()

# Hidden states that have only this rank's rows.
_split: MutableMapping[Tensor, _Rows] = WeakTensorKeyDictionary()


def numbers_own_rows(model: Model) -> bool:
    """Return whether a model makes and numbers its rows itself, from inputs that are whole."""
    modalities = getattr(model, "input_modalities", "text")
    names = (modalities,) if isinstance(modalities, str) else tuple(modalities)
    return "text" not in names or bool(model.config.is_encoder_decoder)


# -- hooks


def stacks_of(model: nn.Module) -> list[nn.ModuleList]:
    """Return the outermost lists of layers with attention."""
    found = []
    for child in model.children():
        if isinstance(child, nn.ModuleList) and len(child) and all(map(_has_attention, child)):
            found.append(child)
        else:
            found += stacks_of(child)
    return found


def _has_attention(layer: nn.Module) -> bool:
    return any("Attention" in type(part).__name__ for part in layer.modules())


RingOf = Callable[[nn.Module], "tuple[Ring, dist.ProcessGroup] | None"]


def install(model: Model, ring_of: RingOf) -> None:
    """Add hooks to the stacks of a model that has none.

    `ring_of` returns the implementation of a layer's attention, and its group; None if it is not
    ours.
    """
    stacks = stacks_of(model)
    if not stacks:
        raise NotImplementedError(
            f"{type(model).__name__} has no list of layers with attention, whose rows could be "
            "split: use it on one rank, or with another attn_implementation"
        )
    for stack in stacks:
        if any(hasattr(hook, "splits") for hook in stack[0]._forward_pre_hooks.values()):
            continue
        has_encoder = ENCODER_ROWS in _names(stack[0])
        is_inner = bool(model.config.is_encoder_decoder) and not has_encoder
        for index, layer in enumerate(stack):
            enter = partial(_enter, ring_of, index == 0)
            enter.splits = True  # type: ignore[attr-defined]
            layer.register_forward_pre_hook(enter, with_kwargs=True)
            leave = partial(_leave, ring_of, index == len(stack) - 1, is_inner)
            # First, so that other hooks see what the layer returns in the end.
            layer.register_forward_hook(leave, always_call=True, prepend=True)
            for part in _crossing(layer):
                part.register_forward_pre_hook(_enter_cross, with_kwargs=True)
                part.register_forward_hook(_leave_cross, always_call=True)


def _crossing(layer: nn.Module) -> list[nn.Module]:
    """Return the parts of a layer that get the rows of an encoder."""
    parts = [part for part in layer.modules() if part is not layer]
    return [part for part in parts if not {*CROSS}.isdisjoint(_names(part))]


def _names(part: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of a module's forward."""
    return _names_of(type(part).forward)


@lru_cache(maxsize=256)
def _names_of(forward: Callable[..., Value]) -> tuple[str, ...]:
    """Return the names of a method's arguments, without self."""
    return tuple(inspect.signature(forward).parameters)[1:]


def _by_name(part: nn.Module, args: tuple[Value, ...], kwargs: Keywords) -> dict[str, Value]:
    """Return the arguments of a module's forward by name."""
    return {**dict(zip(_names(part), args, strict=False)), **kwargs}


def _enter_cross(part: nn.Module, args: tuple[Value, ...], kwargs: Keywords) -> None:
    given = _by_name(part, args, kwargs)
    state.cross = any(given.get(name) is not None for name in CROSS)


def _leave_cross(part: nn.Module, args: object, output: object) -> None:
    state.cross = False


def _enter(
    ring_of: RingOf, is_first: bool, layer: nn.Module, args: tuple[Value, ...], kwargs: Keywords
) -> Inputs | None:
    """Cut the rows of a layer's arguments; the first layer of a stack begins the stack."""
    found = ring_of(layer)
    if found is None or not state.depth:
        return None
    ring, group = found
    names = _names(layer)
    given = _by_name(layer, args, kwargs)
    x = args[0] if args else given[names[0]]
    check = state.check
    if check is not None and not check.cuts:
        if is_first:
            check.inputs.append(x)
        return None
    if is_first:
        state.rows = _begin(ring, group, layer, x)
        state.cut = {}
    rows = state.rows
    if rows is None:
        raise NotImplementedError(
            f"{type(layer).__name__} runs without the first layer of its list: layers cannot be "
            "skipped, or run again in the backward other than by gradient_checkpointing_enable()"
        )
    changed = _own_arguments(given, rows, ring)
    if is_first:
        x = _cut(x, rows.layout, rows)
        _split[x] = rows
        changed[names[0]] = x
    encoder = given.get(ENCODER_ROWS)
    layout_k = None if encoder is None else _layout_of(ring, group, encoder.size(1))
    state.place = Place(rows.layout, layout_k, given.get(BOUNDARIES))
    state.attended = False
    _keep_place(layer)
    of_args = list(args)
    for i, name in enumerate(names[: len(args)]):
        of_args[i] = changed.get(name, args[i])
    if args and is_first:
        of_args[0] = x
    positional = {*names[: len(args)]}
    of_kwargs = {name: x for name, x in changed.items() if name not in positional}
    return tuple(of_args), {**kwargs, **of_kwargs}


def _layout_of(ring: Ring, group: dist.ProcessGroup, rows: int) -> SequenceLayout:
    return SequenceLayout.from_name(ring.layout, rows, dist.get_world_size(group))


def _begin(ring: Ring, group: dist.ProcessGroup, layer: nn.Module, x: Tensor) -> _Rows:
    """Return how the rows of a stack are split, from the hidden states of its first layer."""
    if x.ndim not in (2, 3):
        raise NotImplementedError(
            f"{type(layer).__name__} has hidden states of shape {tuple(x.shape)}: only (batch, "
            "rows, dim) and (rows, dim) can be split"
        )
    dim = x.ndim - 2
    return _Rows(_layout_of(ring, group, x.size(dim)), group, dim)


def _cut(x: Tensor, layout: SequenceLayout, rows: _Rows, dim: int | None = None) -> Tensor:
    """Return this rank's rows of x; once for all layers of a stack."""
    kept = state.cut if state.cut is not None else {}
    dim = rows.dim if dim is None else dim
    key = (id(x), dim)
    if key not in kept:
        kept[key] = (x, layout.shard(x, dist.get_rank(rows.group), dim))
    return kept[key][1]


def _own_arguments(given: Keywords, rows: _Rows, ring: Ring) -> dict[str, Value]:
    """Return the arguments of a layer that have rows, with the rows of this rank."""
    changed: dict[str, Value] = {}
    for name, dim in ROWS.items():
        value = given.get(name)
        if isinstance(value, Tensor):
            changed[name] = _cut(value, rows.layout, rows, dim)
        elif isinstance(value, tuple) and len(value) == 2:
            cosines = _with_prefix(value[0], rows.layout.seqlen, fill=1.0)
            sines = _with_prefix(value[1], rows.layout.seqlen, fill=0.0)
            changed[name] = tuple(_cut(x, rows.layout, rows, dim) for x in (cosines, sines))
    if isinstance(given.get(ENCODER_ROWS), Tensor):
        encoder = given[ENCODER_ROWS]
        layout = _layout_of(ring, rows.group, encoder.size(1))
        changed[ENCODER_ROWS] = _cut(encoder, layout, rows, 1)
    if isinstance(given.get(BOUNDARIES), Tensor):
        # The layer calls attention once, for all images; attention gets the boundaries itself.
        own = rows.layout.shard_len(dist.get_rank(rows.group))
        changed[BOUNDARIES] = given[BOUNDARIES].new_tensor([0, own])
    return changed


def _with_prefix(x: Tensor, num_rows: int, fill: float) -> Tensor:
    """Add the rows of tokens before the patches, which are not rotated, as in DINOv3."""
    prefix = num_rows - x.size(-2)
    if prefix <= 0:
        return x
    key = (id(x), prefix)
    kept = state.cut if state.cut is not None else {}
    if key not in kept:
        first = x.new_full((*x.shape[:-2], prefix, x.size(-1)), fill)
        kept[key] = (x, torch.cat([first, x], -2))
    return kept[key][1]


def _keep_place(layer: nn.Module) -> None:
    """Let a layer that runs again in the backward have its place there, too."""
    if not (layer.training and getattr(layer, "gradient_checkpointing", False)):
        return
    checkpoint: Value = layer._gradient_checkpointing_func
    if hasattr(checkpoint, "keeps_place"):
        return

    def keeping(forward: Callable[..., Value], *args: Value) -> Value:
        place = state.place

        def placed(*args: Value) -> Value:
            before = state.place
            state.place = place
            try:
                return forward(*args)
            finally:
                state.place = before

        return checkpoint(placed, *args)

    keeping.keeps_place = True  # type: ignore[attr-defined]
    layer._gradient_checkpointing_func = keeping  # type: ignore[assignment]


def _leave(
    ring_of: RingOf, is_last: bool, is_inner: bool, layer: nn.Module, args: object, output: Value
) -> Value:
    """End a layer, also a failed one; the last layer of a stack gathers the rows."""
    state.place = None
    found = ring_of(layer)
    if found is None or not state.depth or output is None:
        return None
    ring, group = found
    out = output[0] if isinstance(output, tuple) else output
    check = state.check
    if check is not None and not check.cuts:
        if is_last:
            check.outputs.append(out)
        return None
    rows = state.rows
    if rows is None:
        return None
    if not state.attended:
        raise NotImplementedError(
            f"{type(layer).__name__} did not call its attention function: it computes attention in "
            "its own code, which sees the rows of one rank only"
        )
    _split[out] = rows
    if not is_last:
        return None
    state.rows = state.cut = None
    gathers = ring.gather or is_inner
    if check is not None:
        whole = check.outputs.pop(0)
        _compare(layer, whole, out, rows)
        check.left = None if gathers else rows
    elif gathers:
        whole = whole_rows(out, rows)
    if not gathers:
        return None
    return (whole, *output[1:]) if isinstance(output, tuple) else whole


def whole_rows(out: Tensor, rows: _Rows) -> Tensor:
    if rows.layout.world_size == 1:
        return out
    return gather_rows(out, rows.layout, rows.group, rows.dim)


# -- attention


def attended() -> Place | None:
    """Note a call of attention; return the place of its rows, None outside of stacks."""
    state.attended = True
    return state.place


def by_row(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return a function of each row's query, key and value, in the shape of attention's output.

    All are (batch, heads, rows, dim); the result is (batch, rows, heads, dim). In
    cross-attention, whose keys are other rows, it is a function of the query.
    """
    state.attended = True
    groups = query.size(1) // key.size(1)
    weights = torch.linspace(-1, 1, query.size(-1), dtype=query.dtype, device=query.device)
    of_query = (query * weights).sum(-1, keepdim=True)
    if state.cross or query.size(2) != key.size(2):
        mixed = of_query.expand(-1, -1, -1, value.size(-1))
    else:
        of_key = (key * weights.flip(0)).sum(-1, keepdim=True)
        mixed = of_query + (value + of_key).repeat_interleave(groups, 1)
    return mixed.transpose(1, 2).contiguous()


# -- the check before the first forward


def check_rows(model: Model, args: tuple[Value, ...], kwargs: Keywords, group: Value) -> None:
    """Refuse a model whose layers mix rows outside of attention, and inputs that differ by rank.

    It takes two forwards of the inputs, in evaluation mode and without gradients, in which
    attention is a function of each row.
    """
    name, check = type(model).__name__, _Check()
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    with probe_mode(model), _checking(check):
        with torch.random.fork_rng(devices):
            whole = model.forward(*args, **kwargs)
        if not check.inputs:
            raise NotImplementedError(
                f"the layers with attention of {name} did not run: use it on one rank"
            )
        for x in check.inputs:
            _compare_ranks(name, x, group)
        check.cuts = True
        problem: NotImplementedError | None = None
        try:
            with torch.random.fork_rng(devices):
                own = model.forward(*args, **kwargs)
            if check.left is not None:
                _compare_outputs(name, whole, own, check.left)
        except NotImplementedError as error:
            problem = error
        except Exception as error:
            problem = NotImplementedError(
                f"the layers of {name} cannot run on a part of the rows: use the model on one "
                f"rank, or with another attn_implementation ({type(error).__name__}: {error})"
            )
        _refuse_on_all_ranks(name, problem, device, group)


def _refuse_on_all_ranks(
    name: str, problem: NotImplementedError | None, device: torch.device, group: dist.ProcessGroup
) -> None:
    """Raise the problem of this rank, or name a rank that has one."""
    flag = torch.tensor([problem is not None], dtype=torch.int32, device=device)
    failed = of_ranks(flag, group).flatten().nonzero().flatten().tolist()
    if problem is not None:
        raise problem
    if failed:
        raise NotImplementedError(
            f"the layers of {name} cannot be computed from a part of the rows, as rank "
            f"{failed[0]} has found: its error names the reason"
        )


@contextmanager
def _checking(check: _Check) -> Iterator[None]:
    state.check = check
    try:
        yield
    finally:
        state.check = state.rows = state.cut = state.place = None


def checking() -> bool:
    """Return whether the check of a model runs."""
    return state.check is not None


def _compare(layer: nn.Module, whole: Tensor, own: Tensor, rows: _Rows) -> None:
    """Refuse a stack whose output for this rank's rows is not that among all rows."""
    if _is_part(whole, own, rows):
        return
    raise NotImplementedError(
        f"the layers before and including {type(layer).__name__} compute other values for a part "
        "of the rows than for all rows: they mix rows outside of attention, or count rows from 0; "
        "use the model on one rank, or with another attn_implementation"
    )


def _is_part(whole: Tensor, own: Tensor, rows: _Rows) -> bool:
    """Return whether a tensor has the values of this rank's rows of a whole one."""
    expected = rows.layout.shard(whole, dist.get_rank(rows.group), rows.dim)
    if expected.shape != own.shape:
        return False
    if not own.numel():
        return True
    # Products of other numbers of rows round differently; see `probe`.
    limit = whole.abs().max() * torch.finfo(whole.dtype).eps ** 0.5
    return bool((expected - own).abs().max() <= limit)


def _compare_outputs(name: str, whole: Value, own: Value, rows: _Rows) -> None:
    """Refuse a model whose outputs are not the rows of this rank, if rows are not gathered."""
    for key, x in own.items():
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            continue
        has_rows = x.ndim > rows.dim and whole[key].size(rows.dim) == rows.layout.seqlen
        if not has_rows or not _is_part(whole[key], x, rows):
            raise NotImplementedError(
                f"the output {key} of {name} is computed from the rows of one rank, because "
                "register() got gather=False: use a model without head and pooler, or gather=True"
            )


def _compare_ranks(name: str, x: Tensor, group: dist.ProcessGroup) -> None:
    """Refuse hidden states that differ between ranks before they are cut."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (x.size(-1),), generator=generator).to(x.device) * 2 - 1
    digest = (x.double() * signs).sum(-1)  # (batch, rows) or (rows,)
    each = of_ranks(digest, group)
    limit = torch.finfo(x.dtype).eps ** 0.5 * each.abs().amax()
    is_other = (each - each[0]).abs().flatten(1) > limit  # (ranks, rows)
    differing = is_other.any(1).nonzero().flatten().tolist()
    if differing:
        raise ValueError(
            f"{name} must get the same inputs on every rank, but the rows of ranks {differing} "
            "differ from those of rank 0: pass the whole inputs, such as pixel_values, on every "
            "rank, with the same weights and the same seed; the model splits the rows after its "
            "embeddings"
        )


# -- the outputs of a model


def whole_hidden_states(output: Value) -> None:
    """Replace hidden states of layers, which have the rows of this rank, by those of all ranks."""
    for name in HIDDEN_STATES:
        values = output.get(name) if hasattr(output, "get") else None
        if isinstance(values, tuple):
            output[name] = tuple(_gathered(x) for x in values)


def _gathered(x: Value) -> Value:
    rows = _split.get(x) if isinstance(x, Tensor) else None
    return x if rows is None else whole_rows(x, rows)


def share_of_losses(output: Value, world_size: int) -> None:
    """Give the loss and the logits, which all ranks compute from all rows, a share of the gradient.

    So gradients are summed over the ranks as for other models.
    """
    for name, value in list(output.items()) if hasattr(output, "items") else ():
        is_head = name == "loss" or name.startswith("logits")
        if is_head and isinstance(value, Tensor) and value.requires_grad:
            output[name] = share_of_gradient(value, world_size)
