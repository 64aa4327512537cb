"""Register `attn_implementation="ring_attn"`, and compute the attention of its models."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ring_attn.api import ring_attention, tree_decode
from ring_attn.call import AttentionOptions, DecodeOptions, ExecutionOptions, check_execution
from ring_attn.checks import attention as checks
from ring_attn.core.layout import LAYOUTS, SequenceLayout
from ring_attn.integrations.transformers.cache import LAYOUT, make_cache
from ring_attn.integrations.transformers.cache_step import CacheStep
from ring_attn.integrations.transformers.masks import (
    BatchMask,
    Rule,
    check_batch_mask,
    chunk_of,
    mask_of,
    read_mask,
    repeated,
    scaled_again,
    scales_by_row_index,
)
from ring_attn.integrations.transformers.models import (
    cache_of,
    causal_of,
    check_config,
    count_call,
    first_position,
    registered,
    watch_models,
    window_of,
)
from ring_attn.models.batch import from_document
from ring_attn.models.recurrent import Place
from ring_attn.models.sdpa import as_autocast
from ring_attn.transport import groups
from ring_attn.transport.groups import Group
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.p2p import reporting
from ring_attn.values.checks import as_tuple
from ring_attn.values.compiling import left_out_of_graphs

HONOURED = {"sliding_window", "softcap", "s_aux", "cu_seq_lens_q", "cu_seq_lens_k", "position_ids"}

# Keywords that say where rows stand: without them the attention would be another one.
PLACED = frozenset({LAYOUT, "cu_seq_lens_q", "cu_seq_lens_k"})

# Keywords that models pass to the attention but that it does not need.
NOT_FOR_ATTENTION = {
    "cache_position", "labels", "logits_to_keep", "max_length_k", "max_length_q",
    "num_items_in_batch", "output_hidden_states", "return_dict", "shift_labels", "use_cache",
}  # fmt: skip

WHY_NOT = {
    "output_attentions": "no rank has the weights; attn_implementation='eager' has",
    "output_router_logits": "the auxiliary loss of experts would see this rank's rows alone",
    "head_mask": "heads cannot be masked",
    "position_bias": "a bias of the scores is not built",
    "cache": "a paged cache is not built; `Registration.cache` makes one that is split over ranks",
}

DECODE_OPTIONS = frozenset(DecodeOptions.__annotations__)


@dataclass(frozen=True, eq=False)
class Registration:
    """A registered name of `attn_implementation`; as a context it unregisters the name at its end.

    Attributes:
        name: name of the implementation.
        group: as for `ring_attention`.
        layout: layout for forwards without `sequence_layout`.
        execution: the strategy, backend, same_bits and transport that `register` got.
        ignore: keywords of a forward that are not for the attention.
    """

    name: str
    group: Group
    layout: str
    execution: ExecutionOptions
    ignore: frozenset[str]

    def unregister(self) -> None:
        """Removes the name; models that still use it will raise."""
        package = transformers_package()
        package.AttentionInterface._global_mapping.pop(self.name, None)
        package.AttentionMaskInterface._global_mapping.pop(self.name, None)
        registered.pop(self.name, None)

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exception: object) -> None:
        self.unregister()

    def cache(self, model: Any, *, block: int = 256) -> Any:
        """Makes an empty KV cache, split over the ranks, for `model.generate` or its forward.

        Every rank passes the whole prompt. A rank computes and keeps its rows of the prompt in the
        registered layout; all ranks compute each new token, and one rank (`next_rank`) keeps its
        KV. All ranks get the same logits, bit for bit; sampling needs the same seed on all ranks.
        Layers with a sliding window keep all rows too. The states of recurrent layers live whole on
        every rank; with them, all ranks compute all rows of what follows the first prompt.

        Args:
            model: a model with this implementation and a language model's head. It gets hooks,
                which do nothing with other caches.
            block: number of consecutive new tokens that one rank keeps.

        Returns:
            A `transformers.Cache`; its `layout` has the positions of each rank.

        Raises:
            ValueError: the model has another implementation, or `block` is less than 1.
            TypeError: the model's forward does not pass keywords on.
        """
        implementation = model.config.get_text_config()._attn_implementation
        if implementation != self.name:
            raise ValueError(
                f"model has attn_implementation {implementation!r}, the cache is for "
                f"{self.name!r}: call model.set_attn_implementation({self.name!r})"
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
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """The attention function that models call.

        `query`, `key` and `value` are (batch, heads, rows, headdim), `attention_mask` the mask
        function's result; of `kwargs` see `HONOURED` and `NOT_FOR_ATTENTION`, others must be None
        or False. Returns (batch, rows, nheads, headdim_v), and None instead of weights.
        """
        with reporting(self.group):
            count_call(kwargs, PLACED)
            _check_arguments(attention_mask, dropout, kwargs, self.ignore)
            check_config(module)
            causal = causal_of(module, is_causal, query.size(2))
            rule = Rule(causal, window_of(module, kwargs, causal), chunk_of(module))
            q, k, v = (as_autocast(x).transpose(1, 2) for x in (query, key, value))
            placed = _placed(kwargs.get(LAYOUT), self.layout)
            documents = (kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k"))
            if not isinstance(placed, CacheStep) and q.size(1) != k.size(1):
                raise NotImplementedError(
                    f"q has {q.size(1)} rows and k {k.size(1)}: a KV cache must be made by "
                    f"`Registration.cache(model)` of {self.name!r} and passed as past_key_values; "
                    "cross-attention is not built"
                )
            if "position_ids" in kwargs:
                self.check_positions(kwargs, kwargs["position_ids"], first_position(module))
        options: AttentionOptions = {
            "softmax_scale": scaling,
            "softcap": kwargs.get("softcap") or 0.0,
            "sinks": kwargs.get("s_aux"),
            "group": self.group,
            **self.execution,
        }
        if attention_mask or rule.chunk or scales_by_row_index(module):
            place = placed, documents
            return self._attend_by_mask(module, q, k, v, attention_mask, rule, place, options), None
        options["causal"], options["window_size"] = rule.causal, rule.window
        if isinstance(placed, CacheStep) and placed.chunk is None:
            return tree_decode(q, k, v, layout=placed.cache, **_for_decode(options)), None
        options["layout"] = placed.layouts if isinstance(placed, CacheStep) else placed
        options["cu_seqlens"], options["cu_seqlens_k"] = documents
        return ring_attention(q, k, v, **options), None

    @left_out_of_graphs(
        "chunked attention, padding, images and Llama 4's scaled queries are not compiled: compile "
        "without fullgraph=True, which leaves their attention out"
    )
    def _attend_by_mask(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch_mask: BatchMask | None,
        rule: Rule,
        place: tuple[str | SequenceLayout | CacheStep, tuple[Tensor | None, Tensor | None]],
        options: AttentionOptions,
    ) -> Tensor:
        """Attention by a mask of slices; see `attend`."""
        with reporting(self.group):
            rank, rows, batch = dist.get_rank(groups.check_group(self.group)), q.size(1), q.size(0)
            layout_or_step, documents = place
            cuts = checks.check_cu_seqlens("cu_seq_lens_q", documents[0])
            step = self._step(layout_or_step, rows, cuts)
            seqlen = step.cache.seqlen
            past = seqlen - step.num_new(rows)
            if batch_mask is not None and step is layout_or_step:
                raise NotImplementedError(
                    "images with a cache that is split over ranks are not built"
                )
            check_batch_mask(batch_mask, cuts, documents, (batch, seqlen))
            if scales_by_row_index(module):
                counted = torch.arange(past, past + rows)
                positions = from_document(step.position_ids(rank, rows), cuts)
                q = scaled_again(module, q, counted, positions)
        batch_mask = batch_mask or BatchMask(seqlen, ((seqlen, ()),))
        each = batch_mask.rows if len({*batch_mask.rows}) > 1 else batch_mask.rows[:1]
        mask = mask_of(seqlen, each, rule, cuts, batch_mask.beyond_windows)
        options["mask"] = mask.rows(past, seqlen) if past else mask
        if step.chunk is None:
            return tree_decode(q, k, v, layout=step.cache, **_for_decode(options))
        options["layout"] = step.layouts
        if len(each) == 1:
            return ring_attention(q, k, v, **options)
        options["layout"] = repeated(step.cache, batch)
        q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
        return ring_attention(q, k, v, **options).unflatten(1, (batch, rows))[0]

    def _step(
        self, placed: str | SequenceLayout | CacheStep, rows: int, cuts: tuple[int, ...] | None
    ) -> CacheStep:
        """The forward's step; a name is a layout of `rows` rows on each rank, or of documents."""
        if isinstance(placed, CacheStep):
            return placed
        if isinstance(placed, str):
            world_size = dist.get_world_size(groups.check_group(self.group))
            total = cuts[-1] if cuts and world_size > 1 else rows * world_size
            placed = SequenceLayout.from_name(placed, total, world_size)
        return CacheStep(placed, placed)

    def place(self, given: Mapping[str, Any], rows: int) -> Place | None:
        """The places of a recurrent layer's rows, by its keywords; None if all are here."""
        with reporting(self.group):
            group = groups.check_group(self.group)
            cuts = checks.check_cu_seqlens("cu_seq_lens_q", given.get("cu_seq_lens_q"))
            step = getattr(cache_of(given), "step", None)
            step = step or self._step(_placed(given.get(LAYOUT), self.layout), rows, cuts)
            if dist.get_world_size(group) == 1 or step.chunk is None:
                return None
            if self.execution.get("transport", TransportOptions()) != TransportOptions():
                raise NotImplementedError(
                    "recurrent layers exchange with the default options: register() without "
                    "transport"
                )
        return Place(step.chunk, given.get("cu_seq_lens_q"), group)

    def mask(self, *args: Any, **kwargs: Any) -> BatchMask | None:
        """The mask function that models call; see `read_mask`."""
        with reporting(self.group):
            return read_mask(*args, **kwargs)

    def check_positions(
        self, given: Mapping[str, Any], position_ids: Tensor | None, first: int
    ) -> None:
        """Refuses positions that are not those of this rank's rows, as of a batch that is not cut.

        `given` are keywords of the forward or the attention, `first` is the position_id of the
        sequence's first token. Not checked under torch.compile, which cannot read values.
        """
        if torch.compiler.is_compiling():
            return
        group = groups.check_group(self.group)
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if position_ids is None:
            if world_size == 1:
                return
            raise ValueError(
                "position_ids must be passed to the model, which else counts every rank's rows "
                "from 0: ring_attn.shard_batch makes them"
            )
        placed = _placed(given.get(LAYOUT), self.layout)
        cuts = checks.check_cu_seqlens("cu_seq_lens_q", given.get("cu_seq_lens_q"))
        step = self._step(placed, position_ids.size(-1), cuts)
        checked = (position_ids._version, (step, cuts, rank, first))
        if _validated.get(position_ids) == checked:
            return
        expected = step.position_ids(rank, position_ids.size(-1))
        allowed = [expected + first, from_document(expected, cuts) + first]
        got = position_ids.detach().cpu()
        for values in allowed:
            if got.ndim == 2 and got.size(1) == len(values) and bool((got == values).all()):
                _validated[position_ids] = checked
                return
        raise ValueError(
            f"position_ids of rank {rank} must be those of its rows, {_shown(allowed[0])}, got "
            f"shape {tuple(got.shape)} with {_shown(got.flatten())}: cut input_ids, labels and "
            f"positions with ring_attn.shard_batch in the attention's layout, {step.cache} "
            f"({LAYOUT}= of the forward tells another); documents "
            "whose positions start at 0 need cu_seq_lens_q and cu_seq_lens_k of the whole sequence"
        )


