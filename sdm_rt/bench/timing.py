"""Time on the GPU by CUDA events: warm-up, L2 flushed before each run, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

__all__ = ["Timing", "measure", "peak_bytes"]

FLUSH_BYTES = 256 * 2**20  # more than any L2


class Timing(tuple[float, float]):
    """(milliseconds on the GPU, milliseconds the calling thread was busy), medians."""


def measure(call: Callable[[], object], repeats: int, warmup: int = 2) -> Timing:
    """Time a call.

    Parameters
    ----------
    call : callable
        What to run, on the current stream.
    repeats, warmup : int
        Timed and untimed runs.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(warmup):
        call()
    gpu, host = [], []
    for _ in range(repeats):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        start.record()
        began = time.perf_counter()
        call()
        host.append(1e3 * (time.perf_counter() - began))
        end.record()
        end.synchronize()
        gpu.append(float(start.elapsed_time(end)))
    return Timing((round(statistics.median(gpu), 4), round(statistics.median(host), 4)))


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most memory that a call takes above what was allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before
