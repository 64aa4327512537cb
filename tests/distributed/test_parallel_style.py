"""ContextParallel on modules as models have them: every strategy, order of dims and form, exact.

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
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from ring_attn import ContextParallel, SequenceLayout, Strategy, TransportOptions, parallelize
from ring_attn.core.layout import Layouts
from ring_attn.core.mask import Mask
from ring_attn.testing import Case, Heads, expected
from ring_attn.testing.ranks import arguments_of
from ring_attn.transport.p2p import open_p2p
from tests.bounds import assert_holds
from tests.cold import assert_compiles
from tests.distributed.pool import mesh_of, on_ranks
from tests.refusals import says

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
        others = {"list": [out, None], "two": (out, q), "transposed": out.transpose(1, 2)}
        others |= {"tuple": (None, out), "Answer": Answer(None, out)}
        return others.get(self.returns, out)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.options)


class Way(NamedTuple):
    """A way to call: order of dims, plain or DTensor, and the container of the output."""

    order: str = "BSHD"
    form: str = "plain"
    returns: str = "tensor"


WAYS = [
    Way("BSHD", "plain", "tensor"),
    Way("BSHD", "DTensor", "tuple"),
    Way("BHSD", "plain", "Answer"),
    Way("BHSD", "DTensor", "tensor"),
    Way("SBHD", "plain", "list"),
    Way("SBHD", "DTensor", "tensor"),
]
PLAIN, DTENSOR = [Way("BHSD", "plain", "tuple")], [Way("BHSD", "DTensor", "tuple")]


def both(layout: SequenceLayout) -> Layouts:
    return layout, layout


CHUNKS = both(SequenceLayout.boundaries([0, 25, 50, 75, 97]))  # as torch.chunk splits 97 rows
NESTED = both(SequenceLayout.boundaries([0, 25, 49, 73, 97]))  # halves of 49 and 48, each in two
HALVES = both(SequenceLayout.contiguous(UNEVEN, 2))  # 49 and 48
ZIGZAG = both(SequenceLayout.zigzag(UNEVEN, 2))


def causal(layout: str | Layouts = "contiguous") -> Case:
    seqlen = SEQLEN if isinstance(layout, str) else layout[0].seqlen
    heads = Heads(4, 2, 8, 8)
    return Case("causal", layout, seqlen=seqlen, heads=heads, softmax_scale=SCALE)


def odd_heads(mask: Mask, layout: str | Layouts = "contiguous", **scores: Any) -> Case:
    """Three query heads, which two ranks cannot share evenly, and one kv head."""
    return Case(mask, layout, heads=Heads(3, 1, 8, 8), batch=2, **scores)


class Use(NamedTuple):
    """Options of a style, the layout of which is the case's, and ways to call a module."""

    options: dict[str, Any]
    case: Case = causal()
    ways: list[Way] = WAYS
    module: Callable[..., nn.Module] = Core
    mesh: tuple[int, ...] = (4,)
    tells_layout: bool = True


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
    "uneven": Use({}, causal(CHUNKS), PLAIN),
    "uneven DTensor": Use({}, causal(CHUNKS), DTENSOR, tells_layout=False),
    "uneven co x ds": Use(CO_DS, causal(NESTED), DTENSOR, mesh=(2, 2), tells_layout=False),
    "local zigzag": Use({"inside": "local"}, causal(both(SequenceLayout.zigzag(97, 4))), PLAIN),
    "local DTensor": Use(
        {"inside": "local", "degree": 2}, causal(CHUNKS), DTENSOR, tells_layout=False
    ),
    # The module joins heads by the shape of its inputs.
    "reshapes": Use({}, causal(HALVES), [Way(returns="flat")], mesh=(2,)),
    "uneven heads": Use(
        {"degree": 2},
        odd_heads(Mask(50, 98)),
        [Way("BHSD")],
        partial(Core, enable_gqa=True),
        (2,),
    ),
}


