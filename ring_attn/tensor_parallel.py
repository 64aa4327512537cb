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

All of it is data: a shard is a few runs `[start, end)` of one dim of the whole, and cutting a
tensor, reading a file and putting shards together again go by the same runs.

    q k v (fused)     [ q0 q1 q2 q3 | k0 k1 | v0 v1 ]    rank 0 of 2: q0 q1, k0, v0
    grouped           [ q0 q1 k0 v0 | q2 q3 k1 v1 ]      rank 0 of 2: q0 q1 k0 v0

Biases. Of a column-parallel layer a rank has the part of its outputs. Of a row-parallel one rank 0
has all, and the others have none (`None`; no entry in a state dict): the sum over the ranks then
has it once, and only one rank trains it. As zeros on the others it would learn on every rank.

Where there are fewer kv heads than ranks, `tp_size / num_kv_heads` consecutive ranks have the same
one. Each has the part of its gradient that comes from its own q heads, and what is owed is the sum:
`TensorParallelConfig.kv_replica_ranks` says over which ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, Protocol, TypeVar, get_args

import torch
from torch import Tensor

from ring_attn.checkpoint import Checkpoint
from ring_attn.cost import all_reduce_bytes, transfer_seconds
from ring_attn.values import as_int, as_tuple, check_int, check_one_of, check_tensor, check_type

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

#: Positions `[start, end)` of a dim.
Run = tuple[int, int]

#: Projections of Llama-style models. A pattern is held against the end of a parameter's name
#: without `.weight` or `.bias`, part by part; the first one that fits counts.
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


@dataclass(frozen=True)
class TensorPartition:
    """One rank's part of a tensor that is cut along a dim, as data.

    All parts are `ceil(size / num_partitions)` long; where that does not divide, the last ones are
    shorter or empty, as `torch.chunk` and DTensor's `Shard` have it.

    Args:
        global_shape: of the whole tensor.
        dim: along which it is cut; negative counts from the end.
        num_partitions: number of ranks.
        rank: whose part.

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
        return min(self.rank * self._part, self.global_shape[self.dim])

    @property
    def end(self) -> int:
        """Position after the last."""
        return min((self.rank + 1) * self._part, self.global_shape[self.dim])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        shape = self.global_shape
        return (*shape[: self.dim], self.end - self.start, *shape[self.dim + 1 :])

    @property
    def _part(self) -> int:
        return -(-self.global_shape[self.dim] // self.num_partitions)

    def shard(self, x: Tensor) -> Tensor:
        """The part of a whole tensor, as a copy.

        Raises:
            ValueError: `x` has another shape.
        """
        check_tensor("x", x)
        if tuple(x.shape) != self.global_shape:
            raise ValueError(f"x must have shape {self.global_shape}, got {tuple(x.shape)}")
        return _take(x, self.dim, ((self.start, self.end),))

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole tensor again, from the parts of all ranks in their order.

        Raises:
            ValueError: a wrong number of parts, or one with a wrong shape.
        """
        shards = _checked_count(shards, self.num_partitions)
        for rank, x in enumerate(shards):
            check_tensor(f"shards[{rank}]", x)
            expected = replace(self, rank=rank).shape
            if tuple(x.shape) != expected:
                raise ValueError(
                    f"part of rank {rank} must have shape {expected} of {self.global_shape} cut in "
                    f"dim {self.dim} over {self.num_partitions} ranks, got {tuple(x.shape)}"
                )
        return torch.cat(list(shards), self.dim)


