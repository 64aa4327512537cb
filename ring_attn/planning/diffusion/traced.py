"""Weights, activations and FLOPs of the real transformer, counted on the meta device.

diffusers builds the transformer without memory. Two blocks of each kind then run, forward and
backward in training, for three numbers of rows: what a rank takes is linear in its rows of video
and of text. The second one counts, because the backward of the embeddings may begin during that
of the first one. Attention is replaced by a function that keeps what ring_attn's keeps, and that
notes its calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ring_attn.planning.diffusion.config import TransformerConfig
from ring_attn.planning.diffusion.inputs import INPUTS, Maker, Shape
from ring_attn.planning.diffusion.sizes import Block, Call, Outside, Rowwise, SizedTransformer
from ring_attn.planning.model.config import quiet
from ring_attn.planning.model.sizes import LayerWeights, Weights
from ring_attn.planning.model.traced import (
    Kept,
    LiveBytes,
    NotTraceableError,
    Watch,
    drop_gradient,
    prime_of,
)

SOURCE = "traced: the real module on the meta device"

# A transformer of diffusers, which mypy skips.
Model: TypeAlias = Any


def trace(
    config: TransformerConfig, dtype: torch.dtype = torch.bfloat16, *, training: bool = True
) -> SizedTransformer:
    """Count what a transformer takes, by its config.

    Raises:
        NotTraceableError: diffusers is not installed, the inputs of the class are not known, or the
            module does not run on the meta device.
    """
    _check_installed()
    if config.class_name not in INPUTS:
        raise NotTraceableError(f"the inputs of {config.class_name} are not known")
    with _reporting():
        return _traced(config, dtype, training)


def count_weights(config: TransformerConfig) -> Weights:
    """Count the weights of a transformer, by its config.

    Raises:
        NotTraceableError: diffusers is not installed, or cannot build the transformer.
    """
    _check_installed()
    with _reporting():
        model = _build(config, torch.bfloat16)
        return _weights_of(model, _lists_of_blocks(model, config))


def _check_installed() -> None:
    if find_spec("diffusers") is None:
        raise NotTraceableError("diffusers is not installed")


@contextmanager
def _reporting() -> Iterator[None]:
    """Raise the errors of diffusers' modules, which may fail in any way, as NotTraceableError."""
    try:
        yield
    except NotTraceableError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:80]
        raise NotTraceableError(f"{type(error).__name__}: {text}") from error


def _traced(config: TransformerConfig, dtype: torch.dtype, training: bool) -> SizedTransformer:
    model = _build(config, dtype)
    lists = _lists_of_blocks(model, config)
    weights = _weights_of(model, lists)
    kinds, left, counted = _two_of_each_kind(lists)
    base, more_video, more_text = _shapes(prime_of(model))
    runs = [
        _Run(config, model, left, shape, dtype, training).measured()
        for shape in (base, more_video, more_text)
    ]
    blocks = tuple(
        Block(
            **{
                name: _rowwise([run.blocks[index][name] for run in runs], base)
                for name in runs[0].blocks[index]
            },
            calls=runs[0].calls[index],
        )
        for index in counted
    )
    outside = Outside(
        **{name: _rowwise([run.outside[name] for run in runs], base) for name in runs[0].outside},
        ends_whole=config.plan.output is None,
    )
    return SizedTransformer(config.name, config.class_name, weights, kinds, blocks, outside, SOURCE)


def _shapes(prime: int) -> tuple[Shape, Shape, Shape]:
    """Return shapes whose rows of video, and rows of text, are multiples of a prime.

    The second has twice the video of the first, the third twice its text.
    """
    base = Shape(frames=4, height=8, width=prime, text=4 * prime)
    return base, base._replace(frames=2 * base.frames), base._replace(text=2 * base.text)


def _rowwise(counted: Sequence[float], base: Shape) -> Rowwise:
    """Return the linear function through the counts for the shapes of `_shapes`."""
    first, more_video, more_text = counted
    video = (more_video - first) / base.video
    text = (more_text - first) / base.text
    return Rowwise(video, text, first - video * base.video - text * base.text)


# -- the model


def _build(config: TransformerConfig, dtype: torch.dtype) -> Model:
    """Return the transformer on the meta device; it has no memory."""
    from diffusers.models import transformers

    found = getattr(transformers, config.class_name, None)
    if found is None:
        raise NotTraceableError(f"diffusers does not have the class {config.class_name}")
    with quiet("diffusers"), torch.device("meta"):
        model = found.from_config(dict(config.values))
        return model.to(device="meta", dtype=dtype).train()


