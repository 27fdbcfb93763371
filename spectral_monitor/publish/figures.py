"""Static figures for papers (PNG and SVG) and every table as CSV. Needs matplotlib, the ``report`` extra."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spectral_monitor.development import Development
from spectral_monitor.errors import RecordError
from spectral_monitor.heads import Head
from spectral_monitor.observation import Event, Verdict
from spectral_monitor.publish.story import latest_verdicts, readable
from spectral_monitor.publish.tables import tables_of, tokens_text

#: Okabe-Ito colours and a dash for each: readable without colour.
COLOURS = ("#d55e00", "#0072b2", "#00805f", "#b0568c", "#b8860b", "#3f9bd1")
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)))
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.linewidth": 0.7,
    "lines.linewidth": 1.3,
    "legend.frameon": False,
    "svg.hashsalt": "spectral_monitor",
}
#: Heads drawn one by one.
DRAWN = 6


def write_tables(
    found: Development, verdicts: Sequence[Verdict], events: Sequence[Event], folder: str | os.PathLike[str]
) -> list[Path]:
    """Every table of the run as CSV with full values; returns the files."""
    place = _folder(folder)
    files = []
    for table in tables_of(found, verdicts, events):
        file = place / f"{table.name}.csv"
        file.write_text(table.csv(), encoding="utf-8")
        files.append(file)
    return files


def write_figures(found: Development, verdicts: Sequence[Verdict], folder: str | os.PathLike[str]) -> list[Path]:
    """The figures that the record allows, as PNG (300 dpi) and SVG; returns the files.

    RecordError: matplotlib is missing, or the folder cannot be written.
    """
    try:
        import matplotlib

        matplotlib.use("Agg", force=False)
        from matplotlib import pyplot
    except ImportError:
        raise RecordError("figures need matplotlib: pip install 'spectral_monitor[report]'") from None
    place = _folder(folder)
    drawings: dict[str, Callable[[Any], Any] | None] = {
        "headline": lambda plt: headline(plt, found),
        "sinks": (lambda plt: sinks(plt, found)) if found.series.has_classes else None,
        "causal": (lambda plt: causal(plt, verdicts)) if any(verdict.random for verdict in verdicts) else None,
    }
    files = []
    with matplotlib.rc_context(STYLE):
        for name, draw in drawings.items():
            if draw is None:
                continue
            figure = draw(pyplot)
            for kind in ("png", "svg"):
                file = place / f"{name}.{kind}"
                metadata = {"Date": None} if kind == "svg" else None
                figure.savefig(file, dpi=300, bbox_inches="tight", metadata=metadata)
                files.append(file)
            pyplot.close(figure)
    return files


def _folder(folder: str | os.PathLike[str]) -> Path:
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(f"{place} cannot be written ({error.strerror or error}): choose another folder") from error
    return place


def headline(plt: Any, found: Development) -> Any:
    """Two panels over training: PR of the circuit's heads against all others, and their selectivity.

    Open circles: the PR rise; filled ones: the crossing of the circuit's bar. Grey: 10% to 90% of the other heads.
    """
    series = found.series
    heads: list[Head] = found.final_circuits.get(series.capability, []) or found.rankings["integral"].top(
        series.heads, 3
    )
    heads = heads[:DRAWN]
    columns = [series.column(head) for head in heads]
    others = np.setdiff1d(np.arange(len(series.heads)), [series.column(h) for h in heads])
    used = series.usable
    x = series.x[used]
    leads = {lead.head: lead for lead in found.leads}
    figure, (left, right) = plt.subplots(1, 2, figsize=(6.9, 2.6), constrained_layout=True)
    panels = [(left, series.pr, "PR (entropy effective rank)")]
    ratios = series.selectivity.get(series.capability)
    if ratios is not None:
        panels.append((right, ratios, f"{readable(series.capability)} selectivity"))
    else:
        right.set_visible(False)
    for axes, values, label in panels:
        shown = values[used]
        if len(others):
            with np.errstate(all="ignore"):
                low, high = np.nanpercentile(shown[:, others], [10, 90], axis=1)
            axes.fill_between(x, low, high, color="#8b9096", alpha=0.25, linewidth=0, label="other heads, 10 to 90%")
        for number, (head, column) in enumerate(zip(heads, columns, strict=True)):
            style = {"color": COLOURS[number % 6], "linestyle": DASHES[number % 6]}
            axes.plot(x, shown[:, column], label=str(head), **style)
            lead = leads.get(head)
            onset = None if lead is None else (lead.rise if axes is left else lead.crossing)
            if onset is not None and onset.index is not None:
                filled = COLOURS[number % 6] if axes is right else "white"
                point = (series.x[onset.index], values[onset.index, column])
                axes.plot(*point, "o", mfc=filled, mec=COLOURS[number % 6], ms=5)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "25" else "")
        axes.set_ylabel(label)
        _time_axis(axes, found)
    if ratios is not None:
        right.axhline(series.bars.member, color="#5b6166", linewidth=0.8, linestyle="--")
    left.legend(fontsize=7)
    left.set_title("a  Spectral signal")
    right.set_title("b  Pattern")
    return figure


def sinks(plt: Any, found: Development) -> Any:
    """First-token heads over training: their share of all heads, and by layer."""
    series = found.series
    used = series.usable
    x = series.x[used]
    figure, (left, right) = plt.subplots(1, 2, figsize=(6.9, 2.6), constrained_layout=True)
    left.plot(x, found.first_token_fraction[used], "o-", ms=2.5, color=COLOURS[1])
    if found.shape.after is not None and found.shape.by is not None:
        left.axvspan(max(found.shape.after, x[x > 0].min()), found.shape.by, color=COLOURS[1], alpha=0.12, linewidth=0)
    left.set_ylim(0, 1)
    left.set_ylabel("first-token heads, share of all")
    left.set_title(f"a  Shape: {found.shape.kind}")
    _time_axis(left, found)
    sizes = np.array([(series.layer == layer).sum() for layer in series.layers])
    share = (found.first_token_by_layer[used] / sizes).T
    picture = right.imshow(share, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    ticks = np.unique(np.linspace(0, len(x) - 1, min(5, len(x))).round().astype(int))
    right.set_xticks(ticks, [_time(found, float(x[tick])) for tick in ticks])
    rows = np.arange(0, len(series.layers), max(1, len(series.layers) // 8))
    right.set_yticks(rows, [f"L{series.layers[row]}" for row in rows])
    right.set_xlabel("tokens" if series.axis == "tokens" else "step")
    right.set_title("b  By layer")
    figure.colorbar(picture, ax=right, label="share of the layer's heads")
    return figure


def causal(plt: Any, verdicts: Sequence[Verdict]) -> Any:
    """Damage of the circuit against matched-random draws and the upper bound, one row a check."""
    shown = [verdict for verdict in latest_verdicts(verdicts) if verdict.random]
    figure, axes = plt.subplots(figsize=(6.9, 0.6 + 0.55 * len(shown)), constrained_layout=True)
    jitter = np.random.default_rng(0)
    for row, verdict in enumerate(reversed(shown)):
        baseline = verdict.condition("baseline")
        assert baseline is not None
        damage = [baseline.logprob - draw.logprob for draw in verdict.random]
        axes.plot(damage, row + jitter.uniform(-0.18, 0.18, len(damage)), "o", ms=3, color="#5b6166", alpha=0.6)
        low, high = verdict.effect_ci
        axes.plot([low, high], [row, row], color=COLOURS[0], linewidth=2)
        axes.plot(verdict.effect, row, "D", ms=6, color=COLOURS[0])
        bound = verdict.condition("upper bound")
        if bound is not None:
            axes.plot(baseline.logprob - bound.logprob, row, "s", ms=6, mfc="white", mec="black")
    axes.axvline(0, color="black", linewidth=0.7)
    labels = [f"{readable(verdict.capability)}, {verdict.mode}: {verdict.verdict}" for verdict in reversed(shown)]
    axes.set_yticks(range(len(shown)), labels)
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_xlabel(
        "nats of log-probability lost (diamond: circuit; dots: matched random; square: all heads of its layers)"
    )
    return figure


def _time_axis(axes: Any, found: Development) -> None:
    series = found.series
    positive = series.x[series.usable & (series.x > 0)]
    if len(positive) > 1 and positive.max() / positive.min() > 12:
        axes.set_xscale("log")
        axes.set_xlim(positive.min(), positive.max())
    axes.set_xlabel("tokens" if series.axis == "tokens" else "step")
    axes.xaxis.set_major_formatter(lambda value, _: _time(found, value))


def _time(found: Development, value: float) -> str:
    return tokens_text(value).replace(".0", "") if found.series.axis == "tokens" else f"{value:.0f}"
