"""docs/performance.md: prose written by hand, and between markers what the records say."""

from __future__ import annotations

import re
from pathlib import Path

from tests.performance_page.records import Records
from tests.performance_page.sections import SECTIONS

__all__ = ["PATH", "rendered"]

PATH = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
SECTION = re.compile(r"<!-- figures: (.*?) -->\n.*?<!-- end of figures -->", re.DOTALL)


def rendered(page: str, records: Records) -> str:
    """Return the page with every marked section as the records say.

    Raises
    ------
    ValueError
        If the page does not mark every section exactly once.
    """
    marked = SECTION.findall(page)
    if sorted(marked) != sorted(SECTIONS):
        raise ValueError(f"{PATH.name} must mark each of {sorted(SECTIONS)} once, it marks {sorted(marked)}")
    return SECTION.sub(
        lambda found: (
            f"<!-- figures: {found[1]} -->\n\n{SECTIONS[found[1]](records)}\n<!-- end of figures -->"
        ),
        page,
    )
