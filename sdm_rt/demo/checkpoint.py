"""Checkpoints of a training run: written whole or not at all."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch

from sdm_rt.demo.config import DemoConfig
from sdm_rt.demo.errors import DemoError, is_lack_of_memory

__all__ = ["load_checkpoint", "save_checkpoint"]

CONTENT = frozenset({"config", "text", "text_path", "model", "optimizer", "sampler", "history"})


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
    except Exception as error:  # torch.load raises one of many types, by where the file is broken
        if is_lack_of_memory(error):
            raise
        raise _no_checkpoint(path, _reason(error)) from error
    if not isinstance(content, dict) or not content.keys() >= CONTENT:
        raise _no_checkpoint(path, "it lacks what the demo saves")
    if content["config"].keys() != DemoConfig.__dataclass_fields__.keys():
        raise _no_checkpoint(path, "its sizes are not those of this version")
    return content


def _no_checkpoint(path: Path, reason: str) -> DemoError:
    return DemoError(f"{path} is not a checkpoint of the demo ({reason}); delete it to start again")


def _reason(error: Exception) -> str:
    """Return the first sentence of an error, or its type where that says nothing, as a bare number does."""
    sentence = str(error).partition("\n")[0].partition(". ")[0]
    return sentence if any(map(str.isalpha, sentence)) else type(error).__name__
