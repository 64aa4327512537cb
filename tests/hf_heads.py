"""Every head of transformers (`AutoModelFor...`), and inputs with which a tiny model of it runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto

from ring_attn.integrations.transformers.stacks import numbers_own_rows
from tests.hf_architectures import (
    MIXED,
    NUM_CODES,
    SENSED,
    SENSED_NAMES,
    Architecture,
    architectures,
    inputs_of,
)
from tests.hf_models import VOCAB

SEQLEN = 46

# Kinds of heads whose inputs are no tokens, by the ends of their names in `modeling_auto`.
SENSED_HEADS = {
    "audio": ("AUDIO", "CTC", "RNNT", "TDT", "SPEECH"),
    "videos": ("VIDEO",),
    "images": (
        "FOR_IMAGE_",
        "FOR_MASKED_IMAGE",
        "SEGMENTATION",
        "OBJECT_DETECTION",
        "DEPTH",
        "RECOGNITION",
        "BACKBONE",
        "MASK_GENERATION",
        "KEYPOINT",
        "ZERO_SHOT_IMAGE",
        "MATTING",
        "ESTIMATION",
        "IMAGE_TO_IMAGE",
    ),
}
# Heads of models of texts and images.
OF_IMAGES_AND_TEXT = ("IMAGE_TEXT", "MULTIMODAL", "RETRIEVAL", "VISUAL_QUESTION", "DECISION")

# Sizes of images that are tried in turn, if the config has none.
IMAGE_SIZES = (28, 64, 224)


class Listed(NamedTuple):
    """A class of a mapping of transformers, from types of models to classes."""

    mapping: str
    model_type: str
    model_class: str


def listed(beginning: str) -> Iterator[Listed]:
    """Yield the classes of all mappings whose names have this beginning."""
    for mapping, classes in vars(modeling_auto).items():
        # Most names end in _MAPPING_NAMES, and not MODEL_FOR_AUDIO_TOKENIZATION_NAMES.
        if not (mapping.startswith(beginning) and mapping.endswith("_NAMES")):
            continue
        for model_type, names in classes.items():
            for name in (names,) if isinstance(names, str) else names:
                yield Listed(mapping, model_type, name)


def heads() -> Iterator[Architecture]:
    """Yield every class of `AutoModelFor...` and `AutoModel` once, with the kind of its inputs."""
    found = {each.model_class: each for each in architectures()}
    kind_of = {each.model_type: each.head for each in found.values()}
    # Inputs that are no tokens, if one of the heads has them.
    kind_of |= {each.model_type: each.head for each in found.values() if each.head in SENSED}
    for mapping, model_type, name in (*listed("MODEL_FOR_"), *listed("MODEL_MAPPING")):
        kind = kind_of.get(model_type) or _kind(mapping, name)
        found.setdefault(name, Architecture(kind, model_type, name))
    yield from found.values()


def _kind(mapping: str, model_class: str) -> str:
    """The kind of a head's inputs, from the name of its mapping and the arguments of its class."""
    try:
        names = inspect.signature(getattr(transformers, model_class).forward).parameters
    except (AttributeError, ImportError):
        return "causal"
    if "input_ids" in names and any(name in names for name in SENSED_NAMES):
        return MIXED
    if any(word in mapping for word in OF_IMAGES_AND_TEXT):
        return MIXED
    for kind, words in SENSED_HEADS.items():
        if any(word in mapping for word in words):
            return kind
    if "pixel_values_videos" in names:
        return "videos"
    if "pixel_values" in names:
        return "images"
    return "audio" if {"input_values", "input_features"} & names.keys() else "causal"


def candidates(architecture: Architecture, model: Any) -> Iterator[dict[str, Tensor]]:
    """Yield inputs of the whole sequence, of which the first ones that run are used."""
    names = inspect.signature(model.forward).parameters
    if architecture.model_class == "LongformerForMultipleChoice":
        ids = _with_three_ends(_ids(1, 2, SEQLEN), model.config.sep_token_id)
        yield {"input_ids": ids}
        return
    if architecture.model_class.endswith("ForMultipleChoice"):
        yield {"input_ids": _ids(1, 2, SEQLEN)}
        return
    of_text = _texts(model, names)
    usual = inputs_of(architecture, model)
    if gets_whole_inputs(model, usual):
        yield usual
    elif architecture.model_class in NUM_CODES:
        yield {"input_ids": usual["input_ids"][:, :SEQLEN]}
    else:
        yield {"input_ids": _ids(1, SEQLEN)}
        yield of_text
    yield from _given_by_class(architecture, model, of_text)
    if {"input_values", "input_features"} <= names.keys():  # samples, and features of them
        features = _random(1, 20, 160), _random(1, 160, 20)
        for x in features:
            yield {"input_values": _random(1, 1, 6400), "input_features": x}
    for name in SENSED_NAMES:
        if name in names:
            for shape in _shapes(model, name):
                x = _random(1, *shape)
                yield {name: x}
                yield {name: x, **of_text}
    if "past_values" in names:
        config = model.config
        rows = getattr(config, "context_length", 64)
        num = getattr(config, "num_input_channels", None)
        shape = (rows,) if num is None else (rows, num)
        yield {"past_values": torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))}
    if "flattened_patches" in names:
        x = torch.randn(1, 20, 2 + 768, generator=torch.Generator().manual_seed(1))
        x[..., :2] = torch.arange(20)[:, None] // torch.tensor([5, 1]) % 5 + 1
        yield {"flattened_patches": x, **of_text}


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _with_three_ends(ids: Tensor, end: int) -> Tensor:
    """Ids with three separators: a question, and a text."""
    ids = ids.masked_fill(ids == end, end + 1)
    ids[..., [3, 9, -1]] = end
    return ids


