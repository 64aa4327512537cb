"""Sizes in tensor parallelism: of a model, of one rank's part, and of the all-reduces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from ring_attn.core.sizes import all_reduce_bytes, transfer_seconds
from ring_attn.core.values import as_int, as_tuple, check_int, check_one_of, check_tensor

#: The role of a parameter, which decides its cut.
#:
#:     q k v gate up     column parallel: whole heads, or a part of the intermediate size
#:     o down            row parallel: the same, of the inputs
#:     qkv               q, k and v concatenated in one matrix (Phi-3, MPT, GPT-2)
#:     grouped_qkv       for each kv head its q heads, k and v (Megatron, GPT-NeoX, InternLM2)
#:     gate_up           gate and up concatenated in one matrix
#:     heads             one number per q head, such as attention sinks
#:     column row        other layers: ceil-sized parts of outputs (a vocabulary) or of inputs
#:     replicated        whole on every rank
Kind = Literal[
    "q", "k", "v", "o", "gate", "up", "down", "qkv", "grouped_qkv", "gate_up", "heads",
    "column", "row", "replicated",
]  # fmt: skip

#: Storage of a matrix: `[out, in]` like torch's Linear, or `[in, out]`.
Order = Literal["out_in", "in_out"]

T = TypeVar("T")


@dataclass(frozen=True)
class TensorPartition:
    """One rank's part of a tensor that is cut along a dim, as by `torch.chunk` and DTensor.

    Parts are `ceil(size / num_partitions)` long; the last ones may be shorter or empty. ValueError
    if the shape has no such dim, or `rank` is out of range.

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
        return self._bound(self.rank)

    @property
    def end(self) -> int:
        return self._bound(self.rank + 1)

    def _bound(self, rank: int) -> int:
        size = self.global_shape[self.dim]
        return min(rank * -(-size // self.num_partitions), size)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.global_shape
        return (*shape[: self.dim], self.end - self.start, *shape[self.dim + 1 :])

    def shard(self, x: Tensor) -> Tensor:
        """Copies the part out of a whole tensor; ValueError if `x` has another shape."""
        check_tensor("x", x)
        if tuple(x.shape) != self.global_shape:
            raise ValueError(f"x must have shape {self.global_shape}, got {tuple(x.shape)}")
        return x.narrow(self.dim, self.start, self.end - self.start).clone()

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Joins the parts of all ranks; ValueError if their number or a shape is wrong."""
        shards = checked_count(shards, self.num_partitions)
        for rank, x in enumerate(shards):
            check_tensor(f"shards[{rank}]", x)
            check_part(rank, x, replace(self, rank=rank).shape, f"a tensor {self.global_shape}")
        return torch.cat(shards, self.dim)


class AllReduceCost(NamedTuple):
    """All-reduces of a forward: bytes of each, their number, total bytes and total seconds.

    Bytes count the tensors; a ring all-reduce sends `2 (tp_size - 1) / tp_size` times as many.
    """

    nbytes: int
    num: int
    total_bytes: int
    seconds: float


@dataclass(frozen=True)
class TensorParallelConfig:
    """Sizes of a model, and of one rank's part.

    With a mesh: `TensorParallelConfig(mesh["tp"].get_local_rank(), mesh["tp"].size(), ...)`.

    Args:
        rank: rank within the tensor-parallel group.
        tp_size: size of the tensor-parallel group.
        hidden_size: size of the residual stream.
        intermediate_size: size of the MLP; parts are ceil-sized.
        num_heads: q heads; a multiple of `tp_size`.
        num_kv_heads: kv heads; a multiple of `tp_size`, or a divisor of it (replicated).
        headdim: size of a head; `hidden_size / num_heads` by default.

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
                f"num_heads must divide by tp_size, got {heads} heads over {ranks} ranks; a head "
                "cannot be cut"
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
                    "pass headdim if it is not hidden_size / num_heads"
                )
            object.__setattr__(self, "headdim", self.hidden_size // heads)

    @property
    def local_heads(self) -> int:
        return self.num_heads // self.tp_size

    @property
    def local_kv_heads(self) -> int:
        """Number of kv heads of the rank; 1 if kv heads are replicated."""
        return max(1, self.num_kv_heads // self.tp_size)

    @property
    def local_q_size(self) -> int:
        """Outputs of the rank's q projection."""
        return self.local_heads * (self.headdim or 0)

    @property
    def local_kv_size(self) -> int:
        """Outputs of the rank's k projection; those of v are as many."""
        return self.local_kv_heads * (self.headdim or 0)

    @property
    def local_intermediate_size(self) -> int:
        """Outputs of the rank's gate and up projections, and inputs of its down projection."""
        return self.part(self.intermediate_size).shape[0]

    @property
    def weight_fraction(self) -> float:
        """Share of a matrix on each rank, if it divides evenly and nothing is replicated."""
        return 1.0 / self.tp_size

    @property
    def kv_replica_ranks(self) -> tuple[int, ...]:
        """Ranks with the same kv heads; sum gradients of k and v projections over them."""
        num = max(1, self.tp_size // self.num_kv_heads)
        first = self.rank // num * num
        return tuple(range(first, first + num))

    @property
    def kv_replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """`kv_replica_ranks` of all ranks, each group once: `dist.new_group` needs all groups."""
        ranks = (replace(self, rank=rank).kv_replica_ranks for rank in range(self.tp_size))
        return tuple(sorted(set(ranks)))

    def replicated_outputs(self, kind: Kind) -> slice:
        """The slice of the shard's output dim that is replicated kv heads.

        Sum `weight.grad[config.replicated_outputs("qkv")]` over `config.kv_replica_ranks`.
        Empty for "replicated", whose gradients are equal on all ranks already.

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
        """The all-reduces of a forward: two per block, of (seqlen, hidden_size) each."""
        for name, value in (("seqlen", seqlen), ("num_blocks", num_blocks), ("itemsize", itemsize)):
            check_int(name, value, least=0)
        num = 2 * num_blocks if self.tp_size > 1 else 0
        nbytes = all_reduce_bytes(seqlen, self.hidden_size, 1, itemsize) // 2
        total = num * nbytes
        return AllReduceCost(nbytes, num, total, transfer_seconds(total, gbit_per_s))

    def part(self, size: int) -> TensorPartition:
        """The rank's ceil-sized part of a dim of any size."""
        return TensorPartition((size,), 0, self.tp_size, self.rank)


def _check_rank(name: str, num: int, rank: int) -> None:
    as_int(name, num, least=1)
    if not 0 <= as_int("rank", rank) < num:
        raise ValueError(f"rank must be in [0, {num}), got {rank}")


def checked_count(shards: Sequence[T], num: int) -> tuple[T, ...]:
    """The shards as a tuple, checked to be `num`."""
    parts = as_tuple("shards", shards)
    if len(parts) != num:
        raise ValueError(f"shards must be the parts of all {num} ranks, got {len(parts)}")
    return parts


def check_part(rank: int, x: Tensor, expected: Sequence[int], whole: str) -> None:
    """Refuses a rank's part with a shape other than expected."""
    if tuple(x.shape) != tuple(expected):
        raise ValueError(
            f"part of rank {rank} must have shape {tuple(expected)} of {whole}, got "
            f"{tuple(x.shape)}"
        )
