"""The goals: ours beside the reference's plain calls, its graphs and the floor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.performance_page.records import Records, geometric_mean

__all__ = ["CASE_BOUND", "Goal", "case_misses", "goals"]

CASE_BOUND = 0.85  # of a training step against the reference's graph, in every case
PLAIN = {"training": "step_ms", "forward": "no_grad_ms"}
GRAPH = {"training": "graph_ms", "forward": "no_grad_graph_ms"}
FLOOR = {"training": "floor_ms", "forward": "no_grad_floor_ms"}
WHAT = {"training": "training step", "forward": "no-grad forward"}


@dataclass(frozen=True)
class Goal:
    """One row of the goal table.

    Parameters
    ----------
    name : str
        What is compared with what.
    unit : str
        Of the times or sizes.
    bound : float
        The most that ``value`` may be.
    ours, plain, graph, floor : float, optional
        Ours, the reference's plain call and its best mode, and the least possible.
    value : float, optional
        What the bound is of; None where it is not measured.
    shown : str
        How ``value`` is written: a ratio or an amount.
    note : str
        What else a reader must know.
    """

    name: str
    unit: str
    bound: float
    ours: float | None = None
    plain: float | None = None
    graph: float | None = None
    floor: float | None = None
    value: float | None = None
    shown: str = "ratio"
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None where it is not measured."""
        return None if self.value is None else self.value <= self.bound

    def amount(self, value: float | None) -> str:
        """Return what is bounded, as text."""
        if value is None:
            return "-"
        return f"{value:.2f}" if self.shown == "ratio" else f"{value:.2f} {self.unit}"

    def verdict(self) -> str:
        """Return whether it is met, in words."""
        return {None: "not measured", True: "met", False: "**missed**"}[self.met]


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or not theirs else ours / theirs


def _mean_goal(records: Records, phase: str, against: str, bound: float) -> Goal:
    """Compare all cases with the reference's plain calls or graphs, by the geometric mean."""
    cases = list(records.reference["cases"])
    ours = [records.ours(phase, case, PLAIN[phase]) for case in cases]
    measured = [value for value in ours if value is not None]
    mode = {"graph": GRAPH, "plain": PLAIN}[against][phase]
    name = f"{WHAT[phase]}, geometric mean of {len(cases)} cases, against {against}"
    if len(measured) < len(cases):
        note = f"{len(measured)} of {len(cases)} cases measured" if measured else ""
        return Goal(name, "ms", bound, note=note)
    theirs = {key: [records.theirs(case, key) for case in cases] for key in (PLAIN[phase], GRAPH[phase])}
    means = {
        key: geometric_mean([value for value in values if value is not None])
        for key, values in theirs.items()
    }
    floors = [records.ours(phase, case, FLOOR[phase]) for case in cases]
    known = [value for value in floors if value is not None]
    return Goal(
        name,
        "ms",
        bound,
        ours=geometric_mean(measured),
        plain=means[PLAIN[phase]],
        graph=means[GRAPH[phase]],
        floor=geometric_mean(known) if len(known) == len(cases) else None,
        value=geometric_mean(measured) / means[mode],
    )


def _worst_step(records: Records) -> Goal:
    ratios = {
        case: _ratio(records.ours("training", case, "step_ms"), records.theirs(case, "graph_ms"))
        for case in records.reference["cases"]
    }
    known = {case: value for case, value in ratios.items() if value is not None}
    name = "training step, the slowest case against graph"
    if not known:
        return Goal(name, "ms", CASE_BOUND)
    worst = max(known, key=lambda case: known[case])
    return Goal(
        name,
        "ms",
        CASE_BOUND,
        ours=records.ours("training", worst, "step_ms"),
        plain=records.theirs(worst, "step_ms"),
        graph=records.theirs(worst, "graph_ms"),
        floor=records.ours("training", worst, "floor_ms"),
        value=known[worst],
        note=worst,
    )


def _flagship(records: Records) -> Goal:
    ours = records.ours("training", "flagship", "step_ms")
    return Goal(
        "training step of flagship",
        "ms",
        32.0,
        ours=ours,
        plain=records.theirs("flagship", "step_ms"),
        graph=records.theirs("flagship", "graph_ms"),
        floor=records.ours("training", "flagship", "floor_ms"),
        value=ours,
        shown="amount",
    )


