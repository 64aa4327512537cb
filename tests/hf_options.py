"""Options of configs and heads of Hugging Face models, on a split sequence.

    torchrun --nproc-per-node 2 -m tests.hf_options OUT.txt [model_type ...] [-model_type ...]

For each architecture of `tests.hf_architectures`, and each head of `tests.hf_heads`: each boolean
of its config, and each choice of `CHOICES`, one at a time, if it changes the outputs in one
process. Lines are written to OUT.txt as soon as they are known. All that was tried, also options
without an effect, is printed. With `--defaults`, other options are left out, and so are classes
that have a line in OUT.txt or in tests/hf_outcomes.txt, unless they are named: a sweep that was
stopped goes on.

    python -m tests.hf_options merge OUT.txt

puts the lines of OUT.txt into tests/hf_outcomes.txt, and writes docs/model_options.md.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import PretrainedConfig

from ring_attn import SequenceLayout, shard_batch
from ring_attn.integrations.transformers import register
from ring_attn.integrations.transformers.models import first_position
from ring_attn.testing import check_rounded, noisy_runs
from tests.hf_architectures import MIXED, Architecture, Changes, config_of, doubled, make
from tests.hf_heads import NO_IMAGE, SEQLEN, gets_whole_inputs, heads, inputs_with, with_image
from tests.hf_models import all_in_float64

# Noisy runs of a model, of which there are a thousand.
NUM_NOISY = 8

PAGE = Path(__file__).parents[1] / "docs" / "model_options.md"
OUTCOMES = Path(__file__).with_name("hf_outcomes.txt")
# The option of lines on the default config, and the beginning of those on a model with images.
DEFAULT, WITH = "default", "with "

# Characters of the errors of models that could not be tried.
NUM_SHOWN = 120

TITLE = """# Options and heads of Hugging Face models

Made by `tests/hf_options.py` with transformers {version}: tiny random
models on 2 ranks, without `attention_mask`.

- right: all outputs are those of one process, within the bound of the tests
- refused: an error names the part and the reason
- not valid: transformers refuses the option when the model is made, with its error
- not tried: the tiny model does not run in one process, with transformers' error; "too large" is a
  model whose parts have more than 30 million parameters

## Heads

Each row has the heads of one architecture (`AutoModelFor...` and base models), with the options of
the default config. "With an image" is a model of texts and images that got `pixel_values` of a
whole image on each rank; otherwise such models got token ids if they run without images, and
models of images or sounds got the whole inputs.
{counts}

| architecture | right | refused | not tried |
|---|---|---|---|
"""
OPTIONS_TITLE = """
## Options

Each row is one option of a config that changes the outputs in one process; other options are the
defaults, except those in the same row, without which the option is not valid. Where the default is
refused, options are listed only if they are not refused with the same error. Architectures that are
missing here have not been tried with other options. Not all architectures have been tried with the
types "llama3" and "longrope" of RoPE; "dynamic" changes the outputs only of models whose
`max_position_embeddings` is less than the number of rows. Types of RoPE have not been tried with
hybrid models whose two layers have no attention.

