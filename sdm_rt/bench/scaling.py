"""How time grows with one size while all others stay: tokens, streams, lanes, slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sdm_rt.bench.bounds import floor_bytes, needed_bytes
from sdm_rt.bench.cases import Case, make_inputs
from sdm_rt.bench.forward import no_grad_call
from sdm_rt.bench.timing import DEVICE, copy_bandwidth, floor_ms, measure
from sdm_rt.bench.training import LEAVES, measure_step
from sdm_rt.plan.device import DeviceModel

__all__ = ["CURVES", "bench_scaling"]

REPEATS = 3
MARGIN = 1.1  # of the memory need: the allocator rounds
FIGURES = ("no_grad_ms", "no_grad_floor_ms", "step_ms", "step_floor_ms")


_BASE = Case(streams=2, tokens=8192, chunk=64, lanes=64, head_dim=1024, slots=65536)


def _doubled(first: int, count: int) -> tuple[int, ...]:
    return tuple(first << i for i in range(count))


# The cases of each curve, by the value of the size that varies.
CURVES: dict[str, dict[int, Case]] = {
    "T": {T: replace(_BASE, tokens=T) for T in _doubled(1024, 8)},
    "P": {P: replace(_BASE, tokens=1024, streams=P) for P in _doubled(1, 7)},
    "W": {W: replace(_BASE, tokens=2048, lanes=W) for W in _doubled(8, 6)},
    "S": {S: replace(_BASE, tokens=4096, slots=S) for S in _doubled(4096, 9)},
}


def memory_obstacle(case: Case, model: DeviceModel, training: bool) -> str | None:
    """Say why a case does not fit the memory that is free; None where it fits."""
    needed = MARGIN * needed_bytes(case, model, training)
    free, _ = torch.cuda.mem_get_info()
    if needed <= free:
        return None
    return f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"


def point_figures(case: Case, model: DeviceModel, bandwidth: float) -> dict[str, Any]:
    """Time a call without gradients and a training step, or say why one is left out."""
    row: dict[str, Any] = {}
    obstacles = [memory_obstacle(case, model, training) for training in (False, True)]
    inputs = None if all(obstacles) else make_inputs(case, DEVICE)
    if inputs is None or obstacles[0]:
        row["no_grad_left_out"] = obstacles[0]
    else:
        row["no_grad_ms"], _ = measure(partial(no_grad_call, case, inputs, None), REPEATS)
        row["no_grad_floor_ms"] = floor_ms(floor_bytes(case, model, training=False), bandwidth)
    if inputs is None or obstacles[1]:
        row["step_left_out"] = obstacles[1]
    else:
        for leaf in LEAVES:
            getattr(inputs, leaf).requires_grad_()
        row["step_ms"] = measure_step(case, inputs, repeats=REPEATS)["step_ms"]
        row["step_floor_ms"] = floor_ms(floor_bytes(case, model, training=True), bandwidth)
    return row


def bench_scaling(curves: Mapping[str, Mapping[int, Case]], model: DeviceModel) -> dict[str, Any]:
    """Measure the curves, print a table and return the figures.

    Parameters
    ----------
    curves : mapping
        The cases of each curve, as ``CURVES``.
    model : DeviceModel
        The GPU, for the floor and the memory need.
    """
    bandwidth = copy_bandwidth()
    figures: dict[str, Any] = {}
    print("         value   no-grad ms    floor    step ms    floor")
    for name, curve in curves.items():
        figures[name] = []
        for value, case in curve.items():
            torch.cuda.empty_cache()
            row = {name: value} | point_figures(case, model, bandwidth)
            figures[name].append(row)
            columns = (row.get(key, float("nan")) for key in FIGURES)
            print(f"{name:4} {value:9} " + " ".join(f"{column:10.3f}" for column in columns), flush=True)
            for reason in filter(None, (row.get("no_grad_left_out"), row.get("step_left_out"))):
                print(f"  left out: {reason}")
    return {"copy_tb_s": round(bandwidth / 1e12, 3), "scaling": figures}
