"""A training step of the op on this GPU: forward and backward, memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sdm_rt.bench.bounds import floor_bytes
from sdm_rt.bench.cases import CASES, Case, Inputs, make_inputs
from sdm_rt.bench.kernels import kernel_times, print_kernels
from sdm_rt.bench.timing import (
    DEVICE,
    FLUSH_BYTES,
    WARMUP,
    copy_bandwidth,
    floor_ms,
    graph_figures,
    peak_bytes,
)
from sdm_rt.ops.plan_inputs import device_model
from sdm_rt.ops.write_read import sdm_write_read

__all__ = ["LEAVES", "bench_training", "measure_step"]

REPEATS = 5
LEAVES = ("memory", "k_val", "v", "beta", "g", "q_val")


def training_forward(case: Case, inputs: Inputs, schedule: str | None = None) -> Tensor:
    """Run the op; every differentiable input requires grad."""
    return sdm_write_read(
        inputs.memory,
        *inputs.tokens(),
        chunk_size=case.chunk,
        num_memory_slots=case.slots,
        num_parallel=case.streams,
        snapshot_quant=case.snapshot,
        schedule=schedule,
    )


def training_step(case: Case, inputs: Inputs, schedule: str | None = None) -> None:
    """Run forward and backward; the gradients of the step before are dropped first."""
    for name in LEAVES:
        getattr(inputs, name).grad = None
    training_forward(case, inputs, schedule).backward(inputs.grad_readings)  # type: ignore[no-untyped-call]


def measure_step(
    case: Case, inputs: Inputs, schedule: str | None = None, repeats: int = REPEATS
) -> dict[str, float]:
    """Time forward and backward of plain calls, on the GPU and of the calling thread, in milliseconds."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=DEVICE)
    rows: list[tuple[float, ...]] = []
    for run in range(WARMUP + repeats):
        for name in LEAVES:
            getattr(inputs, name).grad = None
        flush.zero_()
        begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        started = time.perf_counter()
        readings = training_forward(case, inputs, schedule)
        half = time.perf_counter()
        middle.record()
        readings.backward(inputs.grad_readings)  # type: ignore[no-untyped-call]
        done = time.perf_counter()
        end.record()
        end.synchronize()
        del readings
        if run >= WARMUP:
            gpu = begin.elapsed_time(middle), middle.elapsed_time(end), begin.elapsed_time(end)
            rows.append((*gpu, 1e3 * (half - started), 1e3 * (done - half)))
    names = ("forward_ms", "backward_ms", "step_ms", "forward_host_ms", "backward_host_ms")
    medians = (statistics.median(column) for column in zip(*rows, strict=True))
    return {name: round(value, 4) for name, value in zip(names, medians, strict=True)}


def bench_training(names: Sequence[str], kernels: bool, schedule: str | None) -> dict[str, Any]:
    """Measure training steps of the named cases, print a table and return the figures.

    Parameters
    ----------
    names : sequence of str
        Keys of ``CASES``.
    kernels : bool
        Whether each kernel of a step is timed too.
    schedule : {"stepwise", "persistent"}, optional
        The schedule to force.
    """
    figures: dict[str, Any] = {}
    model, bandwidth = device_model(torch.cuda.current_device()), copy_bandwidth()
    print("case            forward ms (host)  backward ms (host)   step ms    graph    floor   peak GiB")
    for name in names:
        case = CASES[name]
        inputs = make_inputs(case, DEVICE)
        for leaf in LEAVES:
            getattr(inputs, leaf).requires_grad_()
        row: dict[str, Any] = dict(measure_step(case, inputs, schedule))
        for leaf in LEAVES:
            getattr(inputs, leaf).grad = None
        row["peak_gib"] = round(peak_bytes(partial(training_step, case, inputs, schedule)) / 2**30, 3)
        row |= graph_figures("graph", partial(training_step, case, inputs, schedule), REPEATS)
        row["floor_ms"] = floor_ms(floor_bytes(case, model, training=True), bandwidth)
        print(
            f"{name:15} {row['forward_ms']:8.3f} ({row['forward_host_ms']:7.3f}) "
            f"{row['backward_ms']:9.3f} ({row['backward_host_ms']:7.3f}) {row['step_ms']:9.3f} "
            f"{row.get('graph_ms', float('nan')):8.3f} {row['floor_ms']:8.3f} {row['peak_gib']:10.3f}",
            flush=True,
        )
        if kernels:
            row["profile"] = kernel_times(partial(training_step, case, inputs, schedule))
            print_kernels(row["profile"])
        figures[name] = row
        del inputs
        torch.cuda.empty_cache()
    return {"copy_tb_s": round(bandwidth / 1e12, 3), "training": figures}
