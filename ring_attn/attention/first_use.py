"""Backends prove themselves: the first use of kernels on a GPU runs a small case on that GPU.

A ring of three ranks in this process computes forward and backward, or decodes, and the results
must be within the bounds of `core.oracle` around attention in float64, on the same GPU. A backend
whose kernels do not compile or are wrong is refused with the error or the figures, and "auto" takes
the next one. All ranks prove before they connect, and compare their backends when they do.

A kernel that reads or writes memory which it does not own ends CUDA's context, after which every
call of CUDA in the process fails. Then no other backend is tried, and CUDA's error is raised. A
kernel that hangs cannot be ended by its own process: its use is logged after SLOW_S.

Proofs that passed are remembered across processes (`proofs`). With RING_ATTN_FIRST_USE=always none
are, and each process runs a case once for each model of GPU; RING_ATTN_FIRST_USE=off runs no cases.
A case takes at most two seconds, beside compiling what its call compiles as well, for nothing is
tuned: by its operators one second is estimated for an A2, 1 to 3 s were measured on a CPU's core.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attn.attention import drivers
from ring_attn.backends import FORWARD, BackendChoice, Purpose, choose_backend, get_backend, proofs
from ring_attn.backends.base import cached_by_gpu, gpu_model
from ring_attn.checks.decoding import check_sequences
from ring_attn.core.dtypes import dtype_name
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.oracle import Inputs, Verdict, check, dense_gradients, plain_gradients
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.strategies import tree_decode
from ring_attn.strategies.registry import make_call
from ring_attn.transport import capture
from ring_attn.transport.local import LocalTransport, run_local
from ring_attn.values.checks import check_one_of

logger = logging.getLogger("ring_attn")

VARIABLE = "RING_ATTN_FIRST_USE"
Setting = Literal["on", "always", "off"]

RANKS = 3  # a ring with a first, a middle and a last step
ROWS, RAGGED_ROWS = 128, 93  # of a rank
CACHE_ROWS = 300  # of a rank: more than one part
PAGE_ROWS = 16
LEFT = 100  # keys before a query in a window
SOFTCAP = 20.0

# Most kv heads, and query heads of each. From 4 kv heads on, sm_90 has another backward.
KV_HEADS, GROUP = 4, 8

# Seconds after which a case is logged that has not ended. It may compile for a minute or two.
SLOW_S = 300.0

# Characters of an error's text: a compiler's has pages.
MAX_CHARACTERS = 400


@dataclass(frozen=True)
class Use:
    """Kernels of a backend: everything on which their compilation depends."""

    backend: str
    kind: str  # "forward", "backward" or "decode"
    spec: AttentionSpec  # of the case
    masks: tuple[str, ...]  # of "causal", "window", "several" and "ragged"
    gpu: str = ""  # its model

    def __str__(self) -> str:
        spec = self.spec
        words = [f"{self.kind} of {self.backend}", dtype_name(spec.dtype)]
        words.append(f"{spec.nheads}/{spec.nheads_kv} heads of {spec.headdim}/{spec.headdim_v}")
        words += [name for name in ("softcap", "sinks", "max_logits") if getattr(spec, name)]
        return ", ".join([*words, *self.masks])


def uses(backend: str, spec: AttentionSpec, purpose: Purpose) -> Iterator[Use]:
    """The cases that a backend must pass for a call on the current GPU."""
    group = min(GROUP, spec.nheads // spec.nheads_kv)
    masks = tuple(x for x in ("causal", "window", "several", "ragged") if getattr(purpose, x))
    gpu = gpu_model() if spec.device_type == "cuda" else ""

    def use(kind: str, kv_heads: int) -> Use:
        cap, heads = SOFTCAP if spec.softcap else 0.0, kv_heads * group
        case = replace(spec, batch=1, nheads=heads, nheads_kv=kv_heads, softcap=cap)
        return Use(backend, kind, case, masks, gpu)

    kv_heads = min(KV_HEADS, spec.batch * spec.nheads_kv)
    yield use("decode" if purpose.decoding else "forward", kv_heads)
    if purpose.backward:
        many, one = use("backward", kv_heads), use("backward", 1)
        yield many
        # Strategies that spread the heads leave a rank with few, which may have another kernel.
        in_one_pass = get_backend(backend).in_one_pass
        if in_one_pass(many.spec) != in_one_pass(one.spec):
            yield one


@cached_by_gpu(maxsize=1024)
def proven_backend(
    spec: AttentionSpec, backend: str = "auto", purpose: Purpose = FORWARD
) -> BackendChoice:
    """The backend for a call on this machine, as `choose_backend`, whose kernels are right here."""
    refused = dict[str, str]()
    while True:
        choice = choose_backend(spec, backend, purpose, tuple(refused.items()))
        if choice.name == "reference" or spec.device_type != "cuda" or _setting() == "off":
            break
        reasons = map(why_wrong, uses(choice.name, spec, purpose))
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is None:
            break
        refused[choice.name] = reason
    for reason in refused.values():
        _warn(f"backend='auto' takes {choice.name!r} here: {reason}")
    return choice


def _setting() -> Setting:
    value = os.environ.get(VARIABLE, "on")
    check_one_of(VARIABLE, value, get_args(Setting))
    return cast(Setting, value)


@cache
def why_wrong(use: Use) -> str | None:
    """The reason why the current GPU's kernels of a use are refused; None if they have passed."""
    capture.refuse("kernels would be used for the first time: make the call once before")
    if _setting() != "on":
        return _proven(use)[1]
    facts = proofs.facts_of(repr(use), use.gpu)
    if proofs.has_passed(facts):
        return None
    with proofs.one_at_a_time(facts):
        if proofs.has_passed(facts):  # meanwhile, in another process
            return None
        verdicts, reason = _proven(use)
        if reason is None:
            proofs.remember(facts, [str(verdict) for verdict in verdicts])
        return reason


