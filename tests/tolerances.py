"""The one table of tolerances of the suite, and the two comparisons every test uses.

An error is measured by norm over the whole tensor:
``|got - want| <= relative * |want| + floor * sqrt(numel)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "SNAPSHOT_GRADIENT",
    "TOLERANCES",
    "Tolerance",
    "assert_close",
    "assert_same_bits",
    "relative_error",
]


@dataclass(frozen=True)
class Tolerance:
    """Accepted error of one dtype, and why this much."""

    relative: float
    floor: float
    reason: str


TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(
        1e-12,
        2.3e-308,
        "unit roundoff 1.1e-16; sums of up to some thousand terms that cancel at most about tenfold. "
        "Floor: the smallest normal number.",
    ),
    torch.float32: Tolerance(
        1e-5,
        1.2e-38,
        "unit roundoff 6e-8; rows live through some hundred rounded updates, and gradients sum over as many. "
        "Floor: the smallest normal number, since a decay below the float32 range is 0 by definition.",
    ),
    torch.bfloat16: Tolerance(
        2e-2,
        1.2e-38,
        "unit roundoff 3.9e-3; rounded rows, rounded outputs, and a gradient bank rounded as often as the "
        "bank: five roundings end to end. Floor: the smallest normal number.",
    ),
    torch.float16: Tolerance(
        2.5e-3,
        6e-8,
        "unit roundoff 4.9e-4, an eighth of bfloat16's, through the same five roundings. "
        "Floor: the spacing of the subnormal numbers, which gradients reach.",
    ),
}

# Relative error of the gradients of k_val, g and q_val with a quantized snapshot, on random data.
SNAPSHOT_GRADIENT: dict[str, Tolerance] = {
    "bf16": Tolerance(
        4e-3, 1.2e-38, "one rounding of the kept rows to bfloat16: unit roundoff 3.9e-3, rms half of it."
    ),
    "fp8": Tolerance(
        3e-2, 1.2e-38, "e4m3 keeps 3 bits below the leading one: unit roundoff 6.3e-2, rms 2.5e-2."
    ),
    "int4": Tolerance(
        1.3e-1, 1.2e-38, "16 levels over the range of a row: rms 1.2e-1 for normal rows of 64 columns."
    ),
}


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| by norm in float64; inf where only ``want`` is 0."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    error, scale = float(torch.linalg.vector_norm(got - want)), float(torch.linalg.vector_norm(want))
    return error / scale if scale > 0 else (0.0 if error == 0 else float("inf"))


def assert_close(
    name: str,
    got: Tensor,
    want: Tensor,
    dtype: torch.dtype,
    *,
    tolerance: Tolerance | None = None,
    nonfinite: bool = False,
) -> None:
    """Fail unless ``got`` equals ``want`` to the tolerance of ``dtype``.

    NaN and inf fail in either tensor, unless ``nonfinite`` says that they belong there: then both tensors
    must hold the same ones at the same places, and the rest is compared.
    """
    tolerance = tolerance or TOLERANCES[dtype]
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    if nonfinite:
        special = ~torch.isfinite(want)
        assert torch.equal(~torch.isfinite(got), special), f"{name}: NaN or inf at other places than expected"
        torch.testing.assert_close(got[special], want[special], rtol=0, atol=0, equal_nan=True)
        got, want = got[~special], want[~special]
    for which, tensor in (("got", got), ("expected", want)):
        bad = int((~torch.isfinite(tensor)).sum())
        assert bad == 0, f"{name}: {bad} of {tensor.numel()} values of the {which} tensor are NaN or inf"
    # Norms are taken of scaled values, so that squares neither overflow nor underflow.
    scale = max(float(want.abs().max()), float(got.abs().max())) if want.numel() else 0.0
    if scale == 0.0:
        return
    error = float(torch.linalg.vector_norm(got / scale - want / scale))
    norm = float(torch.linalg.vector_norm(want / scale))
    allowed = tolerance.relative * norm + tolerance.floor / scale * want.numel() ** 0.5
    measured = error / norm if norm else float("inf")
    assert error <= allowed, (
        f"{name}: relative error {measured:.3g} exceeds {tolerance.relative:.3g} for {dtype} "
        f"(|expected| = {norm * scale:.3g}, largest difference {float((got - want).abs().max()):.3g})"
    )


def assert_same_bits(name: str, got: Tensor, want: Tensor) -> None:
    """Fail unless both have the same shape, dtype and bits (-0 differs from 0, a NaN equals itself)."""
    assert got.dtype == want.dtype, f"{name}: dtype {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    left, right = (x.detach().cpu().contiguous().reshape(-1) for x in (got, want))
    if not left.numel():
        return
    as_bytes = [x.view(torch.uint8).reshape(left.numel(), -1) for x in (left, right)]
    places = (as_bytes[0] != as_bytes[1]).any(dim=1).nonzero()[:, 0].tolist()
    assert not places, (
        f"{name}: {len(places)} of {left.numel()} values differ in their bits, first at index {places[0]}: "
        f"{left[places[0]].item()!r} and {right[places[0]].item()!r}"
    )
