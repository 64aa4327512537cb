"""Plans of diffusers' transformers: how a rank splits the rows of each class over ranks."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Rows(NamedTuple):
    """An argument of the blocks with one row for each position, such as rotary embeddings.

    Attributes:
        argument: its name in the forward of a block. Tuples and lists of tensors have rows in each.
        dim: the dim of the rows.
        of: "video", or "joint" if it has rows for the text, too.
        element: the element of the tuple that has these rows; None means every element.
    """

    argument: str
    dim: int
    of: Literal["video", "joint"] = "video"
    element: int | None = None


class Plan(NamedTuple):
    """How to split the video of a transformer; every rank holds its text.

    The rows of the video enter the first block as its argument `hidden`, (batch, rows, dim), and
    leave after the module `output`, which computes each row by itself.

    Attributes:
        blocks: the names of the lists of blocks, in the order in which they run.
        text: "first" or "last" if the attention of the blocks is over text and video together, in
            this order; "cross" if the video attends to the text in submodules of its own, or there
            is no text.
        cross: names of the submodules of a block whose keys are the text.
        rows: arguments of the blocks with a row for each position.
        output: the module whose output is gathered; or a `ModuleDict` of such modules.
        hidden: the argument of the first block with the video. If the transformer has joined text
            and video before, the text is split with it, and `text` is "cross".
        refused: options of the transformer's config with values that are not supported.
    """

    blocks: tuple[str, ...]
    text: Literal["first", "last", "cross"]
    cross: tuple[str, ...] = ()
    rows: tuple[Rows, ...] = ()
    output: str = "proj_out"
    hidden: str = "hidden_states"
    refused: tuple[tuple[str, object], ...] = ()


_BLOCKS = ("transformer_blocks",)
_BOTH = ("transformer_blocks", "single_transformer_blocks")

# By the name of the class. A class that is not here is refused by name.
PLANS: dict[str, Plan] = {
    "ChromaTransformer2DModel": Plan(_BOTH, "first", rows=(Rows("image_rotary_emb", 0, "joint"),)),
    "CogVideoXTransformer3DModel": Plan(_BLOCKS, "first", rows=(Rows("image_rotary_emb", 0),)),
    "CosmosTransformer3DModel": Plan(
        _BLOCKS,
        "cross",
        cross=("attn2",),
        rows=(Rows("image_rotary_emb", 0), Rows("extra_pos_emb", 1)),
    ),
    "FluxTransformer2DModel": Plan(_BOTH, "first", rows=(Rows("image_rotary_emb", 0, "joint"),)),
    "Flux2Transformer2DModel": Plan(_BOTH, "first", rows=(Rows("image_rotary_emb", 0, "joint"),)),
    "HunyuanVideoTransformer3DModel": Plan(
        _BOTH,
        "last",
        rows=(Rows("freqs_cis", 0), Rows("image_rotary_emb", 0)),
        # Its blocks take the first rows for those of the first frame.
        refused=(("image_condition_type", "token_replace"),),
    ),
    "LTXVideoTransformer3DModel": Plan(
        _BLOCKS, "cross", cross=("attn2",), rows=(Rows("image_rotary_emb", 1),)
    ),
    "MochiTransformer3DModel": Plan(_BLOCKS, "last", rows=(Rows("image_rotary_emb", 0),)),
    "PixArtTransformer2DModel": Plan(_BLOCKS, "cross", cross=("attn2",)),
    "QwenImageTransformer2DModel": Plan(
        _BLOCKS,
        "first",
        rows=(Rows("image_rotary_emb", 0, element=0), Rows("modulate_index", 1)),
    ),
    "SD3Transformer2DModel": Plan(_BLOCKS, "last"),
    "WanTransformer3DModel": Plan(
        ("blocks",), "cross", cross=("attn2",), rows=(Rows("rotary_emb", 1),)
    ),
    "ZImageTransformer2DModel": Plan(
        ("layers",),
        "cross",
        rows=(Rows("freqs_cis", 1), Rows("noise_mask", 1)),
        output="all_final_layer",
        hidden="x",
    ),
}
