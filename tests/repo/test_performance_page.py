"""docs/performance.md is what its script makes of the committed records; the script on made-up records."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sdm_rt.bench.cases import CASES
from sdm_rt.bench.scaling import CURVES
from sdm_rt.cli.bench import PHASES as BENCH_PHASES
from tests.performance_page import __main__ as script
from tests.performance_page.goals import case_misses, goals
from tests.performance_page.markdown import number
from tests.performance_page.page import PATH, rendered
from tests.performance_page.pictures import draw
from tests.performance_page.records import FOLDER, PHASES, Records, geometric_mean, load
from tests.performance_page.sections import SECTIONS, goal_table, misses

REFERENCE = json.loads((FOLDER / "reference.json").read_text())
HEADING = {
    "gpu": "NVIDIA H200",
    "date": "2026-12-24",
    "fingerprint": "0123456789abcdef" * 4,
    "versions": {"torch": "2.11", "torch_cuda": "13.0", "cupy-cuda13x": "14.2", "nvrtc": "13.0"},
}


def made_up(scale: float = 0.5) -> Records:
    """Records of a run that takes ``scale`` times what the reference's graphs take."""
    training, forward = {}, {}
    for case, figures in REFERENCE["cases"].items():
        step, call = scale * figures["graph_ms"], scale * figures["no_grad_graph_ms"]
        training[case] = {
            "forward_ms": step / 4,
            "forward_host_ms": 0.125,
            "backward_ms": 3 * step / 4,
            "backward_host_ms": 0.25,
            "step_ms": step,
            "graph_ms": 0.9 * step,
            "floor_ms": 0.5 * step,
            "peak_gib": scale * figures["peak_gib"],
        }
        forward[case] = {
            "no_grad_ms": call,
            "no_grad_host_ms": 0.5,
            "no_grad_graph_error": "RuntimeError: made up",
            "no_grad_floor_ms": 0.5 * call,
            "no_grad_peak_gib": scale * figures.get("no_grad_peak_gib", 1.0),
        }
    kernels = {"gather": {"launches": 512, "us": 9.5}, "gwr": {"launches": 512, "us": 12.25}}
    training["flagship"]["profile"] = {"span_ms": 12.0, "busy_ms": 11.125, "kernels": kernels}
    narrow = {"gwr": {"launches": 64, "us": 3.0}}
    training["narrow"]["profile"] = {"span_ms": 2.0, "busy_ms": 1.5, "kernels": narrow}
    row = {"step_ms": 20.0, "step_host_ms": 1.0, "no_grad_ms": 9.0, "no_grad_host_ms": 0.5}
    floors = {"op_step_floor_ms": 12.0, "op_no_grad_floor_ms": 5.0, "captured_step_ms": 19.0}
    layer = [
        {"T": 32768, **row, **floors, "cuda_graph_step_error": "ValueError: made up"},
        {"T": 2048, **row, **floors, "cuda_graph_step_ms": 3.5},
    ]
    points = [4 ** (i + 1) for i in range(3)]
    curve = [
        {"no_grad_ms": 1.0 * n, "no_grad_floor_ms": 0.5 * n, "step_ms": 3.0 * n, "step_floor_ms": 1.0 * n}
        for n in points
    ]
    curve[-1] = {"no_grad_ms": 1.0 * points[-1], "step_left_out": "needs 200.0 GiB, 140.0 GiB are free"}
    scaling = {name: [{name: n, **at} for n, at in zip(points, curve, strict=True)] for name in CURVES}
    phases = {
        "forward": {"copy_tb_s": 4.2, "forward": forward},
        "training": {"copy_tb_s": 4.25, "training": training},
        "layer": {
            "layer": layer,
            "layer_decode": [
                {
                    "B": 1,
                    "gpu_ms": 0.24,
                    "host_ms": 0.2,
                    "cuda_graph_gpu_ms": 0.12,
                    "cuda_graph_host_ms": 0.0625,
                },
                {"B": 8, "gpu_ms": 0.48, "host_ms": 0.2},
            ],
            "topk": {"rows": 65536, "k": 64, "gpu_ms": 0.16, "host_ms": 0.01},
        },
        "decode": {
            "launch_us": 3.5,
            "decode": [
                {"P": 2, "python_us": 20.0, "gpu_us": 3.5},
                {"P": 16, "python_us": 24.0, "gpu_us": 5.0},
            ],
        },
        "start": {
            "start": [
                {"cores": 16, "cold_s": 8.0, "warm_s": 0.5},
                {"cores": 2, "cold_s": 30.0, "warm_s": 0.75},
            ]
        },
        "scaling": {"scaling": scaling},
        "accuracy": {"accuracy": {"flagship": {"readings": 2.34e-3, "grad v": 5e-8}}},
    }
    return Records(
        REFERENCE, {phase: {**HEADING, "phase": phase, **record} for phase, record in phases.items()}
    )


