"""Device model: what plans read of a GPU, queried or taken from a preset.

Sources of the presets: shared memory, threads, blocks and registers per SM are the figures of the compute
capability (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", and the CUDA
toolkit's ``cuda_occupancy.h``); SM counts, L2 sizes and memory bandwidth are the product's data sheet, except
for the H200, whose L2 size and bandwidth were measured (4.25 TB/s is a device copy, bytes read plus written),
as were the clusters that it runs at once; the H100 has as many SMs and is taken to run as many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

__all__ = ["MIN_COMPUTE_CAPABILITY", "PRESETS", "DeviceModel", "preset", "require_supported"]

MIN_COMPUTE_CAPABILITY = (8, 0)

KIB = 1024
MIB = 1024 * KIB
GPC_SMS = 16


@dataclass(frozen=True)
class DeviceModel:
    """The figures of one GPU that plans depend on.

    Parameters
    ----------
    name : str
        The product's name, as the driver reports it or as the preset calls it.
    compute_capability : tuple of (int, int)
        Major and minor number.
    sm_count : int
        Streaming multiprocessors (SMs).
    shared_memory_per_block : int
        Opt-in limit of one block's static plus dynamic shared memory, bytes.
    shared_memory_per_sm : int
        Shared memory of one SM, bytes.
    shared_memory_reserved : int
        Bytes the driver takes per resident block.
    l2_bytes : int
        Size of the L2 cache.
    registers_per_sm : int
        32-bit registers of one SM.
    registers_per_block : int
        32-bit registers one block may hold.
    max_threads_per_sm, max_blocks_per_sm : int
        Residency limits of one SM.
    memory_bandwidth : float
        Bytes per second (read plus written) that time floors divide by; 0 where it is unknown.
    bandwidth_source : str
        Where that figure comes from: ``"data sheet"``, ``"measured"`` or ``"memory clock"``.
    active_clusters : tuple of int
        How many clusters of 1, 2, .. 8 blocks, each block on an SM of its own, run at once, as the driver
        says; empty where nobody asked it.
    """

    name: str
    compute_capability: tuple[int, int]
    sm_count: int
    shared_memory_per_block: int
    shared_memory_per_sm: int
    shared_memory_reserved: int
    l2_bytes: int
    registers_per_sm: int
    registers_per_block: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    memory_bandwidth: float
    bandwidth_source: str = "data sheet"
    active_clusters: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field, value in asdict(self).items():
            least = 0 if field in ("shared_memory_reserved", "memory_bandwidth") else 1
            if isinstance(value, int | float) and value < least:
                raise ValueError(f"{self.name}: {field} must be at least {least}, got {value}")
        if self.shared_memory_per_block + self.shared_memory_reserved > self.shared_memory_per_sm:
            raise ValueError(
                f"{self.name}: one block's shared memory ({self.shared_memory_per_block} + "
                f"{self.shared_memory_reserved} reserved bytes) exceeds the SM's {self.shared_memory_per_sm}"
            )

    @property
    def pdl(self) -> bool:
        """Whether the GPU has programmatic dependent launch (compute capability 9.0 and up)."""
        return self.compute_capability >= (9, 0)

    @property
    def clusters(self) -> bool:
        """Whether the GPU has thread block clusters (compute capability 9.0 and up)."""
        return self.compute_capability >= (9, 0)

    def clusters_at_once(self, blocks: int) -> int:
        """Return how many clusters of ``blocks`` blocks run at once, each block on an SM of its own.

        A cluster lies within one GPC, a group of SMs, and GPUs differ in the SMs that a GPC has left. Where
        the driver was not asked, all GPCs are taken to have 16.
        """
        if self.active_clusters:
            return self.active_clusters[blocks - 1]
        return self.sm_count if blocks == 1 else self.sm_count // GPC_SMS * (GPC_SMS // blocks)

    @property
    def arch(self) -> str:
        """The compile target, for example ``"sm_90"``."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}"

    def floor_us(self, bytes_moved: int) -> float:
        """Return the microseconds that the bytes take at the memory bandwidth; 0 where it is unknown."""
        return bytes_moved / self.memory_bandwidth * 1e6 if self.memory_bandwidth else 0.0

    def to_dict(self) -> dict[str, object]:
        """Return the fields as JSON values."""
        lists = {name: list(getattr(self, name)) for name in ("compute_capability", "active_clusters")}
        return {**asdict(self), **lists}

    @classmethod
    def from_attributes(
        cls,
        name: str,
        attributes: Mapping[str, int],
        memory_bandwidth: float | None = None,
        active_clusters: tuple[int, ...] = (),
    ) -> DeviceModel:
        """Make the model of a real device from its CUDA device attributes.

        Parameters
        ----------
        name : str
            The device's name.
        attributes : mapping of str to int
            Device attributes under their ``cudaDevAttr`` names without that prefix, for example
            ``"MultiProcessorCount"``.
        memory_bandwidth : float, optional
            Bytes per second, where they were measured. Default: the memory clock times the bus width, twice
            (double data rate); some drivers report no clock.
        active_clusters : tuple of int
            As of the class.

        Raises
        ------
        KeyError
            Naming the missing attribute.
        """
        if memory_bandwidth is None:
            bandwidth = 2e3 * attributes["MemoryClockRate"] * attributes["GlobalMemoryBusWidth"] / 8
            source = "memory clock"
        else:
            bandwidth, source = memory_bandwidth, "measured"
        return cls(
            name=name,
            compute_capability=(attributes["ComputeCapabilityMajor"], attributes["ComputeCapabilityMinor"]),
            sm_count=attributes["MultiProcessorCount"],
            shared_memory_per_block=attributes["MaxSharedMemoryPerBlockOptin"],
            shared_memory_per_sm=attributes["MaxSharedMemoryPerMultiprocessor"],
            shared_memory_reserved=attributes["ReservedSharedMemoryPerBlock"],
            l2_bytes=attributes["L2CacheSize"],
            registers_per_sm=attributes["MaxRegistersPerMultiprocessor"],
            registers_per_block=attributes["MaxRegistersPerBlock"],
            max_threads_per_sm=attributes["MaxThreadsPerMultiProcessor"],
            max_blocks_per_sm=attributes["MaxBlocksPerMultiprocessor"],
            memory_bandwidth=bandwidth,
            bandwidth_source=source,
            active_clusters=active_clusters,
        )


