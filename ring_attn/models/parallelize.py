"""`parallelize`: applies styles to the modules of a model by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatch

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from ring_attn.models.style import ContextParallel


def parallelize(
    module: nn.Module,
    device_mesh: DeviceMesh,
    plan: ParallelStyle | Mapping[str, ParallelStyle],
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """torch's `parallelize_module`, but raises if a key of the plan matches no module.

    torch only warns. Here all keys are checked before any module changes, and `ContextParallel`
    accepts a mesh with two axes in every version of torch. Returns `module`.

    Args:
        module: the model, changed in place.
        device_mesh: mesh of the styles, with one axis, or two for `ContextParallel`.
        plan: a style for `module`, or styles by name; "*" stands for any part of a name between
            dots, "" for `module` itself.
        src_data_rank: as for `parallelize_module`.

    Example:
        >>> model = nn.ModuleDict({"attn": nn.Identity()})
        >>> parallelize(model, None, {"attention": ContextParallel()})
        Traceback (most recent call last):
            ...
        ValueError: plan has keys that match no module: 'attention' (nearest: 'attn')
    """
    styles = {"": plan} if isinstance(plan, ParallelStyle) else dict(plan)
    if not styles:
        raise ValueError("plan has no key: give a style, or styles by the names of modules")
    for key, style in styles.items():
        if not isinstance(style, ParallelStyle):
            raise TypeError(f"plan[{key!r}] must be a ParallelStyle, got {type(style).__name__}")
    targets = {key: _matches(module, key) for key in styles}
    unmatched = [_with_nearest(key, module) for key, modules in targets.items() if not modules]
    if unmatched:
        raise ValueError(f"plan has keys that match no module: {', '.join(unmatched)}")
    for key, style in styles.items():
        for target in targets[key]:
            if isinstance(style, ContextParallel):  # some versions refuse a mesh with two axes
                style._apply(target, device_mesh)
            else:
                parallelize_module(target, device_mesh, style, src_data_rank=src_data_rank)
    return module


def _matches(module: nn.Module, key: str) -> list[nn.Module]:
    """The modules that match a plan's key as in torch: each part of the key is a pattern."""
    modules = [module]
    for token in key.split(".") if key else ():
        children = (child for parent in modules for child in parent.named_children())
        modules = [child for name, child in children if fnmatch(name, token)]
    return modules


def _with_nearest(key: str, module: nn.Module) -> str:
    names = [name for name, _ in module.named_modules() if name]
    nearest = difflib.get_close_matches(key, names, n=3, cutoff=0.4)
    return f"{key!r} (nearest: {', '.join(map(repr, nearest))})" if nearest else repr(key)
