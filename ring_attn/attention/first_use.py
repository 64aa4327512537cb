"""Self-tests of backends: the first use of kernels on a GPU runs a small case on that GPU.

A ring of three ranks in this process computes forward and backward, or decodes. The results must be
within the bounds of `core.oracle` around attention in float64, on the same GPU. If a backend's
kernels fail to compile or give wrong results, it is rejected with the error or the measured
difference, and "auto" tries the next one. Every rank runs this self-test before it connects; the
ranks then check that they chose the same backend.

A kernel that accesses memory out of bounds ends CUDA's context, after which every CUDA call of the
process fails. Then no other backend is tried, and CUDA's error is raised. A process cannot end a
kernel of its own that hangs; a first use that has not ended is logged after SLOW_S seconds.

Proofs that passed are cached across processes (`proofs`). With RING_ATTN_FIRST_USE=always they are
not, and each process runs a case once for each model of GPU. RING_ATTN_FIRST_USE=off runs no cases.
A case takes at most two seconds, apart from compilation, which its call needs as well, since
nothing is tuned. One second is estimated for an A2 from the case's operators; 1 to 3 s were
measured on one core of a CPU.
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

# The largest number of kv heads, and of query heads for each. From 4 kv heads on, sm_90 has another
# backward for any number of rows.
KV_HEADS, GROUP = 4, 8

# Seconds after which a case that has not ended is logged. It may compile for a minute or two.
SLOW_S = 300.0

# Limit of an error's text: a compiler's error has pages.
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
        parts = [
            f"{self.kind} of {self.backend}",
            dtype_name(spec.dtype),
            f"{spec.nheads}/{spec.nheads_kv} heads of {spec.headdim}/{spec.headdim_v}",
        ]
        parts += [name for name in ("softcap", "sinks", "max_logits") if getattr(spec, name)]
        return ", ".join([*parts, *self.masks])


def uses(backend: str, spec: AttentionSpec, purpose: Purpose) -> Iterator[Use]:
    """Return the cases that a backend must pass for a call on the current GPU."""
    group_size = min(GROUP, spec.nheads // spec.nheads_kv)
    masks = tuple(
        name for name in ("causal", "window", "several", "ragged") if getattr(purpose, name)
    )
    gpu = gpu_model() if spec.device_type == "cuda" else ""

    def use(kind: str, nheads_kv: int) -> Use:
        case = replace(
            spec,
            batch=1,
            nheads=nheads_kv * group_size,
            nheads_kv=nheads_kv,
            softcap=SOFTCAP if spec.softcap else 0.0,
        )
        return Use(backend, kind, case, masks, gpu)

    nheads_kv = min(KV_HEADS, spec.batch * spec.nheads_kv)
    yield use("decode" if purpose.decoding else "forward", nheads_kv)
    if purpose.backward:
        many_heads, one_head = use("backward", nheads_kv), use("backward", 1)
        yield many_heads
        # Strategies that spread the heads leave a rank with few, which may have another kernel;
        # and long launches of few heads may have the kernel of many.
        in_one_pass = get_backend(backend).in_one_pass
        if in_one_pass(many_heads.spec) != in_one_pass(one_head.spec):
            yield one_head
        most_heads = use("backward", KV_HEADS)
        few_rows_differ = in_one_pass(most_heads.spec) != in_one_pass(many_heads.spec)
        if few_rows_differ and purpose.same_bits is not True:
            yield most_heads


@cached_by_gpu(maxsize=1024)
def proven_backend(
    spec: AttentionSpec, backend: str = "auto", purpose: Purpose = FORWARD
) -> BackendChoice:
    """Return the backend of a call, as `choose_backend`, whose kernels are right on this machine.

    A warning names the backends that "auto" has rejected.
    """
    rejected: dict[str, str] = {}
    while True:
        choice = choose_backend(spec, backend, purpose, tuple(rejected.items()))
        if choice.name == "reference" or spec.device_type != "cuda" or _setting() == "off":
            break
        reason = _why_any_wrong(uses(choice.name, spec, purpose))
        if reason is None:
            break
        rejected[choice.name] = reason
    for reason in rejected.values():
        warn_once(f"backend='auto' takes {choice.name!r} here: {reason}")
    return choice


def _why_any_wrong(cases: Iterator[Use]) -> str | None:
    """Return the reason of the first use that fails; None if all have passed."""
    for use in cases:
        reason = why_wrong(use)
        if reason is not None:
            return reason
    return None


def _setting() -> Setting:
    value = os.environ.get(VARIABLE, "on")
    check_one_of(VARIABLE, value, get_args(Setting))
    return cast(Setting, value)


@cache
def why_wrong(use: Use) -> str | None:
    """Return why the kernels of a use are rejected on the current GPU; None if they have passed."""
    capture.refuse("kernels would be used for the first time: make the call once before")
    if _setting() != "on":
        _, reason = _run_case(use)
        return reason
    facts = proofs.facts_of(repr(use), use.gpu)
    if proofs.has_passed(facts):
        return None
    with proofs.one_at_a_time(facts):
        if proofs.has_passed(facts):  # meanwhile, in another process
            return None
        verdicts, reason = _run_case(use)
        if reason is None:
            proofs.remember(facts, [str(verdict) for verdict in verdicts])
        return reason


def _run_case(use: Use) -> tuple[list[Verdict], str | None]:
    """Run the case of a use; return its verdicts, and the reason why it is rejected or None."""
    _refuse_dead_context(use, "before the first use of")
    try:
        # In a separate thread, without the caller's modes: inference, autocast, dispatch.
        with _logged_if_slow(use):
            (verdicts,) = run_local(1, lambda *_: proof(use))
    except torch.OutOfMemoryError as error:
        error.add_note(
            f"This was the first use of {use}, which runs a small case. Set {VARIABLE}=off to run "
            "no case, or free memory."
        )
        raise
    except Exception as error:
        _refuse_dead_context(use, "by the first use of", error)
        return [], f"the first use failed ({use}): {_one_line(error)}"
    # Otherwise an error of the last kernels would appear in the first use of other kernels.
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
    """Log a use that has not ended after SLOW_S, since nothing else names a kernel that hangs."""
    text = (
        "the first use of %s, on %s, has not ended after %g s: it compiles, or a kernel hangs. A "
        "hang ends only with process %d: kill it, and set %s=off or name another backend"
    )
    timer = threading.Timer(
        SLOW_S, logger.error, args=(text, use, use.gpu, SLOW_S, os.getpid(), VARIABLE)
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _one_line(error: BaseException) -> str:
    """Return an error's type and text in one line.

    A compiler raises a chain of errors, one for each function; the text is that of the last one.
    """
    kind = type(error).__name__
    while error.__cause__ is not None:
        error = error.__cause__
    inner_kind = type(error).__name__
    text = " ".join(str(error).split())[:MAX_CHARACTERS]
    return f"{kind}: {text}" if inner_kind == kind else f"{kind}: {inner_kind}: {text}"


@cache
def warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=2)


# -- cases


def proof(use: Use) -> list[Verdict]:
    """Return the verdict about each result, on the current GPU or in Triton's interpreter."""
    spec = use.spec
    layout, mask = _layout_and_mask(use)
    inputs, sinks = _inputs(spec, mask)
    if use.kind == "decode":
        results = _decoded(use, layout, mask, inputs, sinks)
    else:
        results = _attended(use, layout, mask, inputs, sinks)
    oracle = dense_gradients(*inputs, mask, softcap=spec.softcap, sinks=sinks)
    plain = plain_gradients(*inputs, mask, softcap=spec.softcap, sinks=sinks)
    return [
        check(name, x, getattr(oracle, name), getattr(plain, name), oracle.terms[name])
        for name, x in results.items()
    ]


