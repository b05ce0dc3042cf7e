"""Write docs/performance.md and its pictures anew, and print the goal table.

python -m tests.performance_page            write the page and the pictures
python -m tests.performance_page --check    exit with 1 where the page differs from the records; write nothing
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence

from tests.performance_page import page
from tests.performance_page.records import load
from tests.performance_page.sections import goal_table


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the page; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.performance_page", description="docs/performance.md from docs/records."
    )
    parser.add_argument("--check", action="store_true", help="compare only; 1 where the page differs")
    arguments = parser.parse_args(argv)
    records = load()
    present = page.PATH.read_text(encoding="utf-8")
    new = page.rendered(present, records)
    if arguments.check:
        difference = difflib.unified_diff(
            present.splitlines(), new.splitlines(), "docs/performance.md", "records", lineterm="", n=0
        )
        print("\n".join(difference) or "docs/performance.md says what the records say")
        return int(new != present)
    from tests.performance_page.pictures import draw

    page.PATH.write_text(new, encoding="utf-8")
    for path in (page.PATH, *draw(records)):
        print(path, file=sys.stderr)
    print(goal_table(records), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
