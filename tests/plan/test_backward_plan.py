"""The stepwise backward plan against its kernels: signatures, shared memory, variants, working memory."""

from __future__ import annotations

import dataclasses
import functools
from itertools import product

import pytest

from sdm_rt.errors import UnsupportedConfigurationError
from sdm_rt.plan import backward
from sdm_rt.plan.backward import backward_constants
from sdm_rt.plan.device import PRESETS, DeviceModel, preset
from sdm_rt.plan.launch import Launch
from sdm_rt.plan.shapes import BANK_DTYPES, INDEX_DTYPES, SNAPSHOTS, WriteReadShape, dtype_bytes
from sdm_rt.plan.step_plan import StepPlan
from sdm_rt.plan.write_resources import TARGETS, variants
from tests.plan.cases import FLAGSHIP
from tests.plan.kernel_source import constant, explains, parameters

NAMES = ("gwr", "du_update", "phase_a", "gds", "gram_backward")
SMALL = WriteReadShape(2, 150, 64, 8, 9, 128, 256)
plan_backward = functools.partial(backward.plan_backward, schedule="stepwise")


def launch(plan: StepPlan, name: str) -> Launch:
    return next(one for one in plan.kernels() if one.name == name)


def defines(shape: WriteReadShape, name: str, device: DeviceModel | None = None) -> dict[str, str]:
    return dict(launch(plan_backward(shape, device or preset("h100")), name).kernel.defines)


# ---- plan and source ----


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_the_kernels_parameters(name: str) -> None:
    planned = launch(plan_backward(SMALL, preset("h100")), name)
    assert [(argument.name, argument.kind) for argument in planned.arguments] == parameters(name)


@pytest.mark.parametrize("name", NAMES)
def test_every_macro_of_a_variant_stands_in_its_kernels_header(name: str) -> None:
    for macro in defines(SMALL, name):
        if not macro.startswith("SDM_PDL"):
            assert explains(name, macro), f"{name}.cu does not explain {macro}"


