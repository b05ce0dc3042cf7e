"""What the op promises beside its numbers: padding, NaN isolation, empty calls, memory, quantization."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sdm_rt import last_dispatch, repeated_write_slots, reset_dispatch, sdm_write_read
from sdm_rt.cpu import recurrence
from tests.problems import GRADIENTS, Problem, make_problem, run_op, run_oracle
from tests.tolerances import SNAPSHOT_GRADIENT, assert_close, assert_same_bits, relative_error

pytestmark = pytest.mark.usefixtures("poisoned_memory")

NONFINITE = [torch.nan, torch.inf, -torch.inf]


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """In place, without gradients: (readings [P, T, D], bank)."""
    bank = problem.memory.clone()
    with torch.no_grad():
        readings = sdm_write_read(bank, **problem.inputs(), **problem.options())
    return readings.view(problem.streams, problem.tokens, -1), bank


# Padding. The problems hold NaN and indices far outside every bank there.
@pytest.mark.parametrize("return_final_bank", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_padding_touches_nothing(return_final_bank: bool, dtype: torch.dtype) -> None:
    problem = make_problem(4, 9, 3, 4, 5, 8, lengths=[9, 4, 0, 1], gate_per_write=True).cast(dtype)
    got = run_op(problem, return_final_bank=return_final_bank)
    padding = ~problem.real()
    assert bool((got.readings[padding] == 0).all())
    for name in GRADIENTS[1:]:
        assert bool((got.gradients[name][padding] == 0).all()), name
    for p, length in enumerate(problem.lengths):
        rows = slice(8 * p, 8 * p + 8)
        alone = replace(problem.streams_of(p, p + 1), lengths=None).tokens_of(0, length)
        want = run_op(alone, return_final_bank=return_final_bank)
        assert_same_bits("readings", got.readings[p : p + 1, :length], want.readings)
        assert_same_bits("bank", got.bank[rows], want.bank)
        assert_same_bits("gradient of memory", got.gradients["memory"][rows], want.gradients["memory"])
        for name in GRADIENTS[1:]:
            assert_same_bits(
                f"gradient of {name}", got.gradients[name][p : p + 1, :length], want.gradients[name]
            )


def test_a_stream_of_length_zero_keeps_its_bank() -> None:
    problem = make_problem(2, 5, 3, 4, 5, 8, lengths=[5, 0])
    _, bank = forward(problem)
    assert_same_bits("rows of the empty stream", bank[8:], problem.memory[8:])
    assert not torch.equal(bank[:8], problem.memory[:8])


# NaN and inf.
@pytest.mark.parametrize("bad", NONFINITE)
@pytest.mark.parametrize("source", ["v", "memory"])
def test_a_bad_value_or_row_reaches_its_own_column_alone(bad: float, source: str) -> None:
    problem = make_problem(3, 10, 3, 6, 5, 8, writes="hot")
    clean_readings, clean_bank = forward(problem)
    tainted = replace(problem, v=problem.v.clone(), memory=problem.memory.clone())
    first = 0
    if source == "v":
        first = 4
        tainted.v[1, first, 2] = bad
    else:
        tainted.memory[problem.k_idx[1, 0, 0], 2] = bad
    readings, bank = forward(tainted)
    assert not bool(readings[1, first:, 2].isfinite().all()), "the bad value must show where it belongs"
    reachable = torch.zeros_like(readings, dtype=torch.bool)
    reachable[1, first:, 2] = True
    assert_same_bits("readings elsewhere", readings[~reachable], clean_readings[~reachable])
    rows = torch.zeros_like(bank, dtype=torch.bool)
    rows[8:16, 2] = True
    assert_same_bits("bank elsewhere", bank[~rows], clean_bank[~rows])


@pytest.mark.parametrize("bad", NONFINITE)
@pytest.mark.parametrize("source", ["k_val", "beta", "g", "q_val"])
def test_a_bad_weight_reaches_no_other_stream_and_no_earlier_token(bad: float, source: str) -> None:
    problem = make_problem(3, 10, 3, 4, 5, 8, gate_per_write=True)
    clean_readings, clean_bank = forward(problem)
    tainted = replace(problem, **{source: getattr(problem, source).clone()})
    getattr(tainted, source)[1, 4, 0] = bad
    readings, bank = forward(tainted)
    assert_same_bits("earlier tokens", readings[1, :4], clean_readings[1, :4])
    for p in (0, 2):
        assert_same_bits("other streams", readings[p], clean_readings[p])
        rows = slice(8 * p, 8 * p + 8)
        assert_same_bits("banks of other streams", bank[rows], clean_bank[rows])
    if source == "q_val":
        assert_same_bits("later tokens", readings[1, 5:], clean_readings[1, 5:])
        assert_same_bits("bank", bank, clean_bank)


@pytest.mark.parametrize("source", ["memory", *GRADIENTS[1:], "grad_readings", "grad_bank"])
def test_nan_reaches_no_gradient_of_another_stream(source: str) -> None:
    problem = make_problem(3, 10, 3, 4, 5, 8, gate_per_write=True)
    clean = run_op(problem, return_final_bank=True)
    tainted = replace(problem, **{source: getattr(problem, source).clone()})
    if source in ("memory", "grad_bank"):
        getattr(tainted, source)[8:16] = torch.nan
    else:
        getattr(tainted, source)[1] = torch.nan
    got = run_op(tainted, return_final_bank=True)
    for p in (0, 2):
        for name in GRADIENTS:
            part = slice(8 * p, 8 * p + 8) if name == "memory" else p
            assert_same_bits(f"gradient of {name}", got.gradients[name][part], clean.gradients[name][part])
    assert any(bool(got.gradients[name].isnan().any()) for name in GRADIENTS)


def test_a_bad_gradient_reaches_no_later_token() -> None:
    problem = make_problem(1, 10, 3, 4, 5, 8, gate_per_write=True)
    clean = run_op(problem, return_final_bank=True)
    tainted = replace(problem, grad_readings=problem.grad_readings.clone())
    tainted.grad_readings[0, 4] = torch.nan
    got = run_op(tainted, return_final_bank=True)
    for name in GRADIENTS[1:]:
        assert_same_bits(f"gradient of {name}", got.gradients[name][:, 5:], clean.gradients[name][:, 5:])


@pytest.mark.parametrize("bad", NONFINITE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_an_erased_row_that_held_nan_stays_nan(bad: float, dtype: torch.dtype) -> None:
    problem = make_problem(1, 1, 2, 2, 3, 4, gates="-inf").cast(dtype)
    memory = problem.memory.clone()
    row = int(problem.k_idx[0, 0, 0])
    memory[row, 1] = bad
    tainted = replace(problem, memory=memory)
    _, bank = forward(tainted)
    assert bool(bank[row, 1].isnan())
    assert bool(bank[row, [0, 2]].isfinite().all())
    got = run_op(tainted, return_final_bank=True)
    want = run_oracle(tainted, bank_gradient=True, round_rows=dtype)
    assert bool((got.gradients["g"] == 0).all()), "the gradient of a gate of -inf is 0, whatever its row held"
    assert_close("bank", got.bank, want.bank, dtype, nonfinite=True)
    assert_close("gradient of memory", got.gradients["memory"], want.gradients["memory"], dtype)


# Empty calls.
@pytest.mark.parametrize(("P", "T"), [(0, 0), (0, 5), (3, 0)])
@pytest.mark.parametrize("return_final_bank", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_empty_calls(P: int, T: int, return_final_bank: bool, dtype: torch.dtype) -> None:
    problem = make_problem(P, T, 3, 4, 5, 8, gate_per_write=True).cast(dtype)
    got = run_op(problem, return_final_bank=return_final_bank)
    assert got.readings.shape == (P, T, 5)
    assert got.readings.dtype == dtype
    assert_same_bits("bank", got.bank, problem.memory)
    want = problem.grad_bank if return_final_bank else torch.zeros_like(problem.memory)
    assert_same_bits("gradient of memory", got.gradients["memory"], want)
    for name in GRADIENTS[1:]:
        assert got.gradients[name].shape == getattr(problem, name).shape


def test_no_stream_has_a_token() -> None:
    problem = make_problem(3, 4, 3, 4, 5, 8, lengths=[0, 0, 0])
    for packed in (False, True):
        got = run_op(problem, return_final_bank=True, packed=packed)
        assert_same_bits("bank", got.bank, problem.memory)
        assert_same_bits("gradient of memory", got.gradients["memory"], problem.grad_bank)
        assert bool((got.readings == 0).all())


# Repeated slots.
def test_repeated_write_slots_counts_real_entries_once() -> None:
    repeated_write_slots()
    problem = make_problem(2, 4, 3, 2, 4, 6, lengths=[4, 2])
    run_op(problem, return_final_bank=False)
    assert repeated_write_slots() == 0
    k_idx = problem.k_idx.clone()
    k_idx[0, 0] = k_idx[0, 0, 0]  # two repeats
    k_idx[1, 1, 2] = k_idx[1, 1, 1]  # one
    k_idx[1, 3] = 0  # padding
    repeating = replace(problem, k_idx=k_idx)
    run_op(repeating, return_final_bank=False)
    assert repeated_write_slots(reset=False) == 3
    forward(repeating)
    run_op(repeating, return_final_bank=True, packed=True)
    assert repeated_write_slots() == 9
    assert repeated_write_slots() == 0


def test_last_dispatch_tells_the_latest_call_and_hands_out_copies() -> None:
    problem = make_problem(2, 4, 3, 2, 5, 6, lengths=[4, 1]).cast(torch.bfloat16)
    run_op(problem, return_final_bank=False)
    told = last_dispatch()
    expected = {"path": "recurrence", "device": "cpu", "streams": 2, "tokens": 5, "writes": 3, "reads": 2}
    expected |= {"head_dim": 5, "slots": 6, "bank_dtype": "bfloat16", "snapshot_quant": "none"}
    assert told.items() >= expected.items()
    told["path"] = "changed"
    assert last_dispatch()["path"] == "recurrence"
    reset_dispatch()
    assert last_dispatch() == {}


# What a call keeps.
@pytest.mark.parametrize("reason", ["no_grad", "inference_mode", "no input requires grad"])
@pytest.mark.parametrize("return_final_bank", [False, True])
def test_a_call_without_a_backward_saves_nothing(reason: str, return_final_bank: bool) -> None:
    problem = make_problem(2, 5, 3, 4, 5, 8)
    memory = problem.memory.clone()
    if reason != "no input requires grad":
        memory.requires_grad_()
    grad_mode = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(
        reason, torch.enable_grad
    )
    packed: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x

    with grad_mode(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = sdm_write_read(
            memory, **problem.inputs(), **problem.options(), return_final_bank=return_final_bank
        )
    assert packed == []
    for x in out if return_final_bank else (out,):
        assert not x.requires_grad


class PeakBytes(TorchDispatchMode):
    """The most bytes alive at once of storages that are not those of ``inputs``."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = {x.untyped_storage()._cdata for x in inputs}

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if not isinstance(x, Tensor):
                continue
            storage = x.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                weakref.finalize(storage, self._forget, key, size)
                self.live += size
                self.peak = max(self.peak, self.live)
        return out


