"""The GPUs of this machine: identity, attributes, what is supported and what has been validated."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sdm_rt.errors import MissingDependencyError, UntestedHardwareWarning
from sdm_rt.runtime import driver
from sdm_rt.runtime.dependencies import load_cupy

__all__ = ["OLDEST", "Gpu", "attributes", "gpu"]

OLDEST = (8, 0)
VALIDATED = Path(__file__).with_name("validated.json")

# cudaDeviceAttr numbers, under the names of the CUDA documentation without their prefix.
ATTRIBUTES = {
    "MaxSharedMemoryPerBlockOptin": 97,
    "MaxSharedMemoryPerMultiprocessor": 81,
    "ReservedSharedMemoryPerBlock": 111,
    "MultiProcessorCount": 16,
    "L2CacheSize": 38,
    "MaxRegistersPerMultiprocessor": 82,
    "MaxRegistersPerBlock": 12,
    "MaxThreadsPerMultiProcessor": 39,
    "MaxBlocksPerMultiprocessor": 106,
    "MemoryClockRate": 36,
    "GlobalMemoryBusWidth": 37,
    "ComputeCapabilityMajor": 75,
    "ComputeCapabilityMinor": 76,
}


@dataclass(frozen=True)
class Gpu:
    """One GPU of this process.

    Parameters
    ----------
    index : int
        Its CUDA device number.
    name : str
        Its name, as the driver reports it.
    compute_capability : tuple of int
        Major and minor number.
    """

    index: int
    name: str
    compute_capability: tuple[int, int]

    @property
    def target(self) -> str:
        """The compile target, for example ``"sm_90"``."""
        return "sm_{}{}".format(*self.compute_capability)


@cache
def attributes(index: int) -> dict[str, int]:
    """Return the device attributes that plans read, by name; a device without one reports 0."""
    runtime = load_cupy().cuda.runtime
    return {name: int(runtime.deviceGetAttribute(number, index)) for name, number in ATTRIBUTES.items()}


@cache
def _validated() -> frozenset[tuple[int, int]]:
    """Return the compute capabilities that a recorded validation run covers."""
    records = json.loads(VALIDATED.read_text(encoding="utf-8"))
    return frozenset((major, minor) for major, minor in (record["compute_capability"] for record in records))


@cache
def gpu(index: int) -> Gpu:
    """Return the GPU ``index``; warns once for a class of GPU that no recorded validation covers.

    Raises
    ------
    RuntimeError
        For a GPU below compute capability 8.0.
    MissingDependencyError
        Where CuPy or the driver is missing.
    """
    driver.library()
    cupy = load_cupy()
    if not cupy.cuda.is_available():
        raise MissingDependencyError(
            "the GPU path needs a GPU that CuPy can use, and CuPy finds none; `sdm-rt doctor` shows why. CPU "
            "tensors work without it."
        )
    properties = cupy.cuda.runtime.getDeviceProperties(index)
    name = properties["name"]
    found = Gpu(
        index,
        name.decode() if isinstance(name, bytes) else str(name),
        (int(properties["major"]), int(properties["minor"])),
    )
    if found.compute_capability < OLDEST:
        raise RuntimeError(
            "{} has compute capability {}.{}; sdm_rt supports {}.{} and newer. CPU tensors work.".format(
                found.name, *found.compute_capability, *OLDEST
            )
        )
    if found.compute_capability not in _validated():
        warnings.warn(
            "sdm_rt has not been validated on GPUs of compute capability {}.{} ({}); "
            "`python -m pytest -m gpu` of its source tree checks this one.".format(
                *found.compute_capability, found.name
            ),
            UntestedHardwareWarning,
            stacklevel=2,
        )
    return found
