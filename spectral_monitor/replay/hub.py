"""The Hugging Face Hub as the replay needs it: few requests, patient ones, and one clear sentence for what is wrong.

Everything goes through ``huggingface_hub``; this module adds patience (429 obeyed, 5xx and broken connections tried
again with growing pauses), downloads that go on where they broke, and messages for people. It is the only module of
the package that imports ``huggingface_hub``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from spectral_monitor.errors import LoadError

logger = logging.getLogger(__name__)
T = TypeVar("T")

_COMMIT = re.compile(r"[0-9a-f]{40}\Z")
_CHUNK = 1 << 20


class RepositoryError(LoadError):
    """The repository itself is missing, private or gated: nothing of it can be had."""


class RevisionError(LoadError):
    """The repository has no such revision."""


class OfflineError(LoadError):
    """Something is needed that is not on this machine, and the Hub may not be asked."""


class TransferError(LoadError):
    """The Hub or the connection failed more often than the patience allows, or a file arrived damaged."""


class Stopped(Exception):
    """A transfer or a wait was given up because the replay ends."""


@dataclass(frozen=True)
class RemoteFile:
    """One file of a revision as the Hub lists it. ``sha256`` is known for LFS files (all weights), else None."""

    path: str
    size: int
    sha256: str | None = None


@dataclass(frozen=True)
class Patience:
    """How failures of the Hub and of the connection are met.

    Attributes:
        tries: attempts in a row that may fail without a byte gained before the operation is given up.
        first_pause: seconds before the second attempt; doubled each time.
        longest_pause: seconds, the most that is waited unasked. A wait that the server names is obeyed whole.
    """

    tries: int = 8
    first_pause: float = 1.0
    longest_pause: float = 120.0

    def pause(self, failures: int) -> float:
        """Seconds to wait after ``failures`` (>= 1) failures in a row."""
        return float(min(self.longest_pause, self.first_pause * 2 ** (failures - 1)))


def is_offline() -> bool:
    """True where ``HF_HUB_OFFLINE`` (or ``TRANSFORMERS_OFFLINE``) forbids asking the Hub."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@dataclass