def test_peak_bytes_counts_what_is_alive() -> None:
    given = torch.zeros(100)
    with PeakBytes([given]) as peak:
        view = torch.zeros(1000)[:10]
        assert peak.live == 4000, "a view keeps its storage alive"
        given.view(10, 10)
        del view
        assert peak.live == 0
        torch.zeros(500)
    assert peak.peak == 4000


def test_working_memory_of_inference_does_not_grow_with_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence, "SLAB_ELEMENTS", 1 << 14)
    # Under a dispatch mode the call is one operator; here the mode looks inside.
    monkeypatch.setattr("sdm_rt.ops.write_read.is_traced", lambda tensor: False)
    working = {}
    for tokens in (100, 400):
        problem = make_problem(2, tokens, 8, 8, 32, 64).cast(torch.float32)
        bank, inputs, options = problem.memory.clone(), problem.inputs(), problem.options()
        with torch.no_grad(), PeakBytes([bank, *inputs.values()]) as peak:
            readings = sdm_write_read(bank, **inputs, **options)
        working[tokens] = peak.peak - readings.nbytes
    assert working[100] > 0
    assert working[400] == working[100]


# Assertions of the caller.
def test_key_weighted_decay_asserts_the_gate_width() -> None:
    per_token = make_problem(2, 4, 3, 2, 4, 6)
    per_write = make_problem(2, 4, 3, 2, 4, 6, gate_per_write=True)
    for problem, value in ((per_token, False), (per_write, True)):
        asserted = run_op(problem, return_final_bank=False, key_weighted_decay=value)
        plain = run_op(problem, return_final_bank=False)
        assert_same_bits("readings", asserted.readings, plain.readings)
    for problem, value, came in ((per_token, True, 1), (per_write, False, 3)):
        with pytest.raises(ValueError, match=rf"^g: expected .*key_weighted_decay={value}.*, got .*{came}$"):
            run_op(problem, return_final_bank=False, key_weighted_decay=value)


