"""The generated sections of docs/performance.md: a function of the records each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from tests.performance_page.goals import case_misses, goals
from tests.performance_page.markdown import number, ratio, table
from tests.performance_page.records import PHASES, Records, geometric_mean

__all__ = ["SECTIONS", "goal_table"]

NOT_MEASURED = "Not measured yet.\n"
PROFILED = ("flagship", "batch", "narrow", "many streams")
CURVES = {
    "T": "tokens, P = 2, W = R = 64, D = 1,024, S = 65,536",
    "P": "streams, T = 1,024",
    "W": "slots that a token writes and reads, T = 2,048",
    "S": "slots of a stream, T = 4,096",
}


def _timed(milliseconds: float | None, host: float | None) -> str:
    """Return a time with the time that the calling thread was busy."""
    return number(milliseconds) if host is None else f"{number(milliseconds)} ({number(host)})"


def _mean_row(columns: int, ratios: dict[int, list[float]]) -> list[str]:
    row = ["geometric mean", *[""] * (columns - 1)]
    for at, values in ratios.items():
        row[at] = f"{geometric_mean(values):.2f}" if values else "-"
    return row


def _comparison(records: Records, phase: str, plain: str, graph: str, columns: dict[str, str]) -> str:
    """Compare the cases of a phase with the reference's plain calls and graphs.

    Parameters
    ----------
    records : Records
        What was measured.
    phase, plain, graph : str
        The phase, and the names of its plain and its graph figures.
    columns : dict of str to str
        Further columns of ours, by title, and the names of their figures.
    """
    if not records.figures(phase):
        return NOT_MEASURED
    titles = [
        "case",
        *columns,
        "plain call (host)",
        "graph",
        "floor",
        "reference, plain",
        "reference, graph",
        "plain call / its graph",
        "plain call / its plain call",
    ]
    host, floor = plain.replace("_ms", "_host_ms"), {"training": "floor_ms"}.get(phase, "no_grad_floor_ms")
    rows, means = [], {len(titles) - 2: list[float](), len(titles) - 1: list[float]()}
    for case in records.reference["cases"]:
        ours = records.ours(phase, case, plain)
        if ours is None:
            continue
        theirs = records.theirs(case, plain), records.theirs(case, graph)
        for at, other in zip(means, reversed(theirs), strict=True):
            if other:
                means[at].append(ours / other)
        rows.append(
            [
                case,
                *(_timed(*_pair(records, phase, case, name)) for name in columns.values()),
                _timed(ours, records.ours(phase, case, host)),
                number(records.ours(phase, case, graph)),
                number(records.ours(phase, case, floor)),
                *map(number, theirs),
                ratio(ours, theirs[1]),
                ratio(ours, theirs[0]),
            ]
        )
    reasons = sorted(
        {
            f"Not captured as a graph: {case}: {row[error]}.\n"
            for case, row in records.figures(phase).items()
            for error in (graph.replace("_ms", "_error"),)
            if error in row
        }
    )
    return table(titles, [*rows, _mean_row(len(titles), means)]) + "".join(f"\n{line}" for line in reasons)


def _pair(records: Records, phase: str, case: str, name: str) -> tuple[float | None, float | None]:
    host = name.replace("_ms", "_host_ms")
    return records.ours(phase, case, name), records.ours(phase, case, host)


def machine(records: Records) -> str:
    """List the records: where, when and of what they are."""
    if not records.phases:
        return NOT_MEASURED
    rows = []
    for phase in PHASES:
        if phase not in records.phases:
            continue
        record = records.phases[phase]
        versions = record["versions"]
        schedule = f" --schedule {record['schedule']}" if "schedule" in record else ""
        cupy = versions.get("cupy-cuda13x") or versions.get("cupy-cuda12x", "-")
        rows.append(
            [
                f"`sdm-rt bench --phase {phase}{schedule}`",
                f"[{records.slug}-{phase}.json](records/{records.slug}-{phase}.json)",
                record["date"],
                f"{versions['torch']} (CUDA {versions['torch_cuda']})",
                cupy,
                versions["nvrtc"],
                f"`{record['fingerprint'][:12]}`",
            ]
        )
    columns = ["command", "record", "date", "PyTorch", "CuPy", "NVRTC", "sources"]
    bandwidths = {record["copy_tb_s"] for record in records.phases.values() if "copy_tb_s" in record}
    copied = " / ".join(f"{value:.2f}" for value in sorted(bandwidths))
    note = f"\nDevice copy of 1 GiB in these runs, read plus written: {copied} TB/s.\n" if copied else ""
    return f"GPU: {records.reference['gpu']}.\n\n" + table(columns, rows) + note


def goal_table(records: Records) -> str:
    """List every goal."""
    rows = [
        [
            goal.name + (f" ({goal.note})" if goal.note else ""),
            number(goal.ours, f" {goal.unit}" if goal.ours is not None else ""),
            number(goal.plain),
            number(goal.graph),
            number(goal.floor),
            goal.amount(goal.value),
            f"<= {goal.amount(goal.bound)}",
            goal.verdict(),
        ]
        for goal in goals(records)
    ]
    columns = ["figure", "ours", "reference, plain", "reference, graph", "floor", "value", "goal", ""]
    return table(columns, rows)


def misses(records: Records) -> str:
    """List what misses its goal, with its figure."""
    made = goals(records)
    lines = [
        f"{goal.name}{f' ({goal.note})' if goal.note else ''}: {goal.amount(goal.value)}, "
        f"goal {goal.amount(goal.bound)}"
        for goal in made
        if goal.met is False
    ]
    lines += case_misses(records)
    unknown = sum(goal.met is None for goal in made)
    if unknown == len(made):
        return NOT_MEASURED
    listed = "".join(f"- {line}\n" for line in lines) or "Nothing.\n"
    return listed + (f"\nGoals not measured yet: {unknown} of {len(made)}.\n" if unknown else "")


def forward(records: Records) -> str:
    """Compare calls without gradients."""
    return _comparison(records, "forward", "no_grad_ms", "no_grad_graph_ms", {})


def training(records: Records) -> str:
    """Compare training steps."""
    columns = {"forward (host)": "forward_ms", "backward (host)": "backward_ms"}
    return _comparison(records, "training", "step_ms", "graph_ms", columns)


def memory(records: Records) -> str:
    """Compare peak memory."""
    if not (records.figures("training") or records.figures("forward")):
        return NOT_MEASURED
    rows = []
    for case in records.reference["cases"]:
        row = [case]
        for phase, name in (("training", "peak_gib"), ("forward", "no_grad_peak_gib")):
            ours, theirs = records.ours(phase, case, name), records.theirs(case, name)
            row += [number(ours), number(theirs), ratio(ours, theirs)]
        rows.append(row)
    return table(["case", "training, GiB", "reference", "ratio", "no-grad, GiB", "reference", "ratio"], rows)


def kernels(records: Records) -> str:
    """List the kernels of training steps as the profiler saw them."""
    training = records.figures("training") or {}
    profiles = {case: training[case]["profile"] for case in PROFILED if "profile" in training.get(case, {})}
    if not profiles:
        return NOT_MEASURED
    theirs = records.reference["kernels_us"]
    names = dict.fromkeys(name for profile in profiles.values() for name in profile["kernels"])
    rows = []
    for name in names:
        row = [name]
        for case, profile in profiles.items():
            one = profile["kernels"].get(name)
            row.append(f"{one['launches']} x {number(one['us'])}" if one else "-")
            row += [number(theirs[case].get(name))] if case in theirs else []
        rows.append(row)
    header, busy = ["kernel, launches x us"], ["**any kernel, ms a step**"]
    for case, profile in profiles.items():
        header += [case, *(["reference"] if case in theirs else [])]
        busy += [number(profile["busy_ms"]), *(["-"] if case in theirs else [])]
    return table(header, [*rows, busy])


def decode(records: Records) -> str:
    """Compare decode steps and the cost of a launch."""
    rows = records.figures("decode")
    if not rows:
        return NOT_MEASURED
    record, theirs = records.phases["decode"], records.reference["decode"]
    low, high = theirs["python_us"]
    lines = [
        [
            str(row["P"]),
            number(row["python_us"]),
            f"{low} - {high}",
            number(row["gpu_us"]),
            number(theirs["gpu_us"].get(str(row["P"]))),
        ]
        for row in rows
    ]
    columns = ["P", "one call from Python, us", "reference", "GPU time in a graph, us", "reference"]
    text = table(columns, lines) + f"\nOne prepared launch from Python: {number(record['launch_us'])} us.\n"
    if "cold_start_s" in record:
        cold, warm = number(record["cold_start_s"]), number(record["warm_start_s"])
        text += f"First call beyond the imports: {cold} s with an empty cache, {warm} s with a filled one.\n"
    return text


def layer(records: Records) -> str:
    """Compare the whole layer, its decode token and top-k."""
    rows = records.figures("layer")
    if not rows:
        return NOT_MEASURED
    theirs = {row["T"]: row for row in records.reference["layer"]}
    lines = []
    for row in rows:
        other = theirs.get(row["T"], {})
        shown = {
            "step_ms": "forward and backward, plain calls",
            "cuda_graph_step_ms": "forward and backward, `cuda_graph=True`",
            "captured_step_ms": "forward and backward, captured by the caller",
            "no_grad_ms": "no-grad, plain calls",
            "captured_no_grad_ms": "no-grad, captured by the caller",
        }
        for name, what in shown.items():
            floor = row["op_step_floor_ms" if "step" in name else "op_no_grad_floor_ms"]
            times = _timed(row.get(name), row.get(name.replace("_ms", "_host_ms")))
            lines.append(
                [
                    f"T = {row['T']:,}: {what}",
                    times,
                    number(other.get(name)),
                    ratio(row.get(name), other.get(name)),
                    number(floor),
                ]
            )
    tokens = {row["B"]: row["gpu_ms"] for row in records.reference["layer_decode"]}
    for row in records.figures("layer", "layer_decode") or []:
        other_ms = tokens.get(row["B"])
        for prefix, what in (("", ""), ("cuda_graph_", ", `cuda_graph=True`")):
            if f"{prefix}gpu_ms" not in row:  # in older records
                continue
            gpu = row[f"{prefix}gpu_ms"]
            lines.append(
                [
                    f"one decode token, B = {row['B']}{what}",
                    _timed(gpu, row[f"{prefix}host_ms"]),
                    number(other_ms),
                    ratio(gpu, other_ms),
                    "-",
                ]
            )
    topk: dict[str, Any] = records.figures("layer", "topk") or {}
    if topk:
        other_ms = records.reference["topk"]["gpu_ms"]
        lines.append(
            [
                f"`product_key_topk`, {topk['rows']:,} rows, k = {topk['k']}",
                _timed(topk["gpu_ms"], topk["host_ms"]),
                number(other_ms),
                ratio(topk["gpu_ms"], other_ms),
                "-",
            ]
        )
    text = table(["", "ms (host)", "reference", "ratio", "floor of the op"], lines)
    return text + "".join(
        f"\nT = {row['T']:,}, {name.removesuffix('_error')}: {row[name]}.\n"
        for row in rows
        for name in row
        if name.endswith("_error")
    )


def start(records: Records) -> str:
    """List the first training step of new processes."""
    rows = records.figures("start")
    if not rows:
        return NOT_MEASURED
    other = records.reference["start"]
    lines = [[str(row["cores"]), number(row["cold_s"]), number(row["warm_s"])] for row in rows]
    text = table(["cores", "empty cache, s", "filled cache, s"], lines)
    return text + f"\nReference, {other['cores']} cores, its kernels' build: {other['cold_s']} s.\n"


def _growth(points: list[dict[str, Any]], name: str, key: str) -> tuple[str, str]:
    """Return how much a figure grows along its curve, and the largest growth from a point to the next."""
    known = [(point[name], point[key]) for point in points if key in point]
    if len(known) < 2:
        return "-", "-"
    steps = [(after[1] / before[1], before[0], after[0]) for before, after in itertools.pairwise(known)]
    factor, before, after = max(steps)
    return f"{known[-1][1] / known[0][1]:.1f}", f"{factor:.2f} ({before:,} to {after:,})"


def accuracy(records: Records) -> str:
    """List the relative errors of every output."""
    figures = records.figures("accuracy")
    if not figures:
        return NOT_MEASURED
    names = list(next(iter(figures.values())))
    rows = [[case, *(f"{errors[name]:.1e}" for name in names)] for case, errors in figures.items()]
    theirs = records.reference["accuracy"]
    known = ", ".join(f"{dtype} about {error:.1e}" for dtype, error in theirs.items())
    return table(["case", *names], rows) + f"\nReference, every output: {known}.\n"


def scaling(records: Records) -> str:
    """Show the scaling curves, how much each grows, and which points were left out."""
    curves = records.figures("scaling")
    if not curves:
        return NOT_MEASURED
    rows, left_out, pictures = [], [], []
    for name, points in curves.items():
        first, last = points[0][name], points[-1][name]
        for key, what in (("no_grad_ms", "no-grad"), ("step_ms", "training")):
            whole, most = _growth(points, name, key)
            rows.append([f"{name}, {what}", f"{first:,} to {last:,}", f"{last / first:,.0f}", whole, most])
        left_out += [
            f"- {name} = {point[name]:,}, {what}: {point[key]}\n"
            for point in points
            for key, what in (("no_grad_left_out", "no-grad"), ("step_left_out", "training"))
            if point.get(key)
        ]
        pictures.append(
            f"![Time against {name}](pictures/scaling-{name}.png)\n\n{name}: {CURVES.get(name, name)}.\n\n"
        )
    columns = ["curve", "values", "size grows by", "time grows by", "most from a point to the next"]
    omitted = "\nLeft out:\n\n" + "".join(left_out) if left_out else ""
    return "".join(pictures) + table(columns, rows) + omitted


def cpu(records: Records) -> str:
    """List the figures of the op on CPU tensors."""
    record = records.cpu
    if record is None:
        return NOT_MEASURED
    machine = record["machine"]
    rows = [
        [
            str(row["threads"]),
            row["dtype"],
            *(number(row[key]) for key in ("forward", "backward", "together", "no_grad")),
        ]
        for row in record["seconds"]
    ]
    sizes = ", ".join(f"{name} = {size:,}" for name, size in record["shape"].items())
    where = f"{machine['processor']}, {machine['cores']} cores, PyTorch {machine['torch']}, {record['date']}"
    columns = ["threads", "bank", "forward", "backward", "together", "no-grad forward"]
    return f"Seconds; {sizes}; {where}.\n\n" + table(columns, rows)


SECTIONS: dict[str, Callable[[Records], str]] = {
    "cpu": cpu,
    "machine": machine,
    "goals": goal_table,
    "misses": misses,
    "training": training,
    "forward": forward,
    "memory": memory,
    "layer": layer,
    "decode": decode,
    "start": start,
    "scaling": scaling,
    "accuracy": accuracy,
    "kernels": kernels,
}
