"""Bad arguments: one error of the right type, on every rank, that says what to do; nothing is sent.

The table runs once in a ring of two, where making groups and sending are replaced by functions that
raise: an error that comes later than the checks shows as another error.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from ring_attn import SequenceLayout, TransportOptions, ring_attention, select_backend, unshard
from ring_attn.core.strategy import Strategy
from ring_attn.transport import p2p

pytestmark = pytest.mark.dist

# Global length; each of the two ranks holds half.
SEQLEN = 12
ROWS = SEQLEN // 2

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Bad:
    """What takes the place of good arguments, made on the rank; the error; what its text says."""

    arguments: Callable[[], Arguments]
    error: type[Exception]
    says: tuple[str, ...]


def x(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """A tensor of that shape."""
    return torch.zeros(shape, dtype=dtype, device=device)


def good() -> Arguments:
    """q, k, v of a rank: 4 heads of 8 over 2 of keys and values."""
    return {"q": x(1, ROWS, 4, 8), "k": x(1, ROWS, 2, 8), "v": x(1, ROWS, 2, 8)}


def packed(*cu_seqlens: int, **arguments: Any) -> Arguments:
    """The same without a batch, and documents."""
    tensors = {name: tensor[0] for name, tensor in good().items()}
    return {**tensors, "cu_seqlens": ints(*cu_seqlens), **arguments}


def ints(*values: int) -> Tensor:
    """int32 values."""
    return torch.tensor(values, dtype=torch.int32)


def all_of(dtype: torch.dtype, device: str = "cpu") -> Arguments:
    """Good but for dtype and device."""
    return {name: tensor.to(dtype).to(device) for name, tensor in good().items()}


def zigzag(seqlen: int, world_size: int = 2) -> SequenceLayout:
    """A layout."""
    return SequenceLayout.zigzag(seqlen, world_size)


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    """A mesh over both ranks."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def dtensor() -> Tensor:
    """A DTensor in the place of a shard."""
    return distribute_tensor(x(1, ROWS, 4, 8), mesh(2), [Replicate()])


def inference(*shape: int) -> Tensor:
    """A tensor that autograd cannot keep."""
    with torch.inference_mode():
        return x(*shape)


def with_tangent(primal: Tensor) -> Tensor:
    """A dual tensor; the level that it is of is left at the end of the table."""
    return forward_ad.make_dual(primal, torch.ones_like(primal))


SHAPES: dict[str, Bad] = {
    "2-D q": Bad(lambda: {"q": x(ROWS, 8)}, ValueError, ("q (6, 8)", "(batch, rows, nheads")),
    "5-D k": Bad(lambda: {"k": x(1, 1, ROWS, 2, 8)}, ValueError, ("k (1, 1, 6, 2, 8)",)),
    "mixed dims": Bad(lambda: {"v": x(ROWS, 2, 8)}, ValueError, ("v (6, 2, 8)", "all be")),
    "scalar q": Bad(lambda: {"q": x()}, ValueError, ("q ()",)),
    "batch": Bad(lambda: {"k": x(2, ROWS, 2, 8)}, ValueError, ("one batch", "k (2, 6, 2, 8)")),
    "batch of v": Bad(lambda: {"v": x(2, ROWS, 2, 8)}, ValueError, ("one batch", "v (2,")),
    "batch of 0": Bad(
        lambda: {"q": x(0, 6, 4, 8), "k": x(0, 6, 2, 8), "v": x(0, 6, 2, 8)},
        ValueError,
        ("batch", "not be 0"),
    ),
    "rows of k and v": Bad(
        lambda: {"v": x(1, ROWS + 1, 2, 8)}, ValueError, ("k and v", "same rows", "v (1, 7, 2, 8)")
    ),
    "heads of k and v": Bad(
        lambda: {"v": x(1, ROWS, 4, 8)}, ValueError, ("k and v", "heads", "v (1, 6, 4, 8)")
    ),
    "headdim of q and k": Bad(
        lambda: {"q": x(1, ROWS, 4, 16)}, ValueError, ("one headdim", "q (1, 6, 4, 16)")
    ),
    "heads not a multiple": Bad(
        lambda: {"q": x(1, ROWS, 3, 8)}, ValueError, ("multiple of nheads_kv", "3 and 2")
    ),
    "fewer heads than kv heads": Bad(
        lambda: {"q": x(1, ROWS, 1, 8)}, ValueError, ("multiple of nheads_kv", "1 and 2")
    ),
    "no heads": Bad(lambda: {"q": x(1, ROWS, 0, 8)}, ValueError, ("must not be 0", "q (1, 6, 0,")),
    "no kv heads": Bad(
        lambda: {"k": x(1, ROWS, 0, 8), "v": x(1, ROWS, 0, 8)}, ValueError, ("must not be 0",)
    ),
    "headdim of 0": Bad(
        lambda: {"q": x(1, ROWS, 4, 0), "k": x(1, ROWS, 2, 0)}, ValueError, ("must not be 0",)
    ),
    "headdim_v of 0": Bad(lambda: {"v": x(1, ROWS, 2, 0)}, ValueError, ("must not be 0",)),
}

