"""What a compiled kernel takes of an SM: registers, static shared memory, spills, threads.

Two sources, always told apart: ``resources.json``, written from NVRTC's own log by a script and held by CI,
and the budgets of what the table does not list: the kernels of the reference schedule, which never run, and
variants for which there is no room (their ``__launch_bounds__`` cap the registers, so a budget is an upper
bound that the compiler is held to, not a measurement).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sdm_rt.plan.device import DeviceModel
from sdm_rt.runtime.kernel import KernelSpec

__all__ = ["BUDGETS", "FIGURES", "TABLE", "KernelResources", "kernel_resources", "resource_key"]

TABLE = Path(__file__).with_name("resources.json")
FIGURES = ("registers", "static_shared", "spill_stores", "spill_loads")  # of a kernel on a target, in order


@dataclass(frozen=True)
class KernelResources:
    """Registers and static shared memory of one kernel on one target.

    Parameters
    ----------
    registers : int
        Registers of a thread.
    static_shared : int
        Static shared memory of a block, bytes.
    spill_stores, spill_loads : int
        Bytes of register spills of a thread.
    measured : bool
        True for figures read from NVRTC's log, False for a design budget.
    """

    registers: int
    static_shared: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    measured: bool = True


# (threads of the largest block, resident blocks per SM) of __launch_bounds__, by kernel file.
BUDGETS: dict[str, tuple[int, int]] = {
    "reference_gwr.cu": (256, 4),
    "reference_du_update.cu": (256, 1),
    "reference_phase_a.cu": (256, 3),
    "reference_gds.cu": (256, 4),
    "reference_column_sum.cu": (256, 8),
    "reference_phase1_backward_pairs.cu": (512, 2),
    "topk.cu": (128, 4),
}

# The most static shared memory, bytes, of files whose variants are without number: topk.cu is compiled for
# any factors and k, so the table holds the usual ones and plans of others take the budget.
STATIC_BUDGETS: dict[str, int] = {"topk.cu": 28672}


def resource_key(spec: KernelSpec, entry: str) -> str:
    """Return the table's key of one entry of ``spec``: ``entry|-Dname=value -Dname=value``."""
    return f"{entry}|{' '.join(spec.options)}"


@cache
def _table() -> dict[str, dict[str, dict[str, list[int]]]]:
    table: dict[str, dict[str, dict[str, list[int]]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def _budget(file: str, device: DeviceModel) -> KernelResources:
    threads, blocks = BUDGETS[file]
    # ptxas gives a thread the registers that keep `blocks` blocks resident, in whole allocation units.
    per_thread = device.registers_per_sm // (threads * blocks) // 8 * 8
    return KernelResources(min(per_thread, 255), STATIC_BUDGETS.get(file, 0), measured=False)


def _target(targets: dict[str, list[int]], device: DeviceModel) -> str | None:
    """Return the newest target that is not newer than the device."""
    capability = {target: divmod(int(target.removeprefix("sm_")), 10) for target in targets}
    known = [target for target in targets if capability[target] <= device.compute_capability]
    return max(known, key=lambda target: capability[target], default=None)


def kernel_resources(spec: KernelSpec, entry: str, device: DeviceModel) -> KernelResources:
    """Return the resources of ``entry`` of ``spec`` on ``device``.

    Parameters
    ----------
    spec : KernelSpec
        The translation unit with its ``-D`` options.
    entry : str
        One of its kernels.
    device : DeviceModel
        The GPU; a target without own figures takes those of the newest older one.

    Returns
    -------
    KernelResources
        Measured figures where the table lists the kernel, else the budget of its file.

    Raises
    ------
    LookupError
        Where neither source knows the kernel, naming the missing key.
    """
    key = resource_key(spec, entry)
    targets = _table().get(spec.file, {}).get(key, {})
    if not targets and spec.file in BUDGETS:
        return _budget(spec.file, device)
    target = _target(targets, device)
    if target is None:
        raise LookupError(f"{TABLE.name} has no figures of {spec.file} {key} for {device.arch}")
    registers, static_shared, spill_stores, spill_loads = targets[target]
    return KernelResources(registers, static_shared, spill_stores, spill_loads)
