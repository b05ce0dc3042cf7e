"""``sdm-rt plan``: the launches, shared memory, bytes and time floor of a call, without a GPU."""

from __future__ import annotations

import argparse
import json
import sys

from sdm_rt.plan.backward import plan_backward
from sdm_rt.plan.column_slices import SCHEDULES
from sdm_rt.plan.decode import plan_decode
from sdm_rt.plan.device import PRESETS, DeviceModel, preset
from sdm_rt.plan.forward import plan_forward
from sdm_rt.plan.reference_backward import plan_reference_backward
from sdm_rt.plan.shapes import BANK_DTYPES, INDEX_DTYPES, SNAPSHOTS, DecodeShape, WriteReadShape
from sdm_rt.plan.step_plan import StepPlan

__all__ = ["add_arguments", "run"]

PASSES = ("forward", "backward", "decode")
# Of what a decode, one token a stream, has no use for.
DEFAULTS = {"tokens": 4096, "chunk": 64, "slots": 65536}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to `parser`."""
    parser.add_argument("--device", required=True, help=f"preset: {', '.join(PRESETS)}")
    parser.add_argument(
        "--pass",
        dest="passes",
        action="append",
        choices=PASSES,
        help="what to plan; may be repeated (default: forward and backward)",
    )
    parser.add_argument("--streams", type=int, default=1, metavar="P", help="batch x heads (default 1)")
    parser.add_argument("--tokens", type=int, metavar="T", help=f"of a stream (default {DEFAULTS['tokens']})")
    parser.add_argument(
        "--chunk", type=int, metavar="C", help=f"tokens of a chunk (default {DEFAULTS['chunk']})"
    )
    parser.add_argument("--writes", type=int, default=64, metavar="W", help="of a token (default 64)")
    parser.add_argument("--reads", type=int, default=64, metavar="R", help="of a token (default 64)")
    parser.add_argument("--head-dim", type=int, default=1024, metavar="D", help="bank columns (default 1024)")
    parser.add_argument("--slots", type=int, metavar="S", help=f"rows a stream (default {DEFAULTS['slots']})")
    parser.add_argument("--dtype", choices=BANK_DTYPES, default="bfloat16", help="of the bank")
    parser.add_argument("--index-dtype", choices=INDEX_DTYPES, default="int64")
    parser.add_argument("--snapshot", choices=SNAPSHOTS, default="none", help="snapshot_quant (default none)")
    parser.add_argument("--grad-bank-fp32", action="store_true", help="keep the bank's gradient in float32")
    parser.add_argument("--gates-per-write", action="store_true", help="one log-decay a write, not a token")
    parser.add_argument("--no-grad", action="store_true", help="a forward that saves nothing")
    parser.add_argument(
        "--reference",
        action="store_true",
        help="the reference schedule's backward (torch.baddbmm where it uses it), for comparison",
    )
    parser.add_argument("--schedule", choices=SCHEDULES, help="of both passes (default: the plan's choice)")
    parser.add_argument("--json", action="store_true", help="print JSON, one object a plan in a list")


def _plan(name: str, arguments: argparse.Namespace, device: DeviceModel) -> StepPlan:
    if name == "decode":
        return plan_decode(
            DecodeShape(
                streams=arguments.streams,
                writes=arguments.writes,
                reads=arguments.reads,
                head_dim=arguments.head_dim,
                bank_dtype=arguments.dtype,
                index_dtype=arguments.index_dtype,
                gates_per_write=arguments.gates_per_write,
            ),
            device,
        )
    shape = WriteReadShape(
        streams=arguments.streams,
        tokens=arguments.tokens,
        chunk=arguments.chunk,
        writes=arguments.writes,
        reads=arguments.reads,
        head_dim=arguments.head_dim,
        slots=arguments.slots,
        bank_dtype=arguments.dtype,
        gradient_bank_dtype="float32" if arguments.grad_bank_fp32 else arguments.dtype,
        index_dtype=arguments.index_dtype,
        gates_per_write=arguments.gates_per_write,
        snapshot=arguments.snapshot,
        training=not arguments.no_grad,
    )
    if name == "forward":
        return plan_forward(shape, device, arguments.schedule)
    if arguments.reference:
        return plan_reference_backward(shape, device)
    return plan_backward(shape, device, arguments.schedule)


def _check_options(arguments: argparse.Namespace, passes: list[str]) -> None:
    """ValueError for an option that has no effect on what is planned."""
    if arguments.no_grad and "backward" in passes:
        raise ValueError("--no-grad saves nothing, so there is no backward to plan")
    if arguments.no_grad and arguments.snapshot != "none":
        raise ValueError("--no-grad saves nothing, so there is no --snapshot")
    if arguments.reference and "backward" not in passes:
        raise ValueError("--reference is a schedule of the backward")
    if arguments.reference and arguments.schedule:
        raise ValueError("--reference is a schedule of its own and takes no --schedule")
    if arguments.grad_bank_fp32 and "backward" not in passes:
        raise ValueError("--grad-bank-fp32 is of the backward")
    if set(passes) == {"decode"}:
        given = {
            "--schedule": arguments.schedule,
            "--tokens": arguments.tokens,
            "--chunk": arguments.chunk,
            "--slots": arguments.slots,
            "--snapshot": None if arguments.snapshot == "none" else arguments.snapshot,
            "--no-grad": arguments.no_grad or None,
        }
        for option, value in given.items():
            if value is not None:
                raise ValueError(f"a decode is one launch of one token a stream and takes no {option}")


def run(arguments: argparse.Namespace) -> int:
    """Print the plans; 1 with the reason on stderr where a plan is refused or an option is out of range."""
    passes = arguments.passes or (["forward"] if arguments.no_grad else ["forward", "backward"])
    try:
        _check_options(arguments, passes)
        given = {name: value for name, value in vars(arguments).items() if value is not None}
        arguments = argparse.Namespace(**vars(arguments) | DEFAULTS | given)
        device = preset(arguments.device)
        plans = [_plan(name, arguments, device) for name in passes]
    except ValueError as error:
        print(f"sdm-rt plan: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps([plan.to_dict() for plan in plans], indent=2))
    else:
        print("\n\n".join(plan.describe() for plan in plans))
    return 0
