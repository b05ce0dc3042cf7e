"""The decode plan: one token per stream, the recurrence itself in one launch."""

from __future__ import annotations

from sdm_rt.plan.device import DeviceModel, require_supported
from sdm_rt.plan.launch import Argument, Launch, pointers
from sdm_rt.plan.shapes import DecodeShape, dtype_bytes, kernel_type
from sdm_rt.plan.step_plan import StepPlan
from sdm_rt.runtime.kernel import KernelSpec

__all__ = ["DECODE_ARGUMENTS", "ENTRY", "decode_kernel", "decode_shared_memory", "plan_decode"]

ENTRY = "decode_step"
LANES = 8  # threads across the columns of a row; one 128-byte line at 16 bytes a thread
GROUPS = 32  # rows a block walks side by side
WARPS = LANES * GROUPS // 32

DECODE_ARGUMENTS = (
    *pointers("memory", "k_idx", "k_val", "v", "beta", "g", "q_idx", "q_val"),
    *pointers("lengths", "readings", "repeated_writes"),
    Argument("slots", "int64"),
    Argument("writes", "int32"),
    Argument("reads", "int32"),
    Argument("head_dim", "int32"),
    Argument("index_bytes", "int32"),
    Argument("gates_per_write", "int32"),
)


def vector_values(shape: DecodeShape) -> int:
    """Return the values a thread moves at once: 16 bytes where rows allow it, else one value."""
    values = 16 // dtype_bytes(shape.bank_dtype)
    return values if shape.aligned and shape.head_dim % values == 0 else 1


def rows_per_group(lanes: int) -> int:
    """Return the rows each group keeps in registers for `lanes` slots, rounded up to a power of two."""
    rows = -(-lanes // GROUPS)
    return 1 << (rows - 1).bit_length()


def decode_kernel(shape: DecodeShape) -> KernelSpec:
    """Return the translation unit for a shape: bank type, values a thread moves, write rows a group keeps."""
    return KernelSpec(
        "decode.cu",
        (ENTRY,),
        (
            ("BANK", kernel_type(shape.bank_dtype)),
            ("VECTOR", str(vector_values(shape))),
            ("WRITE_ROWS", str(rows_per_group(shape.writes))),
        ),
    )


def decode_shared_memory(shape: DecodeShape) -> int:
    """Return the dynamic shared memory of a block, bytes.

    Per write a 64-bit row, weight and decay; per read a 64-bit row and weight; per warp one float32 partial sum
    of each column of the block.
    """
    columns = LANES * vector_values(shape)
    return 16 * shape.writes + 12 * shape.reads + 4 * (shape.reads % 2) + 4 * WARPS * columns


def plan_decode(shape: DecodeShape, device: DeviceModel) -> StepPlan:
    """Plan one decode step.

    One block holds one stream's slice of `LANES` x vector columns: columns never mix, so the slices are
    independent, and the order of every sum depends on W, R and the dtype alone.

    Parameters
    ----------
    shape : DecodeShape
        Streams, slots, columns and dtypes.
    device : DeviceModel
        The GPU.

    Returns
    -------
    StepPlan
        One launch; none where there are no streams.

    Raises
    ------
    RuntimeError
        For a GPU below compute capability 8.0.
    """
    require_supported(device)
    if shape.streams == 0:
        return StepPlan("decode", device, shape, steps=0, first_step=(), step=())
    columns = LANES * vector_values(shape)
    row = shape.head_dim * dtype_bytes(shape.bank_dtype)
    rows = shape.streams * (2 * shape.writes + shape.reads) * row
    token = (
        (shape.writes + shape.reads) * (dtype_bytes(shape.index_dtype) + dtype_bytes(shape.bank_dtype))
        + 2 * row
        + 4 * (1 + (shape.writes if shape.gates_per_write else 1))
    )
    launch = Launch(
        name="decode",
        kernel=decode_kernel(shape),
        entry=ENTRY,
        grid=(shape.streams, -(-shape.head_dim // columns), 1),
        block=(LANES, GROUPS, 1),
        arguments=DECODE_ARGUMENTS,
        reads=("memory", "k_idx", "k_val", "v", "beta", "g", "q_idx", "q_val", "lengths"),
        writes=("memory", "readings", "repeated_writes"),
        bytes_moved=rows + shape.streams * token,
        floor_bytes=rows,
        shared_memory=decode_shared_memory(shape),
        pdl=device.pdl,
        note=f"{columns} columns a block, {GROUPS} rows side by side",
    )
    return StepPlan("decode", device, shape, steps=1, first_step=(launch,), step=(launch,))
