"""Heads of Hugging Face models that pool rows of the whole sequence, such as of reward models.

    the head reads                           it gets in all rows
    the last token, after `score`            `score`'s logits of the sequence's last token
    row 0 (poolers, classification heads)    the hidden states of the sequence's row 0
    the mean (`classifier_pooling="mean"`)   the mean over the ranks

So the head pools what it gets, and computes its own loss. All ranks have the same pooled values and
the same loss. They get a share of the gradient each, so that gradients are summed as for other
models.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_attn.core.layout import SequenceLayout
from ring_attn.integrations.transformers.untyped import Keywords, Model, Value
from ring_attn.models.pooling import share_of_gradient, weighted_sum

Hook = TypeVar("Hook", bound=Callable[..., object])

# Positional arguments and keywords of a part that pools.
Inputs: TypeAlias = tuple[tuple[Tensor, ...], dict[str, Tensor]]

# Returns the layout of a forward's rows, their group, and the keywords of the forward; None on one
# rank, and outside of a forward.
Where = Callable[[int], "tuple[SequenceLayout, dist.ProcessGroup, Keywords] | None"]

# Classes that pool row 0, if their code reads it.
POOLERS = re.compile(r"(Pooler|ClassificationHead|PredictionHeadTransform)$")
READS_ROW_0 = re.compile(r"\[:, 0(, :)?\]")

# Heads whose outputs are pooled.
CLASSIFIERS = re.compile(r"For(SequenceClassification|MultipleChoice|NextSentencePrediction)$")

# Outputs that are computed of pooled rows.
POOLED = ("loss", "logits", "pooler_output")


def install(model: nn.Module, where: Where) -> bool:
    """Add hooks to the parts of a model that pool rows; return whether it has any.

    `where` returns the place of the rows of the forward that runs.
    """
    poolers = [part for part in model.modules() if _reads_row_0(part)]
    for part in poolers:
        if not _is_hooked(part):
            part.register_forward_pre_hook(_marked(_with_first_row(where)), with_kwargs=True)
    if not CLASSIFIERS.search(type(model).__name__):
        return bool(poolers)
    score = getattr(model, "score", None)
    if isinstance(score, nn.Module):
        if not _is_hooked(score):
            score.register_forward_hook(_marked(_with_last_row(model, where)))
        return True
    if poolers:
        return True
    how = getattr(model.config, "classifier_pooling", None)
    if how is None and READS_ROW_0.search(_code_of(model)):
        how = "cls"
    base = getattr(model, "base_model", model)
    if how not in ("cls", "mean") or base is model:
        return False
    if not _is_hooked(base):
        base.register_forward_hook(_marked(_with_pooled_rows(str(how), where)))
    return True


def finish(output: Value, world_size: int) -> Value:
    """Return the output of a model that pools, whose pooled values have a share of the gradient."""
    for name in POOLED:
        value = output.get(name) if hasattr(output, "get") else None
        if isinstance(value, Tensor) and value.requires_grad:
            output[name] = share_of_gradient(value, world_size)
    return output


def _marked(hook: Hook) -> Hook:
    hook.pools = True  # type: ignore[attr-defined]
    return hook


def _is_hooked(part: nn.Module) -> bool:
    """Return whether a part has its hook; copies of models have those of the original."""
    hooks = [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
    return any(hasattr(hook, "pools") for hook in hooks)


def _code_of(part: nn.Module) -> str:
    """Return the source of a module's forward; empty if there is none."""
    try:
        return inspect.getsource(inspect.unwrap(type(part).forward))
    except (OSError, TypeError):
        return ""


def _reads_row_0(part: nn.Module) -> bool:
    return bool(POOLERS.search(type(part).__name__) and READS_ROW_0.search(_code_of(part)))


def _first_row(x: Tensor, layout: SequenceLayout, group: dist.ProcessGroup) -> Tensor:
    """Return the sequence's row 0, (batch, 1, dim), on all ranks."""
    positions = layout.position_ids(dist.get_rank(group), x.device)
    weights = (positions == 0).float().expand(x.size(0), -1)
    return weighted_sum(x, weights, group).unsqueeze(1)


def _with_first_row(where: Where) -> Callable[..., Inputs | None]:
    def hook(part: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Inputs | None:
        name = next(iter(kwargs), None)
        x = args[0] if args else kwargs[str(name)]
        place = where(x.size(1))
        if place is None:
            return None
        layout, group, _ = place
        first = _first_row(x, layout, group).expand(-1, max(1, x.size(1)), -1)
        if args:
            return (first, *args[1:]), kwargs
        return args, {**kwargs, str(name): first}

    return hook


def _with_last_row(model: Model, where: Where) -> Callable[..., Tensor | None]:
    def hook(part: nn.Module, args: object, logits: Tensor) -> Tensor | None:
        place = where(logits.size(1))
        if place is None:
            return None
        layout, group, given = place
        positions = layout.position_ids(dist.get_rank(group), logits.device)
        pad = model.config.get_text_config().pad_token_id
        ids = given.get("input_ids")
        last = torch.full((logits.size(0),), layout.seqlen - 1, device=logits.device)
        if pad is not None and ids is not None:
            # The last token that is not padding; transformers takes row 0 if there is none.
            is_token = ids != pad
            last = (positions * is_token).amax(1) if ids.size(1) else torch.zeros_like(last)
            dist.all_reduce(last, dist.ReduceOp.MAX, group=group)
        weights = (positions == last[:, None]).float()
        return weighted_sum(logits, weights, group).unsqueeze(1).expand_as(logits)

    return hook


def _with_pooled_rows(how: str, where: Where) -> Callable[..., Value]:
    def hook(base: nn.Module, args: object, output: Value) -> Value:
        x = output[0]
        place = where(x.size(1))
        if place is None:
            return None
        layout, group, given = place
        if how == "cls":
            rows = _first_row(x, layout, group)
        else:
            if given.get("attention_mask") is not None:
                raise NotImplementedError(
                    "the mean of rows together with attention_mask is not supported for sharded "
                    "sequences: call the model without a head, and ring_attn.pool"
                )
            weights = x.new_full(x.shape[:2], 1 / layout.seqlen, dtype=torch.float32)
            rows = weighted_sum(x, weights, group).unsqueeze(1)
        output["last_hidden_state"] = rows.expand_as(x)
        return output

    return hook