def _proven(use: Use) -> tuple[list[Verdict], str | None]:
    """Run the case of a use; return its verdicts, and the reason why it is refused or None."""
    _refuse_dead_context(use, "before the first use of")
    try:
        # In a thread of its own, apart from the caller's modes: inference, autocast, dispatch.
        with _logged_if_slow(use):
            (verdicts,) = run_local(1, lambda *_: proof(use))
    except torch.OutOfMemoryError as error:
        error.add_note(f"in the first use of {use}, which {VARIABLE}=off leaves unchecked")
        raise
    except Exception as error:
        _refuse_dead_context(use, "by the first use of", error)
        return [], f"the first use failed ({use}): {_told(error)}"
    # An error of the last kernels would otherwise be found in another's use.
    _refuse_dead_context(use, "by the first use of")
    wrong = [str(verdict) for verdict in verdicts if not verdict.ok]
    if wrong:
        return verdicts, f"the first use is wrong ({use}): {'; '.join(wrong)}"
    return verdicts, None


def _refuse_dead_context(use: Use, when: str, cause: Exception | None = None) -> None:
    """Raise CUDA's error if the GPU's context is dead, with a note that names the use.

    Raises:
        RuntimeError: CUDA's own, such as `torch.AcceleratorError`, from `cause`.
    """
    error = _error_of_context() if use.spec.device_type == "cuda" else None
    if error is None:
        return
    error.add_note(
        f"The CUDA context was lost {when} {use}, on {use.gpu}. Every later call of CUDA in this "
        "process fails too, so no other backend is tried: end the process. To find the kernel, "
        "run it again with CUDA_LAUNCH_BLOCKING=1; to go on without this backend, name another "
        "one by backend="
    )
    raise error from cause


def _error_of_context() -> RuntimeError | None:
    """Return CUDA's error if every call raises it; None if the context is alive."""
    error = None
    for _ in range(2):  # an error that leaves the context alive is raised once
        try:
            torch.cuda.synchronize()
        except RuntimeError as raised:
            error = raised
        else:
            return None
    return error


@contextmanager
def _logged_if_slow(use: Use) -> Iterator[None]:
    """Log a use that has not ended after SLOW_S: nothing else would name a kernel that hangs."""
    text = (
        "the first use of %s, on %s, has not ended after %g s: it compiles, or a kernel hangs. A "
        "hang ends only with process %d: kill it, and set %s=off or name another backend"
    )
    told = use, use.gpu, SLOW_S, os.getpid(), VARIABLE
    timer = threading.Timer(SLOW_S, logger.error, (text, *told))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _told(error: BaseException) -> str:
    """An error in a line; of a compiler's chain of errors, one for each function, the last."""
    kind = type(error).__name__
    while error.__cause__ is not None:
        error = error.__cause__
    inner = "" if type(error).__name__ == kind else f"{type(error).__name__}: "
    return f"{kind}: {inner}{' '.join(str(error).split())[:MAX_CHARACTERS]}"


