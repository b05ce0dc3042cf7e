"""The ctypes structures and numbers against NVIDIA's own Python bindings."""

from __future__ import annotations

import ctypes
import importlib
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from sdm_rt.errors import MissingDependencyError
from sdm_rt.runtime import device, driver


@pytest.fixture(scope="module")
def bindings() -> Any:
    return pytest.importorskip("cuda.bindings.driver")


def test_launch_config(bindings: Any) -> None:
    attribute = bindings.CUlaunchAttribute()
    attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    cluster = bindings.CUlaunchAttribute()
    cluster.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = 2, 3, 4
    config = bindings.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = 5, 6, 7
    config.blockDimX, config.blockDimY, config.blockDimZ = 8, 9, 10
    config.sharedMemBytes, config.hStream = 11, bindings.CUstream(0x12)
    config.numAttrs, config.attrs = 2, [attribute, cluster]
    ours = driver.LaunchConfig.from_address(int(config.getPtr()))
    assert (list(ours.grid), list(ours.block)) == ([5, 6, 7], [8, 9, 10])
    assert (ours.shared_memory, ours.stream, ours.attribute_count) == (11, 0x12, 2)
    assert ours.attributes[0].id == driver.PROGRAMMATIC_STREAM_SERIALIZATION
    assert ours.attributes[0].value.serialization_allowed == 1
    assert ours.attributes[1].id == driver.CLUSTER_DIMENSION
    assert list(ours.attributes[1].value.cluster) == [2, 3, 4]


def test_kernel_node_params(bindings: Any) -> None:
    params = bindings.CUDA_KERNEL_NODE_PARAMS()
    params.func, params.kern, params.ctx = bindings.CUfunction(1), bindings.CUkernel(2), bindings.CUcontext(3)
    params.gridDimX, params.gridDimY, params.gridDimZ = 4, 5, 6
    params.blockDimX, params.blockDimY, params.blockDimZ = 7, 8, 9
    params.sharedMemBytes = 10
    ours = driver.KernelNodeParams.from_address(int(params.getPtr()))
    assert (ours.function, ours.kernel, ours.context, ours.shared_memory) == (1, 2, 3, 10)
    assert (list(ours.grid), list(ours.block)) == ([4, 5, 6], [7, 8, 9])


def test_function_attributes(bindings: Any) -> None:
    names = {
        "max_threads": "MAX_THREADS_PER_BLOCK",
        "static_shared": "SHARED_SIZE_BYTES",
        "local_bytes": "LOCAL_SIZE_BYTES",
        "registers": "NUM_REGS",
        "max_dynamic_shared": "MAX_DYNAMIC_SHARED_SIZE_BYTES",
    }
    assert set(names) == set(driver.FUNCTION_ATTRIBUTES)
    for ours, theirs in names.items():
        wanted = getattr(bindings.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{theirs}")
        assert driver.FUNCTION_ATTRIBUTES[ours] == int(wanted)


def test_device_attributes() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    for name, number in device.ATTRIBUTES.items():
        assert int(getattr(runtime.cudaDeviceAttr, f"cudaDevAttr{name}")) == number


def test_no_driver_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver.ctypes, "CDLL", absent)
    driver.library.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"NVIDIA driver.*\n?.*CPU tensors work"):
        driver.library()


def test_a_driver_without_a_gpu_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: SimpleNamespace(cuInit=lambda flags: 100))
    driver.library.cache_clear()
    with pytest.raises(MissingDependencyError, match="error 100"):
        driver.library()


@pytest.mark.parametrize(
    "function", ["cuLaunchKernelEx", "cuGraphExecKernelNodeSetParams_v2", "cuStreamGetCaptureInfo_v3"]
)
def test_the_names_exist_in_the_headers(function: str) -> None:
    """The names that ctypes looks up are those that cuda.h maps its functions to."""
    wheels = importlib.import_module("nvidia")
    for folder in wheels.__path__:
        header = f"{folder}/cuda_runtime/include/cuda.h"
        found = subprocess.run(["grep", "-cw", function, header], capture_output=True, text=True, check=False)
        if found.returncode == 0:
            return
    pytest.skip("no cuda.h in the CUDA wheels")


def test_handles_are_pointer_sized() -> None:
    assert ctypes.sizeof(driver.LaunchAttribute) == 72
    assert ctypes.sizeof(driver.LaunchConfig) == 56
    assert ctypes.sizeof(driver.KernelNodeParams) == 72
