"""Step plans as values: validation against the device, order, equality, hashing, JSON, plans without PDL."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys

import pytest

from sdm_rt.plan import backward, forward
from sdm_rt.plan.decode import plan_decode
from sdm_rt.plan.device import PRESETS, preset
from sdm_rt.plan.launch import Launch
from sdm_rt.plan.reference_backward import plan_reference_backward
from sdm_rt.plan.shapes import DecodeShape, WriteReadShape
from tests.plan.cases import FLAGSHIP, WRITE_READ_CASES

plan_forward = functools.partial(forward.plan_forward, schedule="stepwise")
plan_backward = functools.partial(backward.plan_backward, schedule="stepwise")

SHAPE = WriteReadShape(2, 150, 64, 8, 8, 128, 256)


def test_equal_inputs_give_equal_plans_and_hashes() -> None:
    for planner in (plan_forward, plan_backward):
        first, second = planner(SHAPE, preset("h100")), planner(SHAPE, preset("h100"))
        assert first is not second
        assert first == second
        assert hash(first) == hash(second)
        assert first.to_dict() == second.to_dict()
        assert first.describe() == second.describe()


@pytest.mark.parametrize("name", PRESETS)
def test_notes_count_no_more_columns_than_there_are(name: str) -> None:
    """Rows of 13 columns, 26 bytes; a chunk of 5 tokens has 5 columns."""
    shape, device = WriteReadShape(1, 5, 5, 3, 3, 13, 64), preset(name)
    plans = [planner(shape, device) for planner in (plan_forward, plan_backward)]
    if device.clusters:
        plans += [planner(shape, device, schedule="persistent") for planner in (plan_forward, plan_backward)]
    plans.append(plan_decode(DecodeShape(1, 3, 3, 13), device))
    notes = {one.name: one.note for plan in plans for one in plan.kernels()}
    found = {of: re.findall(r"(\d+) (?:columns|bytes)", note) for of, note in notes.items()}
    rows = dict.fromkeys(("decay_write", "persistent_forward", "persistent_backward"), 26)
    most = dict.fromkeys(("gather", "dual_matmul", "du_update", "decode"), 13) | {"solve": 5} | rows
    assert {of for of in found if found[of]} == most.keys() & notes.keys()
    assert all(int(count) <= most[of] for of, counts in found.items() for count in counts)


def test_the_snapshot_of_a_small_bank_has_a_size() -> None:
    shape = WriteReadShape(1, 4096, 64, 64, 64, 16, 65536, snapshot="int4")
    assert "snapshot: room for 262,144 rows, 3.0 MiB" in plan_forward(shape, preset("h100")).notes


def test_the_sort_tells_how_many_chunks_a_block_takes() -> None:
    for tokens, share in ((132 * 200, "a chunk a block"), (300 * 200, "up to 3 chunks a block")):
        shape = WriteReadShape(1, tokens, 200, 64, 64, 64, 65536)  # items in global memory
        sort = plan_forward(shape, preset("h100")).prologue[0]
        assert isinstance(sort, Launch)
        assert sort.note == f"2 passes of 8 bits, {share}, global memory"


def test_plans_differ_with_shape_and_device() -> None:
    plans = {plan_forward(SHAPE, preset(name)) for name in PRESETS}
    plans |= {plan_forward(dataclasses.replace(SHAPE, tokens=151), preset("h100"))}
    assert len(plans) == len(PRESETS) + 1


def test_plans_are_the_same_in_another_process() -> None:
    code = (
        "import hashlib, json\n"
        "from sdm_rt.plan.backward import plan_backward\n"
        "from sdm_rt.plan.device import preset\n"
        "from sdm_rt.plan.shapes import WriteReadShape\n"
        "plan = plan_backward(WriteReadShape(2, 150, 64, 8, 8, 128, 256), preset('h100'), 'stepwise')\n"
        "print(json.dumps(plan.to_dict()))\n"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1]
    assert json.loads(printed[0]) == plan_backward(SHAPE, preset("h100")).to_dict()


def test_a_plan_is_json() -> None:
    plan = plan_backward(SHAPE, preset("h100"))
    assert json.loads(json.dumps(plan.to_dict())) == plan.to_dict()


def test_without_pdl_changes_the_flags_alone() -> None:
    plan = plan_backward(SHAPE, preset("h100"))
    plain = plan.without_pdl()
    assert [call.name for _, call in plain.launches()] == [call.name for _, call in plan.launches()]
    for (_, before), (_, after) in zip(plan.launches(), plain.launches(), strict=True):
        assert isinstance(before, Launch)
        assert isinstance(after, Launch)
        assert not after.pdl
        assert dataclasses.replace(before, pdl=False) == after
    assert any(isinstance(call, Launch) and call.pdl for _, call in plan.launches())


def test_a_plan_is_checked_against_its_device() -> None:
    plan = plan_forward(SHAPE, preset("h100"))
    gather, (gwr, du_update, *_) = plan.step[0], plan_reference_backward(SHAPE, preset("h100")).step
    assert isinstance(gather, Launch)
    with pytest.raises(ValueError, match="gwr uses PDL, which A100 80GB SXM lacks"):
        dataclasses.replace(plan, device=preset("a100"), prologue=(), first_step=(gwr,), step=())
    big = dataclasses.replace(gather, shared_memory=200_000)
    wide = dataclasses.replace(du_update, block=(1024, 1, 1))
    clustered = dataclasses.replace(gather, cluster=(2, 1, 1))
    with pytest.raises(ValueError, match="gather needs 200000 bytes of shared memory, RTX 4090 has 101376"):
        dataclasses.replace(plan, device=preset("rtx4090"), first_step=(big,), step=())
    with pytest.raises(ValueError, match="no block of du_update fits an SM"):
        dataclasses.replace(plan, first_step=(wide,), step=())
    with pytest.raises(ValueError, match="gather uses clusters, which RTX 4090 lacks"):
        dataclasses.replace(plan, device=preset("rtx4090"), first_step=(clustered,), step=())
    with pytest.raises(ValueError, match="steps must not be negative"):
        dataclasses.replace(plan, steps=-1)


def test_step_order() -> None:
    assert list(plan_forward(SHAPE, preset("h100")).step_indices()) == [0, 1, 2]
    assert list(plan_backward(SHAPE, preset("h100")).step_indices()) == [2, 1, 0]


def test_every_launch_takes_the_step_where_it_runs_in_the_loop() -> None:
    for plan in (plan_forward(SHAPE, preset("h100")), plan_backward(SHAPE, preset("h100"))):
        expected = {call.name: set() for call in plan.calls()}
        for call in plan.step:
            expected[call.name] = {"step", "slab_step"} if plan.slab_steps else {"step"}
        for call in plan.prologue:
            expected[call.name] = {"slab_step"} if call.name != "solve" else set()
        for call in plan.kernels():
            changing = {argument.name for argument in call.arguments if argument.step_dependent}
            assert changing == expected[call.name]


def test_describe_marks_design_budgets() -> None:
    note = "* a design budget that __launch_bounds__ enforces, not a measurement"
    text = plan_reference_backward(FLAGSHIP, preset("h100")).describe()
    assert " 64* " in text
    assert note in text
    for planner in (plan_forward, plan_backward):
        assert note not in planner(FLAGSHIP, preset("h100")).describe()


def test_describe_names_sections_of_a_loop_of_one_step_and_of_many() -> None:
    many = plan_backward(SHAPE, preset("h100")).describe()
    assert "[step 2, issued first]" in many
    assert "[each step, 1 to 0]" in many
    assert "[after the loop]" in many
    there = plan_forward(SHAPE, preset("h100"))
    assert "[before the loop]" in there.describe()
    assert "[each step, 0 to 2]" in there.describe()
    assert "[before each slab of 2 steps]" in dataclasses.replace(there, slab_steps=2).describe()
    one = plan_backward(dataclasses.replace(SHAPE, tokens=64), preset("h100")).describe()
    assert "[step 0]" in one
    assert "each step" not in one


def test_empty_plans_print_and_count_nothing() -> None:
    for plan in (
        plan_forward(WRITE_READ_CASES["no_tokens"], preset("h100")),
        plan_decode(DecodeShape(0, 4, 4, 64), preset("h100")),
    ):
        assert "total: 0 launches, 0 steps, 0.000 MB moved" in plan.describe()
        assert plan.to_dict()["launch_count"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk": 0}, r"chunk must be in 1\.\.256, got 0"),
        ({"chunk": 257}, r"chunk must be in 1\.\.256, got 257"),
        ({"writes": 257}, r"writes must be in 1\.\.256, got 257"),
        ({"reads": 0}, r"reads must be in 1\.\.256, got 0"),
        ({"head_dim": 16_385}, r"head_dim must be in 1\.\.16384, got 16385"),
        ({"slots": 0}, r"slots must be in 1\.\."),
        ({"streams": -1}, r"streams must be in 0\.\."),
        ({"tokens": -1}, r"tokens must be in 0\.\."),
        ({"bank_dtype": "float64"}, "bank_dtype must be one of bfloat16, float16, float32, got 'float64'"),
        ({"gradient_bank_dtype": "float16"}, "gradient_bank_dtype must be one of bfloat16, float32"),
        ({"index_dtype": "int16"}, "index_dtype must be one of int32, int64"),
        ({"alignment": 32}, "alignment must be 2, 4, 8 or 16 bytes, got 32"),
        ({"snapshot": "int8"}, "snapshot must be one of none, bf16, fp8, int4"),
    ],
)
def test_shapes_out_of_range_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SHAPE, **changes)


def test_chunks_round_up() -> None:
    counts = [dataclasses.replace(SHAPE, tokens=tokens).chunks for tokens in (0, 1, 63, 64, 65, 128, 129)]
    assert counts == [0, 1, 1, 1, 2, 2, 3]
