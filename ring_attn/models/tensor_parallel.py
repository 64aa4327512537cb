"""Weight shards of tensor parallelism (Megatron-LM, arXiv 1909.08053), from tensors and files.

    x - q k v - attention - o -(sum over ranks)-      x - gate up - silu * - down -(sum over ranks)-
        column      own      row                          column      own     row

    column parallel   q, k, v, gate, up: a rank has some of the outputs, in whole heads
    row parallel      o, down: a rank has the inputs that match these outputs; the ranks' results
                      are summed, one all-reduce after o and one after down

torch's Linear stores `[out, in]`, as do nearly all checkpoints on Hugging Face: `order="out_in"`,
the default. GPT-2's Conv1D and the kernels of Flax are `[in, out]`: `order="in_out"`. Sizes are
checked, but a wrong order of a square matrix goes undetected.

                         "out_in" [out, in]      "in_out" [in, out]
    column parallel      W[start:end, :]         W[:, start:end]
    row parallel         W[:, start:end]         W[start:end, :]

    q k v (fused)     [ q0 q1 q2 q3 | k0 k1 | v0 v1 ]    rank 0 of 2: q0 q1, k0, v0
    grouped           [ q0 q1 k0 v0 | q2 q3 k1 v1 ]      rank 0 of 2: q0 q1 k0 v0

A rank has the part of a column-parallel bias that belongs to its outputs. Rank 0 has the whole
row-parallel bias, and other ranks have `None` (no entry in a state dict): so the sum over the ranks
has the bias once, and only one rank trains it.

With fewer kv heads than ranks, `tp_size / num_kv_heads` consecutive ranks share a kv head. Each
computes the part of the head's gradient from its own q heads: sum the parts over
`TensorParallelConfig.kv_replica_ranks`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, get_args

import torch
from torch import Tensor

from ring_attn.core.values import check_one_of, check_tensor, check_type
from ring_attn.models.checkpoint import Checkpoint, FileTensor
from ring_attn.models.tensor_sizes import (
    AllReduceCost,
    Kind,
    Order,
    TensorParallelConfig,
    TensorPartition,
    check_part,
    checked_count,
)

__all__ = [
    "LLAMA_TP_PLAN",
    "AllReduceCost",
    "Kind",
    "Order",
    "TensorParallelConfig",
    "TensorPartition",
    "load_tp_shard",
    "load_tp_state_dict",
    "shard_parameter",
    "shard_state_dict",
    "unshard_parameter",
    "unshard_state_dict",
]

#: Projections of Llama-style models. A pattern must match the end of a parameter's name without
#: `.weight` or `.bias`, part by part; the first matching pattern counts.
LLAMA_TP_PLAN: Mapping[str, Kind] = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "qkv_proj": "qkv",
    "Wqkv": "qkv",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "gate_up_proj": "gate_up",
}

_ROW_PARALLEL = ("o", "down", "row")

# Size of the dim that is cut, for messages; kinds not listed may have any size.
_CUT_SIZE = {
    "q": "num_heads * headdim",
    "o": "num_heads * headdim",
    "k": "num_kv_heads * headdim",
    "v": "num_kv_heads * headdim",
    "qkv": "(num_heads + 2 * num_kv_heads) * headdim",
    "grouped_qkv": "(num_heads + 2 * num_kv_heads) * headdim",
    "gate": "intermediate_size",
    "up": "intermediate_size",
    "down": "intermediate_size",
    "gate_up": "2 * intermediate_size",
    "heads": "num_heads",
}


def shard_parameter(
    x: Tensor, kind: Kind, config: TensorParallelConfig, *, order: Order = "out_in"
) -> Tensor | None:
    """The rank's part of a weight or of its bias.

    Args:
        x: the whole weight, `(out, in)` or `(in, out)`, or its bias, `(out,)`; any dtype.
        kind: role of the parameter; see `Kind`.
        config: sizes of the model, and the rank.
        order: storage of a weight: "out_in" like torch's Linear, or "in_out".

    Returns:
        The part as a contiguous copy; None for the bias of a row-parallel layer on ranks above 0.

    Raises:
        ValueError: the kind or order is unknown, or the shape does not fit the config.

    Example:
        >>> config = TensorParallelConfig(0, 2, 4, 4, num_heads=2, num_kv_heads=2)
        >>> w = torch.arange(16).view(4, 4)
        >>> shard_parameter(w, "q", config).tolist()
        [[0, 1, 2, 3], [4, 5, 6, 7]]
        >>> shard_parameter(w, "o", config).tolist()
        [[0, 1], [4, 5], [8, 9], [12, 13]]
    """
    check_tensor("x", x)
    return _shard("x", x, kind, config, order)


@torch.no_grad()
def unshard_parameter(
    shards: Sequence[Tensor | None],
    kind: Kind,
    config: TensorParallelConfig,
    *,
    order: Order = "out_in",
) -> Tensor:
    """Joins the shards of a weight or bias, bit for bit: inverts `shard_parameter`.

    `shards` are in the order of the ranks, with None where `shard_parameter` returned None. Raises
    ValueError if replicated kv heads differ, as when their gradients were not summed.
    """
    _check_choices(kind, config, order)
    shards = checked_count(shards, config.tp_size)
    parts = {rank: x for rank, x in enumerate(shards) if x is not None}
    for rank, x in parts.items():
        check_tensor(f"shards[{rank}]", x)
    row_bias = kind in _ROW_PARALLEL and 0 in parts and parts[0].ndim == 1
    if [*parts] != ([0] if row_bias else [*range(config.tp_size)]):
        raise ValueError(
            f"{kind!r} must be on every rank, the bias of a row-parallel layer on rank 0 alone; "
            f"got it on ranks {[*parts]} of {config.tp_size}"
        )
    dtypes = {x.dtype for x in parts.values()}
    if len(dtypes) > 1:
        raise TypeError(f"all parts must have one dtype, got {sorted(map(str, dtypes))}")
    return _assembled(parts, kind, config, order)


def shard_state_dict(
    state_dict: Mapping[str, Tensor],
    config: TensorParallelConfig,
    plan: Mapping[str, Kind] = LLAMA_TP_PLAN,
    *,
    otherwise: Kind | None = None,
    order: Order = "out_in",
) -> dict[str, Tensor]:
    """The rank's part of every parameter of a model, by the same names.

    Args:
        state_dict: tensors of the whole model.
        config: sizes of the model, and the rank.
        plan: kinds by the ends of names, without `.weight` or `.bias`; `*` stands for any part.
            `LLAMA_TP_PLAN | {"query_key_value": "grouped_qkv"}` extends the default.
        otherwise: kind of names that match no pattern, such as "replicated"; None refuses them.
        order: storage of all matrices that are cut.

    Raises:
        ValueError: a name matches no pattern, a shape is wrong, or a module that is cut has tensors
            other than weight and bias (scales of quantised weights, adapters).
    """
    check_type("state_dict", state_dict, Mapping, "tensors by name")
    for name, x in state_dict.items():
        check_tensor(f"state_dict[{name!r}]", x)
    return dict(_shards(state_dict, _kinds(state_dict, plan, otherwise), config, order))


def unshard_state_dict(
    shards: Sequence[Mapping[str, Tensor]],
    config: TensorParallelConfig,
    plan: Mapping[str, Kind] = LLAMA_TP_PLAN,
    *,
    otherwise: Kind | None = None,
    order: Order = "out_in",
) -> dict[str, Tensor]:
    """Joins the state dicts of all ranks to the whole model's: inverts `shard_state_dict`.

    Raises KeyError if a rank lacks a parameter that it should have.
    """
    check_type("config", config, TensorParallelConfig)
    shards = checked_count(shards, config.tp_size)
    for rank, part in enumerate(shards):
        check_type(f"shards[{rank}]", part, Mapping, "tensors by name")
    whole = {}
    names = dict.fromkeys(name for part in shards for name in part)
    for name, kind in _kinds(names, plan, otherwise).items():
        parts = [part.get(name) for part in shards]
        row_bias = kind in _ROW_PARALLEL and parts[0] is not None and parts[0].ndim == 1
        missing = [r for r, x in enumerate(parts) if x is None and not (row_bias and r > 0)]
        if missing:
            raise KeyError(f"{name} is missing from the state dicts of ranks {missing}")
        whole[name] = unshard_parameter(parts, kind, config, order=order)
    return whole


def load_tp_shard(
    source: str | os.PathLike[str],
    name: str,
    kind: Kind,
    config: TensorParallelConfig,
    *,
    order: Order = "out_in",
    device: torch.device | str = "cpu",
    outside_folder: bool = False,
) -> Tensor | None:
    """The rank's part of one tensor of a safetensors checkpoint; reads only this part.

    Args:
        source: a `.safetensors` file, a `model.safetensors.index.json`, or the folder of either.
        name: name of the tensor.
        kind: as for `shard_parameter`.
        config: sizes of the model, and the rank.
        order: as for `shard_parameter`.
        device: device of the result.
        outside_folder: whether an index may name files outside of its folder, by an absolute path,
            by `..` or through a link; only for an index that you trust like a program.

    Returns:
        As `shard_parameter`, in the dtype of the file and in new memory.

    Raises:
        KeyError: no tensor has that name; the message lists the nearest names.
        ValueError: as `shard_parameter`; or the source is not a safetensors checkpoint, is damaged,
            or has files outside of its index's folder.
        FileNotFoundError: the source, or a file that its index names, does not exist.
        ImportError: safetensors is not installed.
    """
    check_type("name", name, str)
    with Checkpoint(source, outside_folder=outside_folder) as checkpoint:
        shard = _shard(name, checkpoint[name], kind, config, order)
    return None if shard is None else shard.to(device)


def load_tp_state_dict(
    source: str | os.PathLike[str],
    config: TensorParallelConfig,
    plan: Mapping[str, Kind] = LLAMA_TP_PLAN,
    *,
    otherwise: Kind | None = None,
    order: Order = "out_in",
    device: torch.device | str = "cpu",
    outside_folder: bool = False,
) -> dict[str, Tensor]:
    """`shard_state_dict` of a safetensors checkpoint; reads only the rank's parts.

    Arguments and errors are those of `load_tp_shard` and of `shard_state_dict`.
    """
    with Checkpoint(source, outside_folder=outside_folder) as checkpoint:
        kinds = _kinds(checkpoint.files, plan, otherwise)
        shards = _shards(checkpoint, kinds, config, order)
        return {name: x.to(device) for name, x in shards}


def _shards(
    tensors: Any, kinds: Mapping[str, Kind], config: TensorParallelConfig, order: Order
) -> Iterator[tuple[str, Tensor]]:
    for name, kind in kinds.items():
        shard = _shard(name, tensors[name], kind, config, order)
        if shard is not None:
            yield name, shard


def _shard(
    name: str, x: Tensor | FileTensor, kind: Kind, config: TensorParallelConfig, order: Order
) -> Tensor | None:
    """The rank's part of a tensor in memory or in a file."""
    shape = tuple(x.shape)
    runs = _checked_runs(name, shape, kind, config, order)
    if not runs and kind in _ROW_PARALLEL and config.rank > 0:
        return None
    return _take(x, _cut_dim(len(shape), kind, order), runs)