def test_grad_bank_fp32_changes_no_bit_on_the_cpu() -> None:
    problem = make_problem(2, 9, 3, 4, 5, 8).cast(torch.bfloat16)
    want = run_op(problem, return_final_bank=True)
    got = run_op(problem, return_final_bank=True, grad_bank_fp32=True)
    for name in GRADIENTS:
        assert_same_bits(f"gradient of {name}", got.gradients[name], want.gradients[name])


# Quantized snapshots.
def quantized(
    problem: Problem, mode: str, return_final_bank: bool
) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor]:
    """(readings, final bank, gradients, the caller's bank after the backward)."""
    leaves = {name: getattr(problem, name).clone().requires_grad_() for name in GRADIENTS}
    arguments = {name: leaves.get(name, x) for name, x in problem.inputs().items()}
    out = sdm_write_read(
        leaves["memory"],
        **arguments,
        **problem.options(),
        snapshot_quant=mode,
        return_final_bank=return_final_bank,
    )
    readings, bank = out if return_final_bank else (out, leaves["memory"].detach().clone())
    outputs = (readings, bank) if return_final_bank else (readings,)
    grads = (problem.grad_readings.flatten(0, 1), problem.grad_bank)[: len(outputs)]
    torch.autograd.backward(outputs, grads)
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    return readings.detach(), bank.detach(), gradients, leaves["memory"].detach()


