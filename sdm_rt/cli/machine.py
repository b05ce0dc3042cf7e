"""Facts about this machine that ``sdm-rt doctor`` reports, gathered without a CUDA context."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "cuda_major",
    "driver_devices",
    "driver_version",
    "header_folders",
    "import_cupy",
    "install_command",
    "loaded_libraries",
]

CUDA_MAJORS = (12, 13)
CUDA_SUCCESS = 0
CUDA_ATTRIBUTE_CAPABILITY_MAJOR = 75
CUDA_ATTRIBUTE_CAPABILITY_MINOR = 76


def cuda_major() -> int:
    """Return the CUDA release whose packages fit: torch's own, else the driver's, else the oldest one."""
    if torch.version.cuda is not None:
        found = int(torch.version.cuda.split(".")[0])
    else:
        version = driver_version()
        found = version[0] if version is not None else CUDA_MAJORS[0]
    return min(max(found, CUDA_MAJORS[0]), CUDA_MAJORS[-1])


def install_command(packages: tuple[str, ...], major: int) -> str:
    """Return the command that installs the requirements of an extra.

    Parameters
    ----------
    packages : tuple of str
        First letters of the wanted requirements, for example ``("cupy", "nvidia-cuda-nvrtc")``.
    major : int
        The CUDA release: the requirements are those of the extra ``cuda<major>``.
    """
    marker = f"extra == 'cuda{major}'"
    wanted = []
    for line in importlib.metadata.requires("sdm_rt") or []:
        requirement, _, condition = line.partition(";")
        if marker in condition.replace('"', "'") and requirement.startswith(packages):
            wanted.append(f"'{requirement.strip()}'")
    return f"python -m pip install {' '.join(wanted)}"


def import_cupy() -> Any:
    """Import CuPy with a cache folder that can be made: without one, its import fails."""
    if "CUPY_CACHE_DIR" not in os.environ:
        try:
            Path.home().joinpath(".cupy", "kernel_cache").mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):
            os.environ["CUPY_CACHE_DIR"] = tempfile.mkdtemp(prefix="sdm_rt-")
    return importlib.import_module("cupy")


def driver_version() -> tuple[int, int] | None:
    """Return the newest CUDA release that the driver supports, or None without a usable driver."""
    driver = _driver()
    version = ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)) != CUDA_SUCCESS:
        return None
    return version.value // 1000, version.value % 1000 // 10


def driver_devices() -> list[tuple[str, tuple[int, int]]]:
    """Return name and compute capability of each GPU that the driver lists."""
    driver = _driver()
    count = ctypes.c_int()
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)) != CUDA_SUCCESS:
        return []
    devices = []
    for device in range(count.value):
        name = ctypes.create_string_buffer(128)
        driver.cuDeviceGetName(name, len(name), device)
        major, minor = (
            _device_attribute(driver, attribute, device)
            for attribute in (CUDA_ATTRIBUTE_CAPABILITY_MAJOR, CUDA_ATTRIBUTE_CAPABILITY_MINOR)
        )
        devices.append((name.value.decode(), (major, minor)))
    return devices


def loaded_libraries(name: str) -> list[str]:
    """Return the shared libraries ``name``.so* in this process, where the platform tells."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    files = {line[line.index("/") :] for line in lines if "/" in line}
    return sorted(file for file in files if Path(file).name.startswith(f"{name}.so"))


def header_folders() -> list[Path]:
    """Return the folders that may hold the CUDA headers: a toolkit's, then those of the wheels."""
    folders = [
        Path(os.environ[name]) / "include" for name in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(name)
    ]
    wheels = importlib.util.find_spec("nvidia")
    for location in (wheels.submodule_search_locations or []) if wheels is not None else []:
        folders += [Path(location) / "cuda_runtime" / "include", Path(location) / "cu13" / "include"]
    return folders


def _driver() -> ctypes.CDLL | None:
    """Return the initialised driver library, or None; initialising makes no context."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    return library if library.cuInit(0) == CUDA_SUCCESS else None


def _device_attribute(driver: ctypes.CDLL, attribute: int, device: int) -> int:
    value = ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return value.value
