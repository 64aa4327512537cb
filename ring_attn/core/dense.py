"""Slices of masks that are given as booleans: of pairs, of blocks, or as a `BlockMask`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ring_attn.core.mask import Mask, Slice, check_number_of_slices

# Pairs of a BlockMask for which its function is evaluated at once.
EVALUATED = 1 << 20


def of_blocks(seen: Tensor, sizes: tuple[int, int], seqlens: tuple[int, int]) -> Iterator[Slice]:
    """Yields one slice for each run of blocks in a row, merged with equal runs in rows below."""
    rows, cols = sizes
    for q0, q1, k0, k1, _, _ in of_dense(seen, bands=False):
        q_end, k_end = min(q1 * rows, seqlens[0]), min(k1 * cols, seqlens[1])
        yield Slice(q0 * rows, q_end, k0 * cols, k_end)


def of_block_mask(mask: Any) -> Mask:
    lists = mask.kv_num_blocks
    if lists.size(0) != 1 or lists.size(1) != 1:
        raise NotImplementedError(
            f"a BlockMask must be of one batch and head, got {tuple(lists.shape[:2])}: create it "
            "with B=None, H=None; masks that differ by head are not built"
        )
    (rows, cols), seqlens = mask.BLOCK_SIZE, mask.seq_lengths
    shape = -(-seqlens[0] // rows), -(-seqlens[1] // cols)
    partial = _listed(mask.kv_num_blocks, mask.kv_indices, shape)
    full = torch.zeros(shape, dtype=torch.bool, device="cpu")
    if mask.full_kv_num_blocks is not None:
        full = _listed(mask.full_kv_num_blocks, mask.full_kv_indices, shape)
    slices = list(of_blocks(full, (rows, cols), seqlens))
    starts = partial.nonzero() * torch.tensor([rows, cols], device="cpu")
    for some in starts.split(EVALUATED // (rows * cols) or 1) if len(starts) else ():
        for (i, j), seen in zip(some.tolist(), _evaluated(mask, some), strict=True):
            seen = seen[: seqlens[0] - i, : seqlens[1] - j]
            slices += [s.moved(i, j) for s in of_dense(seen)]
            check_number_of_slices(len(slices))
    return Mask.of_disjoint(seqlens[0], seqlens[1], slices, f"a BlockMask of {rows} x {cols}")


def _evaluated(mask: Any, starts: Tensor) -> Tensor:
    """(blocks, rows, cols) booleans of a BlockMask's function, from the first positions of blocks.

    It is evaluated by torch, for scalar positions: called with tensors of positions, a function
    that reduces would give another mask. Positions after the end are replaced by the last one.
    """
    from torch.nn.attention.flex_attention import create_mask

    device = mask.kv_num_blocks.device
    first, ends = starts.to(device), [n - 1 for n in mask.seq_lengths]

    def of_block(block: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        i = torch.clamp(first[block, 0] + i, max=ends[0])
        j = torch.clamp(first[block, 1] + j, max=ends[1])
        seen = mask.mask_mod(torch.zeros_like(block), head, i, j)
        return torch.as_tensor(seen, device=device).bool()

    rows, cols = mask.BLOCK_SIZE
    return create_mask(of_block, len(starts), 1, rows, cols, device=device)[:, 0].cpu()


def _listed(counts: Tensor, indices: Tensor, shape: tuple[int, int]) -> Tensor:
    """The key blocks listed for each query block, as booleans."""
    seen = torch.zeros(shape, dtype=torch.bool, device="cpu")
    for row, (count, listed) in enumerate(zip(counts[0, 0].tolist(), indices[0, 0], strict=True)):
        seen[row, listed[:count].cpu().long()] = True
    return seen


class _Run:
    """Runs of keys that consecutive queries see; from query to query, each end moves by 0 or 1."""

    def __init__(self, row: int, start: int, stop: int) -> None:
        self.first = self.last = (start, stop)
        self.row = row
        # How far each end moves with a query; None until the second query.
        self.moves: list[int | None] = [None, None]

    def continues(self, run: tuple[int, int], *, bands: bool) -> bool:
        """Tells whether the next query's run continues this one, or its band; if so, adds it."""
        moves = [now - before for now, before in zip(run, self.last, strict=True)]
        if any(m not in (0, int(bands)) or old not in (None, m)
               for m, old in zip(moves, self.moves, strict=True)):  # fmt: skip
            return False
        self.moves, self.last = [*moves], run
        return True

    def slice(self, stop_row: int) -> Slice:
        lo = self.first[0] - self.row if self.moves[0] else None
        hi = self.first[1] - 1 - self.row if self.moves[1] else None
        return Slice(self.row, stop_row, self.first[0], self.last[1], lo, hi)


def of_dense(seen: Tensor, *, bands: bool = True) -> Iterator[Slice]:
    """Yields slices that hold exactly the pairs of `seen`; without `bands` only rectangles."""
    open_runs: list[_Run] = []
    edges = torch.nn.functional.pad(seen.cpu().int(), (1, 1)).diff(dim=1)
    for row in range(len(edges) + 1):
        here: list[tuple[int, int]] = []
        if row < len(edges):
            starts, stops = ((edges[row] == sign).nonzero().flatten().tolist() for sign in (1, -1))
            here = list(zip(starts, stops, strict=True))
        continued = []
        for run in open_runs:
            following = next((ends for ends in here if run.continues(ends, bands=bands)), None)
            if following is None:
                yield run.slice(row)
            else:
                here.remove(following)
                continued.append(run)
        open_runs = continued + [_Run(row, *ends) for ends in here]
