"""Weight shards: the vectors of specifications B and D, every kind and order, there and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ring_attn.models.tensor_parallel import (
    LLAMA_TP_PLAN,
    Kind,
    Order,
    TensorParallelConfig,
    load_tp_state_dict,
    shard_parameter,
    shard_state_dict,
)
from ring_attn.planning.all_reduces import all_reduce_bytes, transfer_seconds
from tests.bounds import same_bits
from tests.refusals import refused

# (tp_size, kv heads) for 12 q heads; ranks have several kv heads, one, or share one.
GRIDS = [(1, 4), (2, 12), (2, 1), (3, 6), (3, 1), (4, 4), (4, 2), (4, 1)]
HEADS, HEADDIM, HIDDEN = 12, 4, 40
INTERMEDIATE = 5  # of 4 ranks, one has 1 and one nothing
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float64,
    torch.int8,
]


def config_of(tp_size: int, kv_heads: int, rank: int = 0) -> TensorParallelConfig:
    """Has an odd intermediate size, and a number of q outputs unlike the hidden size."""
    return TensorParallelConfig(rank, tp_size, HIDDEN, INTERMEDIATE, HEADS, kv_heads, HEADDIM)


def ranks_of(config: TensorParallelConfig) -> list[TensorParallelConfig]:
    return [replace(config, rank=rank) for rank in range(config.tp_size)]


def parts_of(
    x: Tensor, kind: Kind, config: TensorParallelConfig, order: Order = "out_in"
) -> list[Tensor | None]:
    return [shard_parameter(x, kind, one, order=order) for one in ranks_of(config)]


def outputs_and_inputs(kind: Kind, kv_heads: int) -> tuple[int, int]:
    q, kv = HEADS * HEADDIM, kv_heads * HEADDIM
    return {
        "q": (q, HIDDEN),
        "k": (kv, HIDDEN),
        "v": (kv, HIDDEN),
        "o": (HIDDEN, q),
        "gate": (INTERMEDIATE, HIDDEN),
        "up": (INTERMEDIATE, HIDDEN),
        "down": (HIDDEN, INTERMEDIATE),
        "qkv": (q + 2 * kv, HIDDEN),
        "grouped_qkv": (q + 2 * kv, HIDDEN),
        "gate_up": (2 * INTERMEDIATE, HIDDEN),
        "heads": (HEADS, 0),  # no matrix
        "column": (17, 5),
        "row": (5, 17),
        "replicated": (7, 3),
    }[kind]


# -- the vectors of specification B


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((0, 2, 1024, 4096, 16, 4), (8, 2, 512, 128, 2048, 0.5)),
        ((2, 4, 1024, 4096, 16, 4), (4, 1, 256, 64, 1024, 0.25)),
        ((5, 8, 1024, 4096, 16, 4), (2, 1, 128, 64, 512, 0.125)),
        ((3, 4, 1024, 4097, 16, 4), (4, 1, 256, 64, 4097 - 3 * 1025, 0.25)),
    ],
)
def test_sizes(given: tuple[int, ...], expected: tuple[float, ...]) -> None:
    config = TensorParallelConfig(*given)
    sizes = (config.local_q_size, config.local_kv_size, config.local_intermediate_size)
    heads = (config.local_heads, config.local_kv_heads)
    assert (*heads, *sizes, config.weight_fraction) == expected and config.headdim == 64


def test_cost_of_all_reduces() -> None:
    total = all_reduce_bytes(1024, 1024, num_blocks=24, itemsize=4)
    assert total == 192 << 20 and total // (2 * 24) == 4 << 20
    assert transfer_seconds(total, 100.0) == pytest.approx(0.016, rel=0.01)


MATRIX = torch.arange(1, 9)


@pytest.mark.parametrize(
    ("kind", "shape", "expected"),
    [
        ("column", (2, 4), ([1, 2, 5, 6], [3, 4, 7, 8])),
        ("row", (4, 2), ([1, 2, 3, 4], [5, 6, 7, 8])),
    ],
)
def test_shards_of_matrices_stored_in_out(
    kind: Kind, shape: tuple[int, int], expected: tuple[list[int], ...]
) -> None:
    parts = parts_of(MATRIX.view(shape), kind, TensorParallelConfig(0, 2, 4, 4, 2, 2), "in_out")
    assert tuple(part.flatten().tolist() for part in parts) == expected


# -- shards of every kind, against positions from the order of the heads


def positions_of(kind: Kind, size: int, config: TensorParallelConfig) -> list[int]:
    """Positions along the cut dim, of `size`, that the rank should have, by the order of heads."""
    rank, kv_heads = config.rank, config.num_kv_heads
    if kind == "replicated":
        return [*range(size)]
    if kind in ("gate", "up", "gate_up", "down", "column", "row", "heads"):
        num = 2 if kind == "gate_up" else 1
        chunks = torch.arange(size // num).chunk(
            config.tp_size
        )  # fewer than ranks, if none has more
        mine = chunks[rank].tolist() if rank < len(chunks) else []
        return mine + [size // 2 + at for at in mine] if num == 2 else mine
    group, local = HEADS // kv_heads, HEADS // config.tp_size
    used = range(rank * local, (rank + 1) * local)
    q = [head in used for head in range(HEADS)]
    kv = [any(q[head * group : (head + 1) * group]) for head in range(kv_heads)]
    stored = {"q": q, "o": q, "k": kv, "v": kv, "qkv": q + kv + kv}
    stored["grouped_qkv"] = [
        here
        for head in range(kv_heads)
        for here in (*q[head * group : (head + 1) * group], kv[head], kv[head])
    ]
    return [
        at * HEADDIM + i for at, here in enumerate(stored[kind]) if here for i in range(HEADDIM)
    ]


@pytest.mark.parametrize("order", get_args(Order))
@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize(("tp_size", "kv_heads"), GRIDS)
@pytest.mark.sweep(3)
def test_a_rank_has_its_part(
    tp_size: int, kv_heads: int, kind: Kind, order: Order, tmp_path: Path
) -> None:
    """Weights and biases of every dtype, from tensors and from a file."""
    configs = ranks_of(config_of(tp_size, kv_heads))
    outputs, inputs = outputs_and_inputs(kind, kv_heads)
    by_columns = kind in ("o", "down", "row")
    for dtype, is_bias in product(DTYPES, (True,) if kind == "heads" else (False, True)):
        x = torch.randn(outputs) if is_bias else torch.randn(outputs, inputs)
        dim = 0 if is_bias or not by_columns else 1
        if not is_bias and order == "in_out":
            x, dim = x.T.contiguous(), 1 - dim
        x = x.mul(50).to(dtype)
        if dtype.is_floating_point:
            x[0] = torch.nan
        parts = parts_of(x, kind, configs[0], order)
        save_file({"x": x}, tmp_path / "x.safetensors")
        for config, part in zip(configs, parts, strict=True):
            loaded = load_tp_state_dict(tmp_path, config, {"x": kind}, order=order).get("x")
            assert loaded is part is None or same_bits(loaded, part)
        if is_bias and by_columns:  # on rank 0, so that the sum over the ranks has it once
            assert same_bits(parts[0], x) and parts[1:] == [None] * (tp_size - 1)
            continue
        wanted = [positions_of(kind, x.size(dim), config) for config in configs]
        held = [at for positions in wanted for at in positions]
        for config, part, positions in zip(configs, parts, wanted, strict=True):
            bits, at = x.view(INTEGERS[x.itemsize]), torch.tensor(positions).long()
            assert same_bits(part, bits.index_select(dim, at).view(dtype))
            assert part.is_contiguous() and part.data_ptr() != x.data_ptr()
            if kind != "replicated" and not by_columns:
                shared = [at for at in positions if held.count(at) > 1]
                assert positions[config.replicated_outputs(kind)] == shared
            for other in config.kv_replica_ranks if kind in ("k", "v") else ():
                assert wanted[other] == positions


def test_parts_of_one_number() -> None:
    config, number = config_of(3, 6), torch.tensor(2.5)
    assert all(torch.equal(part, number) for part in parts_of(number, "replicated", config))


def sized(**change: int) -> TensorParallelConfig:
    sizes = {"rank": 0, "tp_size": 4, "hidden_size": 1024, "intermediate_size": 4096}
    return TensorParallelConfig(**sizes | {"num_heads": 16, "num_kv_heads": 4} | change)


def shard(kind: Any, shape: tuple[int, ...], **order: Any) -> Tensor | None:
    return shard_parameter(torch.zeros(shape), kind, config_of(4, 4), **order)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: sized(tp_size=3), "num_heads|16|3"),
    (lambda: sized(rank=4), "rank|tp_size=4|got 4"),
    (lambda: sized(rank=-1), "rank|0|-1"),
    (lambda: sized(tp_size=0), "tp_size|1|0"),
    (lambda: sized(num_kv_heads=3), "num_heads|num_kv_heads|16|3"),
    (lambda: sized(hidden_size=1000), "hidden_size|num_heads|1000|16"),
    (lambda: sized(headdim=0), "headdim|1|0"),
    (lambda: sized(num_heads=24, num_kv_heads=6, hidden_size=1200), "num_kv_heads|tp_size|6|4"),
    (lambda: shard("q", (47, 40)), "tp_size=4|num_heads=12|headdim=4|(48, 40)"),
    (lambda: shard("q", (48, 41)), "hidden_size=40|(48, 40)|(48, 41)"),
    (lambda: shard("q", (48, 40), order="in_out"), "(40, 48)|(48, 40)|'in_out'"),
    (lambda: shard("o", (48, 40)), "(40, 48)|(48, 40)|'out_in'"),
    (lambda: shard("k", (20, 40)), "num_kv_heads=4|headdim=4|(16, 40)"),
    (lambda: shard("down", (40, 100)), "intermediate_size=5|(40, 5)"),
    (lambda: shard("gate_up", (5, 40)), "intermediate_size=5|(10, 40)"),
    (lambda: shard("down", (41,)), "hidden_size=40|(40,)"),
    (lambda: shard("heads", (13,)), "num_heads=12|(12,)"),
    (lambda: shard("heads", (12, 3)), "[1] dims|(12, 3)"),
    (lambda: shard("up", (2, 5, 40)), "[1, 2] dims|(2, 5, 40)"),
    (lambda: shard("up", ()), "[1, 2] dims|()"),
    (lambda: shard("attention", (3, 3)), "kind|'attention'"),
    (lambda: shard("up", (5, 40), order="oi"), "order|'oi'"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_what_does_not_fit_is_refused(make: Callable[[], object], words: str) -> None:
    with refused(ValueError, words):
        make()


# -- replicated kv heads


def test_which_ranks_share_kv_heads() -> None:
    config = TensorParallelConfig(5, 8, 1024, 4096, 16, 2)
    assert config.kv_replica_ranks == (4, 5, 6, 7)
    assert config.kv_replica_groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    alone = replace(config, num_kv_heads=8)
    assert alone.kv_replica_ranks == (5,)
    assert alone.kv_replica_groups == tuple((rank,) for rank in range(8))


# -- whole models


def layer_of(kv_heads: int) -> dict[str, Tensor]:
    """The state dict of a block, with biases of all its projections."""
    sizes = {f"self_attn.{x}_proj": outputs_and_inputs(x, kv_heads) for x in get_args(Kind)[:4]}
    sizes |= {f"mlp.{x}_proj": outputs_and_inputs(x, kv_heads) for x in ("gate", "up", "down")}
    model = {f"{name}.weight": torch.randn(size) for name, size in sizes.items()}
    model |= {f"{name}.bias": torch.randn(out) for name, (out, _) in sizes.items()}
    return model | {"input_layernorm.weight": torch.randn(HIDDEN)}


def test_a_state_dict() -> None:
    whole, config = layer_of(2), config_of(4, 2)
    parts = [shard_state_dict(whole, one, otherwise="replicated") for one in ranks_of(config)]
    assert {*parts[0]} == {*whole}
    only = {"self_attn.o_proj.bias", "mlp.down_proj.bias"}
    assert all({*whole} - {*part} == only for part in parts[1:])


def test_names_that_no_pattern_fits() -> None:
    whole, config = layer_of(2), config_of(2, 2)
    with pytest.raises(ValueError, match="1 names.*input_layernorm.weight"):
        shard_state_dict(whole, config)
    with pytest.raises(ValueError, match="self_attn.q_proj.weight of kind 'q' must have shape"):
        shard_state_dict({"self_attn.q_proj.weight": torch.ones(3, HIDDEN)}, config)
    norms: dict[str, Kind] = {"*_layernorm": "replicated"}
    assert {*shard_state_dict(whole, config, LLAMA_TP_PLAN | norms)} == {*whole}


@pytest.mark.parametrize("name", ["q_proj.weight_scale_inv", "q_proj.lora_A.weight"])
def test_tensors_in_a_module_that_is_cut_need_a_pattern(name: str) -> None:
    config, x = config_of(2, 2), {f"layers.0.self_attn.{name}": torch.ones(3, HIDDEN)}
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj,.*'q'"):
        shard_state_dict(x, config, otherwise="replicated")
    plan: dict[str, Kind] = {name.removesuffix(".weight"): "replicated", **LLAMA_TP_PLAN}
    assert {*shard_state_dict(x, config, plan)} == {*x}


def test_the_first_pattern_that_fits_counts() -> None:
    config, w = config_of(2, 2), torch.randn(48, HIDDEN)
    x = {"layers.0.cross.q_proj.weight": w, "layers.1.self.q_proj.weight": w, "q_proj.weight": w}
    plan: dict[str, Kind] = {"layers.*.cross.q_proj": "replicated", **LLAMA_TP_PLAN}
    part = shard_state_dict(x, config, plan)
    assert [len(y) for y in part.values()] == [48, 24, 24]
    scale = {"layers.0.cross.q_proj.weight_scale": torch.ones(48)}
    assert {*shard_state_dict(scale, config, plan, otherwise="replicated")} == {*scale}
    # A pattern matches only whole parts of a name.
    with pytest.raises(ValueError, match="my_q_proj"):
        shard_state_dict({"my_q_proj.weight": w}, config)
    with pytest.raises(ValueError, match="q_proj.*'colwise'"):
        shard_state_dict(x, config, {"q_proj": "colwise"})  # type: ignore[dict-item]
