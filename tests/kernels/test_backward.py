"""The backward's kernels against the chunked form in float64, on the emulator and on the GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.backends import BACKENDS, Backend, device_model, require
from tests.kernels.backward import Trained, backward, backward_definition, train_on_emulator
from tests.problems import GATES, GRADIENTS, WRITES, Problem, make_problem, run_oracle
from tests.tolerances import SNAPSHOT_GRADIENT, assert_same_bits, relative_error

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Against the definition that rounds bank rows and gradient rows where the product does.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}
APPROXIMATE = ("k_val", "g", "q_val")  # with a quantized snapshot

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def available(backend: Backend) -> None:
    require(backend)


def definition(problem: Problem, chunk: int, **options: bool) -> dict[str, torch.Tensor]:
    dtype = None if problem.memory.dtype == torch.float32 else problem.memory.dtype
    wide_gradient = options.pop("grad_bank_fp32", False)
    return backward_definition(
        problem, chunk, round_bank=dtype, round_gradient=None if wide_gradient else dtype, **options
    )


def compare(got: Trained, want: dict[str, torch.Tensor], bounds: dict[str, float]) -> None:
    for name in GRADIENTS:
        error = relative_error(got.gradients[name], want[name])
        assert error <= bounds[name], f"gradient of {name}: relative error {error:.2e}"


def check(
    backend: Backend,
    problem: Problem,
    chunk: int,
    *,
    bank_gradient: bool = True,
    grad_bank_fp32: bool = False,
    seed: int = 0,
) -> Trained:
    got = backward(
        backend,
        problem,
        chunk,
        bank_gradient=bank_gradient,
        grad_bank_fp32=grad_bank_fp32,
        seed=seed,
    )
    want = definition(problem, chunk, bank_gradient=bank_gradient, grad_bank_fp32=grad_bank_fp32)
    compare(got, want, dict.fromkeys(GRADIENTS, BOUNDS[problem.memory.dtype]))
    assert_same_bits("the restored bank", got.restored, problem.memory)
    padding = ~problem.real()
    for name in ("k_val", "v", "beta", "g", "q_val"):
        grad = got.gradients[name]
        assert not grad[padding].any(), f"gradient of {name} at padding"
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 32, 33])
def test_tokens_around_the_chunk(backend: Backend, dtype: torch.dtype, T: int) -> None:
    check(backend, make_problem(2, T, 4, 3, 16, 24, seed=T).cast(dtype), 16, bank_gradient=T % 2 == 0, seed=T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [1, 3, 30, 64, 72, 100])
def test_widths_of_a_row(backend: Backend, dtype: torch.dtype, D: int) -> None:
    check(backend, make_problem(2, 21, 5, 4, D, 40, seed=D).cast(dtype), 16, seed=D)


@pytest.mark.parametrize("D", [2080, 4100])
def test_rows_of_several_slices(backend: Backend, D: int) -> None:
    check(backend, make_problem(1, 5, 3, 2, D, 6, seed=D, writes="repeats").cast(torch.bfloat16), 4)


@pytest.mark.parametrize("chunk", [1, 2, 7, 33, 64, 65, 130])
def test_chunk_sizes(backend: Backend, chunk: int) -> None:
    problem = make_problem(1, min(2 * chunk + 1, 150), 3, 3, 8, 30, seed=chunk)
    check(backend, problem.cast(torch.float32), chunk)


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
    check(backend, problem, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradient_bank_in_float32(backend: Backend, dtype: torch.dtype) -> None:
    problem = make_problem(2, 40, 4, 5, 72, 30, writes="repeats", seed=6).cast(dtype)
    got = check(backend, problem, 16, grad_bank_fp32=True)
    rounded = backward(backend, problem, 16)
    assert not torch.equal(got.gradients["k_val"], rounded.gradients["k_val"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("snapshot", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("D", [64, 63])
def test_quantized_snapshots(backend: Backend, snapshot: str, dtype: torch.dtype, D: int) -> None:
    problem = make_problem(2, 40, 4, 5, D, 30, seed=7).cast(dtype)
    exact, got = backward(backend, problem, 16), backward(backend, problem, 16, snapshot=snapshot)
    for name in GRADIENTS:
        if name not in APPROXIMATE or (snapshot == "bf16" and dtype == torch.bfloat16):
            assert_same_bits(f"gradient of {name}", got.gradients[name], exact.gradients[name])
            continue
        error = relative_error(got.gradients[name], exact.gradients[name])
        assert 0 < error <= SNAPSHOT_GRADIENT[snapshot].relative, f"gradient of {name}: {error:.2e}"
    kept = SNAPSHOT_GRADIENT[snapshot].relative
    assert relative_error(got.restored, problem.memory) <= kept


def test_index_types_give_the_same_bits(backend: Backend) -> None:
    problem = make_problem(2, 20, 6, 5, 24, 30, writes="repeats").cast(torch.bfloat16)
    wide = check(backend, problem, 16)
    other = replace(problem, k_idx=problem.k_idx.int(), q_idx=problem.q_idx.int())
    got = check(backend, other, 16)
    for name in GRADIENTS:
        assert_same_bits(name, got.gradients[name], wide.gradients[name])


def test_an_index_outside_the_stream_has_no_gradient(backend: Backend) -> None:
    problem = make_problem(3, 20, 5, 6, 16, 9, seed=2, gates="zero").cast(torch.float32)
    outside = replace(problem, k_idx=problem.k_idx.clone(), q_idx=problem.q_idx.clone())
    inside = replace(problem, k_val=problem.k_val.clone(), q_val=problem.q_val.clone())
    places = ((3, 2, 8), (3, 4, 18), (11, 0, 2**40))
    for token, lane, row in places:
        outside.k_idx[1, token, lane] = row
        inside.k_val[1, token, lane] = 0.0
    outside.q_idx[1, 5, 1] = 20
    inside.q_val[1, 5, 1] = 0.0
    got, want = backward(backend, outside, 8), definition(inside, 8, bank_gradient=True)
    for token, lane, _ in places:
        assert got.gradients["k_val"][1, token, lane] == 0
        want["k_val"][1, token, lane] = 0
    assert got.gradients["q_val"][1, 5, 1] == 0
    want["q_val"][1, 5, 1] = 0
    for name in ("memory", "k_val", "v", "beta", "q_val"):
        assert relative_error(got.gradients[name], want[name]) <= 1e-6, name


def test_streams_beside_change_no_bit(backend: Backend) -> None:
    problem = make_problem(3, 40, 4, 4, 24, 30, writes="hot", gates="all kinds", seed=9).cast(torch.bfloat16)
    whole, one = backward(backend, problem, 16), backward(backend, problem.streams_of(1, 2), 16)
    for name in GRADIENTS:
        part = whole.gradients[name]
        part = part[30:60] if name == "memory" else part[1:2]
        assert_same_bits(name, one.gradients[name], part)


@pytest.mark.parametrize("bank_gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streams_of_one_bank_may_read_the_same_rows(
    backend: Backend, dtype: torch.dtype, bank_gradient: bool
) -> None:
    """Rows 7, 15 and 23 are written by nobody and read by all; the others by the stream that owns them."""
    problem = make_problem(3, 37, 3, 4, 24, 8, seed=4, writes="repeats", lengths=(37, 16, 30))
    drawn = torch.Generator().manual_seed(1)
    common = torch.randint(3, problem.q_idx.shape, generator=drawn) * 8 + 7
    real = problem.real()[:, :, None]
    k_idx = torch.where(real & (problem.k_idx % 8 == 7), problem.k_idx - 1, problem.k_idx)
    q_idx = torch.where(real & (torch.arange(4) < 3), common, problem.q_idx)
    problem = replace(problem, k_idx=k_idx, q_idx=q_idx, slots=0).cast(dtype)
    got = backward(backend, problem, 16, bank_gradient=bank_gradient)
    rounded = None if dtype == torch.float32 else dtype
    want = run_oracle(problem, bank_gradient=bank_gradient, round_rows=rounded, round_every=16)
    assert want.gradients["memory"][[7, 15, 23]].abs().min() > 0
    compare(got, want.gradients, dict.fromkeys(GRADIENTS, 2 * BOUNDS[dtype]))
    assert_same_bits("the restored bank", got.restored, problem.memory)
    again = backward(backend, problem, 16, bank_gradient=bank_gradient, seed=1)
    for name in GRADIENTS:
        assert_same_bits(name, again.gradients[name], got.gradients[name])


def test_nan_reaches_no_other_stream_and_no_other_column(backend: Backend) -> None:
    problem = make_problem(2, 40, 4, 4, 20, 30, seed=4).cast(torch.float32)
    clean = backward(backend, problem, 16)
    problem.grad_readings[0, 10, 3] = torch.nan
    got = backward(backend, problem, 16)
    other = [c for c in range(20) if c != 3]
    for name in ("memory", "v"):
        left, right = got.gradients[name], clean.gradients[name]
        assert_same_bits(f"other columns of {name}", left[..., other], right[..., other])
    for name in ("k_val", "v", "beta", "g", "q_val"):
        assert_same_bits(f"other stream: {name}", got.gradients[name][1], clean.gradients[name][1])
        # Later tokens owe nothing to an earlier reading.
        assert_same_bits(f"later tokens: {name}", got.gradients[name][0, 11:], clean.gradients[name][0, 11:])
    assert got.gradients["v"][0, :11, 3].isnan().any()


class TestPlans:
    """What only the emulator is asked: plan branches, with the real planner's launches."""

    @pytest.fixture(autouse=True)
    def emulator_alone(self, backend: Backend) -> None:
        if backend == "gpu":
            pytest.skip("the plan's branches are run on the emulator")

    @pytest.mark.parametrize("vector", [1, 2, 4])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_alignment_changes_no_bit(self, backend: Backend, dtype: torch.dtype, vector: int) -> None:
        problem = make_problem(2, 20, 4, 4, 64, 30, seed=1).cast(dtype)
        whole = backward(backend, problem, 16)
        room = torch.zeros(60 * 64 + 8, dtype=dtype)
        bank = room[vector : vector + 60 * 64].view(60, 64)
        bank.copy_(problem.memory)
        got, _ = train_on_emulator(problem, 16, device_model(backend), bank=bank)
        for name in GRADIENTS:
            assert_same_bits(name, got.gradients[name], whole.gradients[name])
        assert_same_bits("the restored bank", bank, problem.memory)

    def test_the_width_of_the_products_blocks_changes_no_bit(self, backend: Backend) -> None:
        problem = make_problem(2, 40, 4, 3, 72, 24, seed=2).cast(torch.bfloat16)
        runs = []
        for sm_count in (1, 6, 1000):
            model = replace(device_model(backend), sm_count=sm_count)
            runs.append(train_on_emulator(problem, 16, model))
        columns = [
            dict(next(one for one in plan.kernels() if one.name == "du_update").kernel.defines)["COLUMNS"]
            for _, plan in runs
        ]
        assert columns == ["64", "32", "16"]
        for other, _ in runs[1:]:
            for name in GRADIENTS:
                assert_same_bits(name, other.gradients[name], runs[0][0].gradients[name])

    @pytest.mark.parametrize(
        ("D", "snapshot"),
        [(24, "none"), (24, "int4"), (136, "none"), (264, "fp8"), (520, "none"), (1032, "none")],
    )
    def test_the_slots_of_a_team_change_no_bit(self, backend: Backend, D: int, snapshot: str) -> None:
        """On one SM a team of Phase A and of GDS takes more slots than it has lanes, on many SMs one."""
        problem = make_problem(3, 33, 24, 20, D, 400, seed=D).cast(torch.bfloat16)
        runs, grids = [], []
        for sm_count in (1, 1000):
            model = replace(device_model(backend), sm_count=sm_count)
            trained, plan = train_on_emulator(problem, 32, model, snapshot=snapshot, builds=("access",))
            runs.append(trained)
            grids.append([one.grid[0] for one in plan.kernels() if one.name in ("phase_a", "gds")])
        assert all(few < many for few, many in zip(*grids, strict=True))
        for name in GRADIENTS:
            assert_same_bits(name, runs[0].gradients[name], runs[1].gradients[name])
        assert_same_bits("the restored bank", runs[0].restored, runs[1].restored)