class AllReduceCost(NamedTuple):
    """What a forward of a tensor-parallel model reduces, the bytes of each tensor counted once.

    Attributes:
        nbytes: of one all-reduce.
        num: how many there are.
        total_bytes: of all.
        seconds: at the link's speed. A ring sends `2 (tp_size - 1) / tp_size` times the bytes from
            each rank.
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
        tp_size: its size.
        hidden_size: of the residual stream.
        intermediate_size: of the MLP; where it does not divide, parts are ceil-sized, and the last
            ones shorter or empty.
        num_heads: q heads; a multiple of `tp_size`.
        num_kv_heads: kv heads; a multiple of `tp_size`, or a divisor of it (replicated).
        headdim: of a head; `hidden_size / num_heads` by default.

    Raises:
        ValueError: a number below 1, a rank that does not exist, or heads that do not divide.
        TypeError: a number that is not an int.

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
        for name, value in vars(self).items():
            if value is None and name == "headdim":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if value < 1 and name != "rank":
                raise ValueError(f"{name} must be at least 1, got {value}")
        _check_rank("tp_size", self.tp_size, self.rank)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and "
                f"{self.num_kv_heads}"
            )
        if self.num_heads % self.tp_size:
            raise ValueError(
                f"num_heads must divide by tp_size, got {self.num_heads} heads over {self.tp_size} "
                f"ranks; heads are not cut"
            )
        if self.num_kv_heads % self.tp_size and self.tp_size % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must be a multiple of tp_size, or a divisor of it, got "
                f"{self.num_kv_heads} kv heads over {self.tp_size} ranks"
            )
        if self.headdim is None:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"hidden_size must divide by num_heads, got {self.hidden_size} and "
                    f"{self.num_heads}; pass headdim where a model has its own"
                )
            object.__setattr__(self, "headdim", self.hidden_size // self.num_heads)

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
        return self.local_heads * self._headdim

    @property
    def local_kv_size(self) -> int:
        """Outputs of the rank's k projection, and of its v."""
        return self.local_kv_heads * self._headdim

    @property
    def local_intermediate_size(self) -> int:
        """Outputs of the rank's gate and up projections, inputs of its down."""
        start, end = self._intermediate
        return end - start

    @property
    def weight_fraction(self) -> float:
        """Share of a matrix that a rank has, where it divides and nothing is replicated."""
        return 1.0 / self.tp_size

    @property
    def kv_replica_ranks(self) -> tuple[int, ...]:
        """Ranks that have the same kv heads as this one, itself among them.

        The gradients of k and v projections are to be summed over them; one rank is alone.
        """
        num = max(1, self.tp_size // self.num_kv_heads)
        first = self.rank // num * num
        return tuple(range(first, first + num))

    @property
    def kv_replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """`kv_replica_ranks` of all ranks, each group once: `dist.new_group` wants to know all."""
        ranks = (replace(self, rank=rank).kv_replica_ranks for rank in range(self.tp_size))
        return tuple(sorted(set(ranks)))

    def replicated_outputs(self, kind: Kind) -> slice:
        """Outputs in the rank's shard that other ranks have too: those of replicated kv heads.

            weight.grad[config.replicated_outputs("qkv")]   summed over config.kv_replica_ranks

        Args:
            kind: of the parameter.

        Returns:
            Positions in the output dim of the *shard*; an empty slice where nothing is shared, and
            for "replicated", whose gradients are the same on all ranks already.

        Example:
            >>> config = TensorParallelConfig(0, 4, 64, 128, num_heads=8, num_kv_heads=2)
            >>> config.replicated_outputs("k"), config.replicated_outputs("grouped_qkv")
            (slice(0, 8, None), slice(16, 32, None))
        """
        _check_kind(kind)
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

        Raises:
            ValueError: a link without bandwidth, or a negative number.
            TypeError: a number of another type.

        Example:
            >>> config = TensorParallelConfig(0, 2, 1024, 4096, 16, 4)
            >>> cost = config.all_reduce_cost(1024, 24, itemsize=4, gbit_per_s=100.0)
            >>> cost.nbytes >> 20, cost.num, cost.total_bytes >> 20, round(cost.seconds, 3)
            (4, 48, 192, 0.016)
        """
        for name, value in (("seqlen", seqlen), ("num_blocks", num_blocks), ("itemsize", itemsize)):
            check_int(name, value, least=0)
        num = 2 * num_blocks if self.tp_size > 1 else 0
        nbytes = all_reduce_bytes(seqlen, self.hidden_size, 1, itemsize) // 2
        total = num * nbytes
        return AllReduceCost(nbytes, num, total, transfer_seconds(total, gbit_per_s))

    @property
    def _headdim(self) -> int:
        return self.headdim or 0  # never 0: __post_init__ has set it

    @property
    def _q(self) -> Run:
        return self.rank * self.local_q_size, (self.rank + 1) * self.local_q_size

    @property
    def _kv(self) -> Run:
        start = self.rank * self.num_kv_heads // self.tp_size * self._headdim
        return start, start + self.local_kv_size

    @property
    def _intermediate(self) -> Run:
        return _ceil_part(self.intermediate_size, self)


def shard_parameter(
    x: Tensor,
    kind: Kind,
    config: TensorParallelConfig,
    *,
    order: Order = "out_in",
) -> Tensor | None:
    """The rank's part of a weight or of its bias.

    Args:
        x: the whole weight, `(out, in)` or `(in, out)`, or its bias, `(out,)`; any dtype.
        kind: what it is; see `Kind`.
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
    return _shard("x", x, tuple(x.shape), kind, config, order)


@torch.no_grad()
def unshard_parameter(
    shards: Sequence[Tensor | None],
    kind: Kind,
    config: TensorParallelConfig,
    *,
    order: Order = "out_in",
) -> Tensor:
    """The whole weight or bias again, from the parts of all ranks: undoes `shard_parameter`.

    Args:
        shards: in the order of the ranks; None where `shard_parameter` gives None.
        kind: as it was cut.
        config: of any rank.
        order: as it was cut.

    Returns:
        The whole parameter, bit for bit.

    Raises:
        ValueError: a wrong number of parts, a wrong shape, or ranks that have different values of
            what they all should have: replicated kv heads that have drifted apart, or whose
            gradients were not summed.
        TypeError: parts of different dtypes.
    """
    _check_kind(kind)
    _check_config(config)
    _check_order(order)
    shards = _checked_count(shards, config.tp_size)
    for rank, x in enumerate(shards):
        if x is not None:
            check_tensor(f"shards[{rank}]", x)
    first = shards[0]
    row_bias = kind in _ROW_PARALLEL and first is not None and first.ndim == 1
    held = [rank for rank, x in enumerate(shards) if x is not None]
    if held != ([0] if row_bias else [*range(config.tp_size)]):
        raise ValueError(
            f"{kind!r} must be there on every rank, the bias of a row-parallel layer on rank 0 "
            f"alone; got it on ranks {held} of {config.tp_size}"
        )
    parts = [x for x in shards if x is not None]
    dtypes = {x.dtype for x in parts}
    if len(dtypes) > 1:
        raise TypeError(f"all parts must have one dtype, got {sorted(map(str, dtypes))}")
    dim = _cut_dim(parts[0].ndim, kind, order)
    shape = _whole_shape(parts, kind, config, dim)
    runs = []
    for rank, x in enumerate(parts):
        own = _checked_runs("the whole", shape, kind, replace(config, rank=rank), order)
        expected = (*shape[:dim], sum(b - a for a, b in own), *shape[dim + 1 :]) if own else shape
        if tuple(x.shape) != expected:
            raise ValueError(
                f"part of rank {rank} must have shape {expected} of {kind!r} {shape} over "
                f"{config.tp_size} ranks with order={order!r}, got {tuple(x.shape)}"
            )
        runs.append(own)
    return _assembled(parts, shape, dim, runs)


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
        plan: from the end of a name, without `.weight` or `.bias`, to what it is; `*` stands for
            any part. `LLAMA_TP_PLAN | {"query_key_value": "grouped_qkv"}` adds to ours.
        otherwise: of names that no pattern fits, such as "replicated"; None refuses them.
        order: of all matrices that are cut.

    Returns:
        The parts by the same names; without the biases of row-parallel layers on ranks other
        than 0.

    Raises:
        ValueError: names that no pattern fits, tensors inside a module that is cut that are neither
            its weight nor its bias (scales of quantised weights, adapters), or wrong shapes.

    Example:
        >>> config = TensorParallelConfig(1, 2, 4, 8, num_heads=2, num_kv_heads=1)
        >>> whole = {"mlp.up_proj.weight": torch.zeros(8, 4), "norm.weight": torch.ones(4)}
        >>> part = shard_state_dict(whole, config, otherwise="replicated")
        >>> {name: tuple(x.shape) for name, x in part.items()}
        {'mlp.up_proj.weight': (4, 4), 'norm.weight': (4,)}
    """
    check_type("state_dict", state_dict, Mapping, "tensors by name")
    kinds = _kinds(state_dict, plan, otherwise)
    for name, x in state_dict.items():
        check_tensor(f"state_dict[{name!r}]", x)
    found = {
        name: _shard(name, x, tuple(x.shape), kinds[name], config, order)
        for name, x in state_dict.items()
    }
    return {name: x for name, x in found.items() if x is not None}


def unshard_state_dict(
    shards: Sequence[Mapping[str, Tensor]],
    config: TensorParallelConfig,
    plan: Mapping[str, Kind] = LLAMA_TP_PLAN,
    *,
    otherwise: Kind | None = None,
    order: Order = "out_in",
) -> dict[str, Tensor]:
    """The whole model again, from the parts of all ranks: undoes `shard_state_dict`.

    Args:
        shards: a state dict of each rank, in their order.
        config: of any rank.
        plan: as it was cut.
        otherwise: as it was cut.
        order: as it was cut.

    Raises:
        ValueError: as `unshard_parameter`, and names that no pattern fits.
        TypeError: parts of different dtypes.
        KeyError: a parameter that rank 0 does not have, or another rank should have.
    """
    _check_config(config)
    shards = _checked_count(shards, config.tp_size)
    for rank, part in enumerate(shards):
        check_type(f"shards[{rank}]", part, Mapping, "tensors by name")
    kinds = _kinds(dict.fromkeys(name for part in shards for name in part), plan, otherwise)
    whole = {}
    for name, kind in kinds.items():
        parts = [part.get(name) for part in shards]
        bias = kind in _ROW_PARALLEL and parts[0] is not None and parts[0].ndim == 1
        missing = [r for r, x in enumerate(parts) if x is None and not (bias and r > 0)]
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

    safetensors maps the file and gives a view of the shard, which is copied out. What the disk
    reads are the file's header and the pages that the shard lies in: they are asked for before the
    copy, so that the system does not read ahead of them (which would be megabytes on some disks). A
    cut in the first dim is a run of bytes. One in the second ("o" and "down" in "out_in" files) is
    a piece of every row, and where those are apart by less than a page of 4 KiB, all of the tensor
    is read; the memory taken is that of the shard.

    Args:
        source: a `.safetensors` file, a `model.safetensors.index.json`, or the folder of either.
        name: of the tensor in it.
        kind: what it is; see `Kind`.
        config: sizes of the model, and the rank.
        order: of a weight: "out_in" as torch's Linear has it, or "in_out".
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

    Example:
        >>> import tempfile
        >>> from safetensors.torch import save_file
        >>> config = TensorParallelConfig(1, 2, 4, 8, num_heads=2, num_kv_heads=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file({"up.weight": torch.arange(32).view(8, 4)}, f"{folder}/model.safetensors")
        ...     load_tp_shard(folder, "up.weight", "up", config)[:, 0].tolist()
        [16, 20, 24, 28]
    """
    check_type("name", name, str)
    with Checkpoint(source, outside_folder=outside_folder) as checkpoint:
        x = checkpoint.tensor(name)
        shard = _shard(name, x, x.shape, kind, config, order)
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

    Args:
        source: as for `load_tp_shard`. Each file of an index is opened once.
        config: sizes of the model, and the rank.
        plan: as for `shard_state_dict`.
        otherwise: as for `shard_state_dict`.
        order: of all matrices that are cut.
        device: where the shards go.
        outside_folder: as for `load_tp_shard`.

    Returns:
        As `shard_state_dict` of the whole model.

    Raises:
        ValueError: as `shard_state_dict`; or a source that is no safetensors checkpoint, is
            damaged, or has files outside of the folder of its index.
        FileNotFoundError: no such file, or the index names one that is not there.
        ImportError: safetensors is not installed.
    """
    with Checkpoint(source, outside_folder=outside_folder) as checkpoint:
        kinds = _kinds(checkpoint.files, plan, otherwise)
        found = {}
        for name, kind in kinds.items():
            x = checkpoint.tensor(name)
            shard = _shard(name, x, x.shape, kind, config, order)
            if shard is not None:
                found[name] = shard.to(device)
    return found


class _Sliced(Protocol):
    """What a tensor and safetensors' slice of a file have in common."""

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor: ...


def _shard(
    name: str,
    x: _Sliced,
    shape: tuple[int, ...],
    kind: Kind,
    config: TensorParallelConfig,
    order: Order,
) -> Tensor | None:
    """The one way to a shard: from a tensor in memory or in a file."""
    runs = _checked_runs(name, shape, kind, config, order)
    if kind in _ROW_PARALLEL and len(shape) == 1 and config.rank > 0:
        return None
    return _take(x, _cut_dim(len(shape), kind, order), runs)


def _take(x: _Sliced, dim: int, runs: Sequence[Run]) -> Tensor:
    """A copy of those positions of a dim; without runs, of everything."""
    parts = [x[(*[slice(None)] * dim, slice(start, end))] for start, end in runs] or [x[()]]
    if len(parts) > 1:
        return torch.cat(parts, dim)
    # A view of a file would keep all of it mapped, one of a tensor all of it alive.
    return parts[0].clone(memory_format=torch.contiguous_format)


def _cut_dim(ndim: int, kind: Kind, order: Order) -> int:
    """The dim that is cut, where one is."""
    return int(ndim == 2 and (kind in _ROW_PARALLEL) == (order == "out_in"))


def _checked_runs(
    name: str, shape: tuple[int, ...], kind: Kind, config: TensorParallelConfig, order: Order
) -> tuple[Run, ...]:
    """What the rank has of the dim that is cut; none where nothing is cut.

    Raises:
        ValueError: an unknown kind or order, or a shape that does not fit.
    """
    _check_kind(kind)
    _check_config(config)
    _check_order(order)
    if kind == "replicated":
        return ()
    if len(shape) not in ((1,) if kind == "heads" else (1, 2)):
        form = "a vector" if kind == "heads" else "a matrix or a bias"
        raise ValueError(
            f"{name} of kind {kind!r} must be {form}, got shape {shape}; what has other dims is "
            "cut by TensorPartition"
        )
    dim = _cut_dim(len(shape), kind, order)
    row_bias = kind in _ROW_PARALLEL and len(shape) == 1
    if kind in _CUT_SIZE:
        cut = _CUT_SIZE[kind], sum(size for size, _ in _blocks(kind, config, 0))
        other = "hidden_size", config.hidden_size
        sizes = (cut, other) if dim == 0 and not row_bias else (other, cut)
        for at, (size, (words, wanted)) in enumerate(zip(shape, sizes, strict=False)):
            if size != wanted:
                raise ValueError(
                    f"{name} of kind {kind!r}, to be cut over {config.tp_size} ranks, must have "
                    f"{words} = {wanted} in dim {at} with order={order!r}, got shape {shape}"
                )
    return () if row_bias else _runs(_blocks(kind, config, shape[dim]))


# What the size of the dim that is cut is to be; that of the others is any.
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


def _blocks(kind: Kind, config: TensorParallelConfig, size: int) -> list[tuple[int, Run]]:
    """The dim that is cut, as blocks one after another: the size of each, and the rank's part.

    `size` is that of the dim, for the kinds that have any.
    """
    headdim, num_kv = config._headdim, config.num_kv_heads
    q = config.num_heads * headdim, config._q
    kv = num_kv * headdim, config._kv
    mlp = config.intermediate_size, config._intermediate
    heads = config.local_heads
    match kind:
        case "q" | "o":
            return [q]
        case "k" | "v":
            return [kv]
        case "qkv":
            return [q, kv, kv]
        case "grouped_qkv":
            group = q[0] // num_kv
            per_head = ((group, config._q), (headdim, config._kv), (headdim, config._kv))
            return [(n, _within(run, g * n, n)) for g in range(num_kv) for n, run in per_head]
        case "gate" | "up" | "down":
            return [mlp]
        case "gate_up":
            return [mlp, mlp]
        case "heads":
            return [(config.num_heads, (config.rank * heads, (config.rank + 1) * heads))]
        case _:
            return [(size, _ceil_part(size, config))]


def _within(run: Run, start: int, size: int) -> Run:
    """What of a run lies in `[start, start + size)`, counted from there."""
    first, last = (min(max(position - start, 0), size) for position in run)
    return first, last


def _ceil_part(size: int, config: TensorParallelConfig) -> Run:
    part = TensorPartition((size,), 0, config.tp_size, config.rank)
    return part.start, part.end


def _runs(blocks: Iterable[tuple[int, Run]]) -> tuple[Run, ...]:
    """The rank's parts of all blocks, counted from the first; neighbours are joined."""
    runs: list[Run] = []
    before = 0
    for size, (start, end) in blocks:
        first = before + start
        if end > start:
            if runs and runs[-1][1] == first:
                first, _ = runs.pop()
            runs.append((first, before + end))
        before += size
    return tuple(runs) or ((0, 0),)


def _whole_shape(
    parts: Sequence[Tensor], kind: Kind, config: TensorParallelConfig, dim: int
) -> tuple[int, ...]:
    """Shape of the whole parameter, from those of the parts and the config."""
    shape = tuple(parts[0].shape)
    if kind == "replicated" or (kind in _ROW_PARALLEL and len(shape) == 1) or not shape:
        return shape
    found = sum(x.size(dim) for x in parts)
    size = sum(size for size, _ in _blocks(kind, config, found))
    return (*shape[:dim], size, *shape[dim + 1 :])


def _assembled(
    parts: Sequence[Tensor], shape: tuple[int, ...], dim: int, runs: Sequence[Sequence[Run]]
) -> Tensor:
    """The whole of all parts; what several ranks have must be the same bits on all of them."""
    dtype, bits = parts[0].dtype, _BITS[parts[0].element_size()]
    # A number is a row, too; and what is whole on a rank is one run of it.
    rows = shape or (1,)
    whole = torch.empty(rows, dtype=bits, device=parts[0].device)
    owner = torch.full((rows[dim],), -1)
    for rank, (x, own) in enumerate(zip(parts, runs, strict=True)):
        x, at = x.reshape(x.shape or (1,)).view(bits), 0
        for start, end in own or ((0, rows[dim]),):
            piece, there = x.narrow(dim, at, end - start), whole.narrow(dim, start, end - start)
            again = (owner[start:end] >= 0).nonzero().flatten().to(x.device)
            if not torch.equal(piece.index_select(dim, again), there.index_select(dim, again)):
                other = int(owner[start + int(again[0])])
                raise ValueError(
                    f"ranks {other} and {rank} both have positions of [{start}, {end}) in dim "
                    f"{dim}, with different values: parameters that several ranks have must stay "
                    "equal, which takes gradients summed over kv_replica_ranks"
                )
            there.copy_(piece)
            owner[start:end] = rank
            at += end - start
    return whole.view(dtype).view(shape)


# One number of bits for each size of element: comparing those holds for NaN and for 8-bit floats.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _kinds(
    names: Iterable[str], plan: Mapping[str, Kind], otherwise: Kind | None
) -> dict[str, Kind]:
    """What each name is by the plan.

    Raises:
        ValueError: names that no pattern fits, or an unknown kind.
    """
    check_type("plan", plan, Mapping, "kinds by the ends of names")
    for pattern, kind in plan.items():
        check_type("each pattern of plan", pattern, str, "the end of a name")
        _check_kind(kind, f"plan[{pattern!r}]")
    if otherwise is not None:
        _check_kind(otherwise, "otherwise")
    found: dict[str, Kind] = {}
    unknown = []
    for name in names:
        fitting = _kind_of(name, plan) or otherwise
        if fitting is None:
            unknown.append(name)
        else:
            found[name] = fitting
    if unknown:
        raise ValueError(
            f"no pattern of the plan fits {len(unknown)} names, such as {unknown[:3]}: add "
            'patterns for them, or pass otherwise="replicated" where every rank is to have all'
        )
    return found


