"""A step plan as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdm_rt.plan.launch import Launch

if TYPE_CHECKING:
    from sdm_rt.plan.launch import Dim3, LibraryCall
    from sdm_rt.plan.step_plan import StepPlan

__all__ = ["describe"]

HEADER = (
    *("launch", "kernel", "grid", "block", "cluster"),
    *("shared", "PDL", "regs", "blocks/SM", "waves", "MB", "floor us"),
)
TEXT_COLUMNS = 5  # left-aligned; the rest are figures


def _dimension(value: Dim3) -> str:
    sizes = list(value)
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return "x".join(map(str, sizes))


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.2f}"


def _volume(count: int) -> str:
    return f"{count / 1e9:.3f} GB" if count >= 1e9 else f"{count / 1e6:.3f} MB"


def _duration(microseconds: float) -> str:
    return f"{microseconds / 1e3:.3f} ms" if microseconds >= 1e3 else f"{microseconds:.2f} us"


def _row(plan: StepPlan, call: Launch | LibraryCall) -> tuple[str, ...]:
    floor = f"{plan.device.floor_us(call.floor_bytes):.2f}"
    if not isinstance(call, Launch):
        return (call.name, call.function, *("-",) * 8, _megabytes(call.bytes_moved), floor)
    resources, resident = call.resources(plan.device), call.occupancy(plan.device)
    flags = ("dependent",) * call.pdl + ("triggers",) * call.triggers
    return (
        call.name,
        f"{call.kernel.file}:{call.entry}",
        _dimension(call.grid),
        _dimension(call.block),
        _dimension(call.cluster),
        str(call.shared_memory + resources.static_shared),
        "+".join(flags) or "-",
        f"{resources.registers}{'' if resources.measured else '*'}",
        str(resident.blocks),
        f"{call.blocks / resident.wave(plan.device):.2f}",
        _megabytes(call.bytes_moved),
        floor,
    )


def _total_row(plan: StepPlan, label: str, calls: tuple[Launch | LibraryCall, ...]) -> tuple[str, ...]:
    moved, floor = sum(call.bytes_moved for call in calls), sum(call.floor_bytes for call in calls)
    return (label, *("",) * 9, _megabytes(moved), f"{plan.device.floor_us(floor):.2f}")


def _sections(plan: StepPlan) -> list[tuple[str, tuple[Launch | LibraryCall, ...]]]:
    before = f"before each slab of {plan.slab_steps} steps" if plan.slabs > 1 else "before the loop"
    sections = [(before, plan.prologue)]
    if plan.steps:
        indices = plan.step_indices()
        if plan.schedule == "persistent":
            end = plan.steps - 1
            ends = f"0 to {end}" if plan.order == "ascending" else f"{end} to 0"
            walk = f"steps {ends}" if len(indices) == 1 else f"each walk of {plan.walk_steps} steps, {ends}"
            sections.append((walk, plan.step))
        elif plan.steps == 1:
            sections.append((f"step {indices[0]}", plan.first_step))
        elif plan.first_step == plan.step:
            sections.append((f"each step, {indices[0]} to {indices[-1]}", plan.step))
        else:
            sections.append((f"step {indices[0]}, issued first", plan.first_step))
            sections.append((f"each step, {indices[1]} to {indices[-1]}", plan.step))
    sections.append(("after the loop", plan.epilogue))
    return [(title, calls) for title, calls in sections if calls]


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows if len(row) > 1) for column in range(len(HEADER))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < TEXT_COLUMNS else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append((row[0] if len(row) == 1 else "  ".join(cells)).rstrip())
    return lines


def describe(plan: StepPlan) -> str:
    """Return `plan` as text: device, shape, one table row a launch, totals, notes."""
    device = plan.device
    major, minor = device.compute_capability
    bandwidth = f"{device.memory_bandwidth / 1e12:.2f} TB/s {device.bandwidth_source}"
    shape = ", ".join(f"{field}={value}" for field, value in plan.shape.to_dict().items())
    rows: list[tuple[str, ...]] = [HEADER]
    for title, calls in _sections(plan):
        rows.append((f"[{title}]",))
        rows.extend(_row(plan, call) for call in calls)
        if len(calls) > 1:
            rows.append(_total_row(plan, "sum", calls))
    lines = [
        f"{plan.name} on {device.name} (compute capability {major}.{minor}, {device.sm_count} SMs, "
        f"{device.shared_memory_per_block:,} bytes of shared memory a block, "
        f"{bandwidth if device.memory_bandwidth else 'bandwidth unknown'})",
        f"shape: {shape}",
        *_aligned(rows),
        f"total: {plan.launch_count} launches, {plan.steps} steps, "
        f"{_volume(plan.total('bytes_moved'))} moved, floor {_volume(plan.total('floor_bytes'))} = "
        f"{_duration(device.floor_us(plan.total('floor_bytes')))}",
    ]
    if any(not launch.resources(device).measured for launch in plan.kernels()):
        lines.append("* a design budget that __launch_bounds__ enforces, not a measurement")
    notes = dict.fromkeys(f"{launch.name}: {launch.note}" for launch in plan.kernels() if launch.note)
    lines += [*notes, *plan.notes]
    return "\n".join(lines)
