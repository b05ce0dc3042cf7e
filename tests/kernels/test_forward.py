"""The forward's kernels against the oracle, on the emulator and on the GPU: Phase 1, solve and step loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.emulator import build
from tests.kernels.backends import BACKENDS, Backend, device_model, require
from tests.kernels.forward import Written, forward, forward_on_emulator, forward_oracle
from tests.problems import GATES, WRITES, Problem, make_problem
from tests.tolerances import assert_same_bits, relative_error

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Against the oracle that rounds bank rows at the same chunk ends.
BOUNDS = {torch.float32: 5e-7, torch.bfloat16: 3e-3, torch.float16: 1e-3}

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def available(backend: Backend) -> None:
    require(backend)


def check(backend: Backend, problem: Problem, chunk: int, *, seed: int = 0) -> Written:
    """Hold a call to the oracle; on a GPU beside a C++ compiler, to the emulator too."""
    got, want = forward(backend, problem, chunk, seed=seed), forward_oracle(problem, chunk)
    dtype = problem.memory.dtype
    assert got.readings.dtype == got.bank.dtype == dtype
    compare(got, want, dtype)
    assert got.repeats == want.repeats
    padding = ~problem.real()
    assert_same_bits("padding", got.readings[padding], torch.zeros_like(got.readings[padding]))
    if backend == "gpu" and build.unavailable_reason() is None:
        emulated = forward("emulator", problem, chunk)
        compare(got, emulated, dtype)
        assert got.repeats == emulated.repeats
    return got


def compare(got: Written, want: Written, dtype: torch.dtype) -> None:
    for name in ("readings", "bank"):
        error = relative_error(getattr(got, name), getattr(want, name))
        assert error <= BOUNDS[dtype], f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 32, 33])
def test_tokens_around_the_chunk(backend: Backend, dtype: torch.dtype, T: int) -> None:
    check(backend, make_problem(2, T, 4, 3, 16, 24, seed=T).cast(dtype), 16, seed=T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [1, 3, 30, 64, 72, 100])
def test_widths_of_a_row(backend: Backend, dtype: torch.dtype, D: int) -> None:
    check(backend, make_problem(2, 21, 5, 4, D, 40, seed=D).cast(dtype), 16, seed=D)


@pytest.mark.parametrize("chunk", [1, 2, 7, 33, 64, 65, 130])
def test_chunk_sizes(backend: Backend, chunk: int) -> None:
    check(
        backend, make_problem(1, min(2 * chunk + 1, 150), 3, 3, 8, 30, seed=chunk).cast(torch.float32), chunk
    )


@pytest.mark.parametrize(("W", "R"), [(1, 1), (1, 9), (9, 1), (16, 16), (40, 33)])
def test_slots_of_a_token(backend: Backend, W: int, R: int) -> None:
    check(backend, make_problem(1, 40, W, R, 8, 60, seed=W).cast(torch.bfloat16), 32)


@pytest.mark.parametrize("gate_per_write", [False, True])
@pytest.mark.parametrize("gates", GATES)
def test_gates(backend: Backend, gates: str, gate_per_write: bool) -> None:
    problem = make_problem(2, 37, 4, 4, 8, 10, gates=gates, gate_per_write=gate_per_write, writes="repeats")
    check(backend, problem.cast(torch.float32), 16)


@pytest.mark.parametrize("writes", WRITES)
@pytest.mark.parametrize("beta", ["zero", "one"])
def test_collisions(backend: Backend, writes: str, beta: str) -> None:
    problem = make_problem(2, 40, 4, 5, 16, 12, writes=writes, beta=beta, seed=3)
    check(backend, problem.cast(torch.float32), 32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_streams_of_different_lengths(backend: Backend, dtype: torch.dtype) -> None:
    problem = make_problem(5, 37, 3, 4, 16, 20, lengths=[37, 0, 16, 17, 5]).cast(dtype)
    got = check(backend, problem, 16)
    assert_same_bits("bank of the empty stream", got.bank[20:40], problem.memory[20:40])


def test_index_types_give_the_same_bits(backend: Backend) -> None:
    problem = make_problem(2, 20, 6, 5, 24, 30, writes="repeats").cast(torch.bfloat16)
    wide = check(backend, problem, 16)
    for narrow in (("k_idx", "q_idx"), ("k_idx",)):
        other = replace(problem, **{name: getattr(problem, name).int() for name in narrow})
        got = check(backend, other, 16)
        assert_same_bits("readings", got.readings, wide.readings)
        assert_same_bits("bank", got.bank, wide.bank)


def test_an_index_outside_the_stream_is_absent(backend: Backend) -> None:
    problem = make_problem(3, 20, 5, 6, 16, 9, seed=2).cast(torch.float32)
    inside = replace(problem, k_val=problem.k_val.clone(), q_val=problem.q_val.clone())
    outside = replace(problem, k_idx=problem.k_idx.clone(), q_idx=problem.q_idx.clone())
    # The middle stream owns rows 9..17. A write of weight 0 still decays its row, so gates are 0 here.
    for row, lane, place in ((3, 2, 8), (3, 4, 18), (11, 0, 2**40)):
        outside.k_idx[1, row, lane] = place
        inside.k_val[1, row, lane] = 0.0
    outside.q_idx[1, 5, 1] = 20
    inside.q_val[1, 5, 1] = 0.0
    zero = torch.zeros_like(problem.g)
    want = forward_oracle(replace(inside, g=zero), 8)
    compare(forward(backend, replace(outside, g=zero), 8), want, torch.float32)


def test_more_tokens_and_streams_change_no_bit(backend: Backend) -> None:
    problem = make_problem(3, 40, 4, 4, 24, 30, writes="hot", gates="all kinds", seed=9).cast(torch.bfloat16)
    whole = forward(backend, problem, 16)
    for tokens in (1, 20, 33):
        part = forward(backend, problem.tokens_of(0, tokens), 16)
        assert_same_bits("readings", part.readings, whole.readings[:, :tokens])
    one = forward(backend, problem.streams_of(1, 2), 16)
    assert_same_bits("readings", one.readings[0], whole.readings[1])
    assert_same_bits("bank", one.bank, whole.bank[30:60])


def test_nan_reaches_no_other_column_stream_or_earlier_token(backend: Backend) -> None:
    problem = make_problem(2, 40, 4, 4, 20, 30, seed=4).cast(torch.float32)
    clean = forward(backend, problem, 16)
    problem.v[0, 10, 3] = torch.nan
    got = forward(backend, problem, 16)
    other = [c for c in range(20) if c != 3]
    assert_same_bits("other columns", got.readings[..., other], clean.readings[..., other])
    assert_same_bits("other stream", got.readings[1], clean.readings[1])
    assert_same_bits("earlier tokens", got.readings[0, :10], clean.readings[0, :10])
    assert got.readings[0, :, 3].isnan().any()


class TestPlans:
    """What only the emulator is asked: every plan branch, with the real planner's launches."""

    @pytest.fixture(autouse=True)
    def emulator_alone(self, backend: Backend) -> None:
        if backend == "gpu":
            pytest.skip("the plan's branches are run on the emulator")

    @pytest.mark.parametrize("slab_steps", [1, 2, 3])
    def test_slabs_change_no_bit(
        self, backend: Backend, slab_steps: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        problem = make_problem(2, 70, 4, 4, 16, 30, seed=1).cast(torch.bfloat16)
        whole = forward(backend, problem, 16)
        monkeypatch.setattr("sdm_rt.plan.forward.slab_steps", lambda shape, device: slab_steps)
        got, _, _ = forward_on_emulator(problem, 16, device_model(backend))
        assert_same_bits("readings", got.readings, whole.readings)
        assert_same_bits("bank", got.bank, whole.bank)

    @pytest.mark.parametrize("vector", [1, 2, 4])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_alignment_changes_no_bit(self, backend: Backend, dtype: torch.dtype, vector: int) -> None:
        problem = make_problem(2, 20, 4, 4, 64, 30, seed=1).cast(dtype)
        whole = forward(backend, problem, 16)
        room = torch.zeros(60 * 64 + 8, dtype=dtype)
        bank = room[vector : vector + 60 * 64].view(60, 64)
        bank.copy_(problem.memory)
        got, _, _ = forward_on_emulator(problem, 16, device_model(backend), bank=bank)
        assert_same_bits("readings", got.readings, whole.readings)
        assert_same_bits("bank", got.bank, whole.bank)
