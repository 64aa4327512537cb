"""Refuse Hugging Face models whose results on a sharded sequence would be wrong without an error.

    when made         does the model's code call attention functions at all?
    before forward    does it accept the positions of its rows, and were they passed?
    after forward     did each layer call our attention once?

A model that never calls its attention function computes attention within this rank's rows only, and
without a causal mask, which that function would apply. Only a check of the whole model shows it.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache, partial
from types import ModuleType
from typing import Protocol, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_attn.core.layout import SequenceLayout
from ring_attn.integrations.transformers import stacks
from ring_attn.integrations.transformers.pools import finish, install
from ring_attn.integrations.transformers.probe_ranks import check_mixing
from ring_attn.integrations.transformers.untyped import Cache, Config, Keywords, Model, Value
from ring_attn.models.recurrent import (
    Place,
    current,
    functions_of,
    refuse_compiled,
    split_functions,
)
from ring_attn.transport import groups
from ring_attn.transport.groups import Group
from ring_attn.transport.p2p import reporting
from ring_attn.values.probing import probing

# Types of layers in a config: with only a recurrence; with a recurrence; that mix no rows; with
# attention.
ALONE_TYPES = {"linear_attention", "conv"}
RECURRENT_TYPES = ALONE_TYPES | {"hybrid", "hybrid_sliding"}
ROWWISE_TYPES = {"mlp", "moe"}
LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
KNOWN_TYPES = LAYER_TYPES | RECURRENT_TYPES | ROWWISE_TYPES


# Keywords that give the place of a recurrent layer's rows in the sequence.
PLACED = {"sequence_layout", "cu_seq_lens_q"}

# Names of caches in the forwards of models.
CACHES = {"past_key_values", "cache_params"}

# Ways to make position_ids.
MAKE_POSITIONS = (
    "make them with ring_attn.shard_batch, train with "
    "ring_attn.integrations.trainer.split_sequence(Trainer), or generate with "
    "past_key_values=ring.cache(model), where ring is what register() returned"
)

WITH_CACHE = (
    "recurrent layers on a sharded sequence need a cache of `Registration.cache(model)`, got "
    "another cache with states: pass the cache that was made for the model"
)


class Registered(Protocol):
    """The interface of an attn_implementation for the hooks of a model."""

    @property
    def group(self) -> Group: ...

    @property
    def layout(self) -> str: ...

    @property
    def probe(self) -> bool: ...

    @property
    def trusted(self) -> frozenset[str]: ...

    @property
    def gather(self) -> bool: ...

    def layout_of(self, given: Keywords, rows: int) -> SequenceLayout | None:
        """Return the layout of a forward whose outputs are pooled; None if no rows are sharded."""

    def check_positions(self, given: Keywords, position_ids: Tensor, first: int) -> None:
        """Refuse `position_ids` that are not the positions of this rank's rows."""

    def place(self, given: Keywords, rows: int) -> Place | None:
        """Return the place of a recurrent layer's rows in the sequence."""


# The registered names of attn_implementation.
registered: dict[str, Registered] = {}

# Options of configs with which layers read other rows outside of attention.
OTHER_ROWS = {
    "index_topk": "with which an indexer chooses the keys of each query",
    "trigram_input": "with which a row's embedding mixes three rows",
    "token_dropout": "with which embeddings are scaled by the share of masks in the sequence",
}

# Keywords of a forward whose values are positions, from which it computes a loss over all rows.
LABELS_OF_POSITIONS = {"start_positions", "end_positions"}

# Numbers of layers in a config; decoders may have fewer than encoders.
LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")


class _Forward(threading.local):
    """The outermost forward of a watched model in this thread.

    Attributes:
        depth: number of watched models whose forwards run.
        calls: number of calls of our attention.
        recurrences: number of recurrent layers that ran.
        model: class name of the outermost model.
        given: its keywords that are not None.
        recomputes: whether layers run again in the backward, outside of this forward.
        pooled: whether rows of all ranks were pooled.
    """

    depth = 0
    calls = 0
    recurrences = 0
    model = ""
    given: Keywords = {}
    recomputes = False
    pooled = False


