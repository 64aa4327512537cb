"""Conversion of boolean masks to slices: of pairs, of blocks, or of a `BlockMask`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ring_attn.core.mask import Mask, Slice, check_number_of_slices

# torch's class of masks of flex_attention, whose module loads the compiler when it is imported.
BlockMask: TypeAlias = Any

# Number of pairs for which the function of a BlockMask is evaluated at once.
EVALUATED = 1 << 20


def of_blocks(seen: Tensor, sizes: tuple[int, int], seqlens: tuple[int, int]) -> Iterator[Slice]:
    """Yield one slice for each run of blocks in a row, merged with equal runs in rows below."""
    rows, cols = sizes
    seqlen_q, seqlen_k = seqlens
    for run in of_dense(seen, bands=False):  # in units of blocks
        yield Slice(
            q_start=run.q_start * rows,
            q_end=min(run.q_end * rows, seqlen_q),
            k_start=run.k_start * cols,
            k_end=min(run.k_end * cols, seqlen_k),
        )


def of_block_mask(mask: BlockMask) -> Mask:
    """Return the mask of a `BlockMask` of `torch.nn.attention.flex_attention`.

    Raises:
        NotImplementedError: the `BlockMask` has several heads or batch entries.
    """
    lists = mask.kv_num_blocks
    if lists.size(0) != 1 or lists.size(1) != 1:
        raise NotImplementedError(
            "a BlockMask must have one batch entry and one head, got (batch, heads) = "
            f"{tuple(lists.shape[:2])}: masks.each_of_blocks returns the mask of each"
        )
    return of_entry(mask, entry=0, head=0)


def of_entry(mask: BlockMask, entry: int, head: int) -> Mask:
    """Return the mask of a batch entry and a head of a `BlockMask`."""
    rows, cols = mask.BLOCK_SIZE
    seqlens = mask.seq_lengths
    shape = -(-seqlens[0] // rows), -(-seqlens[1] // cols)  # blocks, rounded up
    partial = _listed(mask.kv_num_blocks[entry, head], mask.kv_indices[entry, head], shape)
    full = torch.zeros(shape, dtype=torch.bool, device="cpu")
    if mask.full_kv_num_blocks is not None:
        counts, indices = mask.full_kv_num_blocks, mask.full_kv_indices
        full = _listed(counts[entry, head], indices[entry, head], shape)
    slices = list(of_blocks(full, (rows, cols), seqlens))
    # First position of each partly visible block, (blocks, 2).
    starts = partial.nonzero() * torch.tensor([rows, cols], device="cpu")
    blocks_at_once = EVALUATED // (rows * cols) or 1
    for some in starts.split(blocks_at_once) if len(starts) else ():
        for (i, j), seen in zip(some.tolist(), _evaluated(mask, some, entry, head), strict=True):
            # The last blocks may reach beyond the sequence.
            seen = seen[: seqlens[0] - i, : seqlens[1] - j]
            slices += [s.moved(i, j) for s in of_dense(seen)]
            check_number_of_slices(len(slices))
    return Mask.of_disjoint(seqlens[0], seqlens[1], slices, f"a BlockMask of {rows} x {cols}")


def _evaluated(mask: BlockMask, starts: Tensor, entry: int, head: int) -> Tensor:
    """Evaluate the function of a BlockMask in some blocks.

    torch calls the function with scalar positions, since a function that reduces would give another
    mask for tensors of positions. Positions after the end are replaced by the last one.

    Args:
        mask: the `BlockMask`.
        starts: (blocks, 2) first query and first key of each block.
        entry: the batch entry that the function gets.
        head: the head that the function gets.

    Returns:
        (blocks, rows, cols) booleans on the CPU.
    """
    from torch.nn.attention.flex_attention import create_mask

    device = mask.kv_num_blocks.device
    first = starts.to(device)
    last_query, last_key = (n - 1 for n in mask.seq_lengths)

    def of_block(block: Tensor, zero: Tensor, i: Tensor, j: Tensor) -> Tensor:
        i = torch.clamp(first[block, 0] + i, max=last_query)
        j = torch.clamp(first[block, 1] + j, max=last_key)
        seen = mask.mask_mod(torch.full_like(block, entry), zero + head, i, j)
        return torch.as_tensor(seen, device=device).bool()

    rows, cols = mask.BLOCK_SIZE
    # The batch counts the blocks: (blocks, 1 head, rows, cols).
    evaluated = create_mask(of_block, B=len(starts), H=1, Q_LEN=rows, KV_LEN=cols, device=device)
    return evaluated[:, 0].cpu()


def _listed(counts: Tensor, indices: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return the key blocks listed for each query block, as booleans."""
    seen = torch.zeros(shape, dtype=torch.bool, device="cpu")
    for row, (count, listed) in enumerate(zip(counts.tolist(), indices, strict=True)):
        seen[row, listed[:count].cpu().long()] = True
    return seen


class _Keys(NamedTuple):
    """A run of keys, or the number of keys by which each end of a run moves."""

    start: int
    stop: int


class _QueryRun:
    """Runs of keys that consecutive queries see; from query to query, each end moves by 0 or 1."""

    def __init__(self, row: int, keys: _Keys) -> None:
        self.row = row
        self.first = keys
        self.last = keys
        # How far each end moves from query to query; None until the second query.
        self.moves: _Keys | None = None

    def add_if_continued(self, keys: _Keys, *, bands: bool) -> bool:
        """Add the run of the next query if it continues this one or its band; return whether."""
        moves = _Keys(keys.start - self.last.start, keys.stop - self.last.stop)
        allowed = (0, 1) if bands else (0,)
        if moves.start not in allowed or moves.stop not in allowed:
            return False
        if self.moves not in (None, moves):
            return False
        self.moves = moves
        self.last = keys
        return True

    def slice(self, stop_row: int) -> Slice:
        start_moves = self.moves is not None and self.moves.start > 0
        stop_moves = self.moves is not None and self.moves.stop > 0
        return Slice(
            q_start=self.row,
            q_end=stop_row,
            k_start=self.first.start,
            k_end=self.last.stop,
            lo=self.first.start - self.row if start_moves else None,
            hi=self.first.stop - 1 - self.row if stop_moves else None,
        )


def of_dense(seen: Tensor, *, bands: bool = True) -> Iterator[Slice]:
    """Yield slices that hold exactly the pairs of `seen`; without `bands` only rectangles."""
    open_runs: list[_QueryRun] = []
    # 1 where a run of visible keys starts, -1 where one has ended: (rows, cols + 1).
    edges = torch.nn.functional.pad(seen.cpu().int(), (1, 1)).diff(dim=1)
    for row in range(len(edges) + 1):  # the row after the last one ends all runs
        here: list[_Keys] = []
        if row < len(edges):
            starts = (edges[row] == 1).nonzero().flatten().tolist()
            stops = (edges[row] == -1).nonzero().flatten().tolist()
            here = [_Keys(start, stop) for start, stop in zip(starts, stops, strict=True)]
        continued = []
        for run in open_runs:
            following = next(
                (keys for keys in here if run.add_if_continued(keys, bands=bands)), None
            )
            if following is None:
                yield run.slice(row)
            else:
                here.remove(following)
                continued.append(run)
        open_runs = continued + [_QueryRun(row, keys) for keys in here]
