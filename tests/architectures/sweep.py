"""Every causal-LM family of the installed transformers, tiny, against the textbook path.

``python -m tests.architectures.sweep`` runs all of them and remakes the table in ``docs/architectures.md``;
``python -m tests.architectures.sweep llama bloom`` runs some and prints what came of them.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spectral_monitor.capture import Ablation, Subject, _Tap
from spectral_monitor.errors import CaptureError
from spectral_monitor.guest import guest
from spectral_monitor.heads import Head
from spectral_monitor.probe import ProbeBatch
from spectral_monitor.reading import head_table
from spectral_monitor.screen import Thresholds
from tests.architectures.shrink import tiny_config
from tests.architectures.textbook import Textbook, rank_by_svd, textbook, without_head
from tests.architectures.tiny import build, tiny_probe

CHECKED, REFUSED, DIFFERS, NOT_BUILT = "checked", "refused", "differs", "not built"
#: Largest differences from the textbook path that count as equal. Issue 2 asks for 1e-6 of attention on its families
#: (tests/test_capture.py); where scores are large, two float32 routes to a model's own hidden states differ by more.
RANK_TOLERANCE, ATTENTION_TOLERANCE, LOGPROB_TOLERANCE = 1e-5, 3e-6, 1e-5


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
    """Keeps whole attention rows, sinks and head outputs at the query: what the monitor only adds up."""

    reads_attention = True

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        nothing = torch.zeros(0)
        self.rows, self.sinks, self.outputs = ([nothing] * len(self._blocks) for _ in range(3))

    def attention_ran(self, number: int, row: Any) -> None:
        self.rows[number], self.sinks[number] = row[0].double(), row[1].double()

    def heads_ran(self, number: int, outputs: Tensor) -> None:
        self.outputs[number] = outputs[torch.arange(len(outputs)), self.query].double()


def captured(subject: Subject, probe: ProbeBatch) -> tuple[RowTap, Tensor]:
    """Rows and outputs of all heads in one pass, and the logits [N, V] with capture on."""
    tap = RowTap(subject)
    with subject._instrumented(tap):
        logits = subject._run(tap, probe, np.arange(probe.rows))
    return tap, logits


def examine(model_type: str, model: Any, probe: ProbeBatch) -> Finding:
    """Compare the fast path with the textbook path on one model."""
    name = type(model).__name__
    try:
        subject = Subject(model, probe)
        table = head_table(subject.read(probe, batch_size=probe.rows), probe, "others", Thresholds())
    except CaptureError as error:
        return Finding(model_type, name, REFUSED, note=str(error))
    with guest(model):
        plain = subject.logits(torch.from_numpy(probe.tokens), torch.from_numpy(probe.query))
    tap, logits = captured(subject, probe)
    slow = textbook(model, probe)
    blocks = subject.anatomy.blocks
    finding = Finding(
        model_type,
        name,
        DIFFERS,
        path="+".join(sorted({"registry" if block.kind == "interface" else block.kind for block in blocks})),
        layers=", ".join(f"L{block.layer}: {block.heads} x {block.head_dim}" for block in blocks),
    )
    if slow.layers is not None and slow.layers != list(subject.anatomy.layers):
        return replace(finding, note=f"layers {subject.anatomy.layers}, textbook {slow.layers}")
    shapes = [(tuple(a.shape), tuple(b.shape)) for a, b in zip(tap.rows, slow.rows, strict=True) if a.shape != b.shape]
    if shapes:
        return replace(finding, note=f"attention shapes {shapes}")
    errors = [_row_error(*pair) for pair in zip(tap.rows, tap.sinks, slow.rows, strict=True)]
    ranks = [rank_by_svd(rows[:, head]) for rows in slow.outputs for head in range(rows.shape[1])]
    ablation, least = _ablation_error(subject, model, probe, slow)
    finding = replace(
        finding,
        attention_error=max(errors),
        rank_error=float(np.abs(table.pr / np.array(ranks) - 1).max()),
        ablation_error=ablation,
    )
    faults = []
    if not torch.equal(plain, logits):
        faults.append(f"logits change by {(plain - logits).abs().max():.2g}")
    if not finding.attention_error <= ATTENTION_TOLERANCE:
        faults.append(f"attention differs by {finding.attention_error:.2g}")
    if not finding.rank_error <= RANK_TOLERANCE:
        faults.append(f"rank differs by {finding.rank_error:.2g}")
    if not ablation <= LOGPROB_TOLERANCE:
        faults.append(f"ablation differs by {ablation:.2g} nats")
    if not least > 0:
        faults.append("an ablation changes nothing")
    return replace(finding, outcome=DIFFERS if faults else CHECKED, note="; ".join(faults))


def _row_error(rows: Tensor, sinks: Tensor, slow: Tensor) -> float:
    """Largest difference; eager functions that report rows without their sink's share are held to the rest."""
    without_sink = bool((slow.sum(-1) - 1).abs().max() < 1e-4) and bool(sinks.any())
    return float(((rows / (1 - sinks)[..., None] if without_sink else rows) - slow).abs().max())


