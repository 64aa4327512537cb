"""Weights and activations of the real module, counted on the meta device.

transformers builds the model without memory. One layer of each kind then runs forward and backward,
and every tensor with rows is counted while it lives (`LiveBytes`). Functions for which a GPU has
kernels are replaced by ones that keep what these kernels keep: attention by ring_attn's (q, k, v,
out, lse), recurrences by their inputs and results.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import zip_longest
from typing import Any, TypeAlias
from unittest import mock
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from ring_attn.planning.model.config import quiet
from ring_attn.planning.model.sizes import (
    Activations,
    HeadBytes,
    LayerBytes,
    LayerWeights,
    Weights,
)
from ring_attn.torch_private import Context, TorchDispatchMode, Untyped, tree_leaves
from ring_attn.values.outside import Json

# The rows of the run are a multiple of every chunk, and of a prime that divides the size of no
# weight. So tensors whose size is a multiple of this prime have rows; others are gradients of
# weights, tables or numbers.
PRIMES, CHUNKS = (67, 71, 73, 79, 83, 89), 64

# Weights of experts, by their names in transformers.
EXPERTS = re.compile(r"\bexperts\.")

# Rows of a chunk of fla's delta rules, whose kernel keeps a chunk x chunk matrix for each head.
CHUNK = 64

# What a config says about files and formats of weights, and about angles of RoPE that depend on the
# length: activations do not depend on them.
NOT_BUILT = ("quantization_config", "auto_map", "torch_dtype", "dtype", "rope_scaling")

# A model or a config of transformers, which mypy skips, and what a model returns.
Model: TypeAlias = Any


class NotTraceableError(Exception):
    """The real module cannot be built or run here; the text is the cause."""


@dataclass(frozen=True)
class Traced:
    """What a trace of a model found."""

    weights: Weights
    activations: Activations


def trace(values: Mapping[str, Json], dtype: torch.dtype = torch.bfloat16) -> Traced:
    """Count the weights and activations of a model by its config.

    Raises:
        NotTraceableError: transformers is not installed, does not know the model, or the module
            does not run on the meta device.
    """
    if find_spec("transformers") is None:
        raise NotTraceableError("transformers is not installed")
    with quiet("transformers"), ExitStack() as stack:
        try:
            stack.enter_context(_registered())
            model = _build(values, dtype)
            weights = weights_of(model)
            kinds, layers = _one_of_each_kind(model)
            stack.enter_context(_stand_ins(layers))
            activations = _run(model, layers, kinds)
        except NotTraceableError:
            raise
        except Exception as error:  # a module of transformers may fail in any way
            text = " ".join(str(error).split())[:120]
            raise NotTraceableError(f"{type(error).__name__}: {text}") from error
    return Traced(weights, activations)


# -- the model


@contextmanager
def _registered() -> Iterator[None]:
    """Register the attention of the trace in transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENTION, _attention)
    try:
        yield
    finally:
        AttentionInterface._global_mapping.pop(_ATTENTION)


