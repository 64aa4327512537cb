"""What all ranks of a call do, in order, for every strategy: posts, waits, compute and copies.

One list of actions serves all ranks, each with a number per rank; so thousands of ranks cost as
many tensor operations as one. The drivers in `strategies/` are the truth: a test holds that what
they post and wait for, on every rank, is what stands here.

    ring, forward, 3 ranks            backward
    pack                              delta, pack
    post shards                       post shards
    compute                           compute
    wait shards                       wait shards
    post shards   <- step 1           post shards
    compute                           compute; post gradients
    wait shards                       wait shards
    compute       <- step 2           compute; wait gradients, add, post gradients
    finalise                          wait gradients, add, round
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

import torch
from torch import Tensor

from ring_attn.core import buffers
from ring_attn.core.buffers import gradient_schedule, shard_schedule
from ring_attn.core.heads import HeadRun, HeadShare, is_replicated, share_heads
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.plan import (
    Band,
    Displacement,
    Grid,
    MaskKind,
    Plan,
    Step,
    Tile,
    Traveller,
    check_fit,
    ring_grid,
    step_exchanges,
)
from ring_attn.core.sizes import choose_traveller, flops, gradient_packet, shard_packet
from ring_attn.core.spec import AttentionSpec, Packet
from ring_attn.core.strategy import Strategy
from ring_attn.core.work import StepWork, pair_work
from ring_attn.strategies.all_gather import AllGatherCall, Chunk
from ring_attn.strategies.q_exchange import exchanged_layout
from ring_attn.strategies.ulysses import merge_groups
from ring_attn.transport.base import Channel

Op = Literal["shift", "all_gather", "reduce_scatter", "all_to_all"]
Layouts = tuple[SequenceLayout, SequenceLayout]

# Where dq and dk, dv are computed apart: matrix products of the first of seven, both passes making
# the scores and dp anew. The whole is counted as one pass, of five, in the rates of devices too.
SHARE_OF_DQ = 3 / 7


@dataclass(frozen=True, eq=False)
class Transfer:
    """An exchange is posted.

    Attributes:
        channel: it is waited for by this name; one at a time is under way.
        op: "shift" sends one message to one rank, the others are collectives.
        nbytes: (P,) int64 bytes that leave each rank, as transports count them.
        to: (P,) int64 the receiver of each rank's message; of collectives empty.
        groups: (groups, ranks) int64 who take part together; of shifts empty.
        active: (P,) bool ranks that take part.
    """

    channel: Channel
    op: Op
    nbytes: Tensor
    to: Tensor
    groups: Tensor
    active: Tensor


@dataclass(frozen=True, eq=False)
class Wait:
    """Until the exchange under way on a channel is complete, on the (P,) `active` ranks."""

    channel: Channel
    active: Tensor


@dataclass(frozen=True, eq=False)
class Compute:
    """The tiles of a step, or one of several passes over them.

    Attributes:
        backward: whose passes.
        area: (P,) int64 visible pairs.
        edge: (P,) int64 rows that the mask cuts.
        rows: (P,) int64 rows whose state is loaded and stored; backward the mean of both sides.
        per_pair: (P,) int64 operations for a pair in all heads, of all passes of the direction.
        share: of these passes, what this one takes of the operations.
        window: whether the mask is one with a window.
    """

    backward: bool
    area: Tensor
    edge: Tensor
    rows: Tensor
    per_pair: Tensor
    share: float = 1.0
    window: bool = False

    @property
    def flops(self) -> Tensor:
        """(P,) float64 operations."""
        return self.area.double() * self.per_pair * self.share


@dataclass(frozen=True, eq=False)
class Move:
    """A pass over memory: packing, adding, rounding; (P,) `nbytes` int64 are read and written."""

    label: str
    nbytes: Tensor


Action = Transfer | Wait | Compute | Move


@dataclass(frozen=True, eq=False)
class Phase:
    """A step, as pictures and tables have it: a name and what is done."""

    label: str
    actions: tuple[Action, ...]

    @property
    def posts(self) -> tuple[Transfer, ...]:
        """What is sent."""
        return tuple(action for action in self.actions if isinstance(action, Transfer))

    @property
    def waits(self) -> tuple[Channel, ...]:
        """What is waited for."""
        return tuple(action.channel for action in self.actions if isinstance(action, Wait))

    @property
    def computes(self) -> tuple[Compute, ...]:
        """What is computed."""
        return tuple(action for action in self.actions if isinstance(action, Compute))


@dataclass(frozen=True, eq=False)
class Schedule:
    """What all ranks of a call do in one direction.

    Attributes:
        strategy: whose schedule.
        world_size: number of ranks, P.
        backward: the direction.
        phases: in order.
    """

    strategy: Strategy
    world_size: int
    backward: bool
    phases: tuple[Phase, ...]

    def actions(self) -> Iterator[Action]:
        """All actions in order."""
        for phase in self.phases:
            yield from phase.actions

    @property
    def bytes_sent(self) -> Tensor:
        """(P,) int64 bytes that leave each rank."""
        total = torch.zeros(self.world_size, dtype=torch.int64)
        for phase in self.phases:
            for post in phase.posts:
                total += post.nbytes * post.active
        return total

    def bytes_by_link(self, node_size: int) -> tuple[Tensor, Tensor]:
        """(P,) int64 bytes that each rank sends within its node, and to ranks of other nodes.

        Of a collective so much goes to each of the others: what an all-to-all sends there, and what
        the others need of a gathering.

        Args:
            node_size: so many consecutive ranks are a node.

        Raises:
            ValueError: `node_size` below 1.
        """
        if node_size < 1:
            raise ValueError(f"node_size must be at least 1, got {node_size}")
        node = torch.arange(self.world_size) // node_size
        between = torch.zeros(self.world_size, dtype=torch.int64)
        for phase in self.phases:
            for post in phase.posts:
                nbytes = post.nbytes * post.active
                if post.op == "shift":
                    between += nbytes * (node != node[post.to])
                    continue
                members = post.groups
                away = (node[members][:, :, None] != node[members][:, None, :]).sum(2)
                others = max(members.size(1) - 1, 1)
                between[members] += nbytes[members] * away // others
        return self.bytes_sent - between, between

    @property
    def messages(self) -> Tensor:
        """(P,) int64 exchanges that each rank takes part in; a collective is one."""
        total = torch.zeros(self.world_size, dtype=torch.int64)
        for phase in self.phases:
            for post in phase.posts:
                total += post.active
        return total

    @property
    def flops(self) -> Tensor:
        """(P,) float64 operations of each rank."""
        total = torch.zeros(self.world_size, dtype=torch.float64)
        for phase in self.phases:
            for compute in phase.computes:
                total += compute.flops
        return total


def schedule_of(
    strategy: Strategy,
    spec: AttentionSpec,
    layouts: Layouts,
    mask: Mask,
    *,
    backward: bool,
    travels: Traveller | None = None,
    in_order: bool = False,
    backend: str = "reference",
) -> Schedule:
    """What all ranks do in one direction of a call.

    Args:
        strategy: its degrees divide the number of ranks.
        spec: sizes and types of the whole call.
        layouts: of the queries and of the keys.
        mask: over the lengths of the layouts.
        backward: which direction.
        travels: what a ring sends round in the backward; None is KV with `in_order`, else what
            `cost.choose_traveller` takes. Forward it is always KV.
        in_order: gradients of K and V are summed in the order of the queries: rank by rank in a
            ring, in one place where Q is gathered.
        backend: whose blocks gathered shards are padded to with `in_order`.

    Raises:
        ValueError: layouts and mask that do not fit each other, or degrees that do not divide.
        NotImplementedError: a strategy without a schedule, or layouts of different strides.

    Example:
        >>> layout = SequenceLayout.zigzag(seqlen=1 << 16, world_size=4)
        >>> spec = AttentionSpec("cuda", torch.bfloat16, 1, 32, 8, 128, 128)
        >>> mask = Mask(1 << 16, 1 << 16, causal=True)
        >>> schedule = schedule_of(Strategy(), spec, (layout, layout), mask, backward=False)
        >>> len(schedule.phases), schedule.bytes_sent.tolist()
        (6, [167772160, 167772160, 167772160, 201326592])
    """
    check_fit(*layouts, mask)
    builder = _Builder(spec, layouts, mask, backward, travels, in_order, backend)
    phases = builder.build(strategy)
    return Schedule(strategy, layouts[0].world_size, backward, tuple(phases))


@dataclass(frozen=True)
class _Builder:
    """The arguments of `schedule_of`, and from them the phases of each strategy."""

    spec: AttentionSpec
    layouts: Layouts
    mask: Mask
    backward: bool
    travels: Traveller | None
    in_order: bool
    backend: str

    def build(self, strategy: Strategy) -> list[Phase]:
        """Phases of the exchanges around the core, and of the core."""
        if strategy.ulysses_degree > 1:
            return _ulysses(self, strategy)
        if strategy.exchange_q:
            return _q_exchange(self, strategy)
        if strategy.core == "all_gather":
            return _all_gather(self, strategy.heads_per_chunk)
        return _Ring(self, strategy.inner_degree).phases()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.layouts[0].world_size

    @cached_property
    def everyone(self) -> Tensor:
        """(P,) bool, all of them: one tensor for all actions."""
        return torch.ones(self.world_size, dtype=torch.bool)

    def each(self, value: int) -> Tensor:
        """(P,) int64, the same for all."""
        return torch.full((self.world_size,), value, dtype=torch.int64)

    @property
    def traveller(self) -> Traveller:
        """What a ring sends round in this direction: as `cost.choose_traveller` has it."""
        if not self.backward:
            return "kv"
        if self.travels is not None:
            return self.travels
        if self.in_order:
            return "kv"
        return choose_traveller(self.spec, *self.layouts, self.mask)

    def collective(self, op: Op, nbytes: int, channel: Channel = "shards") -> Transfer:
        """Of all ranks, the same number of bytes leaving each."""
        group = torch.arange(self.world_size)[None]
        return Transfer(channel, op, self.each(nbytes), _no_receivers(), group, self.everyone)

    def wait(self, channel: Channel) -> Wait:
        """All ranks."""
        return Wait(channel, self.everyone)

    def compute(self, work: StepWork, share: float = 1.0) -> Compute:
        """The tiles of a step."""
        spec = self.spec
        per_pair = torch.full_like(work.area, flops(1, spec, backward=self.backward))
        rows = (work.rows + work.cols) // 2 if self.backward else work.rows
        window = self.mask.left is not None
        return Compute(self.backward, work.area, work.edge, rows, per_pair, share, window)

    def rows(self, side: Literal["q", "kv"]) -> Tensor:
        """(P,) rows of each rank's shard."""
        return torch.tensor(self.layouts[0 if side == "q" else 1].shard_lens)

    def start(self) -> list[Action]:
        """Forward an empty state; backward delta and cleared gradients."""
        spec, item = self.spec, self.spec.accum_dtype.itemsize
        q_rows, kv_rows = (self.rows(s) * spec.batch for s in ("q", "kv"))
        if not self.backward:
            return [Move("state", q_rows * spec.nheads * (spec.headdim_v + 2) * item)]
        out = 2 * q_rows * spec.nheads * spec.headdim_v * spec.dtype.itemsize
        dq = q_rows * spec.nheads * spec.headdim * item
        dkv = kv_rows * spec.nheads_kv * (spec.headdim + spec.headdim_v) * item
        return [Move("delta", out + dq + dkv)]

    def finish(self) -> list[Action]:
        """Normalised or scaled, and rounded."""
        spec = self.spec
        sizes = spec.accum_dtype.itemsize + spec.dtype.itemsize
        q_rows, kv_rows = (self.rows(s) * spec.batch for s in ("q", "kv"))
        if not self.backward:
            return [Move("finalize", q_rows * spec.nheads * spec.headdim_v * sizes)]
        dq = q_rows * spec.nheads * spec.headdim
        dkv = kv_rows * spec.nheads_kv * (spec.headdim + spec.headdim_v)
        return [Move("round", (dq + dkv) * sizes)]


