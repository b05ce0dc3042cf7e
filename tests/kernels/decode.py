"""One decode step on a backend: the emulator runs the planned launch, the GPU the public op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sdm_rt.ops.decode_launch import OPERANDS, plan_call
from sdm_rt.plan.device import DeviceModel
from sdm_rt.plan.launch import Launch
from tests import oracle
from tests.emulator.build import Replacement
from tests.emulator.harness import Call, run
from tests.kernels.backends import Backend, device_model
from tests.problems import Problem

__all__ = ["Decoded", "decode", "decode_on_emulator", "decode_oracle", "token"]


@dataclass(frozen=True)
class Decoded:
    """What a decode step leaves behind."""

    readings: Tensor  # [P, D]
    bank: Tensor  # [P*S, D]
    repeats: int


def token(problem: Problem, t: int = 0) -> dict[str, Tensor]:
    """Token t of every stream, [P, *]."""
    return {name: x[:, t].contiguous() for name, x in problem.inputs().items()}


def _lengths(problem: Problem) -> Tensor | None:
    return None if problem.lengths is None else torch.tensor(problem.lengths)


def decode_oracle(problem: Problem) -> Decoded:
    """The oracle's float64 step; rows and readings of the bank's dtype."""
    wide = problem.cast(torch.float64)
    readings, bank = oracle.write_read(
        wide.memory, **wide.inputs(), slots=wide.slots, lengths=wide.lengths, round_rows=problem.memory.dtype
    )
    real = problem.real()[:, 0]
    rows = problem.k_idx[real, 0]
    low = (torch.arange(problem.streams)[real] * problem.slots)[:, None]
    present = [
        row[(row >= start) & (row < start + problem.slots)] for row, start in zip(rows, low, strict=True)
    ]
    repeats = sum(len(row) - len(row.unique()) for row in present)
    return Decoded(readings[:, 0], bank, repeats)


def decode_on_emulator(
    problem: Problem,
    model: DeviceModel,
    *,
    bank: Tensor | None = None,
    seed: int = 0,
    replacements: Sequence[Replacement] = (),
    extra_shared_memory: int = 0,
) -> tuple[Decoded, Launch]:
    """Run the planned launch of a decode step; ``bank`` is the problem's bank in another layout."""
    memory = problem.memory.clone() if bank is None else bank
    operands = token(problem)
    lengths = _lengths(problem)
    planned = plan_call(memory, tuple(operands[name] for name in OPERANDS), lengths, model)
    assert not planned.copies_bank
    assert not planned.copies
    (launch,) = planned.plan.kernels()
    launch = replace(launch, shared_memory=launch.shared_memory + extra_shared_memory)
    y = memory.new_empty(problem.streams, memory.shape[1])
    repeats = torch.zeros(1, dtype=torch.int64)
    tensors = {**operands, "memory": memory, "lengths": lengths, "y": y, "repeats": repeats}
    values = tensors | planned.numbers
    run(
        [Call(launch, values)],
        outputs=[y],
        seed=seed,
        replacements=replacements,
        unused_shared_memory=problem.lengths is not None and not any(problem.lengths),
    )
    return Decoded(y, memory, int(repeats)), launch


def decode(backend: Backend, problem: Problem, *, bank: Tensor | None = None, seed: int = 0) -> Decoded:
    """Run one decode step; ``seed`` is the emulator's order of threads."""
    if backend == "emulator":
        return decode_on_emulator(problem, device_model(backend), bank=bank, seed=seed)[0]
    from sdm_rt import repeated_write_slots, sdm_decode_step

    memory = problem.memory.clone() if bank is None else bank
    storage = memory.untyped_storage()
    here = torch.empty(0, dtype=torch.uint8).set_(storage)
    there = here.cuda()
    # The same layout and offset on the GPU, with whatever lies beside the bank.
    on_gpu = there.view(memory.dtype).as_strided(memory.shape, memory.stride(), memory.storage_offset())
    lengths = _lengths(problem)
    repeated_write_slots()
    readings = sdm_decode_step(
        on_gpu,
        **{name: x.cuda() for name, x in token(problem).items()},
        lengths=None if lengths is None else lengths.cuda(),
    )
    repeats = repeated_write_slots()
    here.copy_(there)
    return Decoded(readings.cpu(), memory, repeats)
