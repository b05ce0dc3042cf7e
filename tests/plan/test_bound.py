"""Bound plans without a GPU: what is prepared, in which order it launches, which arguments are rewritten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from sdm_rt.plan import bound
from sdm_rt.plan.backward import plan_backward
from sdm_rt.plan.bound import BoundPlan
from sdm_rt.plan.column_slices import SCHEDULES
from sdm_rt.plan.decode import plan_decode
from sdm_rt.plan.device import preset
from sdm_rt.plan.forward import plan_forward
from sdm_rt.plan.launch import Launch
from sdm_rt.plan.reference_backward import plan_reference_backward
from sdm_rt.plan.shapes import DecodeShape, WriteReadShape
from sdm_rt.plan.step_plan import StepPlan
from sdm_rt.runtime.device import Gpu

GPU = Gpu(0, "H100", (9, 0))
SHAPE = WriteReadShape(2, 150, 64, 8, 8, 128, 256)
STREAM = 77


class Recorder:
    """Stands in for a prepared launch: its argument slots hold Python values, running it records them."""

    log: list[tuple[str, dict[str, Any], bool]]

    def __init__(self, launch: Launch) -> None:
        self.launch_description = launch
        self.arguments: list[Any] = [None] * len(launch.arguments)

    def set(self, values: Mapping[str, Any]) -> None:
        names = [argument.name for argument in self.launch_description.arguments]
        for name, value in values.items():
            self.arguments[names.index(name)] = value

    def run(self, stream: int) -> None:
        assert stream == STREAM
        names = [argument.name for argument in self.launch_description.arguments]
        values = dict(zip(names, self.arguments, strict=True))
        Recorder.log.append((self.launch_description.name, values, self.launch_description.pdl))


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[list[Launch]]:
    """Replace the driver's side; return the launches that were prepared at once, plan by plan."""
    made: list[list[Launch]] = []
    Recorder.log = []

    def prepare_all(launches: Sequence[Launch], gpu: Gpu, stream: int) -> list[Recorder]:
        made.append(list(launches))
        return [Recorder(launch) for launch in launches]

    monkeypatch.setattr(bound, "prepare_all", prepare_all)
    monkeypatch.setattr(bound.driver, "primary_context", lambda index: 4711)
    return made


def values(plan: StepPlan) -> dict[str, int]:
    names = {argument.name for launch in plan.kernels() for argument in launch.arguments}
    names -= {"step", "slab_step"}
    return {name: number for number, name in enumerate(sorted(names), start=1)}


def test_each_distinct_launch_is_prepared_once_and_all_together(prepared: list[list[Launch]]) -> None:
    plan = plan_backward(SHAPE, preset("h100"), "stepwise")
    BoundPlan(plan, GPU, STREAM)
    # The GWR issued first differs in its PDL flag, so it is prepared apart.
    (launches,) = prepared
    assert [launch.name for launch in launches] == [
        "gwr",
        "du_update",
        "phase_a",
        "gds",
        "gwr",
        "gram_backward",
        "phase1_backward_pairs",
        "phase1_backward_gates",
    ]


@pytest.mark.parametrize(
    ("planner", "schedule"),
    [(planner, schedule) for planner in (plan_forward, plan_backward) for schedule in SCHEDULES],
)
def test_run_follows_the_plan_and_writes_each_step(
    planner: Any, schedule: str, prepared: list[list[Launch]]
) -> None:
    plan = planner(SHAPE, preset("h100"), schedule)
    assert plan.schedule == schedule
    runner = BoundPlan(plan, GPU, STREAM)
    given = values(plan)
    runner.set(given)
    runner.run(STREAM)
    runner.run(STREAM)
    expected = []
    for step, call in plan.launches():
        changing = {"step": step, "slab_step": None if step is None else plan.slab_step(step)}
        named = {argument.name: (given | changing)[argument.name] for argument in call.arguments}
        expected.append((call.name, named, call.pdl))
    assert expected
    assert Recorder.log == expected * 2


