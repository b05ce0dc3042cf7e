"""What tests on a GPU share."""

from __future__ import annotations

import pytest
import torch

from sdm_rt.ops.plan_inputs import device_model
from sdm_rt.runtime.replays import Replays


@pytest.fixture
def repeats_launch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch calls that come again kernel by kernel: else the tests before decide which are replayed."""
    monkeypatch.setattr(Replays, "replay", lambda *_: False)


@pytest.fixture
def clusters() -> None:
    """Skip what needs the persistent schedule on a GPU that has none."""
    if not device_model(torch.cuda.current_device()).clusters:
        pytest.skip("needs a GPU with thread block clusters, compute capability 9.0")


@pytest.fixture
def schedule_runs(request: pytest.FixtureRequest) -> None:
    """Skip a test whose parameter ``schedule`` this GPU does not have."""
    if request.getfixturevalue("schedule") == "persistent":
        request.getfixturevalue("clusters")
