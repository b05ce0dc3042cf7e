"""Product-key top-k: argument checks and dispatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sdm_rt.cpu import topk as definition
from sdm_rt.ops.checks import BANK_DTYPES, check_int, check_no_derivatives, check_sequence
from sdm_rt.ops.counters import record_definition
from sdm_rt.ops.library import define, differentiable_once, is_traced
from sdm_rt.ops.topk_launch import (
    empty_gradient,
    empty_selection,
    select_backward_on_gpu,
    select_on_gpu,
)
from sdm_rt.plan.shapes import MAX_LANES
from sdm_rt.runtime.interop import producer_stream, to_caller, to_tensor

__all__ = ["product_key_topk", "select_slots"]

_MAX_SLOTS = 2**63 - 1


def product_key_topk(raw: Any, factors: Sequence[int], k: int) -> tuple[Any, Any]:
    """Select the ``min(k, S)`` best of S = prod(factors) slots from their factor scores.

    Slot (c_0 .. c_{F-1}) is row (..(c_0 n_1 + c_1)..) n_{F-1} + c_{F-1} and scores the sum of its factor
    scores, added in factor order. The selection is exact and total: sums are float32, -0 counts below +0, NaN
    counts as -inf, and ties are broken by rank, so a row selects the same slots alone, in any batch and on
    any device. With bfloat16 scores and more than two factors, each partial sum is rounded to bfloat16 before
    the next factor is added.

    Parameters
    ----------
    raw : Tensor
        Factor scores, [..., sum(factors)]: the n_0 columns of factor 0, then those of factor 1, and so on.
        float32, bfloat16 or float16; on a CPU also float64 (selected by float32 sums, and the values returned
        are the float64 sums). A CuPy array or another object with ``__dlpack__`` is taken too, without
        gradients.
    factors : sequence of int
        Factor widths n_0 .. n_{F-1}, each at least 1.
    k : int
        Slots to select, 1 to 256.

    Returns
    -------
    val : Tensor
        Scores of the selected slots, [..., min(k, S)], in the dtype of ``raw``. Differentiable, on a GPU
        once: the gradient of a score goes to its F columns, summed in at least float32 in a fixed order.
    idx : Tensor
        The selected slots, int64, [..., min(k, S)], ascending. Both are CuPy arrays for a CuPy array.

    Raises
    ------
    TypeError
        If ``raw`` is no array of such a dtype, or ``k`` or a factor is no int.
    ValueError
        If ``factors``, ``k`` or the width of ``raw`` is out of range; on a GPU also for 2**31 slots and more
        (`UnsupportedConfigurationError`).
    RuntimeError
        Inside a transform of ``torch.func``, for a tensor with a forward-mode tangent, and as
        `sdm_write_read` for a CuPy array. On a GPU: a part of the GPU path is missing
        (`MissingDependencyError`), a GPU below compute capability 8.0, a kernel that would have to be
        compiled inside a CUDA graph capture.

    Notes
    -----
    The product-key construction is that of arXiv 1907.05242; the rule is spelled out in ``docs/math.md``.

    Examples
    --------
    >>> val, idx = product_key_topk(torch.tensor([1.0, 0.0, 5.0, 3.0, 4.0]), (2, 3), 2)
    >>> val, idx
    (tensor([6., 5.]), tensor([0, 3]))
    """
    if not isinstance(raw, Tensor):
        with producer_stream(raw):
            val, idx = product_key_topk(to_tensor(raw, "raw"), factors, k)
            return to_caller(val, raw), to_caller(idx, raw)
    factors = _checked_factors(factors)
    _check(raw, factors, k)
    return select_slots(raw, factors, k)


def select_slots(raw: Tensor, factors: tuple[int, ...], k: int) -> tuple[Tensor, Tensor]:
    """Select as :func:`product_key_topk`, whose arguments the caller has checked.

    Parameters
    ----------
    raw : Tensor
        Factor scores [..., sum(factors)].
    factors : tuple of int
        Factor widths.
    k : int
        Slots to select.

    Returns
    -------
    val, idx : Tensor
        Scores and slots.

    Raises
    ------
    TypeError
        For float64 scores on a GPU.
    """
    check_no_derivatives("product_key_topk", {"raw": raw})
    if raw.is_cuda:
        if raw.dtype == torch.float64:
            raise TypeError(
                "raw: expected dtype float32, bfloat16 or float16 on a GPU, got float64 (CPU only)"
            )
        if not _needs_operator(raw):
            return select_on_gpu(raw, factors, k)
    elif not is_traced(raw):
        return _on_cpu(raw, factors, k)
    val, idx = torch.ops.sdm_rt.product_key_topk(raw, factors, k)
    return val, idx


def _on_cpu(raw: Tensor, factors: tuple[int, ...], k: int) -> tuple[Tensor, Tensor]:
    val, idx = definition.product_key_topk(raw, factors, k)
    record_definition("product_key_topk")
    if val.grad_fn is not None:
        val.grad_fn.register_hook(lambda *_: record_definition("product_key_topk_backward"))
    return val, idx


def _needs_operator(raw: Tensor) -> bool:
    """Whether autograd, a transform, a tracer or a tensor subclass must see the call as one operator."""
    return (
        (raw.requires_grad and torch.is_grad_enabled())
        or type(raw) not in (Tensor, torch.nn.Parameter)
        or is_traced(raw)
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _checked_factors(factors: Sequence[int]) -> tuple[int, ...]:
    widths = check_sequence("factors", factors)
    if not widths:
        raise ValueError("factors: expected at least one factor width, got none")
    for f, width in enumerate(widths):
        check_int(f"factors[{f}]", width, 1, None)
    if math.prod(widths) > _MAX_SLOTS:
        raise ValueError(f"factors: expected a product below 2**63, got {widths}")
    return widths


def _check(raw: Tensor, factors: tuple[int, ...], k: int) -> None:
    if raw.dtype not in BANK_DTYPES:
        raise TypeError(f"raw: expected dtype float64, float32, bfloat16 or float16, got {raw.dtype}")
    if raw.dim() < 1 or raw.shape[-1] != sum(factors):
        raise ValueError(
            f"raw: expected shape [..., {sum(factors)}], the sum of factors {factors}, got {list(raw.shape)}"
        )
    check_int("k", k, 1, MAX_LANES)


def _select(raw: Tensor, factors: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    record_definition("product_key_topk")
    return definition.select(raw, factors, k)


def _select_backward(grad_val: Tensor, idx: Tensor, factors: Sequence[int], k: int) -> Tensor:
    record_definition("product_key_topk_backward")
    return definition.select_backward(grad_val, idx, factors)


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


define(
    "product_key_topk(Tensor raw, int[] factors, int k) -> (Tensor, Tensor)",
    cpu=_select,
    cuda=select_on_gpu,
    fake=empty_selection,
    backward=_backward,
    setup_context=_save,
)
define(
    "product_key_topk_backward(Tensor grad_val, Tensor idx, int[] factors, int k) -> Tensor",
    cpu=_select_backward,
    cuda=select_backward_on_gpu,
    fake=empty_gradient,
    backward=differentiable_once,
)
