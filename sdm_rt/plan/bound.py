"""A step plan bound to a GPU: kernels loaded, arguments written once, run as launches or as one graph."""

from __future__ import annotations

from collections.abc import Mapping

from sdm_rt.plan.launch import Launch
from sdm_rt.plan.step_plan import StepPlan
from sdm_rt.runtime import driver, graph
from sdm_rt.runtime.device import Gpu
from sdm_rt.runtime.launcher import PreparedLaunch, prepare_all, word
from sdm_rt.runtime.replays import Replays

__all__ = ["BoundPlan"]

STEP = "step"
SLAB_STEP = "slab_step"


class BoundPlan:
    """The prepared launches of a plan, for one thread.

    Arguments go by name: a name stands for the same value in every launch that has it. Only the step and the
    first step of its slab are rewritten while the loop runs.

    Parameters
    ----------
    plan : StepPlan
        The plan; it must hold kernels alone.
    gpu : Gpu
        The GPU it was made for.
    stream : int
        The stream the plan is wanted on now; while it is captured, kernels not loaded yet are refused.

    Raises
    ------
    ValueError
        For a reference plan, whose library calls this package does not make.
    RuntimeError
        As of `sdm_rt.runtime.launcher.prepare_all`.
    """

    def __init__(self, plan: StepPlan, gpu: Gpu, stream: int) -> None:
        kernels = plan.kernels()
        if len(kernels) != len(plan.calls()):
            raise ValueError(f"{plan.name}: a plan with library calls is a reference to read, not to run")
        self.plan = plan
        self.specs = tuple(dict.fromkeys(launch.kernel for launch in kernels))
        """The translation units, each once."""
        self._context = driver.primary_context(gpu.index)
        self.names = frozenset(a.name for launch in kernels for a in launch.arguments) - {STEP, SLAB_STEP}
        """The arguments that the caller gives."""
        self._values: dict[str, int | float | None] = dict.fromkeys(sorted(self.names))
        prepared = dict(zip(kernels, prepare_all(kernels, gpu, stream), strict=True))
        # Where an argument stands in the launches that take it, by its name.
        self._takers: dict[str, list[tuple[PreparedLaunch, int, str]]] = {name: [] for name in self.names}
        for launch, ready in prepared.items():
            for at, argument in enumerate(launch.arguments):
                if argument.name in self.names:
                    self._takers[argument.name].append((ready, at, argument.kind))
        self._unwritten: dict[str, int | float] = {}
        # Each launch with the slots of the arguments that change and their values.
        self._sequence: list[tuple[PreparedLaunch, tuple[tuple[int, int], ...]]] = []
        for step, call in plan.launches():
            assert isinstance(call, Launch)
            now = {} if step is None else {STEP: step, SLAB_STEP: plan.slab_step(step)}
            changing = [at for at, argument in enumerate(call.arguments) if argument.step_dependent]
            if unknown := {call.arguments[at].name for at in changing} - now.keys():
                raise ValueError(
                    f"{plan.name}: {call.name} may take the step inside the loop and no other change, not "
                    f"{', '.join(sorted(unknown))}"
                )
            values = tuple((at, now[call.arguments[at].name]) for at in changing)
            self._sequence.append((prepared[call], values))
        self._replays: Replays[graph.Recording] = Replays(len(self._sequence))

    def set(self, values: Mapping[str, int | float]) -> None:
        """Give arguments by name to every launch that has them; the others keep their values.

        Raises
        ------
        KeyError
            For a name that no launch has, and for the step, which the loop writes.
        """
        if unknown := values.keys() - self.names:
            name = sorted(unknown)[0]
            raise KeyError(f"{self.plan.name}: no launch takes an argument {name!r} from the caller")
        held = self._values
        # With something unwritten, an interrupt may have come between these two lines.
        changed = values if self._unwritten else {n: value for n, value in values.items() if held[n] != value}
        self._unwritten.update(changed)
        held.update(changed)

    def _write(self) -> None:
        """Write the arguments given since the last write into the launches that take them."""
        for name, value in self._unwritten.items():
            for launch, at, kind in self._takers[name]:
                launch.arguments[at] = word(kind, value)
        self._unwritten.clear()

    def _require_arguments(self) -> None:
        if missing := [name for name, value in self._values.items() if value is None]:
            raise ValueError(f"{self.plan.name}: arguments never set: {', '.join(missing)}")

    def run(self, stream: int) -> bool:
        """Run the whole sequence on a stream: its launches, or a CUDA graph of them.

        A long sequence whose arguments come again is captured, and replayed while they stay the same
        (`sdm_rt.runtime.replays`).

        Returns
        -------
        bool
            Whether a graph was replayed.

        Raises
        ------
        ValueError
            Where an argument was never set.
        RuntimeError
            With the driver's error.
        """
        self._require_arguments()
        if self._replays.replay(tuple(self._values.values()), stream, self._record):
            return True
        self._launch(stream)
        return False

    def _record(self) -> graph.Recording:
        return graph.record(self._launch, self._context)

    def _launch(self, stream: int) -> None:
        self._write()
        for launch, values in self._sequence:
            for slot, value in values:
                launch.arguments[slot] = value
            launch.run(stream)

    def capture(self, keep: object) -> graph.CapturedLaunches:
        """Capture the whole sequence, with the arguments as they are set, into a CUDA graph.

        Parameters
        ----------
        keep : object
            What keeps the pointers among the arguments valid; held by the graph.

        Returns
        -------
        CapturedLaunches
            Ready to replay; its ``update`` takes one mapping a launch of the sequence.

        Raises
        ------
        ValueError
            Where an argument was never set.
        RuntimeError
            With the driver's error.
        """
        self._require_arguments()
        self._write()
        sequence = [
            (launch, {launch.launch_description.arguments[slot].name: value for slot, value in values})
            for launch, values in self._sequence
        ]
        return graph.capture(sequence, self._context, keep)
