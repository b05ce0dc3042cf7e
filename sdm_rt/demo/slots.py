"""How often validation text writes and reads each slot of the SDM layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
    """Count the slots that ``windows`` [N, T + 1] select in each SDM layer of ``model``, in eval mode."""
    model.eval()
    layers = model.sdm_layers
    counts = [dict.fromkeys(("write_counts", "read_counts"), torch.tensor(0)) for _ in layers]
    for layer in layers:
        layer.args.log_memory_access_stats = True
    for part in torch.split(windows, batch):
        model(part[:, :-1])
        for layer, total in zip(layers, counts, strict=True):
            for name in total:
                total[name] = total[name] + layer.statistics[name].cpu()
    for layer in layers:
        layer.args.log_memory_access_stats = False
    return [
        SlotUse(*(total[name].view(-1, *layer.factors) for name in ("write_counts", "read_counts")))
        for layer, total in zip(layers, counts, strict=True)
    ]
