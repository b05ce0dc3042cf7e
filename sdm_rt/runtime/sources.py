"""CUDA sources: where they are, one self-contained text per kernel, and the digest of that text.

CuPy's disk cache keys on the text handed to NVRTC and not on the files that text includes, so
includes of our own headers are expanded before anything is compiled. ``#line`` directives carry
the names and line numbers of the original files into compiler messages.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sdm_rt import env
from sdm_rt.errors import KernelCompileError
from sdm_rt.runtime.kernel import KernelSpec

__all__ = ["Source", "SourceTree", "expand", "find_kernels"]

_PACKAGED = Path(__file__).resolve().parent.parent / "kernels_cu"
_CHECKOUT = _PACKAGED.parent.parent / "kernels_cu"
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"')
_PRAGMA_ONCE = re.compile(r"^\s*#\s*pragma\s+once\b")


def find_kernels() -> Path:
    """Return the folder of CUDA sources.

    ``SDM_RT_KERNELS`` if set, else the copy inside the installed package, else the checkout's.

    Raises
    ------
    FileNotFoundError
        If the chosen folder holds no ``.cu`` file; the message names the folders tried.
    """
    chosen = env.path("SDM_RT_KERNELS")
    candidates = [chosen] if chosen is not None else [_PACKAGED, _CHECKOUT]
    for folder in candidates:
        if next(folder.glob("*.cu"), None) is not None:
            return folder
    tried = ", ".join(str(folder) for folder in candidates)
    hint = " (set by SDM_RT_KERNELS)" if chosen is not None else ""
    raise FileNotFoundError(f"no CUDA sources (*.cu) in {tried}{hint}")


@dataclass(frozen=True)
class Source:
    """One kernel file with its own headers expanded.

    Parameters
    ----------
    text : str
        What NVRTC compiles: the macros of the specification, then the expanded file.
    digest : str
        SHA-256 of the content alone, so that moving the tree keeps it.
    files : tuple of pathlib.Path
        The file and every header that went into the text, in order of first use.
    """

    text: str
    digest: str
    files: tuple[Path, ...]


def _lines(folder: Path, name: str, included_from: str, seen: dict[str, Path]) -> Iterator[str]:
    path = folder / name
    try:
        content = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise KernelCompileError(f"{included_from}: cannot open {name!r} in {folder}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise KernelCompileError(f"{included_from}: cannot read {name!r} in {folder}: {error}") from None
    seen[name] = path
    yield f'#line 1 "{name}"'
    # Not splitlines(), which ends lines at characters that C++ does not.
    for number, line in enumerate(content.removesuffix("\n").split("\n"), start=1):
        match = _INCLUDE.match(line)
        if match is not None:
            header = match.group(1)
            if header not in seen:
                yield from _lines(folder, header, f"{path}({number})", seen)
            yield f'#line {number + 1} "{name}"'
        elif _PRAGMA_ONCE.match(line):
            yield ""
        else:
            yield line


def expand(spec: KernelSpec, folder: Path) -> Source:
    """Return the self-contained text of ``spec`` from the sources in ``folder``.

    ``#include "name"`` is replaced by that header's text at its first occurrence and by nothing at
    later ones; ``#include <name>`` is left to NVRTC. The macros of the specification come as
    ``#define`` lines in front, so that all kernels share one set of compiler options.

    Raises
    ------
    KernelCompileError
        If the file or a header is missing or cannot be read; the message names the including file and line.
    """
    seen: dict[str, Path] = {}
    body = list(_lines(folder, spec.file, "kernel source", seen))
    macros = [f"#define {name} {value}" for name, value in spec.defines]
    text = "\n".join([*macros, *body, ""])
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return Source(text=text, digest=digest, files=tuple(seen.values()))


_Stamp = tuple[str, int, int, int]

# File times may be this coarse: a file younger than this when read may change under the same time.
SETTLED_NS = 50_000_000


def _stamp(path: str) -> _Stamp:
    """Return what one ``stat`` says of a file."""
    try:
        status = os.stat(path)
    except OSError:
        return (path, -1, -1, -1)
    return (path, status.st_mtime_ns, status.st_size, status.st_ino)


def _chosen() -> bytes | str | None:
    return env.as_set("SDM_RT_KERNELS")


@dataclass(frozen=True)
class _Read:
    """A source as it was read, with what tells when to read it again."""

    source: Source
    chosen: bytes | str | None  # SDM_RT_KERNELS at the time
    stamps: list[_Stamp]
    settled: bool

    def is_current(self, chosen: bytes | str | None, seen: Container[_Stamp] = ()) -> bool:
        """Return whether nothing was touched, of files whose stamps are not among ``seen``."""
        if not self.settled or chosen != self.chosen:
            return False
        for stamp in self.stamps:
            if stamp in seen:
                continue
            path, written, size, inode = stamp
            try:
                status = os.stat(path)
            except OSError:
                return False
            if status.st_mtime_ns != written or status.st_size != size or status.st_ino != inode:
                return False
        return True


class SourceTree:
    """Expanded sources of a process, read again when a file they came from was touched.

    File stamps only say when to read a file again; whether a kernel changed is decided by the digest of its
    text. Sources inside an installed package are not watched.
    """

    def __init__(self) -> None:
        self._reads: dict[KernelSpec, _Read] = {}

    def is_current(self, spec: KernelSpec) -> bool:
        """Return whether the files of ``spec`` are untouched since ``source`` last read them."""
        return self.known(spec) is not None

    def are_current(self, specs: Iterable[KernelSpec]) -> bool:
        """Return whether the files of all ``specs`` are untouched; a file of several is looked at once."""
        chosen = _chosen()
        seen: set[_Stamp] = set()
        for spec in specs:
            read = self._reads.get(spec)
            if read is None or not read.is_current(chosen, seen):
                return False
            seen.update(read.stamps)
        return True

    def known(self, spec: KernelSpec) -> Source | None:
        """Return the source of ``spec`` as it was read, where its files are untouched since."""
        read = self._reads.get(spec)
        return read.source if read is not None and read.is_current(_chosen()) else None

    def forget(self, specs: Iterable[KernelSpec]) -> None:
        """Read ``specs`` again at their next use, as if their files had been touched."""
        for spec in specs:
            self._reads.pop(spec, None)

    def source(self, spec: KernelSpec) -> Source:
        """Return the current expanded source of ``spec``.

        Raises
        ------
        KernelCompileError
            If the file or a header is missing.
        """
        if (known := self.known(spec)) is not None:
            return known
        now = time.time_ns()
        folder = find_kernels()
        source = expand(spec, folder)
        watched = () if folder == _PACKAGED else source.files
        stamps = [_stamp(str(path)) for path in watched]
        settled = all(abs(now - stamp[1]) > SETTLED_NS for stamp in stamps)  # other clocks may be ahead
        self._reads[spec] = _Read(source, _chosen(), stamps, settled)
        return source
