"""Decode on this GPU: cost of a launch, of a call from Python, GPU time, cold and warm start."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sdm_rt.bench.process import wait_seconds
from sdm_rt.ops.decode import sdm_decode_step
from sdm_rt.ops.plan_inputs import device_model
from sdm_rt.plan.decode import plan_decode
from sdm_rt.plan.shapes import DecodeShape
from sdm_rt.runtime import device
from sdm_rt.runtime.interop import current_stream
from sdm_rt.runtime.launcher import prepare

__all__ = ["DecodeBench", "Problem", "bench_decode"]

STEPS = 64  # decode steps of a graph
REPEATS = 30
CALLS = 12_000  # in all; the launches of one repeat fit the driver's queue of 1,024

PREPARE = (
    "from sdm_rt.bench.decode import Problem; "
    "problem = Problem(streams=16, slots=256, columns=1024, lanes=64, steps=1, dtype=torch.bfloat16)"
)


@dataclass(frozen=True)
class DecodeBench:
    """What the decode benchmark runs.

    Parameters
    ----------
    streams : sequence of int
        The P to measure.
    lanes, head_dim, slots : int
        W = R, D, S.
    dtype : torch.dtype
        Of the bank.
    """

    streams: Sequence[int] = (2, 16, 64)
    lanes: int = 64
    head_dim: int = 1024
    slots: int = 16384
    dtype: torch.dtype = torch.bfloat16


class Problem:
    """Decode steps on one bank, each with its own random slots: index ``i`` is step ``i``.

    Parameters
    ----------
    streams, slots, columns, lanes : int
        P, S, D and W = R.
    steps : int
        How many different tokens to draw.
    dtype : torch.dtype
        Of the bank.
    """

    def __init__(
        self, streams: int, slots: int, columns: int, lanes: int, steps: int, dtype: torch.dtype
    ) -> None:
        draw = torch.Generator(device="cuda").manual_seed(0)

        def real(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, device="cuda")

        def rows() -> Tensor:
            # (a + i s) mod S with odd s: distinct within a token.
            first = torch.randint(slots, (steps, streams, 1), generator=draw, device="cuda")
            stride = (
                2 * torch.randint(max(slots // 2, 1), (steps, streams, 1), generator=draw, device="cuda") + 1
            )
            lane = torch.arange(lanes, device="cuda")
            return (first + lane * stride) % slots + slots * torch.arange(streams, device="cuda").view(-1, 1)

        self.memory = torch.randn(streams * slots, columns, device="cuda").to(dtype)
        self.k_idx, self.q_idx = rows(), rows()
        self.k_val = real(steps, streams, lanes).softmax(-1).to(dtype)
        self.q_val = real(steps, streams, lanes).softmax(-1).to(dtype)
        self.v = real(steps, streams, columns).to(dtype)
        self.beta = real(steps, streams, 1).sigmoid()
        self.g = -0.1 * torch.rand(steps, streams, 1, generator=draw, device="cuda")
        fields = (self.k_idx, self.k_val, self.v, self.beta, self.g, self.q_idx, self.q_val)
        self.tokens = [tuple(field[step] for field in fields) for step in range(steps)]

    def step(self, index: int) -> Tensor:
        """Advance the bank by token ``index``; return the readings."""
        readings: Tensor = sdm_decode_step(self.memory, *self.tokens[index])
        return readings


def median_us(measure: Callable[[], float], repeats: int = REPEATS) -> float:
    """Return the median of ``repeats`` measurements in seconds, as microseconds."""
    return round(1e6 * statistics.median(measure() for _ in range(repeats)), 3)


def host_us(call: Callable[[], object]) -> float:
    """Return what one call costs the calling thread, with the GPU keeping up or not."""
    for _ in range(CALLS // 3):  # until the calling thread's core runs at full speed
        call()

    def measure() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS // REPEATS):
            call()
        elapsed = time.perf_counter() - start
        torch.cuda.synchronize()
        return elapsed / (CALLS // REPEATS)

    return median_us(measure)


def gpu_us(problem: Problem) -> float:
    """Return the GPU time of one step: the difference between graphs of 2n and of n steps, divided by n."""

    def replay_seconds(steps: int) -> float:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for step in range(steps):
                problem.step(step)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

        def measure() -> float:
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

        measure()
        return statistics.median(measure() for _ in range(REPEATS))

    return round(1e6 * (replay_seconds(2 * STEPS) - replay_seconds(STEPS)) / STEPS, 3)


def launch_us() -> float:
    """Return what one prepared launch of a small kernel costs from Python."""
    gpu = device.gpu(torch.cuda.current_device())
    plan = plan_decode(DecodeShape(streams=1, writes=1, reads=1, head_dim=8), device_model(gpu.index))
    stream = current_stream(gpu.index)
    launch = prepare(plan.kernels()[0], gpu, stream)
    problem = Problem(streams=1, slots=16, columns=8, lanes=1, steps=1, dtype=torch.bfloat16)
    readings, count = torch.empty_like(problem.v[0]), torch.zeros(1, dtype=torch.int64, device="cuda")
    names = ("k_idx", "k_val", "v", "beta", "g", "q_idx", "q_val")
    pointers = {name: tensor.data_ptr() for name, tensor in zip(names, problem.tokens[0], strict=True)}
    pointers |= {"memory": problem.memory.data_ptr(), "y": readings.data_ptr(), "repeats": count.data_ptr()}
    numbers = {"row_stride": 8, "S": 16, "D": 8, "W": 1, "R": 1, "gates": 1}
    codes = 1 | 1 << 2 | 1 << 8 | 1 << 10 | 1 << 11  # bfloat16 values, float32 beta and g, int64 indices
    launch.set({**pointers, **numbers, "lengths": 0, "dtypes": codes})
    return host_us(lambda: launch.run(stream))


def start_seconds() -> dict[str, float]:
    """Return the seconds of a first call in a new process, with an empty and with a filled cache."""
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = (wait_seconds(PREPARE, "problem.step(0)", cache) for _ in range(2))
    return {"cold_start_s": cold, "warm_start_s": warm}


def bench_decode(shape: DecodeBench, starts: bool) -> dict[str, Any]:
    """Measure decode, print a table and return the figures.

    Parameters
    ----------
    shape : DecodeBench
        What is decoded.
    starts : bool
        Whether the cold and the warm start are measured too, in processes of their own.
    """
    figures: dict[str, Any] = {"launch_us": launch_us(), "decode": []}
    print(f"decode: W = R = {shape.lanes}, D = {shape.head_dim}, S = {shape.slots}, {shape.dtype}")
    print(f"one prepared launch from Python: {figures['launch_us']:.2f} us")
    print("   P   from Python   GPU")
    for streams in shape.streams:
        problem = Problem(streams, shape.slots, shape.head_dim, shape.lanes, 2 * STEPS, shape.dtype)
        problem.step(0)
        row = {"P": streams, "python_us": host_us(partial(problem.step, 1)), "gpu_us": gpu_us(problem)}
        figures["decode"].append(row)
        print(f"{streams:4} {row['python_us']:10.2f} us {row['gpu_us']:7.2f} us")
    if starts:
        figures.update(start_seconds())
        print(f"first call: cold {figures['cold_start_s']:.2f} s, warm {figures['warm_start_s']:.2f} s")
    return figures