running = _Forward()
# Models that have run on several ranks, and whether their outputs are pooled.
_checked: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
_takes_positions: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def watch_models(package: ModuleType) -> None:
    """Wrap the method in which transformers sets a model's attention implementation.

    transformers calls it for every model that is made or gets another implementation, and has no
    hook for it. With implementations that are not in `registered` nothing changes.
    """
    original = package.PreTrainedModel.get_correct_attn_implementation
    if hasattr(original, "watches"):
        return

    def get_correct_attn_implementation(self: Model, *args: object, **kwargs: object) -> object:
        name = original(self, *args, **kwargs)
        if name in registered:
            refuse_by_code(self)
            if _before not in self._forward_pre_hooks.values():
                self.register_forward_pre_hook(_before, with_kwargs=True)
                self.register_forward_hook(after_forward, always_call=True)
        return name

    get_correct_attn_implementation.watches = True  # type: ignore[attr-defined]
    package.PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation


def count_call(kwargs: Keywords, names: frozenset[str]) -> None:
    """Count a call of our attention; refuse it if it did not get all keywords among `names`."""
    if torch.compiler.is_compiling() or not running.depth:
        return
    running.calls += 1
    for name in sorted(names & running.given.keys() - kwargs.keys()):
        raise NotImplementedError(_not_passed_on(name, "attention"))


def _not_passed_on(name: str, layers: str) -> str:
    """Return the error for a keyword that a model's forward does not pass to its layers."""
    return (
        f"{running.model} does not pass {name} on to its {layers}: use this model with equally "
        "many rows on each rank, in the layout given to register(), and without documents"
    )


def has_several_positions(position_ids: Tensor | None) -> bool:
    """Return whether the model got several positions for each token, which it does not pass on."""
    of_model = running.given.get("position_ids")
    return position_ids is None and isinstance(of_model, Tensor) and of_model.ndim == 3


@lru_cache
def _counts_from_padding(module: str) -> bool:
    """Return whether models of a module count positions from the padding's id, like RoBERTa."""
    source = vars(sys.modules[module])
    name = "create_position_ids_from_input_ids"
    if name in source:
        return True
    classes = [value for value in source.values() if isinstance(value, type)]
    return any(hasattr(each, name) for each in classes)


def first_position(part: nn.Module) -> int:
    """Return the position_id of a sequence's first token, for a model or its attention."""
    config: Config = getattr(part, "config", None)
    if getattr(config, "position_embedding_type", "absolute") != "absolute":
        return 0
    if not _counts_from_padding(type(part).__module__):
        return 0
    padding = getattr(config.get_text_config(), "pad_token_id", None)  # images have no padding
    return 0 if padding is None else padding + 1


def check_config(module: nn.Module, in_stack: bool = False) -> None:
    """Refuse models that need rows of other ranks outside of attention.

    `in_stack` is whether the module is in a model that splits its rows itself.
    """
    config = getattr(module, "config", None)
    others = sorted(_layer_types(config) - KNOWN_TYPES)
    if others:
        raise NotImplementedError(
            f"the model has layers of type {', '.join(others)}, which need rows of other ranks in "
            f"a way that is not supported: only {' and '.join(sorted(KNOWN_TYPES))} work on a "
            "sharded sequence"
        )
    if getattr(config, "patch_size", None) and not in_stack:
        raise NotImplementedError(
            "the patches of images cannot be sharded over ranks: make the model with "
            "attn_implementation={'text_config': 'ring_attn', 'vision_config': 'sdpa'}"
        )
    for rope_type in _rope_types(config):
        if "dynamic" in rope_type or rope_type == "longrope":
            raise NotImplementedError(
                f"rope_type {rope_type!r} depends on the largest position on this rank instead of "
                "the largest position of the sequence: use a fixed scaling such as 'yarn', "
                "'llama3' or 'linear'"
            )


def _layer_types(config: Config) -> set[str]:
    """Return the types of layers that a config lists, if any."""
    return set(getattr(config, "layer_types", None) or ())


