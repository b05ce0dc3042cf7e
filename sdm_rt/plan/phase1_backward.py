"""Phase-1 backward: gradients of weights and gates of all chunks at once, in two launches.

The sums over pairs of entries of a slot come first, an entry a thread; then, a chunk a block, the gradients.
Neither reads the bank. A call of the write-read op ends with them; the op of chunks alone rebuilds the
records of its entries before, from the payload.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sdm_rt.plan.buffer import Buffer
from sdm_rt.plan.device import DeviceModel, require_supported
from sdm_rt.plan.forward import forward_constants
from sdm_rt.plan.kernel_resources import kernel_resources
from sdm_rt.plan.launch import Launch, int32s, pointers
from sdm_rt.plan.phase1 import RECORD_BYTES, capacity, plan_phase1
from sdm_rt.plan.shapes import WriteReadShape, dtype_bytes, kernel_type
from sdm_rt.plan.step_plan import StepPlan
from sdm_rt.plan.tiling import ceil_div
from sdm_rt.runtime.kernel import KernelSpec

__all__ = [
    "PAIRS_EACH",
    "entries_a_thread",
    "hides_latency",
    "output_bytes",
    "phase1_backward_constants",
    "phase1_backward_gates_kernel",
    "phase1_backward_pairs_kernel",
    "plan_phase1_backward",
    "plan_phase1_backward_launches",
    "stages_outputs",
]

PAIRS_THREADS = 256
PAIRS_EACH = (4, 2, 1)  # entries that a thread looks at
GATES_THREADS = (256, 512)
BATCH_MIN_CHUNK = 128  # tokens from which the pairs of the write-read op fetch their partners ahead

# Of the chunks, as the scan leaves them.
RECORDS = (
    *("write_entries", "write_terms", "read_entries", "read_terms", "slots", "slot_reads", "slot_count"),
    *("read_slots", "read_slot_count"),
)


def hides_latency(shape: WriteReadShape) -> bool:
    """Return whether the write-read op's pairs fetch the next partner while one is in use; the same bits."""
    return shape.chunk >= BATCH_MIN_CHUNK


def output_bytes(shape: WriteReadShape) -> int:
    """Return the shared memory that the gradients of a chunk pass through, one tensor after the other.

    The largest of grad_k_val and grad_q_val, of the bank's dtype, and a float32 gradient for each write.
    """
    return shape.chunk * max(4 * shape.writes, dtype_bytes(shape.bank_dtype) * shape.reads)


def stages_outputs(shape: WriteReadShape, device: DeviceModel) -> bool:
    """Return whether the gradients of a chunk pass through shared memory: where they fit a block's."""
    kernel = phase1_backward_gates_kernel(shape)
    static = kernel_resources(kernel, kernel.entries[0], device).static_shared
    return output_bytes(shape) <= device.shared_memory_per_block - static


def phase1_backward_pairs_kernel(batch: bool) -> KernelSpec:
    """Return the translation unit of the pairs, ``batch`` with the next partner fetched ahead."""
    return KernelSpec("phase1_backward_pairs.cu", ("phase1_backward_pairs",), (("BATCH", str(int(batch))),))


def phase1_backward_gates_kernel(shape: WriteReadShape) -> KernelSpec:
    """Return the translation unit of the gradients."""
    bank = ("BANK", kernel_type(shape.bank_dtype))
    return KernelSpec("phase1_backward_gates.cu", ("phase1_backward_gates",), (bank,))


def _chunks(shape: WriteReadShape) -> int:
    return shape.streams * shape.chunks


def _record_bytes(shape: WriteReadShape) -> int:
    """Return the bytes of the records of all chunks, of as many slots as they may write."""
    lanes = shape.chunk * (shape.writes + shape.reads)
    return _chunks(shape) * (2 * RECORD_BYTES * lanes + (RECORD_BYTES + 8) * capacity(shape))


def _pairs(shape: WriteReadShape, device: DeviceModel, batch: bool) -> Launch:
    """Return the launch with the most entries a thread that leave a wave of blocks, or else with one."""
    choices = [_pairs_of(shape, batch, each) for each in PAIRS_EACH]
    return next((one for one in choices if one.blocks >= one.occupancy(device).wave(device)), choices[-1])


def entries_a_thread(shape: WriteReadShape, launches: Iterable[Launch]) -> int:
    """Return how many entries a thread of the pairs in ``launches`` looks at; of equal grids, the fewest."""
    (grid,) = {launch.grid for launch in launches if launch.name == "phase1_backward_pairs"}
    return {_pairs_of(shape, False, each).grid: each for each in PAIRS_EACH}[grid]


def _pairs_of(shape: WriteReadShape, batch: bool, each: int) -> Launch:
    C, lanes = shape.chunk, shape.chunk * (shape.writes + shape.reads)
    moved = _record_bytes(shape) + _chunks(shape) * (2 * 4 * C * C + 2 * 4 * lanes)
    reads = (*RECORDS, "d_a", "d_qk")
    return Launch(
        name="phase1_backward_pairs",
        kernel=phase1_backward_pairs_kernel(batch),
        entry="phase1_backward_pairs",
        grid=(_chunks(shape) * ceil_div(lanes, each * PAIRS_THREADS), 1, 1),
        block=(PAIRS_THREADS, 1, 1),
        arguments=(*pointers(*reads, "value_sums", "log_sums"), *int32s("C", "W", "R", "S", "each")),
        reads=reads,
        writes=("value_sums", "log_sums"),
        bytes_moved=moved,
        floor_bytes=moved,
        note=f"{each * PAIRS_THREADS} entries a block; those that share a slot are listed, one a thread, "
        f"partners {'fetched one ahead' if batch else 'a few at a time'}",
    )


