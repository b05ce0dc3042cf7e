"""Phase 1 and the solve: what a slab of chunks needs before its steps, all chunks in one launch a kernel.

None of it reads the bank. A call that saves nothing runs slab after slab, so that its working memory does not
grow with T; every chunk's results are its own, so no split changes a bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdm_rt.plan.buffer import Buffer
from sdm_rt.plan.device import DeviceModel
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

SORT_THREADS = {True: 256, False: 1024}  # by whether a chunk's items lie in shared memory
SORT_DIGIT_BITS = 8
SORT_SHARED = 65_536  # most shared memory for the items of a chunk: every GPU has it
SCAN_THREADS = {True: 512, False: 768}  # by whether a chunk's weights pass through shared memory
SCAN_SHARED = 98_304  # most shared memory for the weights of a chunk: every GPU has it
GRAM_ROWS = 8  # of A or QK a block, one a warp
SOLVE_TILE = 16  # rows of X at a time
SOLVE_PANEL = 64  # columns of X a block, two a thread
SOLVE_SPAN = 32  # columns of A and QK staged at once
SOLVE_THREADS = 64  # a warp for X, one for QX
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
    """Return the bytes of an item of the sort: a slot, a token and a lane of its K and Q lanes."""
    numbers = (shape.slots, shape.chunk, shape.writes + shape.reads)
    return 4 if sum((number - 1).bit_length() for number in numbers) <= 32 else 8


def sort_bytes(shape: WriteReadShape) -> int:
    """Return the bytes of a chunk's items in the sort's two buffers."""
    return 2 * shape.chunk * (shape.writes + shape.reads) * sort_item_bytes(shape)


def sorts_in_shared(shape: WriteReadShape) -> bool:
    """Return whether the sort keeps a chunk's items in shared memory."""
    return sort_bytes(shape) <= SORT_SHARED


def scan_bytes(shape: WriteReadShape, backward: bool) -> int:
    """Return the bytes of a chunk's weights, with those that a backward alone needs or without."""
    return 4 * shape.chunk * (shape.writes + shape.reads + shape.writes * backward)


def staged_weights(shape: WriteReadShape) -> bool:
    """Return whether the scan passes a chunk's weights through shared memory: unless they are too many."""
    return scan_bytes(shape, backward=True) <= SCAN_SHARED


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
        *(Buffer(name, "int32", (chunks, ceil_div(lanes, 16) * 16)) for name in ("payload", "sorted_slots")),
        Buffer("k_eff", "float32", (chunks, C, W)),
        Buffer("q_w", "float32", (chunks, C, R)),
        Buffer("strength", "float32", (chunks, C), kept),
        Buffer("write_entries", "uint8", (chunks, C * W, RECORD_BYTES), kept),
        Buffer("write_terms", "uint8", (chunks, C * W, RECORD_BYTES), kept),
        Buffer("partners", "uint8", (chunks, lanes, RECORD_BYTES)),
        Buffer("partner_at", "int32", (chunks, C, W + R)),
        Buffer("slots", "uint8", (chunks, slots, RECORD_BYTES), kept),
        Buffer("slot_count", "int32", (chunks,), kept),
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
            (
                index,
                ("IN_SHARED", str(int(sorts_in_shared(shape)))),
                ("ITEM", SORT_ITEMS[sort_item_bytes(shape)]),
                ("THREADS", str(SORT_THREADS[sorts_in_shared(shape)])),
            ),
        ),
        "phase1_scan": KernelSpec(
            "phase1_scan.cu",
            ("phase1_scan",),
            (
                bank,
                ("STAGED", str(int(staged_weights(shape)))),
                ("THREADS", str(SCAN_THREADS[staged_weights(shape)])),
            ),
        ),
        "phase1_gram": KernelSpec("phase1_gram.cu", ("phase1_gram",), (bank,)),
        "solve": SOLVE_KERNEL,
    }


