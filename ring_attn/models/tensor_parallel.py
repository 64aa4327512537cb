"""Weight shards of tensor parallelism (Megatron-LM, arXiv 1909.08053), from tensors and files.

    x - q k v - attention - o -(sum over ranks)-      x - gate up - silu * - down -(sum over ranks)-
        column      own      row                          column      own     row

    column parallel   q, k, v, gate, up: a rank has some of the outputs, whole heads of them
    row parallel      o, down: a rank has the inputs that match those outputs; the ranks' results
                      are summed, one all-reduce after o and one after down

In which dim a matrix is cut follows from its order. torch's Linear keeps `[out, in]`, as do the
checkpoints of nearly all models on Hugging Face: `order="out_in"`, the default. GPT-2's Conv1D and
the kernels of Flax are `[in, out]`: `order="in_out"`. Sizes are checked, but a square matrix does
not show which it is.

                         "out_in" [out, in]      "in_out" [in, out]
    column parallel      W[start:end, :]         W[:, start:end]
    row parallel         W[:, start:end]         W[start:end, :]

All of it is data: a shard is some positions of one dim of the whole (`_held`), by which tensors are
cut, files are read and shards are put together again.

    q k v (fused)     [ q0 q1 q2 q3 | k0 k1 | v0 v1 ]    rank 0 of 2: q0 q1, k0, v0
    grouped           [ q0 q1 k0 v0 | q2 q3 k1 v1 ]      rank 0 of 2: q0 q1 k0 v0

Biases. A rank has the part of a column-parallel bias that belongs to its outputs. Rank 0 has all of
a row-parallel bias and the others have none (`None`; no entry in a state dict): the sum over the
ranks then has the bias once, and only one rank trains it.

Where there are fewer kv heads than ranks, `tp_size / num_kv_heads` consecutive ranks have the same
kv head, and each computes the part of its gradient that comes from its own q heads. The ranks whose
parts must be summed are `TensorParallelConfig.kv_replica_ranks`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from ring_attn.core.sizes import all_reduce_bytes, transfer_seconds
from ring_attn.core.values import (
    as_int,
    as_tuple,
    check_int,
    check_one_of,
    check_tensor,
    check_type,
)
from ring_attn.models.checkpoint import Checkpoint

#: What a parameter is, and so how it is cut.
#:
#:     q k v gate up     column parallel: whole heads, or a part of the intermediate size
#:     o down            row parallel, likewise
#:     qkv               q, k and v in one matrix, one after another (Phi-3, MPT, GPT-2)
#:     grouped_qkv       for each kv head its q heads, k and v (Megatron, GPT-NeoX, InternLM2)
#:     gate_up           gate and up in one matrix, one after the other
#:     heads             a number for each q head, as attention sinks
#:     column row        any other: ceil-sized parts of its outputs (a vocabulary) or its inputs
#:     replicated        whole on every rank
Kind = Literal[
    "q", "k", "v", "o", "gate", "up", "down", "qkv", "grouped_qkv", "gate_up", "heads",
    "column", "row", "replicated",
]  # fmt: skip

#: How a matrix is stored: `[out, in]` as torch's Linear has it, or `[in, out]`.
Order = Literal["out_in", "in_out"]

T = TypeVar("T")
#: Projections of Llama-style models. A pattern is compared with the end of a parameter's name
#: without `.weight` or `.bias`, part by part; the first pattern that fits counts.
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


# What the size of the dim that is cut must be; kinds that are not here may have any.
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


@dataclass(frozen=True)
class TensorPartition:
    """One rank's part of a tensor that is cut along a dim, as `torch.chunk` and DTensor cut it.

    All parts are `ceil(size / num_partitions)` long; where that does not divide, the last ones are
    shorter or empty. A negative dim counts from the end.

    Raises:
        ValueError: a dim that the shape does not have, or a rank that does not exist.
        TypeError: a size, dim or rank that is no int.

    Example:
        >>> part = TensorPartition((128, 512), dim=0, num_partitions=4, rank=0)
        >>> part.start, part.end, part.shape
        (0, 32, (32, 512))
        >>> [TensorPartition((10,), 0, 4, rank).shape for rank in range(4)]
        [(3,), (3,), (3,), (1,)]
    """

    global_shape: tuple[int, ...]
    dim: int
    num_partitions: int
    rank: int

    def __post_init__(self) -> None:
        sizes = as_tuple("global_shape", self.global_shape)
        shape = tuple(as_int("each of global_shape", size, least=0) for size in sizes)
        if not -len(shape) <= as_int("dim", self.dim) < len(shape):
            raise ValueError(
                f"dim {self.dim} is out of range for a tensor of {len(shape)} dims, shape {shape}"
            )
        _check_rank("num_partitions", self.num_partitions, self.rank)
        object.__setattr__(self, "global_shape", shape)
        object.__setattr__(self, "dim", self.dim % len(shape))

    @property
    def start(self) -> int:
        """First position of the part."""
        return self._cut(self.rank)

    @property
    def end(self) -> int:
        """Position after the last."""
        return self._cut(self.rank + 1)

    def _cut(self, rank: int) -> int:
        size = self.global_shape[self.dim]
        return min(rank * -(-size // self.num_partitions), size)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        shape = self.global_shape
        return (*shape[: self.dim], self.end - self.start, *shape[self.dim + 1 :])

    def shard(self, x: Tensor) -> Tensor:
        """Copies the part of a whole tensor; ValueError if `x` has another shape."""
        check_tensor("x", x)
        if tuple(x.shape) != self.global_shape:
            raise ValueError(f"x must have shape {self.global_shape}, got {tuple(x.shape)}")
        return _take(x, self.dim, ((self.start, self.end),))

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Joins the parts of all ranks; ValueError if their number or a shape is wrong."""
        shards = _checked_count(shards, self.num_partitions)
        for rank, x in enumerate(shards):
            check_tensor(f"shards[{rank}]", x)
            _check_part(rank, x, replace(self, rank=rank).shape, f"a tensor {self.global_shape}")
        return torch.cat(shards, self.dim)


