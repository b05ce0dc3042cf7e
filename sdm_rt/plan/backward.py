"""The backward plan: GWR, d_u update, Phase A, GDS, last chunk first; then Phase 1 of all chunks."""

from __future__ import annotations

from dataclasses import replace

from sdm_rt.plan.buffer import Buffer, total_bytes
from sdm_rt.plan.device import DeviceModel, require_supported
from sdm_rt.plan.forward import (
    PRODUCT_TILE,
    product_columns,
    product_threads,
    snapshot_code,
    vector_values,
)
from sdm_rt.plan.kernel_resources import kernel_resources
from sdm_rt.plan.launch import Argument, Launch, int32s, pdl_defines, pointers
from sdm_rt.plan.limits import require_limits
from sdm_rt.plan.persistent_backward import choose_backward_schedule, persistent_backward_constants
from sdm_rt.plan.phase1 import RECORD_BYTES, capacity, read_capacity
from sdm_rt.plan.phase1_backward import (
    entries_a_thread,
    plan_phase1_backward_launches,
    stages_outputs,
)
from sdm_rt.plan.shapes import WriteReadShape, dtype_bytes, kernel_type
from sdm_rt.plan.shared_memory import one_block_per_sm
from sdm_rt.plan.step_plan import StepPlan
from sdm_rt.plan.tiling import ceil_div
from sdm_rt.runtime.kernel import KernelSpec

__all__ = [
    "backward_constants",
    "du_update_kernel",
    "gds_kernel",
    "gram_backward_kernel",
    "gwr_kernel",
    "phase_a_kernel",
    "plan_backward",
]

WORD_BYTES = 16
GWR_GROUPS = 16  # of a token's written rows, each with a sum of its own
GWR_WARPS = (8, 16)  # of a block, the first where a lane holds one word of a row
ROW_WARPS = 8  # of a block of Phase A and of GDS
ROW_LOADS = 4  # most words of a row that a lane holds
MIXED_ROW_LOADS = 2  # where gradient rows are wider than the bank's
GRAM_THREADS = 64
GRAM_TILE = 32

STEP = Argument("step", "int32", step_dependent=True)
FIRST_STREAM = "first_stream"


def _dtypes(shape: WriteReadShape) -> tuple[tuple[str, str], ...]:
    return ("BANK", kernel_type(shape.bank_dtype)), ("GRADIENT", kernel_type(shape.gradient_bank_dtype))


def row_word(shape: WriteReadShape) -> int:
    """Return the columns of a word: those that 16 bytes of the bank's format hold (kernels_cu/rows.cuh)."""
    return WORD_BYTES // dtype_bytes(shape.bank_dtype)


def row_loads(shape: WriteReadShape) -> int:
    """Return the words of a row that a lane holds at once, a power of two.

    They fix the order of the dots over columns, so they follow D and the formats, never the alignment.
    """
    most = ROW_LOADS if shape.gradient_bank_dtype == shape.bank_dtype else MIXED_ROW_LOADS
    words = ceil_div(shape.head_dim, 32 * row_word(shape))
    return min(most, 1 << (words - 1).bit_length())


def row_lanes(shape: WriteReadShape) -> int:
    """Return the lanes of a team that owns a slot in Phase A and GDS: half a warp for at most 16 words."""
    return 16 if shape.head_dim <= 16 * row_word(shape) else 32


def _one_wave(launch: Launch, shape: WriteReadShape, device: DeviceModel, slots: int) -> Launch:
    """Return a launch of Phase A or GDS with the blocks that the GPU holds at once, shared by the streams.

    A stream has one block at least, and no more than give each of its ``slots`` a team.
    """
    teams = ROW_WARPS * 32 // row_lanes(shape)
    streams = launch.grid[1]
    share = launch.occupancy(device).wave(device) // streams
    blocks = max(1, min(share, ceil_div(slots, teams)))
    turns = ceil_div(slots, blocks * teams)
    owner = "a warp" if row_lanes(shape) == 32 else "half a warp"
    note = f"{blocks} blocks a stream, at most {turns} slots {owner}; {launch.note}"
    return replace(launch, grid=(blocks, streams, 1), note=note)


def _columns_of_a_load(shape: WriteReadShape, most: int) -> int:
    """Return the columns of one load of a row: a word, or 1 where rows are aligned to fewer bytes."""
    word = row_word(shape)
    return word if most >= word else 1


def _own_vector(shape: WriteReadShape) -> int:
    """Return the columns of one load of rows that this package allocates: they divide D."""
    return _columns_of_a_load(shape, shape.head_dim & -shape.head_dim)


def _bank_vector(shape: WriteReadShape) -> int:
    """Return the columns of one load where rows of the caller's bank are among the loaded."""
    return _columns_of_a_load(shape, vector_values(shape))


