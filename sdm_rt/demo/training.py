"""Training of one model: data order, optimizer, evaluation at intervals, checkpoint, exact resumption."""

from __future__ import annotations

import dataclasses
import math
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdm_rt.demo.checkpoint import load_checkpoint, save_checkpoint
from sdm_rt.demo.config import DemoConfig
from sdm_rt.demo.errors import DemoError
from sdm_rt.demo.evaluation import bits_per_byte
from sdm_rt.demo.model import ByteLanguageModel
from sdm_rt.demo.text import Corpus

__all__ = [
    "History",
    "Progress",
    "StopOnInterrupt",
    "StoppedError",
    "TrainingRun",
    "learning_rate_factor",
    "train",
]

EVALUATIONS = 6


class StoppedError(Exception):
    """Training stopped early, at the user's wish, after saving its checkpoint."""


@dataclass
class History:
    """What training has measured so far.

    Parameters
    ----------
    losses : list of float
        Training loss of each step, in bits per byte.
    evaluated_steps, validation : list
        Steps done at each evaluation, and the validation bits per byte it gave.
    seconds : float
        Wall time of the steps, without evaluations.
    """

    losses: list[float] = field(default_factory=list)
    evaluated_steps: list[int] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    seconds: float = 0.0


class Progress(Protocol):
    """Where `train` reports to."""

    def step(self, loss: float, tokens_per_second: float) -> None:
        """Take the loss of the step just done."""

    def evaluated(self, step: int, bits: float) -> None:
        """Take the validation bits per byte after ``step`` steps."""


class TrainingRun:
    """A model, its optimizer and its place in the data order.

    Parameters
    ----------
    config : DemoConfig
        Sizes; ``config.seed`` settles initial weights and data order, the same with and without SDM layers.
    corpus : Corpus
        The text.
    with_sdm : bool
        False: the same model with its SDM layers removed.
    device : torch.device
        Where the model lives.
    """

    def __init__(self, config: DemoConfig, corpus: Corpus, with_sdm: bool, device: torch.device) -> None:
        self.config = config
        self.corpus = corpus
        self.device = device
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            self.model = ByteLanguageModel(config)
        if not with_sdm:
            self.model.remove_sdm_layers()
        self.model.to(device)
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model, config), betas=(0.9, 0.95))
        self.sampler = torch.Generator().manual_seed(config.seed)
        self.history = History()

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return len(self.history.losses)

    def advance(self) -> float:
        """Do one optimizer step and return its loss in bits per byte."""
        started = time.perf_counter()
        config = self.config
        windows = sample_windows(self.corpus.train, config.batch, config.seq_len, self.sampler).to(
            self.device
        )
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * learning_rate_factor(self.step, config.steps)
        logits = self.model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self.optimizer.step()
        value = loss.item() / math.log(2)
        if not math.isfinite(value):
            raise DemoError(f"training diverged at step {self.step + 1}: the loss is {value}")
        self.history.losses.append(value)
        self.history.seconds += time.perf_counter() - started
        return value

    def save(self, path: Path) -> None:
        """Write the checkpoint from which `load` continues exactly."""
        content = {
            "config": dataclasses.asdict(self.config),
            "text": self.corpus.fingerprint,
            "text_path": self.corpus.path,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sampler": self.sampler.get_state(),
            "history": dataclasses.asdict(self.history),
        }
        save_checkpoint(path, content)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint; one of another text or of other sizes is a DemoError."""
        content = load_checkpoint(path)
        if content["text"] != self.corpus.fingerprint:
            raise DemoError(
                f"{path} was trained on another text than the one found now: name the same text with --text"
            )
        if content["config"] != dataclasses.asdict(self.config):
            raise DemoError(f"{path} belongs to a run of other sizes")
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.sampler.set_state(content["sampler"])
        self.history = History(**content["history"])


class StopOnInterrupt:
    """Context in which the first Ctrl-C only sets ``requested``; a second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> StopOnInterrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def train(
    run: TrainingRun,
    windows: Tensor,
    path: Path,
    progress: Progress,
    stop: StopOnInterrupt,
    replaced: Sequence[Path] = (),
) -> None:
    """Train ``run`` to its last step, evaluating and saving at intervals, first after the first step.

    Parameters
    ----------
    run : TrainingRun
        New, or loaded from a checkpoint.
    windows : torch.Tensor
        Validation bytes, int64 [N, T + 1], on the device of the run.
    path : Path
        The checkpoint.
    progress : Progress
        Told of each step and evaluation.
    stop : StopOnInterrupt
        Looked at after each step.
    replaced : sequence of Path
        What a new run removes once it has done a step; one that the memory is too small for removes nothing.

    Raises
    ------
    StoppedError
        ``stop`` was requested; the checkpoint holds every step done.
    """
    steps, history = run.config.steps, run.history
    first, seconds_before = run.step, history.seconds
    interval = math.ceil(steps / EVALUATIONS)

    def evaluate() -> None:
        bits = bits_per_byte(run.model, windows, run.config.batch)
        history.evaluated_steps.append(run.step)
        history.validation.append(bits)
        progress.evaluated(run.step, bits)

    if not history.validation:
        evaluate()
    while run.step < steps:
        loss = run.advance()
        tokens = (run.step - first) * run.config.batch * run.config.seq_len
        progress.step(loss, tokens / (history.seconds - seconds_before))
        due = run.step % interval == 0 or run.step == steps
        if due:
            evaluate()
        if run.step == 1:
            for old in replaced:
                old.unlink(missing_ok=True)
        stopped = stop.requested and run.step < steps
        if due or stopped or run.step == 1:
            run.save(path)
        if stopped:
            raise StoppedError


def parameter_groups(model: nn.Module, config: DemoConfig) -> list[dict[str, Any]]:
    """Return AdamW's groups, each with ``peak``, its highest learning rate.

    Matrices have weight decay; vectors and parameters marked ``_no_weight_decay`` have none, nor have the
    learned banks (marked ``_sdm_memory_bank``): each of their rows meets few tokens, so they learn faster.
    """
    matrices, vectors, banks = [], [], []
    for parameter in model.parameters():
        if getattr(parameter, "_sdm_memory_bank", False):
            banks.append(parameter)
        elif parameter.ndim < 2 or getattr(parameter, "_no_weight_decay", False):
            vectors.append(parameter)
        else:
            matrices.append(parameter)
    return [
        {"params": matrices, "weight_decay": config.weight_decay, "peak": config.learning_rate},
        {"params": vectors, "weight_decay": 0.0, "peak": config.learning_rate},
        {"params": banks, "weight_decay": 0.0, "peak": config.learning_rate * config.bank_rate},
    ]


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the factor on the peak rate: linear warm-up, then a cosine from 1 to 0.1."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def sample_windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Return ``count`` random windows of ``text`` as int64 [count, length + 1]."""
    starts = torch.randint(len(text) - length, (count, 1), generator=generator)
    return text[starts + torch.arange(length + 1)].long()
