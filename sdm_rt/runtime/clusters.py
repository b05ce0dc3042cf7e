"""How many thread block clusters a GPU runs at once, asked of the driver."""

from __future__ import annotations

import ctypes
import warnings
from functools import cache

from sdm_rt.runtime import driver
from sdm_rt.runtime.device import attributes
from sdm_rt.runtime.driver import check, library

__all__ = ["active_clusters"]

MOST_BLOCKS = 8  # of a cluster that every GPU with clusters can run
# The driver answers for a kernel; this one does nothing, and PTX needs no compiler of ours.
_PTX = b".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry empty() { ret; }\n"


@cache
def active_clusters(index: int) -> tuple[int, ...]:
    """Return how many clusters of 1, 2, .. 8 blocks, each block on an SM of its own, a GPU runs at once.

    Empty for a GPU without clusters (below compute capability 9.0), and where the driver does not answer, as
    without its compiler of PTX: plans then estimate (``DeviceModel.clusters_at_once``); a warning says so.
    """
    if attributes(index)["ComputeCapabilityMajor"] < 9:
        return ()
    try:
        return _ask(index)
    except RuntimeError as error:
        warnings.warn(f"the clusters that the GPU runs at once are estimated: {error}", stacklevel=2)
        return ()


def _ask(index: int) -> tuple[int, ...]:
    shared = attributes(index)["MaxSharedMemoryPerBlockOptin"]  # leaves no room for a second block
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with driver.current_context(driver.primary_context(index)), driver.relaxed_capture_mode():
        check(library().cuModuleLoadData(ctypes.byref(module), _PTX), "cuModuleLoadData of an empty kernel")
        try:
            found = library().cuModuleGetFunction(ctypes.byref(function), module, b"empty")
            check(found, "cuModuleGetFunction")
            assert function.value is not None
            driver.set_function_attribute(function.value, "max_dynamic_shared", shared)
            return tuple(_at_once(function, size, shared) for size in range(1, MOST_BLOCKS + 1))
        finally:
            library().cuModuleUnload(module)


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
