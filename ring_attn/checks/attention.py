"""Check the arguments that users pass to attention. Nothing here communicates.

Checks raise `ValueError` for shapes and options, `TypeError` for dtypes and types,
`NotImplementedError` for combinations that are not supported, and `RuntimeError` for the state of
the process group. Each message names the requirement, the value, and a remedy. Most checks return
the checked value. A check depends only on arguments that all ranks share, or on a rank's shard, so
an argument that is wrong on every rank raises an error on every rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, MutableMapping, Sequence
from difflib import get_close_matches
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.weak import WeakTensorKeyDictionary

from ring_attn.core.dtypes import DTYPES
from ring_attn.core.layout import LAYOUTS, SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.torch_private import is_batched, is_grad_tracking, is_legacy_batched
from ring_attn.transport import capture
from ring_attn.transport.groups import check_group_device
from ring_attn.values.checks import as_int, check_dim, check_flag, check_number, check_type
from ring_attn.values.compiling import cached

# Scores are float32 for most dtypes. Within these bounds softmax_scale, softcap and their quotients
# are normal float32 numbers, and so are scaled scores of products up to 2**64.
SMALLEST_FACTOR, LARGEST_FACTOR = 2.0**-63, 2.0**63


@cached
def check_results(return_lse: bool, return_max_logits: bool, dropout_p: float) -> None:
    """Check the types of the options for results, and refuse dropout."""
    check_flag("return_lse", return_lse)
    check_flag("return_max_logits", return_max_logits)
    check_number("dropout_p", dropout_p)
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"dropout_p must be 0, got {dropout_p}: attention dropout is not supported"
        )


def check_tensors(q: Tensor, k: Tensor, v: Tensor, *, packed: bool, paged: bool = False) -> None:
    """Check types, dtypes, devices and shapes of q, k and v, each of them and together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_floating(name, x)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"q, k, v must have one dtype, got q {q.dtype} and {name} {x.dtype}")
        if x.device != q.device:
            raise ValueError(
                f"q, k, v must be on one device, got q on {q.device} and {name} on {x.device}"
            )
    if q.device.type not in ("cpu", "cuda"):
        raise ValueError(f"q must be on cpu or cuda, got {q.device}")
    _check_shapes(q, k, v, packed=packed, paged=paged)


def check_floating(name: str, x: Tensor, words: str = "a torch.Tensor") -> None:
    """Refuse values that are not plain tensors of a dtype that attention takes."""
    if not isinstance(x, Tensor):
        check_type(name, x, Tensor, words)
    check_plain(name, x)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")


def check_plain(name: str, x: Tensor) -> None:
    """Refuse tensors that are not plain and dense, or wrapped by torch.func or forward mode."""
    if hasattr(x, "placements") or x.is_nested or x.layout is not torch.strided:
        raise TypeError(
            f"{name} must be a plain dense tensor, the rank's shard, got {type(x).__name__} "
            f"({x.layout}); pass {name}.to_local() for a DTensor, {name}.to_dense() for a sparse "
            "tensor, and one packed sequence with cu_seqlens for a nested tensor"
        )
    # A compiler cannot trace these functions, and refuses such tensors itself.
    if not torch.compiler.is_compiling() and (
        is_batched(x) or is_legacy_batched(x) or is_grad_tracking(x)
    ):
        raise NotImplementedError(
            f"transforms of torch.func (grad, jvp, vmap, ...) are not supported, got {name} inside "
            "a transform; use backward() or torch.autograd.grad without is_grads_batched, and a "
            "batch dim"
        )
    if forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError(
            "forward-mode differentiation (torch.autograd.forward_ad) is not supported, got "
            f"{name} with a tangent; use backward() or torch.autograd.grad"
        )


def check_capture(name: str, x: Tensor) -> None:
    """Refuse a call while a CUDA graph is captured, since a replay runs no code on the host."""
    if capture.captures(x.device):
        raise NotImplementedError(
            f"{name} cannot be captured in a CUDA graph, because it runs code on the host: capture "
            "the code around it, or compile without mode='reduce-overhead'"
        )


