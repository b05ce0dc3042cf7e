"""The ordered launches of a step loop as one value that prints, compares and turns into JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol

from sdm_rt.plan.buffer import Arena, Buffer
from sdm_rt.plan.device import DeviceModel
from sdm_rt.plan.launch import Launch, LibraryCall
from sdm_rt.plan.table import describe

__all__ = ["Call", "PlannedShape", "StepPlan"]

Call = Launch | LibraryCall


class PlannedShape(Protocol):
    """What a plan needs of the shape it was made for: a hashable value with JSON and a one-line text."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class StepPlan:
    """The launches of one forward, backward or decode call, in order.

    The first step issued may differ from the others (in its PDL flags), so it stands beside the step that all
    others repeat.

    Parameters
    ----------
    name : str
        What the plan computes, for example ``"forward"``.
    device : DeviceModel
        The GPU it was made for.
    shape : PlannedShape
        The shapes and dtypes it was made from.
    steps : int
        Steps of the loop.
    first_step : tuple of Launch or LibraryCall
        The launches of the step issued first, or of the first walk.
    step : tuple of Launch or LibraryCall
        The launches of every other step, or of every other walk.
    order : {"ascending", "descending"}
        Whether the loop runs over steps 0..steps-1 or back.
    prologue, epilogue : tuple of Launch or LibraryCall
        Launches before each slab of steps, and after the loop.
    slab_steps : int
        Steps of a slab; 0: the loop is one slab.
    schedule : {"stepwise", "persistent"}
        Whether the loop launches kernels for each step, or walks many steps in one launch.
    walk_steps : int
        Steps of a walk, which the launches of ``step`` do together; the last walk may be shorter.
    buffers : tuple of Buffer
        The working memory beside the caller's tensors.
    notes : tuple of str
        Sentences on choices that belong to no single launch.

    Raises
    ------
    ValueError
        For launches that the device cannot take.
    """

    name: str
    device: DeviceModel
    shape: PlannedShape
    steps: int
    first_step: tuple[Call, ...]
    step: tuple[Call, ...]
    order: Literal["ascending", "descending"] = "ascending"
    prologue: tuple[Call, ...] = ()
    epilogue: tuple[Call, ...] = ()
    slab_steps: int = 0
    schedule: Literal["stepwise", "persistent"] = "stepwise"
    walk_steps: int = 1
    buffers: tuple[Buffer, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"{self.name}: steps must not be negative, got {self.steps}")
        if self.walk_steps < 1:
            raise ValueError(f"{self.name}: a walk takes one step at least, got {self.walk_steps}")
        if self.walk_steps > 1 and self.first_step != self.step:
            raise ValueError(f"{self.name}: all walks have the same launches")
        if self.slabs > 1 and self.slab_steps % self.walk_steps:
            raise ValueError(
                f"{self.name}: a slab of {self.slab_steps} steps is no number of walks of {self.walk_steps}"
            )
        for launch in self.kernels():
            total = launch.resources(self.device).static_shared + launch.shared_memory
            if total > self.device.shared_memory_per_block:
                raise ValueError(
                    f"{self.name}: {launch.name} needs {total} bytes of shared memory, "
                    f"{self.device.name} has {self.device.shared_memory_per_block}"
                )
            if launch.occupancy(self.device).blocks == 0:
                raise ValueError(f"{self.name}: no block of {launch.name} fits an SM of {self.device.name}")
            if (launch.pdl or launch.triggers) and not self.device.pdl:
                raise ValueError(f"{self.name}: {launch.name} uses PDL, which {self.device.name} lacks")
            if launch.cluster != (1, 1, 1) and not self.device.clusters:
                raise ValueError(f"{self.name}: {launch.name} uses clusters, which {self.device.name} lacks")

    def calls(self) -> tuple[Call, ...]:
        """Return each distinct call once: prologue, first step, step, epilogue."""
        return tuple(dict.fromkeys((*self.prologue, *self.first_step, *self.step, *self.epilogue)))

    def kernels(self) -> tuple[Launch, ...]:
        """Return each distinct kernel launch once, in order."""
        return tuple(call for call in self.calls() if isinstance(call, Launch))

    @cached_property
    def pointer_names(self) -> frozenset[str]:
        """The pointer arguments of all kernels, by name."""
        return frozenset(a.name for launch in self.kernels() for a in launch.arguments if a.kind == "pointer")

    def step_indices(self) -> range:
        """Return the steps in the order they are issued; the first of each walk."""
        steps = range(0, self.steps, self.walk_steps)
        return steps if self.order == "ascending" else steps[::-1]

    @property
    def slabs(self) -> int:
        """Slabs of the loop."""
        return -(-self.steps // self.slab_steps) if self.slab_steps else 1

    def slab_step(self, index: int) -> int:
        """Return the first step of the slab that step ``index`` belongs to."""
        return index - index % self.slab_steps if self.slab_steps else 0

    def launches(self) -> Iterator[tuple[int | None, Call]]:
        """Yield every call of the whole sequence with its step index.

        A slab's prologue comes with the step of the slab that is issued first; None stands outside the loop.
        """
        if not self.slab_steps:
            for call in self.prologue:
                yield None, call
        slab = None
        for issued, index in enumerate(self.step_indices()):
            if self.slab_steps and self.slab_step(index) != slab:
                slab = self.slab_step(index)
                for call in self.prologue:
                    yield index, call
            for call in self.step if issued else self.first_step:
                yield index, call
        for call in self.epilogue:
            yield None, call

    @cached_property
    def scratch(self) -> Arena:
        """How the buffers that only this plan needs lie in one block."""
        return Arena.of(buffer for buffer in self.buffers if not buffer.kept)

    def total(self, field: Literal["bytes_moved", "floor_bytes"]) -> int:
        """Return the sum of a byte count over the whole sequence."""

        def of(calls: tuple[Call, ...]) -> int:
            return sum(int(getattr(call, field)) for call in calls)

        # The bytes of a walk and of a slab are those of their steps: a short last one has its share.
        step = of(self.step)
        loop = of(self.first_step) - step + step * self.steps // self.walk_steps if self.steps else 0
        before = of(self.prologue)
        before = before * self.steps // self.slab_steps if self.slabs > 1 else before
        return before + loop + of(self.epilogue)

    @property
    def launch_count(self) -> int:
        """Calls of the whole sequence."""
        issued = len(self.step_indices())
        loop = len(self.first_step) + (issued - 1) * len(self.step) if issued else 0
        return self.slabs * len(self.prologue) + loop + len(self.epilogue)

    def without_pdl(self) -> StepPlan:
        """Return the same plan with no launch flagged as a programmatic dependent; its bits are the same."""

        def plain(calls: tuple[Call, ...]) -> tuple[Call, ...]:
            return tuple(replace(call, pdl=False) if isinstance(call, Launch) else call for call in calls)

        return replace(
            self,
            prologue=plain(self.prologue),
            first_step=plain(self.first_step),
            step=plain(self.step),
            epilogue=plain(self.epilogue),
        )

    def describe(self) -> str:
        """Return the plan as a table for people; docs/planning.md explains it line by line."""
        return describe(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values, with what the occupancy rules say of each kernel."""
        return {
            "name": self.name,
            "device": self.device.to_dict(),
            "shape": self.shape.to_dict(),
            "steps": self.steps,
            "order": self.order,
            "prologue": [self._call_dict(call) for call in self.prologue],
            "first_step": [self._call_dict(call) for call in self.first_step],
            "step": [self._call_dict(call) for call in self.step],
            "slab_steps": self.slab_steps,
            "schedule": self.schedule,
            "walk_steps": self.walk_steps,
            "buffers": [buffer.to_dict() for buffer in self.buffers],
            "epilogue": [self._call_dict(call) for call in self.epilogue],
            "launch_count": self.launch_count,
            "bytes_moved": self.total("bytes_moved"),
            "floor_bytes": self.total("floor_bytes"),
            "floor_us": round(self.device.floor_us(self.total("floor_bytes")), 3),
            "notes": list(self.notes),
        }

    def _call_dict(self, call: Call) -> dict[str, Any]:
        if isinstance(call, LibraryCall):
            return call.to_dict()
        resources, resident = call.resources(self.device), call.occupancy(self.device)
        return {
            **call.to_dict(),
            "registers": resources.registers,
            "registers_measured": resources.measured,
            "static_shared": resources.static_shared,
            "resident_blocks": resident.blocks,
            "resident_limit": resident.limit,
            "waves": round(call.blocks / resident.wave(self.device), 3),
        }
