"""How many thread block clusters a GPU runs at once, asked of the driver."""

from __future__ import annotations

import ctypes
from functools import cache

from sdm_rt.runtime import driver
from sdm_rt.runtime.device import attributes
from sdm_rt.runtime.driver import check, library

__all__ = ["active_clusters"]

MOST_BLOCKS = 8  # of a cluster that every GPU with clusters can run
RELAXED = 2  # CUstreamCaptureMode
# The driver answers for a kernel; this one does nothing, and PTX needs no compiler of ours.
_PTX = b".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry empty() { ret; }\n"


@cache
def active_clusters(index: int) -> tuple[int, ...]:
    """Return how many clusters of 1, 2, .. 8 blocks, each block on an SM of its own, a GPU runs at once.

    Empty for a GPU without clusters (below compute capability 9.0).

    Raises
    ------
    RuntimeError
        With the driver's error.
    """
    if attributes(index)["ComputeCapabilityMajor"] < 9:
        return ()
    shared = attributes(index)["MaxSharedMemoryPerBlockOptin"]  # leaves no room for a second block
    module, function, mode = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(RELAXED)
    with driver.current_context(driver.primary_context(index)):
        # Loading a module is allowed beside a capture of this thread in the relaxed mode alone.
        check(library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "capture mode")
        try:
            check(
                library().cuModuleLoadData(ctypes.byref(module), _PTX), "cuModuleLoadData of an empty kernel"
            )
            try:
                found = library().cuModuleGetFunction(ctypes.byref(function), module, b"empty")
                check(found, "cuModuleGetFunction")
                assert function.value is not None
                driver.set_function_attribute(function.value, "max_dynamic_shared", shared)
                return tuple(_at_once(function, size, shared) for size in range(1, MOST_BLOCKS + 1))
            finally:
                library().cuModuleUnload(module)
        finally:
            library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _at_once(function: ctypes.c_void_p, size: int, shared: int) -> int:
    cluster = driver.LaunchAttribute(id=driver.CLUSTER_DIMENSION)
    cluster.value.cluster = (ctypes.c_uint * 3)(size, 1, 1)
    config = driver.LaunchConfig(
        grid=(size, 1, 1),
        block=(32, 1, 1),
        shared_memory=shared,
        attributes=ctypes.pointer(cluster),
        attribute_count=1,
    )
    count = ctypes.c_int()
    result = library().cuOccupancyMaxActiveClusters(ctypes.byref(count), function, ctypes.byref(config))
    check(result, f"cuOccupancyMaxActiveClusters of {size} blocks")
    return count.value
