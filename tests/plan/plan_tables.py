"""Committed plan tables: how a case's plans become a file, and the file's path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sdm_rt.errors import UnsupportedConfigurationError
from sdm_rt.plan.backward import plan_backward, plan_reference_backward
from sdm_rt.plan.decode import plan_decode
from sdm_rt.plan.device import PRESETS, DeviceModel
from sdm_rt.plan.forward import plan_forward
from sdm_rt.plan.step_plan import StepPlan
from tests.plan.cases import DECODE_CASES, WRITE_READ_CASES

FOLDER = Path(__file__).with_name("tables")
SECTIONS = ("prologue", "first_step", "step", "epilogue")
# What a built kernel takes of an SM is held by the test of resources.json, not by these tables.
MEASURED = ("registers", "static_shared", "resident_blocks", "resident_limit", "waves")

CASE_NAMES = (*WRITE_READ_CASES, *DECODE_CASES)
PRESET_NAMES = tuple(PRESETS)


def path(preset: str, case: str) -> Path:
    return FOLDER / preset / f"{case}.json"


def _row(call: dict[str, Any]) -> dict[str, Any]:
    """Return a launch in the tables' short form."""
    row = dict(call)
    if row.pop("registers_measured", False):
        for figure in MEASURED:
            row.pop(figure)
    if "arguments" in row:
        row["arguments"] = " ".join(
            f"{argument['name']}:{argument['kind']}{'*' * argument['step_dependent']}"
            for argument in row["arguments"]
        )
    if row.get("cluster") == [1, 1, 1]:
        del row["cluster"]
    if "defines" in row:
        row["defines"] = " ".join(f"{name}={value}" for name, value in row["defines"].items())
    row.pop("note", None)
    return {key: " ".join(value) if key in ("reads", "writes") else value for key, value in row.items()}


def _table(plan: StepPlan) -> dict[str, Any]:
    table = {**plan.to_dict(), "device": plan.device.name}
    for section in SECTIONS:
        table[section] = [_row(call) for call in table[section]]
    if table["step"] == table["first_step"]:
        table["step"] = "as first_step"
    return table


def tables(preset: str, case: str) -> dict[str, Any]:
    """Return what the planner says of a case on a preset: each plan, or the message of its refusal.

    A reference backward that equals the backward is left out.
    """
    device: DeviceModel = PRESETS[preset]
    if case in DECODE_CASES:
        return {"decode": _table(plan_decode(DECODE_CASES[case], device))}
    shape = WRITE_READ_CASES[case]
    planners: dict[str, Any] = {"forward": plan_forward}
    if shape.training:
        planners.update(backward=plan_backward, reference_backward=plan_reference_backward)
    result: dict[str, Any] = {}
    for name, planner in planners.items():
        try:
            result[name] = _table(planner(shape, device))
        except UnsupportedConfigurationError as error:
            result[name] = {"refused": str(error)}
    reference = result.get("reference_backward", {})
    if all(reference[key] == value for key, value in result.get("backward", {}).items() if key != "name"):
        result.pop("reference_backward", None)
    return result


def text(content: dict[str, Any]) -> str:
    """Return a table file's text: one line a launch, so that differences read well."""
    blocks = []
    for name, plan in content.items():
        lines = []
        for key, value in plan.items():
            if key in SECTIONS and isinstance(value, list) and value:
                rows = ",\n      ".join(json.dumps(call) for call in value)
                lines.append(f"    {json.dumps(key)}: [\n      {rows}\n    ]")
            else:
                lines.append(f"    {json.dumps(key)}: {json.dumps(value)}")
        blocks.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"
