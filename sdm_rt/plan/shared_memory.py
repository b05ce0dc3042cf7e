"""Shared-memory plans: each formula once, checked against the device's opt-in limit, refused with a way out.

All figures are bytes a block; ``cap`` is the opt-in limit of the device model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sdm_rt.errors import UnsupportedConfigurationError
from sdm_rt.plan.device import DeviceModel
from sdm_rt.plan.kernel_resources import KernelResources
from sdm_rt.plan.occupancy import SHARED_MEMORY_UNIT, occupancy
from sdm_rt.plan.shapes import MAX_CHUNK, dtype_bytes

__all__ = [
    "GatesPlan",
    "PairsPlan",
    "PhaseAPlan",
    "gates_plan",
    "largest_chunk",
    "one_block_per_sm",
    "pairs_bytes",
    "pairs_plan",
    "phase_a_bytes",
    "phase_a_plan",
    "snapshot_rows",
]

PHASE_A_DEPTH = 8  # rows a warp of Phase A has in flight
PHASE_A_WARPS = 8
PREFERRED = 114_688  # most that a Phase-1 block takes where it has a choice: two blocks fit an SM of 228 KiB
PAIRS_THREADS = 512
BATCH_BYTES = 16  # a thread, of the det variant's buffer


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def phase_a_bytes(chunk: int, warps: int, bank_dtype: str, gradient_bank_dtype: str) -> int:
    """Return Phase A's need: the staged ``-beta lam`` of the chunk, flags, and each warp's rows in flight.

    ``512 C + 16 ceil(C / 4) + warps * 8 * 32 * (gb + rb)``, where a lane's share of a row is 16 bytes of a
    float32 bank (rb) or gradient bank (gb), else 8.
    """
    lane_bytes = 4 * (dtype_bytes(bank_dtype) + dtype_bytes(gradient_bank_dtype))
    return 512 * chunk + 16 * -(-chunk // 4) + warps * PHASE_A_DEPTH * 32 * lane_bytes


def pairs_bytes(chunk: int) -> tuple[int, int]:
    """Return the float32 triangles of Phase-1 backward: strictly lower (d_A) and lower (d_QK)."""
    return 2 * chunk * (chunk - 1), 2 * chunk * (chunk + 1)


def largest_chunk(device: DeviceModel, bank_dtype: str, gradient_bank_dtype: str) -> int:
    """Return the largest chunk size whose backward fits `device`: Phase A with one warp, and the pairs."""

    def fits(chunk: int) -> bool:
        need = max(phase_a_bytes(chunk, 1, bank_dtype, gradient_bank_dtype), pairs_bytes(chunk)[1])
        return need <= device.shared_memory_per_block

    return _largest(fits)


def _largest(fits: Callable[[int], bool]) -> int:
    return next(chunk for chunk in range(MAX_CHUNK, 0, -1) if fits(chunk))


def _refusal(
    what: str, need: int, chunk: int, device: DeviceModel, bank_dtype: str, gradient_bank_dtype: str
) -> UnsupportedConfigurationError:
    fitting = largest_chunk(device, bank_dtype, gradient_bank_dtype)
    return UnsupportedConfigurationError(
        f"{what} needs {need:,} bytes of shared memory a block at chunk_size={chunk} with a "
        f"{bank_dtype} bank and a {gradient_bank_dtype} gradient bank; {device.name} allows "
        f"{device.shared_memory_per_block:,}. The largest chunk size that fits is chunk_size={fitting}."
    )


@dataclass(frozen=True)
class PhaseAPlan:
    """Warps of a Phase A block and its shared memory."""

    warps: int
    shared_memory: int


def phase_a_plan(chunk: int, bank_dtype: str, gradient_bank_dtype: str, device: DeviceModel) -> PhaseAPlan:
    """Return Phase A's block: eight warps, halved until the block fits.

    Raises
    ------
    UnsupportedConfigurationError
        Where not even one warp fits.
    """
    warps = PHASE_A_WARPS
    while phase_a_bytes(chunk, warps, bank_dtype, gradient_bank_dtype) > device.shared_memory_per_block:
        if warps == 1:
            need = phase_a_bytes(chunk, 1, bank_dtype, gradient_bank_dtype)
            raise _refusal("the backward's Phase A", need, chunk, device, bank_dtype, gradient_bank_dtype)
        warps //= 2
    return PhaseAPlan(warps, phase_a_bytes(chunk, warps, bank_dtype, gradient_bank_dtype))


@dataclass(frozen=True)
class PairsPlan:
    """Blocks of Phase-1 backward's pairs.

    Parameters
    ----------
    blocks_per_chunk : int
        1: a block holds both triangles; 2: one each.
    batch_buffer : bool
        Whether the det variant's buffer follows the triangles.
    shared_memory : int
        Bytes of the larger block.
    """

    blocks_per_chunk: int
    batch_buffer: bool
    shared_memory: int


def _pairs_triangles(
    chunk: int, bank_dtype: str, gradient_bank_dtype: str, device: DeviceModel
) -> tuple[int, int]:
    """Return the blocks of a chunk's pairs and the bytes of triangles in the larger one."""
    cap = device.shared_memory_per_block
    strict, lower = pairs_bytes(chunk)
    if strict + lower <= min(PREFERRED, cap):
        return 1, strict + lower
    if lower > cap:
        what = "the backward's Phase-1 pairs"
        raise _refusal(what, lower, chunk, device, bank_dtype, gradient_bank_dtype)
    return 2, lower


