"""ContextParallel on modules as models have them: every strategy and order of dims, exact.

How q, k, v are passed to a module: tests/unit/test_parallel_style.py.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from ring_attn import ContextParallel, SequenceLayout, Strategy, TransportOptions, parallelize
from ring_attn.core.layout import Layouts
from ring_attn.core.mask import Mask
from ring_attn.testing import Case, Heads, expected, random_sinks
from ring_attn.testing.ranks import arguments_of
from ring_attn.transport.p2p import open_p2p
from tests.bounds import assert_holds
from tests.cold import assert_compiles
from tests.distributed.pool import mesh_of, on_ranks
from tests.refusals import refused, says

pytestmark = pytest.mark.gloo  # code around calls; others run calls on streams

SEQLEN = 100  # 25 rows on each of 4 ranks
UNEVEN = 97
SCALE = 0.3

# From (batch, rows, heads, headdim); each is its own inverse.
ORDERS = {"BSHD": (0, 1, 2, 3), "BHSD": (0, 2, 1, 3), "SBHD": (1, 0, 2, 3)}


class Answer(NamedTuple):
    """The output of models that can also return attention weights."""

    weights: None
    attention: Tensor


class Core(nn.Module):
    """Attention as models write it, over (batch, heads, rows, headdim) inside."""

    def __init__(self, order: str = "BSHD", returns: str = "tensor", **options: Any) -> None:
        super().__init__()
        self.order, self.returns = order, returns
        self.options = options or {"is_causal": True, "scale": SCALE, "enable_gqa": True}
        self.seen: tuple[int, ...] = ()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        self.seen = tuple(q.shape)
        to_bhsd = {"BSHD": (0, 2, 1, 3), "BHSD": (0, 1, 2, 3), "SBHD": (1, 2, 0, 3)}[self.order]
        q, k, v = (x.permute(to_bhsd) for x in (q, k, v))
        out = self.attend(q, k, v).permute([to_bhsd.index(dim) for dim in range(4)])
        if self.returns == "flat":  # heads in one dim, as the next projection needs
            batch, rows = self.seen[:2]
            return out.reshape(batch, rows, -1)
        if self.returns == "whole":
            return out.redistribute(placements=[Replicate()])  # type: ignore[attr-defined]
        others = {"list": [out, None], "two": (out, q), "none": None}
        others |= {"tuple": (None, out), "Answer": Answer(None, out)}
        return others.get(self.returns, out)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.options)


class Never(Core):
    """A module whose own attention must not run."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sinks = nn.Parameter(random_sinks(3))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise AssertionError("this forward is replaced")


class Way(NamedTuple):
    """A way to call: order of dims, container of the output, and form of the tensors."""

    order: str = "BSHD"
    returns: str = "tensor"
    form: str = "plain"

    @property
    def output_index(self) -> int | None:
        """The index of the attention, where the style needs it or may have it."""
        needs_it = self.form == "DTensor" and self.returns != "tensor"
        if not needs_it and self.returns != "Answer":
            return None
        return 0 if self.returns == "list" else -1


WAYS = [
    Way("BSHD", "tensor"),
    Way("BSHD", "tuple"),
    Way("BHSD", "Answer"),
    Way("SBHD", "list", "DTensor"),
]
TUPLE = [Way("BHSD", "tuple")]
DTENSOR = [Way("BHSD", "tuple", "DTensor")]


def both(layout: SequenceLayout) -> Layouts:
    return layout, layout


CHUNKS = both(SequenceLayout.boundaries([0, 25, 50, 75, 97]))  # as torch.chunk splits 97 rows
NESTED = both(SequenceLayout.boundaries([0, 25, 49, 73, 97]))  # halves of 49 and 48, each in two
HALVES = both(SequenceLayout.contiguous(UNEVEN, 2))  # 49 and 48
ZIGZAG = both(SequenceLayout.zigzag(UNEVEN, 2))
OTHER_LENGTHS = SequenceLayout.zigzag(37, 2), SequenceLayout.contiguous(61, 2)


def causal(layout: str | Layouts = "contiguous") -> Case:
    seqlen = SEQLEN if isinstance(layout, str) else layout[0].seqlen
    heads = Heads(4, 2, 8, 8)
    return Case("causal", layout, seqlen=seqlen, heads=heads, softmax_scale=SCALE)


def odd_heads(mask: Mask, layout: str | Layouts = "contiguous", **scores: Any) -> Case:
    """Three query heads, which two ranks cannot share evenly, and one kv head."""
    return Case(mask, layout, heads=Heads(3, 1, 8, 8), batch=2, **scores)


