"""Synthetic observations, events, verdicts and runs, and a wandb that keeps the real one's step rules."""

from __future__ import annotations

import collections
import types
from pathlib import Path
from typing import Any

import numpy as np

from spectral_monitor.observation import (
    CLASSES,
    ConditionMetrics,
    Event,
    HeadTable,
    Observation,
    ProbeMetrics,
    Verdict,
)
from spectral_monitor.record import RunRecord

TOKENS_A_STEP = 4096.0


def observation(
    step: int,
    *,
    layers: int = 2,
    heads: int = 4,
    formed: float = 0.0,
    circuit: tuple[tuple[int, int], ...] = ((1, 0), (1, 2)),
    probe: str = "induction",
    seed: int = 0,
    **changes: Any,
) -> Observation:
    """An observation in which the heads of ``circuit`` attend to the target with mass ``0.01 + 0.8 * formed``."""
    rng = np.random.default_rng([seed, step])
    count = layers * heads
    layer, head = np.repeat(np.arange(layers), heads), np.tile(np.arange(heads), layers)
    inside = np.array([(a, b) in circuit for a, b in zip(layer, head, strict=True)])
    attention = {name: rng.uniform(0.002, 0.02, count) for name in CLASSES}
    attention["induction"] = np.where(inside, 0.01 + 0.8 * formed, attention["induction"])
    attention["first_token"] = np.where(layer == 0, attention["first_token"], 0.3 + 0.01 * rng.uniform(size=count))
    baseline = rng.uniform(0.003, 0.006, count)
    selectivity = {name: values / baseline for name, values in attention.items()}
    stacked = np.stack([selectivity[name] for name in CLASSES])
    best = np.array(CLASSES)[stacked.argmax(axis=0)]
    pr = 2 + rng.uniform(0, 1, count) + np.where(inside, 9 * formed, 2 * formed)
    table = HeadTable(
        layer=layer,
        head=head,
        pr=pr,
        pr_moment=pr * 0.8,
        attention=attention,
        baselines={"others": baseline},
        selectivity=selectivity,
        head_class=np.where(stacked.max(axis=0) >= 30, best, "none"),
        status=np.full(count, "ok"),
        sink=np.zeros(count),
    )
    values: dict[str, Any] = {
        "step": step,
        "tokens": step * TOKENS_A_STEP,
        "probe": probe,
        "fingerprint": "f" * 64,
        "heads": table,
        "metrics": ProbeMetrics(0.02 + 0.9 * formed, 0.1 + 0.85 * formed, 4.0 - 3.5 * formed, 1.0, 64),
        "baseline": "others",
        "null_p99": 2.5,
        "seconds": 0.2,
        "share": 0.01,
        "time": 1.0 + step,
    }
    return Observation(**{**values, **changes})


def event(
    kind: str = "selectivity_crossing", step: int = 8, heads: tuple[str, ...] = ("L1H0",), **changes: Any
) -> Event:
    values: dict[str, Any] = {
        "kind": kind,
        "step": step,
        "tokens": step * TOKENS_A_STEP,
        "probe": "induction",
        "capability": "induction",
        "heads": heads,
        "direction": "up",
        "value": 60.0,
    }
    return Event(**{**values, **changes})


def verdict(step: int = 8, heads: tuple[str, ...] = ("L1H0", "L1H2"), mode: str = "zero", **changes: Any) -> Verdict:
    def condition(name: str, of: tuple[str, ...], logprob: float) -> ConditionMetrics:
        return ConditionMetrics(name, of, logprob, 0.9, 0.95, 5.0)

    values: dict[str, Any] = {
        "step": step,
        "tokens": step * TOKENS_A_STEP,
        "probe": "induction",
        "capability": "induction",
        "heads": heads,
        "mode": mode,
        "verdict": "causal",
        "reason": "taking the circuit out does more than any matched-random draw",
        "p_value": 0.04,
        "level": 0.05,
        "draws": 24,
        "distinct_draws": 66,
        "seed": 1,
        "effect": 3.1,
        "effect_ci": (2.9, 3.3),
        "excess": 3.0,
        "excess_ci": (2.8, 3.2),
        "conditions": (
            condition("baseline", (), -0.2),
            condition("circuit", heads, -3.3),
            condition("upper bound", heads, -4.0),
        ),
        "random": tuple(condition(f"random {n}", ("L1H1", "L1H3"), -0.2 - 0.01 * n) for n in range(24)),
        "rows": 64,
        "seconds": 1.5,
    }
    return Verdict(**{**values, **changes})


