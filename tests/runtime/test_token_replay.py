"""Which one-token calls of a layer are replayed as a graph, and by which graph; without a GPU.

What is real here: the layer, what a graph is found by, the pool of graphs and what drops them. A captured
call is a closure that runs the layer on the graph's own input, so results must have the bits of plain calls.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sdm_rt import (
    Cache,
    SDMLayerState,
    SparseDeltaMemory,
    last_dispatch,
    reset_cuda_graphs,
    suspend_cuda_graphs,
)
from sdm_rt.layer import token_replay
from sdm_rt.layer.activations import make_activation
from sdm_rt.runtime import replays
from tests.layer_reference import make_layer
from tests.tolerances import assert_same_bits

EVERYTHING = {"output_gate": True, "normalize_readings": True, "key_weighted_decay": True}


class Machine:
    """What stands in for the GPU: its stream, its captures, and counts of captures and replays."""

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0
        self.stream = 7
        self.capturing = False
        self.current = True
        self.error: Exception | None = None

    def record(self, layer: SparseDeltaMemory, x: Tensor, bank: Tensor, stream: int) -> Any:
        if self.error is not None:
            raise self.error
        self.captures += 1
        # As a GPU's, the graph knows addresses alone: it keeps neither layer nor bank.
        held, memory = weakref.ref(layer), bank.detach().numpy()
        autocast = torch.is_autocast_cache_enabled()
        output = torch.empty_like(x)
        machine = self

        class Recorded:
            def replay(self, on: int) -> None:
                assert on == stream
                assert not autocast
                machine.replays += 1
                alive = held()
                assert alive is not None
                output.copy_(alive._token(x, addressed(memory)))

        return Recorded(), output


def addressed(memory: Any) -> Tensor:
    return torch.from_numpy(memory)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine()
    loaded = SimpleNamespace(
        generation=0,
        noting=lambda: contextlib.nullcontext(set()),
        are_current=lambda specs, generation: machine.current,
    )
    monkeypatch.setattr(token_replay, "_record", machine.record)
    monkeypatch.setattr(token_replay, "_is_on_gpu", lambda x: True)
    monkeypatch.setattr(token_replay, "current_stream", lambda index: machine.stream)
    monkeypatch.setattr(token_replay, "kernels", lambda: loaded)
    monkeypatch.setattr(token_replay, "ALIGNMENT", 16)
    monkeypatch.setattr(token_replay, "SECONDS_BETWEEN_LOOKS", 0)
    monkeypatch.setattr(replays.driver, "stream_is_capturing", lambda stream: machine.capturing)
    yield machine
    reset_cuda_graphs()


def new_layer(**options: Any) -> SparseDeltaMemory:
    return make_layer(torch.float32, **options).eval()


def pair(**options: Any) -> tuple[SparseDeltaMemory, SparseDeltaMemory]:
    """The same layer without and with graphs."""
    return new_layer(**options), new_layer(cuda_graph=True, **options)


def new_cache(layer: SparseDeltaMemory, batch: int = 2) -> SDMLayerState:
    return layer.create_kv_cache(batch, 1, torch.float32)


def token(seed: int = 0, batch: int = 2) -> Tensor:
    return torch.randn(batch, 1, 12, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def decode(layer: SparseDeltaMemory, cache: Cache, x: Tensor, **options: Any) -> Tensor:
    return layer(x, cache=cache, **options)[0]


def warm(layer: SparseDeltaMemory, cache: Cache, batch: int = 2) -> None:
    """Two calls, after which further ones of the kind are replays."""
    for seed in (90, 91):
        decode(layer, cache, token(seed, batch))


def graphs(layer: SparseDeltaMemory) -> int:
    return len(token_replay._graphs_of(layer))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("options", [{}, EVERYTHING, {"num_reads": 5}, {"query_batchnorm": True}])
def test_tokens_equal_plain_ones_and_replay_from_the_second_on(
    machine: Machine, batch: int, options: dict[str, Any]
) -> None:
    plain, replayed = pair(**options)
    caches = new_cache(plain, batch), new_cache(replayed, batch)
    outputs, wanted = [], []
    for at in range(6):
        wanted.append(decode(plain, caches[0], token(at, batch)))
        assert "graph" not in last_dispatch()
        outputs.append(decode(replayed, caches[1], token(at, batch)))
        assert last_dispatch().get("graph", False) is (at > 0)
        assert machine.replays == at
        assert_same_bits("bank", caches[1].memory, caches[0].memory)
        assert caches[1].cache_len == at + 1
    assert machine.captures == 1
    for at, (got, want) in enumerate(zip(outputs, wanted, strict=True)):
        assert_same_bits(f"output {at}", got, want)  # each in memory of its own


def test_tokens_of_rank_2_and_inputs_that_require_gradients(machine: Machine) -> None:
    plain, replayed = pair()
    caches = new_cache(plain), new_cache(replayed)
    for at in range(4):
        x = token(at).squeeze(1).requires_grad_()
        got, want = (
            decode(layer, cache, x, freqs_cis=torch.zeros(1, 2))
            for layer, cache in zip((replayed, plain), caches, strict=True)
        )
        assert got.shape == (2, 12)
        assert not got.requires_grad
        assert_same_bits("output", got, want)
    assert machine.replays == 3


def test_the_version_of_the_bank_counts_replays() -> None:
    layer = new_layer(cuda_graph=True)
    cache = new_cache(layer)
    warm(layer, cache)
    before = cache.memory._version
    decode(layer, cache, token())
    assert cache.memory._version > before


# ---- what a graph stands for ----


def changes_weights_in_place(layer: SparseDeltaMemory) -> None:
    layer.Wo.weight.data.mul_(2)


def loads_in_place(layer: SparseDeltaMemory) -> None:
    layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()})


def tokens_after(change: Callable[[SparseDeltaMemory], None]) -> Iterator[int]:
    """Change a plain layer and one with a graph; yield after each of three tokens, whose bits must agree."""
    plain, replayed = pair(**EVERYTHING)
    caches = new_cache(plain), new_cache(replayed)
    warm(plain, caches[0])
    warm(replayed, caches[1])
    for layer in (plain, replayed):
        change(layer)
    for at in range(3):
        got, want = decode(replayed, caches[1], token(at)), decode(plain, caches[0], token(at))
        assert_same_bits("output", got, want)
        yield at


@pytest.mark.parametrize("change", [changes_weights_in_place, loads_in_place])
def test_weights_changed_in_place_are_seen_by_the_same_graph(
    machine: Machine, change: Callable[[SparseDeltaMemory], None]
) -> None:
    for _ in tokens_after(change):
        pass
    assert (machine.captures, machine.replays) == (1, 4)


def assigns(layer: SparseDeltaMemory) -> None:
    state = {name: 2 * value for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)


def replaces_a_module(layer: SparseDeltaMemory) -> None:
    layer.Wo = copy.deepcopy(layer.Wo)
    with torch.no_grad():
        layer.Wo.weight.mul_(2)


def transposes(layer: SparseDeltaMemory) -> None:
    layer.Wv_write.weight.data = layer.Wv_write.weight.data.t()


def changes_a_scale(layer: SparseDeltaMemory) -> None:
    layer.read_act.scale = 2.0


def changes_an_activation(layer: SparseDeltaMemory) -> None:
    layer.write_act = make_activation("Sigmoid")


def changes_an_epsilon(layer: SparseDeltaMemory) -> None:
    layer.readings_norm.eps = 0.5


def reads_fewer_slots(layer: SparseDeltaMemory) -> None:
    layer.args.num_reads = 2


def drops_the_gate(layer: SparseDeltaMemory) -> None:
    layer.Wog = None


@pytest.mark.parametrize(
    "change",
    [
        assigns,
        replaces_a_module,
        transposes,
        changes_a_scale,
        changes_an_activation,
        changes_an_epsilon,
        reads_fewer_slots,
        drops_the_gate,
    ],
)
def test_a_changed_layer_never_replays_what_it_was(
    machine: Machine, change: Callable[[SparseDeltaMemory], None]
) -> None:
    for at in tokens_after(change):
        assert (machine.captures, machine.replays) == ((1, 1) if at == 0 else (2, 1 + at))


def test_training_mode_batches_and_streams_have_graphs_of_their_own(machine: Machine) -> None:
    layer = new_layer(cuda_graph=True)
    caches = {batch: new_cache(layer, batch) for batch in (1, 2)}
    for stream in (7, 8):
        machine.stream = stream
        for batch, cache in caches.items():
            warm(layer, cache, batch)
    assert graphs(layer) == machine.captures == 4


def test_caches_that_alternate_and_one_that_is_reset(machine: Machine) -> None:
    plain, replayed = pair()
    caches = [(new_cache(plain), new_cache(replayed)) for _ in range(2)]
    for at in range(10):
        want, got = caches[at % 2]
        if at == 6:
            want.reset()
            got.reset()
        assert_same_bits("output", decode(replayed, got, token(at)), decode(plain, want, token(at)))
        assert_same_bits("bank", got.memory, want.memory)
    assert (machine.captures, machine.replays) == (2, 8)


def test_another_cache_around_the_same_bank_replays_its_graph(machine: Machine) -> None:
    layer = new_layer(cuda_graph=True)
    bank = new_cache(layer).memory
    for at in range(4):
        decode(layer, SDMLayerState(bank, seq_len=at, initial=bank), token(at))
    assert (machine.captures, machine.replays) == (1, 3)


def test_the_same_address_with_another_layout_is_another_bank(machine: Machine) -> None:
    layer = new_layer(cuda_graph=True)
    rows = new_cache(layer).memory
    wide = torch.zeros(rows.shape[0], 2 * rows.shape[1])
    wide[:, : rows.shape[1]] = rows
    strided = wide[:, : rows.shape[1]]
    contiguous = wide.view(-1)[: rows.numel()].view(rows.shape)
    assert strided.data_ptr() == contiguous.data_ptr()
    warm(layer, SDMLayerState(strided, initial=strided))
    decode(layer, SDMLayerState(contiguous, initial=contiguous), token())
    assert machine.replays == 1


@contextlib.contextmanager
def autocast() -> Iterator[None]:
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


@contextlib.contextmanager
def low_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("mode", [autocast, low_precision, deterministic])
def test_each_mode_has_a_graph_of_its_own(machine: Machine, mode: Callable[[], Any]) -> None:
    torch.set_float32_matmul_precision("highest")
    layer = new_layer(cuda_graph=True)
    cache = new_cache(layer)
    for at in range(3):
        decode(layer, cache, token(at))
        with mode():
            decode(layer, cache, token(at))
    assert (graphs(layer), machine.replays) == (2, 4)


def test_inference_mode(machine: Machine) -> None:
    plain, replayed = pair()
    with torch.inference_mode():
        caches = new_cache(plain), new_cache(replayed)
        for at in range(3):
            got, want = decode(replayed, caches[1], token(at)), decode(plain, caches[0], token(at))
            assert_same_bits("output", got, want)
            assert got.is_inference()
    assert machine.replays == 2


# ---- what runs plain ----


class LowRank(nn.Module):
    """What a library for fine-tuning puts around a projection."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * 2


