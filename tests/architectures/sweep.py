"""Every causal-LM family of the installed transformers, tiny, against the textbook path.

``python -m tests.architectures.sweep`` runs all of them and remakes ``docs/architectures.md``;
``python -m tests.architectures.sweep llama bloom`` runs some and prints what came of them.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spectral_monitor.capture import Ablation, Subject, _ReadTap, _Tap
from spectral_monitor.errors import CaptureError
from spectral_monitor.guest import guest
from spectral_monitor.heads import Head
from spectral_monitor.probe import ProbeBatch
from spectral_monitor.reading import head_table
from spectral_monitor.screen import Thresholds
from tests.architectures.shrink import tiny_config
from tests.architectures.textbook import Textbook, rank_by_svd, textbook, without_heads
from tests.architectures.tiny import build, tiny_probe

CHECKED, REFUSED, DIFFERS, NOT_BUILT = "checked", "refused", "differs", "not built"
#: Largest differences from the textbook path that count as equal (issue 2).
RANK_TOLERANCE, ATTENTION_TOLERANCE, LOGPROB_TOLERANCE = 1e-5, 1e-6, 1e-5


@dataclass(frozen=True)
class Finding:
    """What came of one family.

    ``path``: how its attention is read (registry, sdpa, softmax). ``note``: the refusal's sentence, or what differs.
    ``attention_error``, ``rank_error`` (relative) and ``ablation_error`` (nats) are largest differences.
    """

    model_type: str
    architecture: str
    outcome: str
    path: str = ""
    layers: str = ""
    note: str = ""
    attention_error: float = float("nan")
    rank_error: float = float("nan")
    ablation_error: float = float("nan")
    seconds: float = float("nan")


def families() -> list[str]:
    """Model types of the causal-LM mapping."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


class RowTap(_Tap):
    """Keeps whole attention rows and head outputs at the query: what the monitor only adds up."""

    reads_attention = True

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.rows: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}

    def attention_ran(self, number: int, row: Any) -> None:
        self.rows[self._blocks[number].layer] = row[0].double()

    def heads_ran(self, number: int, outputs: Tensor) -> None:
        index = torch.arange(len(outputs))
        self.outputs[self._blocks[number].layer] = outputs[index, self.query].double()


def captured(subject: Subject, probe: ProbeBatch) -> tuple[RowTap, Tensor]:
    """Rows and outputs of all heads in one pass, and the logits [N, V] with capture on."""
    tap = RowTap(subject)
    with subject._instrumented(tap):
        logits = subject._run(tap, probe, np.arange(probe.rows))
    return tap, logits


def examine(model_type: str, model: Any, probe: ProbeBatch) -> Finding:
    """Compare the fast path with the textbook path on one model."""
    name = type(model).__name__
    tokens, query = torch.from_numpy(probe.tokens), torch.from_numpy(probe.query)
    try:
        subject = Subject(model, probe)
        reading = subject.read(probe, batch_size=probe.rows)
    except CaptureError as error:
        return Finding(model_type, name, REFUSED, note=str(error))
    table = head_table(reading, probe, "others", Thresholds())
    with guest(model):
        plain = subject.logits(tokens, query)
    tap, logits = captured(subject, probe)
    slow = textbook(model, probe)
    blocks = subject.anatomy.blocks
    paths = "+".join(sorted({"registry" if b.kind == "interface" else b.kind for b in blocks}))
    layers = ", ".join(f"L{b.layer}: {b.heads} x {b.head_dim}" for b in blocks)
    faults = []
    if not torch.equal(plain, logits):
        faults.append(f"logits change by {(plain - logits).abs().max():.2g}")
    if sorted(tap.rows) != sorted(slow.rows):
        faults.append(f"layers {sorted(tap.rows)}, textbook {sorted(slow.rows)}")
        return Finding(model_type, name, DIFFERS, paths, layers, "; ".join(faults))
    shapes = [
        (k, tuple(tap.rows[k].shape), tuple(v.shape)) for k, v in slow.rows.items() if v.shape != tap.rows[k].shape
    ]
    if shapes:
        return Finding(model_type, name, DIFFERS, paths, layers, f"attention shapes {shapes}")
    attention = max(float((tap.rows[layer] - rows).abs().max()) for layer, rows in slow.rows.items())
    slow_ranks = [rank_by_svd(rows[:, h]) for _, rows in sorted(slow.outputs.items()) for h in range(rows.shape[1])]
    rank = float(np.abs(table.pr / np.array(slow_ranks) - 1).max())
    ablation, least = _ablation_error(subject, model, probe, slow)
    if not attention <= ATTENTION_TOLERANCE:
        faults.append(f"attention differs by {attention:.2g}")
    if not rank <= RANK_TOLERANCE:
        faults.append(f"rank differs by {rank:.2g}")
    if not ablation <= LOGPROB_TOLERANCE:
        faults.append(f"ablation differs by {ablation:.2g} nats")
    if not least > 0:
        faults.append("an ablation changes nothing")
    outcome = DIFFERS if faults else CHECKED
    return Finding(model_type, name, outcome, paths, layers, "; ".join(faults), attention, rank, ablation)


def _ablation_error(subject: Subject, model: Any, probe: ProbeBatch, slow: Textbook) -> tuple[float, float]:
    """Largest difference from zeroed projection columns (nats), and the smallest effect of an ablation."""
    heads = {layer: rows.shape[1] for layer, rows in slow.rows.items()}
    sets = [frozenset([Head(layer, count - 1)]) for layer, count in heads.items()]
    conditions = [Ablation("baseline"), *(Ablation("one head", chosen) for chosen in sets)]
    baseline, *results = subject.run_conditions(probe, conditions, batch_size=probe.rows)
    tokens, query = torch.from_numpy(probe.tokens), torch.from_numpy(probe.query)
    index, target = torch.arange(probe.rows), torch.from_numpy(probe.target)
    worst, least = 0.0, float("inf")
    for chosen, result in zip(sets, results, strict=True):
        twin: Any = without_heads(model, slow.projections, sorted(chosen), heads)
        with torch.no_grad():
            logits = twin(tokens).logits[index, query].double()
        expected = logits.log_softmax(-1)[index, target].numpy()
        worst = max(worst, float(np.abs(result.logprob - expected).max()))
        least = min(least, float(np.abs(result.logprob - baseline.logprob).max()))
    return worst, least


def check(model_type: str, probe: ProbeBatch) -> Finding:
    """Build one family tiny and examine it; whatever happens is a finding."""
    began = time.perf_counter()
    try:
        model = build(tiny_config(model_type))
    except Exception as error:
        return Finding(model_type, "", NOT_BUILT, note=_line(error))
    try:
        finding = examine(model_type, model, probe)
    except Exception as error:
        finding = Finding(model_type, type(model).__name__, DIFFERS, note=_line(error))
    return Finding(**{**finding.__dict__, "seconds": time.perf_counter() - began})


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def sweep(model_types: Iterable[str] | None = None) -> list[Finding]:
    """Examine families one after the other."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    probe = tiny_probe()
    findings = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model_type in families() if model_types is None else model_types:
            finding = check(model_type, probe)
            print(f"{finding.model_type:24} {finding.outcome:10} {finding.path:10} {finding.note}", flush=True)
            findings.append(finding)
    return findings


if __name__ == "__main__":
    sweep(sys.argv[1:] or None)
