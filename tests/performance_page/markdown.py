"""Numbers and tables as markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["number", "ratio", "table"]


def number(value: float | None, unit: str = "") -> str:
    """Return three significant digits, all digits of whole numbers above; a dash for None."""
    if value is None:
        return "-"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{digits}f}{unit}"


def ratio(ours: float | None, theirs: float | None) -> str:
    """Return ours divided by theirs; a dash where one is missing."""
    return "-" if ours is None or not theirs else f"{ours / theirs:.2f}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, with a line feed at its end."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
