"""The reference run's two scripts at toy size: options, parameter count, checkpoint and resume, the same loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from spectral_monitor.record import RunRecord
from train_examples import accelerate_loop, compare_seeds, tinystories_51m
from train_examples.reference import OptionError, ReferenceArguments, build_model, parse, parser

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


def test_the_planted_head_attends_to_the_previous_token_and_no_other_does() -> None:
    options, _ = parse(parser("x"), ["--preset", "cpu"])
    tokens = torch.randint(500, (4, 64), generator=torch.Generator().manual_seed(0))
    model = build_model(options, 500, seed=1)
    model.set_attn_implementation("eager")
    layers = model(input_ids=tokens, output_attentions=True).attentions
    back = torch.stack([layer[:, :, -1, -2].mean(0) for layer in layers]).detach()
    planted = float(back[0, 0])
    assert planted > 0.2
    back[0, 0] = 0
    assert back.max() < 2 * planted / 3


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["--preset", "huge"], "choose one of full, cpu"),
        (["--width", "30", "--heads", "4"], "choose a multiple"),
        (["--family", "llama"], "choose gpt2 or gpt_neox"),
        (["--gap", "3"], "LOW HIGH"),
        (["--attention_gains", "1", "2"], "need --family gpt_neox"),
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


def test_seeds_run_one_after_the_other_with_the_same_probes_and_are_compared(tmp_path: Path) -> None:
    assert tinystories_51m.main([*TOY, "--max_steps", "1", "--seeds", "4", "5", "--output_dir", str(tmp_path)]) == 0
    records = [RunRecord.open(tmp_path / f"seed-{seed}" / "spectral_monitor") for seed in (4, 5)]
    prints = [{name: probe["fingerprint"] for name, probe in record.run["probes"].items()} for record in records]
    assert prints[0] == prints[1] and len(prints[0]) == 3
    four, five = (next(iter(record.observations())).heads.pr for record in records)
    assert (four != five).any()
    runs = [str(tmp_path / "seed-4"), str(tmp_path / "seed-5")]
    result = tmp_path / "compared.json"
    assert compare_seeds.main([*runs, "--draws", "2", "--rows", "8", "--json", str(result)]) == 0
    for name, found in json.loads(result.read_text()).items():
        assert name in ("induction", "key_retrieval")
        matrix = found["transplant"]["PR spread"]
        assert [(entry["source"], entry["target"]) for entry in matrix] == [
            (f"seed-{source}/spectral_monitor", f"seed-{target}/spectral_monitor")
            for target in (4, 5)
            for source in (4, 5)
        ]
        assert all(0 <= entry["verdict"]["conditions"][1]["top1"] <= 1 for entry in matrix)


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
    assert not (tmp_path / "whole" / "checkpoint-3").exists()


def test_the_defaults_in_the_help_are_those_of_the_full_preset() -> None:
    options, _ = parse(parser("x"), [])
    assert options == ReferenceArguments()
