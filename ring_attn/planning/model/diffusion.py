"""Read the config of a transformer of diffusers: the sizes of its attention, and its blocks."""

from __future__ import annotations

from dataclasses import dataclass

from ring_attn.planning.model.config import MAX_LAYERS, Reader, path_of, read_json
from ring_attn.planning.model.table import MODELS

# The key with the class of a model in the configs of diffusers.
CLASS = "_class_name"

# Keys with numbers of blocks that attend to all rows: double-stream blocks, and single-stream ones.
BLOCKS = ("num_layers", "num_single_layers")


@dataclass(frozen=True)
class DiffusionTransformer:
    """The attention over all rows of a transformer of diffusers.

    Attributes:
        name: the name of its class.
        nheads: number of heads.
        headdim: size of a head.
        num_blocks: number of blocks with such an attention.
    """

    name: str
    nheads: int
    headdim: int
    num_blocks: int


def read_diffusion(name: str) -> DiffusionTransformer | None:
    """Return the transformer of a config.json of diffusers, or of a folder with one.

    None means that the config is not of diffusers.

    Raises:
        ConfigError: there is no such file, or the config lacks a size.
    """
    if name.lower() in MODELS:
        return None
    path = path_of(name)
    values = read_json(path)
    if CLASS not in values:
        return None
    read = Reader(str(path), values)
    first, *others = BLOCKS
    num_blocks = read.size(first, most=MAX_LAYERS)
    return DiffusionTransformer(
        name=str(values[CLASS]),
        nheads=read.size("num_attention_heads"),
        headdim=read.size("attention_head_dim"),
        num_blocks=num_blocks + sum(read.optional(key) or 0 for key in others),
    )
