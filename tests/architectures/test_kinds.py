"""The whole monitor, callback, causal check and record, on one family of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

from spectral_monitor import CheckOptions, LogSchedule, RunRecord, SpectralMonitor, SpectralMonitorCallback, Thresholds
from spectral_monitor.causal import CAUSAL
from tests.architectures.shrink import tiny_config
from tests.architectures.tiny import VOCABULARY, build, tiny_probe

PROBE = tiny_probe(rows=12)
#: Bars so low that untrained heads reach them: the check must run, whatever its answer.
LOW = Thresholds(classify=1.0, member=1.0, previous_token=1.0, min_attention=0.0)

KINDS = {
    "gpt2": "learned positions",
    "llama": "grouped-query",
    "bloom": "ALiBi, bypasses the registry",
    "falcon": "multi-query, its own SDPA call",
    "deepseek_v3": "latent attention",
    "qwen3_next": "gated output, hybrid",
    "beam": "gate as wide as the heads",
    "gpt_oss": "sinks and windows",
    "gemma2": "softcap and windows",
    "llama4_text": "chunked attention",
    "jamba": "hybrid",
    "zamba2": "shared blocks",
    "hrm_text": "layers that run more than once",
    "gptj": "parallel attention",
}


@pytest.mark.parametrize("model_type", list(KINDS))
def test_observation_check_and_record(model_type: str, tmp_path: Path) -> None:
    model = build(tiny_config(model_type)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    monitor = SpectralMonitor(
        tmp_path / "run",
        probes=[PROBE],
        thresholds=LOW,
        check=CheckOptions(first_look=10, max_draws=20),
        check_rows=12,
        max_overhead=None,
        on_error="raise",
    )
    look = monitor.observe(model, 1, 100)
    monitor.close()
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    record = RunRecord.open(tmp_path / "run")
    (observation,) = record.observations()
    heads = observation.heads
    assert len(heads) == len(look.observations[0].heads) > 0
    assert (heads.status == "ok").all() and observation.finite
    assert ((heads.pr >= 1) & np.isfinite(heads.pr)).all()
    for name, values in heads.attention.items():
        reached = heads.reach[name] > 0
        assert np.isnan(values[~reached]).all() and (values[reached] >= 0).all()
    verdicts = record.verdicts()
    assert verdicts, "heads passed the bars, but no check ran"
    attention_layers = {f"L{layer}H" for layer in heads.layer}
    for verdict in verdicts:
        assert verdict.reason
        for condition in verdict.random:
            assert all(name[: name.index("H") + 1] in attention_layers for name in condition.heads)
            assert not set(condition.heads) & set(verdict.heads)
    assert not all(verdict.verdict == CAUSAL for verdict in verdicts)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.tokens = torch.randint(VOCABULARY, (32, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def trained(model: Any, folder: Path, callbacks: list[Any]) -> Trainer:
    arguments = TrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no", logging_strategy="no", seed=1,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Rows(), callbacks=callbacks)
    trainer.train()
    return trainer


@pytest.mark.parametrize("model_type", ["bloom", "jamba", "gpt_oss", "zamba2"])
def test_the_callback_rides_along_and_changes_nothing(model_type: str, tmp_path: Path) -> None:
    plain, watched = build(tiny_config(model_type)), build(tiny_config(model_type))
    trained(plain, tmp_path / "plain", [])
    callback = SpectralMonitorCallback(
        run_dir=tmp_path / "run",
        probes=[PROBE],
        schedule=LogSchedule(extra_steps=frozenset({1, 2, 3})),
        check=None,
        max_overhead=None,
    )
    trained(watched, tmp_path / "watched", [callback])
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    assert RunRecord.open(tmp_path / "run").steps() == [0, 1, 2, 3, 4]


def test_a_model_without_attention_is_told_once_at_train_start_and_trains_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(tiny_config("mamba2"))
    callback = SpectralMonitorCallback(run_dir=tmp_path / "run", probes=[PROBE], max_overhead=None)
    with caplog.at_level("WARNING", logger="spectral_monitor"):
        trainer = trained(model, tmp_path / "out", [callback])
    assert trainer.state.global_step == 4
    assert "no softmax attention" in caplog.text
