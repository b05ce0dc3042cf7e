"""Shapes beyond what kernels can number are refused, by every planner and naming what fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import pytest

from sdm_rt.errors import UnsupportedConfigurationError
from sdm_rt.plan.backward import plan_backward
from sdm_rt.plan.device import DeviceModel, preset
from sdm_rt.plan.forward import plan_forward
from sdm_rt.plan.reference_backward import plan_reference_backward
from sdm_rt.plan.shapes import WriteReadShape
from sdm_rt.plan.step_plan import StepPlan

SHAPE = WriteReadShape(1, 64, 64, 4, 4, 16, 100)
Planner = Callable[[WriteReadShape, DeviceModel], StepPlan]
PLANNERS: dict[str, Planner] = {
    **{
        f"{planner.__name__} {schedule}": partial(planner, schedule=schedule)
        for planner in (plan_forward, plan_backward)
        for schedule in (None, "stepwise", "persistent")
    },
    "reference": plan_reference_backward,
}
MOST_TOKENS = 2**31 - 1 - 256


@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"streams": 65_536}, "65,536 streams .* at most 65,535; split the call"),
        ({"tokens": MOST_TOKENS + 1}, "2,147,483,392 tokens a stream .* 2,147,483,391; split the call"),
        (
            {"tokens": 2**30, "streams": 2, "chunk": 1},
            "2,147,483,648 chunks of 1 tokens .* larger chunk_size",
        ),
    ],
)
def test_what_is_beyond_is_refused(planner: Planner, changes: dict[str, int], message: str) -> None:
    with pytest.raises(UnsupportedConfigurationError, match=message):
        planner(dataclasses.replace(SHAPE, **changes), preset("h200"))


@pytest.mark.parametrize(
    "changes",
    [{"streams": 65_535}, {"tokens": MOST_TOKENS}, {"tokens": 2**30 - 1, "streams": 2, "chunk": 1}],
)
def test_the_most_is_planned(changes: dict[str, int]) -> None:
    shape = dataclasses.replace(SHAPE, **changes)
    for planner in (plan_forward, plan_backward):
        assert planner(shape, preset("h200")).steps == shape.chunks
    no_grad = dataclasses.replace(shape, training=False)
    assert plan_forward(no_grad, preset("h200")).steps == shape.chunks
