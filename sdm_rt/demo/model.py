"""The demo's byte-level language model: blocks of local attention, perhaps an SDM layer, and an MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdm_rt import SDMLayerState, SparseDeltaMemory, SparseDeltaMemoryArgs
from sdm_rt.demo.config import DemoConfig

__all__ = ["BlockState", "ByteLanguageModel", "LocalAttention", "band_mask", "rotate"]

BYTES = 256
ROTARY_BASE = 10_000.0


@dataclass
class BlockState:
    """What a block carries from one decoded byte to the next.

    Parameters
    ----------
    keys, values : torch.Tensor
        [B, heads, n, head_dim], n < window: the latest bytes of the attention window, keys already rotated.
    sdm : SDMLayerState or None
        The bank of the SDM layer; None in a model without SDM layers.
    """

    keys: Tensor
    values: Tensor
    sdm: SDMLayerState | None


class ByteLanguageModel(nn.Module):
    """Predict the next byte.

    Parameters
    ----------
    config : DemoConfig
        Sizes of the model; weights are drawn from torch's global generator.
    """

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.window = config.window
        self.embedding = nn.Embedding(BYTES, config.dim)
        self.trunk = nn.ModuleList(Block(config, layer_id) for layer_id in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, BYTES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=config.dim**-0.5)

    @property
    def blocks(self) -> list[Block]:
        """The blocks, first to last."""
        return cast("list[Block]", list(self.trunk))

    @property
    def sdm_layers(self) -> list[SparseDeltaMemory]:
        """The SDM layers, first to last; empty once they are removed."""
        return [block.sdm for block in self.blocks if block.sdm is not None]

    def remove_sdm_layers(self) -> None:
        """Turn this model into the baseline: every other weight stays what it is."""
        for block in self.blocks:
            block.sdm = block.sdm_norm = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, 256] for the byte after each of ``tokens`` [B, T] (int64)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        mask = band_mask(tokens.shape[1], self.window, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def decode(self, tokens: Tensor, position: int, states: list[BlockState]) -> Tensor:
        """Return logits [B, 256] after one byte a sequence.

        Parameters
        ----------
        tokens : torch.Tensor
            int64 [B], the bytes at ``position``.
        position : int
            Their place in the sequence, from 0.
        states : list of BlockState
            One a block, from `new_states` before the first byte; advanced in place.
        """
        positions = torch.tensor([position], device=tokens.device)
        x = self.embedding(tokens[:, None])
        for block, state in zip(self.blocks, states, strict=True):
            x = block.decode(x, positions, state)
        logits: Tensor = self.head(self.norm(x))[:, 0]
        return logits

    def new_states(self, sequences: int) -> list[BlockState]:
        """Return the states before the first byte of ``sequences`` sequences."""
        return [block.new_state(sequences) for block in self.blocks]


class Block(nn.Module):
    """Local attention, SDM layer (not in every block), MLP; each behind a norm and added to the stream.

    Parameters
    ----------
    config : DemoConfig
        Sizes of the model.
    layer_id : int
        Place of the block, from 0.
    """

    def __init__(self, config: DemoConfig, layer_id: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = LocalAttention(config)
        self.sdm_norm: nn.Module | None = None
        self.sdm: SparseDeltaMemory | None = None
        if config.has_sdm_layer(layer_id):
            self.sdm_norm = nn.RMSNorm(config.dim)
            self.sdm = SparseDeltaMemory(
                SparseDeltaMemoryArgs(
                    dim=config.dim,
                    num_heads=config.sdm_heads,
                    slots_per_head=config.slots,
                    num_writes=config.writes,
                    num_reads=config.reads,
                    query_batchnorm=True,
                ),
                layer_id,
            )
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.mlp = nn.Sequential(
            nn.Linear(config.dim, 4 * config.dim), nn.GELU(), nn.Linear(4 * config.dim, config.dim)
        )

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions, mask)
        if self.sdm is not None and self.sdm_norm is not None:
            x = x + self.sdm(self.sdm_norm(x))[0]
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out

    def decode(self, x: Tensor, positions: Tensor, state: BlockState) -> Tensor:
        x = x + self.attention.decode(self.attention_norm(x), positions, state)
        if self.sdm is not None and self.sdm_norm is not None:
            x = x + self.sdm(self.sdm_norm(x), cache=state.sdm)[0]
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out

    def new_state(self, sequences: int) -> BlockState:
        weight = self.attention.qkv.weight
        empty = weight.new_empty(sequences, self.attention.heads, 0, self.attention.head_dim)
        sdm = (
            None if self.sdm is None else self.sdm.create_kv_cache(sequences, 1, weight.dtype, weight.device)
        )
        return BlockState(empty, empty, sdm)


class LocalAttention(nn.Module):
    """Causal attention of each byte to the last ``window`` bytes, with rotary positions.

    Parameters
    ----------
    config : DemoConfig
        Sizes of the model.
    """

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.heads = config.attention_heads
        self.head_dim = config.dim // config.attention_heads
        self.window = config.window
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Return readings [B, T, dim] for ``x`` [B, T, dim] at ``positions`` [T], under a `band_mask`."""
        query, key, value = self._project(x, positions)
        return self._merge(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))

    def decode(self, x: Tensor, positions: Tensor, state: BlockState) -> Tensor:
        """Return readings [B, 1, dim] for one byte ``x`` [B, 1, dim]; the window in ``state`` moves on."""
        query, key, value = self._project(x, positions)
        key, value = torch.cat((state.keys, key), dim=2), torch.cat((state.values, value), dim=2)
        # The next byte sees itself and window - 1 of these.
        oldest = max(0, key.shape[2] - (self.window - 1))
        state.keys, state.values = key[:, :, oldest:], value[:, :, oldest:]
        return self._merge(F.scaled_dot_product_attention(query, key, value))

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sequences, length, _ = x.shape
        projected = self.qkv(x).view(sequences, length, 3, self.heads, self.head_dim)
        query, key, value = projected.permute(2, 0, 3, 1, 4)  # [B, heads, T, head_dim] each
        return rotate(query, positions), rotate(key, positions), value

    def _merge(self, readings: Tensor) -> Tensor:
        out: Tensor = self.out(readings.transpose(1, 2).flatten(2))
        return out


def band_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Return the bool mask [length, length] that is True where byte i sees byte j: i - window < j <= i."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril().triu(1 - window)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Apply rotary position embedding (arXiv 2104.09864) to ``x`` [..., T, head_dim] at ``positions`` [T]."""
    half = x.shape[-1] // 2
    frequencies = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = positions[:, None].to(torch.float64) * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
