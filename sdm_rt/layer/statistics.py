"""What a layer reports about its use of slots and the size of its rows: detached tensors, a value a head."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["access_statistics", "norm_statistics"]


@torch.no_grad()
def access_statistics(k_idx: Tensor, q_idx: Tensor, slots: int, is_real: Tensor | None) -> dict[str, Tensor]:
    """Count how the tokens of a call use the slots of each head, all sequences together.

    Parameters
    ----------
    k_idx, q_idx : Tensor
        Slots within a stream, [N, H, W] and [N, H, R].
    slots : int
        S.
    is_real : Tensor, optional
        bool [N]; rows of padding do not count.

    Returns
    -------
    dict
        ``write_counts`` and ``read_counts``, int64 [H, S], times each slot was selected; ``write_used`` and
        ``read_used``, float32 [H], the share of slots selected at all; ``write_entropy`` and
        ``read_entropy``, float32 [H], the entropy of the counts over log S: 1 where all slots are used alike.
    """
    statistics = {}
    for name, idx in (("write", k_idx), ("read", q_idx)):
        weight = torch.ones_like(idx) if is_real is None else is_real.long().view(-1, 1, 1).expand_as(idx)
        counts = torch.zeros(idx.shape[1], slots, dtype=torch.int64, device=idx.device)
        counts.scatter_add_(1, idx.transpose(0, 1).flatten(1), weight.transpose(0, 1).flatten(1))
        share = counts.float() / counts.sum(dim=1, keepdim=True).clamp_min(1)
        statistics[f"{name}_counts"] = counts
        statistics[f"{name}_used"] = (counts > 0).float().mean(dim=1)
        statistics[f"{name}_entropy"] = torch.special.entr(share).sum(dim=1) / max(math.log(slots), 1e-9)
    return statistics


@torch.no_grad()
def norm_statistics(
    bank: Tensor, values: Tensor, readings: Tensor, slots: int, is_real: Tensor | None
) -> dict[str, Tensor]:
    """Measure 2-norms of bank rows, values and readings of a call.

    Parameters
    ----------
    bank : Tensor
        [B*H*S, D], after the call.
    values, readings : Tensor
        [N, H, D].
    slots : int
        S.
    is_real : Tensor, optional
        bool [N]; rows of padding do not count.

    Returns
    -------
    dict
        Float32 [H] each: ``bank_norm_mean`` and ``bank_norm_max`` over the rows of a head, and
        ``value_norm_mean`` and ``reading_norm_mean`` over its tokens; NaN where there is nothing to average.
    """
    heads = values.shape[1]
    norms = torch.linalg.vector_norm(bank.float(), dim=1).view(-1, heads, slots)
    statistics = {
        "bank_norm_mean": norms.mean(dim=(0, 2)),
        "bank_norm_max": norms.amax(dim=2).amax(dim=0)
        if norms.shape[0]
        else norms.new_full((heads,), torch.nan),
    }
    for name, vectors in (("value_norm_mean", values), ("reading_norm_mean", readings)):
        norms = torch.linalg.vector_norm(vectors.float(), dim=2)  # [N, H]
        if is_real is None:
            statistics[name] = norms.mean(dim=0)
        else:
            statistics[name] = norms.masked_fill(~is_real.unsqueeze(-1), 0.0).sum(dim=0) / is_real.sum()
    return statistics
