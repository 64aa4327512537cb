"""Attention inside the blocks of a transformer: a mode that replaces scaled_dot_product_attention.

Every attention of diffusers' "native" backend is a call of it. Which rows a call has follows from
the numbers of its queries and keys:

    as many as this rank's rows of the video             the split video
    as many as these and rows of text                    text and video together
    in a submodule for cross-attention                   the text, which every rank holds: as usual
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from ring_attn.api import ring_attention
from ring_attn.call import ExecutionOptions
from ring_attn.core.joint import JointLayout
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask, Slice
from ring_attn.integrations.diffusers.plans import Plan
from ring_attn.models.sdpa import Argument, as_autocast, route_sdpa

AnyLayout = SequenceLayout | JointLayout


@lru_cache(maxsize=64)
def joint_layout(num_text: int, video: SequenceLayout, *, first: bool) -> JointLayout:
    """Return the layout of text, first or last, and a video."""
    return JointLayout([num_text, video] if first else [video, num_text])


class BlockAttention(route_sdpa):
    """A mode in which scaled_dot_product_attention is attention over the sequence of all ranks.

    Attributes:
        plan: of the transformer.
        group: the ranks.
        rank: of this process in the group.
        execution: options of `ring_attention`.
        num_text: number of rows of text.
        is_cross: whether a submodule for cross-attention runs.
        num_calls: number of calls of ring_attention.
    """

    def __init__(self, plan: Plan, group: dist.ProcessGroup, execution: ExecutionOptions) -> None:
        super().__init__()
        self.plan = plan
        self.group = group
        self.rank = group.rank()
        self.execution = execution
        self._video: SequenceLayout | None = None
        self.num_text = 0
        self.is_cross = False
        self.num_calls = 0

    @property
    def video(self) -> SequenceLayout:
        """The layout of the video's rows, which the first block sets."""
        if self._video is None:
            raise ValueError(
                "the first block of the transformer must run before its other blocks and its "
                "output module, but it did not: it splits the video"
            )
        return self._video

    def begin(self, video: SequenceLayout, num_text: int) -> None:
        """Take the rows with which a forward of the transformer begins."""
        self._video, self.num_text = video, num_text

    def layout(self, num_rows: int) -> AnyLayout:
        """Return the layout of the queries, or the keys, of a call.

        Raises:
            ValueError: the number of rows is neither that of the video nor that of text and video.
        """
        num_video = self.video.shard_len(self.rank)
        num_text = num_rows - num_video
        if num_text == 0:
            return self.video
        if self.plan.text == "cross" or not 0 < num_text <= self.num_text:
            expected = f"{num_video} rows of the video"
            if self.plan.text != "cross":
                expected += f", or these and at most {self.num_text} rows of text"
            raise ValueError(
                f"attention inside a block must have {expected} on this rank, got {num_rows}: this "
                "transformer does not fit its plan"
            )
        return joint_layout(num_text, self.video, first=self.plan.text == "first")

    def attend(self, *args: Argument, **kwargs: Argument) -> Tensor:
        """Compute a call of F.scaled_dot_product_attention."""
        if self.is_cross:
            # This rank has all keys, and its own queries.
            out: Tensor = functional.scaled_dot_product_attention(*args, **kwargs)
            return out
        return self._attend(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute attention over the sequence; tensors are (batch, nheads, rows, headdim)."""
        if is_causal:
            raise NotImplementedError(
                "is_causal must be False inside a block of diffusers, got True: transformers for "
                "images and videos have no order of text and video to which it could refer"
            )
        layouts = self.layout(query.size(2)), self.layout(key.size(2))
        mask = None
        if attn_mask is not None:
            mask = key_masks(attn_mask, layouts[1], self.rank, layouts[0].seqlen)
        # (batch, nheads, rows, headdim) -> (batch, rows, nheads, headdim)
        q, k, v = (as_autocast(x).transpose(1, 2) for x in (query, key, value))
        out = ring_attention(
            q,
            k,
            v,
            mask=mask,
            softmax_scale=scale,
            dropout_p=dropout_p,
            group=self.group,
            layout=layouts,
            **self.execution,
        )
        self.num_calls += 1
        return out.transpose(1, 2)


# -- masks of keys, such as padding of text

# attn_mask -> {(layout of the keys, number of queries): masks}.
_masks: MutableMapping[Tensor, dict[tuple[AnyLayout, int, int], list[Mask] | None]] = (
    WeakTensorKeyDictionary()
)


def key_masks(attn_mask: Tensor, layout: AnyLayout, rank: int, seqlen_q: int) -> list[Mask] | None:
    """Return a mask for each batch entry from a tensor that hides keys; None if it hides none.

    Args:
        attn_mask: (batch or 1, 1, 1, keys) bool, True where a key is seen: of the keys of all
            ranks, or of this rank's keys if it hides only text, which every rank holds.
        layout: the layout of the keys.
        rank: this rank.
        seqlen_q: number of queries of all ranks.

    Raises:
        NotImplementedError: another mask, such as one that differs by query or head.
    """
    cached = _masks.setdefault(attn_mask, {})
    found = (layout, seqlen_q, attn_mask._version)
    if found not in cached:
        cached[found] = _key_masks(attn_mask, layout, rank, seqlen_q)
    return cached[found]


def _key_masks(attn_mask: Tensor, layout: AnyLayout, rank: int, seqlen_q: int) -> list[Mask] | None:
    is_of_keys = attn_mask.ndim == 4 and attn_mask.shape[1:3] == (1, 1)
    if attn_mask.dtype != torch.bool or not is_of_keys:
        raise NotImplementedError(
            "attn_mask must hide keys, a bool tensor of shape (batch, 1, 1, keys), got "
            f"{attn_mask.dtype} of shape {tuple(attn_mask.shape)}: masks that add to the scores or "
            "differ by query or head are not supported here; call ring_attn.ring_attention "
            "with mask="
        )
    seen = attn_mask[:, 0, 0].cpu()
    if seen.size(1) == layout.shard_len(rank) != layout.seqlen:
        seen = _of_all_keys(seen, layout, rank)
    if seen.size(1) != layout.seqlen:
        raise NotImplementedError(
            f"attn_mask must have {layout.seqlen} keys for layout {layout}, got {seen.size(1)}"
        )
    if bool(seen.all()):
        return None
    return [_mask_of(keys, seqlen_q) for keys in seen]


def _of_all_keys(seen: Tensor, layout: AnyLayout, rank: int) -> Tensor:
    """Return which keys of all ranks are seen, from this rank's keys."""
    positions = layout.position_ids(rank)
    whole = torch.ones(seen.size(0), layout.seqlen, dtype=torch.bool)
    whole[:, positions] = seen
    is_split = torch.ones(layout.seqlen, dtype=torch.bool)
    if isinstance(layout, JointLayout):
        lens = list(layout.part_lens)
        for part, rows in zip(layout.parts, is_split.split(lens), strict=True):
            rows.fill_(isinstance(part, SequenceLayout))
    if not bool(whole[:, is_split].all()):
        raise NotImplementedError(
            "attn_mask must hide only text, because other ranks have the rest of the video's keys, "
            "but it hides keys of the video"
        )
    return whole


def _mask_of(seen: Tensor, seqlen_q: int) -> Mask:
    """Return the mask in which all queries see some keys, (keys,) bool."""
    edges = torch.nn.functional.pad(seen.int(), (1, 1)).diff()
    starts, stops = ((edges == step).nonzero().flatten().tolist() for step in (1, -1))
    slices = [Slice(0, seqlen_q, *run) for run in zip(starts, stops, strict=True)]
    return Mask.of_disjoint(seqlen_q, seen.numel(), slices, "some keys")
