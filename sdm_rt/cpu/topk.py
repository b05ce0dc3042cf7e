"""Product-key top-k in torch: the definition, for any torch device.

Scores are compared through 64-bit integer keys, (score as an ordered int32) * 2**31 + (tie rank), so that
every comparison of the rule is one total order and no result depends on how a sort treats equal elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["product_key_topk", "select", "select_backward"]

_TIE_BITS = 31


def product_key_topk(raw: Tensor, factors: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """Select the best slots of a product-key space; see :func:`sdm_rt.ops.topk.product_key_topk`.

    Parameters
    ----------
    raw : Tensor
        Factor scores, [..., sum(factors)], float64, float32, bfloat16 or float16.
    factors : sequence of int
        Widths n_0 .. n_{F-1}; their product is the number of slots S.
    k : int
        Slots to select.

    Returns
    -------
    val : Tensor
        Scores, [..., min(k, S)], in the dtype of ``raw``; differentiable.
    idx : Tensor
        Slots, int64, [..., min(k, S)], ascending.
    """
    val, idx = _ProductKeyTopk.apply(raw, tuple(factors), k)  # type: ignore[no-untyped-call]
    return val, idx


class _ProductKeyTopk(torch.autograd.Function):
    """Selection without gradient, scores with the gradient of a sum of gathered columns."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor, factors: tuple[int, ...], k: int) -> tuple[Tensor, Tensor]:
        val, idx = select(raw, factors, k)
        ctx.save_for_backward(idx)
        ctx.mark_non_differentiable(idx)
        ctx.factors = factors
        return val, idx

    @staticmethod
    def backward(ctx: Any, grad_val: Tensor, _grad_idx: Tensor) -> tuple[Tensor, None, None]:
        (idx,) = ctx.saved_tensors
        return select_backward(grad_val, idx, ctx.factors), None, None


def select_backward(grad_val: Tensor, idx: Tensor, factors: Sequence[int]) -> Tensor:
    """Return the gradient of the factor scores [..., sum(factors)]: of each slot's score, to its F columns.

    Parameters
    ----------
    grad_val, idx : Tensor
        Gradients of the selected scores, and the slots selected, [..., n].
    factors : sequence of int
        Factor widths.
    """
    accumulator = torch.promote_types(grad_val.dtype, torch.float32)
    grad = torch.zeros((*idx.shape[:-1], sum(factors)), dtype=accumulator, device=idx.device)
    columns = torch.cat(
        [column + offset for column, offset in zip(_columns(idx, factors), _offsets(factors), strict=True)],
        -1,
    )
    grad.scatter_add_(-1, columns, torch.cat([grad_val.to(accumulator)] * len(factors), dim=-1))
    return grad.to(grad_val.dtype)


def select(raw: Tensor, factors: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """Select as :func:`product_key_topk` does, without a gradient."""
    scores = torch.split(raw.float(), list(factors), dim=-1)
    total, slot = _rank_factor(scores[0], k)  # [..., n], best first
    for stage, width in enumerate(factors[1:], start=1):
        if stage > 1 and raw.dtype == torch.bfloat16:  # a sum of two is rounded only where a third is added
            total = total.bfloat16().float()
        score, column = _rank_factor(scores[stage], k)  # [..., m]
        n, m = total.shape[-1], score.shape[-1]
        c = min(k, n * m)
        i, j, tie = _candidates(n, m, c, raw.device)
        pair_total = total[..., i] + score[..., j]
        best = _order(pair_total, tie).topk(c, dim=-1).indices
        total = pair_total.gather(-1, best)
        slot = slot.gather(-1, i[best]) * width + column.gather(-1, j[best])
    idx, ascending = slot.sort(dim=-1)
    if raw.dtype == torch.float64:
        return _sum_of_columns(raw, idx, factors), idx
    return total.gather(-1, ascending).to(raw.dtype), idx


def _rank_factor(score: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the first ``k`` ranks of one factor, [..., min(k, n_f)]: scores and columns, best first."""
    columns = torch.arange(score.shape[-1], device=score.device)
    ranked = _order(score, columns).topk(min(k, score.shape[-1]), dim=-1).indices
    return score.gather(-1, ranked), ranked


def _order(score: Tensor, tie: Tensor) -> Tensor:
    """Return int64 keys that order float32 scores, NaN as -inf and -0 below +0, larger ``tie`` first."""
    bits = torch.where(score.isnan(), -torch.inf, score).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << _TIE_BITS) + tie


def _candidates(n: int, m: int, c: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs (i, j) with (i+1)(j+1) <= c, and their order among equal sums: i + j, then i."""
    pairs = [(i, j) for i in range(n) for j in range(min(m, c // (i + 1)))]
    i, j = torch.tensor(pairs, device=device).unbind(dim=1)
    return i, j, (i + j) * n + i


def _columns(idx: Tensor, factors: Sequence[int]) -> list[Tensor]:
    """Return each slot's column in every factor."""
    strides = [math.prod(factors[f + 1 :]) for f in range(len(factors))]
    return [(idx // stride) % width for stride, width in zip(strides, factors, strict=True)]


def _offsets(factors: Sequence[int]) -> list[int]:
    return [sum(factors[:f]) for f in range(len(factors))]


def _sum_of_columns(raw: Tensor, idx: Tensor, factors: Sequence[int]) -> Tensor:
    """Return the full-precision scores of the slots ``idx``, added in factor order."""
    first, *rest = (
        part.gather(-1, column)
        for part, column in zip(torch.split(raw, list(factors), dim=-1), _columns(idx, factors), strict=True)
    )
    for score in rest:
        first = first + score
    return first
