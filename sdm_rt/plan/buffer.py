"""A block of device memory that a plan needs beside the caller's tensors, as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from sdm_rt.plan.shapes import dtype_bytes

__all__ = ["Arena", "Buffer", "total_bytes"]

ARENA_ALIGNMENT = 256


@dataclass(frozen=True)
class Buffer:
    """One tensor of a plan's working memory; its name is the kernels' argument that it is passed as.

    Parameters
    ----------
    name : str
        The argument's name.
    dtype : str
        ``"uint8"`` for records, else the dtype of the values.
    shape : tuple of int
        Its dimensions.
    kept : bool
        Whether the backward needs it after the call.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kept: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the buffer."""
        return prod(self.shape) * dtype_bytes(self.dtype)

    def to_dict(self) -> dict[str, object]:
        """Return the buffer as JSON values."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "kept": self.kept,
            "bytes": self.bytes,
        }


def total_bytes(buffers: tuple[Buffer, ...], kept: bool | None = None) -> int:
    """Return the bytes of all buffers, or of those that are kept (or not)."""
    return sum(buffer.bytes for buffer in buffers if kept is None or buffer.kept == kept)


@dataclass(frozen=True)
class Arena:
    """Buffers laid out in one block of memory.

    Parameters
    ----------
    offsets : mapping of str to int
        Where each buffer begins, bytes: a multiple of 256.
    bytes : int
        Bytes of the block.
    """

    offsets: Mapping[str, int]
    bytes: int

    @classmethod
    def of(cls, buffers: Iterable[Buffer]) -> Arena:
        """Lay buffers out, one after another."""
        offsets, end = {}, 0
        for buffer in buffers:
            offsets[buffer.name] = end
            end += -(-buffer.bytes // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
        return cls(offsets, end)

    def addresses(self, start: int) -> dict[str, int]:
        """Return each buffer's address in a block that begins at ``start``."""
        return {name: start + offset for name, offset in self.offsets.items()}
