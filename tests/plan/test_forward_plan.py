"""The stepwise forward plan against its kernels: signatures, shared memory, variants, slabs, memory."""

from __future__ import annotations

import dataclasses
import functools
from itertools import product

import pytest

from sdm_rt.errors import UnsupportedConfigurationError
from sdm_rt.plan import forward
from sdm_rt.plan.backward import plan_backward
from sdm_rt.plan.device import PRESETS, DeviceModel, preset
from sdm_rt.plan.forward import forward_constants, kept_buffers
from sdm_rt.plan.launch import Launch
from sdm_rt.plan.phase1 import sort_passes
from sdm_rt.plan.shapes import BANK_DTYPES, INDEX_DTYPES, SNAPSHOTS, WriteReadShape, dtype_bytes
from sdm_rt.plan.step_plan import StepPlan
from sdm_rt.plan.write_resources import TARGETS, variants
from sdm_rt.runtime.kernel import KernelSpec
from tests.plan.cases import FLAGSHIP, WRITE_READ_CASES
from tests.plan.kernel_source import constant, explains, parameters

PHASE1 = ("phase1_sort", "phase1_scan", "phase1_gram", "solve")
NAMES = (*PHASE1, "keep_rows", "gather", "dual_matmul", "decay_write")
plan_forward = functools.partial(forward.plan_forward, schedule="stepwise")
SMALL = WriteReadShape(2, 150, 64, 8, 8, 128, 256)
QUANTIZED = dataclasses.replace(SMALL, snapshot="fp8")  # its plan has every kernel


def launch(plan: StepPlan, name: str) -> Launch:
    return next(one for one in plan.kernels() if one.name == name)


def defines(shape: WriteReadShape, name: str, device: DeviceModel | None = None) -> dict[str, str]:
    return dict(launch(plan_forward(shape, device or preset("h100")), name).kernel.defines)


# ---- plan and source ----


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_the_kernels_parameters(name: str) -> None:
    planned = launch(plan_forward(QUANTIZED, preset("h100")), name)
    assert [(argument.name, argument.kind) for argument in planned.arguments] == parameters(name)


@pytest.mark.parametrize("name", NAMES)
def test_every_macro_of_a_variant_stands_in_its_kernels_header(name: str) -> None:
    plan = plan_forward(QUANTIZED, preset("h100"))
    for macro in dict(launch(plan, name).kernel.defines):
        if not macro.startswith("SDM_PDL"):
            assert explains(name, macro), f"{name}.cu does not explain {macro}"