def _no_groups() -> Tensor:
    return torch.empty(0, 0, dtype=torch.int64)


def _no_receivers() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


def _sizes(rows: Tensor, nbytes: Callable[[int], int]) -> Tensor:
    """The bytes of each rank's message, worked out once for each number of rows."""
    found, inverse = torch.unique(rows, return_inverse=True)
    return torch.tensor([nbytes(n) for n in found.tolist()], dtype=torch.int64)[inverse]


# -- ring


class _Ring:
    """`strategies.ring`: shards, and gradients one step behind, as `core.buffers` has them.

    Every rank makes the same moves, so those of rank 0 are worked out, and its hops as
    displacements on the grid of ranks.
    """

    def __init__(self, b: _Builder, inner_degree: int) -> None:
        self._b, self._travels = b, b.traveller
        self._work = pair_work(*b.layouts, b.mask)
        self._grid = ring_grid(b.world_size, inner_degree)
        order = self._work.displacements(self._grid)
        if self._travels == "q":
            order = tuple(sorted((-x % self._grid.outer, -y % self._grid.inner) for x, y in order))
        self._order = order
        work = self._work.by_displacement(self._grid, self._travels)
        self._steps = [work[x * self._grid.inner + y] for x, y in order]
        self._hops: dict[int, Tensor] = {}
        self._plan = plan_outline(self._grid, order, self._travels)
        moving = self._work.travelling(self._travels).count
        self._shard = _sizes(moving, lambda n: shard_packet(b.spec, self._travels, n).nbytes)
        self._gradient = _sizes(moving, lambda n: gradient_packet(b.spec, self._travels, n).nbytes)

    def phases(self) -> list[Phase]:
        """A phase for each step, one before and one after."""
        b = self._b
        shards = shard_schedule(self._plan)
        gradients = gradient_schedule(self._plan, continued=b.in_order)
        phases = [Phase("start", tuple(b.start()))]
        for index, work in enumerate(self._steps):
            actions = self._shards(index, shards.steps[index].before)
            if b.backward and self._plan.num_hops:
                moves = gradients.steps[index]
                if b.in_order:
                    actions.append(b.compute(work, share=SHARE_OF_DQ))
                    actions += self._gradients(index, moves.before)
                    actions.append(b.compute(work, share=1 - SHARE_OF_DQ))
                else:
                    actions += self._gradients(index, moves.before)
                    actions.append(b.compute(work))
                actions += self._gradients(index, moves.after)
            else:
                actions.append(b.compute(work))
            actions += self._shards(index, shards.steps[index].after)
            phases.append(Phase(f"step {index}", tuple(actions)))
        end = self._gradients(0, gradients.end) if b.backward else []
        return [*phases, Phase("end", (*end, *b.finish()))]

    def _shards(self, index: int, moves: Iterable[buffers.Move]) -> list[Action]:
        return [self._action(index, move, self._shard, ("shards", "outer")) for move in moves]

    def _gradients(self, index: int, moves: Iterable[buffers.Move]) -> list[Action]:
        channels: tuple[Channel, Channel] = ("gradients", "outer_gradients")
        return [self._action(index, move, self._gradient, channels) for move in moves]

    def _action(
        self, index: int, move: buffers.Move, nbytes: Tensor, channels: tuple[Channel, Channel]
    ) -> Action:
        """One of the driver's moves, on all ranks; `nbytes` are of each rank's own message."""
        match move:
            case buffers.Pack():
                return Move("pack", 2 * nbytes)
            case buffers.Clear(_, step):
                return Move("clear", self._held(nbytes, step))
            case buffers.Post(transfer):
                to = self._receivers(transfer.hop.send_to)
                held = self._held(nbytes, transfer.sends)
                channel = channels[transfer.outer]
                return Transfer(channel, "shift", held, to, _no_groups(), self._b.everyone)
            case buffers.Wait(outer):
                return Wait(channels[outer], self._b.everyone)
            case buffers.Add(_, _, step):
                return Move("add", 3 * self._held(nbytes, step))
            case buffers.Return():
                return Move("add", 3 * nbytes)

    def _held(self, values: Tensor, step: int) -> Tensor:
        """(P,) what belongs to the shard that each rank holds at a step."""
        if bool((values == values[0]).all()):
            return values
        grid, (a, b) = self._grid, self._order[step]
        return values.view(grid.outer, grid.inner).roll((a, b), (0, 1)).flatten()

    def _receivers(self, of_first: int) -> Tensor:
        """(P,) to whom each rank sends, from what rank 0 does: one tensor for equal hops."""
        if of_first not in self._hops:
            grid, (a, b) = self._grid, divmod(of_first, self._grid.inner)
            ranks = torch.arange(grid.outer * grid.inner).view(grid.outer, grid.inner)
            self._hops[of_first] = ranks.roll((-a, -b), (0, 1)).flatten()
        return self._hops[of_first]