class Hub:
    """One client with its patience. ``requests`` counts the calls made by kind; ``sleep`` is replaced in tests."""

    patience: Patience = field(default_factory=Patience)
    sleep: Callable[[float], None] = time.sleep
    requests: dict[str, int] = field(default_factory=dict)

    @property
    def offline(self) -> bool:
        """True where the Hub may not be asked."""
        return is_offline()

    # -- asking -------------------------------------------------------------------------------------------------

    def refs(self, repo: str) -> dict[str, str]:
        """Branches and tags of ``repo``: name -> commit. Offline: the names that the local cache knows.

        Raises RepositoryError (missing, private, gated), TransferError (patience spent), OfflineError.
        """
        check_repo_name(repo)
        if is_offline():
            return cached_refs(repo)
        api = _api()
        refs = self.patiently("refs", repo, None, lambda: api.list_repo_refs(repo))
        # A tag of a branch's name must not hide the branch.
        return {ref.name: ref.target_commit for ref in (*refs.tags, *refs.branches)}

    def commit(self, repo: str, revision: str | None) -> str:
        """The commit that ``revision`` (None: the default branch) names now. Errors as ``refs``, and RevisionError."""
        check_repo_name(repo)
        if revision is not None and _COMMIT.match(revision):
            return revision
        if is_offline():
            name = revision or "main"
            commit = cached_refs(repo).get(name)
            if commit is None:
                raise OfflineError(
                    f"{repo} revision {name} is not in the local cache and HF_HUB_OFFLINE forbids asking the Hub: "
                    "unset it, or download the revision first"
                )
            return commit
        api = _api()
        info = self.patiently("commit", repo, revision, lambda: api.model_info(repo, revision=revision))
        if info.sha is None:
            raise LoadError(f"{repo}: the Hub names no commit for revision {revision or 'main'}")
        return str(info.sha)

    def files(self, repo: str, commit: str) -> tuple[RemoteFile, ...]:
        """All files of one commit with size and, for LFS files, SHA-256. Offline: what the cache holds of it."""
        if is_offline():
            return cached_files(repo, commit)
        from huggingface_hub.hf_api import RepoFile

        api = _api()
        tree = self.patiently(
            "tree", repo, commit, lambda: list(api.list_repo_tree(repo, recursive=True, revision=commit))
        )
        return tuple(
            RemoteFile(entry.path, int(entry.size), entry.lfs.sha256 if entry.lfs is not None else None)
            for entry in tree
            if isinstance(entry, RepoFile)
        )

    def text(self, repo: str, commit: str, path: str) -> str:
        """Content of one small text file of ``commit``; from the local cache where it is there."""
        kept = cache_folder(repo) / "snapshots" / commit / path
        if kept.is_file():
            return kept.read_text(encoding="utf-8")
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import get_session, hf_raise_for_status  # type: ignore[attr-defined]

        def get() -> str:
            response = get_session().get(hf_hub_url(repo, path, revision=commit), headers=_headers())
            hf_raise_for_status(response)
            return str(response.text)

        return self.patiently("text", repo, commit, get)

    # -- fetching -----------------------------------------------------------------------------------------------

    def fetch(
        self,
        repo: str,
        commit: str,
        file: RemoteFile,
        target: Path,
        progress: Callable[[int], None] | None = None,
    ) -> Path:
        """Bring one file of ``commit`` to ``target``, whole and checked; a broken transfer goes on where it stopped.

        The bytes come in under ``target`` + ``.part`` and are renamed when size and (where listed) SHA-256 agree with
        the listing. ``progress`` is called with the number of new bytes. Raises TransferError when the patience is
        spent or the content is wrong twice; RepositoryError and RevisionError as ``commit``.
        """
        part = target.with_name(target.name + ".part")
        target.parent.mkdir(parents=True, exist_ok=True)
        damaged = 0
        while True:
            self._transfer(repo, commit, file, part, progress)
            wrong = mismatch(part, file)
            if wrong is None:
                part.replace(target)
                return target
            part.unlink(missing_ok=True)
            if progress is not None:
                progress(-file.size)
            damaged += 1
            if damaged >= 2:
                raise TransferError(f"{repo} {commit[:12]} {file.path}: {wrong}, in two downloads")
            logger.warning("%s %s %s: %s; downloading it once more", repo, commit[:12], file.path, wrong)

    def _transfer(
        self, repo: str, commit: str, file: RemoteFile, part: Path, progress: Callable[[int], None] | None
    ) -> None:
        """Append to ``part`` until it has the listed size; failures that bring no byte use up the patience."""
        from huggingface_hub.file_download import get_hf_file_metadata, hf_hub_url, http_get

        if part.exists() and part.stat().st_size > file.size:
            part.unlink()
        url = hf_hub_url(repo, file.path, revision=commit)
        failures = 0
        while True:
            with open(part, "ab") as handle:
                have = handle.tell()
                if have == file.size:
                    return
                watcher = _Watcher(progress)

                def once(have: int = have, handle: Any = handle, watcher: Any = watcher) -> None:
                    metadata = get_hf_file_metadata(url, headers=None)
                    http_get(
                        metadata.location,
                        handle,
                        resume_size=have,
                        headers=None if _other_host(url, metadata.location) else _headers(),
                        expected_size=file.size,
                        displayed_filename=file.path,
                        _tqdm_bar=watcher,
                    )

                try:
                    self.requests["file"] = self.requests.get("file", 0) + 1
                    once()
                    handle.flush()
                    os.fsync(handle.fileno())
                    return
                except Stopped:
                    raise
                except Exception as error:
                    handle.flush()
                    gained = handle.tell() > have
                    failures = 1 if gained else failures + 1
                    pause = self._after(error, failures, repo, commit, file.path)
            # The size may be too large after a server that ignored the range: start that file again.
            if part.stat().st_size > file.size:
                part.unlink()
            self.sleep(pause)

    # -- patience -----------------------------------------------------------------------------------------------

    def patiently(self, kind: str, repo: str, revision: str | None, call: Callable[[], T]) -> T:
        """``call()``, again and again with pauses where the failure may pass; ``kind`` names it in ``requests``."""
        failures = 0
        while True:
            self.requests[kind] = self.requests.get(kind, 0) + 1
            try:
                return call()
            except Exception as error:
                failures += 1
                pause = self._after(error, failures, repo, revision, None)
            self.sleep(pause)

    def _after(self, error: Exception, failures: int, repo: str, revision: str | None, path: str | None) -> float:
        """Seconds to wait before another attempt; raises the translated error where none is due."""
        what = repo + (f" revision {revision}" if revision else "") + (f" file {path}" if path else "")
        translated = _translate(error, repo, revision, what)
        if translated is not None:
            raise translated from error
        reason = _first_line(error)
        if failures >= self.patience.tries:
            raise TransferError(
                f"{what}: given up after {failures} attempts in a row, last: {reason}; start the command again to go on"
            ) from error
        asked = _asked_wait(error)
        pause = self.patience.pause(failures) if asked is None else asked
        logger.warning("%s: %s; trying again in %.0f s (attempt %d failed)", what, reason, pause, failures)
        return pause


class _Watcher:
    """The little of a tqdm bar that ``http_get`` calls: passes the bytes on."""

    def __init__(self, progress: Callable[[int], None] | None) -> None:
        self._progress = progress

    def __enter__(self) -> _Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, count: int | float | None = 1) -> None:
        if self._progress is not None:
            self._progress(int(count or 0))


