"""Refuses whole Hugging Face models that would be wrong on a split sequence without a word.

    made       does the model's code call attention functions at all?
    forward    does it take the positions of its rows, and were they given?
    after      was our attention called once a layer?

A model that never calls its attention function computes attention of its own rows only, without
even a causal mask, which is that function's task. Only the whole model can show it.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

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

# Types of layers in a config that have a recurrence, and that mix no rows.
ALONE_TYPES = {"linear_attention", "conv"}  # without attention beside the recurrence
RECURRENT_TYPES = ALONE_TYPES | {"hybrid", "hybrid_sliding"}
ROWWISE_TYPES = {"mlp", "moe"}
LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
KNOWN_TYPES = LAYER_TYPES | RECURRENT_TYPES | ROWWISE_TYPES


# Keywords that say where the rows of a recurrent layer stand.
PLACED = {"sequence_layout", "cu_seq_lens_q"}

# Names of caches in the forwards of models.
CACHES = {"past_key_values", "cache_params"}

WITH_CACHE = (
    "recurrent layers on a split sequence continue only from a cache that is made by "
    "`Registration.cache(model)` of their model"
)


class Registered(Protocol):
    """What the hooks of a model need of the implementation that its config names."""

    @property
    def group(self) -> Group: ...

    def check_positions(self, given: Mapping[str, Any], position_ids: Tensor, first: int) -> None:
        """Refuse `position_ids` that are not those of this rank's rows."""

    def place(self, given: Mapping[str, Any], rows: int) -> Place | None:
        """Return where the rows of a recurrent layer stand in the sequence."""


# The registered names of attn_implementation.
registered: dict[str, Registered] = {}

# Options of configs that make layers read other rows than by attention.
OTHER_ROWS = {
    "index_topk": "by which an indexer chooses the keys of each query",
    "trigram_input": "by which a row's embedding mixes three rows",
}

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
    """

    depth = 0
    calls = 0
    recurrences = 0
    model = ""
    given: Mapping[str, Any] = {}
    recomputes = False


_forward = _Forward()
_takes_positions: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def watch_models(package: ModuleType) -> None:
    """Wraps the method by which transformers settles a model's attention implementation.

    transformers calls it for every model that is made or gets another implementation, and has no
    hook for it. With implementations that are not in `registered` nothing changes.
    """
    settle = package.PreTrainedModel.get_correct_attn_implementation
    if hasattr(settle, "watches"):
        return

    def get_correct_attn_implementation(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = settle(self, *args, **kwargs)
        if name in registered:
            _refuse_by_code(self)
            if _before not in self._forward_pre_hooks.values():
                self.register_forward_pre_hook(_before, with_kwargs=True)
                self.register_forward_hook(_after, always_call=True)
        return name

    get_correct_attn_implementation.watches = True  # type: ignore[attr-defined]
    package.PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation


def count_call(kwargs: dict[str, Any], names: frozenset[str]) -> None:
    """Counts a call of our attention; refuses it if the model kept back keywords among `names`."""
    if torch.compiler.is_compiling() or not _forward.depth:
        return
    _forward.calls += 1
    for name in sorted(names & _forward.given.keys() - kwargs.keys()):
        raise NotImplementedError(_kept_back(name, "attention"))


def _kept_back(name: str, layers: str) -> str:
    return (
        f"{_forward.model} does not hand {name} on to its {layers}: this model works with equally "
        "many rows on each rank, in the layout given to register(), and without documents"
    )


@lru_cache
def _counts_from_padding(module: str) -> bool:
    """Tells whether models of a module count positions after the id of padding, as RoBERTa."""
    source = vars(sys.modules[module])
    name = "create_position_ids_from_input_ids"
    return name in source or any(hasattr(x, name) for x in source.values() if isinstance(x, type))


def first_position(part: nn.Module) -> int:
    """The position_id of a sequence's first token, by a model or its attention."""
    config: Any = getattr(part, "config", None)
    if getattr(config, "position_embedding_type", "absolute") != "absolute":
        return 0
    return config.pad_token_id + 1 if _counts_from_padding(type(part).__module__) else 0


