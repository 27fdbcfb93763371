"""Train a model of one's own with the monitor attached: ``python -m train_examples.own_models.train [RUN_DIR]``.

Ten seconds on two cores; no circuit forms in so few steps. It shows where the two lines go.
"""

from __future__ import annotations

import sys

import torch

from spectral_monitor import SpectralMonitor, induction_probe
from train_examples.own_models.nano_gpt import GPT, GPTConfig


def main(run_dir: str = "own_model_run", steps: int = 64) -> None:
    """Train on rows that repeat their first half; look at log-spaced steps."""
    torch.manual_seed(0)
    model = GPT(GPTConfig())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    probe = induction_probe(rows=64, length=32, vocabulary=model.config.vocab_size)
    monitor = SpectralMonitor(run_dir, probes=[probe], max_overhead=None)
    tokens = 0
    monitor.step(model, 0, tokens)
    for step in range(1, steps + 1):
        half = torch.randint(model.config.vocab_size, (16, 32))
        rows = torch.cat([half, half], dim=1)
        _, loss = model(rows[:, :-1], rows[:, 1:])
        assert loss is not None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tokens += rows[:, 1:].numel()
        monitor.step(model, step, tokens)
    monitor.close()
    print(f"{steps} steps, {tokens} tokens; record in {run_dir}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "own_model_run")
