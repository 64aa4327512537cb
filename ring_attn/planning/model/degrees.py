"""How the ranks of a job share a model and its sequences."""

from __future__ import annotations

from dataclasses import dataclass

from ring_attn.planning.model.architecture import Architecture


@dataclass(frozen=True)
class Degrees:
    """Sizes of the axes of a mesh: world_size = dp * cp * tp * pp.

    Attributes:
        world_size: number of ranks.
        cp: ranks that share each sequence (context parallelism).
        tp: ranks that share each layer (tensor parallelism, with norms on shards of the rows).
        pp: groups of ranks that hold a part of the layers each (pipeline parallelism).
        ep: ranks that share the experts, some of the dp * cp ranks (expert parallelism).
        fsdp: ranks that share weights, gradients and optimizer, some of the dp * cp ranks.
    """

    world_size: int
    cp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    fsdp: int = 1

    @property
    def dp(self) -> int:
        """Groups of ranks with sequences of their own (data parallelism)."""
        return self.world_size // (self.cp * self.tp * self.pp)

    @property
    def expert_ways(self) -> int:
        """Ranks over which the weights of the experts are spread."""
        return max(self.fsdp, self.ep)

    def __str__(self) -> str:
        sizes = {"dp": self.dp, "cp": self.cp, "tp": self.tp, "pp": self.pp, "ep": self.ep}
        others = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        return ", ".join([f"fsdp {self.fsdp}", *others])


def degrees_of(
    world_size: int,
    *,
    cp: int | None = None,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    fsdp: int | None = None,
) -> Degrees:
    """Return the degrees of a job; by default all ranks that are left share each sequence.

    Raises:
        ValueError: the degrees do not divide the number of ranks; the error has those that do.

    Example:
        >>> str(degrees_of(16, tp=2))
        'fsdp 8, cp 8, tp 2'
    """
    _check_divides("--tp x --pp", tp * pp, "--world-size", world_size)
    rest = world_size // (tp * pp)
    if cp is None:
        cp = rest
    _check_divides("--cp", cp, "the ranks that --tp and --pp leave, which are", rest)
    fsdp = rest if fsdp is None else fsdp
    _check_divides("--fsdp", fsdp, "the dp x cp ranks, which are", rest)
    _check_divides("--ep", ep, "the dp x cp ranks, which are", rest)
    if fsdp > 1 and max(fsdp, ep) % min(fsdp, ep):
        raise ValueError(f"--ep must divide --fsdp or be a multiple of it, got {ep} and {fsdp}")
    return Degrees(world_size, cp, tp, pp, ep, fsdp)


def check_degrees(degrees: Degrees, architecture: Architecture) -> None:
    """Refuse degrees that a model cannot be split by.

    Raises:
        ValueError: heads, layers or experts are not divisible; the error has the right values.
    """
    for attention in architecture.attentions:
        _check_divides("--tp", degrees.tp, f"{architecture.name}'s heads of q,", attention.nheads)
        _check_divides(
            "--tp", degrees.tp, f"{architecture.name}'s heads of k and v,", attention.nheads_kv
        )
    for recurrence in architecture.recurrences:
        heads = recurrence.nheads_qk if recurrence.nheads_qk > 1 else recurrence.nheads
        _check_divides("--tp", degrees.tp, f"{architecture.name}'s heads of recurrences,", heads)
    num_layers = len(architecture.layers)
    if degrees.pp > num_layers:
        raise ValueError(
            f"--pp must be at most {architecture.name}'s {num_layers} layers, got {degrees.pp}"
        )
    if degrees.ep == 1:
        return
    if not architecture.experts:
        raise ValueError(f"--ep must be 1: {architecture.name} has no experts, got {degrees.ep}")
    _check_divides("--ep", degrees.ep, f"{architecture.name}'s experts,", architecture.experts)


def _check_divides(option: str, value: int, what: str, whole: int) -> None:
    """Refuse a degree that does not divide something; say which degrees do."""
    if whole % value:
        right = [str(x) for x in range(1, min(whole, 256) + 1) if whole % x == 0]
        raise ValueError(
            f"{option} must divide {what} {whole}, got {value}: pass one of {', '.join(right)}"
        )


def stages_of(num_layers: int, pp: int) -> list[range]:
    """Return the layers of each stage of a pipeline; earlier stages have one more.

    Example:
        >>> stages_of(5, 2)
        [range(0, 3), range(3, 5)]
    """
    size, more = divmod(num_layers, pp)
    starts = [stage * size + min(stage, more) for stage in range(pp + 1)]
    return [range(start, stop) for start, stop in zip(starts, starts[1:], strict=False)]
