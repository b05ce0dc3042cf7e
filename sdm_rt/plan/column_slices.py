"""How the persistent schedules cut a bank: column slices, a cluster of blocks for each; when one runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from sdm_rt.errors import UnsupportedConfigurationError
from sdm_rt.plan.device import DeviceModel
from sdm_rt.plan.launch import MAX_CLUSTER, Launch
from sdm_rt.plan.shapes import WriteReadShape, dtype_bytes
from sdm_rt.plan.tiling import ceil_div

__all__ = [
    "NARROW_SLICE",
    "SCHEDULES",
    "WIDE_SLICE",
    "PersistentConfig",
    "choose_config",
    "choose_schedule",
    "configs",
    "slice_choices",
]

SCHEDULES = ("stepwise", "persistent")
WORD_BYTES = 16
WIDE_SLICE, NARROW_SLICE = 256, 128  # bytes of a bank row that a cluster owns
THREADS = 512


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

    @classmethod
    def of(cls, shape: WriteReadShape, launch: Launch) -> PersistentConfig:
        """Return the configuration that a launch was planned with."""
        columns = int(dict(launch.kernel.defines)["COLUMNS"])
        return cls(columns * dtype_bytes(shape.bank_dtype), launch.cluster[0], launch.threads)

    def columns(self, shape: WriteReadShape) -> int:
        """Return the columns of a slice."""
        return self.slice_bytes // dtype_bytes(shape.bank_dtype)

    def slices(self, shape: WriteReadShape) -> int:
        """Return the slices of a row."""
        return ceil_div(shape.row_bytes, self.slice_bytes)

    def clusters(self, shape: WriteReadShape) -> int:
        """Return the clusters of a launch."""
        return shape.streams * self.slices(shape)

    def own_tokens(self, shape: WriteReadShape) -> int:
        """Return the most tokens that a block owns: pairs, dealt to the blocks in turn."""
        return 2 * ceil_div(ceil_div(shape.chunk, 2), self.cluster)


def slice_choices(shape: WriteReadShape, vector: int) -> tuple[int, ...]:
    """Return the bytes of a slice to choose from, the preferred first.

    Rows of up to a narrow slice, and rows loaded in pieces of fewer than 16 bytes, take the narrow one.

    Parameters
    ----------
    shape : WriteReadShape
        Shapes and dtypes.
    vector : int
        Bank values of one load.
    """
    whole_words = vector * dtype_bytes(shape.bank_dtype) == WORD_BYTES
    return (WIDE_SLICE, NARROW_SLICE) if whole_words and shape.row_bytes > NARROW_SLICE else (NARROW_SLICE,)


def configs(shape: WriteReadShape, device: DeviceModel, choices: Iterable[int]) -> Iterator[PersistentConfig]:
    """Yield what the rule takes, and behind it what needs less shared memory.

    The rule: the widest slice, and the largest clusters of which the GPU runs all at once, each block on an
    SM of its own. One cluster more than that would run alone behind all others, for as long as they took.
    """
    for slice_bytes in choices:
        clusters = PersistentConfig(slice_bytes, 1).clusters(shape)
        sizes = range(MAX_CLUSTER, 0, -1)
        cluster = next((size for size in sizes if device.clusters_at_once(size) >= clusters), 1)
        for size in range(cluster, MAX_CLUSTER + 1):
            if device.clusters_at_once(size):
                yield PersistentConfig(slice_bytes, size)


class _Layout(Protocol):
    @property
    def shared_memory(self) -> int: ...


L = TypeVar("L", bound=_Layout)
S = TypeVar("S")


def choose_config(
    shape: WriteReadShape,
    device: DeviceModel,
    candidates: Iterable[PersistentConfig],
    layouts: Callable[[PersistentConfig], Iterator[L]],
    where: str = "",
) -> tuple[PersistentConfig, L]:
    """Return the first configuration that fits the GPU, and its first layout that does.

    Parameters
    ----------
    shape, device
        What is planned.
    candidates : iterable of PersistentConfig
        From the fastest to the smallest.
    layouts : callable
        Yields the layouts of a block's shared memory, from the fastest to the smallest.
    where : str
        What needs it, for the message.

    Raises
    ------
    UnsupportedConfigurationError
        For a GPU without clusters, and where no layout fits.
    """
    if not device.clusters:
        raise UnsupportedConfigurationError(
            f"schedule='persistent' needs thread block clusters (compute capability 9.0), {device.name} has "
            f"none; use schedule='stepwise'"
        )
    need = []
    for config in candidates:
        for layout in layouts(config):
            if layout.shared_memory <= device.shared_memory_per_block:
                return config, layout
            need.append(layout.shared_memory)
    raise UnsupportedConfigurationError(
        f"schedule='persistent' needs {min(need):,} bytes of shared memory a block{where} at "
        f"chunk_size={shape.chunk}; {device.name} allows {device.shared_memory_per_block:,}; use "
        f"schedule='stepwise' or a smaller chunk_size"
    )


def choose_schedule(
    device: DeviceModel, schedule: str | None, failed: str, plan: Callable[[], tuple[S, Launch]]
) -> tuple[S | None, str]:
    """Choose between the stepwise and the persistent schedule.

    Parameters
    ----------
    device : DeviceModel
        The GPU.
    schedule : {"stepwise", "persistent"}, optional
        Forces one. Default: persistent where it can run and no condition failed, else stepwise.
    failed : str
        The condition of the written rule that failed, empty where all hold.
    plan : callable
        Plans the persistent one; returns also the launch that walks the steps.

    Returns
    -------
    planned
        The persistent schedule; None for the stepwise one.
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
        return None, f"schedule: stepwise, since {device.name} has no thread block clusters"
    if schedule is None and failed:
        return None, f"schedule: stepwise, by the rule: {failed}"
    try:
        planned, walk = plan()
    except UnsupportedConfigurationError as error:
        if schedule == "persistent":
            raise
        return None, f"schedule: stepwise, since {error}"
    size = walk.cluster[0]
    clusters, at_once = walk.blocks // size, device.clusters_at_once(size)
    why = "as asked" if schedule else "by the rule"
    return (
        planned,
        f"schedule: persistent, {why}; {clusters} clusters of {size} blocks, {at_once} fit at once",
    )
