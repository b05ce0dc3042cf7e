"""The planner against the committed tables, exactly."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from tests.plan.plan_tables import CASE_NAMES, FOLDER, PRESET_NAMES, path, table, text


@functools.cache
def committed(preset: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path(preset).read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("preset", PRESET_NAMES)
@pytest.mark.parametrize("case", CASE_NAMES)
def test_plan_equals_its_committed_table(preset: str, case: str) -> None:
    planned = json.loads(json.dumps(table(preset, case)))
    assert planned == committed(preset)[case], "python -m tests.plan.regenerate writes the tables anew"


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_the_file_is_what_regenerating_writes(preset: str) -> None:
    assert path(preset).read_text(encoding="utf-8") == text(preset)


def test_no_table_without_its_preset() -> None:
    assert set(FOLDER.rglob("*.json")) == {path(preset) for preset in PRESET_NAMES}