def pairs_plan(
    chunk: int,
    bank_dtype: str,
    gradient_bank_dtype: str,
    device: DeviceModel,
    det: bool,
    resources: KernelResources,
) -> PairsPlan:
    """Return the blocks of Phase-1 backward's pairs.

    One block holds both triangles where they take at most ``min(114,688, cap)``. The det variant's batch
    buffer (16 bytes a thread, at the next multiple of 16) comes with it only where as many blocks stay
    resident on an SM and the block still fits.

    Parameters
    ----------
    chunk : int
        C, 1..256.
    bank_dtype, gradient_bank_dtype : str
        Named in a refusal and used for the chunk size it suggests.
    device : DeviceModel
        The GPU.
    det : bool
        Whether the variant that hides more latency is planned.
    resources : KernelResources
        Registers and static shared memory of the kernel.

    Raises
    ------
    UnsupportedConfigurationError
        Where a block with one triangle does not fit.
    """
    blocks, triangles = _pairs_triangles(chunk, bank_dtype, gradient_bank_dtype, device)
    buffered = _round_up(triangles, 16) + BATCH_BYTES * PAIRS_THREADS
    batch_buffer = False
    if det:
        # A block that no longer fits has no resident copies at all.
        plain, with_buffer = (
            occupancy(device, PAIRS_THREADS, resources.registers, resources.static_shared + size).blocks
            for size in (triangles, buffered)
        )
        batch_buffer = with_buffer >= plain
    return PairsPlan(blocks, batch_buffer, buffered if batch_buffer else triangles)


@dataclass(frozen=True)
class GatesPlan:
    """Whether Phase-1 backward's gates stage their outputs in shared memory, and how much that takes."""

    staged: bool
    shared_memory: int


def gates_plan(
    chunk: int, writes: int, reads: int, value_dtype: str, device: DeviceModel, static_shared: int
) -> GatesPlan:
    """Return whether the gates' outputs are staged: ``(4 + e) C W + e C R <= min(114,688, cap - static)``.

    ``e`` is the size of a value: grad_g is float32, grad_k_val and grad_q_val have the values' dtype.
    """
    value = dtype_bytes(value_dtype)
    need = (4 + value) * chunk * writes + value * chunk * reads
    staged = need <= min(PREFERRED, device.shared_memory_per_block - static_shared)
    return GatesPlan(staged, need if staged else 0)


def one_block_per_sm(need: int, static_shared: int, device: DeviceModel) -> int:
    """Return `need` padded so that an SM holds one block at a time."""
    half = device.shared_memory_per_sm // 2 - device.shared_memory_reserved - static_shared
    return max(need, half // SHARED_MEMORY_UNIT * SHARED_MEMORY_UNIT + SHARED_MEMORY_UNIT)


def snapshot_rows(chunks: int, streams: int, chunk: int, writes: int) -> tuple[int, int]:
    """Return the most rows of a snapshot, ``Nt P C W``, and the bits of a row offset: 64 from 2^31 rows."""
    rows = chunks * streams * chunk * writes
    return rows, 64 if rows >= 2**31 else 32
