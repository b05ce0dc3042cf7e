"""What the launches of a GPU call are handed, without a GPU: prepared launches look at their pointers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_rt import sdm_write_read
from sdm_rt.ops import (
    write_read,
    write_read_autograd,
    write_read_backward_launch,
    write_read_launch,
    write_read_paths,
)
from sdm_rt.plan.launch import Launch
from tests.problems import GRADIENTS, by_token, make_problem, with_gaps
from tests.runtime.plans_without_gpu import STREAM, bind_without_gpu

P, T, W, R, D, S = 3, 20, 4, 6, 16, 32
OPERANDS = ("k_idx", "k_val", "v", "q_idx", "q_val")
Layout = Callable[[Tensor], Tensor]


def rows(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


LAYOUTS: dict[str, Layout] = {
    "[P, T, *]": lambda x: x.clone(),
    "rows": rows,
    "gaps": with_gaps,
    "rows with gaps": lambda x: with_gaps(rows(x)),
    "token by token": by_token,
    "one for all streams": lambda x: x[:1].expand(x.shape),
}


class Looking:
    """A prepared launch that reads, when it runs, what its pointers to operands address."""

    wanted: Mapping[str, Tensor]
    seen: list[tuple[str, str, int]]

    def __init__(self, launch: Launch) -> None:
        self.launch_description = launch
        self.arguments: list[Any] = [0] * len(launch.arguments)

    def run(self, stream: int) -> None:
        for argument, value in zip(self.launch_description.arguments, self.arguments, strict=True):
            want = Looking.wanted.get(argument.name)
            if want is None or value == 0:
                continue
            held = bytes((ctypes.c_char * want.nbytes).from_address(value))
            got = torch.frombuffer(bytearray(held), dtype=want.dtype).view(want.shape)
            assert torch.equal(got, want), f"{self.launch_description.name}: {argument.name}"
            Looking.seen.append((self.launch_description.name, argument.name, value))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run CPU tensors on the path of CUDA tensors; launches look and compute nothing."""
    bind_without_gpu(monkeypatch, Looking)
    monkeypatch.setenv("SDM_RT_REPLAY", "0")
    for module in (write_read_launch, write_read_backward_launch):
        monkeypatch.setattr(module, "current_stream", lambda index: STREAM)
    for module in (write_read, write_read_autograd):
        monkeypatch.setattr(module, "path_of", lambda device: write_read_paths._KERNELS)
    Looking.seen = []


def call_of(layout: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    problem = make_problem(P, T, W, R, D, S).cast(dtype)
    tensors = {name: LAYOUTS[layout](x) for name, x in problem.inputs().items()}
    return {"memory": problem.memory.clone(), **tensors, "num_memory_slots": S, "num_parallel": P}


def look_at(call: Mapping[str, Any]) -> None:
    """Expect the operands of a call: dense, in the bank's dtype."""
    flat = {name: call[name].detach() for name in OPERANDS}
    flat = {name: x.reshape(-1, x.shape[-1]).contiguous() for name, x in flat.items()}
    dtype = call["memory"].dtype
    Looking.wanted = {name: x.to(dtype) if x.is_floating_point() else x for name, x in flat.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_forward_reads_the_callers_values(layout: str) -> None:
    call = call_of(layout)
    look_at(call)
    with torch.no_grad():
        assert sdm_write_read(**call).shape == (P * T, D)
    assert {name for _, name, _ in Looking.seen} == set(OPERANDS)
    in_place = {name for _, name, value in Looking.seen if value == call[name].data_ptr()}
    assert in_place == (set(OPERANDS) if call["v"].is_contiguous() else set())


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_backward_reads_the_indices_and_gives_gradients_like_its_inputs(
    layout: str, dtype: torch.dtype, functional: bool
) -> None:
    call = call_of(layout, dtype)
    call["beta"] = call["beta"].double()
    look_at(call)
    inputs = [call[name].requires_grad_() for name in GRADIENTS if name != "memory"]
    result = sdm_write_read(**call, return_final_bank=functional)
    readings = result[0] if isinstance(result, tuple) else result
    Looking.seen = []
    gradients = torch.autograd.grad(readings, inputs, torch.ones_like(readings))
    assert {name for _, name, _ in Looking.seen} == {"k_idx", "q_idx"}  # values were kept in other forms
    for gradient, x in zip(gradients, inputs, strict=True):
        assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
