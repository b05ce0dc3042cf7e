"""The chunked form of the specification, forward and backward, in dense float64 tensors: a second reference.

One stream, one chunk after another. Every sum over pairs of entries becomes a sum over [C, C, S]: x[t, s] is
the gate of the owner entry of slot s at token t (0 without one), so a decay between two tokens is a
difference of prefix sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["backward", "forward"]


@dataclass
class Chunk:
    """What the backward needs of one chunk of a stream."""

    k_idx: Tensor  # [C, W]
    k_val: Tensor  # [C, W]
    q_idx: Tensor  # [C, R]
    q_val: Tensor  # [C, R]
    beta: Tensor  # [C, 1]
    owner: Tensor  # [C, W] bool: the first lane of its (token, slot)
    erase: Tensor  # [C, W] bool: a gate of -inf
    prefix: Tensor  # [C, S] sum of the finite x up to and including the token
    erasures: Tensor  # [C, S] count of -inf gates up to and including the token
    between: Tensor  # [C, C, S] exp of the sum of x over the tokens after j up to i, for j <= i
    owned: Tensor  # [C, C, S] bool: some owner entry lies in that range, so the decay depends on gates
    a: Tensor  # [C, C]
    x: Tensor  # [C, C]
    qx: Tensor  # [C, C]
    start: Tensor  # [S, D] the bank before the chunk
    delta: Tensor  # [C, D]
    err: Tensor  # [C, D]

    def decay_to(self) -> Tensor:
        """exp(L) [C, S]."""
        return torch.where(self.erasures > 0, 0.0, self.prefix.exp())

    def decay_after(self) -> Tensor:
        """exp(rex) [C, S]."""
        alive = self.erasures[-1] == self.erasures
        return torch.where(alive, (self.prefix[-1] - self.prefix).exp(), 0.0)

    def decay_of_chunk(self) -> Tensor:
        """cpe [S]."""
        return self.decay_to()[-1]


def _dense(index: Tensor, values: Tensor, slots: int) -> Tensor:
    """[C, W] entries to [C, S] sums per slot."""
    return values.new_zeros(index.shape[0], slots).scatter_add(1, index, values)


def _first_lanes(index: Tensor) -> Tensor:
    same = index[:, :, None] == index[:, None, :]  # [C, W, W]
    return ~torch.tril(same, diagonal=-1).any(dim=2)


def _prepare(
    bank: Tensor,
    k_idx: Tensor,
    k_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
) -> tuple[Chunk, Tensor, Tensor]:
    C, slots = k_idx.shape[0], bank.shape[0]
    owner = _first_lanes(k_idx)
    gates = g.expand(k_val.shape)
    erase = torch.isneginf(gates)
    finite = torch.where(owner & ~erase, gates, 0.0)
    prefix = _dense(k_idx, finite, slots).cumsum(0)
    erasures = _dense(k_idx, (owner & erase).to(k_val.dtype), slots).cumsum(0)
    alive = erasures[:, None] == erasures[None, :]
    causal = torch.tril(torch.ones(C, C, dtype=torch.bool))
    between = torch.where(alive & causal[:, :, None], (prefix[:, None] - prefix[None, :]).exp(), 0.0)
    owners = _dense(k_idx, owner.to(k_val.dtype), slots).cumsum(0)
    owned = owners[:, None] != owners[None, :]
    keys, queries = _dense(k_idx, k_val, slots), _dense(q_idx, q_val, slots)
    a = torch.einsum("is,js,ijs->ij", keys, keys, between)
    qk = torch.einsum("is,js,ijs->ij", queries, keys, between)
    lower = torch.tril(a, diagonal=-1)
    identity = torch.eye(C, dtype=bank.dtype)
    x = torch.linalg.inv(identity + beta * lower)
    qx = qk @ x
    decay = torch.where(erasures > 0, 0.0, prefix.exp())
    retrieved = (keys * decay) @ bank
    inter = (queries * decay) @ bank
    residual = v - retrieved
    delta = x @ (beta * residual)
    readings = qx @ (beta * residual) + inter
    err = residual - lower @ delta
    entries = (k_idx, k_val, q_idx, q_val, beta, owner, erase)
    chunk = Chunk(*entries, prefix, erasures, between, owned, a, x, qx, bank, delta, err)
    after = chunk.decay_of_chunk()[:, None] * bank + (keys * chunk.decay_after()).T @ delta
    return chunk, readings, after


def forward(
    bank: Tensor,
    k_idx: Tensor,
    k_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
    chunk_size: int,
    round_rows: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, list[Chunk]]:
    """One stream ([S, D] and [T, *]): readings [T, D], the final bank, and the chunks for ``backward``.

    With ``round_rows`` the bank is rounded to that dtype at the end of every chunk.
    """
    chunks, readings = [], []
    for first in range(0, k_idx.shape[0], chunk_size):
        part = slice(first, first + chunk_size)
        chunk, y, bank = _prepare(
            bank, k_idx[part], k_val[part], v[part], beta[part], g[part], q_idx[part], q_val[part]
        )
        bank = _rounded(bank, round_rows)
        chunks.append(chunk)
        readings.append(y)
    return torch.cat(readings), bank, chunks


def _rounded(rows: Tensor, dtype: torch.dtype | None) -> Tensor:
    return rows if dtype is None else rows.to(dtype).to(rows.dtype)


def _pair_sums(
    d_a: Tensor, d_qk: Tensor, keys: Tensor, queries: Tensor, between: Tensor
) -> tuple[Tensor, ...]:
    """d_row, d_col, d_kvqk, d_qv, each [C, S]."""
    return (
        torch.einsum("ij,js,ijs->is", d_a, keys, between),
        torch.einsum("ij,is,ijs->js", d_a, keys, between),
        torch.einsum("ij,is,ijs->js", d_qk, queries, between),
        torch.einsum("ij,js,ijs->is", d_qk, keys, between),
    )


def _backward_chunk(
    chunk: Chunk, gr: Tensor, grad_after: Tensor, round_rows: torch.dtype | None
) -> tuple[Tensor, dict[str, Tensor]]:
    c = chunk
    C, slots = c.k_idx.shape[0], c.start.shape[0]
    keys, queries = _dense(c.k_idx, c.k_val, slots), _dense(c.q_idx, c.q_val, slots)
    to, after = c.decay_to(), c.decay_after()
    decay = c.decay_of_chunk()
    gwr = (keys * after) @ grad_after
    lam = c.qx.T @ gr + c.x.T @ gwr
    d_k_pd = c.delta @ grad_after.T  # [C, S]: the adjoint of any entry of slot s at that token
    d_tot = decay * (grad_after * c.start).sum(1)
    d_k_eff = (-c.beta * lam) @ c.start.T
    d_q_w = gr @ c.start.T
    of_writes = _rounded(decay[:, None] * grad_after + (keys * to).T @ (-c.beta * lam), round_rows)
    grad_before = _rounded(of_writes + (queries * to).T @ gr, round_rows)
    strictly_lower = torch.tril(torch.ones(C, C, dtype=gr.dtype), diagonal=-1)
    lower = strictly_lower + torch.eye(C, dtype=gr.dtype)
    d_a = c.beta * -(lam @ c.delta.T) * strictly_lower
    d_qk = (gr @ c.delta.T) * lower
    row, col, kvqk, qv = _pair_sums(d_a, d_qk, keys, queries, c.between)
    grad_key = row + col + kvqk + d_k_eff * to + d_k_pd * after
    grad_query = qv + d_q_w * to
    # Pairs whose decay is 1 whatever the gates stay out of dl.
    row, col, kvqk, qv = _pair_sums(d_a, d_qk, keys, queries, c.between * c.owned)
    dl = keys * (row - col - kvqk + d_k_eff * to) + queries * (qv + d_q_w * to)
    dr = d_k_pd * keys * after
    from_here = dl.flip(0).cumsum(0).flip(0)
    before = torch.cat([torch.zeros_like(dr[:1]), dr[:-1].cumsum(0)])
    grad_x = (from_here + before + d_tot).gather(1, c.k_idx)
    return grad_before, {
        "k_val": grad_key.gather(1, c.k_idx),
        "v": c.beta * lam,
        "beta": (lam * c.err).sum(1, keepdim=True),
        "g": grad_x.masked_fill(~c.owner | c.erase, 0.0),
        "q_val": grad_query.gather(1, c.q_idx),
    }


def backward(
    chunks: list[Chunk],
    grad_readings: Tensor,
    grad_bank: Tensor,
    round_rows: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Gradients of one stream by the formulas of the specification; that of g comes per write, [T, W].

    With ``round_rows`` the bank's gradient is rounded to that dtype after the writes of a chunk and after its
    reads.
    """
    parts = []
    stop = grad_readings.shape[0]
    for chunk in reversed(chunks):
        start = stop - chunk.k_idx.shape[0]
        grad_bank, part = _backward_chunk(chunk, grad_readings[start:stop], grad_bank, round_rows)
        parts.append(part)
        stop = start
    gradients = {name: torch.cat([part[name] for part in reversed(parts)]) for name in parts[0]}
    return gradients | {"memory": grad_bank}
