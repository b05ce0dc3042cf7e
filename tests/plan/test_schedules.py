"""The stepwise schedules: names, order, PDL flags of every step, the trigger rule, the reference variant."""

from __future__ import annotations

import dataclasses

import pytest

from sdm_rt.plan.backward import plan_backward, plan_reference_backward
from sdm_rt.plan.device import PRESETS, DeviceModel, preset
from sdm_rt.plan.forward import plan_forward
from sdm_rt.plan.launch import Launch, LibraryCall
from sdm_rt.plan.shapes import WriteReadShape
from sdm_rt.plan.step_plan import StepPlan
from tests.plan.cases import FLAGSHIP, WRITE_READ_CASES

WITH_PDL = [name for name, model in PRESETS.items() if model.compute_capability >= (9, 0)]
WITHOUT_PDL = [name for name, model in PRESETS.items() if model.compute_capability < (9, 0)]
FITTING = [name for name in WRITE_READ_CASES if name not in ("batch", "largest_chunk")]


def rows(plan: StepPlan) -> list[tuple[int | None, str, bool]]:
    """Return (step, name, PDL flag) of the whole sequence."""
    return [(step, call.name, isinstance(call, Launch) and call.pdl) for step, call in plan.launches()]


def test_presets_with_and_without_pdl() -> None:
    assert WITH_PDL == ["h100", "h200", "b200", "rtxpro6000"]
    assert WITHOUT_PDL == ["a100", "rtx4090"]


@pytest.mark.parametrize("device", WITH_PDL)
def test_forward_sequence_with_pdl(device: str) -> None:
    shape = WriteReadShape(2, 150, 64, 8, 8, 128, 256)
    phase1 = [(0, name, False) for name in ("phase1_sort", "phase1_scan", "phase1_gram", "solve")]
    one_step = [("gather", False), ("dual_matmul", False), ("decay_write", True)]
    loop = [(step, name, pdl) for step in (0, 1, 2) for name, pdl in one_step]
    assert rows(plan_forward(shape, preset(device))) == phase1 + loop


def test_each_slab_begins_with_phase_1() -> None:
    shape = WriteReadShape(2, 5 * 64, 64, 8, 8, 128, 256, training=False)
    plan = dataclasses.replace(plan_forward(shape, preset("h100")), slab_steps=2)
    phase1 = ("phase1_sort", "phase1_scan", "phase1_gram", "solve")
    step = ("gather", "dual_matmul", "decay_write")
    expected = [(0, phase1), (0, step), (1, step), (2, phase1), (2, step), (3, step), (4, phase1), (4, step)]
    assert [(at, name) for at, name, _ in rows(plan)] == [
        (at, name) for at, names in expected for name in names
    ]
    assert [plan.slab_step(at) for at in range(5)] == [0, 0, 2, 2, 4]
    assert plan.slabs == 3


@pytest.mark.parametrize("device", WITH_PDL)
def test_backward_sequence_with_pdl(device: str) -> None:
    shape = WriteReadShape(2, 150, 64, 8, 8, 128, 256)
    expected: list[tuple[int | None, str, bool]] = []
    for step in (2, 1, 0):
        expected += [
            (step, "gwr", step != 2),
            (step, "du_update", True),
            (step, "phase_a", True),
            (step, "gds", True),
        ]
    expected.append((None, "column_sum", False))
    assert rows(plan_backward(shape, preset(device))) == expected


@pytest.mark.parametrize("device", WITHOUT_PDL)
@pytest.mark.parametrize("case", FITTING)
def test_below_9_0_nothing_uses_pdl(device: str, case: str) -> None:
    shape = WRITE_READ_CASES[case]
    planners = (plan_forward, plan_backward, plan_reference_backward) if shape.training else (plan_forward,)
    for planner in planners:
        for launch in planner(shape, preset(device)).kernels():
            assert not launch.pdl
            assert not launch.triggers
            assert not {"SDM_PDL_WAIT", "SDM_PDL_TRIGGER"} & dict(launch.kernel.defines).keys()


@pytest.mark.parametrize("device", WITH_PDL)
@pytest.mark.parametrize("case", WRITE_READ_CASES)
def test_only_the_dual_matmul_triggers(device: str, case: str) -> None:
    shape = WRITE_READ_CASES[case]
    plans = [plan_forward(dataclasses.replace(shape, training=False), preset(device))]
    if shape.training and case in FITTING:
        plans.append(plan_backward(shape, preset(device)))
    for plan in plans:
        assert {launch.name for launch in plan.kernels() if launch.triggers} <= {"dual_matmul"}


