"""A write/read problem of two tokens with answers known by hand, to show that a device computes it.

One stream, four slots, two columns. The second token's gate is log(1/2), so that every value is an exact
binary fraction.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sdm_rt.ops.decode import sdm_decode_step
from sdm_rt.ops.write_read import sdm_write_read

__all__ = ["backward_error", "decode_error", "forward_error"]

MEMORY = [[1.0, 2.0], [3.0, -1.0], [0.0, 4.0], [-2.0, 0.5]]
K_IDX = [[0, 1], [1, 3]]
K_VAL = [[0.5, 1.0], [1.0, -0.5]]
V = [[2.0, -1.0], [0.0, 3.0]]
BETA = [[0.5], [1.0]]
G = [[0.0], [-math.log(2.0)]]
Q_IDX = [[1, 2], [0, 1]]
Q_VAL = [[1.0, 2.0], [0.5, -1.0]]
GRAD_READINGS = [[1.0, -2.0], [2.0, 1.0]]

READINGS = [[2.25, 6.5], [0.8125, -2.25]]
FINAL_BANK = [[0.625, 1.75], [-0.5, 3.125], [0.0, 4.0], [-0.1875, -1.6875]]
GRADIENTS = {
    "memory": [[0.625, 0.9375], [0.25, -1.125], [2.0, -4.0], [-0.5, -0.25]],
    "k_val": [[0.0, -2.875], [0.875, -1.75]],
    "v": [[0.75, -0.875], [-2.0, -1.0]],
    "beta": [[-0.5], [-0.625]],
    "g": [[4.375], [0.875]],
    "q_val": [[5.25, -8.0], [3.0, 2.125]],
}


def _largest_error(got: Tensor, known: list[list[float]]) -> float:
    error = (
        got.detach().double().cpu().reshape(-1) - torch.tensor(known, dtype=torch.float64).reshape(-1)
    ).abs()
    return float("inf") if error.isnan().any() else float(error.max())


def _inputs(device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the problem's tensors by the op's argument names, in the op's order."""
    real = {"memory": MEMORY, "k_val": [K_VAL], "v": [V], "beta": [BETA], "g": [G], "q_val": [Q_VAL]}
    tensors = {name: torch.tensor(value, dtype=dtype, device=device) for name, value in real.items()}
    indices = {"k_idx": torch.tensor([K_IDX], device=device), "q_idx": torch.tensor([Q_IDX], device=device)}
    order = ("memory", "k_idx", "k_val", "v", "beta", "g", "q_idx", "q_val")
    return {name: (tensors | indices)[name] for name in order}


def forward_error(device: torch.device, dtype: torch.dtype) -> float:
    """Run the op without gradients; return the largest absolute error of readings and bank."""
    inputs = _inputs(device, dtype)
    readings = sdm_write_read(*inputs.values())
    return max(_largest_error(readings, READINGS), _largest_error(inputs["memory"], FINAL_BANK))


def backward_error(device: torch.device, dtype: torch.dtype) -> float:
    """Run the op and its backward; return the largest absolute error of gradients and restored bank."""
    inputs = _inputs(device, dtype)
    for name in GRADIENTS:
        inputs[name].requires_grad_()
    readings = sdm_write_read(*inputs.values())
    torch.autograd.backward(readings, torch.tensor(GRAD_READINGS, dtype=dtype, device=device))
    errors = [_largest_error(readings, READINGS), _largest_error(inputs["memory"], MEMORY)]
    for name, known in GRADIENTS.items():
        gradient = inputs[name].grad
        errors.append(float("inf") if gradient is None else _largest_error(gradient, known))
    return max(errors)


def decode_error(device: torch.device, dtype: torch.dtype) -> float:
    """Run the tokens one by one through decode; return the largest absolute error of readings and bank."""
    memory, *tokens = _inputs(device, dtype).values()
    errors = [
        _largest_error(sdm_decode_step(memory, *(tensor[:, t] for tensor in tokens)), [READINGS[t]])
        for t in range(len(READINGS))
    ]
    return max([*errors, _largest_error(memory, FINAL_BANK)])
