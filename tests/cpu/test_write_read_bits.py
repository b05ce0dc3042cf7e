"""Promises about bits: repetition, grad mode, streams beside, tokens after, slabs, processes, layouts."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sdm_rt import sdm_decode_step, sdm_write_read
from sdm_rt.cpu import recurrence
from tests.problems import GRADIENTS, Problem, Result, make_problem, run_op
from tests.tolerances import assert_same_bits

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# (W, R, D): around the widths at which vectorised sums change their order.
SHAPES = [(1, 1, 1), (3, 5, 7), (16, 16, 64), (33, 9, 1), (64, 64, 20)]


def assert_same_result(got: Result, want: Result) -> None:
    assert_same_bits("readings", got.readings, want.readings)
    assert_same_bits("bank", got.bank, want.bank)
    for name in GRADIENTS:
        assert_same_bits(f"gradient of {name}", got.gradients[name], want.gradients[name])


def forward(problem: Problem, **options: object) -> tuple[Tensor, Tensor]:
    """In place, without gradients: (readings [P, T, D], bank)."""
    bank = problem.memory.clone()
    with torch.no_grad():
        readings = sdm_write_read(bank, **problem.inputs(), **(problem.options() | options))
    return readings.view(problem.streams, problem.tokens, -1), bank


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("return_final_bank", [False, True])
def test_repeated_calls(dtype: torch.dtype, return_final_bank: bool) -> None:
    problem = make_problem(3, 20, 16, 16, 33, 40, lengths=[20, 7, 0], writes="repeats").cast(dtype)
    want = run_op(problem, return_final_bank=return_final_bank)
    for _ in range(3):
        assert_same_result(run_op(problem, return_final_bank=return_final_bank), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("snapshot_quant", ["none", "int4"])
def test_forward_is_the_same_with_and_without_gradients(dtype: torch.dtype, snapshot_quant: str) -> None:
    problem = make_problem(2, 15, 8, 8, 17, 24, writes="repeats", gate_per_write=True).cast(dtype)
    readings, bank = forward(problem)
    for return_final_bank in (False, True):
        trained = run_op_forward_only(problem, return_final_bank, snapshot_quant)
        assert_same_bits("readings", trained[0].view_as(readings), readings)
        assert_same_bits("bank", trained[1], bank)


def run_op_forward_only(
    problem: Problem, return_final_bank: bool, snapshot_quant: str
) -> tuple[Tensor, Tensor]:
    memory = problem.memory.clone().requires_grad_()
    out = sdm_write_read(
        memory,
        **problem.inputs(),
        **problem.options(),
        return_final_bank=return_final_bank,
        snapshot_quant=snapshot_quant,
    )
    return out if return_final_bank else (out, memory)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("W", "R", "D"), SHAPES)
def test_streams_beside_change_no_bit(dtype: torch.dtype, W: int, R: int, D: int) -> None:
    problem = make_problem(5, 9, W, R, D, W + 8, gate_per_write=True).cast(dtype)
    together = run_op(problem, return_final_bank=True)
    for first, last in ((0, 1), (2, 4), (4, 5)):
        alone = run_op(problem.streams_of(first, last), return_final_bank=True)
        rows = slice(first * problem.slots, last * problem.slots)
        assert_same_bits("readings", alone.readings, together.readings[first:last])
        assert_same_bits("bank", alone.bank, together.bank[rows])
        for name in GRADIENTS:
            part = rows if name == "memory" else slice(first, last)
            assert_same_bits(f"gradient of {name}", alone.gradients[name], together.gradients[name][part])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("W", "R", "D"), SHAPES)
def test_tokens_after_change_no_bit(dtype: torch.dtype, W: int, R: int, D: int) -> None:
    problem = make_problem(2, 13, W, R, D, W + 8).cast(dtype)
    readings, _ = forward(problem)
    for stop in (1, 5, 12):
        shorter, _ = forward(problem.tokens_of(0, stop))
        assert_same_bits("readings", shorter, readings[:, :stop])


# Case 17.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate_per_write", [False, True])
def test_one_call_two_calls_and_token_by_token_are_the_same(dtype: torch.dtype, gate_per_write: bool) -> None:
    problem = make_problem(
        3, 12, 8, 6, 10, 20, gates="all kinds", gate_per_write=gate_per_write, writes="repeats"
    )
    problem = problem.cast(dtype)
    readings, bank = forward(problem)
    for cut in (1, 5, 11):
        head, tail = problem.tokens_of(0, cut), problem.tokens_of(cut, 12)
        first, middle = forward(head)
        second, last = forward(replace(tail, memory=middle))
        assert_same_bits("readings in two calls", torch.cat([first, second], 1), readings)
        assert_same_bits("bank in two calls", last, bank)
    decoded, steps = problem.memory.clone(), []
    for t in range(12):
        steps.append(sdm_decode_step(decoded, **{name: x[:, t] for name, x in problem.inputs().items()}))
    assert_same_bits("decoded readings", torch.stack(steps, 1), readings)
    assert_same_bits("decoded bank", decoded, bank)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("budget", [1, 2000])
def test_slabs_change_no_bit(dtype: torch.dtype, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(3, 20, 4, 4, 8, 16, lengths=[20, 13, 2], writes="repeats").cast(dtype)
    want = [run_op(problem, return_final_bank=form) for form in (False, True)]
    monkeypatch.setattr(recurrence, "SLAB_ELEMENTS", budget)
    for form in (False, True):
        assert_same_result(run_op(problem, return_final_bank=form), want[form])


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def test_threads_change_no_bit(two_threads: None) -> None:
    # Large enough for PyTorch to split an operation between threads (from 32768 elements on).
    problem = make_problem(8, 3, 64, 64, 128, 80).cast(torch.float32)
    want = run_op(problem, return_final_bank=True)
    torch.set_num_threads(1)
    assert_same_result(run_op(problem, return_final_bank=True), want)


def digest() -> str:
    problem = make_problem(2, 20, 8, 8, 16, 24, writes="repeats").cast(torch.float32)
    result = run_op(problem, return_final_bank=True)
    together = hashlib.sha256()
    for x in (result.readings, result.bank, *result.gradients.values()):
        together.update(x.numpy().tobytes())
    return together.hexdigest()


def test_processes_agree(request: pytest.FixtureRequest) -> None:
    run = subprocess.run(
        [sys.executable, "-c", "from tests.cpu.test_write_read_bits import digest; print(digest())"],
        cwd=request.config.rootpath,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == digest()


# Case 10: every layout equals the contiguous call.
def _strided(x: Tensor) -> Tensor:
    """Every second element of a wider tensor."""
    base = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 7, dtype=x.dtype)
    base[..., 1::2] = x
    return base[..., 1::2]


def _offset(x: Tensor) -> Tensor:
    """One element into its storage: 2 bytes for the half-precision dtypes."""
    base = torch.full((x.numel() + 1,), 7, dtype=x.dtype)
    base[1:] = x.reshape(-1)
    return base[1:].view(x.shape)


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def _time_major(x: Tensor) -> Tensor:
    """The first two dimensions swapped in memory, as [T, P, *] stores [P, T, *]."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _odd_strides_of_single_elements(x: Tensor) -> Tensor:
    """Dimensions of size 1 with strides that no contiguous tensor has."""
    strides = [12345 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    return torch.as_strided(x.clone(), x.shape, strides)


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    _strided,
    _offset,
    _transposed,
    _time_major,
    _odd_strides_of_single_elements,
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["bank", "tokens", "gradients"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("P", [1, 2])
def test_layouts(layout: Callable[[Tensor], Tensor], which: str, dtype: torch.dtype, P: int) -> None:
    problem = make_problem(P, 6, 3, 4, 5, 8).cast(dtype)
    memory = layout(problem.memory) if which == "bank" else problem.memory.clone()
    for return_final_bank in (False, True):
        want = run_op(problem, return_final_bank=return_final_bank)
        leaves = {name: getattr(problem, name).clone().requires_grad_() for name in GRADIENTS[1:]}
        arguments = {name: leaves.get(name, x) for name, x in problem.inputs().items()}
        grads = [problem.grad_readings.flatten(0, 1), problem.grad_bank]
        if which == "tokens":
            leaves = {name: layout(x.detach()).requires_grad_() for name, x in leaves.items()}
            arguments = {name: leaves.get(name, layout(x)) for name, x in arguments.items()}
        elif which == "gradients":
            grads = [layout(grad) for grad in grads]
        leaf = memory.requires_grad_()
        leaf.grad = None
        out = sdm_write_read(leaf, **arguments, **problem.options(), return_final_bank=return_final_bank)
        outputs = list(out) if return_final_bank else [out]
        bank = outputs[1] if return_final_bank else leaf.detach().clone()
        readings = outputs[0].detach().clone().view_as(want.readings)
        torch.autograd.backward(outputs, grads[: len(outputs)])
        gradients = {name: leaf.grad for name, leaf in (leaves | {"memory": leaf}).items()}
        assert_same_result(Result(readings, bank.detach(), gradients), want)
        assert_same_bits("the bank after the backward", leaf.detach(), problem.memory)


def test_a_strided_bank_writes_between_nothing_else() -> None:
    problem = make_problem(2, 6, 3, 4, 5, 8)
    base = torch.full((16, 10), 7.0, dtype=torch.float64)
    base[:, 1::2] = problem.memory
    forward_bank = base[:, 1::2]
    with torch.no_grad():
        sdm_write_read(forward_bank, **problem.inputs(), **problem.options())
    assert_same_bits("columns of the bank", base[:, 1::2], forward(problem)[1])
    assert bool((base[:, 0::2] == 7).all())


def test_expanded_gradient() -> None:
    problem = make_problem(2, 6, 3, 4, 5, 8)
    ones = replace(problem, grad_readings=torch.ones_like(problem.grad_readings))
    want = run_op(ones, return_final_bank=False)
    v = problem.v.clone().requires_grad_()
    arguments = problem.inputs() | {"v": v}
    sdm_write_read(problem.memory.clone(), **arguments, **problem.options()).sum().backward()
    assert_same_bits("gradient of v", v.grad, want.gradients["v"])


def test_expanded_inputs() -> None:
    problem = make_problem(2, 6, 3, 4, 5, 8)
    one_token = {name: x[:1, :1] for name, x in problem.inputs().items()}
    own_rows = {name: torch.tensor([0, 8])[:, None, None] + one_token[name] for name in ("k_idx", "q_idx")}
    expanded = {name: own_rows.get(name, x).expand(2, 6, -1) for name, x in one_token.items()}
    got = sdm_write_read(problem.memory.clone(), **expanded, **problem.options())
    copied = {name: x.contiguous() for name, x in expanded.items()}
    want = sdm_write_read(problem.memory.clone(), **copied, **problem.options())
    assert_same_bits("readings", got, want)


def test_parameters() -> None:
    problem = make_problem(2, 6, 3, 4, 5, 8)
    want = run_op(problem, return_final_bank=False)
    parameters = {name: torch.nn.Parameter(getattr(problem, name).clone()) for name in GRADIENTS}
    arguments = {"memory": parameters["memory"]} | {
        name: parameters.get(name, x) for name, x in problem.inputs().items()
    }
    readings = sdm_write_read(**arguments, **problem.options())
    assert type(readings) is Tensor
    readings.backward(problem.grad_readings.flatten(0, 1))
    for name, parameter in parameters.items():
        assert_same_bits(f"gradient of {name}", parameter.grad, want.gradients[name])


@pytest.mark.parametrize("return_final_bank", [False, True])
def test_int32_indices(return_final_bank: bool) -> None:
    problem = make_problem(2, 6, 3, 4, 5, 8, writes="repeats")
    small = replace(problem, k_idx=problem.k_idx.int(), q_idx=problem.q_idx.int())
    got = run_op(small, return_final_bank=return_final_bank)
    assert_same_result(got, run_op(problem, return_final_bank=return_final_bank))


@pytest.mark.parametrize("return_final_bank", [False, True])
def test_flat_inputs(return_final_bank: bool) -> None:
    problem = make_problem(3, 6, 3, 4, 5, 8)
    want = run_op(problem, return_final_bank=return_final_bank)
    leaves = {name: getattr(problem, name).clone().requires_grad_() for name in GRADIENTS}
    flat = {name: leaves.get(name, x).flatten(0, 1) for name, x in problem.inputs().items()}
    out = sdm_write_read(leaves["memory"], **flat, **problem.options(), return_final_bank=return_final_bank)
    outputs = out if return_final_bank else (out,)
    assert outputs[0].shape == (18, 5)
    grads = (problem.grad_readings.flatten(0, 1), problem.grad_bank)[: len(outputs)]
    torch.autograd.backward(outputs, grads)
    assert_same_bits("readings", outputs[0].view_as(want.readings), want.readings)
    for name, leaf in leaves.items():
        assert_same_bits(f"gradient of {name}", leaf.grad, want.gradients[name])


def test_a_gate_per_token_is_the_same_gate_for_every_write() -> None:
    problem = make_problem(2, 6, 3, 4, 5, 8, writes="repeats")
    each = replace(problem, g=problem.g.expand(2, 6, 3).contiguous())
    got, want = run_op(each, return_final_bank=True), run_op(problem, return_final_bank=True)
    assert_same_bits("readings", got.readings, want.readings)
    assert_same_bits("bank", got.bank, want.bank)
    got.gradients["g"] = got.gradients["g"].sum(dim=2, keepdim=True)
    assert_same_result(got, want)


def test_packed_is_the_same_as_padded() -> None:
    problem = make_problem(4, 9, 3, 4, 5, 8, lengths=[4, 0, 9, 1], gate_per_write=True)
    for form in (False, True):
        want = run_op(problem, return_final_bank=form)
        assert_same_result(run_op(problem, return_final_bank=form, packed=True), want)
        assert_same_result(run_op(problem, return_final_bank=form, packed=True, max_seqlen=9), want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_and_offsets_in_both_index_dtypes(dtype: torch.dtype) -> None:
    problem = make_problem(2, 5, 3, 4, 5, 8, lengths=[5, 2])
    want = run_op(problem, return_final_bank=True)
    lengths = torch.tensor(problem.lengths, dtype=dtype)
    assert_same_result(run_op(problem, return_final_bank=True, lengths=lengths), want)
    packed = {name: problem.pack(x) for name, x in problem.inputs().items()}
    readings = sdm_write_read(
        problem.memory.clone(),
        **packed,
        num_memory_slots=8,
        num_parallel=2,
        cu_seqlens=problem.cu_seqlens().to(dtype),
    )
    assert_same_bits("packed readings", readings, problem.pack(want.readings))
