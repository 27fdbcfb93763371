"""The real ``huggingface_hub`` client against the loopback Hub, well behaved and not."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

from spectral_monitor.errors import LoadError
from spectral_monitor.replay.hub import (
    Hub,
    OfflineError,
    Patience,
    RemoteFile,
    RepositoryError,
    RevisionError,
    TransferError,
)
from spectral_monitor.replay.loading import load_model

from .hub_server import Fault, HubServer
from .models import save, tiny_model

REPO = "lab/tiny"


class Waits:
    """Stands in for ``time.sleep``: remembers what was asked for and does not wait."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def patient_hub() -> tuple[Hub, Waits]:
    waits = Waits()
    return Hub(Patience(tries=4, first_pause=1.0), sleep=waits), waits


@pytest.fixture
def published(server: HubServer, tmp_path: Path) -> HubServer:
    for name, seed in (("step0", 0), ("step1000", 1), ("main", 2)):
        save(tiny_model(seed), tmp_path / "pub" / name)
    server.add(REPO, {name: tmp_path / "pub" / name for name in ("step0", "step1000", "main")})
    return server


def weights_of(server: HubServer, hub: Hub, revision: str) -> tuple[str, RemoteFile]:
    commit = server.commit(REPO, revision)
    return commit, next(file for file in hub.files(REPO, commit) if file.path == "model.safetensors")


def test_refs_and_files_as_the_hub_lists_them(published: HubServer) -> None:
    hub, waits = patient_hub()
    published.page = 2  # three files: two pages
    refs = hub.refs(REPO)
    assert refs == {name: published.commit(REPO, name) for name in ("step0", "step1000", "main")}
    files = {file.path: file for file in hub.files(REPO, refs["step0"])}
    assert set(files) == {"config.json", "generation_config.json", "model.safetensors"}
    assert files["model.safetensors"].sha256 is not None
    assert files["config.json"].sha256 is None
    assert hub.requests == {"refs": 1, "tree": 1}
    assert waits.seconds == []


def test_load_model_pins_every_request_to_the_commit(published: HubServer) -> None:
    loaded = load_model(REPO, revision="step1000")
    commit = published.commit(REPO, "step1000")
    assert loaded.commit == commit
    for name, value in tiny_model(1).state_dict().items():
        assert torch.equal(value, loaded.model.state_dict()[name]), name
    asked = [item.path for item in published.requests if not item.path.startswith("/storage/")]
    assert asked, "nothing was asked for"
    assert [path for path in asked if "main" in path] == []
    unpinned = [path for path in asked if commit not in path]
    assert unpinned == [f"/api/models/{REPO}/revision/step1000"]
    assert not torch.equal(
        loaded.model.get_output_embeddings().weight,
        load_model(REPO, revision="step0").model.get_output_embeddings().weight,
    )


