"""Launch sequences that come again with the same arguments, replayed as one CUDA graph each.

A training loop asks its allocator for the same blocks in the same order at every step, so the pointers of a
call are mostly those of an earlier one. A sequence whose arguments were seen before is captured, and replayed
from then on: the host makes one launch, and the GPU waits less between kernels. A replay reads and writes
exactly the memory that the call at hand was given, so it owns nothing and copies nothing.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from sdm_rt import env
from sdm_rt.runtime import driver

__all__ = [
    "IDLE_RUNS",
    "LEAST_LAUNCHES",
    "MOST_NODES",
    "MOST_SEEN",
    "GraphPool",
    "Replays",
    "forget_replays",
    "suspend_replays",
]

LEAST_LAUNCHES = 16
"""A sequence of fewer launches costs the host less than the look-up and the launch of a graph."""
MOST_NODES = 131_072
"""Launches in all graphs of the process."""
IDLE_RUNS = 512
"""A graph that was not used in so many runs of any sequence makes room for another one."""
MOST_SEEN = 64
"""Argument lists of a sequence that are remembered of calls that were not captured."""


class Replayable(Protocol):
    """A graph: a `sdm_rt.runtime.graph.Recording`, or what stands around one."""

    def replay(self, stream: int) -> None:
        """Launch the graph on a stream."""


G = TypeVar("G", bound=Replayable)


@dataclass
class _Held(Generic[G]):
    graph: G
    launches: int
    used: int  # the latest run


class GraphPool(Generic[G]):
    """Graphs within a bound, the one used longest ago first.

    Parameters
    ----------
    most : int
        Launches in all of them, as their sequences count them.
    idle : int
        A graph that was not used in so many runs of the pool makes room for another one.
    """

    def __init__(self, most: int = MOST_NODES, idle: int = IDLE_RUNS) -> None:
        self._most = most
        self._idle = idle
        self._lock = threading.RLock()
        self._held: OrderedDict[Hashable, _Held[G]] = OrderedDict()
        self._keys: dict[int, Hashable] = {}  # by the identity of a graph
        self._nodes = 0
        self._runs = 0
        self.generation = 0
        _pools.add(self)

    def __len__(self) -> int:
        return len(self._held)

    def find(self, key: Hashable) -> G | None:
        """Return the graph of a key, if there is one; counts a run."""
        with self._lock:
            self._runs += 1
            held = self._held.get(key)
            if held is None:
                return None
            held.used = self._runs
            self._held.move_to_end(key)
            return held.graph

    def makes_room(self, launches: int) -> bool:
        """Drop graphs that nobody uses until so many launches fit; False where the others are in use."""
        with self._lock:
            while self._nodes + launches > self._most and self._held:
                key, oldest = next(iter(self._held.items()))
                if self._runs - oldest.used < self._idle:
                    return False
                self._drop(key)
            return launches <= self._most

    def add(self, key: Hashable, graph: G, launches: int) -> None:
        """Keep a new graph."""
        with self._lock:
            self._held[key] = _Held(graph, launches, self._runs)
            self._keys[id(graph)] = key
            self._nodes += launches

    def forget(self, owner: int | None = None) -> None:
        """Drop the graphs of one sequence, or all."""
        with self._lock:
            self.generation += owner is None
            for key in [key for key in self._held if owner is None or key[0] == owner]:  # type: ignore[index]
                self._drop(key)

    def drop(self, graph: G) -> None:
        """Drop one graph, if it is still here."""
        with self._lock:
            if id(graph) in self._keys:
                self._drop(self._keys[id(graph)])

    def _drop(self, key: Hashable) -> None:
        held = self._held.pop(key, None)
        if held is None:  # a finalizer came first
            return
        del self._keys[id(held.graph)]
        self._nodes -= held.launches


class _Suspensions:
    """How many spans without replays are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.open = 0

    def change(self, change: int) -> None:
        with self._lock:
            self.open += change


_pools: weakref.WeakSet[GraphPool[Any]] = weakref.WeakSet()
_pool: GraphPool[Any] = GraphPool()
_suspensions = _Suspensions()
_owners = itertools.count()


def suspend_replays(change: int) -> None:
    """Enter (1) or leave (-1) a span without replays, in every thread; graphs are kept."""
    _suspensions.change(change)


def forget_replays() -> None:
    """Drop all graphs; a replay under way in another thread ends with the one it has."""
    for pool in list(_pools):
        pool.forget()


class Replays(Generic[G]):
    """The graphs of one sequence of launches; used by one thread at a time.

    Parameters
    ----------
    launches : int
        Of the sequence; what it counts in the pool.
    pool : GraphPool, optional
        Where its graphs are kept; default: that of the process.
    least : int
        A sequence of fewer launches has no graphs.
    """

    def __init__(self, launches: int, pool: GraphPool[G] | None = None, least: int = LEAST_LAUNCHES) -> None:
        self._launches = launches
        self._least = least
        self._pool = _pool if pool is None else pool
        self._failed_at: int | None = None  # the pool's generation when a capture failed
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._owner = next(_owners)
        weakref.finalize(self, self._pool.forget, self._owner)

    def replay(self, arguments: Hashable, stream: int, record: Callable[[], G]) -> bool:
        """Run the sequence as a graph, if one with these arguments exists or is due.

        Parameters
        ----------
        arguments, stream, record
            As of `find`.

        Returns
        -------
        bool
            False: nothing has run.
        """
        graph = self.find(arguments, stream, record)
        if graph is None:
            return False
        graph.replay(stream)
        return True

    def find(self, arguments: Hashable, stream: int, record: Callable[[], G]) -> G | None:
        """Return the graph with these arguments, captured now if it is due; nothing has run yet.

        Parameters
        ----------
        arguments : hashable
            All that tells this call from others.
        stream : int
            Where it runs.
        record : callable
            Captures the sequence with its present arguments.

        Returns
        -------
        graph or None
            None for arguments that come for the first time, where all graphs that fit are in use, and inside
            a capture, whose graph the launches become part of.
        """
        if self._launches < self._least or self._failed_at == self._pool.generation or _suspensions.open:
            return None
        if not env.flag("SDM_RT_REPLAY") or driver.stream_is_capturing(stream):
            return None
        key = (self._owner, stream, arguments)
        return self._pool.find(key) or self._capture(key, record)

    def _capture(self, key: Hashable, record: Callable[[], G]) -> G | None:
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > MOST_SEEN:
                self._seen.popitem(last=False)
            return None
        if not self._pool.makes_room(self._launches):
            return None
        del self._seen[key]
        try:
            graph = record()
        except RuntimeError as error:
            self._failed_at = self._pool.generation
            warnings.warn(f"calls stay launched kernel by kernel, without a graph: {error}", stacklevel=2)
            return None
        self._pool.add(key, graph, self._launches)
        return graph