def _lists_of_blocks(model: Model, config: TransformerConfig) -> list[nn.ModuleList]:
    """Return the lists of blocks that the transformer has, in the order in which they run."""
    lists = [reduce(getattr, name.split("."), model) for name in config.plan.blocks]
    return [blocks for blocks in lists if len(blocks)]


def _weights_of(model: Model, lists: list[nn.ModuleList]) -> Weights:
    """Return the numbers of weights of the blocks, and of everything else as `others`."""
    sizes = [_num_weights(block) for blocks in lists for block in blocks]
    return Weights(
        embedding=0,
        head=0,
        others=_num_weights(model) - sum(sizes),
        layers=tuple(LayerWeights(size) for size in sizes),
    )


def _num_weights(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _two_of_each_kind(
    lists: list[nn.ModuleList],
) -> tuple[tuple[int, ...], list[nn.Module], list[int]]:
    """Leave two blocks of each kind in the lists, or one if there are no more.

    Blocks of one kind are in one list, have parts of the same classes, and weights of the same
    shapes.

    Returns:
        The kind of each block, the blocks that are left, and the index among them of the last one
        of each kind.
    """
    found: dict[object, int] = {}
    kinds: list[int] = []
    left: list[nn.Module] = []
    left_of_kind: list[list[int]] = []
    for blocks in lists:
        of_list: list[nn.Module] = []
        for block in list(blocks):
            parts = tuple((name, type(part)) for name, part in block.named_modules())
            shapes = tuple((name, x.shape) for name, x in block.named_parameters())
            kind = found.setdefault((id(blocks), parts, shapes), len(found))
            if kind == len(left_of_kind):
                left_of_kind.append([])
            if len(left_of_kind[kind]) < 2:
                left_of_kind[kind].append(len(left) + len(of_list))
                of_list.append(block)
            kinds.append(kind)
        del blocks[:]
        blocks.extend(of_list)
        left += of_list
    return tuple(kinds), left, [indices[-1] for indices in left_of_kind]


# -- attention


class _NotedAttention(TorchFunctionMode):
    """Replace scaled_dot_product_attention by a function that keeps q, k, v, out and lse.

    Every element of a mask counts as True.

    Attributes:
        shape: the rows of the sample.
        calls: the calls since the list was last replaced.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.calls: list[Call] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in (torch.nonzero, Tensor.nonzero):
            # A mask's values are unknown here: all text counts as real, none as padding.
            mask: Tensor = args[0]
            return mask.new_empty(mask.numel(), mask.ndim, dtype=torch.int64)
        return func(*args, **kwargs)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Keep (batch, rows, heads, dim) as ring_attn does; return (batch, heads, rows, dim)."""
        self.calls.append(self._call(query, key, value))
        out: Tensor = Kept.apply(_attend, *(x.transpose(1, 2) for x in (query, key, value)))
        return out.transpose(1, 2)

    def _call(self, query: Tensor, key: Tensor, value: Tensor) -> Call:
        video, text = self.shape.video, self.shape.text
        keys = key.size(2)
        is_split = keys in (video, video + text) and query.size(2) == keys
        has_text = keys in (text, video + text)
        return Call(
            nheads=query.size(1),
            headdim=query.size(3),
            headdim_v=value.size(3),
            has_text=has_text,
            is_split=is_split,
            other_keys=0 if is_split or has_text else keys,
        )


def _attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


class _AutocastOnMeta(torch.autocast):
    """torch.autocast, which refuses the meta device: there it does nothing."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "meta":
            super().__init__("cpu", enabled=False)
        else:
            super().__init__(device_type, *args, **kwargs)


@contextmanager
def _autocast_on_meta() -> Iterator[None]:
    before = torch.autocast
    torch.autocast = _AutocastOnMeta  # type: ignore[misc]
    try:
        yield
    finally:
        torch.autocast = before  # type: ignore[misc]


# -- a run


@dataclass
class _Measured:
    """Counts of a run: of each block and outside of them, by the names of `Block` and `Outside`."""

    blocks: list[dict[str, float]]
    outside: dict[str, float]
    calls: list[tuple[Call, ...]]


class _Run:
    """A run of a transformer with one block of each kind, for a number of rows."""

    def __init__(
        self,
        config: TransformerConfig,
        model: Model,
        blocks: list[nn.Module],
        shape: Shape,
        dtype: torch.dtype,
        training: bool,
    ) -> None:
        self._config, self._model, self._blocks = config, model, blocks
        self._shape, self._dtype, self._training = shape, dtype, training
        self._counted = LiveBytes(shape.width)
        self._watch = Watch(self._counted, len(blocks))
        self._attention = _NotedAttention(shape)
        self._inputs = [0] * len(blocks)  # bytes
        self._unchanged: set[int] = set()  # ids of the inputs of the block that runs
        self._calls: list[tuple[Call, ...]] = [()] * len(blocks)
        self._before = {"peak": 0, "moved": 0, "flops": 0}

    def measured(self) -> _Measured:
        """Run forward, and backward in training, and return the counts."""
        watch, counted = self._watch, self._counted
        inputs = INPUTS[self._config.class_name](
            self._model.config, Maker(self._shape, self._dtype)
        )
        with ExitStack() as stack:
            self._add_hooks(stack)
            stack.enter_context(torch.set_grad_enabled(self._training))
            stack.enter_context(_autocast_on_meta())
            stack.enter_context(self._attention)
            stack.enter_context(counted)
            sample = self._model(**inputs, return_dict=False)[0]
            if self._training:
                target = torch.empty_like(sample)
                loss = functional.mse_loss(sample.float(), target.float())
                del sample, target
                loss.backward()
        if not self._training:
            last = len(self._blocks)
            watch.peak_backward[last] = counted.peak
            watch.moved_backward[last], watch.flops_backward[last] = watch.moved, watch.flops
        else:  # what follows the backward of the first block
            self._before["moved"] += watch.moved
            self._before["flops"] += watch.flops
        return _Measured(
            [self._of_block(index) for index in range(len(self._blocks))],
            self._of_outside(),
            self._calls,
        )

    def _add_hooks(self, stack: ExitStack) -> None:
        for index, block in enumerate(self._blocks):
            for handle in self._hooks(block, index):
                stack.callback(handle.remove)
        for weight in self._model.parameters():
            handle = weight.register_post_accumulate_grad_hook(drop_gradient)
            stack.callback(handle.remove)

    def _hooks(self, block: nn.Module, index: int) -> list[Any]:
        watch, plan = self._watch, self._config.plan
        names = [plan.hidden]
        if self._config.has_joint_text:
            names.append("encoder_hidden_states")

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments = inspect.signature(module.forward).parameters
            given = dict(zip(arguments, args, strict=False)) | kwargs
            inputs = [x for x in (given.get(name) for name in names) if isinstance(x, Tensor)]
            if index == 0:
                self._before = {
                    "peak": self._counted.peak,
                    "moved": watch.moved,
                    "flops": watch.flops,
                }
            watch.entered(index, inputs)
            self._inputs[index] = sum(x.nbytes for x in inputs)
            self._unchanged = {id(x) for x in inputs}
            self._attention.calls = []

        def after(_: nn.Module, __: object, out: Tensor | tuple[Tensor, ...]) -> None:
            watch.left(index)
            self._calls[index] = tuple(self._attention.calls)
            if index == watch.num_layers - 1:
                outputs = [out] if isinstance(out, Tensor) else list(out)
                # The gradient of an input that is returned is ready only after that of the block.
                made = [x for x in outputs if id(x) not in self._unchanged]
                watch.entered(index + 1, [x for x in made if isinstance(x, Tensor)])

        return [
            block.register_forward_pre_hook(before, with_kwargs=True),
            block.register_forward_hook(after),
        ]

    def _of_block(self, index: int) -> dict[str, float]:
        watch = self._watch
        before = watch.before[index]
        return {
            "inputs": self._inputs[index],
            "kept": watch.before[index + 1] - before,
            "forward": watch.peak_forward[index] - before,
            "backward": watch.peak_backward[index] - before,
            "moved_forward": watch.moved_forward[index],
            "moved_backward": watch.moved_backward[index],
            "flops_forward": watch.flops_forward[index],
            "flops_backward": watch.flops_backward[index],
        }

    def _of_outside(self) -> dict[str, float]:
        watch, last = self._watch, len(self._blocks)
        return {
            "kept": watch.before[0] - self._inputs[0],
            "before": self._before["peak"],
            "after": watch.peak_backward[last] - watch.before[last],
            "moved_before": self._before["moved"],
            "moved_after": watch.moved_backward[last],
            "flops_before": self._before["flops"],
            "flops_after": watch.flops_backward[last],
        }
