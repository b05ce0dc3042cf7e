"""Facts about this machine that ``sdm-rt doctor`` reports, gathered without a CUDA context."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

from sdm_rt.runtime import driver

__all__ = ["gpus", "header_folders", "loaded_libraries"]

CAPABILITY_MAJOR = 75  # CUdevice_attribute
CAPABILITY_MINOR = 76  # CUdevice_attribute


def gpus() -> list[tuple[str, tuple[int, int]]]:
    """Return name and compute capability of each GPU that the driver lists.

    Raises
    ------
    MissingDependencyError
        Without a usable driver.
    """
    count = ctypes.c_int()
    driver.check(driver.library().cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    return [
        (_name(device), (_attribute(device, CAPABILITY_MAJOR), _attribute(device, CAPABILITY_MINOR)))
        for device in range(count.value)
    ]


def loaded_libraries(name: str) -> list[str]:
    """Return the files of the shared library ``name`` in this process, where the platform tells."""
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


def _name(device: int) -> str:
    name = ctypes.create_string_buffer(128)
    driver.check(driver.library().cuDeviceGetName(name, len(name), device), f"cuDeviceGetName({device})")
    return name.value.decode()


def _attribute(device: int, attribute: int) -> int:
    value = ctypes.c_int()
    result = driver.library().cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    driver.check(result, f"cuDeviceGetAttribute({attribute}, {device})")
    return value.value
