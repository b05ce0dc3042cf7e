"""Plans bound to a GPU, one a shape and thread, for ops that launch a plan with new pointers each call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from sdm_rt import env
from sdm_rt.ops.plan_inputs import device_model
from sdm_rt.plan.bound import BoundPlan
from sdm_rt.plan.device import DeviceModel
from sdm_rt.plan.step_plan import PlannedShape, StepPlan
from sdm_rt.runtime import device
from sdm_rt.runtime.compile import kernels
from sdm_rt.runtime.interop import current_stream

__all__ = ["bound_plan"]

Shape = TypeVar("Shape", bound=PlannedShape)


class _Memo(threading.local):
    def __init__(self) -> None:
        self.plans: dict[Any, tuple[BoundPlan, int]] = {}  # with the generation of their kernels


_memo = _Memo()


def bound_plan(
    planner: Callable[[Shape, DeviceModel], StepPlan],
    shape: Shape,
    index: int,
    constants: Callable[[StepPlan], dict[str, int]] | None = None,
) -> BoundPlan:
    """Plan a shape for the GPU ``index`` and bind it, or return what an earlier call of this thread bound.

    Kernels whose sources were edited since are loaded anew. ``constants`` gives the numbers that the shape
    fixes; they are written when the plan is bound.
    """
    key = (planner, shape, index, env.flag("SDM_RT_PDL"))
    bound, generation = _memo.plans.get(key, (None, 0))
    if bound is None or not kernels().are_current(bound.specs, generation):
        generation = kernels().generation
        plan = planner(shape, device_model(index))
        bound = BoundPlan(plan, device.gpu(index), current_stream(index))
        if constants is not None:
            bound.set(constants(plan))
        _memo.plans[key] = bound, generation
    return bound
