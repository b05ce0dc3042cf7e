"""Snapshots of written rows: what training keeps of the bank, whole or quantized row by row.

Modes (math.md, "Quantized snapshots"): ``none`` keeps the bank's dtype, ``bf16`` halves a float32 bank,
``fp8`` keeps an e4m3fn payload and one scale a row, ``int4`` two values a byte and one scale a row. Scales
are float32 numbers of bfloat16 precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["RowSnapshot"]

_FP8_MAX = 448.0
_INT4_MAX = 7.0
# A row of many columns loses less by clipping its few largest values than by a coarser step for all.
_INT4_CLIPS = (1.0, 0.8)


def _row_scale(rows: Tensor, largest: float) -> Tensor:
    """Return amax / largest of each row [n, D] as [n, 1], rounded to bfloat16; 1 for a row of zeros."""
    scale = (rows.abs().amax(dim=1, keepdim=True) / largest).to(torch.bfloat16).to(torch.float32)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _int4_levels(rows: Tensor, scale: Tensor) -> Tensor:
    return (rows / scale).round().clamp(-_INT4_MAX, _INT4_MAX)


class RowSnapshot:
    """A buffer of ``count`` bank rows of D columns in one of the snapshot modes.

    Parameters
    ----------
    mode : str
        ``none``, ``bf16``, ``fp8`` or ``int4``.
    count, columns : int
        Rows that the buffer holds, and D.
    dtype : torch.dtype
        The bank's dtype, in which rows come back.
    device : torch.device
        The bank's device.
    """

    def __init__(self, mode: str, count: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self.mode = mode
        self.columns = columns
        self.dtype = dtype
        payload_dtype = {
            "none": dtype,
            "bf16": torch.bfloat16,
            "fp8": torch.float8_e4m3fn,
            "int4": torch.uint8,
        }[mode]
        payload_columns = (columns + 1) // 2 if mode == "int4" else columns
        self.payload = torch.empty(count, payload_columns, dtype=payload_dtype, device=device)
        scales = count if mode in ("fp8", "int4") else 0
        self.scale = torch.empty(scales, 1, dtype=torch.float32, device=device)

    def store(self, start: int, rows: Tensor) -> None:
        """Keep ``rows`` [n, D] at positions start..start+n."""
        end = start + rows.shape[0]
        if self.mode in ("none", "bf16"):
            self.payload[start:end] = rows
            return
        rows = rows.to(torch.float32)
        if self.mode == "fp8":
            scale = _row_scale(rows, _FP8_MAX)
            # The bfloat16 scale may be a little below amax / 448; beyond 448 e4m3fn has only NaN.
            self.payload[start:end] = (rows / scale).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
        else:
            scale, levels = self._best_int4(rows)
            nibbles = torch.nn.functional.pad(levels + 8.0, (0, rows.shape[1] % 2), value=8.0).to(torch.uint8)
            self.payload[start:end] = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
        self.scale[start:end] = scale

    @staticmethod
    def _best_int4(rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale [n, 1] and levels [n, D] of the clip with the least squared error, row by row."""
        best_scale = best_levels = best_error = None
        for clip in _INT4_CLIPS:
            scale = _row_scale(rows, _INT4_MAX / clip)
            levels = _int4_levels(rows, scale)
            error = (levels * scale - rows).square().sum(dim=1, keepdim=True)
            if best_scale is None or best_levels is None or best_error is None:
                best_scale, best_levels, best_error = scale, levels, error
            else:
                better = error < best_error
                best_scale = torch.where(better, scale, best_scale)
                best_levels = torch.where(better, levels, best_levels)
        assert best_scale is not None and best_levels is not None
        # A row with NaN or inf cannot be scaled: NaN in the scale brings the whole row back as NaN.
        levels = best_levels.nan_to_num(0.0)
        broken = ~rows.isfinite().all(dim=1, keepdim=True)
        return torch.where(broken, torch.full_like(best_scale, torch.nan), best_scale), levels

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
        return ((levels.to(torch.float32) - 8.0) * scale).to(self.dtype)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return (payload, scale), what a backward has to keep."""
        return self.payload, self.scale

    def with_tensors(self, payload: Tensor, scale: Tensor) -> RowSnapshot:
        """Return a snapshot of the same rows that reads from other tensors (as saved-tensor hooks hand back)."""
        other = RowSnapshot(self.mode, 0, self.columns, self.dtype, payload.device)
        other.payload, other.scale = payload, scale
        return other

    def emptied(self) -> RowSnapshot:
        """Return the description of this snapshot without its rows."""
        return RowSnapshot(self.mode, 0, self.columns, self.dtype, self.payload.device)
