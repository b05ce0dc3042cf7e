"""Case 25: two processes equal one, with DDP, with FSDP2, and with the columns of the bank split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.cpu.distributed import (
    PROCESSES,
    column_problem,
    run_column_parallel,
    run_process,
    train,
    two_layers,
)
from tests.tolerances import assert_close

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this PyTorch has no gloo"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of rank 0 of two processes."""
    folder: Path = tmp_path_factory.mktemp("distributed")
    mp.spawn(run_process, (str(folder),), nprocs=PROCESSES)
    return torch.load(folder / "found.pt")


@pytest.mark.parametrize("kind", ["data parallel", "fully sharded"])
def test_training_equals_one_process(found: dict[str, Any], kind: str) -> None:
    model = two_layers()
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    losses = torch.stack(train(model, 0, 1))
    assert_close("losses", found[kind]["losses"], losses, torch.float64)
    weights = dict(model.named_parameters())
    assert found[kind]["weights"].keys() == weights.keys()
    for name, weight in weights.items():
        assert not torch.equal(weight, initial[name]), f"{name} is not trained"
        step = weight.detach() - initial[name]
        assert_close(f"steps of {name}", found[kind]["weights"][name] - initial[name], step, torch.float64)


def test_fully_sharded_layers_hold_half_the_learned_bank(found: dict[str, Any]) -> None:
    whole = two_layers().layers[0].memory.shape[0]
    assert found["fully sharded"]["sharded rows"] * PROCESSES == whole


def test_states_of_fully_sharded_layers(found: dict[str, Any]) -> None:
    """A state made by a forward cannot be reset: its initial bank went with the reshard. Others can."""
    assert "FSDP2 has resharded" in found["fully sharded"]["reset"]
    assert "initial_memory=layer.memory.full_tensor()" in found["fully sharded"]["state"]
    assert found["fully sharded"]["continued"]
    assert found["fully sharded"]["reset again"]


def test_split_columns_equal_whole_rows(found: dict[str, Any]) -> None:
    """Within rounding: torch sums the slots of a column in an order that depends on the row's width."""
    want = run_column_parallel(0, 1)
    assert column_problem().memory.shape[1] % PROCESSES == 0
    for name, value in want.items():
        got = found["column parallel"][name]
        assert_close(name, got, value, torch.float32)
