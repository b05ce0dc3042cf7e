"""What the layer reports about slots and norms."""

from __future__ import annotations

import copy
import math

import torch

from tests.layer_reference import make_layer


def test_statistics_of_slots():
    layer = make_layer(log_memory_access_stats=True)
    assert layer.statistics == {}
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    layer(x, lengths=torch.tensor([6, 2]))
    found = layer.statistics
    for name, projection, count in (("write", layer.Wk_write, 5), ("read", layer.Wq_read, 4)):
        scores = projection(torch.cat([x[0], x[1, :2]])).view(8, 2, 2, 5)
        total = (scores[:, :, 0, :, None] + scores[:, :, 1, None, :]).flatten(2)  # [N, H, S]
        expected = torch.zeros(2, 25, dtype=torch.int64)
        for slots in total.topk(count).indices:
            for h in range(2):
                expected[h, slots[h]] += 1
        share = expected / expected.sum(1, keepdim=True)
        entropy = -(share * share.clamp_min(1e-30).log()).sum(1) / math.log(25)
        assert torch.equal(found[f"{name}_counts"], expected)
        torch.testing.assert_close(found[f"{name}_used"], (expected > 0).float().mean(1))
        torch.testing.assert_close(found[f"{name}_entropy"], entropy)
    assert set(found) == {
        f"{name}_{what}" for name in ("write", "read") for what in ("counts", "used", "entropy")
    }


def test_statistics_of_norms():
    layer = make_layer(log_memory_norms=True)
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    _, state = layer(x, lengths=torch.tensor([6, 2]))
    found = layer.statistics
    norms = state[0].norm(dim=1).view(2, 2, 25).transpose(0, 1).flatten(1).float()
    torch.testing.assert_close(found["bank_norm_mean"], norms.mean(1))
    torch.testing.assert_close(found["bank_norm_max"], norms.amax(1))
    values = layer.Wv_write(torch.cat([x[0], x[1, :2]])).view(8, 2, 6).norm(dim=2).mean(0).detach().float()
    torch.testing.assert_close(found["value_norm_mean"], values)
    assert found["reading_norm_mean"].shape == (2,)
    assert not any(value.requires_grad for value in found.values())
    whole = copy.deepcopy(layer)
    whole(x[:1])
    whole_values = whole.Wv_write(x[0]).view(6, 2, 6).norm(dim=2).mean(0).detach().float()
    torch.testing.assert_close(whole.statistics["value_norm_mean"], whole_values)
