"""Phase 1 and the solve: what a slab of chunks needs before its steps, all chunks in one launch a kernel.

None of it reads the bank. A call that saves nothing runs slab after slab, so that its working memory does not
grow with T; every chunk's results are its own, so no split changes a bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdm_rt.plan.buffer import Buffer
from sdm_rt.plan.device import DeviceModel
from sdm_rt.plan.kernel_resources import kernel_resources
from sdm_rt.plan.launch import Argument, Launch, int32s, pointers
from sdm_rt.plan.shapes import WriteReadShape, dtype_bytes, kernel_index, kernel_type
from sdm_rt.plan.tiling import ceil_div
from sdm_rt.runtime.kernel import KernelSpec

__all__ = [
    "OF_THE_BACKWARD",
    "RECORD_BYTES",
    "Phase1",
    "capacity",
    "phase1_buffers",
    "phase1_kernels",
    "plan_phase1",
    "plan_solve",
    "read_capacity",
    "slab_steps",
    "sort_passes",
    "staged_weights",
]

SORT_THREADS = (512, 1024)  # the wider from SORT_WIDE entries a chunk on
SORT_WIDE = 16384
SORT_DIGIT_BITS = 8
SORT_CODE_BITS = 17  # of an item: what is left of its 32 bits holds the upper bits of the slot
SORT_SHARED = 131_072  # most shared memory for the items of a chunk
SORT_BLOCKS_PER_SM = {512: 4, 1024: 1}
SCAN_THREADS = (256, 512)  # the wider for chunks of more entries than SORT_WIDE
SCAN_STAGED = 65_536  # most shared memory for the weights of a chunk
GRAM_ROWS = 8  # of A or QK a block, one a warp
SOLVE_TILE = 16  # rows of X at a time
SOLVE_PANEL = 64  # columns of X a block
SOLVE_THREADS = SOLVE_TILE * SOLVE_PANEL // 4
SLAB_BYTES = 128 * 2**20

RECORD_BYTES = 16  # of an entry, a term, a slot, partners or a log-decay (kernels_cu/entries.cuh)

# What the scan keeps for a backward alone.
OF_THE_BACKWARD = (
    "write_weight",
    "read_entries",
    "read_terms",
    "read_slots",
    "read_slot_count",
    "slot_reads",
)

SOLVE_KERNEL = KernelSpec("solve.cu", ("solve",))

SORT_ITEMS = {4: "unsigned", 8: "unsigned long long"}

_SLAB = Argument("slab_step", "int32", step_dependent=True)


@dataclass(frozen=True)
class Phase1:
    """The launches of one slab and the memory they need.

    Parameters
    ----------
    launches : tuple of Launch
        Sort, scan, Gram matrices, solve.
    buffers : tuple of Buffer
        Their results and scratch, for one slab.
    """

    launches: tuple[Launch, ...]
    buffers: tuple[Buffer, ...]


def capacity(shape: WriteReadShape) -> int:
    """Return the most slots that a chunk writes: min(C W, S)."""
    return min(shape.chunk * shape.writes, shape.slots)


def read_capacity(shape: WriteReadShape) -> int:
    """Return the most slots that a chunk reads: min(C R, S)."""
    return min(shape.chunk * shape.reads, shape.slots)


def slab_steps(shape: WriteReadShape, device: DeviceModel) -> int:
    """Return the steps of one slab: all of a call that trains, else a fixed budget of memory.

    Never fewer chunks than the GPU has SMs, or the kernels of Phase 1 would leave some idle.
    """
    if shape.training:
        return shape.chunks
    records = sum(buffer.bytes for buffer in phase1_buffers(shape, 1))
    chunks = max(SLAB_BYTES // records, device.sm_count)
    return min(ceil_div(chunks, shape.streams), shape.chunks)


def sort_passes(slots: int) -> tuple[int, int]:
    """Return (passes, bits of a digit) of a radix sort by slot."""
    bits = max(1, (slots - 1).bit_length())
    passes = ceil_div(bits, SORT_DIGIT_BITS)
    return passes, ceil_div(bits, passes)


def sort_item_bytes(shape: WriteReadShape) -> int:
    """Return the bytes of an item that the sort moves: its code, and its slot after the first pass."""
    passes, bits = sort_passes(shape.slots)
    return 4 if (passes - 1) * bits + SORT_CODE_BITS <= 32 else 8


def sort_threads(shape: WriteReadShape) -> int:
    """Return the threads of a block of the sort."""
    return SORT_THREADS[shape.chunk * (shape.writes + shape.reads) > SORT_WIDE]


def scan_threads(shape: WriteReadShape) -> int:
    """Return the threads of a block of the scan."""
    return SCAN_THREADS[shape.chunk * (shape.writes + shape.reads) > SORT_WIDE]


def phase1_buffers(shape: WriteReadShape, chunks: int) -> tuple[Buffer, ...]:
    """Return the results and scratch of ``chunks`` chunks, without the sort's own scratch."""
    C, W, R, slots = shape.chunk, shape.writes, shape.reads, capacity(shape)
    lanes = C * (W + R)
    kept = shape.training
    backward = (
        Buffer("write_weight", "float32", (chunks, C, W), kept=True),
        Buffer("read_entries", "uint8", (chunks, C * R, RECORD_BYTES), kept=True),
        Buffer("read_terms", "uint8", (chunks, C * R, RECORD_BYTES), kept=True),
        Buffer("read_slots", "uint8", (chunks, read_capacity(shape), RECORD_BYTES), kept=True),
        Buffer("read_slot_count", "int32", (chunks,), kept=True),
        Buffer("slot_reads", "int32", (chunks, slots, 2), kept=True),
    )
    return (
        Buffer("payload", "int32", (chunks, ceil_div(lanes, 16) * 16)),
        Buffer("k_eff", "float32", (chunks, C, W)),
        Buffer("q_w", "float32", (chunks, C, R)),
        Buffer("strength", "float32", (chunks, C), kept),
        Buffer("write_entries", "uint8", (chunks, C * W, RECORD_BYTES), kept),
        Buffer("write_terms", "uint8", (chunks, C * W, RECORD_BYTES), kept),
        Buffer("partners", "uint8", (chunks, lanes, RECORD_BYTES)),
        Buffer("partner_at", "int32", (chunks, C, W + R)),
        Buffer("slots", "uint8", (chunks, slots, RECORD_BYTES), kept),
        Buffer("slot_count", "int32", (chunks,), kept),
        Buffer("totals", "uint8", (chunks, slots, RECORD_BYTES)),
        *(Buffer(name, "float32", (chunks, C, C)) for name in ("a", "qk")),
        *(Buffer(name, "float32", (chunks, C, C), kept) for name in ("x", "qx")),
        *(backward if kept else ()),
    )


