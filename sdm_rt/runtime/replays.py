"""Launch sequences that come again with the same arguments, replayed as one CUDA graph each.

A training loop asks its allocator for the same blocks in the same order at every step, so the pointers of a
call are mostly those of an earlier one. A sequence whose arguments were seen before is captured, and replayed
from then on: the host makes one launch, and the GPU waits less between kernels. A replay reads and writes
exactly the memory that the call at hand was given, so it owns nothing and copies nothing.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable

from sdm_rt import env
from sdm_rt.runtime import driver
from sdm_rt.runtime.graph import Recording

__all__ = ["LEAST_LAUNCHES", "MOST_NODES", "Replays", "forget_replays", "suspend_replays"]

LEAST_LAUNCHES = 16
"""A sequence of fewer launches costs the host less than the look-up and the launch of a graph."""
MOST_NODES = 32_768
"""Kernels in all graphs of one sequence; beyond it the graph that was used longest ago is dropped."""
MOST_SEEN = 64
"""Argument lists remembered of calls that were not captured."""


class _State:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.suspensions = 0
        self.all: weakref.WeakSet[Replays] = weakref.WeakSet()


_state = _State()


def suspend_replays(change: int) -> None:
    """Enter (1) or leave (-1) a span without replays, in every thread; graphs are kept."""
    with _state.lock:
        _state.suspensions += change


def forget_replays() -> None:
    """Drop all graphs, of every thread."""
    with _state.lock:
        for one in _state.all:
            one.forget()


class Replays:
    """The graphs of one sequence of launches; belongs to one thread, as its launches do.

    Parameters
    ----------
    launches : int
        Of the sequence.
    record : callable
        Captures the sequence with its present arguments.
    """

    def __init__(self, launches: int, record: Callable[[], Recording]) -> None:
        self._record = record
        self._worthwhile = launches >= LEAST_LAUNCHES
        self._most = max(1, MOST_NODES // max(launches, 1))
        self._graphs: OrderedDict[Hashable, Recording] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        with _state.lock:
            _state.all.add(self)

    def forget(self) -> None:
        """Drop the graphs; a replay under way in another thread ends with the one it has."""
        self._graphs = OrderedDict()

    def replay(self, arguments: Hashable, stream: int) -> bool:
        """Run the sequence as a graph, if one with these arguments exists or is due.

        Parameters
        ----------
        arguments : hashable
            All that tells this call from others.
        stream : int
            Where it runs.

        Returns
        -------
        bool
            False: nothing has run. So it is for arguments that come for the first time, and inside a capture,
            whose graph the launches become part of.
        """
        if not self._worthwhile or _state.suspensions or not env.flag("SDM_RT_REPLAY"):
            return False
        if driver.stream_is_capturing(stream):
            return False
        key = (stream, arguments)
        graphs = self._graphs
        graph = graphs.get(key)
        if graph is None:
            graph = self._capture(graphs, key)
            if graph is None:
                return False
        graphs.move_to_end(key)
        graph.replay(stream)
        return True

    def _capture(self, graphs: OrderedDict[Hashable, Recording], key: Hashable) -> Recording | None:
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > MOST_SEEN:
                self._seen.popitem(last=False)
            return None
        del self._seen[key]
        try:
            graph = graphs[key] = self._record()
        except RuntimeError as error:
            self._worthwhile = False
            warnings.warn(f"calls stay launched kernel by kernel, without a graph: {error}", stacklevel=2)
            return None
        if len(graphs) > self._most:
            graphs.popitem(last=False)
        return graph