def plan_outline(grid: Grid, order: Sequence[Displacement], travels: Traveller) -> Plan:
    """Rank 0's plan with its steps and exchanges, and a tile of no meaning in each."""
    world_size = grid.outer * grid.inner
    begins = [i for i, (a, _) in enumerate(order) if i == 0 or a != order[i - 1][0]]
    nothing, tile = slice(0, 0), Tile(slice(0, 1), slice(0, 1), Band(None, None))
    steps = []
    for index, by in enumerate(order):
        last = index + 1 == len(order)
        hop = None if last else grid.hop(0, by, order[index + 1])
        posts, returns = step_exchanges(grid, 0, tuple(order), begins, index)
        source = grid.moved(0, by, -1)
        kind = MaskKind.FULL
        steps.append(Step(index, source, nothing, (tile,), hop, 1, kind, posts, returns))
    home = grid.hop(0, order[-1], order[0]) if len(order) > 1 else None
    return Plan(0, world_size, travels, nothing, tuple(steps), home)


# -- all-gather


def _all_gather(b: _Builder, heads_per_chunk: int | None) -> list[Phase]:
    """`strategies.all_gather`: the next heads are gathered under the compute of these."""
    call = AllGatherCall(
        b.spec, b.layouts, b.mask, 0, 1.0, b.backend, heads_per_chunk or 1, b.in_order
    )
    work = pair_work(*b.layouts, b.mask)
    in_place = b.backward and b.in_order
    sides: tuple[Traveller, ...] = ("kv", "q") if in_place else ("kv",)
    gathered = {side: work.gathered(side) for side in sides}
    messages = [(chunk, side) for chunk in call.chunks for side in sides]
    others = b.world_size - 1
    sums = _Sums(b, call) if b.backward and not in_place and others else None

    def post(index: int) -> list[Action]:
        if not others or index == len(messages):
            return []
        chunk, side = messages[index]
        nbytes = call.records(side, chunk).nbytes
        return [Move("pack", b.each(2 * nbytes)), b.collective("all_gather", nbytes * others)]

    phases = [Phase("start", (*b.start(), *post(0)))]
    for index, (chunk, side) in enumerate(messages):
        actions: list[Action] = [b.wait("shards")] if others else []
        actions += post(index + 1)
        share = 1.0
        if in_place:
            share = SHARE_OF_DQ if side == "kv" else 1 - SHARE_OF_DQ
        part = replace(b, spec=call.chunk_spec(chunk))
        actions.append(part.compute(gathered[side], share))
        if sums is not None:
            actions += sums.after(chunk)
        phases.append(Phase(f"heads {chunk.kv.start}", tuple(actions)))
    end = sums.end() if sums is not None else []
    return [*phases, Phase("end", (*end, *b.finish()))]


