"""Launches prepared once: configuration, arguments and attributes in memory that the driver reads directly.

A prepared launch costs one call of cuLaunchKernelEx; only arguments that changed are rewritten. It belongs to
the thread that prepared it, since writing arguments and launching are two steps.
"""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sdm_rt import env
from sdm_rt.runtime import driver
from sdm_rt.runtime.compile import kernels
from sdm_rt.runtime.device import Gpu
from sdm_rt.runtime.kernel import KernelSpec

__all__ = ["Launchable", "PreparedLaunch", "prepare", "prepare_all", "word"]

# What the driver answers where no context or another GPU's is current; it has launched nothing then.
_WRONG_CONTEXT = frozenset({driver.INVALID_CONTEXT, driver.INVALID_HANDLE})

# Every argument lies in a slot of 8 bytes, little-endian like every host that CUDA runs on.
SLOT = 8
_RANGES = {
    "pointer": (0, 2**64 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "int32": (-(2**31), 2**31 - 1),
}
_NO_CLUSTER = (1, 1, 1)


class _Argument(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...


class Launchable(Protocol):
    """What a launch needs of a plan's description of it (``plan.launch.Launch``)."""

    @property
    def name(self) -> str:
        """Its role in the plan."""

    @property
    def kernel(self) -> KernelSpec:
        """The translation unit."""

    @property
    def entry(self) -> str:
        """The kernel in it."""

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks."""

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads of a block."""

    @property
    def cluster(self) -> tuple[int, int, int]:
        """Blocks of a cluster."""

    @property
    def shared_memory(self) -> int:
        """Dynamic shared memory of a block, bytes."""

    @property
    def pdl(self) -> bool:
        """Whether it is a programmatic dependent of the launch before it."""

    @property
    def arguments(self) -> Sequence[_Argument]:
        """The kernel's parameters in order."""


def word(kind: str, value: float) -> int:
    """Return a value as a slot of 8 bytes holds an argument of its kind; integers hold themselves.

    Raises
    ------
    TypeError
        For a value that is no integer, unless the kind is ``"float32"``.
    ValueError
        For an integer that the kind cannot hold.
    """
    if kind == "float32":
        return int.from_bytes(struct.pack("<f", value), "little")
    number = operator.index(value)  # type: ignore[arg-type]
    low, high = _RANGES[kind]
    if not low <= number <= high:
        raise ValueError(f"an argument of kind {kind} must lie in {low}..{high}, got {number}")
    return number


def attributes_of(launch: Launchable, pdl: bool) -> list[driver.LaunchAttribute]:
    """Return the launch attributes of a launch; ``pdl`` False leaves out programmatic serialization."""
    found = []
    if launch.cluster != _NO_CLUSTER:
        cluster = driver.LaunchAttribute(id=driver.CLUSTER_DIMENSION)
        cluster.value.cluster = (ctypes.c_uint * 3)(*launch.cluster)
        found.append(cluster)
    if launch.pdl and pdl:
        serialization = driver.LaunchAttribute(id=driver.PROGRAMMATIC_STREAM_SERIALIZATION)
        serialization.value.serialization_allowed = 1
        found.append(serialization)
    return found


class PreparedLaunch:
    """One launch on one GPU, ready to go.

    Parameters
    ----------
    launch : Launchable
        The launch as a plan describes it.
    function : int
        The loaded kernel's handle.
    context : int
        The context it was loaded into.
    pdl : bool
        Whether a programmatic dependent is launched as one (``SDM_RT_PDL``).
    module : object
        What keeps the kernel loaded.
    """

    def __init__(self, launch: Launchable, function: int, context: int, pdl: bool, module: object) -> None:
        self.launch_description = launch
        self._module = module
        self._context = context
        self._slots = {argument.name: at for at, argument in enumerate(launch.arguments)}
        self._kinds = [argument.kind for argument in launch.arguments]
        count = len(self._kinds)
        self.arguments = (ctypes.c_uint64 * count)()
        """The argument slots, each a `word`."""
        base = ctypes.addressof(self.arguments)
        self.parameters = (ctypes.c_void_p * count)(*(base + SLOT * at for at in range(count)))
        """Addresses of the slots, as the driver wants them."""
        found = attributes_of(launch, pdl)
        self._attributes = (driver.LaunchAttribute * max(len(found), 1))(*found)
        self._config = driver.LaunchConfig(
            grid=launch.grid,
            block=launch.block,
            shared_memory=launch.shared_memory,
            attributes=self._attributes,
            attribute_count=len(found),
        )
        self._stream = 0  # as it stands in the configuration
        self.function = function
        """The kernel's handle."""
        self._launch = driver.library().cuLaunchKernelEx
        # Made once: references are what ctypes hands on fastest.
        parameters = ctypes.byref(self.parameters)
        self._launch_arguments = (ctypes.byref(self._config), ctypes.c_void_p(function), parameters, None)

    def write(self, slots: ctypes.Array[ctypes.c_uint64], values: Mapping[str, Any]) -> None:
        """Write arguments by name into argument slots of this kernel; the others keep their values."""
        for name, value in values.items():
            at = self._slots[name]
            slots[at] = word(self._kinds[at], value)

    def set(self, values: Mapping[str, Any]) -> None:
        """Write arguments of the next launch by name; the others keep their values."""
        self.write(self.arguments, values)

    def run(self, stream: int) -> None:
        """Launch on a stream of the kernel's GPU, whatever GPU is current.

        A kernel belongs to the context it was loaded into. The driver refuses to launch it while no context
        or another one is current; only then is its own made current, for the launch.

        Raises
        ------
        RuntimeError
            With the driver's error.
        """
        if stream != self._stream:
            self._config.stream = self._stream = stream
        result = self._launch(*self._launch_arguments)
        if result in _WRONG_CONTEXT:
            with driver.current_context(self._context):
                result = self._launch(*self._launch_arguments)
        if result:
            launch = self.launch_description
            driver.check(
                result,
                f"launch of {launch.name} ({launch.kernel.file}, grid {launch.grid}, block {launch.block}, "
                f"{launch.shared_memory} bytes of dynamic shared memory)",
            )


def refuse_capture(stream: int) -> None:
    """RuntimeError where ``stream`` is being captured: compiling or loading would break the capture."""
    if driver.stream_is_capturing(stream):
        raise RuntimeError(
            "a kernel that is not loaded yet cannot be compiled or loaded inside a CUDA graph capture; run "
            "warmup first: one call with the same shapes and dtypes before the capture"
        )


def prepare(launch: Launchable, gpu: Gpu, stream: int) -> PreparedLaunch:
    """Prepare one launch, as `prepare_all` does."""
    return prepare_all([launch], gpu, stream)[0]


def prepare_all(launches: Sequence[Launchable], gpu: Gpu, stream: int) -> list[PreparedLaunch]:
    """Compile or load the kernels of launches and prepare each.

    Parameters
    ----------
    launches : sequence of Launchable
        The launches.
    gpu : Gpu
        Where they will run.
    stream : int
        The stream they are wanted on now: kernels that must be loaded are refused while it is captured.

    Raises
    ------
    RuntimeError
        Inside a capture, where a kernel is not loaded; the stream stays usable.
    KernelCompileError, NotPrecompiledError, MissingDependencyError
        As ``compile.Kernels.load_all``.
    """
    specs = tuple(dict.fromkeys(launch.kernel for launch in launches))
    if not all(kernels().is_loaded(spec, gpu) for spec in specs):
        refuse_capture(stream)
    modules = dict(zip(specs, kernels().load_all(specs, gpu), strict=True))
    context = driver.primary_context(gpu.index)
    pdl = env.flag("SDM_RT_PDL")
    prepared = []
    with driver.current_context(context):
        for launch in launches:
            module = modules[launch.kernel]
            function = module.function(launch.entry)
            if launch.shared_memory > driver.function_attribute(function, "max_dynamic_shared"):
                driver.set_function_attribute(function, "max_dynamic_shared", launch.shared_memory)
            prepared.append(PreparedLaunch(launch, function, context, pdl, module))
    return prepared


def warmup(launches: Sequence[Launchable], gpu: Gpu) -> None:
    """Compile and load the kernels of ``launches``, so that their next call may stand inside a capture."""
    kernels().load_all([launch.kernel for launch in launches], gpu)
