"""The errors that end the demo with a message for its user."""

from __future__ import annotations

import torch

__all__ = ["DemoError", "is_lack_of_memory"]


class DemoError(Exception):
    """The demo cannot go on; the message says why and what helps, and is all its user sees."""


def is_lack_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is short; PyTorch has no type of it for the CPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(
        said in str(error) for said in ("can't allocate memory", "Storage size calculation overflowed")
    )