def test_new_arguments_reach_every_launch_that_has_them(prepared: list[list[Launch]]) -> None:
    plan = plan_backward(SHAPE, preset("h100"), "stepwise")
    runner = BoundPlan(plan, GPU, STREAM)
    runner.set(values(plan))
    runner.set({"gradient_bank": 9999})
    runner.run(STREAM)
    seen = {
        name: arguments["gradient_bank"]
        for name, arguments, _ in Recorder.log
        if "gradient_bank" in arguments
    }
    assert seen == {"gwr": 9999, "phase_a": 9999, "gds": 9999}


@pytest.mark.usefixtures("prepared")
def test_arguments_never_set_are_named() -> None:
    plan = plan_decode(DecodeShape(2, 4, 4, 64), preset("h100"))
    runner = BoundPlan(plan, GPU, STREAM)
    runner.set({name: value for name, value in values(plan).items() if name not in ("y", "beta")})
    for act in (lambda: runner.run(STREAM), lambda: runner.capture(None)):
        with pytest.raises(ValueError, match="decode: arguments never set: beta, y"):
            act()
    assert Recorder.log == []


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("name", ["memroy", "step", "slab_step"])
def test_unknown_arguments_are_refused(name: str) -> None:
    runner = BoundPlan(plan_forward(SHAPE, preset("h100")), GPU, STREAM)
    with pytest.raises(KeyError, match=f"no launch takes an argument '{name}' from the caller"):
        runner.set({name: 1})


class Interrupted(dict[str, Any]):
    """Notes what is to be written, and is interrupted."""

    def update(self, *given: Any, **named: Any) -> None:
        super().update(*given, **named)
        raise KeyboardInterrupt


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("bank", [1, 2])
@pytest.mark.parametrize("store", ["_values", "_unwritten"])
def test_an_interrupt_leaves_no_argument_of_a_call_that_never_ran(store: str, bank: int) -> None:
    plan = plan_decode(DecodeShape(1, 4, 4, 64), preset("h100"))
    runner = BoundPlan(plan, GPU, STREAM)
    given = values(plan)
    runner.set(given | {"memory": 1})
    runner.run(STREAM)
    setattr(runner, store, Interrupted(getattr(runner, store)))
    with pytest.raises(KeyboardInterrupt):
        runner.set({"memory": 2})
    setattr(runner, store, dict(getattr(runner, store)))
    runner.set({"memory": bank})
    runner.run(STREAM)
    assert Recorder.log[-1][1]["memory"] == bank


@pytest.mark.usefixtures("prepared")
def test_a_reference_plan_does_not_run() -> None:
    plan = plan_reference_backward(WriteReadShape(1, 64, 64, 8, 8, 128, 256), preset("h100"))
    with pytest.raises(ValueError, match="a reference to read, not to run"):
        BoundPlan(plan, GPU, STREAM)


@pytest.mark.usefixtures("prepared")
def test_capture_hands_over_the_sequence_with_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: dict[str, Any] = {}

    def capture(launches: Any, context: int, keep: object) -> str:
        captured.update(launches=launches, context=context, keep=keep)
        return "graph"

    monkeypatch.setattr(bound.graph, "capture", capture)
    plan = plan_backward(SHAPE, preset("h100"), "stepwise")
    runner = BoundPlan(plan, GPU, STREAM)
    runner.set(values(plan))
    assert runner.capture("tensors") == "graph"
    assert (captured["context"], captured["keep"]) == (4711, "tensors")
    got = [(launch.launch_description, values) for launch, values in captured["launches"]]
    assert got == [(call, {} if step is None else {"step": step}) for step, call in plan.launches()]


@pytest.mark.usefixtures("prepared")
def test_an_empty_plan_runs_nothing() -> None:
    runner = BoundPlan(plan_decode(DecodeShape(0, 4, 4, 64), preset("h100")), GPU, STREAM)
    runner.run(STREAM)
    assert Recorder.log == []
