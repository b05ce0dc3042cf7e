"""The progress bar of a training run."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

__all__ = ["ProgressBar"]


class ProgressBar:
    """A bar with loss and tokens a second, between lines with the validation results.

    Parameters
    ----------
    name : str
        What is trained.
    steps, done : int
        Steps in all, and those a checkpoint already holds.
    """

    def __init__(self, name: str, steps: int, done: int) -> None:
        self.name = name
        self.bar: Any = tqdm(
            total=steps, initial=done, desc=name, unit="step", mininterval=0.5, dynamic_ncols=True
        )

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.close()

    def step(self, loss: float, tokens_per_second: float) -> None:
        """Take the loss of the step just done, in bits per byte."""
        self.bar.set_postfix_str(f"loss {loss:.3f} bits, {tokens_per_second:,.0f} tokens/s", refresh=False)
        self.bar.update()

    def evaluated(self, step: int, bits: float) -> None:
        """Print the validation bits per byte after ``step`` steps."""
        self.bar.write(f"{self.name:<19} step {step:>5}   validation {bits:.3f} bits per byte")