def register(
    group: Group = None,
    layout: str = "contiguous",
    *,
    name: str = "ring_attn",
    ignore: Collection[str] = (),
    **execution: Unpack[ExecutionOptions],
) -> Registration:
    """Registers `attn_implementation="ring_attn"` with transformers, for this rank's shards.

    Supported: GQA, causal and bidirectional models, sliding windows and chunks (Llama 4) by layer,
    softcap, sinks, scaling, packed documents (`cu_seq_lens_q`), padding at the end of rows, images
    whose tokens all see each other (Gemma 3), autocast, recurrent layers (delta rules, Mamba,
    convolutions). Refused: other padding and masks, dropout, output_attentions, RoPE that depends
    on the length seen so far (dynamic, longrope), recurrent layers that are not known (see
    `register_recurrence`), compiled or with transport, padding or images with a cache, and unknown
    keywords that reach the attention. Attention with chunks, padding or images is left out of
    compiled graphs.

    If the model passes `position_ids` to its attention, as almost all models but Llama 4 do, they
    are checked against the layout, except under torch.compile. Poolers like BERT's read the first
    row, which only one rank has.

    Args:
        group: as for `ring_attention`.
        layout: layout of prompts, and of forwards without `sequence_layout`: "contiguous", "zigzag"
            or "striped".
        name: the name to register; each group or layout in use needs its own.
        ignore: keywords of the models' forward that are not for the attention, such as those of
            your own loss function.
        **execution: strategy, backend, same_bits and transport, as for `ring_attention`.

    Returns:
        A handle: `unregister()`, `cache(model)`.

    Raises:
        ImportError: transformers is not installed, or older than version 5.
        ValueError: the name is taken or has a meaning in transformers, or the layout, strategy or
            backend is unknown.
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
    ignored = frozenset(
        checks.check_name("each of ignore", one) for one in as_tuple("ignore", ignore)
    )
    if not isinstance(layout, str):
        raise TypeError(
            f"layout must be one of {list(LAYOUTS)}, got {layout!r}: lengths differ from batch to "
            f"batch, so a SequenceLayout goes to the model's forward as {LAYOUT}="
        )
    SequenceLayout.from_name(layout, 0, 1)
    if "flash" in name or "/" in name or "paged" in name:
        raise ValueError(
            f"name must not contain 'flash', 'paged' or '/', which mean something to transformers, "
            f"got {name!r}"
        )
    if name in package.AttentionInterface._global_mapping:
        raise ValueError(
            f"attn_implementation {name!r} is registered already: call unregister() of its handle, "
            "or give another name"
        )
    ring = Registration(name, group, layout, execution, ignored)
    watch_models(package)
    registered[name] = ring
    package.AttentionInterface.register(name, ring.attend)
    package.AttentionMaskInterface.register(name, ring.mask)
    return ring


def _check_arguments(
    attention_mask: object, dropout: float, kwargs: dict[str, Any], ignore: frozenset[str]
) -> None:
    if not isinstance(attention_mask, (BatchMask, type(None))):
        shape = tuple(getattr(attention_mask, "shape", ()))
        raise NotImplementedError(
            f"attention_mask must be (batch, seqlen), got {type(attention_mask).__name__} of shape "
            f"{shape}: a mask of your own is not built; mark documents by cu_seq_lens_q and "
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
                name, "it is not known here; register(ignore=...) if it is not for the attention"
            )
            raise NotImplementedError(f"{name} reached the attention: {reason}")


def _placed(given: object, name: str) -> str | SequenceLayout | CacheStep:
    """The layout of the rows: the forward's, else the registered name."""
    if given is None:
        return name
    if not isinstance(given, (str, SequenceLayout, CacheStep)):
        raise TypeError(f"{LAYOUT} must be a SequenceLayout or one of {LAYOUTS}, got {given!r}")
    return given


def _for_decode(options: AttentionOptions) -> Any:
    return {name: x for name, x in options.items() if name in DECODE_OPTIONS}


# position_ids -> (their version, the key of their checked values). All layers of a model share
# them, and reading them on a GPU synchronises.
_validated: Any = WeakTensorKeyDictionary()


def _shown(positions: Tensor) -> str:
    values = positions.tolist()
    return str(values) if len(values) <= 8 else f"{values[:4]} ... {values[-4:]}"


def transformers_package() -> ModuleType:
    """The package transformers; refuses versions without the interface that this module needs."""
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
