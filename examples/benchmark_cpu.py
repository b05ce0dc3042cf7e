"""Time the op on CPU tensors, forward and backward: a table, and JSON with --json.

python examples/benchmark_cpu.py --threads 1 2 --json cpu.json
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from sdm_rt import sdm_write_read


@dataclass(frozen=True)
class Shape:
    """Sizes of one call: streams, tokens, slots written and read a token, columns, slots of a stream."""

    P: int
    T: int
    W: int
    R: int
    D: int
    S: int


@dataclass(frozen=True)
class Timing:
    """Median seconds of one call."""

    forward: float
    backward: float
    no_grad: float


def make_inputs(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Random inputs. A token's slots are (a + i * s) mod S, a random and s odd: distinct where S is 2^n."""
    torch.manual_seed(0)

    def slots(count: int) -> torch.Tensor:
        first = torch.randint(shape.S, (shape.P, shape.T, 1))
        stride = 2 * torch.randint(shape.S // 2, (shape.P, shape.T, 1)) + 1
        within = (first + torch.arange(count) * stride) % shape.S
        return within + torch.arange(shape.P).view(-1, 1, 1) * shape.S

    def weights(count: int) -> torch.Tensor:
        return torch.randn(shape.P, shape.T, count).softmax(dim=-1).to(dtype).requires_grad_()

    memory = torch.randn(shape.P * shape.S, shape.D).to(dtype).requires_grad_()
    v = torch.randn(shape.P, shape.T, shape.D).to(dtype).requires_grad_()
    beta = torch.randn(shape.P, shape.T, 1).sigmoid().requires_grad_()
    g = (-0.1 * torch.rand(shape.P, shape.T, 1)).requires_grad_()
    return memory, slots(shape.W), weights(shape.W), v, beta, g, slots(shape.R), weights(shape.R)


def measure(shape: Shape, dtype: torch.dtype, repeats: int) -> Timing:
    inputs = make_inputs(shape, dtype)
    gradient = torch.randn(shape.P * shape.T, shape.D).to(dtype)
    spent: list[Timing] = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        readings = sdm_write_read(*inputs, num_memory_slots=shape.S, num_parallel=shape.P)
        after_forward = time.perf_counter()
        readings.backward(gradient)
        after_backward = time.perf_counter()
        with torch.no_grad():
            bank = inputs[0].detach().clone()
            before_no_grad = time.perf_counter()
            sdm_write_read(bank, *inputs[1:], num_memory_slots=shape.S, num_parallel=shape.P)
        after_no_grad = time.perf_counter()
        spent.append(
            Timing(after_forward - start, after_backward - after_forward, after_no_grad - before_no_grad)
        )
    timed = spent[1:]  # the first repetition warms up
    return Timing(
        *(statistics.median(asdict(timing)[field] for timing in timed) for field in asdict(timed[0]))
    )


def processor() -> str:
    """The processor's model where the system tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the op on CPU tensors, forward and backward.")
    for name, default in asdict(Shape(P=4, T=1024, W=16, R=16, D=64, S=4096)).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--dtype", nargs="+", default=["float32"], choices=["float64", "float32", "bfloat16", "float16"]
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[2], help="of PyTorch (default: 2)")
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed repetitions; the median counts (default: 5)"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    shape = Shape(*(getattr(arguments, name) for name in Shape.__dataclass_fields__))

    print(" ".join(f"{name}={size}" for name, size in asdict(shape).items()))
    columns = ("forward s", "backward s", "together s", "no-grad s", "tokens/s")
    print(f"{'threads':<8}{'bank':<10}" + "".join(f"{column:>12}" for column in columns))
    rows = []
    for threads, dtype in itertools.product(arguments.threads, arguments.dtype):
        torch.set_num_threads(threads)
        timing = measure(shape, getattr(torch, dtype), arguments.repeats)
        together = timing.forward + timing.backward
        seconds = {name: round(value, 4) for name, value in {**asdict(timing), "together": together}.items()}
        rows.append({"threads": threads, "dtype": dtype, **seconds})
        print(
            f"{threads:<8}{dtype:<10}{timing.forward:>12.3f}{timing.backward:>12.3f}{together:>12.3f}"
            f"{timing.no_grad:>12.3f}{shape.P * shape.T / together:>12,.0f}"
        )
    if arguments.json is not None:
        record = {
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "shape": asdict(shape),
            "machine": {
                "torch": torch.__version__,
                "python": platform.python_version(),
                "processor": processor(),
                "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            },
            "seconds": rows,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
