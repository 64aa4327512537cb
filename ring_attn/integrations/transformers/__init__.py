"""Run Hugging Face models on a sharded sequence: `attn_implementation="ring_attn"`.

    ring = register(layout="zigzag")
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="ring_attn")

Every rank runs the whole, unchanged model on its rows. All layers except attention work on each row
separately, given its position. So a rank needs the `position_ids` and labels of its rows, which
`shard_batch` makes. `docs/hugging_face.md` shows a custom training loop, images, and generation
from a cache that is sharded over the ranks. For transformers' Trainer see
`ring_attn.integrations.trainer`.

The model's forward passes `sequence_layout` on to the attention; leave it out if all ranks have
equally many rows in the registered layout. Mark packed documents with transformers' `cu_seq_lens_q`
and `cu_seq_lens_k`, in positions of the whole sequence. Mark padding at the end of rows with an
`attention_mask` of the whole sequence, which `shard_batch` does not shard. Mark the tokens of an
image, which see each other, with the `token_type_ids` of the whole sequence.
"""

from ring_attn.integrations.transformers.registration import (
    Registration,
    register,
    transformers_package,
)

__all__ = ["Registration", "register", "transformers_package"]
