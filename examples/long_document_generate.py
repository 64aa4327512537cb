"""Continue a long document with a Hugging Face model whose KV cache is sharded over the ranks.

    torchrun --nproc-per-node 2 examples/long_document_generate.py

This needs the extra `hf`: pip install 'ring-attn[hf]'. Every rank has the ids of the document. Each
rank computes and keeps the keys and values of some rows of every chunk, so the memory of all ranks
together limits the length. Only (1) to (3) are there for the ring. Afterwards rank 0 computes the
logits of document and new tokens in one process with torch's attention. The exit status is 1 if
they give a different token anywhere.
"""

import argparse
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from common import batches, start
from ring_attn.integrations.transformers import register


# A model of transformers, which is not typed here.
def make_model(attention: str) -> Any:
    """Return a small Llama with random weights, the same in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1 << 20,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    # (2) The name that `register` has given to the ring, also for from_pretrained(name, ...).
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def main(args: argparse.Namespace, device: torch.device) -> bool:
    document = next(batches(args.seqlen, device))["input_ids"]
    # (1) All ranks share the document; `group=mesh["cp"]` would make several rings.
    with register(layout="zigzag") as ring:
        model = make_model("ring_attn").to(device)
        # (3) New tokens go to the rank with the fewest rows, 64 at a time.
        cache = ring.cache(model, block=64)
        tokens = model.generate(
            document,
            past_key_values=cache,
            max_new_tokens=args.tokens,
            do_sample=False,
            prefill_chunk_size=args.chunk,  # limits the memory of activations
        )
    if dist.get_rank() != 0:
        return True
    rows = " + ".join(str(length) for length in cache.layout.shard_lens)
    print(f"rows of the cache on each rank: {rows}, of {cache.layout.seqlen}")
    return same_tokens(tokens, args.seqlen)


@torch.no_grad()
def same_tokens(tokens: Tensor, seqlen: int) -> bool:
    """Return whether one process chooses the same tokens after the first `seqlen` tokens."""
    model = make_model("sdpa").to(tokens.device)
    logits = model(tokens[:, :-1]).logits
    new = tokens[:, seqlen:]
    expected = logits[:, seqlen - 1 :].argmax(-1)
    ok = torch.equal(new, expected)
    print(f"generated {bytes(new.flatten().tolist())!r}")
    print("ok: one process chooses the same" if ok else "FAILED: one process chooses others")
    return ok


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seqlen", type=int, default=3001, help="tokens of the document")
    parser.add_argument("--chunk", type=int, default=1000, help="prompt tokens per forward")
    parser.add_argument("--tokens", type=int, default=40, help="tokens to generate")
    start(partial(main, parser.parse_args()))