def _gates(shape: WriteReadShape, device: DeviceModel) -> Launch:
    C, W, R = shape.chunk, shape.writes, shape.reads
    staged = stages_outputs(shape, device)
    value = dtype_bytes(shape.bank_dtype)
    per_token = 2 * 4 * W + 4 * R + 4 * 4 * (W + R) + value * (W + R) + 4 * W
    moved = _record_bytes(shape) + _chunks(shape) * (C * per_token + 4 * capacity(shape))
    given = ("given_log_k", "given_log_q", "given_rex")
    inputs = (*RECORDS, *given, "d_k_eff", "d_k_pd", "d_q_w", "d_tot", "lengths", "cu_seqlens")
    scratch = ("value_sums", "log_sums", "gate_gradients")
    results = ("grad_k_val", "grad_q_val", "grad_g")
    few, many = GATES_THREADS
    launch = Launch(
        name="phase1_backward_gates",
        kernel=phase1_backward_gates_kernel(shape),
        entry="phase1_backward_gates",
        grid=(_chunks(shape), 1, 1),
        block=(few, 1, 1),
        arguments=(
            *pointers(*inputs, *scratch, *results),
            *int32s("P", "T", "C", "W", "R", "S", "grad_gates", "wide", "stage_outputs"),
        ),
        reads=(*inputs, *scratch),
        writes=(*scratch, *results),
        bytes_moved=moved,
        floor_bytes=moved,
        shared_memory=output_bytes(shape) if staged else 0,
        note=f"a chunk a block, gradients {'staged' if staged else 'stored in sorted order'}",
    )
    # A thread's loads wait for each other. Where an SM has one block alone, twice the threads have twice as
    # many under way.
    if launch.blocks > device.sm_count and launch.occupancy(device).blocks > 1:
        return launch
    return replace(launch, block=(many, 1, 1))


def plan_phase1_backward_launches(
    shape: WriteReadShape, device: DeviceModel, *, batch: bool | None = None
) -> tuple[tuple[Launch, ...], tuple[Buffer, ...]]:
    """Plan Phase-1 backward of every chunk of a training call.

    Parameters
    ----------
    shape : WriteReadShape
        Shapes and dtypes of the call; streams and tokens are not 0.
    device : DeviceModel
        The GPU.
    batch : bool, optional
        Whether the pairs fetch their partners ahead; by default where `hides_latency` says so.

    Returns
    -------
    tuple of Launch
        Pairs, gates.
    tuple of Buffer
        Their scratch. The gradients of a token's writes among it are used only where they do not fit shared
        memory and the gradient of the gate is summed over them.
    """
    chunks, C = _chunks(shape), shape.chunk
    lanes = C * (shape.writes + shape.reads)
    buffers = [Buffer(name, "float32", (chunks, lanes)) for name in ("value_sums", "log_sums")]
    if not stages_outputs(shape, device) and not shape.gates_per_write and shape.writes > 1:
        buffers.append(Buffer("gate_gradients", "float32", (chunks, C, shape.writes)))
    launches = (
        _pairs(shape, device, hides_latency(shape) if batch is None else batch),
        _gates(shape, device),
    )
    return launches, tuple(buffers)


def plan_phase1_backward(shape: WriteReadShape, device: DeviceModel, det: bool) -> StepPlan:
    """Plan Phase-1 backward of N chunks, each a stream of one chunk, from their payload.

    Parameters
    ----------
    shape : WriteReadShape
        N streams of C tokens in one training step.
    device : DeviceModel
        The GPU.
    det : bool
        Whether the pairs fetch their partners ahead; the same bits.

    Returns
    -------
    StepPlan
        One slab: scan, pairs, gates. Its buffers hold the results and the scratch.

    Raises
    ------
    RuntimeError
        For a GPU below compute capability 8.0.
    ValueError
        For a shape of several steps, or of a call that saves nothing.
    """
    require_supported(device)
    if shape.chunks != 1 or not shape.training:
        raise ValueError(f"Phase-1 backward alone takes one training step, got {shape}")
    phase1 = plan_phase1(shape, 1, device)
    scan = next(launch for launch in phase1.launches if launch.name == "phase1_scan")
    launches, scratch = plan_phase1_backward_launches(shape, device, batch=det)
    N, C, W = shape.streams, shape.chunk, shape.writes
    results = (
        Buffer("grad_k_val", shape.bank_dtype, (N, C, W), kept=True),
        Buffer("grad_q_val", shape.bank_dtype, (N, C, shape.reads), kept=True),
        Buffer("grad_g", "float32", (N, C, W), kept=True),
    )
    return StepPlan(
        "phase1_backward_det" if det else "phase1_backward",
        device,
        shape,
        steps=1,
        first_step=(),
        step=(),
        prologue=(scan, *launches),
        slab_steps=1,
        buffers=(
            *(buffer for buffer in phase1.buffers if buffer.name in scan.writes),
            # The op of chunks has a gradient for every write, however wide its gates: nothing sums them.
            *(buffer for buffer in scratch if buffer.name != "gate_gradients"),
            *results,
        ),
    )


def phase1_backward_constants(plan: StepPlan) -> dict[str, int]:
    """Return the numbers among the arguments of `plan_phase1_backward`, fixed by its shapes."""
    shape = plan.shape
    assert isinstance(shape, WriteReadShape)
    return {
        **forward_constants(plan),
        "grad_gates": shape.writes,
        "stage_outputs": int(stages_outputs(shape, plan.device)),
        "each": entries_a_thread(shape, plan.kernels()),
    }