TYPES: dict[str, Bad] = {
    "int64": Bad(lambda: all_of(torch.int64), TypeError, ("q must be float16", "torch.int64")),
    "bool": Bad(lambda: all_of(torch.bool), TypeError, ("q must be", "torch.bool")),
    "complex": Bad(lambda: all_of(torch.complex64), TypeError, ("torch.complex64",)),
    "float8": Bad(lambda: all_of(torch.float8_e4m3fn), TypeError, ("q must", "float8_e4m3fn")),
    "mixed dtypes": Bad(
        lambda: {"k": x(1, ROWS, 2, 8, dtype=torch.bfloat16)},
        TypeError,
        ("one dtype", "q torch.float32", "k torch.bfloat16"),
    ),
    "half a dtype": Bad(
        lambda: {"v": x(1, ROWS, 2, 8, dtype=torch.float16)}, TypeError, ("v torch.float16",)
    ),
    "numpy": Bad(
        lambda: {"q": numpy.zeros((1, ROWS, 4, 8))},
        TypeError,
        ("q must be a torch.Tensor", "ndarray"),
    ),
    "None": Bad(lambda: {"v": None}, TypeError, ("v must be a torch.Tensor", "None")),
    "DTensor": Bad(
        lambda: {"q": dtensor()}, TypeError, ("q must be a plain tensor", ".to_local()")
    ),
    "meta": Bad(
        lambda: all_of(torch.float32, "meta"), ValueError, ("q must be on cpu or cuda", "meta")
    ),
    "sparse": Bad(
        lambda: {"q": x(1, ROWS, 4, 8).to_sparse()},
        TypeError,
        ("q must be a dense tensor", "torch.sparse_coo", "q.to_dense()"),
    ),
    "mkldnn": Bad(
        lambda: {"k": x(1, ROWS, 2, 8).to_mkldnn()}, TypeError, ("k must be a dense", "_mkldnn")
    ),
    "jagged": Bad(
        lambda: {"v": torch.nested.nested_tensor([x(ROWS, 2, 8)], layout=torch.jagged)},
        TypeError,
        ("v must be a plain tensor", "nested", "torch.jagged", "cu_seqlens"),
    ),
    "tangent": Bad(
        lambda: {"k": with_tangent(x(1, ROWS, 2, 8))},
        NotImplementedError,
        ("forward-mode", "k with a tangent", "backward()"),
    ),
    "inference": Bad(
        lambda: {"q": x(1, ROWS, 4, 8).requires_grad_(), "v": inference(1, ROWS, 2, 8)},
        ValueError,
        ("v was made under torch.inference_mode()", "v.clone()", "no_grad"),
    ),
    "two devices": Bad(
        lambda: {"v": x(1, ROWS, 2, 8, device="meta")},
        ValueError,
        ("one device", "q on cpu", "v on meta"),
    ),
}