def _given_by_class(
    architecture: Architecture, model: Any, of_text: dict[str, Tensor]
) -> Iterator[dict[str, Tensor]]:
    """Yield inputs that some classes need in addition to those of their kind."""
    config = model.config
    size = getattr(getattr(config, "vision_config", config), "image_size", 28)
    size = size if isinstance(size, int) else size[0]
    match architecture.model_class:
        case "LongformerForQuestionAnswering":
            yield {"input_ids": _with_three_ends(_ids(1, SEQLEN), config.sep_token_id)}
        case "SplinterForPreTraining":
            ids = _ids(1, SEQLEN)
            ids[:, [5, 30]] = config.question_token_id
            yield {"input_ids": ids}
        case "VideoMAEForPreTraining":
            num = (config.image_size // config.patch_size) ** 2 * (
                config.num_frames // config.tubelet_size
            )
            yield {
                "pixel_values": _random(1, config.num_frames, 3, config.image_size, size),
                "bool_masked_pos": (torch.arange(num) % 2 == 0)[None],
            }
        case "LightGlueForKeypointMatching" | "SuperGlueForKeypointMatching":
            yield {"pixel_values": _random(1, 2, 3, 64, 64)}
        case "EfficientLoFTRForKeypointMatching":
            yield {"pixel_values": _random(1, 2, 3, 128, 128)}
        case "SpeechT5ForTextToSpeech":
            yield {**of_text, "decoder_input_values": _random(1, 20, config.num_mel_bins)}
        case "GraniteSpeech5ForCTC":
            yield {"input_features": _random(1, 40, 320)}
        case "Nemotron3DiarizationForAudioFrameClassification":
            yield {"input_features": _random(1, 64, config.audio_config.num_mel_bins)}
        case "InstructBlipForConditionalGeneration" | "InstructBlipVideoForConditionalGeneration":
            frames = (2,) if "Video" in architecture.model_class else ()
            yield {
                "pixel_values": _random(1, *frames, 3, size, size),
                "qformer_input_ids": _ids(1, 7),
                "input_ids": _ids(1, SEQLEN),
            }
        case "MllamaVisionModel":
            tiles = config.max_num_tiles
            yield {
                "pixel_values": _random(1, 1, tiles, 3, size, size),
                "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.int64),
                "aspect_ratio_mask": torch.ones(1, 1, tiles, dtype=torch.int64),
            }
        case "Siglip2Model":
            vision = config.vision_config
            yield {
                "input_ids": _ids(1, SEQLEN),
                "pixel_values": _random(1, 16, vision.num_channels * vision.patch_size**2),
                "pixel_attention_mask": torch.ones(1, 16, dtype=torch.int64),
                "spatial_shapes": torch.tensor([[4, 4]]),
            }
        case "IdeficsForVisionText2Text":
            yield {
                "input_ids": _ids(1, SEQLEN),
                "pixel_values": _random(1, 1, 3, size, size),
                "image_attention_mask": torch.ones(1, SEQLEN, 1, dtype=torch.int64),
            }
        case "Kosmos2ForConditionalGeneration":
            num = config.latent_query_num
            yield {
                "input_ids": _ids(1, SEQLEN),
                "pixel_values": _random(1, 3, size, size),
                "image_embeds_position_mask": (torch.arange(SEQLEN) < num)[None].long(),
            }
        case "Llama4VisionModel":
            yield {"pixel_values": _random(1, 3, size, size)}


def gets_whole_inputs(model: Any, inputs: dict[str, Tensor]) -> bool:
    """Whether each rank gets all inputs: the model cuts rows itself, or they are no tokens."""
    return numbers_own_rows(model) or "input_ids" not in inputs


def _ids(*shape: int) -> Tensor:
    """Random ids, some of which are those of special tokens, such as masks."""
    return torch.randint(2, VOCAB, shape, generator=torch.Generator().manual_seed(1))


