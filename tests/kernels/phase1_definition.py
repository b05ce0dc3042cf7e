"""Phase 1 by its definitions, entry by entry in float64, for the kernels to be compared with."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.problems import Problem

__all__ = ["Entry", "Phase1Reference", "phase1_reference"]


@dataclass(frozen=True)
class Entry:
    """One (token, lane) pair of a chunk that touches a slot; compares in sorted order."""

    slot: int
    token: int
    query: bool
    lane: int
    weight: float
    gate: float | None  # of an owner entry

    def order(self) -> tuple[int, int, bool, int]:
        return self.slot, self.token, self.query, self.lane


@dataclass(frozen=True)
class LogDecay:
    """A sum of gates: the finite ones, and how many erase."""

    finite: float = 0.0
    erasures: int = 0

    def __add__(self, gate: float) -> LogDecay:
        if gate == -math.inf:
            return LogDecay(self.finite, self.erasures + 1)
        return LogDecay(self.finite + gate, self.erasures)

    def __sub__(self, other: LogDecay) -> LogDecay:
        return LogDecay(self.finite - other.finite, self.erasures - other.erasures)

    @property
    def log(self) -> float:
        return -math.inf if self.erasures else self.finite

    @property
    def exp(self) -> float:
        return math.exp(self.log)


@dataclass
class Phase1Reference:
    """What math.md defines of one chunk of a stream; entries that touch no slot hold 0."""

    entries: list[Entry]  # sorted
    log_k: Tensor  # [C, W]
    log_q: Tensor  # [C, R]
    rex: Tensor  # [C, W]
    k_eff: Tensor  # [C, W]
    q_w: Tensor  # [C, R]
    cpe: Tensor  # [C, W]
    flags: Tensor  # uint8 [C, W]; 1: last K entry of its slot, 2: its only one
    strength: Tensor  # [C]
    slots: list[tuple[int, int, int]]  # of each written slot: slot, first K entry, K entries
    slot_decay: list[float]  # of each written slot: exp(tot)
    write_terms: list[tuple[float, int]]  # of each K entry in sorted order: k_val exp(rex), token
    a: Tensor  # [C, C], strictly lower
    qk: Tensor  # [C, C], lower
    x: Tensor  # [C, C]
    qx: Tensor  # [C, C]


def _entries(problem: Problem, stream: int, first: int, chunk: int) -> list[Entry]:
    length = problem.tokens if problem.lengths is None else problem.lengths[stream]
    base, found = stream * problem.slots, []
    for token in range(min(chunk, length - first)):
        t = first + token
        gates = problem.g[stream, t].tolist()
        owned = set()
        for lane, row in enumerate(problem.k_idx[stream, t].tolist()):
            slot = row - base
            if not 0 <= slot < problem.slots:
                continue
            gate = None if slot in owned else gates[lane if len(gates) > 1 else 0]
            owned.add(slot)
            found.append(Entry(slot, token, False, lane, float(problem.k_val[stream, t, lane]), gate))
        for lane, row in enumerate(problem.q_idx[stream, t].tolist()):
            if 0 <= row - base < problem.slots:
                weight = float(problem.q_val[stream, t, lane])
                found.append(Entry(row - base, token, True, lane, weight, None))
    return sorted(found, key=Entry.order)


def phase1_reference(problem: Problem, stream: int, first: int, chunk: int) -> Phase1Reference:
    """Return Phase 1 of the chunk that begins at token ``first`` of a stream."""
    C, W, R = chunk, problem.k_idx.shape[2], problem.q_idx.shape[2]

    def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    entries = _entries(problem, stream, first, chunk)
    reference = Phase1Reference(
        entries,
        *(zeros(C, n) for n in (W, R, W, W, R, W)),
        zeros(C, W, dtype=torch.uint8),
        zeros(C),
        [],
        [],
        [],
        *(zeros(C, C) for _ in range(4)),
    )
    length = problem.tokens if problem.lengths is None else problem.lengths[stream]
    real = max(0, min(C, length - first))
    reference.strength[:real] = problem.beta[stream, first : first + real, 0].double()
    groups: dict[int, list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[entry.slot].append(entry)
    for slot, group in groups.items():
        _slot(reference, slot, group)
    identity = torch.eye(C, dtype=torch.float64)
    reference.x = torch.linalg.inv(identity + reference.strength[:, None] * reference.a)
    reference.qx = reference.qk @ reference.x
    return reference


def _slot(reference: Phase1Reference, slot: int, group: list[Entry]) -> None:
    """Fill in what the entries of one slot give, in sorted order."""
    running, sums = LogDecay(), []
    for entry in group:
        if entry.gate is not None:
            running += entry.gate
        sums.append(running)
    writes = [(entry, log) for entry, log in zip(group, sums, strict=True) if not entry.query]
    for entry, log in zip(group, sums, strict=True):
        at = entry.token, entry.lane
        logs, weights = (
            (reference.log_q, reference.q_w) if entry.query else (reference.log_k, reference.k_eff)
        )
        logs[at], weights[at] = log.log, entry.weight * log.exp
        matrix = reference.qk if entry.query else reference.a
        for other, other_log in writes:
            if other.token < entry.token or (entry.query and other.token == entry.token):
                matrix[entry.token, other.token] += entry.weight * other.weight * (log - other_log).exp
    if not writes:
        return
    reference.slots.append((slot, len(reference.write_terms), len(writes)))
    reference.slot_decay.append(running.exp)
    for n, (entry, log) in enumerate(writes):
        at = entry.token, entry.lane
        rest = running - log
        reference.rex[at], reference.cpe[at] = rest.log, running.exp
        reference.flags[at] = (n == len(writes) - 1) + 2 * (len(writes) == 1)
        reference.write_terms.append((entry.weight * rest.exp, entry.token))
