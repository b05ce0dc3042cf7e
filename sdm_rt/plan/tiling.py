"""How the reference schedule's kernels cut a step into blocks; `ceil_div` of every planner.

The order of a sum over columns follows the column blocks, so their width is a constant. Grids put streams
times tokens (or entries) first, where CUDA allows 2^31 blocks, and column blocks second.
"""

from __future__ import annotations

from sdm_rt.plan.launch import Dim3

__all__ = [
    "DOT_COLUMNS",
    "ENTRIES_PER_BLOCK",
    "SUM_THREADS",
    "THREADS",
    "WARPS",
    "ceil_div",
    "entry_grid",
    "product_tile",
    "product_tile_bytes",
    "token_grid",
]

THREADS = 256
WARPS = THREADS // 32
DOT_COLUMNS = 128  # column block of the backward's dot products: four columns a lane
ENTRIES_PER_BLOCK = 256  # of the backward's slot-sorted kernels
SUM_THREADS = 256


def ceil_div(value: int, divisor: int) -> int:
    """Return the quotient rounded up."""
    return -(-value // divisor)


def token_grid(step_tokens: int, head_dim: int, columns: int) -> Dim3:
    """Return the grid of a kernel with one block per token and column block."""
    return step_tokens, ceil_div(head_dim, columns), 1


def entry_grid(streams: int, entries: int, per_block: int, head_dim: int, columns: int) -> Dim3:
    """Return the grid of a kernel that walks a stream's slot-sorted entries, `per_block` at a time."""
    return streams * ceil_div(entries, per_block), ceil_div(head_dim, columns), 1


def product_tile(chunk: int) -> int:
    """Return the tokens and columns of a block's tile in the [C, C] x [C, D] products."""
    return 32 if chunk <= 64 else 64


def product_tile_bytes(chunk: int, tiles: int) -> int:
    """Return the shared memory of `tiles` float32 tiles, each tile wide and at most 64 deep."""
    depth = min(64, ceil_div(chunk, 4) * 4)
    return 4 * tiles * product_tile(chunk) * depth
