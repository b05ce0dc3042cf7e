"""Records of test runs on real GPUs: ``docs/validation/<gpu>.json``.

A record says which sources a green run on a GPU covered; ``check`` tells whether this tree still has them.

    python tests/validation.py fingerprint
    python -m pytest -o junit_suite_name="$(python tests/validation.py fingerprint)" --junitxml=run.xml
    python tests/validation.py write --junit run.xml --figures training.json forward.json
    python tests/validation.py check

The test run carries the fingerprint as its suite name, so ``write`` refuses the report of another tree. Where
a test itself was at fault it may be run again, of the same sources: its latest outcome counts, and the record
names the test.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdm_rt.bench.record import fingerprint, gpu_slug, versions
from sdm_rt.plan.device import preset

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = Path("sdm_rt", "runtime", "validated.json")
REQUIRED_KEYS = ("gpu", "compute_capability", "date", "fingerprint", "versions", "tests", "figures")


class ValidationError(ValueError):
    """A record that cannot be written or read; the message says why."""


@dataclass(frozen=True)
class Counts:
    """Outcomes of a pytest run."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    gpu_passed: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.passed + other.passed,
            self.failed + other.failed,
            self.skipped + other.skipped,
            self.gpu_passed + other.gpu_passed,
        )


def read_reports(reports: Sequence[Path], expected_fingerprint: str) -> tuple[Counts, list[str]]:
    """Count the outcomes of JUnit reports whose suites are named by ``expected_fingerprint``.

    A test's latest outcome counts, and none that says it did not run. Returned beside the counts: the tests
    that failed in one report and passed in a later one, of the same sources.
    """
    outcomes: dict[str, Counts] = {}
    repeated = []
    for report in reports:
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            if suite.get("name") != expected_fingerprint:
                raise ValidationError(
                    f"{report}: the run was of another tree (suite {suite.get('name')!r}, "
                    f"sources {expected_fingerprint!r})"
                )
            for case in suite.iter("testcase"):
                test, outcome = f"{case.get('classname')}.{case.get('name')}", _outcome(case)
                if test in outcomes and outcome.skipped:
                    continue
                if test in outcomes and outcomes[test].failed and outcome.passed:
                    repeated.append(test)
                outcomes[test] = outcome
    return sum(outcomes.values(), Counts()), repeated


def _outcome(case: ElementTree.Element) -> Counts:
    if case.find("failure") is not None or case.find("error") is not None:
        return Counts(failed=1)
    if case.find("skipped") is not None:
        return Counts(skipped=1)
    on_gpu = case.find("properties/property[@name='gpu']") is not None
    return Counts(passed=1, gpu_passed=int(on_gpu))


def read_junit(report: Path, expected_fingerprint: str) -> Counts:
    """Count the outcomes of one JUnit report; see `read_reports`."""
    return read_reports([report], expected_fingerprint)[0]


def record(
    counts: Counts, gpu: str, capability: str, versions: dict[str, str], figures: Any, sources: str
) -> dict[str, Any]:
    """Return the record of a green run; a run that is not green, or ran nothing on the GPU, is refused."""
    if counts.failed:
        raise ValidationError(f"{counts.failed} tests failed: only a green run is recorded")
    if not counts.gpu_passed:
        raise ValidationError("no test marked gpu passed: the run validates no GPU")
    return {
        "gpu": gpu,
        "compute_capability": capability,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "fingerprint": sources,
        "versions": versions,
        "tests": {"passed": counts.passed, "passed_on_gpu": counts.gpu_passed, "skipped": counts.skipped},
        "figures": figures,
    }


def record_name(gpu: str) -> str:
    """File name of a GPU's record: ``NVIDIA H200`` gives ``h200.json``."""
    return f"{gpu_slug(gpu)}.json"


def validated(root: Path = ROOT) -> list[dict[str, list[int]]]:
    """Return what the package ships of the records of ``root``: the compute capabilities they cover."""
    records = (
        json.loads(path.read_text(encoding="utf-8")) for path in (root / "docs/validation").glob("*.json")
    )
    capabilities = {tuple(map(int, record["compute_capability"].split("."))) for record in records}
    return [{"compute_capability": list(capability)} for capability in sorted(capabilities)]


def save(content: dict[str, Any], root: Path = ROOT) -> tuple[Path, Path]:
    """Write a record, and the list of validated GPUs that the package ships; return both files."""
    path, shipped = root / "docs" / "validation" / record_name(content["gpu"]), root / SHIPPED
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    shipped.write_text(json.dumps(validated(root), indent=2) + "\n", encoding="utf-8")
    return path, shipped


def check(root: Path = ROOT) -> tuple[list[str], bool]:
    """Return one line for each record of ``root``, and whether every record could be read."""
    lines, readable = [], True
    current = fingerprint(root)
    for path in sorted((root / "docs" / "validation").glob("*.json")):
        name = path.relative_to(root).as_posix()
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            missing = [key for key in REQUIRED_KEYS if key not in content]
            if missing:
                raise ValidationError(f"lacks {', '.join(missing)}")
        except (ValueError, TypeError) as error:
            lines.append(f"{name}: cannot be read: {error}")
            readable = False
            continue
        ran = f"{content['gpu']}, {content['date']}, {content['tests']['passed']} tests passed"
        verdict = "matches" if content["fingerprint"] == current else "differs from"
        lines.append(f"{name}: {verdict} the tree ({ran})")
    return lines or ["docs/validation: no record yet"], readable


def _machine(figures: Sequence[dict[str, Any]], sources: str) -> tuple[str, str, dict[str, str]]:
    """Return GPU, compute capability and versions: of this machine, or of the figures of the run."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return properties.name, f"{properties.major}.{properties.minor}", versions()
    if not figures:
        raise ValidationError(
            "torch sees no GPU here: write the record on the machine of the run, or with --figures"
        )
    for one in figures:
        if one["fingerprint"] != sources:
            raise ValidationError(f"the figures of {one['phase']!r} are of another tree")
    capability = preset(gpu_slug(figures[0]["gpu"])).compute_capability
    return figures[0]["gpu"], ".".join(map(str, capability)), figures[0]["versions"]


def _write(arguments: argparse.Namespace) -> None:
    sources = fingerprint()
    counts, repeated = read_reports(arguments.junit, sources)
    figures = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.figures or ()]
    gpu, capability, packages = _machine(figures, sources)
    heading = ("gpu", "date", "fingerprint", "versions")
    measured = [{key: value for key, value in one.items() if key not in heading} for one in figures]
    content = record(counts, gpu, capability, packages, measured, sources)
    if repeated:
        content["tests"]["failed_then_passed"] = repeated
    for path in save(content):
        print(path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Records of test runs on real GPUs.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fingerprint", help="print the fingerprint of the sources")
    commands.add_parser("check", help="say which records still match the sources")
    write = commands.add_parser("write", help="record a green run, on the machine of the run")
    write.add_argument("--junit", type=Path, nargs="+", required=True, help="JUnit reports of the run")
    write.add_argument("--figures", type=Path, nargs="+", help="records of `sdm-rt bench` of the same run")
    arguments = parser.parse_args(argv)
    if arguments.command == "fingerprint":
        print(fingerprint())
        return 0
    if arguments.command == "check":
        lines, readable = check()
        print("\n".join(lines))
        return 0 if readable else 1
    try:
        _write(arguments)
    except ValidationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
