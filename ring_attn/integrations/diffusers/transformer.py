"""Split the video of a transformer of diffusers over ranks, by wrappers around its blocks.

    hidden_states    first block    ...   last block    output module    sample
    of all rows  ->  own rows of the video, all text  ->  own rows  ->   of all rows

Everything before the first block and after the output module runs on whole tensors on every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeAlias, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_attn.call import ExecutionOptions, check_execution
from ring_attn.core.joint import JointLayout
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.names import LAYOUTS
from ring_attn.integrations.diffusers.attention import BlockAttention, joint_layout
from ring_attn.integrations.diffusers.plans import PLANS, Plan, Rows
from ring_attn.models.batch import unshard
from ring_attn.torch_private import Context
from ring_attn.transport import groups
from ring_attn.transport.groups import Group
from ring_attn.transport.p2p import reporting
from ring_attn.values.checks import check_one_of, check_type

# The forward of a module.
Forward = Callable[..., object]

# An argument of a block: a tensor, or any class of tuples or lists of tensors.
Value: TypeAlias = Any


def parallelize(
    transformer: nn.Module,
    group: Group = None,
    *,
    layout: str = "contiguous",
    plan: Plan | None = None,
    **options: Unpack[ExecutionOptions],
) -> Parallelized:
    """Split the video or image of a transformer of diffusers over the ranks of a group.

    Every rank then calls the transformer, or a pipeline with it, with the same whole arguments as
    one process, and gets the same whole output. Inside of the blocks, a rank has its own rows of
    the video and all rows of the text. Every length and every number of ranks works.

    Gradients of parameters are shares: each rank differentiates the same loss of the whole output,
    and their sum over the ranks is the gradient (`sync_gradients(transformer, group)`).

    Args:
        transformer: a transformer of diffusers, such as `pipe.transformer`. Its attention must be
            that of torch, which is the default of diffusers.
        group: as in `ring_attention`.
        layout: how to split the video: "contiguous", "zigzag" or "striped".
        plan: how the class works; None takes it from `PLANS`.
        **options: options of `ring_attention`: strategy (by default "auto"), backend, same_bits,
            transport.

    Returns:
        A handle, whose `remove()` restores the transformer.

    Raises:
        ValueError: the transformer is split already, or lacks a module of its plan.
        TypeError: `transformer` is not a module.
        NotImplementedError: there is no plan for the class.
        RuntimeError: there is no process group.

    Example, under torchrun (the page on diffusion has one that runs)::

        pipe = diffusers.WanPipeline.from_pretrained(path)
        handle = ring_attn.integrations.diffusers.parallelize(pipe.transformer)
        frames = pipe(prompt, generator=torch.Generator().manual_seed(0)).frames
    """
    check_type("transformer", transformer, nn.Module, "a transformer of diffusers")
    check_one_of("layout", layout, LAYOUTS)
    check_execution(options)
    name = type(transformer).__name__
    plan = plan or PLANS.get(name)
    if plan is None:
        raise NotImplementedError(
            f"{name} has no plan: it must be one of {', '.join(sorted(PLANS))}; pass plan=Plan(...)"
        )
    for option, value in plan.refused:
        if getattr(getattr(transformer, "config", None), option, None) == value:
            raise NotImplementedError(
                f"{name} with {option}={value!r} is not supported: use another {option}"
            )
    for module in transformer.modules():
        if hasattr(module, _MARK):
            raise ValueError(f"{name} is split already: call remove() of the handle first")
    process_group = groups.check_group(group)
    options.setdefault("strategy", "auto")
    attention = BlockAttention(plan, process_group, options)
    return Parallelized(transformer, plan, attention, process_group, layout)


# Name of an attribute of wrapped modules.
_MARK = "_ring_attn_forward"


class Parallelized:
    """A transformer whose video is split over ranks.

    Attributes:
        transformer: the transformer.
        plan: how its class works.
        num_calls: number of calls of `ring_attention` so far.
    """

    def __init__(
        self,
        transformer: nn.Module,
        plan: Plan,
        attention: BlockAttention,
        group: dist.ProcessGroup,
        layout: str,
    ) -> None:
        self.transformer = transformer
        self.plan = plan
        self._attention = attention
        self._group = group
        self._layout = layout
        self._restored: list[Callable[[], None]] = []
        blocks = [block for name in plan.blocks for block in _blocks_of(transformer, name)]
        if not blocks:
            raise ValueError(
                f"{type(transformer).__name__} must have blocks in {' or '.join(plan.blocks)}, got "
                "none: pass another plan"
            )
        output = _submodule(transformer, plan.output)
        self._first = blocks[0]
        known = {argument for block in blocks for argument in _arguments(block)}
        unknown = [rows.argument for rows in plan.rows if rows.argument not in known]
        if unknown:
            raise ValueError(
                f"the blocks of {type(transformer).__name__} must have the arguments that its plan "
                f"names in rows, but have no {' or '.join(unknown)}: pass another plan"
            )
        for block in blocks:
            self._wrap(block, self._in_block)
            for name in plan.cross:
                if isinstance(getattr(block, name, None), nn.Module):
                    self._wrap(getattr(block, name), self._in_cross_attention)
        for module in output.values() if isinstance(output, nn.ModuleDict) else (output,):
            self._wrap(module, self._gathered)

    @property
    def num_calls(self) -> int:
        return self._attention.num_calls

    def remove(self) -> None:
        """Restore the transformer to that of one process."""
        while self._restored:
            self._restored.pop()()

    def _wrap(self, module: nn.Module, around: Forward) -> None:
        """Replace a module's forward by `around(module, forward, *args, **kwargs)`."""
        forward: Forward = module.forward
        is_own = "forward" in vars(module)  # such as a wrapper of another package

        @wraps(forward)
        def wrapped(*args: object, **kwargs: object) -> object:
            return around(module, forward, *args, **kwargs)

        def restore() -> None:
            if is_own:
                module.forward = forward
            else:
                del module.forward
            delattr(module, _MARK)

        module.forward = wrapped
        object.__setattr__(module, _MARK, True)
        self._restored.append(restore)

    # -- around modules

    def _in_block(
        self, block: nn.Module, forward: Forward, *args: object, **kwargs: object
    ) -> object:
        """Run a block on this rank's rows."""
        with reporting(self._group):  # an error of one rank becomes one of all ranks
            return self._run_block(block, forward, args, kwargs)

    def _run_block(
        self,
        block: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        bound = inspect.signature(forward).bind(*args, **kwargs)
        given = bound.arguments
        attention = self._attention
        if block is self._first:
            hidden_states = given[self.plan.hidden]
            seqlen, world_size = hidden_states.size(1), self._group.size()
            video = SequenceLayout.from_name(self._layout, seqlen, world_size)
            has_text = self.plan.text != "cross"
            attention.begin(video, given["encoder_hidden_states"].size(1) if has_text else 0)
            given[self.plan.hidden] = attention.video.shard(hidden_states, attention.rank)
        for rows in self.plan.rows:
            if given.get(rows.argument) is not None:
                given[rows.argument] = self._own_rows(given[rows.argument], rows)
        before = attention.num_calls
        with attention:
            result = forward(*bound.args, **bound.kwargs)
        if attention.num_calls == before:
            raise NotImplementedError(
                f"{type(block).__name__} did not call scaled_dot_product_attention, so that its "
                "attention would see this rank's rows only: use the attention backend 'native' of "
                "diffusers and processors that call it"
            )
        return result

    def _in_cross_attention(
        self, module: nn.Module, forward: Forward, *args: object, **kwargs: object
    ) -> object:
        """Run a module whose keys every rank holds."""
        with _set(self._attention, is_cross=True):
            return forward(*args, **kwargs)

    def _gathered(
        self, module: nn.Module, forward: Forward, *args: object, **kwargs: object
    ) -> Tensor:
        """Run the output module on this rank's rows, and return the rows of all ranks."""
        return _Gather.apply(forward(*args, **kwargs), self._attention.video, self._group)

    def _own_rows(self, value: Value, rows: Rows) -> Value:
        """Return this rank's rows of an argument of a block."""
        if isinstance(value, Tensor):
            video = self._attention.video
            layout: SequenceLayout | JointLayout = video
            if rows.of == "joint":
                text = self._attention.num_text
                layout = joint_layout(text, video, first=self.plan.text == "first")
            return layout.shard(value, self._attention.rank, rows.dim)
        elements = [
            self._own_rows(x, rows) if rows.element in (None, index) else x
            for index, x in enumerate(value)
        ]
        return type(value)(elements)


class _Gather(torch.autograd.Function):
    """Gather the rows of all ranks; the gradient of own rows is that of the whole output."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, layout: SequenceLayout, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.layout = layout
        ctx.rank = dist.get_rank(group)
        return unshard(x, layout, group=group)

    @staticmethod
    def backward(ctx: Context, dout: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.layout.shard(dout, ctx.rank), None, None


@contextmanager
def _set(attention: BlockAttention, *, is_cross: bool) -> Iterator[None]:
    """Set whether cross-attention runs, within a block."""
    before, attention.is_cross = attention.is_cross, is_cross
    try:
        yield
    finally:
        attention.is_cross = before


def _arguments(block: nn.Module) -> list[str]:
    """Return the names of the arguments of a block."""
    return list(inspect.signature(block.forward).parameters)


def _blocks_of(transformer: nn.Module, name: str) -> list[nn.Module]:
    """Return the blocks of a list by its name; none if the transformer lacks it."""
    blocks = getattr(transformer, name, None)
    return [] if blocks is None else list(blocks)


def _submodule(transformer: nn.Module, name: str) -> nn.Module:
    module = getattr(transformer, name, None)
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"{type(transformer).__name__} must have a module {name!r}, got {module!r}: pass "
            "another plan"
        )
    return module
