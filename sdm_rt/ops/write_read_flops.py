r"""Floating-point operations of write-read calls, for ``torch.utils.flop_counter.FlopCounterMode``.

Counted are the multiply-adds of the chunked form (docs/math.md), two operations each, whatever path runs. For
a chunk of c tokens with W writes, R reads and D columns, the forward has::

    D (2 W + R) c           gathers of retrieved (W) and inter (R), write (W)
    D c (c + 1)             X u and QX u, lower triangles
    c (c + 1) (2 c + 1) / 6 the inverse X and the product QX = QK X of lower triangles

and the backward::

    D (5 W + 2 R + 1) c     GWR, d_k_pd, d_tot, d_k_eff, Phase A (W each); d_q_w, GDS (R each); grad_beta
    D c (c + 1)             QX^T gr and X^T gwr
    D c c                   dL below the diagonal and d_QK up to it

Shapes alone count: every row is a token, whatever ``lengths`` says, and packed rows form chunks as one
stream. Left out are exponentials, the decay of rows, and the entries of A and QK with their gradients,
which depend on the slots that meet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["backward_flops", "forward_flops"]

Shape = tuple[int, ...]


def _forward(c: int, W: int, R: int, D: int) -> int:
    return D * (c * (2 * W + R) + c * (c + 1)) + c * (c + 1) * (2 * c + 1) // 6


def _backward(c: int, W: int, R: int, D: int) -> int:
    return D * (c * (5 * W + 2 * R + 1) + c * (c + 1) + c * c)


def _flops(multiply_adds: Callable[[int, int, int, int], int], head_dim: int, arguments: Any) -> int:
    """Count a call from the arguments behind its bank."""
    (rows, writes), (_, reads), cu_seqlens = arguments[0], arguments[5], arguments[8]
    streams: int = 1 if cu_seqlens is not None else arguments[9]
    chunk_size: int = arguments[13]
    chunks, rest = divmod(rows // max(streams, 1), chunk_size)
    a_chunk, the_rest = (multiply_adds(c, writes, reads, head_dim) for c in (chunk_size, rest))
    operations: int = 2 * streams * (chunks * a_chunk + the_rest)
    return operations


def forward_flops(memory: Shape, *arguments: Any, **_: Any) -> int:
    """Count ``sdm_rt::write_read`` or ``write_read_inplace``, tensors given as their shapes."""
    return _flops(_forward, memory[1], arguments)


def backward_flops(
    final: Shape, saved: Any, of_readings: Any, of_final: Any, *arguments: Any, **_: Any
) -> int:
    """Count ``sdm_rt::write_read_backward``, tensors given as their shapes."""
    return _flops(_backward, final[1], arguments)
