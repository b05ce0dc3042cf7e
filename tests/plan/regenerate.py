"""Write tests/plan/tables and the examples of docs/planning.md anew: ``python -m tests.plan.regenerate``.

Read the difference by eye. What must hold whatever the tables say is asserted elsewhere in this folder.
"""

from __future__ import annotations

from tests.plan import planning_page
from tests.plan.plan_tables import FOLDER, PRESET_NAMES, path, text


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for preset in PRESET_NAMES:
        path(preset).write_text(text(preset), encoding="utf-8")
    for stale in set(FOLDER.rglob("*.json")) - {path(preset) for preset in PRESET_NAMES}:
        stale.unlink()
    page = planning_page.PATH
    page.write_text(planning_page.rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
