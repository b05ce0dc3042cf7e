"""The top-k kernels against the CPU's rule, bit for bit, on the emulator and on the GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sdm_rt.cpu.topk import product_key_topk
from sdm_rt.plan.device import preset
from sdm_rt.plan.topk import TopkShape, plan_topk
from tests.emulator.build import CompileError
from tests.emulator.harness import Replacement
from tests.kernels.backends import BACKENDS, Backend, require
from tests.kernels.topk import SCORE_KINDS, gradient, score_rows, select
from tests.tolerances import assert_same_bits

# Factors, k, dtype, rows of each kind: one variant of the kernel each.
VARIANTS = [
    ((7,), 3, torch.bfloat16, 60),
    ((300,), 256, torch.float32, 4),
    ((5000,), 16, torch.float16, 3),  # columns of more than 8 bits
    ((66000,), 40, torch.bfloat16, 1),  # of more than 16
    ((10, 12), 16, torch.bfloat16, 80),
    ((6, 50), 33, torch.float32, 20),  # k larger than a factor
    ((40, 9), 1, torch.float16, 40),
    ((16, 16), 256, torch.bfloat16, 4),  # k = S
    ((1, 5, 1, 4), 30, torch.bfloat16, 12),  # k > S
    ((3, 4, 5), 8, torch.bfloat16, 60),
    ((2, 3, 2, 2, 3), 10, torch.float16, 30),
    ((4, 3, 2, 3, 4), 256, torch.bfloat16, 3),
    ((300, 300, 300), 40, torch.float32, 3),  # slots of more than 24 bits
    ((60, 70), 256, torch.bfloat16, 1),  # more pairs than the lanes hold
    ((256, 256), 64, torch.bfloat16, 1),
]

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def available(backend: Backend) -> None:
    require(backend)


def all_kinds(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.cat([score_rows(kind, rows, width, dtype, seed) for seed, kind in enumerate(SCORE_KINDS)])


def assert_same_selection(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    """The same slots, and the same bits of their scores but for what a NaN carries."""
    assert_same_bits("slots", got[1], want[1])
    assert_same_bits("NaN scores", got[0].isnan(), want[0].isnan())
    assert_same_bits("scores", *(val.masked_fill(val.isnan(), 0.0) for val in (got[0], want[0])))


@pytest.mark.parametrize(("factors", "k", "dtype", "rows"), VARIANTS, ids=str)
def test_selects_by_the_rule(
    backend: Backend, factors: tuple[int, ...], k: int, dtype: torch.dtype, rows: int
) -> None:
    raw = all_kinds(rows, sum(factors), dtype)
    assert_same_selection(select(backend, raw, factors, k, seed=k), product_key_topk(raw, factors, k))


@pytest.mark.parametrize(("factors", "k", "dtype", "rows"), VARIANTS, ids=str)
def test_gradient_has_the_bits_of_the_rules(
    backend: Backend, factors: tuple[int, ...], k: int, dtype: torch.dtype, rows: int
) -> None:
    raw = all_kinds(rows, sum(factors), dtype).requires_grad_()
    val, idx = product_key_topk(raw, factors, k)
    grad_val = score_rows("normal", len(raw), val.shape[1], dtype, seed=1)
    (want,) = torch.autograd.grad(val, raw, grad_val)
    assert_same_bits("gradient", gradient(backend, raw.detach(), factors, k, grad_val, idx, seed=k), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_summed_in_float32(backend: Backend, dtype: torch.dtype) -> None:
    raw = torch.zeros(1, 17, dtype=dtype)
    _, idx = product_key_topk(raw, (1, 16), 16)
    grad_val = torch.ones(1, 16, dtype=dtype)
    grad_val[0, 0] = 4096.0  # where the format's spacing is more than 1
    grad = gradient(backend, raw, (1, 16), 16, grad_val, idx)
    assert_same_bits("sum", grad[0, 0], torch.tensor(4096.0 + 15).to(dtype))
    assert_same_bits("single scores", grad[0, 1:], grad_val[0])


@pytest.mark.parametrize("rows", [1, 2, 4, 5])
def test_a_row_selects_the_same_alone(backend: Backend, rows: int) -> None:
    raw = all_kinds(2, 22, torch.bfloat16)
    whole = select(backend, raw, (10, 12), 16)
    part = select(backend, raw[:rows].clone(), (10, 12), 16)
    assert_same_selection(part, (whole[0][:rows], whole[1][:rows]))


def test_nan_and_inf_rows_give_distinct_slots_in_range(backend: Backend) -> None:
    raw = torch.tensor([torch.nan, torch.inf, -torch.inf, -torch.nan]).repeat_interleave(22).view(4, 22)
    _, idx = select(backend, raw.bfloat16(), (10, 12), 16)
    assert idx.min() >= 0
    assert idx.max() < 120
    assert (idx.diff() > 0).all()


class TestLaunches:
    """What only the emulator is asked."""

    @pytest.fixture(autouse=True)
    def emulator_alone(self, backend: Backend) -> None:
        if backend == "gpu":
            pytest.skip("launches for other GPUs and seeded faults are run on the emulator")

    def test_warps_that_take_several_rows(self, backend: Backend) -> None:
        model = replace(preset("a100"), sm_count=1)
        raw = all_kinds(30, 7, torch.bfloat16)
        shape = TopkShape(len(raw), (7,), 3)
        (launch,) = plan_topk(shape, model).kernels()
        assert launch.blocks * launch.threads // 32 < len(raw)
        want = product_key_topk(raw, (7,), 3)
        assert_same_selection(select(backend, raw, (7,), 3, model=model), want)
        grad_val = score_rows("normal", len(raw), 3, torch.bfloat16)
        few = gradient(backend, raw, (7,), 3, grad_val, want[1], model=model)
        assert_same_bits("gradient", few, gradient(backend, raw, (7,), 3, grad_val, want[1]))

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("<< column_bits | column;", "<< column_bits | (255 - column);"),
            ("for (int i = 0; i <= sum; ++i)", "for (int i = sum; i >= 0; --i)"),
            ("(bits & ~sign) > infinity", "(bits & ~sign) > all"),
            ("rounds_partial_sums = IsBf16<SCORE>::value &&", "rounds_partial_sums = false &&"),
            ("(i + 1) * (j + 1) <= c", "(i + 1) * (j + 1) < c"),
            ("make_int4(0, 0, 0, 0);\n            __syncwarp();", "make_int4(0, 0, 0, 0);"),
            ("(value & known) == least) atomicAdd", "(value & known) >= least) atomicAdd"),
            ("tied & ~1u << lane", "tied & (1u << lane) - 1"),
            ("ties += __popc(tied);", ""),
            ("differing & ~known) != 0", "differing & ~known) > 255"),
        ],
    )
    def test_seeded_faults_show(self, backend: Backend, old: str, new: str) -> None:
        factors, k = (3, 40, 5), 8
        raw = all_kinds(20, sum(factors), torch.bfloat16)
        want = product_key_topk(raw, factors, k)

        def check() -> None:
            got = select(backend, raw, factors, k, replacements=[Replacement("topk.cu", old, new)])
            assert_same_selection(got, want)

        with pytest.raises(AssertionError) as caught:  # an EmulatorError is one
            check()
        assert not isinstance(caught.value, CompileError)
