"""Product-key top-k on a backend: the emulator runs the planned launches, the GPU the public op."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sdm_rt.plan.device import DeviceModel
from sdm_rt.plan.step_plan import StepPlan
from sdm_rt.plan.topk import TopkShape, plan_topk, plan_topk_backward
from tests.emulator.harness import Call, Replacement, run
from tests.kernels.backends import Backend, device_model

SCORE_KINDS = ("normal", "ties", "zeros", "special", "subnormal")

__all__ = ["SCORE_KINDS", "gradient", "score_rows", "select"]


def score_rows(kind: str, rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random factor scores [rows, width].

    Parameters
    ----------
    kind : str
        One of SCORE_KINDS. "ties": few distinct values; "zeros": of both signs; "special": NaN, infinities
        and zeros among them; "subnormal": numbers around the least normal one.
    """
    generator = torch.Generator().manual_seed(seed)

    def choose(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows, width), generator=generator)]

    if kind == "ties":
        return choose(-1.0, -0.5, 0.0, 0.5, 1.0, 1.5).to(dtype)
    if kind == "zeros":
        return choose(0.0, -0.0).to(dtype)
    if kind == "special":
        return choose(torch.nan, -torch.nan, torch.inf, -torch.inf, 1.0, 2.0, 0.0, -0.0).to(dtype)
    normal = torch.randn(rows, width, generator=generator)
    return (normal * (torch.finfo(dtype).tiny if kind == "subnormal" else 1.0)).to(dtype)


def _shape(scores: Tensor, rows: int, factors: Sequence[int], k: int) -> TopkShape:
    return TopkShape(rows, tuple(factors), k, str(scores.dtype).removeprefix("torch."))


def _call(plan: StepPlan, **values: Tensor | int) -> Call:
    (launch,) = plan.kernels()
    return Call(launch, values)


def select(
    backend: Backend,
    raw: Tensor,
    factors: Sequence[int],
    k: int,
    *,
    model: DeviceModel | None = None,
    seed: int = 0,
    replacements: Sequence[Replacement] = (),
) -> tuple[Tensor, Tensor]:
    """Select from rows [rows, sum(factors)]; on the emulator for ``model``, ``seed`` orders threads."""
    if backend == "gpu":
        from sdm_rt import product_key_topk

        val, idx = product_key_topk(raw.cuda(), factors, k)
        return val.cpu(), idx.cpu()
    rows = len(raw)
    shape = _shape(raw, rows, factors, k)
    val = torch.empty(rows, shape.selected, dtype=raw.dtype)
    idx = torch.empty(rows, shape.selected, dtype=torch.int64)
    call = _call(plan_topk(shape, model or device_model(backend)), raw=raw, val=val, idx=idx, rows=rows)
    run([call], outputs=[val, idx], seed=seed, replacements=replacements)
    return val, idx


def gradient(
    backend: Backend,
    raw: Tensor,
    factors: Sequence[int],
    k: int,
    grad_val: Tensor,
    idx: Tensor,
    *,
    model: DeviceModel | None = None,
    seed: int = 0,
) -> Tensor:
    """Return the gradient of ``raw``, whose selection is ``idx``."""
    if backend == "gpu":
        from sdm_rt import product_key_topk

        on_gpu = raw.cuda().requires_grad_()
        val, _ = product_key_topk(on_gpu, factors, k)
        return torch.autograd.grad(val, on_gpu, grad_val.cuda())[0].cpu()
    rows = len(raw)
    plan = plan_topk_backward(_shape(raw, rows, factors, k), model or device_model(backend))
    grad_raw = torch.empty_like(raw)
    run(
        [_call(plan, idx=idx, grad_val=grad_val, grad_raw=grad_raw, rows=rows)], outputs=[grad_raw], seed=seed
    )
    return grad_raw
