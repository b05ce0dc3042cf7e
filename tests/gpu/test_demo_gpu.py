"""``sdm-rt demo`` on a GPU: the losses of the CPU, and the command from start to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sdm_rt.cli import main
from sdm_rt.demo.config import DemoConfig
from sdm_rt.demo.text import load_corpus
from sdm_rt.demo.training import TrainingRun
from sdm_rt.ops.availability import gpu_path_obstacle

pytestmark = pytest.mark.gpu

# The warm-up, 100 of 2,000 steps, keeps the first updates small. With 25 of 500 a score that rounds
# differently could choose another slot within 20 steps, and move a loss by 1e-4.
CONFIG = DemoConfig(steps=2000, batch=4, seq_len=64, dim=64, slots=256)


def test_the_first_twenty_losses_are_those_of_the_cpu() -> None:
    corpus = load_corpus(None, 1000, 500_000)
    losses = []
    for device in ("cpu", "cuda"):
        run = TrainingRun(CONFIG, corpus, True, torch.device(device))
        losses.append([run.advance() for _ in range(20)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[1][-1] < 0.8 * losses[1][0]


def test_the_command_trains_draws_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_path_obstacle() is None
    sizes = [
        "--steps=4",
        "--batch=2",
        "--seq-len=64",
        "--dim=64",
        "--layers=2",
        "--sdm-layers=1",
        "--slots=256",
    ]
    out = tmp_path / "run"
    assert main(["demo", "--out", str(out), "--text-bytes=300000", *sizes]) == 0
    assert f"device    cuda ({torch.cuda.get_device_name()})" in capsys.readouterr().out
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")
    report = json.loads((out / "report.json").read_text())
    assert len(report["with_sdm"]["losses"]) == 4
    assert main(["demo", "--out", str(out), "--resume", "--device", "cuda"]) == 0
    assert json.loads((out / "report.json").read_text()) == report
