"""Every check of the emulator, shown on a kernel that fails it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from sdm_rt.plan.launch import Argument, Launch, pdl_defines, pointers
from sdm_rt.runtime.kernel import KernelSpec
from tests.emulator.build import TEST_KERNELS, CompileError, Replacement
from tests.emulator.harness import Call, EmulatorError, run
from tests.emulator.own_kernels import exchange_launch, make_rows, run_rows, scan_launch

CHECKS = {
    "divergent_barrier": ("barrier", r"divergent: .* 32 threads|divergent: this thread is at faults.cu"),
    "barrier_after_exit": ("barrier", r"ended|ends"),
    "lanes_missing": ("deadlock|mask", r"lane|no thread can go on"),
    "lane_outside_mask": ("mask", r"leaves it out"),
    "masks_differ": ("deadlock|mask", r"lane|no thread can go on"),
    "sites_differ": ("mask", r"of the same mask ffffffff"),
    "lane_ended": ("mask", r"lane 3"),
    "source_outside_mask": ("shuffle", r"reads lane 20, which is not in mask 0000ffff"),
    "race_of_a_block": ("race|unwritten", r"shared memory 'dynamic shared'"),
    "race_of_a_warp": ("race", r"shared memory 'dynamic shared'"),
    "race_of_blocks": ("race", r"another cluster of this launch wrote"),
    "read_across_blocks": ("race|unwritten", r"global memory 'y'"),
    "atomic_and_plain": ("race", r"'count'"),
    "unwritten_shared": ("unwritten", r"static shared"),
    "unwritten_output": ("unwritten", r"global memory 'y'"),
    "output_partly_written": (
        "unwritten",
        r"4 of 512 bytes of output 'y' have not been .* first at 308",
    ),
    "global_bounds": ("bounds", r"offset 512 of global memory 'x' of 512 bytes"),
    "shared_bounds": ("bounds", r"offset 256 of shared memory 'dynamic shared' of 256 bytes"),
    "static_shared_bounds": ("undefined", r"index 64 out of bounds"),
    "local_bounds": ("address", r"stack-buffer-overflow"),
    "misaligned_vector": ("alignment", r"multiple of 16"),
    "misaligned_dereference": ("undefined", r"misaligned"),
    "signed_overflow": ("undefined", r"signed integer overflow"),
    "readonly_of_written": ("readonly", r"'y', which this launch writes"),
    "undeclared_write": ("undeclared", r"'x', which the launch does not declare as written"),
    "order_of_threads": ("order", r"'y' depends on the order"),
    "copy_not_waited": ("unwritten", r"dynamic shared"),
    "copy_left_behind": ("copy", r"under way"),
    "mbarrier_not_initialized": ("mbarrier", r"nothing has initialized"),
    "mbarrier_never_completes": ("deadlock", r"64 threads .* wait at an mbarrier \(faults.cu:\d+\)"),
    "cluster_wait_without_arrive": ("cluster", r"without having arrived"),
    "trap": ("trap", r"__trap"),
}
TRIGGERS = ("trigger_after_wait", "trigger_before_wait")
PDL_ENTRIES = ("early_read", "early_write", "early_update", "early_atomic", *TRIGGERS, "one_block_waits")
ENTRIES = (*CHECKS, *PDL_ENTRIES, "sound")
USES_SHARED = (
    "race_of_a_block",
    "race_of_a_warp",
    "shared_bounds",
    "copy_not_waited",
    "copy_left_behind",
    "sound",
)


def launch_of(entry: str) -> Launch:
    pdl, triggers = entry in PDL_ENTRIES, entry in TRIGGERS
    return Launch(
        name=entry,
        kernel=KernelSpec("faults.cu", ENTRIES, pdl_defines(waits=pdl, triggers=triggers)),
        entry=entry,
        grid=(2, 1, 1),
        block=(64, 1, 1),
        arguments=(*pointers("x", "y", "count"), Argument("n", "int32")),
        reads=("x", "y", "count") if entry == "early_update" else ("x", "count"),
        writes=("y", "count"),
        bytes_moved=0,
        floor_bytes=0,
        shared_memory=256 if entry in USES_SHARED else 0,
        pdl=pdl,
        triggers=triggers,
    )


def values_of() -> dict[str, object]:
    x, y = torch.arange(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    return {"x": x, "y": y, "count": torch.zeros(1, dtype=torch.int32), "n": 128}


@pytest.mark.parametrize("entry", CHECKS)
def test_check(entry: str) -> None:
    kinds, pattern = CHECKS[entry]
    values = values_of()
    with pytest.raises(EmulatorError) as caught:
        run([Call(launch_of(entry), values)], outputs=[values["y"]], seed=1)
    assert caught.value.kind in kinds.split("|"), str(caught.value)
    assert re.search(pattern, str(caught.value)), str(caught.value)


def test_checks_name_kernel_thread_and_line() -> None:
    values = values_of()
    where = r"kernel global_bounds, block \(1, 0, 0\), thread \(63, 0, 0\)"
    with pytest.raises(EmulatorError, match=where) as caught:
        run([Call(launch_of("global_bounds"), values)], outputs=[values["y"]])
    source = (TEST_KERNELS / "faults.cu").read_text().splitlines()
    line = next(i for i, text in enumerate(source, 1) if "x[INDEX + 1]" in text)
    assert f"faults.cu:{line}" in str(caught.value)


@pytest.mark.parametrize("seed", range(4))
def test_a_sound_kernel_passes(seed: int) -> None:
    values = values_of()
    run([Call(launch_of("sound"), values)], outputs=[values["y"]], seed=seed)
    x, lane = values["x"].view(2, 64), torch.arange(64) % 32
    segment = (lane % 16) < 8
    forward = torch.where(lane < 16, segment, ~segment)  # whether the lane reads another one
    source = torch.arange(64) + torch.where(forward, torch.where(lane < 16, 8, -8), 0)
    want = x.flip(1)[:, source] + 11 + 8
    assert torch.equal(values["y"].view(2, 64), want.int())
    assert int(values["count"]) == 128


def test_arguments_are_held_to_the_signature() -> None:
    values = values_of()
    wide = (*pointers("x", "y", "count"), Argument("n", "int64"))
    with pytest.raises(EmulatorError, match="argument 3 of kernel sound has 4 bytes, the launch passes 8"):
        run([Call(replace(launch_of("sound"), arguments=wide), values)], outputs=[values["y"]])
    del values["n"]
    with pytest.raises(EmulatorError, match="takes 4 arguments, the launch passes 3"):
        run([Call(replace(launch_of("sound"), arguments=wide[:3]), values)], outputs=[values["y"]])


def test_shared_memory_must_be_used() -> None:
    values = values_of()
    with pytest.raises(EmulatorError, match="asks for 260 bytes and touches 256"):
        run([Call(replace(launch_of("sound"), shared_memory=260), values)], outputs=[values["y"]])


def test_a_block_must_not_reach_into_an_ended_one() -> None:
    late = Replacement(
        "cluster_exchange.cu",
        "        if (column < columns) y",
        "        if (rank == 0) total += *ptx::map_shared(partial, 1) - partial[0];\n"
        "        if (column < columns) y",
    )
    problem = make_rows(2, 60)
    kinds = set()
    for seed in range(8):
        try:
            run_rows(exchange_launch(2, 32, 2), problem, seed=seed, replacements=[late])
        except EmulatorError as error:
            kinds.add(error.kind)
    assert kinds & {"cluster", "race"}


def test_a_second_launch_sees_what_the_first_wrote() -> None:
    values = values_of()
    first = Call(launch_of("sound"), values)
    second = Call(launch_of("sound"), values | {"x": values["y"], "y": torch.empty(128, dtype=torch.int32)})
    counts = run([first, second], outputs=[values["y"], second.values["y"]])
    assert [count.entry for count in counts] == ["sound", "sound"]
    assert int(values["count"]) == 256


def after_another(entry: str, **changes: str) -> dict[str, torch.Tensor]:
    """Run a launch and, as its programmatic dependent, one of `entry` on other tensors but for `changes`."""
    first, second = values_of(), values_of()
    second |= {name: first[source] for name, source in changes.items()}
    run([Call(launch_of("sound"), first), Call(launch_of(entry), second)], outputs=[first["y"]])
    return {"first": first["y"], "second": second["y"], "x": second["x"]}


def test_a_dependent_may_read_early_what_no_launch_on_the_way_writes() -> None:
    result = after_another("early_read")
    assert torch.equal(result["second"], result["x"])


def test_a_dependent_may_write_early_what_no_launch_on_the_way_touches() -> None:
    assert torch.equal(after_another("early_write")["second"], torch.ones(128, dtype=torch.int32))


@pytest.mark.parametrize(
    ("entry", "changes"),
    [
        ("early_read", {"x": "y"}),
        ("early_write", {"y": "y"}),
        ("early_write", {"y": "x"}),
        ("early_update", {"y": "x"}),  # its own read does not hide that of the launch before
    ],
)
def test_a_dependent_must_wait_before(entry: str, changes: dict[str, str]) -> None:
    with pytest.raises(EmulatorError, match=r"before griddepcontrol\.wait"):
        after_another(entry, **changes)


@pytest.mark.parametrize("seed", range(8))
def test_what_this_launch_has_touched_hides_no_early_access(seed: int) -> None:
    """Block 0 waits and adds to `count` before or after block 1, which does not wait."""
    first = values_of()
    second = {**values_of(), "count": first["count"]}
    with pytest.raises(EmulatorError, match=r"before griddepcontrol\.wait") as caught:
        run([Call(launch_of("sound"), first), Call(launch_of("early_atomic"), second)], seed=seed)
    assert caught.value.kind == "pdl"


def test_launches_that_trigger_before_they_wait_keep_each_other_on_the_way() -> None:
    first, second, third = values_of(), values_of(), values_of()
    early = [Call(launch_of("trigger_before_wait"), values) for values in (second, third)]
    last = Call(launch_of("early_read"), values_of() | {"x": first["y"]})
    with pytest.raises(EmulatorError, match=r"before griddepcontrol\.wait.*under way and writes it"):
        run([Call(launch_of("sound"), first), *early, last])
    with pytest.raises(EmulatorError, match=r"under way and may touch it"):  # before the first launch
        run([early[0], Call(launch_of("early_read"), values_of())])
    run([Call(launch_of("trigger_after_wait"), second), Call(launch_of("early_read"), values_of())])


@pytest.mark.parametrize("between", TRIGGERS)
def test_a_launch_that_waits_before_it_triggers_has_its_predecessors_behind_it(between: str) -> None:
    first, second, third = values_of(), values_of(), values_of()
    calls = [Call(launch_of("sound"), first), Call(launch_of(between), second)]
    calls.append(Call(launch_of("early_read"), third | {"x": first["y"]}))
    if between == "trigger_after_wait":
        run(calls, outputs=[third["y"]])
        assert torch.equal(third["y"], first["y"])
    else:
        with pytest.raises(EmulatorError, match=r"before griddepcontrol\.wait.*under way and writes it"):
            run(calls, outputs=[third["y"]])


def test_what_comes_before_the_first_launch_is_unknown() -> None:
    values = values_of()
    with pytest.raises(EmulatorError, match=r"'x' before griddepcontrol\.wait"):
        run([Call(launch_of("early_read"), values)], outputs=[values["y"]])


def test_every_block_of_a_dependent_waits() -> None:
    with pytest.raises(EmulatorError, match=r"the block ends without griddepcontrol\.wait") as caught:
        run([Call(launch_of("one_block_waits"), values_of())])
    assert caught.value.kind == "pdl"


def test_a_kernel_that_does_not_compile_shows_its_own_line() -> None:
    broken = Replacement("block_scan.cu", "const int lane", "const integer lane")
    with pytest.raises(CompileError, match=r"block_scan.cu:\d+:\d+: error: .*integer"):
        run_rows(scan_launch(2, 64), make_rows(2, 40), replacements=[broken])


def test_a_replacement_must_find_its_text() -> None:
    with pytest.raises(ValueError, match="occurs 0 times"):
        Replacement("block_scan.cu", "no such text", "").apply("text")
    with pytest.raises(ValueError, match="occurs 2 times, expected exactly 1"):
        Replacement("block_scan.cu", "a", "b").apply("a a")
    assert Replacement("block_scan.cu", "a", "b", occurrence=1).apply("a a") == "a b"
