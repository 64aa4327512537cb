"""ContextParallel on modules as models have them: every strategy, order of dims and form, exact.

How q, k, v are passed to a module: tests/unit/test_parallel_style.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from ring_attn import SequenceLayout, Strategy, TransportOptions
from ring_attn.core.mask import Mask
from ring_attn.models.style import ContextParallel, parallelize
from ring_attn.testing import Expected, Inputs, random_qkv, random_sinks
from ring_attn.transport.p2p import open_p2p
from tests.bounds import assert_holds, expect
from tests.cold import compile_cold
from tests.distributed.pool import on_ranks
from tests.refusals import says

SIZES = {"batch": 2, "nheads": 4, "nheads_kv": 2, "headdim": 8}
SEQLEN = 100  # 25 rows on each of 4 ranks
UNEVEN = 97
SCALE = 0.3

RESULTS = ("out", "dq", "dk", "dv")
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


class Eager(Core):
    """Attention without an attention function of torch, with repeated kv heads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
        rows = torch.arange(q.size(2))
        scores = (q @ k.mT * SCALE).masked_fill(rows[:, None] < rows, float("-inf"))
        return scores.softmax(-1) @ v


class Never(nn.Module):
    """A module whose own attention must not run."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(random_sinks(3))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block_mask: object = None) -> Tensor:
        raise AssertionError("replaced")


class Case(NamedTuple):
    """A way to call: order of dims, plain or DTensor, and the container of the output."""

    order: str = "BSHD"
    form: str = "plain"
    returns: str = "tensor"


CASES = [
    Case("BSHD", "plain", "tensor"),
    Case("BSHD", "DTensor", "tuple"),
    Case("BHSD", "plain", "tuple"),
    Case("BHSD", "DTensor", "tensor"),
    Case("SBHD", "plain", "list"),
    Case("SBHD", "DTensor", "tensor"),
]
CHUNKS = SequenceLayout.boundaries([0, 25, 50, 75, 97])  # as torch.chunk splits 97 rows
NESTED = SequenceLayout.boundaries([0, 25, 49, 73, 97])  # halves of 49 and 48 rows, each in two
ZIGZAG = SequenceLayout.zigzag(97, 4)
HALVES = SequenceLayout.contiguous(UNEVEN, 2)  # 49 and 48
UNEVEN_DTENSOR = [Case("BHSD", "DTensor", "tuple")]


class Calls(NamedTuple):
    """Calls of a module with the same options; `rows` is the layout if options have none."""

    options: dict[str, Any]
    cases: list[Case] = CASES
    rows: SequenceLayout | None = None
    module: type[Core] = Core

    @property
    def layout(self) -> SequenceLayout:
        named = self.rows or self.options.get("layout", "contiguous")
        return (
            named
            if isinstance(named, SequenceLayout)
            else SequenceLayout.from_name(named, SEQLEN, 4)
        )


CALLS = {
    "ring": Calls({}),
    "ring zigzag": Calls({"layout": "zigzag"}),
    "all_gather": Calls({"strategy": "all_gather", "degree": 1}),
    "ulysses": Calls({"strategy": "ulysses", "layout": "striped"}),
    "ulysses by degree": Calls({"degree": 4}),
    "hybrid": Calls({"degree": 2, "layout": "zigzag"}),
    "hybrid all_gather": Calls({"strategy": "all_gather", "degree": 2}),
    "co x ds": Calls({"strategy": "all_gather", "mesh": (2, 2), "layout": "zigzag"}),
    "double ring, co x ds": Calls({"strategy": "double_ring", "mesh": (2, 2)}),
    "q_exchange": Calls({"strategy": "q_exchange"}),
    "value": Calls({"strategy": Strategy(inner_degree=2)}),
    "uneven": Calls({"layout": CHUNKS}, [Case("BHSD", "plain", "tuple")]),
    "uneven DTensor": Calls({}, UNEVEN_DTENSOR, CHUNKS),
    "uneven co x ds": Calls({"strategy": "all_gather", "mesh": (2, 2)}, UNEVEN_DTENSOR, NESTED),
    "local zigzag": Calls({"layout": ZIGZAG, "inside": "local"}, [Case("BHSD", "plain", "tuple")]),
    "local DTensor": Calls({"inside": "local", "degree": 2}, UNEVEN_DTENSOR, CHUNKS),
    "whole": Calls(
        {"strategy": "ulysses", "inside": "whole", "layout": SequenceLayout.zigzag(UNEVEN, 2)},
        [Case(returns="Answer")],
        module=Eager,
    ),
    "whole DTensor": Calls(
        {"strategy": "ulysses", "inside": "whole", "layout": HALVES},
        [Case(form="DTensor", returns="Answer")],
        module=Eager,
    ),
    # The module joins heads by the shape of its inputs.
    "reshapes": Calls({"layout": HALVES}, [Case(returns="flat")]),
}


@cache
def mesh_of(*shape: int) -> DeviceMesh:
    names = {1: ("cp",), 2: ("co", "ds")}[len(shape)]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def inputs_of(seqlen: int) -> Inputs:
    return random_qkv(seqlen_q=seqlen, **SIZES)


def placed(x: Tensor, whole: Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """This rank's rows as a DTensor of the whole's shape."""
    shape = whole.contiguous()
    return DTensor.from_local(
        x.contiguous(), mesh, [Shard(dim)] * mesh.ndim, shape=shape.shape, stride=shape.stride()
    ).detach()


def run_module(
    module: nn.Module,
    call: Callable[..., Any],
    case: Case,
    layout: SequenceLayout,
    mesh: DeviceMesh,
) -> dict[str, Tensor]:
    """This rank's out, dq, dk, dv, as (batch, rows, heads, headdim)."""
    order = ORDERS[case.order]
    leaves = []
    for x in inputs_of(layout.seqlen):
        shard = layout.shard(x, dist.get_rank()).permute(order)
        if case.form == "DTensor":
            shard = placed(shard, x.permute(order), mesh, case.order.index("S"))
        leaves.append(shard.requires_grad_())
    *qkv, dout = leaves
    out = call(module, *qkv)
    assert isinstance(out, DTensor) == (case.form == "DTensor")
    if isinstance(out, DTensor):
        assert out.placements == qkv[0].placements and out.shape == qkv[0].shape
    results = (out, *torch.autograd.grad(out, qkv, dout.detach()))
    local = [x.to_local() if isinstance(x, DTensor) else x for x in results]
    return {n: x.detach().permute(order) for n, x in zip(RESULTS, local, strict=True)}