def _rope_types(config: Config) -> Iterator[str]:
    """Yield the RoPE types of the config: one, or one for each type of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in by_layer_type or [parameters]:
        yield str(rope.get("rope_type", "default"))


def refuse_by_code(model: Model) -> None:
    """Refuse a model whose class or config shows that it cannot run on a sharded sequence."""
    name, config = type(model).__name__, model.config
    calls_functions = model.is_backend_compatible() or model._supports_sdpa
    settable = calls_functions and model._can_set_attn_implementation()
    if not settable and not _only_recurrent(config):
        raise NotImplementedError(
            f"{name} computes attention in its own code, not by an attention function: use a model "
            "that supports transformers' AttentionInterface"
        )
    if _chooses_classes_by_name(model):
        raise NotImplementedError(
            f"{name} has layers of images with a class of attention for each attn_implementation, "
            "and none for this one: make the model with "
            "attn_implementation={'text_config': 'ring_attn', 'vision_config': 'sdpa'}"
        )
    if getattr(config, "relative_attention_num_buckets", None):
        raise NotImplementedError(
            f"{name} adds a bias by relative position to the scores of attention, which is not "
            "supported: use it on one rank, with another attn_implementation"
        )
    if _merges_attention(model):
        raise NotImplementedError(
            f"{name} computes self-attention and cross-attention in one call, over the keys of the "
            "decoder and the encoder together, which is not supported: use it on one rank, with "
            "another attn_implementation"
        )
    text_config = config.get_text_config()
    if getattr(text_config, "use_bidirectional_attention", None) in (True, "all"):
        raise NotImplementedError(
            f"{name} has use_bidirectional_attention={text_config.use_bidirectional_attention!r}, "
            "which is not supported: its masks are not those of causal models"
        )
    for option, why in OTHER_ROWS.items():
        if getattr(config, option, None):
            raise NotImplementedError(
                f"{name} has {option}, {why}: this needs rows of other ranks in a way that is not "
                "built"
            )


def _chooses_classes_by_name(model: Model) -> bool:
    """Return whether parts of a model are of a class that the name of attention chooses (SAM)."""
    names = vars(sys.modules[type(model).__module__])
    has_classes = any(name.endswith("_ATTENTION_CLASSES") for name in names)
    return has_classes and any(
        hasattr(model.config, name) for name in ("patch_size", "vision_config")
    )


def _merges_attention(model: Model) -> bool:
    """Return whether a decoder attends to its rows and the encoder's in one call (T5Gemma 2)."""
    names = vars(sys.modules[type(model).__module__])
    is_merged = any(name.endswith("MergedAttention") for name in names)
    return is_merged and bool(getattr(model.config, "is_encoder_decoder", False))


def _before(
    model: Model, args: tuple[object, ...], kwargs: dict[str, object]
) -> stacks.Inputs | None:
    """Begin a forward; refuse a forward in which each rank would count positions from 0.

    Return changed arguments of a model that numbers its own rows.
    """
    name = model.config._attn_implementation
    if name not in registered or probing.on:
        return None
    if stacks.state.depth or stacks.numbers_own_rows(model):
        return _before_whole(model, registered[name], args, kwargs)
    _before_rows(model, registered[name], args, kwargs)
    return None


