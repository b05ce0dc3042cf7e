"""The op by itself: two streams of different lengths, the functional form, gradients through two segments."""

from __future__ import annotations

import torch

from sdm_rt import repeated_write_slots, sdm_decode_step, sdm_write_read

P, T, W, R, D, S = 2, 32, 4, 4, 16, 64  # streams, tokens, slots written and read a token, columns, slots

torch.manual_seed(0)


def distinct_slots(tokens: int, count: int) -> torch.Tensor:
    """Bank rows [P, tokens, count]: stream p owns the rows p*S .. (p+1)*S - 1."""
    order = torch.rand(P, tokens, S).argsort(dim=-1)[..., :count]
    return order + torch.arange(P).view(P, 1, 1) * S


bank = torch.randn(P * S, D, requires_grad=True)
k_idx, q_idx = distinct_slots(T, W), distinct_slots(T, R)
k_val = torch.randn(P, T, W).softmax(dim=-1).requires_grad_()
q_val = torch.randn(P, T, R).softmax(dim=-1).requires_grad_()
v = torch.randn(P, T, D, requires_grad=True)
beta = torch.rand(P, T, 1, requires_grad=True)
g = (-0.1 * torch.rand(P, T, 1)).requires_grad_()
tokens = (k_idx, k_val, v, beta, g, q_idx, q_val)
sizes = {"num_memory_slots": S, "num_parallel": P}

# The functional form leaves the caller's bank alone and returns the bank after the call.
readings, final_bank = sdm_write_read(bank, *tokens, **sizes, return_final_bank=True)
print(f"readings {tuple(readings.shape)}, final bank {tuple(final_bank.shape)}")
readings.square().mean().backward()
print(f"gradient norms: bank {bank.grad.norm():.4f}, v {v.grad.norm():.4f}, beta {beta.grad.norm():.4f}")

# A sequence in two segments: the bank carries the state, and the gradients flow back through it.
whole = bank.grad.clone()
bank.grad = None
first = tuple(tensor[:, : T // 2] for tensor in tokens)
second = tuple(tensor[:, T // 2 :] for tensor in tokens)
readings_1, between = sdm_write_read(bank, *first, **sizes, return_final_bank=True)
readings_2, _ = sdm_write_read(between, *second, **sizes, return_final_bank=True)
(readings_1.square().sum() + readings_2.square().sum()).div(readings.numel()).backward()
difference = (bank.grad - whole).abs().max()
print(f"two segments against one: largest difference of the bank's gradient {difference:.1e}")
torch.testing.assert_close(bank.grad, whole)

# Streams of different lengths: what lies behind a stream's length is padding and reads as zero.
with torch.no_grad():
    lengths = torch.tensor([T, T // 4])
    state = bank.clone()
    padded = sdm_write_read(state, *tokens, **sizes, lengths=lengths).view(P, T, D)
    print(f"stream 1 has {T // 4} tokens; readings after them: {padded[1, T // 4 :].abs().max():.1f}")

    # Decode advances a bank by one token of each stream, in place, by the same recurrence.
    state = bank.clone()
    decoded = [sdm_decode_step(state, *(tensor[:, t] for tensor in tokens)) for t in range(T)]
    difference = (torch.stack(decoded, dim=1).reshape(P * T, D) - readings).abs().max()
    print(f"token by token against one call: largest difference {difference:.1e}")
    torch.testing.assert_close(state, final_bank)

print(f"write slots repeated within a token: {repeated_write_slots()}")
