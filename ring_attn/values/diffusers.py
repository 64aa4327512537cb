"""Plans of diffusers' transformers: how a rank splits the rows of each class over ranks."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Rows(NamedTuple):
    """An argument of the blocks with one row for each position, such as rotary embeddings.

    It is split where it has the rows of all ranks. A block may also get this rank's rows, or one
    row that serves all positions.

    Attributes:
        argument: its name in the forward of a block. Tuples and lists of tensors have rows in each.
        dim: the dim of the rows.
        of: "video", or "joint" if it may have rows for the text, too.
        element: the element of the tuple that has these rows; None means every element.
        ndim: the number of dims of tensors that have these rows; None means any.
        after: whether the transformer combines the rows of all ranks with the result of the last
            block. Where it has them, that result must have the rows of all ranks, too.
    """

    argument: str
    dim: int
    of: Literal["video", "joint"] = "video"
    element: int | None = None
    ndim: int | None = None
    after: bool = False


class Plan(NamedTuple):
    """How to split the video of a transformer; every rank holds its text.

    The rows of the video enter the first block as its argument `hidden`, (batch, rows, dim), and
    leave after the module `output`; everything between the last block and this module computes each
    row by itself. Without such a module, or with rows that are used `after`, they leave after the
    last block, and every rank computes what follows.

    Attributes:
        blocks: the names of the lists of blocks, in the order in which they run.
        text: "first" or "last" if the attention of the blocks is over text and video together, in
            this order; "cross" if the video attends to the text in submodules of its own, or there
            is no text.
        cross: names of the submodules of a block whose keys are the text.
        rows: arguments of the blocks with a row for each position.
        output: the module whose output is gathered; or a `ModuleDict` of such modules. None means
            that the result of the last block is gathered.
        hidden: the argument of the first block with the video. If the transformer has joined text
            and video before, the text is split with it, and `text` is "cross".
        refused: options of the transformer's config with values that are not supported.
        required: options of the transformer's config, of which only these values are built.
        dim: the dim of the rows in `hidden` and in the output.
        result: the element of the last block's result that has the video, if that is a tuple.
        to_video: names of submodules of a block whose queries every rank holds, and whose keys are
            the video.
        copies: names of modules after the last block whose results are another medium, of which
            every rank holds all rows. Requires `output`.
        times: the argument of the transformer that has a time for each sample or, as (batch, rows),
            for each position. What follows from it has the same rows, so it is split. Requires
            `output`.
        conditions: names of modules before the first block whose result is a tuple, and the
            elements of it that have a row for each position, (batch, rows, dim). These are split.
            Requires `output`.
    """

    blocks: tuple[str, ...]
    text: Literal["first", "last", "cross"]
    cross: tuple[str, ...] = ()
    rows: tuple[Rows, ...] = ()
    output: str | None = "proj_out"
    hidden: str = "hidden_states"
    refused: tuple[tuple[str, object], ...] = ()
    required: tuple[tuple[str, object], ...] = ()
    dim: int = 1
    result: int = 0
    to_video: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    times: str | None = None
    conditions: tuple[tuple[str, tuple[int, ...]], ...] = ()


_BLOCKS = ("transformer_blocks",)
_BOTH = ("transformer_blocks", "single_transformer_blocks")
_ROTARY = (Rows("image_rotary_emb", 0),)
_JOINT_ROTARY = (Rows("image_rotary_emb", 0, "joint"),)

_FLUX = Plan(_BOTH, "first", rows=_JOINT_ROTARY)
_HUNYUAN_VIDEO = Plan(
    _BOTH,
    "last",
    rows=(Rows("freqs_cis", 0), Rows("image_rotary_emb", 0)),
    # Its blocks take the first rows for those of the first frame.
    refused=(("image_condition_type", "token_replace"),),
)
_WAN = Plan(
    ("blocks",),
    "cross",
    cross=("attn2",),
    # `temb` has a row for each position if each has its own time.
    rows=(Rows("rotary_emb", 1), Rows("temb", 1, ndim=4, after=True)),
    times="timestep",
)
_TRANSFORMER_2D = Plan(
    _BLOCKS,
    "cross",
    cross=("attn2",),
    output=None,
    required=(("only_cross_attention", False), ("double_self_attention", False)),
)

# By the name of the class. A class that is neither here nor in REFUSED is refused by name, too.
PLANS: dict[str, Plan] = {
    "AceStepTransformer1DModel": Plan(
        ("layers",),
        "cross",
        cross=("cross_attn",),
        rows=(Rows("position_embeddings", 0),),
        output=None,
    ),
    "AllegroTransformer3DModel": Plan(
        _BLOCKS, "cross", cross=("attn2",), rows=(Rows("image_rotary_emb", 1, element=1),)
    ),
    "AnyFlowTransformer3DModel": _WAN._replace(
        rows=(Rows("rotary_emb", 2), Rows("temb", 1, ndim=4)),
        # It makes a time for each position from those of frames, so the times are split later.
        times=None,
        conditions=(("condition_embedder", (0, 1)),),
    ),
    "AuraFlowTransformer2DModel": Plan(
        ("joint_transformer_blocks", "single_transformer_blocks"), "first"
    ),
    "BriaFiboTransformer2DModel": _FLUX,
    "BriaFibo2Transformer2DModel": Plan(
        ("layers",),
        "cross",
        cross=("cross_attention",),
        rows=(Rows("freqs_cis", 1), Rows("noise_mask", 1)),
        output=None,
        hidden="x",
    ),
    "BriaTransformer2DModel": _FLUX,
    "ChromaTransformer2DModel": _FLUX,
    "ChronoEditTransformer3DModel": _WAN,
    "CogVideoXTransformer3DModel": Plan(_BLOCKS, "first", rows=_ROTARY),
    "CogView3PlusTransformer2DModel": Plan(_BLOCKS, "first"),
    "CogView4Transformer2DModel": Plan(_BLOCKS, "first", rows=_ROTARY),
    "ConsisIDTransformer3DModel": Plan(_BLOCKS, "first", rows=_ROTARY),
    "CosmosTransformer3DModel": Plan(
        _BLOCKS,
        "cross",
        cross=("attn2",),
        rows=(
            Rows("image_rotary_emb", 0),
            Rows("extra_pos_emb", 1),
            Rows("temb", 1, ndim=3, after=True),
            Rows("embedded_timestep", 1, ndim=3, after=True),
        ),
    ),
    "DiTTransformer2DModel": Plan(_BLOCKS, "cross", output="proj_out_2"),
    "DreamLiteTransformer2DModel": _TRANSFORMER_2D._replace(
        required=(*_TRANSFORMER_2D.required, ("use_self_attention", True))
    ),
    "EasyAnimateTransformer3DModel": Plan(_BLOCKS, "first", rows=_ROTARY),
    "ErnieImageTransformer2DModel": Plan(
        ("layers",),
        "cross",
        rows=(Rows("rotary_pos_emb", 1), Rows("temb", 0)),
        output="final_linear",
        hidden="x",
        dim=0,
    ),
    "FluxTransformer2DModel": _FLUX,
    "Flux2Transformer2DModel": _FLUX,
    "Flux3Transformer2DModel": Plan(
        ("mode_blocks.image", "single_transformer_blocks"),
        "first",
        rows=(*_JOINT_ROTARY, Rows("temb_mod", 1)),
        output=None,
        result=1,
    ),
    "GlmImageTransformer2DModel": Plan(_BLOCKS, "first", rows=_ROTARY),
    "HeliosTransformer3DModel": _WAN._replace(
        # These options take the first rows for the history.
        required=(("guidance_cross_attn", False), ("is_amplify_history", False)),
        output=None,  # its norm takes the last rows
        times=None,
    ),
    "HiDreamImageTransformer2DModel": Plan(
        ("double_stream_blocks", "single_stream_blocks"),
        "last",
        rows=(Rows("image_rotary_emb", 1, "joint"), Rows("hidden_states_masks", 1, "joint")),
        output="final_layer",
    ),
    "HunyuanDiT2DModel": Plan(("blocks",), "cross", cross=("attn2",), rows=_ROTARY),
    "HunyuanImageTransformer2DModel": Plan(_BOTH, "last", rows=_ROTARY),
    "HunyuanVideo15Transformer3DModel": Plan(_BLOCKS, "last", rows=(Rows("freqs_cis", 0),)),
    "HunyuanVideoFramepackTransformer3DModel": _HUNYUAN_VIDEO._replace(output=None),
    "HunyuanVideoTransformer3DModel": _HUNYUAN_VIDEO,
    "Ideogram4Transformer2DModel": Plan(
        ("layers",),
        "cross",
        rows=(Rows("image_rotary_emb", 1), Rows("adaln_input", 1)),
        output="final_layer",
    ),
    "JoyImageEditPlusTransformer3DModel": Plan(
        ("double_blocks",), "last", rows=(Rows("image_rotary_emb", 1),)
    ),
    "JoyImageEditTransformer3DModel": Plan(
        ("double_blocks",), "last", rows=(Rows("image_rotary_emb", 0, element=0),)
    ),
    "Kandinsky5Transformer3DModel": Plan(
        ("visual_transformer_blocks",),
        "cross",
        cross=("cross_attention",),
        rows=(Rows("rope", 1),),
        output=None,
        hidden="visual_embed",
        refused=(("attention_type", "nabla"),),
    ),
    "Kandinsky6Transformer3DModel": Plan(
        ("visual_transformer_blocks",),
        "cross",
        cross=(
            "video_dec_block.cross_attention",
            "audio_dec_block.self_attention",
            "audio_dec_block.cross_attention",
            "va_cross_attention",
        ),
        rows=(Rows("vis_rope", 0),),
        output=None,
        hidden="vis",
        to_video=("av_cross_attention",),
    ),
    "Krea2Transformer2DModel": Plan(_BLOCKS, "cross", rows=_ROTARY, output=None),
    "LTX2VideoTransformer3DModel": Plan(
        _BLOCKS,
        "cross",
        cross=("attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn"),
        rows=(
            # By the type of RoPE: (batch, rows, dim), or (batch, nheads, rows, headdim).
            Rows("video_rotary_emb", 1, ndim=3),
            Rows("video_rotary_emb", 2, ndim=4),
            Rows("ca_video_rotary_emb", 1, ndim=3),
            Rows("ca_video_rotary_emb", 2, ndim=4),
            Rows("temb", 1, after=True),
            Rows("temb_ca_scale_shift", 1),
            Rows("temb_ca_gate", 1),
        ),
        to_video=("video_to_audio_attn",),
        copies=("audio_proj_out",),
        times="timestep",
    ),
    "LTXVideoTransformer3DModel": Plan(
        _BLOCKS,
        "cross",
        cross=("attn2",),
        rows=(Rows("image_rotary_emb", 1), Rows("temb", 1, after=True)),
        times="timestep",
    ),
    "LongCatAudioDiTTransformer": Plan(
        ("blocks",),
        "cross",
        cross=("cross_attn",),
        rows=(Rows("rope", 0),),
        output=None,
    ),
    "LongCatImageTransformer2DModel": _FLUX,
    "Lumina2Transformer2DModel": Plan(
        ("layers",), "cross", rows=(Rows("image_rotary_emb", 1),), output="norm_out"
    ),
    "MiniMaxH3Transformer3DModel": Plan(
        _BLOCKS, "cross", rows=(Rows("rotary_emb", 0), Rows("adaln_indices", 0)), output=None
    ),
    "MiniMaxMusic3Transformer1DModel": Plan(
        _BLOCKS, "cross", rows=(Rows("rotary_emb", 0),), output=None
    ),
    "MochiTransformer3DModel": Plan(_BLOCKS, "last", rows=_ROTARY),
    "MotifVideoTransformer3DModel": Plan(
        _BOTH, "last", cross=("cross_attn",), rows=_ROTARY, required=(("num_decoder_layers", 0),)
    ),
    "OmniGenTransformer2DModel": Plan(("layers",), "cross", rows=_ROTARY, output=None),
    "OvisImageTransformer2DModel": _FLUX,
    "PRXTransformer2DModel": Plan(
        ("blocks",), "first", rows=(Rows("image_rotary_emb", 2),), output="final_layer"
    ),
    "PixArtTransformer2DModel": Plan(_BLOCKS, "cross", cross=("attn2",)),
    "QwenImageTransformer2DModel": Plan(
        _BLOCKS,
        "first",
        rows=(Rows("image_rotary_emb", 0, element=0), Rows("modulate_index", 1)),
    ),
    "SD3Transformer2DModel": Plan(_BLOCKS, "last"),
    "SanaWMLTX2RefinerTransformer3DModel": Plan(
        _BLOCKS,
        "cross",
        cross=("attn2",),
        rows=(
            Rows("video_rotary_emb", 1, ndim=3),
            Rows("video_rotary_emb", 2, ndim=4),
            Rows("temb", 1, after=True),
        ),
        times="timestep",
    ),
    "SkyReelsV2Transformer3DModel": _WAN._replace(
        rows=(Rows("rotary_emb", 1), Rows("temb", 2, ndim=4, after=True)),
        times=None,  # (batch, frames)
    ),
    "StableAudio3DiTModel": Plan(
        _BLOCKS, "cross", cross=("cross_attn",), rows=(Rows("rope", 0),), output=None
    ),
    "StableAudioDiTModel": Plan(
        _BLOCKS,
        "cross",
        cross=("attn2",),
        rows=(Rows("rotary_embedding", 0),),
        output=None,  # a convolution follows `proj_out`
    ),
    "Transformer2DModel": _TRANSFORMER_2D,
    "WanTransformer3DModel": _WAN,
    "WanVACETransformer3DModel": _WAN._replace(
        blocks=("vace_blocks", "blocks"),
        # Its first blocks of both kinds get the whole video.
        rows=(*_WAN.rows, Rows("hidden_states", 1), Rows("control_hidden_states", 1)),
    ),
    "ZImageTransformer2DModel": Plan(
        ("layers",),
        "cross",
        rows=(Rows("freqs_cis", 1), Rows("noise_mask", 1)),
        output="all_final_layer",
        hidden="x",
    ),
}

_FLEX = "calls flex_attention, not scaled_dot_product_attention"
_LINEAR = "has linear attention, which is not scaled_dot_product_attention"

# Why classes have no plan, by their names.
REFUSED: dict[str, str] = {
    "AnyFlowFARTransformer3DModel": _FLEX,
    "Cosmos3OmniTransformer": "packs text with causal attention and other media into one sequence",
    "DualTransformer2DModel": "has two transformers, of which each has a plan of its own",
    "Kandinsky6SRTransformer3DModel": _FLEX,
    "LatteTransformer3DModel": "attends within a frame and across frames in turns",
    "LuminaNextDiT2DModel": "may scale scores by the number of rows of a rank",
    "MiniMaxMusic3RVQDepthDecoder": "decodes the codes of one position",
    "NucleusMoEImageTransformer2DModel": "chooses the rows of an expert among those of all ranks",
    "PriorTransformer": "makes one row, which cannot be split",
    "QwenImage21Transformer2DModel": "attends in segments, which it cuts from a rank's rows",
    "RFD4ProteinaTransformer": "has states of pairs of rows",
    "SanaTransformer2DModel": _LINEAR,
    "SanaVideoTransformer3DModel": _LINEAR,
    "SanaWMTransformer3DModel": "has recurrent layers and convolutions over frames",
    "T5FilmDecoder": "joins the tokens and the sound before it attends to both",
    "TransformerTemporalModel": "attends across frames only, where each pixel is a batch entry",
    "WanAnimate2Transformer3DModel": _FLEX,
    "WanAnimateTransformer3DModel": "attends to a face in each frame, by whole frames of rows",
}