OPTIONS: dict[str, Bad] = {
    "scale nan": Bad(
        lambda: {"softmax_scale": float("nan")}, ValueError, ("softmax_scale", "finite", "nan")
    ),
    # Operators that mask scores before they scale them make NaN of -inf * 0, +inf of -inf * -0.2.
    "scale 0": Bad(lambda: {"softmax_scale": 0.0}, ValueError, ("softmax_scale", "positive", "0")),
    "scale negative": Bad(lambda: {"softmax_scale": -0.2}, ValueError, ("positive", "-0.2")),
    "scale inf": Bad(lambda: {"softmax_scale": float("inf")}, ValueError, ("finite", "inf")),
    "scale of a smaller exponent": Bad(
        lambda: {"softmax_scale": 1e-46}, ValueError, ("softmax_scale", "2**-63", "1e-46")
    ),
    "scale of a greater exponent": Bad(
        lambda: {"softmax_scale": 1e38}, ValueError, ("softmax_scale", "2**63", "1e+38")
    ),
    "softcap of a smaller exponent": Bad(
        lambda: {"softcap": 1e-50}, ValueError, ("softcap", "2**-63", "0 for none", "1e-50")
    ),
    "softcap of a greater exponent": Bad(
        lambda: {"softcap": 1e39}, ValueError, ("softcap", "2**63", "1e+39")
    ),
    "scale str": Bad(
        lambda: {"softmax_scale": "auto"}, TypeError, ("softmax_scale", "float", "str")
    ),
    "scale bool": Bad(lambda: {"softmax_scale": True}, TypeError, ("softmax_scale", "bool")),
    "scale tensor": Bad(
        lambda: {"softmax_scale": x()}, TypeError, ("softmax_scale must be a float", "Tensor")
    ),
    "softcap negative": Bad(
        lambda: {"softcap": -30.0}, ValueError, ("softcap must be positive", "0 for none", "-30.0")
    ),
    "softcap nan": Bad(lambda: {"softcap": float("nan")}, ValueError, ("softcap", "nan")),
    "softcap inf": Bad(lambda: {"softcap": float("inf")}, ValueError, ("softcap", "finite", "inf")),
    "softcap None": Bad(lambda: {"softcap": None}, TypeError, ("softcap must be a float", "None")),
    "softcap bool": Bad(lambda: {"softcap": True}, TypeError, ("softcap must be a float", "bool")),
    "softcap tensor": Bad(lambda: {"softcap": x()}, TypeError, ("softcap", "Tensor")),
    "softcap of aten": Bad(
        lambda: {"softcap": 30.0, "backend": "aten"},
        NotImplementedError,
        ("backend='aten'", "no softcap", "'reference'"),
    ),
    "sinks list": Bad(
        lambda: {"sinks": [0.0] * 4}, TypeError, ("sinks must be a torch.Tensor or None", "list")
    ),
    "sinks int": Bad(
        lambda: {"sinks": ints(0, 0, 0, 0)}, TypeError, ("sinks must be float16", "torch.int32")
    ),
    "sinks DTensor": Bad(
        lambda: {"sinks": distribute_tensor(x(4), mesh(2), [Replicate()])},
        TypeError,
        ("sinks must be a plain tensor", "sinks.to_local()"),
    ),
    "sinks of kv heads": Bad(
        lambda: {"sinks": x(2)}, ValueError, ("one logit for each query head", "(4,), got (2,)")
    ),
    "sinks 2-D": Bad(lambda: {"sinks": x(4, 1)}, ValueError, ("shape (4,), got (4, 1)",)),
    "sinks elsewhere": Bad(
        lambda: {"sinks": x(4, device="meta")}, ValueError, ("sinks", "q's device cpu", "meta")
    ),
    "sinks sparse": Bad(
        lambda: {"sinks": x(4).to_sparse()}, TypeError, ("sinks must be a dense", "sinks.to_dense")
    ),
    "sinks tangent": Bad(
        lambda: {"sinks": with_tangent(x(4))}, NotImplementedError, ("sinks with a tangent",)
    ),
    "sinks inference": Bad(
        lambda: {"q": x(1, ROWS, 4, 8).requires_grad_(), "sinks": inference(4)},
        ValueError,
        ("sinks was made under", "sinks.clone()"),
    ),
    "return_lse int": Bad(
        lambda: {"return_lse": 1}, TypeError, ("return_lse must be a bool", "int 1")
    ),
    "same_bits int": Bad(
        lambda: {"same_bits": 1}, TypeError, ("same_bits must be a bool or None", "int")
    ),
    "same_bits of aten": Bad(
        lambda: {"same_bits": True, "causal": True},
        NotImplementedError,
        ("same_bits=True cannot be had", "backend 'aten'", "triton"),
    ),
    "causal int": Bad(lambda: {"causal": 1}, TypeError, ("causal must be a bool", "int")),
    "causal None": Bad(lambda: {"causal": None}, TypeError, ("causal must be a bool", "None")),
    "window of 3": Bad(
        lambda: {"window_size": (1, 2, 3)},
        ValueError,
        ("window_size", "(left, right)", "(1, 2, 3)"),
    ),
    "window int": Bad(lambda: {"window_size": 4}, ValueError, ("window_size", "pair", "4")),
    "window None": Bad(lambda: {"window_size": None}, ValueError, ("window_size", "pair", "None")),
    "window -2": Bad(
        lambda: {"window_size": (-2, 0)}, ValueError, ("window_size", "-1 for unbounded", "(-2, 0)")
    ),
    "window float": Bad(
        lambda: {"window_size": (2.0, 0)}, TypeError, ("window_size must hold ints", "2.0")
    ),
    "window bool": Bad(
        lambda: {"window_size": (True, 0)}, TypeError, ("window_size must hold ints", "True")
    ),
    "window of 64 bits": Bad(
        lambda: {"window_size": (2**63, 0)}, ValueError, ("window_size", "2**63 - 1", str(2**63))
    ),
    "window causal": Bad(
        lambda: {"window_size": (4, 2), "causal": True},
        ValueError,
        ("causal=True", "window_size=(4, 2)", "(4, 0)", "causal=False"),
    ),
    "dropout text": Bad(
        lambda: {"dropout_p": "no"}, TypeError, ("dropout_p must be a float", "'no'")
    ),
    "dropout": Bad(lambda: {"dropout_p": 0.1}, NotImplementedError, ("dropout_p must be 0", "0.1")),
    "alibi": Bad(
        lambda: {"alibi_slopes": x(4)}, NotImplementedError, ("alibi_slopes must be None",)
    ),
    "unknown backend": Bad(
        lambda: {"backend": "trition"}, ValueError, ("backend must be", "'aten'", "'trition'")
    ),
    "cudnn on cpu": Bad(
        lambda: {"backend": "cudnn"}, NotImplementedError, ("backend='cudnn'", "cpu", "usable here")
    ),
    "unknown argument": Bad(lambda: {"scale": 0.5}, TypeError, ("scale",)),
    "transport type": Bad(
        lambda: {"transport": "nccl"}, TypeError, ("transport must be TransportOptions", "str")
    ),
    "timeout 0": Bad(
        lambda: {"transport": TransportOptions(timeout=0)}, ValueError, ("timeout", "positive", "0")
    ),
    "timeout negative": Bad(
        lambda: {"transport": TransportOptions(timeout=-1.5)}, ValueError, ("timeout", "-1.5")
    ),
    "timeout nan": Bad(
        lambda: {"transport": TransportOptions(timeout=float("nan"))},
        ValueError,
        ("timeout", "nan"),
    ),
    "timeout inf": Bad(
        lambda: {"transport": TransportOptions(timeout=float("inf"))},
        ValueError,
        ("timeout", "inf"),
    ),
    "timeout of no clock": Bad(
        lambda: {"transport": TransportOptions(timeout=1e15)},
        ValueError,
        ("timeout", "1e+09", "1000000000000000"),
    ),
    "timeout below a millisecond": Bad(
        lambda: {"transport": TransportOptions(timeout=1e-12)},
        ValueError,
        ("timeout", "0.001", "1e-12"),
    ),
    "timeout str": Bad(
        lambda: {"transport": TransportOptions(timeout="3")},  # type: ignore[arg-type]
        TypeError,
        ("timeout", "str"),
    ),
    "nccl_max_ctas on gloo": Bad(
        lambda: {"transport": TransportOptions(nccl_max_ctas=4)},
        ValueError,
        ("nccl_max_ctas", "NCCL", "gloo"),
    ),
    "nccl_max_ctas 0": Bad(
        lambda: {"transport": TransportOptions(nccl_max_ctas=0)}, ValueError, ("nccl_max_ctas", "0")
    ),
}

