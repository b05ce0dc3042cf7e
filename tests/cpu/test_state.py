"""Cache and SDMLayerState."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from sdm_rt import Cache, SDMLayerState, SparseDeltaMemory, SparseDeltaMemoryArgs

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SHAPE = {"dim": 8, "num_heads": 2, "slots_per_head": 9, "num_writes": 3, "num_reads": 4}


def test_a_complex_bank_is_refused() -> None:
    state = SDMLayerState(torch.ones(4, 3))
    with pytest.raises(TypeError, match=r"new_memory: expected real numbers, got dtype torch\.complex64"):
        state.update_(torch.ones(4, 3, dtype=torch.complex64))
    assert bool((state.memory == 1).all())


def test_cache_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Cache()


def test_a_state_holds_its_bank():
    memory = torch.randn(6, 4)
    state = SDMLayerState(memory, seq_len=3)
    assert isinstance(state, Cache)
    assert state.cache_len == 3
    assert state[0] is state.state[0] is state.memory
    assert state.memory.data_ptr() == memory.data_ptr()
    assert not SDMLayerState(torch.zeros(6, 4, requires_grad=True)).memory.requires_grad


def test_update_counts_and_copies_in_place():
    memory = torch.randn(6, 4)
    state = SDMLayerState(memory)
    state.update_(state[0])
    assert state.cache_len == 1
    new = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    state.update_(new, seq_len=5)
    assert state.cache_len == 6
    assert torch.equal(memory, new.detach().float())
    assert not memory.requires_grad


def test_reset_of_a_state_made_from_a_tensor_restores_that_tensor():
    memory = torch.randn(6, 4)
    before = memory.clone()
    state = SDMLayerState(memory, seq_len=2)
    state.update_(torch.zeros(6, 4))
    state.reset()
    assert torch.equal(memory, before)
    assert state.cache_len == 0


def test_reset_repeats_the_initial_rows_and_follows_them():
    initial = torch.nn.Parameter(torch.randn(3, 4))
    state = SDMLayerState(torch.zeros(6, 4, dtype=torch.bfloat16), initial=initial)
    with torch.no_grad():
        initial.add_(1)
    state.reset()
    assert torch.equal(state[0], torch.cat([initial, initial]).detach().bfloat16())


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_reset_is_one_copy(rows):
    memory = torch.randn(4, 40).t()  # strided
    state = SDMLayerState(memory, initial=torch.randn(rows, 4))
    with torch.profiler.profile() as profile:
        state.reset()
    copies = [event.count for event in profile.key_averages() if event.key == "aten::copy_"]
    assert copies == [1]
    assert torch.equal(memory, state._initial.repeat(40 // rows, 1))


@pytest.mark.parametrize("learned", [True, False])
def test_states_of_a_layer_reset_to_its_initial_bank(learned):
    layer = SparseDeltaMemory(SparseDeltaMemoryArgs(**SHAPE, backprop_on_memory=learned), 0)
    initial = layer.memory.detach().repeat(2, 1) if learned else torch.zeros(2 * 2 * 9, 4)
    with torch.no_grad():
        _, from_forward = layer(torch.randn(2, 5, 8))
        from_cache = layer.create_kv_cache(2, 5, torch.float32)
        assert torch.equal(from_cache[0], initial)
        layer(torch.randn(2, 5, 8), cache=from_cache)
    for state in (from_forward, from_cache):
        assert state.cache_len == 5
        assert not torch.equal(state[0], initial)
        state.reset()
        assert torch.equal(state[0], initial)
        assert state.cache_len == 0


def test_reset_then_repeat_gives_the_same_outputs():
    layer = SparseDeltaMemory(SparseDeltaMemoryArgs(**SHAPE), 0)
    x = torch.randn(2, 5, 8)
    cache = layer.create_kv_cache(2, 5, torch.float32)
    with torch.no_grad():
        first = layer(x, cache=cache)[0]
        cache.reset()
        assert torch.equal(layer(x, cache=cache)[0], first)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_create_kv_cache_takes_an_initial_bank(dtype):
    layer = SparseDeltaMemory(SparseDeltaMemoryArgs(**SHAPE), 0)
    one, all_banks = torch.randn(18, 4), torch.randn(54, 4)
    for given, expected in ((one, one.repeat(3, 1)), (all_banks, all_banks.clone())):
        state = layer.create_kv_cache(3, 100, dtype, device="cpu", initial_memory=given)
        given.zero_()
        assert state[0].dtype == dtype
        assert torch.equal(state[0], expected.to(dtype))
        state.update_(torch.zeros(54, 4))
        state.reset()
        assert torch.equal(state[0], expected.to(dtype))


@pytest.mark.parametrize("way", ["torch.save", "torch.save weights_only=False", "pickle", "deepcopy"])
def test_a_state_travels(way):
    layer = SparseDeltaMemory(SparseDeltaMemoryArgs(**SHAPE), 0)
    x = torch.randn(1, 6, 8)
    with torch.no_grad():
        _, state = layer(x[:, :4])
        if way == "pickle":
            copied = pickle.loads(pickle.dumps(state))
        elif way == "deepcopy":
            copied = copy.deepcopy(state)
        else:
            file = io.BytesIO()
            torch.save({"state": state}, file)
            file.seek(0)
            copied = torch.load(file, weights_only="False" not in way)["state"]
        expected = layer(x[:, 4:], cache=state)[0]
        assert copied.cache_len == 4
        assert torch.equal(layer(x[:, 4:], cache=copied)[0], expected)
        copied.reset()
    assert torch.equal(copied[0], layer.memory)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: SDMLayerState([1.0]), TypeError, "memory: expected a torch.Tensor, got list"),
        (
            lambda: SDMLayerState(torch.zeros(4)),
            ValueError,
            "memory: expected shape [slots, head_dim], got [4]",
        ),
        (
            lambda: SDMLayerState(torch.zeros(4, 2).long()),
            TypeError,
            "memory: expected dtype float64, float32, bfloat16 or float16, got int64",
        ),
        (
            lambda: SDMLayerState(torch.zeros(4, 2), -1),
            ValueError,
            "seq_len: expected a value at least 0, got -1",
        ),
        (
            lambda: SDMLayerState(torch.zeros(4, 2), initial=torch.zeros(2, 3)),
            ValueError,
            "initial: expected shape [rows, 2], got [2, 3]",
        ),
        (
            lambda: SDMLayerState(torch.zeros(4, 2), initial=torch.zeros(3, 2)),
            ValueError,
            "initial: expected a number of rows that divides the 4 rows of memory, got 3",
        ),
        (
            lambda: SDMLayerState(torch.zeros(4, 2)).update_(torch.zeros(4, 1)),
            ValueError,
            "new_memory: expected shape [4, 2], got [4, 1]",
        ),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((-1, 5, torch.float32), ValueError, "bsz: expected a value at least 0, got -1"),
        ((1, -5, torch.float32), ValueError, "seq_len: expected a value at least 0, got -5"),
        (
            (1, 5, torch.int8),
            TypeError,
            "dtype: expected float64, float32, bfloat16 or float16, got torch.int8",
        ),
        (
            (2, 5, torch.float32, None, torch.zeros(9, 4)),
            ValueError,
            "initial_memory: expected shape [H*S, D] = [18, 4] or [B*H*S, D] = [36, 4], got [9, 4]",
        ),
    ],
)
def test_bad_input_of_create_kv_cache(arguments, error, message):
    layer = SparseDeltaMemory(SparseDeltaMemoryArgs(**SHAPE), 0)
    with pytest.raises(error) as caught:
        layer.create_kv_cache(*arguments)
    assert str(caught.value) == message


def test_a_state_without_rows_resets():
    state = SDMLayerState(torch.zeros(0, 4), seq_len=2, initial=torch.zeros(0, 4))
    state.reset()
    assert state.cache_len == 0
    with pytest.raises(ValueError, match=r"initial: expected a number of rows that divides the 6 rows .* 0"):
        SDMLayerState(torch.zeros(6, 4), initial=torch.zeros(0, 4))