def _decode(records: Records) -> Iterator[Goal]:
    fastest, slowest_us = records.reference["decode"]["python_us"]
    rows = records.figures("decode") or []
    slowest = max(rows, key=lambda row: row["python_us"]) if rows else {}
    ours = slowest.get("python_us")
    yield Goal(
        "decode op from Python, against plain",
        "us",
        0.25,
        ours=ours,
        plain=float(fastest),
        value=_ratio(ours, fastest),
        note=f"the reference's shortest; its longest is {slowest_us} us" if ours else "",
    )
    tokens = {row["B"]: row for row in records.figures("layer", "layer_decode") or []}
    for theirs in records.reference["layer_decode"]:
        row = tokens.get(theirs["B"], {})
        for key, mode in (("gpu_ms", ""), ("cuda_graph_gpu_ms", " with `cuda_graph=True`")):
            if mode and key not in row:  # in older records
                continue
            yield Goal(
                f"decode token of the layer{mode}, B = {theirs['B']}, against plain",
                "ms",
                0.30,
                ours=row.get(key),
                plain=theirs["gpu_ms"],
                value=_ratio(row.get(key), theirs["gpu_ms"]),
            )


def _layer(records: Records) -> Iterator[Goal]:
    rows = {row["T"]: row for row in records.figures("layer") or []}
    for theirs in records.reference["layer"]:
        row = rows.get(theirs["T"], {})
        plain, graph = theirs["step_ms"], theirs.get("cuda_graph_step_ms")
        for against, other, bound in (("graph", graph, 0.70), ("plain", plain, 0.35)):
            if other is None:
                continue
            yield Goal(
                f"layer, T = {theirs['T']:,}, forward and backward, against {against}",
                "ms",
                bound,
                ours=row.get("step_ms"),
                plain=plain,
                graph=graph,
                floor=row.get("op_step_floor_ms"),
                value=_ratio(row.get("step_ms"), other),
            )


def _memory(records: Records) -> Iterator[Goal]:
    for phase, name, what in (
        ("training", "peak_gib", "training"),
        ("forward", "no_grad_peak_gib", "no-grad"),
    ):
        ratios = {
            case: _ratio(records.ours(phase, case, name), records.theirs(case, name))
            for case in records.reference["cases"]
        }
        known = {case: value for case, value in ratios.items() if value is not None}
        worst = max(known, key=lambda case: known[case]) if known else ""
        yield Goal(
            f"peak memory, {what}, the largest case",
            "GiB",
            1.0,
            ours=records.ours(phase, worst, name),
            plain=records.theirs(worst, name),
            value=known.get(worst),
            note=worst,
        )
    ours = records.ours("training", "flagship", "peak_gib")
    theirs = records.theirs("flagship", "peak_gib")
    yield Goal(
        "peak memory, training flagship", "GiB", 10.0, ours=ours, plain=theirs, value=ours, shown="amount"
    )


def _start(records: Records) -> Iterator[Goal]:
    rows = records.figures("start") or []
    empty: dict[str, float] = {}
    many = next((row for row in rows if row["cores"] > 2), empty)
    few = next((row for row in rows if row["cores"] == 2), empty)
    theirs = float(records.reference["start"]["cold_s"])
    cores = records.reference["start"]["cores"]
    first = f"first training step, empty cache, {many.get('cores', cores)} cores"
    for name, row, key, bound, plain in (
        (first, many, "cold_s", 10.0, theirs),
        ("first training step, empty cache, 2 cores", few, "cold_s", 25.0, None),
        ("first training step, filled cache", many or few, "warm_s", 1.0, None),
    ):
        yield Goal(name, "s", bound, ours=row.get(key), plain=plain, value=row.get(key), shown="amount")


def goals(records: Records) -> list[Goal]:
    """Return every goal with what was measured."""
    return [
        _mean_goal(records, "training", "graph", 0.70),
        _worst_step(records),
        _mean_goal(records, "training", "plain", 0.50),
        _flagship(records),
        _mean_goal(records, "forward", "graph", 0.75),
        _mean_goal(records, "forward", "plain", 0.40),
        *_decode(records),
        *_layer(records),
        *_memory(records),
        *_start(records),
    ]


def case_misses(records: Records) -> list[str]:
    """Return a line for each case above a bound that holds in every case."""
    lines = []
    for phase, name, other, bound, what in (
        ("training", "step_ms", "graph_ms", CASE_BOUND, "training step, against graph"),
        ("training", "peak_gib", "peak_gib", 1.0, "peak memory, training"),
        ("forward", "no_grad_peak_gib", "no_grad_peak_gib", 1.0, "peak memory, no-grad"),
    ):
        above = [
            f"{case} {value:.3f}"
            for case in records.reference["cases"]
            if (value := _ratio(records.ours(phase, case, name), records.theirs(case, other))) is not None
            and value > bound
        ]
        if above:
            lines.append(f"{what}, cases above {bound:.2f}: {', '.join(above)}")
    return lines
