"""Whether the GPU path works here."""

from __future__ import annotations

import torch

from sdm_rt.errors import MissingDependencyError
from sdm_rt.runtime.dependencies import load_cupy, load_nvrtc
from sdm_rt.runtime.device import OLDEST

__all__ = ["gpu_path_obstacle"]


def gpu_path_obstacle() -> str | None:
    """Say what keeps training off PyTorch's current CUDA GPU; None where nothing does."""
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA GPU"
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST:
        return (
            f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}, the "
            f"kernels need {OLDEST[0]}.{OLDEST[1]} or newer"
        )
    try:
        load_cupy()
        load_nvrtc()
    except MissingDependencyError as error:
        return str(error).partition("\n")[0]
    return None
