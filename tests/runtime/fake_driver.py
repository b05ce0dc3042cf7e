"""A CUDA driver of this process's imagination: it reads launches exactly as libcuda would, from memory.

Launches are recorded with the arguments found behind the parameter addresses; streams can be captured; graphs
keep their nodes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from sdm_rt.runtime import driver

CONTEXT = 0xC0
INVALID_VALUE = 1


@dataclass
class Recorded:
    """One launch as the driver saw it."""

    function: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_memory: int
    stream: int
    attributes: dict[int, Any]
    parameters: list[bytes]
    context: int


@dataclass
class FakeDriver:
    """Stands in for ``driver.library()``."""

    parameter_count: int
    current: int = CONTEXT
    capturing: set[int] = field(default_factory=set)
    launches: list[Recorded] = field(default_factory=list)
    nodes: list[Recorded] = field(default_factory=list)
    graphs: dict[int, list[Recorded]] = field(default_factory=dict)
    function_attributes: dict[int, int] = field(default_factory=lambda: {8: 49152})
    fail_launch: int = 0
    fail_launch_number: int = -1
    pushed: list[int] = field(default_factory=list)
    capture_mode: int = 0  # CU_STREAM_CAPTURE_MODE_GLOBAL, every thread's own

    def _record(self, config: Any, function: Any, parameters: Any) -> Recorded:
        config = config._obj
        attributes = {}
        for at in range(config.attribute_count):
            attribute = config.attributes[at]
            cluster = attribute.id == driver.CLUSTER_DIMENSION
            value = attribute.value
            attributes[attribute.id] = tuple(value.cluster) if cluster else value.serialization_allowed
        return Recorded(
            function=function.value,
            grid=tuple(config.grid),
            block=tuple(config.block),
            shared_memory=config.shared_memory,
            stream=config.stream or 0,
            attributes=attributes,
            parameters=[ctypes.string_at(parameters._obj[at], 8) for at in range(self.parameter_count)],
            context=self.current,
        )

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: Any) -> int:  # noqa: N802
        if self.current != CONTEXT:
            return driver.INVALID_HANDLE if self.current else driver.INVALID_CONTEXT
        if self.fail_launch and self.fail_launch_number in (-1, len(self.launches)):
            return self.fail_launch
        recorded = self._record(config, function, parameters)
        self.launches.append(recorded)
        if recorded.stream in self.capturing:
            self.nodes.append(recorded)
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = self.current or None
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:  # noqa: N802
        self.pushed.append(self.current)
        self.current = context.value
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:  # noqa: N802
        context._obj.value = self.current
        self.current = self.pushed.pop()
        return 0

    def cuFuncGetAttribute(self, value: Any, attribute: int, function: Any) -> int:  # noqa: N802
        value._obj.value = self.function_attributes[attribute]
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:  # noqa: N802
        self.function_attributes[attribute] = value
        return 0

    def cuStreamIsCapturing(self, stream: Any, status: Any) -> int:  # noqa: N802
        status._obj.value = int((stream.value or 0) in self.capturing)
        return 0

    def cuGetErrorName(self, result: int, text: Any) -> int:  # noqa: N802
        text._obj.value = {700: b"CUDA_ERROR_ILLEGAL_ADDRESS"}.get(result, b"CUDA_ERROR_INVALID_VALUE")
        return 0

    def cuGetErrorString(self, result: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"the reason in words"
        return 0

    def cuStreamCreate(self, stream: Any, flags: int) -> int:  # noqa: N802
        stream._obj.value = 0x51
        return 0

    def cuStreamDestroy_v2(self, stream: Any) -> int:  # noqa: N802
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        """Swap the calling thread's mode with the given one."""
        held, self.capture_mode = self.capture_mode, mode._obj.value
        mode._obj.value = held
        return 0

    def cuStreamBeginCapture_v2(self, stream: Any, mode: int) -> int:  # noqa: N802
        self.capturing.add(stream.value)
        self.nodes = []
        return 0

    def cuStreamEndCapture(self, stream: Any, graph: Any) -> int:  # noqa: N802
        self.capturing.remove(stream.value)
        graph._obj.value = 0x9A00 + len(self.graphs)
        self.graphs[graph._obj.value] = self.nodes
        return 0

    def cuStreamGetCaptureInfo_v3(  # noqa: N802
        self, stream: Any, status: Any, identity: Any, graph: Any, nodes: Any, edges: Any, count: Any
    ) -> int:
        self._handles = (ctypes.c_void_p * 1)(len(self.nodes))
        nodes._obj.contents = self._handles
        ctypes.memmove(
            ctypes.byref(nodes._obj), ctypes.byref(ctypes.c_void_p(ctypes.addressof(self._handles))), 8
        )
        count._obj.value = 1
        return 0

    def cuGraphInstantiateWithFlags(self, executable: Any, graph: Any, flags: Any) -> int:  # noqa: N802
        executable._obj.value = graph.value + 0x100000
        return 0

    def cuGraphExecKernelNodeSetParams_v2(self, executable: Any, node: Any, params: Any) -> int:  # noqa: N802
        params = params._obj
        target = self.graphs[executable.value - 0x100000][node.value - 1]
        assert (params.function, tuple(params.grid), tuple(params.block)) == (
            target.function,
            target.grid,
            target.block,
        )
        addresses = (ctypes.c_void_p * self.parameter_count).from_address(params.parameters)
        target.parameters = [ctypes.string_at(address, 8) for address in addresses]
        return 0

    def cuGraphLaunch(self, executable: Any, stream: Any) -> int:  # noqa: N802
        self.launches += self.graphs[executable.value - 0x100000]
        return 0

    def cuGraphExecDestroy(self, executable: Any) -> int:  # noqa: N802
        assert executable.value - 0x100000 in self.graphs
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:  # noqa: N802
        del self.graphs[graph.value]
        return 0
