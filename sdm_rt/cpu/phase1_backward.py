"""Phase-1 backward of chunks in torch: the definition, for any torch device, float64 inside.

With w the weight of an entry, E the decay from a write at token j to a later entry of its slot, at token i::

    d_row  = sum over earlier writes of d_A[i, j] w E      d_kvqk = sum over later reads of d_QK[i, j] w E
    d_col  = sum over later writes of d_A[i, j] w E        d_qv   = sum over earlier writes of d_QK[i, j] w E
    grad_k_val = d_row + d_col + d_kvqk + d_k_eff exp(L) + d_k_pd exp(rex)
    grad_q_val = d_qv + d_q_w exp(L)
    dl(K) = w (d_row - d_col - d_kvqk) + d_k_eff w exp(L)      dl(Q) = w d_qv + d_q_w w exp(L)
    dr(K) = d_k_pd w exp(rex)
    grad_x(e) = sum of dl over the slot's entries at or after e's token + sum of dr over its writes before e

A pair whose decay holds no gate leaves dl alone: no owner entry lies at the tokens between the two.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from sdm_rt.cpu.phase1 import (
    IS_HEAD,
    IS_OWNER,
    IS_QUERY,
    IS_VALID,
    SMALLEST_DECAY,
    TOKEN_SHIFT,
    LogDecay,
    ends_of,
    pairs,
    running,
)

__all__ = ["phase1_backward"]

BYTE = 0xFF


def phase1_backward(
    payload: Tensor,
    log_k: Tensor,
    log_q: Tensor,
    rex: Tensor,
    k_val: Tensor,
    q_val: Tensor,
    g: Tensor,
    d_a: Tensor,
    d_qk: Tensor,
    d_k_eff: Tensor,
    d_k_pd: Tensor,
    d_q_w: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run Phase-1 backward of N chunks; see :func:`sdm_rt.ops.phase1_backward.phase1_backward`."""
    N, C, W = k_val.shape
    R, device = q_val.shape[2], k_val.device
    code = payload[:, : C * (W + R)].long()
    token, query = code >> TOKEN_SHIFT & BYTE, (code & IS_QUERY) != 0
    valid, head, owner = ((code & bit) != 0 for bit in (IS_VALID, IS_HEAD, IS_OWNER))
    write, read = valid & ~query, valid & query
    cell = token * (W + R) + (code & BYTE) + query * W  # in [C, W + R]

    def sorted_entries(of_writes: Tensor, of_reads: Tensor) -> Tensor:
        return torch.cat([of_writes, of_reads], dim=2).flatten(1).gather(1, cell)

    def entries_of_tokens(x: Tensor) -> Tensor:
        # An absent entry's place in the payload is its own too, so every cell is written.
        return torch.empty_like(x).scatter_(1, cell, x.masked_fill(~valid, 0.0)).view(N, C, W + R)

    places = torch.arange(code.shape[1], device=device).expand_as(code)
    start = places.masked_fill(~head, 0).cummax(dim=1).values
    end = ends_of(places, head | ~valid)
    gates = sorted_entries(g.expand(N, C, W), g.new_zeros(N, C, R))
    x = LogDecay.of_gates(gates, owner)
    log = x.within(start)
    writes, owners = running(write.long(), start), running(owner.long(), start)
    weight = sorted_entries(k_val.double(), q_val.double()).masked_fill(~valid, 0.0)

    value, log_gradient = torch.zeros(2, N * code.shape[1], dtype=torch.float64, device=device)
    flat_log = LogDecay(*(part.flatten() for part in log))
    flat_weight, flat_owners = weight.flatten(), owners.flatten()
    chunk = torch.arange(N, device=device).repeat_interleave(code.shape[1])
    flat_token, flat_read = token.flatten(), read.flatten()
    gradients = torch.stack([d_a, d_qk]).flatten()  # one index tells the cell of either
    for r, p in pairs(token, write, read, writes):
        d = gradients[((flat_read[r] * N + chunk[r]) * C + flat_token[r]) * C + flat_token[p]].double()
        d = d * flat_log.at(r).minus(flat_log.at(p)).exp()
        value.index_add_(0, r, d * flat_weight[p])
        value.index_add_(0, p, d * flat_weight[r])
        owned = (d * flat_weight[r] * flat_weight[p])[flat_owners[r] != flat_owners[p]]
        r, p = (at[flat_owners[r] != flat_owners[p]] for at in (r, p))
        log_gradient.index_add_(0, r, owned)
        log_gradient.index_add_(0, p, -owned)

    from_start = sorted_entries(d_k_eff, d_q_w).double() * _decay(sorted_entries(log_k, log_q))
    no_reads = d_q_w.new_zeros(N, C, R)
    to_end = sorted_entries(d_k_pd, no_reads).double() * _decay(sorted_entries(rex, no_reads))
    value = value.view_as(weight) + from_start + to_end
    dl = (log_gradient.view_as(weight) + weight * from_start).masked_fill(~valid, 0.0)
    dr = (weight * to_end).masked_fill(~write, 0.0)
    # An owner comes first of its token's entries, so they all stand from its place on.
    here_on = _sums_from(dl.flip(1), (places.shape[1] - 1 - end).flip(1)).flip(1)
    before = pad(_sums_from(dr, start), (1, -1)).masked_fill(places == start, 0.0)
    gradient = (here_on + before).masked_fill(~owner | (x.erasures != 0), 0.0)
    by_token = entries_of_tokens(value)
    return (
        by_token[..., :W].to(k_val.dtype).contiguous(),
        by_token[..., W:].to(k_val.dtype).contiguous(),
        entries_of_tokens(gradient)[..., :W].float().contiguous(),
    )


def _decay(log: Tensor) -> Tensor:
    """Return the exponentials of single float32 sums: 0 below the normal range."""
    decay = log.double().exp()
    return decay.masked_fill(decay < SMALLEST_DECAY, 0.0)


def _sums_from(x: Tensor, start: Tensor) -> Tensor:
    """Return sums along the rows of ``x``, each from the place ``start`` on; nothing before it enters."""
    places = torch.arange(x.shape[1], device=x.device)
    distance = 1
    while distance < x.shape[1]:
        earlier = pad(x[:, :-distance], (distance, 0))
        x = x + earlier.masked_fill(places - distance < start, 0.0)
        distance *= 2
    return x