def check_repo_name(repo: str) -> None:
    """RepositoryError when ``repo`` cannot be a Hub repository's name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise RepositoryError(
            f"{repo!r} is neither a folder, nor a file, nor a Hub repository name (owner/name)"
        ) from None


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi()


def _headers() -> dict[str, str]:
    import huggingface_hub.utils as utils

    return dict(utils.build_hf_headers())  # type: ignore[attr-defined]


def _other_host(url: str, location: str) -> bool:
    """True where the token must not go along (a signed address at a storage host)."""
    from urllib.parse import urlsplit

    return urlsplit(url).netloc != urlsplit(location).netloc


def _translate(error: Exception, repo: str, revision: str | None, what: str) -> LoadError | None:
    """The error for people where another attempt is no use; None where it is (429, 5xx, connection, timeout)."""
    from huggingface_hub import errors

    if isinstance(error, LoadError):
        return error
    if isinstance(error, errors.OfflineModeIsEnabled):
        return OfflineError(f"{what} is not on this machine and HF_HUB_OFFLINE forbids asking the Hub: unset it")
    if isinstance(error, errors.GatedRepoError):
        return RepositoryError(
            f"{repo} is gated: accept its terms on the Hub and log in (`hf auth login`) with an account that has access"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return RevisionError(f"{repo} has no revision {revision}: check the spelling of --revision")
    if isinstance(error, errors.EntryNotFoundError):
        return LoadError(f"{what} does not exist on the Hub")
    if isinstance(error, errors.RepositoryNotFoundError):
        return RepositoryError(
            f"{repo} does not exist on the Hub, or is private: check the name, or log in (`hf auth login`)"
        )
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return RepositoryError(
                f"{repo}: the Hub refuses access (HTTP {status}): log in (`hf auth login`) with an account that has it"
            )
        if status in (408, 409, 425, 429) or status >= 500:
            return None
        return LoadError(f"{what}: the Hub answered HTTP {status} ({_first_line(error)})")
    if isinstance(error, OSError) and getattr(error, "errno", None) is not None and not _is_connection(error):
        return LoadError(f"{what}: cannot be written here ({error.strerror or error})")
    if isinstance(error, (OSError, _http_error())):
        return None
    return LoadError(f"{what}: {type(error).__name__}: {_first_line(error)}")


def _http_error() -> type[Exception]:
    """The HTTP library's base error: huggingface_hub's own error derives from it, whichever library it uses."""
    from huggingface_hub.errors import HfHubHTTPError

    return next(base for base in HfHubHTTPError.__bases__ if base is not OSError)  # type: ignore[return-value]


def _is_connection(error: OSError) -> bool:
    return isinstance(error, (ConnectionError, TimeoutError))


def _asked_wait(error: Exception) -> float | None:
    """Seconds that the server asks to wait (rate limit headers, ``Retry-After``), or None."""
    response = getattr(error, "response", None)
    if response is None:
        return None
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    if response.status_code == 429:
        info = parse_ratelimit_headers(response.headers)
        if info is not None and info.remaining == 0:
            return float(info.reset_in_seconds) + 1.0
    after = str(response.headers.get("Retry-After", "")).strip()
    return float(after) if after.isdigit() else None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


# -- what is on this machine ------------------------------------------------------------------------------------------


def cache_folder(repo: str) -> Path:
    """Folder of ``repo`` in the Hub client's cache (it need not exist)."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def cached_refs(repo: str) -> dict[str, str]:
    """Name -> commit for the revisions whose names the local cache knows; OfflineError when it knows none."""
    folder = cache_folder(repo) / "refs"
    refs = {}
    if folder.is_dir():
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                commit = path.read_text().strip()
                if _COMMIT.match(commit):
                    refs[path.relative_to(folder).as_posix()] = commit
    if not refs:
        raise OfflineError(
            f"{repo} is not in the local cache and HF_HUB_OFFLINE forbids asking the Hub: unset it, check the name, "
            "or give the path of a local folder"
        )
    return refs


def remember_ref(repo: str, revision: str | None, commit: str) -> None:
    """Note in the local cache which commit a name stood for, so that the name works offline (as the client does)."""
    name = revision or "main"
    path = cache_folder(repo) / "refs" / name
    if _COMMIT.match(name) or not path.parent.parent.is_dir():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(commit)
    temporary.replace(path)


def cached_files(repo: str, commit: str) -> tuple[RemoteFile, ...]:
    """What the local cache holds of ``commit``: empty when nothing. LFS blobs carry their SHA-256 as their name."""
    folder = cache_folder(repo) / "snapshots" / commit
    found = []
    if folder.is_dir():
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                blob = path.resolve().name
                found.append(
                    RemoteFile(
                        path.relative_to(folder).as_posix(),
                        path.stat().st_size,
                        blob if re.fullmatch(r"[0-9a-f]{64}", blob) else None,
                    )
                )
    return tuple(found)


def cached_path(repo: str, commit: str, file: RemoteFile) -> Path | None:
    """Where the local cache already has this very file of ``commit``, else None."""
    path = cache_folder(repo) / "snapshots" / commit / file.path
    return path if path.is_file() and path.stat().st_size == file.size else None


def mismatch(path: Path, file: RemoteFile) -> str | None:
    """What is wrong with the content of ``path`` against the listing, or None. Reads the file once."""
    size = path.stat().st_size
    if size != file.size:
        return f"{size:,} bytes instead of {file.size:,}"
    if file.sha256 is not None and sha256_of(path) != file.sha256:
        return "its SHA-256 is not the listed one"
    return None


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while chunk := handle.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
