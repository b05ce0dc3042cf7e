"""The oracle: the recurrence of the specification as a naive token loop that autograd differentiates.

Nothing here is fast and nothing here is shared with the product. Every formula is written as it is defined,
one stream and one token at a time, in differentiable torch operations, so the gradients are those of
automatic differentiation. Run it in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["gated_delta_net", "write_read"]


class _RoundStraightThrough(torch.autograd.Function):
    """Round to ``dtype`` and back; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _decay(g: Tensor) -> Tensor:
    """exp(g), with value 0 and gradient 0 where g is -inf, whatever the decayed row holds."""
    erase = torch.isneginf(g)
    return torch.exp(g.masked_fill(erase, 0.0)).masked_fill(erase, 0.0)


def _weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    return (weights[:, None] * rows).sum(dim=0)  # [D]


def write_read(
    memory: Tensor,
    k_idx: Tensor,
    k_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
    *,
    slots: int,
    lengths: Sequence[int] | None = None,
    round_rows: torch.dtype | None = None,
    round_every: int = 1,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence of every stream, token by token.

    Parameters
    ----------
    memory : Tensor [P*S, D]
        The bank; never changed.
    k_idx, q_idx : Tensor [P, T, W], [P, T, R]
        Bank rows. An entry outside its stream's rows is absent: no decay, no write, nothing read.
    k_val, q_val, v, beta : Tensor [P, T, W], [P, T, R], [P, T, D], [P, T, 1]
        Weights, values, write strengths.
    g : Tensor [P, T, 1] or [P, T, W]
        Log-decay per token or per write.
    slots : int
        S, the rows of one stream; 0 means that all streams share all rows.
    lengths : sequence of int, optional
        Tokens of each stream; later tokens are never looked at and read 0.
    round_rows : torch.dtype, optional
        Round written rows to this dtype (the gradient passes straight through) ...
    round_every : int
        ... after every ``round_every`` tokens of a stream, and after its last.

    Returns
    -------
    readings : Tensor [P, T, D]
    bank : Tensor [P*S, D]
        The bank after the last token.
    """
    streams, tokens, _ = k_idx.shape
    rows = slots or memory.shape[0]
    gates = g.expand(k_val.shape)  # [P, T, W]
    readings = []
    bank = memory
    for p in range(streams):
        start = p * slots
        present = range(start, start + rows)
        length = tokens if lengths is None else lengths[p]
        written_since_rounding: set[int] = set()
        for t in range(length):
            owner: dict[int, int] = {}  # written row -> its first lane
            lanes = [n for n, row in enumerate(k_idx[p, t].tolist()) if row in present]
            for n in lanes:
                owner.setdefault(int(k_idx[p, t, n]), n)
            written = list(owner)
            if written:
                place = torch.tensor([written.index(int(k_idx[p, t, n])) for n in lanes])
                weights = k_val[p, t, lanes]
                decayed = _decay(gates[p, t, list(owner.values())])[:, None] * bank[written]
                retrieved = _weighted_sum(weights, decayed[place])
                delta = beta[p, t] * (v[p, t] - retrieved)
                added = torch.zeros_like(decayed).index_add(0, place, weights[:, None] * delta)
                bank = bank.index_copy(0, torch.tensor(written), decayed + added)
                written_since_rounding.update(written)
            if round_rows is not None and ((t + 1) % round_every == 0 or t + 1 == length):
                rounded = sorted(written_since_rounding)
                if rounded:
                    new = _RoundStraightThrough.apply(bank[rounded], round_rows)
                    bank = bank.index_copy(0, torch.tensor(rounded), new)
                written_since_rounding.clear()
            read = [m for m, row in enumerate(q_idx[p, t].tolist()) if row in present]
            readings.append(_weighted_sum(q_val[p, t, read], bank[q_idx[p, t, read].long()]))
        readings.extend(memory.new_zeros(memory.shape[1]) for _ in range(length, tokens))
    if not readings:
        return memory.new_zeros(streams, tokens, memory.shape[1]), bank
    return torch.stack(readings).reshape(streams, tokens, -1), bank


def gated_delta_net(
    state: Tensor, k: Tensor, v: Tensor, q: Tensor, alpha: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Gated DeltaNet from its own definition, arXiv 2412.06464, section 3.

    ``S_t = S_{t-1} (alpha_t (I - beta_t k_t k_t^T)) + beta_t v_t k_t^T`` and ``o_t = S_t q_t``.

    Parameters
    ----------
    state : Tensor [d_v, d_k]
        S_0.
    k, v, q : Tensor [T, d_k], [T, d_v], [T, d_k]
    alpha, beta : Tensor [T]
        Decay factors (not their logarithms) and write strengths.

    Returns
    -------
    outputs : Tensor [T, d_v]
    state : Tensor [d_v, d_k]
        S_T.
    """
    identity = torch.eye(k.shape[1], dtype=k.dtype)
    outputs = []
    for t in range(k.shape[0]):
        transition = alpha[t] * (identity - beta[t] * torch.outer(k[t], k[t]))
        state = state @ transition + beta[t] * torch.outer(v[t], k[t])
        outputs.append(state @ q[t])
    return torch.stack(outputs), state
