"""The op and the layer on a GPU inside PyTorch's training stack: operators, compiler, hooks, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from sdm_rt import sdm_write_read
from tests.cpu.test_library import (
    OPERATORS,
    assert_same,
    flat_arguments,
    run,
    run_layer,
)
from tests.layer_reference import make_layer
from tests.problems import Problem, make_problem
from tests.tolerances import assert_same_bits

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def on_gpu(problem: Problem, dtype: torch.dtype = torch.bfloat16) -> Problem:
    problem = problem.cast(dtype)
    moved = {name: x.to(DEVICE) for name, x in vars(problem).items() if isinstance(x, Tensor)}
    return replace(problem, **moved)


def padded(lengths: tuple[int, ...] | None = None) -> Problem:
    return on_gpu(make_problem(2, 37, 4, 5, 32, 24, writes="repeats", lengths=lengths))


def arguments_of(problem: Problem, requires_grad: bool, mode: str = "none") -> list[Any]:
    arguments = flat_arguments(problem, requires_grad, mode=mode)
    return [x.to(DEVICE) if isinstance(x, Tensor) and not x.requires_grad else x for x in arguments]


class _OnGpu:
    """``sdm_write_read`` with the vectors of a problem's streams moved to the GPU."""

    def __init__(self, op: Callable[..., Any]) -> None:
        self.op = op

    def __call__(self, bank: Tensor, **arguments: Any) -> Any:
        for name in ("lengths", "cu_seqlens"):
            if name in arguments:
                arguments[name] = arguments[name].to(DEVICE)
        return self.op(bank, **arguments)


EAGER = _OnGpu(sdm_write_read)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("lengths", "mode"), [(None, "none"), ((37, 5), "fp8")])
def test_opcheck(lengths: tuple[int, ...] | None, mode: str, requires_grad: bool) -> None:
    arguments = arguments_of(padded(lengths), requires_grad, mode)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(OPERATORS.write_read.default, arguments, test_utils=checks)
    if not requires_grad:
        torch.library.opcheck(OPERATORS.write_read_inplace.default, arguments, test_utils=checks)
        readings, final, saved = OPERATORS.write_read(*arguments)
        backward = (final, saved, readings, None, *arguments[1:])
        torch.library.opcheck(OPERATORS.write_read_backward.default, backward, test_utils=checks)


@pytest.mark.parametrize("mode", ["none", "bf16", "fp8", "int4"])
def test_fakes_know_what_a_call_saves(mode: str) -> None:
    arguments = arguments_of(padded(), False, mode)
    _, _, saved = OPERATORS.write_read(*arguments)
    with FakeTensorMode() as fakes:
        fake = [fakes.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments]
        _, _, expected = OPERATORS.write_read(*fake)
    assert [(x.shape, x.dtype) for x in saved] == [(x.shape, x.dtype) for x in expected]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("return_final_bank", [False, True])
@pytest.mark.parametrize(("lengths", "packed"), [(None, False), ((37, 5), False), ((37, 5), True)])
def test_compiled_op_has_the_bits_of_the_eager_one(
    lengths: tuple[int, ...] | None, packed: bool, return_final_bank: bool, dynamic: bool
) -> None:
    problem = padded(lengths)
    want = run(EAGER, problem, return_final_bank, packed)
    compiled = _OnGpu(torch.compile(sdm_write_read, fullgraph=True, backend="aot_eager", dynamic=dynamic))
    assert_same(run(compiled, problem, return_final_bank, packed), want)


def test_compiled_layer_has_the_bits_of_the_eager_one() -> None:
    layer = make_layer(torch.bfloat16, output_gate=True, key_weighted_decay=True).to(DEVICE)
    x = torch.randn(2, 7, 12, dtype=torch.bfloat16, device=DEVICE)
    want = run_layer(layer, layer, x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same(run_layer(compiled, layer, x), want)


@pytest.mark.parametrize("return_final_bank", [False, True])
@pytest.mark.parametrize("hooks", ["save_on_cpu", "copies at odd addresses"])
def test_hooks_that_hand_back_another_tensor(return_final_bank: bool, hooks: str) -> None:
    problem = padded()
    want = run(EAGER, problem, return_final_bank)

    def unpack(x: Tensor) -> Tensor:
        moved = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:]
        return moved.copy_(x.flatten()).view(x.shape)

    with (
        torch.autograd.graph.save_on_cpu()
        if hooks == "save_on_cpu"
        else torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), unpack)
    ):
        got = run(EAGER, problem, return_final_bank)
    assert_same(got, want)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool) -> None:
    problem = padded()
    want = run(EAGER, problem, True)

    def checkpointed(bank: Tensor, **arguments: Any) -> Any:
        names, tensors = zip(*((n, x) for n, x in arguments.items() if isinstance(x, Tensor)), strict=True)
        others = {n: x for n, x in arguments.items() if n not in names}

        def call(bank: Tensor, *tensors: Tensor) -> Any:
            return sdm_write_read(bank, **dict(zip(names, tensors, strict=True)), **others)

        return checkpoint(call, bank, *tensors, use_reentrant=use_reentrant)

    assert_same(run(checkpointed, problem, True), want)


def test_expanded_gradients_have_the_bits_of_dense_ones() -> None:
    problem = padded()
    found = []
    for dense in (True, False):
        v = problem.v.clone().requires_grad_()
        arguments = problem.inputs() | {"v": v}
        readings = sdm_write_read(problem.memory.clone(), **arguments, **problem.options())
        one = torch.ones(1, 1, dtype=v.dtype, device=DEVICE).expand_as(readings)
        readings.backward(one.contiguous() if dense else one)
        found.append(v.grad)
    assert_same_bits("gradient", found[1], found[0])
