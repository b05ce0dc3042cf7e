"""The decode plan: one token per stream, the recurrence itself in one launch of kernels_cu/decode.cu."""

from __future__ import annotations

from sdm_rt.plan.device import DeviceModel, require_supported
from sdm_rt.plan.launch import Argument, Launch, pdl_defines, pointers
from sdm_rt.plan.shapes import DecodeShape, dtype_bytes, kernel_type
from sdm_rt.plan.step_plan import StepPlan
from sdm_rt.runtime.kernel import KernelSpec

__all__ = ["DECODE_ARGUMENTS", "ENTRY", "decode_kernel", "decode_shared_memory", "plan_decode"]

ENTRY = "decode"
GROUPS = 32  # rows a block works on at a time; part of the order of sums, so one constant
LINE_THREADS = 8  # threads of a 128-byte line at 16 bytes each
SECTOR_THREADS = 2  # threads of a 32-byte sector, the least that memory moves

DECODE_ARGUMENTS = (
    *pointers("memory", "k_idx", "k_val", "v", "beta", "g", "q_idx", "q_val", "lengths", "y", "repeats"),
    Argument("row_stride", "int64"),
    *(Argument(name, "int32") for name in ("S", "D", "W", "R", "gates", "dtypes")),
)


def vector_values(shape: DecodeShape) -> int:
    """Return the bank values a thread moves at once: 16 bytes of them where rows are aligned, else one."""
    values = 16 // dtype_bytes(shape.bank_dtype)
    return values if shape.aligned and shape.head_dim % values == 0 else 1


def rows_held(shape: DecodeShape) -> int:
    """Return the write rows, and the read rows, of a thread: a power of two, so that few variants exist."""
    rows = -(-max(shape.writes, shape.reads) // GROUPS)
    return 1 << (rows - 1).bit_length()


def row_threads(shape: DecodeShape, device: DeviceModel) -> int:
    """Return the threads that share a row in a block; every choice gives the same bits.

    The widest slice of a row, up to a 128-byte line, that still gives each SM a block; where threads move 16
    bytes never below a 32-byte sector, and never wider than the row.
    """
    vector = vector_values(shape)
    narrowest = SECTOR_THREADS if vector > 1 else LINE_THREADS
    row = 1 << (-(-shape.head_dim // vector) - 1).bit_length()
    threads = min(LINE_THREADS, row)
    while threads > narrowest and shape.streams * -(-shape.head_dim // (threads * vector)) < device.sm_count:
        threads //= 2
    return threads


def decode_kernel(shape: DecodeShape, pdl: bool) -> KernelSpec:
    """Return the translation unit of a shape, with or without programmatic dependent launch."""
    rows = str(rows_held(shape))
    return KernelSpec(
        "decode.cu",
        (ENTRY,),
        (
            ("BANK", kernel_type(shape.bank_dtype)),
            ("GROUPS", str(GROUPS)),
            ("K_ROWS", rows),
            ("Q_ROWS", rows),
            *pdl_defines(waits=pdl, triggers=pdl),
            ("VECTOR", str(vector_values(shape))),
        ),
    )


def decode_shared_memory(writes: int, reads: int, threads: int, columns: int) -> int:
    """Return the dynamic shared memory of a block of ``threads`` threads across a row, bytes.

    Four words a write (slot, its weight, weight of the whole slot, decay) and one a read (weight), both
    counts rounded up to 4; four words that hold beta; for each column of the slice v, and for each warp two
    partial sums, of the retrieval and of the reading.
    """
    writes4, reads4 = (-(-count // 4) * 4 for count in (writes, reads))
    warps = threads * GROUPS // 32
    return 4 * (4 * writes4 + reads4 + 4 + (1 + 2 * warps) * columns)


def plan_decode(shape: DecodeShape, device: DeviceModel) -> StepPlan:
    """Plan one decode step.

    A block holds one stream's slice of columns: columns never mix, so slices are independent, and the order
    of every sum depends on W and R alone.

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
    threads = row_threads(shape, device)
    columns = threads * vector_values(shape)
    row = shape.head_dim * dtype_bytes(shape.bank_dtype)
    rows = shape.streams * (2 * shape.writes + shape.reads) * row
    token = (
        (shape.writes + shape.reads) * (dtype_bytes(shape.index_dtype) + dtype_bytes(shape.bank_dtype))
        + 2 * row
        + 4 * (1 + (shape.writes if shape.gates_per_write else 1))
    )
    launch = Launch(
        name="decode",
        kernel=decode_kernel(shape, device.pdl),
        entry=ENTRY,
        grid=(shape.streams, -(-shape.head_dim // columns), 1),
        block=(threads, GROUPS, 1),
        arguments=DECODE_ARGUMENTS,
        reads=("memory", "k_idx", "k_val", "v", "beta", "g", "q_idx", "q_val", "lengths"),
        writes=("memory", "y", "repeats"),
        bytes_moved=rows + shape.streams * token,
        floor_bytes=rows,
        shared_memory=decode_shared_memory(shape.writes, shape.reads, threads, columns),
        pdl=device.pdl,
        triggers=device.pdl,
        note=f"{min(columns, shape.head_dim)} columns a block, {GROUPS} rows side by side",
    )
    return StepPlan("decode", device, shape, steps=1, first_step=(launch,), step=(launch,))
