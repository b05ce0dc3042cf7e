"""What plans are made from, of tensors and GPUs: names of dtypes, the model of a device."""

from __future__ import annotations

from functools import cache

import torch

from sdm_rt.plan.device import DeviceModel
from sdm_rt.runtime import device
from sdm_rt.runtime.clusters import active_clusters

__all__ = ["BANK_NAMES", "device_model"]

BANK_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@cache
def device_model(index: int) -> DeviceModel:
    """Return what plans read of the GPU ``index``."""
    name, clusters = device.gpu(index).name, active_clusters(index)
    return DeviceModel.from_attributes(name, device.attributes(index), active_clusters=clusters)