class Sub(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Wrapped(Tensor):
    pass


def wraps(layer: SparseDeltaMemory) -> None:
    layer.Wo = LowRank(layer.Wo)


def subclasses(layer: SparseDeltaMemory) -> None:
    layer.Wo.__class__ = Sub


def replaces_a_forward(layer: SparseDeltaMemory) -> None:
    layer.Wo.forward = lambda x: 2 * nn.functional.linear(x, layer.Wo.weight, layer.Wo.bias)


def hooks(layer: SparseDeltaMemory) -> None:
    layer.Wo.register_forward_hook(lambda module, args, out: 2 * out)


def pre_hooks(layer: SparseDeltaMemory) -> None:
    layer.Wv_write.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def wraps_a_parameter(layer: SparseDeltaMemory) -> None:
    layer.Wo.weight = nn.Parameter(layer.Wo.weight.data.as_subclass(Wrapped))


def hides_a_parameter(layer: SparseDeltaMemory) -> None:
    weight = layer.Wo.weight
    del layer.Wo.weight
    layer.Wo.weight = weight.detach()


def draws(layer: SparseDeltaMemory) -> None:
    layer.read_act = nn.RReLU()


def measures(layer: SparseDeltaMemory) -> None:
    layer.args.log_memory_norms = True


@pytest.mark.parametrize(
    "change",
    [
        wraps,
        subclasses,
        replaces_a_forward,
        hooks,
        pre_hooks,
        wraps_a_parameter,
        hides_a_parameter,
        draws,
        measures,
    ],
)
def test_layers_with_more_in_them_run_plain(
    machine: Machine, change: Callable[[SparseDeltaMemory], None]
) -> None:
    plain, replayed = pair()
    caches = new_cache(plain), new_cache(replayed)
    warm(plain, caches[0])
    warm(replayed, caches[1])
    for layer in (plain, replayed):
        change(layer)
    for at in range(3):
        outputs = []
        for layer, cache in zip((replayed, plain), reversed(caches), strict=True):
            torch.manual_seed(at)
            outputs.append(decode(layer, cache, token(at)))
        assert_same_bits("output", *outputs)
    assert machine.replays == 1


def test_a_class_made_from_the_layer_runs_plain(machine: Machine) -> None:
    class Doubled(SparseDeltaMemory):
        def _log_decay(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
            return 2 * super()._log_decay(rows, dtype)

    layer = new_layer(cuda_graph=True)
    layer.__class__ = Doubled
    warm(layer, new_cache(layer))
    decode(layer, new_cache(layer), token())
    assert machine.captures == 0


def test_hooks_of_all_modules_are_called(machine: Machine) -> None:
    layer = new_layer(cuda_graph=True)
    cache = new_cache(layer)
    warm(layer, cache)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *rest: seen.append(type(module)))
    try:
        decode(layer, cache, token())
    finally:
        handle.remove()
    assert seen.count(nn.Linear) == 6
    assert machine.replays == 1


def test_a_hook_of_the_layer_itself_is_no_hindrance(machine: Machine) -> None:
    layer = new_layer(cuda_graph=True)
    seen = []
    layer.register_forward_hook(lambda module, args, out: seen.append(1))
    cache = new_cache(layer)
    for at in range(3):
        decode(layer, cache, token(at))
    assert (machine.replays, len(seen)) == (2, 3)


def test_batch_norm_in_training_mode_runs_plain(machine: Machine) -> None:
    layer = new_layer(cuda_graph=True, query_batchnorm=True).train()
    cache = new_cache(layer)
    for at in range(3):
        decode(layer, cache, token(at))
    assert machine.captures == 0
    assert int(layer.query_bn.num_batches_tracked) == 3


def test_calls_that_are_no_single_token_without_gradients(machine: Machine) -> None:
    layer = new_layer(cuda_graph=True)
    cache = new_cache(layer)
    warm(layer, cache)
    frozen = new_layer(cuda_graph=True).requires_grad_(False)
    state = new_cache(frozen)
    for _ in range(3):
        decode(layer, cache, torch.randn(2, 3, 12))
        decode(layer, cache, token(), lengths=torch.tensor([1, 0]))
        decode(layer, cache, token().flatten(0, 1), cu_seqlens=torch.tensor([0, 1, 2]))
        with torch.no_grad():
            layer(token())
        frozen(token(), cache=state)  # in grad mode, though nothing requires a gradient
        layer(token().requires_grad_(), cache=new_cache(layer))[0].sum().backward()
    assert (machine.captures, machine.replays) == (1, 1)


class Passing(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "watch",
    [
        lambda: FlopCounterMode(display=False),
        Passing,
        torch.autograd.forward_ad.dual_level,
        suspend_cuda_graphs,
    ],
    ids=["dispatch mode", "function mode", "forward mode", "suspended"],
)
def test_watched_calls_run_plain(machine: Machine, watch: Callable[[], Any]) -> None:
    layer = new_layer(cuda_graph=True)
    cache = new_cache(layer)
    warm(layer, cache)
    with watch():
        for at in range(3):
            decode(layer, cache, token(at))
    assert machine.replays == 1
    decode(layer, cache, token())
    assert machine.replays == 2


def test_a_callers_capture_and_environment_variables(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = new_layer(cuda_graph=True)
    cache = new_cache(layer)
    warm(layer, cache)
    machine.capturing = True
    decode(layer, cache, token())
    machine.capturing = False
    for name, value in (("SDM_RT_CHECK", "1"), ("SDM_RT_REPLAY", "0")):
        monkeypatch.setenv(name, value)
        decode(layer, cache, token())
        monkeypatch.delenv(name)
    assert machine.replays == 1
    monkeypatch.setenv("SDM_RT_PDL", "0")
    warm(layer, cache)
    assert (machine.captures, machine.replays) == (2, 2)


def test_inputs_that_lie_otherwise_than_a_graphs_own_run_plain(machine: Machine) -> None:
    plain, replayed = pair()
    caches = new_cache(plain), new_cache(replayed)
    apart = torch.randn(2, 5, 12)
    shifted = torch.randn(25)[1:].view(2, 1, 12)
    for x in (apart[:, 2:3], shifted, token()[:1].expand(2, 1, 12)) * 3:
        assert_same_bits("output", decode(replayed, caches[1], x), decode(plain, caches[0], x))
    assert machine.captures == 0


def test_the_cpu_itself_is_never_captured(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    layer = new_layer(cuda_graph=True)
    cache = new_cache(layer)
    for at in range(3):
        decode(layer, cache, token(at))
    assert graphs(layer) == 0


def test_a_compiled_layer_is_not_replayed(machine: Machine) -> None:
    plain, replayed = pair()
    caches = new_cache(plain), new_cache(replayed)
    torch._dynamo.reset()
    compiled = torch.compile(replayed, backend="aot_eager", fullgraph=True)
    for at in range(3):
        got, want = decode(compiled, caches[1], token(at)), decode(plain, caches[0], token(at))
        assert_same_bits("output", got, want)
    assert machine.captures == 0


def test_a_call_that_is_an_error_stays_one(machine: Machine) -> None:
    layer = new_layer(cuda_graph=True)
    cache = new_cache(layer)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="dtype"):
            decode(layer, cache, token().double())
    warm(layer, cache)
    assert (machine.captures, machine.replays) == (1, 1)


# ---- what drops a graph ----


def test_graphs_go_with_the_bank_or_the_layer(machine: Machine) -> None:
    layer = new_layer(cuda_graph=True)
    cache, other = new_cache(layer), new_cache(layer)
    with pytest.MonkeyPatch.context() as patch:
        # The stand-in for a graph must not keep the bank's memory either.
        patch.setattr(token_replay, "_record", lambda *given: (SimpleNamespace(replay=len), given[1]))
        patch.setattr(token_replay._TokenGraph, "replay", lambda graph, stream: None)
        gc.disable()
        try:
            warm(layer, cache)
            warm(layer, other)
            assert graphs(layer) == 2
            view = cache.memory[:1]
            del cache
            assert graphs(layer) == 2  # the memory is still somebody's
            del view
            assert graphs(layer) == 1
            made = weakref.ref(token_replay._graphs_of(layer))
            del layer
            gc.collect()  # a module lies in cycles of its own
            assert made() is None
        finally:
            gc.enable()


def test_reset_drops_and_captures_anew(machine: Machine) -> None:
    layer = new_layer(cuda_graph=True)
    cache = new_cache(layer)
    warm(layer, cache)
    reset_cuda_graphs()
    assert graphs(layer) == 0
    warm(layer, cache)
    assert (machine.captures, machine.replays) == (2, 2)


def test_graphs_are_bounded_and_those_in_use_stay(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_replay, "MOST_GRAPHS", 2)
    monkeypatch.setattr(token_replay, "IDLE_CALLS", 20)
    layer = new_layer(cuda_graph=True)
    caches = [new_cache(layer) for _ in range(3)]
    for at in range(30):
        decode(layer, caches[at % 3], token(at))
    assert (graphs(layer), machine.captures) == (2, 2)
    for at in range(30):
        decode(layer, caches[1 + at % 2], token(at))
    assert (graphs(layer), machine.captures) == (2, 3)  # in the place of the one that nobody used


def test_edited_kernels_are_captured_anew(machine: Machine) -> None:
    layer = new_layer(cuda_graph=True)
    cache = new_cache(layer)
    warm(layer, cache)
    machine.current = False
    decode(layer, cache, token())
    assert (graphs(layer), machine.replays) == (0, 1)
    machine.current = True
    warm(layer, cache)
    assert (machine.captures, machine.replays) == (2, 2)


def test_a_capture_that_fails_warns_once_and_leaves_plain_calls(machine: Machine) -> None:
    plain, replayed = pair()
    caches = new_cache(plain), new_cache(replayed)
    machine.error = RuntimeError("cuGraphInstantiate: out of memory")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for at in range(4):
            got, want = decode(replayed, caches[1], token(at)), decode(plain, caches[0], token(at))
            assert_same_bits("output", got, want)
    (warning,) = caught
    assert "without a graph: cuGraphInstantiate: out of memory" in str(warning.message)
    assert torch.is_autocast_cache_enabled()


def test_copies_and_files_of_a_layer_hold_no_graphs(machine: Machine) -> None:
    layer = new_layer(cuda_graph=True)
    names = set(layer.__dict__)
    cache = new_cache(layer)
    warm(layer, cache)
    assert set(layer.__dict__) == names
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert graphs(other) == 0
        want = decode(new_layer(), new_cache(layer), token())
        for _ in range(3):
            assert_same_bits("output", decode(other, new_cache(layer), token()), want)
    other.load_state_dict(layer.state_dict())


def test_threads_that_share_a_layer(machine: Machine) -> None:
    plain, replayed = pair()
    wanted = [decode(plain, new_cache(plain), token(at)) for at in range(4)]
    caches = [new_cache(replayed) for _ in range(4)]
    wrong: list[int] = []

    def run(at: int) -> None:
        for _ in range(25):
            caches[at].reset()
            if not torch.equal(decode(replayed, caches[at], token(at)), wanted[at]):
                wrong.append(at)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert (machine.captures, machine.replays) == (4, 96)


def test_what_a_result_depends_on_is_known_of_every_module() -> None:
    for name in token_replay.ACTIVATIONS - {"RReLU", "MultiheadAttention", "Threshold"}:
        try:
            module = make_activation(name)
        except TypeError:
            continue
        settings = {key for key in module.__dict__ if not key.startswith("_")}
        known = token_replay._ATTRIBUTES.get(type(module), lambda state: ())(module.__dict__)
        kept = settings - {"training", "init"}  # of PReLU, where its weight started
        assert len(known) == (1 + len(kept) if known else len(kept)), name


def test_layers_of_one_stream_take_turns(machine: Machine) -> None:
    """Their graphs share memory: here a graph leaves in all outputs but its own what a GPU's might."""
    plain, first = pair()
    second = new_layer(cuda_graph=True)
    caches = [new_cache(layer) for layer in (plain, first, second)]
    outputs: list[Tensor] = []
    record = machine.record
    met = threading.Event()
    inside = threading.Event()

    def record_shared(layer: SparseDeltaMemory, x: Tensor, bank: Tensor, stream: int) -> Any:
        recorded, output = record(layer, x, bank, stream)
        outputs.append(output)

        class Recorded:
            def replay(self, on: int) -> None:
                for other in outputs:
                    other.fill_(torch.nan)
                recorded.replay(on)
                if threading.current_thread() is not threading.main_thread():
                    return
                inside.set()
                met.wait(0.2)  # without turns the other thread's replay comes here

        return Recorded(), output

    def other() -> None:
        inside.wait(10)
        decode(first, caches[1], token(3))
        met.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_replay, "_record", record_shared)
        met.set()
        warm(first, caches[1])
        warm(second, caches[2])
        warm(plain, caches[0])
        met.clear()
        inside.clear()
        thread = threading.Thread(target=other)
        thread.start()
        output = decode(second, caches[2], token(2))
        thread.join()
    assert machine.replays == 4
    assert_same_bits("output", output, decode(plain, caches[0], token(2)))


def test_a_parameter_that_became_a_plain_tensor_is_in_no_graph(machine: Machine) -> None:
    layer = new_layer(cuda_graph=True)
    cache = new_cache(layer)
    for name in ("dt_bias", "A_log"):
        value = getattr(layer, name)
        delattr(layer, name)
        setattr(layer, name, value.detach())
        warm(layer, cache)
        assert graphs(layer) == 0
        delattr(layer, name)
        setattr(layer, name, value)
    warm(layer, cache)
    assert graphs(layer) == 1


# ---- what a capture does ----


class Torch:
    """What a capture asks of PyTorch and the driver, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.pools = 0
        self.error: Exception | None = None

        @contextlib.contextmanager
        def on_stream(stream: Any) -> Iterator[None]:
            self.calls.append(("on", stream))
            yield
            self.calls.append("off")

        def record(launch_all: Callable[[int], None], context: int, stream: int) -> str:
            self.calls.append(("record", context, stream))
            launch_all(stream)
            return "recording"

        def new_pool() -> int:
            self.pools += 1
            return self.pools

        def noted(name: str) -> Callable[..., None]:
            return lambda *given: self.calls.append((name, *given))

        monkeypatch.setattr(token_replay, "_rooms", {})
        monkeypatch.setattr(token_replay, "record", record)
        monkeypatch.setattr(token_replay, "new_stream", lambda context: 100 + len(token_replay._rooms))
        monkeypatch.setattr(token_replay.driver, "primary_context", lambda device: 4711)
        monkeypatch.setattr(torch.cuda, "stream", on_stream)
        monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: handle)
        monkeypatch.setattr(torch.cuda, "current_blas_handle", noted("blas"))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", new_pool)
        for name, short in {
            "_cuda_beginAllocateCurrentStreamToPool": "begin",
            "_cuda_endAllocateToPool": "end",
            "_cuda_releasePool": "release",
        }.items():
            monkeypatch.setattr(torch._C, name, noted(short), raising=False)

    def capture(self, stream: int = 7) -> Any:
        def run(x: Tensor, bank: Tensor) -> Tensor:
            self.calls.append("run")
            if self.error is not None:
                raise self.error
            return x + 1

        self.calls.clear()
        return RECORD(SimpleNamespace(_token=run), torch.zeros(1), torch.zeros(1), stream)


RECORD = token_replay._record


def test_a_capture_allocates_from_memory_of_its_own_on_a_stream_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Torch(monkeypatch)
    recording, output = gpu.capture()
    assert (recording, float(output)) == ("recording", 1.0)
    # cuBLAS's working memory too, which PyTorch may drop while graphs use it.
    inside = [("on", 100), ("begin", -1, 1), ("blas",), ("record", 4711, 100), "run", ("end", -1, 1)]
    assert gpu.calls == [*inside, "off"]
    gpu.capture()
    assert gpu.calls == [*inside, ("release", -1, 1), "off"]  # one use is held, not two
    gpu.capture(stream=8)
    assert gpu.calls[:2] == [("on", 101), ("begin", -1, 2)]
    assert gpu.calls[-2] == ("end", -1, 2)


def test_the_memory_stays_when_no_graph_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Torch(monkeypatch)
    gpu.capture()
    gc.collect()
    assert gpu.calls[-2:] == [("end", -1, 1), "off"]  # not released
    gpu.capture()
    assert ("begin", -1, 1) in gpu.calls


def test_a_capture_that_fails_gives_the_allocator_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Torch(monkeypatch)
    gpu.error = RuntimeError("no")
    with pytest.raises(RuntimeError, match="no"):
        gpu.capture()
    assert ("end", -1, 1) in gpu.calls
    assert not token_replay._capturing.locked()