class _Sums:
    """dK and dV of all rows of some heads, summed over the ranks while the next are computed."""

    def __init__(self, b: _Builder, call: AllGatherCall) -> None:
        self._b, self._call = b, call
        self._under_way = False

    def after(self, chunk: Chunk) -> list[Action]:
        """The sums of the heads before are taken, these are packed and posted."""
        nbytes = self._call.gradient_packet(chunk).nbytes
        whole = self._b.each(nbytes * self._b.world_size)
        post = self._b.collective(
            "reduce_scatter", nbytes * (self._b.world_size - 1), channel="gradients"
        )
        actions = [*self.end(), Move("pack", 3 * whole), post]
        self._under_way = True
        return actions

    def end(self) -> list[Action]:
        """What is under way is waited for."""
        return [self._b.wait("gradients")] if self._under_way else []


# -- q-exchange


def _q_exchange(b: _Builder, strategy: Strategy) -> list[Phase]:
    """`strategies.q_exchange`: tails of the queries change places around another strategy."""
    inner = replace(b, layouts=(exchanged_layout(b.layouts[0]), b.layouts[1]))
    spec, rows = b.spec, b.rows("q")
    partner = torch.arange(b.world_size - 1, -1, -1)
    active = partner != torch.arange(b.world_size)
    mine, theirs = rows // 2, rows[partner] // 2

    def phase(label: str, tails: Tensor, dim: int, *, with_lse: bool = False) -> Phase:
        def packet(n: int) -> Packet:
            shapes = ((spec.batch, n, spec.nheads, dim), (spec.batch, spec.nheads, n))
            count = 2 if with_lse else 1
            return Packet(shapes[:count], (spec.dtype, spec.accum_dtype)[:count])

        nbytes = _sizes(tails, lambda n: packet(n).nbytes) * active
        move = Move("swap", 2 * nbytes)
        post = Transfer("shards", "shift", nbytes, partner, _no_groups(), active)
        return Phase(label, (move, post, Wait("shards", active), move))

    there, back = (spec.headdim_v, spec.headdim) if b.backward else (spec.headdim, spec.headdim_v)
    return [
        phase("swap queries", mine, there),
        *inner.build(replace(strategy, exchange_q=False)),
        phase("swap back", theirs, back, with_lse=not b.backward),
    ]


