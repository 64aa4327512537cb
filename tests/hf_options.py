"""Options of configs and heads of Hugging Face models, on a split sequence.

    torchrun --nproc-per-node 2 -m tests.hf_options OUT.md [model_type ...] [-model_type ...]

For each architecture of `tests.hf_architectures`: each boolean of its config, and each choice of
`CHOICES`, one at a time, if it changes the outputs in one process; and each head of `HEADS`. Lines
are written to OUT.md as soon as they are known. All that was tried, also options without an effect,
is printed.

    python -m tests.hf_options merge docs/model_options.md OUT.md

puts the rows of OUT.md into the page.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto

from ring_attn import SequenceLayout, shard_batch
from ring_attn.integrations.transformers import register
from ring_attn.integrations.transformers.models import first_position
from ring_attn.integrations.transformers.stacks import numbers_own_rows
from ring_attn.testing import check_rounded, noisy_runs
from tests.hf_architectures import (
    NUM_CODES,
    SENSED,
    SENSED_NAMES,
    Architecture,
    Changes,
    architectures,
    config_of,
    doubled,
    inputs_of,
    make,
)
from tests.hf_models import VOCAB, all_in_float64

SEQLEN = 46

# Noisy runs of a model, of which there are a thousand.
NUM_NOISY = 8

# Characters of the errors of models that could not be tried.
NUM_SHOWN = 120

TITLE = f"""# Options and heads of Hugging Face models

Made by `tests/hf_options.py` with transformers {transformers.__version__}: tiny random
models on 2 ranks, without `attention_mask`. Each row is one option of a config that changes the
outputs in one process, or a head; other options are the defaults, except those in the same row,
without which the option is not valid. Where the default is refused, options are listed only if they
are not refused with the same error. Architectures of the [table of models](models.md) that are
missing here have not been tried with other options; heads (`...Model`,
`...ForSequenceClassification` and others) that are missing have not been tried. Not all
architectures have been tried with the types "llama3" and "longrope" of RoPE; "dynamic" changes the
outputs only of models whose `max_position_embeddings` is less than the number of rows. Types of
RoPE have not been tried with hybrid models whose two layers have no attention. Classes that have a
row "default" only may not have been tried with other options.

- right: all outputs are those of one process, within the bound of the tests
- refused: an error names the part and the reason
- not valid: transformers refuses the option when the model is made, with its error
- not tried: the tiny model does not run in one process, with transformers' error; "too large" is a
  model whose parts have more than 30 million parameters

| model | option | on a split sequence |
|---|---|---|
"""

# Values of options that are not booleans by default, as real checkpoints have them.
CHOICES: dict[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (True, "all"),
    "classifier_pooling": ("mean", "cls"),
    "position_embedding_type": ("rotary", "absolute", "relative_key"),
    "position_embeddings_type": ("rotary", "relative", "relative_key"),
    "emb_layer_norm_before": (True,),
    "feat_extract_norm": ("layer", "group"),
    "sliding_window": (8,),
    "attention_chunk_size": (8,),
    "attn_logit_softcapping": (5.0,),
    "final_logit_softcapping": (5.0,),
    "per_layer_embedding_ngram": (2,),
    "ngram_size": (2,),
    "index_topk": (4,),
}

# Types of RoPE whose frequencies depend on the positions, or differ from the default ones. Other
# types belong to their models.
ROPE_TYPES = ("linear", "dynamic", "yarn", "llama3", "longrope")
ROPE_OPTIONS = {
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "short_mscale": 1.0,  # PhiMoE's
    "long_mscale": 1.0,
}

# Options without which another one has no effect.
TOGETHER: dict[str, Changes] = {
    "token_dropout": (("mask_token_id", 21),),  # all 21 are in the rows of one of 2 ranks
    "add_fpn": (("out_indices", [1, 2, 3, 4]), ("num_hidden_layers", 4)),
    "asm": (("asm_cutoffs", [20, 50]), ("asm_div_value", 4.0)),
    "multi_query": (("num_kv_heads", 4),),
    "key_query_shared_bottleneck": (("intra_bottleneck_size", 64),),
    "enable_moe_block": (
        ("num_experts", 4),
        ("top_k_experts", 2),
        ("moe_intermediate_size", 96),
    ),
    "use_sliding_window": (("sliding_window", 8), ("max_window_layers", 0)),
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
    """A model class with changes of its config; `head` is one of an `Architecture`."""

    model_type: str
    model_class: str
    changes: Changes = ()
    head: str = "causal"

    def __str__(self) -> str:
        changes = ", ".join(f"{name}={_shown(value)}" for name, value in self.changes)
        return f"{self.model_class} | {changes or 'default'}"

    @property
    def architecture(self) -> Architecture:
        return Architecture(self.head, self.model_type, self.model_class)

    def make(self, implementation: str) -> Any:
        """The model, with the same random weights each time."""
        return make(self.architecture, implementation, self.changes)


def _shown(value: Any) -> str:
    """A value of an option; of RoPE's parameters, their type."""
    while isinstance(value, dict):
        value = value.get("rope_type") or next(iter(value.values()))
    return repr(value)