@pytest.mark.parametrize("mode", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("return_final_bank", [False, True])
def test_quantized_snapshots(mode: str, dtype: torch.dtype, return_final_bank: bool) -> None:
    problem = make_problem(2, 64, 16, 16, 64, 256, gate_per_write=True).cast(dtype)
    want = quantized(problem, "none", return_final_bank)
    got = quantized(problem, mode, return_final_bank)
    assert_same_bits("readings", got[0], want[0])
    assert_same_bits("final bank", got[1], want[1])
    for name in ("memory", "v", "beta"):
        assert_same_bits(f"gradient of {name}", got[2][name], want[2][name])
    tolerance = SNAPSHOT_GRADIENT[mode]
    exact = mode == "bf16" and dtype == torch.bfloat16
    for name in ("k_val", "g", "q_val"):
        if exact:
            assert_same_bits(f"gradient of {name}", got[2][name], want[2][name])
        else:
            assert_close(f"gradient of {name}", got[2][name], want[2][name], dtype, tolerance=tolerance)
            assert not torch.equal(got[2][name], want[2][name]), f"{mode} kept the gradient of {name} exact"
    if return_final_bank or exact:
        assert_same_bits("the caller's bank", got[3], problem.memory)
    else:
        written = torch.zeros(len(got[3]), dtype=torch.bool)
        written[problem.k_idx.flatten()] = True
        assert 0 < int(written.sum()) < len(written)
        assert_same_bits("rows never written", got[3][~written], problem.memory[~written])
        assert_close("restored rows", got[3][written], problem.memory[written], dtype, tolerance=tolerance)


@pytest.mark.parametrize("mode", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("D", [1, 3, 7])
def test_quantized_snapshots_of_odd_widths_and_extreme_rows(mode: str, D: int) -> None:
    problem = make_problem(1, 3, 2, 2, D, 4, writes="hot").cast(torch.float32)
    memory = problem.memory.clone()
    memory[0], memory[1] = 0.0, 1e30
    problem = replace(problem, memory=memory)
    want, got = quantized(problem, "none", True), quantized(problem, mode, True)
    for name in ("k_val", "g", "q_val"):
        error = relative_error(got[2][name], want[2][name])
        assert error < 4 * SNAPSHOT_GRADIENT[mode].relative, f"gradient of {name}: relative error {error}"


@pytest.mark.parametrize("mode", ["bf16", "fp8", "int4"])
def test_a_quantized_snapshot_keeps_bad_rows_in_their_stream(mode: str) -> None:
    problem = make_problem(2, 6, 3, 4, 5, 8).cast(torch.float32)
    memory = problem.memory.clone()
    memory[8:, 0] = torch.nan
    clean, got = quantized(problem, mode, True), quantized(replace(problem, memory=memory), mode, True)
    for name in ("k_val", "g", "q_val"):
        assert_same_bits(f"gradient of {name}", got[2][name][0], clean[2][name][0])
        assert bool(got[2][name][1].isnan().any())
