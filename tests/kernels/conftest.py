"""Runs kernel tests on the GPU if there is one, else in Triton's interpreter."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

# The interpreter says that it is slow; and numpy warns in it, for branches not taken and for pairs
# that are masked later.
WARNINGS = (
    "backend='triton' on CPU:UserWarning",
    "overflow encountered:RuntimeWarning",
    "invalid value:RuntimeWarning",
    "All-NaN slice:RuntimeWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    for warning in WARNINGS:
        config.addinivalue_line("filterwarnings", f"ignore:{warning}")


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Saves a third of the time: patches triton.language once for each launch and module.

    The interpreter patches it again for every call of a helper, without need. A triton
    without these internals stays as it is.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not torch.cuda.is_available():
            _patch_once(monkeypatch)
        yield


def _patch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope")):
        return
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_once(fn: Callable[..., Any]) -> Any:
        if id(fn.__globals__) in patched:
            return interpreter._LangPatchScope()
        patched.add(id(fn.__globals__))
        return patch(fn)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
