"""A kernel as data: which source file, which entry points, which ``-D`` options."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KernelSpec"]


@dataclass(frozen=True, order=True)
class KernelSpec:
    """One translation unit to compile: a file of ``kernels_cu`` with its options.

    Two equal specs name the same module, so a spec is the key of every table of compiled code.

    Parameters
    ----------
    file : str
        File name inside ``kernels_cu``, for example ``"decode.cu"``.
    entries : tuple of str
        Names of the ``extern "C"`` kernels that the module must hold.
    defines : tuple of (str, str)
        Macros passed as ``-Dname=value``, sorted by name.
    """

    file: str
    entries: tuple[str, ...]
    defines: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.file.endswith(".cu"):
            raise ValueError(f"file must end with .cu, got {self.file!r}")
        if not self.entries:
            raise ValueError(f"{self.file}: entries must name at least one kernel")
        if tuple(sorted(self.defines)) != self.defines:
            raise ValueError(f"{self.file}: defines must be sorted by name, got {self.defines}")

    @property
    def options(self) -> tuple[str, ...]:
        """The macros as NVRTC options."""
        return tuple(f"-D{name}={value}" for name, value in self.defines)
