"""The reference schedule's backward, as data: its launches, PDL flags and shared memory, to compare with.

Its kernels are budgets (`sdm_rt.plan.kernel_resources.BUDGETS`), not files: the product runs
`sdm_rt.plan.backward.plan_backward`.
"""

from __future__ import annotations

from dataclasses import replace

from sdm_rt.plan.device import DeviceModel, require_supported
from sdm_rt.plan.kernel_resources import kernel_resources
from sdm_rt.plan.launch import Argument, Launch, LibraryCall, pdl_defines, pointers
from sdm_rt.plan.limits import require_limits
from sdm_rt.plan.shapes import WriteReadShape, dtype_bytes, kernel_type
from sdm_rt.plan.shared_memory import gates_plan, one_block_per_sm, pairs_plan, phase_a_plan
from sdm_rt.plan.step_plan import Call, StepPlan
from sdm_rt.plan.tiling import (
    DOT_COLUMNS,
    ENTRIES_PER_BLOCK,
    SUM_THREADS,
    THREADS,
    WARPS,
    ceil_div,
    entry_grid,
    product_tile,
    product_tile_bytes,
    token_grid,
)
from sdm_rt.runtime.kernel import KernelSpec

__all__ = ["plan_reference_backward"]

NAME = "backward (reference)"

# The integer arguments of the loop's kernels; the step is the one that changes.
SIZES = (
    Argument("step", "int32", step_dependent=True),
    *(Argument(name, "int32") for name in ("T", "C", "W", "R", "D")),
    Argument("S", "int64"),
)

PAIRS_KERNEL = KernelSpec("reference_phase1_backward_pairs.cu", ("phase1_backward_pairs",))


def _column_blocks(shape: WriteReadShape) -> int:
    return ceil_div(shape.head_dim, DOT_COLUMNS)


def _dtypes(shape: WriteReadShape) -> tuple[tuple[str, str], ...]:
    return ("BANK", kernel_type(shape.bank_dtype)), ("GRADIENT", kernel_type(shape.gradient_bank_dtype))


def _gwr(shape: WriteReadShape, device: DeviceModel, pdl: bool) -> Launch:
    floor = shape.write_rows * shape.gradient_row_bytes
    dots = 4 * shape.writes * _column_blocks(shape)
    per_token = shape.writes * (dtype_bytes(shape.index_dtype) + 8) + 2 * 4 * shape.head_dim + dots
    return Launch(
        name="gwr",
        kernel=KernelSpec("reference_gwr.cu", ("gwr",), (*_dtypes(shape), *pdl_defines(waits=device.pdl))),
        entry="gwr",
        grid=token_grid(shape.step_tokens, shape.head_dim, DOT_COLUMNS),
        block=(THREADS, 1, 1),
        arguments=(
            *pointers("gradient_bank", "k_idx", "k_val", "rex", "delta", "gwr", "d_k_pd_parts"),
            *SIZES,
        ),
        reads=("gradient_bank", "k_idx", "k_val", "rex", "delta"),
        writes=("gwr", "d_k_pd_parts"),
        bytes_moved=floor + shape.step_tokens * per_token,
        floor_bytes=floor,
        # Each warp's partial sums; the token's rows and weights.
        shared_memory=4 * WARPS * DOT_COLUMNS + (8 + 4) * shape.writes,
        pdl=pdl,
        note=f"one token and {DOT_COLUMNS} columns a block, one row a warp",
    )


def _du_update(shape: WriteReadShape, device: DeviceModel) -> Launch:
    tile = product_tile(shape.chunk)
    defines = (_dtypes(shape)[0], *pdl_defines(waits=device.pdl), ("TILE", str(tile)))
    kernel = KernelSpec("reference_du_update.cu", ("du_update",), defines)
    static = kernel_resources(kernel, "du_update", device).static_shared
    return Launch(
        name="du_update",
        kernel=kernel,
        entry="du_update",
        grid=(shape.streams * ceil_div(shape.chunk, tile), ceil_div(shape.head_dim, tile), 1),
        block=(THREADS, 1, 1),
        arguments=(*pointers("x", "qx", "grad_readings", "gwr", "lam"), *SIZES),
        reads=("x", "qx", "grad_readings", "gwr"),
        writes=("lam",),
        bytes_moved=_du_bytes(shape),
        floor_bytes=0,
        shared_memory=one_block_per_sm(product_tile_bytes(shape.chunk, tiles=4), static, device),
        pdl=device.pdl,
        note=f"a tile of {tile} tokens x {tile} columns a block, padded to one block an SM, IEEE float32",
    )


