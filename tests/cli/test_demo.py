"""The demo: its text, its model, exact resumption, and the command from start to end."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sdm_rt.cli import demo, main
from sdm_rt.demo import checkpoint, experiment
from sdm_rt.demo.checkpoint import load_checkpoint, save_checkpoint
from sdm_rt.demo.config import DemoConfig
from sdm_rt.demo.errors import DemoError
from sdm_rt.demo.evaluation import bits_per_byte, unigram_bits_per_byte, validation_windows
from sdm_rt.demo.generation import decode_difference, generate
from sdm_rt.demo.model import ByteLanguageModel, LocalAttention
from sdm_rt.demo.slots import count_slot_use
from sdm_rt.demo.text import Corpus, load_corpus, split_files, standard_library_files
from sdm_rt.demo.training import (
    StopOnInterrupt,
    StoppedError,
    TrainingRun,
    learning_rate_factor,
    parameter_groups,
    sample_windows,
    train,
)
from sdm_rt.errors import MissingDependencyError
from sdm_rt.ops import availability
from sdm_rt.ops.availability import gpu_path_obstacle

CPU = torch.device("cpu")
SMALL = DemoConfig(
    steps=6,
    batch=2,
    seq_len=24,
    dim=16,
    layers=2,
    attention_heads=2,
    window=4,
    sdm_heads=2,
    slots=16,
    writes=3,
    reads=3,
)
SMALL_OPTIONS = ["--steps=4", "--batch=2", "--seq-len=16", "--dim=16", "--layers=1", "--slots=64"]


class Silent:
    def step(self, loss: float, tokens_per_second: float) -> None:
        assert tokens_per_second > 0

    def evaluated(self, step: int, bits: float) -> None:
        assert math.isfinite(bits)


class StopAt(StopOnInterrupt):
    """A Ctrl-C during the step after which ``run`` has done ``step`` steps."""

    def __init__(self, run: TrainingRun, step: int) -> None:
        self.run = run
        self.at = step

    @property
    def requested(self) -> bool:  # type: ignore[override]
        return self.run.step >= self.at


@pytest.fixture
def corpus() -> Corpus:
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8)
    return Corpus(text[:6000], text[6000:8000], "this test", None)


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for name in "abcdefghijkl":
        (folder / f"{name}.txt").write_text(f"file {name}: " + f"the quick brown fox {name} jumps. " * 40)
    return folder


def trained(corpus: Corpus, path: Path, with_sdm: bool = True) -> TrainingRun:
    run = TrainingRun(SMALL, corpus, with_sdm, CPU)
    train(run, windows_of(corpus), path, Silent(), StopOnInterrupt())
    return run


def windows_of(corpus: Corpus) -> torch.Tensor:
    return validation_windows(corpus.validation, SMALL.seq_len, 8)


class TestText:
    def test_standard_library_is_split_by_file_in_a_fixed_order(self) -> None:
        first, again = load_corpus(None, 1000), load_corpus(None, 1000)
        assert first.fingerprint == again.fingerprint
        assert len(first.train) > 1_000_000
        assert 0.05 < len(first.validation) / len(first.train) < 0.15
        training, validation = (
            bytes(part.tolist()).split(b"\0")[:-1] for part in (first.train, first.validation)
        )
        assert not set(training) & set(validation)
        assert len(validation) > 5

    def test_standard_library_has_no_tests_and_no_installed_packages(self) -> None:
        folders = {part for name in standard_library_files() for part in name.split("/")[:-1]}
        assert "json" in folders
        assert not folders & {"test", "tests", "site-packages", "dist-packages", "__pycache__"}

    def test_one_file_is_split_by_position(self, tmp_path: Path) -> None:
        content = bytes(range(256)) * 10
        (tmp_path / "text").write_bytes(content)
        corpus = load_corpus(tmp_path / "text", 16)
        assert bytes(corpus.train.tolist()) + bytes(corpus.validation.tolist()) == content
        assert len(corpus.validation) == 256

    def test_folder_takes_text_files_once_each(self, text_folder: Path) -> None:
        whole = load_corpus(text_folder, 16)
        (text_folder / "binary").write_bytes(b"\xff\xfe\x00" * 5000)
        (text_folder / "zeros.txt").write_bytes(b"a\0b" * 5000)
        (text_folder / "copy of a.txt").write_bytes((text_folder / "a.txt").read_bytes())
        assert load_corpus(text_folder, 16).fingerprint == whole.fingerprint
        (text_folder / "new.txt").write_text("new " * 300)
        assert load_corpus(text_folder, 16).fingerprint != whole.fingerprint

    def test_text_bytes_bound_what_is_taken(self, text_folder: Path, tmp_path: Path) -> None:
        whole, part = load_corpus(text_folder, 16), load_corpus(text_folder, 16, 8000)
        sizes = [len(corpus.train) + len(corpus.validation) for corpus in (whole, part)]
        ends = bytes(part.train.tolist()).count(b"\0") + bytes(part.validation.tolist()).count(b"\0")
        assert 6000 < sizes[1] - ends <= 8000 < sizes[0]
        (tmp_path / "one").write_bytes(b"0123456789" * 100)
        one = load_corpus(tmp_path / "one", 16, 300)
        assert len(one.train) + len(one.validation) == 300
        assert len(load_corpus(None, 1000, 500_000).train) < 500_000

    def test_files_too_large_for_a_tenth_still_split(self) -> None:
        training, validation = split_files({"a": b"a" * 50, "b": b"b" * 40, "c": b"c" * 60})
        assert (set(training), set(validation)) == ({"a", "c"}, {"b"})

    def test_too_short_missing_and_empty(self, tmp_path: Path) -> None:
        short = tmp_path / "short.txt"
        short.write_text("short")
        with pytest.raises(
            DemoError, match=r"short\.txt is too short: 4 bytes to train and 1 to validate, .* 64 of"
        ):
            load_corpus(short, 64)
        with pytest.raises(DemoError, match="nowhere: no such file or folder"):
            load_corpus(tmp_path / "nowhere", 64)
        (tmp_path / "empty").mkdir()
        with pytest.raises(DemoError, match=r"no UTF-8 text file in .*empty"):
            load_corpus(tmp_path / "empty", 64)

    def test_what_cannot_be_read_is_said_as_it_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(DemoError, match=f"{os.devnull}: neither a file nor a folder"):
            load_corpus(Path(os.devnull), 64)

        def unreadable(path: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        monkeypatch.setattr(os, "scandir", unreadable)
        with pytest.raises(PermissionError, match=str(tmp_path)):
            load_corpus(tmp_path, 64)

    def test_too_few_bytes_asked_for(self, tmp_path: Path) -> None:
        with pytest.raises(DemoError, match=r"Python standard library is too short: 0 .* more --text-bytes"):
            load_corpus(None, 64, 10)
        (tmp_path / "text").write_text("text")
        with pytest.raises(DemoError, match="no UTF-8 text file that 3 bytes hold in"):
            load_corpus(tmp_path, 64, 3)


class TestModel:
    def test_no_byte_sees_a_later_one(self) -> None:
        model = ByteLanguageModel(SMALL).eval()
        tokens = torch.randint(256, (2, 20))
        changed = tokens.clone()
        changed[:, 12] = (changed[:, 12] + 1) % 256
        with torch.no_grad():
            difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
        assert not difference[:12].any()
        assert difference[12] > 0

    def test_only_sdm_layers_reach_beyond_the_attention_windows(self) -> None:
        model = ByteLanguageModel(SMALL).eval()
        reach = SMALL.layers * (SMALL.window - 1)
        tokens = torch.randint(256, (2, 24))
        changed = tokens.clone()
        changed[:, 0] = (changed[:, 0] + 1) % 256
        beyond = slice(reach + 1, None)
        with torch.no_grad():
            assert (model(tokens) - model(changed))[:, beyond].any()
            model.remove_sdm_layers()
            difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
        assert difference[reach] > 0
        assert not difference[beyond].any()

    def test_baseline_starts_from_the_same_weights_and_data(self, corpus: Corpus) -> None:
        sdm, baseline = (TrainingRun(SMALL, corpus, with_sdm, CPU) for with_sdm in (True, False))
        full = sdm.model.state_dict()
        kept = baseline.model.state_dict()
        assert {name for name in full if "sdm" not in name} == set(kept)
        assert all(torch.equal(full[name], weight) for name, weight in kept.items())
        batches = [sample_windows(corpus.train, 2, 24, run.sampler) for run in (sdm, baseline)]
        assert torch.equal(*batches)

    def test_decode_equals_parallel(self) -> None:
        tokens = torch.randint(256, (2, 30))
        model = ByteLanguageModel(SMALL)
        assert decode_difference(model, tokens) < 1e-12
        model.remove_sdm_layers()
        assert decode_difference(model, tokens) < 1e-12

    def test_generation_is_seeded_and_continues_the_prompt(self) -> None:
        model = ByteLanguageModel(SMALL)
        sample = generate(model, b"def ", 20, 1.0, 3)
        assert len(sample) == 20
        assert generate(model, b"def ", 20, 1.0, 3) == sample
        assert generate(model, b"def ", 20, 1.0, 4) != sample

    def test_cold_generation_takes_the_likeliest_byte_of_the_parallel_forward(self) -> None:
        model = ByteLanguageModel(SMALL).eval()
        prompt = b"import os\n"
        with torch.no_grad():
            likeliest = int(model(torch.tensor([list(prompt)]))[0, -1].argmax())
        assert generate(model, prompt, 1, 1e-4, 0)[0] == likeliest

    @pytest.mark.parametrize(
        ("blocks", "wanted", "expected"),
        [(4, 2, [1, 3]), (4, 0, [0, 1, 2, 3]), (3, 1, [2]), (5, 3, [1, 3, 4]), (2, 2, [0, 1])],
    )
    def test_sdm_layers_are_spread_over_the_blocks(
        self, blocks: int, wanted: int, expected: list[int]
    ) -> None:
        model = ByteLanguageModel(dataclasses.replace(SMALL, layers=blocks, sdm_layers=wanted))
        assert [at for at, block in enumerate(model.blocks) if block.sdm is not None] == expected
        assert decode_difference(model, torch.randint(256, (1, 12))) < 1e-12

    @pytest.mark.parametrize(
        "sizes",
        [
            {"steps": 0},
            {"seq_len": 1},
            {"dim": 20},
            {"slots": 1000},
            {"sdm_layers": 3},
            {"text_bytes": -1},
            {"batch": 2**63},
            {"seq_len": 2**63},
            {"slots": 2**64},
            {"seed": 2**64},
            {"seed": -(2**63) - 1},
        ],
    )
    def test_sizes_out_of_range_are_named(self, sizes: dict[str, int]) -> None:
        (name,) = sizes
        with pytest.raises(DemoError, match=name):
            DemoConfig(**sizes)


class TestEvaluation:
    def test_unigram_of_known_frequencies(self) -> None:
        train_text = torch.tensor(
            [0] * 127 + [1] * 127, dtype=torch.uint8
        )  # each 128 / 510, any other 1 / 510
        windows = torch.tensor([[9, 0, 1], [0, 1, 200]])
        expected = (3 * math.log2(510 / 128) + math.log2(510)) / 4
        assert unigram_bits_per_byte(train_text, windows) == pytest.approx(expected, rel=1e-12)

    def test_uniform_logits_cost_eight_bits(self, corpus: Corpus) -> None:
        model = ByteLanguageModel(SMALL)
        torch.nn.init.zeros_(model.head.weight)
        assert bits_per_byte(model, windows_of(corpus), 3) == pytest.approx(8, abs=1e-5)
        assert model.training

    def test_windows_are_disjoint(self) -> None:
        windows = validation_windows(torch.arange(250, dtype=torch.uint8), 9, 5)
        assert windows.shape == (5, 10)
        assert windows.unique().numel() == windows.numel()


class TestTraining:
    @pytest.mark.parametrize("with_sdm", [True, False])
    @pytest.mark.parametrize("stop", [1, 4])
    def test_resumed_run_equals_uninterrupted_run_bitwise(
        self, corpus: Corpus, tmp_path: Path, with_sdm: bool, stop: int
    ) -> None:
        whole = trained(corpus, tmp_path / "whole.pt", with_sdm)
        first = TrainingRun(SMALL, corpus, with_sdm, CPU)
        with pytest.raises(StoppedError):
            train(first, windows_of(corpus), tmp_path / "part.pt", Silent(), StopAt(first, stop))
        second = TrainingRun(SMALL, corpus, with_sdm, CPU)
        second.load(tmp_path / "part.pt")
        assert second.step == stop
        train(second, windows_of(corpus), tmp_path / "part.pt", Silent(), StopOnInterrupt())
        assert second.history.losses == whole.history.losses
        assert second.history.validation == whole.history.validation
        assert second.history.evaluated_steps == whole.history.evaluated_steps
        weights = zip(second.model.parameters(), whole.model.parameters(), strict=True)
        assert all(torch.equal(*pair) for pair in weights)

    def test_seed_changes_the_run(self, corpus: Corpus) -> None:
        losses = [
            TrainingRun(dataclasses.replace(SMALL, seed=seed), corpus, True, CPU).advance()
            for seed in (0, 0, 1)
        ]
        assert losses[0] == losses[1] != losses[2]

    def test_every_parameter_learns(self, corpus: Corpus, tmp_path: Path) -> None:
        run = TrainingRun(SMALL, corpus, True, CPU)
        before = {name: parameter.clone() for name, parameter in run.model.named_parameters()}
        for _ in range(2):
            run.advance()
        unchanged = [
            name for name, parameter in run.model.named_parameters() if torch.equal(parameter, before[name])
        ]
        # BatchNorm takes a bias before it away: no gradient but rounding's.
        assert set(unchanged) <= {
            f"trunk.{n}.sdm.{name}.bias" for n in (0, 1) for name in ("Wk_write", "Wq_read")
        }

    def test_weight_decay_spares_marked_parameters_and_vectors(self) -> None:
        model = ByteLanguageModel(SMALL)
        marked = torch.nn.Parameter(torch.ones(2, 2))
        marked._no_weight_decay = True  # type: ignore[attr-defined]
        model.register_parameter("marked", marked)
        groups = parameter_groups(model, SMALL)
        decayed, spared, banks = ({id(p) for p in group["params"]} for group in groups)
        (layer, _) = model.sdm_layers
        assert id(marked) in spared
        assert {id(layer.A_log), id(layer.dt_bias), id(model.norm.weight)} <= spared
        assert {id(model.head.weight), id(layer.Wo.weight)} <= decayed
        assert banks == {id(layer.memory) for layer in model.sdm_layers}
        assert [group["weight_decay"] for group in groups] == [SMALL.weight_decay, 0, 0]
        assert len(decayed) + len(spared) + len(banks) == len(list(model.parameters()))

    def test_learning_rate_warms_up_and_decays(self) -> None:
        factors = [learning_rate_factor(step, 100) for step in range(101)]
        assert factors[0] == pytest.approx(0.2)
        assert max(factors) == factors[5] == pytest.approx(1)
        assert factors[5:] == sorted(factors[5:], reverse=True)
        assert factors[100] == pytest.approx(0.1)

    def test_divergence_is_an_error(self, corpus: Corpus) -> None:
        run = TrainingRun(SMALL, corpus, False, CPU)
        torch.nn.init.constant_(run.model.head.weight, math.nan)
        with pytest.raises(DemoError, match="diverged at step 1"):
            run.advance()

    def test_second_ctrl_c_stops_at_once(self) -> None:
        before = signal.getsignal(signal.SIGINT)
        with StopOnInterrupt() as stop:
            assert not stop.requested
            signal.raise_signal(signal.SIGINT)
            assert stop.requested
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before


class TestCheckpoint:
    def test_failed_save_keeps_the_old_one(
        self, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "run.pt"
        TrainingRun(SMALL, corpus, True, CPU).save(path)
        whole = path.read_bytes()

        def break_off(content: object, stream: object) -> None:
            stream.write(b"half")  # type: ignore[attr-defined]
            raise OSError("disk full")

        monkeypatch.setattr(checkpoint.torch, "save", break_off)
        with pytest.raises(OSError, match="disk full"):
            save_checkpoint(path, {"step": 2})
        assert path.read_bytes() == whole

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"no checkpoint", "Weights only load failed"),
            (b"junk text", "KeyError"),
            (b"", "EOFError"),
            ({"a": torch.zeros(2)}, "it lacks what the demo saves"),
            (torch.zeros(2), "it lacks what the demo saves"),
            ({key: {} for key in checkpoint.CONTENT}, "its sizes are not those of this version"),
        ],
    )
    def test_what_is_no_checkpoint_is_named_with_the_reason(
        self, content: object, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "sdm.pt"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        for words in ([], ["--resume"]):
            assert main(["demo", "--out", str(tmp_path), *words]) == 2
            assert capsys.readouterr().err == (
                f"sdm-rt demo: {path} is not a checkpoint of the demo ({reason}); delete it to start again\n"
            )

    def test_what_hinders_reading_is_not_the_files_fault(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(IsADirectoryError, match=str(tmp_path)):
            load_checkpoint(tmp_path)
        path = tmp_path / "run.pt"
        path.write_bytes(b"whole")

        def no_memory(*arguments: object, **named: object) -> None:
            raise MemoryError

        monkeypatch.setattr(checkpoint.torch, "load", no_memory)
        with pytest.raises(MemoryError):
            load_checkpoint(path)

    def test_other_text_and_other_sizes_are_refused(self, corpus: Corpus, tmp_path: Path) -> None:
        path = tmp_path / "run.pt"
        TrainingRun(SMALL, corpus, True, CPU).save(path)
        other_text = dataclasses.replace(corpus, train=corpus.train[1:])
        with pytest.raises(DemoError, match="another text"):
            TrainingRun(SMALL, other_text, True, CPU).load(path)
        with pytest.raises(DemoError, match="other sizes"):
            TrainingRun(dataclasses.replace(SMALL, steps=7), corpus, True, CPU).load(path)


class TestSlotUse:
    def test_counts_what_the_biases_choose(self, corpus: Corpus) -> None:
        model = ByteLanguageModel(SMALL)
        layer = model.sdm_layers[1]
        for projection, first in ((layer.Wk_write, 0), (layer.Wq_read, 2)):
            torch.nn.init.zeros_(projection.weight)
            torch.nn.init.zeros_(projection.bias)
            with torch.no_grad():
                # Head 0 of both: factor rows `first` and 3, so slots (first, 3), then by the rule of ties.
                projection.bias[first] = 5.0
                projection.bias[4 + 3] = 5.0
        windows = windows_of(corpus)
        use = count_slot_use(model, windows, 3)
        tokens = windows[:, 1:].numel()
        assert len(use) == 2
        assert all(
            int(counts.sum()) == 2 * 3 * tokens for layer_use in use for counts in vars(layer_use).values()
        )
        assert use[1].writes[0, 0, 3] == tokens
        assert use[1].reads[0, 2, 3] == tokens
        assert use[1].writes[0, 2, 3] + use[1].writes[0, 0].sum() + use[1].writes[0, :, 3].sum() > 2 * tokens
        assert (use[1].writes > 0).sum(dim=(1, 2)).tolist() == [3, 3]


class TestCommand:
    def run(self, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
        status = main(["demo", *map(str, words)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    def test_runs_to_its_end_and_resumes_to_the_same_report(
        self, text_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "run"
        status, printed, bar = self.run(capsys, "--text", text_folder, "--out", out, *SMALL_OPTIONS)
        assert status == 0
        assert "tokens/s" in bar
        assert "loss" in bar
        for words in (
            "unigram",
            "SDM layers removed",
            "validation bits per byte: after",
            "within the tolerance",
        ):
            assert words in printed
        assert (out / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")
        report = json.loads((out / "report.json").read_text())
        for side in ("with_sdm", "sdm_removed"):
            assert len(report[side]["losses"]) == 4
            assert report[side]["evaluated_steps"] == [0, 1, 2, 3, 4]
        assert report["decode_difference"] < 1e-9

        status, _, _ = self.run(capsys, "--resume", "--out", out)
        assert status == 0
        assert json.loads((out / "report.json").read_text()) == report

        # A finished run is replaced without asking, and repeats itself.
        status, _, _ = self.run(capsys, "--text", text_folder, "--out", out, *SMALL_OPTIONS)
        assert status == 0
        assert (
            json.loads((out / "report.json").read_text())["with_sdm"]["losses"]
            == report["with_sdm"]["losses"]
        )

        # A request that cannot be met leaves it alone.
        here = ["--text", text_folder]
        for wrong in (
            ["--text", tmp_path / "mistyped"],
            [*here, "--seed", 2**64],
            [*here, "--dim", 10**15],
            [*here, *SMALL_OPTIONS, "--batch", 10**17],
        ):
            status, _, _ = self.run(capsys, "--out", out, *wrong)
            assert status == 2
            for name in experiment.CHECKPOINTS.values():
                assert len(load_checkpoint(out / name)["history"]["losses"]) == 4

    def test_prints_to_an_ascii_terminal(self, text_folder: Path, tmp_path: Path) -> None:
        words = ["--text", str(text_folder), "--out", str(tmp_path / "run"), *SMALL_OPTIONS]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"}
        done = subprocess.run(
            [sys.executable, "-m", "sdm_rt.cli", "demo", *words],
            capture_output=True,
            env=environment,
            timeout=240,
        )
        assert done.returncode == 0
        assert b"\\u2503" in done.stdout  # the bar between prompt and sample

    def test_decode_that_differs_fails_the_command(
        self,
        text_folder: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        decode = LocalAttention.decode

        def wrong(
            self: LocalAttention, x: torch.Tensor, positions: torch.Tensor, state: object
        ) -> torch.Tensor:
            return decode(self, x, positions // 2, state)  # type: ignore[arg-type]

        monkeypatch.setattr(LocalAttention, "decode", wrong)
        status, printed, _ = self.run(
            capsys, "--text", text_folder, "--out", tmp_path / "run", *SMALL_OPTIONS
        )
        assert status == 1
        assert "ABOVE the tolerance" in printed

    def test_unfinished_run_is_neither_overwritten_nor_continued_otherwise(
        self,
        text_folder: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        out = tmp_path / "run"
        request = ["--text", text_folder, "--out", out, *SMALL_OPTIONS]

        def stop(run: TrainingRun, windows: object, path: Path, *rest: object) -> None:
            run.advance()
            run.save(path)
            raise StoppedError

        with monkeypatch.context() as patched:
            patched.setattr(experiment, "train", stop)
            status, printed, _ = self.run(capsys, *request)
        assert status == 130
        assert f"sdm-rt demo --resume --out {out}" in printed

        status, _, complaint = self.run(capsys, *request)
        assert status == 2
        assert "unfinished run (sdm.pt at step 1 of 4)" in complaint
        status, _, complaint = self.run(capsys, "--resume", "--out", out, "--steps", 5)
        assert status == 2
        assert "continues a run with steps = 4, not 5" in complaint
        (text_folder / "a.txt").write_text("changed " * 100)
        status, _, complaint = self.run(capsys, "--resume", "--out", out)
        assert status == 2
        assert "another text" in complaint

    @pytest.mark.parametrize(("with_sdm", "expected"), [(True, 130), (False, 0)])
    def test_ctrl_c_at_the_end_of_a_model_stops_where_another_is_to_come(
        self,
        text_folder: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        with_sdm: bool,
        expected: int,
    ) -> None:
        def interrupted(run: TrainingRun, *rest: Any) -> None:
            train(run, *rest)
            if bool(run.model.sdm_layers) == with_sdm:
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(experiment, "train", interrupted)
        out = tmp_path / "run"
        status, printed, _ = self.run(capsys, "--text", text_folder, "--out", out, *SMALL_OPTIONS)
        assert status == expected
        assert (f"sdm-rt demo --resume --out {out}" in printed) == with_sdm
        assert (out / "baseline.pt").exists() != with_sdm
        if with_sdm:
            monkeypatch.undo()
            assert self.run(capsys, "--resume", "--out", out)[0] == 0

    def test_nothing_to_resume(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        status, _, complaint = self.run(capsys, "--resume", "--out", tmp_path)
        assert status == 2
        assert "no checkpoint" in complaint

    def test_out_that_is_a_file_is_named(
        self, text_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").write_text("occupied")
        status, _, complaint = self.run(capsys, "--text", text_folder, "--out", tmp_path / "file")
        assert status == 2
        assert str(tmp_path / "file") in complaint
        assert (tmp_path / "file").read_text() == "occupied"

    def test_threads_are_pytorchs(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[int] = []
        monkeypatch.setattr(torch, "set_num_threads", asked.append)
        for words in ((), ("--threads", "2")):
            assert self.run(capsys, "--text", tmp_path / "missing", "--out", tmp_path / "out", *words)[0] == 2
        assert asked == [1, 2]
        most = 4 * (os.cpu_count() or 1)
        for wrong in (0, most + 1, 99999):
            status, _, complaint = self.run(capsys, "--threads", wrong, "--out", tmp_path / "out")
            assert status == 2
            assert complaint == f"sdm-rt demo: --threads: expected from 1 to {most}, got {wrong}\n"
        assert asked == [1, 2]

    def test_a_seed_beyond_pytorchs_is_one_line(
        self, text_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["--text", text_folder, "--out", tmp_path / "out", "--seed", 10**23]
        status, _, complaint = self.run(capsys, *words)
        assert status == 2
        assert complaint == f"sdm-rt demo: seed must be from -2**63 to 2**64 - 1, got {10**23}\n"

    @pytest.mark.parametrize("size", [f"--dim={10**15}", f"--batch={10**17}", f"--batch={2**63 - 1}"])
    def test_sizes_beyond_the_memory_are_one_line(
        self, text_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str
    ) -> None:
        words = ["--text", text_folder, "--out", tmp_path / "out", *SMALL_OPTIONS, size]
        status, _, complaint = self.run(capsys, *words)
        assert status == 2
        assert complaint.endswith(
            "sdm-rt demo: the memory is too small for these sizes; "
            "less of --batch, --seq-len, --dim, --layers or --slots needs less\n"
        )
        status, _, _ = self.run(capsys, "--text", text_folder, "--out", tmp_path / "out", *SMALL_OPTIONS)
        assert status == 0  # with less: no checkpoint is in the way

    @pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
    def test_lack_of_memory_has_many_types(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        error: BaseException,
    ) -> None:
        def fail(request: object) -> None:
            raise error

        monkeypatch.setattr(experiment, "perform", fail)
        status, _, complaint = self.run(capsys, "--out", tmp_path)
        assert (status, complaint.count("\n")) == (2, 1)

    def test_missing_packages_are_one_error(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        status, _, complaint = self.run(capsys, "--out", tmp_path)
        assert status == 2
        assert complaint == 'sdm-rt demo: needs tqdm and matplotlib: pip install "sdm_rt[demo]"\n'

    def test_cuda_is_refused_with_the_reason(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        status, _, complaint = self.run(capsys, "--device", "cuda", "--out", tmp_path)
        assert status == 2
        assert "--device cuda: PyTorch finds no CUDA GPU; --device cpu works" in complaint

    def test_what_the_gpu_path_lacks_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
        assert gpu_path_obstacle() == ("Tesla V100 has compute capability 7.0, the kernels need 8.0 or newer")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        monkeypatch.setattr(availability, "load_cupy", lambda: None)

        def missing() -> None:
            raise MissingDependencyError("the GPU path needs NVRTC; install it with: a command\nmore")

        monkeypatch.setattr(availability, "load_nvrtc", missing)
        assert gpu_path_obstacle() == "the GPU path needs NVRTC; install it with: a command"
        monkeypatch.setattr(availability, "load_nvrtc", lambda: None)
        assert gpu_path_obstacle() is None

    @pytest.mark.parametrize("asked", ["auto", "cuda"])
    def test_a_gpu_is_chosen_and_named(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        asked: str,
    ) -> None:
        requests: list[experiment.Request] = []
        monkeypatch.setattr(demo, "gpu_path_obstacle", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
        monkeypatch.setattr(experiment, "perform", lambda request: bool(requests.append(request) or True))
        status, printed, _ = self.run(capsys, "--device", asked, "--out", tmp_path)
        assert (status, printed) == (0, "device    cuda (H200)\n")
        assert requests[0].device == torch.device("cuda")

    @pytest.mark.skipif(os.name != "posix", reason="sends SIGINT to another process")
    def test_ctrl_c_keeps_the_checkpoint_and_resume_gives_the_uninterrupted_losses(
        self, text_folder: Path, tmp_path: Path
    ) -> None:
        options = ["--text", str(text_folder), *SMALL_OPTIONS, "--steps=60"]
        command = [sys.executable, "-m", "sdm_rt.cli", "demo"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}

        out = tmp_path / "interrupted"
        with subprocess.Popen(
            [*command, "--out", str(out), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        ) as process:
            deadline = time.monotonic() + 120
            while not (out / "sdm.pt").exists():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            printed = process.communicate(timeout=120)[0].decode()
        assert process.returncode == 130
        assert f"sdm-rt demo --resume --out {out}" in printed
        done = len(load_checkpoint(out / "sdm.pt")["history"]["losses"])
        assert done > 0

        whole = tmp_path / "whole"
        for words in (["--resume", "--out", str(out)], ["--out", str(whole), *options]):
            subprocess.run([*command, *words], check=True, capture_output=True, env=environment, timeout=240)
        reports = [json.loads((folder / "report.json").read_text()) for folder in (out, whole)]
        for side in ("with_sdm", "sdm_removed"):
            assert reports[0][side]["losses"] == reports[1][side]["losses"]
            assert reports[0][side]["validation"] == reports[1][side]["validation"]
        assert reports[0]["sample"] == reports[1]["sample"]
