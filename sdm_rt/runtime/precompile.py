"""Kernels compiled ahead of time: a folder of machine code that a run uses read-only.

An entry is ``<key>.cubin`` beside ``<key>.json``. The key is a digest of the expanded source, the options,
the target and a schema number: content alone, no paths, no times.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path

from sdm_rt.runtime.cache import Entry, write_atomic
from sdm_rt.runtime.cores import side_by_side
from sdm_rt.runtime.kernel import KernelSpec
from sdm_rt.runtime.nvrtc import OPTIONS, compile_source, nvrtc_version, offline_options
from sdm_rt.runtime.sources import Source, expand, find_kernels

__all__ = ["SCHEMA", "find", "key", "new_entry", "precompile"]

SCHEMA = 1


def key(source: Source, target: str) -> str:
    """Return the name of the entry of a source on a target such as ``"sm_90"``."""
    content = json.dumps([SCHEMA, source.digest, list(offline_options(target))])
    return hashlib.sha256(content.encode("utf-8")).hexdigest()[:40]


def precompile(
    specs: Iterable[KernelSpec], targets: Iterable[str], folder: Path
) -> Iterator[tuple[KernelSpec, str, Path, bool]]:
    """Compile every specification for every target into a folder, a core each; needs no GPU.

    Parameters
    ----------
    specs : iterable of KernelSpec
        What to compile.
    targets : iterable of str
        For example ``["sm_80", "sm_90"]``.
    folder : pathlib.Path
        Made if needed; entries that it holds are kept.

    Yields
    ------
    tuple
        (specification, target, the entry's file, whether it was compiled now).

    Raises
    ------
    KernelCompileError
        With NVRTC's log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kernels = find_kernels()
    targets = tuple(targets)
    sources = ((spec, expand(spec, kernels)) for spec in specs)
    wanted = [(spec, source, target) for spec, source in sources for target in targets]

    def provide(one: tuple[KernelSpec, Source, str]) -> tuple[KernelSpec, str, Path, bool]:
        spec, source, target = one
        path = folder / f"{key(source, target)}.cubin"
        if find(folder, source, target) is not None:
            return spec, target, path, False
        start = time.perf_counter()
        cubin = compile_source(source.text, target, spec.file).cubin
        entry = new_entry(spec, source, target, start, cubin, path.name)
        write_atomic(path, cubin)
        entry.write(folder)
        return spec, target, path, True

    yield from side_by_side(provide, wanted)


def new_entry(spec: KernelSpec, source: Source, target: str, start: float, cubin: bytes, name: str) -> Entry:
    """Return the manifest's entry of machine code built just now.

    Parameters
    ----------
    spec, source : KernelSpec, Source
        What was compiled.
    target : str
        The compile target.
    start : float
        ``time.perf_counter()`` when the compile began.
    cubin : bytes
        The machine code.
    name : str
        The name of its file.
    """
    return Entry(
        file=spec.file,
        entries=spec.entries,
        defines=" ".join(f"{macro}={value}" for macro, value in spec.defines),
        target=target,
        options=" ".join(OPTIONS),
        digest=source.digest,
        compiler="NVRTC {}.{}".format(*nvrtc_version()),
        seconds=round(time.perf_counter() - start, 3),
        size=len(cubin),
        sha256=hashlib.sha256(cubin).hexdigest(),
        built=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        cubin=name,
    )


def find(folder: Path, source: Source, target: str) -> Path | None:
    """Return the file of a source's machine code for a target, None where the folder has no sound one."""
    path = folder / f"{key(source, target)}.cubin"
    try:
        expected = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["sha256"]
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return path if found == expected else None
