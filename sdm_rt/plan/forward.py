"""The plan of the forward: Phase 1 for a slab of steps, then its steps one by one or in walks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from sdm_rt.plan.buffer import Arena, Buffer, total_bytes
from sdm_rt.plan.device import DeviceModel, require_supported
from sdm_rt.plan.launch import Argument, Dim3, Launch, int32s, pdl_defines, pointers
from sdm_rt.plan.limits import require_limits
from sdm_rt.plan.persistent import (
    IN_SHARED_MEMORY,
    choose_forward_schedule,
    persistent_constants,
    steps_of_walk,
)
from sdm_rt.plan.phase1 import (
    RECORD_BYTES,
    capacity,
    phase1_buffers,
    plan_phase1,
    slab_steps,
    sort_passes,
)
from sdm_rt.plan.shapes import WriteReadShape, dtype_bytes, kernel_index, kernel_type
from sdm_rt.plan.step_plan import StepPlan
from sdm_rt.plan.tiling import ceil_div
from sdm_rt.runtime.kernel import KernelSpec

__all__ = [
    "PRODUCT_COLUMNS",
    "PRODUCT_TILE",
    "TRIGGER_MAX_CHUNK",
    "WRITE_LANES",
    "decay_write_kernel",
    "dual_matmul_kernel",
    "forward_constants",
    "gather_kernel",
    "keep_rows_kernel",
    "kept_arena",
    "kept_buffers",
    "plan_forward",
    "product_columns",
    "product_threads",
    "snapshot_code",
    "vector_values",
]

TRIGGER_MAX_CHUNK = 64  # up to here the dual matmul is short enough for its dependent to start early
WORD_BYTES = 16
GATHER_THREADS = 512
GATHER_ROW_THREADS = 128  # most threads across a row
GATHER_GROUPS = 32  # most rows side by side
PRODUCT_TILE = 64
PRODUCT_COLUMNS = (64, 32, 16)  # of a block of the products
WRITE_THREADS = 512
WRITE_LANES = (16, 8)  # words of a column slice; the wider where its delta fits shared memory
WRITE_ROWS = {True: 8, False: 2}  # slots of a team in a unit: rows in whole words, rows in single values
WRITE_SLOT_BYTES = 24  # of a slot under way: its record, the weight and token of its first term
KEEP_WARPS = 8
SNAPSHOT_CODES = {"none": "1", "bf16": "2", "fp8": "3", "int4": "4"}

STEPS = (
    Argument("step", "int32", step_dependent=True),
    Argument("slab_step", "int32", step_dependent=True),
)


def vector_values(shape: WriteReadShape) -> int:
    """Return the bank values of one load: the most, up to 16 bytes, that divide the row and its alignment."""
    values = max(1, shape.alignment // dtype_bytes(shape.bank_dtype))
    while shape.head_dim % values:
        values //= 2
    return values


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def gather_block(shape: WriteReadShape) -> Dim3:
    """Return (threads across a row, rows side by side, 1).

    The rows side by side fix the order of sums, so they follow D and the bank's dtype, never the alignment.
    """
    words = ceil_div(shape.head_dim, WORD_BYTES // dtype_bytes(shape.bank_dtype))
    groups = min(GATHER_GROUPS, GATHER_THREADS // min(_power_of_two(words), GATHER_ROW_THREADS))
    threads = _power_of_two(ceil_div(shape.head_dim, vector_values(shape)))
    return min(threads, GATHER_THREADS // groups), groups, 1


def gather_kernel(shape: WriteReadShape) -> KernelSpec:
    """Return the translation unit of the gather."""
    return KernelSpec(
        "gather.cu",
        ("gather",),
        (
            ("BANK", kernel_type(shape.bank_dtype)),
            ("GROUPS", str(gather_block(shape)[1])),
            ("INDEX", kernel_index(shape.index_dtype)),
            ("VECTOR", str(vector_values(shape))),
        ),
    )


def _gather(shape: WriteReadShape) -> Launch:
    W, R, D = shape.writes, shape.reads, shape.head_dim
    vector, block = vector_values(shape), gather_block(shape)
    columns = block[0] * vector
    floor = (shape.write_rows + shape.read_rows) * shape.row_bytes
    small = shape.step_tokens * ((W + R) * (dtype_bytes(shape.index_dtype) + 4) + shape.row_bytes + 8 * D)
    reads = ("memory", "k_idx", "q_idx", "v", "k_eff", "q_w", "lengths", "cu_seqlens")
    return Launch(
        name="gather",
        kernel=gather_kernel(shape),
        entry="gather",
        grid=(shape.chunk, shape.streams, 2 * ceil_div(D, columns)),
        block=block,
        arguments=(
            *pointers(*reads, "residual", "inter"),
            Argument("row_stride", "int64"),
            *STEPS,
            *int32s("P", "T", "C", "W", "R", "S", "D", "shared_bank", "wide"),
        ),
        reads=reads,
        writes=("residual", "inter"),
        bytes_moved=floor + small,
        floor_bytes=floor,
        shared_memory=12 * max(W, R) + 4 * block[1] * columns,
        note=f"one token's write or read rows and {min(columns, D)} columns a block, "
        f"{block[1]} rows side by side",
    )


def product_columns(shape: WriteReadShape, device: DeviceModel, need: Callable[[int], int]) -> int:
    """Return the columns of a block of the products, which change no bit.

    The most whose blocks, of ``need(columns)`` bytes of shared memory, fit and give three SMs in four work.
    """
    fitting = [columns for columns in PRODUCT_COLUMNS if need(columns) <= device.shared_memory_per_block]
    busy = (
        columns
        for columns in fitting
        if 4 * shape.streams * ceil_div(shape.head_dim, columns) >= 3 * device.sm_count
    )
    return next(busy, fitting[-1])


def product_threads(columns: int) -> int:
    """Return the threads of a block of the products: pairs of rows by two columns, by four in wide blocks."""
    return PRODUCT_TILE // 2 * columns // (4 if columns > 32 else 2)


def dual_matmul_kernel(shape: WriteReadShape, columns: int, triggers: bool) -> KernelSpec:
    """Return the translation unit of the dual matmul for blocks of ``columns`` columns."""
    return KernelSpec(
        "dual_matmul.cu",
        ("dual_matmul",),
        (
            ("BANK", kernel_type(shape.bank_dtype)),
            ("COLUMNS", str(columns)),
            ("SAVE", str(int(shape.training))),
            *pdl_defines(waits=False, triggers=triggers),
        ),
    )


def _dual_matmul(shape: WriteReadShape, triggers: bool, device: DeviceModel) -> Launch:
    C, D = shape.chunk, shape.head_dim
    strengths = ceil_div(C, 4) * 4
    side = min(PRODUCT_TILE, strengths)
    save = int(shape.training)

    def need(columns: int) -> int:
        return 4 * (strengths + (1 + save) * C * columns + (2 + save) * side * (side + 4) - 4)

    columns = product_columns(shape, device, need)
    reads = ("residual", "inter", "x", "qx", "a", "strength", "lengths", "cu_seqlens")
    triangles = 4 * (2 + save) * shape.streams * C * (C + 1) // 2
    moved = triangles + shape.step_tokens * (4 * (3 + save) * D + shape.row_bytes + 4)
    return Launch(
        name="dual_matmul",
        kernel=dual_matmul_kernel(shape, columns, triggers),
        entry="dual_matmul",
        grid=(shape.streams, ceil_div(D, columns), 1),
        block=(product_threads(columns), 1, 1),
        arguments=(
            *pointers(*reads, "delta", "readings", "err"),
            *STEPS,
            *int32s("P", "T", "C", "D", "wide"),
        ),
        reads=reads,
        writes=("delta", "readings", "err"),
        bytes_moved=moved,
        floor_bytes=0,
        shared_memory=need(columns),
        triggers=triggers,
        note=f"{min(columns, D)} columns of a chunk a block, IEEE float32",
    )


def snapshot_code(shape: WriteReadShape) -> str:
    """Return how the kernels number the format of the rows that a call keeps (kernels_cu/decay_write.cu)."""
    if not shape.training:
        return "0"
    # "bf16" keeps a bfloat16 bank's rows as "none" does.
    kept = "none" if shape.snapshot == "bf16" and shape.bank_dtype == "bfloat16" else shape.snapshot
    return SNAPSHOT_CODES[kept]


def _word_or_value(shape: WriteReadShape) -> int:
    """Return the bank values of one load of kernels that take a whole word, or single values."""
    word = WORD_BYTES // dtype_bytes(shape.bank_dtype)
    return word if vector_values(shape) == word else 1


def keep_rows_kernel(shape: WriteReadShape) -> KernelSpec:
    """Return the translation unit that keeps rows as fp8 or int4."""
    return KernelSpec(
        "keep_rows.cu",
        ("keep_rows",),
        (
            ("BANK", kernel_type(shape.bank_dtype)),
            ("SNAPSHOT", snapshot_code(shape)),
            ("VECTOR", str(_word_or_value(shape))),
        ),
    )


def _keep_rows(shape: WriteReadShape, walk_steps: int | None = None) -> Launch:
    """Return the launch that keeps the rows of a step, or the rows that a walk has put aside."""
    steps = walk_steps or 1
    rows = steps * shape.write_rows
    kept = rows * shape.snapshot_row_bytes
    records = RECORD_BYTES * rows if walk_steps is None else 0
    return Launch(
        name="keep_rows",
        kernel=keep_rows_kernel(shape),
        entry="keep_rows",
        grid=(ceil_div(capacity(shape), KEEP_WARPS), steps * shape.streams, 1),
        block=(32 * KEEP_WARPS, 1, 1),
        arguments=(
            *pointers("memory", "walk_rows", "slots", "slot_count", "snapshot", "snapshot_scale"),
            Argument("row_stride", "int64"),
            *STEPS,
            *int32s("slab_chunks", "P", "T", "C", "W", "S", "D", "shared_bank"),
        ),
        reads=("memory", "slots", "slot_count") if walk_steps is None else ("walk_rows", "slot_count"),
        writes=("snapshot", "snapshot_scale"),
        bytes_moved=rows * shape.row_bytes + records + kept,
        floor_bytes=kept,
        note="one warp a slot: a row has one scale",
    )


def write_lanes(shape: WriteReadShape, device: DeviceModel) -> int:
    """Return the words of a column slice of the decay-and-write, whose delta shared memory holds."""
    wide, narrow = WRITE_LANES
    words = ceil_div(shape.head_dim, WORD_BYTES // dtype_bytes(shape.bank_dtype))
    fits = write_shared_memory(shape, wide) <= device.shared_memory_per_block
    return wide if words > narrow and fits else narrow


def write_unit(shape: WriteReadShape, lanes: int) -> int:
    """Return the slots that a warp of the decay-and-write has in a unit."""
    return 32 // lanes * WRITE_ROWS[_word_or_value(shape) > 1]


def write_shared_memory(shape: WriteReadShape, lanes: int) -> int:
    """Return the bytes of delta [C, columns of a slice] in float32 and of the slots of two units a warp."""
    delta = 4 * shape.chunk * lanes * WORD_BYTES // dtype_bytes(shape.bank_dtype)
    return delta + WRITE_SLOT_BYTES * 2 * WRITE_THREADS // 32 * write_unit(shape, lanes)


def decay_write_kernel(shape: WriteReadShape, lanes: int, pdl: bool) -> KernelSpec:
    """Return the translation unit of the decay-and-write for slices of ``lanes`` words."""
    return KernelSpec(
        "decay_write.cu",
        ("decay_write",),
        (
            ("BANK", kernel_type(shape.bank_dtype)),
            ("LANES", str(lanes)),
            *pdl_defines(waits=pdl),
            ("SNAPSHOT", "0" if shape.quantizes else snapshot_code(shape)),
            ("VECTOR", str(_word_or_value(shape))),
        ),
    )


def _decay_write(shape: WriteReadShape, device: DeviceModel) -> Launch:
    lanes = write_lanes(shape, device)
    slots = capacity(shape)
    slices = ceil_div(shape.row_bytes, lanes * WORD_BYTES)
    floor = shape.write_rows * shape.row_bytes
    kept = shape.write_rows * shape.snapshot_row_bytes if shape.training and not shape.quantizes else 0
    small = shape.write_rows * RECORD_BYTES + shape.step_tokens * (
        RECORD_BYTES * shape.writes + 4 * shape.head_dim
    )
    reads = ("memory", "delta", "slots", "slot_count", "write_terms")
    launch = Launch(
        name="decay_write",
        kernel=decay_write_kernel(shape, lanes, device.pdl),
        entry="decay_write",
        grid=(1, shape.streams, slices),
        block=(WRITE_THREADS, 1, 1),
        arguments=(
            *pointers(*reads, "snapshot"),
            Argument("row_stride", "int64"),
            *STEPS,
            *int32s("P", "C", "W", "S", "D", "shared_bank"),
        ),
        reads=reads,
        writes=("memory", "snapshot"),
        bytes_moved=2 * floor + kept + small,
        floor_bytes=floor + kept,
        shared_memory=write_shared_memory(shape, lanes),
        pdl=device.pdl,
    )
    # One wave of blocks: each fetches delta once. A block has no fewer than two slots a team.
    share = launch.occupancy(device).wave(device) // (shape.streams * slices)
    most = ceil_div(slots, 2 * WRITE_THREADS // lanes)
    splits = max(1, min(share, most))
    width = min(lanes * WORD_BYTES, shape.row_bytes)
    return replace(
        launch,
        grid=(splits, shape.streams, slices),
        note=f"{width} bytes of every row a block, {splits} blocks a slice"
        + ("; rows loaded before the wait" if device.pdl else ""),
    )


def _buffers(shape: WriteReadShape) -> tuple[Buffer, ...]:
    P, C, D, chunks = shape.streams, shape.chunk, shape.head_dim, shape.chunks * shape.streams
    rows = tuple(Buffer(name, "float32", (P, C, D)) for name in ("residual", "inter", "delta"))
    if not shape.training:
        return rows
    dtype, columns = {
        "none": (shape.bank_dtype, D),
        "bf16": ("bfloat16", D),
        "fp8": ("uint8", D),
        "int4": ("uint8", ceil_div(D, 2)),
    }[shape.snapshot]
    slots = capacity(shape)
    scale = Buffer("snapshot_scale", "float32", (chunks, slots), kept=True)
    return (
        *rows,
        Buffer("err", "float32", (chunks, C, D), kept=True),
        Buffer("snapshot", dtype, (chunks, slots, columns), kept=True),
        *((scale,) if dtype == "uint8" else ()),
    )


@lru_cache(maxsize=256)
def kept_arena(shape: WriteReadShape) -> Arena:
    """Return how what a training call keeps for its backward lies in one block; the same on every GPU."""
    return Arena.of(kept_buffers(shape))


def kept_buffers(shape: WriteReadShape) -> tuple[Buffer, ...]:
    """Return what a training call keeps for its backward; the same on every GPU."""
    phase1 = phase1_buffers(shape, shape.chunks * shape.streams)
    return tuple(buffer for buffer in (*phase1, *_buffers(shape)) if buffer.kept)


def plan_forward(shape: WriteReadShape, device: DeviceModel, schedule: str | None = None) -> StepPlan:
    """Plan the forward (math.md "The chunked form"): Phase 1 for each slab of steps, then its steps.

    The steps are three launches each, four with a quantized snapshot; or a walk of many steps is one launch,
    two with a quantized snapshot (`sdm_rt.plan.persistent`).

    Where the GPU has PDL, the decay-and-write follows the dual matmul as a programmatic dependent; the dual
    matmul triggers it early only at chunk sizes up to 64 and where the decay-and-write is one wave of blocks.

    Parameters
    ----------
    shape : WriteReadShape
        Shapes and dtypes.
    device : DeviceModel
        The GPU.
    schedule : {"stepwise", "persistent"}, optional
        Forces a schedule; both give the same bits.

    Returns
    -------
    StepPlan
        One step per chunk, in ascending order; no step where there are no tokens or no streams.

    Raises
    ------
    UnsupportedConfigurationError
        For more streams, tokens or chunks than the kernels can number, and for a forced schedule that
        cannot run.
    RuntimeError
        For a GPU below compute capability 8.0.
    """
    require_supported(device)
    require_limits(shape)
    if shape.streams == 0 or shape.tokens == 0:
        return StepPlan("forward", device, shape, steps=0, first_step=(), step=())
    decay_write = _decay_write(shape, device)
    wave = decay_write.occupancy(device).wave(device)
    triggers = device.pdl and shape.chunk <= TRIGGER_MAX_CHUNK and decay_write.blocks <= wave
    slab = slab_steps(shape, device)
    phase1 = plan_phase1(shape, slab, device)
    buffers = (*phase1.buffers, *_buffers(shape))
    walk_steps = steps_of_walk(shape, slab)
    step: tuple[Launch, ...] = (_gather(shape), _dual_matmul(shape, triggers, device), decay_write)
    persistent, note = choose_forward_schedule(shape, device, step, walk_steps, schedule)
    if persistent is None:
        walk_steps = 1
        notes = [f"decay_write: {decay_write.blocks} blocks, {wave} fit the GPU at once"]
        step = (_keep_rows(shape), *step) if shape.quantizes else step
    else:
        notes, step = [], (persistent,)
        buffers = tuple(buffer for buffer in buffers if buffer.name not in IN_SHARED_MEMORY)
        if shape.quantizes:
            step = (persistent, _keep_rows(shape, walk_steps))
            rows = (walk_steps * shape.streams, capacity(shape), shape.head_dim)
            buffers = (*buffers, Buffer("walk_rows", shape.bank_dtype, rows))
    if note:
        notes.append(note)
    kept, scratch = (total_bytes(buffers, kept=kept) for kept in (True, False))
    memory = f"working memory {scratch / 2**20:,.1f} MiB"
    notes.append(f"{memory}, kept for the backward {kept / 2**20:,.1f} MiB" if kept else memory)
    if shape.training:
        most = shape.chunks * shape.write_rows
        size = most * shape.snapshot_row_bytes
        notes.append(f"snapshot: room for {most:,} rows, {size / 2**20:,.1f} MiB")
    return StepPlan(
        "forward",
        device,
        shape,
        steps=shape.chunks,
        first_step=step,
        step=step,
        prologue=phase1.launches,
        slab_steps=slab,
        schedule="stepwise" if persistent is None else "persistent",
        walk_steps=walk_steps,
        buffers=buffers,
        notes=tuple(notes),
    )


def forward_constants(plan: StepPlan) -> dict[str, int]:
    """Return the numbers among the arguments of a plan of the forward or of Phase 1, fixed by its shapes."""
    shape = plan.shape
    assert isinstance(shape, WriteReadShape)
    passes, digit_bits = sort_passes(shape.slots)
    numbers = {
        "P": shape.streams,
        "T": shape.tokens,
        "C": shape.chunk,
        "W": shape.writes,
        "R": shape.reads,
        "D": shape.head_dim,
        "S": shape.slots,
        "gates": shape.writes if shape.gates_per_write else 1,
        "slab_chunks": plan.slab_steps * shape.streams,
        "walk_steps": plan.walk_steps,
        "passes": passes,
        "digit_bits": digit_bits,
    }
    if plan.schedule == "persistent":
        walk = plan.step[0]
        assert isinstance(walk, Launch)
        numbers |= persistent_constants(shape, plan.device, walk, plan.walk_steps) | {
            "groups": gather_block(shape)[1]
        }
    taken = {argument.name for launch in plan.kernels() for argument in launch.arguments}
    return {name: number for name, number in numbers.items() if name in taken}
