"""Calls that are alike are checked once; whatever the checks look at makes another call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from sdm_rt import sdm_write_read
from sdm_rt.ops import write_read
from tests.problems import GRADIENTS, by_token, make_problem, with_gaps

P, T, W, R, D, S = 2, 4, 3, 2, 5, 6
Call = dict[str, Any]


def good_call() -> Call:
    problem = make_problem(P, T, W, R, D, S)
    return {"memory": problem.memory, **problem.inputs(), "num_memory_slots": S, "num_parallel": P}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Begin with no call known; a call that is checked adds what the checks return."""
    found: list[object] = []
    check = write_read._check_call

    def counted(*arguments: Any) -> Any:
        found.append(check(*arguments))
        return found[-1]

    monkeypatch.setattr(write_read, "_checked", {})
    monkeypatch.setattr(write_read, "_check_call", counted)
    return found


def with_tokens(call: Call, change: Callable[[Tensor], Tensor]) -> Call:
    return {name: change(x) if isinstance(x, Tensor) and x.dim() == 3 else x for name, x in call.items()}


def flat(call: Call) -> Call:
    return with_tokens(call, lambda x: x.flatten(0, 1))


OTHERS: dict[str, Any] = {
    "tokens": lambda call: with_tokens(call, lambda x: x[:, :3]),
    "rows": flat,
    "bank dtype": lambda call: call | {"memory": call["memory"].float()},
    "bank layout": lambda call: call | {"memory": call["memory"].t().contiguous().t()},
    "index dtype": lambda call: call | {"q_idx": call["q_idx"].int()},
    "weights' dtype": lambda call: call | {"k_val": call["k_val"].half()},
    "gates": lambda call: call | {"g": call["g"][..., :1].expand(P, T, W)},
    "chunk": lambda call: call | {"chunk_size": 8},
    "snapshot": lambda call: call | {"snapshot_quant": "fp8"},
    "wide gradient": lambda call: call | {"grad_bank_fp32": True},
    "bound": lambda call: call | {"max_seqlen": 4},
    "lengths": lambda call: call | {"lengths": torch.tensor([4, 2])},
    "lengths of 32 bits": lambda call: call | {"lengths": torch.tensor([4, 2], dtype=torch.int32)},
    "packed": lambda call: flat(call) | {"cu_seqlens": torch.tensor([0, 4, 8])},
    "gates by name": lambda call: call | {"key_weighted_decay": call["g"].shape[-1] > 1},
}


def test_a_call_like_an_earlier_one_is_not_checked_again(checked: list[object]) -> None:
    want = sdm_write_read(**good_call())
    for _ in range(2):
        assert torch.equal(sdm_write_read(**good_call()), want)
    assert len(checked) == 1


@pytest.mark.parametrize("name", OTHERS)
def test_a_call_that_differs_is_checked(checked: list[object], name: str) -> None:
    sdm_write_read(**good_call())
    for _ in range(2):
        sdm_write_read(**OTHERS[name](good_call()))
    assert len(checked) == 2


@pytest.mark.parametrize(
    ("good", "wrong"),
    [
        ({"chunk_size": 1}, {"chunk_size": True}),
        ({"chunk_size": 8}, {"chunk_size": 8.0}),
        ({"max_seqlen": 4}, {"max_seqlen": 4.0}),
        ({}, {"num_parallel": float(P)}),
        ({}, {"num_memory_slots": [S]}),
    ],
)
def test_a_value_that_equals_a_good_one_but_is_no_int_is_refused(good: Call, wrong: Call) -> None:
    sdm_write_read(**good_call() | good)
    (name,) = wrong
    with pytest.raises(TypeError, match=f"{name}: expected an int"):
        sdm_write_read(**good_call() | wrong)


def test_a_refused_call_is_refused_again(checked: list[object]) -> None:
    call = good_call()
    call["v"] = call["v"][..., :4]
    for _ in range(2):
        with pytest.raises(ValueError, match="v: expected shape"):
            sdm_write_read(**call)
    assert not checked


def test_lengths_that_do_not_fit_are_refused_in_calls_that_are_known(checked: list[object]) -> None:
    sdm_write_read(**good_call(), lengths=torch.tensor([4, 2]))
    with pytest.raises(ValueError, match="lengths: expected values in"):
        sdm_write_read(**good_call(), lengths=torch.tensor([4, 5]))
    assert len(checked) == 1


