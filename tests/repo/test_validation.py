"""The records of GPU runs: what is fingerprinted, what is refused, what ``check`` says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.validation import (
    ROOT,
    SHIPPED,
    Counts,
    ValidationError,
    check,
    fingerprint,
    main,
    read_junit,
    read_reports,
    record,
    record_name,
    save,
    validated,
)

JUNIT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="{name}" tests="5">
  <testcase classname="tests.gpu.test_decode" name="a">@</testcase>
  <testcase classname="tests.kernels.test_decode" name="b">@</testcase>
  <testcase classname="tests.cpu.test_decode" name="c"/>
  <testcase classname="tests.gpu.test_decode" name="d">@<skipped message="no second GPU"/></testcase>
  {more}
</testsuite></testsuites>
""".replace("@", '<properties><property name="gpu" value="yes"/></properties>')


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "sdm_rt" / "ops").mkdir(parents=True)
    (tmp_path / "kernels_cu").mkdir()
    (tmp_path / "sdm_rt" / "ops" / "decode.py").write_text("a = 1\n")
    (tmp_path / "kernels_cu" / "decode.cu").write_text("// kernel\n")
    return tmp_path


def write_record(root: Path, sources: str) -> Path:
    content = record(Counts(passed=7, gpu_passed=3), "NVIDIA H200", "9.0", {"torch": "2.13.0"}, {}, sources)
    (root / SHIPPED).parent.mkdir(parents=True, exist_ok=True)
    return save(content, root)[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "kernels_cu" / "decode.cu").write_text("// kernel \n"),
        lambda root: (root / "kernels_cu" / "decode.cu").rename(root / "kernels_cu" / "step.cu"),
        lambda root: (root / "sdm_rt" / "new.py").write_text(""),
        lambda root: (root / "sdm_rt" / "ops" / "decode.py").unlink(),
    ],
    ids=["content", "name", "new file", "removed file"],
)
def test_fingerprint_changes_with_sources(tree: Path, change) -> None:
    before = fingerprint(tree)
    assert fingerprint(tree) == before
    change(tree)
    assert fingerprint(tree) != before


def test_fingerprint_ignores_what_is_no_source(tree: Path) -> None:
    before = fingerprint(tree)
    (tree / "sdm_rt" / "__pycache__").mkdir()
    (tree / "sdm_rt" / "__pycache__" / "decode.cpython-311.pyc").write_bytes(b"\0")
    (tree / "kernels_cu" / "README.md").write_text("words")
    assert fingerprint(tree) == before


def test_fingerprint_does_not_depend_on_the_place(
    tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = fingerprint(tree)
    moved = tmp_path_factory.mktemp("elsewhere") / "checkout"
    tree.rename(moved)
    assert fingerprint(moved) == before


def test_content_cannot_move_between_files(tree: Path) -> None:
    (tree / "sdm_rt" / "a.py").write_text("xy")
    (tree / "sdm_rt" / "b.py").write_text("")
    before = fingerprint(tree)
    (tree / "sdm_rt" / "a.py").write_text("x")
    (tree / "sdm_rt" / "b.py").write_text("y")
    assert fingerprint(tree) != before


def test_junit_counts(tmp_path: Path) -> None:
    report = tmp_path / "run.xml"
    failed = '<testcase classname="tests.gpu.x" name="e"><failure message="no"/></testcase>'
    report.write_text(JUNIT.format(name="abc", more=failed))
    assert read_junit(report, "abc") == Counts(passed=3, failed=1, skipped=1, gpu_passed=2)


@pytest.mark.parametrize("order", [("run", "alone"), ("alone", "run")])
def test_a_test_that_failed_elsewhere_is_not_hidden_by_a_skip(tmp_path: Path, order: tuple[str, str]) -> None:
    (tmp_path / "run.xml").write_text(JUNIT.format(name="abc", more=""))
    failed = '<testcase classname="tests.gpu.test_decode" name="d"><failure message="no"/></testcase>'
    alone = f'<testsuites><testsuite name="abc">{failed}</testsuite></testsuites>'
    (tmp_path / "alone.xml").write_text(alone)
    counts, repeated = read_reports([tmp_path / f"{name}.xml" for name in order], "abc")
    assert (counts, repeated) == (Counts(passed=3, failed=1, gpu_passed=2), [])


def test_the_suite_marks_its_gpu_tests_in_the_report(request: pytest.FixtureRequest) -> None:
    """What ``read_junit`` looks for is what tests/conftest.py gives to tests marked gpu, and to no others."""
    items = request.session.items
    marked = [item for item in items if ("gpu", "yes") in item.user_properties]
    assert marked == [item for item in items if item.get_closest_marker("gpu") is not None]


def test_junit_of_another_tree_is_refused(tmp_path: Path) -> None:
    report = tmp_path / "run.xml"
    report.write_text(JUNIT.format(name="abc", more=""))
    with pytest.raises(ValidationError, match="another tree"):
        read_junit(report, "abd")


def test_only_a_green_gpu_run_is_recorded() -> None:
    with pytest.raises(ValidationError, match="2 tests failed"):
        record(Counts(passed=5, failed=2, gpu_passed=5), "NVIDIA H200", "9.0", {}, {}, "abc")
    with pytest.raises(ValidationError, match="no test marked gpu passed"):
        record(Counts(passed=5, skipped=9), "NVIDIA H200", "9.0", {}, {}, "abc")


def test_check_says_whether_a_record_matches(tree: Path) -> None:
    assert check(tree) == (["docs/validation: no record yet"], True)
    write_record(tree, fingerprint(tree))
    lines, readable = check(tree)
    assert readable
    assert lines[0].startswith("docs/validation/h200.json: matches the tree (NVIDIA H200, ")
    (tree / "kernels_cu" / "decode.cu").write_text("// edited\n")
    lines, readable = check(tree)
    assert readable
    assert lines[0].startswith("docs/validation/h200.json: differs from the tree (NVIDIA H200, ")


@pytest.mark.parametrize("content", ["{", "[]", '{"gpu": "NVIDIA H200"}'])
def test_check_reports_an_unreadable_record(tree: Path, content: str) -> None:
    write_record(tree, fingerprint(tree)).write_text(content)
    lines, readable = check(tree)
    assert not readable
    assert lines[0].startswith("docs/validation/h200.json: cannot be read")


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "h200.json"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090.json"),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm4_80gb.json"),
    ],
)
def test_record_name(gpu: str, name: str) -> None:
    assert record_name(gpu) == name


def test_a_record_tells_the_package_what_is_validated(tree: Path) -> None:
    assert validated(tree) == []
    write_record(tree, fingerprint(tree))
    assert json.loads((tree / SHIPPED).read_text()) == [{"compute_capability": [9, 0]}]


def test_the_package_claims_what_the_records_say() -> None:
    assert json.loads((ROOT / SHIPPED).read_text()) == validated()


def test_records_of_this_tree_are_readable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    assert "docs/validation" in capsys.readouterr().out