def variants(base: Variant) -> Iterator[Variant]:
    """The default, and each option that may change the forward."""
    yield base
    for name, value in _changed_options(config_of(base.architecture)):
        path, dot, option = name.rpartition(".")
        together = [(path + dot + other, x) for other, x in TOGETHER.get(option, ())]
        yield base._replace(changes=((name, value), *together))


def _changed_options(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Options of a config and of configs in it, each with another value."""
    for name, value in vars(config).items():
        if name.startswith("_") or name in NO_OPTIONS:
            continue
        if isinstance(value, PretrainedConfig):
            yield from _changed_options(value, f"{path}{name}.")
        elif isinstance(value, bool):
            yield path + name, not value
        elif name == "rope_parameters" and value:
            for rope_type in ROPE_TYPES:
                changed = _with_rope_type(config, value, rope_type)
                if changed != value:
                    yield path + name, changed
        else:
            for choice in CHOICES.get(name, ()):
                if choice != value:
                    yield path + name, choice


def _with_rope_type(config: Any, parameters: dict[str, Any], rope_type: str) -> dict[str, Any]:
    """RoPE's parameters with another type; they may be given for each type of layers."""
    if any(isinstance(value, dict) for value in parameters.values()):
        return {
            name: _with_rope_type(config, value, rope_type) if isinstance(value, dict) else value
            for name, value in parameters.items()
        }
    if parameters.get("rope_type", "default") not in ("default", *ROPE_TYPES):
        return parameters
    more: dict[str, Any] = dict(ROPE_OPTIONS)
    if rope_type == "longrope":
        num = _num_frequencies(config, parameters)
        if num is None:
            return parameters
        more |= {"short_factor": [1.0] * num, "long_factor": [2.0 + i for i in range(num)]}
    return {**parameters, **more, "rope_type": rope_type}


def _num_frequencies(config: Any, parameters: dict[str, Any]) -> int | None:
    """The number of RoPE's frequencies, or None if the config has other names for its sizes."""
    sizes = vars(config)
    head_dim = sizes.get("qk_rope_head_dim") or sizes.get("head_dim")
    if head_dim is None:
        width, num_heads = sizes.get("hidden_size"), sizes.get("num_attention_heads")
        if not isinstance(width, int) or not isinstance(num_heads, int):
            return None
        head_dim = width // num_heads
    share = parameters.get("partial_rotary_factor", sizes.get("partial_rotary_factor"))
    return int(head_dim * (share or 1.0)) // 2


def ids_of() -> Tensor:
    """Random ids, some of which are those of special tokens, such as masks."""
    return torch.randint(2, VOCAB, (1, SEQLEN), generator=torch.Generator().manual_seed(1))


def whole_inputs(variant: Variant, model: Any) -> dict[str, Tensor]:
    """Inputs of the whole sequence."""
    inputs = inputs_of(variant.architecture, model)
    if gets_whole_inputs(model, inputs):
        return inputs
    if variant.model_class in NUM_CODES:
        return {"input_ids": inputs["input_ids"][:, :SEQLEN]}
    return {"input_ids": ids_of()}


def gets_whole_inputs(model: Any, inputs: dict[str, Tensor]) -> bool:
    """Whether each rank gets all inputs: the model cuts rows itself, or they are no tokens."""
    return numbers_own_rows(model) or any(name in inputs for name in SENSED_NAMES)


def outputs(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """All outputs of floating point, by name."""
    with torch.no_grad():
        found = model(**inputs)
    return {name: x for name, x in found.items() if isinstance(x, Tensor) and x.is_floating_point()}


def equal_outputs(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


def split_outputs(variant: Variant, model: Any, inputs: dict[str, Tensor]) -> Any:
    """The outputs of a split model with the weights of `model`, or what its error says."""
    rank, layout = dist.get_rank(), SequenceLayout.contiguous(SEQLEN, dist.get_world_size())
    try:
        with register(layout="contiguous"):
            split = variant.make("ring_attn")
            split.load_state_dict(model.state_dict())
            if not gets_whole_inputs(model, inputs):
                inputs = shard_batch(inputs, layout, rank)
                inputs["position_ids"] = inputs["position_ids"] + first_position(split)
            return outputs(split, inputs)
    except (NotImplementedError, ValueError) as error:
        return "refused: " + str(error).partition(": ")[0]
    except Exception as error:
        return f"FAILS: {type(error).__name__}: {str(error)[:300]}"


def whole_outputs(model: Any, inputs: dict[str, Tensor]) -> tuple[Any, Any]:
    """The outputs in one process: in float64, and in noisy runs; rank 0 computes them for all."""
    found = [None, None]
    if dist.get_rank() == 0:
        with all_in_float64():
            found[0] = outputs(copy.deepcopy(model).double(), doubled(inputs))
        found[1] = noisy_runs(lambda: outputs(model, inputs), NUM_NOISY)
    dist.broadcast_object_list(found)
    return found[0], found[1]


def verdict_of(
    got: dict[str, Tensor], oracle: dict[str, Tensor], noisy: list[dict[str, Tensor]], by_row: bool
) -> str:
    """Whether the outputs of this rank are right; `by_row` if they may have its rows only."""
    if got.keys() != oracle.keys():
        return f"WRONG: outputs {sorted(got)} instead of {sorted(oracle)}"
    rank, layout = dist.get_rank(), SequenceLayout.contiguous(SEQLEN, dist.get_world_size())
    for name, x in got.items():
        has_rows = by_row and x.ndim > 1 and oracle[name].size(1) == SEQLEN
        own = functools.partial(layout.shard, rank=rank) if has_rows else lambda whole: whole
        expected = own(oracle[name])
        if x.shape != expected.shape:
            return f"WRONG: {name} has shape {tuple(x.shape)}, not {tuple(expected.shape)}"
        verdict = check_rounded(name, x, expected, [own(one[name]) for one in noisy])
        if not verdict.ok:
            return f"WRONG: {verdict}"
    return "right"


def worst_of_ranks(word: str) -> str:
    """The outcome on the rank where it is worst."""
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, word)
    order = ("WRONG", "FAILS", "refused", "not tried", "not valid", "right")
    return str(min(each, key=lambda word: order.index(word.split(":")[0])))


def _is_invalid(error: Exception) -> bool:
    """Whether a config has found that its options do not go together."""
    return type(error).__name__ == "StrictDataclassClassValidationError"


def _reason(error: Exception) -> str:
    """Type and beginning of an error, in one cell of a table."""
    text = " ".join(str(error).replace("|", "/").split())
    text = text.removeprefix("Class validation error for validator ")
    return f"{type(error).__name__}: {text[:NUM_SHOWN]}"


def of_all_ranks(variant: Variant, default: dict[str, Tensor] | None) -> str | None:
    """Return the outcome of a variant, or None if its outputs are the default ones."""
    try:
        model = variant.make("eager")
    except Exception as error:
        if default is not None and type(error).__name__ == "StrictDataclassFieldValidationError":
            return None  # the option has no such value
        is_refused = isinstance(error, (ValueError, NotImplementedError)) or _is_invalid(error)
        if default is not None and is_refused and str(error) != "too large":
            return worst_of_ranks(f"not valid: {_reason(error)}")
        return worst_of_ranks(f"not tried: {_reason(error)}")
    try:
        inputs = whole_inputs(variant, model)
        plain = outputs(model, inputs)
    except Exception as error:
        return worst_of_ranks(f"not tried: {_reason(error)}")
    if default is not None and equal_outputs(plain, default):
        return None
    got = split_outputs(variant, model, inputs)
    word = worst_of_ranks(got if isinstance(got, str) else "right")
    if word != "right":
        return word
    oracle, noisy = whole_outputs(model, inputs)
    return worst_of_ranks(
        verdict_of(got, oracle, noisy, by_row=not gets_whole_inputs(model, inputs))
    )


def sweep(base: Variant) -> Iterator[tuple[Variant, str | None]]:
    """Yield the outcome of each variant of a class of which a tiny model can be made."""
    found = of_all_ranks(base, None)
    yield base, found
    if str(found).startswith("not tried"):
        return
    model = base.make("eager")
    default = outputs(model, whole_inputs(base, model))
    for variant in [*variants(base)][1:]:
        yield variant, of_all_ranks(variant, default)


def classes(chosen: list[str]) -> list[Variant]:
    """The classes to try, with their defaults."""
    found = [Variant(each.model_type, each.model_class, (), each.head) for each in architectures()]
    head_of = {each.model_type: each.head for each in found}
    # Inputs that are no tokens, if one of the heads has them.
    head_of |= {each.model_type: each.head for each in found if each.head in SENSED}
    for names in HEADS.values():
        for model_type, name in names.items():
            if model_type in head_of and isinstance(name, str):
                found.append(Variant(model_type, name, (), head_of[model_type]))
    by_name: dict[str, Variant] = {}
    for each in found:
        by_name.setdefault(each.model_class, each)
    left_out = {name.removeprefix("-") for name in chosen if name.startswith("-")}
    named = set(chosen) - {f"-{name}" for name in left_out}
    return [
        each
        for each in by_name.values()
        if each.model_type not in left_out and (not named or each.model_type in named)
    ]


def merged(page: str, found: str) -> str:
    """The page with the rows of another one, which replace those of the same class and option."""
    rows = {**_rows_of(page), **_rows_of(found)}
    order = {class_name: i for i, class_name in enumerate(sorted({name for name, _ in rows}))}
    lines = [
        f"| {name} | {option} | {word} |"
        for (name, option), word in sorted(rows.items(), key=lambda row: order[row[0][0]])
    ]
    return TITLE + "\n".join(lines) + "\n"


def _rows_of(page: str) -> dict[tuple[str, str], str]:
    """The outcomes of a page by class and option, in the order of the page."""
    cells = [[cell.strip() for cell in line.split("|")] for line in page.splitlines()]
    rows = [each for each in cells if len(each) == 5 and each[1] not in ("model", "---")]
    return {(name, option): word for _, name, option, word, _ in rows}


def main(path: str, *chosen: str) -> None:
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    with Path(path).open("a") as file:
        if dist.get_rank() == 0 and not file.tell():
            file.write(TITLE)
        for base in classes([*chosen]):
            refusal = None
            for variant, word in sweep(base):
                if dist.get_rank() > 0:
                    continue
                print(variant, "|", word or "no effect", flush=True)
                if word is not None and word != refusal:
                    file.write(f"| {variant} | {word} |\n")
                    file.flush()
                if variant == base and str(word).startswith("refused"):
                    refusal = word
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "merge":
        page = Path(sys.argv[2])
        page.write_text(merged(page.read_text(), Path(sys.argv[3]).read_text()))
    else:
        main(*sys.argv[1:])