def goal(records: Records, name: str):
    (found,) = [goal for goal in goals(records) if goal.name == name]
    return found


def test_the_page_says_what_the_records_say() -> None:
    page = PATH.read_text(encoding="utf-8")
    assert rendered(page, load()) == page, "python -m tests.performance_page writes the page anew"


def test_records_and_reference_name_the_cases_and_phases_of_the_benchmark() -> None:
    assert list(REFERENCE["cases"]) == list(CASES)
    assert sorted(PHASES) == sorted(BENCH_PHASES)
    names = re.compile(rf"reference\.json|cpu-op\.json|\w+-({'|'.join(PHASES)})\.json")
    assert [path.name for path in FOLDER.iterdir() if not names.fullmatch(path.name)] == []


def test_prose_is_kept_and_every_section_written() -> None:
    page = rendered(PATH.read_text(encoding="utf-8"), made_up())
    outside = re.compile(r"<!-- figures: (.*?) -->\n.*?<!-- end of figures -->", re.DOTALL)
    assert outside.sub("", page) == outside.sub("", PATH.read_text(encoding="utf-8"))
    written = page.replace(SECTIONS["cpu"](made_up()), "")
    assert "Not measured yet" not in written
    assert rendered(page, made_up()) == page


@pytest.mark.parametrize(
    "change",
    [
        lambda page: page.replace("<!-- figures: goals -->", "<!-- figures: aims -->"),
        lambda page: page.replace("<!-- figures: goals -->", ""),
        lambda page: page + "\n<!-- figures: goals -->\n<!-- end of figures -->\n",
    ],
    ids=["unknown", "missing", "twice"],
)
def test_a_page_that_does_not_mark_every_section_once_is_refused(change) -> None:
    with pytest.raises(ValueError, match="must mark each of"):
        rendered(change(PATH.read_text(encoding="utf-8")), made_up())


def test_goals_by_hand() -> None:
    records = made_up(0.5)
    mean = goal(records, "training step, geometric mean of 10 cases, against graph")
    assert mean.value == pytest.approx(0.5)
    assert mean.met is True
    assert mean.floor == pytest.approx(0.5 * mean.ours)
    plain = goal(records, "training step, geometric mean of 10 cases, against plain")
    steps = [f["forward_ms"] + f["backward_ms"] for f in REFERENCE["cases"].values()]
    graphs = [f["graph_ms"] for f in REFERENCE["cases"].values()]
    assert plain.value == pytest.approx(0.5 * geometric_mean(graphs) / geometric_mean(steps))
    flagship = goal(records, "training step of flagship")
    assert (flagship.value, flagship.plain, flagship.graph, flagship.met) == (24.5, 61.3, 49.0, True)
    assert goal(records, "no-grad forward, geometric mean of 10 cases, against graph").value == pytest.approx(
        0.5
    )
    assert goal(records, "decode op from Python, against plain").value == pytest.approx(0.24)
    assert goal(records, "decode token of the layer, B = 1, against plain").met is True
    assert goal(records, "decode token of the layer, B = 8, against plain").value == pytest.approx(0.5)
    assert goal(records, "decode token of the layer, B = 8, against plain").met is False
    replayed = "decode token of the layer with `cuda_graph=True`, B = {}, against plain"
    assert goal(records, replayed.format(1)).value == pytest.approx(0.125)
    assert replayed.format(8) not in [goal.name for goal in goals(records)]  # that record has none
    assert goal(records, "layer, T = 32,768, forward and backward, against graph").value == pytest.approx(
        20 / 58.9
    )
    assert goal(records, "layer, T = 2,048, forward and backward, against plain").met is False
    assert goal(records, "peak memory, training, the largest case").value == pytest.approx(0.5)
    assert goal(records, "peak memory, training flagship").value == pytest.approx(5.57)
    assert goal(records, "first training step, empty cache, 16 cores").met is True
    assert goal(records, "first training step, empty cache, 2 cores").met is False
    assert goal(records, "first training step, filled cache").value == 0.5


def test_what_misses_is_listed_with_its_figure() -> None:
    listed = misses(made_up(0.5))
    assert "- first training step, empty cache, 2 cores: 30.00 s, goal 25.00 s\n" in listed
    assert "- decode token of the layer, B = 8, against plain: 0.50, goal 0.30\n" in listed
    assert "flagship" not in listed
    slow = misses(made_up(1.1))
    assert "training step, the slowest case against graph" in slow
    assert "training step of flagship: 53.90 ms, goal 32.00 ms" in slow
    assert "peak memory, training, cases above 1.00: small 1.10" in slow
    assert len(case_misses(made_up(1.1))) == 3
    assert case_misses(made_up(0.5)) == []


