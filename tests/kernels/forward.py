"""One write-read call without gradients: the emulator runs the planned launches, the GPU the op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sdm_rt.ops.checks import flat_tokens, resolve_streams
from sdm_rt.ops.write_read_call import WriteReadCall
from sdm_rt.ops.write_read_launch import BankLayout, allocate, operands_of, planned_shape
from sdm_rt.plan.device import DeviceModel
from sdm_rt.plan.forward import forward_constants, plan_forward
from sdm_rt.plan.launch import Launch
from sdm_rt.plan.step_plan import StepPlan
from tests import oracle
from tests.emulator.build import BUILDS, BuildKind, Replacement
from tests.emulator.harness import Call, run
from tests.kernels.backends import Backend, device_model
from tests.problems import Problem

__all__ = ["Planned", "Written", "forward", "forward_on_emulator", "forward_oracle", "planned_forward"]


@dataclass(frozen=True)
class Written:
    """What a call leaves behind."""

    readings: Tensor  # [P, T, D]
    bank: Tensor  # [P*S, D]
    repeats: int


def forward_oracle(problem: Problem, chunk: int) -> Written:
    """The oracle in float64; bank rows rounded to the bank's dtype at the chunks' ends."""
    wide, dtype = problem.cast(torch.float64), problem.memory.dtype
    readings, bank = oracle.write_read(
        wide.memory,
        **wide.inputs(),
        slots=wide.slots,
        lengths=wide.lengths,
        round_rows=None if dtype == torch.float32 else dtype,
        round_every=chunk,
    )
    rows = problem.k_idx[problem.real()]
    return Written(readings, bank, sum(len(row) - len(row.unique()) for row in rows))


@dataclass(frozen=True)
class Planned:
    """The planned launches of a call with every argument, not run yet."""

    plan: StepPlan
    calls: list[Call]
    values: dict[str, Any]  # every argument that does not change with the step, by name
    readings: Tensor
    scratch: list[Tensor]

    def written(self, problem: Problem) -> Written:
        """What the call left behind, once its launches have run."""
        readings = self.readings.view(problem.streams, problem.tokens, -1)
        return Written(readings, self.values["memory"], int(self.values["repeats"]))


def planned_forward(
    problem: Problem,
    chunk: int,
    model: DeviceModel,
    *,
    bank: Tensor | None = None,
    training: bool = False,
    snapshot: str = "none",
    grad_bank_fp32: bool = False,
    schedule: str | None = "stepwise",
    optional: Mapping[str, Tensor] | None = None,
) -> Planned:
    """Plan a call; ``optional`` holds results that the op leaves out."""
    memory = problem.memory.clone() if bank is None else bank
    lengths = None if problem.lengths is None else torch.tensor(problem.lengths)
    layout = BankLayout.of(memory)
    one_bank = problem.slots == 0
    shape = resolve_streams(memory, problem.k_idx, problem.slots, problem.streams, one_bank, lengths, None)
    operands = operands_of(memory, flat_tokens(problem.inputs()))
    call = WriteReadCall(shape, problem.tokens, chunk, snapshot, grad_bank_fp32, schedule)
    plan = plan_forward(planned_shape(memory, operands, call, layout.alignment, training), model, schedule)
    buffers = allocate(plan.buffers, memory.device)
    readings = torch.empty(shape.rows, memory.shape[1], dtype=memory.dtype)
    values: dict[str, Any] = {
        **dict.fromkeys(a.name for launch in plan.kernels() for a in launch.arguments),
        **operands,
        **buffers,
        **forward_constants(plan),
        **(optional or {}),
        "memory": memory,
        "readings": readings,
        "lengths": lengths,
        "repeats": torch.zeros(1, dtype=torch.int64),
        "row_stride": layout.row_stride,
        "shared_bank": int(one_bank),
        "wide": 1,
    }
    calls = []
    for step, launch in plan.launches():
        assert isinstance(launch, Launch)
        assert step is not None
        now = values | {"step": step, "slab_step": plan.slab_step(step)}
        calls.append(Call(launch, {argument.name: now[argument.name] for argument in launch.arguments}))
    return Planned(plan, calls, values, readings, list(buffers.values()))


def forward_on_emulator(
    problem: Problem,
    chunk: int,
    model: DeviceModel,
    *,
    bank: Tensor | None = None,
    training: bool = False,
    snapshot: str = "none",
    seed: int = 0,
    replacements: Sequence[Replacement] = (),
    builds: Sequence[BuildKind] = BUILDS,
) -> tuple[Written, dict[str, Any], StepPlan]:
    """Run the planned launches; return also every tensor by name, and the plan."""
    planned = planned_forward(problem, chunk, model, bank=bank, training=training, snapshot=snapshot)
    run(
        planned.calls,
        outputs=[planned.readings],
        scratch=planned.scratch,
        seed=seed,
        replacements=replacements,
        builds=builds,
    )
    return planned.written(problem), planned.values, planned.plan


def forward(backend: Backend, problem: Problem, chunk: int, *, seed: int = 0) -> Written:
    """Run one call that saves nothing."""
    if backend == "emulator":
        return forward_on_emulator(problem, chunk, device_model(backend), seed=seed)[0]
    from sdm_rt import repeated_write_slots, sdm_write_read

    memory = problem.memory.cuda()
    options = {
        name: value.cuda() if isinstance(value, Tensor) else value
        for name, value in problem.options().items()
    }
    repeated_write_slots()
    with torch.no_grad():
        readings = sdm_write_read(
            memory, **{name: x.cuda() for name, x in problem.inputs().items()}, chunk_size=chunk, **options
        )
    return Written(
        readings.cpu().view(problem.streams, problem.tokens, -1), memory.cpu(), repeated_write_slots()
    )