def with_sinks(module: nn.Module) -> dict[str, Any]:
    return {"causal": True, "window_size": (20, 0), "softcap": 5.0, "sinks": module.sinks}


class Use(NamedTuple):
    """Options of a style, the layout of which is the case's, and ways to call a module."""

    options: dict[str, Any]
    case: Case = causal()
    ways: list[Way] = WAYS
    module: Callable[..., nn.Module] = Core
    mesh: tuple[int, ...] = (4,)
    has_layout: bool = True  # whether the style has the layout; "contiguous" DTensors need none


CO_DS = {"strategy": "all_gather"}
USES = {
    "ring": Use({}),
    "ring zigzag": Use({}, causal("zigzag")),
    "all_gather": Use({"strategy": "all_gather", "degree": 1}),
    "ulysses": Use({"strategy": "ulysses"}, causal("striped")),
    "ulysses by degree": Use({"degree": 4}),
    "hybrid": Use({"degree": 2}, causal("zigzag")),
    "hybrid all_gather": Use({"strategy": "all_gather", "degree": 2}),
    "co x ds": Use(CO_DS, causal("zigzag"), mesh=(2, 2)),
    "double ring, co x ds": Use({"strategy": "double_ring"}, mesh=(2, 2)),
    "q_exchange": Use({"strategy": "q_exchange"}),
    "value": Use({"strategy": Strategy(inner_degree=2)}),
    "uneven": Use({}, causal(CHUNKS), TUPLE),
    "uneven co x ds": Use(CO_DS, causal(NESTED), TUPLE, mesh=(2, 2)),
    "uneven DTensor": Use({}, causal(CHUNKS), DTENSOR, has_layout=False),
    "local DTensor": Use(
        {"inside": "local", "degree": 2}, causal(CHUNKS), DTENSOR, has_layout=False
    ),
    "local zigzag": Use({"inside": "local"}, causal(both(SequenceLayout.zigzag(97, 4))), TUPLE),
    # The module joins heads by the shape of its inputs.
    "reshapes": Use({}, causal(HALVES), [Way(returns="flat")], mesh=(2,)),
    "uneven heads": Use(
        {"degree": 2},
        odd_heads(Mask(50, 98)),
        [Way("BHSD")],
        partial(Core, enable_gqa=True),
        (2,),
    ),
    "replaced, of other lengths": Use(
        {"replace": {"causal": True}, "strategy": "ulysses"},
        odd_heads(Mask(37, 61, causal=True), OTHER_LENGTHS),
        [Way("BHSD")],
        Never,
        (2,),
    ),
    "replaced, by a function": Use(
        {"replace": with_sinks},
        odd_heads(Mask(UNEVEN, UNEVEN, True, (20, 0)), ZIGZAG, softcap=5.0, sinks=True),
        [Way("SBHD")],
        Never,
        (2,),
    ),
    "replaced DTensors": Use(
        {"replace": {"causal": True, "softmax_scale": SCALE}},
        causal(HALVES),
        [Way("BHSD", form="DTensor")],
        Never,
        (2,),
        has_layout=False,
    ),
}


