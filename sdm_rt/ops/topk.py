"""Product-key top-k: argument checks and dispatch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from sdm_rt.cpu import topk as definition
from sdm_rt.ops.checks import BANK_DTYPES, MAX_ENTRIES, check_int

__all__ = ["product_key_topk"]

_MAX_SLOTS = 2**63 - 1


def product_key_topk(raw: Tensor, factors: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """Select the ``min(k, S)`` best of S = prod(factors) slots from their factor scores.

    Slot (c_0 .. c_{F-1}) is row (..(c_0 n_1 + c_1)..) n_{F-1} + c_{F-1} and scores the sum of its factor
    scores, added in factor order. The selection is exact and total: sums are float32, -0 counts below +0, NaN
    counts as -inf, and ties are broken by rank, so a row selects the same slots alone, in any batch and on
    any device. With bfloat16 scores and more than two factors, each partial sum is rounded to bfloat16 before
    the next factor is added.

    Parameters
    ----------
    raw : Tensor
        Factor scores, [..., sum(factors)]: the n_0 columns of factor 0, then those of factor 1, and so on.
        float32, bfloat16, float16 or float64 (float64 scores are selected by their float32 sums, and the
        values returned are the float64 sums).
    factors : sequence of int
        Factor widths n_0 .. n_{F-1}, each at least 1.
    k : int
        Slots to select, 1 to 256.

    Returns
    -------
    val : Tensor
        Scores of the selected slots, [..., min(k, S)], in the dtype of ``raw``. Differentiable once: the
        gradient of a score goes to its F columns, summed in at least float32 in a fixed order.
    idx : Tensor
        The selected slots, int64, [..., min(k, S)], ascending.

    Raises
    ------
    TypeError
        If ``raw`` is no tensor of such a dtype, or ``k`` or a factor is no int.
    ValueError
        If ``factors``, ``k`` or the width of ``raw`` is out of range.
    RuntimeError
        If ``raw`` is on a GPU.

    Notes
    -----
    The product-key construction is that of arXiv 1907.05242; the rule is spelled out in ``docs/math.md``.

    Examples
    --------
    >>> val, idx = product_key_topk(torch.tensor([1.0, 0.0, 5.0, 3.0, 4.0]), (2, 3), 2)
    >>> val, idx
    (tensor([6., 5.]), tensor([0, 3]))
    """
    factors = _checked_factors(factors)
    _check(raw, factors, k)
    if raw.device.type == "cuda":
        raise RuntimeError(
            "product_key_topk: this version has no GPU kernel for the top-k; move raw to the CPU (raw.cpu())"
        )
    return definition.product_key_topk(raw, factors, k)


def _checked_factors(factors: Sequence[int]) -> tuple[int, ...]:
    widths = tuple(factors)
    if not widths:
        raise ValueError("factors: expected at least one factor width, got none")
    for f, width in enumerate(widths):
        check_int(f"factors[{f}]", width, 1, None)
    if math.prod(widths) > _MAX_SLOTS:
        raise ValueError(f"factors: expected a product below 2**63, got {widths}")
    return widths


def _check(raw: Tensor, factors: tuple[int, ...], k: int) -> None:
    if not isinstance(raw, Tensor):
        raise TypeError(f"raw: expected a torch.Tensor, got {type(raw).__name__}")
    if raw.dtype not in BANK_DTYPES:
        raise TypeError(f"raw: expected dtype float64, float32, bfloat16 or float16, got {raw.dtype}")
    if raw.dim() < 1 or raw.shape[-1] != sum(factors):
        raise ValueError(
            f"raw: expected shape [..., {sum(factors)}], the sum of factors {factors}, got {list(raw.shape)}"
        )
    check_int("k", k, 1, MAX_ENTRIES)
