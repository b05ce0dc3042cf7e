"""Train one layer on associative recall: read pairs of a key and a value, then answer what a key's value was.

Every sequence draws its pairs anew, so only the bank can hold the answer. Runs in a few seconds on a CPU.
"""

import torch
import torch.nn.functional as F
from torch import nn

from sdm_rt import SparseDeltaMemory, SparseDeltaMemoryArgs

KEYS, VALUES, DIM = 32, 16, 64
PAIRS, QUESTIONS, BATCH, STEPS = 16, 16, 32, 120
UNKNOWN = VALUES  # the value of a question


class Recall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Embedding(KEYS, DIM)
        self.value = nn.Embedding(VALUES + 1, DIM)
        self.memory = SparseDeltaMemory(
            SparseDeltaMemoryArgs(dim=DIM, num_heads=2, slots_per_head=1024, num_writes=8, num_reads=8),
            layer_id=0,
        )
        self.head = nn.Linear(DIM, VALUES)

    def forward(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        x = self.key(keys) + self.value(values)  # [B, T, DIM], a pair or a question each
        readings, _ = self.memory(F.layer_norm(x, (DIM,)))
        return self.head(readings)


def make_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keys = torch.rand(BATCH, KEYS).argsort(dim=1)[:, :PAIRS]  # distinct within a sequence
    values = torch.randint(VALUES, (BATCH, PAIRS))
    asked = torch.randint(PAIRS, (BATCH, QUESTIONS))
    unknown = torch.full((BATCH, QUESTIONS), UNKNOWN)
    tokens = torch.cat([keys, keys.gather(1, asked)], 1), torch.cat([values, unknown], 1)
    return *tokens, values.gather(1, asked)


def main() -> None:
    torch.manual_seed(0)
    model = Recall()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    print(f"chance: loss {torch.tensor(float(VALUES)).log():.3f}, accuracy {1 / VALUES:.0%}")
    for step in range(STEPS + 1):
        keys, values, answers = make_batch()
        logits = model(keys, values)[:, PAIRS:]
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        if step % 20 == 0:
            accuracy = (logits.argmax(-1) == answers).float().mean()
            print(f"step {step:3d}  loss {loss:.3f}  accuracy {accuracy:.0%}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
