"""Our own kernels: one launch for all tiles of a step, with bits that do not depend on the steps.

On CUDA (and ROCm) the kernels are compiled at their first use. On a CPU they run only if the
backend is requested by name, in Triton's interpreter: the same code, for tests, in float16 and
float32, some thousand times slower.

On compute capability 9.0 and 10.x, 16-bit dtypes have kernels in Gluon: the forward of head dims 64
and 128, and on 9.0 also of 256; and the backward of head dims 64 and 128 without softcap, which
computes all gradients at once, for 4 kv heads or more, or for long launches of fewer. On 8.0 to 8.9
a kernel in Triton computes such a backward of head dim 128.

Steps accumulate in place and in one order: from the diagonal downwards for out and dq, upwards for
dk and dv. Therefore the sums of a row do not depend on how the tiles are distributed over steps, if
the steps have that order and are cut at multiples of `bits_unit`, as in a causal ring over
contiguous shards. Zigzag and striped rings, windows and documents have other orders: there two runs
are equal bit for bit, but runs of different world sizes are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ring_attn.backends.base import (
    Backend,
    BackwardInputs,
    SomeGradients,
    Tiles,
    architecture,
    greatest,
)
from ring_attn.backends.kept_launches import KeptLaunches
from ring_attn.backends.rates import PLANNED_ARCHITECTURE, fills_one_pass, has_one_pass
from ring_attn.backends.triton_support import MAX_HEADDIM, why_not
from ring_attn.core.cache import Sequences
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.tiles import MaskKind

if TYPE_CHECKING:
    from ring_attn.kernels.configs import Config
    from ring_attn.kernels.decode import SeenRows, SequenceRule
    from ring_attn.kernels.flash_fwd import Carried
    from ring_attn.kernels.launch import Launch
    from ring_attn.kernels.step_table import StepTable

# Decoding reads the keys in parallel parts, for at most this many rows, counting each query head of
# a kv head. With more rows, blocks of rows fill the GPU.
MAX_DECODED_ROWS = 64


@dataclass
class TritonState:
    """The state that the launches of a call share, and the results of the last launch."""

    q: Tensor
    headdim_v: int
    carried: Carried
    gluon: bool = False  # whether the Gluon kernel computes the forward
    started: bool = False  # whether a launch has written the state
    out_dtype: torch.dtype | None = None  # None means the dtype of q


class TritonBackend(Backend):
    """One launch per step in the forward; in the backward one for dq and one for dk and dv."""

    name = "triton"
    tile_by_tile = False
    in_order = True
    # A multiple of the block sizes of all configs.
    bits_unit = 128
    decodes = True
    carries_state = True
    converts_lse = True

    def __init__(self, configs: Mapping[str, Config] | None = None) -> None:
        """Make the backend; the first call imports the kernels.

        Args:
            configs: configs by kind, which replace the frozen configs. "gluon" is the kind of the
                forward in Gluon, and "one_pass" that of the backward of all gradients at once; a
                config of another kernel excludes these in its direction.
        """
        self.launches = KeptLaunches()
        self.configs = configs or {}

    def supports(
        self, spec: AttentionSpec, *, explicit: bool = False, decoding: bool = False
    ) -> str | None:
        return why_not(spec, explicit=explicit, decoding=decoding)

    def new_state(self, q: Tensor, headdim_v: int, sinks: Tensor | None = None) -> TritonState:
        from ring_attn.kernels import tuned
        from ring_attn.kernels.flash_fwd import Carried

        sinks = None if sinks is None else sinks.contiguous()
        gluon = tuned.takes_gluon(q, headdim_v, self.configs)
        counter = torch.zeros(1, dtype=torch.int32, device=q.device) if gluon else None
        carried = Carried(sinks=sinks, counter=counter)
        return TritonState(_unit_stride(q), headdim_v, carried, gluon)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Tiles,
        state: TritonState,
        *,
        scores: Scores,
        last: bool = False,
        spare_sms: int = 0,
    ) -> TritonState:
        """Fold the tiles of one step into the state; the last step writes out and lse."""
        carried = state.carried
        first = not state.started
        if carried.out is not None and not tiles:
            return state
        # A last launch without keys only writes out and lse, which the portable kernel does.
        gluon = state.gluon and k.size(1) > 0
        spare_sms = spare_sms if gluon else 0
        q, k, v = (_copyable(x) if gluon else _unit_stride(x) for x in (q, k, v))
        batch, rows, nheads, _ = q.shape
        if first and not last:
            carried.acc = _float32(q, batch, rows, nheads, state.headdim_v)
            carried.m = _float32(q, batch, nheads, rows)
            carried.l = _float32(q, batch, nheads, rows)
        if last:
            shape = (batch, rows, nheads, state.headdim_v)
            carried.out = q.new_empty(shape, dtype=state.out_dtype)
            carried.lse = _float32(q, batch, nheads, rows)
        others = [carried.acc, carried.m, carried.l, carried.out, carried.lse, carried.sinks]
        if gluon:
            others.append(carried.counter)

        def launch() -> Launch:
            make: Callable[..., Launch]
            if gluon:
                make = partial(_gluon_forward(q.device), spare_sms=spare_sms)
            else:
                from ring_attn.kernels.flash_fwd import forward_launch as make
            config = self.config_of("gluon" if gluon else _kind("fwd", tiles), q, v.size(3))
            # The first and the last launch write every row, even rows without keys.
            table = self.step_table(tiles, config, q.device, num_rows=rows if first or last else 0)
            return make(q, k, v, carried, table, config, first=first, last=last, **vars(scores))

        kind = ("fwd", first, last, spare_sms)
        call = (tiles, kind, scores, state.out_dtype, carried.sinks is None)
        self.launches.run(call, inputs=(q, k, v), others=others, make=launch)
        state.started = True
        if last:
            carried.acc = carried.m = carried.l = None
        return state

    def finalize(self, state: TritonState, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        q, carried = state.q, state.carried
        if carried.out is None:
            # No launch was the last one, for example because this rank has no tiles.
            state.out_dtype = dtype
            none = q.new_empty(q.size(0), 0, q.size(2), state.headdim_v)
            self.forward(q, none, none, (), state, scores=Scores(1.0), last=True)
        assert carried.out is not None and carried.lse is not None, "the last launch makes both"
        return carried.out.to(dtype), carried.lse

    def merge(
        self, out: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        from ring_attn.kernels.merge_tree import merge_tree_launch

        root_out = out.new_empty(out.shape[1:], dtype=dtype)
        root_lse = _float32(lse, *lse.shape[1:])
        sinks = None if sinks is None else sinks.contiguous()
        self.launches.run(
            call=((), "merge_tree", dtype, None if sinks is None else sinks.dtype),
            inputs=(out, lse),
            others=(root_out, root_lse, sinks),
            make=lambda: merge_tree_launch(out, lse, root_out, root_lse, sinks),
        )
        return root_out, root_lse

    def max_logits(self, state: TritonState) -> Tensor:
        """Return the greatest score of each head so far, (nheads,).

        The kernels keep the maxima in base 2.
        """
        if state.carried.m is None:
            return state.q.new_full((state.q.size(2),), -torch.inf, dtype=torch.float32)
        return greatest(state.carried.m) * math.log(2.0)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, *, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Return `out` in float32 and `lse` of a few queries; the keys are read in parallel."""
        from ring_attn.kernels import decode

        batch, rows, nheads, headdim = q.shape
        headdim_v = v.size(3)
        if not tiles:
            out = _float32(q, batch, rows, nheads, headdim_v).zero_()
            return out, _float32(q, batch, nheads, rows).fill_(-torch.inf)
        group = nheads // k.size(2)
        if rows * group > MAX_DECODED_ROWS and max(headdim, headdim_v) <= MAX_HEADDIM:
            state = self.forward(q, k, v, tiles, self.new_state(q, headdim_v), scores=scores)
            return self.finalize(state, torch.float32)
        cols = (min(tile.k_start for tile in tiles), max(tile.k_end for tile in tiles))

        def seen() -> SeenRows:
            make = partial(decode.seen_rows, tiles, rows, q.device)
            return self.launches.table(tiles, ("seen", rows), q.device, make)

        return self._decode(
            q,
            k,
            v,
            block_table=None,
            cache_seqlens=None,
            what=tiles,
            cols=cols,
            seen=seen,
            scores=scores,
        )

    def decode_sequences(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: Sequences,
        cache_seqlens: Tensor,
        block_table: Tensor | None = None,
        *,
        scores: Scores,
    ) -> tuple[Tensor, Tensor]:
        """Return the results of all sequences, by one launch that reads their lengths and pages."""
        from ring_attn.kernels.decode import SequenceRule

        left, right = sequences.window_size
        rule = SequenceRule(
            position=sequences.start,
            run=sequences.run,
            period=sequences.period,
            most_rows=sequences.rows,
            left=left,
            right=right,
        )
        return self._decode(
            q,
            k,
            v,
            block_table=None if block_table is None else block_table.contiguous(),
            cache_seqlens=cache_seqlens.contiguous(),
            what=sequences,
            # Parts of all rows of the cache, as the host does not know the lengths.
            cols=(0, max(1, sequences.rows)),
            seen=lambda: rule,
            scores=scores,
        )

    # Longer than 60 lines: two launches with all their arguments.
    def _decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        block_table: Tensor | None,
        cache_seqlens: Tensor | None,
        what: object,
        cols: tuple[int, int],
        seen: Callable[[], SeenRows | SequenceRule],
        scores: Scores,
    ) -> tuple[Tensor, Tensor]:
        """Compute parts of the columns `cols`, and merge them.

        `seen` returns the rows that the queries see; `what` is the key of these for the cache.
        """
        from ring_attn.kernels import decode
        from ring_attn.kernels.tasks import num_sms

        batch, rows, nheads, _ = q.shape
        nheads_kv, headdim_v = k.size(2), v.size(3)
        k, v = _unit_stride(k), _unit_stride(v)
        config = self.config_of("decode", q, headdim_v)
        blocks = -(-rows * (nheads // nheads_kv) // config.BLOCK_M)  # rounded up
        parts = decode.choose_parts(*cols, blocks * batch * nheads_kv, num_sms(q.device))
        acc = _float32(q, batch, parts.num_parts, rows, nheads, headdim_v)
        m = _float32(q, batch, parts.num_parts, rows, nheads)
        l = _float32(q, batch, parts.num_parts, rows, nheads)
        out = _float32(q, batch, rows, nheads, headdim_v)
        lse = _float32(q, batch, nheads, rows)
        shared = decode.shares(k, v)
        # A page table has any strides, so it is among the inputs; its absence is None among others.
        inputs, others = [q, k, v], [acc, m, l, cache_seqlens]
        if block_table is None:
            others.insert(0, None)
        else:
            inputs.append(block_table)
        self.launches.run(
            call=(what, "decode", parts, scores, shared),
            inputs=inputs,
            others=others,
            make=lambda: decode.decode_launch(
                q,
                k,
                v,
                block_table,
                (acc, m, l),
                cache_seqlens,
                seen(),
                parts,
                config,
                shared=shared,
                **vars(scores),
            ),
        )
        self.launches.run(
            call=((), "merge", parts.num_parts),
            inputs=(acc,),
            others=(m, l, out, lse),
            make=lambda: decode.merge_parts_launch(acc, m, l, out, lse, parts.num_parts),
        )
        return out, lse

    def row_statistics(self, out: Tensor, dout: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return -lse in base 2, and delta = rowsum(dO * O)."""
        out, dout, lse = _unit_stride(out), _unit_stride(dout), lse.contiguous()
        minus_lse = _float32(lse, *lse.shape)
        delta = _float32(lse, *lse.shape)

        def launch() -> Launch:
            from ring_attn.kernels.configs import select
            from ring_attn.kernels.flash_bwd import delta_launch

            config = select("delta", out, out.size(3))
            return delta_launch(out, dout, lse, minus_lse, delta, config)

        self.launches.run(
            call=((), "delta"), inputs=(out, dout), others=(lse, minus_lse, delta), make=launch
        )
        return minus_lse, delta

    def backward(
        self,
        inputs: BackwardInputs,
        tiles: Tiles,
        gradients: SomeGradients,
        *,
        scores: Scores,
        out: Tensor | None = None,
        in_one_pass: bool | None = None,
    ) -> None:
        """Add the tiles' gradients, dq and dk without softmax_scale."""
        if not tiles:
            return
        if in_one_pass is None:
            spec = AttentionSpec.of(inputs.q, inputs.k, inputs.v, scores.softcap)
            in_one_pass = self._takes_one_pass(inputs.q, spec, kv_rows=None)
        if in_one_pass:
            self._in_turns(inputs, tiles, gradients, scores)
            return
        inputs = BackwardInputs(*map(_unit_stride, inputs))
        dq, dk, dv = gradients
        sums_of_kernels = {
            "dq": [] if dq is None else [dq],
            "dkdv": [] if dk is None or dv is None else [dk, dv],
        }
        for kernel, sums in sums_of_kernels.items():
            if sums:
                self.launches.run(
                    call=(tiles, kernel, scores),
                    inputs=(inputs.q, inputs.k, inputs.v, inputs.dout),
                    others=(inputs.lse, inputs.delta, *sums),
                    make=partial(self._backward_launch, kernel, inputs, tiles, sums, scores),
                )

    def in_one_pass(self, spec: AttentionSpec, kv_rows: int | None = None) -> bool:
        """Return whether one kernel computes all gradients of the call."""
        if spec.device_type != "cuda":
            return False
        if not architecture():
            planned = PLANNED_ARCHITECTURE
            return has_one_pass(planned, spec) and fills_one_pass(planned, spec, kv_rows)
        q = torch.empty(0, spec.headdim, dtype=spec.dtype, device=spec.device_type)
        return self._takes_one_pass(q, spec, kv_rows)

    def _takes_one_pass(self, q: Tensor, spec: AttentionSpec, kv_rows: int | None) -> bool:
        from ring_attn.kernels import configs, tuned

        own = self.configs
        is_filled = "one_pass" in own or fills_one_pass(
            configs.architecture(q.device), spec, kv_rows
        )
        return is_filled and tuned.takes_one_pass(q, spec.headdim_v, spec.softcap, own)

    def _in_turns(
        self, inputs: BackwardInputs, tiles: Tiles, gradients: SomeGradients, scores: Scores
    ) -> None:
        """Add the gradients of the tiles by one kernel, whose programs add to dq in turns."""
        from ring_attn.kernels import configs
        from ring_attn.kernels.step_table import transposed
        from ring_attn.kernels.turn_table import make_turn_table, num_turns

        make: Callable[..., Launch]
        arch = configs.architecture(inputs.q.device)
        if arch == "sm_90":
            from ring_attn.kernels.hopper_bwd import bwd_launch as make
        elif arch == "sm_100":
            from ring_attn.kernels.blackwell_bwd import blackwell_bwd_launch as make
        else:
            from ring_attn.kernels.turns_bwd import turns_launch as make
        # Gluon kernels load blocks by TMA, which needs aligned strides.
        strided = _copyable if arch in ("sm_90", "sm_100") else _unit_stride
        q, k, v, dout = (strided(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
        inputs = inputs._replace(q=q, k=k, v=v, dout=dout)
        config = self.config_of("one_pass", q, inputs.v.size(3))
        blocks = (config.BLOCK_N, config.BLOCK_M)
        batch, rows, nheads, _ = q.shape
        num = num_turns(batch, rows, nheads, config.BLOCK_M)
        turns = torch.zeros(num, dtype=torch.int32, device=q.device)

        def launch() -> Launch:
            table = self.launches.table(
                tiles,
                what=(blocks, "turns"),
                device=q.device,
                make=lambda: make_turn_table(transposed(tiles), *blocks, q.device),
            )
            scale = scores.softmax_scale
            return make(inputs, gradients, turns, table, config, softmax_scale=scale)

        dq, dk, dv = gradients
        self.launches.run(
            call=(tiles, "bwd", dq is None, dk is None, scores),
            inputs=(q, k, v, dout),
            others=(inputs.lse, inputs.delta, dq, dk, dv, turns),
            make=launch,
        )

    def gradient_factor(self, scores: Scores) -> float:
        """Return softmax_scale; sums without it leave more bits to products in 16 bits."""
        return scores.softmax_scale

    def _backward_launch(
        self,
        kernel: str,
        inputs: BackwardInputs,
        tiles: Tiles,
        gradients: Sequence[Tensor],
        scores: Scores,
    ) -> Launch:
        from ring_attn.kernels import configs
        from ring_attn.kernels.flash_bwd import dkdv_launch, dq_launch
        from ring_attn.kernels.tasks import num_sms

        q, k = inputs.q, inputs.k
        headdim_v = inputs.v.size(3)
        kv_rows = kernel == "dkdv"
        kind = f"{kernel}_softcap" if scores.softcap else _kind(kernel, tiles)
        config = self.config_of(kind, q, headdim_v)
        table = self.step_table(tiles, config, q.device, kv_rows=kv_rows)
        if kv_rows and kind not in self.configs:
            programs = table.num_blocks * k.size(0) * k.size(2)
            few = configs.few_programs(q, headdim_v)
            config = configs.filling(config, programs, num_sms(q.device), few)
            table = self.step_table(tiles, config, q.device, kv_rows=True)
        make: Callable[..., Launch] = dkdv_launch if kv_rows else dq_launch
        return make(inputs, *gradients, table, config, **vars(scores))

    def config_of(self, kind: str, q: Tensor, headdim_v: int) -> Config:
        """Return a kernel's config: of this backend, of RING_ATTN_CONFIGS, or the frozen one."""
        from ring_attn.kernels import tuned

        return self.configs.get(kind) or tuned.select(kind, q, headdim_v)

    def step_table(
        self,
        tiles: Tiles,
        config: Config,
        device: torch.device,
        *,
        kv_rows: bool = False,
        num_rows: int = 0,
    ) -> StepTable:
        from ring_attn.kernels.step_table import make_step_table, transposed

        blocks = (config.BLOCK_N, config.BLOCK_M) if kv_rows else (config.BLOCK_M, config.BLOCK_N)

        def make() -> StepTable:
            return make_step_table(
                transposed(tiles) if kv_rows else tiles,
                *blocks,
                device,
                descending=not kv_rows,
                num_rows=num_rows,
            )

        return self.launches.table(tiles, (blocks, kv_rows, num_rows), device, make)


def _kind(kernel: str, tiles: Tiles) -> str:
    """Return the kind of a kernel's config, which is `*_whole` for steps of one unmasked tile."""
    whole = len(tiles) == 1 and tiles[0].kind is MaskKind.FULL
    return f"{kernel}_whole" if whole else kernel


def _unit_stride(x: Tensor) -> Tensor:
    """Return x with contiguous elements in the last dim, as all kernels require."""
    return x if x.stride(-1) == 1 or x.size(-1) == 1 else x.contiguous()


def _copyable(x: Tensor) -> Tensor:
    """Return x with strides that TMA can load."""
    from ring_attn.kernels.hopper_fwd import copyable

    return copyable(x)


def _float32(like: Tensor, *shape: int) -> Tensor:
    """Return an uninitialised float32 tensor on the device of `like`."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _gluon_forward(device: torch.device) -> Callable[..., Launch]:
    """Return the function that makes launches of the Gluon forward for a device."""
    from ring_attn.kernels import configs

    if configs.architecture(device) == "sm_100":
        from ring_attn.kernels.blackwell_fwd import blackwell_launch

        return blackwell_launch
    from ring_attn.kernels.hopper_fwd import hopper_launch

    return hopper_launch