def _preset(
    name: str,
    compute_capability: tuple[int, int],
    sm_count: int,
    l2_bytes: int,
    memory_bandwidth: float,
    bandwidth_source: str = "data sheet",
    active_clusters: tuple[int, ...] = (),
) -> DeviceModel:
    """Complete a product's own figures by those of its compute capability."""
    shared_kib, threads, blocks = {
        (8, 0): (164, 2048, 32),
        (8, 9): (100, 1536, 24),
        (9, 0): (228, 2048, 32),
        (10, 0): (228, 2048, 32),
        (12, 0): (100, 1536, 24),
    }[compute_capability]
    return DeviceModel(
        name=name,
        compute_capability=compute_capability,
        sm_count=sm_count,
        shared_memory_per_block=(shared_kib - 1) * KIB,
        shared_memory_per_sm=shared_kib * KIB,
        shared_memory_reserved=KIB,
        l2_bytes=l2_bytes,
        registers_per_sm=65536,
        registers_per_block=65536,
        max_threads_per_sm=threads,
        max_blocks_per_sm=blocks,
        memory_bandwidth=memory_bandwidth,
        bandwidth_source=bandwidth_source,
        active_clusters=active_clusters,
    )


_GH100_CLUSTERS = (132, 66, 39, 30, 22, 17, 15, 15)

PRESETS: dict[str, DeviceModel] = {
    "a100": _preset("A100 80GB SXM", (8, 0), 108, 40 * MIB, 2.039e12),
    "rtx4090": _preset("RTX 4090", (8, 9), 128, 72 * MIB, 1.008e12),
    "h100": _preset("H100 SXM", (9, 0), 132, 50 * MIB, 3.35e12, active_clusters=_GH100_CLUSTERS),
    "h200": _preset("H200", (9, 0), 132, 60 * MIB, 4.25e12, "measured", _GH100_CLUSTERS),
    "b200": _preset("B200", (10, 0), 148, 132_644_864, 7.67e12),
    "rtxpro6000": _preset("RTX PRO 6000 Blackwell", (12, 0), 188, 128 * MIB, 1.792e12),
}


def preset(name: str) -> DeviceModel:
    """Return the preset ``name``: a100, rtx4090, h100, h200, b200 or rtxpro6000.

    Case, spaces, hyphens and underscores do not matter (``"RTX PRO 6000"`` is ``"rtxpro6000"``).

    Raises
    ------
    ValueError
        For a name that is no preset; the message lists them.
    """
    key = "".join(character for character in name.lower() if character.isalnum())
    if key not in PRESETS:
        raise ValueError(f"no device preset named {name!r}; presets: {', '.join(PRESETS)}")
    return PRESETS[key]


def require_supported(device: DeviceModel) -> None:
    """Raise a RuntimeError for a GPU below compute capability 8.0."""
    if device.compute_capability < MIN_COMPUTE_CAPABILITY:
        major, minor = device.compute_capability
        raise RuntimeError(
            f"{device.name} has compute capability {major}.{minor}; "
            f"sdm_rt supports {MIN_COMPUTE_CAPABILITY[0]}.{MIN_COMPUTE_CAPABILITY[1]} and newer"
        )
