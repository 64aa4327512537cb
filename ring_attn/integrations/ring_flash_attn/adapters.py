"""`ring_flash_attn.adapters`: functions that patch transformers; all of them raise here."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from ring_attn.call import Group


def substitute_hf_flash_attn(process_group: Group, heads_k_stride: int) -> NoReturn:
    """Raises NotImplementedError: it would patch transformers for the whole process."""
    _refuse("substitute_hf_flash_attn")


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: Group) -> NoReturn:
    """Raises NotImplementedError: it would set the documents of all later calls."""
    _refuse("update_ring_flash_attn_params")


def use_ring_attn(flag: bool) -> NoReturn:
    """Raises NotImplementedError: it would switch the patch on and off."""
    _refuse("use_ring_attn")


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"{name} is not built, as it patches transformers for the process; call "
        "ring_attn.integrations.transformers.register(group), load the model with "
        "attn_implementation='ring_attn', and pass cu_seq_lens_q and cu_seq_lens_k of the whole "
        "sequence to its forward"
    )
