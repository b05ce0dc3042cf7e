"""The layer on a GPU without gradients: whole sequences, ragged ones, and token by token, against the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from sdm_rt import SparseDeltaMemory, SparseDeltaMemoryArgs, last_dispatch
from tests.tolerances import relative_error

pytestmark = pytest.mark.gpu


def layers(**options: object) -> tuple[SparseDeltaMemory, SparseDeltaMemory]:
    """The same float32 layer on the CPU and on the GPU."""
    torch.manual_seed(0)
    defaults = {"dim": 128, "num_heads": 2, "num_writes": 16, "num_reads": 24, "slots_per_head": 1024}
    layer = SparseDeltaMemory(SparseDeltaMemoryArgs(**{**defaults, **options}), layer_id=0)
    layer.init_weights()
    layer.eval()
    return layer, copy.deepcopy(layer).cuda()


@pytest.mark.parametrize(
    "options", [{}, {"key_weighted_decay": True, "output_gate": True}, {"query_batchnorm": True}]
)
def test_sequences_equal_the_cpu(options: dict[str, object]) -> None:
    here, there = layers(**options)
    x = torch.randn(3, 150, 128)
    with torch.no_grad():
        want, state = here(x)
        got, state_there = there(x.cuda())
    assert last_dispatch()["path"] == "gpu"
    # A score that rounds differently may select another slot of equal standing; it must stay rare.
    assert relative_error(got.cpu(), want) < 1e-3
    assert relative_error(state_there.memory.cpu(), state.memory) < 1e-3


def test_ragged_sequences_equal_the_cpu() -> None:
    here, there = layers()
    x = torch.randn(3, 100, 128)
    lengths = torch.tensor([100, 0, 33])
    with torch.no_grad():
        want, _ = here(x, lengths=lengths)
        got, _ = there(x.cuda(), lengths=lengths.cuda())
    assert relative_error(got.cpu(), want) < 1e-3


def test_token_by_token_equals_the_whole_sequence() -> None:
    _, there = layers()
    x = torch.randn(2, 40, 128, device="cuda")
    with torch.no_grad():
        whole, state = there(x)
        cache = there.create_kv_cache(2, 40, torch.float32, device=torch.device("cuda"))
        first, cache = there(x[:, :8], cache=cache)
        parts = [first]
        for t in range(8, 40):
            part, cache = there(x[:, t : t + 1], cache=cache)
            parts.append(part)
        assert last_dispatch()["op"] == "sdm_decode_step"
    assert relative_error(torch.cat(parts, dim=1), whole) < 1e-3
    assert relative_error(cache.memory, state.memory) < 1e-3


def test_bfloat16_runs_and_stays_near_float32() -> None:
    _, there = layers()
    x = torch.randn(2, 64, 128, device="cuda")
    with torch.no_grad():
        want, _ = there(x)
        half = copy.deepcopy(there).to(torch.bfloat16)
        got, state = half(x.bfloat16())
    assert state.memory.dtype == torch.bfloat16
    assert relative_error(got.float(), want) < 0.2
