"""`ring_flash_attn.adapters`: transformers' "flash_attention_2" over the ranks of a group.

    substitute_hf_flash_attn(group, heads_k_stride=1)     # once; also a context, undone at its end
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="flash_attention_2")
    ...
    update_ring_flash_attn_params(cu_seqlens, group)      # before each forward
    model(input_ids=ids.chunk(world_size, 1)[rank], position_ids=..., attention_mask=...)

Rank r holds the r-th equal run of the packed sequence. As in ring-flash-attn, `cu_seqlens` alone
says where documents end; padding is the last of them. Here positions and masks that contradict it
are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ring_attn.checks import attention as checks
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.strategy import Strategy
from ring_attn.integrations.transformers.models import registered, watch_models
from ring_attn.integrations.transformers.registration import Registration, transformers_package
from ring_attn.models.recurrent import Place
from ring_attn.transport import groups
from ring_attn.transport.groups import Group
from ring_attn.transport.p2p import reporting
from ring_attn.values.checks import as_int, check_type

NAME = "flash_attention_2"

# Keywords that flash-attention gets and that change nothing here.
UNUSED = ("position_ids", "max_length_q", "max_length_k", "use_top_left_mask", "target_dtype")
DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k")


class Substitution:
    """Changes by `substitute_hf_flash_attn`; as a context, undone at its end."""

    def __init__(self, group: Group, heads_k_stride: int) -> None:
        strategy = Strategy("all_gather", heads_per_chunk=heads_k_stride)
        self.group, self._stride = group, heads_k_stride
        self._ring = Registration(NAME, group, "contiguous", {"strategy": strategy}, frozenset())
        package = transformers_package()
        self._functions = package.AttentionInterface._global_mapping
        self._before: Callable[..., Any] = self._functions[NAME]
        watch_models(package)
        self._functions[NAME] = self.attend

    def undo(self) -> None:
        """Gives transformers its own function back."""
        global _current
        if _current is self:
            self._functions[NAME] = self._before
            registered.pop(NAME, None)
            _current = None

    def __enter__(self) -> Substitution:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """The attention function that models call; see `Registration.attend`."""
        if not _is_on:
            result: tuple[Tensor, None] = self._before(
                module, query, key, value, attention_mask, **kwargs
            )
            return result
        with reporting(self.group):
            for name in DOCUMENTS:
                if kwargs.pop(name, None) is not None:
                    raise ValueError(
                        f"{name} was passed to the model: with {NAME} substituted, documents come "
                        "from update_ring_flash_attn_params(cu_seqlens, process_group) alone"
                    )
            if key.size(1) % self._stride:
                raise ValueError(
                    f"heads_k_stride must divide the model's {key.size(1)} kv heads, "
                    f"got {self._stride}"
                )
            cu_seqlens, positions = self._documents(), kwargs.get("position_ids")
            _check_rows(self.group, query.size(2), cu_seqlens, attention_mask, positions)
        for name in UNUSED:
            kwargs.pop(name, None)
        kwargs |= dict.fromkeys(DOCUMENTS, cu_seqlens)
        return self._ring.attend(module, query, key, value, None, **kwargs)

    def check_positions(self, given: Mapping[str, Any], position_ids: Tensor, first: int) -> None:
        """Checks the positions that a whole model gets, as `attend` does in each layer."""
        told = self._documents(), given.get("attention_mask"), position_ids - first
        _check_rows(self.group, position_ids.size(-1), *told)

    def place(self, given: Mapping[str, Any], rows: int) -> Place | None:
        """The place of the rows of a recurrent layer."""
        return self._ring.place({**given, "cu_seq_lens_q": self._documents()}, rows)

    def _documents(self) -> Tensor:
        group = groups.check_group(self.group)
        if group not in _documents:
            raise RuntimeError(
                "update_ring_flash_attn_params(cu_seqlens, process_group) must come before the "
                "first forward of this process group, got none"
            )
        return _documents[group]


def _check_rows(
    group: Group, num: int, cu_seqlens: Tensor, mask: Tensor | None, position_ids: Tensor | None
) -> None:
    """Refuses a mask and positions of this rank's `num` rows that contradict the documents."""
    process_group = groups.check_group(group)
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    cuts = checks.check_cu_seqlens("cu_seqlens", cu_seqlens)
    assert cuts is not None, "only None gives None"
    if cuts[-1] != num * world_size:
        raise ValueError(
            f"cu_seqlens must end at the length of all ranks' rows, {world_size} x {num}, got "
            f"{cuts[-1]}: pad the sequence, and add the padding as a document"
        )
    versions = tuple(None if x is None else x._version for x in (mask, position_ids))
    known = (cuts, rank, num, versions, None if mask is None else id(mask))
    # All layers of a model share the positions, and reading them on a GPU synchronises.
    if position_ids is not None and _checked.get(position_ids) == known:
        return
    positions = SequenceLayout.contiguous(cuts[-1], world_size).position_ids(rank)
    starts = torch.tensor(cuts)
    document = torch.searchsorted(starts, positions, right=True) - 1
    seen = _seen(mask, document)
    if position_ids is None:
        return
    got, last = position_ids.detach().cpu(), document == len(cuts) - 2
    # Frameworks give padding any positions, mostly zeros, and may pass no mask.
    padding = ~seen.all(0) | (last & (not got[..., last].any()) & (len(cuts) > 2))
    in_document = positions - starts[document]
    expected = positions, in_document
    if got.shape[-1] != num or not any(bool(((got == x) | padding).all()) for x in expected):
        raise ValueError(
            f"position_ids of rank {rank} must be those of its {num} rows in the packed sequence "
            f"or in each document, {in_document[:4].tolist()} ..., got shape {tuple(got.shape)} "
            f"with {got.flatten()[:4].tolist()} ..."
        )
    _checked[position_ids] = known


