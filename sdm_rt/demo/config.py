"""What one demo run is: sizes of the model and of its training, stored in every checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sdm_rt.demo.errors import DemoError

__all__ = ["DemoConfig"]

LARGEST = 2**63 - 1  # of a size, in PyTorch


@dataclass(frozen=True)
class DemoConfig:
    """Sizes of the model and of its training.

    Parameters
    ----------
    steps, batch, seq_len : int
        Optimizer steps, sequences of a step, bytes of a sequence.
    dim, layers : int
        Width of the model, number of blocks (each: local attention, an SDM layer, an MLP).
    sdm_layers : int
        How many of the blocks have an SDM layer, evenly spread, the last among them; 0: all.
    text_bytes : int
        Most bytes of text to take, whole files; 0: all of a named text, 4,000,000 of the standard library.
    attention_heads, window : int
        Heads of the local attention; a byte sees itself and the ``window - 1`` bytes before it.
    sdm_heads, slots, writes, reads : int
        SDM layers: heads, slots of a head (a square), write and read slots of a byte.
    learning_rate, weight_decay, clip : float
        AdamW's peak rate (warm-up over a twentieth of the steps, then a cosine to a tenth), its weight
        decay, and the largest gradient norm.
    bank_rate : float
        Learning rate of the learned initial banks, as a multiple of ``learning_rate``.
    seed : int
        Seeds the initial weights, the order of the text and the sample.

    Raises
    ------
    DemoError
        A size is out of range; the message names it.
    """

    steps: int = 600
    batch: int = 8
    seq_len: int = 128
    dim: int = 128
    layers: int = 2
    sdm_layers: int = 0
    text_bytes: int = 0
    attention_heads: int = 4
    window: int = 32
    sdm_heads: int = 2
    slots: int = 4096
    writes: int = 4
    reads: int = 16
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    bank_rate: float = 15.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch",
            "dim",
            "layers",
            "attention_heads",
            "window",
            "sdm_heads",
            "writes",
            "reads",
        ):
            if not 1 <= getattr(self, name) <= LARGEST:
                raise DemoError(f"{name} must be from 1 to {LARGEST}, got {getattr(self, name)}")
        if not 0 <= self.sdm_layers <= self.layers:
            raise DemoError(f"sdm_layers must be from 0 to layers = {self.layers}, got {self.sdm_layers}")
        if self.text_bytes < 0:
            raise DemoError(f"text_bytes must be at least 0, got {self.text_bytes}")
        if not -(2**63) <= self.seed < 2**64:
            raise DemoError(f"seed must be from -2**63 to 2**64 - 1, got {self.seed}")
        if not 2 <= self.seq_len <= LARGEST:
            raise DemoError(f"seq_len must be from 2 to {LARGEST}, got {self.seq_len}")
        if not 1 <= self.slots <= LARGEST or math.isqrt(self.slots) ** 2 != self.slots:
            raise DemoError(f"slots must be a square number from 1 to {LARGEST}, got {self.slots}")
        if self.dim % (2 * self.attention_heads) or self.dim % self.sdm_heads:
            raise DemoError(
                f"dim must be a multiple of {math.lcm(2 * self.attention_heads, self.sdm_heads)}, for "
                f"{self.attention_heads} attention heads of even width and {self.sdm_heads} SDM heads, "
                f"got {self.dim}"
            )

    def has_sdm_layer(self, block: int) -> bool:
        """Return whether block ``block``, from 0, has an SDM layer."""
        wanted = self.sdm_layers or self.layers
        return (block + 1) * wanted // self.layers > block * wanted // self.layers
