"""Builds: kept by content, shared between PDL variants, refused with a reason where there is no compiler."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sdm_rt.runtime.kernel import KernelSpec
from tests.emulator import build
from tests.emulator.build import Replacement, library

SCAN = KernelSpec("block_scan.cu", ("block_scan",), (("ROWS", "2"),))


@pytest.fixture
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(build, "_cache_folder", lambda: folder)
    return folder


def folders(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.is_dir())


def test_without_a_compiler_tests_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    reason = build.unavailable_reason.__wrapped__()
    assert "g++" in reason
    monkeypatch.setattr(build, "unavailable_reason", lambda: reason)
    with pytest.raises(pytest.skip.Exception, match=r"needs a C\+\+ compiler"):
        build.require()


def test_a_build_is_kept_by_its_content(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = library(SCAN, "access")
    assert first.parent.parent == private_cache
    monkeypatch.setattr(build, "execute", lambda *_, **__: pytest.fail("compiled again"))
    assert library(SCAN, "access") == first
    with_pdl = KernelSpec(SCAN.file, SCAN.entries, (("ROWS", "2"), ("SDM_PDL_WAIT", "1")))
    assert library(with_pdl, "access") == first


def test_every_ingredient_changes_the_key(private_cache: Path) -> None:
    three = KernelSpec(SCAN.file, SCAN.entries, (("ROWS", "3"),))
    fault = Replacement(SCAN.file, "valid ? sum : 0", "sum")
    built = [library(SCAN, "access"), library(SCAN, "address"), library(three, "access")]
    built.append(library(SCAN, "access", [fault]))
    assert len(set(built)) == 4
    assert sorted(path.parent for path in built) == folders(private_cache)


def test_of_two_builds_at_once_one_waits_for_the_other(
    private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build._compiler_version()  # asked of the compiler once a process
    ready, compile_it, links = threading.Barrier(2), build.execute, []

    def execute(command: Sequence[str], **options: Any) -> Any:
        links.append("-shared" in command)
        return compile_it(command, **options)

    def make(_: int) -> Path:
        ready.wait(timeout=60)
        return library(SCAN, "access")

    monkeypatch.setattr(build, "execute", execute)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(make, range(2))
    assert first == second
    assert sum(links) == 1
    assert [first.parent] == folders(private_cache)
    assert first.exists()


@pytest.mark.parametrize("file", ["block_scam.cu", "walk_wirte.cuh"])
def test_a_fault_in_a_file_that_is_missing_is_refused(file: str) -> None:
    with pytest.raises(ValueError, match=file):
        build.kernel_sources(SCAN, [Replacement(file, "a", "b")])


def test_a_fault_in_a_header_of_other_kernels_changes_nothing() -> None:
    fault = Replacement("walk_write.cuh", "a text that is not there", "")
    assert build.kernel_sources(SCAN, [fault]) == build.kernel_sources(SCAN)


def test_a_failed_build_leaves_nothing(private_cache: Path) -> None:
    broken = Replacement(SCAN.file, "valid ? sum : 0", "valid ?")
    with pytest.raises(build.CompileError, match=r"block_scan\.cu"):
        library(SCAN, "access", [broken])
    assert not folders(private_cache)
