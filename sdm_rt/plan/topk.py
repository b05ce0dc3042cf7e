"""The plans of product-key top-k and of its gradient: one launch each of kernels_cu/topk.cu."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from sdm_rt.errors import UnsupportedConfigurationError
from sdm_rt.plan.device import DeviceModel, require_supported
from sdm_rt.plan.launch import Argument, Launch, pointers
from sdm_rt.plan.shapes import BANK_DTYPES, MAX_LANES, MAX_SLOTS, dtype_bytes, kernel_type
from sdm_rt.plan.step_plan import StepPlan
from sdm_rt.runtime.kernel import KernelSpec

__all__ = ["TopkShape", "plan_topk", "plan_topk_backward", "topk_kernel"]

WARPS = 4  # rows a block works on at a time, one a warp
BLOCKS_PER_SM = 16  # all the warps an SM holds
INDEX_BYTES = 8


@dataclass(frozen=True)
class TopkShape:
    """One call of product-key top-k: what `plan_topk` reads.

    Parameters
    ----------
    rows : int
        Rows of factor scores.
    factors : tuple of int
        Widths of the factors.
    k : int
        Slots to select, 1..256.
    dtype : str
        Dtype of the scores: ``"bfloat16"``, ``"float16"`` or ``"float32"``.

    Raises
    ------
    ValueError
        Naming the field and its range.
    """

    rows: int
    factors: tuple[int, ...]
    k: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.rows < 0:
            raise ValueError(f"rows must not be negative, got {self.rows}")
        if not self.factors or min(self.factors) < 1:
            raise ValueError(f"factors must be one or more widths of at least 1, got {self.factors}")
        if not 1 <= self.k <= MAX_LANES:
            raise ValueError(f"k must be in 1..{MAX_LANES}, got {self.k}")
        if self.dtype not in BANK_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(BANK_DTYPES)}, got {self.dtype!r}")

    @property
    def slots(self) -> int:
        """S, the product of the factors."""
        return prod(self.factors)

    @property
    def selected(self) -> int:
        """Slots selected of a row: min(k, S)."""
        return min(self.k, self.slots)

    @property
    def width(self) -> int:
        """Factor scores of a row."""
        return sum(self.factors)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**asdict(self), "factors": list(self.factors)}


def topk_kernel(shape: TopkShape) -> KernelSpec:
    """Return the translation unit of a shape, which holds both directions; the rows do not matter."""
    return KernelSpec(
        "topk.cu",
        ("topk", "topk_backward"),
        (
            ("FACTORS", ",".join(map(str, shape.factors))),
            ("K", str(shape.selected)),
            ("SCORE", kernel_type(shape.dtype)),
        ),
    )


def _plan(
    name: str, reads: tuple[str, ...], writes: tuple[str, ...], shape: TopkShape, device: DeviceModel
) -> StepPlan:
    require_supported(device)
    if shape.slots > MAX_SLOTS:
        raise UnsupportedConfigurationError(
            f"factors: {shape.factors} span {shape.slots} slots, more than the {MAX_SLOTS} that the kernel "
            f"numbers; use narrower factors, and more heads"
        )
    if shape.rows == 0:
        return StepPlan(name, device, shape, steps=0, first_step=(), step=())
    values = shape.rows * (shape.width + shape.selected) * dtype_bytes(shape.dtype)
    moved = values + shape.rows * shape.selected * INDEX_BYTES
    launch = Launch(
        name=name,
        kernel=topk_kernel(shape),
        entry=name,
        grid=(min(-(-shape.rows // WARPS), BLOCKS_PER_SM * device.sm_count), 1, 1),
        block=(32 * WARPS, 1, 1),
        arguments=(*pointers(*reads, *writes), Argument("rows", "int64")),
        reads=reads,
        writes=writes,
        bytes_moved=moved,
        floor_bytes=moved,
        note="a row a warp",
    )
    return StepPlan(name, device, shape, steps=1, first_step=(launch,), step=(launch,))


def plan_topk(shape: TopkShape, device: DeviceModel) -> StepPlan:
    """Plan one selection.

    A warp holds a row, so a row selects the same slots whatever stands beside it.

    Parameters
    ----------
    shape : TopkShape
        Rows, factors, k and dtype.
    device : DeviceModel
        The GPU.

    Returns
    -------
    StepPlan
        One launch; none where there are no rows.

    Raises
    ------
    RuntimeError
        For a GPU below compute capability 8.0.
    UnsupportedConfigurationError
        For more slots than the kernel can number.
    """
    return _plan("topk", ("raw",), ("val", "idx"), shape, device)


def plan_topk_backward(shape: TopkShape, device: DeviceModel) -> StepPlan:
    """Plan the gradient of the factor scores; as `plan_topk`."""
    return _plan("topk_backward", ("idx", "grad_val"), ("grad_raw",), shape, device)