DOCUMENTS: dict[str, Bad] = {
    "packed without cu_seqlens": Bad(
        lambda: packed(0, SEQLEN, cu_seqlens=None),
        ValueError,
        ("packed", "cu_seqlens", "q (6, 4, 8)"),
    ),
    "list": Bad(
        lambda: packed(cu_seqlens=[0, SEQLEN]), TypeError, ("cu_seqlens must be an int32", "list")
    ),
    "float": Bad(
        lambda: packed(cu_seqlens=torch.tensor([0.0, 12.0])), TypeError, ("cu_seqlens", "float32")
    ),
    "2-D": Bad(
        lambda: packed(cu_seqlens=ints(0, SEQLEN)[None]),
        ValueError,
        ("cu_seqlens", "1-D", "(1, 2)"),
    ),
    "meta": Bad(
        lambda: packed(cu_seqlens=ints(0, SEQLEN).to("meta")),
        ValueError,
        ("cu_seqlens must be on cpu or on q's device cpu", "got meta"),
    ),
    "k on meta": Bad(
        lambda: packed(0, SEQLEN, cu_seqlens_k=ints(0, SEQLEN).to("meta")),
        ValueError,
        ("cu_seqlens_k must be on cpu or on q's device cpu", "got meta"),
    ),
    "sparse": Bad(
        lambda: packed(cu_seqlens=ints(0, SEQLEN).to_sparse()),
        TypeError,
        ("cu_seqlens must be a dense tensor", "cu_seqlens.to_dense()"),
    ),
    "one boundary": Bad(
        lambda: packed(SEQLEN), ValueError, ("cu_seqlens", "two boundaries", "(1,)")
    ),
    "not from 0": Bad(lambda: packed(2, SEQLEN), ValueError, ("cu_seqlens", "start at 0", "2")),
    "decreasing": Bad(
        lambda: packed(0, 8, 5, SEQLEN), ValueError, ("cu_seqlens", "not decrease", "8 then 5")
    ),
    # With a name the length is cu_seqlens' own: what does not fit is this rank's number of rows.
    "end with a name": Bad(
        lambda: packed(0, SEQLEN + 4),
        ValueError,
        ("must have 8 rows", "got 6", "pass a SequenceLayout, not its name"),
    ),
    "end with a layout": Bad(
        lambda: packed(0, SEQLEN + 4, layout=zigzag(SEQLEN)),
        ValueError,
        ("seqlen=12", "cu_seqlens", "16"),
    ),
    "batched end": Bad(
        lambda: {"cu_seqlens": ints(0, 5), "layout": zigzag(SEQLEN)},
        ValueError,
        ("cu_seqlens", "5"),
    ),
    "k without q": Bad(
        lambda: {"cu_seqlens_k": ints(0, SEQLEN)}, ValueError, ("cu_seqlens_k needs cu_seqlens",)
    ),
    "as many documents": Bad(
        lambda: packed(0, 5, SEQLEN, cu_seqlens_k=ints(0, 3, 7, SEQLEN)),
        ValueError,
        ("as many documents", "2 and 3"),
    ),
    "k not from 0": Bad(
        lambda: packed(0, SEQLEN, cu_seqlens_k=ints(1, SEQLEN)),
        ValueError,
        ("cu_seqlens_k must start at 0", "1"),
    ),
    "k of a wrong end": Bad(
        lambda: packed(0, SEQLEN, cu_seqlens_k=ints(0, SEQLEN - 2), layout=zigzag(SEQLEN)),
        ValueError,
        ("seqlen=12", "cu_seqlens", "10"),
    ),
    "k of a type": Bad(
        lambda: packed(0, SEQLEN, cu_seqlens_k=(0, SEQLEN)), TypeError, ("cu_seqlens_k", "tuple")
    ),
}

