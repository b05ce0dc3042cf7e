"""Snapshots of written rows: what training keeps of the bank, whole or quantized row by row.

Modes (math.md, "Quantized snapshots"): ``none`` keeps the bank's dtype, ``bf16`` halves a float32 bank,
``fp8`` keeps an e4m3fn payload and one scale a row, ``int4`` two values a byte and one scale a row. Scales
are float32 numbers of bfloat16 precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RowSnapshot"]

_FP8_MAX = 448.0
_INT4_LIMIT = 7.5  # levels -8..7 stand for the middles of 16 steps: (level + 0.5) scale
# A row of many columns loses less by clipping its few largest values than by a coarser step for all.
_INT4_CLIPS = (1.0, 0.8)


def _row_scale(rows: Tensor, largest: float) -> Tensor:
    """Return amax / largest of each row [n, D] as [n, 1], rounded to bfloat16; 0 where it is subnormal.

    Kernels flush subnormal numbers to zero, and the reciprocal of the smallest ones is infinite.
    """
    quotient = rows.abs().amax(dim=1, keepdim=True) / largest
    quotient = quotient.masked_fill(quotient < torch.finfo(torch.float32).tiny, 0.0)
    return quotient.to(torch.bfloat16).to(torch.float32)


def _quantize_int4(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale [n, 1] and levels [n, D] in -8..7; of two clips, each row takes the more exact one.

    A row of zeros has scale 0.
    """
    scales = [_row_scale(rows, _INT4_LIMIT / clip) for clip in _INT4_CLIPS]
    inverses = [scale.reciprocal().masked_fill(scale == 0, 0.0) for scale in scales]
    levels = [(rows * inverse).floor().clamp(-8.0, 7.0) for inverse in inverses]
    errors = [
        ((level + 0.5) * scale - rows).square().sum(1, keepdim=True)
        for level, scale in zip(levels, scales, strict=True)
    ]
    clipped = errors[1] < errors[0]
    # A row with NaN or inf cannot be scaled: NaN in the scale brings the whole row back as NaN.
    broken = ~rows.isfinite().all(dim=1, keepdim=True)
    scale = torch.where(clipped, scales[1], scales[0]).masked_fill(broken, torch.nan)
    return scale, torch.where(clipped, levels[1], levels[0]).nan_to_num(0.0)


@dataclass(frozen=True)
class RowSnapshot:
    """Bank rows [n, D] in one of the snapshot modes.

    Parameters
    ----------
    mode : str
        ``none``, ``bf16``, ``fp8`` or ``int4``.
    columns : int
        D.
    dtype : torch.dtype
        The bank's dtype, in which rows come back.
    payload : Tensor
        [n, D] in the mode's dtype; for ``int4`` uint8 [n, ceil(D / 2)], the even column in the low half.
    scale : Tensor
        float32 [n, 1] for ``fp8`` and ``int4``, else [0, 1].
    """

    mode: str
    columns: int
    dtype: torch.dtype
    payload: Tensor
    scale: Tensor

    @classmethod
    def empty(cls, mode: str, count: int, bank: Tensor) -> RowSnapshot:
        """Return room for ``count`` rows of ``bank``."""
        dtypes = {"none": bank.dtype, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
        columns = bank.shape[1]
        width = (columns + 1) // 2 if mode == "int4" else columns
        return cls(
            mode,
            columns,
            bank.dtype,
            torch.empty(count, width, dtype=dtypes[mode], device=bank.device),
            torch.empty(count if mode in ("fp8", "int4") else 0, 1, dtype=torch.float32, device=bank.device),
        )

    def store(self, start: int, rows: Tensor) -> None:
        """Keep ``rows`` [n, D] at positions start..start+n."""
        end = start + rows.shape[0]
        if self.mode in ("none", "bf16"):
            self.payload[start:end] = rows
            return
        rows = rows.to(torch.float32)
        if self.mode == "fp8":
            scale = _row_scale(rows, _FP8_MAX)
            scale = scale.masked_fill(scale == 0, 1.0)  # of a row of zeros
            # The bfloat16 scale may be a little below amax / 448; beyond 448 e4m3fn has only NaN.
            self.payload[start:end] = (
                (rows * scale.reciprocal()).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
            )
        else:
            scale, levels = _quantize_int4(rows)
            nibbles = torch.nn.functional.pad(levels + 8.0, (0, rows.shape[1] % 2), value=8.0).to(torch.uint8)
            self.payload[start:end] = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
        self.scale[start:end] = scale

    def load(self, start: int, end: int) -> Tensor:
        """Return rows start..end as [n, D] in the bank's dtype."""
        payload = self.payload[start:end]
        if self.mode in ("none", "bf16"):
            return payload.to(self.dtype)
        scale = self.scale[start:end]
        if self.mode == "fp8":
            return (payload.to(torch.float32) * scale).to(self.dtype)
        levels = torch.stack((payload & 15, payload >> 4), dim=2).view(payload.shape[0], -1)[
            :, : self.columns
        ]
        return ((levels.to(torch.float32) - 7.5) * scale).to(self.dtype)