def check_differentiated(**tensors: Tensor | None) -> bool:
    """Return whether a backward may follow; if so, refuse tensors that autograd cannot save."""
    if not torch.is_grad_enabled():
        return False
    for x in tensors.values():
        if x is not None and x.requires_grad:
            break
    else:
        return False
    if torch.compiler.is_compiling():  # a compiler cannot trace is_inference, and checks it itself
        return True
    for name, x in tensors.items():
        if x is not None and x.is_inference():
            raise ValueError(
                f"{name} was made under torch.inference_mode(), so autograd cannot save it for the "
                f"backward, but an input requires a gradient; pass {name}.clone(), or call under "
                "torch.no_grad()"
            )
    return True


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, *, packed: bool, paged: bool) -> None:
    """Check the shapes of q, k and v. With `paged`, k and v are a pool of pages."""

    # A function, called for errors only: text with shapes would bind a graph to these shapes.
    def shapes() -> str:
        return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"

    dims = {q.ndim, k.ndim, v.ndim}
    if dims == {3} and not packed:
        raise ValueError(
            "q, k, v of shape (rows, nheads, headdim) are packed and need cu_seqlens, but got "
            f"{shapes()} without cu_seqlens: pass cu_seqlens, or (batch, rows, nheads, headdim)"
        )
    if dims not in ({3}, {4}):
        raise ValueError(
            "q, k, v must all be (batch, rows, nheads, headdim), or (rows, nheads, headdim) with "
            f"cu_seqlens, got {shapes()}"
        )
    if q.ndim == 4 and not paged and not q.size(0) == k.size(0) == v.size(0):
        raise ValueError(f"q, k, v must have the same batch size, got {shapes()}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k and v must have the same rows and heads, got {shapes()}")
    if q.size(-1) != k.size(-1):
        raise ValueError(f"q and k must have the same headdim, got {shapes()}")
    nheads, nheads_kv = q.size(-2), k.size(-2)
    if 0 in (nheads, nheads_kv, q.size(-1), v.size(-1)) or (q.ndim == 4 and q.size(0) == 0):
        raise ValueError(f"batch, heads and headdim must not be 0, got {shapes()}")
    if nheads % nheads_kv:
        raise ValueError(
            f"nheads must be a multiple of nheads_kv, but got nheads={nheads} and "
            f"nheads_kv={nheads_kv} ({shapes()}). The expected shape is (batch, rows, nheads, "
            "headdim)"
        )


def check_scale(softmax_scale: float | None) -> float | None:
    """Return the scale; refuse a scale that is not a number, or out of range."""
    if softmax_scale is None:
        return None
    check_number("softmax_scale", softmax_scale)
    return _check_factor("softmax_scale", softmax_scale, "; the default is headdim ** -0.5")


def check_softcap(softcap: float) -> float:
    """Return the cap, 0.0 for no cap; refuse a cap that is not a number, or out of range."""
    check_number("softcap", softcap)
    if softcap == 0:
        return 0.0
    return _check_factor("softcap", softcap, "; pass 0 for no cap")