def _sort(shape: WriteReadShape, chunks: int, device: DeviceModel) -> tuple[Launch, tuple[Buffer, ...]]:
    shared, held = sorts_in_shared(shape), sort_bytes(shape)
    # In global memory the items of as many chunks as run at once.
    blocks = chunks if shared else min(chunks, device.sm_count)
    passes, bits = sort_passes(shape.slots)
    moved = chunks * shape.chunk * (shape.writes + shape.reads) * (dtype_bytes(shape.index_dtype) + 2 * 4)
    share = "a chunk a block" if blocks == chunks else f"up to {ceil_div(chunks, blocks)} chunks a block"
    launch = Launch(
        name="phase1_sort",
        kernel=phase1_kernels(shape)["phase1_sort"],
        entry="phase1_sort",
        grid=(blocks, 1, 1),
        block=(SORT_THREADS[shared], 1, 1),
        arguments=(
            *pointers("k_idx", "q_idx", "lengths", "cu_seqlens", "sort_scratch", "payload", "sorted_slots"),
            _SLAB,
            *int32s("slab_chunks", "P", "T", "C", "W", "R", "S", "shared_bank", "wide"),
            *int32s("digit_bits", "passes"),
        ),
        reads=("k_idx", "q_idx", "lengths", "cu_seqlens", "sort_scratch"),
        writes=("sort_scratch", "payload", "sorted_slots"),
        bytes_moved=moved,
        floor_bytes=moved,
        shared_memory=held if shared else 0,
        note=f"{passes} passes of {bits} bits, {share}, {'shared' if shared else 'global'} memory",
    )
    return launch, () if shared else (Buffer("sort_scratch", "uint8", (blocks, held)),)


def _scan(shape: WriteReadShape, chunks: int, backward: bool) -> Launch:
    C, W, R = shape.chunk, shape.writes, shape.reads
    inputs = ("payload", "sorted_slots", "k_val", "q_val", "g", "beta", "lengths", "cu_seqlens")
    logs = ("log_k", "log_q", "rex", "cpe")
    records = ("write_entries", "write_terms", "partners", "partner_at", "slots", "slot_count")
    results = ("k_eff", "q_w", "flags", "strength", *records, "repeats", *OF_THE_BACKWARD)
    entry = 2 * 4 + dtype_bytes(shape.bank_dtype) + 4 + RECORD_BYTES
    moved = chunks * C * ((W + R) * entry + 2 * RECORD_BYTES * W)
    moved += chunks * capacity(shape) * RECORD_BYTES
    if shape.training:
        moved += chunks * (C * (4 * W + 2 * RECORD_BYTES * R) + read_capacity(shape) * RECORD_BYTES)
    return Launch(
        name="phase1_scan",
        kernel=phase1_kernels(shape)["phase1_scan"],
        entry="phase1_scan",
        grid=(chunks, 1, 1),
        block=(SCAN_THREADS[staged_weights(shape)], 1, 1),
        arguments=(
            *pointers(*inputs, *logs, *results),
            _SLAB,
            *int32s("P", "T", "C", "W", "R", "S", "gates", "wide"),
        ),
        reads=(*inputs, "write_entries", "write_terms"),
        writes=(*logs, *results),
        bytes_moved=moved,
        floor_bytes=moved,
        shared_memory=scan_bytes(shape, backward) if staged_weights(shape) else 0,
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


def plan_solve(chunks: int, chunk: int) -> Launch:
    """Plan the solve of ``chunks`` chunks of C = ``chunk`` tokens."""
    moved = chunks * 4 * (4 * chunk * chunk + chunk)
    rows = ceil_div(chunk, SOLVE_TILE) * SOLVE_TILE
    spans = (
        4 * min(SOLVE_SPAN, rows) * (SOLVE_TILE + 4)
    )  # two of A, two of QK; a column's stride has 4 to spare
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
        shared_memory=4 * (spans + rows * SOLVE_PANEL),
        note=f"{min(SOLVE_PANEL, chunk)} columns a block, X by one warp and QX by another, IEEE float32",
    )


def plan_phase1(shape: WriteReadShape, steps: int, device: DeviceModel, *, backward: bool = True) -> Phase1:
    """Plan Phase 1 and the solve of one slab of ``steps`` steps.

    Parameters
    ----------
    shape : WriteReadShape
        Shapes and dtypes of the call.
    steps : int
        Steps of a slab (see `slab_steps`).
    device : DeviceModel
        The GPU.
    backward : bool
        False: the caller takes nothing that a backward alone needs (`OF_THE_BACKWARD`), even in training.
    """
    chunks = steps * shape.streams
    sort, sort_scratch = _sort(shape, chunks, device)
    scan = _scan(shape, chunks, shape.training and backward)
    return Phase1(
        launches=(sort, scan, _gram(shape, chunks), plan_solve(chunks, shape.chunk)),
        buffers=(*sort_scratch, *phase1_buffers(shape, chunks)),
    )
