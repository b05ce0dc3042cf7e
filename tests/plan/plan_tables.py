"""Committed plan tables, one file a preset: how the plans of the cases become its text.

Arguments, reads and writes are left out, since other tests hold them against the kernels, and what a built
kernel takes of an SM, which the test of resources.json holds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sdm_rt.errors import UnsupportedConfigurationError
from sdm_rt.plan.backward import plan_backward
from sdm_rt.plan.decode import plan_decode
from sdm_rt.plan.device import PRESETS
from sdm_rt.plan.forward import plan_forward
from sdm_rt.plan.reference_backward import plan_reference_backward
from sdm_rt.plan.step_plan import StepPlan
from tests.plan.cases import DECODE_CASES, WRITE_READ_CASES

FOLDER = Path(__file__).with_name("tables")
SECTIONS = ("prologue", "first_step", "step", "epilogue")
BUDGETED = ("registers", "resident_blocks", "waves")  # kept of a kernel that is planned and not built
LAUNCH = (
    *("entry", "function", "grid", "block", "shared_memory", "shared_padding"),
    *("bytes_moved", "floor_bytes"),
)

CASE_NAMES = (*WRITE_READ_CASES, *DECODE_CASES)
PRESET_NAMES = tuple(PRESETS)

Table = dict[str, Any]


def path(preset: str) -> Path:
    return FOLDER / f"{preset}.json"


def _launch(call: dict[str, Any]) -> Table:
    row = {key: call[key] for key in LAUNCH if key in call}
    if defines := call.get("defines"):
        row["defines"] = " ".join(f"{name}={value}" for name, value in defines.items())
    if row.get("entry") == call["name"]:
        del row["entry"]
    row["flags"] = " ".join(flag for flag in ("pdl", "triggers") if call.get(flag))
    if call.get("cluster", [1, 1, 1]) != [1, 1, 1]:
        row["cluster"] = call["cluster"]
    if not call.get("registers_measured", True):
        row |= {figure: call[figure] for figure in BUDGETED}
    return {call["name"]: {key: value for key, value in row.items() if value not in ("", 0)}}


def _plan(plan: StepPlan) -> Table:
    made = plan.to_dict()
    table: Table = {
        key: made[key] for key in ("steps", "order", "slab_steps", "launch_count", "bytes_moved", "floor_us")
    }
    for section in SECTIONS:
        table[section] = [_launch(call) for call in made[section]]
    if table["step"] == table["first_step"]:
        del table["first_step"]
    for kept in (False, True):
        buffers = {one["name"]: one["bytes"] for one in made["buffers"] if one["kept"] == kept}
        table["kept" if kept else "scratch"] = buffers
    return {key: value for key, value in table.items() if value}


def table(preset: str, case: str) -> Table:
    """Return what the planner says of a case on a preset: each plan, or the message of its refusal.

    The schedules are those of a call that names none; where that is the persistent one, the stepwise plan
    stands beside it.
    """
    device = PRESETS[preset]
    if case in DECODE_CASES:
        return {"decode": _plan(plan_decode(DECODE_CASES[case], device))}
    shape = WRITE_READ_CASES[case]
    planners: dict[str, Any] = {"forward": plan_forward}
    if shape.training:
        planners["backward"] = plan_backward
    result: Table = {}
    for name, planner in planners.items():
        plan = planner(shape, device)
        result[name] = _plan(plan)
        if plan.schedule == "persistent":
            result[f"{name}_stepwise"] = _plan(planner(shape, device, "stepwise"))
    if shape.training:
        try:
            result["reference_backward"] = _plan(plan_reference_backward(shape, device))
        except UnsupportedConfigurationError as error:
            result["reference_backward"] = {"refused": str(error)}
    return result


def text(preset: str) -> str:
    """Return a file's text: one line a launch, so that differences read well."""
    cases = []
    for case in CASE_NAMES:
        plans = []
        for name, plan in table(preset, case).items():
            lines = []
            for key, value in plan.items():
                if key in SECTIONS:
                    rows = ",\n     ".join(json.dumps(call) for call in value)
                    lines.append(f'   "{key}": [\n     {rows}\n   ]')
                else:
                    lines.append(f'   "{key}": {json.dumps(value)}')
            plans.append(f'  "{name}": {{\n' + ",\n".join(lines) + "\n  }")
        cases.append(f' "{case}": {{\n' + ",\n".join(plans) + "\n }")
    return "{\n" + ",\n".join(cases) + "\n}\n"
