"""The published tables as long-form observation files: what a user would import.

Each builder writes a CSV in the import format whose per-head values have exactly the counts that the published table
states; where a table says nothing (which heads, what else they do), the heads are the first ones and do nothing.
"""

from __future__ import annotations

import csv
from pathlib import Path

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "published"
SHAPES = {"pythia-1b": (16, 8), "olmo-1b": (16, 16), "olmoe-1b-7b": (16, 16)}
BILLION = 1e9


def rows_of(name: str) -> list[dict[str, str]]:
    with open(PUBLISHED / name, newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def heads_of(model: str) -> list[tuple[int, int]]:
    layers, heads = SHAPES[model]
    return [(layer, head) for layer in range(layers) for head in range(heads)]


def bos_fraction(path: Path, model: str) -> Path:
    """``bos_fraction.csv`` of one model: that share of its heads is classed first token."""
    heads = heads_of(model)
    rows: list[dict[str, object]] = []
    for row in rows_of("bos_fraction.csv"):
        if row["model"] == model:
            first = round(float(row["fraction"]) * len(heads))
            rows += [
                {
                    "tokens": float(row["tokens_B"]) * BILLION,
                    "layer": layer,
                    "head": head,
                    "head_class": "first_token" if number < first else "none",
                }
                for number, (layer, head) in enumerate(heads)
            ]
    return write(path, rows)


def bos_per_layer(path: Path, model: str) -> Path:
    """``bos_per_layer.csv`` of one model, with the steps of its revisions."""
    rows: list[dict[str, object]] = []
    for row in rows_of("bos_per_layer.csv"):
        if row["model"] == model:
            step = int(row["revision"].split("-")[0].removeprefix("step"))
            for layer, head in heads_of(model):
                kind = "first_token" if head < int(row[f"L{layer}"]) else "none"
                rows.append({"step": step, "layer": layer, "head": head, "head_class": kind})
    return write(path, rows)


def milestones(path: Path, model: str) -> Path:
    """``milestones.csv`` of one model on its published revisions: the counts reach each bar where the table says so."""
    repo = {"pythia-1b": "EleutherAI/pythia-1b", "olmo-1b": "allenai/OLMo-1B-0724-hf"}
    repo["olmoe-1b-7b"] = "allenai/OLMoE-1B-7B-0924"
    times = [row for row in rows_of("revisions.csv") if row["repo"] == repo[model]]
    table = {row["milestone"]: float(row[model]) if row[model] else None for row in rows_of("milestones.csv")}
    heads = heads_of(model)

    def reached(name: str, tokens: float) -> bool:
        at = table[name]
        return at is not None and tokens >= at - 0.001

    rows: list[dict[str, object]] = []
    for time in times:
        tokens = float(time["tokens_B"])
        induction = max([number for number in (3, 5) if reached(f"induction_heads>={number}", tokens)], default=0)
        share = max([s for s in (0.1, 0.3, 0.5, 0.7) if reached(f"bos_fraction>={s:.2f}", tokens)], default=0.0)
        first = -int(-share * len(heads) // 1)
        kinds = ["first_token"] * first
        for kind in ("previous_token", "self"):
            kinds += [kind] * (30 if reached(f"{kind}_heads>=30", tokens) else 0)
        kinds += ["none"] * len(heads)
        for number, (layer, head) in enumerate(heads):
            rows.append(
                {
                    "step": time["step"],
                    "tokens": tokens * BILLION,
                    "layer": layer,
                    "head": head,
                    "selectivity_induction": 60.0 if number < induction else 1.0,
                    "head_class": kinds[number],
                }
            )
    return write(path, rows)


def recall(path: Path, model: str) -> Path:
    """``recall.csv`` of one model on its published revisions."""
    repo = {"pythia-1b": "EleutherAI/pythia-1b", "olmo-1b": "allenai/OLMo-1B-0724-hf"}
    repo["olmoe-1b-7b"] = "allenai/OLMoE-1B-7B-0924"
    times = [row for row in rows_of("revisions.csv") if row["repo"] == repo[model]]
    entry = next(row for row in rows_of("recall.csv") if row["model"] == model)
    circuit = next(row for row in rows_of("circuits.csv") if row["model"] == model)["circuit"].split()
    assert len(circuit) == int(entry["final_heads"])
    third, two_thirds, all_of_it = (float(entry[f"tokens_B_{level}"]) for level in (33, 67, 100))
    count = len(circuit)
    needed = {third: -(-count // 3), two_thirds: -(-2 * count // 3), all_of_it: count}
    rows: list[dict[str, object]] = []
    for time in times:
        tokens = float(time["tokens_B"])
        known = max([number for at, number in needed.items() if tokens >= at - 0.001], default=0)
        for layer, head in heads_of(model):
            inside = f"L{layer}H{head}" in circuit[:known]
            rows.append(
                {
                    "step": time["step"],
                    "tokens": tokens * BILLION,
                    "layer": layer,
                    "head": head,
                    "selectivity_induction": 100.0 if inside else 1.0,
                }
            )
    return write(path, rows)


def lead_of_l4h4(path: Path) -> Path:
    """``pythia1b_L4H4.csv``: one head among others that do nothing."""
    rows: list[dict[str, object]] = []
    for row in rows_of("pythia1b_L4H4.csv"):
        for layer, head in heads_of("pythia-1b"):
            own = (layer, head) == (4, 4)
            rows.append(
                {
                    "tokens": float(row["tokens_B"]) * BILLION,
                    "layer": layer,
                    "head": head,
                    "pr": row["pr"] if own else 2.0,
                    "selectivity_induction": row["induction_selectivity"] if own else 1.0,
                }
            )
    return write(path, rows)


def null_calibration(path: Path, model: str) -> Path:
    """``null_calibration.csv`` of one model: as many heads above each bar as stated."""
    entry = next(row for row in rows_of("null_calibration.csv") if row["model"] == model)
    heads, floor = int(entry["heads"]), float(entry["null_p99"])
    bars = {2.0: int(entry["above_2"]), floor: int(entry["above_null_p99"])}
    bars |= {bar: int(entry[f"above_{bar:g}"]) for bar in (10.0, 30.0, 50.0, 100.0)}
    values = [0.9] * heads
    for bar, number in sorted(bars.items()):
        for index in range(number):
            values[index] = max(values[index], bar * 1.001)
    values[0] = float(entry["real_max"])
    rows: list[dict[str, object]] = [
        {"step": 1, "layer": index // 16, "head": index % 16, "selectivity_induction": value, "null_p99": floor}
        for index, value in enumerate(values)
    ]
    return write(path, rows)