def gwr_kernel(shape: WriteReadShape, pdl: bool) -> KernelSpec:
    """Return the translation unit of the GWR."""
    return KernelSpec(
        "gwr.cu",
        ("gwr",),
        (
            *_dtypes(shape),
            ("LOADS", str(row_loads(shape))),
            *pdl_defines(waits=pdl, triggers=pdl),
            ("VECTOR", str(_own_vector(shape))),
        ),
    )


def _gwr(shape: WriteReadShape, device: DeviceModel, pdl: bool) -> Launch:
    W, D = shape.writes, shape.head_dim
    slice_columns = 32 * row_word(shape) * row_loads(shape)
    floor = shape.write_rows * shape.gradient_row_bytes
    per_token = W * (dtype_bytes(shape.index_dtype) + 8) + 2 * 4 * D
    reads = ("gradient_bank", "k_idx", "write_weight", "err", "strength", "lengths", "cu_seqlens")
    return Launch(
        name="gwr",
        kernel=gwr_kernel(shape, device.pdl),
        entry="gwr",
        grid=(shape.chunk, shape.streams, 1),
        block=(32 * GWR_WARPS[row_loads(shape) > 1], 1, 1),
        arguments=(
            *pointers(*reads, "gwr", "d_k_pd"),
            STEP,
            *int32s("P", "T", "C", "W", "S", "D", "shared_bank", "wide", "wide_index"),
        ),
        reads=reads,
        writes=("gwr", "d_k_pd"),
        bytes_moved=floor + shape.step_tokens * per_token,
        floor_bytes=floor,
        shared_memory=4 * GWR_GROUPS * slice_columns + 16 * W,
        pdl=pdl,
        triggers=device.pdl,
        note=f"one token's written rows a block, {GWR_GROUPS} rows side by side",
    )


def du_update_kernel(shape: WriteReadShape, columns: int, pdl: bool) -> KernelSpec:
    """Return the translation unit of the d_u update for blocks of ``columns`` columns."""
    return KernelSpec(
        "du_update.cu",
        ("du_update",),
        (
            ("BANK", kernel_type(shape.bank_dtype)),
            ("COLUMNS", str(columns)),
            *pdl_defines(waits=pdl, triggers=pdl),
        ),
    )


def _du_update(shape: WriteReadShape, device: DeviceModel) -> Launch:
    C, D = shape.chunk, shape.head_dim
    side = min(PRODUCT_TILE, ceil_div(C, 4) * 4)

    def need_of(columns: int) -> int:
        return 4 * (2 * C * columns + 2 * side * (side + 4) - 4)

    columns = product_columns(shape, device, need_of)
    kernel = du_update_kernel(shape, columns, device.pdl)
    static = kernel_resources(kernel, "du_update", device).static_shared
    need = need_of(columns)
    shared = one_block_per_sm(need, static, device)
    triangles = 2 * 4 * shape.streams * C * (C + 1) // 2
    reads = ("x", "qx", "strength", "grad_readings", "gwr", "lengths", "cu_seqlens")
    return Launch(
        name="du_update",
        kernel=kernel,
        entry="du_update",
        grid=(shape.streams, ceil_div(D, columns), 1),
        block=(product_threads(columns), 1, 1),
        arguments=(
            *pointers(*reads, "lam", "grad_v"),
            STEP,
            *int32s("P", "T", "C", "D", "wide"),
        ),
        reads=reads,
        writes=("lam", "grad_v"),
        bytes_moved=triangles + shape.step_tokens * (2 * shape.row_bytes + 2 * 4 * D + 4),
        floor_bytes=0,
        shared_memory=shared,
        shared_padding=shared - need,
        pdl=device.pdl,
        triggers=device.pdl,
        note=f"{min(columns, D)} columns of a chunk a block, "
        f"{'padded to ' if shared > need else ''}one block an SM, IEEE float32",
    )


def phase_a_kernel(shape: WriteReadShape, pdl: bool) -> KernelSpec:
    """Return the translation unit of Phase A."""
    return KernelSpec(
        "phase_a.cu",
        ("phase_a",),
        (
            *_dtypes(shape),
            ("LANES", str(row_lanes(shape))),
            ("LOADS", str(row_loads(shape))),
            *pdl_defines(waits=pdl, triggers=pdl),
            ("SNAPSHOT", snapshot_code(shape)),
            ("VECTOR", str(_bank_vector(shape))),
        ),
    )