def formed_at(step: int, onset: int = 16) -> float:
    """How far the circuit of the synthetic run has formed."""
    return float(1 / (1 + np.exp(-(step - onset) / 3)))


def record(run_dir: Path, steps: tuple[int, ...] = (0, 1, 2, 4, 8, 16, 24, 32), **options: Any) -> RunRecord:
    """A whole run on disk, closed: the circuit forms at step 16, crosses at 24, and is found causal there."""
    run = {
        "probes": {"induction": {"fingerprint": "f" * 64, "rows": 64, "length": 64, "protocol": "default"}},
        "model": {"type": "gpt_neox", "layers": 2, "heads": 4},
    }
    record = RunRecord.create(run_dir, run)
    for step in steps:
        record.append(observation(step, formed=formed_at(step), **options))
        if step == 16:
            record.add_event(event("pr_rise", 16, ("L1H0", "L1H2", "L0H3")))
        if step == 24:
            record.add_event(event("selectivity_crossing", 24, ("L1H0", "L1H2")))
            record.add_verdict(verdict(24))
            record.add_event(event("circuit_formed", 24, ("L1H0", "L1H2")))
    record.close()
    return record


class StrictRun:
    """A run with wandb's rules: rows behind the counter vanish, ``commit`` and ``step`` act as in wandb 0.31.

    ``rows`` are the flushed rows with their ``_step``; ``drops`` what vanished; ``calls`` the log calls.
    """

    offline, disabled = True, False

    def __init__(self, run_id: str = "r1") -> None:
        self.id, self.config = run_id, _Config()
        self.dir = "."
        self.rows: list[dict[str, Any]] = []
        self.drops: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self.alerts: list[dict[str, Any]] = []
        self.defined: dict[str, dict[str, Any]] = {}
        self.finished = 0
        self._counter = 0
        self._pending: dict[str, Any] = {}
        self._teardown_hooks: list[Any] = []

    @property
    def step(self) -> int:
        return self._counter

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.calls.append({"data": data, "step": step, "commit": commit})
        if step is not None:
            if step < self._counter:
                self.drops.append({"step": step, **data})
                return
            if step > self._counter:
                self._flush()
                self._counter = step
        self._pending.update(data)
        if commit or (commit is None and step is None):
            self._flush()
            self._counter += 1

    def _flush(self) -> None:
        if self._pending:
            self.rows.append({"_step": self._counter, **self._pending})
        self._pending = {}

    def define_metric(self, name: str, **options: Any) -> None:
        self.defined[name] = options

    def alert(self, title: str, text: str, level: str = "INFO", wait_duration: Any = None) -> None:
        self.alerts.append({"title": title, "text": text, "level": level})

    def finish(self) -> None:
        for hook in self._teardown_hooks:
            hook.call()
        self._flush()
        self.finished += 1


class _Config(dict[str, Any]):
    def update(self, values: dict[str, Any], allow_val_change: bool = False) -> None:  # type: ignore[override]
        super().update(values)


def fake_wandb(run: StrictRun | None = None) -> types.ModuleType:
    """A module to put into ``sys.modules["wandb"]``: counts ``init`` and ``finish``."""
    module = types.ModuleType("wandb")
    module.run = run  # type: ignore[attr-defined]
    module.inits = []  # type: ignore[attr-defined]

    def init(**options: Any) -> StrictRun:
        module.inits.append(options)  # type: ignore[attr-defined]
        module.run = StrictRun(f"r{len(module.inits)}")  # type: ignore[attr-defined]
        return module.run  # type: ignore[attr-defined, no-any-return]

    class Media:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.args, self.options = args, options

    module.init = init  # type: ignore[attr-defined]
    module.Table = module.Image = module.Histogram = Media  # type: ignore[attr-defined]
    return module


def fake_wandb_modules(run: StrictRun | None = None) -> dict[str, types.ModuleType]:
    """``fake_wandb`` with the one inner module that knows how to hook into ``finish``."""
    inner = types.ModuleType("wandb.sdk.wandb_run")
    inner.TeardownHook = collections.namedtuple("TeardownHook", "call stage")  # type: ignore[attr-defined]
    inner.TeardownStage = types.SimpleNamespace(EARLY=1, LATE=2)  # type: ignore[attr-defined]
    return {"wandb": fake_wandb(run), "wandb.sdk": types.ModuleType("wandb.sdk"), "wandb.sdk.wandb_run": inner}
