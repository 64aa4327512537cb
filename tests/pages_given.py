"""What pages of docs/ take as given, such as a reader's model: small ones, for the tests."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor


def path() -> str:
    """A folder with a tiny Llama and its tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tempfile.mkdtemp()
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        vocab_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the same weights on every rank
        LlamaForCausalLM(config).save_pretrained(folder)
    words = {f"w{i}": i for i in range(64)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        pad_token="w0",
        eos_token="w1",
    ).save_pretrained(folder)
    return folder


def data() -> list[dict[str, list[int]]]:
    """Texts of different lengths, as token ids with labels."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(64, (n,), generator=generator).tolist() for n in (41, 17, 30, 25) * 4]
    return [{"input_ids": x, "labels": x} for x in ids]


def out() -> str:
    """A folder for checkpoints."""
    return tempfile.mkdtemp()


def batch() -> dict[str, Tensor]:
    """One sequence, the same on every rank: 20 tokens of a prompt without labels, and 81 with."""
    ids = torch.randint(64, (1, 101), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :20] = -100
    return {"input_ids": ids, "labels": labels}


def model() -> Any:
    """A small transformer whose layers have an attribute `attention`."""
    from common import Transformer

    with torch.random.fork_rng():
        torch.manual_seed(0)  # the same weights on every rank
        return Transformer(num_layers=2)
