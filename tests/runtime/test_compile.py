from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdm_rt.errors import KernelCompileError, MissingDependencyError, NotPrecompiledError
from sdm_rt.runtime import cache, cores, nvrtc, precompile
from sdm_rt.runtime import compile as compile_module
from sdm_rt.runtime.compile import CupyBuilder, Kernels
from sdm_rt.runtime.dependencies import load_cupy
from sdm_rt.runtime.device import Gpu
from sdm_rt.runtime.kernel import KernelSpec
from sdm_rt.runtime.sources import SETTLED_NS, expand
from tests.runtime.cupy_without_gpu import HOPPER, SMALL_CUH, SPEC, FakeModule, current

BROKEN = SMALL_CUH + "int broken = no_such_name;\n"
pytestmark = pytest.mark.usefixtures("sources")


def manifest(folder: Path) -> list[cache.Entry]:
    return cache.entries(folder / cache.MANIFEST)


def test_a_first_load_compiles_a_second_one_does_not(
    kernels: Kernels, cache_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = kernels.load(SPEC, HOPPER)
    assert capsys.readouterr().err == "sdm_rt: compiling small.cu for sm_90\n"
    assert kernels.load(SPEC, HOPPER) is module
    assert len(FakeModule.loaded) == 1
    (entry,) = manifest(cache_folder)
    assert (entry.file, entry.entries, entry.defines, entry.target) == (
        "small.cu",
        ("small",),
        "SCALE=2",
        "sm_90",
    )
    assert entry.size == len(FakeModule.loaded[0])
    assert (cache_folder / cache.CUBINS / entry.cubin).is_file()

    later_process = Kernels(CupyBuilder())
    later_process.load(SPEC, HOPPER)
    assert capsys.readouterr().err == ""
    assert FakeModule.loaded[0] == FakeModule.loaded[1]


def test_a_kernel_stays_loaded_as_long_as_it_is_kept(kernels: Kernels) -> None:
    """CuPy keeps it too, until somebody calls ``cupy.clear_memo()``; the fake does not."""
    module = kernels.load(SPEC, HOPPER)
    gc.collect()
    assert len(FakeModule.alive) == 1
    del module, kernels._good[SPEC, HOPPER.index]
    gc.collect()
    assert len(FakeModule.alive) == 0


def test_a_kernel_stays_loaded_when_its_source_is_edited(kernels: Kernels, sources: Path) -> None:
    """A caller's own CUDA graph may launch it."""
    kernels.load(SPEC, HOPPER)
    (sources / "small.cuh").write_text(SMALL_CUH.replace("SCALE * x", "SCALE - x"))
    kernels.load(SPEC, HOPPER)
    gc.collect()
    assert len(FakeModule.alive) == 2


def test_the_progress_line_says_how_many_are_left(
    kernels: Kernels, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [replace(SPEC, defines=(("SCALE", str(scale)),)) for scale in (2, 3)]
    kernels.load_all([*specs, specs[0]], HOPPER)
    assert sorted(capsys.readouterr().err.splitlines()) == [
        "sdm_rt: compiling small.cu for sm_90",
        "sdm_rt: compiling small.cu for sm_90, 1 more to go",
    ]
    monkeypatch.setenv("SDM_RT_PROGRESS", "0")
    kernels.load(replace(SPEC, defines=(("SCALE", "4"),)), HOPPER)
    assert capsys.readouterr().err == ""


def test_several_kernels_compile_side_by_side(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: [0, 1, 2])
    together = threading.Barrier(3)
    watched = compile_module.watched_cache

    def meet(*arguments: Any) -> cache.KernelCache:
        together.wait(timeout=30)  # breaks unless three compiles are under way
        return watched(*arguments)

    monkeypatch.setattr(compile_module, "watched_cache", meet)
    specs = [replace(SPEC, defines=(("SCALE", str(scale)),)) for scale in range(2, 5)]
    modules = kernels.load_all(specs, HOPPER)
    code = [module.functions["small"].code for module in modules]
    assert [f"#define SCALE {at}" in text for at, text in enumerate(code, start=2)] == [True] * 3
    assert len(set(FakeModule.loaded)) == 3
    assert [kernels.load(spec, HOPPER) for spec in specs] == modules


def test_threads_that_compile_have_the_gpu_current(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else CuPy, going back to GPU 0, which new threads have, would make a context on it."""
    devices: list[int] = []
    watched = compile_module.watched_cache

    def note(*arguments: Any) -> cache.KernelCache:
        devices.append(current.device)
        return watched(*arguments)

    monkeypatch.setattr(compile_module, "watched_cache", note)
    specs = [replace(SPEC, defines=(("SCALE", str(scale)),)) for scale in range(2, 5)]
    kernels.load_all(specs, replace(HOPPER, index=3))
    assert devices == [3, 3, 3]
    assert not hasattr(current, "device")  # of the calling thread


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[KernelSpec]:
    """What is compiled, in the order of its start."""
    started: list[KernelSpec] = []
    compile_one = CupyBuilder.compile

    def note(self: CupyBuilder, spec: KernelSpec, *rest: Any) -> Any:
        started.append(spec)
        return compile_one(self, spec, *rest)

    monkeypatch.setattr(CupyBuilder, "compile", note)
    return started


@pytest.mark.parametrize("broken_first", [False, True])
def test_one_broken_kernel_of_several_spoils_no_other(
    kernels: Kernels, sources: Path, compiled: list[KernelSpec], broken_first: bool
) -> None:
    (sources / "broken.cu").write_text(BROKEN)
    broken, absent = replace(SPEC, file="broken.cu"), replace(SPEC, file="absent.cu")
    order = [broken, SPEC] if broken_first else [SPEC, broken]
    with pytest.raises(KernelCompileError, match=r"broken\.cu.*\(3\): error"):
        kernels.load_all(order, HOPPER)
    assert sorted(compiled) == sorted(order)
    kernels.load(SPEC, HOPPER)
    for one in (broken, absent):
        with pytest.raises(KernelCompileError, match=one.file.replace(".", r"\.")):
            kernels.load_all([replace(SPEC, defines=(("SCALE", "7"),)), one], HOPPER)
    assert len(compiled) == 2  # nothing again, and nothing beside what cannot be


def test_a_broken_header_fails_once_for_all_kernels_that_have_it(
    kernels: Kernels, sources: Path, compiled: list[KernelSpec]
) -> None:
    (sources / "small.cuh").write_text(BROKEN)
    specs = [replace(SPEC, defines=(("SCALE", str(scale)),)) for scale in range(2, 6)]
    for _ in range(3):
        with pytest.raises(KernelCompileError, match=r"small\.cuh.*\(3\): error"):
            kernels.load_all(specs, HOPPER)
        assert len(compiled) == 4


def test_an_edit_beside_a_broken_kernel_is_not_lost(kernels: Kernels, sources: Path) -> None:
    first = loaded_and_edited(kernels, sources)
    (sources / "broken.cu").write_text(BROKEN)
    time.sleep(2e-9 * SETTLED_NS)
    with pytest.raises(KernelCompileError):
        kernels.load_all([replace(SPEC, file="broken.cu"), SPEC], HOPPER)
    assert not kernels.are_current([SPEC], first)


@pytest.mark.parametrize("error", [NotPrecompiledError, KeyboardInterrupt])
def test_an_edit_whose_compile_was_stopped_is_not_lost(
    kernels: Kernels, sources: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    first = loaded_and_edited(kernels, sources)
    with monkeypatch.context() as stopped:
        if error is NotPrecompiledError:
            stopped.setenv("SDM_RT_JIT", "0")
        else:
            stopped.setattr(CupyBuilder, "compile", raising(error))
        with pytest.raises(error):
            kernels.load(SPEC, HOPPER)
    assert not kernels.are_current([SPEC], first)
    kernels.load(SPEC, HOPPER)
    assert FakeModule.loaded[0] != FakeModule.loaded[1]


def test_what_was_just_edited_and_loaded_is_loaded(kernels: Kernels, sources: Path) -> None:
    kernels.load(SPEC, HOPPER)
    (sources / "small.cuh").write_text(SMALL_CUH.replace("SCALE * x", "SCALE + x"))
    assert not kernels.is_loaded(SPEC, HOPPER)
    kernels.load(SPEC, HOPPER)
    assert kernels.is_loaded(SPEC, HOPPER)
    time.sleep(2e-9 * SETTLED_NS)
    assert kernels.is_loaded(SPEC, HOPPER)
    first = kernels.generation
    (sources / "small.cuh").write_text(SMALL_CUH.replace("SCALE * x", "SCALE - x"))
    assert not kernels.is_loaded(SPEC, HOPPER)
    time.sleep(2e-9 * SETTLED_NS)
    assert not kernels.is_loaded(SPEC, HOPPER)
    assert not kernels.are_current([SPEC], first)  # the look did not pass for a load
    (sources / "small.cuh").unlink()
    assert not kernels.is_loaded(SPEC, HOPPER)


def test_errors_name_the_file_whose_name_ends_like_another(tmp_path: Path) -> None:
    files = (tmp_path / "rows.cuh", tmp_path / "walk_back_rows.cuh", tmp_path / "a.cu")
    source = SimpleNamespace(files=files)
    log = 'rows.cuh(3): error: x\nwalk_back_rows.cuh(288): error: f(int) in "a.cu(1)"\na.cu(7): warning'
    expected = f'{files[0]}(3): error: x\n{files[1]}(288): error: f(int) in "a.cu(1)"\n{files[2]}(7): warning'
    assert compile_module.with_paths(log, source) == expected  # type: ignore[arg-type]


def loaded_and_edited(kernels: Kernels, sources: Path) -> int:
    """Load SPEC, edit its header; return the generation between."""
    time.sleep(2e-9 * SETTLED_NS)
    kernels.load(SPEC, HOPPER)
    assert kernels.are_current([SPEC], kernels.generation)
    (sources / "small.cuh").write_text(SMALL_CUH.replace("SCALE * x", "SCALE + x"))
    time.sleep(2e-9 * SETTLED_NS)
    return kernels.generation


def raising(error: type[BaseException]) -> Any:
    def stop(*_arguments: Any) -> None:
        raise error

    return stop


def test_loaded_kernels_do_not_wait_for_a_compile(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    time.sleep(2e-9 * SETTLED_NS)
    module = kernels.load(SPEC, HOPPER)
    begun, done = threading.Event(), threading.Event()

    def wait(*_arguments: Any) -> Any:
        begun.set()
        assert done.wait(30)
        return module

    monkeypatch.setattr(CupyBuilder, "compile", wait)
    other = replace(SPEC, defines=(("SCALE", "7"),))
    thread = threading.Thread(target=lambda: kernels.load(other, HOPPER))
    thread.start()
    assert begun.wait(30)
    assert kernels.load_all([SPEC], HOPPER) == [module]
    done.set()
    thread.join()


def test_a_thread_that_outlives_the_main_one_still_compiles() -> None:
    """Python's pools take no work then; the thread does it by itself."""
    program = (
        "import threading, time\n"
        "from sdm_rt.runtime.cores import side_by_side\n"
        "def work():\n"
        "    time.sleep(0.5)\n"
        "    print(list(side_by_side(abs, [-1, -2, -3])))\n"
        "threading.Thread(target=work).start()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[1, 2, 3]\n"


def test_each_gpu_has_its_own_module(kernels: Kernels) -> None:
    first, second = kernels.load(SPEC, HOPPER), kernels.load(SPEC, replace(HOPPER, index=1))
    assert first is not second


def test_an_edited_header_is_compiled_at_the_next_call(kernels: Kernels, sources: Path) -> None:
    first = kernels.load(SPEC, HOPPER)
    (sources / "small.cuh").write_text(SMALL_CUH.replace("SCALE * x", "SCALE + x"))
    assert not kernels.is_loaded(SPEC, HOPPER)
    second = kernels.load(SPEC, HOPPER)
    assert second is not first
    assert FakeModule.loaded[0] != FakeModule.loaded[1]


def test_every_keeper_of_a_module_learns_of_an_edit(kernels: Kernels, sources: Path) -> None:
    time.sleep(2e-9 * SETTLED_NS)
    kernels.load(SPEC, HOPPER)
    first = kernels.generation
    assert kernels.are_current([SPEC], first)
    (sources / "small.cuh").write_text(SMALL_CUH.replace("SCALE * x", "SCALE + x"))
    assert not kernels.are_current([SPEC], first)
    time.sleep(2e-9 * SETTLED_NS)
    kernels.load(SPEC, HOPPER)  # by one keeper: the sources have been read again
    assert not kernels.are_current([SPEC], first)
    assert kernels.are_current([SPEC], kernels.generation)


def test_whoever_notes_learns_which_kernels_its_thread_uses(kernels: Kernels, sources: Path) -> None:
    other = replace(SPEC, defines=(("N", "7"), *SPEC.defines))
    with kernels.noting() as used:
        kernels.load(SPEC, HOPPER)
        thread = threading.Thread(target=lambda: kernels.are_current([other], 0))
        thread.start()
        thread.join()
        assert used == {SPEC}
        kernels.are_current([other], kernels.generation)
    kernels.are_current([replace(other, file="none.cu")], 0)
    assert used == {SPEC, other}


def test_touching_a_file_compiles_nothing(kernels: Kernels, sources: Path) -> None:
    module = kernels.load(SPEC, HOPPER)
    os.utime(sources / "small.cuh", (1, 1))
    assert kernels.load(SPEC, HOPPER) is module
    assert len(FakeModule.loaded) == 1


def test_a_first_build_that_fails_is_raised_with_the_path_and_not_tried_again(
    kernels: Kernels, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / "small.cuh").write_text(BROKEN)
    message = f'{sources / "small.cuh"}(3): error: identifier "no_such_name" is undefined'
    with pytest.raises(KernelCompileError) as caught:
        kernels.load(SPEC, HOPPER)
    assert message in str(caught.value)
    monkeypatch.setattr(CupyBuilder, "compile", lambda *a: pytest.fail("compiled a second time"))
    with pytest.raises(KernelCompileError) as again:
        kernels.load(SPEC, HOPPER)
    assert message in str(again.value)


def test_the_last_good_version_serves_while_the_source_is_broken(kernels: Kernels, sources: Path) -> None:
    good = kernels.load(SPEC, HOPPER)
    (sources / "small.cuh").write_text(BROKEN)
    with pytest.warns(RuntimeWarning, match=r"small\.cuh\(3\): error.*\n[^$]*goes on serving"):
        assert kernels.load(SPEC, HOPPER) is good
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.load(SPEC, HOPPER) is good
    (sources / "small.cuh").unlink()
    with pytest.warns(RuntimeWarning, match=r"cannot open 'small\.cuh'"):
        assert kernels.load(SPEC, HOPPER) is good
    (sources / "small.cuh").write_text(SMALL_CUH.replace("SCALE * x", "SCALE - x"))
    assert kernels.load(SPEC, HOPPER) is not good


def test_cupys_own_cache_is_given_back(kernels: Kernels, sources: Path) -> None:
    compiler = load_cupy().cuda.compiler
    users = compiler._kernel_cache_backend
    kernels.load(SPEC, HOPPER)
    assert compiler._kernel_cache_backend is users
    (sources / "small.cuh").write_text(BROKEN)
    with pytest.warns(RuntimeWarning):
        kernels.load(SPEC, HOPPER)
    assert compiler._kernel_cache_backend is users


def test_another_threads_compile_meanwhile_uses_its_own_cache(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = load_cupy().cuda.compiler
    asked: list[str] = []

    class Users:
        def load(self, name: str) -> bytes:
            asked.append(name)
            return b"theirs"

    users = Users()
    monkeypatch.setattr(compiler, "_kernel_cache_backend", users)
    watched = compile_module.watched_cache
    found: list[bytes] = []

    def watched_meanwhile(spec: Any, source: Any, gpu: Any, on_miss: Any) -> cache.KernelCache:
        def ask() -> None:
            found.append(compiler._kernel_cache_backend.load("a kernel of the user"))

        def on_miss_here() -> None:
            other = threading.Thread(target=ask)
            other.start()
            other.join()

        return watched(spec, source, gpu, on_miss_here)

    monkeypatch.setattr(compile_module, "watched_cache", watched_meanwhile)
    kernels.load(SPEC, HOPPER)
    assert (asked, found) == (["a kernel of the user"], [b"theirs"])
    assert compiler._kernel_cache_backend is users


def test_a_cache_that_another_thread_swaps_meanwhile_does_no_harm(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread reads CuPy's cache, sets its own, and sets what it has read when all is over."""
    compiler = load_cupy().cuda.compiler
    users, watched, found = compiler._kernel_cache_backend, compile_module.watched_cache, []

    def watched_meanwhile(spec: Any, source: Any, gpu: Any, on_miss: Any) -> cache.KernelCache:
        def swap() -> None:
            found.append(compiler._kernel_cache_backend)
            compiler._set_kernel_cache_backend(users)

        return watched(spec, source, gpu, swap)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(compile_module, "watched_cache", watched_meanwhile)
        kernels.load(SPEC, HOPPER)
    try:
        compiler._set_kernel_cache_backend(found[0])
        kernels.load(replace(SPEC, defines=(("SCALE", "9"),)), HOPPER)
        assert compiler._kernel_cache_backend.load("a kernel of the user") is None
    finally:
        compiler._set_kernel_cache_backend(users)


def test_a_precompiled_kernel_equals_the_run_time_build(
    kernels: Kernels,
    sources: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "precompiled"
    ((_, _, path, built),) = precompile.precompile([SPEC], ["sm_90"], folder)
    assert built
    kernels.load(SPEC, HOPPER)
    (built_now,) = FakeModule.loaded
    assert path.read_bytes() in (built_now, built_now + b"\0")  # CuPy takes the last byte for a string's end
    capsys.readouterr()

    monkeypatch.setenv("SDM_RT_PRECOMPILED", str(folder))
    monkeypatch.setenv("SDM_RT_JIT", "0")
    Kernels(CupyBuilder()).load(SPEC, HOPPER)
    assert FakeModule.loaded[1:] == [path.read_bytes()]
    assert capsys.readouterr().err == ""


def test_only_precompiled_kernels_without_run_time_compilation(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDM_RT_JIT", "0")
    with pytest.raises(
        NotPrecompiledError, match=r"small\.cu -DSCALE=2 for sm_90 .*SDM_RT_PRECOMPILED is not set"
    ):
        kernels.load(SPEC, HOPPER)
    monkeypatch.setenv("SDM_RT_PRECOMPILED", str(tmp_path))
    with pytest.raises(NotPrecompiledError, match="sdm-rt precompile --arch sm_90"):
        kernels.load(SPEC, HOPPER)


def test_a_damaged_precompiled_file_is_not_used(
    kernels: Kernels, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((_, _, path, _),) = precompile.precompile([SPEC], ["sm_90"], tmp_path / "precompiled")
    path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.setenv("SDM_RT_PRECOMPILED", str(path.parent))
    monkeypatch.setenv("SDM_RT_JIT", "0")
    with pytest.raises(NotPrecompiledError):
        kernels.load(SPEC, HOPPER)
    ((_, _, path, built),) = precompile.precompile([SPEC], ["sm_90"], path.parent)
    assert built
    kernels.load(SPEC, HOPPER)


def test_every_ingredient_of_the_precompiled_key_counts(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = expand(SPEC, sources)
    keys = [precompile.key(source, "sm_90"), precompile.key(source, "sm_100")]
    keys.append(precompile.key(replace(source, digest="0"), "sm_90"))
    with monkeypatch.context() as patch:
        patch.setattr(precompile, "SCHEMA", precompile.SCHEMA + 1)
        keys.append(precompile.key(source, "sm_90"))
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "-lineinfo"))
    keys.append(precompile.key(source, "sm_90"))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("version", "capability", "newest"), [((12, 4), (10, 0), "9.0"), ((12, 8), (12, 1), "12.0")]
)
def test_an_nvrtc_older_than_the_gpu_is_one_message(
    kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, int],
    capability: tuple[int, int],
    newest: str,
) -> None:
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: version)
    gpu = Gpu(0, "fake new GPU", capability)
    with pytest.raises(MissingDependencyError) as caught:
        kernels.load(SPEC, gpu)
    message = str(caught.value)
    assert "{}.{}".format(*capability) in message
    assert f"at most {newest}" in message
    assert "pip install" in message
    assert "nvidia-cuda-nvrtc" in message


def test_a_specification_is_checked() -> None:
    for fields in [("a.cuh", ("a",)), ("a.cu", ()), ("a.cu", ("a",), (("B", "1"), ("A", "1")))]:
        with pytest.raises(ValueError, match=r"a\.cu"):
            KernelSpec(*fields)
