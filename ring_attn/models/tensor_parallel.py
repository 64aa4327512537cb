"""Weight shards of tensor parallelism (Megatron-LM, arXiv 1909.08053), from tensors and files.

A rank has some outputs of column-parallel layers and the matching inputs of row-parallel layers,
whose results are summed over the ranks: one all-reduce after o, one after down.

torch's Linear stores `[out, in]`, as do nearly all checkpoints on Hugging Face: `order="out_in"`,
the default. GPT-2's Conv1D and the kernels of Flax are `[in, out]`: `order="in_out"`. Sizes are
checked, but a wrong order of a square matrix is not detected.

                                                         "out_in"           "in_out"
    column parallel   q, k, v, gate, up: whole heads     W[start:end, :]    W[:, start:end]
    row parallel      o, down: the matching inputs       W[:, start:end]    W[start:end, :]

    q k v (fused)     [ q0 q1 q2 q3 | k0 k1 | v0 v1 ]    rank 0 of 2: q0 q1, k0, v0
    grouped           [ q0 q1 k0 v0 | q2 q3 k1 v1 ]      rank 0 of 2: q0 q1 k0 v0

A column-parallel bias is sharded like its outputs. Only rank 0 has a row-parallel bias, so the sum
over the ranks contains the bias once, and only one rank trains it.

With fewer kv heads than ranks, `tp_size / num_kv_heads` consecutive ranks share a kv head. Each
computes the part of the head's gradient that comes from its q heads: sum the parts over
`TensorParallelConfig.kv_replica_ranks`. Use DTensor (`distribute_tensor`) to shard other tensors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ring_attn.models.checkpoint import TensorSlice, open_checkpoint
from ring_attn.values.checks import check_int, check_one_of, check_tensor, check_type

#: The role of a parameter, which decides how it is sharded.
#:
#:     q k v gate up     column parallel: whole heads, or a part of the intermediate size
#:     o down            row parallel: the same parts, but of the inputs
#:     qkv gate_up       q, k and v, or gate and up, concatenated in one matrix (Phi-3)
#:     grouped_qkv       for each kv head its q heads, k and v (Megatron, GPT-NeoX, InternLM2)
#:     heads             one number per q head, such as attention sinks
#:     column row        other layers: parts of outputs (a vocabulary) or of inputs
#:     replicated        whole on every rank
Kind = Literal[
    "q",
    "k",
    "v",
    "o",
    "gate",
    "up",
    "down",
    "qkv",
    "grouped_qkv",
    "gate_up",
    "heads",
    "column",
    "row",
    "replicated",
]

#: Storage of a matrix: `[out, in]` like torch's Linear, or `[in, out]`.
Order = Literal["out_in", "in_out"]
Plan = Mapping[str, Kind]

#: Projections of Llama-style models. A pattern must match the end of a parameter's name without
#: `.weight` or `.bias`, part by part; the first matching pattern counts.
LLAMA_TP_PLAN: Plan = {
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


@dataclass(frozen=True)
class TensorParallelConfig:
    """Sizes of a model, and of one rank's shard.

    With a mesh: `TensorParallelConfig(mesh["tp"].get_local_rank(), mesh["tp"].size(), ...)`.

    Args:
        rank: rank within the tensor-parallel group.
        tp_size: size of the tensor-parallel group.
        hidden_size: size of the residual stream.
        intermediate_size: size of the MLP, which is sharded as by DTensor: each part has
            `ceil(size / tp_size)` elements, and the last parts are shorter or empty.
        num_heads: number of q heads; a multiple of `tp_size`.
        num_kv_heads: number of kv heads; a multiple of `tp_size`, or a divisor of it, in which case
            kv heads are replicated.
        headdim: size of a head; `hidden_size / num_heads` by default.

    Raises:
        ValueError: `rank` is not in the group, or sizes do not divide as stated above.
        TypeError: a size is not an int.

    Example:
        >>> config = TensorParallelConfig(0, 2, 64, 128, num_heads=8, num_kv_heads=2)
        >>> config.headdim, config.local_heads, config.local_kv_size
        (8, 4, 8)
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
            if value is not None or name != "headdim":
                check_int(name, value, least=0 if name == "rank" else 1)
        heads, kv_heads, ranks = self.num_heads, self.num_kv_heads, self.tp_size
        if self.rank >= ranks:
            raise ValueError(f"rank must be below tp_size={ranks}, got {self.rank}")
        if heads % kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {heads} and {kv_heads}"
            )
        if heads % ranks:
            raise ValueError(f"num_heads must be a multiple of tp_size, got {heads} and {ranks}")
        if kv_heads % ranks and ranks % kv_heads:
            raise ValueError(
                "num_kv_heads must be a multiple or a divisor of tp_size, got "
                f"{kv_heads} and {ranks}"
            )
        if self.headdim is None:
            if self.hidden_size % heads:
                raise ValueError(
                    "hidden_size must be a multiple of num_heads unless headdim is given, got "
                    f"{self.hidden_size} and {heads}: pass headdim"
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
        """Number of outputs of the rank's q projection."""
        return self.local_heads * (self.headdim or 0)

    @property
    def local_kv_size(self) -> int:
        """Number of outputs of the rank's k projection, and of its v projection."""
        return self.local_kv_heads * (self.headdim or 0)

    @property
    def local_intermediate_size(self) -> int:
        """Number of outputs of the rank's gate and up projections, and of inputs of its down."""
        return _pieces("gate", self, size=0, is_bias=False)[self.rank].length

    @property
    def weight_fraction(self) -> float:
        """Fraction of a matrix on each rank, if it divides evenly and nothing is replicated."""
        return 1.0 / self.tp_size

    @property
    def kv_replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks with the same kv heads; `dist.new_group` needs all groups."""
        size = max(1, self.tp_size // self.num_kv_heads)
        firsts = range(0, self.tp_size, size)
        return tuple(tuple(range(first, first + size)) for first in firsts)

    @property
    def kv_replica_ranks(self) -> tuple[int, ...]:
        """The rank's group of `kv_replica_groups`; sum gradients of k and v over it."""
        return next(ranks for ranks in self.kv_replica_groups if self.rank in ranks)

    def replicated_outputs(self, kind: Kind) -> slice:
        """Return the slice of the shard's output dim that holds replicated kv heads.

        Sum `weight.grad[config.replicated_outputs("qkv")]` over `config.kv_replica_ranks`. The
        slice is empty for "replicated", whose gradients are equal on all ranks already.

        Raises:
            ValueError: `kind` is unknown.

        Example:
            >>> config = TensorParallelConfig(0, 4, 64, 128, num_heads=8, num_kv_heads=2)
            >>> config.replicated_outputs("k"), config.replicated_outputs("grouped_qkv")
            (slice(0, 8, None), slice(16, 32, None))
        """
        check_one_of("kind", kind, get_args(Kind))
        if kind not in ("k", "v", "qkv", "grouped_qkv") or len(self.kv_replica_ranks) == 1:
            return slice(0, 0)
        q, kv = self.local_q_size, self.local_kv_size
        return slice(0, kv) if kind in ("k", "v") else slice(q, q + 2 * kv)


def shard_parameter(
    x: Tensor, kind: Kind, config: TensorParallelConfig, *, order: Order = "out_in", name: str = "x"
) -> Tensor | None:
    """Return the rank's shard of a weight or of its bias.

    Args:
        x: the whole weight, `(out, in)` or `(in, out)`, or its bias, `(out,)`; any dtype.
        kind: role of the parameter; see `Kind`.
        config: sizes of the model, and the rank.
        order: storage of a weight: "out_in" like torch's Linear, or "in_out".
        name: name of the parameter in error messages.

    Returns:
        The shard as a contiguous copy; None for the bias of a row-parallel layer on ranks above 0.

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
    check_tensor(name, x)
    return _part(name, x, tuple(x.shape), kind, config, order)


def _part(
    name: str,
    x: Tensor | TensorSlice,
    shape: tuple[int, ...],
    kind: Kind,
    config: TensorParallelConfig,
    order: Order,
) -> Tensor | None:
    """Return the rank's shard of a tensor, or of a tensor in a file, which is read only there."""
    dim = _cut_dim(len(shape), kind, order)
    parts: list[Tensor] = []
    end = 0
    for length, ranks in _checked_cut(name, shape, kind, config, order):
        start, end = end, end + length
        if config.rank in ranks:
            index = (*[slice(None)] * dim, slice(start, end))
            parts.append(x[index[: len(shape)]])  # without dims, there is nothing to slice
    if not parts:
        return None
    if len(parts) > 1:
        return torch.cat(parts, dim)
    # A view would keep the whole file mapped, or the whole tensor alive.
    return parts[0].clone(memory_format=torch.contiguous_format)


def shard_state_dict(
    state_dict: Mapping[str, Tensor],
    config: TensorParallelConfig,
    plan: Plan = LLAMA_TP_PLAN,
    *,
    otherwise: Kind | None = None,
    order: Order = "out_in",
) -> dict[str, Tensor]:
    """Return the rank's shards of all parameters of a model, under the same names.

    Args:
        state_dict: tensors of the whole model.
        config, order: as for `shard_parameter`.
        plan: kinds by the ends of names, without `.weight` or `.bias`; `*` stands for any part.
            `LLAMA_TP_PLAN | {"query_key_value": "grouped_qkv"}` extends the default.
        otherwise: kind of names that match no pattern, such as "replicated". By default such names
            raise an error.

    Returns:
        The shards by name. Row-parallel biases are only in the result of rank 0.

    Raises:
        ValueError: a name matches no pattern, a shape is wrong, or a sharded module has tensors
            other than weight and bias (scales of quantised weights, adapters).
        TypeError: `state_dict` or `plan` is not a mapping, or a value is not a tensor.

    Example:
        >>> config = TensorParallelConfig(0, 2, 4, 4, num_heads=2, num_kv_heads=2)
        >>> shards = shard_state_dict({"attn.q_proj.weight": torch.zeros(4, 4)}, config)
        >>> shards["attn.q_proj.weight"].shape
        torch.Size([2, 4])
    """
    check_type("state_dict", state_dict, Mapping, "tensors by name")
    kinds = _kinds(state_dict, plan, otherwise)
    parts = {
        name: shard_parameter(state_dict[name], kind, config, order=order, name=name)
        for name, kind in kinds.items()
    }
    return {name: part for name, part in parts.items() if part is not None}


def load_tp_state_dict(
    source: str | os.PathLike[str],
    config: TensorParallelConfig,
    plan: Plan = LLAMA_TP_PLAN,
    *,
    otherwise: Kind | None = None,
    order: Order = "out_in",
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Return the rank's shards of a safetensors checkpoint, and read only these from the files.

    The system may read ahead; on some disks it reads the rest of a matrix that is sharded by inputs
    (o, down). Processes of one machine share the memory of the files.

    Args:
        source: a `.safetensors` file, a `model.safetensors.index.json`, or the folder of either.
        config, plan, otherwise, order: as for `shard_state_dict`.
        device: the device of the shards.

    Returns:
        The shards by name, as `shard_state_dict` returns them.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: the folder has no safetensors file.
        ValueError: a file or the index is damaged, or as `shard_state_dict`.

    Example:
        >>> config = TensorParallelConfig(0, 2, 4, 4, num_heads=2, num_kv_heads=2)
        >>> load_tp_state_dict("missing", config)
        Traceback (most recent call last):
            ...
        FileNotFoundError: [Errno 2] No such file or directory: 'missing'
    """
    with open_checkpoint(source) as tensors:
        shards = {}
        for name, kind in _kinds(tensors, plan, otherwise).items():
            x = tensors[name]
            part = _part(name, x, tuple(x.get_shape()), kind, config, order)
            if part is not None:
                shards[name] = part.to(device)
        return shards


def _cut_dim(ndim: int, kind: Kind, order: Order) -> int:
    """Return the dim that is sharded: 0 or 1 of a matrix, 0 of a bias."""
    check_one_of("kind", kind, get_args(Kind))
    check_one_of("order", order, get_args(Order))
    if ndim != 2 or kind == "replicated":
        return 0
    shards_inputs = kind in ("o", "down", "row")
    input_dim = 1 if order == "out_in" else 0
    return input_dim if shards_inputs else 1 - input_dim


def _checked_cut(
    name: str, shape: tuple[int, ...], kind: Kind, config: TensorParallelConfig, order: Order
) -> list[_Piece]:
    """Return the pieces of the sharded dim; refuse a shape that does not match the config."""
    check_type("config", config, TensorParallelConfig)
    ndim, dim = len(shape), _cut_dim(len(shape), kind, order)
    allowed = {"replicated": [ndim], "heads": [1]}.get(kind, [1, 2])
    if ndim not in allowed:
        raise ValueError(f"{name} of kind {kind!r} must have {allowed} dims, got shape {shape}")
    size = shape[dim] if shape else 1
    pieces = _pieces(kind, config, size, is_bias=ndim == 1)
    if kind in ("column", "row", "replicated"):  # of any shape
        return pieces
    expected = [config.hidden_size] * ndim
    expected[dim] = sum(piece.length for piece in pieces)
    if [*shape] != expected:
        raise ValueError(
            f"{name} of kind {kind!r} must have shape {tuple(expected)} with {order=} for "
            f"{config}, got {shape}"
        )
    return pieces


class _Piece(NamedTuple):
    """Consecutive positions of the sharded dim, and the ranks that have them."""

    length: int
    ranks: Sequence[int]


def _pieces(kind: Kind, config: TensorParallelConfig, size: int, *, is_bias: bool) -> list[_Piece]:
    """Return the pieces of the sharded dim, in the order of storage.

    `size` is the size of the dim, for kinds whose size the config does not fix.
    """
    num_ranks, headdim = config.tp_size, config.headdim or 0
    if is_bias and kind in ("o", "down", "row"):
        only_first_rank = range(1)
        return [_Piece(size if kind == "row" else config.hidden_size, only_first_rank)]

    def parts(size: int) -> list[_Piece]:
        """Return one piece for each rank, as DTensor shards a dim of this size."""
        longest = -(-size // num_ranks)  # rounded up
        ends = [min(rank * longest, size) for rank in range(num_ranks + 1)]
        lengths = [end - start for start, end in pairwise(ends)]
        return [_Piece(length, range(rank, rank + 1)) for rank, length in enumerate(lengths)]

    q = parts(config.num_heads * headdim)
    kv = [_Piece(config.local_kv_size, ranks) for ranks in config.kv_replica_groups]
    # For each kv head, or run of kv heads: the q heads of its ranks, then k and v.
    groups = ([q[rank] for rank in piece.ranks] + [piece, piece] for piece in kv)
    mlp = parts(config.intermediate_size)
    return {
        "q": q,
        "k": kv,
        "v": kv,
        "o": q,
        "gate": mlp,
        "up": mlp,
        "down": mlp,
        "qkv": q + kv + kv,
        "grouped_qkv": [piece for group in groups for piece in group],
        "gate_up": mlp + mlp,
        "heads": parts(config.num_heads),
        "column": parts(size),
        "row": parts(size),
        "replicated": [_Piece(size, range(num_ranks))],
    }[kind]


def _kinds(names: Iterable[str], plan: Plan, otherwise: Kind | None) -> dict[str, Kind]:
    """Return the kind of each name; refuse a wrong plan, and names that match no pattern."""
    check_type("plan", plan, Mapping, "kinds by the ends of names")
    for pattern, kind in plan.items():
        check_type("each pattern of plan", pattern, str, "the end of a name")
        check_one_of(f"plan[{pattern!r}]", kind, get_args(Kind))
    check_one_of("otherwise", "replicated" if otherwise is None else otherwise, get_args(Kind))
    kinds = {name: _kind_of(name, plan) or otherwise for name in names}
    unknown = [name for name, kind in kinds.items() if kind is None]
    if unknown:
        raise ValueError(
            f"no pattern of the plan matches {len(unknown)} names, such as {unknown[:3]}: add "
            'patterns for them, or pass otherwise="replicated" to keep them whole on every rank'
        )
    return {name: kind for name, kind in kinds.items() if kind is not None}


def _kind_of(name: str, plan: Plan) -> Kind | None:
    """Return the kind of the first pattern that matches the end of a name, or None.

    Refuse a tensor inside a sharded module that is neither its weight nor its bias.
    """
    module = re.sub(r"\.(weight|bias)$", "", name)
    parent: tuple[str, Kind] | None = None
    for pattern, kind in plan.items():
        end = re.escape(pattern).replace(r"\*", "[^.]*")
        match = re.fullmatch(rf"(?:.*\.)?{end}(?P<rest>\..+)?", module)
        if match is None:
            continue
        rest = match["rest"]
        if not rest:
            return kind
        if parent is None:
            parent = module.removesuffix(rest), kind
    if parent is None:
        return None
    parent_name, parent_kind = parent
    if parent_kind != "replicated":
        raise ValueError(
            f"{name} is in {parent_name}, which the plan shards as {parent_kind!r}, but it is "
            "neither the weight nor the bias of that module: add a pattern that matches it"
        )
    return None
