"""The stepwise forward plan: gather, dual matmul, decay-and-write, chunk after chunk."""

from __future__ import annotations

from sdm_rt.plan.device import DeviceModel, require_supported
from sdm_rt.plan.launch import Argument, Launch, pdl_defines, pointers
from sdm_rt.plan.shapes import WriteReadShape, dtype_bytes, kernel_type
from sdm_rt.plan.shared_memory import require_backward_fits, snapshot_rows
from sdm_rt.plan.step_plan import StepPlan
from sdm_rt.plan.tiling import (
    THREADS,
    WARPS,
    ceil_div,
    entry_grid,
    product_tile,
    product_tile_bytes,
    row_columns,
    token_grid,
)
from sdm_rt.runtime.kernel import KernelSpec

__all__ = ["SIZES", "TRIGGER_MAX_CHUNK", "plan_forward"]

TRIGGER_MAX_CHUNK = 64  # up to here the dual matmul is short enough for its dependent to start early
WRITE_ENTRIES = 64  # slot-sorted entries of a decay-and-write block, eight a warp


# The integer arguments every stepwise kernel takes; the step is the one that changes.
SIZES = (
    Argument("step", "int32", step_dependent=True),
    *(Argument(name, "int32") for name in ("T", "C", "W", "R", "D")),
    Argument("S", "int64"),
)


def _gather(shape: WriteReadShape) -> Launch:
    columns = row_columns(shape.bank_dtype)
    lanes = shape.writes + shape.reads
    saved = ("snapshot", "snapshot_scale") if shape.training else ()
    floor = (shape.write_rows + shape.read_rows) * shape.row_bytes
    if shape.training:
        floor += shape.write_rows * shape.snapshot_row_bytes
    small = shape.step_tokens * (lanes * (dtype_bytes(shape.index_dtype) + 4) + 2 * 4 * shape.head_dim)
    defines = (
        ("BANK", kernel_type(shape.bank_dtype)),
        ("SNAPSHOT", shape.snapshot if shape.training else "off"),
    )
    return Launch(
        name="gather",
        kernel=KernelSpec("gather.cu", ("gather",), defines),
        entry="gather",
        grid=token_grid(shape.step_tokens, shape.head_dim, columns),
        block=(THREADS, 1, 1),
        arguments=(
            *pointers("memory", "k_idx", "q_idx", "k_eff", "q_w", "retrieved", "inter", *saved),
            *SIZES,
        ),
        reads=("memory", "k_idx", "q_idx", "k_eff", "q_w"),
        writes=("retrieved", "inter", *saved),
        bytes_moved=floor + small,
        floor_bytes=floor,
        # Each warp's partial sums of both outputs; the token's rows and weights.
        shared_memory=2 * 4 * WARPS * columns + (8 + 4) * lanes,
        note=f"one token and {columns} columns a block, one row a warp",
    )


def _dual_matmul(shape: WriteReadShape, triggers: bool) -> Launch:
    tile = product_tile(shape.chunk)
    triangles = ("x", "qx", "a") if shape.training else ("x", "qx")
    saved = ("delta", "err") if shape.training else ("delta",)
    floats = 2 + len(saved)
    moved = shape.step_tokens * (2 * (shape.chunk + 1) * len(triangles) + 4)
    moved += shape.step_tokens * (4 * floats * shape.head_dim + 2 * shape.row_bytes)
    return Launch(
        name="dual_matmul",
        kernel=KernelSpec(
            "dual_matmul.cu",
            ("dual_matmul",),
            (
                ("BANK", kernel_type(shape.bank_dtype)),
                ("SAVE_ERR", str(int(shape.training))),
                *pdl_defines(waits=False, triggers=triggers),
                ("TILE", str(tile)),
            ),
        ),
        entry="dual_matmul",
        grid=(shape.streams * ceil_div(shape.chunk, tile), ceil_div(shape.head_dim, tile), 1),
        block=(THREADS, 1, 1),
        arguments=(
            *pointers(*triangles, "v", "beta", "retrieved", "inter", *saved, "readings"),
            *SIZES,
        ),
        reads=(*triangles, "v", "beta", "retrieved", "inter"),
        writes=(*saved, "readings"),
        bytes_moved=moved,
        floor_bytes=0,
        shared_memory=product_tile_bytes(shape.chunk, tiles=len(triangles) + 1),
        triggers=triggers,
        note=f"a tile of {tile} tokens x {tile} columns a block, IEEE float32",
    )


