"""`ring_flash_attn.adapters`: transformers' "flash_attention_2" over the ranks of a group.

    substitute_hf_flash_attn(group, heads_k_stride=1)     # once; also a context, undone at its end
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="flash_attention_2")
    ...
    update_ring_flash_attn_params(cu_seqlens, group)      # before each forward
    model(input_ids=ids.chunk(world_size, 1)[rank], position_ids=..., attention_mask=...)

Rank r holds the r-th of equal runs of the packed sequence. As in ring-flash-attn, only `cu_seqlens`
marks the ends of documents; padding is the last document. Here, positions and masks that contradict
`cu_seqlens` are refused.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple
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
from ring_attn.integrations.transformers.untyped import Keywords
from ring_attn.models.recurrent import Place
from ring_attn.transport import groups
from ring_attn.transport.groups import Group
from ring_attn.transport.p2p import reporting
from ring_attn.values.checks import as_int, check_type

NAME = "flash_attention_2"

# Keywords that flash-attention gets and that change nothing here.
UNUSED = ("position_ids", "max_length_q", "max_length_k", "use_top_left_mask", "target_dtype")
DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k")

# An attention function of transformers.
AttentionFunction = Callable[..., tuple[Tensor, None]]


class Substitution:
    """The substitution that `substitute_hf_flash_attn` has made; a context undoes it at its end."""

    def __init__(self, group: Group, heads_k_stride: int) -> None:
        strategy = Strategy("all_gather", heads_per_chunk=heads_k_stride)
        self.group, self._stride = group, heads_k_stride
        self._ring = Registration(
            name=NAME,
            group=group,
            layout="contiguous",
            execution={"strategy": strategy},
            ignore=frozenset(),
        )
        package = transformers_package()
        self._functions: dict[str, AttentionFunction] = package.AttentionInterface._global_mapping
        self._original = self._functions[NAME]
        watch_models(package)
        self._functions[NAME] = self.attend

    @property
    def probe(self) -> bool:
        """Whether models are probed: not here, as code like ring-flash-attn's shards by itself."""
        return False

    @property
    def trusted(self) -> frozenset[str]:
        """Classes that are not judged: no model is probed."""
        return frozenset()

    @property
    def gather(self) -> bool:
        """Whether models that number their own rows gather them; such models are refused."""
        return True

    @property
    def layout(self) -> str:
        """The layout in which models split their rows themselves: they are refused."""
        raise NotImplementedError(
            "models that number their own rows, such as encoders of images, are not supported "
            "together with substitute_hf_flash_attn: use "
            "ring_attn.integrations.transformers.register"
        )

    def layout_of(self, given: Keywords, rows: int) -> None:
        """Refuse heads that pool rows, while attention is substituted."""
        if _is_on:
            raise NotImplementedError(
                "heads that pool rows are not supported together with substitute_hf_flash_attn: "
                "call the model without its head, or ring_attn.integrations.transformers.register"
            )

    def undo(self) -> None:
        """Restore transformers' own function."""
        global _current
        if _current is self:
            self._functions[NAME] = self._original
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
        **kwargs: Any,  # keywords of the model's forward, which transformers passes on
    ) -> tuple[Tensor, None]:
        """Compute attention; models call this function. See `Registration.attend`."""
        if not _is_on:
            return self._original(module, query, key, value, attention_mask, **kwargs)
        with reporting(self.group):
            for name in DOCUMENTS:
                if kwargs.pop(name, None) is not None:
                    raise ValueError(
                        f"{name} was passed to the model, but with {NAME} substituted, documents "
                        "come only from update_ring_flash_attn_params: call that with cu_seqlens "
                        f"and process_group, and leave {name} out"
                    )
            if key.size(1) % self._stride:
                raise ValueError(
                    f"heads_k_stride must be a divisor of the model's {key.size(1)} kv heads, got "
                    f"{self._stride}"
                )
            cu_seqlens = self._documents()
            _check_rows(
                self.group, query.size(2), cu_seqlens, attention_mask, kwargs.get("position_ids")
            )
        for name in UNUSED:
            kwargs.pop(name, None)
        kwargs |= dict.fromkeys(DOCUMENTS, cu_seqlens)
        return self._ring.attend(module, query, key, value, attention_mask=None, **kwargs)

    def check_positions(self, given: Keywords, position_ids: Tensor, first: int) -> None:
        """Check the positions that a whole model gets, as `attend` does in each layer."""
        _check_rows(
            self.group,
            position_ids.size(-1),
            self._documents(),
            given.get("attention_mask"),
            position_ids - first,
        )

    def place(self, given: Keywords, rows: int) -> Place | None:
        """Return the place of the rows of a recurrent layer."""
        return self._ring.place({**given, "cu_seq_lens_q": self._documents()}, rows)

    def _documents(self) -> Tensor:
        """Return the boundaries that were set for the group; refuse a group without boundaries."""
        group = groups.check_group(self.group)
        if group not in _documents:
            raise RuntimeError(
                "the documents of this process group are not set: call "
                "update_ring_flash_attn_params(cu_seqlens, process_group) before the first forward"
            )
        return _documents[group]