def _layout_and_mask(use: Use) -> tuple[SequenceLayout, Mask]:
    """Return the layout of the keys, and a mask of the kinds that the use names."""
    if use.kind == "decode":
        layout = SequenceLayout.contiguous(RANKS * CACHE_ROWS, RANKS)
        seqlen_q, documents = 1, None
    else:
        rows = RAGGED_ROWS if "ragged" in use.masks else ROWS
        layout = SequenceLayout.contiguous(RANKS * rows, RANKS)
        seqlen_q = layout.seqlen
        # The boundary is not at a multiple of any block.
        several = (0, layout.seqlen // 2 + 5, layout.seqlen)
        documents = several if "several" in use.masks else None
    mask = Mask(
        seqlen_q,
        layout.seqlen,
        causal="causal" in use.masks,
        window_size=(LEFT if "window" in use.masks else -1, -1),
        cu_seqlens_q=documents,
        cu_seqlens_k=documents,
    )
    return layout, mask


def _inputs(spec: AttentionSpec, mask: Mask) -> tuple[Inputs, Tensor | None]:
    """Draw whole q, k, v and dout, and sinks."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, device="cpu")
        return x.to(torch.device(spec.device_type), spec.dtype)

    inputs = Inputs(
        q=draw(1, mask.seqlen_q, spec.nheads, spec.headdim),
        k=draw(1, mask.seqlen_k, spec.nheads_kv, spec.headdim),
        v=draw(1, mask.seqlen_k, spec.nheads_kv, spec.headdim_v),
        dout=draw(1, mask.seqlen_q, spec.nheads, spec.headdim_v),
    )
    sinks = draw(spec.nheads).float() if spec.sinks else None
    return inputs, sinks


def _attended(
    use: Use, layout: SequenceLayout, mask: Mask, inputs: Inputs, sinks: Tensor | None
) -> dict[str, Tensor]:
    """Return results of a ring: out and lse, or for a backward dq, dk and dv."""
    backward = use.kind == "backward"

    def work(rank: int, transport: LocalTransport) -> tuple[Tensor, ...]:
        call = make_call(
            Strategy("ring"),
            use.spec,
            (layout, layout),
            mask,
            rank,
            backend=use.backend,
            backward=backward,
        )
        q, k, v, dout = (layout.shard(x, rank) for x in inputs)
        forward = drivers.forward(call, q, k, v, transport, sinks)
        if not backward:
            return forward.out, forward.lse
        gradients = drivers.backward(call, forward.saved, dout, transport, sinks)
        return gradients.dq, gradients.dk, gradients.dv

    results_of_ranks = run_local(RANKS, work)
    shards_of_results = zip(*results_of_ranks, strict=True)
    if backward:
        dqs, dks, dvs = shards_of_results
        return {"dq": layout.unshard(dqs), "dk": layout.unshard(dks), "dv": layout.unshard(dvs)}
    outs, lses = shards_of_results
    return {"out": layout.unshard(outs), "lse": layout.unshard(lses, 2)}


def _decoded(
    use: Use, layout: SequenceLayout, mask: Mask, inputs: Inputs, sinks: Tensor | None
) -> dict[str, Tensor]:
    """Return out and lse of decoding, for "several" from sequences in pages."""
    call = tree_decode.make_call(use.spec, backend=use.backend)

    def work(rank: int, transport: LocalTransport) -> tuple[Tensor, Tensor]:
        k, v = layout.shard(inputs.k, rank), layout.shard(inputs.v, rank)
        if "several" not in use.masks:
            tiles = tree_decode.decode_tiles(layout.segments(rank), mask)
            return drivers.decode(call, tiles, inputs.q, k, v, transport, sinks)
        # The pages are in reverse order in the pool, so that a kernel must read the table.
        num_pages = -(-k.size(1) // PAGE_ROWS)
        page_numbers = torch.arange(num_pages, dtype=torch.int32, device=k.device)
        block_table = page_numbers.flip(0)[None]  # (1, num_pages)
        cache_seqlens = torch.full_like(page_numbers[:1], layout.seqlen)  # (1,)
        k, v = _in_pages(k, num_pages).flip(0), _in_pages(v, num_pages).flip(0)
        sequences = check_sequences(k, block_table, layout, (-1, 0), rank, RANKS)
        return drivers.decode(
            call,
            (),
            inputs.q,
            k,
            v,
            transport,
            sinks,
            sequences=sequences,
            tables=(cache_seqlens, block_table),
        )

    results = run_local(RANKS, work)
    out, lse = results[0]
    return {"out": out, "lse": lse}


def _in_pages(x: Tensor, num_pages: int) -> Tensor:
    """Cut (1, rows, heads, dim) to pages (num_pages, PAGE_ROWS, heads, dim), padded by zeros."""
    padding = num_pages * PAGE_ROWS - x.size(1)
    rows = F.pad(x[0], (0, 0, 0, 0, 0, padding))  # (num_pages * PAGE_ROWS, heads, dim)
    return rows.unflatten(0, (num_pages, PAGE_ROWS))
