"""The least time and the memory of a case, from its plans."""

from __future__ import annotations

from sdm_rt.bench.cases import Case, shape_of
from sdm_rt.plan.backward import plan_backward
from sdm_rt.plan.buffer import total_bytes
from sdm_rt.plan.device import DeviceModel
from sdm_rt.plan.forward import plan_forward
from sdm_rt.plan.shapes import dtype_bytes

__all__ = ["floor_bytes", "needed_bytes"]

INDEX_BYTES = 8  # int64
DRAW_BYTES = 4  # inputs are drawn in float32


def floor_bytes(case: Case, device: DeviceModel, training: bool) -> int:
    """Return the bytes that must cross the memory bus: of a call without gradients, or of a training step.

    A training step also writes the bank's gradient once.
    """
    shape = shape_of(case, training)
    forward = plan_forward(shape, device).total("floor_bytes")
    if not training:
        return forward
    gradient = case.streams * case.slots * shape.gradient_row_bytes
    return forward + plan_backward(shape, device).total("floor_bytes") + gradient


def needed_bytes(case: Case, device: DeviceModel, training: bool) -> int:
    """Return the most memory that drawing the inputs of a case and running it take."""
    shape = shape_of(case, training)
    bank = case.streams * case.slots * case.head_dim
    tokens, value = case.streams * case.tokens, dtype_bytes(shape.bank_dtype)
    lanes = 2 * tokens * case.lanes
    inputs = value * (bank + lanes + 2 * tokens * case.head_dim) + INDEX_BYTES * lanes
    drawing = DRAW_BYTES * max(bank, lanes, tokens * case.head_dim)
    outputs = value * tokens * case.head_dim
    buffers = total_bytes(plan_forward(shape, device).buffers)
    if training:
        outputs += value * (lanes + tokens * case.head_dim) + shape.gradient_row_bytes * (
            bank // case.head_dim
        )
        buffers += total_bytes(plan_backward(shape, device).buffers)
    return inputs + max(drawing, outputs + buffers)
