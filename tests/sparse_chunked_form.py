"""The chunked form in float64 over the rows that a chunk touches: a reference for real sizes, on any device.

One stream at a time, forward and backward. Decays between two tokens are quotients exp(L_i) / exp(L_j), which
is exact enough in float64 while gates are mild; a token's write slots are distinct. `tests/chunked_form.py`
has neither limit and is what this one is held to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["gradients"]


@dataclass
class _Chunk:
    """What the backward needs of a chunk; U rows of the bank, C tokens."""

    rows: Tensor  # [U]
    k_at: Tensor  # [C, W], places among the rows
    q_at: Tensor  # [C, R]
    keys: Tensor  # [C, U]
    queries: Tensor  # [C, U]
    decay: Tensor  # exp(L) [C, U]
    beta: Tensor  # [C, 1]
    x: Tensor  # [C, C]
    qx: Tensor  # [C, C]
    delta: Tensor  # [C, D]
    err: Tensor  # [C, D]
    start: Tensor  # [U, D]


def _rounded(rows: Tensor, dtype: torch.dtype | None) -> Tensor:
    return rows if dtype is None else rows.to(dtype).double()


def _advance(bank: Tensor, tokens: dict[str, Tensor], part: slice, round_rows: torch.dtype | None) -> _Chunk:
    k_idx, q_idx = tokens["k_idx"][part], tokens["q_idx"][part]
    C, W = k_idx.shape
    rows, places = torch.unique(torch.cat([k_idx, q_idx], 1), return_inverse=True)
    k_at, q_at = places[:, :W], places[:, W:]
    empty = torch.zeros(C, len(rows), dtype=torch.float64, device=bank.device)
    keys = empty.scatter(1, k_at, tokens["k_val"][part])
    queries = empty.scatter_add(1, q_at, tokens["q_val"][part])
    gates = tokens["g"][part].expand(k_idx.shape)
    decay = empty.scatter(1, k_at, gates).cumsum(0).exp()
    beta, start = tokens["beta"][part], bank[rows]
    before = keys / decay
    a = (keys * decay) @ before.T
    qk = ((queries * decay) @ before.T).tril()
    identity = torch.eye(C, dtype=torch.float64, device=bank.device)
    lower = a.tril(-1)
    x = torch.linalg.solve_triangular(identity + beta * lower, identity, upper=False, unitriangular=True)
    residual = tokens["v"][part] - (keys * decay) @ start
    delta = x @ (beta * residual)
    last = decay[-1]
    bank[rows] = _rounded(last[:, None] * start + (before * last).T @ delta, round_rows)
    return _Chunk(
        rows, k_at, q_at, keys, queries, decay, beta, x, qk @ x, delta, residual - lower @ delta, start
    )


def _retreat(c: _Chunk, grad_bank: Tensor, gr: Tensor, round_rows: torch.dtype | None) -> dict[str, Tensor]:
    after, last = grad_bank[c.rows], c.decay[-1]
    to_end = last / c.decay
    lam = c.qx.T @ gr + c.x.T @ ((c.keys * to_end) @ after)
    d_k_pd = c.delta @ after.T
    d_tot = last * (after * c.start).sum(1)
    d_k_eff, d_q_w = (-c.beta * lam) @ c.start.T, gr @ c.start.T
    of_writes = _rounded(last[:, None] * after + (c.keys * c.decay).T @ (-c.beta * lam), round_rows)
    grad_bank[c.rows] = _rounded(of_writes + (c.queries * c.decay).T @ gr, round_rows)
    d_a = (c.beta * -(lam @ c.delta.T)).tril(-1)
    d_qk = (gr @ c.delta.T).tril()
    before = c.keys / c.decay
    row, col = (d_a @ before) * c.decay, (d_a.T @ (c.keys * c.decay)) / c.decay
    kvqk, qv = (d_qk.T @ (c.queries * c.decay)) / c.decay, (d_qk @ before) * c.decay
    dl = c.keys * (row - col - kvqk + d_k_eff * c.decay) + c.queries * (qv + d_q_w * c.decay)
    dr = d_k_pd * c.keys * to_end
    grad_x = dl.flip(0).cumsum(0).flip(0) + dr.cumsum(0) - dr + d_tot
    return {
        "k_val": (row + col + kvqk + d_k_eff * c.decay + d_k_pd * to_end).gather(1, c.k_at),
        "v": c.beta * lam,
        "beta": (lam * c.err).sum(1, keepdim=True),
        "g": grad_x.gather(1, c.k_at),
        "q_val": (qv + d_q_w * c.decay).gather(1, c.q_at),
    }


def gradients(
    bank: Tensor,
    tokens: dict[str, Tensor],
    grad_readings: Tensor,
    chunk: int,
    round_rows: torch.dtype | None,
) -> dict[str, Tensor]:
    """Gradients of one stream.

    Parameters
    ----------
    bank : Tensor
        [S, D], float64; advanced here.
    tokens : dict of Tensor
        The token tensors of the op by name, [T, *], float64; indices are slots of the stream.
    grad_readings : Tensor
        [T, D].
    chunk : int
        C.
    round_rows : torch.dtype, optional
        Round bank rows to this dtype at the end of a chunk, and gradient rows after its writes and its reads.

    Returns
    -------
    dict
        ``memory`` [S, D] and those of the token tensors; that of g per write, [T, W].
    """
    T = grad_readings.shape[0]
    parts = [slice(first, min(first + chunk, T)) for first in range(0, T, chunk)]
    chunks = [_advance(bank, tokens, part, round_rows) for part in parts]
    grad_bank = torch.zeros_like(bank)
    found = []
    for part, done in zip(reversed(parts), reversed(chunks), strict=True):
        found.append(_retreat(done, grad_bank, grad_readings[part], round_rows))
    joined = {name: torch.cat([one[name] for one in reversed(found)]) for name in found[0]}
    return joined | {"memory": grad_bank}
