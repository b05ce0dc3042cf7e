"""The table of compiled kernels' resources: lookups, targets, budgets, and that the two never mix."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from sdm_rt.plan import kernel_resources as module
from sdm_rt.plan.device import preset
from sdm_rt.plan.kernel_resources import (
    BUDGETS,
    STATIC_BUDGETS,
    TABLE,
    KernelResources,
    kernel_resources,
    resource_key,
)
from sdm_rt.plan.write_resources import SOURCES, code_digest
from sdm_rt.runtime.kernel import KernelSpec
from sdm_rt.runtime.sources import find_kernels

SPEC = KernelSpec("decode.cu", ("decode",), (("BANK", "Bf16"), ("VECTOR", "8")))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    content = {
        "decode.cu": {
            "decode|-DBANK=Bf16 -DVECTOR=8": {
                "sm_100": [50, 16, 0, 0],
                "sm_80": [40, 16, 0, 0],
                "sm_86": [41, 16, 4, 8],
            }
        }
    }
    monkeypatch.setattr(module, "_table", lambda: content)


def test_key() -> None:
    assert resource_key(SPEC, "decode") == "decode|-DBANK=Bf16 -DVECTOR=8"
    assert resource_key(KernelSpec("x.cu", ("x",)), "x") == "x|"


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("capability", "figures"),
    [
        ((8, 0), (40, 16, 0, 0)),
        ((8, 6), (41, 16, 4, 8)),
        ((8, 9), (41, 16, 4, 8)),
        ((9, 0), (41, 16, 4, 8)),
        ((10, 0), (50, 16, 0, 0)),
        ((11, 0), (50, 16, 0, 0)),
    ],
)
def test_a_target_without_figures_takes_those_of_the_nearest_older_one(
    capability: tuple[int, int], figures: tuple[int, int, int, int]
) -> None:
    device = dataclasses.replace(preset("a100"), compute_capability=capability)
    assert kernel_resources(SPEC, "decode", device) == KernelResources(*figures, measured=True)


@pytest.mark.usefixtures("table")
def test_missing_figures_are_an_error_that_names_them() -> None:
    older = dataclasses.replace(preset("a100"), compute_capability=(7, 5))
    with pytest.raises(LookupError, match=r"decode\.cu decode\|-DBANK=Bf16 -DVECTOR=8 for sm_75"):
        kernel_resources(SPEC, "decode", older)
    other = KernelSpec("decode.cu", ("decode",), (("BANK", "float"),))
    with pytest.raises(LookupError, match="-DBANK=float"):
        kernel_resources(other, "decode", preset("a100"))
    with pytest.raises(LookupError, match=r"unknown\.cu"):
        kernel_resources(KernelSpec("unknown.cu", ("x",)), "x", preset("a100"))


def test_budgets_are_what_launch_bounds_enforce() -> None:
    spec = KernelSpec("reference_gwr.cu", ("gwr",))
    assert kernel_resources(spec, "gwr", preset("h100")) == KernelResources(64, measured=False)
    update = KernelSpec("reference_du_update.cu", ("du_update",))
    assert kernel_resources(update, "du_update", preset("h100")).registers == 255


def test_only_a_file_with_variants_without_number_has_figures_and_a_budget() -> None:
    measured = json.loads(TABLE.read_text(encoding="utf-8"))
    assert set(measured) & set(BUDGETS) == set(STATIC_BUDGETS)


def test_the_table_was_written_from_these_sources() -> None:
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    written: dict[str, str] = json.loads(SOURCES.read_text(encoding="utf-8"))
    assert set(written) == set(table)
    stale = [file for file, digest in written.items() if digest != code_digest(file)]
    assert not stale, f"python -m sdm_rt.plan.write_resources {' '.join(stale)}"


def test_the_digest_is_that_of_code_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kernels"
    shutil.copytree(find_kernels(), folder)
    monkeypatch.setenv("SDM_RT_KERNELS", str(folder))
    digest, header = code_digest("gather.cu"), folder / "ptx.cuh"
    text = header.read_text(encoding="utf-8")
    header.write_text("// A comment.\n" + text.replace("\n", "\n\n"), encoding="utf-8")
    assert code_digest("gather.cu") == digest
    header.write_text(text + "\nstruct New {};\n", encoding="utf-8")
    assert code_digest("gather.cu") != digest


def test_the_table_has_figures_of_one_form() -> None:
    for kernels in json.loads(TABLE.read_text(encoding="utf-8")).values():
        for key, targets in kernels.items():
            assert "|" in key
            for target, (registers, static_shared, spill_stores, spill_loads) in targets.items():
                assert target.startswith("sm_")
                assert 1 <= registers <= 255
                assert min(static_shared, spill_stores, spill_loads) >= 0