def phase1_kernels(shape: WriteReadShape) -> dict[str, KernelSpec]:
    """Return the translation units of Phase 1 and the solve, by their entry."""
    bank, index = ("BANK", kernel_type(shape.bank_dtype)), ("INDEX", kernel_index(shape.index_dtype))
    return {
        "phase1_sort": KernelSpec(
            "phase1_sort.cu",
            ("phase1_sort",),
            (index, ("ITEM", SORT_ITEMS[sort_item_bytes(shape)]), ("THREADS", str(sort_threads(shape)))),
        ),
        "phase1_scan": KernelSpec(
            "phase1_scan.cu", ("phase1_scan",), (bank, index, ("THREADS", str(scan_threads(shape))))
        ),
        "phase1_gram": KernelSpec("phase1_gram.cu", ("phase1_gram",), (bank,)),
        "solve": SOLVE_KERNEL,
    }


def _sort(shape: WriteReadShape, chunks: int, device: DeviceModel) -> tuple[Launch, tuple[Buffer, ...]]:
    lanes = shape.chunk * (shape.writes + shape.reads)
    threads = sort_threads(shape)
    blocks = min(chunks, SORT_BLOCKS_PER_SM[threads] * device.sm_count)
    passes, bits = sort_passes(shape.slots)
    held = min(passes - 1, 2) * lanes * sort_item_bytes(shape)
    kernel = phase1_kernels(shape)["phase1_sort"]
    static = kernel_resources(kernel, "phase1_sort", device).static_shared
    shared = held <= min(SORT_SHARED, device.shared_memory_per_block - static)
    moved = chunks * lanes * (dtype_bytes(shape.index_dtype) + 4)
    launch = Launch(
        name="phase1_sort",
        kernel=kernel,
        entry="phase1_sort",
        grid=(blocks, 1, 1),
        block=(threads, 1, 1),
        arguments=(
            *pointers("k_idx", "q_idx", "lengths", "cu_seqlens", "sort_scratch", "payload"),
            _SLAB,
            *int32s("slab_chunks", "P", "T", "C", "W", "R", "S", "shared_bank", "wide"),
            *int32s("digit_bits", "passes"),
        ),
        reads=("k_idx", "q_idx", "lengths", "cu_seqlens", "sort_scratch"),
        writes=("sort_scratch", "payload"),
        bytes_moved=moved,
        floor_bytes=moved,
        shared_memory=held if shared else 0,
        note=f"{passes} passes of {bits} bits, a chunk a block, {'shared' if shared else 'global'} memory",
    )
    return launch, () if shared else (Buffer("sort_scratch", "uint8", (blocks, held)),)


def staged_weights(shape: WriteReadShape) -> bool:
    """Return whether the scan stages a chunk's weights in shared memory; larger chunks are few at a time."""
    return 4 * shape.chunk * (shape.writes + shape.reads) <= SCAN_STAGED


