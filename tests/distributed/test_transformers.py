"""Hugging Face models on split rows: training, forwards with a cache, embeddings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
)

from ring_attn import SequenceLayout, shard_batch, unshard
from ring_attn.integrations.transformers import register
from ring_attn.integrations.transformers.cache import NOT_WITH_CACHE
from ring_attn.testing import noisy_runs
from tests.bounds import assert_close, named
from tests.cold import assert_compiles
from tests.distributed.pool import Pools, on_ranks
from tests.hf_models import (
    CONFIGS,
    GQA,
    HYBRIDS,
    IMAGE,
    VOCAB,
    all_in_float64,
    make_batch,
    make_model,
    yardstick,
)
from tests.refusals import refused

SEQLEN, NUM_PROMPT = 83, 37
Step = tuple[Tensor, dict[str, Tensor]]


def gradients(model: Any, loss: Tensor) -> Step:
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), found


DOCUMENTS = (31, 40, 71)


class How(NamedTuple):
    """A training step of a family on split rows.

    Attributes:
        padded: there is padding at the end, or at the beginning ("left").
        computed_again: activation checkpointing runs the ring again in the backward; the layout
            is sent with the call, and differs from the registered layout.
        cuts: a single row of documents with these ends.
        restarts: positions start at 0 in each document.
    """

    family: str
    kind: str = "zigzag"
    world_size: int = 2
    strategy: str = "ring"
    seqlen: int = SEQLEN
    padded: bool | str = False
    computed_again: bool = False
    cuts: tuple[int, ...] = ()
    restarts: bool = False
    causal: bool = True
    autocast: bool = False

    def batch(self) -> dict[str, Tensor]:
        batch = make_batch(self.seqlen, self.family, self.padded)
        return {name: x[:1] for name, x in batch.items()} if self.cuts else batch

    @property
    def changes(self) -> dict[str, Any]:
        return {} if self.causal else {"is_causal": False}


def whole_step(how: How) -> tuple[Step, list[Step]]:
    """Loss and gradients of one process, in float64 and in noisy runs; cached."""
    return _whole_step(how._replace(kind="", world_size=0, strategy="", computed_again=False))


@lru_cache
def _whole_step(how: How) -> tuple[Step, list[Step]]:
    def step(model: Any, batch: dict[str, Tensor]) -> Step:
        if not how.cuts:
            return gradients(model, model(**batch).loss)
        parts = batch["input_ids"].tensor_split(how.cuts, dim=1)
        logits = torch.cat([model(part).logits for part in parts], 1)
        return gradients(model, model.loss_function(logits, batch["labels"], VOCAB))

    model, batch = yardstick(how.family, **how.changes), how.batch()
    with autocast(how):
        noisy = noisy_runs(lambda: step(copy.deepcopy(model), batch))
    if "pixel_values" in batch:
        batch["pixel_values"] = batch["pixel_values"].double()
    with all_in_float64():
        return step(model.double(), batch), noisy


def autocast(how: How) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=how.autocast)


def sharded_step(how: How) -> Step:
    """Loss and gradients of this rank's rows, summed over the ranks."""
    rank, layout = dist.get_rank(), SequenceLayout.from_name(how.kind, how.seqlen, how.world_size)
    batch, documents = how.batch(), {}
    if how.cuts:
        cuts = torch.tensor([0, *how.cuts, how.seqlen], dtype=torch.int32)
        documents = {"cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts}
        documents |= {"max_length_q": 31, "max_length_k": 31}
    if how.restarts:
        lens = cuts.diff().tolist()
        batch["position_ids"] = torch.cat([torch.arange(n) for n in lens])[None]
    kind = "contiguous" if how.computed_again else how.kind
    with register(layout=kind, strategy=how.strategy), autocast(how):
        model = make_model(how.family, "ring_attn", **how.changes)
        if how.computed_again:
            model.train().gradient_checkpointing_enable()
        types = batch.pop("token_type_ids", None)
        part: dict[str, Any] = shard_batch(with_images(model, batch), layout, rank) | documents
        if types is not None:
            part["token_type_ids"] = types
        if how.seqlen % how.world_size:  # otherwise the name is enough
            part["sequence_layout"] = layout
        if how.family == "bert":  # predicts the token; its head divides by this rank's labels
            del part["shift_labels"]
            labels, count = layout.shard(batch["labels"], rank), (batch["labels"] != -100).sum()
            logits = model(**part).logits
            loss = cross_entropy(logits.transpose(1, 2), labels, reduction="sum") / count
        else:
            count = int((batch["labels"][:, 1:] != -100).sum())
            out = model(**part, labels=part["shift_labels"], num_items_in_batch=count)
            assert out.logits.dtype == (torch.bfloat16 if how.autocast else torch.float32)
            loss = out.loss
        found = gradients(model, loss)
        for x in (found[0], *found[1].values()):
            dist.all_reduce(x)
        return found


def with_images(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch; one with images gets embeddings, from which a rank's rows can be cut."""
    if "pixel_values" not in batch:
        return batch
    features = model.get_image_features(batch["pixel_values"]).pooler_output
    embeds, ids = model.get_input_embeddings()(batch["input_ids"]), batch["input_ids"]
    embeds = embeds.masked_scatter((ids == IMAGE)[..., None], features)
    return {"inputs_embeds": embeds, "labels": batch["labels"]}


@pytest.mark.parametrize(
    "how",
    [
        *(How(family) for family in CONFIGS),
        *(How(family, padded=True) for family in ("qwen2", "bert")),
        How("qwen2", padded="left"),
        How("llama4", "contiguous", padded="left"),
        How("llama4", "striped", 3, "ulysses"),
        How("gemma3_images", "contiguous", 3, "all_gather"),
        How("llama4", "striped", 3, "all_gather", padded=True),
        How("qwen3", "contiguous", strategy="ulysses"),
        How("qwen3", "striped", strategy="all_gather", seqlen=84),
        How("llama", computed_again=True),
        How("llama", causal=False),
        How("llama", autocast=True),
        How("qwen2", cuts=DOCUMENTS, restarts=True),
        How("qwen2", "contiguous", cuts=DOCUMENTS),
        How("llama4", cuts=DOCUMENTS),
        How("llama4", "contiguous", cuts=DOCUMENTS, restarts=True),
    ],
    ids=lambda how: "-".join(map(str, how)),
)
@pytest.mark.sweep(2)
def test_a_training_step(ranks: Pools, how: How) -> None:
    assert_same_step(ranks, how)


def assert_same_step(ranks: Pools, how: How) -> None:
    (loss, gradients), noisy = whole_step(how)
    losses, noisy_gradients = zip(*noisy, strict=True)
    for got_loss, got in ranks(how.world_size).run(sharded_step, how):
        assert gradients.keys() == got.keys()
        assert_close("loss", got_loss, loss, losses)
        for name, gradient in got.items():
            assert_close(name, gradient, gradients[name], named(noisy_gradients, name))


FAST = ("lfm2",)
MORE = {"qwen3_next": {"computed_again": True}, "lfm2": {"kind": "striped", "world_size": 3}}


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family in FAST else pytest.mark.slow) for family in HYBRIDS],
)
@pytest.mark.gloo
def test_hybrid_models(ranks: Pools, family: str) -> None:
    more = How(family, padded=True), How(family, "contiguous", cuts=DOCUMENTS, restarts=True)
    for how in (
        *(() if family in FAST else more),
        How(family),
        How(family, "contiguous", 3),
        How(family, world_size=3, cuts=DOCUMENTS, restarts=True),
        How(family, "contiguous", padded=True),
        How(family, **MORE.get(family, {})),
    ):
        assert_same_step(ranks, how)


