"""Hugging Face's Trainer on sharded sequences: train a small Llama over bytes, and generate.

    torchrun --nproc-per-node 2 examples/huggingface_trainer.py

This needs the extra `trainer`: pip install 'ring-attn[trainer]'. Only (1) to (3) are there for the
ring. Afterwards rank 0 computes the evaluation loss in one process with torch's attention. The exit
status is 1 if the two losses differ by more than float32 can round. To use it, replace the small
model by `from_pretrained(name, ...)`, and the bytes by a dataset.
"""

import argparse
import tempfile
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from common import batches, start
from ring_attn.integrations.trainer import split_sequence
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
    )
    # (2) The name that `register` has given to the ring.
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def texts(count: int, seqlen: int) -> list[dict[str, torch.Tensor]]:
    """Return samples of a dataset."""
    data = islice(batches(seqlen, torch.device("cpu")), count)
    return [{name: x[0] for name, x in batch.items()} for batch in data]


def main(args: argparse.Namespace, device: torch.device) -> bool:
    # (1) All ranks share each sequence; `group=mesh["cp"]` would make several rings.
    with register(layout="zigzag") as ring, tempfile.TemporaryDirectory() as folder:
        model = make_model("ring_attn")
        # (3) The Trainer's arguments do not change; `per_device_*` counts the sequences of a ring.
        settings = TrainingArguments(
            folder,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            max_steps=args.steps,
            learning_rate=1e-3,
            logging_steps=max(1, args.steps // 10),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=device.type == "cpu",
            ddp_find_unused_parameters=False,
        )
        data = texts(args.steps + 4, args.seqlen)
        trainer = split_sequence(Trainer)(
            model=model, args=settings, train_dataset=data[4:], eval_dataset=data[:4]
        )
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]

        # Every rank has the whole prompt, and the KV cache is sharded over the ranks.
        prompt = data[0]["input_ids"].unsqueeze(0).to(device)  # (1, seqlen)
        tokens = model.eval().generate(
            prompt, past_key_values=ring.cache(model), max_new_tokens=20, do_sample=False
        )
    if dist.get_rank() != 0:
        return True
    generated = bytes(tokens[0, prompt.size(1) :].tolist())
    print(f"generated {generated.decode('latin-1')!r}")
    return same_loss(model, data[:4], loss)


def same_loss(model: Any, data: list[dict[str, torch.Tensor]], loss: float) -> bool:
    """Return whether a mean loss equals the loss of the model in one process."""
    twin = make_model("sdpa").to(model.device).eval()
    twin.load_state_dict(model.state_dict())
    losses = []
    for sample in data:
        batch = {name: x.unsqueeze(0).to(model.device) for name, x in sample.items()}
        with torch.no_grad():
            losses.append(twin(**batch).loss)
    expected = float(torch.stack(losses).mean())
    # Roundings of a layer and of the loss are relative to their values.
    allowed = torch.finfo(torch.float32).eps * 2 * model.config.num_hidden_layers * expected
    error = abs(loss - expected)
    ok = error <= allowed
    print(f"evaluation loss {loss:.6f} on sharded sequences, {expected:.6f} in one process")
    print("ok" if ok else f"FAILED: they differ by {error:.1e}, allowed {allowed:.1e}")
    return ok


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seqlen", type=int, default=513, help="bytes of each sequence")
    start(partial(main, parser.parse_args()))
