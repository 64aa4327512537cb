"""Read the config of a transformer of diffusers: its class, its blocks and its attention."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec

from ring_attn.planning.diffusion.table import TRANSFORMERS
from ring_attn.planning.model.config import MAX_LAYERS, ConfigError, Reader, path_of, read_json
from ring_attn.planning.model.table import MODELS
from ring_attn.values.diffusers import PLANS, REFUSED, Plan
from ring_attn.values.outside import Json

# The key with the class of a model in the configs of diffusers.
CLASS = "_class_name"

# Classes that are not in `PLANS` are planned as if text came first.
UNKNOWN = Plan(("transformer_blocks", "single_transformer_blocks"), "first")


@dataclass(frozen=True)
class TransformerConfig:
    """A transformer of diffusers.

    Attributes:
        name: its name in the table, or the path of its config.
        class_name: the name of its class.
        values: its config, with the defaults of the class.
        plan: how the class is split over ranks.
        nheads, headdim: number and size of the heads of the attention over all rows.
        num_blocks, num_single_blocks: number of its blocks; of further blocks whose weights serve
            text and video.
    """

    name: str
    class_name: str
    values: Mapping[str, Json] = field(repr=False)
    plan: Plan = field(repr=False)
    nheads: int
    headdim: int
    num_blocks: int
    num_single_blocks: int = 0

    @property
    def hidden(self) -> int:
        """The width of the transformer."""
        return self.nheads * self.headdim

    @property
    def has_joint_text(self) -> bool:
        """Whether text and video are one sequence in attention."""
        return self.plan.text != "cross"


def read_transformer(name: str) -> TransformerConfig | None:
    """Return the transformer of a config.json of diffusers, of a folder, or of a name in the table.

    None means that the config is not of diffusers.

    Raises:
        ConfigError: there is no such file, the config lacks a size, or the class cannot be split
            over ranks.
    """
    known = TRANSFORMERS.get(name.lower())
    if known is not None:
        return transformer_of(name.lower(), known)
    if name.lower() in MODELS:
        return None
    path = path_of(name, others=TRANSFORMERS)
    values = read_json(path)
    return transformer_of(str(path), values) if CLASS in values else None


def transformer_of(name: str, values: Mapping[str, Json]) -> TransformerConfig:
    """Return the transformer of a config of diffusers.

    Raises:
        ConfigError: as for `read_transformer`.
    """
    class_name = str(values[CLASS])
    if class_name in REFUSED:
        raise ConfigError(
            f"--model: {class_name} {REFUSED[class_name]}: ring_attn does not split it over ranks"
        )
    values = {**_defaults(class_name), **values}
    read = Reader(name, values)
    nheads = read.size("num_attention_heads", "n_heads", "num_heads")
    headdim = read.optional("attention_head_dim")
    if headdim is None:
        headdim = read.size("dim", "hidden_size") // nheads
    return TransformerConfig(
        name=name,
        class_name=class_name,
        values=values,
        plan=PLANS.get(class_name, UNKNOWN),
        nheads=nheads,
        headdim=headdim,
        num_blocks=read.size("num_layers", "n_layers", most=MAX_LAYERS),
        num_single_blocks=read.optional("num_single_layers") or 0,
    )


def _defaults(class_name: str) -> dict[str, Json]:
    """Return the defaults of a class of diffusers; nothing if it is not installed."""
    if find_spec("diffusers") is None:
        return {}
    from diffusers.models import transformers

    found = getattr(transformers, class_name, None)
    if found is None:
        return {}
    parameters = inspect.signature(found.__init__).parameters.values()
    return {x.name: x.default for x in parameters if x.default is not inspect.Parameter.empty}
