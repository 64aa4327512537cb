"""The contact ladder: each kernel once, forward and backward apart, with a map of errors.

A backward gets `out` and `lse` of the oracle, so that a wrong forward says nothing about it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from dev.gpu import device
from dev.gpu.cells import Figures, NotHere
from ring_attn.attention import drivers
from ring_attn.backends import rates
from ring_attn.backends.base import BackwardInputs
from ring_attn.backends.triton import TritonBackend
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.kernels import configs
from ring_attn.kernels.configs import Config
from ring_attn.strategies.tree_decode import decode_tiles, make_call
from ring_attn.testing import Expected, Inputs, check, poisoned_empty, random_qkv
from ring_attn.transport.local import LocalTransport, run_local
from tests.bounds import expect, whole
from tests.kernels.calls import PORTABLE, frozen

# One of whole blocks, and one that ends within a block.
MASKS = {"full": Mask(1024, 1024), "causal": Mask(1000, 1000, causal=True)}
TRIAL_MASKS = {"full": Mask(128, 128), "causal": Mask(100, 100, causal=True)}

# A map has a figure for each block of so many rows and dims, within a tile of TILE rows.
BLOCK, TILE = 8, 64


def forward(kernels: str, headdim: int, mask: str) -> Figures:
    """Compare out and lse with the oracle."""
    backend, inputs, bounds = prepared(kernels, headdim, mask)
    scores = Scores(headdim**-0.5)
    with poisoned_empty():
        state = backend.new_state(inputs.q, headdim)
        state = backend.forward(
            inputs.q, inputs.k, inputs.v, whole(bounds), state, scores=scores, last=True
        )
        out, lse = backend.finalize(state, inputs.q.dtype)
    return judged({"out": out, "lse": lse}, *expect(inputs, bounds))


def backward(kernels: str, headdim: int, mask: str) -> Figures:
    """Compare dq, dk and dv with the oracle."""
    backend, inputs, bounds = prepared(kernels, headdim, mask)
    oracle, plain = expect(inputs, bounds)
    scores = Scores(headdim**-0.5)
    out, lse = oracle.out.to(inputs.q.dtype), oracle.lse.float()
    grads = [torch.zeros(x.shape, device=x.device) for x in (inputs.q, inputs.k, inputs.v)]
    dq, dk, dv = grads
    with poisoned_empty():
        given = BackwardInputs(*inputs, *backend.row_statistics(out, inputs.dout, lse))
        backend.backward(given, whole(bounds), (dq, dk, dv), scores=scores, out=out)
    factor, dtype = backend.gradient_factor(scores), inputs.q.dtype
    got = {"dq": (dq * factor).to(dtype), "dk": (dk * factor).to(dtype), "dv": dv.to(dtype)}
    return judged(got, oracle, plain)


def decode(queries: int) -> Figures:
    """Compare the decoding of some queries, over three ranks in this process, with the oracle."""
    seqlen = 100 if device.is_trial() else 3000
    layout = SequenceLayout.contiguous(seqlen, 3)
    mask = Mask(queries, seqlen, causal=True)
    inputs = inputs_of(mask, headdim=64 if device.is_trial() else 128)
    q, k, v, _ = inputs
    call = make_call(AttentionSpec.of(q, k, v), backend="triton")

    def work(rank: int, transport: LocalTransport) -> tuple[Tensor, Tensor]:
        tiles = decode_tiles(layout.segments(rank), mask)
        k_shard, v_shard = (layout.shard(x, rank) for x in (k, v))
        return drivers.decode(call, tiles, q, k_shard, v_shard, transport)

    out, lse = run_local(layout.world_size, work)[0]
    return judged({"out": out, "lse": lse}, *expect(inputs, mask))


def prepared(kernels: str, headdim: int, mask: str) -> tuple[TritonBackend, Inputs, Mask]:
    bounds = (TRIAL_MASKS if device.is_trial() else MASKS)[mask]
    return TritonBackend(_configs(kernels, headdim)), inputs_of(bounds, headdim), bounds


def _configs(kernels: str, headdim: int) -> dict[str, Config]:
    """Configs of "portable", or of "gluon N": the N-th forward of that head dim."""
    if device.is_trial():
        return dict.fromkeys(PORTABLE, configs.INTERPRETER)
    architecture = configs.architecture(torch.device(device.CUDA))
    if kernels == "portable":
        return frozen(architecture, headdim)
    if architecture not in rates.GLUON_HEADDIMS:
        raise NotHere(f"{architecture} has no kernels in Gluon")
    some = configs.in_gluon(architecture).get(headdim)
    if some is None:
        raise NotHere(f"no forward in Gluon takes {headdim} dims on {architecture}")
    given = {"gluon": some[int(kernels.split()[1])]}
    one_pass = configs.ONE_PASS[architecture].get(headdim)
    return given | ({} if one_pass is None else {"one_pass": one_pass})


def inputs_of(mask: Mask, headdim: int) -> Inputs:
    heads, kv_heads = (2, 1) if device.is_trial() else (8, 2)
    return random_qkv(
        seqlen_q=mask.seqlen_q,
        seqlen_k=mask.seqlen_k,
        nheads=heads,
        nheads_kv=kv_heads,
        headdim=headdim,
        device=device.where(),
        dtype=device.dtype(),
    )


def judged(got: Mapping[str, Tensor], oracle: Expected, plain: Expected) -> Figures:
    """Return error / bound of each result; raise with maps of those that are wrong."""
    ratios, wrong = {}, []
    for name, x in got.items():
        expected = getattr(oracle, name)
        verdict = check(name, x, expected, getattr(plain, name), oracle.terms[name])
        ratios[name] = round(float(verdict.ratio), 3)
        if not verdict.ok:
            wrong.append(fault_of(name, x, expected))
    if wrong:
        raise AssertionError(json.dumps({"ratios": ratios, "wrong": wrong}))
    return {"ratios": ratios}


def fault_of(name: str, got: Tensor, expected: Tensor) -> Figures:
    """Describe where a result is wrong: a layout's mistake repeats in rows or dims of a block.

    The map has the logarithm (base 10) of the largest error, for each block of rows (within tiles
    of TILE rows) and dims, of the first batch entry and head; 9 stands for NaN.
    """
    fault: Figures = {
        "result": name,
        "nan": int(got.isnan().sum()),
        "zeros": int((got == 0).sum()),
        "of": got.numel(),
    }
    if got.dim() != 4:  # lse has no dims
        return fault
    error = (got.double() - expected.double()).abs().nan_to_num(nan=1e9)[0, :, 0]
    rows, dims = error.size(0) // TILE * TILE, error.size(1)
    if rows:
        blocks = error[:rows].unflatten(0, (-1, TILE // BLOCK, BLOCK)).amax((0, 2))
        blocks = blocks.unflatten(1, (dims // BLOCK, BLOCK)).amax(2)
        fault["map"] = blocks.log10().round().clamp(-9, 9).int().tolist()
    fault["worst rows"] = error.amax(1).topk(min(20, error.size(0))).indices.sort().values.tolist()
    return fault