def _kind_of(name: str, plan: Mapping[str, Kind]) -> Kind | None:
    """What a name is by the plan; None where no pattern fits.

    Raises:
        ValueError: a tensor inside a module that is cut, which the plan does not speak of.
    """
    parts = name.split(".")
    if parts[-1] in ("weight", "bias") and len(parts) > 1:
        parts.pop()
    found = _fitting(parts, plan)
    for end in range(len(parts) - 1, 0, -1) if found is None else ():
        outer = _fitting(parts[:end], plan)
        if outer not in (None, "replicated"):
            raise ValueError(
                f"{name} lies in {'.'.join(parts[:end])}, which the plan cuts as {outer!r}, but it "
                "is neither its weight nor its bias: give it a pattern of its own"
            )
    return found


def _fitting(parts: Sequence[str], plan: Mapping[str, Kind]) -> Kind | None:
    """The kind of the first pattern that fits the end of a name."""
    for pattern, kind in plan.items():
        wanted = pattern.split(".")
        ending = parts[-len(wanted) :]
        if len(ending) == len(wanted) and all(map(fnmatchcase, ending, wanted)):
            return kind
    return None


def _check_kind(kind: str, name: str = "kind") -> None:
    check_one_of(name, kind, get_args(Kind))


def _check_order(order: str) -> None:
    check_one_of("order", order, get_args(Order))


def _check_config(config: TensorParallelConfig) -> None:
    check_type("config", config, TensorParallelConfig)


def _check_rank(name: str, num: int, rank: int) -> None:
    as_int(name, num, least=1)
    if not 0 <= as_int("rank", rank) < num:
        raise ValueError(f"rank must be in [0, {num}), got {rank}")


def _checked_count(shards: Sequence[T], num: int) -> tuple[T, ...]:
    """Parts, of which there must be so many."""
    parts = as_tuple("shards", shards)
    if len(parts) != num:
        raise ValueError(f"shards must be the parts of all {num} ranks, got {len(parts)}")
    return parts
