"""Attention inside the blocks of a transformer: a mode that replaces scaled_dot_product_attention.

Every attention of diffusers' "native" backend is a call of it. Which rows a call has follows from
the numbers of its queries and keys:

    as many as this rank's rows of the video             the split video
    as many as these and rows of text                    text and video together
    in a submodule for cross-attention                   the text, which every rank holds: as usual
    in a submodule whose queries every rank holds        keys of the video
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import lru_cache
from typing import Literal

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
from ring_attn.core.masks import from_dense
from ring_attn.models.sdpa import Argument, as_autocast, route_sdpa
from ring_attn.values.compiling import left_out_of_graphs
from ring_attn.values.diffusers import Plan

AnyLayout = SequenceLayout | JointLayout

# The owner of the rows of a call of attention: a block, or a submodule that a plan names in `cross`
# or `to_video`.
Role = Literal["block", "cross", "to_video"]

# Masks that are added to scores hide a key by such a number: it underflows in the softmax.
_HIDDEN = -1e4


@lru_cache(maxsize=64)
def joint_layout(num_text: int, video: SequenceLayout, *, first: bool) -> JointLayout:
    """Return the layout of text, first or last, and a video."""
    return JointLayout([num_text, video] if first else [video, num_text])


@lru_cache(maxsize=64)
def replicated_layout(num_rows: int, world_size: int) -> JointLayout:
    """Return the layout of rows that every rank holds."""
    return JointLayout([num_rows], world_size)


class BlockAttention(route_sdpa):
    """A mode in which scaled_dot_product_attention is attention over the sequence of all ranks.

    Attributes:
        plan: of the transformer.
        group: the ranks.
        rank: of this process in the group.
        execution: options of `ring_attention`.
        num_text: number of rows of text.
        role: of the submodule that runs.
        num_calls: number of calls of ring_attention.
    """

    def __init__(self, plan: Plan, group: dist.ProcessGroup, execution: ExecutionOptions) -> None:
        super().__init__()
        self.plan = plan
        self.group = group
        self.rank = group.rank()
        self.execution = execution
        self._video: SequenceLayout | None = None
        self._joint: AnyLayout | None = None
        self.num_text = 0
        self.role: Role = "block"
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

    def begin(self, video: SequenceLayout) -> None:
        """Take the layout of the video with which a forward of the transformer begins."""
        self._video, self._joint, self.num_text = video, video, 0

    def with_text(self, num_text: int) -> None:
        """Take the number of rows of text with which a block begins."""
        self.num_text = num_text
        # Made here, and not in a call of attention, since torch.compile cannot trace a new layout.
        self._joint = joint_layout(num_text, self.video, first=self.plan.text == "first")

    def layout(self, num_rows: int) -> AnyLayout:
        """Return the layout of the queries, or the keys, of a call.

        Raises:
            ValueError: the number of rows is neither that of the video nor that of text and video.
        """
        num_video = self.video.shard_len(self.rank)
        num_text = num_rows - num_video
        if num_text == 0:
            return self.video
        if num_text == self.num_text and self._joint is not None:
            return self._joint
        if self.plan.text == "cross" or not 0 < num_text <= self.num_text:
            expected = f"{num_video} rows of the video"
            if self.plan.text != "cross":
                expected += f", or these and at most {self.num_text} rows of text"
            raise ValueError(
                f"attention inside a block must have {expected} on this rank, got {num_rows}: this "
                "transformer does not fit its plan"
            )
        return joint_layout(num_text, self.video, first=self.plan.text == "first")

    def layouts(self, num_queries: int, num_keys: int) -> tuple[AnyLayout, AnyLayout]:
        """Return the layouts of the queries and the keys of a call."""
        if self.role == "to_video":
            return replicated_layout(num_queries, self.group.size()), self.video
        return self.layout(num_queries), self.layout(num_keys)

    def attend(self, *args: Argument, **kwargs: Argument) -> Tensor:
        """Compute a call of F.scaled_dot_product_attention."""
        if self.role == "cross":
            # This rank has all keys, and its own queries.
            out: Tensor = functional.scaled_dot_product_attention(*args, **kwargs)
            return out
        return self._attend(*args, **kwargs)

    @left_out_of_graphs(
        "attention inside a block of diffusers chooses layouts and masks on the host, which "
        "torch.compile cannot trace: leave out fullgraph=True"
    )
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
        layouts = self.layouts(num_queries=query.size(2), num_keys=key.size(2))
        mask = None if attn_mask is None else masks_of(attn_mask, layouts, self.rank)
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


# -- masks, such as padding of text

# attn_mask -> {(layouts of queries and keys, version of the tensor): masks}.
_masks: MutableMapping[Tensor, dict[tuple[AnyLayout, AnyLayout, int], list[Mask] | None]] = (
    WeakTensorKeyDictionary()
)


def masks_of(
    attn_mask: Tensor, layouts: tuple[AnyLayout, AnyLayout], rank: int
) -> list[Mask] | None:
    """Return a mask for each batch entry from a tensor; None if it hides nothing.

    Args:
        attn_mask: (batch or 1, heads or 1, queries or 1, keys): bool, True where a key is seen; or
            a number that is added to the scores, 0 or at most -1e4. It has the rows of all ranks,
            or this rank's rows if it hides only text, which every rank holds.
        layouts: the layouts of queries and keys.
        rank: this rank.

    Raises:
        NotImplementedError: another mask, such as one that differs by head.
    """
    cached = _masks.setdefault(attn_mask, {})
    found = (*layouts, attn_mask._version)
    if found not in cached:
        cached[found] = _masks_of(attn_mask, layouts, rank)
    return cached[found]


def _masks_of(
    attn_mask: Tensor, layouts: tuple[AnyLayout, AnyLayout], rank: int
) -> list[Mask] | None:
    seen = _seen(attn_mask).cpu()
    if bool(seen.all()):
        return None
    layout_q, layout_k = layouts
    if seen.shape[1:] == (layout_q.seqlen, layout_k.seqlen) and layout_q.seqlen > 1:
        return [from_dense(entry) for entry in seen]
    # The rest hides some queries from all keys, and some keys from all queries.
    queries, keys = seen.any(dim=2), seen.any(dim=1)
    if not torch.equal(seen, queries[:, :, None] & keys[:, None]):
        raise NotImplementedError(
            f"attn_mask of shape {tuple(attn_mask.shape)} differs by query and key, but does not "
            "have the rows of all ranks: this rank cannot know which keys of other ranks it hides; "
            "call ring_attn.ring_attention with mask="
        )
    if queries.size(1) == 1:
        whole_q = queries.expand(-1, layout_q.seqlen)
    else:
        whole_q = _of_all_rows(queries, layout_q, rank)
    whole_k = _of_all_rows(keys, layout_k, rank)
    return [_mask_of(*entry) for entry in zip(whole_q, whole_k, strict=True)]


def _seen(attn_mask: Tensor) -> Tensor:
    """Return which keys are seen, (batch or 1, queries or 1, keys) bool."""
    if attn_mask.ndim != 4:
        raise NotImplementedError(
            "attn_mask must be (batch or 1, heads or 1, queries or 1, keys), got shape "
            f"{tuple(attn_mask.shape)}"
        )
    seen = attn_mask
    if attn_mask.dtype != torch.bool:
        seen = attn_mask == 0
        if not bool((seen | (attn_mask <= _HIDDEN)).all()) or not bool(seen.any(dim=-1).all()):
            raise NotImplementedError(
                f"attn_mask must hide keys, and some but not all for each query, got "
                f"{attn_mask.dtype} with other numbers than 0 and those up to {_HIDDEN:.0e}, or "
                "rows without 0: numbers that are added to scores are not supported"
            )
    if seen.size(1) > 1 and not torch.equal(seen, seen[:, :1].expand_as(seen)):
        raise NotImplementedError(
            f"attn_mask must be equal for all heads, got shape {tuple(attn_mask.shape)} with other "
            "values by head: call ring_attn.ring_attention with mask= for each head"
        )
    return seen[:, 0]


def _of_all_rows(seen: Tensor, layout: AnyLayout, rank: int) -> Tensor:
    """Return which rows of all ranks are seen, (batch, seqlen), from all or this rank's rows."""
    if seen.size(1) == layout.seqlen:
        return seen
    if seen.size(1) != layout.shard_len(rank):
        raise NotImplementedError(
            f"attn_mask must have {layout.seqlen} rows for layout {layout}, got {seen.size(1)}"
        )
    whole = torch.ones(seen.size(0), layout.seqlen, dtype=torch.bool)
    whole[:, layout.position_ids(rank)] = seen
    is_split = torch.ones(layout.seqlen, dtype=torch.bool)
    if isinstance(layout, JointLayout):
        lens = list(layout.part_lens)
        for part, rows in zip(layout.parts, is_split.split(lens), strict=True):
            rows.fill_(isinstance(part, SequenceLayout))
    if not bool(whole[:, is_split].all()):
        raise NotImplementedError(
            "attn_mask must hide only text, because other ranks have the rest of the video's rows, "
            "but it hides rows of the video"
        )
    return whole


def _mask_of(queries: Tensor, keys: Tensor) -> Mask:
    """Return the mask in which some queries see some keys, (rows,) bool each."""
    slices = [Slice(*q, *k) for q in _runs(queries) for k in _runs(keys)]
    return Mask.of_disjoint(queries.numel(), keys.numel(), slices, "some keys")


def _runs(seen: Tensor) -> list[tuple[int, int]]:
    """Return the runs of rows that are seen, as starts and stops."""
    edges = torch.nn.functional.pad(seen.int(), (1, 1)).diff()  # 1 at starts, -1 at stops
    starts = (edges == 1).nonzero().flatten().tolist()
    stops = (edges == -1).nonzero().flatten().tolist()
    return list(zip(starts, stops, strict=True))
