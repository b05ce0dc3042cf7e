"""Which slots the tokens of a layer write and read, and how strongly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sdm_rt.layer.activations import is_same_softmax
from sdm_rt.layer.args import SparseDeltaMemoryArgs
from sdm_rt.layer.layout import OneTokenLayout, TokenLayout
from sdm_rt.ops.topk import select_slots

__all__ = ["SlotSelection", "select_writes_and_reads"]


class SlotSelection(NamedTuple):
    """The bank rows and weights that the tokens write and read, as the op takes them, and slots [N, H, *].

    The slots of a call without access statistics may be those of writes and reads together.
    """

    k_idx: Tensor
    k_val: Tensor
    q_idx: Tensor
    q_val: Tensor
    k_slots: Tensor
    q_slots: Tensor


def select_writes_and_reads(
    rows: Tensor,
    layout: TokenLayout,
    args: SparseDeltaMemoryArgs,
    factors: tuple[int, ...],
    modules: Mapping[str, Any],
) -> SlotSelection:
    """Project the tokens to keys and queries, select by product keys, and activate the scores.

    Parameters
    ----------
    rows : Tensor
        The layer's input, [N, dim].
    layout : TokenLayout
        Where its tokens lie.
    args : SparseDeltaMemoryArgs
        The layer's arguments.
    factors : tuple of int
        Its product-key factors.
    modules : mapping
        The layer's modules by name: ``Wk_write``, ``Wq_read``, ``write_act``, ``read_act``, and ``key_bn``,
        ``query_bn`` where it has them.
    """
    write_keys, write_act = modules["Wk_write"], modules["write_act"]
    read_keys, read_act = modules["Wq_read"], modules["read_act"]
    if (
        isinstance(layout, OneTokenLayout)
        and args.num_writes == args.num_reads
        and not args.query_batchnorm
        and is_same_softmax(write_act, read_act)
    ):
        # A row selects the same slots in any batch: one selection and one activation for both.
        keys = torch.cat([write_keys(rows), read_keys(rows)])
        scores, slots = _select(keys, args.num_heads, factors, args.num_writes)  # [2B, H, W]
        k_val, q_val = layout.to_streams(write_act(scores)).chunk(2)
        k_idx, q_idx = layout.bank_rows(slots, args.slots_per_head).chunk(2)
        k_slots, q_slots = slots.chunk(2) if args.log_memory_access_stats else (slots, slots)
        return SlotSelection(k_idx, k_val, q_idx, q_val, k_slots, q_slots)
    keys = _normalize(modules.get("key_bn"), write_keys(rows), layout)
    k_score, k_slots = _select(keys, args.num_heads, factors, args.num_writes)
    keys = _normalize(modules.get("query_bn"), read_keys(rows), layout)
    q_score, q_slots = _select(keys, args.num_heads, factors, args.num_reads)
    return SlotSelection(
        k_idx=layout.bank_rows(k_slots, args.slots_per_head),
        k_val=layout.to_streams(write_act(k_score)),
        q_idx=layout.bank_rows(q_slots, args.slots_per_head),
        q_val=layout.to_streams(read_act(q_score)),
        k_slots=k_slots,
        q_slots=q_slots,
    )


def _select(keys: Tensor, heads: int, factors: tuple[int, ...], count: int) -> tuple[Tensor, Tensor]:
    """Return scores and slots [N, H, count] of normalized keys or queries [N, H * sum(n_f)]."""
    return select_slots(keys.view(keys.shape[0], heads, sum(factors)), factors, count)


def _normalize(norm: nn.Module | None, keys: Tensor, layout: TokenLayout) -> Tensor:
    """Apply BatchNorm to the real tokens among ``keys`` [N, columns]; in training, padding must not count.

    Finding the rows waits for the device; packed inputs have no padding to leave out.
    """
    if norm is None or keys.shape[0] == 0:
        return keys
    is_real = layout.is_real
    if is_real is None or not norm.training:
        normalized: Tensor = norm(keys)
        return normalized
    rows = is_real.nonzero().squeeze(-1)
    if rows.numel() == 0:
        return keys
    real: Tensor = norm(keys.index_select(0, rows))
    return torch.zeros_like(keys, dtype=real.dtype).index_copy(0, rows, real)
