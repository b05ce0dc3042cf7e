"""Training steps of op and layer for the tests on a GPU: inputs, one step, what it leaves behind."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from sdm_rt import SparseDeltaMemory, SparseDeltaMemoryArgs, sdm_write_read
from tests.problems import GRADIENTS, Problem, make_problem
from tests.tolerances import assert_same_bits

__all__ = [
    "DEVICE",
    "OPTIONS",
    "assert_same",
    "digest",
    "layer_step",
    "new_layer",
    "on_cpu",
    "op_step",
    "problem",
    "tokens",
]

DEVICE = torch.device("cuda")
OPTIONS: dict[str, object] = {
    "dim": 128,
    "num_heads": 2,
    "num_writes": 16,
    "num_reads": 24,
    "slots_per_head": 1024,
    "chunk_size": 32,
}
Found = dict[str, Tensor]


def new_layer(dtype: torch.dtype = torch.float32, **options: Any) -> SparseDeltaMemory:
    """A layer whose gates and strengths differ from head to head, and whose bank is not small."""
    torch.manual_seed(5)
    layer = SparseDeltaMemory(SparseDeltaMemoryArgs(**{**OPTIONS, **options}), 0)
    with torch.no_grad():
        layer.A_log.copy_(torch.linspace(-2, 0, layer.num_heads))
        if layer.memory is not None:
            layer.memory.mul_(4)
    return layer.to(DEVICE, dtype)


def on_cpu(layer: SparseDeltaMemory) -> SparseDeltaMemory:
    """The same layer on the CPU."""
    return copy.deepcopy(layer).cpu()


def tokens(seed: int = 0, batch: int = 2, length: int = 100, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inputs of a layer, the same numbers whatever the device."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, 128, generator=draw).to(DEVICE, dtype)


def gradients_of(layer: nn.Module) -> Found:
    """Take the gradients of a layer's parameters away from it."""
    found = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad(set_to_none=True)
    return found


def layer_step(layer: nn.Module, x: Tensor, **options: Any) -> Found:
    """Run forward and backward; return output, final and restored bank, and all gradients."""
    x = x.detach().clone().requires_grad_()
    out, state = layer(x, **options)
    final = state[0].clone()
    out.float().square().mean().backward()
    assert x.grad is not None
    results = {"output": out.detach(), "final bank": final, "restored bank": state[0].clone(), "x": x.grad}
    return results | gradients_of(layer)


def problem(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Problem:
    """A problem of several chunks of 32, with repeated slots."""
    given = {"writes": "repeats", "gate_per_write": True, "seed": 3, **options}
    return make_problem(3, 100, 8, 10, 64, 96, **given).cast(dtype)


def op_step(
    case: Problem,
    bank: Tensor | None = None,
    changes: dict[str, Tensor] | None = None,
    grad: Tensor | None = None,
    **options: Any,
) -> Found:
    """Run the op in place and its backward; return readings, final and restored bank, and all gradients.

    Parameters
    ----------
    case : Problem
        The inputs.
    bank : Tensor, optional
        Where the bank lies, in place of a new contiguous tensor; filled here.
    changes : dict of Tensor, optional
        Leaves in place of the problem's tensors.
    grad : Tensor, optional
        Gradient of the readings; default: the problem's.
    **options
        Arguments of ``sdm_write_read``.
    """
    given = {name: x.to(DEVICE) for name, x in case.inputs().items()} | (changes or {})
    leaves = {name: given[name].detach().requires_grad_() for name in GRADIENTS if name != "memory"}
    start = case.memory.to(DEVICE, copy=True).requires_grad_()
    if bank is None:
        bank = torch.empty_like(start, requires_grad=False)
    bank.detach().copy_(start.detach())
    settings = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in case.options().items()}
    # The bank as autograd sees it: rows that follow from `start`, in the memory of `bank`.
    seen = _Placed.apply(start, bank)
    readings = sdm_write_read(seen, **(given | leaves), **{"chunk_size": 32, **settings, **options})
    final = bank.detach().clone()
    readings.backward(case.grad_readings.flatten(0, 1).to(DEVICE) if grad is None else grad)
    results = {"readings": readings.detach(), "final bank": final, "restored bank": bank.detach().clone()}
    for name, leaf in {"memory": start, **leaves}.items():
        assert leaf.grad is not None, f"no gradient of {name}"
        results[name] = leaf.grad
    return results


class _Placed(torch.autograd.Function):
    """``start`` in the memory of ``bank``, which holds the same values."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, bank: Tensor) -> Tensor:
        return bank.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def assert_same(got: Found, want: Found) -> None:
    """Fail unless both steps left the same bits."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert_same_bits(name, got[name], tensor)


def digest(found: Found) -> str:
    """A hash of all bits."""
    state = hashlib.sha256()
    for name in sorted(found):
        state.update(name.encode())
        state.update(found[name].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()
