"""Observations from elsewhere into a record, and a record out as a plain dataset.

In: one long table (CSV or Parquet), a row a head and observation, with the column names of design "The record". Only
``layer``, ``head`` and one of ``step`` and ``tokens`` are needed; a column that is missing stays missing, and what
needs it says so when the record is analysed. Out: a folder that ``datasets.load_dataset``, pandas and DuckDB open, with
a card.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from spectral_monitor.errors import RecordError
from spectral_monitor.observation import BASELINES, CLASSES, UNCLASSIFIED
from spectral_monitor.record import RunRecord, dumps, from_table

_INTEGERS = ("step", "layer", "head", "probe_rows", "attempt")
_FLOATS = (
    "tokens",
    "pr",
    "pr_moment",
    "baseline",
    "probe_top1",
    "probe_top5",
    "probe_loss",
    "probe_target_logit",
    "null_p99",
    "seconds",
    "share",
    "time",
)
_STRINGS = ("probe", "head_class", "status", "fingerprint", "baseline_name", "mark", "label")
_BOOLEANS = ("tokens_estimated", "finite")
_PREFIXES = ("attention_", "selectivity_", "reach_", "extra_", *(f"baseline_{name}" for name in BASELINES))
#: One value an observation: they must agree in all of its rows.
_SHARED = ("tokens", "fingerprint", "baseline_name", "finite", "mark", "label", "null_p99", "probe_top1", "probe_loss")


@dataclass(frozen=True)
class Imported:
    """What an import did: the record's directory, counts, and sentences on what was left out or made up."""

    run_dir: Path
    observations: int
    heads: int
    probes: tuple[str, ...]
    notes: tuple[str, ...]


def import_table(
    file: str | os.PathLike[str],
    run_dir: str | os.PathLike[str],
    rename: Mapping[str, str] | None = None,
    capability: str = "induction",
) -> Imported:
    """Make a record of the observations in a CSV or Parquet file.

    Args:
        file: long form, one row a head and observation.
        run_dir: a new or empty directory; it appears only when everything has been written.
        rename: column of the file -> column name of the record, for files that use other names.
        capability: the class that the probe asks for.

    Raises:
        RecordError: the file cannot be read, lacks ``layer``, ``head`` or both of ``step`` and ``tokens``, holds a
            value of the wrong kind or range, or one head twice in one observation; or ``run_dir`` is not empty.
    """
    source, target = Path(file), Path(run_dir)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RecordError(f"{target} exists and is not empty: import into a new directory")
    table = _read(source)
    notes: list[str] = []
    table = _renamed(table, rename or {}, source)
    table = _typed(table, source, notes)
    table = _with_steps(table, source, notes)
    _check_values(table, source)
    groups = _groups(table, source)
    probes = {str(group["probe"][0]): str(group["fingerprint"][0] or "") for group in groups}
    run = {
        "source": {"kind": "import", "file": source.name, "sha256": hashlib.sha256(source.read_bytes()).hexdigest()},
        "probes": {
            name: {"fingerprint": fingerprint, "capability": capability} for name, fingerprint in probes.items()
        },
        "notes": notes,
    }
    _write(target, run, groups)
    heads = len(set(zip(table["layer"].to_pylist(), table["head"].to_pylist(), strict=True)))
    return Imported(target, len(groups), heads, tuple(probes), tuple(notes))


def _read(source: Path) -> pa.Table:
    if not source.is_file():
        raise RecordError(f"no file at {source}: check the path")
    suffix = source.suffix.lower()
    try:
        if suffix == ".csv":
            options = pyarrow.csv.ConvertOptions(strings_can_be_null=True)
            table = pyarrow.csv.read_csv(source, convert_options=options)
        elif suffix in (".parquet", ".pq"):
            table = pq.read_table(source)
        else:
            raise RecordError(f"{source.name} is neither .csv nor .parquet: give a file of one of these kinds")
    except (pa.ArrowException, OSError) as error:
        raise RecordError(f"{source} cannot be read as a table ({str(error).splitlines()[0]})") from error
    if not table.num_rows:
        raise RecordError(f"{source} has no rows: there is nothing to import")
    return table


