"""Continues a long document with a Hugging Face model whose KV cache is split over the ranks.

    torchrun --nproc-per-node 2 examples/long_document_generate.py

Needs the extra `hf`: pip install 'ring-attn[hf]'. The ids of the document are on every rank; of
its keys and values each rank computes and keeps some rows of every chunk, so that the memory of
all ranks together bounds the length. (1) to (3) are all that makes the ring. Afterwards rank 0
reads document and new tokens in one process with torch's attention: if it would choose another
token anywhere, the exit status is 1.
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


def make_model(attention: str) -> Any:
    """A small Llama of random weights, the same wherever it is made."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=1 << 20,
        initializer_range=0.2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
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
            document, past_key_values=cache, max_new_tokens=args.tokens, do_sample=False,
            prefill_chunk_size=args.chunk,  # bounds the memory of activations
        )  # fmt: skip
    if dist.get_rank() != 0:
        return True
    rows = " + ".join(map(str, cache.layout.shard_lens))
    print(f"rows of the cache on each rank: {rows}, of {cache.layout.seqlen}")
    return same_tokens(tokens, args.seqlen)


@torch.no_grad()
def same_tokens(tokens: Tensor, seqlen: int) -> bool:
    """Tells whether one process would choose the same tokens after the first `seqlen`."""
    logits = make_model("sdpa").to(tokens.device)(tokens[:, :-1]).logits
    new = tokens[:, seqlen:]
    ok = torch.equal(new, logits[:, seqlen - 1 :].argmax(-1))
    print(f"generated {bytes(new.flatten().tolist())!r}")
    print(f"{'ok' if ok else 'FAILED'}: one process would{'' if ok else ' not'} choose these")
    return ok


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seqlen", type=int, default=3001, help="tokens of the document")
    parser.add_argument("--chunk", type=int, default=1000, help="tokens that are read at a time")
    parser.add_argument("--tokens", type=int, default=40, help="tokens to generate")
    start(partial(main, parser.parse_args()))
