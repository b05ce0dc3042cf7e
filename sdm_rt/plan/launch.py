"""One kernel launch as data: kernel, grid, block, shared memory, PDL, arguments, what it reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from sdm_rt.plan.device import DeviceModel
from sdm_rt.plan.kernel_resources import KernelResources, kernel_resources
from sdm_rt.plan.occupancy import Occupancy, occupancy
from sdm_rt.runtime.kernel import KernelSpec

__all__ = ["Argument", "ArgumentKind", "Dim3", "Launch", "LibraryCall", "int32s", "pdl_defines", "pointers"]

ArgumentKind = Literal["pointer", "int32", "int64", "float32"]
Dim3 = tuple[int, int, int]

KINDS = ("pointer", "int32", "int64", "float32")
MAX_GRID: Dim3 = (2**31 - 1, 65535, 65535)
MAX_BLOCK: Dim3 = (1024, 1024, 64)
MAX_THREADS = 1024
MAX_CLUSTER = 8  # blocks; the portable limit


@dataclass(frozen=True)
class Argument:
    """One parameter of a kernel.

    Parameters
    ----------
    name : str
        The parameter's name in the kernel's signature.
    kind : {"pointer", "int32", "int64", "float32"}
        How it is passed; a pointer is a device address, null where the tensor is absent.
    step_dependent : bool
        Whether its value changes with the step of the loop.
    """

    name: str
    kind: ArgumentKind
    step_dependent: bool = False

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"argument name must be an identifier, got {self.name!r}")
        if self.kind not in KINDS:
            raise ValueError(f"{self.name}: kind must be one of {', '.join(KINDS)}, got {self.kind!r}")


def pointers(*names: str) -> tuple[Argument, ...]:
    """Return pointer arguments of these names."""
    return tuple(Argument(name, "pointer") for name in names)


def int32s(*names: str) -> tuple[Argument, ...]:
    """Return int32 arguments of these names."""
    return tuple(Argument(name, "int32") for name in names)


def pdl_defines(waits: bool, triggers: bool = False) -> tuple[tuple[str, str], ...]:
    """Return the macros of a kernel that is launched as a programmatic dependent, or triggers its own."""
    macros = (("SDM_PDL_TRIGGER", triggers), ("SDM_PDL_WAIT", waits))
    return tuple((name, "1") for name, on in macros if on)


def _checked_dimension(what: str, value: Dim3, limits: Dim3) -> None:
    if len(value) != 3 or any(not 1 <= size <= limit for size, limit in zip(value, limits, strict=True)):
        raise ValueError(f"{what} must be three sizes in 1..{limits}, got {value}")


@dataclass(frozen=True)
class LibraryCall:
    """A call of a library function in the place of a kernel; only reference schedules hold one.

    Parameters
    ----------
    name : str
        Its role in the schedule.
    function : str
        The function, for example ``"torch.baddbmm"``.
    reads, writes : tuple of str
        Names of the tensors.
    bytes_moved, floor_bytes : int
        As of a `Launch`.
    """

    name: str
    function: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    bytes_moved: int
    floor_bytes: int = 0

    def to_dict(self) -> dict[str, object]:
        """Return the call as JSON values."""
        return {
            "name": self.name,
            "function": self.function,
            "reads": list(self.reads),
            "writes": list(self.writes),
            "bytes_moved": self.bytes_moved,
            "floor_bytes": self.floor_bytes,
        }


@dataclass(frozen=True)
class Launch:
    """One kernel launch, validated when made, hashable and comparable.

    Parameters
    ----------
    name : str
        Its role in the schedule, for example ``"gather"``.
    kernel : KernelSpec
        The translation unit.
    entry : str
        The kernel in it.
    grid, block : tuple of three int
        Blocks of the grid, threads of a block. A grid is never empty: planners leave empty launches out.
    arguments : tuple of Argument
        The kernel's parameters in order.
    reads, writes : tuple of str
        Names of pointer arguments that the kernel reads or writes.
    bytes_moved : int
        Operand bytes of the launch, each operand counted once.
    floor_bytes : int
        The part of ``bytes_moved`` that must cross the memory bus: rows of the bank, of the gradient bank and
        of the snapshot at their first touch in the step. The rest is small or was touched before.
    cluster : tuple of three int
        Blocks of a thread block cluster.
    shared_memory : int
        Dynamic shared memory of a block, bytes.
    shared_padding : int
        The part of it that the kernel does not touch: asked for to keep fewer blocks on an SM.
    pdl : bool
        Whether the launch is a programmatic dependent of the launch before it.
    triggers : bool
        Whether this variant of the kernel executes ``griddepcontrol.launch_dependents``.
    note : str
        One sentence on the choice, for readers of the plan.

    Raises
    ------
    ValueError
        For sizes outside CUDA's limits, names that do not fit together or negative byte counts.
    """

    name: str
    kernel: KernelSpec
    entry: str
    grid: Dim3
    block: Dim3
    arguments: tuple[Argument, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    bytes_moved: int
    floor_bytes: int
    cluster: Dim3 = (1, 1, 1)
    shared_memory: int = 0
    shared_padding: int = 0
    pdl: bool = False
    triggers: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        if self.entry not in self.kernel.entries:
            raise ValueError(f"{self.name}: {self.kernel.file} has no entry {self.entry!r}")
        _checked_dimension(f"{self.name}: grid", self.grid, MAX_GRID)
        _checked_dimension(f"{self.name}: block", self.block, MAX_BLOCK)
        if self.threads > MAX_THREADS:
            raise ValueError(f"{self.name}: block {self.block} has more than {MAX_THREADS} threads")
        _checked_dimension(f"{self.name}: cluster", self.cluster, (MAX_CLUSTER,) * 3)
        if prod(self.cluster) > MAX_CLUSTER or any(
            blocks % size for blocks, size in zip(self.grid, self.cluster, strict=True)
        ):
            raise ValueError(
                f"{self.name}: cluster {self.cluster} must divide grid {self.grid} and hold at most "
                f"{MAX_CLUSTER} blocks"
            )
        names = [argument.name for argument in self.arguments]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.name}: argument names must differ, got {names}")
        tensors = {argument.name for argument in self.arguments if argument.kind == "pointer"}
        if unknown := sorted({*self.reads, *self.writes} - tensors):
            raise ValueError(f"{self.name}: reads and writes name no pointer argument: {', '.join(unknown)}")
        if self.pdl and ("SDM_PDL_WAIT", "1") not in self.kernel.defines:
            raise ValueError(f"{self.name}: a programmatic dependent needs a kernel with SDM_PDL_WAIT=1")
        if self.triggers != (("SDM_PDL_TRIGGER", "1") in self.kernel.defines):
            raise ValueError(
                f"{self.name}: triggers={self.triggers} contradicts SDM_PDL_TRIGGER of the kernel"
            )
        if not 0 <= self.shared_padding <= self.shared_memory:
            raise ValueError(
                f"{self.name}: need 0 <= shared_padding <= shared_memory, got {self.shared_padding} and "
                f"{self.shared_memory}"
            )
        if not 0 <= self.floor_bytes <= self.bytes_moved:
            raise ValueError(
                f"{self.name}: need 0 <= floor_bytes <= bytes_moved, got {self.floor_bytes} and "
                f"{self.bytes_moved}"
            )

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return prod(self.block)

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return prod(self.grid)

    def resources(self, device: DeviceModel) -> KernelResources:
        """Return what the kernel takes of an SM, from the committed table."""
        return kernel_resources(self.kernel, self.entry, device)

    def occupancy(self, device: DeviceModel) -> Occupancy:
        """Return the blocks of this launch that one SM holds at once."""
        resources = self.resources(device)
        return occupancy(
            device, self.threads, resources.registers, resources.static_shared + self.shared_memory
        )

    def to_dict(self) -> dict[str, object]:
        """Return the launch as JSON values."""
        return {
            "name": self.name,
            "kernel": self.kernel.file,
            "entry": self.entry,
            "defines": dict(self.kernel.defines),
            "grid": list(self.grid),
            "block": list(self.block),
            "cluster": list(self.cluster),
            "shared_memory": self.shared_memory,
            "shared_padding": self.shared_padding,
            "pdl": self.pdl,
            "triggers": self.triggers,
            "arguments": [
                {"name": argument.name, "kind": argument.kind, "step_dependent": argument.step_dependent}
                for argument in self.arguments
            ],
            "reads": list(self.reads),
            "writes": list(self.writes),
            "bytes_moved": self.bytes_moved,
            "floor_bytes": self.floor_bytes,
            "note": self.note,
        }
