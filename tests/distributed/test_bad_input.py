"""Bad arguments: one error of the right type, on every rank, that says what to do; nothing is sent.

The table runs once in a ring of two, where making groups and sending are replaced by functions that
raise: an error that comes later than the checks shows as another error.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
from tests.distributed.pool import Ended, ended

# Global length; each of the two ranks holds half.
SEQLEN = 12
ROWS = SEQLEN // 2

Arguments = dict[str, Any]


# By name: what takes the place of good arguments, or makes it on the rank; the error; and what its
# message names, between bars.
Table = dict[str, tuple[Arguments | Callable[[], Arguments], type[Exception], str]]


def x(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def good() -> Arguments:
    """q, k, v of a rank: 4 heads of 8 over 2 of keys and values."""
    return {"q": x(1, ROWS, 4, 8), "k": x(1, ROWS, 2, 8), "v": x(1, ROWS, 2, 8)}


def packed(*cu_seqlens: int, **arguments: Any) -> Arguments:
    """The same without a batch, and documents."""
    tensors = {name: tensor[0] for name, tensor in good().items()}
    return {**tensors, "cu_seqlens": ints(*cu_seqlens), **arguments}


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def all_of(dtype: torch.dtype, device: str = "cpu") -> Arguments:
    return {name: tensor.to(dtype).to(device) for name, tensor in good().items()}


def zigzag(seqlen: int, world_size: int = 2) -> SequenceLayout:
    return SequenceLayout.zigzag(seqlen, world_size)


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def dtensor(*shape: int) -> Tensor:
    """A DTensor in the place of a plain tensor."""
    return distribute_tensor(x(*shape), mesh(2), [Replicate()])


def inference(*shape: int) -> Tensor:
    """A tensor that autograd cannot keep."""
    with torch.inference_mode():
        return x(*shape)


def with_tangent(*shape: int) -> Tensor:
    """A dual tensor; the level that it is of is left at the end of the table."""
    return forward_ad.make_dual(x(*shape), torch.ones(shape))


def transport(**options: Any) -> Arguments:
    return {"transport": TransportOptions(**options)}


SHAPES: Table = {
    "2-D q": ({"q": x(ROWS, 8)}, ValueError, "q (6, 8)|(batch, rows, nheads"),
    "5-D k": ({"k": x(1, 1, ROWS, 2, 8)}, ValueError, "k (1, 1, 6, 2, 8)"),
    "mixed dims": ({"v": x(ROWS, 2, 8)}, ValueError, "v (6, 2, 8)|all be"),
    "scalar q": ({"q": x()}, ValueError, "q ()"),
    "batch": ({"k": x(2, ROWS, 2, 8)}, ValueError, "one batch|k (2, 6, 2, 8)"),
    "batch of v": ({"v": x(2, ROWS, 2, 8)}, ValueError, "one batch|v (2,"),
    "batch of 0": (
        dict(zip("qkv", 3 * [x(0, ROWS, 2, 8)], strict=True)),
        ValueError,
        "batch|not be 0",
    ),
    "rows of k and v": ({"v": x(1, ROWS + 1, 2, 8)}, ValueError, "k and v|v (1, 7, 2, 8)"),
    "heads of k and v": ({"v": x(1, ROWS, 4, 8)}, ValueError, "k and v|heads|v (1, 6, 4, 8)"),
    "headdim of q and k": ({"q": x(1, ROWS, 4, 16)}, ValueError, "one headdim|q (1, 6, 4, 16)"),
    "heads not a multiple": ({"q": x(1, ROWS, 3, 8)}, ValueError, "multiple of nheads_kv|3 and 2"),
    "fewer heads than kv heads": ({"q": x(1, ROWS, 1, 8)}, ValueError, "nheads_kv|1 and 2"),
    "no heads": ({"q": x(1, ROWS, 0, 8)}, ValueError, "must not be 0|q (1, 6, 0,"),
    "no kv heads": ({"k": x(1, ROWS, 0, 8), "v": x(1, ROWS, 0, 8)}, ValueError, "must not be 0"),
    "headdim of 0": ({"q": x(1, ROWS, 4, 0), "k": x(1, ROWS, 2, 0)}, ValueError, "must not be 0"),
    "headdim_v of 0": ({"v": x(1, ROWS, 2, 0)}, ValueError, "must not be 0"),
}

TYPES: Table = {
    "int64": (all_of(torch.int64), TypeError, "q must be float16|torch.int64"),
    "bool": (all_of(torch.bool), TypeError, "q must be|torch.bool"),
    "complex": (all_of(torch.complex64), TypeError, "torch.complex64"),
    "float8": (all_of(torch.float8_e4m3fn), TypeError, "q must|float8_e4m3fn"),
    "mixed dtypes": ({"k": x(1, ROWS, 2, 8, dtype=torch.bfloat16)}, TypeError, "k torch.bfloat16"),
    "half a dtype": ({"v": x(1, ROWS, 2, 8, dtype=torch.float16)}, TypeError, "v torch.float16"),
    "numpy": ({"q": numpy.zeros((1, ROWS, 4, 8))}, TypeError, "q must be a torch.Tensor|ndarray"),
    "None": ({"v": None}, TypeError, "v must be a torch.Tensor|None"),
    "DTensor": (
        lambda: {"q": dtensor(1, ROWS, 4, 8)},
        TypeError,
        "q must be a plain tensor|.to_local()",
    ),
    "meta": (all_of(torch.float32, "meta"), ValueError, "q must be on cpu or cuda|meta"),
    "sparse": ({"q": x(1, ROWS, 4, 8).to_sparse()}, TypeError, "q must be a dense|q.to_dense()"),
    "mkldnn": ({"k": x(1, ROWS, 2, 8).to_mkldnn()}, TypeError, "k must be a dense|_mkldnn"),
    "jagged": (
        {"v": torch.nested.nested_tensor([x(ROWS, 2, 8)], layout=torch.jagged)},
        TypeError,
        "v must be a plain tensor|cu_seqlens",
    ),
    "tangent": (
        lambda: {"k": with_tangent(1, ROWS, 2, 8)},
        NotImplementedError,
        "k with a tangent",
    ),
    "inference": (
        lambda: {"q": x(1, ROWS, 4, 8).requires_grad_(), "v": inference(1, ROWS, 2, 8)},
        ValueError,
        "v was made under|v.clone()",
    ),
    "two devices": ({"v": x(1, ROWS, 2, 8, device="meta")}, ValueError, "one device|v on meta"),
}

OPTIONS: Table = {
    "scale nan": ({"softmax_scale": float("nan")}, ValueError, "softmax_scale|finite|nan"),
    # Operators that mask scores before they scale them make NaN of -inf * 0, +inf of -inf * -0.2.
    "scale 0": ({"softmax_scale": 0.0}, ValueError, "softmax_scale|positive|0"),
    "scale negative": ({"softmax_scale": -0.2}, ValueError, "positive|-0.2"),
    "scale inf": ({"softmax_scale": float("inf")}, ValueError, "finite|inf"),
    "scale of a smaller exponent": ({"softmax_scale": 1e-46}, ValueError, "softmax_scale|1e-46"),
    "scale of a greater exponent": ({"softmax_scale": 1e38}, ValueError, "softmax_scale|1e+38"),
    "softcap of a smaller exponent": ({"softcap": 1e-50}, ValueError, "softcap|0 for none|1e-50"),
    "softcap of a greater exponent": ({"softcap": 1e39}, ValueError, "softcap|2**63|1e+39"),
    "scale str": ({"softmax_scale": "auto"}, TypeError, "softmax_scale|float|str"),
    "scale bool": ({"softmax_scale": True}, TypeError, "softmax_scale|bool"),
    "scale tensor": ({"softmax_scale": x()}, TypeError, "softmax_scale must be a float|Tensor"),
    "softcap negative": ({"softcap": -30.0}, ValueError, "softcap must be positive|-30.0"),
    "softcap nan": ({"softcap": float("nan")}, ValueError, "softcap|nan"),
    "softcap inf": ({"softcap": float("inf")}, ValueError, "softcap|finite|inf"),
    "softcap None": ({"softcap": None}, TypeError, "softcap must be a float|None"),
    "softcap bool": ({"softcap": True}, TypeError, "softcap must be a float|bool"),
    "softcap tensor": ({"softcap": x()}, TypeError, "softcap|Tensor"),
    "softcap of aten": (
        {"softcap": 30.0, "backend": "aten"},
        NotImplementedError,
        "aten|reference",
    ),
    "sinks list": ({"sinks": [0.0] * 4}, TypeError, "sinks must be a torch.Tensor or None|list"),
    "sinks int": ({"sinks": ints(0, 0, 0, 0)}, TypeError, "sinks must be float16|torch.int32"),
    "sinks DTensor": (lambda: {"sinks": dtensor(4)}, TypeError, "sinks.to_local()"),
    "sinks of kv heads": ({"sinks": x(2)}, ValueError, "query head|(4,), got (2,)"),
    "sinks 2-D": ({"sinks": x(4, 1)}, ValueError, "shape (4,), got (4, 1)"),
    "sinks elsewhere": ({"sinks": x(4, device="meta")}, ValueError, "sinks|q's device cpu|meta"),
    "sinks sparse": ({"sinks": x(4).to_sparse()}, TypeError, "sinks must be a dense|to_dense"),
    "sinks tangent": (lambda: {"sinks": with_tangent(4)}, NotImplementedError, "sinks with"),
    "sinks inference": (
        lambda: {"q": x(1, ROWS, 4, 8).requires_grad_(), "sinks": inference(4)},
        ValueError,
        "sinks was made under|sinks.clone()",
    ),
    "return_lse int": ({"return_lse": 1}, TypeError, "return_lse must be a bool|int 1"),
    "same_bits int": ({"same_bits": 1}, TypeError, "same_bits must be a bool or None|int"),
    "same_bits of aten": (
        {"same_bits": True, "causal": True},
        NotImplementedError,
        "same_bits=True|triton",
    ),
    "causal int": ({"causal": 1}, TypeError, "causal must be a bool|int"),
    "causal None": ({"causal": None}, TypeError, "causal must be a bool|None"),
    "window of 3": ({"window_size": (1, 2, 3)}, ValueError, "window_size|(left, right)|(1, 2, 3)"),
    "window int": ({"window_size": 4}, ValueError, "window_size|pair|4"),
    "window None": ({"window_size": None}, ValueError, "window_size|pair|None"),
    "window -2": ({"window_size": (-2, 0)}, ValueError, "window_size|-1 for unbounded|(-2, 0)"),
    "window float": ({"window_size": (2.0, 0)}, TypeError, "window_size must hold ints|2.0"),
    "window bool": ({"window_size": (True, 0)}, TypeError, "window_size must hold ints|True"),
    "window of 64 bits": ({"window_size": (2**63, 0)}, ValueError, "9223372036854775808"),
    "window causal": ({"window_size": (4, 2), "causal": True}, ValueError, "causal=True|(4, 2)"),
    "dropout text": ({"dropout_p": "no"}, TypeError, "dropout_p must be a float|'no'"),
    "dropout": ({"dropout_p": 0.1}, NotImplementedError, "dropout_p must be 0|0.1"),
    "alibi": ({"alibi_slopes": x(4)}, NotImplementedError, "alibi_slopes must be None"),
    "unknown backend": ({"backend": "trition"}, ValueError, "backend must be|'aten'|'trition'"),
    "cudnn on cpu": ({"backend": "cudnn"}, NotImplementedError, "backend='cudnn'|cpu|usable here"),
    "unknown argument": ({"scale": 0.5}, TypeError, "scale"),
    "transport type": ({"transport": "nccl"}, TypeError, "transport must be TransportOptions|str"),
    "timeout 0": (transport(timeout=0), ValueError, "timeout|positive|0"),
    "timeout negative": (transport(timeout=-1.5), ValueError, "timeout|-1.5"),
    "timeout nan": (transport(timeout=float("nan")), ValueError, "timeout|nan"),
    "timeout inf": (transport(timeout=float("inf")), ValueError, "timeout|inf"),
    "timeout of no clock": (transport(timeout=1e15), ValueError, "1000000000000000"),
    "timeout below a millisecond": (transport(timeout=1e-12), ValueError, "timeout|1e-12"),
    "timeout str": (transport(timeout="3"), TypeError, "timeout|str"),
    "nccl_max_ctas on gloo": (transport(nccl_max_ctas=4), ValueError, "nccl_max_ctas|gloo"),
    "nccl_max_ctas 0": (transport(nccl_max_ctas=0), ValueError, "nccl_max_ctas|0"),
}

DOCUMENTS: Table = {
    "packed without cu_seqlens": (
        packed(0, SEQLEN, cu_seqlens=None),
        ValueError,
        "packed|q (6, 4, 8)",
    ),
    "list": (packed(cu_seqlens=[0, SEQLEN]), TypeError, "cu_seqlens must be an int32|list"),
    "float": (packed(cu_seqlens=torch.tensor([0.0, 12.0])), TypeError, "cu_seqlens|float32"),
    "2-D": (packed(cu_seqlens=ints(0, SEQLEN)[None]), ValueError, "cu_seqlens|1-D|(1, 2)"),
    "meta": (
        packed(cu_seqlens=ints(0, SEQLEN).to("meta")),
        ValueError,
        "cu_seqlens must|cpu|got meta",
    ),
    "k on meta": (
        packed(0, 12, cu_seqlens_k=ints(0, 12).to("meta")),
        ValueError,
        "cu_seqlens_k must|got meta",
    ),
    "sparse": (packed(cu_seqlens=ints(0, SEQLEN).to_sparse()), TypeError, "cu_seqlens.to_dense()"),
    "one boundary": (packed(SEQLEN), ValueError, "cu_seqlens|two boundaries|(1,)"),
    "not from 0": (packed(2, SEQLEN), ValueError, "cu_seqlens|start at 0|2"),
    "decreasing": (packed(0, 8, 5, SEQLEN), ValueError, "cu_seqlens|not decrease|8 then 5"),
    # With a name the length is cu_seqlens' own: what does not fit is this rank's number of rows.
    "end with a name": (packed(0, SEQLEN + 4), ValueError, "must have 8 rows|got 6|SequenceLayout"),
    "end with a layout": (packed(0, SEQLEN + 4, layout=zigzag(SEQLEN)), ValueError, "seqlen=12|16"),
    "batched end": (
        {"cu_seqlens": ints(0, 5), "layout": zigzag(SEQLEN)},
        ValueError,
        "cu_seqlens|5",
    ),
    "k without q": ({"cu_seqlens_k": ints(0, SEQLEN)}, ValueError, "cu_seqlens_k needs cu_seqlens"),
    "as many documents": (
        packed(0, 5, SEQLEN, cu_seqlens_k=ints(0, 3, 7, SEQLEN)),
        ValueError,
        "as many documents|2 and 3",
    ),
    "k not from 0": (
        packed(0, SEQLEN, cu_seqlens_k=ints(1, SEQLEN)),
        ValueError,
        "cu_seqlens_k|start at 0",
    ),
    "k of a wrong end": (
        packed(0, SEQLEN, cu_seqlens_k=ints(0, SEQLEN - 2), layout=zigzag(SEQLEN)),
        ValueError,
        "seqlen=12|10",
    ),
    "k of a type": (packed(0, SEQLEN, cu_seqlens_k=(0, SEQLEN)), TypeError, "cu_seqlens_k|tuple"),
}

LAYOUTS: Table = {
    "unknown name": ({"layout": "zigzak"}, ValueError, "layout must be|'zigzag'|'zigzak'"),
    "boundaries by name": ({"layout": "boundaries"}, ValueError, "layout must be|SequenceLayout"),
    "world size": ({"layout": zigzag(SEQLEN, 3)}, ValueError, "world_size=3|the group, 2"),
    "rows": ({"layout": zigzag(20)}, ValueError, "q of rank|pass a SequenceLayout, not its name"),
    "rows of k": ({"layout": (zigzag(SEQLEN), zigzag(20))}, ValueError, "k of rank|10 rows|got 6"),
    "whole tensors": (
        {
            "q": x(1, SEQLEN, 4, 8),
            "k": x(1, SEQLEN, 2, 8),
            "v": x(1, SEQLEN, 2, 8),
            "layout": zigzag(SEQLEN),
        },
        ValueError,
        "must have 6 rows|pass this rank's shard",
    ),
    "wrong type": ({"layout": 2}, TypeError, "layout must be|SequenceLayout|2"),
    "None": ({"layout": None}, TypeError, "layout must be|None"),
    "three": ({"layout": (zigzag(SEQLEN),) * 3}, TypeError, "layout must be|a pair"),
    "pair of names": ({"layout": ("zigzag", "zigzag")}, TypeError, "layout must be|'zigzag'"),
    "striped against zigzag": (
        {"layout": (zigzag(SEQLEN), SequenceLayout.striped(SEQLEN, 2))},
        NotImplementedError,
        "both be striped or neither|striped(",
    ),
}

STRATEGIES: Table = {
    "no such name": ({"strategy": "star"}, ValueError, "strategy must be one of|'ring'|'star'"),
    "an empty strategy": ({"strategy": ""}, ValueError, "strategy must be one of|'ring'|''"),
    "an empty layout": ({"layout": ""}, ValueError, "layout must be one of|'zigzag'|''"),
    "no strategy": ({"strategy": 2}, TypeError, "or a Strategy|int"),
    "no degree": ({"strategy": "hybrid"}, ValueError, "ulysses_degree|divides 2|two axes"),
    "degree that does not divide": (
        {"strategy": Strategy(inner_degree=3)},
        ValueError,
        "inner_degree|3 and 2",
    ),
}

GROUPS: Table = {
    "two axes": (
        lambda: {"group": mesh(1, 2, names=("dp", "cp"))},
        ValueError,
        "one axis|'hybrid'",
    ),
    "three axes": (
        lambda: {"group": mesh(1, 2, 1, names=("dp", "cp", "tp"))},
        ValueError,
        "(1, 2, 1)|mesh['dp']",
    ),
    "two axes without names": (lambda: {"group": mesh(2, 1)}, ValueError, "their names|(2, 1)"),
    "list": ({"group": [0, 1]}, TypeError, "group must be|DeviceMesh|list"),
    "name": ({"group": "cp"}, TypeError, "group must be|ProcessGroup|str"),
    "non-member": (
        {"group": dist.GroupMember.NON_GROUP_MEMBER},
        RuntimeError,
        "not a member of group",
    ),
}

TABLE: Table = {
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
    told = "backend='flash_attn'|pip install 'ring-attn[flash]'|usable here"
    TABLE["options: flash_attn is not installed"] = ({"backend": "flash_attn"}, ImportError, told)


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


def arguments_of(name: str) -> Arguments:
    """Those of an entry of the table."""
    changes = TABLE[name][0]
    return {**good(), **(changes() if callable(changes) else changes)}


def is_as_told(name: str, got: Ended) -> bool:
    """Whether the error is that of the entry, and its message names the facts."""
    _, error, says = TABLE[name]
    return got.error is error and all(part in got.text for part in says.split("|"))


def run_table() -> dict[str, Ended]:
    """Every entry of the table on this rank; and that no transport has been made for it."""
    before = set(p2p._transports)
    raised = {}
    with forward_ad.dual_level():
        for name in TABLE:
            arguments = arguments_of(name)
            with no_communication():
                raised[name] = ended(lambda arguments=arguments: ring_attention(**arguments))
    assert set(p2p._transports) == before
    return raised


@pytest.fixture(scope="module")
def raised(ranks: Any) -> list[dict[str, Ended]]:
    results: list[dict[str, Ended]] = ranks(2).run(run_table)
    return results


@pytest.mark.parametrize("name", TABLE)
def test_bad_argument(raised: list[dict[str, Ended]], name: str) -> None:
    for rank, one in enumerate(raised):
        got = one[name]
        assert is_as_told(name, got), (rank, got)
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


def run_non_member() -> Ended:
    """Rank 1 is not in the group, and says so instead of leaving rank 0 to wait."""
    group = dist.new_group([0])
    return ended(lambda: ring_attention(**good(), group=group))


def test_non_member(fresh_ranks: Callable[..., Any]) -> None:
    member, outsider = fresh_ranks(2).run(run_non_member)
    assert member.error is None, member
    assert outsider.error is RuntimeError and "not a member of group" in outsider.text


def run_unshard_table() -> list[Ended]:
    layout = zigzag(SEQLEN)
    with no_communication():
        return [
            ended(lambda: unshard(x(1, ROWS + 1, 4), layout)),
            ended(lambda: unshard(x(1, ROWS, 4), layout, dim=2)),
            ended(lambda: unshard(x(1, ROWS, 4), zigzag(SEQLEN, 4))),
            ended(lambda: unshard(x(1, ROWS, 4), layout, dim=3)),
            ended(lambda: unshard(x(1, ROWS, 4, device="meta"), layout)),
            ended(lambda: unshard(x(1, ROWS, 4), layout, group=[0, 1])),  # type: ignore[arg-type]
            ended(lambda: unshard(x(1, ROWS, 4), "zigzag")),  # type: ignore[arg-type]
            ended(lambda: unshard(x(1, ROWS, 4).to_sparse(), layout)),
            ended(lambda: unshard([1.0], layout)),  # type: ignore[arg-type]
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
    got = ended(call)
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
    for call in (ring_attention, select_backend):
        with forward_ad.dual_level():
            arguments = arguments_of(name)
            got = ended(lambda call=call, arguments=arguments: call(**arguments))
        assert is_as_told(name, got), got


@pytest.mark.parametrize("backend", ["cudnn", "trition"])
def test_select_backend_says_why_not(backend: str) -> None:
    name = "options: cudnn on cpu" if backend == "cudnn" else "options: unknown backend"
    got = ended(lambda: select_backend(**good(), backend=backend))
    assert is_as_told(name, got), got
