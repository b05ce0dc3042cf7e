"""Product-key top-k on a GPU: prepared launches behind two operators of ``torch.library``.

The operators make the call one node of a graph: PyTorch's compiler and fake tensors see shapes alone, and the
gradient is itself an operator. A launch is prepared once a shape and thread; later calls write pointers.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sdm_rt.ops.counters import record_dispatch
from sdm_rt.ops.decode_launch import BANK_NAMES, device_model
from sdm_rt.plan.step_plan import StepPlan
from sdm_rt.plan.topk import TopkShape, plan_topk, plan_topk_backward
from sdm_rt.runtime import device
from sdm_rt.runtime.compile import kernels
from sdm_rt.runtime.interop import current_stream
from sdm_rt.runtime.launcher import PreparedLaunch, prepare

__all__ = ["topk_on_gpu"]

_PLANNERS = {"topk": plan_topk, "topk_backward": plan_topk_backward}


@dataclass(frozen=True)
class _Ready:
    """One direction of a shape, ready to launch on one GPU from one thread."""

    launch: PreparedLaunch
    plan: StepPlan


class _Memo(threading.local):
    def __init__(self) -> None:
        self.ready: dict[Any, _Ready] = {}


_memo = _Memo()


def _launch(entry: str, shape: TopkShape, index: int, tensors: dict[str, Tensor]) -> StepPlan:
    """Launch ``entry`` on PyTorch's current stream; return its plan."""
    key = (entry, shape, index)
    ready = _memo.ready.get(key)
    if ready is None or not kernels().is_current(ready.launch.launch_description.kernel):
        plan = _PLANNERS[entry](shape, device_model(index))
        (planned,) = plan.kernels()
        launch = prepare(planned, device.gpu(index), current_stream(index))
        launch.set({"rows": shape.rows})
        ready = _memo.ready[key] = _Ready(launch, plan)
    ready.launch.set({name: tensor.data_ptr() for name, tensor in tensors.items()})
    ready.launch.run(current_stream(index))
    return ready.plan


def _shape(scores: Tensor, rows: int, factors: list[int], k: int) -> TopkShape:
    return TopkShape(rows, tuple(factors), k, BANK_NAMES[scores.dtype])


def _empty_selection(raw: Tensor, factors: list[int], k: int) -> tuple[Tensor, Tensor]:
    shape = (*raw.shape[:-1], _selected(factors, k))
    return raw.new_empty(shape), raw.new_empty(shape, dtype=torch.int64)


def _selected(factors: list[int], k: int) -> int:
    selected = 1
    for width in factors:
        selected = min(selected * width, k)
    return selected


def _select(raw: Tensor, factors: list[int], k: int) -> tuple[Tensor, Tensor]:
    val, idx = _empty_selection(raw, factors, k)
    if raw.numel():
        shape = _shape(raw, raw.numel() // raw.shape[-1], factors, k)
        tensors = {"raw": raw.contiguous(), "val": val, "idx": idx}
        plan = _launch("topk", shape, raw.get_device(), tensors)
        record_dispatch({"op": "product_key_topk", "path": "gpu", "plan": plan})
    return val, idx


def _empty_gradient(grad_val: Tensor, idx: Tensor, factors: list[int], k: int) -> Tensor:
    return grad_val.new_empty((*idx.shape[:-1], sum(factors)))


def _gradient(grad_val: Tensor, idx: Tensor, factors: list[int], k: int) -> Tensor:
    grad_raw = _empty_gradient(grad_val, idx, factors, k)
    if idx.numel():
        shape = _shape(grad_val, idx.numel() // idx.shape[-1], factors, k)
        tensors = {"idx": idx.contiguous(), "grad_val": grad_val.contiguous(), "grad_raw": grad_raw}
        _launch("topk_backward", shape, idx.get_device(), tensors)
    return grad_raw


def _save(ctx: Any, inputs: tuple[Tensor, list[int], int], output: tuple[Tensor, Tensor]) -> None:
    _, ctx.factors, ctx.k = inputs
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_val: Tensor | None, _grad_idx: Tensor | None
) -> tuple[Tensor | None, None, None]:
    (idx,) = ctx.saved_tensors
    if grad_val is None:
        return None, None, None
    return torch.ops.sdm_rt.product_key_topk_backward(grad_val, idx, ctx.factors, ctx.k), None, None


_library = torch.library.Library("sdm_rt", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("product_key_topk(Tensor raw, int[] factors, int k) -> (Tensor, Tensor)")  # type: ignore[no-untyped-call]
_library.define("product_key_topk_backward(Tensor grad_val, Tensor idx, int[] factors, int k) -> Tensor")  # type: ignore[no-untyped-call]
_library.impl("product_key_topk", _select, "CUDA")  # type: ignore[no-untyped-call]
_library.impl("product_key_topk_backward", _gradient, "CUDA")  # type: ignore[no-untyped-call]
torch.library.register_fake("sdm_rt::product_key_topk", _empty_selection, lib=_library)
torch.library.register_fake("sdm_rt::product_key_topk_backward", _empty_gradient, lib=_library)
torch.library.register_autograd("sdm_rt::product_key_topk", _backward, setup_context=_save, lib=_library)


def topk_on_gpu(raw: Tensor, factors: tuple[int, ...], k: int) -> tuple[Tensor, Tensor]:
    """Select on a GPU.

    Parameters
    ----------
    raw : Tensor
        Factor scores [..., sum(factors)], float32, bfloat16 or float16, checked.
    factors : tuple of int
        Factor widths.
    k : int
        Slots to select.

    Returns
    -------
    val : Tensor
        Scores [..., min(k, S)] in the dtype of ``raw``; differentiable once.
    idx : Tensor
        Slots, int64, ascending.
    """
    val, idx = torch.ops.sdm_rt.product_key_topk(raw, factors, k)
    return val, idx
