"""What a user can read about past calls: repeated write slots, and the plan of the latest call."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "count_repeats",
    "device_repeats",
    "last_dispatch",
    "record_dispatch",
    "repeated_write_slots",
    "reset_dispatch",
]

_lock = threading.Lock()
_repeats = 0
_on_device: dict[torch.device, Tensor] = {}
_dispatch: dict[str, Any] = {}


def count_repeats(count: int) -> None:
    """Add ``count`` write entries that repeat a slot of their token."""
    global _repeats
    with _lock:
        _repeats += count


def device_repeats(device: torch.device) -> Tensor:
    """Return the counter of a GPU, int64 [1], that its kernels add to.

    Raises
    ------
    RuntimeError
        For the first op of a GPU inside a CUDA graph capture.
    """
    with _lock:
        counter = _on_device.get(device)
        if counter is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "the first op on a GPU cannot stand inside a CUDA graph capture; run warmup first: one "
                    "call with the same shapes and dtypes before the capture"
                )
            counter = torch.zeros(1, dtype=torch.int64, device=device)
            torch.cuda.current_stream(device).synchronize()  # before any other stream adds to it
            _on_device[device] = counter
        return counter


def repeated_write_slots(reset: bool = True) -> int:
    """Return how many write entries repeated a slot of their own token since the last reset.

    A repeated slot is legal: it decays once, by the gate of its first lane, and its weights add. Many
    repeats usually mean a fault in the indices. Waits for the GPUs that have run ops.

    Parameters
    ----------
    reset : bool
        Whether to set the count back to 0.
    """
    global _repeats
    with _lock:
        count = _repeats
        if reset:
            _repeats = 0
        for device, counter in _on_device.items():
            torch.cuda.synchronize(device)
            count += int(counter)
            if reset:
                counter.zero_()
                torch.cuda.synchronize(device)
    return count


def record_dispatch(description: dict[str, Any]) -> None:
    """Keep ``description`` as the latest call's."""
    global _dispatch
    _dispatch = description


def last_dispatch() -> dict[str, Any]:
    """Return how the latest op call of this process ran: its path and its shapes; empty before the first."""
    return dict(_dispatch)


def reset_dispatch() -> None:
    """Forget the latest call."""
    record_dispatch({})
