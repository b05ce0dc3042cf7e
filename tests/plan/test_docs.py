"""docs/planning.md shows what the commands print, and its Python runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sdm_rt.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
CONSOLE = re.findall(r"```console\n\$ sdm-rt (.*)\n([^`]*)```", PAGE)


def test_the_page_has_its_examples() -> None:
    assert len(CONSOLE) == 3


@pytest.mark.parametrize(("command", "printed"), CONSOLE)
def test_console_examples_are_what_the_command_prints(
    command: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(command.split())
    captured = capsys.readouterr()
    assert captured.out + captured.err == printed


def test_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n([^`]*)```", PAGE)
    exec(compile(code, "docs/planning.md", "exec"), {})
    assert capsys.readouterr().out.rstrip("\n") == CONSOLE[0][1].rstrip("\n")
