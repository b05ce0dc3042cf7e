"""The contract of the in-place form: it advances the bank, and a backward takes that back."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import hessian

from sdm_rt import sdm_write_read
from tests.problems import GRADIENTS, Problem, make_problem, run_op
from tests.tolerances import assert_close, assert_same_bits

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CHANGED = "changed between this in-place call and its backward"
SECOND = r"second backward through one in-place call.*return_final_bank=True"


def call(bank: Tensor, problem: Problem, **options: object) -> tuple[Tensor, dict[str, Tensor]]:
    """One in-place call on ``bank`` with fresh leaves; returns (readings, leaves)."""
    leaves = {name: getattr(problem, name).clone().requires_grad_() for name in GRADIENTS[1:]}
    arguments = {name: leaves.get(name, x) for name, x in problem.inputs().items()}
    return sdm_write_read(bank, **arguments, **problem.options(), **options), leaves


def two_calls() -> tuple[Problem, Problem]:
    whole = make_problem(2, 11, 3, 4, 5, 8, writes="repeats")
    return whole.tokens_of(0, 6), whole.tokens_of(6, 11)


@pytest.mark.parametrize("dtype", DTYPES)
def test_advances_the_bank_and_a_backward_restores_it(dtype: torch.dtype) -> None:
    problem = make_problem(2, 9, 3, 4, 5, 8, writes="repeats").cast(dtype)
    bank = problem.memory.clone()
    readings, _ = call(bank, problem)
    want = run_op(problem, return_final_bank=True)
    assert_same_bits("bank after the call", bank, want.bank)
    assert_same_bits("readings", readings.view_as(want.readings), want.readings)
    assert not torch.equal(bank, problem.memory)
    readings.backward(problem.grad_readings.flatten(0, 1))
    assert_same_bits("bank after the backward", bank, problem.memory)


def test_stacked_calls_run_backward_in_reverse_and_no_gradient_flows_between() -> None:
    first, second = two_calls()
    bank = first.memory.clone().requires_grad_()
    y1, leaves1 = call(bank, first)
    between = bank.detach().clone()
    y2, leaves2 = call(bank, second)
    y2.backward(second.grad_readings.flatten(0, 1))
    assert_same_bits("bank after the second call's backward", bank, between)
    gradient2 = bank.grad.clone()
    bank.grad = None
    y1.backward(first.grad_readings.flatten(0, 1))
    assert_same_bits("bank after both backwards", bank, first.memory)

    want1 = run_op(first, return_final_bank=False)
    want2 = run_op(replace(second, memory=between), return_final_bank=False)
    assert_same_bits("gradient of the second call's bank", gradient2, want2.gradients["memory"])
    assert_same_bits("gradient of the first call's bank", bank.grad, want1.gradients["memory"])
    for leaves, want in ((leaves1, want1), (leaves2, want2)):
        for name, leaf in leaves.items():
            assert_same_bits(f"gradient of {name}", leaf.grad, want.gradients[name])


def test_one_backward_through_both_stacked_calls() -> None:
    first, second = two_calls()
    bank = first.memory.clone()
    y1, _ = call(bank, first)
    y2, _ = call(bank, second)
    # autograd runs the node made last first, which is the reverse order.
    (y1.sum() + y2.sum()).backward()
    assert_same_bits("bank", bank, first.memory)


def test_wrong_order_is_refused_and_the_right_order_still_works() -> None:
    first, second = two_calls()
    bank = first.memory.clone()
    y1, leaves = call(bank, first)
    y2, _ = call(bank, second)
    after = bank.clone()
    with pytest.raises(RuntimeError, match=CHANGED):
        y1.sum().backward(retain_graph=True)
    assert_same_bits("bank", bank, after)
    assert all(leaf.grad is None for leaf in leaves.values())
    y2.sum().backward()
    y1.sum().backward()
    assert_same_bits("bank", bank, first.memory)


@pytest.mark.parametrize("change", ["in place", "through a view", "op without gradient"])
def test_a_bank_changed_in_between_is_refused(change: str) -> None:
    first, second = two_calls()
    bank = first.memory.clone()
    readings, leaves = call(bank, first)
    if change == "in place":
        bank.mul_(1.0)
    elif change == "through a view":
        bank[3].zero_()
    else:
        with torch.no_grad():
            call(bank, second)
    left = bank.clone()
    with pytest.raises(RuntimeError, match=CHANGED):
        readings.sum().backward()
    assert_same_bits("bank", bank, left)
    assert all(leaf.grad is None for leaf in leaves.values())


@pytest.mark.parametrize("retain_graph", [False, True])
def test_a_second_backward_is_refused_and_names_the_remedy(retain_graph: bool) -> None:
    problem, _ = two_calls()
    bank = problem.memory.clone()
    readings, _ = call(bank, problem)
    grad = problem.grad_readings.flatten(0, 1)
    readings.backward(grad, retain_graph=retain_graph)
    with pytest.raises(RuntimeError, match=SECOND):
        readings.backward(grad)
    assert_same_bits("bank", bank, problem.memory)


def test_the_remedy_works() -> None:
    problem, _ = two_calls()
    memory = problem.memory.clone().requires_grad_()
    readings, bank = sdm_write_read(memory, **problem.inputs(), **problem.options(), return_final_bank=True)
    loss = readings.square().sum() + bank.square().sum()
    (once,) = torch.autograd.grad(loss, memory, retain_graph=True)
    (twice,) = torch.autograd.grad(loss, memory)
    assert_same_bits("gradient", twice, once)


def test_a_forgotten_call_does_not_block_the_next() -> None:
    first, second = two_calls()
    bank = first.memory.clone()
    call(bank, first)
    between = bank.clone()
    readings, _ = call(bank, second)
    readings.sum().backward()
    assert_same_bits("bank", bank, between)


def test_three_calls_then_new_ones_after_their_backwards() -> None:
    whole = make_problem(1, 12, 2, 2, 3, 6)
    bank = whole.memory.clone()
    banks, readings = [], []
    for start in (0, 4, 8):
        banks.append(bank.clone())
        readings.append(call(bank, whole.tokens_of(start, start + 4))[0])
    readings[2].sum().backward()
    assert_same_bits("bank", bank, banks[2])
    readings[2] = call(bank, whole.tokens_of(0, 4))[0]
    for y, before in zip(reversed(readings), reversed(banks), strict=True):
        y.sum().backward()
        assert_same_bits("bank", bank, before)


def test_banks_are_independent_of_each_other() -> None:
    first, second = two_calls()
    one, other = first.memory.clone(), second.memory.clone()
    y1, _ = call(one, first)
    y2, _ = call(other, second)
    y1.sum().backward()
    y2.sum().backward()
    assert_same_bits("first bank", one, first.memory)
    assert_same_bits("second bank", other, second.memory)


def test_gradient_accumulation_repeats_its_bits() -> None:
    problem = make_problem(2, 7, 3, 3, 4, 6)
    bank = problem.memory.clone().requires_grad_()
    once = run_op(problem, return_final_bank=False)
    leaves = {name: getattr(problem, name).clone().requires_grad_() for name in GRADIENTS[1:]}
    for _ in range(2):
        arguments = {name: leaves.get(name, x) for name, x in problem.inputs().items()}
        readings = sdm_write_read(bank, **arguments, **problem.options())
        readings.backward(problem.grad_readings.flatten(0, 1))
    for name, leaf in (leaves | {"memory": bank}).items():
        assert_same_bits(f"gradient of {name}", leaf.grad, once.gradients[name] + once.gradients[name])


def test_a_learned_bank_copied_per_sequence_gets_the_summed_gradient() -> None:
    problem = make_problem(3, 7, 3, 3, 4, 6)
    learned = problem.memory[:6].clone().requires_grad_()
    bank = learned.repeat(3, 1)
    readings = sdm_write_read(bank, **problem.inputs(), **problem.options())
    readings.backward(problem.grad_readings.flatten(0, 1))
    same = replace(problem, memory=learned.detach().repeat(3, 1))
    want = run_op(same, return_final_bank=False).gradients["memory"]
    assert_close("gradient of the learned bank", learned.grad, want.view(3, 6, 4).sum(0), torch.float64)


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("return_final_bank", [False, True])
def test_each_input_alone_may_require_grad(name: str, return_final_bank: bool) -> None:
    problem = make_problem(2, 7, 3, 3, 4, 6, gate_per_write=True)
    want = run_op(problem, return_final_bank=return_final_bank).gradients[name]
    arguments = {"memory": problem.memory.clone(), **problem.inputs()}
    leaf = arguments[name].clone().requires_grad_()
    arguments[name] = leaf
    out = sdm_write_read(**arguments, **problem.options(), return_final_bank=return_final_bank)
    outputs = out if return_final_bank else (out,)
    grads = (problem.grad_readings.flatten(0, 1), problem.grad_bank)[: len(outputs)]
    torch.autograd.backward(outputs, grads)
    assert_same_bits(f"gradient of {name}", leaf.grad, want)


@pytest.mark.parametrize("used", ["readings", "bank"])
def test_a_gradient_into_one_result_alone(used: str) -> None:
    problem = make_problem(2, 7, 3, 3, 4, 6)
    memory = problem.memory.clone().requires_grad_()
    readings, bank = sdm_write_read(memory, **problem.inputs(), **problem.options(), return_final_bank=True)
    zeros = {"grad_readings": torch.zeros(2, 7, 4).double(), "grad_bank": torch.zeros(12, 4).double()}
    if used == "readings":
        readings.backward(problem.grad_readings.flatten(0, 1))
        del zeros["grad_readings"]
    else:
        bank.backward(problem.grad_bank)
        del zeros["grad_bank"]
    want = run_op(replace(problem, **zeros), return_final_bank=True)
    assert_close("gradient of memory", memory.grad, want.gradients["memory"], torch.float64)


def test_an_input_changed_in_place_before_the_backward_is_refused() -> None:
    problem, _ = two_calls()
    k_val = problem.k_val.clone()
    arguments = problem.inputs() | {"k_val": k_val, "v": problem.v.clone().requires_grad_()}
    readings = sdm_write_read(problem.memory.clone(), **arguments, **problem.options())
    k_val.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        readings.sum().backward()


def test_second_derivatives_are_refused() -> None:
    problem, _ = two_calls()
    memory = problem.memory.clone().requires_grad_()
    readings, _ = sdm_write_read(memory, **problem.inputs(), **problem.options(), return_final_bank=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(readings.sum(), memory, create_graph=True)
    v = problem.v.clone().requires_grad_()
    bank = problem.memory.clone()
    readings = sdm_write_read(bank, **problem.inputs() | {"v": v}, **problem.options())
    with pytest.raises(RuntimeError, match="first derivatives only"):
        hessian(lambda v: sdm_write_read(bank, **problem.inputs() | {"v": v}, **problem.options()).sum(), v)


def test_two_threads_on_banks_of_their_own() -> None:
    problems = [make_problem(2, 30, 3, 3, 4, 6, seed=seed) for seed in range(2)]
    want = [run_op(problem, return_final_bank=False) for problem in problems]
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for _ in range(5):
                got = run_op(problems[index], return_final_bank=False)
                for name in GRADIENTS:
                    assert_same_bits(name, got.gradients[name], want[index].gradients[name])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