def _du_bytes(shape: WriteReadShape) -> int:
    triangles = 2 * 2 * (shape.chunk + 1)
    return shape.step_tokens * (triangles + shape.row_bytes + 2 * 4 * shape.head_dim)


def _phase_a(shape: WriteReadShape, device: DeviceModel, pdl: bool) -> Launch:
    plan = phase_a_plan(shape.chunk, shape.bank_dtype, shape.gradient_bank_dtype, device)
    entries = shape.chunk * shape.writes
    floor = shape.write_rows * (shape.snapshot_row_bytes + shape.gradient_row_bytes + shape.row_bytes)
    dots = 2 * 4 * _column_blocks(shape)
    small = shape.streams * entries * (4 + 8 + 4 + 4 + dots) + shape.step_tokens * 4 * (shape.head_dim + 1)
    saved = ("snapshot", "snapshot_scale")
    reads = ("gradient_bank", *saved, "payload", "k_idx", "k_eff", "cpe", "lam", "beta")
    return Launch(
        name="phase_a",
        kernel=KernelSpec(
            "reference_phase_a.cu",
            ("phase_a",),
            (
                *_dtypes(shape),
                *pdl_defines(waits=pdl),
                ("SNAPSHOT", shape.snapshot),
                ("WARPS", str(plan.warps)),
            ),
        ),
        entry="phase_a",
        grid=entry_grid(shape.streams, entries, ENTRIES_PER_BLOCK, shape.head_dim, DOT_COLUMNS),
        block=(32 * plan.warps, 1, 1),
        arguments=(*pointers(*reads, "memory", "d_k_eff_parts", "d_tot_parts"), *SIZES),
        reads=reads,
        writes=("gradient_bank", "memory", "d_k_eff_parts", "d_tot_parts"),
        bytes_moved=floor + shape.write_rows * shape.gradient_row_bytes + small,
        floor_bytes=floor,
        shared_memory=plan.shared_memory,
        pdl=pdl,
        note=f"{ENTRIES_PER_BLOCK} slot-sorted entries and {DOT_COLUMNS} columns a block, {plan.warps} warps",
    )


def _gds(shape: WriteReadShape, pdl: bool) -> Launch:
    entries = shape.chunk * shape.reads
    floor = shape.read_rows * (shape.row_bytes + 2 * shape.gradient_row_bytes)
    small = (
        shape.streams * entries * (4 + 8 + 4 + 4 * _column_blocks(shape))
        + shape.step_tokens * shape.row_bytes
    )
    reads = ("memory", "gradient_bank", "payload", "q_idx", "q_w", "grad_readings")
    return Launch(
        name="gds",
        kernel=KernelSpec("reference_gds.cu", ("gds",), (*_dtypes(shape), *pdl_defines(waits=pdl))),
        entry="gds",
        grid=entry_grid(shape.streams, entries, ENTRIES_PER_BLOCK, shape.head_dim, DOT_COLUMNS),
        block=(THREADS, 1, 1),
        arguments=(*pointers(*reads, "d_q_w_parts"), *SIZES),
        reads=reads,
        writes=("gradient_bank", "d_q_w_parts"),
        bytes_moved=floor + small,
        floor_bytes=floor,
        shared_memory=16 * ENTRIES_PER_BLOCK,
        pdl=pdl,
        note=f"{ENTRIES_PER_BLOCK} slot-sorted entries and {DOT_COLUMNS} columns a block",
    )


def _column_sum(shape: WriteReadShape) -> Launch:
    dots = shape.chunks * shape.step_tokens * (3 * shape.writes + shape.reads)
    names = ("d_k_pd", "d_k_eff", "d_tot", "d_q_w")
    parts = tuple(f"{name}_parts" for name in names)
    return Launch(
        name="column_sum",
        kernel=KernelSpec("reference_column_sum.cu", ("column_sum",)),
        entry="column_sum",
        grid=(ceil_div(dots, 4 * SUM_THREADS), 1, 1),
        block=(SUM_THREADS, 1, 1),
        arguments=(*pointers(*parts, *names), *SIZES[1:]),
        reads=parts,
        writes=names,
        bytes_moved=4 * dots * (_column_blocks(shape) + 1),
        floor_bytes=0,
        note=f"adds {_column_blocks(shape)} column blocks in block order, four dots a thread",
    )


