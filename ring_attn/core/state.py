"""The running state of online softmax and its merge, in plain torch: the specification.

For scores s_j of a query and values v_j, a state over a set of keys is

    m = max_j s_j        l = sum_j exp(s_j - m)        acc = sum_j exp(s_j - m) v_j

un-normalised and in float32, so that `out = acc / l` and `lse = m + log(l)` (natural logarithm) are
rounded once, at the end. Two states merge by rescaling both to the greater maximum:

    m' = max(m, m2)      l' = l exp(m - m') + l2 exp(m2 - m')      (acc likewise)

Both exponents are at most 0, so a gap of 1e4 underflows to weight 0 and never overflows. An empty
set is (0, -inf, 0) and gives `out = 0`, `lse = -inf`. A finished (out, lse) is the state
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
        """Make an empty state, whose memory is allocated when the first rows are folded.

        Args:
            shape: (batch, rows, nheads, headdim_v).
            dtype: dtype of the state.
            device: device of the state.
            sinks: (nheads,) logits in `dtype`, which `finalize` adds to the denominators.
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
        """Merge the state of more keys into some rows, in place.

        Args:
            rows: the q rows.
            acc: (batch, n, nheads, headdim_v). The first fold adopts it without a copy if it has
                all rows.
            m: (batch, nheads, n).
            l: (batch, nheads, n); None means 1, which makes (acc, m) an (out, lse) pair.
        """
        acc, m = acc.to(self.dtype), m.to(self.dtype)
        if self._parts is None and acc.shape == self.shape:
            self._parts = (acc, m, torch.ones_like(m) if l is None else l.to(self.dtype))
            return
        all_acc, all_m, all_l = self._filled()
        own_acc, own_m, own_l = all_acc[:, rows], all_m[:, :, rows], all_l[:, :, rows]
        m_new, keep, add = weights_of(own_m, m)
        own_acc.mul_(_to_rows(keep)).addcmul_(acc, _to_rows(add))
        own_l.mul_(keep)
        if l is None:
            own_l.add_(add)
        else:
            own_l.addcmul_(l, add)  # rounds once, as for acc
        own_m.copy_(m_new)

    def finalize(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Normalise the state and round `out` to `dtype`, once; the state is consumed.

        Returns:
            `out` (batch, rows, nheads, headdim_v) and `lse` (batch, nheads, rows).
        """
        acc, m, l = self._filled()
        self._parts = None
        if self.sinks is not None:
            m, keep, add = weights_of(m, self.sinks.view(1, -1, 1))
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


def weights_of(m: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the greater of two maxima, and the factors that rescale the sums of both to it."""
    m_new = torch.maximum(m, other)
    # exp(-inf - -inf) is NaN, so rows that are empty on both sides get a pivot of 0.
    pivot = m_new.masked_fill(m_new == -torch.inf, 0.0)
    return m_new, (m - pivot).exp_(), (other - pivot).exp_()


def _to_rows(x: Tensor) -> Tensor:
    """Convert (batch, nheads, rows) to (batch, rows, nheads, 1), to scale rows of acc."""
    return x.transpose(1, 2).unsqueeze(-1)


def merge_tree(
    out: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Merge the results of disjoint sets of keys in a tree, each level of it with one call.

    All operations are elementwise, so the bits do not depend on the number of threads.

    Args:
        out: (sets, batch, rows, nheads, headdim_v) in the dtype of the state.
        lse: (sets, batch, nheads, rows).
        sinks: (nheads,), merged at the root.
        dtype: dtype of the resulting `out`.

    Returns:
        `out` (batch, rows, nheads, headdim_v) and `lse` (batch, nheads, rows).
    """
    every = slice(None)
    left, batch = out.shape[:2]
    # The sets become a part of the batch, so that one state holds all sets of a level.
    acc = out.flatten(0, 1)  # (sets * batch, rows, nheads, headdim_v)
    m = lse.flatten(0, 1)  # (sets * batch, nheads, rows)
    l = torch.ones_like(m)
    while left > 1:
        half = -(-left // 2)  # rounded up: with an odd number, the set in the middle is not merged
        lower = slice(0, (left - half) * batch)
        upper = slice(half * batch, left * batch)
        state = _state_of(acc[lower])
        # The first fold adopts its tensors without a copy, so the second writes into acc, m and l.
        state.fold(every, acc[lower], m[lower], l[lower])
        state.fold(every, acc[upper], m[upper], l[upper])
        left = half
    sinks = None if sinks is None else sinks.to(acc.dtype)
    root = _state_of(acc[:batch], sinks)
    # Cloned, because the result must not keep the results of all ranks alive.
    root.fold(every, acc[:batch].clone(), m[:batch].clone(), l[:batch].clone())
    return root.finalize(dtype)


def _state_of(acc: Tensor, sinks: Tensor | None = None) -> State:
    batch, rows, nheads, headdim_v = acc.shape
    return State((batch, rows, nheads, headdim_v), acc.dtype, acc.device, sinks)


def rounded_gradient(grad: Tensor, dtype: torch.dtype, factor: float) -> Tensor:
    """Return `factor * grad` in `dtype`, rounded once; `grad` may be overwritten."""
    if factor == 1.0:
        return grad.to(dtype)
    if grad.dtype == dtype:
        return grad.mul_(factor)
    if grad.device.type == "cpu":  # where torch.mul would fill a temporary in the dtype of grad
        return grad.mul_(factor).to(dtype)
    return torch.mul(grad, factor, out=torch.empty_like(grad, dtype=dtype))


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of the sinks, (nheads,): -sum over rows of exp(sink - lse) * delta."""
    # Rows that see no key, with a sink of -inf, have delta 0: this avoids 0 * NaN.
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    weight = (sinks.to(lse.dtype).view(1, -1, 1) - lse).exp_()
    return weight.mul_(delta).sum((0, 2)).neg_().to(sinks.dtype)
