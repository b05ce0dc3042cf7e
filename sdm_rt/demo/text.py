"""The text of the demo: which files, and which of their bytes train and which validate."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from sdm_rt.demo.errors import DemoError

__all__ = ["Corpus", "load_corpus", "read_files", "split_files", "standard_library_files"]

VALIDATION_SHARE = 0.1
STANDARD_LIBRARY_BYTES = 4_000_000
# Tests are no library code; encodings and pydoc_data are generated tables.
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests"}
)
FILE_END = b"\0"
BINARY_SIGN_BYTES = 8192  # libraries of gigabytes show a zero byte here, and are not read further


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes to validate on, from different files (or ends of one file).

    Parameters
    ----------
    train, validation : torch.Tensor
        uint8 [bytes]; a zero byte ends each file where there are several.
    description : str
        One line for the user: where the text comes from and how it was split.
    path : str or None
        The file or folder it was read from; None: the Python standard library.
    """

    train: torch.Tensor
    validation: torch.Tensor
    description: str
    path: str | None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of both parts: two runs with one fingerprint saw the same text."""
        digest = hashlib.sha256()
        for part in (self.train, self.validation):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part.numpy().tobytes())
        return digest.hexdigest()


def load_corpus(path: Path | None, least: int, most: int = 0) -> Corpus:
    """Read the text and split it into training and validation bytes.

    Parameters
    ----------
    path : Path or None
        A file, a folder (all its UTF-8 text files), or None: sources of the Python standard library.
    least : int
        The fewest bytes either part may have.
    most : int
        The most bytes to take of the text, in whole files where there are several; 0: all of ``path``,
        4,000,000 of the standard library.

    Raises
    ------
    DemoError
        No such path, no text in it, or less than ``least`` bytes on either side of the split.
    OSError
        ``path`` may not be read.
    """
    if path is None:
        sources = standard_library_files()
        files = _up_to(sources, most or STANDARD_LIBRARY_BYTES)
        origin = "Python standard library"
        if not sources:
            raise DemoError(
                "no .py sources of the Python standard library on this machine: name a text with --text"
            )
    elif path.is_dir():
        files = read_files(path, (found for found in path.rglob("*") if found.is_file()), most)
        origin = str(path)
        if not files:
            os.scandir(path).close()  # a folder that may not be read is the system's error
            within = f" that {most:,} bytes hold" if most else ""
            raise DemoError(f"no UTF-8 text file{within} in {path}")
    elif path.is_file():
        content = path.read_bytes()
        files = {path.name: content[:most] if most else content}
        origin = str(path)
    else:
        problem = "neither a file nor a folder" if path.exists() else "no such file or folder"
        raise DemoError(f"--text {path}: {problem}")

    if len(files) <= 1:
        content = next(iter(files.values()), b"")
        cut = round(len(content) * (1 - VALIDATION_SHARE))
        train, validation, how = content[:cut], content[cut:], "one file, split by position"
    else:
        training_files, validation_files = split_files(files)
        train, validation = _join(training_files), _join(validation_files)
        how = f"{len(training_files)} files to train, {len(validation_files)} others to validate"
    if min(len(train), len(validation)) < least:
        raise DemoError(
            f"the text of {origin} is too short: {len(train):,} bytes to train and {len(validation):,} to "
            f"validate, at least {least:,} of each are needed; name a longer --text"
            f"{', more --text-bytes' if most else ''} or a shorter --seq-len"
        )
    description = f"{origin}: {len(train):,} + {len(validation):,} bytes, {how}"
    return Corpus(
        _tensor(train), _tensor(validation), description, None if path is None else str(path.absolute())
    )


def standard_library_files() -> dict[str, bytes]:
    """Return the standard library's hand-written ``.py`` sources, by relative path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = (
        found
        for found in root.rglob("*.py")
        if not SKIPPED_FOLDERS.intersection(found.relative_to(root).parts)
    )
    return read_files(root, sources)


def read_files(root: Path, paths: Iterable[Path], most: int = 0) -> dict[str, bytes]:
    """Read those of ``paths`` below ``root`` that are UTF-8 text, each content once, ``most`` bytes in all.

    Returns
    -------
    dict of str to bytes
        By relative path, in the order of a hash of it: mixed, and the same on every machine.
    """
    by_name = {found.relative_to(root).as_posix(): found for found in paths}
    files: dict[str, bytes] = {}
    contents: set[bytes] = set()
    total = 0
    for name in sorted(by_name, key=_name_hash):
        try:
            content = _read_text(by_name[name])
        except (OSError, UnicodeDecodeError):
            continue
        if not content or content in contents:
            continue
        total += len(content)
        if most and total > most:
            break
        contents.add(content)
        files[name] = content
    return files


def _read_text(path: Path) -> bytes:
    """Return the content of a file of UTF-8 text, of another one nothing or an error."""
    with path.open("rb") as stream:
        head = stream.read(BINARY_SIGN_BYTES)
        if FILE_END in head:
            return b""
        content = head + stream.read()
    content.decode("utf-8")
    return b"" if FILE_END in content else content


def split_files(files: dict[str, bytes]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Split two or more files into those that train and those that validate, about a tenth of the bytes."""
    room = VALIDATION_SHARE * sum(map(len, files.values()))
    validation: dict[str, bytes] = {}
    for name, content in files.items():
        if len(content) <= room:
            validation[name] = content
            room -= len(content)
    if not validation:
        smallest = min(files, key=lambda name: len(files[name]))
        validation = {smallest: files[smallest]}
    return {name: files[name] for name in files if name not in validation}, validation


def _up_to(files: dict[str, bytes], limit: int) -> dict[str, bytes]:
    taken: dict[str, bytes] = {}
    total = 0
    for name, content in files.items():
        if total + len(content) > limit:
            break
        taken[name] = content
        total += len(content)
    return taken


def _join(files: dict[str, bytes]) -> bytes:
    return b"".join(content + FILE_END for content in files.values())


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _name_hash(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
