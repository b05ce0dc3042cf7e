"""The triangular solve of each chunk in torch: the definition, for any torch device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["solve"]


def solve(a: Tensor, beta: Tensor, qk: Tensor) -> tuple[Tensor, Tensor]:
    """Return X = (I + diag(beta) tril(A, -1))^-1 and QX = tril(QK) X; see :func:`sdm_rt.ops.solve.wy_solve`.

    Row after row, by products and sums of elements, never by a matrix product: so no precision setting
    applies, what lies above the diagonal is not read, and a row reaches no earlier one.

    Parameters
    ----------
    a, qk : Tensor
        [N, C, C].
    beta : Tensor
        [N, C], of the same dtype.
    """
    chunk = a.shape[1]
    x, qx = torch.zeros_like(a), torch.zeros_like(a)
    for i in range(chunk):
        if i:
            x[:, i, :i] = -beta[:, i, None] * (a[:, i, :i, None] * x[:, :i, :i]).sum(1)
        x[:, i, i] = 1.0
        qx[:, i, : i + 1] = (qk[:, i, : i + 1, None] * x[:, : i + 1, : i + 1]).sum(1)
    return x, qx
