"""The oracle against torch; the bound, which detects defects and permits mere rounding."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ring_attn.core.mask import Mask
from ring_attn.core.masks import window
from ring_attn.testing import (
    RESULTS,
    RESULTS_WITH_SINKS,
    Expected,
    Inputs,
    check,
    check_all,
    dense_attention,
    dense_gradients,
    masks,
    plain_attention,
    plain_gradients,
    poisoned_empty,
    random_qkv,
    random_sinks,
)
from tests.bounds import textbook_backward, textbook_forward

MASKS = masks(33)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# softcap and sinks. The cap is about as large as the scores, so that it bends most of them.
SCORES: dict[str, dict[str, Any]] = {
    "usual": {},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": random_sinks(4, seed=1)},
    "both": {"softcap": 2.0, "sinks": random_sinks(4, seed=1)},
}


def inputs_for(mask: Mask, dtype: torch.dtype = torch.float32, **options: object) -> Inputs:
    sizes: dict[str, object] = {
        "batch": 2, "nheads": 4, "nheads_kv": 2, "headdim": 16, "headdim_v": 24
    }  # fmt: skip
    return random_qkv(
        seqlen_q=mask.seqlen_q,
        seqlen_k=mask.seqlen_k,
        dtype=dtype,
        **(sizes | options),  # type: ignore[arg-type]
    )


def textbook(
    inputs: Inputs,
    mask: Mask,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    *,
    other_order: bool = False,
) -> Expected:
    """The backward of flash-attention's paper, p = exp(s - lse) and delta, in float32 at least.

    `other_order`: the backward sums scores over the dims from the last to the first, like a
    separate kernel, so that its scores round differently from the forward's, which made lse.
    """
    dtype, wide = inputs.q.dtype, torch.promote_types(inputs.q.dtype, torch.float32)
    q, k, v, dout = (x.to(wide) for x in inputs)
    how = {"seen": mask.dense(), "scale": q.size(-1) ** -0.5, "softcap": softcap}
    out, lse = textbook_forward(q, k, v, **how, sinks=sinks)
    delta = (out.to(dtype).to(wide) * dout).sum(-1).transpose(1, 2)
    if other_order:
        q, k = q.flip(-1), k.flip(-1)
    dq, dk, dv = textbook_backward(q, k, v, dout, lse, delta, **how)
    if other_order:
        dq, dk = dq.flip(-1), dk.flip(-1)
    dsinks = None
    if sinks is not None:
        weights = (sinks.to(wide).view(-1, 1) - lse).exp()
        dsinks = -(weights * delta).sum((0, 2)).to(sinks.dtype)
    return Expected(out.to(dtype), lse, dq.to(dtype), dk.to(dtype), dv.to(dtype), dsinks)


def failed(got: Expected, inputs: Inputs, mask: Mask, **scores: Any) -> set[str]:
    oracle, plain = (f(*inputs, mask, **scores) for f in (dense_gradients, plain_gradients))
    verdicts = check_all(got, oracle, plain)
    return {verdict.name for verdict in verdicts if not verdict.ok}


@pytest.mark.parametrize("name", ["full", "causal", "window", "longer kv", "documents"])
def test_the_oracle_is_torch_sdpa(name: str) -> None:
    mask = MASKS[name]
    inputs = inputs_for(mask, torch.float64)
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask.dense(), enable_gqa=True)
    grads = torch.autograd.grad(out.transpose(1, 2), (q, k, v), inputs.dout)
    lse = dense_attention(q, k, v, mask)[1].detach()
    assert not failed(Expected(out.transpose(1, 2).detach(), lse, *grads), inputs, mask)


@pytest.mark.parametrize("attention", [dense_attention, plain_attention])
def test_rows_that_see_nothing_have_their_sinks(
    attention: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    inputs, alone = inputs_for(MASKS["empty rows"]), 16
    sinks = torch.tensor([-math.inf, -1e4, 0.0, 3.0])
    leaves = [x.clone().requires_grad_() for x in (*inputs[:3], sinks)]
    out, lse = attention(*leaves[:3], MASKS["empty rows"], sinks=leaves[3])
    grads = torch.autograd.grad(out, leaves, inputs.dout.to(out.dtype))
    assert (lse[:, :, :alone] == sinks.view(1, 4, 1)).all() and lse[:, :, alone:].isfinite().all()
    assert (out[:, :alone] == 0).all() and (grads[0][:, :alone] == 0).all()
    assert all(x.isfinite().all() for x in (out, *grads))
    assert grads[3][0] == 0 and (grads[3][2:] != 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MASKS)
def test_a_right_algorithm_holds(name: str, dtype: torch.dtype) -> None:
    """Alternates usual and large logits."""
    mask, first = MASKS[name], list(MASKS).index(name)
    for turn, scores in enumerate(SCORES.values(), first + DTYPES.index(dtype)):
        inputs = inputs_for(mask, dtype, large_logits=turn % 2 == 1)
        assert not failed(textbook(inputs, mask, **scores), inputs, mask, **scores), scores


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits_that_round_otherwise_in_the_backward_hold(
    dtype: torch.dtype, seed: int
) -> None:
    """Rows of one key, where only errors of s and lse move p; `out` is subnormal in float16.

    Bounds were too narrow here if they took lse's error from lse, not from the products in it, or
    gave a subnormal `out` a relative error.
    """
    sinks = random_sinks(4, seed=seed)
    for name, scores in (
        ("diagonal", {}),
        ("diagonal", {"sinks": sinks}),
        ("window", {"sinks": sinks, "softcap": 30.0}),
    ):
        mask = MASKS[name]
        inputs = inputs_for(mask, dtype, large_logits=True, batch=1, seed=seed)
        got = textbook(inputs, mask, **scores, other_order=True)
        assert not failed(got, inputs, mask, **scores), (name, scores)


def ten_bits(x: Tensor) -> Tensor:
    """Truncates float32 as TF32 tensor cores do."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def without_head_0(dout: Tensor) -> Tensor:
    return dout.index_fill(2, torch.tensor([0]), 0.0)