LAYOUTS: dict[str, Bad] = {
    "unknown name": Bad(
        lambda: {"layout": "zigzak"}, ValueError, ("layout must be", "'zigzag'", "'zigzak'")
    ),
    "boundaries by name": Bad(
        lambda: {"layout": "boundaries"}, ValueError, ("layout must be", "SequenceLayout")
    ),
    "world size": Bad(
        lambda: {"layout": zigzag(SEQLEN, 3)}, ValueError, ("world_size=3", "the group, 2")
    ),
    "rows": Bad(
        lambda: {"layout": zigzag(20)},
        ValueError,
        (
            "q of rank",
            "must have 10 rows",
            "got 6",
            "layout.shard",
            "pass a SequenceLayout, not its name",
        ),
    ),
    "rows of k": Bad(
        lambda: {"layout": (zigzag(SEQLEN), zigzag(20))},
        ValueError,
        ("k of rank", "10 rows", "got 6"),
    ),
    "whole tensors": Bad(
        lambda: {
            "q": x(1, SEQLEN, 4, 8),
            "k": x(1, SEQLEN, 2, 8),
            "v": x(1, SEQLEN, 2, 8),
            "layout": zigzag(SEQLEN),
        },
        ValueError,
        ("must have 6 rows", "got 12", "pass this rank's shard"),
    ),
    "wrong type": Bad(lambda: {"layout": 2}, TypeError, ("layout must be", "SequenceLayout", "2")),
    "None": Bad(lambda: {"layout": None}, TypeError, ("layout must be", "None")),
    "three": Bad(
        lambda: {"layout": (zigzag(SEQLEN),) * 3}, TypeError, ("layout must be", "a pair")
    ),
    "pair of names": Bad(
        lambda: {"layout": ("zigzag", "zigzag")},
        TypeError,
        ("layout must be", "a pair", "'zigzag'"),
    ),
    "striped against zigzag": Bad(
        lambda: {"layout": (zigzag(SEQLEN), SequenceLayout.striped(SEQLEN, 2))},
        NotImplementedError,
        ("both be striped or neither", "zigzag(", "striped("),
    ),
}