def placed(x: Tensor, whole: Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """This rank's rows as a DTensor with the shape of the whole."""
    whole = whole.contiguous()
    placements = [Shard(dim)] * mesh.ndim
    shape, stride = whole.shape, whole.stride()
    return DTensor.from_local(x.contiguous(), mesh, placements, shape=shape, stride=stride).detach()


def shards_of(case: Case, mesh: DeviceMesh, way: Way) -> list[Tensor]:
    """This rank's q, k, v and dout, as they are passed to the module."""
    order, leaves = ORDERS[way.order], []
    shards, _ = arguments_of(case, mesh.size(), dist.get_rank())
    for x, shard in zip(case.build_inputs(), shards, strict=True):
        shard = shard.permute(order)
        if way.form == "DTensor":
            shard = placed(shard, x.permute(order), mesh, way.order.index("S"))
        leaves.append(shard.requires_grad_())
    return leaves


def run_module(module: nn.Module, case: Case, mesh: DeviceMesh, way: Way) -> dict[str, Tensor]:
    """This rank's out, dq, dk, dv, as (batch, rows, heads, headdim), and its part of dsinks."""
    *qkv, dout = shards_of(case, mesh, way)
    out = module(*qkv)
    if way.returns in ("tuple", "list", "Answer"):
        assert type(out).__name__ == way.returns and len(out) == 2
        out = out[0 if way.returns == "list" else 1]
    if way.returns == "flat":
        assert out.shape == (*qkv[0].shape[:2], 32)
        out = out.unflatten(2, (4, 8))
    assert isinstance(out, DTensor) == (way.form == "DTensor")
    if isinstance(out, DTensor):
        assert out.placements == qkv[0].placements and out.shape == qkv[0].shape
    wanted = [*qkv, module.sinks] if case.sinks else qkv
    found = (out, *torch.autograd.grad(out, wanted, dout.detach()))
    local = [x.to_local() if isinstance(x, DTensor) else x for x in found]
    names = ("out", "dq", "dk", "dv", "dsinks")[: len(local)]
    order = ORDERS[way.order]
    return {
        name: x.detach().permute(order) if x.ndim == 4 else x.detach()
        for name, x in zip(names, local, strict=True)
    }


def run_use(name: str) -> list[dict[str, Tensor]]:
    """This rank's results of each way."""
    options, case, ways, make, shape, has_layout = USES[name]
    mesh, results = mesh_of(*shape), []
    for way in ways:
        seq_dim, head_dim = way.order.index("S"), way.order.index("H")
        style = ContextParallel(
            seq_dim=seq_dim,
            head_dim=head_dim,
            layout=case.layout if has_layout else "contiguous",
            output_index=way.output_index,
            **options,
        )
        module = parallelize_module(make(way.order, way.returns), mesh, style)
        results.append(run_module(module, case, mesh, way))
        if "replace" in options:
            assert module.seen == ()
            continue
        seen = [*case.build_inputs().q.permute(ORDERS[way.order]).shape]
        if options.get("inside") == "local":
            seen[seq_dim] = case.build_layouts(mesh.size())[0].shard_len(dist.get_rank())
        assert module.seen == tuple(seen)
    return results


@pytest.mark.parametrize("name", USES)
@pytest.mark.sweep(3)
def test_every_strategy_in_every_form(ranks: Any, one_thread: None, name: str) -> None:
    use = USES[name]
    world_size = math.prod(use.mesh)
    of_q, of_kv = use.case.build_layouts(world_size)
    layouts = {"out": of_q, "dq": of_q, "dk": of_kv, "dv": of_kv}
    for way, *by_rank in zip(use.ways, *ranks(world_size).run(run_use, name), strict=True):
        got = {name: x.unshard([one[name] for one in by_rank]) for name, x in layouts.items()}
        if use.case.sinks:
            got["dsinks"] = by_rank[0]["dsinks"] + by_rank[1]["dsinks"]
        assert_holds(got, *expected(use.case), way)


@pytest.mark.parametrize(
    ("layout", "options", "form"),
    [
        (SequenceLayout.boundaries([0, 49, UNEVEN]), {"inside": "local"}, "plain"),
        pytest.param(ZIGZAG[0], {}, "plain", marks=pytest.mark.slow),
        pytest.param(ZIGZAG[0], {}, "DTensor", marks=pytest.mark.slow),
    ],
    ids=["local", "global", "global DTensor"],
)
@on_ranks(2)
def test_a_module_compiles_with_a_new_layout(
    layout: SequenceLayout, options: dict[str, Any], form: str
) -> None:
    """As one graph, with the bits of eager."""
    style = ContextParallel(layout=copy.deepcopy(layout), **options)  # without cached values
    core = parallelize(Core(), mesh_of(2), {"": style})
    *qkv, _ = shards_of(causal(both(layout)), mesh_of(2), Way(form=form))
    assert_compiles(core, [qkv], "aot_eager", fullgraph=True)


@on_ranks(4)
def test_rows_and_heads_over_two_axes() -> None:
    """With tensor parallelism, DTensors on (cp, tp) have rows over one axis and heads over one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    core = parallelize_module(Core("BHSD"), mesh["cp"], ContextParallel(seq_dim=2, head_dim=1))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    cp, tp = coordinate
    layout, placements = SequenceLayout.contiguous(SEQLEN, 2), [Shard(2), Shard(1)]
    leaves = []
    for x in causal().build_inputs():
        x = layout.shard(x, cp).transpose(1, 2).chunk(2, 1)[tp].contiguous()
        leaves.append(DTensor.from_local(x, mesh, placements).detach().requires_grad_())
    *qkv, dout = leaves
    out = core(*qkv)
    assert out.placements == (Shard(2), Shard(1)) and out.shape == (2, 4, SEQLEN, 8)
    assert core.seen == (2, 4, SEQLEN, 8)
    found = (out, *torch.autograd.grad(out, qkv, dout.detach()))
    named = zip(("out", "dq", "dk", "dv"), found, strict=True)
    assert_holds({n: x.full_tensor().transpose(1, 2) for n, x in named}, *expected(causal()))

    one_head = torch.empty(2, 1, SEQLEN, 8)
    local = torch.zeros(2, 1 - tp, SEQLEN // 2, 8)
    shape, stride = one_head.shape, one_head.stride()
    k = DTensor.from_local(local, mesh, placements, shape=shape, stride=stride)
    with refused(ValueError, "the 1 heads of k|the 2 ranks"):
        core(qkv[0], k, k)


# -- errors


def plain_qkv(rows: int = 8, heads: int = 3) -> list[Tensor]:
    return [*torch.randn(3, 1, rows, heads, 4)]


class NoAttention(nn.Module):
    """A module with an attention module's arguments, but no attention."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q + k + v


def sharded(dim: int = 1) -> list[Tensor]:
    return [DTensor.from_local(x, mesh_of(2), [Shard(dim)]) for x in plain_qkv(heads=2)]


def try_style(
    style: dict[str, Any],
    module: Callable[[], nn.Module] = Core,
    qkv: Callable[[], list[Any]] = plain_qkv,
    shape: tuple[int, ...] = (2,),
) -> None:
    parallelize_module(module(), mesh_of(*shape), ContextParallel(**style))(*qkv())


RUNS = SequenceLayout.boundaries([0, 8, 8])


def returning(form: str) -> dict[str, Any]:
    """A module that returns its output in the given form, and input tensors for it."""
    return {"module": partial(Core, returns=form), "qkv": partial(plain_qkv, heads=2)}


# The style, words of the message, and the rest of the call. Strategies, layouts and arguments of
# scaled_dot_product_attention have their own checks, and tests of these.
ERRORS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "degree 0": ({"degree": 0}, "degree|at least 1|0", {}),
    "degree and value": ({"degree": 2, "strategy": Strategy()}, "degree=2|strategy by name", {}),
    "degree and mesh": ({"degree": 2}, "must be 1|got 2", {"shape": (2, 1)}),
    "rows of chunks": (
        {"layout": RUNS},
        "[4, 4]|[8, 0]",
        {"qkv": lambda: plain_qkv([8, 0][dist.get_rank()])},
    ),
    "no sdpa": ({}, "did not call F.scaled_dot_product_attention", {"module": NoAttention}),
    "seq_dim": ({"seq_dim": 2, "head_dim": 1}, "seq_dim=2", {}),
    "placement": ({}, "along their rows|Shard(1)", {"qkv": lambda: sharded(2)}),
    "forms": (
        {},
        "q is a DTensor|k is a Tensor",
        {"qkv": lambda: [*sharded()[:1], *plain_qkv()[:2]]},
    ),
    "types": ({}, "k must be a torch.Tensor", {"qkv": lambda: [*plain_qkv()[:1], 1.0, 2.0]}),
    "missing": ({}, "without v|index 2|'v'", {"qkv": lambda: plain_qkv()[:2]}),
    "indices": ({"qkv_indices": (0, 1, 3)}, "3 positional|v at index 3", {}),
    "keywords": ({"qkv_names": ("query", "k", "v")}, "Core|'query'", {}),
    "plain output": ({}, "got DTensors but returned no DTensor", returning("none")),
    "output dim": ({}, "sharded along its rows|Replicate", returning("whole")),
    "output_index": ({"output_index": 2}, "output_index=2|2 elements", returning("tuple")),
    "output type": ({"output_index": 0}, "output_index=0|NoneType", returning("tuple")),
    "no container": ({"output_index": 0}, "a tuple or list|DTensor", returning("tensor")),
    "no output_index": (
        {"inside": "local"},
        "got DTensors|pass output_index",
        {"module": partial(Core, returns="tuple"), "qkv": sharded},
    ),
    "arguments": ({"replace": {}}, "[3]", {"qkv": lambda: [*plain_qkv(), 5]}),
    "options of a function": ({"replace": lambda module: {"group": None}}, "['group']", {}),
    "type of a function": ({"replace": lambda module: 1.5}, "a dict of options|float", {}),
}

# Mistakes in a module's output, found once it has run.
AFTER = (
    "plain output",
    "output dim",
    "output_index",
    "output type",
    "no container",
    "no output_index",
)


@on_ranks(2)
def test_errors_say_what_is_wrong_on_every_rank() -> None:
    """Each wrong use is refused before the ring has sent a message."""
    for name, (style, words, others) in ERRORS.items():
        ring = open_p2p(mesh_of(2).get_group(), TransportOptions())
        before = ring.stats.messages
        with pytest.raises((ValueError, TypeError, NotImplementedError)) as error:
            try_style(style, **others)
        assert says(str(error.value), words), (name, error.value)
        assert ring.stats.messages == before or name in AFTER, name
