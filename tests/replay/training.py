"""A real, tiny training run with the live monitor, each observed step saved as a revision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from spectral_monitor.causal import CheckOptions
from spectral_monitor.monitor import SpectralMonitor
from spectral_monitor.probe import ProbeBatch, induction_probe
from spectral_monitor.screen import Thresholds

from .models import save, tiny_model

#: Twelve observed steps of forty.
STEPS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40)
TOKENS_PER_STEP = 16 * 32


def probe() -> ProbeBatch:
    return induction_probe(rows=32, length=48, vocabulary=64, exclude=(0,))


def monitor_options() -> dict[str, Any]:
    """Bars so low that candidate sets change in a run this short: causal checks and crossings happen."""
    return {
        "thresholds": Thresholds(classify=1.2, member=1.02, previous_token=1.2, min_attention=0.0, hysteresis=1.0),
        "check": CheckOptions(first_look=2, max_draws=4),
        "check_rows": 16,
        "check_seconds": None,
        "null_draws": 3,
    }


def train(revisions: Path, run_dir: Path) -> None:
    """Train for 40 steps; write ``revisions/stepN`` and the live record at each of ``STEPS``."""
    model = tiny_model(7, attention_dropout=0.0, hidden_dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(0)
    monitor = SpectralMonitor(run_dir, [probe()], max_overhead=None, on_error="raise", **monitor_options())
    for step in range(STEPS[-1] + 1):
        if step in STEPS:
            monitor.observe(model, step, float(step * TOKENS_PER_STEP), tokens_estimated=True, label=f"step{step}")
            model.eval()
            save(model, revisions / f"step{step}")
        half = torch.randint(1, 64, (16, 16), generator=data)
        tokens = torch.cat([half, half], dim=1)  # every row repeats: induction pays
        model.train()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