def test_a_case_that_was_not_measured_is_no_geometric_mean() -> None:
    records = made_up()
    del records.phases["training"]["training"]["batch"]
    mean = goal(records, "training step, geometric mean of 10 cases, against graph")
    assert mean.met is None
    assert mean.note == "9 of 10 cases measured"
    assert "not measured" in goal_table(records)
    assert "batch" not in SECTIONS["training"](records)


def test_sections_show_the_figures() -> None:
    records = made_up()
    assert (
        "| flagship | 6.12 (0.12) | 18.4 (0.25) | 24.5 | 22.1 | 12.2 | 61.3 | 49.0 | 0.50 | 0.40 |"
        in SECTIONS["training"](records)
    )
    forward = SECTIONS["forward"](records)
    assert "| flagship | 6.95 (0.50) | - | 3.48 | 22.0 | 13.9 | 0.50 | 0.32 |" in forward
    assert "Not captured as a graph: flagship: RuntimeError: made up." in forward
    listed = SECTIONS["kernels"](records)
    assert "| kernel, launches x us | flagship | reference | narrow |" in listed
    assert "| gather | 512 x 9.50 | 16.5 | - |" in listed
    assert "| gwr | 512 x 12.2 | - | 64 x 3.00 |" in listed
    assert "| **any kernel, ms a step** | 11.1 | - | 1.50 |" in listed
    assert "| flagship fp8 | 3.58 | 7.15 | 0.50 | 0.50 | - | - |" in SECTIONS["memory"](records)
    assert "T = 32,768, cuda_graph_step: ValueError: made up." in SECTIONS["layer"](records)
    listed = SECTIONS["layer"](records)
    assert "| one decode token, B = 1 | 0.24 (0.20) | 0.96 | 0.25 | - |" in listed
    assert "| one decode token, B = 1, `cuda_graph=True` | 0.12 (0.06) | 0.96 | 0.12 | - |" in listed
    assert "B = 8, `cuda_graph=True`" not in listed
    assert "| T, training | 4 to 64 | 16 | 4.0 | 4.00 (4 to 16) |" in SECTIONS["scaling"](records)
    assert "- S = 64, training: needs 200.0 GiB, 140.0 GiB are free" in SECTIONS["scaling"](records)
    records.phases["forward"]["schedule"] = "stepwise"
    machine = SECTIONS["machine"](records)
    assert "4.20 / 4.25 TB/s" in machine
    assert "`sdm-rt bench --phase forward --schedule stepwise` | [h200-forward.json]" in machine
    assert "| 2 | 20.0 | 100 - 150 | 3.50 | 2.70 |" in SECTIONS["decode"](records)
    assert "| flagship | 2.3e-03 | 5.0e-08 |" in SECTIONS["accuracy"](records)
    assert "| 2 | 30.0 | 0.75 |" in SECTIONS["start"](records)


def test_pictures(tmp_path: Path) -> None:
    paths = draw(made_up(), tmp_path / "pictures")
    assert [path.name for path in paths] == [f"scaling-{name}.png" for name in CURVES]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size < 60_000
    assert all(f"pictures/{path.name}" in SECTIONS["scaling"](made_up()) for path in paths)


def test_the_script_writes_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "performance.md"
    page.write_text(PATH.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(script.page, "PATH", page)
    monkeypatch.setattr(script, "load", made_up)
    monkeypatch.setattr("tests.performance_page.pictures.draw", lambda records: draw(records, tmp_path))
    assert script.main(["--check"]) == 1
    assert "+| training step of flagship | 24.5 ms |" in capsys.readouterr().out
    assert page.read_text(encoding="utf-8") == PATH.read_text(encoding="utf-8")
    assert script.main([]) == 0
    assert "| training step of flagship | 24.5 ms |" in capsys.readouterr().out
    assert script.main(["--check"]) == 0


def test_a_record_under_a_wrong_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "reference.json").write_text(json.dumps(REFERENCE))
    record = made_up().phases["decode"]
    (tmp_path / "h200-start.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"h200-start\.json: is a record of phase decode on NVIDIA H200"):
        load(tmp_path)
    (tmp_path / "h200-start.json").rename(tmp_path / "h200-decode.json")
    assert load(tmp_path).figures("decode") == record["decode"]
    (tmp_path / "h200-decode.json").write_text(json.dumps({**record, "gpu": "NVIDIA H100"}))
    with pytest.raises(ValueError, match="on NVIDIA H100"):
        load(tmp_path)


def test_numbers() -> None:
    shown = [number(value) for value in (None, 0.126, 9.994, 12.34, 123.4, 12345.6)]
    assert shown == ["-", "0.13", "9.99", "12.3", "123", "12,346"]
