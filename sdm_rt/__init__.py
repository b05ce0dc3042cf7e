"""Sparse Delta Memory for PyTorch and CuPy, with CUDA kernels compiled at run time by NVRTC.

Importing this package creates no CUDA context and compiles nothing.
"""

from sdm_rt.errors import (
    KernelCompileError,
    MissingDependencyError,
    NotPrecompiledError,
    UnsupportedConfigurationError,
    UntestedHardwareWarning,
)

from sdm_rt.ops.counters import last_dispatch, repeated_write_slots, reset_dispatch
from sdm_rt.ops.write_read import sdm_write_read

__version__ = "0.1.0"

__all__ = [
    "KernelCompileError",
    "MissingDependencyError",
    "NotPrecompiledError",
    "UnsupportedConfigurationError",
    "UntestedHardwareWarning",
    "last_dispatch",
    "repeated_write_slots",
    "reset_dispatch",
    "sdm_write_read",
]
