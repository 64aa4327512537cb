"""Split the video of a transformer of diffusers over ranks, by wrappers around its blocks.

    hidden_states    first block    ...   last block    output module    sample
    of all rows  ->  own rows of the video, all text  ->  own rows  ->   of all rows

Everything before the first block and after the output module runs on whole tensors on every rank.
If the plan has no output module, or the time has a row for each position, so does everything after
the last block. Every rank would then count the gradients of its parameters, so that the gradient of
the sample counts on rank 0 only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeAlias, Unpack, cast

import torch.distributed as dist
from torch import Tensor, nn

from ring_attn.call import ExecutionOptions, check_execution
from ring_attn.core.joint import JointLayout
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.names import LAYOUTS
from ring_attn.core.strategy import Strategy
from ring_attn.integrations.diffusers.attention import BlockAttention, Role, joint_layout
from ring_attn.integrations.diffusers.config import (
    ContextParallelConfig,
    is_config,
    requested_by,
)
from ring_attn.models.gathered import counted_on_one_rank, gather_own_rows, gather_rows
from ring_attn.transport import groups
from ring_attn.transport.groups import Group
from ring_attn.transport.p2p import reporting
from ring_attn.values.checks import check_one_of, check_type
from ring_attn.values.compiling import left_out_of_graphs
from ring_attn.values.diffusers import PLANS, REFUSED, Plan, Rows

# The forward of a module.
Forward = Callable[..., object]

# An argument of a block: a tensor, or any class of tuples or lists of tensors.
Value: TypeAlias = Any


def parallelize(
    transformer: nn.Module,
    group: Group | ContextParallelConfig = None,
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

    torch.compile of the transformer leaves out its blocks. To compile a block, compile its forward
    before this call.

    Args:
        transformer: a transformer of diffusers, such as `pipe.transformer`. Its attention must be
            that of torch, which is the default of diffusers.
        group: as in `ring_attention`; or a `diffusers.ContextParallelConfig`, which names the ranks
            and the strategy.
        layout: how to split the video: "contiguous", "zigzag" or "striped".
        plan: how the class works; None takes it from `PLANS`.
        **options: options of `ring_attention`: strategy (by default "auto"), backend, same_bits,
            transport.

    Returns:
        A handle, whose `remove()` restores the transformer.

    Raises:
        ValueError: the transformer is split already, or lacks a module or an argument that its plan
            names; a field of the plan would be ignored; the degrees of a config do not fit the
            ranks, or a strategy is given beside it.
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
    if plan is None and name in REFUSED:
        raise NotImplementedError(f"{name} {REFUSED[name]}: it runs in one process only")
    if plan is None:
        raise NotImplementedError(
            f"{name} has no plan: it must be one of {', '.join(sorted(PLANS))}; pass plan=Plan(...)"
        )
    _check_options(transformer, plan)
    for module in transformer.modules():
        if hasattr(module, _MARK):
            raise ValueError(f"{name} is split already: call remove() of the handle first")
    process_group = _group_of(group, options)
    options.setdefault("strategy", "auto")
    attention = BlockAttention(plan, process_group, options)
    return Parallelized(transformer, plan, attention, process_group, layout)


def _group_of(group: Group | ContextParallelConfig, options: ExecutionOptions) -> dist.ProcessGroup:
    """Return the process group; set the strategy of the options if a config names it."""
    if not is_config(group):
        return groups.check_group(cast(Group, group))
    if "strategy" in options:
        raise ValueError(
            f"strategy must be left out beside a ContextParallelConfig, which names one, got "
            f"{options['strategy']!r}: pass a group or a mesh instead of the config"
        )
    requested = requested_by(group)
    options["strategy"] = requested.strategy
    return groups.check_group(requested.group)


def _check_options(transformer: nn.Module, plan: Plan) -> None:
    """Refuse options of a transformer's config that its plan does not serve."""
    name, config = type(transformer).__name__, getattr(transformer, "config", None)
    for option, value in plan.refused:
        if getattr(config, option, None) == value:
            raise NotImplementedError(
                f"{name} with {option}={value!r} is not supported: use another {option}"
            )
    for option, value in plan.required:
        given = getattr(config, option, value)
        if given != value:
            raise NotImplementedError(
                f"{name} with {option}={given!r} is not supported: it must be {value!r}"
            )


_WHY_LEFT_OUT = (
    "ring_attn splits the arguments of a block on the host, and gathers the output: no graph has "
    "these steps; compile the blocks, each by block.forward = torch.compile(block.forward), before "
    "parallelize"
)

