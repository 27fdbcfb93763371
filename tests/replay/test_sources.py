"""Sources are read into checkpoints in order, with their tokens and where those come from."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub.constants
import pytest

from spectral_monitor.errors import LoadError
from spectral_monitor.replay.hub import RemoteFile, RepositoryError
from spectral_monitor.replay.sources import open_source


class Listed:
    """A Hub of names only."""

    def __init__(self, **repos: dict[str, str]) -> None:
        self.repos = {name.replace("__", "/").replace("_", "-"): refs for name, refs in repos.items()}

    def refs(self, repo: str) -> dict[str, str]:
        if repo not in self.repos:
            raise RepositoryError(f"{repo} does not exist")
        return self.repos[repo]

    def files(self, repo: str, commit: str) -> tuple[RemoteFile, ...]:
        raise AssertionError("a source asks for no listing")


def names(*revisions: str) -> dict[str, str]:
    return {name: f"{index:040x}" for index, name in enumerate(revisions)}


def test_pythia_has_its_stated_tokens_per_step() -> None:
    hub = Listed(EleutherAI__pythia_160m=names("step1000", "step0", "step512", "main", "step1"))
    source = open_source("EleutherAI/pythia-160m", hub)
    assert [(item.name, item.tokens) for item in source.checkpoints] == [
        ("step0", 0),
        ("step1", 2_097_152),
        ("step512", 512 * 2_097_152),
        ("step1000", 1000 * 2_097_152),
    ]
    assert all(item.tokens_estimated and "2,097,152" in item.tokens_from for item in source.checkpoints)
    assert [item.name for item in source.skipped] == ["main"]
    assert [item.name for item in source.references] == ["main"]


def test_labels_are_rounded_and_say_so_and_the_user_has_the_last_word() -> None:
    hub = Listed(a__b=names("step1000-tokens2B", "stage1-step5-tokens1B", "stage2-ingredient3-step5-tokens1B"))
    source = open_source("a/b", hub)
    assert [item.series for item in source.checkpoints] == ["", "stage1", "stage2-ingredient3"]
    assert source.checkpoints[0].tokens == 2e9
    assert "rounded to within 500,000,000" in source.checkpoints[0].tokens_from
    mine = open_source("a/b", hub, per_step=3.0)
    assert [item.tokens for item in mine.checkpoints] == [3000.0, 15.0, 15.0]


def test_unknown_tokens_stay_unknown() -> None:
    (checkpoint,) = open_source("a/b", Listed(a__b=names("step7"))).checkpoints
    assert (checkpoint.tokens, checkpoint.tokens_from, checkpoint.tokens_estimated) == (None, "unknown", False)


def test_two_names_of_one_step_make_one_checkpoint() -> None:
    source = open_source("a/b", Listed(a__b=names("step7", "step_7")))
    assert [item.name for item in source.checkpoints] == ["step7"]
    assert "another checkpoint of step 7" in source.skipped[0].reason


def test_trainer_folder(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        state = {"global_step": step, "num_input_tokens_seen": step * 96 if step != 9 else 0}
        (folder / "trainer_state.json").write_text(json.dumps(state))
    (tmp_path / "checkpoint-10-backup").mkdir()
    (tmp_path / "runs").mkdir()
    source = open_source(str(tmp_path), Listed())
    assert [(item.step, item.tokens, item.tokens_estimated) for item in source.checkpoints] == [
        (9, None, False),  # the Trainer did not count: 0 is not a number of tokens
        (10, 960.0, False),
        (100, 9600.0, False),
    ]
    assert sorted(item.name for item in source.skipped) == ["checkpoint-10-backup", "runs"]


def test_one_checkpoint_folder_by_itself(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-30"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"x")
    (checkpoint,) = open_source(str(folder), Listed()).checkpoints
    assert (checkpoint.step, checkpoint.folder) == (30, folder)
    plain = tmp_path / "final"
    plain.mkdir()
    (plain / "model.safetensors").write_bytes(b"x")
    (plain / "trainer_state.json").write_text(json.dumps({"global_step": 77}))
    assert open_source(str(plain), Listed()).checkpoints[0].step == 77


def test_gguf_files(tmp_path: Path) -> None:
    for name in ("step5.gguf", "step40.gguf", "model.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    source = open_source(str(tmp_path), Listed())
    assert [(item.step, item.gguf_file) for item in source.checkpoints] == [(5, "step5.gguf"), (40, "step40.gguf")]
    (single,) = open_source(str(tmp_path / "step40.gguf"), Listed()).checkpoints
    assert (single.step, single.gguf_file, single.folder) == (40, "step40.gguf", tmp_path)
    assert open_source(str(tmp_path / "model.gguf"), Listed()).checkpoints[0].step == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "lists no revision"),
        ("a/b\n", "line 1: give a repository and a revision"),
        ("a/b step9\n", "line 1: a/b has no revision step9"),
        ("repo,revision,step\na/b,step1,x\n", "line 2: step and tokens must be numbers"),
        ("a/b main\n", "holds no checkpoint whose name tells its step"),
    ],
)
def test_wrong_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, said: str) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    file = tmp_path / "list.txt"
    file.write_text(content)
    with pytest.raises(LoadError, match=said):
        open_source(str(file), Listed(a__b=names("step1", "main")))


@pytest.mark.parametrize("text", ["./absent", "absent.txt", "/absent/place", "absent.gguf"])
def test_what_does_not_exist(text: str) -> None:
    with pytest.raises(LoadError, match="does not exist"):
        open_source(text, Listed())


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="holds no checkpoint whose name tells its step"):
        open_source(str(tmp_path), Listed())
