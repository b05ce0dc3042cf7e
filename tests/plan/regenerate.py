"""Write tests/plan/tables anew from the planner: ``python -m tests.plan.regenerate``.

Read the difference by eye. What must hold whatever the tables say is asserted elsewhere in this folder.
"""

from __future__ import annotations

from tests.plan.plan_tables import CASE_NAMES, FOLDER, PRESET_NAMES, path, tables, text


def main() -> None:
    written = set()
    for preset in PRESET_NAMES:
        for case in CASE_NAMES:
            file = path(preset, case)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text(tables(preset, case)), encoding="utf-8")
            written.add(file)
    for stale in set(FOLDER.rglob("*.json")) - written:
        stale.unlink()


if __name__ == "__main__":
    main()
