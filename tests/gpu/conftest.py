"""What tests on a GPU share."""

from __future__ import annotations

import pytest

from sdm_rt.runtime.replays import Replays


@pytest.fixture
def repeats_launch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch calls that come again kernel by kernel: else the tests before decide which are replayed."""
    monkeypatch.setattr(Replays, "replay", lambda *_: False)
