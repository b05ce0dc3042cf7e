"""The demo from its text to its report: train with and without SDM layers, compare, draw, decode."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from sdm_rt.demo.checkpoint import load_checkpoint
from sdm_rt.demo.config import DemoConfig
from sdm_rt.demo.errors import DemoError
from sdm_rt.demo.evaluation import unigram_bits_per_byte, validation_windows
from sdm_rt.demo.generation import decode_difference, generate
from sdm_rt.demo.model import ByteLanguageModel
from sdm_rt.demo.picture import draw
from sdm_rt.demo.progress import ProgressBar
from sdm_rt.demo.slots import count_slot_use
from sdm_rt.demo.text import Corpus, load_corpus
from sdm_rt.demo.training import StopOnInterrupt, StoppedError, TrainingRun, train

__all__ = ["Request", "perform"]

NAMES = {True: "with SDM layers", False: "SDM layers removed"}
CHECKPOINTS = {True: "sdm.pt", False: "baseline.pt"}
VALIDATION_WINDOWS = 128
FEWEST_WINDOWS = 8
CHECKED_SEQUENCES = 2
DECODE_TOLERANCE = 1e-9
PROMPT_BYTES, SAMPLE_BYTES, TEMPERATURE = 64, 320, 0.7


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    Parameters
    ----------
    sizes : mapping of str to int
        The `DemoConfig` fields given; the rest is the default's, or the checkpoint's when resuming.
    text : Path or None
        The text; None: the standard library, or the checkpoint's text when resuming.
    out : Path
        Folder of checkpoints, picture and report.
    resume : bool
        Continue the run in ``out``.
    device : torch.device
        Where to train.
    """

    sizes: Mapping[str, int]
    text: Path | None
    out: Path
    resume: bool
    device: torch.device


