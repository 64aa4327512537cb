"""Names of other packages: signatures read from the packages, orders of rows, refusals."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from ring_attn import SequenceLayout
from ring_attn.backends import BackendChoice
from ring_attn.integrations import context_parallel, flash_attn, ring_flash_attn
from ring_attn.integrations.ring_flash_attn import adapters
from ring_attn.models.sdpa import route_sdpa, sdpa_attention
from tests.refusals import refused

DENSE = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False, group=None)"
)
VARLEN = "cu_seqlens, max_seqlen, " + DENSE
LLAMA3 = (
    "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice, "
    + DENSE
)

# Read from ring-flash-attn 0.1.8: every name that the package exports.
RING_FLASH_ATTN_0_1_8 = {
    "llama3_flash_attn_prepare_cu_seqlens": "(cu_seqlens, causal, rank, world_size)",
    "substitute_hf_flash_attn": "(process_group, heads_k_stride)",
    "update_ring_flash_attn_params": "(cu_seqlens, process_group)",
} | {
    f"{family}_{packing}": f"({tensors}, {rest}"
    for family, rest in {
        "ring_flash_attn": DENSE,
        "zigzag_ring_flash_attn": DENSE,
        "stripe_flash_attn": DENSE,
        "ring_flash_attn_varlen": VARLEN,
        "zigzag_ring_flash_attn_varlen": VARLEN,
        "llama3_flash_attn_varlen": LLAMA3,
    }.items()
    for packing, tensors in {
        "func": "q, k, v",
        "kvpacked_func": "q, kv",
        "qkvpacked_func": "qkv",
    }.items()
}

# Read from flash-attn 2.8.3, flash_attn/flash_attn_interface.py; our own options come after these.
OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
SIDES = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
OURS = "*, group=None, layout='contiguous', **execution"
FLASH_ATTN_2_8 = {
    "flash_attn_func": f"(q, k, v, {OPTIONS}, {OURS})",
    "flash_attn_kvpacked_func": f"(q, kv, {OPTIONS}, {OURS})",
    "flash_attn_qkvpacked_func": f"(qkv, {OPTIONS}, {OURS})",
    "flash_attn_varlen_func": f"(q, k, v, {SIDES}, {OPTIONS}, block_table=None, {OURS})",
    "flash_attn_varlen_kvpacked_func": f"(q, kv, {SIDES}, {OPTIONS}, {OURS})",
    "flash_attn_varlen_qkvpacked_func": f"(qkv, cu_seqlens, max_seqlen, {OPTIONS}, {OURS})",
}


def plain_signature(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    parameters = [
        p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()
    ]
    return str(inspect.Signature(parameters))


@pytest.mark.parametrize(
    ("module", "name", "signature"),
    [
        *((ring_flash_attn, *item) for item in RING_FLASH_ATTN_0_1_8.items()),
        *((flash_attn, *item) for item in FLASH_ATTN_2_8.items()),
    ],
    ids=[*RING_FLASH_ATTN_0_1_8, *FLASH_ATTN_2_8],
)
def test_signature(module: Any, name: str, signature: str) -> None:
    function = getattr(module, name)
    assert plain_signature(function) == signature
    assert function.__name__ == function.__qualname__ == name


def test_torchs_signatures() -> None:
    from torch.distributed.tensor.experimental import _attention as theirs

    for name in ("context_parallel", "context_parallel_unshard", "set_rotate_method"):
        ours = getattr(context_parallel, name)
        assert plain_signature(ours) == plain_signature(getattr(theirs, name))
    # A builtin: its parameters are written in its docstring.
    documented = (F.scaled_dot_product_attention.__doc__ or "").partition("(")[2].partition("->")[0]
    at = [
        documented.index(name) for name in list(inspect.signature(sdpa_attention).parameters)[:-1]
    ]
    assert at == sorted(at)


# What the package's function returns, run with ring-flash-attn 0.1.8:
# (cu_seqlens, causal, rank, world_size) -> cu_seqlens_q, cu_seqlens_k, longest of both, k slice.
PREPARED = [
    (([0, 3, 8], True, 1, 2), ([0, 4], [0, 5], 4, 5, (3, 8))),
    (([0, 3, 8], False, 0, 2), ([0, 3, 4], [0, 3, 8], 3, 5, (0, 8))),
    (([0, 4, 8], True, 1, 2), ([0, 4], [0, 4], 4, 4, (4, 8))),
    (([0, 12], False, 1, 3), ([0, 4], [0, 12], 4, 12, (0, 12))),
    (([0, 7, 8, 28, 40, 60], True, 1, 4), ([0, 13, 15], [0, 20, 22], 13, 20, (8, 30))),
    (([0, 7, 8, 28, 40, 60], False, 1, 4), ([0, 13, 15], [0, 20, 32], 13, 20, (8, 40))),
    (([0, 4, 4, 8], True, 1, 2), ([0, 0, 4], [0, 0, 4], 4, 4, (4, 8))),
    (([0, 4, 4, 8], False, 0, 2), ([0, 4], [0, 4], 4, 4, (0, 4))),
]


PREPARE = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens
# Refusal by the adapters.


@pytest.mark.parametrize(("given", "expected"), PREPARED)
def test_prepared_documents(given: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    cu, causal, rank, world_size = given
    for dtype in (torch.int32, torch.int64):
        cu_q, cu_k, most_q, most_k, keys = PREPARE(
            torch.tensor(cu, dtype=dtype), causal, rank, world_size
        )
        assert cu_q.dtype == cu_k.dtype == dtype
        got = (cu_q.tolist(), cu_k.tolist(), most_q, most_k, (keys.start, keys.stop))
        assert got == expected


INT32 = torch.int32
X = torch.randn(1, 2, 6, 8)
SHORT = X[:, :, :5]
# Equal shards on one rank do not imply equal sequences.
PAIR = (SequenceLayout.boundaries([0, 6, 12]), SequenceLayout.boundaries([0, 6, 15]))
CAUSAL_OF_PAIR = partial(sdpa_attention, is_causal=True, layout=PAIR)
KV_PACKED = flash_attn.flash_attn_kvpacked_func
QKV_PACKED = ring_flash_attn.ring_flash_attn_qkvpacked_func
NOT_BUILT = NotImplementedError


@pytest.mark.parametrize(
    ("function", "arguments", "error", "words"),
    [
        (PREPARE, (torch.tensor([0, 7]), True, 0, 2), ValueError, "multiple of world_size|7 and 2"),
        (PREPARE, (torch.tensor([0, 8]), True, 2, 2), ValueError, "rank must be in [0, 2), got 2"),
        (PREPARE, ([0, 3, 8], True, 0, 2), TypeError, "cu_seqlens must be|int32"),
        (PREPARE, (None, True, 0, 2), TypeError, "cu_seqlens must be|int32"),
        (PREPARE, (torch.tensor([0.0, 8.0]), True, 0, 2), TypeError, "cu_seqlens must be|int32"),
        (PREPARE, (torch.zeros(2, 2, dtype=INT32), True, 0, 2), ValueError, "1-D|two boundaries"),
        (PREPARE, (torch.tensor([1, 8]), True, 0, 2), ValueError, "must start at 0"),
        (adapters.substitute_hf_flash_attn, (None, 0), ValueError, "heads_k_stride"),
        (adapters.substitute_hf_flash_attn, ("world", 1), TypeError, "group"),
        (ring_flash_attn.update_ring_flash_attn_params, (None, None), TypeError, "cu_seqlens"),
        (
            ring_flash_attn.update_ring_flash_attn_params,
            (torch.tensor([1, 8]), None),
            ValueError,
            "0",
        ),
        (adapters.use_ring_attn, (1,), TypeError, "flag"),
        (flash_attn.flash_attn_with_kvcache, (None, None), NOT_BUILT, "tree_decode"),
        (context_parallel.set_rotate_method, ("ring",), ValueError, "allgather|alltoall|'ring'"),
        (sdpa_attention, (X, X, X, torch.zeros(6, 6)), NOT_BUILT, "attn_mask|got (6, 6)"),
        (sdpa_attention, (X, X, X, None, 0.5), NOT_BUILT, "dropout_p must be 0, got 0.5"),
        (
            sdpa_attention,
            (X[0], X[0], X[0]),
            ValueError,
            "query must be (batch, nheads, rows|got (2",
        ),
        (sdpa_attention, (X, X[:, :1], X[:, :1]), ValueError, "many heads unless enable_gqa=True"),
        (sdpa_attention, (X, SHORT, SHORT, None, 0, True), NOT_BUILT, "first query with the first"),
        (sdpa_attention, (3, X, X), TypeError, "query must be a torch.Tensor, got int"),
        (KV_PACKED, (X,), TypeError, "flash_attn_kvpacked_func() is missing|kv"),
        (partial(KV_PACKED, q=X), (X, X), TypeError, "q"),
        (partial(QKV_PACKED, softcap=1.0), (X,), TypeError, "softcap"),
        (QKV_PACKED, (X, 0.0, None, False, (-1, -1), None, False, False, None, 1), TypeError, ""),
        (CAUSAL_OF_PAIR, (X, X, X), NOT_BUILT, "as many queries as keys, got 12 and 15"),
    ],
)
def test_what_cannot_be_is_refused(
    function: Callable[..., Any], arguments: tuple[Any, ...], error: type[Exception], words: str
) -> None:
    with refused(error, words):
        function(*arguments)


def test_flex_attention_is_refused_compiled_or_not() -> None:
    """The operator stands for the compiled function, whose compilation takes seconds."""
    from torch._higher_order_ops.flex_attention import flex_attention as operator
    from torch.nn.attention.flex_attention import flex_attention

    # Uncompiled it compiles itself, and torch's compiler shows our error within its own.
    for function, options in ((flex_attention, ()), (operator, (None, ((), ()), 1.0, {}))):
        with route_sdpa(), pytest.raises(Exception, match="flex_attention is not routed"):
            function(X, X, X, *options)


@pytest.mark.parametrize(
    ("backend", "reported", "refused"),
    [("triton", False, False), ("aten", False, True), ("aten", True, False)],
)
def test_deterministic_is_promised_or_refused(backend: str, reported: bool, refused: bool) -> None:
    """Depends, on simulated CUDA, on the backend and on torch's deterministic setting."""
    qkv = (mock.Mock(device=torch.device("cuda")),) * 3
    options = flash_attn.Options(deterministic=True)
    choice = BackendChoice(backend, {})
    with (
        mock.patch.object(flash_attn, "select_backend", return_value=choice),
        mock.patch.object(torch, "are_deterministic_algorithms_enabled", return_value=reported),
    ):
        if refused:
            with pytest.raises(NotImplementedError, match=f"backend '{backend}'"):
                flash_attn.check_deterministic(qkv, options)
        else:
            flash_attn.check_deterministic(qkv, options)
