"""Register `attn_implementation="ring_attn"`, and compute the attention of models that use it."""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ring_attn.api import ring_attention, tree_decode
from ring_attn.call import AttentionOptions, DecodeOptions, ExecutionOptions, check_execution
from ring_attn.checks import attention as checks
from ring_attn.core import masks
from ring_attn.core.layout import LAYOUTS, SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.integrations.transformers import stacks
from ring_attn.integrations.transformers.cache import LAYOUT, make_cache
from ring_attn.integrations.transformers.cache_step import CacheStep
from ring_attn.integrations.transformers.masks import (
    BatchMask,
    KeyRange,
    Rule,
    check_batch_mask,
    chunk_of,
    mask_of,
    read_mask,
    scaled_again,
    scales_by_row_index,
    tokens_of_rows,
)
from ring_attn.integrations.transformers.models import (
    MAKE_POSITIONS,
    cache_of,
    causal_of,
    check_config,
    count_call,
    first_position,
    has_several_positions,
    registered,
    running,
    watch_models,
    window_of,
)
from ring_attn.integrations.transformers.probe import values_of
from ring_attn.integrations.transformers.untyped import Cache, Keywords, Model, Value
from ring_attn.models.batch import from_document
from ring_attn.models.recurrent import Place
from ring_attn.models.sdpa import as_autocast
from ring_attn.transport import groups
from ring_attn.transport.groups import Group
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.p2p import reporting
from ring_attn.values.checks import as_tuple, check_flag
from ring_attn.values.compiling import left_out_of_graphs
from ring_attn.values.probing import probing

HONOURED = {"sliding_window", "softcap", "s_aux", "cu_seq_lens_q", "cu_seq_lens_k", "position_ids"}

# Arguments that `_attend_in_stack` reads, or that have no effect there.
IN_STACK = frozenset({"attention_mask", "is_causal", "max_seqlen"})

# Keywords that give the positions of rows: without them the attention would be different.
PLACED = frozenset({LAYOUT, "cu_seq_lens_q", "cu_seq_lens_k"})

# Keywords that models pass to the attention but that it does not need.
NOT_FOR_ATTENTION = {
    "cache_position",
    "labels",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_hidden_states",
    "return_dict",
    "shift_labels",
    "use_cache",
}

# Reasons why keywords are refused, and remedies.
WHY_NOT = {
    "output_attentions": "no rank has all weights; use attn_implementation='eager'",
    "output_router_logits": "the auxiliary loss of experts would see only this rank's rows",
    "head_mask": "heads cannot be masked",
    "position_bias": "a bias of the scores is not supported",
    "cache": "a paged cache is not supported; `Registration.cache` makes a cache that is sharded",
}

DECODE_OPTIONS = frozenset(DecodeOptions.__annotations__)


