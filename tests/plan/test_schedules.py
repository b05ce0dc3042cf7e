"""The stepwise schedules: names, order, PDL flags of every step, the trigger rule, the reference variant."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest

from sdm_rt.plan import backward, forward
from sdm_rt.plan.device import PRESETS, DeviceModel, preset
from sdm_rt.plan.launch import Launch, LibraryCall
from sdm_rt.plan.reference_backward import plan_reference_backward
from sdm_rt.plan.shapes import WriteReadShape, dtype_bytes
from sdm_rt.plan.step_plan import StepPlan
from tests.plan.cases import FLAGSHIP, WRITE_READ_CASES

plan_forward = functools.partial(forward.plan_forward, schedule="stepwise")
plan_backward = functools.partial(backward.plan_backward, schedule="stepwise")

Planner = Callable[[WriteReadShape, DeviceModel], StepPlan]

WITH_PDL = [name for name, model in PRESETS.items() if model.compute_capability >= (9, 0)]
WITHOUT_PDL = [name for name, model in PRESETS.items() if model.compute_capability < (9, 0)]
RUNNING = [name for name, shape in WRITE_READ_CASES.items() if shape.chunks * shape.streams]
TRAINING = [name for name in RUNNING if WRITE_READ_CASES[name].training]
# The reference schedule's Phase A does not fit every preset there.
FITTING_THE_REFERENCE = [name for name in TRAINING if name not in ("batch", "largest_chunk")]


def rows(plan: StepPlan) -> list[tuple[int | None, str, bool]]:
    """Return (step, name, PDL flag) of the whole sequence."""
    return [(step, call.name, isinstance(call, Launch) and call.pdl) for step, call in plan.launches()]


def launch(plan: StepPlan, name: str) -> Launch:
    return next(one for one in plan.kernels() if one.name == name)


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
@pytest.mark.parametrize("snapshot", ["fp8", "int4"])
def test_quantized_rows_are_kept_before_a_step_changes_them(device: str, snapshot: str) -> None:
    shape = WriteReadShape(2, 150, 64, 8, 8, 128, 256, snapshot=snapshot)
    one_step = [("keep_rows", False), ("gather", False), ("dual_matmul", False), ("decay_write", True)]
    loop = [(step, name, pdl) for step in (0, 1, 2) for name, pdl in one_step]
    assert rows(plan_forward(shape, preset(device)))[4:] == loop
    nothing_kept = plan_forward(dataclasses.replace(shape, training=False), preset(device))
    assert [call.name for call in nothing_kept.step] == [name for name, _ in one_step[1:]]


PRODUCT_EPILOGUE = ("gram_backward", "phase1_backward_pairs", "phase1_backward_gates")


@pytest.mark.parametrize("device", WITH_PDL)
@pytest.mark.parametrize(
    ("planner", "after_the_loop"),
    [(plan_backward, PRODUCT_EPILOGUE), (plan_reference_backward, ("column_sum",))],
)
def test_backward_sequence_with_pdl(planner: Planner, after_the_loop: tuple[str, ...], device: str) -> None:
    shape = WriteReadShape(2, 150, 64, 8, 8, 128, 256)
    expected: list[tuple[int | None, str, bool]] = []
    for step in (2, 1, 0):
        expected += [
            (step, "gwr", step != 2),
            (step, "du_update", True),
            (step, "phase_a", True),
            (step, "gds", True),
        ]
    expected += [(None, name, False) for name in after_the_loop]
    assert rows(planner(shape, preset(device))) == expected


@pytest.mark.parametrize("device", WITHOUT_PDL)
@pytest.mark.parametrize("case", RUNNING)
def test_below_9_0_nothing_uses_pdl(device: str, case: str) -> None:
    shape = WRITE_READ_CASES[case]
    planners: list[Planner] = [plan_forward]
    if case in TRAINING:
        planners.append(plan_backward)
    if case in FITTING_THE_REFERENCE:
        planners.append(plan_reference_backward)
    for planner in planners:
        for one in planner(shape, preset(device)).kernels():
            assert not one.pdl
            assert not one.triggers
            assert not {"SDM_PDL_WAIT", "SDM_PDL_TRIGGER"} & dict(one.kernel.defines).keys()


@pytest.mark.parametrize("device", PRESETS)
def test_notes_tell_of_waits_and_overlap_where_there_is_pdl(device: str) -> None:
    forward_plan, backward_plan = (
        planner(FLAGSHIP, preset(device)) for planner in (plan_forward, plan_backward)
    )
    with_pdl = device in WITH_PDL
    assert ("rows loaded before the wait" in launch(forward_plan, "decay_write").note) is with_pdl
    assert ("loaded before the wait" in launch(backward_plan, "phase_a").note) is with_pdl
    assert ("beside Phase A" in launch(backward_plan, "gds").note) is with_pdl


@pytest.mark.parametrize("device", WITH_PDL)
@pytest.mark.parametrize("case", RUNNING)
def test_what_triggers_has_a_dependent_behind_it(device: str, case: str) -> None:
    """In the forward the dual matmul alone; nothing outside a loop."""
    shape = WRITE_READ_CASES[case]
    plans = [plan_forward(shape, preset(device))]
    if shape.training:
        plans.append(plan_backward(shape, preset(device)))
    for plan in plans:
        triggering = {one.name for one in plan.kernels() if one.triggers}
        calls = [*plan.first_step, *plan.step]
        waiting = {one.name for one in calls if isinstance(one, Launch) and one.pdl}
        behind = {one.name: then.name for one, then in zip(calls, [*calls[1:], *plan.step], strict=False)}
        assert {behind[name] for name in triggering} <= waiting
        if plan.name == "forward":
            assert triggering <= {"dual_matmul"}


def triggers(shape: WriteReadShape, device: DeviceModel) -> bool:
    return launch(plan_forward(shape, device), "dual_matmul").triggers


def test_trigger_needs_a_chunk_of_at_most_64() -> None:
    for chunk, expected in ((1, True), (64, True), (65, False), (128, False)):
        shape = WriteReadShape(1, 1024, chunk, 8, 8, 128, 4096)
        assert triggers(shape, preset("h100")) is expected


def test_trigger_needs_the_decay_and_write_in_one_wave() -> None:
    # Rows of 2,048 bytes are eight slices of 16 words, each of two streams a block or more.
    shape = WriteReadShape(2, 1024, 64, 8, 8, 1024, 4096)
    resident = launch(plan_forward(shape, preset("h100")), "decay_write").occupancy(preset("h100")).blocks
    outcomes = set()
    for sm_count in range(1, 133):
        device = dataclasses.replace(preset("h100"), sm_count=sm_count)
        blocks = launch(plan_forward(shape, device), "decay_write").blocks
        outcomes.add(triggers(shape, device))
        assert triggers(shape, device) is (blocks <= resident * sm_count)
        assert (blocks == 16) or blocks <= resident * sm_count
    assert outcomes == {False, True}


@pytest.mark.parametrize("device", WITH_PDL)
def test_the_flagship_triggers_and_so_do_chunks_of_64_that_fit_one_wave(device: str) -> None:
    for case in ("small", "flagship", "flagship_fp8_snapshot", "narrow", "many_streams", "float32"):
        assert triggers(WRITE_READ_CASES[case], preset(device)), case
    for case in ("7b", "batch"):
        assert not triggers(WRITE_READ_CASES[case], preset(device)), case
    many = dataclasses.replace(FLAGSHIP, streams=200)
    assert launch(plan_forward(many, preset(device)), "decay_write").blocks == 200 * 8
    assert not triggers(many, preset(device))


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
    plan = plan_reference_backward(shape, preset("h100"), ieee_products)
    assert plan.name == "backward (reference)"
    for calls, first in ((plan.first_step, True), (plan.step, False)):
        gwr, du_update, phase_a, gds = calls
        assert isinstance(du_update, LibraryCall) is library
        if isinstance(du_update, LibraryCall):
            assert du_update.function == "torch.baddbmm"
        else:
            assert du_update.pdl
        assert isinstance(gwr, Launch)
        assert isinstance(phase_a, Launch)
        assert isinstance(gds, Launch)
        assert (gwr.pdl, phase_a.pdl, gds.pdl) == (not first, not library, True)
    (column_sum,) = plan.epilogue
    assert isinstance(column_sum, Launch)
    assert not column_sum.pdl


@pytest.mark.parametrize("case", ["small", "one_token"])
def test_the_product_never_calls_a_library(case: str) -> None:
    for planner in (plan_forward, plan_backward):
        assert not any(
            isinstance(call, LibraryCall) for call in planner(WRITE_READ_CASES[case], preset("h100")).calls()
        )


@pytest.mark.parametrize("device", PRESETS)
@pytest.mark.parametrize("case", TRAINING)
def test_du_update_is_alone_on_its_sm(device: str, case: str) -> None:
    plans = [plan_backward(WRITE_READ_CASES[case], preset(device))]
    if case in FITTING_THE_REFERENCE:
        plans.append(plan_reference_backward(WRITE_READ_CASES[case], preset(device)))
    updates = [one for plan in plans for one in plan.kernels() if one.name == "du_update"]
    assert updates
    for one in updates:
        shared = one.shared_memory + one.resources(preset(device)).static_shared + 1024
        assert 2 * shared > preset(device).shared_memory_per_sm
        assert one.occupancy(preset(device)).blocks == 1


@pytest.mark.parametrize("planner", [plan_forward, plan_backward, plan_reference_backward])
@pytest.mark.parametrize("case", ["no_tokens", "no_streams"])
def test_empty_calls_launch_nothing(planner: Planner, case: str) -> None:
    plan = planner(WRITE_READ_CASES[case], preset("h100"))
    assert list(plan.launches()) == []
    assert plan.launch_count == 0


@pytest.mark.parametrize("planner", [plan_backward, plan_reference_backward])
def test_backward_of_a_call_that_saved_nothing_is_refused(planner: Planner) -> None:
    with pytest.raises(ValueError, match="training must be True"):
        planner(WRITE_READ_CASES["flagship_no_grad"], preset("h100"))


def covers(blocks: int, size: int, whole: int) -> bool:
    return (blocks - 1) * size < whole <= blocks * size


@pytest.mark.parametrize("device", PRESETS)
@pytest.mark.parametrize("case", RUNNING)
def test_forward_grids_cover_every_chunk_token_slot_and_column(case: str, device: str) -> None:
    shape = dataclasses.replace(WRITE_READ_CASES[case], training=False)
    plan = plan_forward(shape, preset(device))
    launches = {one.name: one for one in plan.kernels()}
    defines = {name: dict(one.kernel.defines) for name, one in launches.items()}
    chunks = plan.slab_steps * shape.streams
    in_shared = defines["phase1_sort"]["IN_SHARED"] == "1"
    assert launches["phase1_sort"].grid == (
        chunks if in_shared else min(chunks, preset(device).sm_count),
        1,
        1,
    )
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
    assert dual_matmul.block == (32 * columns // (4 if columns == 64 else 2), 1, 1)  # pairs of 64 rows

    # Blocks share the slots of a slice: as many as fit the GPU at once, each with two slots a team or more.
    decay_write, lanes = launches["decay_write"], int(defines["decay_write"]["LANES"])
    assert decay_write.grid[1] == shape.streams
    assert covers(decay_write.grid[2], lanes * 16 // dtype_bytes(shape.bank_dtype), shape.head_dim)
    teams = decay_write.block[0] // lanes
    assert (decay_write.grid[0] - 1) * 2 * teams < min(shape.chunk * shape.writes, shape.slots)
    wave = decay_write.occupancy(preset(device)).wave(preset(device))
    assert decay_write.grid[0] == 1 or decay_write.blocks <= wave


@pytest.mark.parametrize("snapshot", ["fp8", "int4"])
def test_a_row_with_one_scale_belongs_to_one_warp(snapshot: str) -> None:
    shape = dataclasses.replace(WRITE_READ_CASES["wide"], snapshot=snapshot)
    plan = plan_forward(shape, preset("h100"))
    keep_rows = launch(plan, "keep_rows")
    assert keep_rows.block == (256, 1, 1)
    assert keep_rows.grid == (64 * 256 // 8, 1, 1)
    assert launch(plan, "decay_write").grid[2] == 16384 * 2 // 256


@pytest.mark.parametrize("device", PRESETS)
@pytest.mark.parametrize("case", TRAINING)
def test_backward_grids_cover_every_token_slot_and_column(case: str, device: str) -> None:
    shape = WRITE_READ_CASES[case]
    launches = {one.name: one for one in plan_backward(shape, preset(device)).kernels()}
    assert launches["gwr"].grid == (shape.chunk, shape.streams, 1)
    du_update = launches["du_update"]
    assert du_update.grid[::2] == (shape.streams, 1)
    columns = int(dict(du_update.kernel.defines)["COLUMNS"])
    assert covers(du_update.grid[1], columns, shape.head_dim)
    assert du_update.block == (32 * columns // (4 if columns == 64 else 2), 1, 1)  # pairs of 64 rows
    for name, lanes in (("phase_a", shape.writes), ("gds", shape.reads)):
        one, slots = launches[name], min(shape.chunk * lanes, shape.slots)
        assert one.grid[1:] == (shape.streams, 1)
        # One wave, or a block a stream; no block without a slot.
        assert one.blocks <= max(one.occupancy(preset(device)).wave(preset(device)), shape.streams)
        teams = 8 if shape.row_bytes > 256 else 16  # a half warp holds 16 words
        assert one.grid[0] == 1 or teams * (one.grid[0] - 1) < slots
    tiles = -(-shape.chunk // 32)
    assert launches["gram_backward"].grid == (shape.chunks * shape.streams * tiles * (tiles + 1) // 2, 1, 1)


@pytest.mark.parametrize("case", FITTING_THE_REFERENCE)
def test_reference_grids_cover_every_token_entry_and_column(case: str) -> None:
    """Column blocks times their width reach D; blocks times their tokens or entries reach the step's."""
    shape = WRITE_READ_CASES[case]
    lanes = {"phase_a": shape.writes, "gds": shape.reads}
    for one in plan_reference_backward(shape, preset("h100")).kernels():
        if one.name not in ("gwr", *lanes):
            continue
        assert covers(one.grid[1], 128, shape.head_dim)
        if one.name in lanes:
            assert one.grid[0] % shape.streams == 0
            assert covers(one.grid[0] // shape.streams, 256, shape.chunk * lanes[one.name])
        else:
            assert one.grid[0] == shape.streams * shape.chunk


def test_nothing_compiles_anew_for_another_length_or_stream_count() -> None:
    device = preset("h100")
    other = dataclasses.replace(FLAGSHIP, streams=3, tokens=777, slots=4096)
    for planner in (plan_forward, plan_backward):

        def modules(shape: WriteReadShape, planner: Planner = planner) -> set[object]:
            specs = {one.kernel for one in planner(shape, device).kernels()}
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
