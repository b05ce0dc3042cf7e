from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sdm_rt.runtime import cache, cores
from sdm_rt.runtime.compile import CupyBuilder, Kernels
from tests.runtime.conftest import write_sources
from tests.runtime.cupy_without_gpu import HOPPER, SPEC, FakeModule

ROOT = Path(__file__).resolve().parents[2]


def environment(folder: Path, sources: Path, **more: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    settings = {"SDM_RT_CACHE_DIR": str(folder), "SDM_RT_KERNELS": str(sources), "OMP_NUM_THREADS": "1"}
    return {**kept, **settings, **more}


def start(*words: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out.strip()


def load_once(variables: dict[str, str]) -> str:
    return finish(start("-m", "tests.runtime.load_once", **variables)).split()[0]


def test_a_second_process_compiles_nothing_and_an_edit_does(tmp_path: Path) -> None:
    write_sources(tmp_path / "kernels")
    variables = environment(tmp_path / "cache", tmp_path / "kernels")
    assert [load_once(variables), load_once(variables)] == ["compiled", "cached"]
    header = tmp_path / "kernels" / "small.cuh"
    header.write_text(header.read_text().replace("SCALE * x", "SCALE + x"))
    assert [load_once(variables), load_once(variables)] == ["compiled", "cached"]


def test_a_moved_tree_keeps_the_cache(tmp_path: Path) -> None:
    write_sources(tmp_path / "kernels")
    assert load_once(environment(tmp_path / "cache", tmp_path / "kernels")) == "compiled"
    shutil.move(tmp_path / "kernels", tmp_path / "moved")
    shutil.move(tmp_path / "cache", tmp_path / "other cache")
    odd_spelling = tmp_path / "other cache" / ".." / "moved"
    assert load_once(environment(tmp_path / "other cache", odd_spelling)) == "cached"


def test_eight_processes_on_a_cold_cache_one_of_them_killed(tmp_path: Path) -> None:
    write_sources(tmp_path / "kernels")
    variables = environment(tmp_path / "cache", tmp_path / "kernels")
    doomed = start("-m", "tests.runtime.load_once", "--die", **variables)
    assert doomed.stdout is not None
    assert doomed.stdout.readline() == "compiling\n"
    others = [start("-m", "tests.runtime.load_once", **variables) for _ in range(7)]
    doomed.kill()
    doomed.communicate()
    results = [finish(process).split()[0] for process in others]
    assert "compiled" in results
    assert load_once(variables) == "cached"
    (entry,) = cache.entries(tmp_path / "cache" / cache.MANIFEST)
    (cubin,) = (tmp_path / "cache" / cache.CUBINS).iterdir()
    assert cubin.name == entry.cubin


def test_a_damaged_entry_is_rebuilt(kernels: Kernels, sources: Path, cache_folder: Path) -> None:
    kernels.load(SPEC, HOPPER)
    (cubin,) = (cache_folder / cache.CUBINS).iterdir()
    sound = cubin.read_bytes()
    for damaged in (sound[:-7], sound[:-1] + bytes([sound[-1] ^ 1]), b""):
        cubin.write_bytes(damaged)
        Kernels(CupyBuilder()).load(SPEC, HOPPER)
        assert cubin.read_bytes() == sound
    assert len(set(FakeModule.loaded)) == 1


@pytest.mark.parametrize("reason", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_disk_that_takes_nothing_only_warns_once(
    kernels: Kernels, sources: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    from cupy.cuda import _compiler_cache

    def refuse(*_: object, **__: object) -> None:
        raise OSError(reason, os.strerror(reason), "/some/random/name")

    cache._warn_unsaved.cache_clear()
    monkeypatch.setattr(_compiler_cache.tempfile, "NamedTemporaryFile", refuse)
    with pytest.warns(RuntimeWarning, match=os.strerror(reason)):
        kernels.load(SPEC, HOPPER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Kernels(CupyBuilder()).load(SPEC, HOPPER)
    assert len(FakeModule.loaded) == 2


@pytest.mark.usefixtures("sources")
def test_kernels_that_compile_side_by_side_share_one_folder_of_their_own(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the wanted one cannot be made. Slow to find that out, so that all of them are at it."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SDM_RT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(cores, "usable_cores", lambda: list(range(6)))
    made: list[str] = []

    def slow(**options: str) -> str:
        time.sleep(0.1)
        made.append(str(tmp_path / f"{options['prefix']}{len(made)}"))
        os.mkdir(made[-1])
        return made[-1]

    monkeypatch.setattr(cache, "tempfile", SimpleNamespace(mkdtemp=slow))
    specs = [replace(SPEC, defines=(("SCALE", str(scale)),)) for scale in range(2, 8)]
    with pytest.warns(RuntimeWarning, match="compile cache cannot be made") as warned:
        kernels.load_all(specs, HOPPER)
    assert len(made) == len(warned) == 1
    assert len(list((Path(made[0]) / cache.CUBINS).iterdir())) == 6


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_serves_and_warns(kernels: Kernels, sources: Path, cache_folder: Path) -> None:
    kernels.load(SPEC, HOPPER)
    cache._warn_unsaved.cache_clear()
    (cache_folder / cache.CUBINS).chmod(0o500)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Kernels(CupyBuilder()).load(SPEC, HOPPER)
    (sources / "small.cuh").write_text("__device__ float scaled(float x) { return -x; }\n")
    with pytest.warns(RuntimeWarning, match="could not be kept"):
        kernels.load(SPEC, HOPPER)


def test_a_cache_that_cannot_be_made_is_a_temporary_one_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("SDM_RT_CACHE_DIR", str(blocked / "cache"))
    with pytest.warns(RuntimeWarning, match="SDM_RT_CACHE_DIR") as caught:
        folder = cache.cache_folder()
    assert cache.cache_folder() == folder
    assert len(caught) == 1
    assert (folder / cache.CUBINS).is_dir()


def test_the_platforms_user_cache_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SDM_RT_CACHE_DIR", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache._user_cache() == tmp_path / "sdm_rt"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache._user_cache() == tmp_path / ".cache" / "sdm_rt"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache._user_cache() == tmp_path / "Library" / "Caches" / "sdm_rt"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache._user_cache() == tmp_path / "local" / "sdm_rt" / "cache"


@pytest.mark.parametrize("home", ["unwritable", "missing", "unset"])
def test_no_home_no_compiler_no_toolkit(tmp_path: Path, home: str) -> None:
    """Import, NVRTC and a compile work with nothing set, with at most one warning."""
    write_sources(tmp_path / "kernels")
    (tmp_path / "file").write_text("")
    variables = environment(
        tmp_path / "cache", tmp_path / "kernels", PATH="/nonexistent", CUDA_HOME="/nonexistent"
    )
    del variables["SDM_RT_CACHE_DIR"]
    places = {"unwritable": str(tmp_path / "file" / "home"), "missing": "/proc/nonexistent"}
    if home == "unset":
        del variables["HOME"]
        variables["XDG_CACHE_HOME"] = str(tmp_path / "file" / "cache")
    else:
        variables["HOME"] = places[home]
    process = start("-m", "tests.runtime.load_once", **variables)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert out.split()[0] == "compiled"
    assert err.count("Warning") <= 1, err


def test_import_makes_no_context_and_a_fork_works(tmp_path: Path) -> None:
    script = """
import os, sys
import torch, sdm_rt, sdm_rt.ops.decode
assert "cupy" not in sys.modules
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    memory = torch.zeros(4, 3)
    index = torch.tensor([[1]])
    one = torch.ones(1, 1)
    sdm_rt.sdm_decode_step(memory, index, one, torch.ones(1, 3), one, -one, index, one)
    os._exit(0 if bool((memory[1] == 1).all()) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    write_sources(tmp_path / "kernels")
    finish(start("-c", script, **environment(tmp_path / "cache", tmp_path / "kernels")))


def test_clear_removes_everything_unfinished_files_included(
    kernels: Kernels, sources: Path, cache_folder: Path
) -> None:
    kernels.load(SPEC, HOPPER)
    (cache_folder / cache.CUBINS / "tmp123").write_bytes(b"unfinished")
    assert cache.clear() > 1000
    for part in (cache.CUBINS, cache.MANIFEST):
        assert list((cache_folder / part).iterdir()) == []
    Kernels(CupyBuilder()).load(SPEC, HOPPER)
    assert len(cache.entries(cache_folder / cache.MANIFEST)) == 1


def test_clear_beside_another_one(
    kernels: Kernels, sources: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.load(SPEC, HOPPER)
    unlink = Path.unlink

    def taken(path: Path, missing_ok: bool = False) -> None:
        unlink(path)  # by the other process
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", taken)
    assert cache.clear() == 0
    assert list((cache_folder / cache.CUBINS).iterdir()) == []


def test_an_unreadable_manifest_entry_is_left_out(
    kernels: Kernels, sources: Path, cache_folder: Path
) -> None:
    kernels.load(SPEC, HOPPER)
    (cache_folder / cache.MANIFEST / "broken.json").write_text("{")
    (cache_folder / cache.MANIFEST / "other.json").write_text('{"entries": []}')
    assert len(cache.entries(cache_folder / cache.MANIFEST)) == 1