def test_blocks_are_those_that_the_kernels_are_written_for() -> None:
    plan = plan_forward(FLAGSHIP, preset("h100"))
    assert launch(plan, "phase1_sort").block == (int(defines(FLAGSHIP, "phase1_sort")["THREADS"]), 1, 1)
    assert launch(plan, "phase1_scan").block == (int(defines(FLAGSHIP, "phase1_scan")["THREADS"]), 1, 1)
    assert launch(plan, "phase1_gram").block == (32 * constant("phase1_gram", "ROWS"), 1, 1)
    warps = 2 * (constant("solve", "PANEL") // 2 // 32)  # for X and for QX, two columns a thread
    assert launch(plan, "solve").block == (32 * warps, 1, 1)
    columns = int(defines(FLAGSHIP, "dual_matmul")["COLUMNS"])
    assert launch(plan, "dual_matmul").block == (constant("dual_matmul", "TILE") // 2 * columns // 2, 1, 1)
    assert launch(plan, "decay_write").block == (constant("decay_write", "THREADS"), 1, 1)
    keep_rows = launch(plan_forward(QUANTIZED, preset("h100")), "keep_rows")
    assert keep_rows.block == (32 * constant("keep_rows", "WARPS"), 1, 1)
    most = constant("gather", "MAX_THREADS")
    for dtype, D in product(BANK_DTYPES, (1, 3, 8, 30, 64, 100, 128, 500, 1000, 1024, 4096, 16384)):
        shape = dataclasses.replace(SMALL, head_dim=D, bank_dtype=dtype, gradient_bank_dtype=dtype)
        assert launch(plan_forward(shape, preset("h100")), "gather").threads <= most


def test_constants_name_every_number_that_a_shape_fixes() -> None:
    plan = plan_forward(SMALL, preset("h100"))
    numbers = {a.name for one in plan.kernels() for a in one.arguments if a.kind != "pointer"}
    by_call = {"step", "slab_step", "row_stride", "shared_bank", "wide"}
    assert forward_constants(plan).keys() == numbers - by_call
    values = {"P": 2, "T": 150, "C": 64, "W": 8, "R": 8, "D": 128, "S": 256, "gates": 1, "slab_chunks": 6}
    assert forward_constants(plan) == {**values, "passes": 1, "digit_bits": 8}
    gates = dataclasses.replace(SMALL, gates_per_write=True)
    assert forward_constants(plan_forward(gates, preset("h100")))["gates"] == 8


@pytest.mark.parametrize(
    ("slots", "passes", "bits"),
    [(1, 1, 1), (2, 1, 1), (256, 1, 8), (257, 2, 5), (65536, 2, 8), (65537, 3, 6), (2**31 - 1, 4, 8)],
)
def test_the_sort_covers_the_bits_of_a_slot(slots: int, passes: int, bits: int) -> None:
    assert sort_passes(slots) == (passes, bits)
    assert passes * bits >= (slots - 1).bit_length()


# ---- shared memory ----


def item_bytes(C: int, lanes: int, slots: int) -> int:
    """Slot, token and lane side by side."""
    return 4 if (slots - 1).bit_length() + (C - 1).bit_length() + (lanes - 1).bit_length() <= 32 else 8


def sort_bytes(C: int, lanes: int, slots: int) -> int:
    """Items in two buffers."""
    return 2 * C * lanes * item_bytes(C, lanes, slots)


def scan_bytes(C: int, W: int, R: int, training: bool) -> int:
    """A float of every entry; for a backward one more of every write."""
    return 4 * C * (W + R + (W if training else 0))


def gram_bytes(C: int) -> int:
    """Eight rows, or all where there are fewer."""
    return 4 * C * min(8, C)


def solve_bytes(C: int) -> int:
    """Tiles of 16 rows: two spans of A and two of QK, up to 32 columns 20 floats apart; 64 columns of X."""
    rows = -(-C // 16) * 16
    return 4 * (4 * 20 * min(32, rows) + 64 * rows)


def product_bytes(C: int, columns: int, training: bool) -> int:
    """strength; u, in training delta too; two or three square tiles whose rows lie four floats apart."""
    side, strengths = min(64, -(-C // 4) * 4), -(-C // 4) * 4
    if training:
        return 4 * (strengths + 2 * C * columns + 3 * side * (side + 4) - 4)
    return 4 * (strengths + C * columns + 2 * side * (side + 4) - 4)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("C", [1, 2, 15, 16, 17, 33, 64, 100, 128, 255, 256])
def test_shared_memory_by_hand(C: int, training: bool) -> None:
    shape = WriteReadShape(2, 1024, C, 7, 9, 1024, 4096, training=training, snapshot="int4")
    plan = plan_forward(shape, preset("h100"))
    columns = int(defines(shape, "dual_matmul")["COLUMNS"])
    # Nine offsets of 8 bytes and weights of 4; four rows of 1,024 sums.
    assert {one.name: one.shared_memory for one in plan.kernels()} == {
        "phase1_sort": sort_bytes(C, 16, 4096),
        "phase1_scan": scan_bytes(C, 7, 9, training),
        "phase1_gram": gram_bytes(C),
        "solve": solve_bytes(C),
        "gather": 9 * 12 + 4 * 4 * 1024,
        "dual_matmul": product_bytes(C, columns, training),
        # Delta of 16 words of eight columns; two units of 2 x 8 slots of 24 bytes, for 16 warps.
        "decay_write": 4 * C * 128 + 16 * 2 * 16 * 24,
    } | ({"keep_rows": 0} if training else {})


@pytest.mark.parametrize(
    ("name", "C", "need"),
    [
        ("phase1_sort", 64, 65_536),
        ("phase1_sort", 65, 0),
        ("phase1_scan", 64, 32_768),
        ("phase1_scan", 128, 65_536),
        ("phase1_scan", 129, 0),
        ("phase1_gram", 64, 2_048),
        ("phase1_gram", 256, 8_192),
        ("solve", 64, 26_624),
        ("solve", 256, 75_776),
        ("dual_matmul", 64, 39_152),
        ("dual_matmul", 256, 52_208),
        ("decay_write", 64, 45_056),
        ("decay_write", 256, 143_360),
    ],
)
def test_shared_memory_in_figures(name: str, C: int, need: int) -> None:
    shape = WriteReadShape(2, 1024, C, 64, 64, 1024, 65536, training=False)
    assert launch(plan_forward(shape, preset("h100")), name).shared_memory == need


@pytest.mark.parametrize("device", ["h100", "rtx4090"])
@pytest.mark.parametrize(
    ("chunk", "lanes", "slots", "item", "threads"),
    [
        (64, 128, 65_536, "unsigned", "256"),  # 16 + 6 + 7 bits; 8,192 entries of 4 bytes, twice
        (64, 129, 65_536, "unsigned", "1024"),  # more than 64 KiB
        (256, 256, 65_536, "unsigned", "1024"),  # 16 + 8 + 8 bits
        (256, 257, 65_536, "unsigned long long", "1024"),
        (64, 64, 2**20, "unsigned", "256"),
        (64, 64, 2**20 + 1, "unsigned long long", "256"),
        (64, 65, 2**31 - 1, "unsigned long long", "1024"),
    ],
)
def test_an_item_holds_slot_token_and_lane_and_lies_in_shared_memory_where_it_fits(
    device: str, chunk: int, lanes: int, slots: int, item: str, threads: str
) -> None:
    shape = WriteReadShape(2, 1024, chunk, lanes // 2, lanes - lanes // 2, 1024, slots, training=False)
    plan = plan_forward(shape, preset(device))
    sort = launch(plan, "phase1_sort")
    shared = threads == "256"
    assert dict(sort.kernel.defines) == {
        "INDEX": "long long",
        "IN_SHARED": str(int(shared)),
        "ITEM": item,
        "THREADS": threads,
    }
    held = sort_bytes(chunk, lanes, slots)
    assert (held <= 65_536) == shared
    assert sort.shared_memory == (held if shared else 0)
    scratch = sum(buffer.bytes for buffer in plan.buffers if buffer.name == "sort_scratch")
    assert scratch == (0 if shared else sort.grid[0] * held)


@pytest.mark.parametrize(
    ("chunk", "lanes", "threads"), [(64, 128, "512"), (128, 64, "512"), (128, 65, "768"), (256, 256, "768")]
)
def test_the_scan_of_a_large_chunk_takes_more_threads_and_no_shared_memory(
    chunk: int, lanes: int, threads: str
) -> None:
    shape = WriteReadShape(2, 1024, chunk, lanes, lanes, 1024, 4096)
    scan = launch(plan_forward(shape, preset("rtx4090")), "phase1_scan")
    staged = threads == "512"
    assert dict(scan.kernel.defines) == {"BANK": "Bf16", "STAGED": str(int(staged)), "THREADS": threads}
    assert scan.shared_memory == (scan_bytes(chunk, lanes, lanes, True) if staged else 0)


@pytest.mark.parametrize("device", PRESETS)
@pytest.mark.parametrize("dtype", BANK_DTYPES)
@pytest.mark.parametrize("training", [False, True])
def test_every_call_fits_every_gpu(device: str, dtype: str, training: bool) -> None:
    """Chunks of any size, forward and backward."""
    sizes = [
        *product((1, 64, 200, 256), (1, 100, 1024, 16384), (1, 256)),
        *((C, 1024, 64) for C in range(1, 257)),
    ]
    for C, D, lanes in sizes:
        shape = WriteReadShape(2, 1000, C, lanes, lanes, D, 65536, bank_dtype=dtype, training=training)
        plans = [plan_forward(shape, preset(device))]
        if training:
            plans.append(plan_backward(shape, preset(device), "stepwise"))
        for one in (one for plan in plans for one in plan.kernels()):
            need = one.shared_memory + one.resources(preset(device)).static_shared
            assert need <= preset(device).shared_memory_per_block
            assert one.occupancy(preset(device)).blocks


def test_more_streams_than_a_grid_holds_are_refused() -> None:
    shape = WriteReadShape(65_535, 1, 1, 1, 1, 1, 1, training=False)
    assert plan_forward(shape, preset("h100")).steps == 1
    with pytest.raises(UnsupportedConfigurationError, match=r"65,536 streams.*at most 65,535"):
        plan_forward(dataclasses.replace(shape, streams=65_536), preset("h100"))


# ---- variants ----


@pytest.mark.parametrize(
    ("dtype", "D", "alignment", "vector"),
    [
        ("bfloat16", 1024, 16, 8),
        ("float16", 1024, 8, 4),
        ("bfloat16", 1024, 4, 2),
        ("bfloat16", 1024, 2, 1),
        ("bfloat16", 100, 16, 4),
        ("bfloat16", 30, 16, 2),
        ("bfloat16", 33, 16, 1),
        ("float32", 1024, 16, 4),
        ("float32", 1024, 8, 2),
        ("float32", 1024, 2, 1),
        ("float32", 30, 16, 2),
        ("float32", 7, 16, 1),
    ],
)
def test_a_load_divides_the_row_and_its_alignment(dtype: str, D: int, alignment: int, vector: int) -> None:
    shape = dataclasses.replace(
        SMALL, head_dim=D, bank_dtype=dtype, gradient_bank_dtype=dtype, alignment=alignment
    )
    assert defines(shape, "gather")["VECTOR"] == str(vector)
    whole = vector if vector * dtype_bytes(dtype) == 16 else 1  # whole words or single values
    assert defines(shape, "decay_write")["VECTOR"] == str(whole)
    assert defines(dataclasses.replace(shape, snapshot="int4"), "keep_rows")["VECTOR"] == str(whole)
    assert D % vector == 0
    assert max(alignment, dtype_bytes(dtype)) % (vector * dtype_bytes(dtype)) == 0


@pytest.mark.parametrize(
    ("dtype", "D", "groups"),
    [
        ("bfloat16", 1, 32),
        ("bfloat16", 128, 32),
        ("bfloat16", 129, 16),
        ("bfloat16", 256, 16),
        ("bfloat16", 257, 8),
        ("bfloat16", 512, 8),
        ("bfloat16", 513, 4),
        ("bfloat16", 16384, 4),
        ("float32", 64, 32),
        ("float32", 65, 16),
        ("float32", 512, 4),
    ],
)
def test_rows_side_by_side_follow_the_width_and_dtype_alone(dtype: str, D: int, groups: int) -> None:
    """They are part of the order of sums: nothing but D and the dtype may choose them."""
    shape = dataclasses.replace(SMALL, head_dim=D, bank_dtype=dtype, gradient_bank_dtype=dtype)
    others: list[dict[str, object]] = [{"alignment": alignment} for alignment in (2, 4, 8, 16)]
    others += [{"streams": 64}, {"tokens": 1}, {"writes": 256}, {"slots": 7}, {"index_dtype": "int32"}]
    others += [{"training": False}, {"chunk": 128}]
    for change in others:
        for device in PRESETS.values():
            chosen = launch(plan_forward(dataclasses.replace(shape, **change), device), "gather")
            assert dict(chosen.kernel.defines)["GROUPS"] == str(groups)
            assert chosen.block[1] == groups


def test_rows_side_by_side_leave_a_warp_whole() -> None:
    for D in (1, 2, 3, 8, 16, 100, 1000, 16384):
        gather = launch(plan_forward(dataclasses.replace(SMALL, head_dim=D), preset("h100")), "gather")
        assert gather.threads % 32 == 0
        assert gather.threads <= 512


@pytest.mark.parametrize(
    ("sm_count", "columns"), [(1, 64), (42, 64), (43, 32), (85, 32), (86, 16), (500, 16)]
)
def test_the_products_take_the_widest_blocks_that_give_three_sms_in_four_work(
    sm_count: int, columns: int
) -> None:
    """2 streams of 1,024 columns: 32 blocks of 64 columns, 64 of 32."""
    device = dataclasses.replace(preset("h100"), sm_count=sm_count)
    assert defines(FLAGSHIP, "dual_matmul", device)["COLUMNS"] == str(columns)
    du_update = launch(plan_backward(FLAGSHIP, device, "stepwise"), "du_update")
    assert dict(du_update.kernel.defines)["COLUMNS"] == str(columns)


def test_the_products_take_narrow_blocks_where_wide_ones_do_not_fit() -> None:
    shape = dataclasses.replace(FLAGSHIP, streams=64, chunk=256)
    for device, columns in (("h100", 64), ("rtx4090", 16)):
        wide, chosen = product_bytes(256, 64, True), product_bytes(256, columns, True)
        assert (wide <= preset(device).shared_memory_per_block) is (columns == 64)
        planned = launch(plan_forward(shape, preset(device)), "dual_matmul")
        assert dict(planned.kernel.defines)["COLUMNS"] == str(columns)
        assert planned.shared_memory == chosen


@pytest.mark.parametrize("dtype", BANK_DTYPES)
@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_snapshot_variants(dtype: str, snapshot: str) -> None:
    code = {"none": "1", "bf16": "1" if dtype == "bfloat16" else "2", "fp8": "3", "int4": "4"}[snapshot]
    quantized = snapshot in ("fp8", "int4")
    shape = dataclasses.replace(SMALL, bank_dtype=dtype, gradient_bank_dtype=dtype, snapshot=snapshot)
    for training in (True, False):
        one = dataclasses.replace(shape, training=training)
        kept = code if training and not quantized else "0"
        assert defines(one, "decay_write")["SNAPSHOT"] == kept
        assert defines(one, "dual_matmul")["SAVE"] == str(int(training))
        names = [call.name for call in plan_forward(one, preset("h100")).step]
        assert ("keep_rows" in names) is (training and quantized)
        if training and quantized:
            assert defines(one, "keep_rows")["SNAPSHOT"] == code


@pytest.mark.parametrize(
    ("device", "dtype", "C", "D", "lanes"),
    [
        ("h100", "bfloat16", 64, 64, 8),
        ("h100", "bfloat16", 64, 65, 16),
        ("h100", "float32", 64, 32, 8),
        ("h100", "float32", 64, 33, 16),
        ("h100", "bfloat16", 256, 16384, 16),  # 143,360 bytes
        ("a100", "bfloat16", 256, 1024, 16),
        ("rtx4090", "bfloat16", 174, 1024, 16),  # 89,088 + 12,288 = 101,376
        ("rtx4090", "bfloat16", 175, 1024, 8),
        ("rtx4090", "float32", 256, 1024, 16),  # 65,536
    ],
)
def test_a_slice_of_the_decay_and_write_is_16_words_where_its_delta_fits(
    device: str, dtype: str, C: int, D: int, lanes: int
) -> None:
    shape = WriteReadShape(2, 1024, C, 8, 8, D, 4096, bank_dtype=dtype)
    planned = launch(plan_forward(shape, preset(device)), "decay_write")
    assert dict(planned.kernel.defines)["LANES"] == str(lanes)
    rows = 2 if dict(planned.kernel.defines)["VECTOR"] == "1" else 8
    slots = 2 * 16 * (32 // lanes) * rows  # two units of 16 warps
    assert planned.shared_memory == 4 * C * lanes * (8 if dtype == "bfloat16" else 4) + 24 * slots


def wide_grid(sm_count: int) -> list[WriteReadShape]:
    """Shapes that differ in all that a forward plan chooses by."""
    widths = (1, 3, 17, 32, 33, 64, 65, 66, 100, 129, 256, 257, 512, 513, 1000, 1025, 2052, 4098, 16384)
    shapes = []
    for dtype, D, alignment in product(BANK_DTYPES, widths, (2, 4, 8, 16)):
        base = WriteReadShape(1, 300, 16, 8, 8, D, 64, bank_dtype=dtype, alignment=alignment)
        shapes += [dataclasses.replace(base, snapshot=snapshot) for snapshot in SNAPSHOTS]
        shapes += [dataclasses.replace(base, training=False, index_dtype=index) for index in INDEX_DTYPES]
    for index, dtype, C, slots in product(INDEX_DTYPES, BANK_DTYPES, (16, 180), (64, 2**30)):
        shapes.append(WriteReadShape(1, 300, C, 64, 64, 64, slots, bank_dtype=dtype, index_dtype=index))
    # One block, half a block and a block an SM of the products' widest, above and below the trigger's chunk.
    streams = (1, sm_count // 2, sm_count)
    for dtype, training, P, C in product(BANK_DTYPES, (False, True), streams, (16, 80)):
        shapes.append(WriteReadShape(P, 300, C, 8, 8, 64, 64, bank_dtype=dtype, training=training))
    return shapes


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "sm_86"])  # no preset has it
def test_the_table_lists_what_plans_choose_and_nothing_else(target: str) -> None:
    devices = [device for device in PRESETS.values() if device.arch == target]
    chosen = {
        one.kernel
        for device in devices
        for shape in wide_grid(device.sm_count)
        for one in plan_forward(shape, device).kernels()
    }
    listed = {spec for spec in variants(target) if set(spec.entries) & set(NAMES)}
    assert chosen == listed


def test_the_table_of_sm_86_lists_what_that_of_sm_80_does() -> None:
    def specs(target: str) -> set[KernelSpec]:
        return set(variants(target))

    assert specs("sm_86") == specs("sm_80")


# ---- working memory ----


def test_what_a_call_without_gradients_needs_stops_growing_with_its_tokens() -> None:
    for shape in (FLAGSHIP, WRITE_READ_CASES["batch"], WRITE_READ_CASES["many_streams"]):
        for device in PRESETS.values():
            sizes: list[int] = []
            for tokens in (2**12, 2**16, 2**17, 2**18, 2**22):
                plan = plan_forward(dataclasses.replace(shape, tokens=tokens, training=False), device)
                assert not any(buffer.kept for buffer in plan.buffers)
                sizes.append(sum(buffer.bytes for buffer in plan.buffers))
            assert sizes[0] <= sizes[1]
            assert len(set(sizes[1:])) == 1


def test_a_slab_is_the_budget_or_a_chunk_for_every_sm() -> None:
    def slab(shape: WriteReadShape) -> tuple[int, int]:
        """Chunks of a slab, and what they take of Phase 1's results."""
        plan = plan_forward(shape, preset("h100"))
        step_buffers = ("residual", "inter", "delta", "sort_scratch")
        size = sum(buffer.bytes for buffer in plan.buffers if buffer.name not in step_buffers)
        return plan.slab_steps * shape.streams, size

    long = dataclasses.replace(FLAGSHIP, tokens=2**20, training=False)
    chunks, size = slab(long)
    one_step = size // chunks * long.streams
    assert chunks > 132
    assert 2**27 - one_step <= size < 2**27 + one_step
    large = WriteReadShape(2, 2**20, 256, 256, 256, 1024, 65536, training=False)
    chunks, size = slab(large)
    assert chunks == 132
    assert size > 2**27
    short = dataclasses.replace(long, tokens=65)
    assert slab(short)[0] == 2 * 2


def test_a_training_call_is_one_slab_and_keeps_what_the_backward_reads() -> None:
    plan = plan_forward(FLAGSHIP, preset("h100"))
    assert (plan.slab_steps, plan.slabs) == (512, 1)
    chunks, entries = 1024, 1024 * 64 * 64
    slots = min(64 * 64, 65536)
    by_hand = {
        "strength": 4 * chunks * 64,
        "write_entries": 16 * entries,
        "write_terms": 16 * entries,
        "write_weight": 4 * entries,
        "slots": 16 * chunks * slots,
        "slot_count": 4 * chunks,
        "slot_reads": 8 * chunks * slots,
        "read_entries": 16 * entries,
        "read_terms": 16 * entries,
        "read_slots": 16 * chunks * slots,
        "read_slot_count": 4 * chunks,
        "x": 4 * chunks * 64 * 64,
        "qx": 4 * chunks * 64 * 64,
        "err": 4 * chunks * 64 * 1024,
        "snapshot": 2 * chunks * slots * 1024,
    }
    assert {buffer.name: buffer.bytes for buffer in plan.buffers if buffer.kept} == by_hand


@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_what_a_call_keeps_is_the_same_on_every_gpu_and_in_both_schedules(snapshot: str) -> None:
    shape = dataclasses.replace(SMALL, snapshot=snapshot)
    for device in PRESETS.values():
        for schedule in (None, "stepwise"):
            plan = forward.plan_forward(shape, device, schedule)
            assert tuple(buffer for buffer in plan.buffers if buffer.kept) == kept_buffers(shape)
    assert kept_buffers(dataclasses.replace(shape, training=False)) == ()


def test_what_a_backward_reads_is_kept_or_the_callers() -> None:
    """Or made by the backward itself."""
    for snapshot in SNAPSHOTS:
        shape = dataclasses.replace(SMALL, snapshot=snapshot)
        plan = plan_backward(shape, preset("h100"), "stepwise")
        own = {buffer.name for buffer in plan.buffers}
        given = {"k_idx", "lengths", "cu_seqlens", "memory", "gradient_bank", "grad_readings"}
        given |= {"given_log_k", "given_log_q", "given_rex", "gate_gradients"}  # null in calls of the op
        given |= set() if snapshot in ("fp8", "int4") else {"snapshot_scale"}
        results = {"grad_v", "grad_beta", "grad_k_val", "grad_q_val", "grad_g"}
        kept = {buffer.name for buffer in kept_buffers(shape)}
        assert plan.pointer_names == own | given | results | kept


@pytest.mark.parametrize(
    ("snapshot", "dtype", "row", "scale"),
    [
        ("none", "float32", 404, 0),
        ("bf16", "float32", 202, 0),
        ("fp8", "float32", 101, 4),
        ("int4", "bfloat16", 51, 4),
    ],
)
def test_snapshot_buffers(snapshot: str, dtype: str, row: int, scale: int) -> None:
    shape = WriteReadShape(3, 100, 64, 8, 8, 101, 200, bank_dtype=dtype, snapshot=snapshot)
    sizes = {buffer.name: buffer.bytes for buffer in plan_forward(shape, preset("h100")).buffers}
    assert sizes["snapshot"] == 2 * 3 * 200 * row
    assert sizes.get("snapshot_scale", 0) == 2 * 3 * 200 * scale
