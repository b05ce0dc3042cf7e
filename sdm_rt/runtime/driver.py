"""The CUDA driver through ctypes: the calls that CuPy and PyTorch do not offer, and nothing else.

Only libcuda is used, so neither a toolkit nor a binding package is needed. Every function takes and returns
plain integers for handles. Functions that may wait for the GPU release the interpreter lock.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

from sdm_rt.errors import MissingDependencyError

__all__ = [
    "CLUSTER_DIMENSION",
    "CUDA_SUCCESS",
    "INVALID_CONTEXT",
    "INVALID_HANDLE",
    "PROGRAMMATIC_STREAM_SERIALIZATION",
    "KernelNodeParams",
    "LaunchAttribute",
    "LaunchConfig",
    "check",
    "current_context",
    "driver_version",
    "function_attribute",
    "library",
    "primary_context",
    "set_function_attribute",
    "stream_is_capturing",
]

CUDA_SUCCESS = 0
INVALID_CONTEXT = 201  # CUresult
INVALID_HANDLE = 400  # CUresult
CLUSTER_DIMENSION = 4  # CUlaunchAttributeID
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
RELAXED = 2  # CUstreamCaptureMode
STREAM_CAPTURE_NONE = 0  # CUstreamCaptureStatus

FUNCTION_ATTRIBUTES = {  # CUfunction_attribute
    "max_threads": 0,
    "static_shared": 1,
    "local_bytes": 3,
    "registers": 4,
    "max_dynamic_shared": 8,
}


class _AttributeValue(ctypes.Union):
    _fields_ = (
        ("pad", ctypes.c_char * 64),
        ("cluster", ctypes.c_uint * 3),
        ("serialization_allowed", ctypes.c_int),
    )


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", _AttributeValue))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


class KernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_memory", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


@cache
def library() -> ctypes.CDLL:
    """Return the initialised driver library; initialising makes no context.

    Raises
    ------
    MissingDependencyError
        Where there is no NVIDIA driver or it finds no usable GPU.
    """
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError:
        raise MissingDependencyError(
            f"the GPU path needs an NVIDIA driver, and {name} is not on this machine; install the driver of "
            f"your GPU (https://www.nvidia.com/drivers). CPU tensors work without it."
        ) from None
    result = driver.cuInit(0)
    if result != CUDA_SUCCESS:
        raise MissingDependencyError(
            f"the GPU path needs a working NVIDIA driver, and cuInit of {name} failed with error {result}; "
            f"`nvidia-smi` shows what the driver sees. CPU tensors work without it."
        )
    return driver


def _text(function: str, result: int) -> str:
    pointer = ctypes.c_char_p()
    if (
        getattr(library(), function)(result, ctypes.byref(pointer)) == CUDA_SUCCESS
        and pointer.value is not None
    ):
        return pointer.value.decode()
    return str(result)


def check(result: int, what: str) -> None:
    """Raise a RuntimeError that names the driver's error and what was being done; nothing on success."""
    if result != CUDA_SUCCESS:
        raise RuntimeError(f"{what}: {_text('cuGetErrorName', result)}, {_text('cuGetErrorString', result)}")


def driver_version() -> tuple[int, int]:
    """Return the newest CUDA release that the driver supports, for example (13, 0)."""
    version = ctypes.c_int()
    check(library().cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
    return version.value // 1000, version.value % 1000 // 10


@cache
def primary_context(device: int) -> int:
    """Return the primary context of a GPU, the one that PyTorch and CuPy use; made if there is none."""
    handle = ctypes.c_int()
    check(library().cuDeviceGet(ctypes.byref(handle), device), f"cuDeviceGet({device})")
    context = ctypes.c_void_p()
    what = f"cuDevicePrimaryCtxRetain({device})"
    check(library().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), what)
    assert context.value is not None
    return context.value


class current_context:  # noqa: N801 - used as a function
    """Make a context current for a ``with`` block, on this thread.

    Parameters
    ----------
    context : int
        A context handle.
    """

    def __init__(self, context: int) -> None:
        self._context = ctypes.c_void_p(context)

    def __enter__(self) -> None:
        check(library().cuCtxPushCurrent_v2(self._context), "cuCtxPushCurrent")

    def __exit__(self, *exception: object) -> None:
        popped = ctypes.c_void_p()
        check(library().cuCtxPopCurrent_v2(ctypes.byref(popped)), "cuCtxPopCurrent")


class relaxed_capture_mode:  # noqa: N801 - used as a function
    """Allow this thread, for a ``with`` block, what a capture of another stream or thread would forbid."""

    def __enter__(self) -> None:
        self._mode = ctypes.c_int(RELAXED)
        check(library().cuThreadExchangeStreamCaptureMode(ctypes.byref(self._mode)), "capture mode")

    def __exit__(self, *exception: object) -> None:
        library().cuThreadExchangeStreamCaptureMode(ctypes.byref(self._mode))


def function_attribute(function: int, name: str) -> int:
    """Return an attribute of a loaded kernel, by its key in ``FUNCTION_ATTRIBUTES``."""
    value = ctypes.c_int()
    result = library().cuFuncGetAttribute(
        ctypes.byref(value), FUNCTION_ATTRIBUTES[name], ctypes.c_void_p(function)
    )
    check(result, f"cuFuncGetAttribute({name})")
    return value.value


def set_function_attribute(function: int, name: str, value: int) -> None:
    """Set an attribute of a loaded kernel, by its key in ``FUNCTION_ATTRIBUTES``."""
    result = library().cuFuncSetAttribute(ctypes.c_void_p(function), FUNCTION_ATTRIBUTES[name], value)
    check(result, f"cuFuncSetAttribute({name}, {value})")


def stream_is_capturing(stream: int) -> bool:
    """Return whether work given to ``stream`` now would enter (or break) a CUDA graph capture."""
    status = ctypes.c_int()
    result = library().cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status))
    # The legacy default stream answers with an error while another stream captures.
    return result != CUDA_SUCCESS or status.value != STREAM_CAPTURE_NONE