| model | option | on a split sequence |
|---|---|---|
"""
# The ends of names of classes: heads and base models.
ENDS = r"(For[A-Z]|LMHead|Model|Backbone|EncoderModel|DecoderModel|TextModel|VisionModel)"
NAME = re.compile(rf"(.+?)({ENDS}.*)")

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

# Inputs of a variant, where the first inputs with which the model runs are not meant.
IMAGE = "an image"


class Variant(NamedTuple):
    """A model class with changes of its config; `head` is one of an `Architecture`."""

    model_type: str
    model_class: str
    changes: Changes = ()
    head: str = "causal"
    given: str = ""

    def __str__(self) -> str:
        changes = ", ".join(f"{name}={_shown(value)}" for name, value in self.changes)
        option = f"{WITH}{self.given}" if self.given else changes or DEFAULT
        return f"{self.model_class} | {option}"

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


def whole_inputs(variant: Variant, model: Any) -> dict[str, Tensor]:
    """Inputs of the whole sequence."""
    if variant.given == IMAGE:
        return with_image(model)
    return inputs_with(variant.architecture, model)


def outputs(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """All outputs of floating point, by name."""
    with torch.no_grad():
        found = model(**inputs)
    items = found.items() if hasattr(found, "items") else enumerate(found)
    return {name: x for key, value in items for name, x in _tensors(str(key), value)}


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of floating point of an output, which may be nested, by name."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, list | tuple):
        for i, x in enumerate(value):
            yield from _tensors(f"{name}[{i}]", x)
    elif isinstance(value, dict):
        for key, x in value.items():
            yield from _tensors(f"{name}.{key}", x)


def equal_outputs(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


def split_outputs(variant: Variant, model: Any, inputs: dict[str, Tensor]) -> Any:
    """The outputs of a split model with the weights of `model`, or what its error says."""
    rank, layout = dist.get_rank(), SequenceLayout.contiguous(SEQLEN, dist.get_world_size())
    group = dist.new_group()  # an error ends the group
    try:
        with register(group, layout="contiguous"):
            split = variant.make("ring_attn")
            split.load_state_dict(model.state_dict())
            if not gets_whole_inputs(model, inputs):
                inputs = shard_batch(inputs, layout, rank, dims=_dims(inputs))
                inputs["position_ids"] = inputs["position_ids"] + first_position(split)
            return outputs(split, inputs)
    except (NotImplementedError, ValueError) as error:
        return "refused: " + str(error).partition(": ")[0]
    except Exception as error:
        text = " ".join(str(error).replace("|", "/").split())
        return f"FAILS: {type(error).__name__}: {text[:300]}"
    finally:
        dist.destroy_process_group(group)


def _dims(inputs: dict[str, Tensor]) -> dict[str, int | None]:
    """The dims of the rows of inputs for which `shard_batch` has another rule."""
    names = ("visual_feats", "visual_pos", "qformer_input_ids")
    dims: dict[str, int | None] = dict.fromkeys(names)
    if inputs["input_ids"].ndim == 3 and inputs["input_ids"].size(1) != SEQLEN:
        dims["input_ids"] = 2  # (batch, choices, rows)
    return {name: dim for name, dim in dims.items() if name in inputs}


def whole_outputs(model: Any, inputs: dict[str, Tensor]) -> tuple[Any, Any]:
    """The outputs in one process: in float64, and in noisy runs; rank 0 computes them for all.

    Instead of the noisy runs, return an error as a text if a model has computed sizes in floating
    point, which random roundings change.
    """
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        with all_in_float64():
            found[0] = outputs(copy.deepcopy(model).double(), doubled(inputs))
        try:
            found[1] = noisy_runs(lambda: outputs(model, inputs), NUM_NOISY)
        except RuntimeError as error:
            found[1] = f"it has no runs with random roundings: {_reason(error)}"
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
    if not plain:
        return worst_of_ranks("not tried: the model has no outputs of floating point")
    if default is not None and equal_outputs(plain, default):
        return None
    got = split_outputs(variant, model, inputs)
    word = worst_of_ranks(got if isinstance(got, str) else "right")
    if word != "right":
        return word
    oracle, noisy = whole_outputs(model, inputs)
    if isinstance(noisy, str):
        return f"not tried: {noisy}"
    return worst_of_ranks(
        verdict_of(got, oracle, noisy, by_row=not gets_whole_inputs(model, inputs))
    )


def sweep(base: Variant, only_defaults: bool) -> Iterator[tuple[Variant, str | None]]:
    """Yield the outcome of each variant of a class of which a tiny model can be made."""
    found = of_all_ranks(base, None)
    yield base, found
    if base.head == MIXED:
        variant = base._replace(given=IMAGE)
        found_with_image = of_all_ranks(variant, None)
        is_known = NO_IMAGE not in str(found_with_image)
        yield variant, found_with_image if is_known else None
    if str(found).startswith("not tried") or only_defaults:
        return
    model = base.make("eager")
    default = outputs(model, whole_inputs(base, model))
    for variant in [*variants(base)][1:]:
        yield variant, of_all_ranks(variant, default)


def classes(chosen: list[str]) -> list[Variant]:
    """The classes to try, with their defaults."""
    found = [Variant(each.model_type, each.model_class, (), each.head) for each in heads()]
    left_out = {name.removeprefix("-") for name in chosen if name.startswith("-")}
    named = set(chosen) - {f"-{name}" for name in left_out}
    return [
        each
        for each in found
        if left_out.isdisjoint((each.model_type, each.model_class))
        and (not named or not named.isdisjoint((each.model_type, each.model_class)))
    ]


Rows = dict[tuple[str, str], str]


def rows_of(text: str) -> Rows:
    """The outcomes by class and option, in the order of their lines."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    return {(name, option): word for _, name, option, word, _ in cells}