def check_config(module: nn.Module) -> None:
    """Refuses models that need rows of other ranks outside of attention."""
    config = getattr(module, "config", None)
    others = sorted(set(getattr(config, "layer_types", None) or ()) - KNOWN_TYPES)
    if others:
        raise NotImplementedError(
            f"the model has layers of type {', '.join(others)}, which need rows of other ranks in "
            f"their own way: only {' and '.join(sorted(KNOWN_TYPES))} work on a split sequence"
        )
    if getattr(config, "patch_size", None):
        raise NotImplementedError(
            "the patches of images are not split over ranks: make the model with "
            "attn_implementation={'text_config': 'ring_attn', 'vision_config': 'sdpa'}"
        )
    for rope_type in _rope_types(config):
        if "dynamic" in rope_type or rope_type == "longrope":
            raise NotImplementedError(
                f"rope_type {rope_type!r} depends on the longest position that this rank has, not "
                "on that of the sequence: use a fixed scaling such as 'yarn', 'llama3' or 'linear'"
            )


def _rope_types(config: Any) -> Iterator[str]:
    """The RoPE types of the config: one, or one for each type of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in by_layer_type or [parameters]:
        yield str(rope.get("rope_type", "default"))


def _refuse_by_code(model: Any) -> None:
    """Refuses a model by what transformers says of its class, and by its config."""
    name, config = type(model).__name__, model.config
    calls_functions = model.is_backend_compatible() or model._supports_sdpa
    settable = calls_functions and model._can_set_attn_implementation()
    if not settable and not _only_recurrent(config):
        raise NotImplementedError(
            f"{name} computes attention by code of its own, not by an attention function: it "
            "cannot be split over ranks; use a model that supports transformers' "
            "AttentionInterface"
        )
    if config.is_encoder_decoder:
        raise NotImplementedError(
            f"{name} is an encoder and a decoder: cross-attention is not built for models, only "
            "encoders and decoders alone"
        )
    for option, why in OTHER_ROWS.items():
        if getattr(config, option, None):
            raise NotImplementedError(
                f"{name} has {option}, {why}: this needs rows of other ranks in its own way, which "
                "is not built"
            )


def _before(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Begins a forward; refuses one whose rows would have the positions of rank 0's."""
    name = model.config._attn_implementation
    if name not in registered:
        return
    recurrent = bool(RECURRENT_TYPES & {*(getattr(model.config, "layer_types", None) or ())})
    if torch.compiler.is_compiling():
        if recurrent:
            refuse_compiled()
        return
    for layer in model.modules() if recurrent else ():
        if functions := functions_of(layer):
            split_functions(layer, functions)
            _place_rows_of(layer, model.config)
    _forward.depth += 1
    if _forward.depth > 1:
        return
    names = inspect.signature(model.forward).parameters
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    _forward.calls, _forward.recurrences, _forward.model = 0, 0, type(model).__name__
    _forward.given = {key: x for key, x in given.items() if x is not None}
    _forward.recomputes = model.training and model.is_gradient_checkpointing
    ring = registered[name]
    with reporting(ring.group):
        _require_positions(model, groups.check_group(ring.group))
        # A split cache cuts and adds them in a hook of its own, after this one.
        if {"position_ids"} == _forward.given.keys() & {"position_ids", "past_key_values"}:
            ring.check_positions(given, given["position_ids"], first_position(model))


def _place_rows_of(layer: nn.Module, config: Any) -> None:
    """Hooks a recurrent layer, so that it knows where its rows stand where it is registered.

    The hooks run in each forward, also in those that recompute activations.
    """
    if any(hasattr(hook, "enters") for hook in layer._forward_pre_hooks.values()):
        return

    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows: Tensor = args[0] if args else kwargs["hidden_states"]
        current.place = _place_of(config, kwargs, rows.size(1))
        if current.place is None:
            return None
        cache = cache_of(kwargs)
        left_out = {"attention_mask", "cu_seq_lens_q"}
        if not hasattr(cache, "step"):
            _refuse_states(layer, cache)
            left_out |= CACHES
        return args, kwargs | dict.fromkeys(left_out & kwargs.keys())

    enter.enters = True  # type: ignore[attr-defined]
    layer.register_forward_pre_hook(enter, with_kwargs=True)
    layer.register_forward_hook(_leave, always_call=True)