def changed(name: str, **by: Any) -> Callable[..., Expected]:
    """Makes a defect: one result has wrong values at some indices of a dim."""

    def defect(inputs: Inputs, mask: Mask, right: Expected) -> Expected:
        x = getattr(right, name)
        return replace(right, **{name: x.index_fill(by["dim"], torch.tensor(by["at"]), by["to"])})

    return defect


BOTH = SCORES["both"]
# Scores, the defect, and the results in which it must be detected.
DEFECTS: dict[str, tuple[dict[str, Any], Callable[..., Expected], set[str]]] = {
    "TF32 products": (
        {},
        lambda i, m, _: textbook(Inputs(ten_bits(i.q), ten_bits(i.k), ten_bits(i.v), i.dout), m),
        set(RESULTS),
    ),
    "a key too few": ({}, lambda i, m, _: textbook(i, m & window(m.seqlen_q, 31)), set(RESULTS)),
    "lse in base 2": ({}, lambda i, m, y: replace(y, lse=y.lse / math.log(2.0)), {"lse"}),
    "out in bfloat16": ({}, lambda i, m, y: replace(y, out=y.out.bfloat16().float()), {"out"}),
    "one NaN": ({}, changed("dv", dim=1, at=[3], to=math.nan), {"dv"}),
    "a head's gradient left out": (
        {},
        lambda i, m, y: replace(y, dk=textbook(i._replace(dout=without_head_0(i.dout)), m).dk),
        {"dk"},
    ),
    "no cap": (BOTH, lambda i, m, _: textbook(i, m, sinks=BOTH["sinks"]), set(RESULTS_WITH_SINKS)),
    "no sinks": (
        BOTH,
        lambda i, m, y: replace(textbook(i, m, softcap=2.0), dsinks=y.dsinks),
        set(RESULTS),
    ),
    "a sink without its gradient": (BOTH, changed("dsinks", dim=0, at=[2], to=0.0), {"dsinks"}),
    "gradient of a sink without weight": (
        BOTH,
        changed("dsinks", dim=0, at=[0], to=1e-30),
        {"dsinks"},
    ),
    "sinks not in lse": (
        BOTH,
        lambda i, m, y: replace(y, lse=textbook(i, m, softcap=2.0).lse),
        {"lse"},
    ),
    "an empty row's dq that is not 0": ({}, changed("dq", dim=1, at=[0], to=1e-38), {"dq"}),
    **{
        f"an empty row's lse that is {wrong}": (
            {},
            changed("lse", dim=2, at=[0], to=wrong),
            {"lse"},
        )
        for wrong in (0.0, math.inf, math.nan, -3e38)
    },
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_seen(defect: str) -> None:
    mask = MASKS["empty rows" if "empty row" in defect else "causal"]
    inputs = inputs_for(mask)
    scores, wrongly, wrong = DEFECTS[defect]
    got = wrongly(inputs, mask, textbook(inputs, mask, **scores))
    assert failed(got, inputs, mask, **scores) == wrong


def test_results_of_another_form_raise() -> None:
    x = torch.zeros(2, 3, dtype=torch.float64)
    given = Expected(x, x, x, x, x, dsinks=x[0])
    with pytest.raises(ValueError, match=r"dq must have shape \(2, 3\)"):
        check("dq", x.float()[:1], x, x.float())
    with pytest.raises(TypeError, match="dq must be torch.float32"):
        check("dq", x.half(), x, x.float())
    with pytest.raises(ValueError, match="dsinks must be in all or none"):
        check_all(replace(given, dsinks=None), given, given)
    assert check("out", x.float() + 1e-30, x, x.float()).ratio == math.inf


def test_inputs_are_what_they_are_named_for() -> None:
    sizes: dict[str, Any] = {"seqlen_q": 5, "seqlen_k": 7, "nheads": 4, "headdim": 8, "seed": 3}
    strided = random_qkv(**sizes, noncontiguous=True)
    assert all(map(torch.equal, strided, random_qkv(**sizes)))
    assert all(x.stride(-1) == 2 and not x.is_contiguous() for x in strided)
    large = random_qkv(seqlen_q=64, large_logits=True)
    lse = dense_attention(*large[:3], Mask(64, 64))[1]
    assert lse.max() > 89  # exp overflows float32 there
    # One sink takes no weight; all sinks are alike in every dtype.
    sinks = random_sinks(6, seed=3)
    assert sinks[0] < -9000 and sinks[1:].abs().max() < 20
    assert all(random_sinks(6, dtype=d, seed=3).double().equal(sinks.double()) for d in DTYPES)


def test_poisoned_empty() -> None:
    before = torch.empty
    with pytest.raises(KeyError), poisoned_empty():
        for x in (
            torch.empty(3),
            torch.empty_like(torch.ones(2, dtype=torch.bfloat16)),
            torch.ones(2).new_empty(4, dtype=torch.float16),
            torch.empty_strided((2, 2), (1, 2)),
            *(torch.empty(16, dtype=torch.uint8).view(dtype) for dtype in DTYPES),
        ):
            assert x.isnan().all()
        assert (torch.empty(3, dtype=torch.int32) == -1).all()
        raise KeyError
    assert torch.empty is before