def _check_rows(
    group: Group, num: int, cu_seqlens: Tensor, mask: Tensor | None, position_ids: Tensor | None
) -> None:
    """Refuse a mask and positions of this rank's `num` rows that contradict the documents."""
    process_group = groups.check_group(group)
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    cuts = checks.check_cu_seqlens("cu_seqlens", cu_seqlens)
    assert cuts is not None, "only None gives None"
    if cuts[-1] != num * world_size:
        raise ValueError(
            f"cu_seqlens must end at the length of all ranks' rows, {world_size} x {num}, got "
            f"{cuts[-1]}: pad the sequence, and add the padding as a document"
        )
    facts = _Facts(
        cu_seqlens=cuts,
        rank=rank,
        rows=num,
        mask_id=None if mask is None else id(mask),
        mask_version=None if mask is None else mask._version,
        positions_version=None if position_ids is None else position_ids._version,
    )
    # All layers of a model share the positions, and reading them on a GPU synchronises.
    if position_ids is not None and _checked.get(position_ids) == facts:
        return
    positions = SequenceLayout.contiguous(cuts[-1], world_size).position_ids(rank)
    starts = torch.tensor(cuts)
    document = torch.searchsorted(starts, positions, right=True) - 1  # of each row
    is_token = _tokens(mask, document)
    if position_ids is None:
        return
    got = position_ids.detach().cpu()
    # Frameworks give padding any positions, mostly zeros, and may pass no mask. So a last document
    # whose positions are all zero counts as padding, if there are other documents.
    in_last = document == len(cuts) - 2
    last_is_padding = len(cuts) > 2 and not got[..., in_last].any()
    is_padding = ~is_token.all(0) | (in_last & last_is_padding)
    in_document = positions - starts[document]
    matches = any(
        bool(((got == expected) | is_padding).all()) for expected in (positions, in_document)
    )
    if got.shape[-1] != num or not matches:
        raise ValueError(
            f"position_ids of rank {rank} must be the positions of its {num} rows in the packed "
            f"sequence or in each document, {in_document[:4].tolist()} ..., got shape "
            f"{tuple(got.shape)} with {got.flatten()[:4].tolist()} ..."
        )
    _checked[position_ids] = facts


def _tokens(mask: Tensor | None, document: Tensor) -> Tensor:
    """Return which rows are tokens, not padding, (batch, rows).

    Refuse documents with both tokens and padding. `document` is the index of each row's document.
    """
    num = len(document)
    if mask is None:
        return torch.ones(1, num, dtype=torch.bool)
    if mask.ndim != 2 or mask.size(1) != num:
        raise NotImplementedError(
            f"attention_mask must be (batch, {num}), for this rank's rows, got {tuple(mask.shape)}"
        )
    is_token = mask.detach().bool().cpu()
    _, lengths = document.unique_consecutive(return_counts=True)
    documents = is_token.split(lengths.tolist(), 1)
    if any(bool((rows.any(1) & ~rows.all(1)).any()) for rows in documents):
        raise NotImplementedError(
            "attention_mask hides a part of a document: add a boundary to cu_seqlens where the "
            "padding begins"
        )
    return is_token


class _Facts(NamedTuple):
    """The facts with which positions were checked. In-place changes increase a version."""

    cu_seqlens: tuple[int, ...]
    rank: int
    rows: int
    mask_id: int | None
    mask_version: int | None
    positions_version: int | None


_is_on = True
_current: Substitution | None = None
_documents: WeakKeyDictionary[dist.ProcessGroup, Tensor] = WeakKeyDictionary()
# position_ids -> the facts with which they were checked
_checked: MutableMapping[Tensor, _Facts] = WeakTensorKeyDictionary()


def substitute_hf_flash_attn(process_group: Group, heads_k_stride: int) -> Substitution:
    """Substitute transformers' "flash_attention_2" by ring attention over the ranks of a group.

    This replaces an earlier substitution.

    Args:
        process_group: the ranks that share each packed sequence.
        heads_k_stride: number of KV heads to gather at a time; must be a divisor of the models'
            number of kv heads.

    Returns:
        A handle: `undo()` it, or use it as a context, which undoes the substitution at its end.

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
    """Set the documents of the next forwards of a group.

    Args:
        cu_seqlens: int32 boundaries of the documents in the whole sequence, from 0.
        process_group: the ranks that share the sequence.

    Raises:
        TypeError: `cu_seqlens` is not an integer tensor.
        ValueError: boundaries decrease, or do not start at 0.
        RuntimeError: there is no process group.
    """
    if checks.check_cu_seqlens("cu_seqlens", cu_seqlens) is None:
        raise TypeError("cu_seqlens must be an int32 tensor, got None")
    _documents[groups.check_group(process_group)] = cu_seqlens


def use_ring_attn(flag: bool) -> None:
    """Turn the substitution off, for forwards of whole sequences on a rank, or on again."""
    global _is_on
    check_type("flag", flag, bool)
    _is_on = flag
    if flag and _current is not None:
        registered[NAME] = _current
    else:
        registered.pop(NAME, None)