def test_known_calls_are_bounded(checked: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_read, "MOST_CHECKED", 3)
    for chunk in range(1, 9):
        sdm_write_read(**good_call(), chunk_size=chunk)
        assert len(write_read._checked) <= 3


@pytest.mark.parametrize("functional", [False, True])
def test_the_graph_has_one_node_for_a_call(functional: bool) -> None:
    """Gradients go straight to the caller's [P, T, *] tensors, without nodes of views between."""
    call = good_call()
    leaves = {name: call[name].requires_grad_() for name in GRADIENTS if name != "memory"}
    result = sdm_write_read(**call, return_final_bank=functional)
    readings = result[0] if isinstance(result, tuple) else result
    assert readings.grad_fn is not None
    next_nodes = [node for node, _ in readings.grad_fn.next_functions if node is not None]
    assert {id(node.variable) for node in next_nodes} == {id(leaf) for leaf in leaves.values()}
    readings.sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert leaf.grad.shape == leaf.shape, name


def test_a_backward_keeps_the_callers_memory_but_of_what_no_view_flattens() -> None:
    call = good_call()
    call["k_val"].requires_grad_()
    call |= {"v": by_token(call["v"]), "q_val": with_gaps(call["q_val"])}
    readings = sdm_write_read(**call)
    saved = readings.grad_fn.saved_tensors  # type: ignore[union-attr]
    kept = {tensor.untyped_storage().data_ptr() for tensor in saved}
    names = ("k_idx", "k_val", "v", "q_val")
    found = {name for name in names if call[name].untyped_storage().data_ptr() in kept}
    assert found == {"k_idx", "k_val", "q_val"}


@pytest.mark.parametrize("layout", [lambda x: x.clone(), with_gaps], ids=["dense", "gaps"])
@pytest.mark.parametrize("rows", [False, True])
def test_a_kept_tensor_that_was_overwritten_is_refused(
    layout: Callable[[Tensor], Tensor], rows: bool
) -> None:
    call = flat(good_call()) if rows else good_call()
    call["k_val"].requires_grad_()
    call["v"] = layout(call["v"])
    readings = sdm_write_read(**call)
    call["v"].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        readings.sum().backward()


@pytest.mark.parametrize("layout", [by_token, with_gaps])
def test_gradients_do_not_depend_on_the_layout(layout: Callable[[Tensor], Tensor]) -> None:
    found = []
    for change in (lambda x: x, layout):
        call = with_tokens(good_call(), change)
        leaves = [call[name].requires_grad_() for name in GRADIENTS if name != "memory"]
        found.append(torch.autograd.grad(sdm_write_read(**call).square().sum(), leaves))
        assert [grad.shape for grad in found[-1]] == [leaf.shape for leaf in leaves]
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_a_gradient_of_rows_is_no_view() -> None:
    call = flat(good_call())
    leaf = call["v"].requires_grad_()
    (grad,) = torch.autograd.grad(sdm_write_read(**call, return_final_bank=True)[0].sum(), leaf)
    assert not grad._is_view()


def test_checks_make_no_copies() -> None:
    """Of seven token tensors that no view flattens, and of the bank: one copy each, in a traced call too."""
    call = with_tokens(good_call(), by_token)
    names = [name for name, x in call.items() if isinstance(x, Tensor)]
    rest = {name: x for name, x in call.items() if name not in names}

    def run(*tensors: Tensor) -> Any:
        return sdm_write_read(**dict(zip(names, tensors, strict=True)), **rest, return_final_bank=True)

    graph = make_fx(run)(*(call[name] for name in names)).graph
    assert sum("clone" in str(node.target) for node in graph.nodes) == 8


def test_a_flag_counts_as_it_is_at_the_call() -> None:
    flag = torch.tensor(True)
    call = good_call() | {"num_memory_slots": 0}
    for name, lanes in (("k_idx", W), ("q_idx", R)):
        call[name] = (S * torch.arange(P)).view(P, 1, 1).expand(P, T, lanes)
    sdm_write_read(**call, shared_bank=flag)
    flag.fill_(False)
    with pytest.raises(ValueError, match="num_memory_slots: expected the slots of a stream"):
        sdm_write_read(**call, shared_bank=flag)
    sdm_write_read(**good_call(), key_weighted_decay=[1] if good_call()["g"].shape[-1] > 1 else [])
