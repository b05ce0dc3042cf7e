"""Phase-1 backward of chunks on CPU tensors: against its formulas, autograd, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdm_rt import phase1_backward, phase1_backward_det
from sdm_rt.cpu import phase1 as forward_definition
from tests.bad_calls import Arguments, Bad, assert_refused, bad
from tests.kernels.phase1 import Chunks, make_chunks, phase1_oracle
from tests.kernels.phase1_backward import (
    GRADIENTS,
    ROUNDED,
    Gradients,
    backward_definition,
    make_gradients,
    op_arguments,
)
from tests.problems import GATES, WRITES
from tests.tolerances import assert_close, assert_same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def gradients_of(chunks: Chunks, seed: int = 0) -> Gradients:
    N, C, W = chunks.k_idx.shape
    return make_gradients(N, C, W, chunks.q_idx.shape[2], seed)


def check(chunks: Chunks, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    gradients = gradients_of(chunks, seed)
    got = phase1_backward(**op_arguments(chunks, gradients))
    for name, one, want in zip(GRADIENTS, got, backward_definition(chunks, gradients), strict=True):
        assert one.dtype == (torch.float32 if name == "grad_g" else chunks.k_val.dtype)
        assert one.is_contiguous()
        assert_close(name, one, want, one.dtype, tolerance=ROUNDED[one.dtype])
    return got


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    shape=st.tuples(*(st.integers(1, high) for high in (3, 12, 6, 6))),
    slots=st.integers(8, 30),
    gates=st.sampled_from(GATES),
    gate_per_write=st.booleans(),
    writes=st.sampled_from(WRITES),
    signed_weights=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    ragged=st.booleans(),
)
def test_equals_the_formulas(
    seed: int,
    shape: tuple[int, int, int, int],
    slots: int,
    gates: str,
    gate_per_write: bool,
    writes: str,
    signed_weights: bool,
    dtype: torch.dtype,
    ragged: bool,
) -> None:
    N, C, W, R = shape
    chunks = make_chunks(
        N,
        C,
        W,
        R,
        slots,
        dtype,
        seed=seed,
        gates=gates,
        gate_per_write=gate_per_write,
        writes=writes,
        signed_weights=signed_weights,
        lengths=[(seed + 5 * n) % (C + 1) for n in range(N)] if ragged else None,
    )
    check(chunks, seed)


@pytest.mark.parametrize(("C", "W", "R"), [(256, 1, 2), (1, 256, 256), (65, 20, 7), (130, 3, 50)])
def test_large_chunks(C: int, W: int, R: int) -> None:
    check(make_chunks(1, C, W, R, 257, seed=C, gates="all kinds", gate_per_write=True))


@pytest.mark.parametrize("gate_per_write", [False, True])
@pytest.mark.parametrize("writes", WRITES)
@pytest.mark.parametrize("gates", ["zero", "mild", "some -inf", "some positive"])
def test_the_formulas_are_the_gradient_of_the_forward(gates: str, writes: str, gate_per_write: bool) -> None:
    """Autograd through the forward's formulas in float64: no counting of owners, terms of 1 just cancel."""
    chunks = make_chunks(
        2, 14, 3, 4, 7, seed=5, gates=gates, gate_per_write=gate_per_write, writes=writes, lengths=[14, 9]
    )
    gradients = gradients_of(chunks)
    names = ("k_val", "q_val", "g")
    leaves = {name: getattr(chunks, name).double().requires_grad_() for name in names}
    made = phase1_oracle(replace(chunks, **leaves))
    real = ~leaves["k_val"].isnan()  # padding holds NaN
    at_end = leaves["k_val"].where(real, 0.0) * made.rex.exp().where(real, 0.0)
    d_a, d_qk = gradients.d_a.double().nan_to_num(), gradients.d_qk.double().nan_to_num()
    products = [(d_a, made.a), (d_qk, made.qk), (gradients.d_k_eff, made.k_eff)]
    products += [(gradients.d_q_w, made.q_w), (gradients.d_k_pd, at_end)]
    total = torch.stack([(d.double() * x).sum() for d, x in products]).sum()
    found = torch.autograd.grad(total, list(leaves.values()))
    grad_k, grad_q, grad_x = backward_definition(chunks, gradients)
    if not gate_per_write:
        grad_x = grad_x.sum(dim=2, keepdim=True)
    for name, got, want in zip(names, (grad_k, grad_q, grad_x), found, strict=True):
        assert_close(f"gradient of {name}", got, want, torch.float64)


def test_the_variant_that_hides_latency_gives_the_same_bits() -> None:
    chunks = make_chunks(3, 30, 4, 4, 12, writes="hot")
    arguments = op_arguments(chunks, gradients_of(chunks))
    for name, one, two in zip(
        GRADIENTS, phase1_backward_det(**arguments), phase1_backward(**arguments), strict=True
    ):
        assert_same_bits(name, one, two)


def test_pairs_in_parts_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = make_chunks(3, 30, 4, 4, 12, writes="hot", gates="all kinds")
    arguments = op_arguments(chunks, gradients_of(chunks))
    whole = phase1_backward(**arguments)
    for pairs in (1, 7, 100):
        monkeypatch.setattr(forward_definition, "PAIRS_AT_ONCE", pairs)
        for name, one, two in zip(GRADIENTS, phase1_backward(**arguments), whole, strict=True):
            assert_same_bits(name, one, two)


