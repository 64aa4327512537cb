"""Options of configs and heads of Hugging Face models, on a split sequence.

    torchrun --nproc-per-node 2 -m tests.hf_options OUT.md [model_type ...] [-model_type ...]

For each architecture of `tests.hf_architectures`: each boolean of its config, and each choice of
`CHOICES`, one at a time, if it changes the outputs in one process; and each head of `HEADS`. Lines
are written to OUT.md as soon as they are known; models whose default is refused are left out.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ring_attn import SequenceLayout, shard_batch
from ring_attn.integrations.transformers import register
from ring_attn.integrations.transformers.models import first_position
from ring_attn.testing import check_rounded, noisy_runs
from tests.hf_architectures import MAX_PARAMETERS, SENSED, SPECIAL, architectures, options
from tests.hf_models import VOCAB, all_in_float64

SEQLEN = 46

TITLE = f"""# Options and heads of Hugging Face models

Made by `tests/hf_options.py` with transformers {transformers.__version__}: tiny random
models on 2 ranks, without `attention_mask`. Each row is one option of a config that changes the
outputs in one process, or a head; other options are the defaults. These architectures were tried:
the others of the [table of models](models.md) have not been tried with other options.

- right: all outputs are those of one process, within the bound of the tests
- refused: an error names the part and the reason
- not tried: no tiny model could be made with this option

