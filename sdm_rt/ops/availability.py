"""Whether training can run on a GPU here."""

from __future__ import annotations

import torch

__all__ = ["gpu_path_available", "gpu_path_obstacle"]


def gpu_path_available() -> bool:
    """Return whether a layer can be trained on a CUDA GPU with this version, on this machine."""
    return gpu_path_obstacle() is None


def gpu_path_obstacle() -> str | None:
    """Say what keeps training off the GPU; None where nothing does."""
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA GPU"
    return "this version of sdm_rt runs the layer on a GPU without gradients only"