STRATEGIES: dict[str, Bad] = {
    "no such name": Bad(
        lambda: {"strategy": "star"}, ValueError, ("strategy must be one of", "'ring'", "'star'")
    ),
    "an empty strategy": Bad(
        lambda: {"strategy": ""}, ValueError, ("strategy must be one of", "'ring'", "''")
    ),
    "an empty layout": Bad(
        lambda: {"layout": ""}, ValueError, ("layout must be one of", "'zigzag'", "''")
    ),
    "no strategy": Bad(lambda: {"strategy": 2}, TypeError, ("or a Strategy", "int")),
    "no degree": Bad(
        lambda: {"strategy": "hybrid"}, ValueError, ("ulysses_degree", "divides 2", "two axes")
    ),
    "degree that does not divide": Bad(
        lambda: {"strategy": Strategy(inner_degree=3)},
        ValueError,
        ("inner_degree must divide", "got 3 and 2"),
    ),
}

GROUPS: dict[str, Bad] = {
    "two axes": Bad(
        lambda: {"group": mesh(1, 2, names=("dp", "cp"))},
        ValueError,
        ("one axis", "1 x 2", "inner_degree 2", "'hybrid'"),
    ),
    "three axes": Bad(
        lambda: {"group": mesh(1, 2, 1, names=("dp", "cp", "tp"))},
        ValueError,
        ("one axis", "'dp'", "'cp'", "(1, 2, 1)", "mesh['dp']"),
    ),
    "two axes without names": Bad(
        lambda: {"group": mesh(2, 1)}, ValueError, ("two axes needs their names", "(2, 1)")
    ),
    "list": Bad(lambda: {"group": [0, 1]}, TypeError, ("group must be", "DeviceMesh", "list")),
    "name": Bad(lambda: {"group": "cp"}, TypeError, ("group must be", "ProcessGroup", "str")),
    "non-member": Bad(
        lambda: {"group": dist.GroupMember.NON_GROUP_MEMBER},
        RuntimeError,
        ("not a member of group",),
    ),
}