def _take(x: Tensor | FileTensor, dim: int, runs: _Runs) -> Tensor:
    """Copies the runs of positions of a dim; without runs, everything."""
    parts = [x[(*[slice(None)] * dim, slice(*run))] for run in runs] or [x[()]]
    if len(parts) > 1:
        return torch.cat(parts, dim)
    # A view would keep the whole file mapped, or the whole tensor alive.
    return parts[0].clone(memory_format=torch.contiguous_format)


def _cut_dim(ndim: int, kind: Kind, order: Order) -> int:
    return int(ndim == 2 and (kind in _ROW_PARALLEL) == (order == "out_in"))


# Runs `[start, end)` of positions.
_Runs = Sequence[tuple[int, int]]


def _checked_runs(
    name: str, shape: tuple[int, ...], kind: Kind, config: TensorParallelConfig, order: Order
) -> _Runs:
    """The rank's runs of the dim to cut, () to cut nothing; refuses a wrong shape."""
    _check_choices(kind, config, order)
    if kind == "replicated":
        return ()
    if len(shape) not in ((1,) if kind == "heads" else (1, 2)):
        form = "a vector" if kind == "heads" else "a matrix or a bias"
        raise ValueError(
            f"{name} of kind {kind!r} must be {form}, got shape {shape}; cut other shapes by "
            "TensorPartition"
        )
    dim = _cut_dim(len(shape), kind, order)
    row_bias = kind in _ROW_PARALLEL and len(shape) == 1
    whole, runs = _size_and_runs(kind, config, shape[dim])
    if kind in _CUT_SIZE:
        sizes = [("hidden_size", config.hidden_size)] * 2
        if not row_bias:
            sizes[dim] = (_CUT_SIZE[kind], whole)
        for at, (size, (formula, expected)) in enumerate(zip(shape, sizes, strict=False)):
            if size != expected:
                raise ValueError(
                    f"{name} of kind {kind!r}, to be cut over {config.tp_size} ranks, must have "
                    f"{formula} = {expected} in dim {at} with order={order!r}, got shape {shape}"
                )
    return () if row_bias else runs


