"""Fixtures of the tests that run kernels on the emulator and on the GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.emulator.build import KERNELS_CU, TEST_KERNELS


@pytest.fixture
def kernels_of_the_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the runtime compile the tests' own kernels: it reads one folder, so both kinds lie in one."""
    folder = tmp_path / "kernels"
    shutil.copytree(KERNELS_CU, folder)
    for kernel in TEST_KERNELS.glob("*.cu"):
        shutil.copy(kernel, folder)
    monkeypatch.setenv("SDM_RT_KERNELS", str(folder))
