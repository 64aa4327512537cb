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

from ring_attn import groups, refusals
from ring_attn.call import Group
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.values import as_int, check_type
from ring_attn.integrations.transformers import Registration, transformers_package
from ring_attn.integrations.transformers_models import registered, watch_models
from ring_attn.models.recurrent import Place
from ring_attn.strategies.strategy import Strategy
from ring_attn.transport.p2p import telling

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
        with telling(self.group):
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
            cu_seqlens, rows = self._documents(), _Rows.of(self.group, query.size(2))
            rows.check(cu_seqlens, attention_mask, kwargs.get("position_ids"))
        for name in UNUSED:
            kwargs.pop(name, None)
        kwargs |= dict.fromkeys(DOCUMENTS, cu_seqlens)
        return self._ring.attend(module, query, key, value, None, **kwargs)

    def check_positions(self, given: Mapping[str, Any], position_ids: Tensor, first: int) -> None:
        """Checks the positions that a whole model gets, as `attend` does in each layer."""
        rows = _Rows.of(self.group, position_ids.size(-1))
        rows.check(self._documents(), given.get("attention_mask"), position_ids - first)

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


class _Rows:
    """This rank's rows: the `rank`-th of `world_size` runs of `num` positions."""

    def __init__(self, num: int, rank: int, world_size: int) -> None:
        self.num, self.rank, self.world_size = num, rank, world_size

    @classmethod
    def of(cls, group: Group, num: int) -> _Rows:
        process_group = groups.check_group(group)
        return cls(num, dist.get_rank(process_group), dist.get_world_size(process_group))

    def check(self, cu_seqlens: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> None:
        """Refuses a mask and positions that contradict the documents."""
        cuts = refusals.check_cu_seqlens("cu_seqlens", cu_seqlens)
        assert cuts is not None, "only None gives None"
        if cuts[-1] != self.num * self.world_size:
            raise ValueError(
                f"cu_seqlens must end at the length of all ranks' rows, {self.world_size} x "
                f"{self.num}, got {cuts[-1]}: pad the sequence, and add the padding as a document"
            )
        versions = tuple(None if x is None else x._version for x in (mask, position_ids))
        known = (cuts, self.rank, self.num, versions, None if mask is None else id(mask))
        # All layers of a model share the positions, and reading them on a GPU synchronises.
        if position_ids is not None and _checked.get(position_ids) == known:
            return
        layout = SequenceLayout.contiguous(cuts[-1], self.world_size)
        positions, starts = layout.position_ids(self.rank), torch.tensor(cuts)
        document = torch.searchsorted(starts, positions, right=True) - 1
        seen = self._seen(mask, document)
        if position_ids is not None:
            got, last = position_ids.detach().cpu(), document == len(cuts) - 2
            # Frameworks give padding any positions, mostly zeros, and may pass no mask.
            padding = ~seen.all(0) | (last & (not got[..., last].any()) & (len(cuts) > 2))
            self._check_positions(got, positions, positions - starts[document], padding)
            _checked[position_ids] = known

    def _seen(self, mask: Tensor | None, document: Tensor) -> Tensor:
        """(batch, rows) rows that are no padding; refuses documents that are padded in part."""
        if mask is None:
            return torch.ones(1, self.num, dtype=torch.bool)
        whole = self.num * self.world_size
        if mask.ndim != 2 or mask.size(1) not in (self.num, whole):
            raise NotImplementedError(
                f"attention_mask must be (batch, {self.num}) of this rank's rows, or (batch, "
                f"{whole}) of all, got {tuple(mask.shape)}"
            )
        seen = mask.detach().bool().cpu()
        if mask.size(1) != self.num:
            seen = seen[:, self.rank * self.num :][:, : self.num]
        counts = torch.zeros(len(seen), int(document.max()) + 1 if self.num else 0)
        totals = counts.index_add(1, document, torch.ones(seen.shape))
        counts = counts.index_add(1, document, seen.float())
        if bool(((counts > 0) & (counts < totals)).any()):
            raise NotImplementedError(
                "attention_mask hides a part of a document: cu_seqlens must have an end where "
                "padding begins"
            )
        return seen

    def _check_positions(
        self, got: Tensor, positions: Tensor, in_document: Tensor, padding: Tensor
    ) -> None:
        """Refuses positions that are neither global nor counted from each document's start."""
        for expected in (positions, in_document):
            if got.shape[-1] == self.num and bool(((got == expected) | padding).all()):
                return
        raise ValueError(
            f"position_ids of rank {self.rank} must be those of its {self.num} rows in the packed "
            f"sequence or in each document, {in_document[:4].tolist()} ..., got shape "
            f"{tuple(got.shape)} with {got.flatten()[:4].tolist()} ..."
        )


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
    if refusals.check_cu_seqlens("cu_seqlens", cu_seqlens) is None:
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
