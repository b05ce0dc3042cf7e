"""Accuracy on this GPU: outputs and gradients against the recurrence in float64, without any rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sdm_rt.bench.cases import CASES, Case, Inputs, make_inputs
from sdm_rt.bench.timing import DEVICE
from sdm_rt.bench.training import LEAVES, training_forward
from sdm_rt.cpu.recurrence import Streams, Tokens, advance, retreat

__all__ = ["bench_accuracy"]

TOKENS = 512
SEED = 3


def definition(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """Return readings, final bank and gradients of the recurrence in float64."""
    flat = [tensor.detach().flatten(0, 1) for tensor in inputs.tokens()]
    tokens = Tokens(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in flat))
    starts = [stream * case.tokens for stream in range(case.streams)]
    streams = Streams.sorted_by_length(starts, [case.tokens] * case.streams, inputs.memory.device)
    bank = inputs.memory.detach().double()
    readings, saved, _ = advance(bank, tokens, streams, "none")
    assert saved is not None
    final = bank.clone()
    gradient = torch.zeros_like(bank)
    grads = retreat(bank, gradient, tokens, streams, saved, inputs.grad_readings.double())
    return {
        "readings": readings,
        "final bank": final,
        "grad memory": gradient,
        "grad k_val": grads.k_val,
        "grad v": grads.v,
        "grad beta": grads.beta,
        "grad g": grads.g.sum(dim=1, keepdim=True),
        "grad q_val": grads.q_val,
    }


def outputs(case: Case, inputs: Inputs, schedule: str | None) -> dict[str, Tensor]:
    """Return the same of the op; its bank is restored afterwards."""
    for leaf in LEAVES:
        getattr(inputs, leaf).requires_grad_()
    readings = training_forward(case, inputs, schedule)
    final = inputs.memory.detach().clone()
    readings.backward(inputs.grad_readings)  # type: ignore[no-untyped-call]
    grads = {f"grad {leaf}": getattr(inputs, leaf).grad for leaf in LEAVES}
    return {"readings": readings.detach(), "final bank": final, **grads}


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return |got - want| / |want| by norm, in float64."""
    want = want.reshape(got.shape)
    return float(torch.linalg.vector_norm(got.double() - want) / torch.linalg.vector_norm(want))


def bench_accuracy(names: Sequence[str], schedule: str | None) -> dict[str, Any]:
    """Measure the relative errors of the named cases, cut to 512 tokens, print and return them.

    Parameters
    ----------
    names : sequence of str
        Keys of ``CASES``.
    schedule : {"stepwise", "persistent"}, optional
        The schedule to force.
    """
    figures: dict[str, dict[str, float]] = {}
    for name in names:
        case = replace(CASES[name], tokens=min(TOKENS, CASES[name].tokens))
        inputs = make_inputs(case, DEVICE, SEED)
        want = definition(case, inputs)
        got = outputs(case, inputs, schedule)
        figures[name] = {key: float(f"{relative_error(got[key], want[key]):.3g}") for key in want}
        errors = "  ".join(f"{key} {error:.1e}" for key, error in figures[name].items())
        print(f"{name:15} {errors}", flush=True)
        del inputs, want, got
        torch.cuda.empty_cache()
    return {"accuracy": figures}
