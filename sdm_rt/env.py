"""Every ``SDM_RT_*`` environment variable, in one table: name, meaning, default.

``docs/environment.md`` is this table as a page; a test holds the two together.
Values are read at the time of use, so a change inside a process takes effect at the next call.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["VARIABLES", "Variable", "as_set", "flag", "path"]


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Parameters
    ----------
    name : str
        The variable's full name.
    default : str
        What an unset variable means, in the variable's own notation; empty for "chosen automatically".
    meaning : str
        One sentence for users.
    """

    name: str
    default: str
    meaning: str


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "SDM_RT_KERNELS", "", "Folder whose CUDA sources are used in place of the installed kernels_cu."
    ),
    Variable(
        "SDM_RT_CACHE_DIR",
        "",
        "Folder of the compile cache; unset: the platform's user cache, else a temporary folder.",
    ),
    Variable(
        "SDM_RT_PRECOMPILED", "", "Folder filled by `sdm-rt precompile`, used read-only before any compile."
    ),
    Variable(
        "SDM_RT_JIT", "1", "0 forbids run-time compilation: a kernel that is not precompiled is an error."
    ),
    Variable("SDM_RT_PDL", "1", "0 launches every kernel without programmatic dependent launch; same bits."),
    Variable(
        "SDM_RT_REPLAY",
        "1",
        "0 launches repeated calls and those of cuda_graph=True kernel by kernel, not as CUDA graphs; "
        "same bits.",
    ),
    Variable("SDM_RT_CHECK", "0", "1 checks indices on the GPU before each call (waits for the GPU)."),
    Variable("SDM_RT_PROGRESS", "1", "0 hides the progress line of a compile."),
)

_NAMES = {variable.name: variable for variable in VARIABLES}

# Looked up several times a call of an op. For an unset variable os.environ raises and catches an exception,
# ten times the cost of asking the dictionary behind it.
_environment: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_keys = {name: getattr(os.environ, "encodekey", str)(name) for name in _NAMES}


def as_set(name: str) -> bytes | str | None:
    """Return what the environment holds for the variable ``name``, undecoded; None where it is unset."""
    held: bytes | str | None = _environment.get(_keys[name])
    return held


def _value(name: str) -> str:
    held = as_set(name)
    return (held is not None and os.fsdecode(held).strip()) or _NAMES[name].default


def flag(name: str) -> bool:
    """Return the variable ``name`` as a boolean; anything but 0 and 1 is a ValueError."""
    value = _value(name)
    if value not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {value!r}")
    return value == "1"


def path(name: str) -> Path | None:
    """Return the variable ``name`` as a path, None where it is unset; ``~user`` of nobody is a ValueError."""
    value = _value(name)
    try:
        return Path(value).expanduser() if value else None
    except RuntimeError as error:
        raise ValueError(f"{name}: {value!r} names no folder: {error}") from None
