"""The layer in training stacks: accumulation, checkpointing, autocast, copies, files, restored banks."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.layer_reference import make_layer
from tests.tolerances import TOLERANCES, Tolerance, assert_close

EVERYTHING = {"output_gate": True, "normalize_readings": True, "key_weighted_decay": True}


def tokens(dtype=torch.float32, **options):
    return torch.randn(2, 7, 12, dtype=dtype, **options)


def gradients_of(layer):
    return {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}


def test_forward_with_and_without_gradients_gives_the_same_bits():
    layer = make_layer(torch.float32, **EVERYTHING)
    x = tokens()
    out, state = layer(x)
    bank = state[0].clone()
    with torch.no_grad():
        plain, plain_state = layer(x)
    assert torch.equal(out, plain)
    assert torch.equal(bank, plain_state[0])


def test_repeated_steps_give_the_same_bits():
    layer = make_layer(torch.float32, **EVERYTHING)
    x = tokens()
    found = []
    for _ in range(2):
        layer.zero_grad()
        out, _ = layer(x)
        out.square().sum().backward()
        found.append((out, gradients_of(layer)))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


def test_a_backward_restores_the_bank_of_its_call():
    layer = make_layer(torch.float32)
    out, state = layer(tokens())
    initial = layer.memory.detach().repeat(2, 1)
    assert not torch.equal(state[0], initial)
    out.sum().backward()
    assert torch.equal(state[0], initial)


def test_the_learned_bank_itself_is_never_advanced():
    layer = make_layer(torch.float32)
    before = layer.memory.detach().clone()
    for x in (tokens()[:1], tokens()):
        out, _ = layer(x)
        assert torch.equal(layer.memory, before)
        out.sum().backward()
        assert torch.equal(layer.memory, before)


def test_gradients_accumulate_over_calls_in_any_order():
    layer = make_layer(torch.float64, **EVERYTHING)
    first, second = tokens(torch.float64), tokens(torch.float64)
    layer(torch.cat([first, second]))[0].square().sum().backward()
    expected = gradients_of(layer)
    layer.zero_grad()
    outputs = [layer(first)[0], layer(second)[0]]
    for out in outputs:
        out.square().sum().backward()
    for name, gradient in gradients_of(layer).items():
        assert_close(name, gradient, expected[name], torch.float64)


def test_a_second_backward_through_one_call_names_the_remedy():
    layer = make_layer(torch.float32)
    out, _ = layer(tokens())
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second backward .* Run the forward again"):
        out.sum().backward()


def test_training_through_a_cache_gives_gradients_of_each_piece():
    layer = make_layer(torch.float64)
    x = tokens(torch.float64)
    cache = layer.create_kv_cache(2, 7, torch.float64)
    first, _ = layer(x[:, :3], cache=cache)
    middle = cache[0].clone()
    second, _ = layer(x[:, 3:], cache=cache)
    second.sum().backward()
    assert torch.equal(cache[0], middle)
    found = gradients_of_given(layer)
    layer.zero_grad()
    other = layer.create_kv_cache(2, 7, torch.float64, initial_memory=middle)
    layer(x[:, 3:], cache=other)[0].sum().backward()
    assert found == gradients_of_given(layer)
    first.sum().backward()
    assert torch.equal(cache[0], layer.memory.detach().repeat(2, 1))


def gradients_of_given(layer):
    """Gradients as lists, of the parameters that have one: the bank of a cache is not the learned one."""
    assert layer.memory.grad is None
    return {name: p.grad.tolist() for name, p in layer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_activation_checkpointing_changes_no_bit(use_reentrant):
    layer = make_layer(torch.float32, **EVERYTHING)
    x = tokens(requires_grad=True)
    layer(x)[0].square().sum().backward()
    expected = gradients_of(layer) | {"x": x.grad.clone()}
    layer.zero_grad()
    x.grad = None
    out = checkpoint(lambda x: layer(x)[0], x, use_reentrant=use_reentrant)
    out.square().sum().backward()
    for name, gradient in (gradients_of(layer) | {"x": x.grad}).items():
        assert torch.equal(gradient, expected[name]), name


def test_two_checkpointed_layers_in_a_row():
    layers = torch.nn.ModuleList([make_layer(torch.float32), make_layer(torch.float32, **EVERYTHING)])
    x = tokens(requires_grad=True)

    def gradients(run):
        layers.zero_grad()
        out = x
        for layer in layers:
            out = out + run(layer, out)
        out.square().sum().backward()
        return [parameter.grad.clone() for parameter in layers.parameters()]

    expected = gradients(lambda layer, x: layer(x)[0])
    for use_reentrant in (True, False):
        found = gradients(lambda layer, x: checkpoint(lambda y: layer(y)[0], x, use_reentrant=use_reentrant))  # noqa: B023
        assert all(torch.equal(got, want) for got, want in zip(found, expected, strict=True))


def test_saved_tensors_on_another_device_or_copied():
    layer = make_layer(torch.float32)
    x = tokens()
    layer(x)[0].sum().backward()
    expected = gradients_of(layer)
    layer.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        out = layer(x)[0]
    out.sum().backward()
    for name, gradient in gradients_of(layer).items():
        assert torch.equal(gradient, expected[name]), name


def test_autocast_runs_in_bfloat16():
    # All slots are selected, so that no rounding of a score can change the selection.
    layer = make_layer(
        torch.float32, slots_per_head=9, num_writes=9, num_reads=9, query_batchnorm=True, **EVERYTHING
    )
    x = tokens()
    expected = layer(x)[0]
    expected.sum().backward()
    wanted = gradients_of(layer)
    layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        out, state = layer(x)
    assert (out.dtype, state[0].dtype) == (torch.bfloat16, torch.bfloat16)
    entry = TOLERANCES[torch.bfloat16]
    tolerance = Tolerance(
        4 * entry.relative, entry.floor, "four times the op's: six projections and three norms"
    )
    assert_close("output", out, expected, torch.bfloat16, tolerance=tolerance)
    out.sum().backward()
    for name, gradient in gradients_of(layer).items():
        assert gradient.dtype == torch.float32
        if name not in ("Wk_write.bias", "Wq_read.bias"):  # 0 but for rounding: the norm takes them out
            assert_close(name, gradient, wanted[name], torch.bfloat16, tolerance=tolerance)


def test_a_deepcopy_is_independent():
    layer = make_layer(torch.float32, query_batchnorm=True, log_memory_norms=True)
    x = tokens()
    expected = layer(x)[0]
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(x)[0], expected)
    with torch.no_grad():
        copied.memory.zero_()
    assert torch.equal(layer(x)[0], expected)
    assert copied.memory._sdm_memory_bank
    assert copied.A_log._no_weight_decay


def test_state_dicts_load_strictly_through_a_file():
    layer = make_layer(torch.float32, query_batchnorm=True, **EVERYTHING)
    x = tokens()
    layer(x)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = make_layer(torch.float32, query_batchnorm=True, **EVERYTHING)
    other.init_weights()
    other.load_state_dict(torch.load(file), strict=True)
    assert torch.equal(other.eval()(x)[0], layer.eval()(x)[0])


def test_a_whole_layer_travels_through_a_file():
    layer = make_layer(torch.float32, **EVERYTHING)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    x = tokens()
    assert torch.equal(torch.load(file, weights_only=False)(x)[0], layer(x)[0])


def test_an_optimizer_learns_every_parameter():
    layer = make_layer(torch.float32, query_batchnorm=True, **EVERYTHING)
    before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    x, target = tokens(), tokens()
    losses = []
    for _ in range(20):
        loss = torch.nn.functional.mse_loss(layer(x)[0], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert not [name for name, value in before.items() if torch.equal(layer.get_parameter(name), value)]
