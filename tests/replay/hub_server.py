"""A Hub on loopback for tests: the real protocol for the real ``huggingface_hub`` client, and it misbehaves on order.

Speaks refs, model info, tree listings (paged, with LFS hashes), resolve with redirects to a storage host, HEAD, byte
ranges and ETags. Faults are queued with ``order`` and met by the next matching requests.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

_LFS = re.compile(r".+\.(safetensors|bin|gguf)\Z")


@dataclass
class Fault:
    """``kind``: ``429``, ``500``, ``cut`` (close after ``value`` bytes), ``corrupt``, ``gated``, ``forbidden``."""

    kind: str
    where: str = ""
    times: int = 1
    value: int = 0
    after: int = 0


@dataclass
class Request:
    method: str
    path: str
    range: str | None
    status: int = 0
    sent: int = 0
    time: float = field(default_factory=time.monotonic)


class HubServer:
    """``with HubServer() as server: server.add("me/model", {"step1": folder, "main": folder})``.

    ``endpoint`` is what ``HF_ENDPOINT`` is to be; ``requests`` is the log; ``rate`` limits storage bytes a second.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.tags: dict[str, set[str]] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.rate: float | None = None
        self.page = 1000
        self.lock = threading.Lock()
        self._blobs: dict[str, bytes] = {}
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, repo: str, revisions: Mapping[str, Path | Mapping[str, bytes]], tags: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        """Publish folders (or name -> bytes) as revisions; ``tags``: those that are tags, not branches."""
        for name, content in revisions.items():
            files = (
                {p.relative_to(content).as_posix(): p.read_bytes() for p in sorted(content.rglob("*")) if p.is_file()}
                if isinstance(content, Path)
                else dict(content)
            )
            self.repos.setdefault(repo, {})[name] = files
            for data in files.values():
                self._blobs[hashlib.sha256(data).hexdigest()] = data
        self.tags.setdefault(repo, set()).update(tags)

    def commit(self, repo: str, revision: str) -> str:
        """Commit of a revision: made of its content, so equal names of other content differ."""
        digest = hashlib.sha1(f"{repo}@{revision}".encode())
        for path, data in sorted(self.repos[repo][revision].items()):
            digest.update(path.encode() + hashlib.sha256(data).digest())
        return digest.hexdigest()

    def order(self, *faults: Fault) -> None:
        self.faults.extend(faults)

    def sent(self, pattern: str = "") -> int:
        """Body bytes of storage responses whose path matches."""
        return sum(
            item.sent for item in self.requests if item.path.startswith("/storage") and re.search(pattern, item.path)
        )

    def count(self, pattern: str, method: str | None = None) -> int:
        return sum(1 for item in self.requests if re.search(pattern, item.path) and method in (None, item.method))

    def fault_for(self, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if re.search(fault.where, path):
                    if fault.after > 0:
                        fault.after -= 1
                        return None
                    fault.times -= 1
                    if fault.times <= 0:
                        self.faults.remove(fault)
                    return fault
        return None

    def find(self, repo: str, revision: str) -> dict[str, bytes] | None:
        revisions = self.repos.get(repo, {})
        if revision in revisions:
            return revisions[revision]
        return next((files for name, files in revisions.items() if self.commit(repo, name) == revision), None)

    def name_of(self, repo: str, revision: str) -> str | None:
        revisions = self.repos.get(repo, {})
        if revision in revisions:
            return revision
        return next((name for name in revisions if self.commit(repo, name) == revision), None)


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        return None

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    # -- routing --------------------------------------------------------------------------------------------------

    def _answer(self, body: bool) -> None:
        self.body = body
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        self.entry = Request(self.command, path, self.headers.get("Range"))
        with self.hub.lock:
            self.hub.requests.append(self.entry)
        fault = self.hub.fault_for(path)
        if fault is not None and fault.kind in ("429", "500", "gated", "forbidden"):
            self._refuse(fault)
        elif path.startswith("/storage/"):
            self._storage(path.removeprefix("/storage/"), fault)
        elif path.startswith("/api/models/"):
            self._api(path.removeprefix("/api/models/"), parse_qs(parts.query))
        elif "/resolve/" in path:
            self._resolve(path, fault)
        else:
            self._send(404, b"{}")

    def _refuse(self, fault: Fault) -> None:
        if fault.kind == "429":
            self._send(429, b"{}", {"RateLimit": f'"api";r=0;t={fault.value}', "Retry-After": str(fault.value)})
        elif fault.kind == "500":
            self._send(500, b"{}")
        elif fault.kind == "gated":
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        else:
            self._send(403, b"{}", {"X-Error-Message": "Forbidden"})

    def _api(self, rest: str, query: dict[str, list[str]]) -> None:
        match = re.match(r"(?P<repo>[^/]+/[^/]+)(?:/(?P<what>refs|revision|tree)(?:/(?P<revision>.+))?)?\Z", rest)
        if match is None or match["repo"] not in self.hub.repos:
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            return
        repo, what = match["repo"], match["what"]
        if what == "refs":
            self._json(self._refs(repo))
            return
        revision = match["revision"] or "main"
        name = self.hub.name_of(repo, revision)
        if name is None:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        elif what == "tree":
            self._tree(repo, name, query)
        else:
            siblings = [{"rfilename": path} for path in self.hub.repos[repo][name]]
            self._json({"id": repo, "modelId": repo, "sha": self.hub.commit(repo, name), "siblings": siblings})

    def _refs(self, repo: str) -> dict[str, object]:
        def one(name: str, kind: str) -> dict[str, str]:
            return {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": self.hub.commit(repo, name)}

        tags = self.hub.tags.get(repo, set())
        names = list(self.hub.repos[repo])
        return {
            "branches": [one(name, "heads") for name in names if name not in tags],
            "converts": [],
            "tags": [one(name, "tags") for name in names if name in tags],
        }

    def _tree(self, repo: str, name: str, query: dict[str, list[str]]) -> None:
        entries = [self._tree_entry(path, data) for path, data in sorted(self.hub.repos[repo][name].items())]
        start = int(query.get("cursor", ["0"])[0])
        end = start + self.hub.page
        headers = {}
        if end < len(entries):
            address = f"{self.hub.endpoint}{urlsplit(self.path).path}?recursive=True&cursor={end}"
            headers["Link"] = f'<{address}>; rel="next"'
        self._send(200, json.dumps(entries[start:end]).encode(), headers)

    @staticmethod
    def _tree_entry(path: str, data: bytes) -> dict[str, object]:
        entry: dict[str, object] = {"type": "file", "path": path, "size": len(data), "oid": _blob_id(data)}
        if _LFS.match(path):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return entry

    def _resolve(self, path: str, fault: Fault | None) -> None:
        match = re.match(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)\Z", path)
        files = None if match is None else self.hub.find(match["repo"], match["revision"])
        if match is None or files is None:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
            return
        name = self.hub.name_of(match["repo"], match["revision"])
        assert name is not None
        headers = {"X-Repo-Commit": self.hub.commit(match["repo"], name)}
        data = files.get(match["file"])
        if data is None:
            self._send(404, b"{}", {**headers, "X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        if _LFS.match(match["file"]):
            sha = hashlib.sha256(data).hexdigest()
            # The storage is another host to the client, as with the real Hub.
            headers |= {
                "Location": f"http://localhost:{self.hub.port}/storage/{name}/{match['file']}/{sha}?signature=x",
                "X-Linked-Etag": f'"{sha}"',
                "X-Linked-Size": str(len(data)),
                "ETag": f'"{_blob_id(data)}"',
            }
            self._send(302, b"", headers)
        else:
            self._bytes(data, {**headers, "ETag": f'"{_blob_id(data)}"'}, fault)

    def _storage(self, rest: str, fault: Fault | None) -> None:
        data = self.hub._blobs[rest.rsplit("/", 1)[1]]
        if fault is not None and fault.kind == "corrupt":
            data = bytes([data[0]]) + bytes([data[1] ^ 255]) + data[2:]
        self._bytes(data, {"ETag": f'"{rest.rsplit("/", 1)[1]}"'}, fault)

    # -- sending --------------------------------------------------------------------------------------------------

    def _bytes(self, data: bytes, headers: dict[str, str], fault: Fault | None) -> None:
        match = re.match(r"bytes=(\d+)-(\d*)\Z", self.headers.get("Range", ""))
        status = 200
        part = data
        if match is not None:
            first = int(match[1])
            if first >= len(data):
                self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                return
            part, status = data[first:], 206
            headers = {**headers, "Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"}
        self._send(status, part, {**headers, "Accept-Ranges": "bytes"}, fault)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: Mapping[str, str] = {}, fault: Fault | None = None) -> None:
        self.entry.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not self.body:
            return
        cut = fault.value if fault is not None and fault.kind == "cut" else None
        try:
            self._write(data if cut is None else data[:cut])
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
            return
        if cut is not None:
            self.wfile.flush()
            self.connection.close()
            self.close_connection = True

    def _write(self, data: bytes) -> None:
        rate = self.hub.rate if self.entry.path.startswith("/storage") else None
        size = len(data) if rate is None else max(1, int(rate / 50))
        for start in range(0, len(data), max(1, size)):
            piece = data[start : start + size]
            self.wfile.write(piece)
            self.entry.sent += len(piece)
            if rate is not None:
                time.sleep(len(piece) / rate)


def _blob_id(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