def _before_rows(
    model: Model, ring: Registered, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Begin the forward of a model that gets this rank's rows and their positions."""
    is_recurrent = bool(RECURRENT_TYPES & _layer_types(model.config))
    if torch.compiler.is_compiling():
        if is_recurrent:
            refuse_compiled()
        return
    if is_recurrent:
        for layer in model.modules():
            functions = functions_of(layer)
            if functions:
                split_functions(layer, functions)
                _place_rows_of(layer, model.config)
    running.depth += 1
    if running.depth > 1:
        return
    names = inspect.signature(model.forward).parameters
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    running.calls = 0
    running.recurrences = 0
    running.model = type(model).__name__
    running.given = {key: value for key, value in given.items() if value is not None}
    running.recomputes = model.training and model.is_gradient_checkpointing
    running.pooled = False
    with reporting(ring.group):
        require_positions(model, groups.check_group(ring.group))
        # A sharded cache shards and adds positions in its own hook, after this one.
        has_positions = "position_ids" in running.given
        has_cache = "past_key_values" in running.given
        if has_positions and not has_cache:
            position_ids = cast(Tensor, given["position_ids"])
            ring.check_positions(given, position_ids, first_position(model))
        _check_parts(model, ring)


def _before_whole(
    model: Model, ring: Registered, args: tuple[object, ...], kwargs: dict[str, object]
) -> stacks.Inputs | None:
    """Begin the forward of a model that numbers its own rows; see `stacks`."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{type(model).__name__} splits its rows in hooks, which are not compiled: compile "
            "other models, or this one with another attn_implementation"
        )
    running.depth += 1
    stacks.state.depth += 1
    if stacks.state.depth > 1:
        return None
    with reporting(ring.group):
        group = groups.check_group(ring.group)
        names = inspect.signature(model.forward).parameters
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if dist.get_world_size(group) > 1:
            _check_whole(model, given)
        if "use_cache" in names and "use_cache" not in given:
            kwargs = {**kwargs, "use_cache": False}  # a cache of this rank's rows has no use
        if model not in _checked:
            stacks.install(model, _ring_of)
            is_probed = ring.probe and type(model).__name__ not in ring.trusted
            if is_probed and dist.get_world_size(group) > 1:
                stacks.check_rows(model, args, kwargs, group)
            _checked[model] = False
    return args, kwargs


def _check_whole(model: Model, given: Keywords) -> None:
    """Refuse arguments with which a model that numbers its own rows cannot be split."""
    name = type(model).__name__
    for option in (*CACHES, "use_cache"):
        if given.get(option) is not None and given[option] is not False:
            raise NotImplementedError(
                f"{name} splits its rows after its embeddings, and {option} is not supported for "
                "that: generate on one rank, with another attn_implementation"
            )
    for option in sorted(PLACED & given.keys()):
        raise NotImplementedError(
            f"{name} splits its rows itself, in the layout given to register(): leave {option} out"
        )
    if given.get("return_dict", getattr(model.config, "return_dict", True)) is False:
        raise NotImplementedError(
            f"{name} splits its rows, for which its outputs must have names: leave "
            "return_dict=False out"
        )
    for part in model.modules() if model.training else ():
        config = getattr(part, "config", None)
        if getattr(part, "layerdrop", 0) or getattr(config, "layerdrop", 0):
            raise NotImplementedError(
                f"{name} skips layers at random (layerdrop), each rank other layers: set "
                "layerdrop, encoder_layerdrop and decoder_layerdrop of the config to 0"
            )


def _ring_of(layer: nn.Module) -> tuple[Registered, dist.ProcessGroup] | None:
    """Return the implementation of a layer's attention, and its group, if it is registered."""
    for part in layer.modules():
        config: Config = getattr(part, "config", None)
        if config is not None:
            ring = registered.get(config._attn_implementation)
            return None if ring is None else (ring, groups.check_group(ring.group))
    return None


def _after_whole(model: Model, ring: Registered, output: Value) -> None:
    """End the forward of a model that numbers its own rows, also a failed one."""
    stacks.state.depth -= 1
    running.depth -= 1
    world_size = dist.get_world_size(groups.check_group(ring.group))
    unfinished = stacks.state.depth == 0 and stacks.state.rows is not None
    if unfinished:
        stacks.state.rows = stacks.state.cut = None
    if output is None or world_size == 1:
        return
    if unfinished:
        with reporting(ring.group):
            raise NotImplementedError(
                f"the last layer of {type(model).__name__} did not run, after which the rows of "
                "all ranks are gathered: use the model on one rank"
            )
    if not ring.gather:
        return
    stacks.whole_hidden_states(output)
    if running.depth == 0:
        stacks.share_of_losses(output, world_size)


def _check_parts(model: Model, ring: Registered) -> None:
    """Before a model's first forward on several ranks, find parts that mix or pool rows."""
    group = groups.check_group(ring.group)
    if dist.get_world_size(group) == 1:
        return
    for name in LABELS_OF_POSITIONS & running.given.keys():
        raise NotImplementedError(
            f"{name} is a position in the whole sequence, but {running.model} would compute its "
            "loss over one rank's rows: leave it out, gather the logits with ring_attn.unshard, "
            "and compute the loss of the whole sequence"
        )
    if model in _checked:
        return
    pools = install(model, partial(_where, model))
    if ring.probe:
        given, first = dict(running.given), first_position(model)
        check_mixing(model, given, first, pools, group, ring.trusted)
    _checked[model] = pools


def _where(
    model: Model, rows: int
) -> tuple[SequenceLayout, dist.ProcessGroup, dict[str, Value]] | None:
    """Return the layout and group of the forward under way, whose rows are pooled; see `pools`."""
    ring = registered.get(model.config._attn_implementation)
    if ring is None or probing.on or not running.depth or torch.compiler.is_compiling():
        return None
    group = groups.check_group(ring.group)
    if dist.get_world_size(group) == 1:
        return None
    if running.given.keys() & CACHES or "cu_seq_lens_q" in running.given:
        raise NotImplementedError(
            f"{running.model} pools rows, which is not supported together with a cache or with "
            "packed documents: pass one sequence a row, without a cache"
        )
    layout = ring.layout_of(running.given, rows)
    if layout is None:
        return None
    running.pooled = True
    return layout, group, dict(running.given)


def _place_rows_of(layer: nn.Module, config: Config) -> None:
    """Add hooks to a recurrent layer that set the place of its rows while it runs.

    The hooks run in each forward, also in forwards that recompute activations.
    """
    if any(hasattr(hook, "enters") for hook in layer._forward_pre_hooks.values()):
        return

    def enter(
        layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        if probing.on:
            return None
        rows = cast(Tensor, args[0] if args else kwargs["hidden_states"])
        current.place = _place_of(config, kwargs, rows.size(1))
        if current.place is None:
            return None
        cache = cache_of(kwargs)
        # The split functions apply the documents themselves.
        removed = {"attention_mask", "cu_seq_lens_q"}
        if not hasattr(cache, "step"):
            _refuse_states(layer, cache)
            removed |= CACHES
        return args, kwargs | dict.fromkeys(removed & kwargs.keys())

    enter.enters = True  # type: ignore[attr-defined]
    layer.register_forward_pre_hook(enter, with_kwargs=True)
    layer.register_forward_hook(_leave, always_call=True)


def _leave(layer: nn.Module, args: object, output: object) -> None:
    """Reset the place after a recurrent layer has run."""
    current.place = None


def cache_of(given: Keywords) -> Cache:
    """Return the cache among the keywords of a model or layer, or None."""
    return next((given[name] for name in CACHES if given.get(name) is not None), None)


def _refuse_states(layer: nn.Module, cache: object) -> None:
    """Refuse a cache that has a state of this layer."""
    layers, index = getattr(cache, "layers", ()), getattr(layer, "layer_idx", 0)
    if index >= len(layers):
        return
    states = getattr(layers[index], "has_previous_state", {})
    if any(states.values()):
        raise NotImplementedError(WITH_CACHE)


def _place_of(config: Config, given: Keywords, rows: int) -> Place | None:
    """Count the call of a recurrent layer; return the place of its rows if it is registered."""
    ring = registered.get(config._attn_implementation)
    if ring is None:
        return None
    if torch.compiler.is_compiling():
        refuse_compiled()
    running.recurrences += 1
    # Some models pass keywords on to their attention only, so they are taken from the forward.
    # While activations are recomputed, no forward is known.
    placed = {name: running.given[name] for name in PLACED & running.given.keys()}
    missing = placed.keys() - given.keys()
    if running.recomputes and missing:
        layers = "recurrent layers, which run again in the backward"
        with reporting(ring.group):
            raise NotImplementedError(_not_passed_on(min(missing), layers))
    return ring.place({**placed, **given}, rows)


def require_positions(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Refuse models that do not accept positions, and forwards without positions."""
    if dist.get_world_size(group) == 1 or _only_recurrent(model.config):
        return
    if model not in _takes_positions:
        _takes_positions[model] = any(
            "position_ids" in inspect.signature(part.forward).parameters
            for part in model.modules()
            if _before in part._forward_pre_hooks.values()
        )
    if not _takes_positions[model]:
        raise NotImplementedError(
            f"{running.model} has no parameter position_ids and counts every rank's rows from 0: "
            "use it on one rank only"
        )
    if not running.given.keys() & {"position_ids", "past_key_values"}:
        raise ValueError(
            f"position_ids must be passed to {running.model}, which otherwise counts every rank's "
            f"rows from 0: {MAKE_POSITIONS}"
        )


def after_forward(model: Model, args: tuple[object, ...], output: object) -> object:
    """End a forward, also a failed one; refuse its output if layers did not call our attention.

    Return the output if it was pooled.
    """
    name = model.config._attn_implementation
    if torch.compiler.is_compiling() or name not in registered or not running.depth or probing.on:
        return None
    if stacks.state.depth:
        _after_whole(model, registered[name], output)
        return None
    running.depth -= 1
    if running.depth == 0:
        running.given = {}
    if running.depth > 0 or output is None or _runs_compiled(model):
        return None
    attending, recurrent = _layers(model.config.get_text_config())
    if running.calls < attending or running.recurrences < recurrent:
        with reporting(registered[name].group):
            raise NotImplementedError(
                f"{running.model} has {attending} layers with attention and called "
                f"attn_implementation {name!r} {running.calls} times; of {recurrent} recurrent "
                f"layers {running.recurrences} are known (see register_recurrence): other layers "
                "need rows of other ranks in a way that is not supported, or were skipped at "
                "random (layerdrop); the output would be wrong"
            )
    if not running.pooled:
        return None
    return finish(output, dist.get_world_size(groups.check_group(registered[name].group)))


def _only_recurrent(config: Config) -> bool:
    """Return whether no layer has attention, as in Mamba, so that no layer needs positions."""
    types = _layer_types(config)
    return bool(types) and types <= ALONE_TYPES | ROWWISE_TYPES


def _layers(config: Config) -> tuple[int, int]:
    """Return the number of layers that must call attention, and of layers with a recurrence."""
    numbers = [getattr(config, key, None) for key in LAYERS]
    num_layers = min(int(number) for number in numbers if number is not None)
    types = (getattr(config, "layer_types", None) or [])[:num_layers]
    if not types:
        return num_layers, 0
    recurrent = sum(kind in RECURRENT_TYPES for kind in types)
    attending = sum(kind not in ROWWISE_TYPES | ALONE_TYPES for kind in types)
    return attending, recurrent


def _runs_compiled(model: nn.Module) -> bool:
    """Return whether parts are compiled, so that their calls of attention are not counted."""
    return any(
        part._compiled_call_impl is not None or "forward" in vars(part) for part in model.modules()
    )


def causal_of(module: nn.Module, is_causal: bool | None, rows: int) -> bool:
    """Return whether a call is causal; refuse a config that contradicts the module.

    `is_causal` is the argument of the call, `rows` its number of rows.
    """
    of_module = bool(getattr(module, "is_causal", True))
    of_config = getattr(getattr(module, "config", None), "is_causal", None)
    if is_causal is None:
        if of_module and of_config is False:
            raise ValueError(
                "config.is_causal is False, but is_causal of the attention module is True: pass "
                "is_causal=False to the forward, too"
            )
        return of_module
    # Some models pass is_causal=False for a single row, as in decoding; a tiny shard has one too.
    if of_module and rows == 1 and of_config is not False:
        return True
    return bool(is_causal)


def window_of(module: nn.Module, kwargs: Keywords, causal: bool) -> tuple[int, int]:
    """Return the window (left, right) of a layer, (-1, -1) without one.

    transformers' window of n keys includes the query: it has n - 1 other keys.
    """
    size = kwargs.get("sliding_window")
    of_config = getattr(getattr(module, "config", None), "sliding_window", None)
    if size is not None and not causal and of_config in (size, size - 1):
        # Without causality, the masks of transformers reach as far as the config's window. Most
        # models pass n + 1 for this reason, but T5Gemma passes n.
        return (of_config, of_config)
    if size is not None:
        return (size - 1, 0 if causal else size - 1)
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    if types and layer is not None:
        has_window = types[layer] == "sliding_attention"
    else:
        has_window = "sliding_window" not in kwargs and bool(of_config)
    if has_window:  # transformers would put the window into a mask, and there is no mask here
        raise NotImplementedError(
            f"layer {layer} has a sliding window, but {type(module).__name__} does not pass it to "
            "its attention function: use a model that passes sliding_window"
        )
    return (-1, -1)
