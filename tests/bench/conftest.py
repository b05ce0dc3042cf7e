"""The benchmarks without a GPU: the op on CPU tensors, CUDA's clock and graphs replaced by stand-ins."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import pytest
import torch

from sdm_rt.bench import accuracy, forward, layer, scaling, start, timing, training
from sdm_rt.plan.device import preset


class Event:
    """A time that the host took."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        assert hasattr(self, "at"), "the event was never recorded"

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


class Stream:
    """A stream that only knows who waits."""

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)


class Graph:
    """A graph that replays nothing; a test may ask how often."""

    replays = 0

    def replay(self) -> None:
        type(self).replays += 1


@contextlib.contextmanager
def capturing(graph: Graph, stream: Stream):
    assert isinstance(graph, Graph)
    assert isinstance(stream, Stream)
    yield


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, object], None]:
    """Replace what the benchmarks take of CUDA; return how to replace one thing of torch.cuda more."""
    replaced = {
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "graph": capturing,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": Stream,
        "current_device": lambda: 0,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda: 2**20,
        "max_memory_allocated": lambda: 3 * 2**20 + 2**30,
        "reset_peak_memory_stats": lambda: None,
        "mem_get_info": lambda: (2**40, 2**40),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for module in (accuracy, forward, layer, scaling, start, timing, training):
        monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
    for module in (forward, training):
        monkeypatch.setattr(module, "device_model", lambda index: preset("h200"))
    for module in (timing, training):
        monkeypatch.setattr(module, "FLUSH_BYTES", 16)
    monkeypatch.setattr(timing, "COPY_BYTES", 2**20)
    monkeypatch.setattr(Graph, "replays", 0)
    return lambda name, value: monkeypatch.setattr(torch.cuda, name, value)
