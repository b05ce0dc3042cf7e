"""The persistent backward schedule: one launch walks a slab's steps back, one cluster for each column slice.

It takes the order of every sum from the launches of a stepwise step, so both schedules give the same bits.
Dots over columns leave each slice as partial sums, which a small launch at the end of each slab adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sdm_rt.errors import UnsupportedConfigurationError
from sdm_rt.plan.buffer import Buffer, total_bytes
from sdm_rt.plan.column_slices import (
    NARROW_SLICE,
    WIDE_SLICE,
    PersistentConfig,
    choose_config,
    choose_schedule,
    configs,
    slice_choices,
)
from sdm_rt.plan.device import DeviceModel
from sdm_rt.plan.forward import vector_values
from sdm_rt.plan.launch import Argument, Launch, int32s, pointers
from sdm_rt.plan.phase1 import RECORD_BYTES, capacity, read_capacity
from sdm_rt.plan.shapes import WriteReadShape, dtype_bytes
from sdm_rt.plan.tiling import ceil_div
from sdm_rt.runtime.kernel import KernelSpec

__all__ = [
    "COLUMN_SUM_KERNEL",
    "BackwardSlabs",
    "choose_backward_schedule",
    "failed_condition",
    "persistent_backward_constants",
    "persistent_backward_kernels",
    "plan_persistent_backward",
]

WORD_BYTES = 16
TILE_ROWS = 32
TILE_PAIRS = 16  # most pairs of columns in a tile
TEAM_SLOTS = 4  # of a team under way at once; half as many where rows take more registers
SLOT_BYTES = 56  # of a slot under way: its record, its first two K and Q entries, where its Q entries lie
PARTIAL_BYTES = 64 * 2**20  # of partial sums in a slab
SUM_THREADS = 256
MAX_CHUNK_THAT_PAYS = 64  # as far as it was measured
SUM_KINDS = 4  # d_k_pd, d_k_eff, d_q_w, d_tot

COLUMN_SUM_KERNEL = KernelSpec("column_sum.cu", ("column_sum",))

_SLAB_STEP = Argument("slab_step", "int32", step_dependent=True)


@dataclass(frozen=True)
class Layout:
    """What a block keeps in its shared memory.

    Parameters
    ----------
    list_tokens : int
        Tokens whose written rows are listed at once.
    in_place : bool
        Whether lam takes the place of gwr.
    overlap : bool
        Whether the lists lie where the tiles of the d_u update lie later.
    shared_memory : int
        Bytes of the whole.
    """

    list_tokens: int
    in_place: bool
    overlap: bool
    shared_memory: int


@dataclass(frozen=True)
class BackwardSlabs:
    """The persistent schedule of a backward.

    Parameters
    ----------
    launches : tuple of Launch
        Those of a slab: the steps, then the sums over slices.
    slab_steps : int
        Steps of a slab.
    buffers : tuple of Buffer
        The partial sums of a slab.
    """

    launches: tuple[Launch, ...]
    slab_steps: int
    buffers: tuple[Buffer, ...]


def _slices(shape: WriteReadShape, phase_a: KernelSpec) -> tuple[int, ...]:
    return slice_choices(shape, int(dict(phase_a.defines)["VECTOR"]))


def _kernel(shape: WriteReadShape, phase_a: KernelSpec, config: PersistentConfig) -> KernelSpec:
    defines = dict(phase_a.defines)
    return KernelSpec(
        "persistent_backward.cu",
        ("persistent_backward",),
        (
            ("BANK", defines["BANK"]),
            ("COLUMNS", str(config.columns(shape))),
            ("GRADIENT", defines["GRADIENT"]),
            ("SNAPSHOT", defines["SNAPSHOT"]),
            ("THREADS", str(config.threads)),
            ("VECTOR", defines["VECTOR"]),
        ),
    )


def persistent_backward_kernels(shape: WriteReadShape, phase_a: KernelSpec) -> tuple[KernelSpec, ...]:
    """Return the translation units that plans choose from in the place of a Phase A and its neighbours."""
    slices = _slices(shape, phase_a)
    return tuple(_kernel(shape, phase_a, PersistentConfig(one, 1)) for one in slices)


def _shared_memory(
    shape: WriteReadShape, config: PersistentConfig, list_tokens: int, in_place: bool, overlap: bool
) -> int:
    C, columns = shape.chunk, config.columns(shape)
    by_value = vector_values(shape) * dtype_bytes(shape.bank_dtype) < WORD_BYTES
    few = by_value or shape.gradient_bank_dtype != shape.bank_dtype
    team_slots = TEAM_SLOTS // 2 if few else TEAM_SLOTS
    units = config.threads // 32 * (32 * WORD_BYTES // config.slice_bytes) * team_slots
    pairs = min(TILE_PAIRS, config.threads // (columns // 4), config.own_tokens(shape) // 2)
    tiles = 2 * TILE_ROWS * pairs * 16
    words = 3 if shape.index_dtype == "int64" else 2  # slot, weight, the other half of an index on its way
    lists = 4 * ceil_div(list_tokens * shape.writes * words, 4) * 4
    listed = max(tiles, lists) if overlap else tiles + lists
    values = 4 * (1 if in_place else 2) * C * columns
    return SLOT_BYTES * units + listed + 4 * ceil_div(C, 4) * 4 + C * config.slice_bytes + values


def _layouts(shape: WriteReadShape, config: PersistentConfig) -> Iterator[Layout]:
    """Yield the layouts from the fastest to the smallest."""
    own, warps = config.own_tokens(shape), config.threads // 32
    # One list a warp at least; with more it fetches ahead.
    counts = dict.fromkeys(min(warps * depth, own) for depth in (ceil_div(own, warps), 2, 1))
    for in_place in (False, True):
        for overlap in (False, True):
            for count in counts:
                yield Layout(
                    count, in_place, overlap, _shared_memory(shape, config, count, in_place, overlap)
                )


def _choose(
    shape: WriteReadShape, device: DeviceModel, phase_a: KernelSpec, config: PersistentConfig | None
) -> tuple[PersistentConfig, Layout]:
    """Return the configuration and its layout; an UnsupportedConfigurationError says why there is none."""
    candidates = configs(shape, device, _slices(shape, phase_a)) if config is None else (config,)
    return choose_config(shape, device, candidates, lambda one: _layouts(shape, one), " in the backward")


def _partial_buffers(shape: WriteReadShape, slices: int, steps: int) -> tuple[Buffer, ...]:
    cells = slices, steps * shape.streams
    entries = {"partial_k_pd": shape.writes, "partial_k_eff": shape.writes, "partial_q_w": shape.reads}
    return (
        *(Buffer(name, "float32", (*cells, shape.chunk, lanes)) for name, lanes in entries.items()),
        Buffer("partial_tot", "float32", (*cells, capacity(shape))),
    )


def _walk(
    shape: WriteReadShape,
    config: PersistentConfig,
    layout: Layout,
    kernel: KernelSpec,
    slab_steps: int,
    step_floor: int,
    partial_bytes: int,
) -> Launch:
    P, C, W, R, D = shape.streams, shape.chunk, shape.writes, shape.reads, shape.head_dim
    triangles = 2 * 4 * P * C * (C + 1) // 2
    token = W * (dtype_bytes(shape.index_dtype) + 4 + RECORD_BYTES) + R * RECORD_BYTES
    token += 2 * 4 * D + 2 * shape.row_bytes + 4
    records = P * (capacity(shape) * (RECORD_BYTES + 8) + read_capacity(shape) * RECORD_BYTES)
    moved = slab_steps * (step_floor + triangles + shape.step_tokens * token + records) + partial_bytes
    saved = ("snapshot", "snapshot_scale", "k_idx", "write_weight", "err", "strength", "x", "qx")
    slots = ("slots", "slot_count", "write_terms", "slot_reads")
    read_slots = ("read_slots", "read_slot_count", "read_terms")
    inputs = (*saved, "grad_readings", *slots, *read_slots, "lengths", "cu_seqlens")
    outputs = ("lam", "grad_v", "partial_k_pd", "partial_k_eff", "partial_q_w", "partial_tot")
    place = "lam in the place of gwr" if layout.in_place else "gwr and lam side by side"
    lists = f"{layout.list_tokens} tokens' rows listed at once"
    width = min(config.slice_bytes, shape.row_bytes)
    return Launch(
        name="persistent_backward",
        kernel=kernel,
        entry="persistent_backward",
        grid=(config.slices(shape) * config.cluster, P, 1),
        block=(config.threads, 1, 1),
        cluster=(config.cluster, 1, 1),
        arguments=(
            *pointers("gradient_bank", "memory", *inputs, *outputs),
            Argument("row_stride", "int64"),
            _SLAB_STEP,
            *int32s("slab_chunks", "P", "T", "C", "W", "R", "S", "D", "shared_bank", "wide", "wide_index"),
            *int32s("list_tokens", "in_place", "overlap"),
        ),
        reads=("gradient_bank", "memory", *inputs),
        writes=("gradient_bank", "memory", *outputs),
        bytes_moved=moved,
        floor_bytes=slab_steps * step_floor,
        shared_memory=layout.shared_memory,
        note=f"{width} bytes of every row a cluster, {slab_steps} steps a walk; {place}, {lists}"
        + (", where the tiles lie later" if layout.overlap else ""),
    )


def _column_sum(shape: WriteReadShape, slices: int, slab_steps: int, partial_bytes: int) -> Launch:
    partials = ("partial_k_pd", "partial_k_eff", "partial_q_w", "partial_tot")
    reads = (*partials, "k_idx", "q_idx", "slots", "slot_count", "lengths", "cu_seqlens")
    writes = ("d_k_pd", "d_k_eff", "d_q_w", "d_tot")
    entries = shape.chunk * (shape.writes + shape.reads) * dtype_bytes(shape.index_dtype)
    chunks = slab_steps * shape.streams
    return Launch(
        name="column_sum",
        kernel=COLUMN_SUM_KERNEL,
        entry="column_sum",
        grid=(chunks, SUM_KINDS, 1),
        block=(SUM_THREADS, 1, 1),
        arguments=(
            *pointers(*reads, *writes),
            _SLAB_STEP,
            *int32s("slab_chunks", "P", "T", "C", "W", "R", "S", "shared_bank", "wide", "wide_index"),
            *int32s("slices", "halves"),
        ),
        reads=reads,
        writes=writes,
        bytes_moved=partial_bytes + partial_bytes // slices + chunks * entries,
        floor_bytes=0,
        note="adds the slices of every dot in order",
    )


def plan_persistent_backward(
    shape: WriteReadShape,
    device: DeviceModel,
    step: tuple[Launch, ...],
    config: PersistentConfig | None = None,
) -> BackwardSlabs:
    """Plan the launches that do the work of a slab of steps.

    Slices and clusters follow `sdm_rt.plan.column_slices.configs`; what does not fit takes larger clusters,
    then narrower slices. A slab is as many steps as leave about 64 MiB of partial sums.

    Parameters
    ----------
    shape : WriteReadShape
        Shapes and dtypes.
    device : DeviceModel
        The GPU.
    step : tuple of Launch
        A step of the stepwise schedule: GWR, d_u update, Phase A, GDS; they fix the order of every sum.
    config : PersistentConfig, optional
        Slice and cluster in the place of the rule's.

    Raises
    ------
    UnsupportedConfigurationError
        For a GPU without clusters, for several streams of one bank, and where shared memory does not suffice.
    """
    if shape.shared_bank:
        raise UnsupportedConfigurationError(
            "schedule='persistent' walks streams side by side, and streams of one bank may read the same "
            "rows: their gradients are added in turn, by schedule='stepwise'"
        )
    (phase_a,) = (launch.kernel for launch in step if launch.name == "phase_a")
    chosen, layout = _choose(shape, device, phase_a, config)
    slices = chosen.slices(shape)
    one_step = total_bytes(_partial_buffers(shape, slices, 1))
    slab_steps = min(max(1, PARTIAL_BYTES // one_step), shape.chunks)
    partial_bytes = slab_steps * one_step
    floor = sum(launch.floor_bytes for launch in step)
    kernel = _kernel(shape, phase_a, chosen)
    return BackwardSlabs(
        launches=(
            _walk(shape, chosen, layout, kernel, slab_steps, floor, partial_bytes),
            _column_sum(shape, slices, slab_steps, partial_bytes),
        ),
        slab_steps=slab_steps,
        buffers=_partial_buffers(shape, slices, slab_steps),
    )


def failed_condition(shape: WriteReadShape) -> str:
    """Return the condition that failed; empty where the persistent schedule is the faster one, on an H200.

    It saves the launches of a step and their ramps; the stepwise kernels work on all SMs, and sum dots over
    whole rows. So it pays at chunks of up to 64 tokens where a row is one narrow slice.
    """
    if shape.chunk > MAX_CHUNK_THAT_PAYS:
        return f"a chunk of {shape.chunk} tokens, more than {MAX_CHUNK_THAT_PAYS}"
    if shape.row_bytes > NARROW_SLICE:
        return f"a row of {shape.row_bytes:,} bytes, more than {NARROW_SLICE}"
    return ""


def choose_backward_schedule(
    shape: WriteReadShape, device: DeviceModel, step: tuple[Launch, ...], schedule: str | None
) -> tuple[BackwardSlabs | None, str]:
    """Return the persistent schedule, None for the stepwise one, and why.

    ``schedule`` and the errors are those of `sdm_rt.plan.column_slices.choose_schedule`, the rest that of
    `plan_persistent_backward`.
    """

    def plan() -> tuple[BackwardSlabs, Launch]:
        slabs = plan_persistent_backward(shape, device, step)
        return slabs, slabs.launches[0]

    return choose_schedule(device, schedule, failed_condition(shape), plan)


def persistent_backward_constants(
    shape: WriteReadShape, device: DeviceModel, walk: Launch, slab_steps: int
) -> dict[str, int]:
    """Return the numbers among the arguments of a slab's launches that the choice fixes."""
    config, layout = choose_config(
        shape, device, (PersistentConfig.of(shape, walk),), lambda one: _layouts(shape, one)
    )
    return {
        "slab_chunks": slab_steps * shape.streams,
        "list_tokens": layout.list_tokens,
        "in_place": int(layout.in_place),
        "overlap": int(layout.overlap),
        "slices": config.slices(shape),
        "halves": WIDE_SLICE // config.slice_bytes,
    }