# -- Ulysses and hybrid


@dataclass(frozen=True)
class _Kind:
    """A tensor that is exchanged: whose rows and heads, its last dim (None: a statistic), dtype."""

    side: Literal["q", "kv"]
    dim: int | None
    dtype: torch.dtype


def _ulysses(b: _Builder, strategy: Strategy) -> list[Phase]:
    """`strategies.ulysses`: heads for rows, the cores between the groups, rows for heads."""
    degree, world_size = strategy.ulysses_degree, b.world_size
    if world_size % degree:
        raise ValueError(
            f"ulysses_degree must divide the world size, got {degree} and {world_size}"
        )
    shares = share_heads(b.spec.nheads, b.spec.nheads_kv, degree)
    there, back = _exchanged(b, is_replicated(shares, b.spec.nheads_kv))
    exchange = _HeadExchange(b, degree, shares)
    merged = _merged(b.layouts[0], degree), _merged(b.layouts[1], degree)
    core = replace(strategy, ulysses_degree=1)
    phases = [exchange.phase("to heads", there, back=False)]
    for run in range(max(len(share.runs) for share in shares)):
        for members, (num, num_kv) in _members_by_run(shares, run):
            spec = replace(b.spec, nheads=num, nheads_kv=num_kv)
            inner = replace(b, spec=spec, layouts=merged)
            spread = _Spread(members, degree)
            phases += [spread.phase(phase) for phase in inner.build(core)]
    return [*phases, exchange.phase("to rows", back, back=True)]


