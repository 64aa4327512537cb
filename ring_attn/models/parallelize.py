"""`parallelize`: apply styles to the modules of a model by name."""

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
    """Apply styles to modules like torch's `parallelize_module`, and refuse keys without a module.

    torch only warns if a key of the plan matches no module. Here all keys are checked before any
    module changes. Also, `ContextParallel` accepts a mesh with two axes in every version of torch.

    Args:
        module: the model, changed in place.
        device_mesh: mesh of the styles, with one axis, or with two axes for `ContextParallel`.
        plan: a style for `module`, or styles by the names of modules. In a name, "*" stands for any
            part between dots; "" is the name of `module` itself.
        src_data_rank: as for `parallelize_module`.

    Returns:
        `module`.

    Raises:
        ValueError: the plan has no key, or a key matches no module.
        TypeError: a value of the plan is not a style.

    Example:
        >>> model = nn.ModuleDict({"attn": nn.Identity()})
        >>> parallelize(model, None, {"attention": ContextParallel()})
        Traceback (most recent call last):
            ...
        ValueError: plan has keys that match no module: 'attention' (nearest: 'attn')
    """
    styles = {"": plan} if isinstance(plan, ParallelStyle) else dict(plan)
    if not styles:
        raise ValueError("plan has no key: pass a style, or styles by the names of modules")
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
    """Return the modules that match a key of a plan, as in torch: each part is a pattern."""
    patterns = key.split(".") if key else []
    modules = [module]
    for pattern in patterns:
        modules = [
            child
            for parent in modules
            for name, child in parent.named_children()
            if fnmatch(name, pattern)
        ]
    return modules


def _with_nearest(key: str, module: nn.Module) -> str:
    """Return a key, with the most similar names of modules if there are any, for an error."""
    names = [name for name, _ in module.named_modules() if name]
    nearest = difflib.get_close_matches(key, names, n=3, cutoff=0.4)
    if not nearest:
        return repr(key)
    return f"{key!r} (nearest: {', '.join(repr(name) for name in nearest)})"
