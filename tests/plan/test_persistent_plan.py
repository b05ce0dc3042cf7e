"""The plan of the persistent forward: where it runs, what it asks for, why it is refused, how it prints."""

from __future__ import annotations

import dataclasses
import re
from itertools import product
from typing import Any

import pytest

from sdm_rt.cli import main
from sdm_rt.errors import UnsupportedConfigurationError
from sdm_rt.plan.device import PRESETS, preset
from sdm_rt.plan.forward import forward_constants, plan_forward
from sdm_rt.plan.launch import Launch
from sdm_rt.plan.shapes import BANK_DTYPES, INDEX_DTYPES, QUANTIZED, SNAPSHOTS, WriteReadShape, dtype_bytes
from sdm_rt.plan.step_plan import StepPlan
from sdm_rt.plan.tiling import ceil_div
from sdm_rt.plan.write_resources import TARGETS, variants
from sdm_rt.runtime.kernel import KernelSpec
from tests.plan.cases import FLAGSHIP, WRITE_READ_CASES
from tests.plan.kernel_source import explains, parameters

WITH_CLUSTERS = [name for name, device in PRESETS.items() if device.clusters]
WITHOUT_CLUSTERS = [name for name, device in PRESETS.items() if not device.clusters]


def planned(shape: WriteReadShape, device: str = "h100") -> tuple[StepPlan, Launch]:
    plan = plan_forward(shape, preset(device), "persistent")
    launch = plan.step[0]
    assert plan.schedule == "persistent"
    assert isinstance(launch, Launch)
    assert launch.name == "persistent_forward"
    return plan, launch


