"""A loopback Hub and an isolated cache for every replay test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from .hub_server import HubServer


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hub cache of this test's own."""
    cache = tmp_path / "hf-cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    return cache


@pytest.fixture
def server(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A running loopback Hub that the real client talks to."""
    with HubServer() as running:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", running.endpoint)
        template = running.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        yield running


@pytest.fixture
def offline_switch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to forbid asking the Hub from then on, as HF_HUB_OFFLINE=1 does."""
    return lambda: monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
