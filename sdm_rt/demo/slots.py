"""How often validation text writes and reads each slot of the SDM layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sdm_rt import product_key_topk
from sdm_rt.demo.model import ByteLanguageModel

__all__ = ["SlotUse", "count_slot_use"]


@dataclass(frozen=True)
class SlotUse:
    """Counts of one SDM layer over some text.

    Parameters
    ----------
    writes, reads : torch.Tensor
        int64 [H, n_0, n_1]: times that slot (c_0, c_1), a pair of key factors, was selected.
    """

    writes: Tensor
    reads: Tensor


@torch.no_grad()
def count_slot_use(model: ByteLanguageModel, windows: Tensor, batch: int) -> list[SlotUse]:
    """Count the slots that ``windows`` [N, T + 1] select in each SDM layer of ``model``."""
    counts: list[SlotUse] = []
    handles: list[RemovableHandle] = []
    for layer in model.sdm_layers:
        args = layer.args
        side = math.isqrt(args.slots_per_head)
        use = SlotUse(*(torch.zeros(args.num_heads, side, side, dtype=torch.long) for _ in range(2)))
        counts.append(use)
        for projection, k, total in (
            (layer.Wk_write, args.num_writes, use.writes),
            (layer.Wq_read, args.num_reads, use.reads),
        ):
            handles.append(projection.register_forward_hook(_Counter(k, total)))
    model.eval()
    for part in torch.split(windows, batch):
        model(part[:, :-1])
    model.train()
    for handle in handles:
        handle.remove()
    return counts


class _Counter:
    def __init__(self, k: int, total: Tensor) -> None:
        self.k = k
        self.total = total

    def __call__(self, projection: nn.Module, inputs: tuple[Tensor, ...], scores: Tensor) -> None:
        heads, *factors = self.total.shape
        _, slots = product_key_topk(scores.reshape(-1, heads, sum(factors)), factors, self.k)
        for head, total in enumerate(self.total):
            total += torch.bincount(slots[:, head].flatten().cpu(), minlength=total.numel()).view_as(total)