def _leave(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    current.place = None


def cache_of(given: Mapping[str, Any]) -> Any:
    """The cache among the keywords of a model or layer, or None."""
    return next((given[name] for name in CACHES if given.get(name) is not None), None)


def _refuse_states(layer: Any, cache: Any) -> None:
    layers, index = getattr(cache, "layers", ()), getattr(layer, "layer_idx", 0)
    states = getattr(layers[index], "has_previous_state", {}) if index < len(layers) else {}
    if any(states.values()):
        raise NotImplementedError(WITH_CACHE)


def _place_of(config: Any, given: dict[str, Any], rows: int) -> Place | None:
    """Counts the call of a recurrent layer; its place, where its model is registered."""
    ring = registered.get(config._attn_implementation)
    if ring is None:
        return None
    if torch.compiler.is_compiling():
        refuse_compiled()
    _forward.recurrences += 1
    # Some models hand keywords on to their attention alone. Outside of a forward none are known.
    placed = {x: _forward.given[x] for x in PLACED & _forward.given.keys()}
    if _forward.recomputes and (kept_back := placed.keys() - given.keys()):
        layers = "recurrent layers, which run again in the backward"
        with reporting(ring.group):
            raise NotImplementedError(_kept_back(min(kept_back), layers))
    return ring.place(placed | given, rows)


def _require_positions(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Refuses models that take no positions, and forwards without them."""
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
            f"{_forward.model} takes no position_ids and counts every rank's rows from 0: it is "
            "only right on one rank"
        )
    if not _forward.given.keys() & {"position_ids", "past_key_values"}:
        raise ValueError(
            f"position_ids must be passed to {_forward.model}, which else counts every rank's rows "
            "from 0: ring_attn.shard_batch makes them"
        )


def _after(model: Any, args: tuple[Any, ...], output: Any) -> None:
    """Ends a forward, also one that failed; refuses its output if layers did not call us."""
    name = model.config._attn_implementation
    if torch.compiler.is_compiling() or name not in registered or not _forward.depth:
        return
    _forward.depth -= 1
    if not _forward.depth:
        _forward.given = {}
    if _forward.depth or output is None or _runs_compiled(model):
        return
    attending, recurrent = _layers(model.config.get_text_config())
    if _forward.calls < attending or _forward.recurrences < recurrent:
        with reporting(registered[name].group):
            raise NotImplementedError(
                f"{_forward.model} has {attending} layers with attention and called "
                f"attn_implementation {name!r} {_forward.calls} times; of {recurrent} recurrent "
                f"layers {_forward.recurrences} are known (see register_recurrence): others need "
                "rows of other ranks in their own way, or were left out at random (layerdrop); its "
                "output would be wrong"
            )


def _only_recurrent(config: Any) -> bool:
    """Tells whether no layer has attention, as of Mamba: none asks where its rows stand."""
    types = {*(getattr(config, "layer_types", None) or ())}
    return bool(types) and types <= ALONE_TYPES | ROWWISE_TYPES


def _layers(config: Any) -> tuple[int, int]:
    """Numbers of layers that must call attention, and of those that have a recurrence."""
    layers = min(int(n) for key in LAYERS if (n := getattr(config, key, None)) is not None)
    types = (getattr(config, "layer_types", None) or [])[:layers]
    if not types:
        return layers, 0
    recurrent = sum(kind in RECURRENT_TYPES for kind in types)
    attending = sum(kind not in ROWWISE_TYPES | ALONE_TYPES for kind in types)
    return attending, recurrent


def _runs_compiled(model: nn.Module) -> bool:
    """Tells whether parts are compiled, so that their calls of attention are not counted."""
    return any(
        part._compiled_call_impl is not None or "forward" in vars(part) for part in model.modules()
    )


def causal_of(module: nn.Module, is_causal: bool | None, rows: int) -> bool:
    """Causality of the call, else of the module; refuses a config that contradicts the module."""
    of_module = bool(getattr(module, "is_causal", True))
    of_config = getattr(getattr(module, "config", None), "is_causal", None)
    if is_causal is None:
        if of_module and of_config is False:
            raise ValueError(
                "config.is_causal is False and the attention module says True: pass "
                "is_causal=False to the forward, too"
            )
        return of_module
    # Some models pass is_causal=False for a single row, as in decoding; a tiny shard has one too.
    if of_module and rows == 1 and of_config is not False:
        return True
    return bool(is_causal)


def window_of(module: nn.Module, kwargs: dict[str, Any], causal: bool) -> tuple[int, int]:
    """(left, right) of a layer; transformers' window of n includes the query: n - 1 other keys."""
    size = kwargs.get("sliding_window")
    if size is not None:
        return (size - 1, 0 if causal else size - 1)
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    if types and layer is not None:
        slides = types[layer] == "sliding_attention"
    else:
        slides = "sliding_window" not in kwargs and bool(getattr(config, "sliding_window", None))
    if slides:  # only masks would have the window, and none is made here
        raise NotImplementedError(
            f"layer {layer} has a sliding window that {type(module).__name__} does not pass to its "
            "attention function"
        )
    return (-1, -1)
