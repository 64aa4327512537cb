"""Bytes and FLOPs of a diffusion transformer, as functions of its rows of video and text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ring_attn.planning.model.sizes import Weights


@dataclass(frozen=True)
class Rowwise:
    """A number, such as bytes or FLOPs of a sample, that depends on the rows linearly.

    Attributes:
        video, text: share of each row of the video, and of each row of the text.
        fixed: share of the sample.

    Example:
        >>> Rowwise(2.0, 3.0, 1.0).at(10, 5)
        36.0
    """

    video: float = 0.0
    text: float = 0.0
    fixed: float = 0.0

    def at(self, video: float, text: float) -> float:
        """Return the number for so many rows of video and of text."""
        return self.video * video + self.text * text + self.fixed


@dataclass(frozen=True)
class Call:
    """A call of attention in a block.

    Attributes:
        nheads: number of heads.
        headdim, headdim_v: sizes of a head of q and k, and of v.
        has_text: whether the text is among the keys.
        is_split: whether the keys are the video, or text and video: rows of all ranks. Else they
            are rows that every rank holds, and nothing is sent.
        other_keys: number of further keys that every rank holds, such as an image's.
    """

    nheads: int
    headdim: int
    headdim_v: int
    has_text: bool
    is_split: bool = True
    other_keys: int = 0

    @property
    def words(self) -> str:
        if not self.is_split:
            return "cross-attention, not sent"
        return "attention over text and video" if self.has_text else "attention over the video"

    def local_flops(self, video: float, text: float) -> float:
        """Return the FLOPs of the forward of a call that sends nothing, for a rank's rows."""
        keys = (text if self.has_text else 0) + self.other_keys
        return 2.0 * self.nheads * (self.headdim + self.headdim_v) * video * keys


@dataclass(frozen=True)
class Block:
    """Bytes and FLOPs of a block for each sample, by a rank's rows.

    Attributes:
        inputs: bytes of its inputs, which are outputs of the block before.
        kept: bytes that its forward keeps for the backward, with its outputs.
        forward: the most bytes that its forward holds, beyond what was held before it; in inference
            of a forward without gradients.
        backward: the most bytes that its backward holds, beyond what was held before the forward.
        moved_forward, moved_backward: bytes that operators other than products read and write.
        flops_forward, flops_backward: FLOPs of products.
        calls: its calls of attention.
    """

    inputs: Rowwise
    kept: Rowwise
    forward: Rowwise
    backward: Rowwise
    moved_forward: Rowwise
    moved_backward: Rowwise
    flops_forward: Rowwise
    flops_backward: Rowwise
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Outside:
    """Bytes and FLOPs of a transformer outside of its blocks, for each sample.

    Everything before the first block runs on the rows of all ranks. So does everything after the
    last one, if `ends_whole`.

    Attributes:
        kept: bytes that are held from before the first block on, without its inputs.
        before: the most bytes that are held before the first block.
        after: the most bytes that are held after the last block, with the loss and its backward in
            training, beyond what was held before.
        moved_before, moved_after: bytes that operators other than products read and write, in all
            directions.
        flops_before, flops_after: FLOPs of products, in all directions.
        ends_whole: whether what follows the last block runs on the rows of all ranks.
    """

    kept: Rowwise
    before: Rowwise
    after: Rowwise
    moved_before: Rowwise
    moved_after: Rowwise
    flops_before: Rowwise
    flops_after: Rowwise
    ends_whole: bool


@dataclass(frozen=True)
class SizedTransformer:
    """A transformer with all that it takes.

    Attributes:
        name: its name, or the path of its config.
        class_name: the name of its class in diffusers.
        weights: numbers of its weights; those outside of blocks are `others`.
        kinds: the index in `blocks` of each block of the transformer.
        blocks: what each kind of block takes.
        outside: what the rest takes.
        source: where the numbers come from: "traced: .." or "estimate: ..".
        note: why the module was not traced; "" if it was.
    """

    name: str
    class_name: str
    weights: Weights
    kinds: tuple[int, ...]
    blocks: tuple[Block, ...]
    outside: Outside
    source: str
    note: str = ""

    def of_block(self, index: int) -> Block:
        return self.blocks[self.kinds[index]]

    @property
    def calls(self) -> Counter[Call]:
        """How many calls of each kind all blocks make."""
        return Counter(call for kind in self.kinds for call in self.blocks[kind].calls)