def _decay_write(shape: WriteReadShape, pdl: bool) -> Launch:
    columns = row_columns(shape.bank_dtype)
    entries = shape.chunk * shape.writes
    floor = shape.write_rows * shape.row_bytes
    small = shape.streams * entries * (4 + 4 + 4 + 4) + shape.step_tokens * 4 * shape.head_dim
    return Launch(
        name="decay_write",
        kernel=KernelSpec(
            "decay_write.cu",
            ("decay_write",),
            (("BANK", kernel_type(shape.bank_dtype)), *pdl_defines(waits=pdl)),
        ),
        entry="decay_write",
        grid=entry_grid(shape.streams, entries, WRITE_ENTRIES, shape.head_dim, columns),
        block=(THREADS, 1, 1),
        arguments=(*pointers("memory", "payload", "k_idx", "k_val", "rex", "cpe", "delta"), *SIZES),
        reads=("memory", "payload", "k_idx", "k_val", "rex", "cpe", "delta"),
        writes=("memory",),
        bytes_moved=2 * floor + small,
        floor_bytes=floor,
        shared_memory=16 * WRITE_ENTRIES,
        pdl=pdl,
        note=f"{WRITE_ENTRIES} slot-sorted entries and {columns} columns a block, rows read again from L2",
    )


def plan_forward(shape: WriteReadShape, device: DeviceModel) -> StepPlan:
    """Plan the forward's step loop (math.md "The chunked form").

    Where the GPU has PDL, the decay-and-write follows the dual matmul as a programmatic dependent; the dual
    matmul triggers it early only at chunk sizes up to 64 and where the decay-and-write is one wave of blocks.

    Parameters
    ----------
    shape : WriteReadShape
        Shapes and dtypes.
    device : DeviceModel
        The GPU.

    Returns
    -------
    StepPlan
        One step per chunk, in ascending order; no step where there are no tokens or no streams.

    Raises
    ------
    UnsupportedConfigurationError
        For a training call whose backward does not fit the GPU's shared memory.
    RuntimeError
        For a GPU below compute capability 8.0.
    """
    require_supported(device)
    if shape.training:
        require_backward_fits(shape.chunk, shape.bank_dtype, shape.gradient_bank_dtype, device)
    if shape.streams == 0 or shape.tokens == 0:
        return StepPlan("forward", device, shape, steps=0, first_step=(), step=())
    decay_write = _decay_write(shape, device.pdl)
    wave = decay_write.occupancy(device).wave(device)
    triggers = device.pdl and shape.chunk <= TRIGGER_MAX_CHUNK and decay_write.blocks <= wave
    notes = [f"decay_write: {decay_write.blocks} blocks, {wave} fit the GPU at once"]
    if shape.training:
        rows, bits = snapshot_rows(shape.chunks, shape.streams, shape.chunk, shape.writes)
        size = shape.chunks * shape.write_rows * shape.snapshot_row_bytes
        notes.append(
            f"snapshot: at most {rows:,} rows ({bits}-bit row offsets), buffer {size / 2**30:.2f} GiB"
        )
    step = (_gather(shape), _dual_matmul(shape, triggers), decay_write)
    return StepPlan(
        "forward", device, shape, steps=shape.chunks, first_step=step, step=step, notes=tuple(notes)
    )
