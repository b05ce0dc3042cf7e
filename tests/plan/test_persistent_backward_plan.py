"""The plan of the persistent backward: where it runs, what it asks for, why it is refused, how it prints."""

from __future__ import annotations

import dataclasses
import re
from itertools import product
from typing import Any

import pytest

from sdm_rt.cli import main
from sdm_rt.errors import UnsupportedConfigurationError
from sdm_rt.plan.backward import backward_constants, plan_backward
from sdm_rt.plan.device import PRESETS, preset
from sdm_rt.plan.launch import Launch
from sdm_rt.plan.persistent_backward import COLUMN_SUM_KERNEL
from sdm_rt.plan.shapes import BANK_DTYPES, SNAPSHOTS, WriteReadShape, dtype_bytes
from sdm_rt.plan.step_plan import StepPlan
from sdm_rt.plan.tiling import ceil_div
from sdm_rt.plan.write_resources import TARGETS, variants
from tests.plan.cases import FLAGSHIP, WRITE_READ_CASES
from tests.plan.kernel_source import explains, parameters

WITH_CLUSTERS = [name for name, device in PRESETS.items() if device.clusters]
WITHOUT_CLUSTERS = [name for name, device in PRESETS.items() if not device.clusters]
FILES = ("persistent_backward.cu", "column_sum.cu")


def planned(shape: WriteReadShape, device: str = "h100") -> tuple[StepPlan, Launch]:
    plan = plan_backward(shape, preset(device), "persistent")
    walk, column_sum = plan.step
    assert isinstance(walk, Launch)
    assert (walk.name, column_sum.name) == ("persistent_backward", "column_sum")
    return plan, walk


