"""The persistent forward schedule: one launch walks all steps of a slab, one cluster for each column slice.

A column slice cannot quantize its part of a row, whose one scale follows from all columns. With such a
snapshot the steps of a slab are cut into walks, each of one launch, which keeps rows in the bank's format,
and of one that quantizes them.

It takes the order of every sum from the launches of a stepwise step, so both schedules give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from sdm_rt.errors import UnsupportedConfigurationError
from sdm_rt.plan.column_slices import (
    WIDE_SLICE,
    PersistentConfig,
    choose_config,
    choose_schedule,
    configs,
    slice_choices,
)
from sdm_rt.plan.device import DeviceModel
from sdm_rt.plan.launch import MAX_GRID, Argument, Launch, int32s, pointers
from sdm_rt.plan.phase1 import capacity
from sdm_rt.plan.shapes import WriteReadShape, dtype_bytes
from sdm_rt.plan.tiling import ceil_div
from sdm_rt.runtime.kernel import KernelSpec

__all__ = [
    "IN_SHARED_MEMORY",
    "choose_forward_schedule",
    "failed_condition",
    "persistent_constants",
    "persistent_kernels",
    "persistent_launch",
    "steps_of_walk",
]

PRODUCT_TILE = 64
PRODUCT_PAIRS = 16  # most pairs of rows in a tile
PRODUCT_WIDTH = 2  # columns of a thread in the products
SPREAD = 1.2  # of the time that a step's bytes take: over this the clusters start, where nothing is kept,
MOST_OF_A_WALK = 0.02  # and over no more of a walk's
CLOCK_MHZ = 1800  # about an SM's; no bit depends on it
BATCH_ROWS = 4  # rows of a thread that are asked for together
RINGS = (3, 1)  # batches of a thread under way, the preferred count first
MAX_CHUNK_THAT_PAYS = 128  # as far as it was measured
RECORD_BYTES = 32  # of a slot under way: its record, the weights and codes of its first two terms
IN_SHARED_MEMORY = ("residual", "inter", "delta")  # buffers that the stepwise schedule has beside
WALK_BYTES = 512 * 2**20  # of rows that wait for the launch that quantizes them


@dataclass(frozen=True)
class Layout:
    """What a block keeps in its shared memory.

    Parameters
    ----------
    ring : int
        Batches of rows that a thread has under way.
    list_tokens : int
        Tokens whose rows are listed at once.
    in_place : bool
        Whether delta takes the place of residual.
    shared_memory : int
        Bytes of the whole.
    """

    ring: int
    list_tokens: int
    in_place: bool
    shared_memory: int


def _vector(gather: KernelSpec) -> int:
    return int(dict(gather.defines)["VECTOR"])


def _kernel(
    shape: WriteReadShape, gather: KernelSpec, decay_write: KernelSpec, config: PersistentConfig, ring: int
) -> KernelSpec:
    defines = dict(gather.defines)
    # Rows that wait to be quantized are in the bank's format, as of a snapshot "none".
    kept = "1" if shape.quantizes else dict(decay_write.defines)["SNAPSHOT"]
    return KernelSpec(
        "persistent_forward.cu",
        ("persistent_forward",),
        (
            ("BANK", defines["BANK"]),
            ("COLUMNS", str(config.columns(shape))),
            ("RING", str(ring)),
            ("SNAPSHOT", kept),
            ("THREADS", str(config.threads)),
            ("VECTOR", defines["VECTOR"]),
        ),
    )


def persistent_kernels(
    shape: WriteReadShape, gather: KernelSpec, decay_write: KernelSpec
) -> tuple[KernelSpec, ...]:
    """Return the translation units that plans choose from in the place of a gather and a decay-and-write."""
    slices = slice_choices(shape, _vector(gather))
    return tuple(
        _kernel(shape, gather, decay_write, PersistentConfig(one, 1), ring)
        for one, ring in product(slices, RINGS)
    )


def _list_words(shape: WriteReadShape) -> int:
    """Return the 4-byte words of a listed row: slot, weight, and the other half of an index on its way."""
    return 3 if shape.index_dtype == "int64" else 2


def _shared_memory(
    shape: WriteReadShape, config: PersistentConfig, vector: int, ring: int, list_tokens: int, in_place: bool
) -> int:
    C, columns, own = shape.chunk, config.columns(shape), config.own_tokens(shape)
    words = columns // vector
    strengths = ceil_div(C, 4) * 4
    side = min(PRODUCT_TILE, strengths)
    pairs = min(PRODUCT_PAIRS, config.threads // (columns // PRODUCT_WIDTH), own // 2)
    slots = config.threads // 32 * max(1, 32 // words) * BATCH_ROWS
    rows = config.threads * BATCH_ROWS * vector * dtype_bytes(shape.bank_dtype)
    tiles = 2 * 2 * 2 * pairs * (side + 4)
    lists = ceil_div(list_tokens * (shape.writes + shape.reads) * _list_words(shape), 4) * 4
    values = (1 if in_place else 2) * C * columns
    return ring * (rows + RECORD_BYTES * slots) + 4 * (tiles + strengths + own * columns + lists + values)


def _tokens_side_by_side(shape: WriteReadShape, config: PersistentConfig, vector: int) -> int:
    """Return the tokens whose rows a block reads at once: a row of threads for writes, one for reads."""
    return config.threads // (config.columns(shape) // vector) // 2


def _layouts(shape: WriteReadShape, config: PersistentConfig, vector: int) -> Iterator[Layout]:
    """Yield the layouts from the fastest to the smallest."""
    own = config.own_tokens(shape)
    side_by_side = _tokens_side_by_side(shape, config, vector)
    counts = [own, *(side_by_side >> halvings for halvings in range(side_by_side.bit_length()))]
    for ring, in_place in product(RINGS, (False, True)):
        for count in dict.fromkeys(min(count, own) for count in counts):
            if in_place or count >= min(own, side_by_side):
                memory = _shared_memory(shape, config, vector, ring, count, in_place)
                yield Layout(ring, count, in_place, memory)


def failed_condition(
    shape: WriteReadShape, device: DeviceModel, vector: int, config: PersistentConfig, layout: Layout
) -> str:
    """Return the condition that failed; empty where the persistent schedule is the faster one, on an H200.

    It saves the launches of a step and their ramps, where its blocks have the shared memory to keep rows
    under way: batches of rows in number, lists of as many tokens as its threads read side by side. Where not
    all clusters run at once, only rows of one slice were measured.
    """
    if shape.chunk > MAX_CHUNK_THAT_PAYS:
        return f"a chunk of {shape.chunk} tokens, more than {MAX_CHUNK_THAT_PAYS}"
    if layout.ring < RINGS[0]:
        return f"a block has room for {layout.ring} batch of rows under way, not for {RINGS[0]}"
    lists = min(config.own_tokens(shape), _tokens_side_by_side(shape, config, vector))
    if layout.list_tokens < lists:
        return f"a block has room for lists of {layout.list_tokens} tokens, not of {lists}"
    clusters, at_once = config.clusters(shape), device.clusters_at_once(config.cluster)
    if clusters > at_once and shape.row_bytes > WIDE_SLICE:
        return f"{clusters:,} clusters, {at_once:,} fit at once, and a row of more than {WIDE_SLICE} bytes"
    return ""


def _choose(
    shape: WriteReadShape, device: DeviceModel, vector: int, config: PersistentConfig | None
) -> tuple[PersistentConfig, Layout]:
    """Return the configuration and its layout; an UnsupportedConfigurationError says why there is none."""
    candidates = configs(shape, device, slice_choices(shape, vector)) if config is None else (config,)
    return choose_config(shape, device, candidates, lambda one: _layouts(shape, one, vector))


def _launch(
    shape: WriteReadShape,
    device: DeviceModel,
    config: PersistentConfig,
    layout: Layout,
    kernel: KernelSpec,
    steps: int,
    step_floor: int,
) -> Launch:
    P, C, W, R, D = shape.streams, shape.chunk, shape.writes, shape.reads, shape.head_dim
    save = int(shape.training)
    triangles = 4 * (2 + save) * P * C * (C + 1) // 2
    token = (W + R) * (dtype_bytes(shape.index_dtype) + 4) + 16 * W + 2 * shape.row_bytes + 4 * save * D + 4
    moved = step_floor + triangles + shape.step_tokens * token + 16 * P * capacity(shape)
    moved += shape.write_rows * shape.row_bytes if shape.quantizes else 0
    inputs = ("k_idx", "q_idx", "v", "k_eff", "q_w", "x", "qx", "a", "strength", "slots", "slot_count")
    reads = ("memory", *inputs, "write_terms", "lengths", "cu_seqlens")
    place = "delta in the place of residual" if layout.in_place else "residual and delta side by side"
    spread = start_spread_us(shape, device, config, step_floor, steps)
    width = min(config.slice_bytes, shape.row_bytes)
    return Launch(
        name="persistent_forward",
        kernel=kernel,
        entry="persistent_forward",
        grid=(config.slices(shape) * config.cluster, P, 1),
        block=(config.threads, 1, 1),
        cluster=(config.cluster, 1, 1),
        arguments=(
            *pointers(*reads, "readings", "err", "snapshot", "walk_rows"),
            Argument("row_stride", "int64"),
            Argument("step", "int32", step_dependent=True),
            Argument("slab_step", "int32", step_dependent=True),
            *int32s("slab_chunks", "walk_steps", "P", "T", "C", "W", "R", "S", "D", "shared_bank", "wide"),
            *int32s("wide_index", "groups", "list_tokens", "in_place", "start_spread"),
        ),
        reads=(*reads, "err") if layout.in_place else reads,
        writes=("memory", "readings", "err", "walk_rows" if shape.quantizes else "snapshot"),
        bytes_moved=steps * moved,
        floor_bytes=steps * step_floor,
        shared_memory=layout.shared_memory,
        note=f"{width} bytes of every row a cluster, {steps} steps a walk; "
        f"{layout.ring * BATCH_ROWS} rows of a thread under way, {place}, "
        f"{layout.list_tokens} tokens' rows listed at once"
        + (f"; clusters start over {spread:.1f} us" if spread else ""),
    )


def start_spread_us(
    shape: WriteReadShape, device: DeviceModel, config: PersistentConfig, step_floor: int, steps: int
) -> float:
    """Return the microseconds over which the clusters of a walk of ``steps`` steps start.

    Clusters in step with each other share the memory's bandwidth while they gather and leave it idle while
    they compute. Spread out they gather in turn: 8 percent less time at "flagship" without gradients on an
    H200, none less where rows are kept too. Where not all run at once they are out of step anyway. The last
    to start is the last to end, so a short walk spreads them less.
    """
    if shape.training or config.clusters(shape) > device.clusters_at_once(config.cluster):
        return 0.0
    return min(SPREAD, MOST_OF_A_WALK * steps) * device.floor_us(step_floor)


def steps_of_walk(shape: WriteReadShape, slab_steps: int) -> int:
    """Return the steps that one launch walks: all of a slab, unless rows of theirs wait to be quantized."""
    if not shape.quantizes:
        return slab_steps
    most = WALK_BYTES // (shape.write_rows * shape.row_bytes)
    most = max(1, min(most, MAX_GRID[1] // shape.streams))
    return ceil_div(slab_steps, ceil_div(slab_steps, most))


def persistent_launch(
    shape: WriteReadShape,
    device: DeviceModel,
    step: tuple[Launch, ...],
    walk_steps: int,
    config: PersistentConfig | None = None,
) -> Launch:
    """Return the launch that does the work of all steps of a walk.

    Slices and clusters follow `sdm_rt.plan.column_slices.configs`; what does not fit takes larger clusters,
    then narrower slices.

    Parameters
    ----------
    shape : WriteReadShape
        Shapes and dtypes.
    device : DeviceModel
        The GPU.
    step : tuple of Launch
        A step of the stepwise schedule; its launches fix the order of every sum.
    walk_steps : int
        Steps of a walk (`steps_of_walk`).
    config : PersistentConfig, optional
        Slice and cluster in the place of the rule's.

    Raises
    ------
    UnsupportedConfigurationError
        For a GPU without clusters, and where shared memory does not suffice.
    """
    gather, _, decay_write = step
    chosen, layout = _choose(shape, device, _vector(gather.kernel), config)
    kernel = _kernel(shape, gather.kernel, decay_write.kernel, chosen, layout.ring)
    floor = sum(launch.floor_bytes for launch in step)
    return _launch(shape, device, chosen, layout, kernel, walk_steps, floor)


def choose_forward_schedule(
    shape: WriteReadShape,
    device: DeviceModel,
    step: tuple[Launch, ...],
    walk_steps: int,
    schedule: str | None,
) -> tuple[Launch | None, str]:
    """Return the launch that walks the steps, None for the stepwise schedule, and why.

    ``schedule`` and the errors are those of `sdm_rt.plan.column_slices.choose_schedule`, the rest that of
    `persistent_launch`.
    """

    def plan() -> tuple[Launch, Launch]:
        launch = persistent_launch(shape, device, step, walk_steps)
        return launch, launch

    return choose_schedule(device, schedule, _failed_where_it_fits(shape, device, step[0].kernel), plan)


def _failed_where_it_fits(shape: WriteReadShape, device: DeviceModel, gather: KernelSpec) -> str:
    """Return the condition that failed; none where it cannot run, so that the plan says why."""
    vector = _vector(gather)
    try:
        config, layout = _choose(shape, device, vector, None)
    except UnsupportedConfigurationError:
        return ""
    return failed_condition(shape, device, vector, config, layout)


def persistent_constants(
    shape: WriteReadShape, device: DeviceModel, launch: Launch, walk_steps: int
) -> dict[str, int]:
    """Return the numbers among the arguments of a launch of ``walk_steps`` steps that its layout fixes."""
    vector = int(dict(launch.kernel.defines)["VECTOR"])
    config, layout = _choose(shape, device, vector, PersistentConfig.of(shape, launch))
    spread = start_spread_us(shape, device, config, launch.floor_bytes // walk_steps, walk_steps)
    return {
        "start_spread": round(spread * CLOCK_MHZ),
        "list_tokens": layout.list_tokens,
        "in_place": int(layout.in_place),
        "wide_index": int(shape.index_dtype == "int64"),
    }
