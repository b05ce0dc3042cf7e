"""How the layer's weights are drawn, from torch's global generator."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["check_positive", "draw_decay_rate_", "draw_time_step_", "draw_weight_"]

SMALLEST_DECAY_RATE = 1e-4
TIME_STEP_RANGE = (1e-3, 1e-1)
SMALLEST_TIME_STEP = 1e-4


def check_positive(name: str, value: Any) -> float:
    """Return a positive finite number as a float; TypeError or ValueError naming the argument."""
    if not isinstance(value, (numbers.Real, Tensor)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not 0 < float(value) < math.inf:
        raise ValueError(f"{name}: expected a positive number, got {value}")
    return float(value)


def draw_weight_(weight: Tensor, std: float) -> None:
    """Draw from a normal distribution cut at 3 standard deviations."""
    nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)


def draw_decay_rate_(a_log: Tensor, bounds: tuple[float, float]) -> None:
    """Draw the logarithms of decay rates that are uniform in ``bounds``."""
    a_log.uniform_(*bounds).clamp_(min=SMALLEST_DECAY_RATE).log_()


def draw_time_step_(bias: Tensor) -> None:
    """Draw biases whose softplus is log-uniform in `TIME_STEP_RANGE`."""
    time_step = bias.uniform_(*map(math.log, TIME_STEP_RANGE)).exp_().clamp_(min=SMALLEST_TIME_STEP)
    time_step.add_(torch.log(-torch.expm1(-time_step)))  # the inverse of softplus