@pytest.mark.parametrize(
    ("repo", "revision", "error", "said"),
    [
        ("lab/absent", None, RepositoryError, "does not exist on the Hub, or is private"),
        (REPO, "step1001", RevisionError, "has no revision step1001"),
        ("a b/c", None, LoadError, "neither a folder"),
    ],
)
def test_unknown_repository_and_revision(
    published: HubServer, repo: str, revision: str | None, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as caught:
        load_model(repo, revision=revision)
    assert "\n" not in str(caught.value)
    assert published.sent() == 0


def test_gated_repository_is_asked_once(published: HubServer) -> None:
    published.order(Fault("gated", "/refs", times=99))
    hub, waits = patient_hub()
    with pytest.raises(RepositoryError, match=f"{REPO} is gated"):
        hub.refs(REPO)
    assert hub.requests == {"refs": 1}
    assert waits.seconds == []


def test_the_wait_that_the_server_names_is_obeyed(published: HubServer) -> None:
    published.order(Fault("429", "/refs", value=77))
    hub, waits = patient_hub()
    assert len(hub.refs(REPO)) == 3
    assert waits.seconds == [78.0]


def test_server_errors_are_met_with_growing_pauses_and_an_end(published: HubServer) -> None:
    published.order(Fault("500", "/refs", times=2))
    hub, waits = patient_hub()
    hub.refs(REPO)
    assert waits.seconds == [1.0, 2.0]
    published.order(Fault("500", "/refs", times=99))
    with pytest.raises(TransferError, match="given up after 4 attempts"):
        hub.refs(REPO)


def test_fetch_brings_the_very_bytes(published: HubServer, tmp_path: Path) -> None:
    hub, _ = patient_hub()
    commit, file = weights_of(published, hub, "step1000")
    seen: list[int] = []
    path = hub.fetch(REPO, commit, file, tmp_path / "d" / "model.safetensors", seen.append)
    assert path.read_bytes() == (tmp_path / "pub/step1000/model.safetensors").read_bytes()
    assert sum(seen) == file.size
    assert list(path.parent.iterdir()) == [path]


def test_cut_connection_goes_on_at_the_byte(
    published: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    hub, _ = patient_hub()
    commit, file = weights_of(published, hub, "step0")
    published.order(Fault("cut", "/storage/.*safetensors", value=3 * 4096 + 5, times=2))
    path = hub.fetch(REPO, commit, file, tmp_path / "model.safetensors")
    assert path.read_bytes() == (tmp_path / "pub/step0/model.safetensors").read_bytes()
    ranges = [item.range for item in published.requests if item.path.startswith("/storage/")]
    assert ranges == [None, "bytes=12288-", "bytes=24576-"]


def test_errors_in_the_middle_of_a_file_keep_what_is_there(
    published: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    hub, waits = patient_hub()
    commit, file = weights_of(published, hub, "step0")
    published.order(Fault("cut", "/storage/", value=8192), Fault("500", "/storage/"))
    path = hub.fetch(REPO, commit, file, tmp_path / "model.safetensors")
    assert path.read_bytes() == (tmp_path / "pub/step0/model.safetensors").read_bytes()
    assert published.sent() <= file.size + 8192
    assert waits.seconds == [1.0]


def test_a_partial_file_of_a_killed_run_is_continued(published: HubServer, tmp_path: Path) -> None:
    hub, _ = patient_hub()
    commit, file = weights_of(published, hub, "step0")
    whole = (tmp_path / "pub/step0/model.safetensors").read_bytes()
    (tmp_path / "model.safetensors.part").write_bytes(whole[:10_000])
    path = hub.fetch(REPO, commit, file, tmp_path / "model.safetensors")
    assert path.read_bytes() == whole
    assert published.sent() == file.size - 10_000


def test_wrong_content_is_fetched_once_more_and_then_refused(published: HubServer, tmp_path: Path) -> None:
    hub, _ = patient_hub()
    commit, file = weights_of(published, hub, "step0")
    target = tmp_path / "model.safetensors"
    published.order(Fault("corrupt", "/storage/"))
    hub.fetch(REPO, commit, file, target)
    assert target.read_bytes() == (tmp_path / "pub/step0/model.safetensors").read_bytes()
    target.unlink()
    published.order(Fault("corrupt", "/storage/", times=2))
    with pytest.raises(TransferError, match="its SHA-256 is not the listed one"):
        hub.fetch(REPO, commit, file, target)
    assert not target.exists()
    assert not target.with_name("model.safetensors.part").exists()


def test_offline_uses_the_cache_and_says_what_is_missing(published: HubServer, offline_switch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    load_model(REPO, revision="step0")
    offline_switch()
    before = len(published.requests)
    hub, _ = patient_hub()
    assert hub.refs(REPO) == {"step0": published.commit(REPO, "step0")}
    assert torch.equal(
        load_model(REPO, revision="step0").model.get_output_embeddings().weight,
        tiny_model(0).get_output_embeddings().weight,
    )
    with pytest.raises(OfflineError, match="step1000 is not in the local cache"):
        load_model(REPO, revision="step1000")
    with pytest.raises(OfflineError, match="lab/other is not in the local cache"):
        load_model("lab/other")
    assert len(published.requests) == before
