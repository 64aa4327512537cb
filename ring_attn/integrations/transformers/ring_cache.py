"""The KV cache of Hugging Face's generation loop, split over ranks.

This module needs transformers, whose class is the base of ours. So it is imported only in
functions.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from ring_attn.core.cache import next_rank
from ring_attn.core.layout import SequenceLayout
from ring_attn.integrations.transformers.cache_step import CacheStep
from ring_attn.integrations.transformers.models import ALONE_TYPES, RECURRENT_TYPES
from ring_attn.integrations.transformers.untyped import Value

# Fewest new tokens per rank to split them: so every rank gets some, in zigzag two chunks.
ROWS_PER_RANK = 2

# The classes of recurrent layers, by their types; layers of other types are DynamicLayer.
_WITH_STATES = {
    **dict.fromkeys(RECURRENT_TYPES, LinearAttentionAndFullAttentionLayer),
    **dict.fromkeys(ALONE_TYPES, LinearAttentionLayer),
}


class RingCache(Cache):
    """This rank's rows of the keys and values of all layers, by `layout`; whole states.

    Attributes:
        step: the forward under way, or None.
        keeps: whether the rank keeps rows of that forward.
        cut: layout of those rows, of which all ranks compute all, or None.
    """

    is_croppable = False
    layout: SequenceLayout
    num_seen: int
    step: CacheStep | None
    keeps: bool
    cut: SequenceLayout | None

    def __init__(
        self, group: dist.ProcessGroup, kind: str, block: int, types: tuple[str, ...]
    ) -> None:
        super().__init__(layers=[])
        self.group, self.kind, self.block = group, kind, block
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.types, self.has_states = types, bool(_WITH_STATES.keys() & {*types})
        self.reset()

    def begin(self, rows: int, keep: int) -> CacheStep:
        """Assign `rows` new rows to the ranks that compute and keep them."""
        if self.num_seen != self.layout.seqlen:
            raise RuntimeError("a forward with this cache has failed: start with an empty one")
        self.cut = chunk = None
        if rows >= ROWS_PER_RANK * self.world_size:
            chunk = SequenceLayout.from_name(self.kind, rows, self.world_size)
            self.layout, self.keeps = self.layout.followed_by(chunk), True
            if self.has_states and self.num_seen:
                self.cut, chunk = chunk, None
        else:
            taker = next_rank(self.layout, block=self.block)
            self.layout, self.keeps = self.layout.appended(taker, rows), taker == self.rank
        self.step = step = CacheStep(self.layout, chunk, keep)
        return step

    def end(self) -> None:
        self.num_seen, self.step = self.layout.seqlen, None

    def under_way(self) -> CacheStep:
        if self.step is None:
            raise RuntimeError(
                "this cache belongs to another model: make one by Registration.cache(model)"
            )
        return self.step

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Value,
        **kwargs: Value,
    ) -> tuple[Tensor, Tensor]:
        """Append new rows if this rank keeps them; only in a forward of the cache's model."""
        self.under_way()
        while len(self.layers) <= layer_idx:
            self.layers.append(DynamicLayer())
        if self.cut is not None:
            key_states, value_states = (
                self.cut.shard(x, self.rank, 2) for x in (key_states, value_states)
            )
        elif not self.keeps:
            key_states, value_states = key_states[:, :, :0], value_states[:, :, :0]
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Value
    ) -> Tensor:
        """Keep the rows before the next one; return the rows that a convolution needs.

        Of split rows these are the rank's own, as the exchange is part of their convolution.
        """
        chunk, keep = self.under_way().chunk, super().update_conv_state
        if chunk is None or self.world_size == 1:
            return keep(conv_states, layer_idx, state_idx, **kwargs)
        width = kwargs.get("conv_kernel_size") or conv_states.size(-1)
        first = max(0, chunk.seqlen - width)
        positions = chunk.position_ids(self.rank, conv_states.device)
        last = conv_states.new_zeros(*conv_states.shape[:-1], chunk.seqlen - first)
        last[..., positions[positions >= first] - first] = conv_states[..., positions >= first]
        # As bytes, to which one rank each contributes: gloo cannot sum every dtype.
        dist.all_reduce(last.view(torch.uint8), group=self.group)
        keep(last, layer_idx, state_idx, **kwargs)
        return conv_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the length of the whole sequence, without the rows that this forward adds."""
        return self.num_seen

    def get_mask_sizes(self, new: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """Return (keys, offset) of a mask over the whole sequence, which is never made.

        Releases of transformers pass a number of new rows, or their positions.
        """
        return self.num_seen + (new.size(0) if isinstance(new, Tensor) else new), 0

    def crop(self, *args: object) -> None:
        """Raise NotImplementedError, as several ranks would have to drop rows."""
        raise NotImplementedError(
            "a cache that is split over ranks cannot be cropped: assisted generation is not "
            "supported"
        )

    def reset(self) -> None:
        self.layers.clear()
        if self.has_states:
            self.layers += [_WITH_STATES.get(one, DynamicLayer)() for one in self.types]
        self.layout = SequenceLayout.from_name(self.kind, 0, self.world_size)
        self.num_seen, self.step, self.keeps, self.cut = 0, None, False, None
