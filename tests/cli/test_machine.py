"""What the doctor learns of driver, GPUs, libraries and packages."""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
from pathlib import Path

import pytest
import torch

from sdm_rt.cli import machine


class FakeDriver:
    """The driver library's entry points for two GPUs."""

    DEVICES = ((b"NVIDIA H200", (9, 0)), (b"NVIDIA A100", (8, 0)))

    def cuDriverGetVersion(self, version) -> int:  # noqa: N802
        version._obj.value = 12090
        return 0

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


def test_driver_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_driver", FakeDriver)
    assert machine.driver_version() == (12, 9)
    assert machine.driver_devices() == [("NVIDIA H200", (9, 0)), ("NVIDIA A100", (8, 0))]


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(machine.ctypes, "CDLL", absent)
    assert machine.driver_version() is None
    assert machine.driver_devices() == []


@pytest.mark.parametrize(
    ("torch_cuda", "driver", "major"),
    [
        ("12.8", (13, 0), 12),
        ("13.0", (13, 0), 13),
        (None, (13, 0), 13),
        (None, (11, 8), 12),
        (None, (14, 1), 13),
        (None, None, 12),
    ],
)
def test_cuda_major(monkeypatch: pytest.MonkeyPatch, torch_cuda, driver, major: int) -> None:
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setattr(machine, "driver_version", lambda: driver)
    assert machine.cuda_major() == major


@pytest.mark.parametrize("major", [12, 13])
def test_install_command_names_the_requirements_of_the_extra(major: int) -> None:
    declared = [
        line.partition(";")[0].strip()
        for line in importlib.metadata.requires("sdm_rt")
        if f"cuda{major}" in line.partition(";")[2]
    ]
    packages = ("cupy", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "cuda-bindings")
    command = machine.install_command(packages, major)
    assert command == "python -m pip install " + " ".join(f"'{requirement}'" for requirement in declared)
    assert len(declared) == len(packages)
    assert machine.install_command(("cupy",), major) == f"python -m pip install 'cupy-cuda{major}x>=14'"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/maps is Linux's")
def test_loaded_libraries_name_their_files() -> None:
    found = machine.loaded_libraries("libc")
    assert found
    assert all(Path(file).name.startswith("libc.so") and Path(file).is_file() for file in found)
    assert machine.loaded_libraries("libabsent") == []


def test_a_toolkit_named_by_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_PATH", "/toolkit")
    assert machine.header_folders()[0] == Path("/toolkit/include")


def test_cupy_gets_a_cache_folder_where_home_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", "")  # so that monkeypatch takes away what import_cupy sets
    monkeypatch.delenv("CUPY_CACHE_DIR")
    monkeypatch.setenv("HOME", "/dev/null/home")
    monkeypatch.setitem(sys.modules, "cupy", sys)
    monkeypatch.setattr(machine.tempfile, "mkdtemp", lambda prefix: f"/made/{prefix}")
    assert machine.import_cupy() is sys
    assert machine.os.environ["CUPY_CACHE_DIR"] == "/made/sdm_rt-"
