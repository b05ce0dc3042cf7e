"""``sdm-rt cache``: what the compile cache holds, and how to empty it."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from sdm_rt.runtime import cache

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument("action", nargs="?", choices=("list", "clear"), default="list")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """List or clear the cache; return the exit status."""
    try:
        folder = cache.cache_folder()
        freed = cache.clear() if arguments.action == "clear" else 0
    except (OSError, ValueError) as error:
        print(f"sdm-rt cache: {error}", file=sys.stderr)
        return 1
    if arguments.action == "clear":
        if arguments.json:
            print(json.dumps({"folder": str(folder), "freed_bytes": freed}, indent=1))
        else:
            print(f"{folder}: {freed / 1024:.0f} KiB freed")
        return 0
    found = cache.entries(folder / cache.MANIFEST)
    if arguments.json:
        print(json.dumps([asdict(entry) for entry in found], indent=1))
        return 0
    print(folder)
    for entry in found:
        print(
            f"{entry.built}  {entry.target:7} {entry.seconds:6.2f} s {entry.size / 1024:6.0f} KiB  "
            f"{entry.file} {entry.defines}  ({entry.compiler})"
        )
    print(f"{len(found)} kernel files, {sum(entry.size for entry in found) / 1024:.0f} KiB")
    return 0
