"""One write-read call with its backward: the emulator runs the planned launches, the GPU the op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sdm_rt.ops.write_read_backward_launch import aligned_gradient
from sdm_rt.ops.write_read_launch import allocate
from sdm_rt.plan.backward import backward_constants, plan_backward
from sdm_rt.plan.device import DeviceModel
from sdm_rt.plan.launch import Launch
from sdm_rt.plan.shapes import WriteReadShape
from sdm_rt.plan.step_plan import StepPlan
from tests import chunked_form
from tests.emulator.build import BUILDS, BuildKind, Replacement
from tests.emulator.harness import Call, run
from tests.kernels.backends import Backend, device_model
from tests.kernels.forward import Planned, planned_forward
from tests.problems import GRADIENTS, Problem

__all__ = ["Trained", "backward", "backward_definition", "planned_backward", "train_on_emulator"]


@dataclass(frozen=True)
class Trained:
    """What a forward and its backward leave behind."""

    readings: Tensor  # [P, T, D]
    gradients: dict[str, Tensor]  # by the names of GRADIENTS, shaped like their inputs
    restored: Tensor  # the bank after the backward


def planned_backward(
    problem: Problem,
    forward: Planned,
    model: DeviceModel,
    *,
    bank_gradient: bool,
    bank: Tensor,
    schedule: str | None = "stepwise",
) -> tuple[StepPlan, list[Call], dict[str, Tensor], list[Tensor]]:
    """Plan the backward of a planned training call; return also the gradients and the scratch."""
    shape = forward.plan.shape
    assert isinstance(shape, WriteReadShape)
    plan = plan_backward(shape, model, schedule)
    rows, dtype = problem.streams * problem.tokens, bank.dtype
    wide = torch.float32 if shape.gradient_bank_dtype == "float32" else dtype
    gradient_bank = (
        problem.grad_bank.to(wide, copy=True) if bank_gradient else torch.zeros(bank.shape, dtype=wide)
    )
    gradients = {
        "grad_k_val": torch.empty(rows, shape.writes, dtype=dtype),
        "grad_v": torch.empty(rows, shape.head_dim, dtype=dtype),
        "grad_beta": torch.empty(rows, 1),
        "grad_g": torch.empty(rows, problem.g.shape[2]),
        "grad_q_val": torch.empty(rows, shape.reads, dtype=dtype),
    }
    buffers = allocate(plan.buffers, bank.device)
    values: dict[str, Any] = {
        **dict.fromkeys(a.name for launch in plan.kernels() for a in launch.arguments),
        **{name: x for name, x in forward.values.items() if name not in buffers},
        **buffers,
        **gradients,
        **backward_constants(plan),
        "gradient_bank": gradient_bank,
        "grad_readings": aligned_gradient(problem.grad_readings.flatten(0, 1), bank),
    }
    calls = []
    for step, launch in plan.launches():
        assert isinstance(launch, Launch)
        now = values | ({} if step is None else {"step": step, "slab_step": plan.slab_step(step)})
        calls.append(Call(launch, {argument.name: now[argument.name] for argument in launch.arguments}))
    return plan, calls, gradients | {"grad_memory": gradient_bank}, list(buffers.values())


def train_on_emulator(
    problem: Problem,
    chunk: int,
    model: DeviceModel,
    *,
    bank: Tensor | None = None,
    bank_gradient: bool = True,
    snapshot: str = "none",
    grad_bank_fp32: bool = False,
    schedule: str | None = "stepwise",
    seed: int = 0,
    replacements: Sequence[Replacement] = (),
    builds: Sequence[BuildKind] = BUILDS,
) -> tuple[Trained, StepPlan]:
    """Run the planned launches of a forward and its backward; ``schedule`` is the backward's."""
    forward = planned_forward(
        problem,
        chunk,
        model,
        bank=bank,
        training=True,
        snapshot=snapshot,
        grad_bank_fp32=grad_bank_fp32,
    )
    memory = forward.values["memory"]
    plan, calls, gradients, scratch = planned_backward(
        problem, forward, model, bank_gradient=bank_gradient, bank=memory, schedule=schedule
    )
    written = [x for name, x in gradients.items() if name != "grad_memory"]
    run(
        [*forward.calls, *calls],
        outputs=[forward.readings, *written],
        scratch=[*forward.scratch, *scratch],
        seed=seed,
        replacements=replacements,
        builds=builds,
    )
    shaped = {}
    for name in GRADIENTS:
        grad = gradients[f"grad_{name}"]
        shaped[name] = grad.to(memory.dtype) if name == "memory" else grad.view(getattr(problem, name).shape)
    readings = forward.readings.view(problem.streams, problem.tokens, -1)
    return Trained(readings, shaped, memory), plan


