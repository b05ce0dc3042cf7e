"""README.md: the two commands that CI executes, the example, and links of all pages."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from sdm_rt.cli import COMMANDS
from tests.readme import README, command

ROOT = README.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "kernels_cu" / "README.md"])


def extras(words: list[str]) -> set[str]:
    """Extras that an install command asks for."""
    return set(re.fullmatch(r"\.\[([\w,]+)\]", words[words.index("-e") + 1]).group(1).split(","))


def declared_extras() -> set[str]:
    section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    return set(re.findall(r"^(\w+) = \[", section.partition("\n[project.scripts]")[0], re.MULTILINE))


@pytest.mark.parametrize(
    ("name", "start"), [("demo", ["sdm-rt", "demo"]), ("test", ["python", "-m", "pytest", "-n", "3"])]
)
def test_commands(name: str, start: list[str]) -> None:
    install, ours = (shlex.split(part) for part in command(name).split("&&"))
    assert install[:6] == ["python", "-m", "pip", "install", "-c", "constraints.txt"]
    assert extras(install) <= declared_extras()
    assert ours == start
    assert "demo" in COMMANDS


def test_the_tests_extra_holds_what_runs_them() -> None:
    install, ours = (shlex.split(part) for part in command("test").split("&&"))
    assert "test" in extras(install)
    assert "-n" in ours
    project = (ROOT / "pyproject.toml").read_text()
    (extra,) = re.findall(r"^test = \[(.*?)^\]$", project, re.MULTILINE | re.DOTALL)
    assert {"pytest", "pytest-xdist"} <= set(re.findall(r'"([\w-]+)>=', extra))


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "<!-- command: demo -->\n```bash\na\nb\n```",
        "<!-- command: demo -->\n```bash\na\n```\n<!-- command: demo -->\n```bash\na\n```",
        "<!-- command: demo -->\nwords\n```bash\na\n```",
    ],
    ids=["absent", "two lines", "twice", "not beside its marker"],
)
def test_an_ambiguous_command_is_refused(text: str) -> None:
    with pytest.raises(LookupError, match="exactly one command"):
        command("demo", text)


def test_the_example_runs() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(example.splitlines()) <= 15
    variables: dict = {}
    exec(compile(example, "README.md", "exec"), variables)
    gradient = variables["layer"].memory.grad
    assert torch.isfinite(gradient).all()
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    local = [target for target in targets if not target.startswith(("http://", "https://"))]
    assert [target for target in local if not (page.parent / target).exists()] == []