def _seen(mask: Tensor | None, document: Tensor) -> Tensor:
    """(batch, rows) rows that are no padding; refuses documents that are padded in part."""
    num = len(document)
    if mask is None:
        return torch.ones(1, num, dtype=torch.bool)
    if mask.ndim != 2 or mask.size(1) != num:
        raise NotImplementedError(
            f"attention_mask must be (batch, {num}), of this rank's rows, got {tuple(mask.shape)}"
        )
    seen = mask.detach().bool().cpu()
    _, lengths = document.unique_consecutive(return_counts=True)
    each = seen.split(lengths.tolist(), 1)
    if any(bool((part.any(1) & ~part.all(1)).any()) for part in each):
        raise NotImplementedError(
            "attention_mask hides a part of a document: cu_seqlens must have an end where padding "
            "begins"
        )
    return seen


_is_on = True
_current: Substitution | None = None
_documents: WeakKeyDictionary[dist.ProcessGroup, Tensor] = WeakKeyDictionary()
# position_ids -> what they were checked with
_checked: Any = WeakTensorKeyDictionary()


def substitute_hf_flash_attn(process_group: Group, heads_k_stride: int) -> Substitution:
    """Makes transformers' "flash_attention_2" compute over the ranks of a group.

    Takes the place of an earlier substitution.

    Args:
        process_group: the ranks that share each packed sequence.
        heads_k_stride: number of KV heads to gather at a time; must divide the models' kv heads.

    Returns:
        A handle: `undo()`, or a context that undoes at its end.

    Raises:
        ImportError: transformers is not installed, or older than version 5.
    """
    global _current
    groups.check_group_type(process_group)
    stride = as_int("heads_k_stride", heads_k_stride, least=1)
    if _current is not None:
        _current.undo()
    _current = Substitution(process_group, stride)
    use_ring_attn(_is_on)
    return _current


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: Group) -> None:
    """Sets the documents of the next forwards of a group: boundaries in the whole sequence."""
    if checks.check_cu_seqlens("cu_seqlens", cu_seqlens) is None:
        raise TypeError("cu_seqlens must be an int32 tensor, got None")
    _documents[groups.check_group(process_group)] = cu_seqlens


def use_ring_attn(flag: bool) -> None:
    """Switches the substitution off, for forwards of whole sequences on a rank, and on again."""
    global _is_on
    check_type("flag", flag, bool)
    _is_on = flag
    if flag and _current is not None:
        registered[NAME] = _current
    else:
        registered.pop(NAME, None)