def _renamed(table: pa.Table, rename: Mapping[str, str], source: Path) -> pa.Table:
    for old, new in rename.items():
        if old not in table.column_names:
            raise RecordError(f"{source.name} has no column {old!r} to rename: it has {', '.join(table.column_names)}")
        if new in table.column_names:
            raise RecordError(f"{source.name} already has a column {new!r}: {old!r} cannot take its name")
    table = table.rename_columns([rename.get(name, name) for name in table.column_names])
    twice = {name for name in table.column_names if table.column_names.count(name) > 1}
    if twice:
        raise RecordError(f"{source.name} has the column {sorted(twice)[0]!r} twice: name each column once")
    return table


def _typed(table: pa.Table, source: Path, notes: list[str]) -> pa.Table:
    """Only known columns, each of its own type; RecordError names the column and the first bad value."""
    columns: dict[str, Any] = {}
    unknown = []
    for name in table.column_names:
        if name in _INTEGERS:
            columns[name] = _cast(table, name, pa.int64(), source)
        elif name in _FLOATS or name.startswith(_PREFIXES):
            columns[name] = _cast(table, name, pa.float64(), source)
        elif name in _BOOLEANS:
            columns[name] = _cast(table, name, pa.bool_(), source)
        elif name in _STRINGS:
            columns[name] = _cast(table, name, pa.string(), source)
        elif name == "tokens_B":
            columns["tokens"] = pc.multiply(_cast(table, name, pa.float64(), source), 1e9)
            notes.append("tokens were read from tokens_B, in billions")
        else:
            unknown.append(name)
    missing = [name for name in ("layer", "head") if name not in columns]
    if missing or not {"step", "tokens"} & set(columns):
        needs = missing[0] if missing else "step or tokens"
        raise RecordError(
            f"{source.name} has no column {needs}: one row a head and observation with layer, head and step (or "
            f"tokens) is needed; it has {', '.join(table.column_names)}. Use --rename OLD=NEW where it has other names"
        )
    if unknown:
        notes.append(f"columns not imported, their names are unknown: {', '.join(unknown)}")
    rows = table.num_rows
    if "probe" not in columns:
        columns["probe"] = pa.array(["induction"] * rows)
    if "fingerprint" not in columns:
        columns["fingerprint"] = pa.array([""] * rows)
        notes.append("the probe batch is unknown (no fingerprint): comparisons with other runs cannot be checked")
    if "baseline_name" not in columns:
        columns["baseline_name"] = pa.array(["unknown"] * rows)
    return pa.table(columns)


def _cast(table: pa.Table, name: str, kind: pa.DataType, source: Path) -> pa.ChunkedArray:
    column = table[name]
    try:
        return column.cast(kind)
    except (pa.ArrowException, ValueError):
        pass
    for row, value in enumerate(column.to_pylist()):
        try:
            pa.array([value]).cast(kind)
        except (pa.ArrowException, ValueError):
            raise RecordError(
                f"{source.name}: column {name!r} holds {value!r} in data row {row + 1}, which is no {_WORDS[kind]}"
            ) from None
    raise RecordError(f"{source.name}: column {name!r} cannot be read as {_WORDS[kind]}")


_WORDS = {pa.int64(): "whole number", pa.float64(): "number", pa.bool_(): "true or false", pa.string(): "text"}


def _with_steps(table: pa.Table, source: Path, notes: list[str]) -> pa.Table:
    if "step" in table.column_names:
        if table["step"].null_count:
            raise RecordError(f"{source.name}: column 'step' is empty in some rows")
        return table
    if table["tokens"].null_count:
        raise RecordError(f"{source.name}: without a step, every row needs its tokens")
    tokens = table["tokens"].to_numpy()
    order = np.searchsorted(np.unique(tokens), tokens)
    notes.append("the file has no steps: observations are numbered 0, 1, 2 ... in order of tokens")
    return table.append_column("step", pa.array(order, pa.int64()))


