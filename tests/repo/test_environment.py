"""One table of environment variables: sdm_rt/env.py, docs/environment.md and the code that reads them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from unittest import mock

import pytest

from sdm_rt import env
from sdm_rt.env import VARIABLES

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_page_is_the_table() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (.+?) \| (.+) \|$", (ROOT / "docs" / "environment.md").read_text(), re.MULTILINE
    )
    table = [(v.name, f"`{v.default}`" if v.default else "not set", v.meaning) for v in VARIABLES]
    assert rows == table


def test_the_code_reads_no_other_variable() -> None:
    names = {variable.name for variable in VARIABLES}
    for path in (ROOT / "sdm_rt").rglob("*.py"):
        # PROGRAMMATIC names such as SDM_RT_* in prose end with a star.
        found = set(re.findall(r"\bSDM_RT_[A-Z_]*[A-Z]\b(?!\*)", path.read_text(encoding="utf-8")))
        assert found <= names, f"{path.relative_to(ROOT)} names {found - names}"


@pytest.mark.parametrize(("value", "expected"), [(None, True), ("", True), ("1", True), (" 0 ", False)])
def test_flag(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool) -> None:
    monkeypatch.delenv("SDM_RT_PDL", raising=False)
    if value is not None:
        monkeypatch.setenv("SDM_RT_PDL", value)
    assert env.flag("SDM_RT_PDL") is expected


def test_a_variable_is_what_the_environment_holds_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SDM_RT_PDL", raising=False)
    seen = [env.as_set("SDM_RT_PDL")]
    for value in ("0", "1"):
        monkeypatch.setenv("SDM_RT_PDL", value)
        seen.append(env.as_set("SDM_RT_PDL"))
    monkeypatch.delenv("SDM_RT_PDL")
    assert [held and os.fsdecode(held) for held in (*seen, env.as_set("SDM_RT_PDL"))] == [
        None,
        "0",
        "1",
        None,
    ]
    with mock.patch.dict(os.environ, {"SDM_RT_PDL": "0"}):
        assert not env.flag("SDM_RT_PDL")


def test_a_flag_is_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDM_RT_CHECK", "yes")
    with pytest.raises(ValueError, match="SDM_RT_CHECK must be 0 or 1, got 'yes'"):
        env.flag("SDM_RT_CHECK")


def test_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SDM_RT_KERNELS", raising=False)
    assert env.path("SDM_RT_KERNELS") is None
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SDM_RT_KERNELS", "~/kernels")
    assert env.path("SDM_RT_KERNELS") == tmp_path / "kernels"


def test_a_home_folder_of_nobody_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDM_RT_CACHE_DIR", "~nobody-of-this-name/cache")
    with pytest.raises(ValueError, match="SDM_RT_CACHE_DIR: '~nobody-of-this-name/cache' names no folder"):
        env.path("SDM_RT_CACHE_DIR")