def _build(values: Mapping[str, Json], dtype: torch.dtype) -> Model:
    """Return the model on the meta device; it has no memory."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    model_type = str(values.get("model_type", ""))
    if model_type not in CONFIG_MAPPING:
        raise NotTraceableError(f"transformers does not know the model_type {model_type!r}")
    built = {name: value for name, value in values.items() if name not in NOT_BUILT}
    config = CONFIG_MAPPING[model_type](**built)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=_ATTENTION
        )
    return model.train()


def _layers_of(model: Model) -> nn.ModuleList:
    """Return the list of decoder layers."""
    num = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num:
            return module
    raise NotTraceableError(f"{type(model).__name__} has no list of {num} layers")


def weights_of(model: Model) -> Weights:
    """Return the numbers of weights of a model of transformers."""
    layers = _layers_of(model)
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    is_tied = head is None or head.weight is embedding
    in_layers = sum(x.numel() for x in layers.parameters())
    total = sum(x.numel() for x in model.parameters())
    head_size = 0 if is_tied else head.weight.numel()
    return Weights(
        embedding=embedding.numel(),
        head=head_size,
        others=total - in_layers - embedding.numel() - head_size,
        layers=tuple(_weights_of_layer(layer) for layer in layers),
    )


def _weights_of_layer(layer: nn.Module) -> LayerWeights:
    sizes = {name: x.numel() for name, x in layer.named_parameters()}
    experts = sum(size for name, size in sizes.items() if EXPERTS.search(name))
    return LayerWeights(dense=sum(sizes.values()) - experts, experts=experts)


def _one_of_each_kind(model: Model) -> tuple[list[int], list[nn.Module]]:
    """Leave one layer of each kind in the model; return the kind of each layer, and those left.

    Layers of one kind have parts of the same classes, and weights of the same shapes.
    """
    layers = _layers_of(model)
    found: dict[tuple[object, ...], int] = {}
    kinds: list[int] = []
    left: list[nn.Module] = []
    config = model.config.get_text_config()
    types = vars(config).get("layer_types") or []
    types_left = []
    for layer, kind_in_config in zip_longest(layers, types):
        parts = [(name, type(part)) for name, part in layer.named_modules()]
        shapes = [(name, x.shape) for name, x in layer.named_parameters()]
        kind = found.setdefault((*parts, *shapes), len(found))
        if kind == len(left):
            left.append(layer)
            types_left.append(kind_in_config)
        kinds.append(kind)
    del layers[:]
    layers.extend(left)
    if types:
        config.layer_types = types_left  # a model's forward reads the type of each layer there
    return kinds, left


# -- functions whose kernels keep less than the operators of their references


_ATTENTION = "ring_attn_traced"


class Kept(torch.autograd.Function):
    """A kernel that keeps tensors for its backward, and returns gradients of its inputs."""

    @staticmethod
    def forward(ctx: Context, make: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> Tensor:
        out, *others = make(*inputs)
        ctx.save_for_backward(*inputs, *others, out)
        ctx.num_inputs = len(inputs)
        return out

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        return (None, *(torch.empty_like(x) for x in saved[: ctx.num_inputs]))


def _attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object
) -> tuple[Tensor, None]:
    """Stand for ring_attn's attention: (batch, heads, rows, dim) -> (batch, rows, heads, dim)."""

    def make(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        return out, q.new_empty(q.shape[:-1], dtype=torch.float32)

    rows = [x.transpose(1, 2) for x in (q, k, v)]
    return Kept.apply(make, *rows), None


def _convolution(x: Tensor, weight: Tensor, *_: object, **__: object) -> Tensor:
    return Kept.apply(lambda x, weight: (torch.empty_like(x),), x, weight)


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: object
) -> tuple[Tensor, None]:
    def make(query: Tensor, key: Tensor, value: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(value), value.new_empty(*value.shape[:3], CHUNK)

    return Kept.apply(make, query, key, value, g, beta), None


def _scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *_: object, **__: object
) -> Tensor:
    return Kept.apply(lambda x, *_: (torch.empty_like(x),), x, dt, A, B, C)


# Names of functions in the Python files of models -> what stands for them.
STAND_INS: dict[str, Callable[..., object]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _scan,
    "mamba_selective_scan": _scan,
}


@contextmanager
def _stand_ins(layers: list[nn.Module]) -> Iterator[None]:
    """Replace the functions of recurrences in the Python files of the layers' parts."""
    files = {type(part).forward.__globals__["__name__"] for x in layers for part in x.modules()}
    with ExitStack() as stack:
        for name in files:
            for function, stand_in in STAND_INS.items():
                target = f"{name}.{function}"
                if hasattr(sys.modules[name], function):
                    stack.enter_context(mock.patch(target, stand_in))
        yield


# -- counting


class LiveBytes(TorchDispatchMode):
    """Count the bytes of tensors with rows, for as long as their storages live.

    Attributes:
        live: bytes that live now.
        peak: the greatest `live` since it was last set.
        moved: bytes that operators other than products have read and written.
        flops: FLOPs of products.
    """

    def __init__(self, prime: int) -> None:
        super().__init__()
        self.live = self.peak = self.moved = self.flops = 0
        self._prime = prime
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Untyped, types: object, args: tuple[object, ...] = (), kwargs: Untyped = None
    ) -> Untyped:
        out = func(*args, **(kwargs or {}))
        made = [x for x in _tensors(out) if self.hold(x)]
        packet = func.overloadpacket
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        if made and packet.__name__ not in PRODUCTS:
            self.moved += sum(x.nbytes for x in (*_tensors((args, kwargs)), *made))
        return out

    def hold(self, x: Tensor) -> bool:
        """Count the storage of a tensor until it is freed; return whether it is new."""
        storage = x.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known or (nbytes // x.itemsize) % self._prime:
            return False
        self._known.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        finalize(storage, self._freed, key, nbytes)
        return True

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.remove(key)
        self.live -= nbytes


# Operators whose time is that of their FLOPs.
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "_grouped_mm"}


def _tensors(tree: object) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