# Name of an attribute of wrapped modules.
_MARK = "_ring_attn_forward"


class Parallelized:
    """A transformer whose video is split over ranks.

    Attributes:
        transformer: the transformer.
        plan: how its class works.
        group: the ranks.
        num_calls: number of calls of `ring_attention` so far.
        strategy: of these calls.
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
        self.group = group
        self._layout = layout
        self._restored: list[Callable[[], None]] = []
        lists = [_submodule(transformer, name) for name in plan.blocks]
        blocks = [block for blocks in lists if blocks is not None for block in blocks.children()]
        if not blocks:
            raise ValueError(
                f"{type(transformer).__name__} must have blocks in {' or '.join(plan.blocks)}, got "
                "none: pass another plan"
            )
        _check_plan(transformer, blocks, plan)
        output = None if plan.output is None else _required(transformer, plan.output)
        conditions = [
            (_required(transformer, name), elements) for name, elements in plan.conditions
        ]
        self._first, self._last = blocks[0], blocks[-1]
        # Whether the result of the last block needs the rows of all ranks, by its arguments.
        self._ends_whole = output is None
        for block in blocks:
            self._wrap(block, partial(self._in_block, _arguments(block)), is_traced=False)
            for name in plan.cross:
                self._wrap_child(block, name, self._in_cross_attention)
            for name in plan.to_video:
                self._wrap_child(block, name, self._in_attention_to_video)
        if output is None:
            self._wrap(transformer, self._counted_once)
        else:
            for module in output.values() if isinstance(output, nn.ModuleDict) else (output,):
                self._wrap(module, self._gathered, is_traced=False)
            for name in plan.copies:
                self._wrap_child(transformer, name, self._counted_once)
            if plan.times is not None:
                times_of = partial(self._with_own_times, _arguments(transformer), plan.times)
                self._wrap(transformer, times_of)
            for module, elements in conditions:
                self._wrap(module, partial(self._with_own_conditions, elements))

    @property
    def num_calls(self) -> int:
        return self._attention.num_calls

    @property
    def strategy(self) -> str | Strategy:
        return self._attention.execution["strategy"]

    def remove(self) -> None:
        """Restore the transformer to that of one process."""
        while self._restored:
            self._restored.pop()()

    def _wrap(self, module: nn.Module, around: Forward, *, is_traced: bool = True) -> None:
        """Replace a module's forward by `around(module, forward, *args, **kwargs)`.

        torch.compile includes it in graphs if `is_traced`.
        """
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

        module.forward = wrapped if is_traced else left_out_of_graphs(_WHY_LEFT_OUT)(wrapped)
        object.__setattr__(module, _MARK, True)
        self._restored.append(restore)

    def _wrap_child(self, block: nn.Module, name: str, around: Forward) -> None:
        """Wrap a submodule of a block, if the block has it."""
        module = _submodule(block, name)
        if module is not None:
            self._wrap(module, around)

    # -- around modules

    def _with_own_times(
        self,
        arguments: Sequence[str],
        name: str,
        module: nn.Module,
        forward: Forward,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Run the transformer with this rank's times, if each position has its own."""
        given: dict[str, Value] = dict(zip(arguments, args, strict=False)) | kwargs
        times = given.get(name)
        if not isinstance(times, Tensor) or times.ndim != 2:
            return forward(*args, **kwargs)
        return forward(**{**given, name: self._own_times(times)})

    @left_out_of_graphs(_WHY_LEFT_OUT)
    def _own_times(self, times: Tensor) -> Tensor:
        """Return this rank's rows of (batch, rows) times.

        If a rank had one row or none, the rows of all ranks are returned: one time would count for
        all positions.
        """
        layout = SequenceLayout.from_name(self._layout, times.size(1), self.group.size())
        has_rows = min(layout.shard_lens) > 1
        return layout.shard(times, self._attention.rank, 1) if has_rows else times

    def _with_own_conditions(
        self,
        elements: tuple[int, ...],
        module: nn.Module,
        forward: Forward,
        *args: object,
        **kwargs: object,
    ) -> tuple[object, ...]:
        """Run a module, and split the elements of its result that have a row for each position."""
        results = cast(tuple[Any, ...], forward(*args, **kwargs))
        return tuple(
            self._own_conditions(result) if index in elements else result
            for index, result in enumerate(results)
        )

    @left_out_of_graphs(_WHY_LEFT_OUT)
    def _own_conditions(self, conditions: Tensor) -> Tensor:
        """Return this rank's rows of (batch, rows, dim) conditions."""
        layout = SequenceLayout.from_name(self._layout, conditions.size(1), self.group.size())
        return layout.shard(conditions, self._attention.rank, 1)

    def _in_block(
        self,
        arguments: Sequence[str],
        block: nn.Module,
        forward: Forward,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Run a block, whose forward has these arguments, on this rank's rows."""
        # Not by `Signature.bind`, which torch.compile cannot trace.
        given: dict[str, Value] = dict(zip(arguments, args, strict=False)) | kwargs
        with reporting(self.group):  # an error of one rank becomes one of all ranks
            self._split_arguments(block, given)
            named = [given.pop(name) for name in arguments[: len(args)]]
            unnamed = args[len(arguments) :]  # a block may have *args
            return self._run_block(block, partial(forward, *named, *unnamed, **given))

    def _split_arguments(self, block: nn.Module, given: dict[str, Value]) -> None:
        """Replace the arguments of a block that have the rows of all ranks by this rank's rows."""
        attention = self._attention
        self._ends_whole = self.plan.output is None
        if block is self._first:
            hidden_states = given[self.plan.hidden]
            seqlen, world_size = hidden_states.size(self.plan.dim), self.group.size()
            attention.begin(SequenceLayout.from_name(self._layout, seqlen, world_size))
            given[self.plan.hidden] = attention.video.shard(
                hidden_states, attention.rank, self.plan.dim
            )
        text = given.get("encoder_hidden_states")
        if self.plan.text != "cross" and isinstance(text, Tensor):
            attention.with_text(text.size(1))
        for rows in self.plan.rows:
            if given.get(rows.argument) is not None:
                given[rows.argument] = self._own_rows(given[rows.argument], rows)

    def _run_block(self, block: nn.Module, forward: Forward) -> object:
        attention = self._attention
        before = attention.num_calls
        with attention:
            result = forward()
        if attention.num_calls == before:
            raise NotImplementedError(
                f"{type(block).__name__} did not call scaled_dot_product_attention, so that its "
                "attention would see this rank's rows only: use the attention backend 'native' of "
                "diffusers and processors that call it"
            )
        if block is self._last and self._ends_whole:
            return self._with_all_rows(result)
        return result

    def _with_all_rows(self, result: Value) -> Value:
        """Return the result of the last block with the rows of all ranks."""
        if isinstance(result, Tensor):
            return gather_rows(result, self._attention.video, self.group, self.plan.dim)
        return type(result)(
            self._with_all_rows(x) if index == self.plan.result else x
            for index, x in enumerate(result)
        )

    def _counted_once(
        self, module: nn.Module, forward: Forward, *args: object, **kwargs: object
    ) -> object:
        """Run a module equally on all ranks; the gradients of its results count on rank 0 only."""
        return _counted_on_one_rank(forward(*args, **kwargs), is_counted=self._attention.rank == 0)

    def _in_cross_attention(
        self, module: nn.Module, forward: Forward, *args: object, **kwargs: object
    ) -> object:
        """Run a module whose keys every rank holds."""
        with _as(self._attention, "cross"):
            return forward(*args, **kwargs)

    def _in_attention_to_video(
        self, module: nn.Module, forward: Forward, *args: object, **kwargs: object
    ) -> object:
        """Run a module whose queries every rank holds, and whose keys are the video."""
        with _as(self._attention, "to_video"):
            return forward(*args, **kwargs)

    def _gathered(
        self, module: nn.Module, forward: Forward, *args: object, **kwargs: object
    ) -> object:
        """Run the output module on this rank's rows, and return the rows of all ranks."""
        if self._ends_whole:
            return self._counted_once(module, forward, *args, **kwargs)
        rows = cast(Tensor, forward(*args, **kwargs))
        return gather_own_rows(rows, self._attention.video, self.group, self.plan.dim)

    def _own_rows(self, value: Value, rows: Rows) -> Value:
        """Return this rank's rows of an argument of a block."""
        if not isinstance(value, Tensor):
            inner = rows._replace(element=None)
            if isinstance(value, dict):
                return {key: self._own_rows(x, inner) for key, x in value.items()}
            return type(value)(
                [
                    self._own_rows(x, inner) if rows.element in (None, index) else x
                    for index, x in enumerate(value)
                ]
            )
        if rows.ndim not in (None, value.ndim):
            return value
        attention, num_rows = self._attention, value.size(rows.dim)
        video = attention.video
        is_own = num_rows == video.shard_len(attention.rank)
        if num_rows != video.seqlen and (num_rows == 1 or is_own):
            return value
        num_text = num_rows - video.seqlen
        most_text = attention.num_text if rows.of == "joint" else 0
        if not 0 <= num_text <= most_text:
            raise ValueError(
                f"{rows.argument} of a block must have {video.seqlen} rows in dim {rows.dim}"
                f"{f', or up to {most_text} more for the text' if most_text else ''}, got shape "
                f"{tuple(value.shape)}: this transformer does not fit its plan"
            )
        self._ends_whole |= rows.after
        layout: SequenceLayout | JointLayout = video
        if num_text:
            layout = joint_layout(num_text, video, first=self.plan.text == "first")
        return layout.shard(value, attention.rank, rows.dim)


def _counted_on_one_rank(value: Value, *, is_counted: bool) -> Value:
    """Return the results of a transformer, with `counted_on_one_rank` of each tensor."""
    if isinstance(value, Tensor):
        return counted_on_one_rank(value, is_counted=is_counted)
    if isinstance(value, (list, tuple)):
        return type(value)(_counted_on_one_rank(x, is_counted=is_counted) for x in value)
    if isinstance(value, dict):  # the outputs of diffusers are dicts
        counted = {key: _counted_on_one_rank(x, is_counted=is_counted) for key, x in value.items()}
        return type(value)(**counted)
    return value


@contextmanager
def _as(attention: BlockAttention, role: Role) -> Iterator[None]:
    """Set the role of a submodule while it runs."""
    before, attention.role = attention.role, role
    try:
        yield
    finally:
        attention.role = before


def _arguments(block: nn.Module) -> list[str]:
    """Return the names of the arguments of a block, in their order."""
    parameters = inspect.signature(block.forward).parameters.values()
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [parameter.name for parameter in parameters if parameter.kind not in several]


def _check_plan(transformer: nn.Module, blocks: Sequence[nn.Module], plan: Plan) -> None:
    """Refuse what a plan names and a transformer lacks, and fields that would change nothing.

    Raises:
        ValueError: A field of the plan would be ignored.
    """
    name = type(transformer).__name__
    if plan.output is None:
        for field in ("conditions", "copies", "times"):
            value = getattr(plan, field)
            if value:
                raise ValueError(
                    f"{field} of a plan requires an output, got {value!r} and output=None: name "
                    f"the module whose output is gathered, or leave {field} out"
                )
    of_blocks = {argument for block in blocks for argument in _arguments(block)}
    arguments = (
        ("rows", "the blocks of ", of_blocks, [rows.argument for rows in plan.rows]),
        ("hidden", "the first block of ", _arguments(blocks[0]), [plan.hidden]),
        ("times", "", _arguments(transformer), [plan.times] if plan.times else []),
    )
    for field, where, known, named in arguments:
        unknown = [argument for argument in named if argument not in known]
        if unknown:
            raise ValueError(
                f"the forward of {where}{name} must have the arguments that {field} of its plan "
                f"names, but has no {' or '.join(unknown)}: pass another plan"
            )
    modules = (
        ("cross", "a block of ", blocks, plan.cross),
        ("to_video", "a block of ", blocks, plan.to_video),
        ("copies", "", (transformer,), plan.copies),
    )
    for field, where, owners, children in modules:
        unknown = [child for child in children if not any(_has_place(x, child) for x in owners)]
        if unknown:
            raise ValueError(
                f"{where}{name} must have the modules that {field} of its plan names, but has no "
                f"{' or '.join(unknown)}: pass another plan"
            )


def _has_place(module: nn.Module, name: str) -> bool:
    """Return whether a module has a submodule of this name, or None where it may have one."""
    for part in name.split("."):
        if not hasattr(module, part):
            return False
        module = getattr(module, part)
        if module is None:
            return True
    return True


def _required(transformer: nn.Module, name: str) -> nn.Module:
    """Return a submodule that a plan names.

    Raises:
        ValueError: The transformer has no such module.
    """
    module = _submodule(transformer, name)
    if module is None:
        raise ValueError(
            f"{type(transformer).__name__} must have a module {name!r}, but has none: pass another "
            "plan"
        )
    return module


def _submodule(module: nn.Module, name: str) -> nn.Module | None:
    """Return a submodule by its name, which may have dots; None if there is none."""
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None
