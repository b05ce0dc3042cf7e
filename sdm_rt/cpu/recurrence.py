"""The recurrence of Sparse Delta Memory, token by token and vectorised over streams: the definition.

For each token of a stream, with write slots s_n = k_idx[n] and read slots q_idx[m] (arXiv 2607.07386; the
gated delta rule of arXiv 2412.06464 on the touched rows)::

    M[s_n] <- exp(g_n) M[s_n]
    r       = sum_n k_n M[s_n]
    delta   = beta (v - r)
    M[s_n] <- M[s_n] + k_n delta
    y       = sum_m q_m M[q_idx[m]]

``advance`` runs it forward in place; ``retreat`` walks back from the last token to the first, restores the
bank and returns the gradients. Sums are float32 (float64 for a float64 bank), bank rows are rounded to the
bank's dtype once a token. Products are summed by elementwise multiply and ``sum``, not by a matrix product:
then neither other columns nor other streams can reach a value, in no bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sdm_rt.cpu.snapshot import RowSnapshot

__all__ = ["Gradients", "Saved", "Streams", "Tokens", "advance", "retreat"]

SLAB_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Tokens:
    """The flat token tensors of a call, one row a token.

    Parameters
    ----------
    k_idx, q_idx : Tensor
        Bank rows [N, W] and [N, R].
    k_val, v, beta, g, q_val : Tensor
        [N, W], [N, D], [N, 1], [N, 1] or [N, W], [N, R].
    """

    k_idx: Tensor
    k_val: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor
    q_idx: Tensor
    q_val: Tensor


@dataclass(frozen=True)
class Streams:
    """The streams of a call in falling order of length, so that those still running are always a prefix.

    Parameters
    ----------
    starts : Tensor
        int64 [P], the flat row of each stream's first token.
    lengths : Tensor
        int64 [P], falling.
    """

    starts: Tensor
    lengths: Tensor

    @classmethod
    def sorted_by_length(cls, starts: list[int], lengths: list[int], device: torch.device) -> Streams:
        """Make the value from streams in any order; streams of length 0 drop out."""
        order = sorted((p for p in range(len(lengths)) if lengths[p]), key=lambda p: -lengths[p])
        return cls(
            torch.tensor([starts[p] for p in order], dtype=torch.int64, device=device),
            torch.tensor([lengths[p] for p in order], dtype=torch.int64, device=device),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of all streams together."""
        return int(self.lengths.sum())

    def slabs(self, elements_per_token: int) -> list[tuple[int, int]]:
        """Split the positions 0..max(lengths) into spans whose copies stay within a fixed budget."""
        if self.lengths.numel() == 0:
            return []
        longest = int(self.lengths[0])
        steps = max(1, SLAB_ELEMENTS // (elements_per_token * self.lengths.numel()))
        return [(first, min(first + steps, longest)) for first in range(0, longest, steps)]

    def rows(self, first: int, last: int) -> tuple[Tensor, list[int]]:
        """Return the flat rows of positions first..last in time order, and how many streams run at each."""
        positions = torch.arange(first, last, device=self.starts.device).unsqueeze(1)
        running = positions < self.lengths
        return (self.starts + positions)[running], running.sum(dim=1).tolist()


@dataclass(frozen=True)
class Gradients:
    """Gradients of a call, in the dtype of the sums; rows of padding are 0."""

    k_val: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor
    q_val: Tensor


@dataclass(frozen=True)
class Saved:
    """What a backward needs beside the inputs, in time order.

    There is room for all N rows of the token tensors; with padding, the rows behind the last token are 0.

    Parameters
    ----------
    rows : RowSnapshot
        The written rows before each token, W a token.
    error : Tensor
        v - r, [N, D], in the dtype of the sums.
    """

    rows: RowSnapshot
    error: Tensor

    @classmethod
    def empty(cls, mode: str, tokens: int, writes: int, bank: Tensor) -> Saved:
        """Return room for ``tokens`` tokens of a call on ``bank``."""
        return cls(
            RowSnapshot.empty(mode, tokens * writes, bank),
            torch.empty(tokens, bank.shape[1], dtype=sum_dtype(bank), device=bank.device),
        )

    def clear_behind(self, tokens: int) -> None:
        """Set to 0 what lies behind the first ``tokens`` tokens."""
        rows = self.error.shape[0]
        for tensor in (self.rows.payload, self.rows.scale, self.error):
            tensor[tokens * (tensor.shape[0] // max(rows, 1)) :].zero_()


def sum_dtype(bank: Tensor) -> torch.dtype:
    """Return the dtype of sums over a bank: float64 for float64, else float32."""
    return torch.float64 if bank.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class _Slab:
    """A span of tokens in time order, converted and with repeated slots resolved."""

    counts: list[int]
    rows: Tensor  # flat rows [n]
    k_idx: Tensor  # [n, W]
    k: Tensor  # [n, W]
    k_slot: Tensor  # [n, W], the weights of a lane's slot added up
    owner: Tensor  # bool [n, W], the first lane of its slot
    v: Tensor  # [n, D]
    beta: Tensor  # [n, 1]
    decay: Tensor  # exp of the slot's gate, [n, W]
    erased: Tensor  # bool [n, W], gate of -inf
    q_idx: Tensor  # [n, R]
    q: Tensor  # [n, R]

    def steps(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """Split tensors [n, ...] into one piece a position."""
        return list(zip(*(torch.split(tensor, self.counts) for tensor in tensors), strict=True))

    @property
    def repeats(self) -> int:
        """Lanes that repeat a slot of their token."""
        return int((~self.owner).sum())

    @property
    def reads_are_distinct(self) -> bool:
        """Whether no row is read twice at one position, over all streams."""
        positions = torch.arange(len(self.counts), device=self.q_idx.device)
        position = positions.repeat_interleave(torch.tensor(self.counts, device=self.q_idx.device))
        reads = (position.unsqueeze(1) * (self.q_idx.max() + 1) + self.q_idx).flatten().sort().values
        return not bool((reads[1:] == reads[:-1]).any())


def _resolve_repeats(k_idx: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (weight of each lane's slot, gate of each lane's slot, whether the lane is its slot's first)."""
    by_slot, lanes = k_idx.sort(dim=1, stable=True)
    heads = torch.ones_like(by_slot, dtype=torch.bool)
    heads[:, 1:] = by_slot[:, 1:] != by_slot[:, :-1]
    if bool(heads.all()):
        return k, g, heads
    group = heads.cumsum(dim=1) - 1
    weights = torch.zeros_like(k).scatter_add_(1, group, k.gather(1, lanes)).gather(1, group)
    places = torch.arange(k.shape[1], device=k.device).expand_as(group)
    head_place = torch.where(heads, places, torch.zeros_like(places)).cummax(dim=1).values
    gates = g.gather(1, lanes.gather(1, head_place))
    return (
        torch.empty_like(k).scatter_(1, lanes, weights),
        torch.empty_like(g).scatter_(1, lanes, gates),
        torch.empty_like(heads).scatter_(1, lanes, heads),
    )


def _slabs(bank: Tensor, tokens: Tokens, streams: Streams, backwards: bool) -> Iterator[_Slab]:
    writes, reads = tokens.k_idx.shape[1], tokens.q_idx.shape[1]
    dtype = sum_dtype(bank)
    spans = streams.slabs(4 * (writes + reads + bank.shape[1]))
    for first, last in reversed(spans) if backwards else spans:
        rows, counts = streams.rows(first, last)
        k_idx = tokens.k_idx[rows].long()
        k = tokens.k_val[rows].to(bank.dtype).to(dtype)
        g = tokens.g[rows].to(dtype).expand(-1, writes)
        k_slot, gate, owner = _resolve_repeats(k_idx, k, g)
        decay = gate.exp()
        yield _Slab(
            counts=counts,
            rows=rows,
            k_idx=k_idx,
            k=k,
            k_slot=k_slot,
            owner=owner,
            v=tokens.v[rows].to(bank.dtype).to(dtype),
            beta=tokens.beta[rows].to(dtype),
            decay=decay.masked_fill(decay < torch.finfo(dtype).tiny, 0.0),
            erased=gate == -torch.inf,
            q_idx=tokens.q_idx[rows].long(),
            q=tokens.q_val[rows].to(bank.dtype).to(dtype),
        )


def advance(
    bank: Tensor, tokens: Tokens, streams: Streams, snapshot_quant: str | None
) -> tuple[Tensor, Saved | None, int]:
    """Run all tokens of all streams, in place on the bank.

    Parameters
    ----------
    bank : Tensor
        [rows, D], advanced in place.
    tokens : Tokens
        The call's inputs; rows that no stream owns are never read.
    streams : Streams
        Where the streams lie.
    snapshot_quant : str or None
        The snapshot mode of a call that will run backward; None keeps nothing.

    Returns
    -------
    readings : Tensor
        [N, D] in the bank's dtype, 0 on padding.
    saved : Saved or None
        What ``retreat`` needs.
    repeats : int
        Write lanes that repeated a slot of their token.
    """
    columns, writes, reads = bank.shape[1], tokens.k_idx.shape[1], tokens.q_idx.shape[1]
    readings = bank.new_zeros(tokens.k_idx.shape[0], columns)
    saved = None
    if snapshot_quant is not None:
        saved = Saved.empty(snapshot_quant, tokens.k_idx.shape[0], writes, bank)
        saved.clear_behind(streams.num_tokens)
    repeats = done = 0
    for slab in _slabs(bank, tokens, streams, backwards=False):
        repeats += slab.repeats
        results = []
        for k_idx, k, k_slot, v, beta, decay, q_idx, q in slab.steps(
            slab.k_idx,
            slab.k.unsqueeze(2),
            slab.k_slot.unsqueeze(2),
            slab.v,
            slab.beta,
            slab.decay.unsqueeze(2),
            slab.q_idx,
            slab.q.unsqueeze(2),
        ):
            k_idx, q_idx = k_idx.reshape(-1), q_idx.reshape(-1)
            before = bank.index_select(0, k_idx)
            decayed = before.view(-1, writes, columns) * decay
            error = v - (k * decayed).sum(dim=1)
            after = torch.addcmul(decayed, k_slot, (beta * error).unsqueeze(1))
            # Lanes of one slot carry the same row, so their order does not matter.
            bank.index_copy_(0, k_idx, after.view(-1, columns).to(bank.dtype))
            results.append((q * bank.index_select(0, q_idx).view(-1, reads, columns)).sum(dim=1))
            if saved is not None:
                saved.rows.store(done * writes, before)
                saved.error[done : done + len(error)] = error
            done += len(error)
        readings[slab.rows] = torch.cat(results).to(bank.dtype)
    return readings, saved, repeats


def retreat(
    bank: Tensor, grad_bank: Tensor, tokens: Tokens, streams: Streams, saved: Saved, grad_readings: Tensor
) -> Gradients:
    """Walk all tokens back: restore the bank, turn the gradient of the bank into that of its start.

    Parameters
    ----------
    bank : Tensor
        [rows, D] after the call; restored in place from the snapshot.
    grad_bank : Tensor
        [rows, D] in the dtype of the sums: the gradient of the bank after the call, changed in place to that
        of the bank before it.
    tokens, streams : Tokens, Streams
        As given to ``advance``.
    saved : Saved
        What ``advance`` returned.
    grad_readings : Tensor
        Gradient of the readings, [N, D].

    Returns
    -------
    Gradients
        Each [N, *]; for lanes of one slot every lane gets the derivative of its own weight, the first lane
        alone that of the gate.
    """
    dtype = sum_dtype(bank)
    columns, writes, reads = bank.shape[1], tokens.k_idx.shape[1], tokens.q_idx.shape[1]
    count = tokens.k_idx.shape[0]
    grads = Gradients(
        *(
            torch.zeros(count, width, dtype=dtype, device=bank.device)
            for width in (writes, columns, 1, writes, reads)
        )
    )
    end = streams.num_tokens
    for slab in _slabs(bank, tokens, streams, backwards=True):
        # index_add_ wakes every thread for a few rows, which takes milliseconds where cores are busy.
        distinct = slab.reads_are_distinct
        errors = saved.error[end - len(slab.rows) : end]
        pieces = []
        steps = slab.steps(
            slab.k_idx,
            slab.k.unsqueeze(2),
            slab.k_slot.unsqueeze(2),
            slab.beta,
            slab.decay.unsqueeze(2),
            slab.q_idx,
            slab.q.unsqueeze(2),
            errors,
            grad_readings[slab.rows].to(dtype).unsqueeze(1),
        )
        for k_idx, k, k_slot, beta, decay, q_idx, q, error, grad_y in reversed(steps):
            k_idx, q_idx = k_idx.reshape(-1), q_idx.reshape(-1)
            read = bank.index_select(0, q_idx).view(-1, reads, columns)
            grad_q = (read * grad_y).sum(dim=2)
            grad_read = (q * grad_y).view(-1, columns)
            if distinct:
                grad_bank.index_copy_(0, q_idx, grad_bank.index_select(0, q_idx).add_(grad_read))
            else:
                grad_bank.index_add_(0, q_idx, grad_read)
            grad_after = grad_bank.index_select(0, k_idx).view(-1, writes, columns)
            grad_delta = (k * grad_after).sum(dim=1)
            grad_v = (beta * grad_delta).unsqueeze(1)
            before = saved.rows.load((end - len(error)) * writes, end * writes)
            decayed = before.view(-1, writes, columns) * decay
            grad_decayed = torch.addcmul(grad_after, k_slot, grad_v, value=-1)
            grad_k = (grad_after * (beta * error).unsqueeze(1)).sum(dim=2) - (decayed * grad_v).sum(dim=2)
            grad_g = (grad_decayed * decayed).sum(dim=2)
            grad_bank.index_copy_(0, k_idx, (decay * grad_decayed).view(-1, columns))
            bank.index_copy_(0, k_idx, before)
            pieces.append((grad_k, grad_delta, grad_g, grad_q))
            end -= len(error)
        grad_k, grad_delta, grad_g, grad_q = (
            torch.cat(parts) for parts in zip(*reversed(pieces), strict=True)
        )
        grads.k_val[slab.rows] = grad_k
        grads.v[slab.rows] = slab.beta * grad_delta
        grads.beta[slab.rows] = (grad_delta * errors).sum(dim=1, keepdim=True)
        # The gate of a slot is its first lane's; an erasure is flat.
        grads.g[slab.rows] = grad_g.masked_fill(~slab.owner | slab.erased, 0.0)
        grads.q_val[slab.rows] = grad_q
    return grads
