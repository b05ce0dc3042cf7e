"""Decoding byte by byte: a sample of text, and a check of decoding against the parallel forward."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from sdm_rt.demo.model import ByteLanguageModel

__all__ = ["decode_difference", "generate"]


@torch.no_grad()
def generate(model: ByteLanguageModel, prompt: bytes, count: int, temperature: float, seed: int) -> bytes:
    """Return ``count`` bytes that continue ``prompt``, each drawn from the decoded logits.

    Parameters
    ----------
    model : ByteLanguageModel
        Put into eval mode.
    prompt : bytes
        At least one byte.
    count : int
        Bytes to draw.
    temperature : float
        Divides the logits.
    seed : int
        Of the draws.
    """
    model.eval()
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(seed)
    states = model.new_states(1)
    continued = bytearray(prompt)
    logits = torch.empty(0)
    for position in range(len(prompt) + count - 1):
        logits = model.decode(torch.tensor([continued[position]], device=device), position, states)
        if position >= len(prompt) - 1:
            probabilities = (logits[0].float().cpu() / temperature).softmax(-1)
            continued.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(continued[len(prompt) :])


@torch.no_grad()
def decode_difference(model: ByteLanguageModel, tokens: Tensor) -> float:
    """Return the largest difference between decoded and parallel logits over ``tokens`` [B, T], in float64.

    In float64 no rounding can move a score across the edge of a top-k, where the two paths would
    rightly select different slots. GPUs have no float64 kernels, so a copy of the model runs on the CPU.
    """
    model, tokens = copy.deepcopy(model).cpu().double().eval(), tokens.cpu()
    parallel = model(tokens)
    states = model.new_states(tokens.shape[0])
    decoded = [model.decode(tokens[:, position], position, states) for position in range(tokens.shape[1])]
    return float((torch.stack(decoded, dim=1) - parallel).abs().max())
