"""Operands in the memory of the bank that a call overwrites: it means their values at its start."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sdm_rt import sdm_decode_step, sdm_write_read
from sdm_rt.ops.inplace_call import any_meets, apart
from tests.problems import Problem, make_problem
from tests.tolerances import assert_same_bits

NAMES = ("k_val", "v", "beta", "g", "q_val")


def problem_of(tokens: int) -> Problem:
    return make_problem(2, tokens, 3, 4, 6, 96, writes="repeats", gate_per_write=True).cast(torch.float32)


def inside(bank: Tensor, like: Tensor) -> Tensor:
    """Return a view of the bank behind its first row, in the shape of ``like``."""
    return bank.flatten()[bank.shape[1] : bank.shape[1] + like.numel()].view(like.shape)


def calls(problem: Problem, name: str, device: str = "cpu") -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return a bank and operands of which ``name`` lies in it, and the same with a copy of that operand.

    The first token of the first stream writes the first rows in which it lies.
    """
    bank = problem.memory.to(device, copy=True)
    operands = {one: x.to(device, copy=True) for one, x in problem.inputs().items()}
    operands["k_idx"][0, 0] = torch.arange(1, 4)
    view = inside(bank, operands[name])
    if name == "g":
        view.abs_().neg_()
    return [(bank, operands | {name: view}), (bank.clone(), operands | {name: view.clone()})]


def assert_equal_steps(problem: Problem, name: str, device: str = "cpu", **options: Any) -> None:
    """Readings, gradients and the restored bank do not depend on where the operand lies."""
    found = []
    for bank, operands in calls(problem, name, device):
        before = bank.clone()
        leaves = {one: operands[one].clone().requires_grad_() for one in NAMES if one != name}
        readings = sdm_write_read(bank, **operands | leaves, **problem.options(), **options)
        advanced = bank.clone()
        readings.backward(problem.grad_readings.flatten(0, 1).to(device))
        assert_same_bits("the restored bank", bank, before)
        gradients = {one: leaf.grad for one, leaf in leaves.items()}
        found.append(gradients | {"readings": readings.detach(), "bank": advanced})
    for one, want in found[1].items():
        assert_same_bits(one, found[0][one], want)


def assert_equal_calls(problem: Problem, name: str, device: str = "cpu", **options: Any) -> None:
    """Readings and the bank of a call without a backward do not depend on where the operand lies."""
    (bank, operands), (other, copies) = calls(problem, name, device)
    got = sdm_write_read(bank, **operands, **problem.options(), **options)
    assert_same_bits("readings", got, sdm_write_read(other, **copies, **problem.options(), **options))
    assert_same_bits("bank", bank, other)


def assert_equal_decode_steps(name: str, device: str = "cpu") -> None:
    """The same of a decode step."""
    (bank, operands), (other, copies) = calls(problem_of(1), name, device)
    assert_same_bits("readings", sdm_decode_step(bank, **operands), sdm_decode_step(other, **copies))
    assert_same_bits("bank", bank, other)


@pytest.mark.parametrize("name", NAMES)
def test_calls_and_steps(name: str) -> None:
    assert_equal_calls(problem_of(40), name)
    assert_equal_steps(problem_of(40), name)
    assert_equal_decode_steps(name)


@pytest.mark.parametrize("name", NAMES)
def test_calls_as_operators(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of dispatch modes and of the compiler, which run the implementations of the operators."""
    monkeypatch.setattr("sdm_rt.cpu.recurrence.SLAB_ELEMENTS", 8)
    problem = problem_of(40)
    (_, _), (other, copies) = calls(problem, name)
    want = sdm_write_read(other, **copies, **problem.options())
    compiled = torch.compile(sdm_write_read, backend="eager", fullgraph=True)
    for call, mode in ((sdm_write_read, FlopCounterMode(display=False)), (compiled, nullcontext())):
        bank, operands = calls(problem, name)[0]
        with mode:
            got = call(bank, **operands, **problem.options())
        assert_same_bits("readings", got, want)
        assert_same_bits("bank", bank, other)


def test_an_array_that_begins_before_the_bank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views of one NumPy array come as tensors of storages of their own."""
    monkeypatch.setattr("sdm_rt.cpu.recurrence.SLAB_ELEMENTS", 8)
    problem = problem_of(40)
    base = torch.cat([problem.memory[:1], problem.memory]).numpy()
    bank, v = base[1:], base[:80].reshape(2, 40, -1)
    other, copy = bank.copy(), v.copy()
    got = sdm_write_read(bank, **problem.inputs() | {"v": v}, **problem.options())
    want = sdm_write_read(other, **problem.inputs() | {"v": copy}, **problem.options())
    assert_same_bits("readings", got, want)
    assert_same_bits("bank", torch.from_numpy(bank), torch.from_numpy(other))


def test_what_does_not_meet_the_bank_is_not_copied() -> None:
    buffer = torch.randn(100)
    bank, before, behind = buffer[20:80].view(10, 6), buffer[8:20], buffer[80:92]
    elsewhere = torch.randn(12)
    assert not any_meets(bank.clone(), [x.data_ptr() for x in (before, behind, elsewhere)])
    for x in (before, behind, elsewhere):
        assert apart(bank, x) is x
    for x in (buffer[8:21], buffer[79:92], buffer[8:30:12]):  # one element of each is the bank's
        assert any_meets(bank, [elsewhere.data_ptr(), x.data_ptr()])
        copy = apart(bank, x)
        assert copy is not x
        assert_same_bits("copy", copy, x)
