"""The planner against the committed tables, exactly; the tables against themselves."""

from __future__ import annotations

import json

import pytest

from tests.plan.plan_tables import CASE_NAMES, FOLDER, PRESET_NAMES, path, tables, text


@pytest.mark.parametrize("preset", PRESET_NAMES)
@pytest.mark.parametrize("case", CASE_NAMES)
def test_plan_equals_its_committed_table(preset: str, case: str) -> None:
    committed = json.loads(path(preset, case).read_text(encoding="utf-8"))
    planned = json.loads(text(tables(preset, case)))
    assert planned == committed


def test_no_table_without_its_case() -> None:
    expected = {path(preset, case) for preset in PRESET_NAMES for case in CASE_NAMES}
    assert set(FOLDER.rglob("*.json")) == expected