def perform(request: Request) -> bool:
    """Run the demo; return whether the decode path's logits equal the parallel forward's.

    Raises
    ------
    DemoError
        The request cannot be met; nothing was trained.
    StoppedError
        Ctrl-C: the checkpoints in ``request.out`` continue with ``resume``.
    """
    config, text = _resumed(request) if request.resume else _started(request)
    corpus = load_corpus(text, FEWEST_WINDOWS * (config.seq_len + 1), config.text_bytes)
    windows = validation_windows(corpus.validation, config.seq_len, VALIDATION_WINDOWS).to(request.device)
    unigram = unigram_bits_per_byte(corpus.train, windows.cpu())
    request.out.mkdir(parents=True, exist_ok=True)
    print(f"text      {corpus.description}")
    print(
        f"unigram   {unigram:.3f} bits per byte: "
        "the validation text under the byte frequencies of the training text"
    )

    runs = {with_sdm: _prepared(config, corpus, with_sdm, request) for with_sdm in (True, False)}
    replaced = [] if request.resume else [request.out / name for name in CHECKPOINTS.values()]
    with StopOnInterrupt() as stop:
        for with_sdm, run in runs.items():
            with ProgressBar(NAMES[with_sdm], config.steps, run.step) as progress:
                train(run, windows, request.out / CHECKPOINTS[with_sdm], progress, stop, replaced)
                replaced = []
            if stop.requested and with_sdm:  # it came in the last step, and the other model is still to do
                raise StoppedError
    sdm, baseline = runs[True], runs[False]
    slot_use = count_slot_use(sdm.model, windows, config.batch)
    draw(request.out / "curves.png", sdm.history, baseline.history, unigram, slot_use)

    prompt = bytes(corpus.validation[:PROMPT_BYTES].tolist())
    sample = generate(sdm.model, prompt, SAMPLE_BYTES, TEMPERATURE, config.seed)
    print(f"\nA sample, decoded byte by byte after the first {len(prompt)} bytes of the validation text:\n")
    print(_readable(prompt) + "┃" + _readable(sample))

    difference = decode_difference(sdm.model, windows[:CHECKED_SEQUENCES, :-1])
    equal = difference <= DECODE_TOLERANCE
    verdict = f"{'within' if equal else 'ABOVE'} the tolerance of {DECODE_TOLERANCE:.0e}"
    print(
        f"\ndecode    logits of {config.seq_len} bytes, one by one against all at once, "
        f"in float64 on the CPU: largest difference {difference:.1e}, {verdict}"
    )
    print("\n" + _table(sdm, baseline, unigram))
    report = {
        "config": dataclasses.asdict(config),
        "text": {"description": corpus.description, "sha256": corpus.fingerprint},
        "unigram_bits_per_byte": unigram,
        "with_sdm": dataclasses.asdict(sdm.history),
        "sdm_removed": dataclasses.asdict(baseline.history),
        "decode_difference": difference,
        "sample": _readable(sample),
    }
    (request.out / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(f"\nwritten   {request.out}: curves.png, report.json, {', '.join(CHECKPOINTS.values())}")
    return equal


def _started(request: Request) -> tuple[DemoConfig, Path | None]:
    """Return what to run anew; an unfinished run in the folder is an error."""
    config = DemoConfig(**request.sizes)
    found = [request.out / name for name in CHECKPOINTS.values() if (request.out / name).exists()]
    done = [_steps_done(path) for path in found]
    if found and (len(found) < len(CHECKPOINTS) or any(steps < total for steps, total in done)):
        steps, total = done[-1]
        raise DemoError(
            f"{request.out} holds an unfinished run ({found[-1].name} at step {steps} of {total}): "
            "continue it with --resume, choose another folder with --out, or delete it"
        )
    return config, request.text


def _resumed(request: Request) -> tuple[DemoConfig, Path | None]:
    """Return what the run in the folder was started with; a request for anything else is an error."""
    path = request.out / CHECKPOINTS[True]
    if not path.exists():
        raise DemoError(f"--resume: no checkpoint {path}")
    content = load_checkpoint(path)
    for name, value in request.sizes.items():
        if content["config"][name] != value:
            raise DemoError(
                f"--resume continues a run with {name} = {content['config'][name]}, not {value}: "
                "leave the option out, or start another run with another --out"
            )
    saved = content["text_path"]
    return DemoConfig(**content["config"]), request.text or (Path(saved) if saved else None)


def _prepared(config: DemoConfig, corpus: Corpus, with_sdm: bool, request: Request) -> TrainingRun:
    """Return a new run, or the one in the folder when resuming."""
    run = TrainingRun(config, corpus, with_sdm, request.device)
    path = request.out / CHECKPOINTS[with_sdm]
    if request.resume and path.exists():
        run.load(path)
    return run


def _steps_done(path: Path) -> tuple[int, int]:
    content = load_checkpoint(path)
    return len(content["history"]["losses"]), content["config"]["steps"]


def _readable(content: bytes) -> str:
    """Return printable text: a zero byte ends a line, other control characters become U+FFFD."""
    text = content.replace(b"\0", b"\n").decode("utf-8", errors="replace")
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text
    )


def _bank_parameters(model: ByteLanguageModel) -> int:
    return sum(layer.memory.numel() for layer in model.sdm_layers if layer.memory is not None)


def _table(sdm: TrainingRun, baseline: TrainingRun, unigram: float) -> str:
    config = sdm.config
    runs = (sdm, baseline)
    rows = [
        ("", *NAMES.values()),
        ("parameters", *(f"{sum(p.numel() for p in run.model.parameters()):,}" for run in runs)),
        ("of them rows of learned banks", *(f"{_bank_parameters(run.model):,}" for run in runs)),
        ("steps x bytes of a step", *(f"{config.steps:,} x {config.batch * config.seq_len:,}" for _ in runs)),
        ("seconds of training steps", *(f"{run.history.seconds:.0f}" for run in runs)),
        ("validation bits per byte: before", *(f"{run.history.validation[0]:.3f}" for run in runs)),
        ("validation bits per byte: after", *(f"{run.history.validation[-1]:.3f}" for run in runs)),
        ("validation bits per byte: unigram", *(f"{unigram:.3f}" for _ in runs)),
    ]
    lines = [f"{name:<34}{left:>20}{right:>20}" for name, left, right in rows]
    lines.append(
        "Both models: the same seed, initial weights, data order and steps; only the SDM layers differ."
    )
    return "\n".join(lines)
