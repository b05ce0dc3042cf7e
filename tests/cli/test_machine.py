"""What the doctor learns of GPUs, loaded libraries and headers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sdm_rt.cli import machine
from sdm_rt.errors import MissingDependencyError
from sdm_rt.runtime import driver


class FakeDriver:
    """The driver library's entry points for two GPUs."""

    DEVICES = ((b"NVIDIA H200", (9, 0)), (b"NVIDIA A100", (8, 0)))

    def cuDeviceGetCount(self, count) -> int:  # noqa: N802
        count._obj.value = len(self.DEVICES)
        return 0

    def cuDeviceGetName(self, name, length: int, device: int) -> int:  # noqa: N802
        assert len(self.DEVICES[device][0]) < length
        name.value = self.DEVICES[device][0]
        return 0

    def cuDeviceGetAttribute(self, value, attribute: int, device: int) -> int:  # noqa: N802
        value._obj.value = self.DEVICES[device][1][{75: 0, 76: 1}[attribute]]
        return 0


def test_gpus_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "library", FakeDriver)
    assert machine.gpus() == [("NVIDIA H200", (9, 0)), ("NVIDIA A100", (8, 0))]


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise MissingDependencyError("no libcuda")

    monkeypatch.setattr(driver, "library", absent)
    with pytest.raises(MissingDependencyError):
        machine.gpus()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/maps is Linux's")
def test_loaded_libraries_name_their_files() -> None:
    found = machine.loaded_libraries("libc")
    assert found
    assert all(Path(file).name.startswith("libc.so") and Path(file).is_file() for file in found)
    assert machine.loaded_libraries("libabsent") == []


def test_a_toolkit_named_by_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_PATH", "/toolkit")
    assert machine.header_folders()[0] == Path("/toolkit/include")
