"""ContextParallel and parallelize in one process: plans, options, untouched modules."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils.checkpoint import CheckpointError, checkpoint

from ring_attn import ContextParallel, parallelize
from tests.bounds import assert_computes
from tests.refusals import refused


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Mesh of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    dist.destroy_process_group()


class Core(nn.Module):
    """Attention of (batch, heads, rows, headdim)."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.seen: type[Tensor] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        self.seen = type(q)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def model() -> nn.Module:
    """Three layers with attention; torch warns of the last, in which a pattern has no match."""
    layers = [nn.ModuleDict({"core": Core(), "norm": nn.LayerNorm(8)}) for _ in range(3)]
    layers.append(nn.ModuleDict({"norm": nn.LayerNorm(8)}))
    return nn.ModuleDict({"layers": nn.ModuleList(layers), "head": nn.Linear(4, 4)})


def style(**options: Any) -> ContextParallel:
    return ContextParallel(seq_dim=2, head_dim=1, **options)


def qkv() -> list[Tensor]:
    torch.manual_seed(0)
    return [*torch.randn(3, 1, 4, 9, 8)]


def styled(module: nn.Module) -> list[str]:
    """The names of the modules with a style."""
    return [
        name
        for name, part in module.named_modules()
        if type(part).__name__.startswith("ContextParallel")
    ]


@pytest.mark.parametrize(
    ("key", "expected"),
    [("layers.1.core", [1]), ("l*.[02].c?re", [0, 2]), ("*.*.core", [0, 1, 2])],
)
def test_keys_are_torchs_patterns(
    mesh: DeviceMesh, key: str, expected: list[int], recwarn: Any
) -> None:
    whole = model()
    assert parallelize(whole, mesh, {key: style(), "head": ColwiseParallel()}) is whole
    assert styled(whole) == [f"layers.{i}.core" for i in expected]
    assert isinstance(whole["head"].weight, DTensor) and not recwarn.list
    assert styled(parallelize(Core(), mesh, style())) == [""]


@pytest.mark.parametrize(
    ("plan", "error", "text"),
    [
        (
            {"layers.0.core": style(), "layers.*.cores": style()},
            ValueError,
            "keys that match no module: 'layers.*.cores' (nearest: 'layers.2.core', ",
        ),
        ({"layers.0.core": style(), "zzzz": style()}, ValueError, "no module: 'zzzz'"),
        ({"layers.*.core.q": style()}, ValueError, "no module: 'layers.*.core.q'"),
        ({}, ValueError, "plan has no key"),
        ({"head": "ring"}, TypeError, "plan['head'] must be a ParallelStyle, got str"),
    ],
)
def test_a_wrong_plan_changes_nothing(
    mesh: DeviceMesh, plan: dict[str, Any], error: type[Exception], text: str
) -> None:
    whole = model()
    with refused(error, text):
        parallelize(whole, mesh, plan)
    assert not styled(whole)