class Watch:
    """Record the counts at the borders of layers, forward and backward.

    Border i is the input of layer i, the last one is the output of the last layer. In the backward
    the gradient of border i is ready when layer i has ended.

    Attributes:
        counted: the counts.
        num_layers: number of layers.
        before: live bytes at each border in the forward.
        peak_forward, moved_forward, flops_forward: peaks of live bytes, moved bytes and FLOPs from
            each border to the next one.
        peak_backward, moved_backward, flops_backward: the same in the backward; the last of each is
            from the last border to the end of the loss, in both directions.
    """

    def __init__(self, counted: LiveBytes, num_layers: int) -> None:
        self.counted, self.num_layers = counted, num_layers
        self.before = [0] * (num_layers + 1)
        self.peak_forward, self.moved_forward = [0] * num_layers, [0] * num_layers
        self.peak_backward, self.moved_backward = [0] * (num_layers + 1), [0] * (num_layers + 1)
        self.flops_forward, self.flops_backward = [0] * num_layers, [0] * (num_layers + 1)
        self._moved = self._flops = 0

    def entered(self, index: int, borders: Sequence[Tensor]) -> None:
        """Begin a layer's forward; the last index begins the head."""
        self.before[index] = self.counted.live
        self.next()
        with_gradients = [x for x in borders if x.requires_grad]
        if with_gradients:
            register_multi_grad_hook(with_gradients, lambda _: self._left_backward(index))

    def left(self, index: int) -> None:
        """End a layer's forward."""
        self.peak_forward[index] = self.counted.peak
        self.moved_forward[index] = self.moved
        self.flops_forward[index] = self.flops

    @property
    def moved(self) -> int:
        """Bytes that operators have moved since the last border."""
        return self.counted.moved - self._moved

    @property
    def flops(self) -> int:
        """FLOPs of products since the last border."""
        return self.counted.flops - self._flops

    def _left_backward(self, index: int) -> None:
        """End the backward of what follows a border."""
        self.peak_backward[index] = self.counted.peak
        self.moved_backward[index] = self.moved
        self.flops_backward[index] = self.flops
        self.next()

    def next(self) -> None:
        """Begin to count anew."""
        self.counted.peak = self.counted.live
        self._moved, self._flops = self.counted.moved, self.counted.flops


def _run(model: Model, layers: list[nn.Module], kinds: list[int]) -> Activations:
    """Run a forward and a backward, and return the bytes of each layer and of the head."""
    prime = prime_of(model)
    counted, rows = LiveBytes(prime), CHUNKS * prime
    watch = Watch(counted, len(layers))
    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            for handle in _hooks(layer, index, watch):
                stack.callback(handle.remove)
        for weight in model.parameters():
            handle = weight.register_post_accumulate_grad_hook(drop_gradient)
            stack.callback(handle.remove)
        ids = torch.zeros(1, rows, dtype=torch.int64, device="meta")
        with counted:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return _activations(watch, kinds, rows)


def _hooks(layer: nn.Module, index: int, watch: Watch) -> list[RemovableHandle]:
    """Add the hooks of a layer that record its borders; return their handles."""

    def before(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        watch.entered(index, [args[0] if args else kwargs["hidden_states"]])

    def after(_: nn.Module, __: object, out: Tensor | tuple[Tensor, ...]) -> None:
        watch.left(index)
        if index == watch.num_layers - 1:
            watch.entered(index + 1, [out if isinstance(out, Tensor) else out[0]])

    return [
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(after),
    ]


def drop_gradient(weight: Tensor) -> None:
    weight.grad = None


def prime_of(model: Model) -> int:
    """Return a prime that divides the size of no weight."""
    sizes = {weight.numel() for weight in model.parameters()}
    for prime in PRIMES:
        if all(size % prime for size in sizes):
            return prime
    raise NotTraceableError(f"each of {PRIMES} divides the size of a weight")


def _activations(watch: Watch, kinds: list[int], rows: int) -> Activations:
    """Return the recorded counts for each row."""
    before, num_layers = watch.before, watch.num_layers
    layers = tuple(
        LayerBytes(
            kept=(before[i + 1] - before[i]) / rows,
            forward=(watch.peak_forward[i] - before[i]) / rows,
            backward=(watch.peak_backward[i] - before[i]) / rows,
            moved_forward=watch.moved_forward[i] / rows,
            moved_backward=watch.moved_backward[i] / rows,
        )
        for i in range(num_layers)
    )
    head = HeadBytes(
        before=before[0] / rows,
        peak=(watch.peak_backward[num_layers] - before[num_layers]) / rows,
        moved=watch.moved_backward[num_layers] / rows,
    )
    return Activations(tuple(kinds), layers, head, "traced: the real module on the meta device")
