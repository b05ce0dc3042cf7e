"""The persistent forward schedule: one launch walks all steps of a slab, one cluster for each column slice.

It takes the order of every sum from the launches of a stepwise step, so both schedules give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sdm_rt.errors import UnsupportedConfigurationError
from sdm_rt.plan.device import DeviceModel
from sdm_rt.plan.launch import MAX_CLUSTER, Argument, Launch, int32s, pointers
from sdm_rt.plan.phase1 import capacity
from sdm_rt.plan.shapes import WriteReadShape, dtype_bytes
from sdm_rt.plan.tiling import ceil_div
from sdm_rt.runtime.kernel import KernelSpec

__all__ = [
    "IN_SHARED_MEMORY",
    "NO_ROW_SCALE",
    "SCHEDULES",
    "PersistentConfig",
    "choose_schedule",
    "pays",
    "persistent_constants",
    "persistent_kernels",
    "persistent_launch",
]

SCHEDULES = ("stepwise", "persistent")
MAX_CHUNK_THAT_PAYS = 64
"""Chunks of more tokens spend their steps on memory, which the stepwise kernels use better."""

WORD_BYTES = 16
WIDE_SLICE, NARROW_SLICE = 256, 128  # bytes of a column slice
CLUSTERS = (4, 2, 1)  # blocks; the most of them that leave every block an SM
LARGE_CLUSTER = 8  # where its blocks are no more than half of the SMs
THREADS = 512
PRODUCT_TILE = 64
PRODUCT_PAIRS = 16  # most pairs of rows in a tile
WRITE_ROWS = 8  # rows of a thread under way at once in decay-and-write
RECORD_BYTES = 24  # of a slot under way: its record, the weight and token of its first term
IN_SHARED_MEMORY = (
    "residual",
    "inter",
    "delta",
)  # buffers of the stepwise schedule that this one does without
NO_ROW_SCALE = ("none", "bf16")  # snapshots that a column slice can write by itself


@dataclass(frozen=True)
class PersistentConfig:
    """How the work of a stream is cut.

    Parameters
    ----------
    slice_bytes : int
        Bytes of a bank row that one cluster owns.
    cluster : int
        Blocks of a cluster, 1..8.
    threads : int
        Threads of a block.
    """

    slice_bytes: int
    cluster: int
    threads: int = THREADS


@dataclass(frozen=True)
class Layout:
    """What a block keeps in its shared memory.

    Parameters
    ----------
    list_tokens : int
        Tokens whose rows are listed at once.
    in_place : bool
        Whether delta takes the place of residual.
    shared_memory : int
        Bytes of the whole.
    """

    list_tokens: int
    in_place: bool
    shared_memory: int


def _vector(gather: KernelSpec) -> int:
    return int(dict(gather.defines)["VECTOR"])


def _slices(shape: WriteReadShape, vector: int) -> tuple[int, ...]:
    """Return the slices, bytes of a row, to choose from: rows of words under 16 bytes take the narrow one."""
    words = vector * dtype_bytes(shape.bank_dtype)
    return (WIDE_SLICE, NARROW_SLICE) if words == WORD_BYTES else (NARROW_SLICE,)


def _kernel(
    shape: WriteReadShape, gather: KernelSpec, decay_write: KernelSpec, config: PersistentConfig
) -> KernelSpec:
    defines = dict(gather.defines)
    return KernelSpec(
        "persistent_forward.cu",
        ("persistent_forward",),
        (
            ("BANK", defines["BANK"]),
            ("COLUMNS", str(_columns(shape, config))),
            ("SNAPSHOT", dict(decay_write.defines)["SNAPSHOT"]),
            ("THREADS", str(config.threads)),
            ("VECTOR", defines["VECTOR"]),
        ),
    )


def persistent_kernels(
    shape: WriteReadShape, gather: KernelSpec, decay_write: KernelSpec
) -> tuple[KernelSpec, ...]:
    """Return the translation units that plans choose from in the place of a gather and a decay-and-write."""
    slices = _slices(shape, _vector(gather))
    return tuple(_kernel(shape, gather, decay_write, PersistentConfig(one, CLUSTERS[0])) for one in slices)


def _columns(shape: WriteReadShape, config: PersistentConfig) -> int:
    return config.slice_bytes // dtype_bytes(shape.bank_dtype)


def _own_tokens(shape: WriteReadShape, config: PersistentConfig) -> int:
    """Return the most tokens that a block owns: pairs, dealt to the blocks in turn."""
    return 2 * ceil_div(ceil_div(shape.chunk, 2), config.cluster)


def _list_words(shape: WriteReadShape) -> int:
    """Return the 4-byte words of a listed row: slot, weight, and the other half of an index on its way."""
    return 3 if shape.index_dtype == "int64" else 2


def _shared_memory(
    shape: WriteReadShape, config: PersistentConfig, vector: int, list_tokens: int, in_place: bool
) -> int:
    C, columns, own = shape.chunk, _columns(shape, config), _own_tokens(shape, config)
    words = columns // vector
    strengths = ceil_div(C, 4) * 4
    side = min(PRODUCT_TILE, strengths)
    pairs = min(PRODUCT_PAIRS, config.threads // (columns // 4), own // 2)
    units = config.threads // 32 * max(1, 32 // words) * WRITE_ROWS
    tiles = 2 * 2 * 2 * pairs * (side + 4)
    lists = ceil_div(list_tokens * (shape.writes + shape.reads) * _list_words(shape), 4) * 4
    values = (1 if in_place else 2) * C * columns
    return RECORD_BYTES * units + 4 * (tiles + strengths + own * columns + lists + values)


def _layouts(shape: WriteReadShape, config: PersistentConfig, vector: int) -> Iterator[Layout]:
    """Yield the layouts from the fastest to the smallest."""
    own = _own_tokens(shape, config)
    # Two rows of threads a token: those that it writes and those that it reads.
    side_by_side = config.threads // (_columns(shape, config) // vector) // 2
    counts = [own, *(side_by_side >> halvings for halvings in range(side_by_side.bit_length()))]
    for in_place in (False, True):
        for count in dict.fromkeys(min(count, own) for count in counts):
            if in_place or count >= min(own, side_by_side):
                yield Layout(count, in_place, _shared_memory(shape, config, vector, count, in_place))


def _fitting(
    shape: WriteReadShape, device: DeviceModel, config: PersistentConfig, vector: int
) -> Layout | None:
    limit = device.shared_memory_per_block
    return next((layout for layout in _layouts(shape, config, vector) if layout.shared_memory <= limit), None)


def _blocks(shape: WriteReadShape, config: PersistentConfig) -> int:
    return shape.streams * ceil_div(shape.row_bytes, config.slice_bytes) * config.cluster


def _leaves_half(shape: WriteReadShape, device: DeviceModel, slice_bytes: int) -> bool:
    """Return whether large clusters leave half of the SMs idle: steps are then short, and launches long."""
    return 2 * _blocks(shape, PersistentConfig(slice_bytes, LARGE_CLUSTER)) <= device.sm_count


def pays(shape: WriteReadShape, device: DeviceModel) -> bool:
    """Return whether the persistent schedule is the faster one, as measured on an H200.

    It saves the launches of a step and their ramps, and loses where clusters of column slices read rows of
    several slices in pieces. So it pays at chunks of up to 64 tokens where a row is one slice or two, where a
    step is short, and where nothing is kept, so that a step moves less.
    """
    if shape.chunk > MAX_CHUNK_THAT_PAYS:
        return False
    return not shape.training or shape.row_bytes <= WIDE_SLICE or _leaves_half(shape, device, WIDE_SLICE)


def _candidates(shape: WriteReadShape, device: DeviceModel, vector: int) -> Iterator[PersistentConfig]:
    """Yield what the rule would take, and behind it what needs less shared memory."""
    choices = _slices(shape, vector)
    first = choices[0] if shape.row_bytes > WIDE_SLICE else choices[-1]
    for slice_bytes in (first, *(one for one in choices if one < first)):
        sizes = [PersistentConfig(slice_bytes, cluster) for cluster in CLUSTERS]
        cluster = next((one.cluster for one in sizes if _blocks(shape, one) <= device.sm_count), CLUSTERS[-1])
        if _leaves_half(shape, device, slice_bytes):
            cluster = LARGE_CLUSTER
        while cluster <= MAX_CLUSTER:
            yield PersistentConfig(slice_bytes, cluster)
            cluster *= 2


def _choose(
    shape: WriteReadShape, device: DeviceModel, vector: int, config: PersistentConfig | None
) -> tuple[PersistentConfig, Layout]:
    """Return the configuration and its layout; an UnsupportedConfigurationError says why there is none."""
    if not device.clusters:
        raise UnsupportedConfigurationError(
            f"schedule='persistent' needs thread block clusters (compute capability 9.0), {device.name} has "
            f"none; use schedule='stepwise'"
        )
    if shape.training and shape.snapshot not in NO_ROW_SCALE:
        raise UnsupportedConfigurationError(
            f"schedule='persistent' cannot keep a snapshot of snapshot_quant={shape.snapshot!r}, whose rows "
            f"have one scale across all column slices; use schedule='stepwise' or snapshot_quant='none'"
        )
    candidates = [config] if config is not None else list(_candidates(shape, device, vector))
    for one in candidates:
        if (layout := _fitting(shape, device, one, vector)) is not None:
            return one, layout
    need = min(layout.shared_memory for one in candidates for layout in _layouts(shape, one, vector))
    raise UnsupportedConfigurationError(
        f"schedule='persistent' needs {need:,} bytes of shared memory a block at chunk_size={shape.chunk}; "
        f"{device.name} allows {device.shared_memory_per_block:,}; use schedule='stepwise' or a smaller "
        f"chunk_size"
    )


def _launch(
    shape: WriteReadShape,
    config: PersistentConfig,
    layout: Layout,
    kernel: KernelSpec,
    slab_steps: int,
    step_floor: int,
) -> Launch:
    P, C, W, R, D = shape.streams, shape.chunk, shape.writes, shape.reads, shape.head_dim
    save = int(shape.training)
    triangles = 4 * (2 + save) * P * C * (C + 1) // 2
    token = (W + R) * (dtype_bytes(shape.index_dtype) + 4) + 16 * W + 2 * shape.row_bytes + 4 * save * D + 4
    moved = step_floor + triangles + shape.step_tokens * token + 16 * P * capacity(shape)
    inputs = ("k_idx", "q_idx", "v", "k_eff", "q_w", "x", "qx", "a", "strength", "slots", "slot_count")
    reads = ("memory", *inputs, "write_terms", "lengths", "cu_seqlens")
    place = "delta in the place of residual" if layout.in_place else "residual and delta side by side"
    return Launch(
        name="persistent_forward",
        kernel=kernel,
        entry="persistent_forward",
        grid=(ceil_div(shape.row_bytes, config.slice_bytes) * config.cluster, P, 1),
        block=(config.threads, 1, 1),
        cluster=(config.cluster, 1, 1),
        arguments=(
            *pointers(*reads, "readings", "err", "snapshot"),
            Argument("row_stride", "int64"),
            Argument("slab_step", "int32", step_dependent=True),
            *int32s("slab_chunks", "P", "T", "C", "W", "R", "S", "D", "shared_bank", "wide"),
            *int32s("wide_index", "groups", "list_tokens", "in_place"),
        ),
        reads=(*reads, "err") if layout.in_place else reads,
        writes=("memory", "readings", "err", "snapshot"),
        bytes_moved=slab_steps * moved,
        floor_bytes=slab_steps * step_floor,
        shared_memory=layout.shared_memory,
        note=f"{config.slice_bytes} bytes of every row a cluster, all steps of a slab; {place}, "
        f"{layout.list_tokens} tokens' rows listed at once",
    )


def persistent_launch(
    shape: WriteReadShape,
    device: DeviceModel,
    step: tuple[Launch, ...],
    slab_steps: int,
    config: PersistentConfig | None = None,
) -> Launch:
    """Return the launch that does the work of all steps of a slab.

    Slices are 256 bytes of a row, 128 for rows of up to 256 bytes or of words under 16 bytes; clusters have
    four blocks, or two or one where the GPU has fewer SMs than that takes. What does not fit takes larger
    clusters, then narrower slices.

    Parameters
    ----------
    shape : WriteReadShape
        Shapes and dtypes.
    device : DeviceModel
        The GPU.
    step : tuple of Launch
        A step of the stepwise schedule; its launches fix the order of every sum.
    slab_steps : int
        Steps of a slab.
    config : PersistentConfig, optional
        Slice and cluster in the place of the rule's.

    Raises
    ------
    UnsupportedConfigurationError
        For a GPU without clusters, a snapshot with one scale a row, and where shared memory does not suffice.
    """
    gather, _, decay_write = step
    chosen, layout = _choose(shape, device, _vector(gather.kernel), config)
    kernel = _kernel(shape, gather.kernel, decay_write.kernel, chosen)
    floor = sum(launch.floor_bytes for launch in step)
    return _launch(shape, chosen, layout, kernel, slab_steps, floor)


def choose_schedule(
    shape: WriteReadShape,
    device: DeviceModel,
    step: tuple[Launch, ...],
    slab_steps: int,
    schedule: str | None,
) -> tuple[Launch | None, str]:
    """Choose the schedule of a forward.

    Parameters
    ----------
    shape, device, step, slab_steps
        As of `persistent_launch`.
    schedule : {"stepwise", "persistent"}, optional
        Forces one. Default: persistent where it can run and `pays`, else stepwise.

    Returns
    -------
    launch : Launch or None
        The launch of the persistent schedule; None for the stepwise one.
    note : str
        Which one, and why.

    Raises
    ------
    ValueError
        For another name.
    UnsupportedConfigurationError
        Where the forced schedule cannot run, saying why.
    """
    if schedule not in (None, *SCHEDULES):
        raise ValueError(f"schedule: expected None or one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if schedule == "stepwise":
        return None, "schedule: stepwise, as asked"
    if schedule is None and not device.clusters:
        return None, "schedule: stepwise, without clusters"
    if schedule is None and not pays(shape, device):
        return None, "schedule: stepwise, by the rule"
    try:
        launch = persistent_launch(shape, device, step, slab_steps)
    except UnsupportedConfigurationError as error:
        if schedule == "persistent":
            raise
        return None, f"schedule: stepwise, since {error}"
    clusters = launch.blocks // launch.cluster[0]
    why = "as asked" if schedule else "by the rule"
    return launch, f"schedule: persistent, {why}; {clusters} clusters of {launch.cluster[0]} blocks"


def persistent_constants(shape: WriteReadShape, device: DeviceModel, launch: Launch) -> dict[str, int]:
    """Return the numbers among the launch's arguments that its layout fixes."""
    defines = dict(launch.kernel.defines)
    slice_bytes = int(defines["COLUMNS"]) * dtype_bytes(shape.bank_dtype)
    config = PersistentConfig(slice_bytes, launch.cluster[0], launch.threads)
    layout = _fitting(shape, device, config, int(defines["VECTOR"]))
    assert layout is not None
    return {
        "list_tokens": layout.list_tokens,
        "in_place": int(layout.in_place),
        "wide_index": int(shape.index_dtype == "int64"),
    }
