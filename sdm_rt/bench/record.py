"""What the JSON of a benchmark says of its run: GPU, releases, date and the sources that were measured."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import platform
import re
from pathlib import Path
from typing import Any

import torch

from sdm_rt.runtime.dependencies import load_cupy

__all__ = ["fingerprint", "gpu_slug", "heading", "versions"]

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = ("kernels_cu", "sdm_rt")
SOURCE_SUFFIXES = (".py", ".cu", ".cuh")
PACKAGES = ("sdm_rt", "torch", "numpy", "cupy-cuda12x", "cupy-cuda13x", "cuda-bindings", "pytest")


def fingerprint(root: Path = ROOT) -> str:
    """Return the SHA-256 over the relative paths and contents of the sources, in the order of the paths.

    Parameters
    ----------
    root : Path
        A checkout, or the folder that the package is installed in: both give the same for the same sources.
    """
    files = {
        # A wheel carries the kernels inside the package.
        re.sub("^sdm_rt/kernels_cu/", "kernels_cu/", path.relative_to(root).as_posix()): path
        for folder in SOURCE_FOLDERS
        for path in (root / folder).rglob("*")
        if path.suffix in SOURCE_SUFFIXES and path.is_file()
    }
    digest = hashlib.sha256()
    for name in sorted(files):
        content = files[name].read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def gpu_slug(name: str) -> str:
    """Return a GPU's name as file names begin: ``NVIDIA H200`` gives ``h200``."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return "_".join(word for word in words if word not in ("", "nvidia", "geforce"))


def versions() -> dict[str, str]:
    """Return the releases of everything that a run on a GPU depends on."""
    cupy = load_cupy()
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch_cuda"] = str(torch.version.cuda)
    found["nvrtc"] = ".".join(str(part) for part in cupy.cuda.nvrtc.getVersion())
    found["driver_cuda"] = str(cupy.cuda.runtime.driverGetVersion())
    return found


def heading(phase: str, gpu: str) -> dict[str, Any]:
    """Return the first keys of a record.

    Parameters
    ----------
    phase : str
        What was measured.
    gpu : str
        The GPU's name.
    """
    return {
        "phase": phase,
        "gpu": gpu,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "fingerprint": fingerprint(),
        "versions": versions(),
    }
