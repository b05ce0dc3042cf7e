"""Arrays of other libraries at the border of an op: DLPack in and out, and the stream of the work.

Inside an op everything is a ``torch.Tensor`` and pointers; an array of another library is turned, once, where
the op is called, into a tensor that shares its memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from sdm_rt.errors import MissingDependencyError
from sdm_rt.runtime.dependencies import load_cupy

__all__ = [
    "check_writable",
    "current_stream",
    "empty_like_caller",
    "is_cupy",
    "is_foreign",
    "producer_stream",
    "to_caller",
    "to_tensor",
]


# What a producer of DLPack may raise, or PyTorch of what it was given.
_PRODUCER_ERRORS = (
    AssertionError,
    AttributeError,
    BufferError,
    KeyError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def check_writable(array: Any) -> None:
    """Refuse a read-only bank: TypeError."""
    if getattr(getattr(array, "flags", None), "writeable", True) is False:
        raise TypeError(f"memory: expected a writable array, got a read-only {type(array).__name__}")


def is_cupy(array: object) -> bool:
    """Return whether ``array`` is a CuPy array, without importing CuPy."""
    return type(array).__module__.partition(".")[0] == "cupy" and hasattr(array, "__dlpack__")


def is_foreign(array: object) -> bool:
    """Return whether ``array`` is another library's array that DLPack can share."""
    return not isinstance(array, Tensor) and hasattr(array, "__dlpack__")


def to_tensor(array: Any, name: str) -> Tensor:
    """Return a tensor that shares the memory of ``array``.

    The producer makes PyTorch's current stream wait for what it has queued on its own, as DLPack asks. Its
    library first copies a non-contiguous CuPy array other than the bank, and any with negative strides.

    Raises
    ------
    TypeError
        Naming the argument, for an object without ``__dlpack__`` or with one that PyTorch cannot take.
    ValueError
        For a bank with negative strides.
    """
    if isinstance(array, Tensor):
        return array
    if not hasattr(array, "__dlpack__"):
        raise TypeError(
            f"{name}: expected a torch.Tensor, a CuPy array or another object with __dlpack__, got "
            f"{type(array).__name__}"
        )
    if name != "memory" and is_cupy(array) and not array.flags.c_contiguous:
        array = load_cupy().ascontiguousarray(array)
    strides = getattr(array, "strides", None)
    if isinstance(strides, tuple) and min(strides, default=0) < 0:  # PyTorch has none, and aborts the process
        if name == "memory":
            raise ValueError(f"memory: expected strides of at least 0, got {list(strides)} bytes")
        array = array.copy()
    try:
        return from_dlpack(array)
    except _PRODUCER_ERRORS as error:
        raise TypeError(f"{name}: {type(array).__name__} cannot be shared through DLPack: {error}") from error


@contextlib.contextmanager
def producer_stream(array: object) -> Iterator[None]:
    """Make PyTorch work on the caller's stream: CuPy's current one for a CuPy array, else its own."""
    if not is_cupy(array):
        yield
        return
    if not torch.cuda.is_available():
        raise MissingDependencyError(
            "CuPy arrays are worked on through PyTorch, and this PyTorch finds no GPU "
            "(torch.cuda.is_available() is False); install a CUDA build of torch"
        )
    cupy = load_cupy()
    device = int(array.device.id)  # type: ignore[attr-defined]
    with cupy.cuda.Device(device):
        pointer = int(cupy.cuda.get_current_stream().ptr)
    own: torch.cuda.Stream = torch.cuda.default_stream(device)
    if pointer != own.cuda_stream:
        own = torch.cuda.ExternalStream(pointer, device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(own):
        yield


def empty_like_caller(array: Any, shape: tuple[int, ...]) -> Any:
    """Return uninitialised memory of the dtype of ``array``: CuPy's for a CuPy array, PyTorch's otherwise."""
    if is_cupy(array):
        cupy = load_cupy()
        with array.device:
            return cupy.empty(shape, dtype=array.dtype)
    return to_tensor(array, "memory").new_empty(shape)


def to_caller(tensor: Tensor, array: Any) -> Any:
    """Return ``tensor`` as the kind of array that ``array`` is: CuPy's, sharing its memory, or itself."""
    return load_cupy().from_dlpack(tensor) if is_cupy(array) else tensor


def current_stream(device: int) -> int:
    """Return the handle of PyTorch's current stream on a GPU; 0 is the legacy default stream."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream
