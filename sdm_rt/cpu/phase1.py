"""Phase 1 of chunks in torch: the definition, for any torch device.

The entries of a chunk, one for each (token, lane) of kind K (write) or Q (read), are sorted by slot, token, K
before Q, lane. With x(e) the gate of the first K entry of each (slot, token) and 0 of any other entry::

    L(e)     = sum of x over the slot's entries up to e     tot = sum over all of them     rex(e) = tot - L(e)
    k_eff    = k_val exp(L)             q_w = q_val exp(L)             cpe = exp(tot)
    A[i, j]  = sum over (n, m) with k_idx[i, n] == k_idx[j, m] of k_i k_j exp(L_i - L_j),   j <  i
    QK[i, j] = sum over (n, m) with q_idx[i, n] == k_idx[j, m] of q_i k_j exp(L_i - L_j),   j <= i

Log-decays are summed in fixed point, in units of 2^-38: exactly, so running sums over a whole row of entries
may wrap around and their differences inside a slot are still right. Gates of -inf and NaN are counted beside.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["LogDecay", "Phase1", "ends_of", "pairs", "phase1", "running"]

# Bits of a payload entry; the lane stands in the lowest eight (kernels_cu/entries.cuh).
TOKEN_SHIFT = 8
IS_QUERY = 1 << 16
IS_VALID = 1 << 17
IS_HEAD = 1 << 18
IS_OWNER = 1 << 19
PAYLOAD_ALIGNMENT = 16

UNITS = 2.0**38
LARGEST_GATE = 65536.0  # exp of more is inf, of less 0
ERASURE = -3.4e38  # a gate below counts as -inf
SMALLEST_DECAY = torch.finfo(torch.float32).tiny
PAIRS_AT_ONCE = 1 << 22


class Phase1(NamedTuple):
    """What a chunk's tokens need before the bank is read; N chunks of C tokens, W writes and R reads each.

    Parameters
    ----------
    payload : Tensor
        int32 [N, C (W + R) rounded up to 16]: the sorted entries. Opaque; ``phase1_backward`` takes it.
    log_k, rex : Tensor
        float32 [N, C, W]: L of each write, and the sum of x over its slot after the write's token.
    log_q : Tensor
        float32 [N, C, R]: L of each read.
    cpe : Tensor
        float32 [N, C, W]: exp of the sum of x over all of the write's slot.
    k_eff, q_w : Tensor
        float32 [N, C, W] and [N, C, R]: the weights at the chunk's start.
    a, qk : Tensor
        float32 [N, C, C]: what a token retrieves and reads of earlier writes; 0 above the diagonal, and ``a``
        on it too.
    last, only : Tensor
        bool [N, C, W]: whether a write is the last of its slot in the chunk, and the only one.
    """

    payload: Tensor
    log_k: Tensor
    log_q: Tensor
    rex: Tensor
    cpe: Tensor
    k_eff: Tensor
    q_w: Tensor
    a: Tensor
    qk: Tensor
    last: Tensor
    only: Tensor


class LogDecay(NamedTuple):
    """Sums of gates: the finite ones in fixed point, those of -inf and NaN counted."""

    fixed: Tensor
    erasures: Tensor
    nans: Tensor

    @classmethod
    def of_gates(cls, g: Tensor, owner: Tensor) -> LogDecay:
        """Take the gate of each owner entry, 0 of any other."""
        erasure, nan = owner & (g < ERASURE), owner & g.isnan()
        finite = g.double().clamp(-LARGEST_GATE, LARGEST_GATE).masked_fill(~owner | erasure | nan, 0.0)
        return cls((finite * UNITS).round().long(), erasure.long(), nan.long())

    def at(self, index: Tensor) -> LogDecay:
        """Return the sums at the places ``index`` of the last dimension."""
        return LogDecay(*(part.gather(-1, index) for part in self))

    def minus(self, other: LogDecay) -> LogDecay:
        """Return the sums less others: what was added since."""
        return LogDecay(*(one - two for one, two in zip(self, other, strict=True)))

    def within(self, start: Tensor) -> LogDecay:
        """Return running sums along the last dimension, each from the place ``start`` on."""
        return LogDecay(*(running(part, start) for part in self))

    def log(self) -> Tensor:
        """Return the sums, float32."""
        return self._special(self.fixed.float() / UNITS, -torch.inf)

    def exp(self) -> Tensor:
        """Return their exponentials as float32 has them: 0 across an erasure and below the normal range."""
        decay = (self.fixed / UNITS).exp()
        return self._special(decay.masked_fill(decay < SMALLEST_DECAY, 0.0).float().double(), 0.0)

    def _special(self, finite: Tensor, erased: float) -> Tensor:
        return finite.masked_fill(self.erasures != 0, erased).masked_fill(self.nans != 0, torch.nan)


def running(x: Tensor, start: Tensor) -> Tensor:
    """Return running sums of integers along the last dimension, each from the place ``start`` on."""
    total = x.cumsum(-1)
    return total - (total - x).gather(-1, start)


def phase1(
    k_idx: Tensor, q_idx: Tensor, k_val: Tensor, q_val: Tensor, g: Tensor, slots: int, lengths: Tensor | None
) -> tuple[Phase1, int]:
    """Run Phase 1 of N chunks; see :func:`sdm_rt.ops.phase1.phase1_forward`.

    Parameters
    ----------
    k_idx, q_idx, k_val, q_val, g : Tensor
        Checked, [N, C, W], [N, C, R], [N, C, W], [N, C, R], [N, C, 1] or [N, C, W].
    slots : int
        S; an index outside 0..S-1 is absent.
    lengths : Tensor, optional
        [N], tokens of each chunk.

    Returns
    -------
    Phase1
        The results.
    int
        Writes that repeat a slot of their token.
    """
    N, C, W = k_idx.shape
    R, device = q_idx.shape[2], k_idx.device
    lanes = torch.cat([torch.arange(W, device=device), torch.arange(R, device=device)])
    reads = torch.arange(W + R, device=device) >= W
    tokens = torch.arange(C, device=device)
    entry = (lanes | reads * IS_QUERY) | (tokens[:, None] << TOKEN_SHIFT)  # [C, W + R]

    slot = torch.cat([k_idx.long(), q_idx.long()], dim=2)
    valid = (slot >= 0) & (slot < slots)
    if lengths is not None:
        valid &= (tokens < lengths[:, None].to(device))[..., None]
    # Stable: entries of one slot keep their order, absent ones follow as they came.
    slot, order = torch.where(valid, slot, slots).flatten(1).sort(dim=1, stable=True)
    valid = valid.flatten(1).gather(1, order)
    entry = entry.flatten().expand(N, -1).gather(1, order)
    token, query = entry >> TOKEN_SHIFT & 0xFF, (entry & IS_QUERY) != 0
    write = valid & ~query
    head = valid & _differs_from_before(slot)
    owner = write & (head | _differs_from_before(token))
    repeats = int((write & ~owner).sum())
    payload = entry | valid * IS_VALID | head * IS_HEAD | owner * IS_OWNER
    payload = pad(payload, (0, -payload.shape[1] % PAYLOAD_ALIGNMENT)).int()

    def sorted_entries(of_writes: Tensor, of_reads: Tensor) -> Tensor:
        return torch.cat([of_writes, of_reads], dim=2).flatten(1).gather(1, order)

    def entries_of_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.masked_fill(~valid, 0)
        lanes_of_tokens = torch.empty_like(x).scatter_(1, order, x).view(N, C, W + R)
        return lanes_of_tokens[..., :W].contiguous(), lanes_of_tokens[..., W:].contiguous()

    places = torch.arange(order.shape[1], device=device).expand_as(order)
    start = places.masked_fill(~head, 0).cummax(dim=1).values
    end = ends_of(places, head | ~valid)
    gates = sorted_entries(g.expand(N, C, W), g.new_zeros(N, C, R))
    log = LogDecay.of_gates(gates, owner).within(start)
    total = log.at(end)
    writes = running(write.long(), start)
    last = write & (writes == writes.gather(1, end))
    only = last & (writes == 1)
    weight = sorted_entries(k_val.double(), q_val.double())

    log_k, log_q = entries_of_tokens(log.log())
    k_eff, q_w = entries_of_tokens(weight * log.exp())
    a, qk = _gram(log, weight, token, write, query & valid, writes, C)
    return (
        Phase1(
            payload=payload,
            log_k=log_k,
            log_q=log_q,
            rex=entries_of_tokens(total.minus(log).log())[0],
            cpe=entries_of_tokens(total.exp().float())[0],
            k_eff=k_eff.float(),
            q_w=q_w.float(),
            a=a,
            qk=qk,
            last=entries_of_tokens(last)[0],
            only=entries_of_tokens(only)[0],
        ),
        repeats,
    )


def _differs_from_before(x: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(x[:, :1], dtype=torch.bool), x[:, 1:] != x[:, :-1]], dim=1)


def ends_of(places: Tensor, begins: Tensor) -> Tensor:
    """Return the last place of each place's run, where runs begin at ``begins``."""
    final = torch.ones_like(begins[:, :1])
    ends = torch.cat([begins[:, 1:], final], dim=1)
    return places.masked_fill(~ends, places.shape[1]).flip(1).cummin(dim=1).values.flip(1)