class AllReduceCost(NamedTuple):
    """What the all-reduces of a forward send, in the bytes of the tensors.

    A ring sends `2 (tp_size - 1) / tp_size` times the bytes from each rank.
    """

    nbytes: int
    num: int
    total_bytes: int
    seconds: float


@dataclass(frozen=True)
class TensorParallelConfig:
    """Sizes of a model, over how many ranks it is cut, and what one of them has: a value.

    With a mesh: `TensorParallelConfig(mesh["tp"].get_local_rank(), mesh["tp"].size(), ...)`.

    Args:
        rank: within the tensor-parallel group.
        tp_size: size of that group.
        hidden_size: of the residual stream.
        intermediate_size: of the MLP; where it does not divide, parts are ceil-sized.
        num_heads: q heads; a multiple of `tp_size`.
        num_kv_heads: kv heads; a multiple of `tp_size`, or a divisor of it (replicated).
        headdim: of a head; `hidden_size / num_heads` by default.

    Example:
        >>> config = TensorParallelConfig(2, 4, 1024, 4096, num_heads=16, num_kv_heads=4)
        >>> config.local_heads, config.local_kv_heads, config.local_q_size
        (4, 1, 256)
        >>> TensorParallelConfig(5, 8, 1024, 4096, 16, 2).kv_replica_ranks
        (4, 5, 6, 7)
    """

    rank: int
    tp_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    headdim: int | None = None

    def __post_init__(self) -> None:
        _check_rank("tp_size", self.tp_size, self.rank)
        for name, value in vars(self).items():
            if name != "rank" and not (name == "headdim" and value is None):
                check_int(name, value, least=1)
        heads, kv_heads, ranks = self.num_heads, self.num_kv_heads, self.tp_size
        if heads % kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {heads} and {kv_heads}"
            )
        if heads % ranks:
            raise ValueError(
                f"num_heads must divide by tp_size, got {heads} heads over {ranks} ranks; heads "
                "are not cut"
            )
        if kv_heads % ranks and ranks % kv_heads:
            raise ValueError(
                "num_kv_heads must be a multiple of tp_size, or a divisor of it, got "
                f"{kv_heads} kv heads over {ranks} ranks"
            )
        if self.headdim is None:
            if self.hidden_size % heads:
                raise ValueError(
                    f"hidden_size must divide by num_heads, got {self.hidden_size} and {heads}; "
                    "pass headdim where a model has its own"
                )
            object.__setattr__(self, "headdim", self.hidden_size // heads)

    @property
    def local_heads(self) -> int:
        """q heads of the rank."""
        return self.num_heads // self.tp_size

    @property
    def local_kv_heads(self) -> int:
        """kv heads of the rank; 1 where they are replicated."""
        return max(1, self.num_kv_heads // self.tp_size)

    @property
    def local_q_size(self) -> int:
        """Outputs of the rank's q projection."""
        return self.local_heads * (self.headdim or 0)

    @property
    def local_kv_size(self) -> int:
        """Outputs of the rank's k projection, and of its v."""
        return self.local_kv_heads * (self.headdim or 0)

    @property
    def local_intermediate_size(self) -> int:
        """Outputs of the rank's gate and up projections, inputs of its down."""
        return self._part(self.intermediate_size).shape[0]

    @property
    def weight_fraction(self) -> float:
        """Share of a matrix that a rank has, where it divides and nothing is replicated."""
        return 1.0 / self.tp_size

    @property
    def kv_replica_ranks(self) -> tuple[int, ...]:
        """Ranks that have the same kv heads as this one, itself among them.

        The gradients of k and v projections must be summed over them.
        """
        num = max(1, self.tp_size // self.num_kv_heads)
        first = self.rank // num * num
        return tuple(range(first, first + num))

    @property
    def kv_replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """`kv_replica_ranks` of all ranks, each group once: `dist.new_group` needs all groups."""
        ranks = (replace(self, rank=rank).kv_replica_ranks for rank in range(self.tp_size))
        return tuple(sorted(set(ranks)))

    def replicated_outputs(self, kind: Kind) -> slice:
        """Outputs in the rank's shard that other ranks have too: those of replicated kv heads.

            weight.grad[config.replicated_outputs("qkv")]   summed over config.kv_replica_ranks

        They are positions in the output dim of the *shard*; none where nothing is shared, and for
        "replicated", whose gradients are the same on all ranks already.

        Example:
            >>> config = TensorParallelConfig(0, 4, 64, 128, num_heads=8, num_kv_heads=2)
            >>> config.replicated_outputs("k"), config.replicated_outputs("grouped_qkv")
            (slice(0, 8, None), slice(16, 32, None))
        """
        check_one_of("kind", kind, get_args(Kind))
        q, kv = self.local_q_size, self.local_kv_size
        if len(self.kv_replica_ranks) > 1 and kind in ("k", "v"):
            return slice(0, kv)
        if len(self.kv_replica_ranks) > 1 and kind in ("qkv", "grouped_qkv"):
            return slice(q, q + 2 * kv)
        return slice(0, 0)

    def all_reduce_cost(
        self, seqlen: int, num_blocks: int, itemsize: int, gbit_per_s: float
    ) -> AllReduceCost:
        """What the all-reduces of a forward cost: two a block, of (seqlen, hidden_size) each.

        Args:
            seqlen: rows of a rank, of all sequences.
            num_blocks: layers.
            itemsize: bytes of a number.
            gbit_per_s: of the link.
        """
        for name, value in (("seqlen", seqlen), ("num_blocks", num_blocks), ("itemsize", itemsize)):
            check_int(name, value, least=0)
        num = 2 * num_blocks if self.tp_size > 1 else 0
        nbytes = all_reduce_bytes(seqlen, self.hidden_size, 1, itemsize) // 2
        total = num * nbytes
        return AllReduceCost(nbytes, num, total, transfer_seconds(total, gbit_per_s))

    def _part(self, size: int) -> TensorPartition:
        return TensorPartition((size,), 0, self.tp_size, self.rank)


def shard_parameter(
    x: Tensor, kind: Kind, config: TensorParallelConfig, *, order: Order = "out_in"
) -> Tensor | None:
    """The rank's part of a weight or of its bias.

    Args:
        x: the whole weight, `(out, in)` or `(in, out)`, or its bias, `(out,)`; any dtype.
        kind: what the parameter is; see `Kind`.
        config: sizes of the model, and the rank.
        order: of a weight: "out_in" as torch's Linear has it, or "in_out".

    Returns:
        The part as a contiguous copy. None for the bias of a row-parallel layer on a rank other
        than 0: the sum over the ranks has it once.

    Raises:
        ValueError: an unknown kind or order, or a shape that does not fit the config.

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
    """The whole weight or bias again, bit for bit: undoes `shard_parameter`.

    `shards` are in the order of the ranks, with None where `shard_parameter` gives None. Raises
    ValueError where they differ and must be equal: kv heads whose gradients were not summed.
    """
    _check_choices(kind, config, order)
    shards = _checked_count(shards, config.tp_size)
    parts = {rank: x for rank, x in enumerate(shards) if x is not None}
    for rank, x in parts.items():
        check_tensor(f"shards[{rank}]", x)
    row_bias = kind in _ROW_PARALLEL and 0 in parts and parts[0].ndim == 1
    if [*parts] != ([0] if row_bias else [*range(config.tp_size)]):
        raise ValueError(
            f"{kind!r} must be there on every rank, the bias of a row-parallel layer on rank 0 "
            f"alone; got it on ranks {[*parts]} of {config.tp_size}"
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
    """The rank's part of every parameter of a model.

    Args:
        state_dict: of the whole model.
        config: sizes of the model, and the rank.
        plan: kinds by the ends of names, without `.weight` or `.bias`; `*` stands for any part.
            `LLAMA_TP_PLAN | {"query_key_value": "grouped_qkv"}` adds to ours.
        otherwise: kind of names that no pattern fits, such as "replicated"; None refuses them.
        order: of all matrices that are cut.

    Returns:
        The parts by the same names; without the biases of row-parallel layers on ranks other
        than 0.

    Raises:
        ValueError: names that no pattern fits, tensors inside a module that is cut that are neither
            its weight nor its bias (scales of quantised weights, adapters), or wrong shapes.
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
    """The whole model again, from the state dicts of all ranks: undoes `shard_state_dict`.

    Raises KeyError for a parameter that rank 0 does not have, or another rank should have.
    """
    check_type("config", config, TensorParallelConfig)
    shards = _checked_count(shards, config.tp_size)
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
    """The rank's part of one tensor of a safetensors checkpoint; the rest of it is not read.

    A cut in the first dim is a run of bytes. A cut in the second ("o" and "down" in "out_in" files)
    is a piece of every row; where the pieces are apart by less than a page of 4 KiB, the disk reads
    the whole tensor, and the memory taken is still that of the shard.

    Args:
        source: a `.safetensors` file, a `model.safetensors.index.json`, or the folder of either.
        name: of the tensor in it.
        kind: as for `shard_parameter`.
        config: sizes of the model, and the rank.
        order: as for `shard_parameter`.
        device: where the shard goes.
        outside_folder: whether an index may name files outside of its folder, by an absolute path,
            by `..` or behind a link; only for an index that is trusted as a program is.

    Returns:
        As `shard_parameter`, in the dtype of the file; memory of its own.

    Raises:
        KeyError: no tensor of that name; the message has the nearest ones.
        ValueError: as `shard_parameter`; or a source that is no safetensors checkpoint, is damaged,
            or has files outside of the folder of its index.
        FileNotFoundError: no such file, or the index names one that is not there.
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
    """The rank's part of every tensor of a safetensors checkpoint; the rest is not read.

    Takes the arguments of `load_tp_shard` and of `shard_state_dict`, returns what the latter does
    for the whole model, and raises the errors of both.
    """
    with Checkpoint(source, outside_folder=outside_folder) as checkpoint:
        kinds = _kinds(checkpoint.files, plan, otherwise)
        shards = _shards(checkpoint, kinds, config, order)
        return {name: x.to(device) for name, x in shards}


class _Sliced(Protocol):
    """What a tensor in memory and one in a file have in common."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor: ...


def _shards(
    tensors: Any, kinds: Mapping[str, Kind], config: TensorParallelConfig, order: Order
) -> Iterator[tuple[str, Tensor]]:
    for name, kind in kinds.items():
        shard = _shard(name, tensors[name], kind, config, order)
        if shard is not None:
            yield name, shard


def _shard(
    name: str, x: _Sliced, kind: Kind, config: TensorParallelConfig, order: Order
) -> Tensor | None:
    """The rank's part of a tensor in memory or in a file."""
    shape = tuple(x.shape)
    held = _checked_held(name, shape, kind, config, order)
    if held is None:  # "replicated", or the bias of a row-parallel layer
        return None if kind in _ROW_PARALLEL and config.rank > 0 else _take(x, 0, ())
    edges = torch.diff(pad(held.to(torch.int8), (1, 1))).nonzero().flatten().tolist()
    runs = [*zip(edges[::2], edges[1::2], strict=True)] or [(0, 0)]
    return _take(x, _cut_dim(len(shape), kind, order), runs)


def _take(x: _Sliced, dim: int, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Copies the positions `[start, end)` of a dim; without runs, everything."""
    parts = [x[(*[slice(None)] * dim, slice(*run))] for run in runs] or [x[()]]
    if len(parts) > 1:
        return torch.cat(parts, dim)
    # A view of a file would keep all of it mapped, one of a tensor all of it alive.
    return parts[0].clone(memory_format=torch.contiguous_format)


def _cut_dim(ndim: int, kind: Kind, order: Order) -> int:
    return int(ndim == 2 and (kind in _ROW_PARALLEL) == (order == "out_in"))


def _checked_held(
    name: str, shape: tuple[int, ...], kind: Kind, config: TensorParallelConfig, order: Order
) -> Tensor | None:
    """`_held`, for a shape that is checked; None where nothing is cut."""
    _check_choices(kind, config, order)
    if kind == "replicated":
        return None
    if len(shape) not in ((1,) if kind == "heads" else (1, 2)):
        form = "a vector" if kind == "heads" else "a matrix or a bias"
        raise ValueError(
            f"{name} of kind {kind!r} must be {form}, got shape {shape}; what has other dims is "
            "cut by TensorPartition"
        )
    dim = _cut_dim(len(shape), kind, order)
    row_bias = kind in _ROW_PARALLEL and len(shape) == 1
    held = _held(kind, config, shape[dim])
    if kind in _CUT_SIZE:
        sizes = [("hidden_size", config.hidden_size)] * 2
        if not row_bias:
            sizes[dim] = (_CUT_SIZE[kind], len(held))
        for at, (size, (words, wanted)) in enumerate(zip(shape, sizes, strict=False)):
            if size != wanted:
                raise ValueError(
                    f"{name} of kind {kind!r}, to be cut over {config.tp_size} ranks, must have "
                    f"{words} = {wanted} in dim {at} with order={order!r}, got shape {shape}"
                )
    return None if row_bias else held


def _held(kind: Kind, config: TensorParallelConfig, size: int) -> Tensor:
    """Which positions of the dim that is cut the rank has, of as many as the config says.

    `size` is that of the dim, for the kinds that have any.
    """

    def part(size: int, start: int, length: int) -> Tensor:
        positions = torch.arange(size)
        return (positions >= start) & (positions < start + length)

    def ceil_part(size: int) -> Tensor:
        mine = config._part(size)
        return part(size, mine.start, mine.end - mine.start)

    heads, kv_heads, rank = config.num_heads, config.num_kv_heads, config.rank
    num_q, num_kv = config.local_q_size, config.local_kv_size
    q = part(num_q * config.tp_size, rank * num_q, num_q)
    headdim = len(q) // heads
    kv = part(kv_heads * headdim, rank * kv_heads // config.tp_size * headdim, num_kv)
    mlp = ceil_part(config.intermediate_size)
    match kind:
        case "q" | "o":
            return q
        case "k" | "v":
            return kv
        case "qkv":
            return torch.cat([q, kv, kv])
        case "grouped_qkv":
            return torch.cat([x.view(kv_heads, -1) for x in (q, kv, kv)], 1).flatten()
        case "gate" | "up" | "down":
            return mlp
        case "gate_up":
            return torch.cat([mlp, mlp])
        case "heads":
            return part(heads, rank * config.local_heads, config.local_heads)
        case _:
            return ceil_part(size)


def _assembled(
    parts: Mapping[int, Tensor], kind: Kind, config: TensorParallelConfig, order: Order
) -> Tensor:
    """The whole of the parts by rank; what several ranks have must be the same bits on all."""
    first = parts[0]
    dim, shape = _cut_dim(first.ndim, kind, order), list(first.shape)
    row_bias = kind in _ROW_PARALLEL and first.ndim == 1
    if first.ndim and not row_bias and kind != "replicated":
        shape[dim] = len(_held(kind, config, sum(x.size(dim) for x in parts.values())))
    whole = first.new_empty(shape).view(_BITS[first.element_size()]).reshape(shape or [1])
    owner = torch.full((whole.size(dim),), -1)
    for rank, x in parts.items():
        held = _checked_held("the whole", (*shape,), kind, replace(config, rank=rank), order)
        at = torch.arange(len(owner)) if held is None else held.nonzero().flatten()
        expected = [*shape[:dim], len(at), *shape[dim + 1 :]] if shape else []
        _check_part(rank, x, expected, f"{kind!r} {(*shape,)} with {order=}")
        bits = x.to(whole.device).view(whole.dtype).reshape(x.shape or (1,))
        again = (owner[at] >= 0).nonzero().flatten()
        there, here = at[again].to(whole.device), again.to(whole.device)
        if not torch.equal(bits.index_select(dim, here), whole.index_select(dim, there)):
            raise ValueError(
                f"ranks {int(owner[at[again[0]]])} and {rank} both have positions from "
                f"{int(at[again[0]])} on in dim {dim}, with different values: parameters that "
                "several ranks have must stay equal, which takes gradients summed over "
                "kv_replica_ranks"
            )
        whole.index_copy_(dim, at.to(whole.device), bits)
        owner[at] = rank
    return whole.view(first.dtype).reshape(shape)


# A number of bits for each size of element: they compare NaN and 8-bit floats, too.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _kinds(
    names: Iterable[str], plan: Mapping[str, Kind], otherwise: Kind | None
) -> dict[str, Kind]:
    """The kind of each name by the plan, all of which must have one."""
    check_type("plan", plan, Mapping, "kinds by the ends of names")
    for pattern, kind in plan.items():
        check_type("each pattern of plan", pattern, str, "the end of a name")
        check_one_of(f"plan[{pattern!r}]", kind, get_args(Kind))
    if otherwise is not None:
        check_one_of("otherwise", otherwise, get_args(Kind))
    found = {name: _kind_of(name, plan) or otherwise for name in names}
    unknown = [name for name, kind in found.items() if kind is None]
    if unknown:
        raise ValueError(
            f"no pattern of the plan fits {len(unknown)} names, such as {unknown[:3]}: add "
            'patterns for them, or pass otherwise="replicated" where every rank is to have all'
        )
    return {name: kind for name, kind in found.items() if kind is not None}


def _kind_of(name: str, plan: Mapping[str, Kind]) -> Kind | None:
    """The kind of the first pattern that fits the end of a name; None where none fits."""
    parts = name.split(".")
    if parts[-1] in ("weight", "bias") and len(parts) > 1:
        parts.pop()
    for end in range(len(parts), 0, -1):
        for pattern, kind in plan.items():
            wanted = pattern.split(".")
            ending = parts[max(0, end - len(wanted)) : end]
            if len(ending) < len(wanted) or not all(map(fnmatchcase, ending, wanted)):
                continue
            if end < len(parts) and kind != "replicated":
                raise ValueError(
                    f"{name} lies in {'.'.join(parts[:end])}, which the plan cuts as {kind!r}, but "
                    "it is neither its weight nor its bias: give it a pattern of its own"
                )
            if end == len(parts):
                return kind
            break
    return None


def _check_choices(kind: str, config: object, order: str) -> None:
    check_one_of("kind", kind, get_args(Kind))
    check_type("config", config, TensorParallelConfig)
    check_one_of("order", order, get_args(Order))


def _check_rank(name: str, num: int, rank: int) -> None:
    as_int(name, num, least=1)
    if not 0 <= as_int("rank", rank) < num:
        raise ValueError(f"rank must be in [0, {num}), got {rank}")


def _checked_count(shards: Sequence[T], num: int) -> tuple[T, ...]:
    parts = as_tuple("shards", shards)
    if len(parts) != num:
        raise ValueError(f"shards must be the parts of all {num} ranks, got {len(parts)}")
    return parts


def _check_part(rank: int, x: Tensor, expected: Sequence[int], whole: str) -> None:
    if tuple(x.shape) != tuple(expected):
        raise ValueError(
            f"part of rank {rank} must have shape {tuple(expected)} of {whole}, got "
            f"{tuple(x.shape)}"
        )