def test_blocks_are_those_that_the_kernels_are_written_for() -> None:
    plan = plan_backward(FLAGSHIP, preset("h100"))
    for name in ("phase_a", "gds"):
        assert launch(plan, name).block == (32 * constant(name, "WARPS"), 1, 1)
    assert launch(plan, "gwr").block == (32 * constant("gwr", "GROUPS"), 1, 1)
    narrow = plan_backward(dataclasses.replace(FLAGSHIP, head_dim=256), preset("h100"))
    assert launch(narrow, "gwr").block == (32 * constant("gwr", "NARROW_WARPS"), 1, 1)
    columns = int(defines(FLAGSHIP, "du_update")["COLUMNS"])
    assert launch(plan, "du_update").block == (constant("du_update", "TILE") // 2 * columns // 2, 1, 1)
    assert launch(plan, "gram_backward").block == (constant("gram_backward", "THREADS"), 1, 1)


def test_constants_name_every_number_that_a_shape_fixes() -> None:
    plan = plan_backward(SMALL, preset("h100"))
    numbers = {a.name for one in plan.kernels() for a in one.arguments if a.kind != "pointer"}
    assert backward_constants(plan).keys() == numbers - {"step", "row_stride", "shared_bank", "wide"}
    values = {"P": 2, "T": 150, "C": 64, "W": 8, "R": 9, "D": 128, "S": 256, "first_stream": 0}
    assert backward_constants(plan) == {
        **values,
        "grad_gates": 1,
        "wide_index": 1,
        "stage_outputs": 1,
        "each": 1,
    }
    other = dataclasses.replace(SMALL, gates_per_write=True, index_dtype="int32")
    changed = backward_constants(plan_backward(other, preset("h100")))
    assert (changed["grad_gates"], changed["wide_index"]) == (8, 0)


# ---- shared memory ----


@pytest.mark.parametrize("device", PRESETS)
@pytest.mark.parametrize("C", [1, 2, 15, 33, 64, 100, 255, 256])
def test_shared_memory_by_hand(C: int, device: str) -> None:
    """gwr: sixteen groups' slices of 1,024 columns, and an offset, a weight and a dot for each write.

    du_update: two [C, columns] operands and two square tiles whose rows lie four floats apart; the rest is
    padding.
    """
    shape = dataclasses.replace(FLAGSHIP, chunk=C, writes=7)
    plan = plan_backward(shape, preset(device))
    columns, side = int(defines(shape, "du_update", preset(device))["COLUMNS"]), min(64, -(-C // 4) * 4)
    du_update = launch(plan, "du_update")
    touched = 4 * (2 * C * columns + 2 * side * (side + 4) - 4)
    assert du_update.shared_memory - du_update.shared_padding == touched
    assert ("padded" in du_update.note) == (du_update.shared_padding > 0)
    loop = [one for one in plan.kernels() if one.name in NAMES and one.name != "du_update"]
    assert {one.name: one.shared_memory for one in loop} == {
        "gwr": 4 * 16 * 1024 + 16 * 7,
        "phase_a": 0,
        "gds": 0,
        "gram_backward": 0,
    }
    assert not any(one.shared_padding for one in plan.kernels() if one.name != "du_update")


@pytest.mark.parametrize(
    ("device", "columns", "need", "padded"),
    [("h100", 16, 42_992, 115_840), ("a100", 16, 42_992, 83_072), ("rtx4090", 16, 42_992, 50_304)],
)
def test_the_d_u_update_in_figures(device: str, columns: int, need: int, padded: int) -> None:
    du_update = launch(plan_backward(FLAGSHIP, preset(device)), "du_update")
    assert dict(du_update.kernel.defines)["COLUMNS"] == str(columns)
    assert du_update.shared_memory - du_update.shared_padding == need
    assert du_update.shared_memory == padded


# ---- variants ----


@pytest.mark.parametrize(
    ("dtype", "gradient", "D", "loads"),
    [
        ("bfloat16", "bfloat16", 1, 1),
        ("bfloat16", "bfloat16", 256, 1),
        ("bfloat16", "bfloat16", 257, 2),
        ("bfloat16", "bfloat16", 513, 4),
        ("float16", "float16", 16384, 4),
        ("bfloat16", "float32", 257, 2),
        ("bfloat16", "float32", 16384, 2),
        ("float32", "float32", 128, 1),
        ("float32", "float32", 129, 2),
        ("float32", "float32", 257, 4),
    ],
)
def test_the_order_of_dots_follows_the_width_and_formats_alone(
    dtype: str, gradient: str, D: int, loads: int
) -> None:
    """The words of a lane are part of the order of sums: nothing but D and both formats may choose them."""
    shape = dataclasses.replace(SMALL, head_dim=D, bank_dtype=dtype, gradient_bank_dtype=gradient)
    others: list[dict[str, object]] = [{"alignment": alignment} for alignment in (2, 4, 8, 16)]
    others += [{"streams": 64}, {"tokens": 1}, {"writes": 256}, {"slots": 7}, {"index_dtype": "int32"}]
    others += [{"snapshot": "int4"}, {"chunk": 128}]
    for change in others:
        for device in PRESETS.values():
            plan = plan_backward(dataclasses.replace(shape, **change), device)
            for name in ("gwr", "phase_a", "gds"):
                assert dict(launch(plan, name).kernel.defines)["LOADS"] == str(loads)


@pytest.mark.parametrize(
    ("dtype", "D", "lanes"),
    [
        ("bfloat16", 1, 16),
        ("float16", 128, 16),
        ("bfloat16", 129, 32),
        ("float32", 64, 16),
        ("float32", 65, 32),
    ],
)
def test_a_row_of_at_most_16_words_is_half_a_warps(dtype: str, D: int, lanes: int) -> None:
    for gradient, alignment in product({dtype, "float32"}, (4, 16)):
        shape = dataclasses.replace(
            SMALL, head_dim=D, bank_dtype=dtype, gradient_bank_dtype=gradient, alignment=alignment
        )
        for name in ("phase_a", "gds"):
            assert defines(shape, name)["LANES"] == str(lanes)


@pytest.mark.parametrize("streams", [1, 2, 7, 1000])
@pytest.mark.parametrize("device", PRESETS)
def test_streams_share_one_wave_of_blocks(device: str, streams: int) -> None:
    model = preset(device)
    plan = plan_backward(dataclasses.replace(FLAGSHIP, streams=streams), model)
    for name in ("phase_a", "gds"):
        one = launch(plan, name)
        share = one.occupancy(model).wave(model) // streams
        assert one.grid == (min(max(share, 1), 64 * 64 // 8), streams, 1)


@pytest.mark.parametrize(
    ("dtype", "D", "alignment", "own", "bank"),
    [
        ("bfloat16", 1024, 16, 8, 8),
        ("bfloat16", 1024, 8, 8, 1),  # rows that the caller has placed
        ("bfloat16", 1004, 16, 1, 1),
        ("float32", 1024, 16, 4, 4),
        ("float32", 1004, 8, 4, 1),
        ("float32", 1002, 16, 1, 1),
    ],
)
def test_loads_are_words_where_the_rows_allow_it(
    dtype: str, D: int, alignment: int, own: int, bank: int
) -> None:
    """The gradient bank is the package's own, so its rows are aligned wherever D is."""
    shape = dataclasses.replace(
        SMALL, head_dim=D, bank_dtype=dtype, gradient_bank_dtype=dtype, alignment=alignment
    )
    assert defines(shape, "gwr")["VECTOR"] == str(own)
    assert defines(shape, "phase_a")["VECTOR"] == defines(shape, "gds")["VECTOR"] == str(bank)
    assert defines(shape, "gram_backward")["VECTOR"] == str(min(own, 4))


@pytest.mark.parametrize("dtype", BANK_DTYPES)
@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_phase_a_reads_the_format_that_was_kept(dtype: str, snapshot: str) -> None:
    code = {"none": "1", "bf16": "1" if dtype == "bfloat16" else "2", "fp8": "3", "int4": "4"}[snapshot]
    shape = dataclasses.replace(SMALL, bank_dtype=dtype, gradient_bank_dtype=dtype, snapshot=snapshot)
    assert defines(shape, "phase_a")["SNAPSHOT"] == code


def wide_grid(sm_count: int) -> list[WriteReadShape]:
    """Shapes that differ in all that a backward plan chooses by."""
    widths = (1, 3, 32, 33, 64, 66, 128, 129, 130, 256, 257, 260, 264, 513, 520, 1025, 1032, 16384)
    shapes = []
    for dtype, D, alignment, snapshot in product(BANK_DTYPES, widths, (2, 16), SNAPSHOTS):
        for gradient in {dtype, "float32"}:
            one = WriteReadShape(1, 300, 16, 8, 8, D, 64, dtype, gradient, alignment=alignment)
            shapes.append(dataclasses.replace(one, snapshot=snapshot))
    for dtype, P, index in product(BANK_DTYPES, (1, sm_count // 2, sm_count), INDEX_DTYPES):
        shapes.append(WriteReadShape(P, 300, 16, 8, 8, 64, 64, bank_dtype=dtype, index_dtype=index))
    return shapes


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "sm_86"])  # no preset has it
def test_the_table_lists_what_plans_choose_and_nothing_else(target: str) -> None:
    devices = [device for device in PRESETS.values() if device.arch == target]
    chosen = {
        one.kernel
        for device in devices
        for shape in wide_grid(device.sm_count)
        for one in plan_backward(shape, device).kernels()
        if one.name in NAMES
    }
    assert chosen == {spec for spec in variants(target) if set(spec.entries) & set(NAMES)}


# ---- working memory ----


def test_working_memory_by_hand() -> None:
    plan = plan_backward(FLAGSHIP, preset("h100"))
    chunks, tokens, entries = 1024, 1024 * 64, 1024 * 64 * 64
    by_hand = {
        "gwr": 4 * 2 * 64 * 1024,
        "lam": 4 * tokens * 1024,
        "d_k_pd": 4 * entries,
        "d_k_eff": 4 * entries,
        "d_q_w": 4 * entries,
        "d_tot": 4 * chunks * 64 * 64,
        "d_a": 4 * tokens * 64,
        "d_qk": 4 * tokens * 64,
        "value_sums": 4 * 2 * entries,
        "log_sums": 4 * 2 * entries,
    }
    assert {buffer.name: buffer.bytes for buffer in plan.buffers} == by_hand
    assert not any(buffer.kept for buffer in plan.buffers)
    assert f"working memory {sum(by_hand.values()) / 2**20:,.1f} MiB" in plan.notes


def test_every_buffer_is_written_before_it_is_read() -> None:
    """By an earlier launch of the step, or of the loop; d_q_w and d_k_eff by the launch that reads them."""
    plan = plan_backward(SMALL, preset("h100"))
    written: set[str] = set()
    own = {buffer.name for buffer in plan.buffers} - {"gate_gradients"}
    for call in (*plan.first_step, *plan.epilogue):
        assert (set(call.reads) & own) - written <= set(call.writes)
        written |= set(call.writes)
    assert own <= written


def test_a_word_is_16_bytes_of_the_banks_format() -> None:
    for dtype in BANK_DTYPES:
        shape = dataclasses.replace(SMALL, bank_dtype=dtype, gradient_bank_dtype="float32")
        assert backward.row_word(shape) * dtype_bytes(dtype) == 16


def test_streams_of_one_bank_take_a_gds_each_in_order() -> None:
    shape = dataclasses.replace(FLAGSHIP, streams=3, shared_bank=True)
    plan = plan_backward(shape, preset("h100"))
    names = ["gwr", "du_update", "phase_a", "gds", "gds", "gds"]
    assert [launch.name for launch in plan.step] == [launch.name for launch in plan.first_step] == names
    turns = [launch for launch in plan.step if isinstance(launch, Launch) and launch.name == "gds"]
    constants = backward_constants(plan)
    assert [constants[turn.arguments[-1].name] for turn in turns] == [0, 1, 2]
    separate = plan_backward(dataclasses.replace(shape, shared_bank=False), preset("h100"))
    (together,) = (launch for launch in separate.step if isinstance(launch, Launch) and launch.name == "gds")
    assert together.arguments[-1].name == "first_stream"
    assert sum(turn.floor_bytes for turn in turns) == together.floor_bytes
    assert [turn.grid[1] for turn in turns] == [1, 1, 1]
    with pytest.raises(UnsupportedConfigurationError, match="streams of one bank may read the same rows"):
        backward.plan_backward(shape, preset("h100"), "persistent")
    narrow = dataclasses.replace(shape, head_dim=64)
    assert backward.plan_backward(narrow, preset("h100")).schedule == "stepwise"