def _texts(model: Any, names: Any) -> dict[str, Tensor]:
    """Ids, and what else a model of texts needs."""
    inputs: dict[str, Tensor] = {}
    if "input_ids" in names:
        inputs["input_ids"] = _ids(1, SEQLEN)
    if "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = _ids(1, SEQLEN)
    if "bbox" in names:
        corners = torch.randint(64, (1, SEQLEN, 4), generator=torch.Generator().manual_seed(2))
        inputs["bbox"] = corners.sort(-1).values
    if "visual_feats" in names:
        generator = torch.Generator().manual_seed(2)
        size = model.config.visual_feat_dim
        inputs["visual_feats"] = torch.randn(1, 5, size, generator=generator)
        inputs["visual_pos"] = torch.rand(1, 5, 4, generator=generator)
    return inputs


def _shapes(model: Any, name: str) -> Iterator[tuple[int, ...]]:
    """Yield shapes of pixels or samples, without the batch."""
    config = model.config
    if name == "input_values":
        yield from ((1600,), (6400,), (1, 6400))
        return
    if name == "input_features":
        encoder = next(
            (part for part in (config, *vars(config).values()) if hasattr(part, "num_mel_bins")),
            None,
        )
        bins = getattr(encoder, "num_mel_bins", 16)
        rows = 2 * getattr(encoder, "max_source_positions", 32)
        yield from ((rows, bins), (bins, rows), (64, 80), (128, 80), (64, 64))
        return
    parts = [part for part in vars(config).values() if hasattr(part, "image_size")]
    found = [part.image_size for part in (config, *parts) if hasattr(part, "image_size")]
    for size in (*found, *IMAGE_SIZES):
        if not isinstance(size, int | list | tuple):
            continue
        height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
        if name == "pixel_values_videos":
            yield 4, 3, height, width
        else:
            yield 3, height, width
            yield 1, 3, height, width


def inputs_with(architecture: Architecture, model: Any) -> dict[str, Tensor]:
    """The first inputs with which the model runs; raises the error of the first ones."""
    first: Exception | None = None
    for inputs in candidates(architecture, model):
        try:
            with torch.no_grad():
                model(**inputs)
            return inputs
        except Exception as error:
            first = first or error
    raise first or ValueError("the test knows no inputs of it")


NO_IMAGE = "the test knows no inputs with an image"
# How models say how many tokens an image needs.
NUM_FEATURES = re.compile(r"features:? (?:torch.Size\(\[)?(\d+)")


def with_image(model: Any) -> dict[str, Tensor]:
    """Ids with the tokens of an image, and its pixels."""
    names, config = inspect.signature(model.forward).parameters, model.config
    token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    if token is None or "pixel_values" not in names:
        raise ValueError(NO_IMAGE)
    first: Exception | None = None
    for pixels in _images(model, names):
        try:
            return _with_tokens(model, pixels, token)
        except Exception as error:
            first = first or error
    raise first or ValueError("the test knows no image of it")


def _images(model: Any, names: Any) -> Iterator[dict[str, Tensor]]:
    """Yield images in the forms that models take."""
    generator = torch.Generator().manual_seed(1)
    vision = getattr(model.config, "vision_config", model.config)
    if "image_grid_thw" in names:
        merge = getattr(vision, "spatial_merge_size", 2)
        channels = getattr(vision, "in_channels", getattr(vision, "num_channels", 3))
        times = getattr(vision, "temporal_patch_size", 1)
        size = channels * times * vision.patch_size**2
        grid = torch.tensor([[1, 4 * merge, 6 * merge]])
        yield {
            "pixel_values": torch.randn(24 * merge**2, size, generator=generator),
            "image_grid_thw": grid,
        }
    for shape in _shapes(model, "pixel_values"):
        pixels = {"pixel_values": torch.randn(1, *shape, generator=generator)}
        yield pixels
        if "image_sizes" in names:
            yield pixels | {"image_sizes": torch.tensor([shape[-2:]])}


def _with_tokens(model: Any, pixels: dict[str, Tensor], token: int) -> dict[str, Tensor]:
    """Add ids, with as many tokens of the image as the model says that it needs."""
    names = inspect.signature(model.forward).parameters
    num = 1
    for _ in range(3):
        ids = _ids(1, SEQLEN)
        ids = ids.masked_fill(ids == token, token - 1)
        first = (SEQLEN - num) // 2  # so that both of two ranks have rows of the image
        ids[:, first : first + num] = token
        inputs = {"input_ids": ids, **pixels}
        if "mm_token_type_ids" in names:
            inputs["mm_token_type_ids"] = (ids == token).int()
        if "position_ids" in names:  # else models compute others than the ranks get
            inputs["position_ids"] = torch.arange(SEQLEN)[None]
        try:
            with torch.no_grad():
                model(**inputs)
        except Exception as error:
            said = NUM_FEATURES.search(str(error))
            if said is None:
                raise
            needed = int(said[1])
            size = model.config.get_text_config().hidden_size
            num = needed // size if needed % size == 0 else needed
            if not 1 < num < SEQLEN:
                raise ValueError(f"an image has {num} tokens") from error
            continue
        if num == 1:
            raise ValueError("the model does not count the tokens of an image")
        return inputs
    raise ValueError("the model does not say how many tokens an image needs")