@dataclass(frozen=True, eq=False)
class Registration:
    """A registered name of `attn_implementation`. A context unregisters it at its end.

    Attributes:
        name: name of the implementation.
        group: as for `ring_attention`.
        layout: layout for forwards without `sequence_layout`.
        execution: the strategy, backend, same_bits and transport that `register` got.
        ignore: keywords of a forward that the attention ignores.
        probe: whether models are probed for other parts that mix rows.
        gather: whether models that number their own rows gather them after their last layer.
        trusted: classes of parts and models that the probe does not judge.
    """

    name: str
    group: Group
    layout: str
    execution: ExecutionOptions
    ignore: frozenset[str]
    probe: bool = True
    gather: bool = True
    trusted: frozenset[str] = frozenset()

    def unregister(self) -> None:
        """Remove the name; models that still use it will raise an error."""
        package = transformers_package()
        package.AttentionInterface._global_mapping.pop(self.name, None)
        package.AttentionMaskInterface._global_mapping.pop(self.name, None)
        registered.pop(self.name, None)

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exception: object) -> None:
        self.unregister()

    def cache(self, model: Model, *, block: int = 256) -> Cache:
        """Make an empty KV cache, sharded over the ranks, for `model.generate` or its forward.

        Every rank passes the whole prompt. A rank computes and keeps its rows of the prompt in the
        registered layout. All ranks compute each new token, and one rank (`next_rank`) keeps its
        KV. All ranks get the same logits, bit for bit; sampling needs the same seed on all ranks.
        Layers with a sliding window also keep all rows. Every rank has the whole states of
        recurrent layers; in models with such layers, all ranks compute all rows of every input
        after the first prompt.

        Args:
            model: a model with this implementation and a language model's head. It gets hooks,
                which do nothing with other caches.
            block: number of consecutive new tokens that one rank keeps.

        Returns:
            A `transformers.Cache`. Its `layout` has the positions of each rank.

        Raises:
            ValueError: the model has another implementation, or `block` is less than 1.
            TypeError: the model's forward does not pass keywords on.
        """
        implementation = model.config.get_text_config()._attn_implementation
        if implementation != self.name:
            raise ValueError(
                f"model must have attn_implementation {self.name!r}, for which the cache is, got "
                f"{implementation!r}: call model.set_attn_implementation({self.name!r})"
            )
        return make_cache(model, group=self.group, kind=self.layout, block=block)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: BatchMask | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Value,  # keywords of the model's forward, which transformers passes on
    ) -> tuple[Tensor, None]:
        """Compute attention; models call this function.

        `query`, `key` and `value` are (batch, heads, rows, headdim), `attention_mask` is the result
        of `mask`. For `kwargs` see `HONOURED` and `NOT_FOR_ATTENTION`; other keywords must be None
        or False. Return (batch, rows, nheads, headdim_v), and None instead of weights.
        """
        if probing.on:
            if stacks.checking():
                return stacks.by_row(query, key, value), None
            return values_of(query, value), None
        place = stacks.attended()
        if place is not None:
            given = {**kwargs, "attention_mask": attention_mask, "is_causal": is_causal}
            out = self._attend_in_stack(module, (query, key, value), dropout, scaling, place, given)
            return out, None
        with reporting(self.group):
            self._refuse_outside_of_stack(module)
            count_call(kwargs, PLACED)
            _check_arguments(attention_mask, dropout, kwargs, self.ignore)
            check_config(module)
            causal = causal_of(module, is_causal, query.size(2))
            rule = Rule(causal, window_of(module, kwargs, causal), chunk_of(module))
            # (batch, heads, rows, headdim) -> (batch, rows, heads, headdim)
            q, k, v = (as_autocast(x).transpose(1, 2) for x in (query, key, value))
            placed = _placed(kwargs.get(LAYOUT), self.layout)
            documents = (kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k"))
            if not isinstance(placed, CacheStep):
                self._check_rows(q, k)
            if "position_ids" in kwargs and not has_several_positions(kwargs["position_ids"]):
                given = {**kwargs, "attention_mask": attention_mask}
                self.check_positions(given, kwargs["position_ids"], first_position(module))
        options: AttentionOptions = {
            "softmax_scale": scaling,
            "softcap": kwargs.get("softcap") or 0.0,
            "sinks": kwargs.get("s_aux"),
            "group": self.group,
            **self.execution,
        }
        if attention_mask or rule.chunk or scales_by_row_index(module):
            out = self._attend_by_mask(
                module,
                q,
                k,
                v,
                batch_mask=attention_mask,
                rule=rule,
                placed=placed,
                documents=documents,
                options=options,
            )
        else:
            out = _attend_by_rule((q, k, v), rule, placed, documents, options)
        return out, None

    def _attend_in_stack(
        self,
        module: nn.Module,
        qkv: tuple[Tensor, Tensor, Tensor],
        dropout: float,
        scaling: float | None,
        place: stacks.Place,
        given: Keywords,
    ) -> Tensor:
        """Compute attention in a model that splits its rows itself, which are at `place`.

        `qkv` are as in `attend`, `given` are its other arguments.
        """
        with reporting(self.group):
            others = {name: x for name, x in given.items() if name not in IN_STACK}
            _check_arguments(given["attention_mask"], dropout, others, self.ignore)
            check_config(module, in_stack=True)
            # (batch, heads, rows, headdim) -> (batch, rows, heads, headdim)
            q, k, v = (as_autocast(x).transpose(1, 2) for x in qkv)
            cross = stacks.state.cross
            causal = not cross and causal_of(module, given["is_causal"], q.size(1))
            # The window of a decoder's layer is not one of its cross-attention.
            has_window = not cross or given.get("sliding_window") is not None
            window = window_of(module, given, causal) if has_window else (-1, -1)
            rule = Rule(causal, window, None if cross else chunk_of(module))
            batch_mask: BatchMask | None = given["attention_mask"]
            if cross and place.layout_k is None:
                raise NotImplementedError(
                    f"{type(module).__name__} has cross-attention, but its layer did not get "
                    f"{stacks.ENCODER_ROWS}: rows of another name are not split"
                )
            layout_k = (place.layout_k if cross else None) or place.layout
            seqlens = place.layout.seqlen, layout_k.seqlen
            check_batch_mask(batch_mask, None, (None, None), (q.size(0), layout_k.seqlen))
        options: AttentionOptions = {
            "softmax_scale": scaling,
            "softcap": given.get("softcap") or 0.0,
            "sinks": given.get("s_aux"),
            "group": self.group,
            "layout": (place.layout, layout_k),
            **self.execution,
        }
        if batch_mask is not None or rule.chunk:
            whole = ((0, seqlens[1]), ())
            rows = (whole,) if batch_mask is None else batch_mask.rows
            beyond = batch_mask is not None and batch_mask.beyond_windows
            row_masks = [
                mask_of(seqlens[1], row, rule, None, beyond)
                if rule.chunk or row[1]
                else _mask_of_keys(seqlens, row[0], rule)
                for row in rows
            ]
            options["mask"] = row_masks if len({*rows}) > 1 else row_masks[0]
        else:
            options["causal"] = rule.causal
            options["window_size"] = rule.window
            options["cu_seqlens"] = place.cu_seqlens
            options["cu_seqlens_k"] = place.cu_seqlens
        return ring_attention(q, k, v, **options)

    def _refuse_outside_of_stack(self, module: nn.Module) -> None:
        """Refuse attention between rows that every rank has, of a model that splits its rows."""
        if not stacks.state.depth:
            return
        if dist.get_world_size(groups.check_group(self.group)) > 1:
            raise NotImplementedError(
                f"{type(module).__name__} is outside of the layers whose rows are split: use the "
                "model on one rank, or with another attn_implementation"
            )

    def _check_rows(self, q: Tensor, k: Tensor) -> None:
        """Refuse a cache of transformers, and cross-attention: k has other rows than q."""
        if q.size(1) != k.size(1):
            raise NotImplementedError(
                f"q and k must have equally many rows, got {q.size(1)} and {k.size(1)}: with a KV "
                "cache pass past_key_values=ring.cache(model), where ring is what "
                f"register({self.name!r}) returned; cross-attention is not supported"
            )

    @left_out_of_graphs(
        "chunked attention, padding, images and Llama 4's scaled queries are not compiled: compile "
        "without fullgraph=True, which runs their attention outside of graphs"
    )
    def _attend_by_mask(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch_mask: BatchMask | None,
        rule: Rule,
        placed: str | SequenceLayout | CacheStep,
        documents: tuple[Tensor | None, Tensor | None],
        options: AttentionOptions,
    ) -> Tensor:
        """Compute attention with a mask of slices; see `attend`."""
        batch, rows = q.size(0), q.size(1)
        with reporting(self.group):
            rank = dist.get_rank(groups.check_group(self.group))
            cuts = checks.check_cu_seqlens("cu_seq_lens_q", documents[0])
            step = self._step(placed, rows, cuts)
            seqlen = step.cache.seqlen
            past = seqlen - step.num_new(rows)
            if batch_mask is not None and isinstance(placed, CacheStep):
                raise NotImplementedError(
                    "padding and images are not supported together with a sharded cache: generate "
                    "without attention_mask and token_type_ids"
                )
            check_batch_mask(batch_mask, cuts, documents, (batch, seqlen))
            if scales_by_row_index(module):
                row_indices = torch.arange(past, past + rows)
                positions = from_document(step.position_ids(rank, rows), cuts)
                q = scaled_again(module, q, row_indices, positions)
        if batch_mask is None:
            without_padding = ((0, seqlen), ())
            batch_mask = BatchMask(seqlen, (without_padding,))
        # One mask serves all rows of the batch if they are equal.
        differ = len({*batch_mask.rows}) > 1
        mask_rows = batch_mask.rows if differ else batch_mask.rows[:1]
        row_masks = [
            mask_of(seqlen, row, rule, cuts, batch_mask.beyond_windows) for row in mask_rows
        ]
        if differ:
            options["mask"] = row_masks
        else:
            (mask,) = row_masks
            options["mask"] = mask.rows(past, seqlen) if past else mask
        if step.chunk is None:
            return tree_decode(q, k, v, layout=step.cache, **_for_decode(options))
        options["layout"] = step.layouts
        return ring_attention(q, k, v, **options)

    def _step(
        self, placed: str | SequenceLayout | CacheStep, rows: int, cuts: tuple[int, ...] | None
    ) -> CacheStep:
        """Return the step of a forward.

        A layout by name has `rows` rows on each rank, or the length of the documents `cuts`.
        """
        if isinstance(placed, CacheStep):
            return placed
        if isinstance(placed, str):
            world_size = dist.get_world_size(groups.check_group(self.group))
            total = cuts[-1] if cuts and world_size > 1 else rows * world_size
            placed = SequenceLayout.from_name(placed, total, world_size)
        return CacheStep(placed, placed)

    def place(self, given: Keywords, rows: int) -> Place | None:
        """Return the place of a recurrent layer's rows; None if this rank has the whole sequence.

        `given` are the keywords of the layer.
        """
        with reporting(self.group):
            group = groups.check_group(self.group)
            cuts = checks.check_cu_seqlens("cu_seq_lens_q", given.get("cu_seq_lens_q"))
            step = getattr(cache_of(given), "step", None)
            if step is None:
                step = self._step(_placed(given.get(LAYOUT), self.layout), rows, cuts)
            if dist.get_world_size(group) == 1 or step.chunk is None:
                return None
            if self.execution.get("transport", TransportOptions()) != TransportOptions():
                raise NotImplementedError(
                    "recurrent layers exchange only with the default options of transport: call "
                    "register() without transport"
                )
        return Place(step.chunk, given.get("cu_seq_lens_q"), group)

    def mask(self, *args: Value, **kwargs: Value) -> BatchMask | None:
        """Return the mask of a forward; models call this function. See `read_mask`."""
        if probing.on:
            return None
        with reporting(self.group):
            return read_mask(*args, **kwargs)

    def layout_of(self, given: Keywords, rows: int) -> SequenceLayout:
        """Return the layout of a forward's rows, without documents and without a cache."""
        placed = _placed(given.get(LAYOUT), self.layout)
        return self._step(placed, rows, None).cache

    def check_positions(self, given: Keywords, position_ids: Tensor | None, first: int) -> None:
        """Refuse positions that are not the positions of this rank's rows.

        This finds batches that were not sharded. `given` are keywords of the forward or of the
        attention, `first` is the position_id of the sequence's first token. There is no check under
        torch.compile, which cannot read values.
        """
        if torch.compiler.is_compiling():
            return
        group = groups.check_group(self.group)
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if position_ids is None:
            if world_size == 1:
                return
            raise ValueError(
                "position_ids must be passed to the model, which otherwise counts every rank's "
                f"rows from 0: {MAKE_POSITIONS}"
            )
        placed = _placed(given.get(LAYOUT), self.layout)
        cuts = checks.check_cu_seqlens("cu_seq_lens_q", given.get("cu_seq_lens_q"))
        rows = position_ids.size(-1)
        step = self._step(placed, rows, cuts)
        tokens = tokens_of_rows(given.get("attention_mask"))
        facts = _Facts(position_ids._version, step, cuts, rank, first, tokens)
        if _validated.get(position_ids) == facts:
            return
        in_sequence = step.position_ids(rank, rows)
        in_document = from_document(in_sequence, cuts)
        got = position_ids.detach().cpu() - first
        has_text = True
        if got.ndim == 3:
            # Some models with several positions for each token have those of text before them.
            restarts = cuts is not None or tokens is not None
            _check_several(got[-3:], in_sequence, restarts, rank)
            has_text, got = got.size(0) == 4, got[0]
        if not has_text or _are_positions(got, in_sequence, in_document, tokens):
            _validated[position_ids] = facts
            return
        cache = cache_of(running.given)
        if cache is not None and not hasattr(cache, "step"):
            raise ValueError(
                f"the KV cache must be sharded, too, got a {type(cache).__name__} of transformers: "
                "pass past_key_values=ring.cache(model), also to generate(), where ring is what "
                f"register({self.name!r}) returned"
            )
        raise ValueError(
            f"position_ids of rank {rank} must be the positions of its rows, "
            f"{_shown(in_sequence + first)}, got shape {tuple(got.shape)} with "
            f"{_shown(got.flatten() + first)}: shard input_ids, labels and positions with "
            f"ring_attn.shard_batch in the attention's layout, {step.cache} (pass another layout "
            f"to the forward as {LAYOUT}=); for documents whose positions start at 0, pass "
            "cu_seq_lens_q and cu_seq_lens_k of the whole sequence, which shard_batch makes from "
            "the whole position_ids; for padding before tokens pass the whole attention_mask"
        )


# More than 60 lines, most of them documentation.
def register(
    group: Group = None,
    layout: str = "contiguous",
    *,
    name: str = "ring_attn",
    ignore: Collection[str] = (),
    probe: bool = True,
    trusted: Collection[str] = (),
    gather: bool = True,
    **execution: Unpack[ExecutionOptions],
) -> Registration:
    """Register `attn_implementation="ring_attn"` with transformers, for this rank's shards.

    Supported: GQA, causal and bidirectional models, sliding windows and chunks (Llama 4) by layer,
    softcap, sinks, scaling, packed documents (`cu_seq_lens_q`), padding at the end of rows, images
    whose tokens all see each other (Gemma 3), autocast, recurrent layers (delta rules, Mamba,
    convolutions). Not supported (raises an error): other padding and masks, dropout,
    output_attentions, RoPE that depends on the length seen so far (dynamic, longrope), recurrent
    layers that are unknown (see `register_recurrence`), compiled, or used with transport, padding
    or images with a cache, and unknown keywords that reach the attention. Attention with chunks,
    padding or images runs outside of compiled graphs.

    If the model passes `position_ids` to its attention, as almost all models except Llama 4 do,
    they are checked against the layout, except under torch.compile.

    Heads for sequence classification (reward models) and poolers such as BERT's pool the rows of
    all ranks. All ranks have the same logits and the same loss, each with a share of its gradient:
    sum gradients over the ranks, and do not sum this loss. For embeddings see `ring_attn.pool`.

    Args:
        group: as for `ring_attention`.
        layout: layout of prompts, and of forwards without `sequence_layout`: "contiguous", "zigzag"
            or "striped".
        name: the name to register; each group or layout in use needs a different name.
        ignore: keywords of the models' forward that the attention ignores, such as keywords of a
            custom loss function.
        probe: whether to look for parts of a model, other than attention, that mix rows, before its
            first forward on several ranks. This takes four forwards of 23 random tokens on each
            rank, in evaluation mode and without gradients. A part that mixes rows must see rows of
            other ranks; to test this takes a forward of the inputs without attention, in which the
            part runs five times. For models that number their own rows the probe takes two
            forwards of the inputs.
        trusted: names of classes that the probe does not judge: of parts that are right although
            they mix rows of one rank only, and of models that cannot be probed, which are refused
            otherwise.
        gather: whether models that number their own rows gather the rows of all ranks after their
            last layer. With False, the rows of this rank are left, for models without a head.
        **execution: strategy, backend, same_bits and transport, as for `ring_attention`.

    Returns:
        A handle, with `unregister()` and `cache(model)`.

    Raises:
        ImportError: transformers is not installed, or older than version 5.
        ValueError: the name is registered already or has a meaning in transformers, or the layout,
            strategy or backend is unknown.
        TypeError: the layout is not a name, an option is unknown, or a type is wrong.

    Example:
        >>> with register(layout="zigzag", name="ring_zigzag") as ring:
        ...     ring.name
        'ring_zigzag'
    """
    package = transformers_package()
    checks.check_options("register", execution, ExecutionOptions)
    check_execution(execution)
    groups.check_group_type(group)
    checks.check_name("name", name)
    ignored = _check_names("ignore", ignore)
    trusted_classes = _check_names("trusted", trusted)
    _check_layout_name(layout)
    _check_free_name(package, name)
    check_flag("probe", probe)
    check_flag("gather", gather)
    ring = Registration(
        name=name,
        group=group,
        layout=layout,
        execution=execution,
        ignore=ignored,
        probe=probe,
        gather=gather,
        trusted=trusted_classes,
    )
    watch_models(package)
    registered[name] = ring
    package.AttentionInterface.register(name, ring.attend)
    package.AttentionMaskInterface.register(name, ring.mask)
    return ring


def _check_names(option: str, names: Collection[str]) -> frozenset[str]:
    return frozenset(checks.check_name(f"each of {option}", x) for x in as_tuple(option, names))


def _check_layout_name(layout: object) -> None:
    """Refuse a layout that is not the name of one."""
    if not isinstance(layout, str):
        raise TypeError(
            f"layout must be one of {list(LAYOUTS)}, got {layout!r}: lengths differ from batch to "
            f"batch, so pass a SequenceLayout to the model's forward as {LAYOUT}="
        )
    SequenceLayout.from_name(layout, 0, 1)


def _check_free_name(package: ModuleType, name: str) -> None:
    """Refuse names that have a meaning in transformers, and names in use."""
    if "flash" in name or "/" in name or "paged" in name:
        raise ValueError(
            "name must not contain 'flash', 'paged' or '/', which have a meaning in transformers, "
            f"got {name!r}"
        )
    if name in package.AttentionInterface._global_mapping:
        raise ValueError(
            f"attn_implementation {name!r} is registered already: call unregister() of its handle, "
            "or pass another name"
        )


def _check_arguments(
    attention_mask: object, dropout: float, kwargs: Keywords, ignore: frozenset[str]
) -> None:
    """Refuse masks, dropout and keywords that attention cannot honour."""
    if not isinstance(attention_mask, (BatchMask, type(None))):
        shape = tuple(getattr(attention_mask, "shape", ()))
        raise NotImplementedError(
            f"attention_mask must be (batch, seqlen), got {type(attention_mask).__name__} of shape "
            f"{shape}: custom masks are not supported; mark documents with cu_seq_lens_q and "
            "cu_seq_lens_k"
        )
    if dropout:
        raise NotImplementedError(
            f"attention dropout must be 0, got {dropout}: set attention_dropout (in BERT "
            "attention_probs_dropout_prob) of the config to 0, or call model.eval()"
        )
    known = HONOURED | NOT_FOR_ATTENTION | ignore | {LAYOUT}
    for name, value in kwargs.items():
        if name not in known and value is not None and value is not False:
            reason = WHY_NOT.get(
                name, "it is unknown; pass it to register(ignore=...) if attention can ignore it"
            )
            raise NotImplementedError(f"{name} reached the attention: {reason}")


def _mask_of_keys(seqlens: tuple[int, int], keys: KeyRange, rule: Rule) -> Mask:
    """Return the mask in which the queries of one row of the batch see only these keys.

    Queries of padding see them, too, as in transformers: the logits of a whole batch, with which
    speech is decoded and metrics are computed, contain the rows of padding.
    """
    seqlen_q, seqlen_k = seqlens
    left, right = rule.window
    lo = None if left < 0 else -left
    hi = None if right < 0 else right
    if rule.causal:
        hi = 0
    return masks.from_slices(seqlen_q, seqlen_k, [(0, seqlen_q, *keys, lo, hi)])


def _placed(given: object, name: str) -> str | SequenceLayout | CacheStep:
    """Return the layout that a forward got, or the registered name."""
    if given is None:
        return name
    if not isinstance(given, (str, SequenceLayout, CacheStep)):
        raise TypeError(f"{LAYOUT} must be a SequenceLayout or one of {LAYOUTS}, got {given!r}")
    return given


# No TypedDict, because mypy cannot choose an overload of `tree_decode` by it.
def _attend_by_rule(
    qkv: tuple[Tensor, Tensor, Tensor],
    rule: Rule,
    placed: str | SequenceLayout | CacheStep,
    documents: tuple[Tensor | None, Tensor | None],
    options: AttentionOptions,
) -> Tensor:
    """Compute attention with a causal mask or a window; see `Registration.attend`."""
    options["causal"] = rule.causal
    options["window_size"] = rule.window
    if isinstance(placed, CacheStep) and placed.chunk is None:
        return tree_decode(*qkv, layout=placed.cache, **_for_decode(options))
    options["layout"] = placed.layouts if isinstance(placed, CacheStep) else placed
    options["cu_seqlens"], options["cu_seqlens_k"] = documents
    return ring_attention(*qkv, **options)


def _for_decode(options: AttentionOptions) -> dict[str, Value]:
    """Return the options that `tree_decode` has, too."""
    return {name: value for name, value in options.items() if name in DECODE_OPTIONS}


class _Facts(NamedTuple):
    """The facts with which positions were checked. In-place changes increase the version."""

    version: int
    step: CacheStep
    cu_seqlens: tuple[int, ...] | None
    rank: int
    first: int
    tokens: tuple[KeyRange, ...] | None


# position_ids -> the facts with which they were found right. All layers of a model share them, and
# reading them on a GPU synchronises.
_validated: MutableMapping[Tensor, _Facts] = WeakTensorKeyDictionary()


def _are_positions(
    got: Tensor, in_sequence: Tensor, in_document: Tensor, tokens: tuple[KeyRange, ...] | None
) -> bool:
    """Return whether these are positions of rows: in the sequence, in documents, or of tokens.

    `got` is (batch or 1, rows). Positions of padding can have any value.
    """
    if got.ndim != 2 or got.size(1) != len(in_sequence):
        return False
    if any(bool((got == expected).all()) for expected in (in_sequence, in_document)):
        return True
    if tokens is None or len(got) not in (1, len(tokens)):
        return False
    of_rows = got.expand(len(tokens), -1)
    for row, (start, end) in zip(of_rows, tokens, strict=True):
        is_token = (in_sequence >= start) & (in_sequence < end)
        if not bool((row == in_sequence - start)[is_token].all()):
            return False
    return True


def _check_several(several: Tensor, in_sequence: Tensor, restarts: bool, rank: int) -> None:
    """Refuse several positions for each token (mrope) that cannot be those of this rank's rows.

    `several` is (3, batch, rows). Images take fewer positions than tokens. So no position is larger
    than that of the token in the sequence; and unless positions restart, only the first token of
    the sequence has only zeros.
    """
    if several.ndim != 3 or several.size(-1) != len(in_sequence):
        raise ValueError(
            f"position_ids of rank {rank} must have {len(in_sequence)} rows in the last dim, got "
            f"shape {tuple(several.shape)}: shard them with ring_attn.shard_batch"
        )
    too_large = bool((several > in_sequence.clamp(min=1)).any())
    from_zero = bool(((several == 0).all(0) & (in_sequence > 0)).any()) and not restarts
    if too_large or from_zero:
        raise ValueError(
            f"position_ids of rank {rank} cannot be the positions of its rows, whose positions in "
            f"the sequence are {_shown(in_sequence)}, got {_shown(several[0, 0])} in the first of "
            f"{len(several)} dims: compute the positions of the whole sequence (get_rope_index), "
            "and shard them with ring_attn.shard_batch"
        )


def _shown(positions: Tensor) -> str:
    """Return the first and the last positions, for an error."""
    values = positions.tolist()
    return str(values) if len(values) <= 8 else f"{values[:4]} ... {values[-4:]}"


def transformers_package() -> ModuleType:
    """Return transformers; refuse versions without the interface that this module needs."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError("transformers is not installed: pip install 'ring-attn[hf]'") from error
    if not hasattr(transformers, "AttentionMaskInterface"):
        raise ImportError(
            f"transformers 5 or newer is needed, found {transformers.__version__}: "
            "pip install 'ring-attn[hf]'"
        )
    return transformers
