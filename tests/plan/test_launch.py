"""Launches as values: what is refused, equality, hashing, JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from sdm_rt.plan.device import preset
from sdm_rt.plan.launch import Argument, Launch, pdl_defines, pointers
from sdm_rt.runtime.kernel import KernelSpec

SPEC = KernelSpec("reference_gwr.cu", ("gwr",))


def make(**changes: Any) -> Launch:
    fields: dict[str, Any] = {
        "name": "gwr",
        "kernel": SPEC,
        "entry": "gwr",
        "grid": (4, 2, 1),
        "block": (256, 1, 1),
        "arguments": (*pointers("source", "target"), Argument("step", "int32", step_dependent=True)),
        "reads": ("source",),
        "writes": ("target",),
        "bytes_moved": 100,
        "floor_bytes": 50,
    }
    return Launch(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"entry": "scatter"}, "reference_gwr.cu has no entry 'scatter'"),
        ({"grid": (0, 1, 1)}, "grid must be three sizes in"),
        ({"grid": (1, 65_536, 1)}, "grid must be three sizes in"),
        ({"grid": (1, 1)}, "grid must be three sizes in"),
        ({"block": (1, 1, 65)}, "block must be three sizes in"),
        ({"block": (64, 17, 1)}, "has more than 1024 threads"),
        ({"cluster": (3, 1, 1)}, "must divide grid"),
        ({"grid": (16, 1, 1), "cluster": (16, 1, 1)}, "cluster must be three sizes in"),
        ({"grid": (8, 8, 1), "cluster": (4, 4, 1)}, "at most 8 blocks"),
        ({"arguments": pointers("source", "target", "source")}, "argument names must differ"),
        ({"reads": ("other",)}, "reads and writes name no pointer argument: other"),
        ({"writes": ("step",)}, "reads and writes name no pointer argument: step"),
        ({"shared_memory": -1}, "need 0 <= shared_padding <= shared_memory"),
        ({"shared_memory": 8, "shared_padding": 9}, "need 0 <= shared_padding <= shared_memory"),
        ({"shared_memory": 8, "shared_padding": -1}, "need 0 <= shared_padding <= shared_memory"),
        ({"floor_bytes": 101}, "floor_bytes <= bytes_moved"),
        ({"pdl": True}, "needs a kernel with SDM_PDL_WAIT=1"),
        ({"triggers": True}, "contradicts SDM_PDL_TRIGGER"),
        (
            {"kernel": KernelSpec("reference_gwr.cu", ("gwr",), pdl_defines(False, True))},
            "contradicts SDM_PDL_TRIGGER",
        ),
    ],
)
def test_impossible_launches_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_the_largest_sizes_are_accepted() -> None:
    make(grid=(2**31 - 1, 65_535, 65_535), block=(1024, 1, 1))
    make(grid=(8, 1, 1), cluster=(8, 1, 1))


def test_launches_compare_and_hash_by_value() -> None:
    assert make() == make()
    assert hash(make()) == hash(make())
    assert len({make(), make(), make(shared_memory=16)}) == 2
    for field, value in {"grid": (4, 1, 1), "note": "other", "bytes_moved": 101, "shared_memory": 1}.items():
        assert make(**{field: value}) != make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().shared_memory = 1  # type: ignore[misc]


def test_a_launch_is_json() -> None:
    content = json.loads(json.dumps(make().to_dict()))
    assert content["grid"] == [4, 2, 1]
    assert content["arguments"][2] == {"name": "step", "kind": "int32", "step_dependent": True}


def test_counts() -> None:
    launch = make(block=(8, 32, 1))
    assert (launch.threads, launch.blocks) == (256, 8)


def test_occupancy_counts_dynamic_shared_memory() -> None:
    assert make().occupancy(preset("h100")).blocks == 4
    assert make(shared_memory=100_000).occupancy(preset("h100")).blocks == 2


@pytest.mark.parametrize(("name", "kind"), [("two words", "int32"), ("x", "double")])
def test_impossible_arguments_are_refused(name: str, kind: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        Argument(name, kind)
