"""The compile cache: CuPy's own disk cache in our folder, and a manifest of what lies in it.

CuPy keys an entry by the source text, the options, the target and the compiler's version, writes it to a
temporary file that it renames, and checks a hash when it reads it. What is added here: the choice of the
folder, a save that only warns on a full or read-only disk, and one small JSON file an entry that tells people
what it is. No lock is held by anyone.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sdm_rt import env

__all__ = ["Entry", "KernelCache", "cache_folder", "clear", "entries", "is_temporary", "write_atomic"]

CUBINS = "cubins"
MANIFEST = "manifest"


def _user_cache() -> Path:
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        return (Path(base) if base else Path.home() / "AppData" / "Local") / "sdm_rt" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "sdm_rt"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sdm_rt"


_folder_lock = threading.Lock()


@cache
def _usable(wanted: str) -> tuple[Path, bool]:
    """Return the folder ``wanted`` (empty: the user's cache), or a temporary one and True; warns once."""
    try:
        folder = Path(wanted) if wanted else _user_cache()
        for part in (CUBINS, MANIFEST):
            (folder / part).mkdir(parents=True, exist_ok=True)
        return folder, False
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        temporary = Path(tempfile.mkdtemp(prefix="sdm_rt-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        for part in (CUBINS, MANIFEST):
            (temporary / part).mkdir()
        warnings.warn(
            f"the compile cache cannot be made ({error}); kernels are compiled anew in every process. "
            f"SDM_RT_CACHE_DIR chooses another folder.",
            RuntimeWarning,
            stacklevel=2,
        )
        return temporary, True


def _chosen() -> tuple[Path, bool]:
    with _folder_lock:  # threads that compile side by side make one temporary folder
        return _usable(str(env.path("SDM_RT_CACHE_DIR") or ""))


def cache_folder() -> Path:
    """Return the folder of the compile cache, made if needed.

    ``SDM_RT_CACHE_DIR``, else the platform's user cache, else a temporary folder with one warning.
    """
    return _chosen()[0]


def is_temporary() -> bool:
    """Return whether the folder of the compile cache is a temporary one, gone with the process."""
    return _chosen()[1]


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that readers see all of it or none of it."""
    temporary = path.with_name(f".writing-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class Entry:
    """What the manifest says of one compiled kernel file.

    Parameters
    ----------
    file : str
        The source file, for example ``"decode.cu"``.
    entries : tuple of str
        Its kernels.
    defines : str
        Its macros, ``"NAME=value NAME=value"``.
    target : str
        The compile target, for example ``"sm_90"``.
    options : str
        The compiler options.
    digest : str
        SHA-256 of the expanded source.
    compiler : str
        The compiler's version.
    seconds : float
        Time that the compile took.
    size : int
        Bytes of the machine code.
    sha256 : str
        Their digest.
    built : str
        When, in UTC, ISO 8601.
    cubin : str
        The name of the machine code's file.
    """

    file: str
    entries: tuple[str, ...]
    defines: str
    target: str
    options: str
    digest: str
    compiler: str
    seconds: float
    size: int
    sha256: str
    built: str
    cubin: str

    def write(self, folder: Path) -> None:
        """Write the entry as one JSON file into ``folder``."""
        text = json.dumps(asdict(self), indent=1) + "\n"
        write_atomic(folder / f"{Path(self.cubin).stem}.json", text.encode("utf-8"))


def _read(path: Path) -> Entry | None:
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        fields["entries"] = tuple(fields["entries"])
        return Entry(**fields)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def entries(folder: Path) -> list[Entry]:
    """Return the readable entries of a manifest folder, newest first."""
    found = (_read(path) for path in folder.glob("*.json"))
    return sorted(
        (entry for entry in found if entry is not None), key=lambda entry: entry.built, reverse=True
    )


def clear() -> int:
    """Remove every compiled kernel of the cache, unfinished files included; return the bytes freed."""
    freed = 0
    for part in (CUBINS, MANIFEST):
        for path in (cache_folder() / part).glob("*"):
            with contextlib.suppress(FileNotFoundError):  # another process clears too
                if path.is_file():
                    size = path.stat().st_size
                    path.unlink()
                    freed += size
    return freed


class KernelCache:
    """CuPy's disk cache in our folder, in the form that CuPy's compiler calls.

    Parameters
    ----------
    disk : object
        CuPy's disk cache (``load(name)`` and ``save(name, cubin, source)``).
    on_miss : callable
        Called before a compile, that is when nothing usable was found.
    on_save : callable
        Called with the name and the machine code after a compile.
    """

    def __init__(self, disk: Any, on_miss: Callable[[], None], on_save: Callable[[str, bytes], None]) -> None:
        self._disk = disk
        self._on_miss = on_miss
        self._on_save = on_save

    def load(self, name: str) -> bytes | None:
        """Return the machine code of an entry, None where it is missing or damaged."""
        try:
            cubin: bytes | None = self._disk.load(name)
        except OSError:
            cubin = None
        if cubin is None:
            self._on_miss()
        return cubin

    def save(self, name: str, cubin: bytes, source: str) -> None:
        """Keep an entry; a folder that takes none is one warning a process."""
        try:
            self._disk.save(name, cubin, source)
            self._on_save(name, cubin)
        except OSError as error:
            _warn_unsaved(error.strerror or type(error).__name__)


@cache
def _warn_unsaved(reason: str) -> None:
    warnings.warn(
        f"a compiled kernel could not be kept in the cache ({reason}); the next process compiles it again",
        RuntimeWarning,
        stacklevel=2,
    )