def backward(
    backend: Backend,
    problem: Problem,
    chunk: int,
    *,
    bank_gradient: bool = True,
    seed: int = 0,
    snapshot: str = "none",
    grad_bank_fp32: bool = False,
) -> Trained:
    """Run one call and its backward; on the GPU the functional form where the final bank has a gradient."""
    if backend == "emulator":
        return train_on_emulator(
            problem,
            chunk,
            device_model(backend),
            bank_gradient=bank_gradient,
            seed=seed,
            snapshot=snapshot,
            grad_bank_fp32=grad_bank_fp32,
        )[0]
    return train_on_gpu(
        problem,
        bank_gradient=bank_gradient,
        chunk_size=chunk,
        snapshot_quant=snapshot,
        grad_bank_fp32=grad_bank_fp32,
    )


def train_on_gpu(problem: Problem, *, bank_gradient: bool, **options: object) -> Trained:
    """Run the op and its backward on the GPU."""
    from sdm_rt import sdm_write_read

    leaves = {name: getattr(problem, name).cuda().requires_grad_() for name in GRADIENTS}
    arguments = {name: leaves.get(name, x.cuda()) for name, x in problem.inputs().items()}
    keywords = {
        name: value.cuda() if isinstance(value, Tensor) else value
        for name, value in problem.options().items()
    }
    out = sdm_write_read(
        leaves["memory"],
        **arguments,
        return_final_bank=bank_gradient,
        **(keywords | options),
    )
    grad_readings = problem.grad_readings.flatten(0, 1).cuda()
    if bank_gradient:
        readings, final = out
        torch.autograd.backward([readings, final], [grad_readings, problem.grad_bank.cuda()])
    else:
        readings = out
        readings.backward(grad_readings)
    gradients = {}
    for name, leaf in leaves.items():
        assert leaf.grad is not None, f"no gradient of {name}"
        gradients[name] = leaf.grad.cpu()
    shape = problem.streams, problem.tokens, -1
    return Trained(readings.detach().cpu().view(shape), gradients, leaves["memory"].detach().cpu())


def backward_definition(
    problem: Problem,
    chunk: int,
    *,
    bank_gradient: bool,
    round_bank: torch.dtype | None,
    round_gradient: torch.dtype | None,
) -> dict[str, Tensor]:
    """Gradients by the chunked form in float64, rows rounded where the product rounds them."""
    wide = problem.cast(torch.float64)
    found = {name: torch.zeros_like(getattr(wide, name)) for name in GRADIENTS}
    for p in range(problem.streams):
        rows = slice(p * problem.slots, (p + 1) * problem.slots)
        length = problem.tokens if problem.lengths is None else problem.lengths[p]
        inputs = {name: x[p, :length] for name, x in wide.inputs().items()}
        for name in ("k_idx", "q_idx"):
            inputs[name] = inputs[name] - p * problem.slots
        grad_bank = wide.grad_bank[rows] if bank_gradient else torch.zeros_like(wide.memory[rows])
        if length == 0:
            found["memory"][rows] = grad_bank
            continue
        _, _, chunks = chunked_form.forward(
            wide.memory[rows], **inputs, chunk_size=chunk, round_rows=round_bank
        )
        grads = chunked_form.backward(chunks, wide.grad_readings[p, :length], grad_bank, round_gradient)
        found["memory"][rows] = grads["memory"]
        for name in ("k_val", "v", "beta", "q_val"):
            found[name][p, :length] = grads[name]
        gate = grads["g"]
        found["g"][p, :length] = gate if wide.g.shape[2] > 1 else gate.sum(dim=1, keepdim=True)
    return found
