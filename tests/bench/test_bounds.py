"""The floor and the memory need of a case."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sdm_rt.bench.bounds import floor_bytes, needed_bytes
from sdm_rt.bench.cases import CASES, Case, make_inputs, shape_of
from sdm_rt.bench.timing import floor_ms
from sdm_rt.plan.device import preset

H200 = preset("h200")
FLAGSHIP = CASES["flagship"]


def test_the_flagship_floor_by_hand() -> None:
    """512 steps of 2 chunks, 8,192 rows of 2 KB to write and as many to read (docs/performance.md)."""
    row, steps = 2048, 512
    # Forward: both kinds of rows are read, and the written ones go back.
    no_grad = steps * row * 3 * 8192
    phase1 = floor_bytes(FLAGSHIP, H200, training=False) - no_grad
    assert 0 <= phase1 < 0.25 * no_grad
    training = floor_bytes(FLAGSHIP, H200, training=True)
    # The snapshot too; the backward moves 7 rows' worth a slot; then the bank's gradient is written once.
    assert training > steps * row * (4 + 7) * 8192 + 2 * 65536 * row
    assert 22 < floor_ms(training, 4.25e12) < 26


def test_a_call_without_gradients_keeps_no_snapshot() -> None:
    assert shape_of(replace(FLAGSHIP, snapshot="fp8"), training=True).snapshot == "fp8"
    assert shape_of(replace(FLAGSHIP, snapshot="fp8"), training=False).snapshot == "none"


@pytest.mark.parametrize("training", [False, True])
def test_the_need_covers_the_inputs(training: bool) -> None:
    case = Case(2, 32, 8, 4, 16, 64)
    inputs = make_inputs(case, torch.device("cpu"))
    held = sum(tensor.nbytes for tensor in vars(inputs).values())
    assert held < needed_bytes(case, H200, training) < 40 * held


def test_the_need_of_the_flagship_is_near_what_was_measured() -> None:
    """The goal is 10 GiB above inputs (0.9 GiB) and bank; a need below that would promise too much room."""
    need = needed_bytes(FLAGSHIP, H200, training=True) / 2**30
    assert 8 < need < 16