def pairs(token: Tensor, write: Tensor, read: Tensor, writes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the pairs of each entry with the writes of its slot at earlier tokens, a read's own token too.

    Parameters
    ----------
    token : Tensor
        int64 [N, entries], in sorted order.
    write, read : Tensor
        bool [N, entries], which entries are valid writes and reads.
    writes : Tensor
        int64 [N, entries], writes of the entry's slot up to its own place.

    Yields
    ------
    later, earlier : Tensor
        int64 [pairs], places among all N * entries, `later` ascending; about `PAIRS_AT_ONCE` at a time.
    """
    meets = (write | read) & (writes > 0)
    later = meets.flatten().nonzero()[:, 0]
    earlier = write.flatten().nonzero()[:, 0]
    count = writes.flatten()[later]
    first = write.flatten().cumsum(0)[later] - count  # of its writes among all
    token, read = token.flatten(), read.flatten()
    stops = count.cumsum(0)
    begin = 0
    while begin < len(later):
        before = int(stops[begin - 1]) if begin else 0
        end = int(torch.searchsorted(stops, before + PAIRS_AT_ONCE, right=True))
        part = slice(begin, max(end, begin + 1))
        r = later[part].repeat_interleave(count[part])
        within = torch.arange(len(r), device=r.device) - (
            stops[part] - count[part] - before
        ).repeat_interleave(count[part])
        p = earlier[first[part].repeat_interleave(count[part]) + within]
        keep = (token[p] < token[r]) | read[r]
        yield r[keep], p[keep]
        begin = part.stop


def _gram(
    log: LogDecay, weight: Tensor, token: Tensor, write: Tensor, read: Tensor, writes: Tensor, C: int
) -> tuple[Tensor, Tensor]:
    """Return A and QK."""
    N, entries = weight.shape
    flat = LogDecay(*(part.flatten() for part in log))
    chunk = torch.arange(N, device=weight.device)[:, None].expand(N, entries).flatten()
    # A below QK in one tensor, so that one index tells the cell.
    cells = torch.zeros(2 * N * C * C, dtype=torch.float64, device=weight.device)
    parts = pairs(token, write, read, writes)
    weight, token, read = weight.flatten(), token.flatten(), read.flatten()
    for r, p in parts:
        terms = weight[r] * weight[p] * flat.at(r).minus(flat.at(p)).exp()
        cell = ((read[r] * N + chunk[r]) * C + token[r]) * C + token[p]
        cells.scatter_add_(0, cell, terms)
    a, qk = cells.float().view(2, N, C, C)
    return a, qk
