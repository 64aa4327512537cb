"""The process that runs cells: one request a line on stdin, one answer a line on stdout.

What cells print goes to stderr, which is the worker's log. SIGUSR1 prints the stacks of all
threads, even while C code holds the GIL.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from importlib import import_module
from typing import Any, TextIO

from dev.gpu.cells import Figures, Launched, NotHere
from dev.gpu.triton_key import use_key_of_variable

# Modules that a worker imports before it is ready, so that no cell's limit pays for them.
PRELOAD = "RING_ATTN_GPU_PRELOAD"

# Exit status of a worker whose CUDA context is dead.
POISONED = 77

# Characters of an error's text.
MAX_CHARACTERS = 4000


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    for name in os.environ.get(PRELOAD, "").split():
        import_module(name)
    use_key_of_variable()
    _write(answers, {"ready": os.getpid()})
    for line in sys.stdin:
        answer = answer_to(json.loads(line))
        _write(answers, answer)
        if answer["state"] == "poisoned":
            os._exit(POISONED)  # handlers of CUDA's libraries could hang at the exit


def answer_to(request: Figures) -> Figures:
    """Run the function of a request; return its state, seconds, and figures or error."""
    start = time.monotonic()
    try:
        module, _, function = request["target"].partition(":")
        figures = getattr(import_module(module), function)(*request["arguments"])
        state = "launched" if isinstance(figures, Launched) else "ok"
        answer = {"state": state, "figures": figures or {}}
    except NotHere as error:
        answer = {"state": "not here", "error": str(error)}
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        answer = {"state": "failed", "error": text[:MAX_CHARACTERS]}
    dead = error_of_context()
    if dead is not None:
        answer |= {"state": "poisoned", "context": dead}
    else:
        release_memory()
    return answer | {"s": round(time.monotonic() - start, 2)}


def error_of_context() -> str | None:
    """Return CUDA's error if the context is dead, which every later call would raise, too."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:MAX_CHARACTERS]
    return None


def release_memory() -> None:
    """Give freed memory back to the device, which other workers use, too."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _write(answers: TextIO, answer: Figures) -> None:
    answers.write(json.dumps(answer, default=str) + "\n")


if __name__ == "__main__":
    main()
