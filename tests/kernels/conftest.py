"""Kernel tests run on the GPU where there is one, and else in Triton's interpreter."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Takes a third off the time: triton.language is patched once a launch and module.

    The interpreter does it again for every call of a helper, where all is patched already. A triton
    that is made otherwise is left as it is.
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
