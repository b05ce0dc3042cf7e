"""Bad input to decode: which error, what its message names, and that nothing was changed."""

from __future__ import annotations

import pytest
import torch

from sdm_rt import sdm_decode_step
from tests.bad_calls import Arguments, Bad, assert_refused, bad, put
from tests.problems import make_problem

P, W, R, D, S = 2, 3, 2, 5, 6


def good_step() -> Arguments:
    problem = make_problem(P, 1, W, R, D, S)
    return {"memory": problem.memory, **{name: x[:, 0] for name, x in problem.inputs().items()}}


STEPS = [
    bad("bank of rank 1", ValueError, "memory...expected...[60]", memory=lambda x: x.flatten()),
    bad("bank one row short", ValueError, "memory...2...got 11", memory=lambda x: x[:-1]),
    bad("int64 bank", TypeError, "memory...expected dtype...float32...got int64", memory=lambda x: x.long()),
    bad("one row expanded", ValueError, "memory...overlap", memory=torch.zeros(1, D).expand(P * S, D)),
    bad(
        "four tokens",
        ValueError,
        "k_idx...expected...one token a stream...got [2, 4, 3]",
        k_idx=lambda x: x[:, None].expand(2, 4, 3),
    ),
    bad("indices of rank 1", ValueError, "k_idx...expected...got [6]", k_idx=lambda x: x.flatten()),
    bad("float indices", TypeError, "q_idx...int32 or int64...got float64", q_idx=lambda x: x.double()),
    bad("a weight too many", ValueError, "k_val...expected...3...got...4]", k_val=torch.zeros(P, 4)),
    bad("narrow values", ValueError, "v...expected...5...got...4]", v=lambda x: x[..., :4]),
    bad("gates neither per token nor per write", ValueError, "g...expected...got...2]", g=torch.zeros(P, 2)),
    bad(
        "values on another device",
        ValueError,
        "v...expected...memory...cpu...got meta",
        v=lambda x: x.to("meta"),
    ),
    bad(
        "a write to the next stream's row",
        ValueError,
        "k_idx...0..5...stream 0...got 6",
        k_idx=put((0, 2), 6),
    ),
    bad("a negative read index", ValueError, "q_idx...6..11...stream 1...got -1", q_idx=put((1, 0), -1)),
    bad(
        "257 writes",
        ValueError,
        "k_idx...1..256...got 257",
        k_idx=torch.zeros(P, 257, dtype=torch.long),
        k_val=torch.zeros(P, 257),
    ),
    bad("a length of two", ValueError, "lengths...0..1...got 2...stream 1", lengths=torch.tensor([1, 2])),
    bad("lengths of three streams", ValueError, "lengths...[2]...got [3]", lengths=torch.tensor([1, 1, 1])),
    bad("float lengths", TypeError, "lengths...int32 or int64...got float32", lengths=torch.ones(P)),
]


@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.label)
def test_decode_refuses(case: Bad) -> None:
    assert_refused(sdm_decode_step, case.change(good_step()), case)


def test_decode_refuses_to_be_differentiated() -> None:
    call = good_step()
    call["v"] = call["v"].requires_grad_()
    case = bad("v", RuntimeError, "v...not differentiable...sdm_write_read...torch.no_grad()")
    assert_refused(sdm_decode_step, call, case)
    with torch.no_grad():
        assert sdm_decode_step(**call).shape == (P, D)
