from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import sdm_rt
from sdm_rt.errors import KernelCompileError
from sdm_rt.runtime import sources as module
from sdm_rt.runtime.kernel import KernelSpec
from sdm_rt.runtime.nvrtc import compile_source
from sdm_rt.runtime.sources import SourceTree, expand, find_kernels
from tests.runtime.cupy_without_gpu import SMALL_CUH, SPEC


def test_a_header_is_expanded_once(sources: Path) -> None:
    (sources / "twice.cuh").write_text('#include "small.cuh"\n  #  include "small.cuh"\nint after;\n')
    (sources / "small.cu").write_text('#include "small.cuh"\n#include "twice.cuh"\n#include <cuda_fp16.h>\n')
    source = expand(SPEC, sources)
    assert source.text.count("scaled") == 1
    assert "#include <cuda_fp16.h>" in source.text
    assert '"small.cuh"' in source.text
    assert 'include "' not in source.text
    assert [path.name for path in source.files] == ["small.cu", "small.cuh", "twice.cuh"]


def test_macros_come_first(sources: Path) -> None:
    assert expand(SPEC, sources).text.startswith("#define SCALE 2\n#line 1")


@pytest.mark.parametrize(("file", "line"), [("small.cu", 3), ("small.cuh", 3)])
def test_errors_name_the_file_and_its_line(sources: Path, file: str, line: int) -> None:
    with (sources / file).open("a") as opened:
        opened.write("int broken = no_such_name;\n")
    with pytest.raises(KernelCompileError) as caught:
        compile_source(expand(SPEC, sources).text, "sm_90", "small.cu")
    assert f'{file}({line}): error: identifier "no_such_name" is undefined' in str(caught.value)


def test_the_digest_is_of_the_content_alone(sources: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "moved"
    shutil.copytree(sources, moved)
    before, after = expand(SPEC, sources), expand(SPEC, moved)
    assert before.digest == after.digest
    assert str(tmp_path) not in before.text
    (moved / "small.cuh").write_text(SMALL_CUH.replace("SCALE * x", "x * SCALE"))
    other_macro = KernelSpec(SPEC.file, SPEC.entries, (("SCALE", "3"),))
    digests = {before.digest, expand(SPEC, moved).digest, expand(other_macro, sources).digest}
    assert len(digests) == 3


def test_a_missing_header_names_the_including_line(sources: Path) -> None:
    (sources / "small.cuh").write_text('\n#include "absent.cuh"\n')
    with pytest.raises(KernelCompileError, match=r"small\.cuh\(2\): cannot open 'absent\.cuh'"):
        expand(SPEC, sources)


def test_the_checkout_is_found_without_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SDM_RT_KERNELS", raising=False)
    assert (find_kernels() / "decode.cu").is_file()


def test_the_copy_in_the_package_comes_before_the_checkout(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SDM_RT_KERNELS")
    monkeypatch.setattr(module, "_PACKAGED", sources)
    assert find_kernels() == sources


def test_a_folder_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDM_RT_KERNELS", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="set by SDM_RT_KERNELS"):
        find_kernels()


def test_the_package_folder_is_where_the_wheel_puts_it() -> None:
    assert Path(sdm_rt.__file__).parent / "kernels_cu" == module._PACKAGED


def test_an_edit_is_seen_even_within_one_tick_of_file_times(sources: Path) -> None:
    tree = SourceTree()
    first = tree.source(SPEC)
    edited = SMALL_CUH.replace("SCALE * x", "SCALE + x")
    assert len(edited) == len(SMALL_CUH)
    (sources / "small.cuh").write_text(edited)
    assert not tree.is_current(SPEC)
    assert tree.source(SPEC).digest != first.digest


def test_a_file_of_a_clock_that_is_ahead_is_read_once(sources: Path) -> None:
    ahead = time.time() + 86400
    for path in sources.iterdir():
        os.utime(path, (ahead, ahead))
    tree = SourceTree()
    first = tree.source(SPEC)
    assert tree.source(SPEC) is first
    (sources / "small.cuh").write_text(SMALL_CUH.replace("SCALE * x", "SCALE + x"))
    assert tree.source(SPEC).digest != first.digest


def test_untouched_files_are_read_once(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLED_NS", -(10**12))
    tree = SourceTree()
    first = tree.source(SPEC)
    assert tree.is_current(SPEC)
    assert tree.source(SPEC) is first
    monkeypatch.setenv("SDM_RT_KERNELS", f"{sources}/")
    assert not tree.is_current(SPEC)
    assert tree.source(SPEC).digest == first.digest


def test_a_file_of_several_kernels_is_looked_at_once(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLED_NS", -(10**12))
    tree = SourceTree()
    (sources / "other.cu").write_text('#include "small.cuh"\n')
    specs = [SPEC, KernelSpec("other.cu", ("other",)), KernelSpec("other.cu", ("other",), (("SCALE", "3"),))]
    assert not tree.are_current(specs)
    for spec in specs:
        tree.source(spec)
    looked_at: list[str] = []

    def stat(path: str) -> os.stat_result:
        looked_at.append(Path(path).name)
        return os.lstat(path)

    monkeypatch.setattr(module, "os", SimpleNamespace(environ=os.environ, stat=stat))
    assert tree.are_current(specs)
    assert sorted(looked_at) == ["other.cu", "small.cu", "small.cuh"]
    monkeypatch.undo()
    (sources / "other.cu").write_text('#include "small.cuh"\nint more;\n')
    os.utime(sources / "other.cu", (1, 1))
    monkeypatch.setenv("SDM_RT_KERNELS", str(sources))
    assert tree.is_current(SPEC)
    assert not tree.are_current(specs)
    (sources / "small.cuh").unlink()
    assert not tree.is_current(SPEC)


def test_sources_of_an_installed_package_are_not_watched(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SDM_RT_KERNELS")
    monkeypatch.setattr(module, "_PACKAGED", sources)
    tree = SourceTree()
    tree.source(SPEC)
    (sources / "small.cuh").write_text("#error\n")
    assert tree.is_current(SPEC)


def test_lines_end_where_the_compiler_ends_them(sources: Path) -> None:
    """Other characters that end a line of text stand in comments, and end no comment."""
    for character in "\x0b\x0c\x1c\x85\u2028":
        (sources / "small.cu").write_text(f"int x; // {character} y\nint z;\n", encoding="utf-8")
        text = expand(KernelSpec("small.cu", ("small",)), sources).text
        assert text == f'#line 1 "small.cu"\nint x; // {character} y\nint z;\n'
    (sources / "small.cu").write_bytes(b"\xef\xbb\xbfint x;\r\nint y;\r\n")
    assert expand(KernelSpec("small.cu", ("small",)), sources).text == '#line 1 "small.cu"\nint x;\nint y;\n'


@pytest.mark.parametrize("kind", ["latin-1", "folder", "loop"])
def test_a_header_that_cannot_be_read_names_the_including_line(sources: Path, kind: str) -> None:
    (sources / "small.cu").write_text('int x;\n#include "odd.cuh"\n')
    odd = sources / "odd.cuh"
    if kind == "latin-1":
        odd.write_bytes("// für".encode("latin-1"))
    elif kind == "folder":
        odd.mkdir()
    else:
        odd.symlink_to(odd)
    with pytest.raises(KernelCompileError, match=r"small\.cu\(2\): cannot read 'odd\.cuh' in"):
        expand(KernelSpec("small.cu", ("small",)), sources)
