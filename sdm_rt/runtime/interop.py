"""Arrays of other libraries at the border of an op: DLPack in and out, and the stream of the work.

Inside an op everything is a ``torch.Tensor`` and pointers; an array of another library is turned, once, where
the op is called, into a tensor that shares its memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from sdm_rt.errors import MissingDependencyError
from sdm_rt.runtime import driver
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

PER_THREAD_STREAM = 2
"""The handle of CUDA's per-thread default stream."""

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
def producer_stream(
    array: object, operands: Iterable[object] = (), *, allocates: bool = True
) -> Iterator[None]:
    """Make PyTorch work on the caller's stream: CuPy's current one for a CuPy array, else its own.

    Where operands come of the other of the two libraries, the streams wait for each other: at the start the
    work for what PyTorch has queued (as for CuPy `to_tensor` makes it wait), at the end the other library's
    stream for the work, before which it must not hand out memory that the operands lay in.

    Parameters
    ----------
    array : object
        What decides: the bank, or the only operand.
    operands : iterable of object
        The others.
    allocates : bool
        Whether the work takes memory of PyTorch's allocator that no one holds afterwards.

    Raises
    ------
    RuntimeError
        For CuPy's per-thread default stream, of which PyTorch knows one for all threads; and, where the work
        allocates, for a capture by CuPy, after which PyTorch would give the graph's memory to others.
    """
    if not is_cupy(array):
        try:
            yield
        finally:
            if isinstance(array, Tensor) and array.is_cuda and any(map(is_cupy, operands)):
                _let_wait(_cupy_stream(array.get_device()), torch.cuda.current_stream(array.device))
        return
    if not torch.cuda.is_available():
        raise MissingDependencyError(
            "CuPy arrays are worked on through PyTorch, and this PyTorch finds no GPU "
            "(torch.cuda.is_available() is False); install a CUDA build of torch"
        )
    device = int(array.device.id)  # type: ignore[attr-defined]
    own, before = _cupy_stream(device), torch.cuda.current_stream(device)
    if own.cuda_stream == PER_THREAD_STREAM:
        raise RuntimeError(
            "CuPy's current stream is the per-thread default stream, which PyTorch cannot work on; make the "
            "call in `with cupy.cuda.Stream():`"
        )
    apart = own.cuda_stream != before.cuda_stream  # streams of another origin are never equal
    if allocates and apart and driver.stream_is_capturing(own.cuda_stream):
        raise RuntimeError(
            "the call stands inside a capture that CuPy began, of which PyTorch's allocator knows nothing; "
            "capture with torch.cuda.graph, and let cupy.cuda.ExternalStream work on the same stream"
        )
    shared = apart and any(isinstance(operand, Tensor) and operand.is_cuda for operand in operands)
    if shared:
        _let_wait(own, before)
    try:
        with torch.cuda.stream(own):
            yield
    finally:
        if shared:
            _let_wait(before, own)


def _cupy_stream(device: int) -> torch.cuda.Stream:
    """Return CuPy's current stream on a GPU as PyTorch's."""
    cupy = load_cupy()
    with cupy.cuda.Device(device):
        pointer = int(cupy.cuda.get_current_stream().ptr)
    stream: torch.cuda.Stream = torch.cuda.default_stream(device)
    if pointer != stream.cuda_stream:
        stream = torch.cuda.ExternalStream(pointer, device)  # type: ignore[no-untyped-call]
    return stream


def _let_wait(stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
    """Let what is queued on ``stream`` from now on wait for what is queued on ``other``.

    Not where one of them captures: a capture may wait for nothing outside it.
    """
    if stream.cuda_stream == other.cuda_stream:
        return
    if not any(driver.stream_is_capturing(one.cuda_stream) for one in (stream, other)):
        stream.wait_stream(other)


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
