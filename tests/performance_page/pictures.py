"""The scaling curves as pictures: time beside its floor, both axes logarithmic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from tests.performance_page.records import Records

__all__ = ["FOLDER", "draw"]

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
TITLES = {"T": "tokens T", "P": "streams P", "W": "slots a token writes and reads, W = R", "S": "slots S"}
LINES = (
    ("step_ms", "training step", "o-", "#1f5fa8"),
    ("step_floor_ms", "its floor", "--", "#1f5fa8"),
    ("no_grad_ms", "no-grad forward", "s-", "#d9772b"),
    ("no_grad_floor_ms", "its floor", "--", "#d9772b"),
)


def _short(value: float, _position: int | None = None) -> str:
    """Return 65536 as 64k."""
    for unit, letter in ((2**20, "M"), (2**10, "k")):
        if value >= unit and value % unit == 0:
            return f"{value / unit:.0f}{letter}"
    return f"{value:g}"


def _curve(path: Path, name: str, points: list[dict[str, Any]], gpu: str) -> None:
    figure = Figure(figsize=(6, 3.8), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for key, label, style, color in LINES:
        known = [(point[name], point[key]) for point in points if key in point]
        if known:
            axes.plot(*zip(*known, strict=True), style, color=color, markersize=4, linewidth=1.3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator([point[name] for point in points]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(_short))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
    axes.set_xlabel(TITLES.get(name, name))
    axes.set_ylabel("milliseconds")
    axes.set_title(gpu, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Software": None})


def draw(records: Records, folder: Path = FOLDER) -> list[Path]:
    """Write a picture for each scaling curve; return the files.

    Parameters
    ----------
    records : Records
        What was measured.
    folder : Path
        Where the pictures go; made where it is missing.
    """
    curves = records.figures("scaling") or {}
    paths = []
    for name, points in curves.items():
        folder.mkdir(parents=True, exist_ok=True)
        paths.append(folder / f"scaling-{name}.png")
        _curve(paths[-1], name, points, records.reference["gpu"])
    return paths
