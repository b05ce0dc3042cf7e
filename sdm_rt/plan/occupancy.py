"""How many blocks of a kernel an SM holds at once, by the rules of the CUDA occupancy calculator."""

from __future__ import annotations

from dataclasses import dataclass

from sdm_rt.plan.device import DeviceModel

__all__ = ["Occupancy", "occupancy"]

WARP = 32
MAX_REGISTERS_PER_THREAD = 255
# Allocation rules common to compute capability 8.0 and newer.
REGISTER_UNIT = 256  # registers, per warp
SHARED_MEMORY_UNIT = 128  # bytes, per block
SUB_PARTITIONS = 4  # of an SM; each owns a quarter of the registers


@dataclass(frozen=True)
class Occupancy:
    """Resident blocks of one SM and what limits them.

    Parameters
    ----------
    blocks : int
        Blocks resident on one SM; 0 where not even one fits.
    limit : str
        ``"threads"``, ``"blocks"``, ``"registers"`` or ``"shared memory"``: the scarcest resource (the first
        of this order where several tie).
    """

    blocks: int
    limit: str

    def wave(self, device: DeviceModel) -> int:
        """Return the blocks that the whole GPU holds at once."""
        return self.blocks * device.sm_count


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _blocks_by_registers(device: DeviceModel, warps: int, registers: int) -> int:
    per_warp = _round_up(registers * WARP, REGISTER_UNIT)
    # The hardware checks a launch as if warps came in whole sets of sub-partitions.
    checked = per_warp * _round_up(warps, SUB_PARTITIONS)
    if registers > MAX_REGISTERS_PER_THREAD or checked > device.registers_per_block:
        return 0
    resident_warps = device.registers_per_sm // SUB_PARTITIONS // per_warp * SUB_PARTITIONS
    return resident_warps // warps


def _blocks_by_shared_memory(device: DeviceModel, shared_memory: int) -> int:
    if shared_memory > device.shared_memory_per_block:
        return 0
    allocated = _round_up(shared_memory + device.shared_memory_reserved, SHARED_MEMORY_UNIT)
    return device.shared_memory_per_sm // allocated if allocated else device.max_blocks_per_sm


def occupancy(device: DeviceModel, threads: int, registers: int, shared_memory: int) -> Occupancy:
    """Return the resident blocks per SM of a kernel.

    Named barriers beyond the one of ``__syncthreads`` are not modelled: no kernel here uses them.

    Parameters
    ----------
    device : DeviceModel
        The GPU; the SM is taken as configured for its largest shared memory.
    threads : int
        Threads of a block, 1..1024.
    registers : int
        Registers of a thread.
    shared_memory : int
        Static plus dynamic shared memory of a block, bytes.

    Returns
    -------
    Occupancy
        The count and the resource that sets it.

    Raises
    ------
    ValueError
        For a thread count outside 1..1024, registers below 1 or negative shared memory.
    """
    if not 1 <= threads <= 1024:
        raise ValueError(f"threads must be in 1..1024, got {threads}")
    if registers < 1:
        raise ValueError(f"registers must be at least 1, got {registers}")
    if shared_memory < 0:
        raise ValueError(f"shared_memory must not be negative, got {shared_memory}")
    warps = -(-threads // WARP)
    limits = {
        "threads": device.max_threads_per_sm // WARP // warps,
        "blocks": device.max_blocks_per_sm,
        "registers": _blocks_by_registers(device, warps, registers),
        "shared memory": _blocks_by_shared_memory(device, shared_memory),
    }
    limit = min(limits, key=lambda name: limits[name])
    return Occupancy(limits[limit], limit)
