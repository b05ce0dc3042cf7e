"""``sdm-rt plan``: tables, JSON, options and refusals."""

from __future__ import annotations

import json

import pytest

from sdm_rt.cli import main
from sdm_rt.plan.backward import plan_backward
from sdm_rt.plan.decode import plan_decode
from sdm_rt.plan.device import preset
from sdm_rt.plan.forward import plan_forward
from sdm_rt.plan.reference_backward import plan_reference_backward
from sdm_rt.plan.shapes import DecodeShape, WriteReadShape


def plan(options: str) -> int:
    return main(["plan", *options.split()])


def test_forward_and_backward_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--device h100 --streams 2 --tokens 4096") == 0
    shape = WriteReadShape(2, 4096, 64, 64, 64, 1024, 65536)
    expected = [plan_forward(shape, preset("h100")), plan_backward(shape, preset("h100"))]
    assert capsys.readouterr().out == "\n\n".join(made.describe() for made in expected) + "\n"


def test_every_option_reaches_the_shape(capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--device a100 --pass backward --streams 3 --tokens 100 --chunk 16 --writes 5 --reads 7",
        "--head-dim 96 --slots 500 --dtype float16 --index-dtype int32 --snapshot fp8",
        "--grad-bank-fp32 --gates-per-write --json",
    )
    assert plan(" ".join(options)) == 0
    shape = WriteReadShape(3, 100, 16, 5, 7, 96, 500, "float16", "float32", "int32", True, "fp8")
    assert json.loads(capsys.readouterr().out) == [plan_backward(shape, preset("a100")).to_dict()]


def test_decode_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--device h200 --pass decode --streams 16 --json") == 0
    shape = DecodeShape(16, 64, 64, 1024)
    assert json.loads(capsys.readouterr().out) == [plan_decode(shape, preset("h200")).to_dict()]


def test_no_grad_plans_the_forward_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--device h200 --no-grad") == 0
    shape = WriteReadShape(1, 4096, 64, 64, 64, 1024, 65536, training=False)
    assert capsys.readouterr().out == plan_forward(shape, preset("h200")).describe() + "\n"


def test_reference_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--device h200 --streams 1 --pass backward --reference") == 0
    shape = WriteReadShape(1, 4096, 64, 64, 64, 1024, 65536)
    expected = plan_reference_backward(shape, preset("h200")).describe()
    assert "torch.baddbmm" in expected
    assert capsys.readouterr().out == expected + "\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--device v100", "no device preset named 'v100'"),
        ("--device h100 --chunk 300", "chunk must be in 1..256, got 300"),
        (
            "--device rtx4090 --chunk 256 --pass backward --reference",
            "The largest chunk size that fits is chunk_size=188.",
        ),
        ("--device a100 --pass forward --schedule persistent", "use schedule='stepwise'"),
        ("--device h100 --no-grad --pass backward", "--no-grad saves nothing"),
        ("--device h100 --reference --schedule persistent", "--reference is a schedule of its own"),
        ("--device h100 --reference --pass forward", "--reference is a schedule of the backward"),
        ("--device h100 --no-grad --snapshot fp8", "there is no --snapshot"),
        ("--device h100 --pass decode --schedule stepwise", "a decode is one launch"),
        ("--device h100 --pass decode --schedule persistent", "takes no --schedule"),
        ("--device h100 --pass decode --tokens 5", "a decode is one launch of one token"),
        ("--device h100 --pass decode --chunk 3", "takes no --chunk"),
        ("--device h100 --pass decode --slots 3", "takes no --slots"),
        ("--device h100 --pass decode --snapshot fp8", "takes no --snapshot"),
        ("--device h100 --pass decode --no-grad", "takes no --no-grad"),
        ("--device h100 --pass decode --grad-bank-fp32", "--grad-bank-fp32 is of the backward"),
        ("--device h100 --no-grad --grad-bank-fp32", "--grad-bank-fp32 is of the backward"),
        ("--device h100 --pass backward --streams 65536", "65,536 streams do not fit"),
    ],
)
def test_refusals_are_one_line_and_status_1(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(options) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_device_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan"])
    assert "--device" in capsys.readouterr().err