def _phase_a(shape: WriteReadShape, device: DeviceModel) -> Launch:
    floor = shape.write_rows * (shape.snapshot_row_bytes + shape.gradient_row_bytes + shape.row_bytes)
    small = shape.write_rows * (RECORD_BYTES + 4)
    small += shape.step_tokens * ((RECORD_BYTES + 4) * shape.writes + 4 * shape.head_dim + 4)
    reads = ("gradient_bank", "snapshot", "snapshot_scale", "slots", "slot_count", "write_terms", "lam")
    queries = ("slot_reads", "read_terms", "grad_readings", "lengths", "cu_seqlens")
    dots = ("d_k_eff", "d_q_w")
    launch = Launch(
        name="phase_a",
        kernel=phase_a_kernel(shape, device.pdl),
        entry="phase_a",
        grid=(1, shape.streams, 1),
        block=(32 * ROW_WARPS, 1, 1),
        arguments=(
            *pointers("gradient_bank", "memory", *reads[1:], "strength", *queries, *dots, "d_tot"),
            Argument("row_stride", "int64"),
            STEP,
            *int32s("P", "T", "C", "W", "R", "S", "D", "shared_bank", "wide"),
        ),
        reads=(*reads, "strength", *queries, *dots),
        writes=("gradient_bank", "memory", *dots, "d_tot"),
        bytes_moved=floor + shape.write_rows * shape.gradient_row_bytes + small,
        floor_bytes=floor,
        pdl=device.pdl,
        triggers=device.pdl,
        note=("the first snapshot and gradient rows loaded before the wait; " if device.pdl else "")
        + "slots read too done whole",
    )
    return _one_wave(launch, shape, device, capacity(shape))


def gds_kernel(shape: WriteReadShape, pdl: bool) -> KernelSpec:
    """Return the translation unit of the GDS."""
    return KernelSpec(
        "gds.cu",
        ("gds",),
        (
            *_dtypes(shape),
            ("LANES", str(row_lanes(shape))),
            ("LOADS", str(row_loads(shape))),
            *pdl_defines(waits=pdl, triggers=pdl),
            ("VECTOR", str(_bank_vector(shape))),
        ),
    )


def _gds(shape: WriteReadShape, device: DeviceModel) -> tuple[Launch, ...]:
    """Return the launch for all streams, or one for each where they read rows of one bank."""
    if not shape.shared_bank:
        return (_gds_of(shape, device, shape.streams, FIRST_STREAM),)
    return tuple(_gds_of(shape, device, 1, f"{FIRST_STREAM}_{stream}") for stream in range(shape.streams))