def test_exp_of_l_and_rex_is_that_of_the_floats_given() -> None:
    chunks = make_chunks(1, 6, 1, 1, 8, seed=2)
    gradients = gradients_of(chunks)
    arguments = op_arguments(chunks, replace(gradients, d_a=torch.zeros(1, 6, 6), d_qk=torch.zeros(1, 6, 6)))
    grad_k, grad_q, _ = phase1_backward(
        **arguments
        | {name: torch.full((1, 6, 1), x) for name, x in (("log_k", 2.0), ("log_q", 3.0), ("rex", -1.0))}
    )
    want = gradients.d_k_eff.double() * torch.tensor(2.0).double().exp()
    want += gradients.d_k_pd.double() * torch.tensor(-1.0).double().exp()
    assert_close("grad_k_val", grad_k, want, torch.float32, tolerance=ROUNDED[torch.float32])
    want = gradients.d_q_w.double() * torch.tensor(3.0).double().exp()
    assert_close("grad_q_val", grad_q, want, torch.float32, tolerance=ROUNDED[torch.float32])


def test_nan_reaches_no_other_slot() -> None:
    chunks = make_chunks(2, 12, 2, 2, 6, gates="mild", gate_per_write=True, seed=4)
    clean = gradients_of(chunks)
    d_k_eff = clean.d_k_eff.clone()
    d_k_eff[0, 6, 1] = torch.nan
    before = phase1_backward(**op_arguments(chunks, clean))
    after = phase1_backward(**op_arguments(chunks, replace(clean, d_k_eff=d_k_eff)))
    reached = torch.zeros_like(chunks.k_idx, dtype=torch.bool)
    reached[0, :7] = chunks.k_idx[0, :7] == chunks.k_idx[0, 6, 1]
    assert torch.equal(after[2].isnan(), reached)
    assert_same_bits("the other gates' gradients", after[2][~reached], before[2][~reached])


def good() -> Arguments:
    chunks = make_chunks(2, 5, 3, 4, 10)
    return dict(op_arguments(chunks, gradients_of(chunks)))


BAD = [
    bad("weights of rank 2", ValueError, "k_val...[N, C, W]...got [5, 3]", k_val=lambda x: x[0]),
    bad("other tokens of reads", ValueError, "q_val...[2, 5, R]...got [2, 4, 4]", q_val=torch.zeros(2, 4, 4)),
    bad("no lanes", ValueError, "q_val...1..256 slots...got 0", q_val=torch.zeros(2, 5, 0)),
    bad("a gate too many", ValueError, "g...[2, 5, 1] or [2, 5, 3]...got [2, 5, 2]", g=torch.zeros(2, 5, 2)),
    bad("a short payload", ValueError, "payload...[2, 48]...got [2, 32]", payload=lambda x: x[:, :32]),
    bad("log_k of reads", ValueError, "log_k...[2, 5, 3]...got [2, 5, 4]", log_k=torch.zeros(2, 5, 4)),
    bad("log_q of writes", ValueError, "log_q...[2, 5, 4]...got [2, 5, 3]", log_q=torch.zeros(2, 5, 3)),
    bad("rex of rank 2", ValueError, "rex...[2, 5, 3]...got [5, 3]", rex=torch.zeros(5, 3)),
    bad("a larger d_a", ValueError, "d_a...[2, 5, 5]...got [2, 6, 6]", d_a=torch.zeros(2, 6, 6)),
    bad("another d_qk", ValueError, "d_qk...[2, 5, 5]...got [1, 5, 5]", d_qk=torch.zeros(1, 5, 5)),
    bad("another d_k_eff", ValueError, "d_k_eff...[2, 5, 3]...got [2, 5, 1]", d_k_eff=torch.zeros(2, 5, 1)),
    bad("another d_k_pd", ValueError, "d_k_pd...[2, 5, 3]...got [2, 3, 5]", d_k_pd=torch.zeros(2, 3, 5)),
    bad("another d_q_w", ValueError, "d_q_w...[2, 5, 4]...got [2, 5, 3]", d_q_w=torch.zeros(2, 5, 3)),
    bad("a strided d_a", ValueError, "d_a...contiguous...strides", d_a=lambda x: x.mT),
    bad("an int64 payload", TypeError, "payload...int32...int64", payload=lambda x: x.long()),
    bad(
        "float64 weights",
        TypeError,
        "k_val...float32, bfloat16 or float16...float64",
        k_val=lambda x: x.double(),
    ),
    bad(
        "two dtypes of weights",
        TypeError,
        "q_val...dtype of k_val, float32...float16",
        q_val=lambda x: x.half(),
    ),
    bad("half gates", TypeError, "g...float32...float16", g=lambda x: x.half()),
    bad("float64 d_qk", TypeError, "d_qk...float32...float64", d_qk=lambda x: x.double()),
    bad("a list", TypeError, "g...expected a torch.Tensor, got list", g=lambda x: x.tolist()),
    bad("two devices", ValueError, "d_q_w...device of payload, cpu...got meta", d_q_w=lambda x: x.to("meta")),
    bad("needs a gradient", RuntimeError, "q_val...not differentiable", q_val=lambda x: x.requires_grad_()),
]


@pytest.mark.parametrize("op", [phase1_backward, phase1_backward_det])
@pytest.mark.parametrize("case", BAD, ids=lambda case: case.label)
def test_bad_input(case: Bad, op: object) -> None:
    assert_refused(op, case.change(good()), case)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (1, 257)], ids=str)
def test_chunks_out_of_range(shape: tuple[int, int]) -> None:
    call = good() | {"k_val": torch.zeros(*shape, 3), "q_val": torch.zeros(*shape, 4)}
    with pytest.raises(ValueError, match=r"^k_val: expected (at least one chunk|C in 1\.\.256)"):
        phase1_backward(**call)