def triggers(shape: WriteReadShape, device: DeviceModel) -> bool:
    plan = plan_forward(shape, device)
    return next(launch for launch in plan.kernels() if launch.name == "dual_matmul").triggers


def test_trigger_needs_a_chunk_of_at_most_64() -> None:
    for chunk, expected in ((1, True), (64, True), (65, False), (128, False)):
        shape = WriteReadShape(1, 1024, chunk, 8, 8, 128, 4096)
        assert triggers(shape, preset("h100")) is expected


def test_trigger_needs_the_decay_and_write_in_one_wave() -> None:
    # A block for every eight of a stream's slots.
    shape = WriteReadShape(2, 1024, 64, 8, 8, 128, 4096)
    plan = plan_forward(shape, preset("h100"))
    decay_write = plan.step[2]
    assert isinstance(decay_write, Launch)
    assert decay_write.grid == (64 * 8 // 8, 2, 1)
    resident = decay_write.occupancy(preset("h100")).blocks
    enough = -(-decay_write.blocks // resident)
    for sm_count in range(1, 133):
        device = dataclasses.replace(preset("h100"), sm_count=sm_count)
        assert triggers(shape, device) is (sm_count >= enough)


@pytest.mark.parametrize("device", WITH_PDL)
def test_the_flagship_does_not_trigger(device: str) -> None:
    """2 streams of 64 * 64 slots are 1,024 blocks, more than any of these GPUs holds at once."""
    decay_write = plan_forward(FLAGSHIP, preset(device)).step[2]
    assert isinstance(decay_write, Launch)
    assert decay_write.blocks == 1024
    assert decay_write.occupancy(preset(device)).wave(preset(device)) < 1024
    assert not triggers(FLAGSHIP, preset(device))


@pytest.mark.parametrize(
    ("shape", "ieee_products", "library"),
    [
        (WriteReadShape(1, 128, 64, 8, 8, 128, 256), True, True),
        (WriteReadShape(2, 3, 1, 8, 8, 128, 256), True, True),
        (WriteReadShape(2, 128, 64, 8, 8, 128, 256), False, True),
        (WriteReadShape(2, 128, 64, 8, 8, 128, 256), True, False),
        (WriteReadShape(2, 128, 2, 8, 8, 128, 256), True, False),
    ],
)
def test_reference_backward_calls_the_library_where_the_reference_does(
    shape: WriteReadShape, ieee_products: bool, library: bool
) -> None:
    device = preset("h100")
    plan = plan_reference_backward(shape, device, ieee_products)
    own = plan_backward(shape, device)
    if not library:
        assert dataclasses.replace(plan, name=own.name) == own
        return
    for calls, first in ((plan.first_step, True), (plan.step, False)):
        gwr, du_update, phase_a, gds = calls
        assert isinstance(du_update, LibraryCall)
        assert du_update.function == "torch.baddbmm"
        assert isinstance(gwr, Launch)
        assert isinstance(phase_a, Launch)
        assert isinstance(gds, Launch)
        assert (gwr.pdl, phase_a.pdl, gds.pdl) == (not first, False, True)
    assert plan.epilogue == own.epilogue


@pytest.mark.parametrize("case", ["small", "one_token"])
def test_the_product_never_calls_a_library(case: str) -> None:
    for planner in (plan_forward, plan_backward):
        assert not any(
            isinstance(call, LibraryCall) for call in planner(WRITE_READ_CASES[case], preset("h100")).calls()
        )


@pytest.mark.parametrize("device", PRESETS)
@pytest.mark.parametrize("case", FITTING)
def test_du_update_is_alone_on_its_sm(device: str, case: str) -> None:
    shape = WRITE_READ_CASES[case]
    if not shape.training:
        return
    for launch in plan_backward(shape, preset(device)).kernels():
        if launch.name == "du_update":
            resources = launch.resources(preset(device))
            shared = launch.shared_memory + resources.static_shared + 1024
            assert 2 * shared > preset(device).shared_memory_per_sm


@pytest.mark.parametrize("planner", [plan_forward, plan_backward])
@pytest.mark.parametrize("case", ["no_tokens", "no_streams"])
def test_empty_calls_launch_nothing(planner: object, case: str) -> None:
    plan = planner(WRITE_READ_CASES[case], preset("h100"))
    assert list(plan.launches()) == []
    assert plan.launch_count == 0


def test_backward_of_a_call_that_saved_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="training must be True"):
        plan_backward(WRITE_READ_CASES["flagship_no_grad"], preset("h100"))


def covers(blocks: int, size: int, whole: int) -> bool:
    return (blocks - 1) * size < whole <= blocks * size


@pytest.mark.parametrize("device", PRESETS)
@pytest.mark.parametrize(
    "case", [name for name, shape in WRITE_READ_CASES.items() if shape.chunks * shape.streams]
)
def test_forward_grids_cover_every_chunk_token_slot_and_column(case: str, device: str) -> None:
    shape = dataclasses.replace(WRITE_READ_CASES[case], training=False)
    plan = plan_forward(shape, preset(device))
    launches = {launch.name: launch for launch in plan.kernels()}
    defines = {name: dict(launch.kernel.defines) for name, launch in launches.items()}
    chunks = plan.slab_steps * shape.streams
    a_block_an_sm = shape.chunk * (shape.writes + shape.reads) > 16_384
    most = preset(device).sm_count * (1 if a_block_an_sm else 4)
    assert launches["phase1_sort"].grid == (min(chunks, most), 1, 1)
    assert launches["phase1_scan"].grid == (chunks, 1, 1)
    assert launches["phase1_gram"].grid[::2] == (chunks, 2)
    assert launches["solve"].grid[::2] == (chunks, 1)
    assert covers(launches["phase1_gram"].grid[1], 8, shape.chunk)
    assert covers(launches["solve"].grid[1], 64, shape.chunk)

    gather = launches["gather"]
    assert gather.grid[:2] == (shape.chunk, shape.streams)
    assert gather.grid[2] % 2 == 0
    assert covers(gather.grid[2] // 2, gather.block[0] * int(defines["gather"]["VECTOR"]), shape.head_dim)
    assert gather.block[1] == int(defines["gather"]["GROUPS"])

    dual_matmul, columns = launches["dual_matmul"], int(defines["dual_matmul"]["COLUMNS"])
    assert dual_matmul.grid[::2] == (shape.streams, 1)
    assert covers(dual_matmul.grid[1], columns, shape.head_dim)
    assert dual_matmul.block == (32 * columns // 4, 1, 1)  # pairs of 64 rows

    decay_write = launches["decay_write"]
    slice_columns = 32 * int(defines["decay_write"]["VECTOR"]) * int(defines["decay_write"]["LOADS"])
    assert covers(decay_write.grid[0], 8, min(shape.chunk * shape.writes, shape.slots))
    assert decay_write.grid[1] == shape.streams
    assert covers(decay_write.grid[2], slice_columns, shape.head_dim)


@pytest.mark.parametrize("snapshot", ["fp8", "int4"])
def test_a_row_with_one_scale_belongs_to_one_warp(snapshot: str) -> None:
    shape = dataclasses.replace(WRITE_READ_CASES["wide"], snapshot=snapshot)
    for training, slices in ((True, 1), (False, 16)):
        plan = plan_forward(dataclasses.replace(shape, training=training), preset("h100"))
        decay_write = plan.step[2]
        assert isinstance(decay_write, Launch)
        assert decay_write.grid[2] == slices


@pytest.mark.parametrize("case", [name for name in FITTING if WRITE_READ_CASES[name].training])
def test_backward_grids_cover_every_token_entry_and_column(case: str) -> None:
    """Column blocks times their width reach D; blocks times their tokens or entries reach the step's."""
    shape = WRITE_READ_CASES[case]
    lanes = {"phase_a": shape.writes, "gds": shape.reads}
    for launch in plan_backward(shape, preset("h100")).kernels():
        if launch.name not in ("gwr", *lanes):
            continue
        assert covers(launch.grid[1], 128, shape.head_dim)
        if launch.name in lanes:
            assert launch.grid[0] % shape.streams == 0
            assert covers(launch.grid[0] // shape.streams, 256, shape.chunk * lanes[launch.name])
        else:
            assert launch.grid[0] == shape.streams * shape.chunk


def test_nothing_compiles_anew_for_another_length_or_stream_count() -> None:
    device = preset("h100")
    other = dataclasses.replace(FLAGSHIP, streams=3, tokens=777, slots=4096)
    for planner in (plan_forward, plan_backward):

        def modules(shape: WriteReadShape, planner: object = planner) -> set[object]:
            specs = {launch.kernel for launch in planner(shape, device).kernels()}
            return {
                dataclasses.replace(
                    spec,
                    defines=tuple(
                        pair for pair in spec.defines if pair[0] not in ("SDM_PDL_TRIGGER", "COLUMNS")
                    ),
                )
                for spec in specs
            }

        assert modules(FLAGSHIP) == modules(other)