def _phase1_notes(shape: WriteReadShape, device: DeviceModel) -> tuple[str, ...]:
    resources = kernel_resources(PAIRS_KERNEL, PAIRS_KERNEL.entries[0], device)
    dtypes = shape.bank_dtype, shape.gradient_bank_dtype
    pairs = pairs_plan(shape.chunk, *dtypes, device, det=False, resources=resources)
    det = pairs_plan(shape.chunk, *dtypes, device, det=True, resources=resources)
    gates = gates_plan(shape.chunk, shape.writes, shape.reads, shape.bank_dtype, device, static_shared=0)
    blocks = "both triangles in a block" if pairs.blocks_per_chunk == 1 else "one triangle a block"
    buffer = f"{det.shared_memory:,} with batch buffer" if det.batch_buffer else "no batch buffer"
    staging = f"outputs staged in {gates.shared_memory:,} bytes" if gates.staged else "outputs not staged"
    return (
        f"Phase-1 backward pairs: {blocks}, {pairs.shared_memory:,} bytes of shared memory (det: {buffer})",
        f"Phase-1 backward gates: {staging}",
    )


def _own_update(shape: WriteReadShape, device: DeviceModel) -> StepPlan:
    """Return the schedule with a kernel of its own for the d_u update."""
    require_supported(device)
    if not shape.training:
        raise ValueError("a backward needs what the forward saves: training must be True, got False")
    require_limits(shape)
    if shape.streams == 0 or shape.tokens == 0:
        return StepPlan(NAME, device, shape, steps=0, first_step=(), step=(), order="descending")
    pdl = device.pdl
    rest: tuple[Call, ...] = (_du_update(shape, device), _phase_a(shape, device, pdl), _gds(shape, pdl))
    return StepPlan(
        NAME,
        device,
        shape,
        steps=shape.chunks,
        first_step=(_gwr(shape, device, pdl=False), *rest),
        step=(_gwr(shape, device, pdl), *rest),
        order="descending",
        epilogue=(_column_sum(shape),),
        notes=_phase1_notes(shape, device),
    )


def plan_reference_backward(
    shape: WriteReadShape, device: DeviceModel, ieee_products: bool = True
) -> StepPlan:
    """Plan the reference schedule's backward, for comparison; the product always runs `plan_backward`.

    Where the GPU has PDL every launch of the loop is a programmatic dependent of the one before it, except
    the first; the sum over column blocks after the loop is a plain launch. Where P < 2 or C < 2, or where
    float32 products are not IEEE, the library call ``torch.baddbmm`` takes the place of the d_u update, and
    Phase A behind it is a plain launch.

    Parameters
    ----------
    shape : WriteReadShape
        Shapes and dtypes.
    device : DeviceModel
        The GPU.
    ieee_products : bool
        Whether the library's float32 products are IEEE (no TF32).

    Returns
    -------
    StepPlan
        One step per chunk, in descending order; no launch where there are no tokens or no streams.

    Raises
    ------
    UnsupportedConfigurationError
        Where a kernel of the schedule does not fit the GPU's shared memory.
    RuntimeError
        For a GPU below compute capability 8.0.
    ValueError
        For the shape of a call that saves nothing (``training=False``).
    """
    plan = _own_update(shape, device)
    if not plan.steps or (shape.streams >= 2 and shape.chunk >= 2 and ieee_products):
        return plan
    library = LibraryCall(
        name="du_update",
        function="torch.baddbmm",
        reads=("x", "qx", "grad_readings", "gwr"),
        writes=("lam",),
        bytes_moved=_du_bytes(shape),
    )
    exchange: dict[str, Call] = {"du_update": library, "phase_a": _phase_a(shape, device, pdl=False)}

    def exchanged(calls: tuple[Call, ...]) -> tuple[Call, ...]:
        return tuple(exchange.get(call.name, call) for call in calls)

    return replace(plan, first_step=exchanged(plan.first_step), step=exchanged(plan.step))
