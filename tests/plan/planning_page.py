"""docs/planning.md: its console examples, and the page with what the commands print today."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from sdm_rt.cli import main

__all__ = ["EXAMPLE", "PATH", "printed", "rewritten"]

PATH = Path(__file__).parents[2] / "docs" / "planning.md"
EXAMPLE = re.compile(r"```console\n\$ sdm-rt (.*)\n([^`]*)```")


def printed(command: str) -> str:
    """Return what ``sdm-rt command`` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        main(command.split())
    return out.getvalue()


def rewritten(page: str) -> str:
    """Return the page with every example as it prints today."""
    return EXAMPLE.sub(lambda found: f"```console\n$ sdm-rt {found[1]}\n{printed(found[1])}```", page)