@lru_cache(maxsize=4)
def _merged(layout: SequenceLayout, degree: int) -> SequenceLayout:
    return merge_groups(layout, degree)[0]


def _exchanged(b: _Builder, replicated: bool) -> tuple[list[_Kind], list[_Kind]]:
    """The tensors that go to the heads, and those that come back."""
    spec, dtype, accum = b.spec, b.spec.dtype, b.spec.accum_dtype
    if not b.backward:
        inputs = [
            _Kind("q", spec.headdim, dtype),
            _Kind("kv", spec.headdim, dtype),
            _Kind("kv", spec.headdim_v, dtype),
        ]
        return inputs, [_Kind("q", spec.headdim_v, dtype), _Kind("q", None, accum)]
    shared = accum if replicated else dtype
    gradients = [
        _Kind("q", spec.headdim, dtype),
        _Kind("kv", spec.headdim, shared),
        _Kind("kv", spec.headdim_v, shared),
    ]
    return [_Kind("q", spec.headdim_v, dtype)], gradients


def _members_by_run(shares: Sequence[HeadShare], run: int) -> list[tuple[Tensor, tuple[int, int]]]:
    """The members of a group whose run of that number has so many heads and kv heads."""
    found: dict[tuple[int, int], list[int]] = {}
    for member, share in enumerate(shares):
        if run < len(share.runs):
            sizes = share.runs[run].num, share.runs[run].num_kv
            found.setdefault(sizes, []).append(member)
    return [(torch.tensor(members), sizes) for sizes, members in found.items()]


