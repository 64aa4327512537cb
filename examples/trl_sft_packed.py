"""TRL's SFTTrainer on packed documents that are sharded over ranks.

    torchrun --nproc-per-node 2 examples/trl_sft_packed.py

This needs the extra `trainer`, and trl: pip install 'ring-attn[trainer]' trl. Texts of any lengths
are packed into sequences. Documents never see each other, and may be on several ranks. Afterwards
rank 0 computes the loss of some documents in one process with torch's attention, one document at a
time. The exit status is 1 if the two losses differ by more than float32 can round.
"""

import argparse
import tempfile
from functools import partial

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from common import batches, start
from huggingface_trainer import make_model, same_loss
from ring_attn.integrations.trainer import split_sequence
from ring_attn.integrations.transformers import register


def documents(count: int) -> Dataset:
    """Return pieces of 30 to 400 bytes. With a tokenizer, rows of {"text": ...} work too."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(30, 400, (count,), generator=generator).tolist()
    pieces = [next(batches(length, torch.device("cpu"))) for length in lengths]
    return Dataset.from_list([{"input_ids": piece["input_ids"][0].tolist()} for piece in pieces])


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are bytes."""
    words = {f"<{i}>": i for i in range(256)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<0>")),
        pad_token="<0>",
        eos_token="<1>",
    )


def main(args: argparse.Namespace, device: torch.device) -> bool:
    data = documents(args.documents)
    # All ranks share each packed sequence; `group=mesh["cp"]` would make several rings.
    with register(layout="zigzag"), tempfile.TemporaryDirectory() as folder:
        model = make_model("ring_attn")
        # SFTTrainer's arguments do not change.
        settings = SFTConfig(
            folder,
            packing=True,
            eval_packing=False,
            max_length=512,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            max_steps=args.steps,
            learning_rate=1e-3,
            logging_steps=max(1, args.steps // 5),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=device.type == "cpu",
            ddp_find_unused_parameters=False,
            bf16=False,  # on by default in TRL, like the next
            gradient_checkpointing=False,
        )
        trainer = split_sequence(SFTTrainer)(
            model=model,
            args=settings,
            train_dataset=data,
            eval_dataset=data.select(range(6)),
            processing_class=byte_tokenizer(),
        )
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    if dist.get_rank() != 0:
        return True
    rows = [torch.tensor(ids) for ids in data["input_ids"][:6]]
    return same_loss(model, [{"input_ids": ids, "labels": ids} for ids in rows], loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--documents", type=int, default=60)
    start(partial(main, parser.parse_args()))