def _check_factor(name: str, value: float, remedy: str) -> float:
    """Return a factor of scores as a float; refuse factors out of range."""
    # Compared, not tested by math.isfinite: that refuses the symbol that a compiler may make of a
    # float. 0 is refused because fused operators mask before they scale, and -inf times 0 is NaN.
    if not SMALLEST_FACTOR <= value <= LARGEST_FACTOR:
        raise ValueError(
            f"{name} must be positive and finite, from 2**-63 (1.1e-19) to 2**63 (9.2e18), because "
            f"scores are float32 numbers, but got {value}{remedy}"
        )
    return float(value)


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Check that sinks are None or have a logit for each query head."""
    if sinks is None:
        return
    check_floating("sinks", sinks, "a torch.Tensor or None")
    if sinks.shape != (q.size(-2),):
        raise ValueError(
            f"sinks must have one logit for each query head, shape ({q.size(-2)},), got "
            f"{tuple(sinks.shape)}"
        )
    if sinks.device != q.device:
        raise ValueError(f"sinks must be on q's device {q.device}, got {sinks.device}")


def check_same_bits(same_bits: bool | None) -> bool | None:
    """Return `same_bits`; refuse values that are neither a bool nor None."""
    if same_bits is not None:
        check_type("same_bits", same_bits, bool, "a bool or None")
    return same_bits


def check_window(window_size: Sequence[int], causal: bool) -> tuple[int, int]:
    """Return (left, right), each at least 0, or -1 for unbounded; `causal` bounds right by 0."""
    check_flag("causal", causal)
    name = "each of window_size (-1 is unbounded)"
    left, right = (as_int(name, size, least=-1) for size in check_pair(window_size))
    if causal:
        right = min(right, 0)  # -1 stays: the mask applies causality separately
    return left, right


def check_pair(window_size: Sequence[int]) -> tuple[int, int]:
    """Return the two sides of a window; refuse values that are not a pair."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size must be a pair (left, right), got {window_size!r}")
    return window_size[0], window_size[1]