class _HeadExchange:
    """The all-to-all inside the groups."""

    def __init__(self, b: _Builder, degree: int, shares: Sequence[HeadShare]) -> None:
        self._b, self._degree, self._shares = b, degree, shares
        self._ranks = torch.arange(b.world_size)

    def phase(self, label: str, kinds: Sequence[_Kind], *, back: bool) -> Phase:
        """Packed, exchanged, unpacked."""
        nbytes = self._leaving(kinds, back=back)
        groups = self._ranks.view(-1, self._degree)
        everyone = self._b.everyone
        channel: Channel = "gradients" if back and self._b.backward else "shards"
        post = Transfer(channel, "all_to_all", nbytes, _no_receivers(), groups, everyone)
        move = 2 * nbytes
        return Phase(
            label, (Move("pack", move), post, Wait(channel, everyone), Move("unpack", move))
        )

    def _leaving(self, kinds: Sequence[_Kind], *, back: bool) -> Tensor:
        """(P,) bytes for the rest of the group: its heads of one's rows, or its rows of one's."""
        table = self._message_bytes(kinds)
        ranks, degree = self._ranks, self._degree
        own = table[ranks % degree, ranks]
        if not back:
            return table.sum(0) - own
        of_group = table.view(degree, -1, degree).sum(2)
        return of_group[ranks % degree, ranks // degree] - own

    def _message_bytes(self, kinds: Sequence[_Kind]) -> Tensor:
        """(degree, P) bytes of a message with the heads of a member and the rows of a rank."""
        rows = torch.stack([self._b.rows("q"), self._b.rows("kv")], 1)
        found, inverse = torch.unique(rows, dim=0, return_inverse=True)
        by_heads: dict[tuple[tuple[int, int], ...], Tensor] = {}
        table = []
        for share in self._shares:
            heads = tuple((run.num, run.num_kv) for run in share.runs)
            if heads not in by_heads:
                sizes = [self._packet(kinds, share.runs, *n).nbytes for n in found.tolist()]
                by_heads[heads] = torch.tensor(sizes, dtype=torch.int64)[inverse]
            table.append(by_heads[heads])
        return torch.stack(table)

    def _packet(
        self, kinds: Sequence[_Kind], runs: Iterable[HeadRun], q_rows: int, kv_rows: int
    ) -> Packet:
        shapes: list[tuple[int, ...]] = []
        dtypes: list[torch.dtype] = []
        for run in runs:
            for kind in kinds:
                heads, rows = (run.num, q_rows) if kind.side == "q" else (run.num_kv, kv_rows)
                batch = self._b.spec.batch
                statistic = (batch, heads, rows)
                shapes.append(statistic if kind.dim is None else (batch, rows, heads, kind.dim))
                dtypes.append(kind.dtype)
        return Packet(tuple(shapes), tuple(dtypes))


class _Spread:
    """What is done between the groups, by some members of every group.

    Tensors that several actions share are spread once, and shared again.
    """

    def __init__(self, members: Tensor, degree: int) -> None:
        self._members, self._degree = members, degree
        self._spread: dict[int, tuple[Tensor, Tensor]] = {}

    def phase(self, phase: Phase) -> Phase:
        """The phase with a number for each rank in the place of one for each group."""
        return Phase(phase.label, tuple(self._action(action) for action in phase.actions))

    def _action(self, action: Action) -> Action:
        match action:
            case Wait():
                return replace(action, active=self._once(action.active, self._placed))
            case Move():
                return replace(action, nbytes=self._placed(action.nbytes))
            case Compute():
                return replace(
                    action,
                    area=self._placed(action.area),
                    edge=self._placed(action.edge),
                    rows=self._placed(action.rows),
                    per_pair=self._placed(action.per_pair),
                )
            case Transfer():
                return replace(
                    action,
                    nbytes=self._placed(action.nbytes),
                    to=self._once(action.to, self._receivers),
                    groups=self._once(action.groups, self._groups),
                    active=self._once(action.active, self._placed),
                )

    def _once(self, values: Tensor, spread: Callable[[Tensor], Tensor]) -> Tensor:
        # With the tensor itself, so that its id is not given to another.
        if id(values) not in self._spread:
            self._spread[id(values)] = values, spread(values)
        return self._spread[id(values)][1]

    def _placed(self, values: Tensor) -> Tensor:
        if len(self._members) == self._degree:
            return values.repeat_interleave(self._degree)
        whole = torch.zeros(len(values), self._degree, dtype=values.dtype)
        whole[:, self._members] = values[:, None]
        return whole.flatten()

    def _receivers(self, to: Tensor) -> Tensor:
        """The same member of the other group."""
        return (to[:, None] * self._degree + torch.arange(self._degree)).flatten()

    def _groups(self, groups: Tensor) -> Tensor:
        return (groups[:, None, :] * self._degree + self._members[:, None]).flatten(0, 1)
