"""Product-key top-k against a brute-force reading of the rule, stage by stage in Python."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.functional import hessian

from sdm_rt.ops.topk import product_key_topk
from tests.tolerances import assert_same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FACTORS = [(7,), (1,), (4, 5), (1, 6), (3, 3, 3), (2, 5, 1, 3), (2, 3, 2, 2, 3), (16, 16), (40, 9)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def comparable(score):
    """A score as the rule compares it: NaN as -inf, -0 below +0."""
    if math.isnan(score):
        return (-math.inf, 1)
    return (float(score), 0 if score == 0 and math.copysign(1.0, score) < 0 else 1)


def rank(scores, k):
    columns = sorted(range(len(scores)), key=lambda c: (comparable(scores[c]), c), reverse=True)
    return [(scores[c], c) for c in columns[:k]]


def reference_row(row, factors, k, rounds):
    """Return [(slot, float32 score)] ascending by slot for one row of float32 scores."""
    parts = np.split(row, np.cumsum(factors)[:-1])
    kept = rank(parts[0], k)
    for f in range(1, len(factors)):
        if f > 1 and rounds:
            kept = [(np.float32(torch.tensor(s).bfloat16().float().item()), slot) for s, slot in kept]
        ranked = rank(parts[f], k)
        c = min(k, len(kept) * len(ranked))
        pairs = []
        for (i, (total, slot)), (j, (score, column)) in itertools.product(enumerate(kept), enumerate(ranked)):
            if (i + 1) * (j + 1) <= c:
                pairs.append((comparable(total + score), i + j, i, total + score, slot * factors[f] + column))
        pairs.sort(key=lambda pair: pair[:3], reverse=True)
        kept = [(total, slot) for *_, total, slot in pairs[:c]]
    return sorted((int(slot), score) for score, slot in kept)


@np.errstate(invalid="ignore", over="ignore")
def reference(raw, factors, k):
    rounds = raw.dtype == torch.bfloat16 and len(factors) > 2
    rows = raw.float().reshape(-1, raw.shape[-1]).numpy()
    found = [reference_row(row, factors, k, rounds) for row in rows]
    idx = torch.tensor([[slot for slot, _ in row] for row in found])
    val = torch.tensor(np.array([[score for _, score in row] for row in found]))
    return val, idx


def scores(kind, rows, width, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if kind == "normal":
        raw = torch.randn(rows, width, generator=generator)
    elif kind == "ties":
        raw = torch.randint(-2, 3, (rows, width), generator=generator) * 0.5
    elif kind == "zeros":
        raw = torch.where(torch.rand(rows, width, generator=generator) < 0.5, -0.0, 0.0)
    else:
        choices = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0, -0.0, 0.0, 2.0, -torch.nan])
        raw = choices[torch.randint(0, 8, (rows, width), generator=generator)]
    return raw.to(dtype)


def assert_same_scores(val, expected, dtype):
    torch.testing.assert_close(val, expected.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(val.signbit() & ~val.isnan(), expected.to(dtype).signbit() & ~expected.isnan())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factors", FACTORS, ids=str)
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "special"])
def test_equals_the_rule(kind, factors, dtype):
    raw = scores(kind, 12, sum(factors), dtype)
    slots = math.prod(factors)
    for k in sorted({1, 2, 3, 5, 8, 16, min(slots, 256), min(slots + 3, 256)}):
        val, idx = product_key_topk(raw, factors, k)
        expected_val, expected_idx = reference(raw, factors, k)
        assert idx.dtype == torch.int64
        assert val.dtype == dtype
        assert torch.equal(idx, expected_idx), k
        if dtype == torch.float64:
            torch.testing.assert_close(val, expected_val.double(), rtol=1e-6, atol=1e-6, equal_nan=True)
        else:
            assert_same_scores(val, expected_val, dtype)


@settings(max_examples=60, deadline=None)
@given(
    factors=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    k=st.integers(1, 40),
    bf16=st.booleans(),
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(["normal", "ties", "zeros", "special"]),
)
def test_equals_the_rule_anywhere(factors, k, bf16, seed, kind):
    dtype = torch.bfloat16 if bf16 else torch.float32
    raw = scores(kind, 3, sum(factors), dtype, seed)
    val, idx = product_key_topk(raw, factors, k)
    expected_val, expected_idx = reference(raw, factors, k)
    assert torch.equal(idx, expected_idx)
    assert_same_scores(val, expected_val, dtype)


@pytest.mark.parametrize("factors", [(9, 8), (3, 4, 5)], ids=str)
def test_distinct_scores_select_the_largest_sums(factors):
    raw = scores("normal", 20, sum(factors), torch.float32)
    parts = raw.split(list(factors), -1)
    total = parts[0]
    for part in parts[1:]:
        total = (total[..., None] + part[:, None]).flatten(1)
    val, idx = product_key_topk(raw, factors, 10)
    expected = total.topk(10).indices.sort().values
    assert torch.equal(idx, expected)
    assert torch.equal(val, total.gather(-1, expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 33, 128])
def test_a_row_selects_the_same_alone_and_in_a_batch(tokens, dtype):
    raw = scores("ties", tokens, 64, dtype)
    val, idx = product_key_topk(raw.view(1, tokens, 64), (32, 32), 32)
    assert idx.shape == (1, tokens, 32)
    for t in range(tokens):
        alone_val, alone_idx = product_key_topk(raw[t], (32, 32), 32)
        assert torch.equal(idx[0, t], alone_idx)
        assert torch.equal(val[0, t], alone_val)


@pytest.mark.parametrize("k", [1, 7, 64])
def test_nan_and_inf_rows_give_distinct_slots_in_range(k):
    raw = scores("special", 64, 16, torch.bfloat16)
    raw[0], raw[1], raw[2] = torch.nan, torch.inf, -torch.inf
    val, idx = product_key_topk(raw, (8, 8), k)
    assert idx.min() >= 0
    assert idx.max() < 64
    assert (idx.diff() > 0).all()
    assert val[0].isnan().all()
    assert (val[1] == torch.inf).all()


def test_pairs_outside_the_hyperbola_are_left_out_on_ties():
    # All sums tie, and rank i is column 3 - i. (3, 3) would win by i + j, but (3+1)(3+1) > 4; of the
    # candidates, those with i + j = 3 come first, then (2, 0) and (1, 1) before (0, 2).
    _, idx = product_key_topk(torch.zeros(8), (4, 4), 4)
    ranks = {(3, 0), (0, 3), (2, 0), (1, 1)}
    assert set(idx.tolist()) == {(3 - i) * 4 + (3 - j) for i, j in ranks}


def test_partial_sums_are_rounded_only_in_bfloat16_with_more_than_two_factors():
    # 256 + 1 rounds to 256 in bfloat16, so a third factor's 1 is lost there and kept in float32.
    row = [256.0, 1.0, 1.0]
    assert product_key_topk(torch.tensor(row).bfloat16(), (1, 1, 1), 1)[0].item() == 256
    assert product_key_topk(torch.tensor(row).half(), (1, 1, 1), 1)[0].item() == 258
    assert product_key_topk(torch.tensor(row), (1, 1, 1), 1)[0].item() == 258
    # With two factors the choice is between float32 sums, 257 over 256, although both return 256.
    val, idx = product_key_topk(torch.tensor([256.0, 1.0, 0.0]).bfloat16(), (1, 2), 1)
    assert (val.item(), idx.item()) == (256, 0)


def test_float64_selects_by_float32_sums_and_returns_float64_sums():
    tiny = 1e-12
    val, idx = product_key_topk(torch.tensor([1 + tiny, 1.0], dtype=torch.float64), (2,), 1)
    assert (val.item(), idx.item()) == (1.0, 1)  # equal in float32: the larger column
    val, _ = product_key_topk(torch.tensor([1.0, tiny], dtype=torch.float64), (1, 1), 1)
    assert val.item() == 1.0 + tiny


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3), (2, 3), ()], ids=str)
def test_any_leading_shape(shape):
    raw = torch.randn(*shape, 9, requires_grad=True)
    val, idx = product_key_topk(raw, (4, 5), 6)
    assert val.shape == idx.shape == (*shape, 6)
    val.sum().backward()
    assert raw.grad.shape == raw.shape


def test_strided_input_equals_contiguous():
    raw = scores("ties", 10, 24, torch.bfloat16)
    for view in (raw.repeat_interleave(2, 1)[:, ::2], raw.t().contiguous().t(), raw[:1].expand(10, 24)):
        val, idx = product_key_topk(view, (12, 12), 9)
        expected_val, expected_idx = product_key_topk(
            view.clone(memory_format=torch.contiguous_format), (12, 12), 9
        )
        assert torch.equal(val, expected_val)
        assert torch.equal(idx, expected_idx)


def gathered_sums(raw, idx, factors):
    total, stride = 0, math.prod(factors)
    for part, width in zip(raw.split(list(factors), -1), factors, strict=True):
        stride //= width
        total = total + part.gather(-1, idx // stride % width)
    return total


@pytest.mark.parametrize("factors", FACTORS, ids=str)
def test_gradient_is_that_of_the_gathered_sums(factors):
    raw = scores("normal", 6, sum(factors), torch.float64).requires_grad_()
    val, idx = product_key_topk(raw, factors, 11)
    upstream = torch.randn_like(val)
    (grad,) = torch.autograd.grad(val, raw, upstream)
    expected_val = gathered_sums(raw, idx, factors)
    (expected,) = torch.autograd.grad(expected_val, raw, upstream)
    torch.testing.assert_close(val, expected_val, rtol=0, atol=0)
    torch.testing.assert_close(grad, expected, rtol=1e-14, atol=1e-14)


def test_gradcheck():
    # Scores a float32 ulp and more apart, so that no finite difference changes the selection.
    raw = (torch.randperm(24).view(2, 12).double() * 0.37).requires_grad_()
    assert torch.autograd.gradcheck(lambda raw: product_key_topk(raw, (3, 4, 5), 7)[0], raw)


def test_gradient_accumulates_in_float32_and_repeats_bitwise():
    raw = torch.zeros(5, 17, dtype=torch.bfloat16, requires_grad=True)
    val, _ = product_key_topk(raw, (1, 16), 16)
    upstream = torch.full_like(val, 1.0)
    upstream[:, 0] = 256.0  # 256 + 15 ones stays 256 where bfloat16 accumulates
    grads = [torch.autograd.grad(val, raw, upstream, retain_graph=True)[0] for _ in range(3)]
    assert grads[0].dtype == torch.bfloat16
    assert grads[0][0, 0].item() == torch.tensor(271.0).bfloat16().item()
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


@pytest.mark.parametrize(
    ("shape", "factors", "k", "error", "message"),
    [
        ((2, 8), (4, 4), 0, ValueError, "k: expected a value in 1..256, got 0"),
        ((2, 8), (4, 4), 257, ValueError, "k: expected a value in 1..256, got 257"),
        ((2, 8), (4, 4), 2.0, TypeError, "k: expected an int, got float"),
        ((2, 8), (), 2, ValueError, "factors: expected at least one factor width, got none"),
        ((2, 8), 8, 2, TypeError, "factors: expected a sequence, got int"),
        ((2, 8), (8, 0), 2, ValueError, "factors[1]: expected a value at least 1, got 0"),
        ((2, 8), (4.0, 4), 2, TypeError, "factors[0]: expected an int, got float"),
        (
            (2, 8),
            (4, 5),
            2,
            ValueError,
            "raw: expected shape [..., 9], the sum of factors (4, 5), got [2, 8]",
        ),
        ((), (1,), 1, ValueError, "raw: expected shape [..., 1], the sum of factors (1,), got []"),
        (
            (4, 1),
            (2**32, 2**31),
            1,
            ValueError,
            "factors: expected a product below 2**63, got (4294967296, 2147483648)",
        ),
    ],
)
def test_bad_values(shape, factors, k, error, message):
    with pytest.raises(error) as caught:
        product_key_topk(torch.zeros(shape), factors, k)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            torch.zeros(2, 8).long(),
            "raw: expected dtype float64, float32, bfloat16 or float16, got torch.int64",
        ),
        (
            [0.0] * 8,
            "raw: expected a torch.Tensor, a CuPy array or another object with __dlpack__, got list",
        ),
    ],
    ids=["int64", "list"],
)
def test_bad_types(raw, message):
    with pytest.raises(TypeError) as caught:
        product_key_topk(raw, (4, 4), 2)
    assert str(caught.value) == message


def test_float64_on_a_gpu_is_refused():
    with FakeTensorMode():
        raw = torch.empty(2, 8, dtype=torch.float64, device="cuda")
        with pytest.raises(
            TypeError, match=r"raw: expected dtype float32, bfloat16 or float16 on a GPU, got float64"
        ):
            product_key_topk(raw, (4, 4), 2)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("k", [3, 30])
def test_shapes_on_a_gpu_are_known_without_one(dtype, k):
    with FakeTensorMode():
        val, idx = product_key_topk(torch.empty(3, 7, 9, dtype=dtype, device="cuda"), (4, 5), k)
    assert (val.shape, val.dtype, val.device.type) == ((3, 7, min(k, 20)), dtype, "cuda")
    assert (idx.shape, idx.dtype, idx.device.type) == (val.shape, torch.int64, "cuda")
    # Without CUDA in PyTorch no fake CUDA tensor can require grad: the gradient's shape from meta tensors.
    raw = torch.empty(3, 7, 9, dtype=dtype, device="meta", requires_grad=True)
    val, idx = torch.ops.sdm_rt.product_key_topk(raw, (4, 5), k)
    assert not idx.requires_grad
    (grad,) = torch.autograd.grad(val, raw, torch.empty_like(val))
    assert (grad.shape, grad.dtype) == (raw.shape, dtype)


def test_an_object_with_dlpack_is_taken():
    raw = scores("ties", 5, 9, torch.float32)
    val, idx = product_key_topk(raw.numpy(), (4, 5), 6)
    expected_val, expected_idx = product_key_topk(raw, (4, 5), 6)
    assert torch.equal(val, expected_val)
    assert torch.equal(idx, expected_idx)


def test_meta_tensors_propagate_shapes():
    val, idx = product_key_topk(torch.empty(3, 7, 8, dtype=torch.bfloat16, device="meta"), (4, 4), 5)
    assert (val.shape, val.dtype) == ((3, 7, 5), torch.bfloat16)
    assert (idx.shape, idx.dtype) == ((3, 7, 5), torch.int64)


def test_second_derivatives() -> None:
    scores = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = hessian(lambda raw: product_key_topk(raw, (3, 3), 2)[0].square().sum(), scores)
    _, idx = product_key_topk(scores, (3, 3), 2)
    want = torch.zeros(6, 6, dtype=torch.float64)
    for slot in idx.tolist():  # the score of a slot is a sum of two columns
        columns = [slot // 3, 3 + slot % 3]
        for row in columns:
            want[row, columns] += 2
    assert_same_bits("second derivative", found, want)


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_transforms_are_refused(transform: Any) -> None:
    with pytest.raises(RuntimeError, match=r"product_key_topk: torch\.func transforms"):
        transform(lambda raw: product_key_topk(raw, (3, 3), 2)[0].sum())(torch.randn(2, 6))
