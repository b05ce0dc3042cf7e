"""What no plan of a write-read call goes beyond, whatever its schedule."""

from __future__ import annotations

from sdm_rt.errors import UnsupportedConfigurationError
from sdm_rt.plan.launch import MAX_GRID
from sdm_rt.plan.shapes import MAX_CHUNK, WriteReadShape

__all__ = ["require_limits"]

MAX_TOKENS = 2**31 - 1 - MAX_CHUNK  # of a stream: kernels round up to whole chunks in 32 bits


def require_limits(shape: WriteReadShape) -> None:
    """Raise UnsupportedConfigurationError for more streams, tokens or chunks than the kernels can number."""
    if shape.streams > MAX_GRID[1]:
        raise UnsupportedConfigurationError(
            f"{shape.streams:,} streams do not fit the grid of one launch, which holds at most "
            f"{MAX_GRID[1]:,}; split the call"
        )
    if shape.tokens > MAX_TOKENS:
        raise UnsupportedConfigurationError(
            f"{shape.tokens:,} tokens a stream are more than the kernels number, {MAX_TOKENS:,}; split the "
            f"call"
        )
    chunks = shape.chunks * shape.streams
    if shape.training and chunks > MAX_GRID[0]:
        raise UnsupportedConfigurationError(
            f"{chunks:,} chunks of {shape.chunk} tokens do not fit the grid of one launch, which holds at "
            f"most {MAX_GRID[0]:,}; use a larger chunk_size or split the call"
        )