def _ablation_error(subject: Subject, model: Any, probe: ProbeBatch, slow: Textbook) -> tuple[float, float]:
    """Largest difference from zeroed projection columns (nats), and the smallest effect of an ablation.

    The last head of each projection is taken out, in all layers and runs that share its weights.
    """
    owners: dict[str, list[int]] = {}
    for number, name in enumerate(slow.projections):
        weight: Any = model.get_submodule(name).weight
        shared = next((other for other in owners if model.get_submodule(other).weight is weight), name)
        owners.setdefault(shared, []).append(number)
    layers = subject.anatomy.layers
    last = {name: slow.rows[numbers[0]].shape[1] - 1 for name, numbers in owners.items()}
    conditions = [
        Ablation(name, frozenset(Head(layers[number], last[name]) for number in numbers))
        for name, numbers in owners.items()
    ]
    baseline, *results = subject.run_conditions(probe, [Ablation("baseline"), *conditions], batch_size=probe.rows)
    tokens, query = torch.from_numpy(probe.tokens), torch.from_numpy(probe.query)
    index, target = torch.arange(probe.rows), torch.from_numpy(probe.target)
    worst, least = 0.0, float("inf")
    for name, result in zip(owners, results, strict=True):
        twin: Any = without_head(model, name, last[name], last[name] + 1)
        with torch.no_grad():
            logits = twin(tokens, use_cache=False).logits[index, query].double()
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
    return replace(finding, seconds=time.perf_counter() - began)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


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


# -- the table in the documentation -----------------------------------------------------------------------------------

TABLE = Path(__file__).parents[2] / "docs" / "architectures.md"
BEGIN, END = "<!-- sweep: begin -->", "<!-- sweep: end -->"
#: Entries that have no softmax attention, and entries that are no causal models of token ids by themselves.
_RECURRENT = ("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm")
_NOT_TOKENS = ("gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody", "xlnet")


def section(findings: list[Finding], seconds: float) -> str:
    """The generated part of the documentation."""
    import transformers

    outcomes = Counter(finding.outcome for finding in findings)
    heads = [finding for finding in findings if finding.model_type not in _RECURRENT + _NOT_TOKENS]
    checked = sum(finding.outcome == CHECKED for finding in heads)
    lines = [
        BEGIN,
        f"transformers {transformers.__version__}, torch {torch.__version__}: {len(findings)} entries of the causal-LM "
        f"mapping, {outcomes[CHECKED]} checked, {outcomes[REFUSED]} refused, {outcomes[NOT_BUILT]} not built here, "
        f"{outcomes[DIFFERS]} differ; {seconds:.0f} s on one thread. {len(_RECURRENT)} have no softmax attention "
        f"({', '.join(_RECURRENT)}), {len(_NOT_TOKENS)} are no causal models of token ids "
        f"({', '.join(_NOT_TOKENS)}); of the other {len(heads)}, {checked} are checked "
        f"({100 * checked / len(heads):.1f}%).",
        "",
        "| model type | class | outcome | attention read at | heads x size by layer | or why not |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for finding in findings:
        cells = (finding.model_type, finding.architecture, finding.outcome, finding.path, finding.layers, finding.note)
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join([*lines, END])


def table() -> dict[str, str]:
    """Model type -> outcome, as the documentation has it."""
    inside = TABLE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    rows = [line.strip("| ").split(" | ") for line in inside.splitlines() if line.startswith("| ")]
    return {row[0]: row[2] for row in rows[2:]}


def main(model_types: list[str]) -> None:
    """Run the sweep; without arguments remake the table."""
    began = time.perf_counter()
    findings = sweep(model_types or None)
    print(Counter(finding.outcome for finding in findings))
    if not model_types:
        text = TABLE.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        TABLE.write_text(before + section(findings, time.perf_counter() - began) + after, encoding="utf-8")
        print(f"wrote {TABLE}")


if __name__ == "__main__":
    main(sys.argv[1:])
