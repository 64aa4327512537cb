"""Hugging Face's Trainer, or TRL's SFTTrainer, on sequences that are sharded over ranks.

    register(layout="zigzag")
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="ring_attn")
    split_sequence(Trainer)(model=model, args=args, train_dataset=data).train()

The ranks of the group that `register` got share each sequence; different groups are data parallel.
See `docs/hugging_face.md`.

The Trainer does everything else over all ranks. `per_device_*_batch_size` counts the sequences of a
group. Loss, gradients and logged numbers equal the results of one process for the whole
batches, for any lengths.

Documents never attend to each other. `cu_seq_lens_q` marks them, or positions that restart, as from
`DataCollatorWithFlattening` and TRL's packing. The rows of a batch become documents too: they are
concatenated without the padding at their ends, and sharded as one sequence.
"""

from ring_attn.integrations.trainer.trainer import split_sequence

__all__ = ["split_sequence"]
