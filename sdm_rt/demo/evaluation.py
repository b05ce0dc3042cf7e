"""Bits per byte on validation text: of a model, and of the text's byte frequencies."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sdm_rt.demo.model import ByteLanguageModel

__all__ = ["bits_per_byte", "unigram_bits_per_byte", "validation_windows"]


def validation_windows(text: Tensor, length: int, most: int) -> Tensor:
    """Return up to ``most`` disjoint windows of ``text``, evenly spread, as int64 [windows, length + 1]."""
    available = len(text) // (length + 1)
    chosen = torch.linspace(0, available - 1, min(most, available)).round().long()
    return text[: available * (length + 1)].view(available, length + 1)[chosen].long()


@torch.no_grad()
def bits_per_byte(model: ByteLanguageModel, windows: Tensor, batch: int) -> float:
    """Return the mean of -log2 p(byte | bytes before it in its window) over ``windows`` [N, T + 1].

    The first byte of a window is only read, ``batch`` windows are taken at once.
    """
    model.eval()
    nats = 0.0
    for part in torch.split(windows, batch):
        logits = model(part[:, :-1])
        nats += F.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten(), reduction="sum").item()
    model.train()
    return nats / math.log(2) / windows[:, 1:].numel()


def unigram_bits_per_byte(train: Tensor, windows: Tensor) -> float:
    """Return the bits per byte of ``windows`` [N, T + 1] under the byte frequencies of ``train``.

    Every byte counts once more than it occurs, so that none is impossible.
    """
    counts = torch.bincount(train.long(), minlength=256).double() + 1
    bits = -(counts / counts.sum()).log2()
    return float(bits[windows[:, 1:]].mean())
