"""Checkpoints of a training run: written whole or not at all."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch

from sdm_rt.demo.errors import DemoError

__all__ = ["load_checkpoint", "save_checkpoint"]


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` to ``path``, which at every moment holds the old or the new checkpoint whole."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as stream:
        torch.save(content, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, path)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU; a file that is none is a DemoError naming it."""
    stored = path.read_bytes()
    try:
        content = torch.load(io.BytesIO(stored), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # torch.load raises one of many types, by where the file is broken
        raise DemoError(
            f"{path} is not a checkpoint of the demo ({error}); delete it to start again"
        ) from error
    if not isinstance(content, dict):
        raise DemoError(f"{path} is not a checkpoint of the demo; delete it to start again")
    return content