def both(model: Any, call: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
    """Results of the call for the model in float64, and in noisy runs."""
    with torch.no_grad():
        noisy = noisy_runs(lambda: call(model))
        with all_in_float64():
            return call(model.double()), noisy


def make_prompt() -> Tensor:
    return make_batch(SEQLEN)["input_ids"][:, :NUM_PROMPT]


def own_loop(rows: tuple[int, ...], embeddings: bool) -> Tensor:
    """Logits of all rows from a hand-written loop of forwards with these numbers of new rows."""
    with register(layout="contiguous") as ring, torch.no_grad():
        model = make_model("qwen3", "ring_attn")
        cache, found = ring.cache(model, block=3), []
        for part in make_prompt()[:, : sum(rows)].split(rows, 1):
            given = model.get_input_embeddings()(part) if embeddings else part
            options = {"inputs_embeds" if embeddings else "input_ids": given}
            found.append(model(**options, past_key_values=cache).logits)
        assert sum(cache.layout.shard_lens) == cache.get_seq_length() == sum(rows)
    return torch.cat(found, 1)


@pytest.mark.parametrize("embeddings", [False, True], ids=["ids", "embeddings"])
@pytest.mark.gloo
def test_forwards_of_any_length_give_all_logits(ranks: Pools, embeddings: bool) -> None:
    """Forwards of up to 3 rows, which every rank computes, and of 7 and 20, which ranks split."""
    rows = (3, 7, 1, 1, 20, 2)
    ids = make_prompt()[:, : sum(rows)]
    oracle, noisy = both(yardstick("qwen3"), lambda model: model(ids).logits)
    for got in ranks(2).run(own_loop, rows, embeddings):
        assert_close("logits", got, oracle, noisy)


@on_ranks(2)
def test_one_graph_for_several_lengths() -> None:
    """A model compiled whole has the bits of eager."""
    with register(layout="contiguous"), torch.no_grad():
        model = make_model("qwen2", "ring_attn")
        calls = []
        for seqlen in (83, 96, 101):
            ids, layout = make_batch(seqlen)["input_ids"], SequenceLayout.zigzag(seqlen, 2)
            part = shard_batch({"input_ids": ids}, layout, dist.get_rank())
            calls.append((part, SequenceLayout.zigzag(seqlen, 2)))  # new, without cached values

        def logits(part: dict[str, Tensor], layout: SequenceLayout) -> Tensor:
            return model(**part, sequence_layout=layout, use_cache=False).logits

        assert_compiles(logits, calls, fullgraph=True, dynamic=True)


@pytest.mark.gloo
@on_ranks(2)
def test_several_positions_for_each_token() -> None:
    """Qwen2.5-VL: text, an image of 4 x 5 tokens, text. Positions are whole, then sharded."""
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    start, height, width, seqlen = 7, 4, 5, 41
    grid = torch.stack(
        [
            torch.zeros(height, width),
            torch.arange(height)[:, None].expand(-1, width),
            torch.arange(width).expand(height, -1),
        ]
    ).flatten(1)  # (3, tokens of the image)
    after = torch.arange(seqlen - start - height * width) + start + max(height, width)
    text = [torch.arange(start).expand(3, -1), after.expand(3, -1)]
    positions = torch.cat([text[0], grid + start, text[1]], 1).long()[:, None]  # (3, 1, seqlen)
    ids = torch.randint(VOCAB, (1, seqlen), generator=torch.Generator().manual_seed(0))
    layout, rank = SequenceLayout.zigzag(seqlen, 2), dist.get_rank()
    part = shard_batch({"input_ids": ids, "position_ids": positions}, layout, rank)

    def model_with(implementation: str) -> Any:
        torch.manual_seed(0)
        config = Qwen2_5_VLTextConfig(**GQA, rope_parameters=rope)
        made: Any = Qwen2_5_VLTextModel._from_config(config, attn_implementation=implementation)
        return made.eval()

    def whole(model: Any) -> Tensor:
        return model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state

    with torch.no_grad(), register():
        plain, model = model_with("eager"), model_with("ring_attn")
        options = {"sequence_layout": layout, "use_cache": False}
        out = model(**part, **options).last_hidden_state
        noisy = noisy_runs(lambda: whole(plain))
        with all_in_float64():
            oracle = whole(plain.double())
        assert_close("hidden states", unshard(out, layout), oracle, noisy)
        local = {**part, "position_ids": positions[..., : part["input_ids"].size(1)]}
        with refused(ValueError, f"position_ids of rank {rank} cannot be|get_rope_index"):
            # Rank 0 has the first row: its positions can only be too large.
            model(**{**local, "position_ids": local["position_ids"] + 3 * (rank == 0)}, **options)


# -- refusals on every rank


def run_wrong(case: str) -> None:
    """A call that must be refused on this rank; more of them: integration/test_transformers.py."""
    layout = SequenceLayout.zigzag(SEQLEN, dist.get_world_size())
    with register(layout="zigzag") as ring:
        model = make_model("llama", "ring_attn")
        part = shard_batch({"input_ids": make_batch(SEQLEN)["input_ids"]}, layout, dist.get_rank())
        options: dict[str, Any] = {**part, "sequence_layout": layout}
        rows = part["input_ids"].size(1)
        mask = torch.ones(2, rows, dtype=torch.int64)

        def prompt(of: Any = model, **more: Any) -> dict[str, Any]:
            return {"input_ids": make_prompt(), "past_key_values": ring.cache(of), **more}

        if case in ("cut types", "cached types"):
            model, types = make_model("gemma3_images", "ring_attn"), torch.ones_like(mask)
            options["token_type_ids"] = types
            if case == "cached types":
                short = {"input_ids": make_prompt()[:, :3], "token_type_ids": types[:, :3]}
                options = short | {"past_key_values": ring.cache(model)}
        elif case in ("padded documents", "other documents"):
            cuts = torch.tensor([0, 40, SEQLEN], dtype=torch.int32)
            options |= {"cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts}
            if case == "padded documents":
                options["attention_mask"] = make_batch(SEQLEN, padded=True)["attention_mask"]
            else:
                model = make_model("llama4", "ring_attn")
                options["cu_seq_lens_k"] = torch.tensor([0, 41, SEQLEN], dtype=torch.int32)
        elif case == "positions":
            del options["position_ids"]
        elif case == "other layout":
            options["sequence_layout"] = SequenceLayout.contiguous(SEQLEN, dist.get_world_size())
        elif case == "plain cache":
            options["past_key_values"] = model(**options, use_cache=True).past_key_values
        elif case == "documents":
            lens = torch.cat([torch.arange(40), torch.arange(SEQLEN - 40)])[None]
            options["position_ids"] = layout.shard(lens, dist.get_rank())
        elif case == "cache and layout":
            options["past_key_values"] = ring.cache(model)
        elif case == "padded prompts":
            whole = torch.ones_like(make_prompt())
            whole[0, :2] = 0
            cache = ring.cache(model)
            model.generate(
                make_prompt(), attention_mask=whole, past_key_values=cache, max_new_tokens=2
            )
        elif case == "assisted":
            cache = ring.cache(model)
            model.generate(make_prompt()[:1], past_key_values=cache, prompt_lookup_num_tokens=2)
        elif case == "failed before":
            options = prompt()
            with pytest.raises(NotImplementedError):
                model(**options, tilt=0.5)
        elif case in NOT_WITH_CACHE:
            options = prompt(**{case: make_prompt() if case == "labels" else True})
        elif case == "token types":
            options = prompt(token_type_ids=torch.zeros(2, NUM_PROMPT))
        elif case == "changed in place":
            model(**options)
            options["position_ids"] += 1
        elif case == "cache of another":
            options = prompt(make_model("llama", "ring_attn"))
        model(**options)


REFUSALS = {
    "cut types": (ValueError, "must have the shape of the whole sequence, (2, 83), got (2, 4"),
    "cached types": (NotImplementedError, "images are not supported together with a sharded cache"),
    "padded documents": (ValueError, "cu_seq_lens_q, which marks the ends of documents"),
    "other documents": (ValueError, "cu_seq_lens_q and cu_seq_lens_k must be equal"),
    "positions": (ValueError, "position_ids must be passed to LlamaForCausalLM"),
    "other layout": (ValueError, "position_ids of rank "),
    "documents": (ValueError, "pass cu_seq_lens_q and cu_seq_lens_k"),
    "plain cache": (NotImplementedError, "pass past_key_values=ring.cache(model)"),
    "cache and layout": (ValueError, "sequence_layout must be left out"),
    "padded prompts": (NotImplementedError, "the prompts of a batch must have one length"),
    "assisted": (NotImplementedError, "cannot be cropped: assisted generation is not supported"),
    "failed before": (RuntimeError, "a forward with this cache has failed"),
    **{name: (NotImplementedError, f"{name} with a KV cache") for name in NOT_WITH_CACHE},
    "token types": (NotImplementedError, "token_type_ids of shape (2, 37) seems to have"),
    "changed in place": (ValueError, "must be the positions of its rows, ["),
    "cache of another": (RuntimeError, "this cache belongs to another model"),
}


@on_ranks(2)
def test_what_is_not_honoured_is_refused() -> None:
    for case, (error, text) in REFUSALS.items():
        with refused(error, text):
            run_wrong(case)


@on_ranks(2)
def test_a_rank_alone_with_a_part_of_the_padding_is_named() -> None:
    rank, layout = dist.get_rank(), SequenceLayout.contiguous(SEQLEN, 2)
    mask = torch.ones(2, SEQLEN, dtype=torch.int64)
    mask[0, -2:] = 0
    whole = "of the whole sequence, (2, 83), got (2, 41): pass the whole tensors on every rank, as "
    error, reported = (
        RuntimeError,
        "rank 1 refused the call: ValueError: attention_mask and token_type",
    )
    if rank == 1:
        error, reported = ValueError, f"{whole}ring_attn.shard_batch does with attention_mask"
    with register(dist.new_group()):
        model = make_model("llama", "ring_attn")
        part = shard_batch({"input_ids": make_batch(SEQLEN)["input_ids"]}, layout, rank)
        with refused(error, reported):
            model(**part, attention_mask=layout.shard(mask, rank), sequence_layout=layout)