def bytes_by_hand(
    C: int, W: int, K: int, columns: int, value_bytes: int, tokens: int, in_place: bool, overlap: bool
) -> int:
    """Of a block of 512 threads in a cluster of K: ``tokens`` lists, 12 bytes an entry of 64-bit indices."""
    own = 2 * ceil_div(ceil_div(C, 2), K)
    pairs = min(16, 512 // (columns // 4), own // 2)
    slots = 16 * (512 // (columns * value_bytes)) * 4  # under way: warps, teams of a warp, slots of a team
    lists, tiles = ceil_div(tokens * W * 12, 16) * 16, 2 * 32 * pairs * 16
    listed = max(lists, tiles) if overlap else lists + tiles
    values = (1 if in_place else 2) * C * columns * 4
    return 56 * slots + listed + ceil_div(C, 4) * 16 + C * columns * value_bytes + values


@pytest.mark.parametrize(
    ("case", "slice_bytes", "cluster", "tokens", "in_place", "overlap", "need", "slab_steps"),
    [
        ("flagship", 256, 6, 12, False, False, 104_704, 64),
        ("7b", 256, 3, 16, False, False, 212_480, 8),
        ("batch", 256, 2, 16, True, True, 229_376, 2),
        ("narrow", 256, 6, 12, False, False, 100_096, 64),
        ("many_streams", 128, 2, 32, False, False, 84_224, 16),
    ],
)
def test_cut_slab_and_shared_memory_of_the_known_cases(
    case: str,
    slice_bytes: int,
    cluster: int,
    tokens: int,
    in_place: bool,
    overlap: bool,
    need: int,
    slab_steps: int,
) -> None:
    shape = FLAGSHIP if case == "flagship" else WRITE_READ_CASES[case]
    plan, walk = planned(shape)
    columns = slice_bytes // dtype_bytes(shape.bank_dtype)
    slices = -(-shape.head_dim // columns)
    assert dict(walk.kernel.defines)["COLUMNS"] == str(columns)
    assert walk.cluster == (cluster, 1, 1)
    assert walk.grid == (slices * cluster, shape.streams, 1)
    assert walk.block == (512, 1, 1)
    numbers = backward_constants(plan)
    layout = numbers["list_tokens"], numbers["in_place"], numbers["overlap"]
    assert layout == (tokens, int(in_place), int(overlap))
    assert (numbers["slices"], numbers["halves"]) == (slices, 256 // slice_bytes)
    by_hand = bytes_by_hand(shape.chunk, shape.writes, cluster, columns, 2, tokens, in_place, overlap)
    assert walk.shared_memory == by_hand == need
    assert plan.slab_steps == slab_steps
    assert numbers["slab_chunks"] == slab_steps * shape.streams


@pytest.mark.parametrize("changes", [{"alignment": 2}, {"gradient_bank_dtype": "float32"}])
def test_rows_of_more_registers_are_half_as_many_under_way(changes: dict[str, Any]) -> None:
    """Rows loaded value by value, and wide gradients: 56 bytes a slot less for two of a team's four."""
    rest = {"head_dim": 64, "alignment": 16}  # one narrow slice, whatever the alignment
    _, most = planned(dataclasses.replace(FLAGSHIP, **rest))
    _, few = planned(dataclasses.replace(FLAGSHIP, **rest | changes))
    assert most.shared_memory - few.shared_memory == 56 * 16 * 4 * 2


def test_a_slab_keeps_its_partial_sums_within_the_budget() -> None:
    for name, shape in WRITE_READ_CASES.items():
        if not shape.training or not shape.streams * shape.tokens:
            continue
        plan, _ = planned(shape)
        partial = sum(buffer.bytes for buffer in plan.buffers if buffer.name.startswith("partial"))
        assert partial <= 64 * 2**20 or plan.slab_steps == 1, name
        more = partial // plan.slab_steps * (plan.slab_steps + 1)
        assert more > 64 * 2**20 or plan.slab_steps == plan.steps, name


def shapes() -> list[WriteReadShape]:
    sizes = product((1, 7, 64, 128, 200, 256), (1, 100, 1024), (1, 64, 256), BANK_DTYPES, (False, True))
    return [
        WriteReadShape(
            2,
            1000,
            C,
            lanes,
            lanes,
            D,
            65536,
            bank_dtype=dtype,
            gradient_bank_dtype="float32" if wide else dtype,
        )
        for C, D, lanes, dtype, wide in sizes
    ]


@pytest.mark.parametrize("device", WITH_CLUSTERS)
def test_it_fits_the_gpus_with_the_most_shared_memory(device: str) -> None:
    limit = preset(device).shared_memory_per_block
    for shape in shapes():
        if limit < 200_000 and shape.chunk >= 64:
            continue
        _, walk = planned(shape, device)
        assert walk.shared_memory <= limit
        assert walk.occupancy(preset(device)).blocks


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
        plan_backward(FLAGSHIP, preset(device), "persistent")


def test_a_schedule_of_another_name_is_refused() -> None:
    with pytest.raises(
        ValueError, match="schedule: expected None or one of stepwise, persistent, got 'fast'"
    ):
        plan_backward(FLAGSHIP, preset("h100"), "fast")


def test_the_choice_of_a_call_that_names_no_schedule() -> None:
    def schedule(shape: WriteReadShape, device: str) -> tuple[str, str]:
        plan = plan_backward(shape, preset(device))
        return plan.schedule, next((note for note in plan.notes if note.startswith("schedule")), "")

    narrow = dataclasses.replace(FLAGSHIP, head_dim=64)  # rows of 128 bytes
    assert schedule(narrow, "h100")[0] == "persistent"
    assert schedule(narrow, "h100")[1].startswith("schedule: persistent, by the rule")
    for shape, failed in (
        (FLAGSHIP, "a row of 2,048 bytes, more than 128"),
        (dataclasses.replace(narrow, head_dim=65), "a row of 130 bytes, more than 128"),
        (dataclasses.replace(narrow, chunk=65), "a chunk of 65 tokens, more than 64"),
    ):
        assert schedule(shape, "h100") == ("stepwise", f"schedule: stepwise, by the rule: {failed}")
    for snapshot in SNAPSHOTS:
        assert schedule(dataclasses.replace(narrow, snapshot=snapshot), "h100")[0] == "persistent"
    chosen, note = schedule(narrow, "a100")
    assert chosen == "stepwise"
    assert note == "schedule: stepwise, since A100 80GB SXM has no thread block clusters"


def test_the_launches_stand_for_the_steps_of_a_slab() -> None:
    shape = dataclasses.replace(FLAGSHIP, tokens=64 * 150)
    stepwise = plan_backward(shape, preset("h100"), "stepwise")
    plan, walk = planned(shape)
    assert (plan.steps, plan.slab_steps, plan.slabs) == (150, 64, 3)
    assert plan.epilogue == stepwise.epilogue
    assert plan.launch_count == 3 * 2 + len(plan.epilogue) == len(list(plan.launches()))
    # The last slab, of 22 steps, comes first.
    issued = [plan.slab_step(step) for step, call in plan.launches() if call is walk and step is not None]
    assert issued == [128, 64, 0]
    assert walk.floor_bytes == plan.slab_steps * sum(call.floor_bytes for call in stepwise.step)
    ours, theirs = ({buffer.name for buffer in one.buffers} for one in (plan, stepwise))
    assert theirs - ours == {"gwr"}
    assert ours - theirs == {"partial_k_pd", "partial_k_eff", "partial_q_w", "partial_tot"}


@pytest.mark.parametrize("file", FILES)
def test_arguments_are_the_kernels_parameters(file: str) -> None:
    name = file.removesuffix(".cu")
    plan, _ = planned(FLAGSHIP)
    launch = next(one for one in plan.kernels() if one.kernel.file == file)
    assert [(argument.name, argument.kind) for argument in launch.arguments] == parameters(name)
    for macro in dict(launch.kernel.defines):
        assert explains(name, macro), f"{file} does not explain {macro}"
    by_call = {"slab_step", "row_stride", "shared_bank", "wide"}
    numbers = {a.name for a in launch.arguments if a.kind != "pointer"} - by_call
    assert numbers <= backward_constants(plan).keys()


@pytest.mark.parametrize("target", [target for target in TARGETS if int(target[3:]) >= 90])
def test_the_table_lists_what_plans_choose_and_nothing_else(target: str) -> None:
    devices = [name for name, device in PRESETS.items() if device.arch == target]
    chosen = {COLUMN_SUM_KERNEL}
    for device, dtype, D, alignment, wide in product(
        devices, BANK_DTYPES, (1, 3, 32, 64, 66, 100, 129, 257, 1024), (2, 4, 8, 16), (False, True)
    ):
        gradient = "float32" if wide else dtype
        shape = WriteReadShape(
            1,
            300,
            16,
            8,
            8,
            D,
            64,
            bank_dtype=dtype,
            gradient_bank_dtype=gradient,
            alignment=max(alignment, dtype_bytes(dtype)),
        )
        for snapshot in SNAPSHOTS:
            chosen.add(planned(dataclasses.replace(shape, snapshot=snapshot), device)[1].kernel)
    assert chosen == {spec for spec in variants(target) if spec.file in FILES}


@pytest.mark.parametrize("target", [target for target in TARGETS if int(target[3:]) < 90])
def test_older_targets_list_none(target: str) -> None:
    assert not [spec for spec in variants(target) if spec.file in FILES]


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--device", "h100", "--streams", "2", "--pass", "backward", "--schedule"]
    assert main([*command, "persistent"]) == 0
    text = capsys.readouterr().out
    assert "persistent_backward.cu:persistent_backward" in text
    assert "schedule: persistent, as asked; 16 clusters of 6 blocks, 17 fit at once" in text
    assert main([*command, "stepwise"]) == 0
    assert "persistent_backward" not in capsys.readouterr().out