# Wrong types are tested in tests/unit/test_wrong_values.py.
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seq_dim": 1, "head_dim": 1}, "got 1 and 1"),
        ({"seq_dim": 3}, "got 3 and 2"),
        ({"seq_dim": -3}, "got -3 and 2"),
        ({"qkv_indices": (0, 1)}, "qkv_indices must be three"),
        ({"qkv_names": ("q", "k", "k")}, "qkv_names must be three"),
        ({"replace": {"casual": True}}, r"got \['casual'\]"),
        ({"replace": {}, "inside": "local"}, "inside='local' chooses .* does not run"),
        ({"replace": {}, "output_index": 1}, "output_index=1 chooses .* does not run"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_options_are_checked_at_once(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ContextParallel(**options)


def expected(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def test_only_calls_within_the_forward_are_ours(mesh: DeviceMesh) -> None:
    core, other = parallelize(Core(), mesh, style()), Core()
    assert_computes(core(*qkv()), expected, *qkv())
    assert core.seen is DTensor
    mask = torch.ones(9, 9, dtype=torch.bool)
    with pytest.raises(TypeError):
        core(*qkv(), scale="wrong")
    # The route ends though the forward raised: SDPA takes a mask again.
    F.scaled_dot_product_attention(*qkv(), attn_mask=mask)
    other(*qkv())
    assert other.seen is Tensor


def test_a_copy_runs_itself(mesh: DeviceMesh) -> None:
    core = parallelize(Core(), mesh, style())
    twin = copy.deepcopy(core)
    twin(*qkv())
    assert twin.seen is DTensor and core.seen is None


def test_what_the_style_cannot_be_applied_to(mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match="this ContextParallelCore has a ContextParallel style"):
        parallelize(parallelize(Core(), mesh, style()), mesh, style())
    patched = Core()
    patched.forward = lambda q, k, v: q  # type: ignore[method-assign]
    with pytest.raises(NotImplementedError, match="this Core has a forward that was set"):
        parallelize(patched, mesh, style())
    with pytest.raises(TypeError, match="needs a DeviceMesh, got NoneType"):
        style()._apply(Core(), None)  # type: ignore[arg-type]


class Tempered(Core):
    """Multiplies q by its own parameter, a plain tensor."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        return super().forward(q * self.temperature, k, v, scale)


def test_parameters_of_a_module_that_sees_its_shard(mesh: DeviceMesh) -> None:
    core = parallelize(Tempered(), mesh, style(inside="local"))
    q, k, v = qkv()
    out = core(q, k, v, scale=0.5)
    assert_computes(out, partial(expected, scale=1.0), q, k, v)
    out.sum().backward()
    assert core.temperature.grad is not None and core.seen is Tensor


class Checkpointing(Core):
    """Checkpoints within its forward; at recomputation SDPA is no longer routed."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        out: Tensor = checkpoint(expected, q, k, v, use_reentrant=False)
        return out


def gradient_of_squares(index: int, *inputs: Tensor) -> Tensor:
    leaves = [x.requires_grad_() for x in inputs]
    return torch.autograd.grad(expected(*leaves).square().sum(), leaves)[index]


def test_checkpoints_around_the_module_are_exact_and_within_it_an_error(mesh: DeviceMesh) -> None:
    core = parallelize(Core(), mesh, style())
    leaves = [x.requires_grad_() for x in qkv()]
    out = checkpoint(core, *leaves, use_reentrant=False)
    got = torch.autograd.grad(out.square().sum(), leaves)
    for i, gradient in enumerate(got):
        assert_computes(gradient, partial(gradient_of_squares, i), *leaves)

    core = parallelize(Checkpointing(), mesh, style())
    # torch's SDPA refuses DTensors on this device, or checkpoint finds other saved tensors.
    with pytest.raises((CheckpointError, NotImplementedError)):
        core(*leaves).sum().backward()


ROWS, HEADS, DIM = Shard(2), Shard(1), Shard(3)


@pytest.mark.parametrize(
    ("names", "q", "k", "text"),
    [
        (("cp", "tp"), (ROWS, DIM), (ROWS, DIM), r"along their rows, Shard\(2\).*Shard\(dim=3\)"),
        (("cp", "tp"), (ROWS, ROWS), (ROWS, ROWS), "along heads or batch on other axes"),
        (("cp", "tp"), (ROWS, Partial()), (ROWS, Partial()), "Partial"),
        (("cp", "tp"), (Replicate(), HEADS), (Replicate(), HEADS), "along their rows"),
        (("cp", "tp"), (ROWS, HEADS), (ROWS, Replicate()), "the same placements.*Replicate"),
        (("dp", "tp"), (ROWS, HEADS), (ROWS, HEADS), r"axes \('dp', 'tp'\) .* \('cp',\)"),
    ],
    ids=["headdim", "rows twice", "partial", "replicated", "different", "other axes"],
)
def test_placements_that_are_not_shards_of_the_attention(
    mesh: DeviceMesh, names: tuple[str, str], q: Any, k: Any, text: str
) -> None:
    core = parallelize(Core(), mesh, style())
    both = init_device_mesh("cpu", (1, 1), mesh_dim_names=names)
    given = [DTensor.from_local(x, both, at) for x, at in zip(qkv(), (q, k, k), strict=True)]
    with pytest.raises(ValueError, match=text):
        core(*given)


def test_the_axes_of_dtensors_may_be_in_another_order(mesh: DeviceMesh) -> None:
    core = parallelize(Core(), mesh, style())
    both = init_device_mesh("cpu", (1, 1), mesh_dim_names=("tp", "cp"))
    given = [DTensor.from_local(x, both, (HEADS, ROWS)) for x in qkv()]
    out = core(*given)
    assert out.placements == (HEADS, ROWS)
    assert_computes(out.to_local(), expected, *qkv())


def test_a_replaced_module_gets_options_for_each_call(mesh: DeviceMesh) -> None:
    """The module's forward does not run, and its parameters may be among the options."""

    def options(module: nn.Module) -> Any:
        return {"causal": True, "softmax_scale": module.temperature.item()}

    core = parallelize(Core(), mesh, style(replace=options))
    for temperature in (2.0, 0.5):
        core.temperature.data.fill_(temperature)
        assert_computes(core(*qkv()), partial(expected, scale=temperature), *qkv())
    assert core.seen is None
    with refused(NotImplementedError, "Core is replaced|arguments ['scale']"):
        core(*qkv(), scale=0.5)


class Names(nn.Module):
    def forward(self, x: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)


class Keywords(Names):
    def forward(self, x: int, *, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)


class Variadic(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return F.scaled_dot_product_attention(args[2], args[1], kwargs["value"])


NAMES = {"qkv_names": ("query", "key", "value")}


@pytest.mark.parametrize(
    ("module", "options", "call"),
    [
        (Names, NAMES, lambda core, q, k, v: core(5, q, k, v)),
        (Names, NAMES, lambda core, q, k, v: core(x=5, key=k, value=v, query=q)),
        (Names, NAMES, lambda core, q, k, v: core(5, q, value=v, key=k)),
        (Names, {"qkv_indices": (1, 2, 3)}, lambda core, q, k, v: core(5, q, k, value=v)),
        (Keywords, NAMES, lambda core, q, k, v: core(5, query=q, key=k, value=v)),
        (
            Variadic,
            {"qkv_names": ("q", "k", "value"), "qkv_indices": (2, 1, 3)},
            lambda core, q, k, v: core("x", k, q, value=v),
        ),
    ],
)
def test_positions_and_names_of_any_forward(
    mesh: DeviceMesh, module: type[nn.Module], options: dict[str, Any], call: Any
) -> None:
    core = parallelize(module(), mesh, style(**options))
    assert_computes(call(core, *qkv()), F.scaled_dot_product_attention, *qkv())
