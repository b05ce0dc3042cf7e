"""docs/planning.md shows what the commands print, and its Python runs."""

from __future__ import annotations

import re

import pytest

from tests.plan.planning_page import EXAMPLE, PATH, printed, rewritten

PAGE = PATH.read_text(encoding="utf-8")
EXAMPLES = EXAMPLE.findall(PAGE)


def test_the_page_has_its_examples() -> None:
    assert len(EXAMPLES) == 4


@pytest.mark.parametrize(("command", "shown"), EXAMPLES)
def test_console_examples_are_what_the_command_prints(command: str, shown: str) -> None:
    assert printed(command) == shown, "python -m tests.plan.regenerate writes the examples anew"


def test_rewriting_finds_every_example() -> None:
    emptied = EXAMPLE.sub(r"```console\n$ sdm-rt \1\n```", PAGE)
    assert emptied != PAGE
    assert rewritten(emptied) == rewritten(PAGE)


def test_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n([^`]*)```", PAGE)
    exec(compile(code, "docs/planning.md", "exec"), {})
    assert capsys.readouterr().out.rstrip("\n") == EXAMPLES[0][1].rstrip("\n")