def _check_values(table: pa.Table, source: Path) -> None:
    for name in ("step", "layer", "head", "tokens", "pr"):
        if name in table.column_names:
            column = table[name]
            if name in ("layer", "head") and column.null_count:
                raise RecordError(f"{source.name}: column {name!r} is empty in some rows")
            low = pc.min(column).as_py()
            if low is not None and low < 0:
                raise RecordError(f"{source.name}: column {name!r} holds {low:g}; it must not be negative")
    for name in table.column_names:
        if name.startswith(("attention_", "selectivity_")):
            values = table[name].to_numpy()
            values = values[np.isfinite(values)]
            above = name.startswith("attention_") and values.size and values.max() > 1 + 1e-6
            if values.size and (values.min() < 0 or above):
                worst = values.max() if above else values.min()
                bounds = "between 0 and 1" if name.startswith("attention_") else "at least 0"
                raise RecordError(f"{source.name}: column {name!r} holds {worst:g}; it must be {bounds}")
    if "head_class" in table.column_names:
        named = [name.removeprefix("selectivity_") for name in table.column_names if name.startswith("selectivity_")]
        allowed = dict.fromkeys([*CLASSES, *named, UNCLASSIFIED, ""])
        for value in pc.unique(table["head_class"]).to_pylist():
            if value is not None and value not in allowed:
                raise RecordError(
                    f"{source.name}: head_class {value!r} is unknown: use {', '.join(name for name in allowed if name)}"
                )


def _groups(table: pa.Table, source: Path) -> list[pa.Table]:
    """One table an observation, heads in order; RecordError for a head that is there twice or values that disagree."""
    keys = [("probe", "ascending"), ("step", "ascending"), ("layer", "ascending"), ("head", "ascending")]
    table = table.sort_by(keys).combine_chunks()
    step, layer, head = (table[name].to_numpy() for name in ("step", "layer", "head"))
    probe = np.array(table["probe"].to_pylist(), dtype=np.str_)
    same = (probe[1:] == probe[:-1]) & (step[1:] == step[:-1])
    twice = np.flatnonzero(same & (layer[1:] == layer[:-1]) & (head[1:] == head[:-1]))
    if len(twice):
        row = int(twice[0])
        raise RecordError(
            f"{source.name}: head L{layer[row]}H{head[row]} stands twice at step {step[row]} of probe {probe[row]!r}"
        )
    starts = np.concatenate([[0], np.flatnonzero(~same) + 1, [len(step)]])
    groups = [table.slice(int(a), int(b - a)) for a, b in pairwise(starts)]
    shared = [name for name in _SHARED if name in table.column_names]
    for group in groups:
        for name in shared:
            if len(pc.unique(group[name])) > 1:
                raise RecordError(
                    f"{source.name}: column {name!r} has several values at step {group['step'][0].as_py()}: "
                    "it must be the same for all heads of one observation"
                )
    return [group.combine_chunks() for group in groups]


def _write(target: Path, run: Mapping[str, Any], groups: list[pa.Table]) -> None:
    """Write the record beside its place and move it there whole."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as place:
            made = Path(place) / "record"
            with RunRecord.create(made, run) as record:
                for group in groups:
                    record.append(from_table(group))
            (made / ".lock").unlink(missing_ok=True)
            if target.exists():
                target.rmdir()
            shutil.move(made, target)
    except OSError as error:
        raise RecordError(
            f"record {target} cannot be written ({error.strerror or error}): choose another directory"
        ) from error


# -- out --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exported:
    """What an export wrote: its folder and the rows of each table."""

    folder: Path
    rows: dict[str, int]


def export_record(record: RunRecord, folder: str | os.PathLike[str]) -> Exported:
    """Write a record as a dataset folder: ``observations``, ``events`` and ``verdicts`` as Parquet, and a card.

    Tables without rows are left out. RecordError: an empty record, or a folder that exists and is not empty.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RecordError(f"{target} exists and is not empty: export into a new directory")
    tables = {"observations": record.table()}
    events = [
        {**asdict(event), "heads": list(event.heads), "detail": dumps(event.detail, None)} for event in record.events()
    ]
    verdicts = [_verdict_row(asdict(verdict)) for verdict in record.verdicts()]
    tables |= {name: pa.Table.from_pylist(rows) for name, rows in (("events", events), ("verdicts", verdicts)) if rows}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as place:
            made = Path(place) / "dataset"
            made.mkdir()
            for name, table in tables.items():
                pq.write_table(table, made / f"{name}.parquet", compression="zstd")
            (made / "run.json").write_text(dumps(record.run))
            (made / "README.md").write_text(card(record, tables))
            if target.exists():
                target.rmdir()
            shutil.move(made, target)
    except OSError as error:
        raise RecordError(f"{target} cannot be written ({error.strerror or error}): choose another folder") from error
    return Exported(target, {name: table.num_rows for name, table in tables.items()})