| model | option | on a split sequence |
|---|---|---|
"""

# Values of options that are not booleans by default, as real checkpoints have them.
CHOICES: dict[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (True, "all"),
    "classifier_pooling": ("mean", "cls"),
    "position_embedding_type": ("rotary", "absolute", "relative_key"),
    "sliding_window": (8,),
    "attention_chunk_size": (8,),
    "attn_logit_softcapping": (5.0,),
    "final_logit_softcapping": (5.0,),
    "per_layer_embedding_ngram": (2,),
    "ngram_size": (2,),
    "index_topk": (4,),
}

# Booleans that say nothing of a model's forward.
NO_OPTIONS = {
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "use_cache",
    "torchscript",
    "tie_word_embeddings",
    "is_encoder_decoder",
    "add_cross_attention",
    "is_decoder",
}

HEADS = {
    "base": modeling_auto.MODEL_MAPPING_NAMES,
    "sequence": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "token": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "question": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "next sentence": modeling_auto.MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES,
}


class Variant(NamedTuple):
    """A model class with changes of its config."""

    model_type: str
    model_class: str
    changes: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        changes = ", ".join(f"{name}={value!r}" for name, value in self.changes)
        return f"{self.model_class} | {changes or 'default'}"

    def config(self) -> Any:
        config_class = getattr(transformers, self.model_class).config_class
        config_class = config_class or CONFIG_MAPPING[self.model_type]
        arguments = options(config_class) | SPECIAL.get(self.model_class, {})
        return config_class(**arguments | dict(self.changes))

    def make(self, implementation: str) -> Any:
        """The model, with the same random weights each time."""
        model_class = getattr(transformers, self.model_class)
        with torch.device("meta"):
            num = sum(p.numel() for p in model_class(self.config()).parameters())
        if num > MAX_PARAMETERS:
            raise ValueError("too large")
        torch.manual_seed(0)
        made = model_class._from_config(
            self.config(), attn_implementation=implementation, experts_implementation="eager"
        )
        return made.eval()


def variants(model_type: str, model_class: str) -> Iterator[Variant]:
    """The default, and each option that may change the forward."""
    yield Variant(model_type, model_class)
    for name, value in vars(Variant(model_type, model_class).config()).items():
        if isinstance(value, bool) and name not in NO_OPTIONS and not name.startswith("_"):
            yield Variant(model_type, model_class, ((name, not value),))
        for choice in CHOICES.get(name, ()):
            if choice != value and not isinstance(value, bool):
                yield Variant(model_type, model_class, ((name, choice),))


def ids_of() -> Tensor:
    """Random ids, some of which are those of special tokens, such as masks."""
    return torch.randint(2, VOCAB, (1, SEQLEN), generator=torch.Generator().manual_seed(1))


def outputs(model: Any, ids: Tensor, **more: Any) -> dict[str, Tensor]:
    """All outputs of floating point, by name."""
    with torch.no_grad():
        found = model(input_ids=ids, **more)
    return {name: x for name, x in found.items() if isinstance(x, Tensor) and x.is_floating_point()}


def outcome(variant: Variant, default: dict[str, Tensor] | None) -> str | None:
    """Return the outcome of a variant on all ranks, or None if its outputs are the default ones."""
    ids = ids_of()
    try:
        model = variant.make("eager")
        plain = outputs(model, ids)
    except Exception as error:
        return f"not tried: {type(error).__name__}"
    same_names = default is not None and default.keys() == plain.keys()
    if same_names and all(torch.equal(x, default[name]) for name, x in plain.items()):  # type: ignore[index]
        return None
    rank, layout = dist.get_rank(), SequenceLayout.contiguous(SEQLEN, dist.get_world_size())
    part = shard_batch({"input_ids": ids}, layout, rank)
    try:
        with register(layout="contiguous"):
            split = variant.make("ring_attn")
            split.load_state_dict(model.state_dict())
            positions = part["position_ids"] + first_position(split)
            got = outputs(split, part["input_ids"], position_ids=positions)
    except (NotImplementedError, ValueError) as error:
        return "refused: " + str(error).partition(": ")[0]
    except Exception as error:
        return f"FAILS: {type(error).__name__}: {error}"
    with all_in_float64():
        oracle = outputs(copy.deepcopy(model).double(), ids)
    noisy = noisy_runs(lambda: outputs(model, ids))
    for name, x in got.items():
        by_row = x.ndim > 1 and (oracle[name].size(1), x.size(1)) == (SEQLEN, len(positions[0]))

        def own(whole: Tensor, by_row: bool = by_row) -> Tensor:
            return layout.shard(whole, rank) if by_row else whole

        verdict = check_rounded(name, x, own(oracle[name]), [own(one[name]) for one in noisy])
        if not verdict.ok:
            return f"WRONG: {verdict}"
    return "right"


def of_all_ranks(variant: Variant, default: dict[str, Tensor] | None) -> str | None:
    """The outcome on the rank where it is worst."""
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, outcome(variant, default))
    order = ("WRONG", "FAILS", "refused", "not tried", "right")
    return min(each, key=lambda word: order.index(str(word).split(":")[0]) if word else 9)


def sweep(model_type: str, model_class: str) -> Iterator[tuple[Variant, str]]:
    """Yield the outcome of each variant of a class whose default is not refused."""
    base = Variant(model_type, model_class)
    found = of_all_ranks(base, None)
    yield base, str(found)
    if found != "right":
        return
    default = outputs(base.make("eager"), ids_of())
    for variant in [*variants(model_type, model_class)][1:]:
        word = of_all_ranks(variant, default)
        if word is not None:
            yield variant, word


def classes(chosen: list[str]) -> list[tuple[str, str]]:
    """The model types and classes to try."""
    of_tokens = [each for each in architectures() if each.head not in SENSED]
    found = [(each.model_type, each.model_class) for each in of_tokens]
    types = dict(found).keys()
    for names in HEADS.values():
        for model_type, name in names.items():
            if model_type in types and isinstance(name, str):
                found.append((model_type, name))
    left_out = {name.removeprefix("-") for name in chosen if name.startswith("-")}
    named = set(chosen) - {f"-{name}" for name in left_out}
    return [
        pair
        for pair in dict.fromkeys(found)
        if pair[0] not in left_out and (not named or pair[0] in named)
    ]


def main(path: str, *chosen: str) -> None:
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    with Path(path).open("a") as file:
        if dist.get_rank() == 0 and not file.tell():
            file.write(TITLE)
        for model_type, model_class in classes([*chosen]):
            for variant, word in sweep(model_type, model_class):
                if dist.get_rank() == 0:
                    file.write(f"| {variant} | {word} |\n")
                    file.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
