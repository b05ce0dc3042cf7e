"""One decode step on a backend: the emulator runs the planned launch, the GPU the public op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sdm_rt.plan.decode import plan_decode
from sdm_rt.plan.device import DeviceModel
from sdm_rt.plan.launch import Launch
from sdm_rt.plan.shapes import DecodeShape
from tests import oracle
from tests.emulator.build import Replacement
from tests.emulator.harness import Call, run
from tests.kernels.backends import Backend, device_model
from tests.problems import Problem

__all__ = ["Decoded", "decode", "decode_on_emulator", "decode_oracle", "token"]

BANK_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
VALUE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
VALUE_BITS = {"k_val": 0, "v": 2, "beta": 4, "g": 6, "q_val": 8}
WIDE_BITS = {"k_idx": 10, "q_idx": 11, "lengths": 12}


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
    streams, columns = problem.streams, memory.shape[1]
    gates = operands["g"].shape[1]
    shape = DecodeShape(
        streams=streams,
        writes=operands["k_idx"].shape[1],
        reads=operands["q_idx"].shape[1],
        head_dim=columns,
        bank_dtype=BANK_NAMES[memory.dtype],
        index_dtype=str(operands["k_idx"].dtype).removeprefix("torch."),
        gates_per_write=gates > 1,
        aligned=memory.data_ptr() % 16 == 0 and memory.stride(0) * memory.element_size() % 16 == 0,
    )
    (launch,) = plan_decode(shape, model).kernels()
    launch = replace(launch, shared_memory=launch.shared_memory + extra_shared_memory)
    codes = sum(VALUE_CODES[operands[name].dtype] << bit for name, bit in VALUE_BITS.items())
    integers = operands | ({} if lengths is None else {"lengths": lengths})
    codes |= sum(
        int(integers[name].dtype == torch.int64) << bit for name, bit in WIDE_BITS.items() if name in integers
    )
    y = torch.empty(streams, columns, dtype=memory.dtype)
    repeats = torch.zeros(1, dtype=torch.int64)
    values = {
        **operands,
        "memory": memory,
        "lengths": lengths,
        "y": y,
        "repeats": repeats,
        "row_stride": memory.stride(0),
        "S": problem.slots,
        "D": columns,
        "W": shape.writes,
        "R": shape.reads,
        "gates": gates,
        "dtypes": codes,
    }
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
    on_gpu = _strided_copy(memory)
    lengths = _lengths(problem)
    repeated_write_slots()
    readings = sdm_decode_step(
        on_gpu,
        **{name: x.cuda() for name, x in token(problem).items()},
        lengths=None if lengths is None else lengths.cuda(),
    )
    repeats = repeated_write_slots()
    memory.copy_(on_gpu)
    return Decoded(readings.cpu(), memory, repeats)


def _strided_copy(memory: Tensor) -> Tensor:
    """The tensor on the GPU with its whole storage, so that layout and offset stay."""
    storage = memory.untyped_storage()
    whole = torch.empty(0, dtype=memory.dtype).set_(storage, 0, (storage.nbytes() // memory.element_size(),))
    return whole.cuda().as_strided(memory.shape, memory.stride(), memory.storage_offset())
