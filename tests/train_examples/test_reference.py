"""The reference run's two scripts at toy size: options, parameter count, checkpoint and resume, the same loss."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from spectral_monitor.record import RunRecord
from tests.publish.offline import OfflineRun, offline_environment
from train_examples import accelerate_loop, compare_seeds, tinystories_51m
from train_examples.reference import (
    OptionError,
    ReferenceArguments,
    build,
    build_model,
    load_options,
    parse,
    parser,
    song_syllables,
    summary,
)

TOY = (  # noqa: SIM905
    "--preset cpu --layers 2 --width 16 --heads 2 --context 64 --gap 4 12 --long_gap 16 24 --probe_rows 8 "
    "--vocabulary 500 --code_words 16 "
    "--per_device_train_batch_size 2 --max_steps 6 --logging_steps 1 --save_steps 100 --disable_tqdm true"
).split()


def test_the_full_preset_is_the_51m_model_and_its_optimizer() -> None:
    options, training = parse(parser("x"), [])
    with torch.device("meta"):
        model = build_model(options, 50257, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 51_082_752
    assert (options.layers, options.width, options.heads, options.context) == (8, 512, 16, 256)
    assert (training.learning_rate, training.adam_beta1, training.adam_beta2, training.weight_decay) == (
        1e-3,
        0.9,
        0.95,
        0.5,
    )
    assert (training.max_steps, training.per_device_train_batch_size) == (10_000, 64)
    assert options.code_share == 0.10 and options.code_words == 512 and options.probe_rows == 2000


def test_the_command_line_wins_over_the_preset() -> None:
    options, training = parse(parser("x"), ["--preset=cpu", "--width", "96", "--max_steps", "7"])
    assert (options.data, options.width, training.max_steps, training.use_cpu) == ("generated", 96, 7, True)
    assert options.heads == 12


def test_the_cpu_preset_plants_the_gains_it_says_and_nothing_else() -> None:
    with_gains, _ = parse(parser("x"), ["--preset", "cpu"])
    without, _ = parse(parser("x"), ["--preset", "cpu", "--attention_gains", "1", "1"])
    planted, plain = (build_model(options, 384, seed=1).state_dict() for options in (with_gains, without))
    name = "gpt_neox.layers.1.attention.query_key_value.weight"
    ratio = (planted[name] / plain[name]).view(12, 3, 16, 192)[:, :2].mean((1, 2, 3))
    assert sorted(round(float(gain), 3) for gain in ratio) == [1.0] * 4 + [6.0] * 8
    assert all(torch.equal(planted[key], plain[key]) for key in plain if key != name)


def test_the_cpu_presets_rows_ask_for_both_tasks_and_its_probes_use_what_they_are_made_of() -> None:
    """Without enough of either task in its rows the preset learns only one of them (as it once did)."""
    options, training = parse(parser("x"), ["--preset", "cpu"])
    assert training.max_steps * training.per_device_train_batch_size * options.context >= 3_000_000
    setup = build(options, seed=7, rows=400)
    rows = [setup.rows[number]["input_ids"].tolist() for number in range(400)]

    syllables = set(song_syllables(setup.tokenizer))
    assert len(syllables) == 60, "every syllable is one token"
    induction, retrieval, long = setup.probes
    assert set(np.unique(induction.tokens).tolist()) == syllables
    sung, guessed = 0, 0
    for row in rows:
        follower: dict[int, int] = {}
        for token, after in itertools.pairwise(row):
            if token in syllables and after in syllables:
                sung += 1
                guessed += follower.get(token) == after
            follower[token] = after
    assert sung > 0.4 * 400 * options.context, "songs are much of the text"
    assert guessed > 0.4 * sung, "what came after the last time is often right: induction pays"

    codes = set(np.unique(retrieval.target).tolist())
    assert len(codes) == options.code_words and set(np.unique(long.target).tolist()) == codes
    told = [[token for token in row if token in codes] for row in rows]
    assert {len(found) for found in told} == {0, 2}
    assert all(found[0] == found[1] for found in told if found)
    assert np.mean([bool(found) for found in told]) == pytest.approx(0.35, abs=0.07)


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["--preset", "huge"], "choose one of full, cpu"),
        (["--width", "30", "--heads", "4"], "choose a multiple"),
        (["--family", "llama"], "choose gpt2 or gpt_neox"),
        (["--gap", "3"], "LOW HIGH"),
        (["--attention_gains", "1", "2"], "needs --family gpt_neox"),
        (["--song_share", "1.5"], "0 to 1"),
    ):
        with pytest.raises(OptionError, match=said):
            parse(parser("x"), arguments)
    assert tinystories_51m.main([*TOY, "--data", str(tmp_path / "no.txt"), "--output_dir", str(tmp_path / "o")]) == 1
    assert "there is no file" in capsys.readouterr().err
    assert accelerate_loop.main([*TOY, "--seeds", "1", "2", "--output_dir", str(tmp_path / "o")]) == 1
    assert "one seed" in capsys.readouterr().err
    assert tinystories_51m.main([*TOY, "--resume_from_checkpoint", "last", "--output_dir", str(tmp_path / "o")]) == 1
    assert "no checkpoint" in capsys.readouterr().err


def trainer_losses(out: Path, step: int) -> list[float]:
    state = json.loads((out / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def test_a_stopped_and_resumed_trainer_run_has_the_losses_of_an_unbroken_one(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert tinystories_51m.main([*TOY, "--output_dir", str(whole), "--stop_after", "6"]) == 0
    assert tinystories_51m.main([*TOY, "--output_dir", str(broken), "--stop_after", "3"]) == 0
    assert not (broken / "final").exists()
    resume = ["--resume_from_checkpoint", "last", "--stop_after", "6"]
    assert tinystories_51m.main([*TOY, "--output_dir", str(broken), *resume]) == 0
    assert trainer_losses(broken, 6) == trainer_losses(whole, 6)
    assert len(trainer_losses(whole, 6)) == 6
    record = RunRecord.open(broken / "spectral_monitor")
    probes = {observation.probe for observation in record.observations()}
    assert probes == {"induction", "key_retrieval", "key_retrieval_long"}
    assert (broken / "final" / "config.json").exists() and (broken / "final" / "tokenizer.json").exists()


def test_seeds_run_one_after_the_other_with_the_same_probes_and_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tinystories_51m.main([*TOY, "--max_steps", "1", "--seeds", "4", "5", "--output_dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for probe in ("induction", "key_retrieval", "key_retrieval_long"):
        assert len(re.findall(rf"^{probe}: top-1 \d+\.\d% at step 1; ", printed, re.MULTILINE)) == 2
    records = [RunRecord.open(tmp_path / f"seed-{seed}" / "spectral_monitor") for seed in (4, 5)]
    prints = [{name: probe["fingerprint"] for name, probe in record.run["probes"].items()} for record in records]
    assert prints[0] == prints[1] and len(prints[0]) == 3
    four, five = (next(iter(record.observations())).heads.pr for record in records)
    assert (four != five).any()
    runs = [str(tmp_path / "seed-4"), str(tmp_path / "seed-5")]
    result = tmp_path / "compared.json"
    drawn = ["--picture", str(tmp_path / "accuracy.svg")]
    assert compare_seeds.main([*runs, "--draws", "2", "--rows", "8", "--json", str(result), *drawn]) == 0
    picture = (tmp_path / "accuracy.svg").read_text()
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert picture.count(">seed-4<") == picture.count(">seed-5<") == 3
    for name, found in json.loads(result.read_text()).items():
        assert name in ("induction", "key_retrieval")
        matrix = found["transplant"]["PR spread"]
        assert [(entry["source"], entry["target"]) for entry in matrix] == [
            (f"seed-{source}/spectral_monitor", f"seed-{target}/spectral_monitor")
            for target in (4, 5)
            for source in (4, 5)
        ]
        assert all(0 <= entry["verdict"]["conditions"][1]["top1"] <= 1 for entry in matrix)


def in_another_process(script: str, folder: Path) -> None:
    """Run Python code that uses W&B offline, its files in ``folder``: W&B reads its environment once a process."""
    pytest.importorskip("wandb")
    environment = offline_environment(folder)
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


#: The accuracy of each probe in a W&B run.
TOP1 = {
    "spectral_monitor/probe_top1",
    "spectral_monitor/key_retrieval/probe_top1",
    "spectral_monitor/key_retrieval_long/probe_top1",
}


def test_the_bare_loop_logs_the_loss_and_all_three_probes_to_wandb(tmp_path: Path) -> None:
    arguments = [*TOY, "--report_to", "wandb", "--output_dir", str(tmp_path / "run")]
    in_another_process(f"from train_examples.accelerate_loop import main; assert main({arguments}) == 0", tmp_path)
    run = OfflineRun.find(tmp_path)
    assert {"train/loss", *TOP1} <= run.all_keys()
    assert run.points("spectral_monitor/key_retrieval_long/probe_top1", "spectral_monitor/step")


def test_each_seed_has_a_wandb_run_of_its_own(tmp_path: Path) -> None:
    arguments = [*TOY, "--max_steps", "2", "--report_to", "wandb", "--output_dir", str(tmp_path / "runs"), "--seeds"]
    in_another_process(
        "from train_examples.tinystories_51m import main\n"
        f"assert main([*{arguments}, '4']) == 0\n"
        # 4 has ended, 5 had not begun
        f"assert main([*{arguments}, '4', '5', '--resume_from_checkpoint', 'last']) == 0",
        tmp_path,
    )
    assert len(trainer_losses(tmp_path / "runs" / "seed-5", 2)) == 2
    runs = [OfflineRun.read(file) for file in sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))]
    assert sorted(sum("train/loss" in row for row in run.rows) for run in runs) == [0, 2, 2]
    assert sum(run.all_keys() >= TOP1 for run in runs) >= 2


def test_a_run_without_a_record_is_said_in_its_summary(tmp_path: Path) -> None:
    (line,) = summary(tmp_path / "nothing")
    assert line.startswith("no summary: ") and str(tmp_path) in line


def test_comparing_what_is_no_run_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_seeds.main([str(tmp_path), str(tmp_path / "b")]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_the_bare_loop_resumes_to_the_same_losses(tmp_path: Path) -> None:
    def losses(out: Path, *more: str) -> list[float]:
        options, training = parse(parser("x"), [*TOY, "--output_dir", str(out), *more])
        return accelerate_loop.run(options, training)

    whole = losses(tmp_path / "whole")
    first = losses(tmp_path / "broken", "--stop_after", "3")
    second = losses(tmp_path / "broken", "--resume_from_checkpoint", "last")
    assert len(whole) == 6 and first + second == whole
    assert (tmp_path / "broken" / "final" / "config.json").exists()
    assert load_options(tmp_path / "broken").preset == "cpu"
    kept = [observation.step for observation in RunRecord.open(tmp_path / "broken" / "spectral_monitor").observations()]
    assert sorted(set(kept)) == [0, 1, 2, 4, 6] and len(kept) == 15
    assert not (tmp_path / "whole" / "checkpoint-3").exists()


def test_the_defaults_in_the_help_are_those_of_the_full_preset() -> None:
    options, _ = parse(parser("x"), [])
    assert options == ReferenceArguments()