def _gds_of(shape: WriteReadShape, device: DeviceModel, streams: int, first: str) -> Launch:
    rows, tokens = (total // shape.streams * streams for total in (shape.read_rows, shape.step_tokens))
    floor = rows * (shape.row_bytes + 2 * shape.gradient_row_bytes)
    small = rows * RECORD_BYTES + tokens * ((RECORD_BYTES + 4) * shape.reads + shape.row_bytes)
    reads = ("gradient_bank", "memory", "read_slots", "read_slot_count", "read_terms", "grad_readings")
    lengths = ("lengths", "cu_seqlens")
    beside = device.pdl and first in (FIRST_STREAM, f"{FIRST_STREAM}_0")
    launch = Launch(
        name="gds",
        kernel=gds_kernel(shape, device.pdl),
        entry="gds",
        grid=(1, streams, 1),
        block=(32 * ROW_WARPS, 1, 1),
        arguments=(
            *pointers(*reads, *lengths, "d_q_w"),
            Argument("row_stride", "int64"),
            STEP,
            *int32s("P", "T", "C", "R", "S", "D", "shared_bank", "wide", first),
        ),
        reads=(*reads, *lengths, "d_q_w"),
        writes=("gradient_bank", "d_q_w"),
        bytes_moved=floor + small,
        floor_bytes=floor,
        pdl=device.pdl,
        triggers=device.pdl,
        note="rows that the step does not write" + (", beside Phase A" if beside else ""),
    )
    return _one_wave(launch, shape, device, read_capacity(shape))


def gram_backward_kernel(shape: WriteReadShape) -> KernelSpec:
    """Return the translation unit of the gradients of the Gram matrices."""
    return KernelSpec(
        "gram_backward.cu",
        ("gram_backward",),
        (("BANK", kernel_type(shape.bank_dtype)), ("VECTOR", str(min(_own_vector(shape), 4)))),
    )


def _gram_backward(shape: WriteReadShape) -> Launch:
    C, chunks = shape.chunk, shape.chunks * shape.streams
    tiles = ceil_div(C, GRAM_TILE)
    reads = ("lam", "err", "strength", "grad_readings", "lengths", "cu_seqlens")
    moved = chunks * (C * (8 * shape.head_dim + shape.row_bytes + 8) + 2 * 4 * C * C)
    return Launch(
        name="gram_backward",
        kernel=gram_backward_kernel(shape),
        entry="gram_backward",
        grid=(chunks * tiles * (tiles + 1) // 2, 1, 1),
        block=(GRAM_THREADS, 1, 1),
        arguments=(
            *pointers(*reads, "d_a", "d_qk", "grad_beta"),
            *int32s("P", "T", "C", "D", "wide"),
        ),
        reads=reads,
        writes=("d_a", "d_qk", "grad_beta"),
        bytes_moved=moved,
        floor_bytes=moved,
        note=f"{GRAM_TILE} x {GRAM_TILE} tokens a block, IEEE float32",
    )


def _buffers(shape: WriteReadShape) -> tuple[Buffer, ...]:
    P, C, W, R, D = shape.streams, shape.chunk, shape.writes, shape.reads, shape.head_dim
    chunks = shape.chunks * P
    return (
        Buffer("gwr", "float32", (P, C, D)),
        Buffer("lam", "float32", (chunks, C, D)),
        *(Buffer(name, "float32", (chunks, C, W)) for name in ("d_k_pd", "d_k_eff")),
        Buffer("d_q_w", "float32", (chunks, C, R)),
        Buffer("d_tot", "float32", (chunks, capacity(shape))),
        *(Buffer(name, "float32", (chunks, C, C)) for name in ("d_a", "d_qk")),
    )


def plan_backward(shape: WriteReadShape, device: DeviceModel, schedule: str | None = None) -> StepPlan:
    """Plan the backward (math.md "The backward"): the steps, last chunk first; then Phase 1 of all chunks.

    The steps are four launches each, or two launches for all steps of a slab
    (`sdm_rt.plan.persistent_backward`).

    Where the GPU has PDL every launch of the loop is a programmatic dependent of the one before it, except
    the first, and lets its own dependent start early, which then waits (GDS at its end alone, unless another
    stream's is before it); the launches after the loop are plain.

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
        One step per chunk, in descending order; no launch where there are no tokens or no streams.

    Raises
    ------
    RuntimeError
        For a GPU below compute capability 8.0.
    ValueError
        For the shape of a call that saves nothing (``training=False``).
    UnsupportedConfigurationError
        For more streams, tokens or chunks than the kernels can number, and for a forced schedule that
        cannot run.
    """
    require_supported(device)
    if not shape.training:
        raise ValueError("a backward needs what the forward saves: training must be True, got False")
    require_limits(shape)
    if shape.streams == 0 or shape.tokens == 0:
        return StepPlan("backward", device, shape, steps=0, first_step=(), step=(), order="descending")
    rest = (_du_update(shape, device), _phase_a(shape, device), *_gds(shape, device))
    first_step: tuple[Launch, ...] = (_gwr(shape, device, pdl=False), *rest)
    step: tuple[Launch, ...] = (_gwr(shape, device, device.pdl), *rest)
    launches, scratch = plan_phase1_backward_launches(shape, device)
    buffers = (*_buffers(shape), *scratch)
    slabs, note = choose_backward_schedule(shape, device, step, schedule)
    if slabs is not None:
        first_step = step = slabs.launches
        buffers = (*(buffer for buffer in buffers if buffer.name != "gwr"), *slabs.buffers)
    notes = (note,) if note else ()
    return StepPlan(
        "backward",
        device,
        shape,
        steps=shape.chunks,
        first_step=first_step,
        step=step,
        order="descending",
        epilogue=(_gram_backward(shape), *launches),
        slab_steps=slabs.slab_steps if slabs is not None else 0,
        schedule="stepwise" if slabs is None else "persistent",
        walk_steps=slabs.slab_steps if slabs is not None else 1,
        buffers=buffers,
        notes=(*notes, f"working memory {total_bytes(buffers) / 2**20:,.1f} MiB"),
    )


def backward_constants(plan: StepPlan) -> dict[str, int]:
    """Return the numbers among the arguments of a plan of the backward, fixed by its shapes."""
    shape = plan.shape
    assert isinstance(shape, WriteReadShape)
    numbers = {
        "P": shape.streams,
        "T": shape.tokens,
        "C": shape.chunk,
        "W": shape.writes,
        "R": shape.reads,
        "D": shape.head_dim,
        "S": shape.slots,
        "grad_gates": shape.writes if shape.gates_per_write else 1,
        "wide_index": int(shape.index_dtype == "int64"),
        "stage_outputs": int(stages_outputs(shape, plan.device)),
        "each": entries_a_thread(shape, plan.kernels()),
        FIRST_STREAM: 0,
        **{f"{FIRST_STREAM}_{stream}": stream for stream in range(shape.streams)},
    }
    if plan.schedule == "persistent":
        walk = plan.step[0]
        assert isinstance(walk, Launch)
        numbers |= persistent_backward_constants(shape, plan.device, walk, plan.slab_steps)
    taken = {argument.name for launch in plan.kernels() for argument in launch.arguments}
    return {name: number for name, number in numbers.items() if name in taken}