TABLE: dict[str, Bad] = {
    f"{group}: {name}": bad
    for group, bads in (
        ("shapes", SHAPES),
        ("types", TYPES),
        ("options", OPTIONS),
        ("documents", DOCUMENTS),
        ("layouts", LAYOUTS),
        ("strategies", STRATEGIES),
        ("groups", GROUPS),
    )
    for name, bad in bads.items()
}
if importlib.util.find_spec("flash_attn") is None:
    TABLE["options: flash_attn is not installed"] = Bad(
        lambda: {"backend": "flash_attn"},
        ImportError,
        ("backend='flash_attn'", "pip install 'ring-attn[flash]'", "usable here"),
    )


@dataclass(frozen=True)
class Raised:
    """What a rank got instead of a result."""

    error: type[BaseException] | None
    text: str
    alone: bool


@contextmanager
def no_communication() -> Iterator[None]:
    """Within it, whatever starts to communicate raises."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("communication before the checks")

    with ExitStack() as stack:
        names = ("new_group", "all_gather", "all_gather_object", "isend", "irecv")
        for name in names:
            stack.enter_context(mock.patch.object(dist, name, refuse))
        for name in ("call", "post", "all_gather"):
            stack.enter_context(mock.patch.object(p2p.P2PTransport, name, refuse))
        yield


def raised_by(call: Callable[[], object]) -> Raised:
    """The error of a call."""
    try:
        call()
    except Exception as error:
        alone = error.__cause__ is None and error.__context__ is None
        return Raised(type(error), str(error), alone)
    return Raised(None, "it ran", True)


def run_table() -> dict[str, Raised]:
    """Every entry of the table on this rank; and that no transport has been made for it."""
    before = set(p2p._transports)
    raised = {}
    with forward_ad.dual_level():
        for name, bad in TABLE.items():
            arguments = {**good(), **bad.arguments()}
            with no_communication():
                raised[name] = raised_by(lambda arguments=arguments: ring_attention(**arguments))
    assert set(p2p._transports) == before
    return raised


@pytest.fixture(scope="module")
def raised(ranks: Any) -> list[dict[str, Raised]]:
    """The table's errors by rank."""
    results: list[dict[str, Raised]] = ranks(2).run(run_table)
    return results


@pytest.mark.parametrize("name", TABLE)
def test_bad_argument(raised: list[dict[str, Raised]], name: str) -> None:
    bad = TABLE[name]
    for rank, one in enumerate(raised):
        got = one[name]
        assert got.error is bad.error, (rank, got)
        for part in bad.says:
            assert part in got.text, (rank, part, got.text)
        assert got.alone, "an error that came up while another was handled"
        assert got.text.strip() == got.text and "\n" not in got.text


def run_good() -> tuple[int, int]:
    """The arguments that the table changes run, and communicate."""
    out = ring_attention(**good())
    stats = p2p.open_p2p(dist.group.WORLD, TransportOptions()).stats  # type: ignore[arg-type]
    before = stats.messages
    documents = ring_attention(**packed(0, 5, SEQLEN))
    assert documents.shape == out.shape[1:]
    refused = 0
    try:
        with no_communication():
            ring_attention(**good())
    except AssertionError:
        refused = 1
    return stats.messages - before, refused


def test_good_arguments_run(ranks: Any) -> None:
    """So that each entry of the table fails by what it changes, and the refusal works."""
    assert ranks(2).run(run_good) == [(1, 1), (1, 1)]


