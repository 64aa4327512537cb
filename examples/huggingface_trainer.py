"""Hugging Face's Trainer on split sequences: a small Llama over bytes, trained and continued.

    torchrun --nproc-per-node 2 examples/huggingface_trainer.py

Needs the extra `trainer`: pip install 'ring-attn[trainer]'. (1) to (3) are all that makes the ring.
Afterwards rank 0 computes the evaluation loss in one process with torch's attention: if the two
differ by more than float32 can round, the exit status is 1. Put `from_pretrained(name, ...)` in the
place of the small model, and a dataset of yours in the place of the bytes.
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


def make_model(attention: str) -> Any:
    """A small Llama of random weights, the same wherever it is made."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=1 << 20,
    )  # fmt: skip
    # (2) The name that `register` has given to the ring.
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def texts(count: int, seqlen: int) -> list[dict[str, torch.Tensor]]:
    data = islice(batches(seqlen, torch.device("cpu")), count)
    return [{name: x[0] for name, x in batch.items()} for batch in data]


def main(args: argparse.Namespace, device: torch.device) -> bool:
    # (1) All ranks share each sequence; `group=mesh["cp"]` would make several rings.
    with register(layout="zigzag") as ring, tempfile.TemporaryDirectory() as folder:
        model = make_model("ring_attn")
        # (3) The Trainer's arguments stay; `per_device_*` counts sequences of a ring.
        settings = TrainingArguments(
            folder, per_device_train_batch_size=1, per_device_eval_batch_size=1,
            max_steps=args.steps, learning_rate=1e-3, logging_steps=max(1, args.steps // 10),
            save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=device.type == "cpu",
            ddp_find_unused_parameters=False,
        )  # fmt: skip
        data = texts(args.steps + 4, args.seqlen)
        trainer = split_sequence(Trainer)(
            model=model, args=settings, train_dataset=data[4:], eval_dataset=data[:4]
        )
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]

        # The prompt is whole on every rank; the KV cache is split over them.
        prompt = data[0]["input_ids"][None].to(device)
        more = model.eval().generate(
            prompt, past_key_values=ring.cache(model), max_new_tokens=20, do_sample=False
        )
    if dist.get_rank() != 0:
        return True
    print(f"generated {bytes(more[0, prompt.size(1) :].tolist()).decode('latin-1')!r}")
    return same_loss(model, data[:4], loss)


def same_loss(model: Any, data: list[dict[str, torch.Tensor]], loss: float) -> bool:
    """Whether a mean loss equals the model's in one process."""
    twin = make_model("sdpa").to(model.device).eval()
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        rows = [{name: x[None].to(model.device) for name, x in one.items()} for one in data]
        losses = [twin(**row).loss for row in rows]
    alone = float(torch.stack(losses).mean())
    # A layer's roundings are relative to its values, and so are the loss's.
    allowed = torch.finfo(torch.float32).eps * 2 * model.config.num_hidden_layers * alone
    ok = abs(loss - alone) <= allowed
    print(f"evaluation loss {loss:.6f} on split sequences, {alone:.6f} in one process")
    print("ok" if ok else f"FAILED: they differ by {abs(loss - alone):.1e}, allowed {allowed:.1e}")
    return ok


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seqlen", type=int, default=513, help="bytes of each sequence")
    start(partial(main, parser.parse_args()))
