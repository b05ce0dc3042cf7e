"""What plans are held against in the sources of kernels: signatures, constants, header comments."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["constant", "explains", "parameters", "source"]

KERNELS = Path(__file__).parents[2] / "kernels_cu"
KINDS = {"int": "int32", "long long": "int64"}


def source(name: str) -> str:
    """Return the text of a ``.cu`` file."""
    return (KERNELS / f"{name}.cu").read_text(encoding="utf-8")


def constant(name: str, macro: str) -> int:
    """Return what a ``.cu`` file defines a macro to be."""
    found = re.search(rf"^#define {macro} (\d+)\b", source(name), re.MULTILINE)
    assert found is not None
    return int(found[1])


def parameters(name: str) -> list[tuple[str, str]]:
    """Return (name, kind) of each parameter of the kernel that a ``.cu`` file is named after."""
    signature = re.search(rf"\b{name}\(([^)]*)\)\s*\{{", source(name))
    assert signature is not None
    found = []
    for parameter in signature[1].split(","):
        kind, parameter_name = " ".join(parameter.split()).rsplit(" ", 1)
        pointer = "*" in kind + parameter_name
        found.append((parameter_name.lstrip("*"), "pointer" if pointer else KINDS[kind]))
    return found


def explains(name: str, macro: str) -> bool:
    """Return whether the comment in front of a ``.cu`` file says what a macro stands for."""
    header = re.sub(r"\s*\n//\s*", " ", source(name).split("#include")[0])
    return re.search(rf"\b{macro} \(", header) is not None
