"""CuPy, at its first use: the one import, and the one message where a part of the GPU path is missing."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sdm_rt.errors import MissingDependencyError
from sdm_rt.runtime.cache import cache_folder

__all__ = ["CUPY_VERSION", "cuda_release", "install_command", "load_cupy", "load_nvrtc"]

CUPY_VERSION = (14, 2)  # the first whose disk cache can be given a folder after its import
CUDA_RELEASES = (12, 13)


def cuda_release() -> int:
    """Return the CUDA release whose packages fit PyTorch's: 12 or 13."""
    built = torch.version.cuda
    release = int(built.split(".")[0]) if built else CUDA_RELEASES[0]
    return min(max(release, CUDA_RELEASES[0]), CUDA_RELEASES[-1])


def install_command(*packages: str) -> str:
    """Return the command that installs what the GPU path needs.

    Parameters
    ----------
    *packages : str
        First letters of the wanted requirements, for example ``"nvidia-cuda-nvrtc"``; none for all of them.
    """
    marker = f"extra == 'cuda{cuda_release()}'"
    wanted = []
    for line in importlib.metadata.requires("sdm_rt") or []:
        requirement, _, condition = line.partition(";")
        if marker in condition.replace('"', "'") and requirement.startswith(packages or ("",)):
            wanted.append(f"'{requirement.strip()}'")
    return f"python -m pip install {' '.join(wanted)}"


def _missing(what: str, *packages: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"the GPU path needs {what}; install it with: {install_command(*packages)}\n"
        f"CPU tensors work without it; `sdm-rt doctor` shows what this machine has."
    )


@contextlib.contextmanager
def _importable_cache_folder() -> Iterator[None]:
    """Give CuPy a cache folder while it is imported, where it could not make its own: it would fail."""
    if "CUPY_CACHE_DIR" in os.environ:
        yield
        return
    try:
        Path.home().joinpath(".cupy", "kernel_cache").mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        os.environ["CUPY_CACHE_DIR"] = str(cache_folder() / "cupy")
        try:
            yield
        finally:
            del os.environ["CUPY_CACHE_DIR"]
    else:
        yield


@cache
def load_cupy() -> Any:
    """Import CuPy, which needs no GPU, and return the module.

    Raises
    ------
    MissingDependencyError
        Where CuPy is missing, too old or cannot load its libraries; with the command that installs it.
    """
    try:
        with _importable_cache_folder():
            cupy = importlib.import_module("cupy")
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise
        raise _missing("CuPy") from None
    except ImportError as error:
        raise _missing(f"a working CuPy ({str(error).strip().splitlines()[0]})") from error
    version = tuple(int(part) for part in cupy.__version__.split(".")[:2])
    if version < CUPY_VERSION:
        wanted = ".".join(map(str, CUPY_VERSION))
        raise _missing(f"CuPy {wanted} or newer, not {cupy.__version__}", "cupy")
    return cupy


@cache
def load_nvrtc() -> Any:
    """Return CuPy's binding of NVRTC with the library loaded; needs no GPU.

    Raises
    ------
    MissingDependencyError
        Where libnvrtc cannot be loaded; with the command that installs it.
    """
    load_cupy()
    nvrtc = importlib.import_module("cupy.cuda").nvrtc
    try:
        nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise _missing(f"NVRTC ({lines[0]})", "nvidia-cuda-nvrtc") from error
    return nvrtc
