"""Each kernel's time where it runs, within its call, by PyTorch's profiler (CUPTI)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from sdm_rt.bench.timing import WARMUP

__all__ = ["kernel_times", "print_kernels", "summarize"]


def summarize(events: Iterable[tuple[str, int, int]]) -> dict[str, Any]:
    """Sum up what ran on the GPU.

    Parameters
    ----------
    events : iterable of (str, int, int)
        Name, start and end of each kernel, nanoseconds.

    Returns
    -------
    dict
        ``span_ms`` from the first start to the last end, ``busy_ms`` in which any kernel ran, and
        ``kernels``: launches and mean microseconds by name, in the order of their first launch.
    """
    ordered = sorted(events, key=lambda event: event[1])
    if not ordered:
        raise RuntimeError("the profiler saw no kernel; CUPTI may be taken by another profiler")
    times: dict[str, list[int]] = {}
    busy, until = 0, ordered[0][1]
    for name, start, end in ordered:
        times.setdefault(name, []).append(end - start)
        busy += max(0, end - max(start, until))
        until = max(until, end)
    return {
        "span_ms": round((until - ordered[0][1]) / 1e6, 4),
        "busy_ms": round(busy / 1e6, 4),
        "kernels": {
            name: {"launches": len(spent), "us": round(sum(spent) / len(spent) / 1e3, 2)}
            for name, spent in times.items()
        },
    }


def kernel_times(call: Callable[[], object]) -> dict[str, Any]:
    """Profile one call, after as many as a graph of it takes; returns what `summarize` does.

    A kernel that is launched early counts the time in which it waits for the one before it.
    """
    for _ in range(1 + WARMUP):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    found = profiler.profiler.kineto_results.events()
    return summarize(
        (_short(event.name()), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in found
        if event.device_type().name == "CUDA"
    )


def _short(name: str) -> str:
    """Return a kernel's name; of PyTorch's own, and of copies, what they do."""
    if name.startswith("Mem"):
        return " ".join(name.split()[:2]).lower()
    return "fill" if "FillFunctor" in name else name.split("<")[0].split("::")[-1]


def print_kernels(figures: dict[str, Any]) -> None:
    """Print a profiled call in one line."""
    kernels = figures["kernels"].items()
    print(f"  span {figures['span_ms']:.3f} ms, busy {figures['busy_ms']:.3f} ms; launches x us: ", end="")
    print("  ".join(f"{name} {one['launches']} x {one['us']}" for name, one in kernels), flush=True)
