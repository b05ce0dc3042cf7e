"""The ``sdm-rt`` command; each subcommand lives in the module of its name.

A subcommand module offers ``add_arguments(parser)`` and ``run(arguments) -> int``
(the exit status). It is imported only when its subcommand was asked for.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

__all__ = ["INTERRUPTED", "main"]

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

COMMANDS: dict[str, str] = {
    "demo": "train a small byte-level language model on real text",
    "doctor": "say what works, what is missing and how to get it",
    "precompile": "compile kernels ahead of time, without a GPU",
    "cache": "list or clear the compile cache",
    "bench": "measure an op on this machine's GPU",
    "plan": "print the launches, shared memory, bytes moved and time floor of a call, without a GPU",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="sdm-rt", description="Sparse Delta Memory with run-time compiled kernels."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name in words[:1]:
            importlib.import_module(f"sdm_rt.cli.{name}").add_arguments(subparser)
    arguments = parser.parse_args(words)
    try:
        status: int = importlib.import_module(f"sdm_rt.cli.{arguments.command}").run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has left; Python flushes once more as it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status