def _size_and_runs(kind: Kind, config: TensorParallelConfig, size: int) -> tuple[int, _Runs]:
    """The expected size of the dim to cut, and the rank's runs of it.

    `size` is the dim's actual size, for kinds that may have any.
    """
    headdim, rank = config.local_q_size // config.local_heads, config.rank
    num_q, num_kv = config.local_q_size, config.local_kv_size
    q, kv = config.num_heads * headdim, config.num_kv_heads * headdim
    kv_head = rank * config.num_kv_heads // config.tp_size  # the rank's first
    of_q = (rank * num_q, (rank + 1) * num_q)
    of_kv = (kv_head * headdim, kv_head * headdim + num_kv)
    mlp = config.part(config.intermediate_size)
    match kind:
        case "q" | "o":
            return q, (of_q,)
        case "k" | "v":
            return kv, (of_kv,)
        case "qkv":
            return q + 2 * kv, (of_q, _moved(of_kv, q), _moved(of_kv, q + kv))
        case "grouped_qkv":
            # k and v of all earlier groups precede the rank's q heads.
            q_heads = _moved(of_q, 2 * kv_head * headdim)
            if len(config.kv_replica_ranks) == 1:
                return q + 2 * kv, ((q_heads[0], q_heads[1] + 2 * num_kv),)
            end = (kv_head + 1) * (q // config.num_kv_heads + 2 * headdim)
            return q + 2 * kv, (q_heads, (end - 2 * headdim, end))
        case "gate" | "up" | "down":
            return config.intermediate_size, ((mlp.start, mlp.end),)
        case "gate_up":
            gate = (mlp.start, mlp.end)
            return 2 * config.intermediate_size, (gate, _moved(gate, config.intermediate_size))
        case "heads":
            local = config.local_heads
            return config.num_heads, ((rank * local, (rank + 1) * local),)
        case _:
            part = config.part(size)
            return size, ((part.start, part.end),)


def _moved(run: tuple[int, int], by: int) -> tuple[int, int]:
    return run[0] + by, run[1] + by


def _assembled(
    parts: Mapping[int, Tensor], kind: Kind, config: TensorParallelConfig, order: Order
) -> Tensor:
    """Joins the parts of all ranks; replicated positions must have the same bits on all of them."""
    first = parts[0]
    dim, shape = _cut_dim(first.ndim, kind, order), list(first.shape)
    row_bias = kind in _ROW_PARALLEL and first.ndim == 1
    if first.ndim and not row_bias and kind != "replicated":
        shape[dim] = _size_and_runs(kind, config, sum(x.size(dim) for x in parts.values()))[0]
    whole = first.new_empty(shape)
    runs = {}
    for rank, x in parts.items():
        of_rank = replace(config, rank=rank)
        runs[rank] = _checked_runs("the whole", (*shape,), kind, of_rank, order)
        pieces = [whole.narrow(dim, start, end - start) for start, end in runs[rank]]
        lengths = [piece.size(dim) for piece in pieces]
        expected = [*shape[:dim], sum(lengths), *shape[dim + 1 :]] if pieces else shape
        check_part(rank, x, expected, f"{kind!r} {(*shape,)} with {order=}")
        if not pieces:
            whole.copy_(x)
        for piece, part in zip(pieces, x.split(lengths, dim) if pieces else (), strict=True):
            piece.copy_(part)
    for rank, x in parts.items():
        if not _same_bits(_take(whole, dim, runs[rank]), x.to(whole.device)):
            raise ValueError(
                f"rank {rank} has positions of dim {dim} that another rank has with different "
                "values: replicated parameters must stay equal, so sum their gradients over "
                "kv_replica_ranks"
            )
    return whole


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Compares bits, so that NaN equals NaN, and 8-bit floats work."""
    return torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (a, b)))


def _kinds(
    names: Iterable[str], plan: Mapping[str, Kind], otherwise: Kind | None
) -> dict[str, Kind]:
    """The kind of each name by the plan; refuses names without a kind."""
    check_type("plan", plan, Mapping, "kinds by the ends of names")
    for pattern, kind in plan.items():
        check_type("each pattern of plan", pattern, str, "the end of a name")
        check_one_of(f"plan[{pattern!r}]", kind, get_args(Kind))
    if otherwise is not None:
        check_one_of("otherwise", otherwise, get_args(Kind))
    kinds = {name: _kind_of(name, plan) or otherwise for name in names}
    unknown = [name for name, kind in kinds.items() if kind is None]
    if unknown:
        raise ValueError(
            f"no pattern of the plan fits {len(unknown)} names, such as {unknown[:3]}: add "
            'patterns for them, or pass otherwise="replicated" to keep them whole on every rank'
        )
    return {name: kind for name, kind in kinds.items() if kind is not None}


def _kind_of(name: str, plan: Mapping[str, Kind]) -> Kind | None:
    """The kind of the first pattern that matches the end of a name; None without a match."""
    path = name.split(".")
    if path[-1] in ("weight", "bias") and len(path) > 1:
        path.pop()
    kind = _fitting(path, plan)
    for end in range(1, len(path)) if kind is None else ():
        module = _fitting(path[:end], plan)
        if module not in (None, "replicated"):
            raise ValueError(
                f"{name} lies in {'.'.join(path[:end])}, which the plan cuts as {module!r}, but it "
                "is neither its weight nor its bias: give it a pattern of its own"
            )
    return kind


def _fitting(path: Sequence[str], plan: Mapping[str, Kind]) -> Kind | None:
    for pattern, kind in plan.items():
        parts = pattern.split(".")
        ending = path[-len(parts) :]
        if len(ending) == len(parts) and all(map(fnmatchcase, ending, parts)):
            return kind
    return None


def _check_choices(kind: str, config: object, order: str) -> None:
    check_one_of("kind", kind, get_args(Kind))
    check_type("config", config, TensorParallelConfig)
    check_one_of("order", order, get_args(Order))
