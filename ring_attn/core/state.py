"""The running state of online softmax and its merge, in plain torch: the specification.

For scores s_j of a query and values v_j, a state over a set of keys is

    m = max_j s_j        l = sum_j exp(s_j - m)        acc = sum_j exp(s_j - m) v_j

un-normalised and in float32, so `out = acc / l` and `lse = m + log(l)` (natural logarithm) are
rounded once, at the end. Two states merge by rescaling both to the greater maximum:

    m' = max(m, m2)      l' = l exp(m - m') + l2 exp(m2 - m')      (acc likewise)

Both exponents are at most 0, so a gap of 1e4 underflows to weight 0 and never overflows. An empty
set is (0, -inf, 0) and gives `out = 0`, `lse = -inf`. Any finished (out, lse) is the state
(out, lse, 1), and a sink, a logit without a value, is (0, sink, 1). (Milakov and Gimelshein,
arXiv 1805.02867; ring use: arXiv 2310.01889.)
"""

from __future__ import annotations

import torch
from torch import Tensor


class State:
    """(acc, m, l) for the q rows of one rank.

    Its parts:
        acc: (batch, rows, nheads, headdim_v) float32, float64 for float64 inputs.
        m: (batch, nheads, rows) running maximum, -inf where a row has seen nothing.
        l: (batch, nheads, rows) running sum.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        sinks: Tensor | None = None,
    ) -> None:
        """Makes an empty state; memory is allocated when the first rows are folded.

        `sinks`, (nheads,) logits of type `dtype`, are added to the denominators by `finalize`.
        """
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.sinks = sinks
        self._parts: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def m(self) -> Tensor:
        return self._filled()[1]

    def fold(self, rows: slice, acc: Tensor, m: Tensor, l: Tensor | None = None) -> None:
        """Merges the state of more keys into some rows, in place.

        Args:
            rows: the q rows.
            acc: (batch, n, nheads, headdim_v); adopted without a copy by the first fold if it has
                all rows.
            m: (batch, nheads, n).
            l: (batch, nheads, n); None is 1, which makes (acc, m) an (out, lse) pair.
        """
        acc, m = acc.to(self.dtype), m.to(self.dtype)
        if self._parts is None and acc.shape == self.shape:
            self._parts = (acc, m, torch.ones_like(m) if l is None else l.to(self.dtype))
            return
        all_acc, all_m, all_l = self._filled()
        own_acc, own_m, own_l = all_acc[:, rows], all_m[:, :, rows], all_l[:, :, rows]
        m_new, keep, add = _weights(own_m, m)
        own_acc.mul_(_to_rows(keep)).addcmul_(acc, _to_rows(add))
        own_l.mul_(keep)
        # addcmul_ rounds once, as for acc.
        own_l.add_(add) if l is None else own_l.addcmul_(l, add)
        own_m.copy_(m_new)

    def finalize(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Normalises and rounds `out` to `dtype`, once; consumes the state.

        Returns:
            `out` (batch, rows, nheads, headdim_v) and `lse` (batch, nheads, rows).
        """
        acc, m, l = self._filled()
        self._parts = None
        if self.sinks is not None:
            m, keep, add = _weights(m, self.sinks.view(1, -1, 1))
            acc.mul_(_to_rows(keep))
            l.mul_(keep).add_(add)
        lse = m + l.log()
        out = acc.div_(_to_rows(l.masked_fill_(l == 0.0, 1.0)))
        return out.to(dtype), lse

    def _filled(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._parts is None:
            batch, rows, nheads, _ = self.shape
            m = torch.full((batch, nheads, rows), -torch.inf, dtype=self.dtype, device=self.device)
            acc = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            self._parts = (acc, m, torch.zeros_like(m))
        return self._parts


def _weights(m: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The greater of two maxima, and the factors that rescale the sums of both to it."""
    m_new = torch.maximum(m, other)
    # exp(-inf - -inf) is NaN: rows that are empty on both sides get a pivot of 0.
    pivot = m_new.masked_fill(m_new == -torch.inf, 0.0)
    return m_new, (m - pivot).exp_(), (other - pivot).exp_()


def _to_rows(x: Tensor) -> Tensor:
    """(batch, nheads, rows) -> (batch, rows, nheads, 1), to scale rows of acc."""
    return x.transpose(1, 2).unsqueeze(-1)


def merge_tree(
    out: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Merges the results of disjoint sets of keys in a tree: each level merges many states at once.

    All operations are elementwise, so the bits do not depend on the number of threads.

    Args:
        out: (sets, batch, rows, nheads, headdim_v) in the type of the state.
        lse: (sets, batch, nheads, rows).
        sinks: (nheads,), merged at the root.
        dtype: type of the resulting `out`.
    """
    every = slice(None)
    left, batch = out.shape[:2]
    acc, m = out.flatten(0, 1), lse.flatten(0, 1)
    l = torch.ones_like(m)
    while left > 1:
        half = -(-left // 2)
        lower, upper = slice(0, (left - half) * batch), slice(half * batch, left * batch)
        state = _state_of(acc[lower])
        # The first fold adopts its tensors without a copy, so the second writes into acc, m and l.
        state.fold(every, acc[lower], m[lower], l[lower])
        state.fold(every, acc[upper], m[upper], l[upper])
        left = half
    sinks = None if sinks is None else sinks.to(acc.dtype)
    root = _state_of(acc[:batch], sinks)
    # Cloned: the result must not keep the memory of all ranks' results alive.
    root.fold(every, *(x[:batch].clone() for x in (acc, m, l)))
    return root.finalize(dtype)


def _state_of(acc: Tensor, sinks: Tensor | None = None) -> State:
    batch, rows, nheads, headdim_v = acc.shape
    return State((batch, rows, nheads, headdim_v), acc.dtype, acc.device, sinks)


def rounded_gradient(grad: Tensor, dtype: torch.dtype, factor: float) -> Tensor:
    """`factor * grad` in `dtype`, rounded once; may overwrite `grad`."""
    if factor == 1.0:
        return grad.to(dtype)
    if grad.dtype == dtype:
        return grad.mul_(factor)
    if grad.device.type == "cpu":  # there torch.mul would fill a temporary in grad's dtype
        return grad.mul_(factor).to(dtype)
    return torch.mul(grad, factor, out=torch.empty_like(grad, dtype=dtype))


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """(nheads,) gradient of the sinks: -sum over rows of exp(sink - lse) * delta."""
    # Rows that see no key, with a sink of -inf: avoids 0 * NaN, since their delta is 0.
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    weight = (sinks.to(lse.dtype).view(1, -1, 1) - lse).exp_()
    return weight.mul_(delta).sum((0, 2)).neg_().to(sinks.dtype)
