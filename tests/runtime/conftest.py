from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.cupy_without_gpu import SMALL_CU, SMALL_CUH, kernels

__all__ = ["kernels"]


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SDM_RT_CACHE_DIR", str(folder))
    monkeypatch.delenv("SDM_RT_PRECOMPILED", raising=False)
    monkeypatch.delenv("SDM_RT_JIT", raising=False)
    return folder


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two small files in the place of kernels_cu."""
    folder = tmp_path / "kernels"
    write_sources(folder)
    monkeypatch.setenv("SDM_RT_KERNELS", str(folder))
    return folder


def write_sources(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "small.cu").write_text(SMALL_CU)
    (folder / "small.cuh").write_text(SMALL_CUH)