def check_boundaries(
    name: str, cu_seqlens: Tensor | None, device: torch.device | None = None
) -> None:
    """Check type, shape and device of document boundaries; `device` is q's device, if known."""
    if cu_seqlens is None:
        return
    check_type(name, cu_seqlens, Tensor, "an int32 tensor")
    check_plain(name, cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 (or int64), got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        raise ValueError(
            f"{name} must be 1-D with at least two boundaries, got shape {tuple(cu_seqlens.shape)}"
        )
    misplaced = device is not None and cu_seqlens.device not in (device, torch.device("cpu"))
    if misplaced or cu_seqlens.device.type == "meta":
        device_of_q = "" if device is None else f" {device}"
        raise ValueError(
            f"{name} must be on cpu or on q's device{device_of_q}, got {cu_seqlens.device}; pass "
            f"{name} with its values, on one of these devices"
        )


def check_cu_seqlens(name: str, cu_seqlens: Tensor | None) -> tuple[int, ...] | None:
    """Return document boundaries as ints; refuse them if they decrease or do not start at 0.

    A tensor on a GPU is read once, and again only after a change.
    """
    check_boundaries(name, cu_seqlens)
    if cu_seqlens is None:
        return None
    boundaries = _on_host(cu_seqlens)
    if boundaries[0] != 0:
        raise ValueError(f"{name} must start at 0, got {boundaries[0]}")
    for before, after in zip(boundaries, boundaries[1:], strict=False):
        if after < before:
            raise ValueError(f"{name} must not decrease, got {before} then {after}")
    return boundaries


# tensor -> (its version, its values)
_host_values: MutableMapping[Tensor, tuple[int, tuple[int, ...]]] = WeakTensorKeyDictionary()


def _on_host(x: Tensor) -> tuple[int, ...]:
    """Return the values of a tensor; a tensor on a GPU is read again only after a change."""
    if x.device.type == "cpu":
        return tuple(x.tolist())
    version, values = _host_values.get(x, (None, ()))
    if version != x._version:
        capture.refuse("the host would read cu_seqlens: make the same call once before")
        values = tuple(x.tolist())
        _host_values[x] = x._version, values
    return values


def check_documents(cu_q: tuple[int, ...] | None, cu_k: tuple[int, ...] | None) -> None:
    """Refuse documents of the keys without documents of the queries."""
    if cu_k is not None and cu_q is None:
        raise ValueError(
            "cu_seqlens_k needs cu_seqlens, the boundaries of the queries, got None: pass both, or "
            "only cu_seqlens"
        )


def check_name(option: str, name: object) -> str:
    """Return a name; refuse values that are not text."""
    check_type(option, name, str, "a name")
    return cast(str, name)


# Names of arguments in other packages, and what to pass here.
OTHER_NAMES = {
    "attention_bias": "mask=ring_attn.masks... or softcap: a bias is not supported",
    "attention_mask": "cu_seqlens, or mask=ring_attn.masks... of the whole sequence",
    "attn_bias": "mask=ring_attn.masks... or softcap: a bias is not supported",
    "attn_mask": "mask=ring_attn.masks.from_dense(...), the mask of the whole sequence",
    "block_mask": "mask=ring_attn.masks.blocks(...)",
    "cu_seqlens_q": "cu_seqlens, the boundaries in the whole sequence",
    "deterministic": "nothing, because results are always deterministic (see same_bits)",
    "enable_gqa": "nothing, because heads of q share the heads of k and v if these are fewer",
    "is_causal": "causal",
    "key_padding_mask": "cu_seqlens, or mask=ring_attn.masks.documents(...)",
    "max_seqlen_k": "nothing, because cu_seqlens_k has the lengths",
    "max_seqlen_q": "nothing, because cu_seqlens has the lengths",
    "mesh": "group",
    "process_group": "group",
    "return_attn_probs": "return_lse; no rank has all probabilities",
    "return_softmax_lse": "return_lse",
    "s_aux": "sinks",
    "scale": "softmax_scale",
    "scaling": "softmax_scale",
    "score_mod": "softcap or sinks: other functions of scores are not supported",
    "sliding_window": "window_size=(left, right)",
}

# More arguments than q, k and v are options of another package by their place.
POSITIONAL = (
    "pass options by name, as their order differs from package to package: causal=, "
    "softmax_scale=, cu_seqlens=, window_size="
)


def check_options(function: str, given: Iterable[str], known: type) -> None:
    """Refuse options that are not keys of the TypedDict `known`."""
    unknown = [name for name in given if name not in known.__annotations__]
    if not unknown:
        return
    remedies = [
        f"instead of {name} pass {OTHER_NAMES[name]}" for name in unknown if name in OTHER_NAMES
    ]
    similar = [
        f"instead of {name} pass {match}"
        for name in unknown
        if name not in OTHER_NAMES
        for match in get_close_matches(name, known.__annotations__, n=1)
    ]
    remedy = "; ".join(remedies + similar) or "leave these out"
    raise TypeError(
        f"{function} has no option {', '.join(unknown)}: {remedy}. Its options are "
        f"{', '.join(known.__annotations__)}"
    )


def check_unknown(
    function: str, positional: Sequence[object], unknown: Iterable[str], known: type
) -> None:
    """Refuse options that were passed by place, and options that do not exist."""
    check_options(function, unknown, known)
    if positional:
        raise TypeError(
            f"{function} takes q, k and v by place, but got {len(positional)} more: {POSITIONAL}"
        )


def check_layouts(layout: object) -> tuple[SequenceLayout, SequenceLayout]:
    """Return the layouts of queries and keys, from one layout for both or a pair."""
    q, k = layout if isinstance(layout, (tuple, list)) and len(layout) == 2 else (layout, layout)
    if isinstance(q, SequenceLayout) and isinstance(k, SequenceLayout):
        return q, k
    raise TypeError(
        f"layout must be one of {list(LAYOUTS)}, a SequenceLayout or a pair of them, got {layout!r}"
    )


def resolve_layouts(
    layout: object,
    rows: tuple[int, int],
    totals: tuple[int | None, int | None],
    rank: int,
    world_size: int,
) -> tuple[SequenceLayout, SequenceLayout]:
    """Return the layouts of queries and keys, checked against this rank's rows of q and of k.

    `totals` are the ends of the last documents of q and k; None without cu_seqlens.
    """
    if isinstance(layout, str):
        q, k = (
            SequenceLayout.from_name(layout, _seqlen(num, total, world_size), world_size)
            for num, total in zip(rows, totals, strict=True)
        )
    else:
        q, k = check_layouts(layout)
    check_layout("q", q, rows[0], totals[0], rank, world_size)
    check_layout("k", k, rows[1], totals[1], rank, world_size)
    return q, k


def _seqlen(rows: int, total: int | None, world_size: int) -> int:
    """Return the length of a sequence whose layout is given by name.

    With several ranks, the documents fill the sequence: a rank cannot distinguish padding from a
    shorter shard of another rank. With one rank, rows after the documents are padding.
    """
    if total is None or world_size == 1:
        return rows * world_size
    return total


def check_layout(
    name: str, layout: SequenceLayout, rows: int, total: int | None, rank: int, world_size: int
) -> None:
    """Check a layout against the group, the end of the documents, and this rank's rows."""
    if layout.world_size != world_size:
        raise ValueError(
            f"layout must be for {world_size} ranks, as the group has, got {layout} for "
            f"{layout.world_size}: pass a layout for {world_size} ranks, or the group of "
            f"{layout.world_size} ranks"
        )
    if total is not None and layout.seqlen < total:
        raise ValueError(
            f"layout must have at least {total} rows, because cu_seqlens ends there, got {layout} "
            f"with {layout.seqlen}; rows after the end of cu_seqlens are padding"
        )
    if layout.shard_len(rank) != rows:
        if total == rows == layout.seqlen:
            remedy = (
                "cu_seqlens must have the boundaries in the whole sequence of all ranks, but it "
                f"ends at {total}, where this rank's rows end; if all rows are on one rank, pass a "
                "SequenceLayout"
            )
        else:
            remedy = (
                "pass this rank's shard (layout.shard), with rows in dim 1 and heads in dim 2; if "
                "the ranks' lengths differ, or padding follows the documents, pass a "
                "SequenceLayout, not its name"
            )
        raise ValueError(
            f"{name} of the group's rank {rank} must have {layout.shard_len(rank)} rows for layout "
            f"{layout}, got {rows}: {remedy}"
        )


def warn_if_local(name: str, total: int | None, layout: SequenceLayout) -> None:
    """Warn about boundaries that may count the rows of one rank instead of the whole sequence.

    Boundaries that end where the rows of every rank end have two meanings: those of one rank, the
    same on every rank by mistake, or those of a sequence whose other rows are padding. No rank can
    distinguish them, so the call runs with the second meaning.
    """
    if total and total < layout.seqlen and set(layout.shard_lens) == {total}:
        warnings.warn(
            f"{name} ends at {total}, where the rows of every rank end, so none of its documents "
            f"has the other {layout.seqlen - total} rows of the sequence. If these are the "
            f"boundaries of one rank's documents, pass those of the whole sequence as {name}",
            stacklevel=2,
        )


def check_shard(x: Tensor, dim: int, layout: object, group: dist.ProcessGroup) -> int:
    """Check this rank's rows of any tensor, in a dim; return the rank."""
    check_dim("x", x, dim)
    check_plain("x", x)
    check_type("layout", layout, SequenceLayout)
    check_group_device(group, x.device)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    check_layout(
        "x",
        cast(SequenceLayout, layout),
        rows=x.size(dim),
        total=None,
        rank=rank,
        world_size=world_size,
    )
    return rank


def check_mask_alone(mask: object, causal: bool, window_size: Sequence[int], *cu: object) -> None:
    """Check the type of a mask, and refuse the options that it replaces; `cu` are boundaries."""
    words = "a ring_attn.Mask or None (masks.from_dense and masks.blocks make it from a tensor)"
    check_type("mask", mask, Mask, words)
    conflicts = {
        "causal": causal,
        "window_size": tuple(window_size) != (-1, -1),
        "cu_seqlens": any(boundaries is not None for boundaries in cu),
    }
    for name, passed in conflicts.items():
        if passed:
            raise ValueError(
                f"mask replaces {name}, got both: leave {name} out, and intersect masks with `&`, "
                "such as ring_attn.masks.documents(...) & ring_attn.masks.window(...)"
            )


def check_given_mask(mask: Mask, queries: int, keys: int) -> None:
    """Check the lengths of a mask against the tensors."""
    if (mask.seqlen_q, mask.seqlen_k) != (queries, keys):
        raise ValueError(
            f"mask must have {queries} queries and {keys} keys, the lengths of the whole sequence, "
            f"got {mask.seqlen_q} and {mask.seqlen_k}"
        )
