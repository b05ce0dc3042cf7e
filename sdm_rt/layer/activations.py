"""What turns product-key scores into write and read weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules import activation

from sdm_rt.layer.hooks import has_global_hooks, is_watched

__all__ = [
    "ACTIVATIONS",
    "L2Normalize",
    "ScaledSoftmax",
    "check_activation",
    "is_same_softmax",
    "l2_normalize",
    "make_activation",
]

# Torch's activations by name; Softmax2d keeps the shape too, but never works over the last dimension.
ACTIVATIONS = frozenset({*activation.__all__, "Identity"} - {"Softmax2d"})
_WITH_DIM = ("Softmin", "LogSoftmax")


def l2_normalize(x: Tensor, dim: int = -1, eps: float = 1e-12) -> Tensor:
    """Return ``x / max(|x|, eps)`` along ``dim``, computed in at least float32, in the dtype of ``x``.

    Parameters
    ----------
    x : Tensor
        Floating point, any shape.
    dim : int
        The dimension whose 2-norm becomes 1.
    eps : float
        Lower bound of the norm: a zero vector stays zero.

    Returns
    -------
    Tensor
        Like ``x``.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    norm: Tensor = torch.linalg.vector_norm(wide, dim=dim, keepdim=True)
    return (wide / norm.clamp_min(eps)).to(x.dtype)


class ScaledSoftmax(nn.Module):
    """softmax(scale * x) over the last dimension.

    Parameters
    ----------
    scale : float
        The inverse temperature.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Return weights [..., W] of scores [..., W]."""
        return torch.softmax(x if self.scale == 1.0 else self.scale * x, dim=-1)

    def extra_repr(self) -> str:
        """Return the scale for the module's repr."""
        return f"scale={self.scale}"


class L2Normalize(nn.Module):
    """:func:`l2_normalize` over the last dimension, as a module."""

    def forward(self, x: Tensor) -> Tensor:
        """Return weights [..., W] of scores [..., W]."""
        return l2_normalize(x)


def is_same_softmax(first: nn.Module, second: nn.Module) -> bool:
    """Whether both are :class:`ScaledSoftmax` of one scale, without hooks: one call may serve for both."""
    return (
        type(first) is type(second) is ScaledSoftmax
        and first.scale == second.scale
        and not (is_watched(first) or is_watched(second) or has_global_hooks())
    )


def make_activation(name: str, scale: float = 1.0) -> nn.Module:
    """Return the activation ``name``: "Softmax" (with ``scale``), "l2_normalize", or one of ``torch.nn``."""
    if name == "Softmax":
        return ScaledSoftmax(scale)
    if name == "l2_normalize":
        return L2Normalize()
    if name not in ACTIVATIONS:
        raise ValueError(f"no activation {name!r}")
    module: nn.Module = getattr(nn, name)(**({"dim": -1} if name in _WITH_DIM else {}))
    return module


def check_activation(field: str, name: str) -> None:
    """ValueError naming ``field`` unless :func:`make_activation` makes ``name`` keep the shape of scores."""
    try:
        scores = torch.zeros(1, 1, 4, device="meta")
        shape = make_activation(name).to("meta")(scores).shape
    except (TypeError, ValueError):
        shape = None
    if shape != (1, 1, 4):
        raise ValueError(
            f'{field}: expected "Softmax", "l2_normalize" or the name of a torch.nn activation that needs no '
            f"arguments and keeps the shape, got {name!r}"
        )
