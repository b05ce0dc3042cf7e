"""Typed errors and warnings of the package; every one subclasses a built-in a caller already expects."""

from __future__ import annotations

__all__ = [
    "KernelCompileError",
    "MissingDependencyError",
    "NotPrecompiledError",
    "UnsupportedConfigurationError",
    "UntestedHardwareWarning",
]


class UnsupportedConfigurationError(ValueError):
    """A valid request whose plan does not fit the GPU.

    The message names the limit, the need, and a setting that fits.
    """


class MissingDependencyError(RuntimeError):
    """The GPU path lacks CuPy, NVRTC or a driver.

    The message says what is missing, the command that installs it, and that CPU tensors work.
    """


class KernelCompileError(RuntimeError):
    """NVRTC refused a kernel source; the message carries its log with the file's own line numbers."""


class NotPrecompiledError(RuntimeError):
    """A kernel is not in the precompiled folder, and run-time compilation is off (``SDM_RT_JIT=0``)."""


class UntestedHardwareWarning(UserWarning):
    """The GPU class is covered by no recorded validation."""