@cache
def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)


# -- cases


def proof(use: Use) -> list[Verdict]:
    """The verdict about each result, on the current GPU or in Triton's interpreter."""
    spec, device, decodes = use.spec, torch.device(use.spec.device_type), use.kind == "decode"
    rows = CACHE_ROWS if decodes else RAGGED_ROWS if "ragged" in use.masks else ROWS
    layout = SequenceLayout.contiguous(RANKS * rows, RANKS)
    seqlen, seqlen_q = layout.seqlen, 1 if decodes else layout.seqlen
    cuts = (0, seqlen // 2 + 5, seqlen) if "several" in use.masks and not decodes else None
    window = LEFT if "window" in use.masks else -1, -1
    mask = Mask(seqlen_q, seqlen, "causal" in use.masks, window, cuts, cuts)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device, spec.dtype)

    inputs = Inputs(
        draw(1, seqlen_q, spec.nheads, spec.headdim),
        draw(1, seqlen, spec.nheads_kv, spec.headdim),
        draw(1, seqlen, spec.nheads_kv, spec.headdim_v),
        draw(1, seqlen_q, spec.nheads, spec.headdim_v),
    )
    sinks = draw(spec.nheads).float() if spec.sinks else None
    results = (_decoded if decodes else _attended)(use, layout, mask, inputs, sinks)
    oracle, plain = (
        gradients(*inputs, mask, softcap=spec.softcap, sinks=sinks)
        for gradients in (dense_gradients, plain_gradients)
    )
    return [
        check(name, x, getattr(oracle, name), getattr(plain, name), oracle.terms[name])
        for name, x in results.items()
    ]


def _attended(
    use: Use, layout: SequenceLayout, mask: Mask, inputs: Inputs, sinks: Tensor | None
) -> dict[str, Tensor]:
    backward = use.kind == "backward"

    def work(rank: int, transport: LocalTransport) -> tuple[Tensor, ...]:
        call = make_call(
            Strategy("ring"), use.spec, (layout, layout), mask, rank, backend=use.backend,
            backward=backward,
        )  # fmt: skip
        q, k, v, dout = (layout.shard(x, rank) for x in inputs)
        done = drivers.forward(call, q, k, v, transport, sinks)
        if not backward:
            return done.out, done.lse
        return drivers.backward(call, done.saved, dout, transport, sinks)[:3]

    shards = zip(*run_local(RANKS, work), strict=True)
    if backward:
        return dict(zip(("dq", "dk", "dv"), map(layout.unshard, shards), strict=True))
    outs, lses = shards
    return {"out": layout.unshard(outs), "lse": layout.unshard(lses, 2)}


def _decoded(
    use: Use, layout: SequenceLayout, mask: Mask, inputs: Inputs, sinks: Tensor | None
) -> dict[str, Tensor]:
    call = tree_decode.make_call(use.spec, backend=use.backend)

    def work(rank: int, transport: LocalTransport) -> tuple[Tensor, Tensor]:
        tiles = tree_decode.decode_tiles(layout.segments(rank), mask)
        k, v = (layout.shard(x, rank) for x in (inputs.k, inputs.v))
        if "several" not in use.masks:
            return drivers.decode(call, tiles, inputs.q, k, v, transport, sinks)
        # Sequences, in pages of a pool: the last page comes first.
        count = -(-k.size(1) // PAGE_ROWS)
        k, v = (F.pad(x[0], (0, 0, 0, 0, 0, count * PAGE_ROWS - x.size(1))) for x in (k, v))
        k, v = (x.unflatten(0, (count, PAGE_ROWS)).flip(0) for x in (k, v))
        numbers = torch.arange(count, dtype=torch.int32, device=k.device)
        tables = torch.full_like(numbers[:1], layout.seqlen), numbers.flip(0)[None]
        sequences = check_sequences(k, tables[1], layout, (-1, 0), rank, RANKS)
        return drivers.decode(call, (), inputs.q, k, v, transport, sinks, sequences, tables)

    out, lse = run_local(RANKS, work)[0]
    return {"out": out, "lse": lse}