def merged(known: Rows, found: Rows) -> Rows:
    """All rows, those of a class one after another; found ones replace those of the same option."""
    rows = {**known, **found}
    order = {class_name: i for i, class_name in enumerate(sorted({name for name, _ in rows}))}
    return dict(sorted(rows.items(), key=lambda row: order[row[0][0]]))


def lines_of(rows: Rows) -> str:
    return "".join(f"| {name} | {option} | {word} |\n" for (name, option), word in rows.items())


def page_of(rows: Rows) -> str:
    """The page of the documentation: heads by architecture, and options."""
    of_heads = {key: word for key, word in rows.items() if _is_of_head(key[1])}
    options = {key: word for key, word in rows.items() if not _is_of_head(key[1])}
    defaults = [word.split(":")[0] for (_, option), word in of_heads.items() if option == DEFAULT]
    counts = (
        f"Of {len(defaults)} classes, {defaults.count('right')} are right, "
        f"{defaults.count('refused')} are refused, and {defaults.count('not tried')} were not "
        "tried."
    )
    title = TITLE.format(version=transformers.__version__, counts=counts)
    return title + "".join(_lines_of_heads(of_heads)) + OPTIONS_TITLE + lines_of(options)


def _is_of_head(option: str) -> bool:
    return option == DEFAULT or option.startswith(WITH)


def _lines_of_heads(rows: Rows) -> Iterator[str]:
    """Yield a line for each architecture: its heads by their outcome."""
    found: dict[str, dict[str, dict[str, list[str]]]] = {}
    for (name, option), word in rows.items():
        split = NAME.fullmatch(name)
        stem, head = (split[1], split[2]) if split else (name, name)
        outcome, _, reason = word.partition(": ")
        reason = reason.replace(name, "it")
        shown = f"`{head}`" if option == DEFAULT else f"`{head}` {option}"
        found.setdefault(stem, {}).setdefault(outcome, {}).setdefault(reason, []).append(shown)
    for stem, outcomes in sorted(found.items()):
        cells = [
            "; ".join(
                ", ".join(shown) + (f": {reason}" if reason else "")
                for reason, shown in outcomes.get(outcome, {}).items()
            )
            for outcome in ("right", "refused", "not tried")
        ]
        yield f"| {stem} | {' | '.join(cells)} |\n"


def main(path: str, *chosen: str) -> None:
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    only_defaults = "--defaults" in chosen
    with Path(path).open("a+") as file:
        file.seek(0)
        known = {name for name, _ in rows_of(file.read() + OUTCOMES.read_text())}
        dist.barrier()  # before rank 0 writes more
        for base in classes([name for name in chosen if name != "--defaults"]):
            if only_defaults and base.model_class in known - {*chosen}:
                continue
            if dist.get_rank() == 0:
                print("begin", base.model_class, flush=True)
            refusal = None
            for variant, word in sweep(base, only_defaults):
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
        all_rows = rows_of(OUTCOMES.read_text())
        for path in sys.argv[2:]:
            all_rows = merged(all_rows, rows_of(Path(path).read_text()))
        OUTCOMES.write_text(lines_of(all_rows))
        PAGE.write_text(page_of(all_rows))
    else:
        main(*sys.argv[1:])
