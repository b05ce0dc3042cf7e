"""The demo's picture: validation and training curves, and maps of how the SDM layers use their slots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from sdm_rt.demo.slots import SlotUse
from sdm_rt.demo.training import History

__all__ = ["draw"]

Runs: TypeAlias = Sequence[tuple[str, str, History]]  # label, colour, what was measured


def draw(path: Path, sdm: History, baseline: History, unigram: float, slot_use: Sequence[SlotUse]) -> None:
    """Write the picture as PNG.

    Parameters
    ----------
    path : Path
        The file to write.
    sdm, baseline : History
        Of the model with its SDM layers and without them.
    unigram : float
        Bits per byte of the validation text under the byte frequencies of the training text.
    slot_use : sequence of SlotUse
        One an SDM layer.
    """
    rows = len(slot_use)
    figure = Figure(figsize=(12, 4.2 + 3.2 * rows), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1 + rows, 2, height_ratios=[1.35] + [1.0] * rows)
    runs = (("SDM layers removed", "#d9772b", baseline), ("with SDM layers", "#1f5fa8", sdm))
    _validation_curves(figure.add_subplot(grid[0, 0]), runs, unigram)
    _loss_curves(figure.add_subplot(grid[0, 1]), runs)
    for row, use in enumerate(slot_use):
        for column, (what, counts) in enumerate((("writes", use.writes), ("reads", use.reads))):
            axes = figure.add_subplot(grid[1 + row, column])
            _slot_map(figure, axes, f"SDM layer {row + 1}: {what}", counts)
    figure.savefig(path)


def _validation_curves(axes: Axes, runs: Runs, unigram: float) -> None:
    for label, color, history in runs:
        steps, bits = history.evaluated_steps, history.validation
        axes.plot(
            steps, bits, "o-", color=color, markersize=4, label=f"{label}: {bits[0]:.2f} → {bits[-1]:.3f}"
        )
    axes.axhline(unigram, color="#666666", linestyle="--", label=f"unigram: {unigram:.2f}")
    ends = [unigram, *(history.validation[-1] for _, _, history in runs)]
    # The untrained models' 8 bits and more would flatten everything else; the legend gives them.
    axes.set_ylim(min(ends) - 0.2, max(ends) + 0.4)
    _decorate(axes, "Validation text", "bits per byte")


def _loss_curves(axes: Axes, runs: Runs) -> None:
    for label, color, history in runs:
        bits = np.asarray(history.losses)
        width = max(1, len(bits) // 40)
        smooth = np.convolve(bits, np.full(width, 1 / width), mode="valid")
        axes.plot(np.arange(1, len(bits) + 1), bits, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(
            np.arange(len(smooth)) + (width + 1) / 2, smooth, color=color, label=f"{label}, mean of {width}"
        )
    _decorate(axes, "Training loss", "bits per byte")


def _slot_map(figure: Figure, axes: Axes, title: str, counts: Tensor) -> None:
    heads, height, width = counts.shape
    gap = np.full((height, max(1, width // 16)), np.nan)
    tiles: list[Any] = []
    for head in counts.numpy():
        tiles += [np.where(head > 0, head, 0.5), gap]  # 0.5 lies under the colour scale: an unused slot
    colors = colormaps["viridis"].with_extremes(under="#e4e4e4", bad="none")
    scale = LogNorm(1, max(2, int(counts.max())))
    image = axes.imshow(np.concatenate(tiles[:-1], axis=1), cmap=colors, norm=scale, aspect="equal")
    used = (counts > 0).double().mean().item()
    axes.set_title(f"{title}, {used:.0%} of {counts.numel():,} slots used", fontsize=10)
    axes.set_xticks([head * (width + gap.shape[1]) + width / 2 for head in range(heads)])
    axes.set_xticklabels([f"head {head + 1}: second key factor" for head in range(heads)], fontsize=8)
    axes.tick_params(axis="x", length=0)
    axes.set_yticks([])
    axes.set_ylabel("first key factor", fontsize=8)
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, label="times selected", shrink=0.9)


def _decorate(axes: Axes, title: str, ylabel: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=True, edgecolor="none", framealpha=0.9)
