"""The wheel: the kernels inside it, found from an installation outside the checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    builders = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    folder = tmp_path_factory.mktemp("dist")
    return Path(next(builders.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])))


def test_the_wheel_holds_the_package_and_the_kernels(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    kernels = {f"sdm_rt/kernels_cu/{path.name}" for path in (ROOT / "kernels_cu").iterdir()}
    tracked = ("*.py", "*.json", "py.typed")
    package = {
        path.relative_to(ROOT).as_posix() for pattern in tracked for path in (ROOT / "sdm_rt").rglob(pattern)
    }
    assert any(name.endswith(".cu") for name in kernels)
    assert kernels | package <= names
    strangers = {name for name in names if not name.startswith(("sdm_rt/", "sdm_rt-"))}
    assert strangers == set()


def test_kernels_are_found_inside_an_installation(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = "import sdm_rt.runtime.sources as sources; print(sources.find_kernels())"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r}); {code}"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(found) == site / "sdm_rt" / "kernels_cu"


def test_kernels_are_found_from_the_checkout() -> None:
    code = "import sdm_rt.runtime.sources as sources; print(sources.find_kernels())"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"]
    found = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True).stdout.strip()
    assert Path(found) == ROOT / "kernels_cu"
