"""Runs Hugging Face models on a split sequence: `attn_implementation="ring_attn"`.

    ring = register(layout="zigzag")
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="ring_attn")

Every rank runs the whole, unchanged model on its rows. All layers but attention work on each row by
itself, given its position. So a rank needs the `position_ids` and labels of its rows, which
`shard_batch` makes: `docs/hugging_face.md` has a loop of your own, images, and generation from a
cache that is split over the ranks. For transformers' Trainer see `ring_attn.integrations.trainer`.

The model's forward passes `sequence_layout` on to the attention; leave it out if all ranks have
equally many rows in the registered layout. Mark packed documents by transformers' `cu_seq_lens_q`
(and `_k`), in positions of the whole sequence. Mark padding at the end of rows by an
`attention_mask` of the whole sequence, which `shard_batch` does not cut. The whole
`token_type_ids` mark the tokens of an image, which see each other.
"""

from ring_attn.integrations.transformers.registration import (
    Registration,
    register,
    transformers_package,
)

__all__ = ["Registration", "register", "transformers_package"]
