"""The op inside PyTorch's training machinery: inference mode, hooks, checkpointing, autocast, transforms."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from sdm_rt import phase1_forward, product_key_topk, sdm_decode_step, sdm_write_read, wy_solve
from tests.problems import GRADIENTS, Problem, Result, make_problem, run_op
from tests.tolerances import assert_same_bits


def assert_same_result(got: Result, want: Result) -> None:
    assert_same_bits("readings", got.readings, want.readings)
    assert_same_bits("bank", got.bank, want.bank)
    for name in GRADIENTS:
        assert_same_bits(f"gradient of {name}", got.gradients[name], want.gradients[name])


# Case 13.
@pytest.mark.parametrize("made_inside", [False, True])
def test_inference_mode(made_inside: bool) -> None:
    problem = make_problem(2, 7, 3, 4, 5, 8, writes="repeats")
    want = run_op(problem, return_final_bank=True)
    with torch.inference_mode():
        bank = problem.memory.clone() if made_inside else None
        tokens = {name: x.clone() if made_inside else x for name, x in problem.inputs().items()}
    if bank is None:
        bank = problem.memory.clone()
    with torch.inference_mode():
        functional, final = sdm_write_read(bank, **tokens, **problem.options(), return_final_bank=True)
        assert_same_bits("the caller's bank", bank, problem.memory)
        readings = sdm_write_read(bank, **tokens, **problem.options())
    for got in (functional, readings):
        assert_same_bits("readings", got.view_as(want.readings), want.readings)
    for got in (final, bank):
        assert_same_bits("bank", got, want.bank)


def test_an_inference_mode_call_still_counts_as_a_change_of_the_bank() -> None:
    problem = make_problem(2, 7, 3, 4, 5, 8)
    bank = problem.memory.clone().requires_grad_()
    readings = sdm_write_read(bank, **problem.inputs(), **problem.options())
    with torch.inference_mode():
        sdm_write_read(bank, **problem.inputs(), **problem.options())
    with pytest.raises(RuntimeError, match="changed between"):
        readings.sum().backward()


def test_a_bank_of_inference_mode_and_a_backward() -> None:
    """PyTorch does not track changes of inference tensors, so a backward could not tell that they changed."""
    problem = make_problem(2, 7, 3, 4, 5, 8)
    want = _gradients(problem, True, "none")
    with torch.inference_mode():
        bank = problem.memory.clone()
    leaf = problem.v.clone().requires_grad_()
    arguments = problem.inputs() | {"v": leaf}
    with pytest.raises(RuntimeError, match="memory: an inference tensor cannot be advanced in place"):
        sdm_write_read(bank, **arguments, **problem.options())
    assert_same_bits("the caller's bank", bank, problem.memory)
    out = sdm_write_read(bank, **arguments, **problem.options(), return_final_bank=True)
    torch.autograd.backward(out, (problem.grad_readings.flatten(0, 1), problem.grad_bank))
    assert_same_bits("gradient of v", leaf.grad, want["v"])
    with torch.no_grad():
        sdm_write_read(bank, **arguments, **problem.options())
    assert_same_bits("the advanced bank", bank, out[1])


@pytest.mark.parametrize("return_final_bank", [False, True])
@pytest.mark.parametrize("name", ["k_idx", "beta", "q_idx", "lengths"])
def test_operands_of_inference_mode_and_a_backward(name: str, return_final_bank: bool) -> None:
    problem = make_problem(2, 7, 3, 4, 5, 8, lengths=(7, 3))
    arguments = problem.inputs() | problem.options()
    found = []
    for inference in (False, True):
        with torch.inference_mode(inference):
            operand = arguments[name].clone()
        bank, leaf = problem.memory.clone(), problem.v.clone().requires_grad_()
        given = arguments | {name: operand, "v": leaf}
        out = sdm_write_read(bank, **given, return_final_bank=return_final_bank)
        readings, final = out if return_final_bank else (out, bank.clone())
        readings.backward(problem.grad_readings.flatten(0, 1))
        found.append((readings, final, leaf.grad))
    for what, got, want in zip(("readings", "bank", "gradient of v"), *reversed(found), strict=True):
        assert_same_bits(what, got, want)


@pytest.mark.parametrize("mode", [nullcontext, lambda: FlopCounterMode(display=False)])
def test_forward_mode_derivatives_of_the_other_ops_are_refused(mode: Callable[[], Any]) -> None:
    index, one = torch.zeros(1, 4, 2, dtype=torch.int32), torch.ones(1, 4, 2)
    gates, square = torch.zeros(1, 4, 1), torch.zeros(1, 4, 4)
    calls: dict[str, Callable[[Tensor], Any]] = {
        "raw": lambda x: product_key_topk(x, (3, 3), 2),
        "g": lambda x: phase1_forward(index, index, one, one, x),
        "beta": lambda x: wy_solve(square, x, square),
    }
    inputs = {"raw": torch.randn(5, 6), "g": gates, "beta": torch.ones(1, 4)}
    for name, call in calls.items():
        call(inputs[name])
        with forward_ad.dual_level(), mode():
            dual = forward_ad.make_dual(inputs[name], torch.ones_like(inputs[name]))
            with pytest.raises(RuntimeError, match=f"{name}: has a tangent"):
                call(dual)


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("op", [sdm_write_read, sdm_decode_step])
def test_forward_mode_derivatives_are_refused(op: Callable[..., Any], name: str) -> None:
    problem = make_problem(2, 1, 3, 4, 5, 8)
    arguments = {"memory": problem.memory.clone(), **problem.inputs()}
    options = problem.options() if op is sdm_write_read else {}
    with forward_ad.dual_level():
        op(**arguments | {"memory": problem.memory.clone()}, **options)  # no tangent, no error
        arguments[name] = forward_ad.make_dual(arguments[name], torch.ones_like(arguments[name]))
        for mode in (nullcontext(), FlopCounterMode(display=False)):
            refusal = pytest.raises(RuntimeError, match=f"{name}: has a tangent, and {op.__name__} has no")
            with mode, refusal:
                op(**arguments, **options)
    assert_same_bits("the bank", arguments["memory"], problem.memory)


# Case 24.
@pytest.mark.parametrize("return_final_bank", [False, True])
@pytest.mark.parametrize("snapshot_quant", ["none", "fp8"])
def test_save_on_cpu(return_final_bank: bool, snapshot_quant: str) -> None:
    problem = make_problem(2, 7, 3, 4, 5, 8, writes="repeats", gate_per_write=True)
    want = _gradients(problem, return_final_bank, snapshot_quant)
    with torch.autograd.graph.save_on_cpu():
        got = _gradients(problem, return_final_bank, snapshot_quant)
    for name in GRADIENTS:
        assert_same_bits(f"gradient of {name}", got[name], want[name])


@pytest.mark.parametrize("return_final_bank", [False, True])
def test_hooks_that_hand_back_another_tensor(return_final_bank: bool) -> None:
    problem = make_problem(2, 7, 3, 4, 5, 8, writes="repeats", gate_per_write=True)
    want = _gradients(problem, return_final_bank, "none")
    packed = []

    def pack(x: Tensor) -> Tensor:
        copy = x.detach().clone()
        packed.append(copy)
        return copy

    # The backward gets yet another tensor, of other strides.
    def unpack(x: Tensor) -> Tensor:
        return x.detach().t().clone(memory_format=torch.contiguous_format).t() if x.dim() == 2 else x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        got = _gradients(problem, return_final_bank, "none")
    assert packed
    for name in GRADIENTS:
        assert_same_bits(f"gradient of {name}", got[name], want[name])


def _gradients(problem: Problem, return_final_bank: bool, snapshot_quant: str) -> dict[str, Tensor]:
    leaves = {name: getattr(problem, name).clone().requires_grad_() for name in GRADIENTS}
    arguments = {name: leaves.get(name, x) for name, x in problem.inputs().items()}
    out = sdm_write_read(
        leaves["memory"],
        **arguments,
        **problem.options(),
        return_final_bank=return_final_bank,
        snapshot_quant=snapshot_quant,
    )
    outputs = out if return_final_bank else (out,)
    grads = (problem.grad_readings.flatten(0, 1), problem.grad_bank)[: len(outputs)]
    torch.autograd.backward(outputs, grads)
    return {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_of_chained_segments(use_reentrant: bool) -> None:
    problem = make_problem(2, 10, 3, 4, 5, 8, writes="repeats", gate_per_write=True)
    want = run_op(problem, return_final_bank=True)
    leaves = {name: getattr(problem, name).clone().requires_grad_() for name in GRADIENTS}

    def segment(bank: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        part = {name: leaves.get(name, x)[:, start:stop] for name, x in problem.inputs().items()}
        return sdm_write_read(bank, **part, **problem.options(), return_final_bank=True)

    bank, parts = leaves["memory"], []
    for start, stop in ((0, 4), (4, 10)):
        readings, bank = checkpoint(segment, bank, start, stop, use_reentrant=use_reentrant)
        parts.append(readings.view(2, stop - start, 5))
    readings = torch.cat(parts, 1)
    torch.autograd.backward([readings, bank], [problem.grad_readings, problem.grad_bank])
    got = Result(readings.detach(), bank.detach(), {name: leaf.grad for name, leaf in leaves.items()})
    assert_same_result(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_no_bit(dtype: torch.dtype) -> None:
    problem = make_problem(2, 7, 3, 4, 5, 8, gate_per_write=True).cast(dtype)
    want = run_op(problem, return_final_bank=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run_op(problem, return_final_bank=True)
    assert_same_result(got, want)


def test_autocast_projections_feed_a_float32_bank() -> None:
    problem = make_problem(2, 7, 3, 4, 5, 8).cast(torch.float32)
    linear = torch.nn.Linear(5, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        v = linear(problem.v)
        assert v.dtype == torch.bfloat16
        arguments = problem.inputs() | {"v": v}
        readings = sdm_write_read(problem.memory.clone(), **arguments, **problem.options())
    assert readings.dtype == torch.float32
    readings.square().sum().backward()
    assert bool(linear.weight.grad.isfinite().all())
    assert bool((linear.weight.grad != 0).any())


# Case 14.
def test_grad_mode_decides_not_the_module_mode() -> None:
    problem = make_problem(2, 7, 3, 4, 5, 8)
    v = problem.v.clone().requires_grad_()
    arguments = problem.inputs() | {"v": v}
    assert sdm_write_read(problem.memory.clone(), **arguments, **problem.options()).requires_grad
    with torch.no_grad():
        assert not sdm_write_read(problem.memory.clone(), **arguments, **problem.options()).requires_grad


def test_checkpointing_an_in_place_call_is_refused() -> None:
    problem = make_problem(2, 7, 3, 4, 5, 8)
    v = problem.v.clone().requires_grad_()
    bank = problem.memory.clone()

    def call(v: Tensor) -> Tensor:
        return sdm_write_read(bank, **(problem.inputs() | {"v": v}), **problem.options())

    readings = checkpoint(call, v, use_reentrant=False)
    with pytest.raises(RuntimeError, match="activation checkpointing"):
        readings.sum().backward()
    assert v.grad is None


def test_selective_checkpointing_keeps_or_repeats_the_call() -> None:
    problem = make_problem(2, 7, 3, 4, 5, 8)
    v = problem.v.clone().requires_grad_()
    ran = []

    def call(v: Tensor) -> Tensor:
        arguments = problem.inputs() | {"v": v.tanh()}
        return sdm_write_read(problem.memory.clone(), **arguments, **problem.options()).square()

    (want,) = torch.autograd.grad(call(v).sum(), v)
    for choice in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE):

        def policy(context: Any, op: Any, *_: Any, choice: Any = choice, **__: Any) -> CheckpointPolicy:
            if op == torch.ops.sdm_rt.write_read.default:
                ran.append(context.is_recompute)
                return choice
            return CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)
        out = checkpoint(call, v, use_reentrant=False, context_fn=contexts)
        assert_same_bits("gradient", torch.autograd.grad(out.sum(), v)[0], want)
    assert ran.count(False) == 2


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_functional_transforms_are_refused(transform: Callable[..., Any]) -> None:
    problem = make_problem(1, 4, 2, 2, 3, 4)

    def call(memory: Tensor) -> Tensor:
        out = sdm_write_read(memory, **problem.inputs(), **problem.options(), return_final_bank=True)
        return out[0].sum()

    argument = problem.memory.expand(2, -1, -1) if transform is torch.vmap else problem.memory
    with pytest.raises(RuntimeError, match=r"torch\.func transforms"):
        transform(call)(argument)


def test_functional_transforms_of_decode_are_refused() -> None:
    problem = make_problem(1, 1, 2, 2, 3, 4)
    banks = problem.memory.expand(2, -1, -1).clone()
    with pytest.raises(RuntimeError, match=r"sdm_decode_step: torch\.func transforms"):
        torch.vmap(lambda bank: sdm_decode_step(bank, **problem.inputs()))(banks)
    assert_same_bits("banks", banks, problem.memory.expand(2, -1, -1))


@pytest.mark.parametrize("name", ["memory", "k_idx", "v", "lengths"])
def test_wrappers_of_several_tensors_are_refused(name: str) -> None:
    problem = make_problem(2, 7, 3, 4, 5, 8, lengths=(7, 4))
    arguments = {"memory": problem.memory.clone(), **problem.inputs(), **problem.options()}
    arguments[name] = TwoTensor(arguments[name], arguments[name].clone())
    with pytest.raises(TypeError, match=rf"^{name}: expected a plain tensor, got TwoTensor"):
        sdm_write_read(**arguments)


@pytest.mark.parametrize("return_final_bank", [False, True])
def test_gradients_only_where_asked_for(return_final_bank: bool) -> None:
    problem = make_problem(2, 7, 3, 4, 5, 8, writes="repeats", lengths=(7, 4))
    want = _gradients(problem, return_final_bank, "none")
    for name in GRADIENTS:
        leaf = getattr(problem, name).clone().requires_grad_()
        arguments = {"memory": problem.memory.clone()} | problem.inputs() | {name: leaf}
        out = sdm_write_read(**arguments, **problem.options(), return_final_bank=return_final_bank)
        outputs = out if return_final_bank else (out,)
        grads = (problem.grad_readings.flatten(0, 1), problem.grad_bank)[: len(outputs)]
        torch.autograd.backward(outputs, grads)
        assert_same_bits(f"gradient of {name}", leaf.grad, want[name])


def test_an_expanded_gradient() -> None:
    problem = make_problem(2, 7, 3, 4, 5, 8)
    found = []
    for dense in (True, False):
        v = problem.v.clone().requires_grad_()
        readings = sdm_write_read(
            problem.memory.clone(), **(problem.inputs() | {"v": v}), **problem.options()
        )
        ones = torch.ones_like(readings) if dense else torch.ones(1, 1, dtype=v.dtype).expand_as(readings)
        readings.backward(ones)
        found.append(v.grad)
    assert_same_bits("gradient", found[1], found[0])


def test_lengths_changed_before_the_backward_are_refused() -> None:
    problem = make_problem(2, 7, 3, 4, 5, 8)
    v, lengths = problem.v.clone().requires_grad_(), torch.tensor([7, 4])
    arguments = problem.inputs() | {"v": v} | problem.options() | {"lengths": lengths}
    readings = sdm_write_read(problem.memory.clone(), **arguments)
    lengths.fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        readings.sum().backward()
