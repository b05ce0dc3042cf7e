"""The plans of the ops that work on chunks alone, without a bank: the solve, and Phase 1."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sdm_rt.plan.buffer import Buffer
from sdm_rt.plan.device import DeviceModel, require_supported
from sdm_rt.plan.phase1 import OF_THE_BACKWARD, plan_phase1, plan_solve
from sdm_rt.plan.shapes import MAX_CHUNK, WriteReadShape
from sdm_rt.plan.step_plan import StepPlan

__all__ = ["SolveShape", "plan_chunk_solve", "plan_phase1_forward"]

# What Phase 1 of a write-read call makes for others than the caller of `phase1_forward`.
_LEFT_OUT = ("x", "qx", *OF_THE_BACKWARD)


@dataclass(frozen=True)
class SolveShape:
    """One call of the solve: what `plan_chunk_solve` reads.

    Parameters
    ----------
    chunks : int
        N.
    chunk : int
        C, tokens of a chunk, 1..256.

    Raises
    ------
    ValueError
        Naming the field and its range.
    """

    chunks: int
    chunk: int

    def __post_init__(self) -> None:
        if self.chunks < 0:
            raise ValueError(f"chunks must not be negative, got {self.chunks}")
        if not 1 <= self.chunk <= MAX_CHUNK:
            raise ValueError(f"chunk must be in 1..{MAX_CHUNK}, got {self.chunk}")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def plan_chunk_solve(shape: SolveShape, device: DeviceModel) -> StepPlan:
    """Plan X and QX of N chunks in one launch; none where there are no chunks.

    Raises
    ------
    RuntimeError
        For a GPU below compute capability 8.0.
    """
    require_supported(device)
    if shape.chunks == 0:
        return StepPlan("wy_solve", device, shape, steps=0, first_step=(), step=())
    launch = plan_solve(shape.chunks, shape.chunk)
    return StepPlan("wy_solve", device, shape, steps=1, first_step=(launch,), step=(launch,))


def plan_phase1_forward(shape: WriteReadShape, device: DeviceModel) -> StepPlan:
    """Plan Phase 1 of N chunks, each a stream of one chunk, without the solve.

    Parameters
    ----------
    shape : WriteReadShape
        N streams of C tokens in one training step.
    device : DeviceModel
        The GPU.

    Returns
    -------
    StepPlan
        One slab: sort, scan, Gram matrices. Its buffers hold the results and the scratch.

    Raises
    ------
    RuntimeError
        For a GPU below compute capability 8.0.
    ValueError
        For a shape of several steps, or of a call that saves nothing.
    """
    require_supported(device)
    if shape.chunks != 1 or not shape.training:
        raise ValueError(f"Phase 1 alone takes one training step, got {shape}")
    phase1 = plan_phase1(shape, 1, device, backward=False)
    launches = tuple(launch for launch in phase1.launches if launch.name != "solve")
    writes = (shape.streams, shape.chunk, shape.writes)
    results = (
        *(Buffer(name, "float32", writes, kept=True) for name in ("log_k", "rex", "cpe")),
        Buffer("log_q", "float32", (shape.streams, shape.chunk, shape.reads), kept=True),
        Buffer("flags", "uint8", writes, kept=True),
    )
    needed = tuple(buffer for buffer in phase1.buffers if buffer.name not in _LEFT_OUT)
    return StepPlan(
        "phase1_forward",
        device,
        shape,
        steps=1,
        first_step=(),
        step=(),
        prologue=launches,
        slab_steps=1,
        buffers=(*needed, *results),
    )
