"""Sequences of prepared launches as CUDA graphs: one that replays as it is, one that takes other arguments.

A graph is captured once, on a stream of its own. An update rewrites the parameters of exactly those kernel
nodes whose arguments changed (cuGraphExecKernelNodeSetParams): no new capture, no indirection in the kernels,
and replays that are already queued keep the values they were given.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdm_rt.runtime import driver
from sdm_rt.runtime.driver import check, library
from sdm_rt.runtime.launcher import PreparedLaunch

__all__ = ["CapturedLaunches", "Recording", "Values", "capture", "new_stream", "record"]

Values = Mapping[str, Any]

NON_BLOCKING = 1  # CUstream_flags
THREAD_LOCAL = 1  # CUstreamCaptureMode


@dataclass(frozen=True)
class _Node:
    """One kernel of a graph with its own argument slots."""

    handle: int
    launch: PreparedLaunch
    slots: ctypes.Array[ctypes.c_uint64]
    addresses: ctypes.Array[ctypes.c_void_p]  # of the slots; params points to it
    params: driver.KernelNodeParams

    @classmethod
    def of(cls, handle: int, launch: PreparedLaunch) -> _Node:
        slots = type(launch.arguments).from_buffer_copy(launch.arguments)
        base, count = ctypes.addressof(slots), len(slots)
        addresses = (ctypes.c_void_p * count)(
            *(base + ctypes.sizeof(ctypes.c_uint64) * at for at in range(count))
        )
        description = launch.launch_description
        params = driver.KernelNodeParams(
            function=launch.function,
            grid=description.grid,
            block=description.block,
            shared_memory=description.shared_memory,
            parameters=ctypes.cast(addresses, ctypes.c_void_p),
        )
        return cls(handle, launch, slots, addresses, params)


class Recording:
    """A CUDA graph of launches with the arguments they were captured with; made by `record`."""

    def __init__(self, graph: int, executable: int, context: int) -> None:
        self._executable = ctypes.c_void_p(executable)
        self._context = context
        self._finalizer = weakref.finalize(self, _destroy, graph, executable)

    def replay(self, stream: int) -> None:
        """Launch the graph on a stream."""
        with driver.current_context(self._context):
            check(library().cuGraphLaunch(self._executable, ctypes.c_void_p(stream)), "cuGraphLaunch")


class CapturedLaunches(Recording):
    """A CUDA graph of launches that takes other arguments; made by `capture`.

    The graph owns what it was given to keep: tensors live as long as it addresses them.
    """

    def __init__(self, graph: int, executable: int, context: int, nodes: list[_Node], keep: object) -> None:
        super().__init__(graph, executable, context)
        self._nodes = nodes
        self._keep = keep

    def __len__(self) -> int:
        return len(self._nodes)

    def update(self, values: Sequence[Values], keep: object) -> int:
        """Give the launches other arguments, for replays from now on.

        Parameters
        ----------
        values : sequence of mapping
            For each launch, the arguments that change, by name.
        keep : object
            What keeps the new pointers valid; held until the next update.

        Returns
        -------
        int
            How many kernel nodes were rewritten.
        """
        if len(values) != len(self._nodes):
            raise ValueError(
                f"values: expected one mapping for each of {len(self._nodes)} launches, got {len(values)}"
            )
        changed = 0
        with driver.current_context(self._context):
            for node, new in zip(self._nodes, values, strict=True):
                before = bytes(node.slots)
                node.launch.write(node.slots, new)
                if bytes(node.slots) == before:
                    continue
                result = library().cuGraphExecKernelNodeSetParams_v2(
                    self._executable, ctypes.c_void_p(node.handle), ctypes.byref(node.params)
                )
                check(result, f"update of {node.launch.launch_description.name} in a CUDA graph")
                changed += 1
        self._keep = keep
        return changed


def _destroy(graph: int, executable: int) -> None:
    library().cuGraphExecDestroy(ctypes.c_void_p(executable))
    library().cuGraphDestroy(ctypes.c_void_p(graph))


def _latest_node(stream: ctypes.c_void_p) -> int:
    """Return the node that the next work of a capturing stream would follow: the launch just made."""
    status, count = ctypes.c_int(), ctypes.c_size_t()
    identity, graph = ctypes.c_uint64(), ctypes.c_void_p()
    nodes, edges = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_void_p()
    result = library().cuStreamGetCaptureInfo_v3(
        stream,
        ctypes.byref(status),
        ctypes.byref(identity),
        ctypes.byref(graph),
        ctypes.byref(nodes),
        ctypes.byref(edges),
        ctypes.byref(count),
    )
    check(result, "cuStreamGetCaptureInfo")
    if count.value != 1 or nodes[0] is None:
        raise RuntimeError(f"a launch became {count.value} nodes of the CUDA graph, expected 1")
    return int(nodes[0])


def capture(
    launches: Sequence[tuple[PreparedLaunch, Values]], context: int, keep: object
) -> CapturedLaunches:
    """Capture launches, in order, into a CUDA graph.

    Parameters
    ----------
    launches : sequence of (PreparedLaunch, mapping)
        Each launch with the arguments it is to be given first; one prepared launch may occur many times.
    context : int
        The context of their GPU (``driver.primary_context``).
    keep : object
        What keeps the pointers among the arguments valid; held by the graph.

    Returns
    -------
    CapturedLaunches
        Ready to replay; nothing has run yet.

    Raises
    ------
    RuntimeError
        With the driver's error; the capture has been ended and later calls work.
    """
    nodes: list[_Node] = []

    def launch_all(stream: ctypes.c_void_p) -> None:
        for launch, values in launches:
            launch.set(values)
            launch.run(stream.value or 0)
            nodes.append(_Node.of(_latest_node(stream), launch))

    graph, executable = _instantiate(launch_all, context)
    return CapturedLaunches(graph, executable, context, nodes, keep)


def new_stream(context: int) -> int:
    """Return a new stream to capture on; it lives as long as the process."""
    stream = ctypes.c_void_p()
    with driver.current_context(context), driver.relaxed_capture_mode():
        check(library().cuStreamCreate(ctypes.byref(stream), NON_BLOCKING), "cuStreamCreate")
    assert stream.value is not None
    return stream.value


def record(launch_all: Callable[[int], None], context: int, stream: int | None = None) -> Recording:
    """Capture launches into a CUDA graph that replays them as they are.

    Parameters
    ----------
    launch_all : callable
        Makes the launches on the stream it is given.
    context : int
        The context of their GPU (``driver.primary_context``).
    stream : int, optional
        Where to capture (`new_stream`); default: a stream that is gone afterwards.

    Raises
    ------
    RuntimeError
        With the driver's error; the capture has been ended and later calls work.
    """
    return Recording(*_instantiate(lambda on: launch_all(on.value or 0), context, stream), context)


def _instantiate(
    launch_all: Callable[[ctypes.c_void_p], None], context: int, own: int | None = None
) -> tuple[int, int]:
    """Return the graph that the stream ``own``, or one made for it, captures, and its executable."""
    graph, executable, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(own)
    with driver.current_context(context), driver.relaxed_capture_mode():
        if own is None:
            check(library().cuStreamCreate(ctypes.byref(stream), NON_BLOCKING), "cuStreamCreate")
        try:
            check(library().cuStreamBeginCapture_v2(stream, THREAD_LOCAL), "cuStreamBeginCapture")
            try:
                launch_all(stream)
            finally:
                ended = library().cuStreamEndCapture(stream, ctypes.byref(graph))
            check(ended, "cuStreamEndCapture")
            check(
                library().cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_uint64(0)),
                "cuGraphInstantiate",
            )
        except BaseException:
            if graph.value is not None:
                library().cuGraphDestroy(graph)
            raise
        finally:
            if own is None:
                library().cuStreamDestroy_v2(stream)
    assert graph.value is not None
    assert executable.value is not None
    return graph.value, executable.value
