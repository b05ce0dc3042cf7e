"""Plans bound without a GPU: an H200 as its preset describes it, launches that a test makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sdm_rt.ops import bound_plans, write_read_launch
from sdm_rt.plan import bound
from sdm_rt.plan.device import preset
from sdm_rt.plan.launch import Launch
from tests.runtime.cupy_without_gpu import HOPPER

__all__ = ["STREAM", "bind_without_gpu"]

STREAM = 7


def bind_without_gpu(monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Launch], Any]) -> None:
    """Let write-read plans bind: ``prepare`` makes what stands in for each prepared launch."""

    def prepare_all(launches: Sequence[Launch], gpu: object, stream: int) -> list[Any]:
        return [prepare(launch) for launch in launches]

    counter = torch.zeros(1, dtype=torch.int64)
    kernels = SimpleNamespace(are_current=lambda *kept: True, generation=0)
    monkeypatch.setattr(bound, "prepare_all", prepare_all)
    monkeypatch.setattr(bound.driver, "primary_context", lambda index: 4711)
    monkeypatch.setattr(bound_plans, "device_model", lambda index: preset("h200"))
    monkeypatch.setattr(bound_plans.device, "gpu", lambda index: HOPPER)
    monkeypatch.setattr(bound_plans, "current_stream", lambda index: STREAM)
    monkeypatch.setattr(bound_plans, "kernels", lambda: kernels)
    monkeypatch.setattr(bound_plans, "_memo", bound_plans._Memo())
    monkeypatch.setattr(write_read_launch, "device_repeats", lambda device: counter)