def bytes_by_hand(
    C: int, W: int, R: int, K: int, columns: int, words: int, ring: int, tokens: int, in_place: bool
) -> int:
    """Of a block of 512 threads in a cluster of K: ``tokens`` lists, 12 bytes an entry of 64-bit indices."""
    own = 2 * ceil_div(ceil_div(C, 2), K)
    side = min(64, ceil_div(C, 4) * 4)
    pairs = min(16, 512 // (columns // 2), own // 2)
    slots = 16 * (32 // words) * 4  # of a batch: warps, rows side by side, rows of a thread
    lists = ceil_div(tokens * (W + R) * 12, 16) * 16
    tiles = 2 * 2 * (2 * pairs) * (side + 4) * 4
    values = (1 if in_place else 2) * C * columns * 4
    rows = ring * (512 * 4 * 16 + 32 * slots)
    return rows + tiles + ceil_div(C, 4) * 16 + own * columns * 4 + lists + values


@pytest.mark.parametrize(
    ("case", "slice_bytes", "cluster", "ring", "tokens", "in_place", "need"),
    [
        ("flagship", 256, 6, 3, 12, False, 214_016),
        ("7b", 256, 3, 3, 4, True, 228_864),
        ("batch", 256, 4, 1, 4, True, 231_424),
        ("narrow", 256, 6, 3, 12, False, 204_800),
        ("many_streams", 128, 2, 3, 32, False, 223_488),
    ],
)
def test_cut_and_shared_memory_of_the_known_cases(
    case: str, slice_bytes: int, cluster: int, ring: int, tokens: int, in_place: bool, need: int
) -> None:
    shape = FLAGSHIP if case == "flagship" else WRITE_READ_CASES[case]
    plan, launch = planned(shape)
    columns = slice_bytes // dtype_bytes(shape.bank_dtype)
    assert dict(launch.kernel.defines)["COLUMNS"] == str(columns)
    assert launch.cluster == (cluster, 1, 1)
    assert launch.grid == (-(-shape.head_dim // columns) * cluster, shape.streams, 1)
    assert launch.block == (512, 1, 1)
    numbers = forward_constants(plan)
    assert (numbers["list_tokens"], numbers["in_place"]) == (tokens, int(in_place))
    assert dict(launch.kernel.defines)["RING"] == str(ring)
    words = slice_bytes // 16
    by_hand = bytes_by_hand(
        shape.chunk, shape.writes, shape.reads, cluster, columns, words, ring, tokens, in_place
    )
    assert launch.shared_memory == by_hand == need


def test_clusters_start_spread_out_where_nothing_is_kept_and_all_run_at_once() -> None:
    """Over 1.2 times the time of a step's bytes, of a short walk over a fiftieth of the walk's.

    Of flagship a step's are 3 x 2 x 4,096 rows of 2 KB, at 4.25 TB/s.
    """
    no_grad = dataclasses.replace(FLAGSHIP, training=False)
    floor_us = 3 * 2 * 64 * 64 * 2048 / 4.25e6
    for steps, floors in ((512, 1.2), (60, 1.2), (30, 0.6), (1, 0.02)):
        plan, launch = planned(dataclasses.replace(no_grad, tokens=64 * steps), "h200")
        spread_us = floors * floor_us
        assert f"clusters start over {spread_us:.1f} us" in launch.note
        assert forward_constants(plan)["start_spread"] == round(spread_us * 1800)
    more_clusters_than_sms = dataclasses.replace(no_grad, streams=40)
    for shape in (FLAGSHIP, more_clusters_than_sms):
        plan, launch = planned(shape, "h200")
        assert "clusters start over" not in launch.note
        assert forward_constants(plan)["start_spread"] == 0


def shapes() -> list[WriteReadShape]:
    sizes = product((1, 7, 64, 128, 200, 256), (1, 100, 1024), (1, 64, 256), BANK_DTYPES, (False, True))
    return [
        WriteReadShape(2, 1000, C, lanes, lanes, D, 65536, bank_dtype=dtype, training=training)
        for C, D, lanes, dtype, training in sizes
    ]


@pytest.mark.parametrize("device", WITH_CLUSTERS)
def test_it_fits_the_gpus_with_the_most_shared_memory(device: str) -> None:
    limit = preset(device).shared_memory_per_block
    for shape in shapes():
        if limit < 200_000 and shape.chunk >= 128:
            continue
        plan, launch = planned(shape, device)
        assert launch.shared_memory <= limit
        assert launch.occupancy(preset(device)).blocks
        assert forward_constants(plan)["list_tokens"] >= 1


def test_what_does_not_fit_is_refused_with_need_and_limit() -> None:
    shape = WriteReadShape(2, 1000, 256, 64, 64, 1024, 65536)
    with pytest.raises(UnsupportedConfigurationError) as caught:
        planned(shape, "rtxpro6000")
    need = re.search(r"needs ([\d,]+) bytes.*chunk_size=256; .* allows 101,376;", str(caught.value))
    assert need is not None
    assert int(need[1].replace(",", "")) > 101_376


@pytest.mark.parametrize("device", WITHOUT_CLUSTERS)
def test_a_gpu_without_clusters_is_refused(device: str) -> None:
    with pytest.raises(UnsupportedConfigurationError, match="needs thread block clusters"):
        plan_forward(FLAGSHIP, preset(device), "persistent")


@pytest.mark.parametrize("snapshot", QUANTIZED)
@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, 32),  # 2 * 4,096 rows of 2 KiB a step
        ({"streams": 16}, 4),
        ({"streams": 256}, 1),  # more than the memory for waiting rows: by single steps
        ({"streams": 1, "tokens": 130, "slots": 9}, 3),  # all steps
        ({"tokens": 33 * 64}, 17),  # a second one of 16
    ],
)
def test_rows_with_a_scale_are_quantized_walk_by_walk(
    snapshot: str, changes: dict[str, Any], steps: int
) -> None:
    """One launch walks as many steps as leave 512 MiB of rows, the next one quantizes them."""
    shape = dataclasses.replace(FLAGSHIP, snapshot=snapshot, **changes)
    plan, walk = planned(shape)
    _, keep_rows = plan.step
    assert plan.walk_steps == steps
    assert forward_constants(plan)["walk_steps"] == steps
    (waiting,) = (buffer for buffer in plan.buffers if buffer.name == "walk_rows")
    assert waiting.shape == (steps * shape.streams, shape.write_rows // shape.streams, 1024)
    assert (waiting.dtype, waiting.kept) == ("bfloat16", False)
    assert waiting.bytes <= 2**29 or steps == 1
    assert keep_rows.grid[1] == steps * shape.streams
    assert walk.writes[-1] == "walk_rows"
    assert keep_rows.reads == ("walk_rows", "slot_count")
    assert dict(walk.kernel.defines)["SNAPSHOT"] == "1"
    issued = [(step, call.name) for step, call in plan.launches()][4:]
    first = range(0, plan.steps, steps)
    assert issued == [(step, name) for step in first for name in ("persistent_forward", "keep_rows")]
    assert {plan.slab_step(step) for step, _ in issued} == {0}
    assert plan.launch_count == 4 + 2 * len(first)
    assert plan.schedule == "persistent"


@pytest.mark.parametrize("steps", [1, 33, 65, 128])
@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_the_floor_of_walks_is_that_of_the_steps(snapshot: str, steps: int) -> None:
    """Also where the last walk is short."""
    shape = dataclasses.replace(FLAGSHIP, snapshot=snapshot, tokens=64 * steps)
    stepwise = plan_forward(shape, preset("h100"), "stepwise")
    plan, walk = planned(shape)
    assert plan.total("floor_bytes") == stepwise.total("floor_bytes")
    unquantized = planned(dataclasses.replace(shape, snapshot="none"))[1]
    if shape.quantizes:
        rows = shape.write_rows * shape.row_bytes
        assert walk.bytes_moved // plan.walk_steps == unquantized.bytes_moved // plan.steps
        assert walk.floor_bytes // plan.walk_steps == unquantized.floor_bytes // plan.steps - rows


def test_walks_fill_slabs() -> None:
    plan, _ = planned(dataclasses.replace(FLAGSHIP, snapshot="fp8"))
    assert dataclasses.replace(plan, slab_steps=256).slabs == 2
    with pytest.raises(ValueError, match="a slab of 40 steps is no number of walks of 32"):
        dataclasses.replace(plan, slab_steps=40)
    with pytest.raises(ValueError, match="one step at least, got 0"):
        dataclasses.replace(plan, walk_steps=0)
    with pytest.raises(ValueError, match="all walks have the same launches"):
        dataclasses.replace(plan, first_step=plan.step[:1])


def test_a_schedule_of_another_name_is_refused() -> None:
    with pytest.raises(
        ValueError, match="schedule: expected None or one of stepwise, persistent, got 'fast'"
    ):
        plan_forward(FLAGSHIP, preset("h100"), "fast")


def chosen(shape: WriteReadShape, device: str = "h100") -> tuple[str, str]:
    """Return the schedule of a call that names none, and the plan's note on it."""
    plan = plan_forward(shape, preset(device))
    (note,) = [note for note in plan.notes if note.startswith("schedule")]
    return plan.schedule, note


@pytest.mark.parametrize(
    ("changes", "schedule"),
    [
        ({}, "persistent"),  # 16 clusters of 6 blocks
        ({"training": False}, "persistent"),
        *(({"snapshot": snapshot}, "persistent") for snapshot in QUANTIZED),  # in walks
        ({"chunk": 1}, "persistent"),
        ({"chunk": 128}, "persistent"),  # lists of 16 tokens, delta in the place of residual
        ({"chunk": 129, "head_dim": 64, "writes": 16, "reads": 16}, "stepwise"),
        ({"writes": 256, "reads": 256}, "stepwise"),  # lists of 8 tokens of 12
        ({"chunk": 128, "writes": 128, "reads": 128, "streams": 4}, "stepwise"),  # 7B: lists of 4 tokens
        ({"streams": 16}, "persistent"),  # 128 clusters of one block
        ({"streams": 17}, "stepwise"),  # 136, on 132 SMs
        ({"streams": 500, "head_dim": 128}, "persistent"),  # rows of one slice
        ({"streams": 500, "head_dim": 129}, "stepwise"),
    ],
)
def test_a_call_that_names_no_schedule_follows_the_rule(changes: dict[str, Any], schedule: str) -> None:
    """Room for rows under way and lists, and all clusters at once or rows of one slice."""
    shape = dataclasses.replace(FLAGSHIP, **changes)
    found, note = chosen(shape)
    assert found == schedule
    assert note.startswith(f"schedule: {schedule}, by the rule")
    assert plan_forward(shape, preset("h100")) == plan_forward(shape, preset("h100"), None)
    assert chosen(shape, "a100") == (
        "stepwise",
        "schedule: stepwise, since A100 80GB SXM has no thread block clusters",
    )


@pytest.mark.parametrize(
    ("changes", "device", "failed"),
    [
        ({"chunk": 129, "head_dim": 64}, "h100", "a chunk of 129 tokens, more than 128"),
        ({"chunk": 128}, "rtxpro6000", "a block has room for 1 batch of rows under way, not for 3"),
        ({"writes": 256, "reads": 256}, "h100", "a block has room for lists of 8 tokens, not of 12"),
        ({"streams": 17}, "h100", "136 clusters, 132 fit at once, and a row of more than 256 bytes"),
    ],
)
def test_a_stepwise_plan_names_the_condition_that_failed(
    changes: dict[str, Any], device: str, failed: str
) -> None:
    note = chosen(dataclasses.replace(FLAGSHIP, **changes), device)[1]
    assert note == f"schedule: stepwise, by the rule: {failed}"


def test_the_rule_gives_way_where_the_launch_cannot_run() -> None:
    schedule, note = chosen(WriteReadShape(2, 1000, 256, 64, 64, 1024, 65536), "rtxpro6000")
    assert schedule == "stepwise"
    assert note.startswith("schedule: stepwise, since schedule='persistent' needs ")


@pytest.mark.parametrize("device", WITH_CLUSTERS)
def test_the_largest_clusters_that_all_run_at_once(device: str) -> None:
    model = preset(device)
    for streams in (1, 2, 3, 5, 8, 12, 16, 33, 64, 200):
        _, launch = planned(dataclasses.replace(FLAGSHIP, streams=streams, head_dim=64, chunk=16), device)
        size = launch.cluster[0]
        assert launch.blocks == streams * size
        assert streams <= model.clusters_at_once(size) or size == 1
        assert size == 8 or streams > model.clusters_at_once(size + 1)


@pytest.mark.parametrize(("head_dim", "columns"), [(1, 64), (64, 64), (72, 128), (128, 128), (1024, 128)])
def test_the_widest_slice_that_a_row_fills(head_dim: int, columns: int) -> None:
    _, launch = planned(dataclasses.replace(FLAGSHIP, head_dim=head_dim))
    assert dict(launch.kernel.defines)["COLUMNS"] == str(columns)


@pytest.mark.parametrize("training", [False, True])
def test_the_launch_stands_for_the_steps_of_a_slab(training: bool) -> None:
    shape = dataclasses.replace(FLAGSHIP, tokens=2**17, training=training)
    stepwise = plan_forward(shape, preset("h100"), "stepwise")
    plan, launch = planned(shape)
    assert plan.steps == stepwise.steps
    assert plan.slab_steps == stepwise.slab_steps
    assert plan.launch_count == plan.slabs * 5
    assert plan.walk_steps == plan.slab_steps
    assert [call for _, call in plan.launches()] == [*plan.prologue, launch] * plan.slabs
    assert [step for step, call in plan.launches() if call is launch] == [
        step for step in range(plan.steps) if step == plan.slab_step(step)
    ]
    floor = sum(call.floor_bytes for call in stepwise.step)
    assert launch.floor_bytes == plan.slab_steps * floor
    kept = {buffer for buffer in stepwise.buffers if buffer.kept}
    assert {buffer for buffer in plan.buffers if buffer.kept} == kept
    gone = {buffer.name for buffer in set(stepwise.buffers) - set(plan.buffers)}
    assert gone == {"residual", "inter", "delta"}


@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_arguments_are_the_kernels_parameters(snapshot: str) -> None:
    plan, launch = planned(dataclasses.replace(FLAGSHIP, snapshot=snapshot))
    assert [(argument.name, argument.kind) for argument in launch.arguments] == parameters(
        "persistent_forward"
    )
    for macro in dict(launch.kernel.defines):
        assert explains("persistent_forward", macro), f"persistent_forward.cu does not explain {macro}"
    by_call = {"step", "slab_step", "row_stride", "shared_bank", "wide"}
    numbers = {a.name for a in launch.arguments if a.kind != "pointer"} - by_call
    assert numbers <= forward_constants(plan).keys()


def test_the_order_of_sums_is_that_of_the_stepwise_gather() -> None:
    for dtype, D in product(BANK_DTYPES, (1, 64, 128, 200, 512, 1024)):
        shape = dataclasses.replace(FLAGSHIP, head_dim=D, bank_dtype=dtype, gradient_bank_dtype=dtype)
        stepwise = plan_forward(shape, preset("h100"), "stepwise")
        gather = next(one for one in stepwise.kernels() if one.name == "gather")
        assert forward_constants(planned(shape)[0])["groups"] == int(dict(gather.kernel.defines)["GROUPS"])


@pytest.mark.parametrize("target", [target for target in TARGETS if int(target[3:]) >= 90])
def test_the_table_lists_what_plans_choose_and_nothing_else(target: str) -> None:
    devices = [name for name, device in PRESETS.items() if device.arch == target]
    chosen = set()
    for device, dtype, D, alignment in product(
        devices, BANK_DTYPES, (1, 3, 32, 33, 64, 66, 100, 129, 257, 1024), (2, 4, 8, 16)
    ):
        shape = WriteReadShape(1, 300, 16, 8, 8, D, 64, bank_dtype=dtype, alignment=alignment)
        for training, snapshot in ((False, "none"), *product((True,), SNAPSHOTS)):
            for index in INDEX_DTYPES:
                one = dataclasses.replace(shape, training=training, snapshot=snapshot, index_dtype=index)
                chosen.add(planned(one, device)[1].kernel)
    listed = {spec for spec in variants(target) if spec.file == "persistent_forward.cu"}
    assert chosen <= listed

    def without_ring(specs: set[KernelSpec]) -> set[tuple[tuple[str, str], ...]]:
        return {tuple(one for one in spec.defines if one[0] != "RING") for spec in specs}

    # How many rows are under way follows from the chunk and the GPU's shared memory: both counts are listed.
    assert without_ring(chosen) == without_ring(listed)
    assert len(listed) == 2 * len(without_ring(listed))


@pytest.mark.parametrize("target", [target for target in TARGETS if int(target[3:]) < 90])
def test_older_targets_list_none(target: str) -> None:
    assert not [spec for spec in variants(target) if spec.file == "persistent_forward.cu"]


def test_the_printed_plan_says_that_the_launch_does_all_steps() -> None:
    text = planned(FLAGSHIP)[0].describe()
    assert "[steps 0 to 511]" in text
    assert "schedule: persistent, as asked; 16 clusters of 6 blocks, 17 fit at once" in text
    long = dataclasses.replace(FLAGSHIP, tokens=2**17, training=False)
    plan, _ = planned(long)
    assert f"[before each slab of {plan.slab_steps} steps]" in plan.describe()
    assert f"[each walk of {plan.walk_steps} steps, 0 to {plan.steps - 1}]" in plan.describe()
    by_rule = plan_forward(dataclasses.replace(FLAGSHIP, chunk=256), preset("h100"))
    assert by_rule.schedule == "stepwise"
    assert "schedule: stepwise, by the rule" in by_rule.describe()


def test_the_command_prints_it_and_its_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--device", "h100", "--streams", "2", "--pass", "forward", "--schedule"]
    assert main([*command, "persistent"]) == 0
    assert "persistent_forward.cu:persistent_forward" in capsys.readouterr().out
    assert main([*command, "stepwise"]) == 0
    assert "persistent_forward" not in capsys.readouterr().out
    assert main([*command, "persistent", "--snapshot", "fp8"]) == 0
    assert "[each walk of 32 steps, 0 to " in capsys.readouterr().out
    assert main([*command, "persistent", "--device", "a100"]) == 1
    assert "needs thread block clusters" in capsys.readouterr().err
