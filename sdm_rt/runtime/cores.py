"""Work that leaves Python alone for long, done on all cores of this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["side_by_side", "usable_cores"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def usable_cores() -> list[int]:
    """Return the cores that this process may run on, by number."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Yield ``work(item)`` of each item, in their order, computed by a thread a core.

    NVRTC compiles without Python's lock, so its calls run side by side. One item is done by the calling
    thread. An exception comes up in the place of its result; items that were not begun by then are left.
    """
    if len(items) < 2:
        yield from map(work, items)
        return
    pool = ThreadPoolExecutor(min(len(items), len(usable_cores())), thread_name_prefix="sdm_rt")
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(cancel_futures=True)