def call_core(returns: str, core: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found = core(q, k, v)
    if returns in ("tuple", "list", "Answer"):
        assert type(found).__name__ == returns and len(found) == 2
        return found[0 if returns == "list" else 1]
    if returns == "flat":
        assert found.shape == (*q.shape[:2], 32)
        return found.unflatten(2, (4, 8))
    return found


def run_calls(name: str) -> list[dict[str, Tensor]]:
    """This rank's results of each case."""
    options, cases, _, module = calls = CALLS[name]
    layout, mesh = calls.layout, mesh_of(*options.get("mesh", (dist.get_world_size(),)))
    results = []
    for case in cases:
        seq_dim = case.order.index("S")
        style = ContextParallel(
            seq_dim=seq_dim,
            head_dim=case.order.index("H"),
            output_index=1 if case.returns in ("tuple", "Answer") else 0,
            **{name: value for name, value in options.items() if name != "mesh"},
        )
        core = module(case.order, case.returns)
        parallelize_module(core, mesh, style)
        results.append(run_module(core, partial(call_core, case.returns), case, layout, mesh))
        seen = [*inputs_of(layout.seqlen).q.permute(ORDERS[case.order]).shape]
        if options.get("inside") == "local":
            seen[seq_dim] = layout.shard_len(dist.get_rank())
        elif options.get("inside") == "whole":  # all rows of some heads
            seen[case.order.index("H")] //= dist.get_world_size()
        assert core.seen == tuple(seen)
    return results


@cache
def expected(seqlen: int) -> tuple[Expected, Expected]:
    return expect(inputs_of(seqlen), Mask(seqlen, seqlen, causal=True), SCALE)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.sweep(3)
def test_every_strategy_in_every_form(ranks: Any, one_thread: None, name: str) -> None:
    calls = CALLS[name]
    layout = calls.layout
    ran = ranks(layout.world_size).run(run_calls, name)
    for case, *by_rank in zip(calls.cases, *ran, strict=True):
        got = {name: layout.unshard([one[name] for one in by_rank]) for name in by_rank[0]}
        assert_holds(got, *expected(layout.seqlen), case)


# For two ranks, new at every call.
COMPILED: dict[str, Callable[[], dict[str, Any]]] = {
    "global": lambda: {"layout": SequenceLayout.zigzag(UNEVEN, 2)},
    "local": lambda: {"layout": SequenceLayout.boundaries([0, 49, UNEVEN]), "inside": "local"},
    "whole": lambda: {
        "layout": SequenceLayout.striped(UNEVEN, 2), "inside": "whole", "strategy": "ulysses"
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("local", "plain"),
        pytest.param("global", "DTensor", marks=pytest.mark.slow),
        pytest.param("whole", "DTensor", marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_a_module_compiles_with_a_new_layout(name: str, form: str) -> None:
    """As one graph, with the bits of the same module as it is."""
    mesh, case = mesh_of(2), Case(form=form)
    options = [COMPILED[name]() for _ in range(2)]
    cold, plain = (parallelize(Core(), mesh, {"": ContextParallel(**one)}) for one in options)
    compiled, num_graphs = compile_cold(cold, "aot_eager", fullgraph=True)
    got, want = (
        run_module(
            module, lambda module, *qkv: module(*qkv), case, COMPILED[name]()["layout"], mesh
        )
        for module in (compiled, plain)
    )
    assert num_graphs() == 1 and all(got[part].equal(want[part]) for part in want)


class Cross(nn.Module):
    """Cross attention: every query sees every key; kv heads are not repeated."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


class Odd(NamedTuple):
    """A module over (batch, heads, rows, headdim), its style, and what it computes."""

    module: type[nn.Module]
    style: dict[str, Any]
    mask: Mask
    scores: dict[str, Any]

    @property
    def inputs(self) -> Inputs:
        """Three query heads, which two ranks cannot share evenly, and one kv head."""
        rows = {"seqlen_q": self.mask.seqlen_q, "seqlen_k": self.mask.seqlen_k}
        return random_qkv(batch=2, nheads=3, nheads_kv=1, headdim=8, **rows)

    @property
    def layouts(self) -> tuple[SequenceLayout, SequenceLayout]:
        """Layouts of queries and of keys."""
        rows = self.mask.seqlen_q, self.mask.seqlen_k
        given = self.style.get("layout", tuple(SequenceLayout.contiguous(n, 2) for n in rows))
        return given if isinstance(given, tuple) else (given, given)


def with_sinks(module: nn.Module) -> dict[str, Any]:
    return {"causal": True, "window_size": (20, 0), "softcap": 5.0, "sinks": module.sinks}


ODD = {
    "uneven heads": Odd(Cross, {"degree": 2}, Mask(50, 98), {}),
    "replaced, of other lengths": Odd(
        Cross,
        {
            "replace": {"causal": True},
            "layout": (SequenceLayout.zigzag(37, 2), SequenceLayout.contiguous(61, 2)),
            "strategy": "ulysses",
        },
        Mask(37, 61, causal=True),
        {},
    ),
    "a module that does not run": Odd(
        Never,
        {"replace": with_sinks, "layout": SequenceLayout.zigzag(UNEVEN, 2)},
        Mask(UNEVEN, UNEVEN, True, (20, 0)),
        {"softcap": 5.0, "sinks": random_sinks(3)},
    ),
}


def run_odd(name: str) -> dict[str, Tensor]:
    """This rank's out, dq, dk, dv, and its share of the gradient of sinks."""
    odd, order = ODD[name], ORDERS["BHSD"]
    style = ContextParallel(seq_dim=2, head_dim=1, **odd.style)
    module = parallelize_module(odd.module(), mesh_of(2), style)
    of_q, of_kv = odd.layouts
    shards = zip(odd.inputs, (of_q, of_kv, of_kv, of_q), strict=True)
    *qkv, dout = (one.shard(x, dist.get_rank()).permute(order) for x, one in shards)
    leaves = [x.requires_grad_() for x in (*qkv, *module.parameters())]
    out = module(*qkv)
    found = (out.detach(), *torch.autograd.grad(out, leaves, dout))
    if odd.module is Never:
        with pytest.raises(NotImplementedError, match="block_mask"):
            module(*qkv, block_mask="causal")
    named = zip((*RESULTS, "dsinks"), found, strict=False)
    return {name: x.permute(order) if x.ndim == 4 else x for name, x in named}


@pytest.mark.parametrize("name", ODD)
def test_other_lengths_heads_and_functions(ranks: Any, one_thread: None, name: str) -> None:
    odd, by_rank = ODD[name], ranks(2).run(run_odd, name)
    sides = zip(RESULTS, (0, 0, 1, 1), strict=True)
    got = {one: odd.layouts[side].unshard([ran[one] for ran in by_rank]) for one, side in sides}
    if odd.scores:
        got["dsinks"] = by_rank[0]["dsinks"] + by_rank[1]["dsinks"]
    assert_holds(got, *expect(odd.inputs, odd.mask, **odd.scores))


# -- beside tensor parallelism


@on_ranks(4)
def test_rows_and_heads_over_two_axes() -> None:
    """q, k, v are DTensors on (cp, tp), rows over one axis and heads over the other.

    A kv head on only one of the ranks is refused.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    core = parallelize_module(Core("BHSD"), mesh["cp"], ContextParallel(seq_dim=2, head_dim=1))
    cp, tp = mesh.get_coordinate()
    layout, placements = SequenceLayout.contiguous(SEQLEN, 2), [Shard(2), Shard(1)]
    leaves = []
    for x in inputs_of(SEQLEN):
        x = layout.shard(x, cp).transpose(1, 2).chunk(2, 1)[tp].contiguous()
        leaves.append(DTensor.from_local(x, mesh, placements).detach().requires_grad_())
    *qkv, dout = leaves
    out = core(*qkv)
    assert out.placements == (Shard(2), Shard(1)) and out.shape == (2, 4, SEQLEN, 8)
    assert core.seen == (2, 4, SEQLEN, 8)
    found = (out, *torch.autograd.grad(out, qkv, dout.detach()))
    got = {n: x.full_tensor().transpose(1, 2) for n, x in zip(RESULTS, found, strict=True)}
    assert_holds(got, *expected(SEQLEN))

    one = torch.empty(2, 1, SEQLEN, 8)
    local = torch.zeros(2, 1 - tp, SEQLEN // 2, 8)
    k = DTensor.from_local(local, mesh, placements, shape=one.shape, stride=one.stride())
    with pytest.raises(ValueError, match="the 1 heads of k must divide by the 2 ranks"):
        core(qkv[0], k, k)


# -- errors


def plain_qkv(
    rows: int = 8, heads: int = 3, rows_kv: int | None = None, heads_kv: int | None = None
) -> list[Tensor]:
    q, kv = (rows, heads), (rows_kv or rows, heads_kv or heads)
    return [torch.randn(1, *one, 4) for one in (q, kv, kv)]


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
    names: tuple[str, ...] | None = ("cp",),
) -> None:
    mesh = mesh_of(2) if shape == (2,) else init_device_mesh("cpu", shape, mesh_dim_names=names)
    parallelize_module(module(), mesh, ContextParallel(**style))(*qkv())


MASK = torch.ones(16, 16, dtype=torch.bool)
RUNS = SequenceLayout.boundaries([0, 8, 8])
WHOLE = {"inside": "whole", "degree": 2}
GROUPED = partial(plain_qkv, heads=4, heads_kv=2)


def returning(form: str) -> dict[str, Any]:
    """A module that returns its output in the given form, and input tensors for it."""
    qkv = partial(sharded, 1) if form == "transposed" else partial(plain_qkv, heads=2)
    return {"module": partial(Core, returns=form), "qkv": qkv}


# The style, words of the message, and the rest of the call.
ERRORS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "degree": ({"degree": 3}, "degree|3 and 2", {}),
    "degree 0": ({"degree": 0}, "degree|at least 1|0", {}),
    "degree of ulysses": ({"degree": 1, "strategy": "ulysses"}, "'ulysses'|2|1", {}),
    "degree of q_exchange": ({"degree": 2, "strategy": "q_exchange"}, "'q_exchange'|1|2", {}),
    "degree and value": ({"degree": 2, "strategy": Strategy()}, "degree=2|strategy by name", {}),
    "degree and mesh": ({"degree": 2}, "2 and 1", {"shape": (2, 1), "names": ("co", "ds")}),
    "hybrid without": ({"strategy": "hybrid"}, "needs degree=|2 ranks", {}),
    "strategy": ({"strategy": "rign"}, "'rign'", {}),
    "names of axes": ({}, "needs their names", {"shape": (1, 2), "names": None}),
    "three axes": ({}, "('a', 'b', 'c')", {"shape": (1, 2, 1), "names": ("a", "b", "c")}),
    "layout name": ({"layout": "zagzig"}, "'zagzig'", {}),
    "layout type": ({"layout": 5}, "layout must be one of", {}),
    "layout ranks": ({"layout": SequenceLayout.zigzag(16, 4)}, "ranks than the mesh, 2", {}),
    "rows": ({"layout": SequenceLayout.contiguous(20, 2)}, "10 rows|got 8", {}),
    "rows of chunks": (
        {"layout": RUNS}, "[4, 4]|[8, 0]", {"qkv": lambda: plain_qkv([8, 0][dist.get_rank()])}
    ),
    "no sdpa": ({}, "did not call F.scaled_dot_product_attention", {"module": NoAttention}),
    "attn_mask": ({}, "attn_mask", {"module": partial(Core, attn_mask=MASK)}),
    "dropout_p": ({}, "dropout_p|0.1", {"module": partial(Core, dropout_p=0.1)}),
    "top-left": ({}, "queries|8 and 16", {"qkv": partial(plain_qkv, rows_kv=16)}),
    "gqa": ({}, "enable_gqa=True|(1, 4, ", {"module": partial(Core, scale=1.0), "qkv": GROUPED}),
    "whole and ring": ({"inside": "whole"}, "all 2 ranks|degree 1", {}),
    "whole and heads": (WHOLE, "3 heads of q|2 ranks", {}),
    "whole and dims": (WHOLE, "(1, 16, 1, 'headdim')|(1, 16, 4)", returning("flat")),
    "whole and more": (WHOLE, "no tensor beside|2 elements", returning("two")),
    "local and dims": ({"inside": "local"}, "(1, 8, 2, 4)|(1, 2, 8, 4)", returning("transposed")),
    "seq_dim": ({"seq_dim": 2, "head_dim": 1}, "seq_dim=2", {}),
    "placement": ({}, "Shard(1)", {"qkv": lambda: sharded(2)}),
    "forms": ({}, "q is DTensor|k is", {"qkv": lambda: [*sharded(1)[:1], *plain_qkv()[:2]]}),
    "types": ({}, "k must be a torch.Tensor", {"qkv": lambda: [torch.ones(1, 8, 3, 4), 1.0, 2.0]}),
    "missing": ({}, "no v|index 2|'v'", {"qkv": lambda: plain_qkv()[:2]}),
    "indices": ({"qkv_indices": (0, 1, 3)}, "[0, 1, 3]", {}),
    "keywords": ({"qkv_names": ("query", "k", "v")}, "'query'|Core.forward", {}),
    "output_index": ({"output_index": 2}, "output_index 2|2 elements", returning("tuple")),
    "output type": ({}, "NoneType", returning("tuple")),
    "options of a function": ({"replace": lambda module: {"group": None}}, "['group']", {}),
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
