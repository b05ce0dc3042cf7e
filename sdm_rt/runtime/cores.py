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


def side_by_side(
    work: Callable[[Item], Result], items: Sequence[Item], enter_thread: Callable[[], None] | None = None
) -> Iterator[Result]:
    """Yield ``work(item)`` of each item, in their order, computed by a thread a core.

    NVRTC compiles without Python's lock, so its calls run side by side. One item is done by the calling
    thread, and so are all where Python starts no thread any more. An exception comes up in the place of its
    result; items that were not begun by then are left.

    Parameters
    ----------
    work : callable
        Takes an item.
    items : sequence
        What it takes.
    enter_thread : callable, optional
        Called before an item's work in a thread that was started for it.
    """
    if len(items) < 2:
        yield from map(work, items)
        return

    def work_in_thread(item: Item) -> Result:
        if enter_thread is not None:
            enter_thread()
        return work(item)

    pool = ThreadPoolExecutor(min(len(items), len(usable_cores())), thread_name_prefix="sdm_rt")
    try:
        try:
            results = pool.map(work_in_thread, items)
        except RuntimeError:  # the main thread has ended, or Python is about to
            results = map(work, items)
        yield from results
    finally:
        pool.shutdown(cancel_futures=True)
