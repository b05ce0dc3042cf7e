"""The forward on this GPU: calls without gradients, a training forward's launches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sdm_rt.bench.bounds import floor_bytes
from sdm_rt.bench.cases import CASES, Case, Inputs, make_inputs, shape_of
from sdm_rt.bench.kernels import kernel_times, print_kernels
from sdm_rt.bench.timing import DEVICE, copy_bandwidth, floor_ms, graph_figures, measure, peak_bytes
from sdm_rt.ops.counters import device_repeats
from sdm_rt.ops.plan_inputs import device_model
from sdm_rt.ops.write_read import sdm_write_read
from sdm_rt.ops.write_read_launch import allocate, pointers_of
from sdm_rt.plan.bound import BoundPlan
from sdm_rt.plan.forward import forward_constants, plan_forward
from sdm_rt.plan.step_plan import StepPlan
from sdm_rt.runtime import device
from sdm_rt.runtime.interop import current_stream

__all__ = ["bench_forward"]

REPEATS = 5
TOKENS = ("k_idx", "k_val", "v", "beta", "g", "q_idx", "q_val")


def no_grad_call(case: Case, inputs: Inputs, schedule: str | None = None) -> Tensor:
    """Run the op without gradients."""
    with torch.no_grad():
        return sdm_write_read(
            inputs.memory,
            *inputs.tokens(),
            chunk_size=case.chunk,
            num_memory_slots=case.slots,
            num_parallel=case.streams,
            schedule=schedule,
        )


def training_plan(case: Case, schedule: str | None = None) -> StepPlan:
    """Plan the forward of a call that a backward will follow."""
    return plan_forward(shape_of(case, training=True), device_model(torch.cuda.current_device()), schedule)


def bind(plan: StepPlan, case: Case, inputs: Inputs) -> tuple[BoundPlan, dict[str, Tensor]]:
    """Bind a forward plan to the inputs; return also what it addresses."""
    index = torch.cuda.current_device()
    bound = BoundPlan(plan, device.gpu(index), current_stream(index))
    tensors = {
        "memory": inputs.memory,
        "readings": torch.empty_like(inputs.grad_readings),
        "repeats": device_repeats(inputs.memory.device),
        **dict(zip(TOKENS, inputs.tokens(), strict=True)),
        **allocate(plan.buffers, inputs.memory.device),
    }
    numbers = {"row_stride": case.head_dim, "shared_bank": 0, "wide": 0}
    bound.set({**forward_constants(plan), **pointers_of(plan, tensors), **numbers})
    return bound, tensors


def bench_forward(names: Sequence[str], kernels: bool, schedule: str | None) -> dict[str, Any]:
    """Measure the named cases, print a table and return the figures.

    Parameters
    ----------
    names : sequence of str
        Keys of ``CASES``.
    kernels : bool
        Whether each kernel of a call without gradients is timed too.
    schedule : {"stepwise", "persistent"}, optional
        The schedule to force.
    """
    figures: dict[str, Any] = {}
    stream = current_stream(torch.cuda.current_device())
    model, bandwidth = device_model(torch.cuda.current_device()), copy_bandwidth()
    print("case             no-grad ms (host)    graph    floor   peak GiB   training forward ms (host)")
    for name in names:
        case = CASES[name]
        inputs = make_inputs(case, DEVICE)
        no_grad, host = measure(partial(no_grad_call, case, inputs, schedule), REPEATS)
        peak = peak_bytes(partial(no_grad_call, case, inputs, schedule))
        graph = graph_figures("no_grad_graph", partial(no_grad_call, case, inputs, schedule), REPEATS)
        plan = training_plan(case, schedule)
        bound, tensors = bind(plan, case, inputs)
        training, training_host = measure(partial(bound.run, stream), REPEATS)
        row: dict[str, Any] = {
            "no_grad_ms": no_grad,
            "no_grad_host_ms": host,
            **graph,
            "no_grad_floor_ms": floor_ms(floor_bytes(case, model, training=False), bandwidth),
            "no_grad_peak_gib": round(peak / 2**30, 3),
            "training_forward_ms": training,
            "training_forward_host_ms": training_host,
            "training_forward_floor_ms": floor_ms(plan.total("floor_bytes"), bandwidth),
        }
        print(
            f"{name:15} {no_grad:9.3f} ({host:7.3f}) {row.get('no_grad_graph_ms', float('nan')):8.3f} "
            f"{row['no_grad_floor_ms']:8.3f} {row['no_grad_peak_gib']:10.3f} "
            f"{training:16.3f} ({training_host:7.3f})",
            flush=True,
        )
        if kernels:
            row["profile"] = kernel_times(partial(no_grad_call, case, inputs, schedule))
            print_kernels(row["profile"])
        figures[name] = row
        del inputs, bound, tensors
        torch.cuda.empty_cache()
    return {"copy_tb_s": round(bandwidth / 1e12, 3), "forward": figures}
