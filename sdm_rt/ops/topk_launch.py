"""Product-key top-k on a GPU: a launch is prepared once a shape and thread; later calls write pointers."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sdm_rt.ops.counters import record_dispatch
from sdm_rt.ops.plan_inputs import BANK_NAMES, device_model
from sdm_rt.plan.topk import TopkShape, plan_topk, plan_topk_backward
from sdm_rt.runtime import device
from sdm_rt.runtime.compile import kernels
from sdm_rt.runtime.interop import current_stream
from sdm_rt.runtime.kernel import KernelSpec
from sdm_rt.runtime.launcher import PreparedLaunch, prepare

__all__ = ["empty_gradient", "empty_selection", "select_backward_on_gpu", "select_on_gpu"]

_PLANNERS = {"topk": plan_topk, "topk_backward": plan_topk_backward}

_write_pointers = struct.Struct("<3Q").pack_into


@dataclass(frozen=True)
class _Ready:
    """One direction of a shape, ready to launch on one GPU from one thread."""

    launch: PreparedLaunch
    spec: KernelSpec
    generation: int  # of its kernel
    selected: tuple[int, ...]  # the shape of values and slots
    dispatch: dict[str, Any]


class _Memo(threading.local):
    def __init__(self) -> None:
        self.ready: dict[Any, _Ready] = {}


_memo = _Memo()


def _ready(entry: str, scores: Tensor, factors: Sequence[int], k: int) -> _Ready:
    """Return the prepared launch of ``entry`` for factor scores (or their gradient) of this shape, not empty.

    Parameters
    ----------
    entry : str
        The kernel.
    scores : Tensor
        [..., sum(factors)].
    factors : sequence of int
        Factor widths.
    k : int
        Slots to select.
    """
    index = scores.get_device()
    key = (entry, scores.shape, scores.dtype, index, *factors, k)
    ready = _memo.ready.get(key)
    if ready is None or not kernels().are_current((ready.spec,), ready.generation):
        generation = kernels().generation
        rows = scores.numel() // scores.shape[-1]
        shape = TopkShape(rows, tuple(factors), k, BANK_NAMES[scores.dtype])
        plan = _PLANNERS[entry](shape, device_model(index))
        (planned,) = plan.kernels()
        launch = prepare(planned, device.gpu(index), current_stream(index))
        launch.set({"rows": rows})
        dispatch = {"op": f"product_key_{entry}", "path": "gpu", "plan": plan}
        ready = _Ready(launch, planned.kernel, generation, (*scores.shape[:-1], shape.selected), dispatch)
        _memo.ready[key] = ready
    return ready


def _run(ready: _Ready, first: Tensor, second: Tensor, third: Tensor) -> None:
    """Launch on PyTorch's current stream; the kernel's first arguments point to contiguous tensors."""
    launch = ready.launch
    _write_pointers(launch.arguments, 0, first.data_ptr(), second.data_ptr(), third.data_ptr())
    launch.run(current_stream(third.get_device()))


def empty_selection(raw: Tensor, factors: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """Return room for the values and slots selected from ``raw`` [..., sum(factors)]."""
    shape = (*raw.shape[:-1], _selected(factors, k))
    return raw.new_empty(shape), raw.new_empty(shape, dtype=torch.int64)


def _selected(factors: Sequence[int], k: int) -> int:
    selected = 1
    for width in factors:
        selected = min(selected * width, k)
    return selected


def select_on_gpu(raw: Tensor, factors: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """Select on a GPU.

    Parameters
    ----------
    raw : Tensor
        Factor scores [..., sum(factors)], float32, bfloat16 or float16, checked.
    factors : sequence of int
        Factor widths.
    k : int
        Slots to select.

    Returns
    -------
    val : Tensor
        Scores [..., min(k, S)] in the dtype of ``raw``.
    idx : Tensor
        Slots, int64, ascending.
    """
    if raw.numel() == 0:
        record_dispatch({"op": "product_key_topk", "path": "gpu", "plan": None})
        return empty_selection(raw, factors, k)
    ready = _ready("topk", raw, factors, k)
    val, idx = raw.new_empty(ready.selected), raw.new_empty(ready.selected, dtype=torch.int64)
    _run(ready, raw.contiguous(), val, idx)
    record_dispatch(ready.dispatch)
    return val, idx


def empty_gradient(grad_val: Tensor, idx: Tensor, factors: Sequence[int], k: int) -> Tensor:
    """Return room for the gradient of the factor scores."""
    return grad_val.new_empty((*idx.shape[:-1], sum(factors)))


def select_backward_on_gpu(grad_val: Tensor, idx: Tensor, factors: Sequence[int], k: int) -> Tensor:
    """Return the gradient of the factor scores from that of the selected scores, on a GPU."""
    grad_raw = empty_gradient(grad_val, idx, factors, k)
    if idx.numel() == 0:
        record_dispatch({"op": "product_key_topk_backward", "path": "gpu", "plan": None})
        return grad_raw
    ready = _ready("topk_backward", grad_raw, factors, k)
    _run(ready, idx.contiguous(), grad_val.contiguous(), grad_raw)
    record_dispatch(ready.dispatch)
    return grad_raw
