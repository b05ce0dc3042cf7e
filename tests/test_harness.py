"""The suite's own instruments: poisoned memory really is poisoned, and the comparisons really fail."""

from __future__ import annotations

import pytest
import torch

from tests.tolerances import TOLERANCES, assert_close, assert_same_bits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uninitialized_memory_is_nan(poisoned_memory: None, dtype: torch.dtype) -> None:
    base = torch.ones(3, dtype=dtype)
    allocations = {
        "empty": torch.empty(1000, dtype=dtype),
        "empty_like": torch.empty_like(base),
        "empty_strided": torch.empty_strided((3, 2), (1, 3), dtype=dtype),
        "new_empty": base.new_empty(7),
        "new_empty_strided": base.new_empty_strided((2, 2), (1, 2)),
        "resize_": torch.empty(0, dtype=dtype).resize_(5),
    }
    for name, x in allocations.items():
        assert bool(x.isnan().all()), name
    assert not bool(torch.zeros(9, dtype=dtype).isnan().any())


def test_uninitialized_integers_are_the_largest(poisoned_memory: None) -> None:
    assert bool((torch.empty(5, dtype=torch.int64) == torch.iinfo(torch.int64).max).all())


def test_memory_is_poisoned_in_the_backward_too(poisoned_memory: None) -> None:
    class LeavesItsGradientUnwritten(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return torch.empty_like(grad)

    x = torch.ones(3, requires_grad=True)
    LeavesItsGradientUnwritten.apply(x).sum().backward()
    assert bool(x.grad.isnan().all())


def test_poison_needs_both_switches() -> None:
    filled = (
        torch.utils.deterministic.fill_uninitialized_memory and torch.are_deterministic_algorithms_enabled()
    )
    assert filled == bool(torch.empty(1000).isnan().all())


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_assert_close_accepts_half_and_refuses_twice_the_tolerance(dtype: torch.dtype) -> None:
    want = torch.linspace(1, 2, 100, dtype=torch.float64)
    relative = TOLERANCES[dtype].relative
    assert_close("x", want * (1 + relative / 2), want, dtype)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close("x", want * (1 + relative * 2), want, dtype)


def test_assert_close_lets_no_nan_pass() -> None:
    clean, poisoned = torch.ones(3), torch.tensor([1.0, torch.nan, 1.0])
    for got, want in ((poisoned, clean), (clean, poisoned), (poisoned, poisoned)):
        with pytest.raises(AssertionError, match="NaN or inf"):
            assert_close("x", got, want, torch.float32)
    assert_close("x", poisoned, poisoned, torch.float32, nonfinite=True)
    with pytest.raises(AssertionError, match="other places"):
        assert_close("x", clean, poisoned, torch.float32, nonfinite=True)
    with pytest.raises(AssertionError):
        assert_close("x", torch.tensor([torch.inf]), torch.tensor([torch.nan]), torch.float32, nonfinite=True)


def test_assert_close_of_zeros() -> None:
    zero = torch.zeros(4, dtype=torch.float64)
    assert_close("x", zero, zero, torch.float64)
    assert_close("x", torch.empty(0), torch.empty(0), torch.float32)
    with pytest.raises(AssertionError, match="relative error inf"):
        assert_close("x", zero + 1e-30, zero, torch.float64)
    with pytest.raises(AssertionError, match="shape"):
        assert_close("x", zero[:3], zero, torch.float64)


def test_assert_same_bits_sees_the_sign_of_zero() -> None:
    nan = torch.tensor([torch.nan, 1.0])
    assert_same_bits("x", nan, nan.clone())
    with pytest.raises(AssertionError, match="first at index 0"):
        assert_same_bits("x", torch.tensor([0.0]), torch.tensor([-0.0]))
    with pytest.raises(AssertionError, match="dtype"):
        assert_same_bits("x", torch.tensor([0.0]), torch.tensor([0.0], dtype=torch.float64))