def placed(x: Tensor, whole: Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """This rank's rows as a DTensor of the whole's shape."""
    shape = whole.contiguous()
    return DTensor.from_local(
        x.contiguous(), mesh, [Shard(dim)] * mesh.ndim, shape=shape.shape, stride=shape.stride()
    ).detach()


def shards_of(case: Case, mesh: DeviceMesh, way: Way) -> list[Tensor]:
    """This rank's q, k, v and dout in the form of a call."""
    order, leaves = ORDERS[way.order], []
    shards, _ = arguments_of(case, mesh.size(), dist.get_rank())
    for x, shard in zip(case.build_inputs(), shards, strict=True):
        shard = shard.permute(order)
        if way.form == "DTensor":
            shard = placed(shard, x.permute(order), mesh, way.order.index("S"))
        leaves.append(shard.requires_grad_())
    return leaves


def run_module(module: nn.Module, case: Case, mesh: DeviceMesh, way: Way) -> dict[str, Tensor]:
    """This rank's out, dq, dk, dv, as (batch, rows, heads, headdim), ."""
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
    found = (out, *torch.autograd.grad(out, qkv, dout.detach()))
    local = [x.to_local() if isinstance(x, DTensor) else x for x in found]
    named = zip(("out", "dq", "dk", "dv"), local, strict=True)
    return {name: x.detach().permute(ORDERS[way.order]) for name, x in named}


def run_use(name: str) -> list[dict[str, Tensor]]:
    """This rank's results of each way."""
    options, case, ways, make, shape, tells_layout = USES[name]
    mesh, results = mesh_of(*shape), []
    for way in ways:
        seq_dim, head_dim = way.order.index("S"), way.order.index("H")
        style = ContextParallel(
            seq_dim=seq_dim,
            head_dim=head_dim,
            output_index=1 if way.returns in ("tuple", "Answer") else 0,
            layout=case.layout if tells_layout else "contiguous",
            **options,
        )
        module = parallelize_module(make(way.order, way.returns), mesh, style)
        results.append(run_module(module, case, mesh, way))
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
        assert_holds(got, *expected(use.case), way)


@pytest.mark.parametrize(
    ("layout", "options", "form"),
    [
        (SequenceLayout.boundaries([0, 49, UNEVEN]), {"inside": "local"}, "plain"),
        pytest.param(ZIGZAG[0], {}, "DTensor", marks=pytest.mark.slow),
    ],
    ids=["local", "global"],
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


# -- beside tensor parallelism


@on_ranks(4)
def test_rows_and_heads_over_two_axes() -> None:
    """q, k, v are DTensors on (cp, tp), rows over one axis and heads over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    core = parallelize_module(Core("BHSD"), mesh["cp"], ContextParallel(seq_dim=2, head_dim=1))
    cp, tp = mesh.get_coordinate()
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

    one = torch.empty(2, 1, SEQLEN, 8)
    local = torch.zeros(2, 1 - tp, SEQLEN // 2, 8)
    k = DTensor.from_local(local, mesh, placements, shape=one.shape, stride=one.stride())
    with pytest.raises(ValueError, match="the 1 heads of k must divide by the 2 ranks"):
        core(qkv[0], k, k)


# -- errors


def plain_qkv(rows: int = 8, heads: int = 3) -> list[Tensor]:
    return [*torch.randn(3, 1, rows, heads, 4)]


class NoAttention(nn.Module):
    """A module with an attention module's arguments, but no attention."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q + k + v


def sharded(dim: int) -> list[Tensor]:
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
    qkv = partial(sharded, 1) if form == "transposed" else partial(plain_qkv, heads=2)
    return {"module": partial(Core, returns=form), "qkv": qkv}


# The style, words of the message, and the rest of the call. Strategies, layouts and arguments of
# scaled_dot_product_attention have their own checks, and tests of these.
ERRORS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "degree 0": ({"degree": 0}, "degree|at least 1|0", {}),
    "degree and value": ({"degree": 2, "strategy": Strategy()}, "degree=2|strategy by name", {}),
    "degree and mesh": ({"degree": 2}, "2 and 1", {"shape": (2, 1)}),
    "rows of chunks": (
        {"layout": RUNS}, "[4, 4]|[8, 0]", {"qkv": lambda: plain_qkv([8, 0][dist.get_rank()])}
    ),
    "no sdpa": ({}, "did not call F.scaled_dot_product_attention", {"module": NoAttention}),
    "local and dims": ({"inside": "local"}, "(1, 8, 2, 4)|(1, 2, 8, 4)", returning("transposed")),
    "seq_dim": ({"seq_dim": 2, "head_dim": 1}, "seq_dim=2", {}),
    "placement": ({}, "Shard(1)", {"qkv": lambda: sharded(2)}),
    "forms": ({}, "q is DTensor|k is", {"qkv": lambda: [*sharded(1)[:1], *plain_qkv()[:2]]}),
    "types": ({}, "k must be a torch.Tensor", {"qkv": lambda: [torch.ones(1, 8, 3, 4), 1.0, 2.0]}),
    "missing": ({}, "no v|index 2|'v'", {"qkv": lambda: plain_qkv()[:2]}),
    "indices": ({"qkv_indices": (0, 1, 3)}, "3 positional|v at index 3", {}),
    "keywords": ({"qkv_names": ("query", "k", "v")}, "Core|'query'", {}),
    "output_index": ({"output_index": 2}, "output_index 2|2 elements", returning("tuple")),
    "output type": ({}, "NoneType", returning("tuple")),
}  # fmt: skip

# Mistakes in a module's output, found once it has run.
AFTER = ("output_index", "output type", "local and dims")


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