def _scan(shape: WriteReadShape, chunks: int) -> Launch:
    C, W, R = shape.chunk, shape.writes, shape.reads
    inputs = ("payload", "k_idx", "q_idx", "k_val", "q_val", "g", "beta", "lengths", "cu_seqlens")
    logs = ("log_k", "log_q", "rex", "cpe")
    sorted_records = ("write_entries", "write_terms", "partners", "partner_at")
    records = (*sorted_records, "slots", "slot_count", "totals")
    results = ("k_eff", "q_w", "flags", "strength", *records, "repeats", *OF_THE_BACKWARD)
    entry = 4 + dtype_bytes(shape.bank_dtype) + 4 + RECORD_BYTES
    moved = chunks * C * ((W + R) * entry + 2 * RECORD_BYTES * W)
    moved += chunks * capacity(shape) * 2 * RECORD_BYTES
    if shape.training:
        moved += chunks * (C * (4 * W + 2 * RECORD_BYTES * R) + read_capacity(shape) * RECORD_BYTES)
    return Launch(
        name="phase1_scan",
        kernel=phase1_kernels(shape)["phase1_scan"],
        entry="phase1_scan",
        grid=(chunks, 1, 1),
        block=(scan_threads(shape), 1, 1),
        arguments=(
            *pointers(*inputs, *logs, *results),
            _SLAB,
            *int32s("P", "T", "C", "W", "R", "S", "gates", "shared_bank", "wide", "staged"),
        ),
        reads=(*inputs, "slots", "totals", "write_entries", "write_terms"),
        writes=(*logs, *results),
        bytes_moved=moved,
        floor_bytes=moved,
        shared_memory=4 * C * (W + R) if staged_weights(shape) else 0,
        note="exact fixed-point sums, one chunk a block",
    )


def _gram(shape: WriteReadShape, chunks: int) -> Launch:
    C = shape.chunk
    inputs = ("partner_at", "partners", "write_entries", "k_val", "q_val", "lengths", "cu_seqlens")
    lanes = C * (shape.writes + shape.reads)
    moved = chunks * (lanes * (4 + dtype_bytes(shape.bank_dtype)) + 2 * 4 * C * C)
    return Launch(
        name="phase1_gram",
        kernel=phase1_kernels(shape)["phase1_gram"],
        entry="phase1_gram",
        grid=(chunks, ceil_div(C, GRAM_ROWS), 2),
        block=(32 * GRAM_ROWS, 1, 1),
        arguments=(
            *pointers(*inputs, "a", "qk"),
            _SLAB,
            *int32s("P", "T", "C", "W", "R", "wide"),
        ),
        reads=inputs,
        writes=("a", "qk"),
        bytes_moved=moved,
        floor_bytes=moved,
        shared_memory=4 * min(GRAM_ROWS, C) * C,
        note=f"{GRAM_ROWS} rows a block, one a warp, its only writer",
    )


def _solve_tile_floats(chunk: int) -> int:
    """Return the floats of a tile up to the last one read: a tile's last row ends at its diagonal."""
    rows = min(SOLVE_TILE, chunk)
    return (rows - 1) * (chunk + 1) + chunk // rows * rows


def plan_solve(chunks: int, chunk: int) -> Launch:
    """Plan the solve of ``chunks`` chunks of C = ``chunk`` tokens."""
    moved = chunks * 4 * (4 * chunk * chunk + chunk)
    return Launch(
        name="solve",
        kernel=SOLVE_KERNEL,
        entry="solve",
        grid=(chunks, ceil_div(chunk, SOLVE_PANEL), 1),
        block=(SOLVE_THREADS, 1, 1),
        arguments=(*pointers("a", "qk", "strength", "x", "qx"), *int32s("C")),
        reads=("a", "qk", "strength"),
        writes=("x", "qx"),
        bytes_moved=moved,
        floor_bytes=moved,
        shared_memory=4 * (chunk * SOLVE_PANEL + _solve_tile_floats(chunk)),
        note=f"{SOLVE_PANEL} columns a block, IEEE float32",
    )


def plan_phase1(shape: WriteReadShape, steps: int, device: DeviceModel) -> Phase1:
    """Plan Phase 1 and the solve of one slab of ``steps`` steps.

    Parameters
    ----------
    shape : WriteReadShape
        Shapes and dtypes of the call.
    steps : int
        Steps of a slab (see `slab_steps`).
    device : DeviceModel
        The GPU.
    """
    chunks = steps * shape.streams
    sort, sort_scratch = _sort(shape, chunks, device)
    return Phase1(
        launches=(sort, _scan(shape, chunks), _gram(shape, chunks), plan_solve(chunks, shape.chunk)),
        buffers=(*sort_scratch, *phase1_buffers(shape, chunks)),
    )