def run_non_member() -> Raised:
    """Rank 1 is not in the group, and says so instead of leaving rank 0 to wait."""
    group = dist.new_group([0])
    return raised_by(lambda: ring_attention(**good(), group=group))


def test_non_member(fresh_ranks: Callable[..., Any]) -> None:
    member, outsider = fresh_ranks(2).run(run_non_member)
    assert member.error is None, member
    assert outsider.error is RuntimeError and "not a member of group" in outsider.text


def run_unshard_table() -> list[Raised]:
    """Wrong arguments of unshard."""
    layout = zigzag(SEQLEN)
    with no_communication():
        return [
            raised_by(lambda: unshard(x(1, ROWS + 1, 4), layout)),
            raised_by(lambda: unshard(x(1, ROWS, 4), layout, dim=2)),
            raised_by(lambda: unshard(x(1, ROWS, 4), zigzag(SEQLEN, 4))),
            raised_by(lambda: unshard(x(1, ROWS, 4), layout, dim=3)),
            raised_by(lambda: unshard(x(1, ROWS, 4, device="meta"), layout)),
            raised_by(lambda: unshard(x(1, ROWS, 4), layout, group=[0, 1])),  # type: ignore[arg-type]
            raised_by(lambda: unshard(x(1, ROWS, 4), "zigzag")),  # type: ignore[arg-type]
            raised_by(lambda: unshard(x(1, ROWS, 4).to_sparse(), layout)),
            raised_by(lambda: unshard([1.0], layout)),  # type: ignore[arg-type]
        ]


def test_unshard_of_bad_arguments(ranks: Any) -> None:
    for results in ranks(2).run(run_unshard_table):
        errors = [(got.error, got.alone) for got in results]
        assert errors == [(ValueError, True)] * 5 + [(TypeError, True)] * 4, results
        assert "must have 6 rows" in results[0].text and "got 7" in results[0].text
        assert "got 4" in results[1].text
        assert "world_size=4" in results[2].text and "the group, 2" in results[2].text
        words = ("dim", "meta", "group", "layout", "x must be a dense", "x must be a torch.Tensor")
        for word, got in zip(words, results[3:], strict=True):
            assert word in got.text, (word, got)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ring_attention(**good()),
        lambda: ring_attention(**packed(0, SEQLEN)),
        lambda: unshard(x(1, ROWS, 4), zigzag(SEQLEN)),
    ],
    ids=["ring_attention", "packed", "unshard"],
)
def test_no_process_group(call: Callable[[], object]) -> None:
    assert not dist.is_initialized()
    got = raised_by(call)
    assert got.error is RuntimeError and got.alone
    for part in ("no process group", "init_process_group", "torchrun"):
        assert part in got.text


# A DTensor cannot be made without a process group.
TENSORS = [
    name
    for name in TABLE
    if name.startswith(("shapes", "types")) and name.split()[1] not in ("DTensor", "inference")
]


@pytest.mark.parametrize("name", TENSORS)
def test_bad_tensors_without_a_process_group(name: str) -> None:
    """What is wrong with the tensors is said first: no launcher is needed to find it."""
    bad = TABLE[name]
    for call in (ring_attention, select_backend):
        with forward_ad.dual_level():
            arguments = {**good(), **bad.arguments()}
            got = raised_by(lambda call=call, arguments=arguments: call(**arguments))
        assert got.error is bad.error and all(part in got.text for part in bad.says), got


@pytest.mark.parametrize("backend", ["cudnn", "trition"])
def test_select_backend_says_why_not(backend: str) -> None:
    bad = TABLE["options: cudnn on cpu" if backend == "cudnn" else "options: unknown backend"]
    got = raised_by(lambda: select_backend(**good(), backend=backend))
    assert got.error is bad.error and all(part in got.text for part in bad.says), got


def test_table_is_not_trivial() -> None:
    assert len(TABLE) >= 40
    assert {bad.error for bad in TABLE.values()} >= {
        ValueError,
        TypeError,
        NotImplementedError,
        RuntimeError,
    }