def _verdict_row(verdict: dict[str, Any]) -> dict[str, Any]:
    row = {**verdict, "heads": list(verdict["heads"])}
    for name in ("effect_ci", "excess_ci"):
        row[name] = list(row[name])
    for name in ("conditions", "random"):
        row[name] = [{**condition, "heads": list(condition["heads"])} for condition in row[name]]
    return row


_COLUMNS = {
    "step": "finished optimizer updates",
    "tokens": "training tokens seen",
    "layer, head": "0-based head",
    "pr": "entropy effective rank of the head's output at the query position",
    "pr_moment": "classical participation ratio of the same matrix",
    "attention_<class>": "mean attention mass on the class's target positions",
    "baseline, baseline_<name>": "mean attention on the baseline's positions",
    "selectivity_<class>": "attention / baseline",
    "head_class": "class of largest selectivity, if that reaches the bar",
    "status": "ok, dead (all-zero output) or not_finite",
    "probe_top1, probe_loss": "how well the model does the probe's task (loss in nats)",
    "finite, mark": "whether the observation counts, and why not",
}


def card(record: RunRecord, tables: Mapping[str, pa.Table]) -> str:
    """The dataset card: how to load it, what is in it, what the columns mean."""
    configs = "\n".join(
        f"- config_name: {name}\n  data_files: {name}.parquet" + ("\n  default: true" if name == "observations" else "")
        for name in tables
    )
    steps = record.steps()
    probes = "\n".join(
        f"- `{name}`: SHA-256 `{str(probe.get('fingerprint', '')) or 'unknown'}`"
        + (f", {probe['rows']} rows of {probe['length']} tokens" if {"rows", "length"} <= set(probe) else "")
        for name, probe in record.probes.items()
    )
    columns = "\n".join(f"| `{name}` | {text} |" for name, text in _COLUMNS.items())
    rows = "\n".join(f"| `{name}` | {table.num_rows} | {table.num_columns} |" for name, table in tables.items())
    return f"""---
pretty_name: Attention circuits over training
tags:
- interpretability
- attention
- training-dynamics
configs:
{configs}
---

# Attention circuits over training

Observations of every attention head of one training run or replay, written by `spectral_monitor`:
{len(steps)} observations from step {steps[0]} to step {steps[-1]}.

```python
from datasets import load_dataset

heads = load_dataset("PATH_OR_REPO", "observations", split="train").to_pandas()
heads.query("layer == 1").groupby("step").pr.mean()
```

| table | rows | columns |
| --- | --- | --- |
{rows}

Probe batches:

{probes}

Columns of `observations` (one row a head and observation):

| column | meaning |
| --- | --- |
{columns}

`run.json` holds the run's configuration as recorded. A value that was not measured is null or NaN, never 0.
"""


def upload(folder: Path, repo: str, private: bool = True) -> None:
    """Upload an exported folder as a dataset repository, through the Hub's own command-line client.

    RecordError with the client's last line when it refuses (no login, no such name, no network).
    """
    command = [
        sys.executable,
        "-m",
        "huggingface_hub.cli.hf",
        "upload",
        repo,
        str(folder),
        ".",
        "--repo-type",
        "dataset",
    ]
    command.append("--private" if private else "--no-private")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        reason = lines[-1] if lines else f"exit status {done.returncode}"
        raise RecordError(f"the Hub did not take {repo} ({reason}): log in with `hf auth login`, check the name")
