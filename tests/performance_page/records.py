"""The records that the page is made from: one JSON file a phase, and the reference's figures."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdm_rt.bench.record import gpu_slug

__all__ = ["FOLDER", "PHASES", "Records", "geometric_mean", "load"]

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "records"
PHASES = ("forward", "training", "layer", "decode", "start", "scaling", "accuracy")


@dataclass(frozen=True)
class Records:
    """What was measured.

    Parameters
    ----------
    reference : dict
        ``reference.json``: the published implementation.
    phases : dict
        The records of ``sdm-rt bench`` on a GPU of the reference's model, by phase.
    cpu : dict, optional
        ``cpu-op.json``, of examples/benchmark_cpu.py.
    """

    reference: dict[str, Any]
    phases: dict[str, dict[str, Any]] = field(default_factory=dict)
    cpu: dict[str, Any] | None = None

    @property
    def slug(self) -> str:
        """What the names of the GPU's records begin with."""
        return gpu_slug(self.reference["gpu"])

    def figures(self, phase: str, key: str | None = None) -> Any:
        """Return the figures of a phase, or None where it was not measured."""
        return self.phases.get(phase, {}).get(phase if key is None else key)

    def ours(self, phase: str, case: str, name: str) -> float | None:
        """Return our figure of a case."""
        value: float | None = (self.figures(phase) or {}).get(case, {}).get(name)
        return value

    def theirs(self, case: str, name: str) -> float | None:
        """Return the reference's figure of a case; ``step_ms`` is its plain forward and backward together."""
        figures = self.reference["cases"].get(case, {})
        if name == "step_ms":
            return round(figures["forward_ms"] + figures["backward_ms"], 2) if figures else None
        value: float | None = figures.get(name)
        return value


def load(folder: Path = FOLDER) -> Records:
    """Read the records of a folder.

    Raises
    ------
    ValueError
        If a record is of another GPU or phase than its name says.
    """
    reference = json.loads((folder / "reference.json").read_text(encoding="utf-8"))
    slug = gpu_slug(reference["gpu"])
    phases = {}
    for phase in PHASES:
        path = folder / f"{slug}-{phase}.json"
        if not path.exists():
            continue
        record = json.loads(path.read_text(encoding="utf-8"))
        if (record["phase"], gpu_slug(record["gpu"])) != (phase, slug):
            raise ValueError(f"{path.name}: is a record of phase {record['phase']} on {record['gpu']}")
        phases[phase] = record
    cpu = folder / "cpu-op.json"
    return Records(reference, phases, json.loads(cpu.read_text(encoding="utf-8")) if cpu.exists() else None)


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of positive numbers."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
