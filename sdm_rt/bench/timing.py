"""Time on the GPU by CUDA events: warm-up, L2 flushed before each run, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

__all__ = ["DEVICE", "Timing", "copy_bandwidth", "floor_ms", "graph_figures", "measure", "peak_bytes"]

DEVICE = torch.device("cuda")
FLUSH_BYTES = 256 * 2**20  # more than any L2
COPY_BYTES = 2**30
WARMUP = 2


class Timing(tuple[float, float]):
    """(milliseconds on the GPU, milliseconds the calling thread was busy), medians."""


def measure(call: Callable[[], object], repeats: int, warmup: int = WARMUP) -> Timing:
    """Time a call.

    Parameters
    ----------
    call : callable
        What to run, on the current stream.
    repeats, warmup : int
        Timed and untimed runs.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=DEVICE)
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


def _capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture a call as one CUDA graph, after runs of it on the stream of the capture."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


def graph_figures(name: str, call: Callable[[], object], repeats: int) -> dict[str, float | str]:
    """Time replays of a call that is captured as one CUDA graph.

    Parameters
    ----------
    name : str
        First part of the figure's name.
    call : callable
        Runs on the current stream, whatever it is.
    repeats : int
        Timed replays.

    Returns
    -------
    dict
        ``{name}_ms``, or ``{name}_error`` with the reason why the call cannot be captured, which is printed
        too.
    """
    try:
        graph = _capture(call)
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[0]
        print(f"  no graph: {type(error).__name__}: {reason}", flush=True)
        return {f"{name}_error": f"{type(error).__name__}: {reason}"}
    milliseconds, _ = measure(graph.replay, repeats)
    return {f"{name}_ms": milliseconds}


def copy_bandwidth() -> float:
    """Return the bytes a second, read plus written, of a copy of 1 GiB on this GPU."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    milliseconds, _ = measure(partial(target.copy_, source), 5)
    return 2e3 * COPY_BYTES / milliseconds


def floor_ms(moved: int, bandwidth: float) -> float:
    """Return the milliseconds that bytes take at a bandwidth in bytes a second."""
    return round(1e3 * moved / bandwidth, 4)


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
