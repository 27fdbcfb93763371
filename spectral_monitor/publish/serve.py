"""``spectral-monitor serve``: one page on this machine's loopback, live while the run goes on. Read-only."""

from __future__ import annotations

import math
import os
import socketserver
import threading
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import numpy as np

from spectral_monitor.errors import SpectralMonitorError
from spectral_monitor.heads import Head
from spectral_monitor.observation import CLASSES, UNCLASSIFIED, Event, Observation, Verdict
from spectral_monitor.publish.follow import Follower, Snapshot
from spectral_monitor.publish.names import PublishError
from spectral_monitor.publish.rows import Bars, target_of
from spectral_monitor.record import dumps

PORT = 8321
#: Heads whose series the page gets: the circuit's, those that crossed or were alarmed, then the strongest.
FOLLOWED = 12
#: Names under which a browser on this machine may ask for the page. Any other Host is another site's trick.
HOSTS = ("localhost", "127.0.0.1", "[::1]")

_FILES = {
    "/": ("live/page.html", "text/html; charset=utf-8"),
    "/live.css": ("live/live.css", "text/css; charset=utf-8"),
    "/base.css": ("templates/report.css", "text/css; charset=utf-8"),
    "/live.js": ("live/live.js", "text/javascript; charset=utf-8"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


class LiveServer(ThreadingHTTPServer):
    """The server of one run directory; ``address`` is what to open. Use as a context manager, or ``close`` it.

    ``wait``: the run directory may come later; until then the page says that it is not there.

    Raises RecordError when there is no run directory (and ``wait`` is not set), PublishError when the port is taken.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, run_dir: str | os.PathLike[str], port: int = PORT, wait: bool = False) -> None:
        self.follower = Follower(run_dir)
        if not wait:
            self.follower.poll()
        self._lock = threading.Lock()
        self._live: tuple[int, bytes] = (-1, b"")
        if not 0 <= port <= 65535:
            raise PublishError(f"port {port} does not exist: give a number from 1024 to 65535, or 0 for any free one")
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise PublishError(
                f"port {port} cannot be opened ({error.strerror or error}): give another --port, or 0 for a free one"
            ) from error

    def server_bind(self) -> None:
        """Bind without asking a name server for this machine's name, as the base class would."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", int(self.server_address[1])

    @property
    def address(self) -> str:
        """The page's address."""
        return f"http://127.0.0.1:{self.server_port}/"

    def snapshot(self) -> Snapshot:
        """The run as it stands now."""
        with self._lock:
            return self.follower.poll()

    def live(self) -> tuple[int, bytes]:
        """Version and JSON of the page's data; made once a version."""
        with self._lock:
            snapshot = self.follower.poll()
            if self._live[0] != snapshot.version:
                self._live = (snapshot.version, dumps(live_data(snapshot), indent=None).encode())
            return self._live

    def __enter__(self) -> LiveServer:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for a fixed list of paths; no path of a request ever becomes the name of a file."""

    server: LiveServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "spectral_monitor", ""
    timeout = 30
    common: ClassVar[dict[str, str]] = {
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }

    def do_GET(self) -> None:
        """Serve one resource."""
        if not _is_local(self.headers.get_all("Host") or []):
            self._send(
                HTTPStatus.FORBIDDEN,
                b"This server answers only under the name localhost or 127.0.0.1.\n",
                "text/plain; charset=utf-8",
            )
            return
        parts = urlsplit(self.path)
        try:
            if parts.path in _FILES:
                name, kind = _FILES[parts.path]
                self._send(HTTPStatus.OK, (files("spectral_monitor.publish") / name).read_bytes(), kind)
            elif parts.path == "/live.json":
                self._live()
            elif parts.path == "/look.json":
                self._look(parse_qs(parts.query))
            elif parts.path == "/report":
                self._report()
            else:
                self._send(HTTPStatus.NOT_FOUND, b"Nothing here.\n", "text/plain; charset=utf-8")
        except SpectralMonitorError as error:
            self._json(HTTPStatus.SERVICE_UNAVAILABLE, dumps({"error": str(error)}).encode())

    do_HEAD = do_GET

    def _refuse(self) -> None:
        self.close_connection = True  # a body that is not read must not be taken for the next request
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, b"Read-only.\n", "text/plain; charset=utf-8", {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse

    def _live(self) -> None:
        version, body = self.server.live()
        tag = f'"{id(self.server):x}-{version}"'
        if self.headers.get("If-None-Match") == tag:
            self._send(HTTPStatus.NOT_MODIFIED, b"", "application/json", {"ETag": tag})
        else:
            self._json(HTTPStatus.OK, body, {"ETag": tag})

    def _look(self, query: Mapping[str, Sequence[str]]) -> None:
        """Every head of one look: ``?probe=induction&step=512``."""
        try:
            probe, step = query["probe"][0], int(query["step"][0])
            snapshot = self.server.snapshot()
            found = next(seen for seen in snapshot.of(probe) if seen.step == step)
        except (KeyError, ValueError, StopIteration):
            self._json(HTTPStatus.NOT_FOUND, b'{"error": "no such observation"}')
            return
        self._json(HTTPStatus.OK, dumps(look_data(found, snapshot.run), indent=None).encode())

    def _report(self) -> None:
        from spectral_monitor.publish.report import build_report
        from spectral_monitor.record import RunRecord

        html = build_report(RunRecord.open(self.server.follower.run_dir))
        self._send(
            HTTPStatus.OK, html.encode(), "text/html; charset=utf-8", {"Content-Security-Policy": _REPORT_POLICY}
        )

    def _json(self, status: HTTPStatus, body: bytes, more: Mapping[str, str] | None = None) -> None:
        self._send(status, body, "application/json; charset=utf-8", more)

    def _send(self, status: HTTPStatus, body: bytes, kind: str, more: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {"Content-Security-Policy": _POLICY, **self.common, "Content-Type": kind, **(more or {})}
        if status != HTTPStatus.NOT_MODIFIED:
            headers["Content-Length"] = str(len(body))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the terminal quiet: a page that polls would fill it."""

    def handle(self) -> None:
        """A browser that goes away in the middle of an answer is no error."""
        try:
            super().handle()
        except (ConnectionError, TimeoutError):
            self.close_connection = True


def serve(run_dir: str | os.PathLike[str], port: int = PORT, wait: bool = False) -> LiveServer:
    """A server for ``run_dir`` that is not running yet: call ``serve_forever`` or use it as a context manager."""
    return LiveServer(run_dir, port, wait)


def _is_local(hosts: Sequence[str]) -> bool:
    """Whether the one Host header names this machine's loopback (on any port: it may be forwarded by ssh)."""
    if len(hosts) != 1:
        return False
    name, colon, port = hosts[0].strip().lower().rpartition(":")
    if not colon or hosts[0].endswith("]"):
        name, port = hosts[0].strip().lower(), "0"
    return name in HOSTS and port.isdigit()


# -- data -------------------------------------------------------------------------------------------------------------


def live_data(snapshot: Snapshot) -> dict[str, Any]:
    """What the page draws: everything but the heads of single looks."""
    bars = Bars.of(snapshot.run)
    return {
        "version": snapshot.version,
        "name": snapshot.run_dir.resolve().name,
        "run_dir": str(snapshot.run_dir.resolve()),
        "model": _described(snapshot.run.get("model")),
        "bars": {"selectivity": bars.selectivity, "attention": bars.attention},
        "classes": [*CLASSES, UNCLASSIFIED],
        "probes": [_probe(snapshot, probe) for probe in snapshot.probes],
        "events": [_event(event) for event in snapshot.events],
        "verdicts": [_verdict(verdict) for verdict in snapshot.verdicts],
    }


def look_data(observation: Observation, run: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """All heads of one look."""
    heads = observation.heads
    target = target_of(observation, run)
    return {
        "step": observation.step,
        "probe": observation.probe,
        "layer": heads.layer,
        "head": heads.head,
        "head_class": heads.head_class,
        "status": heads.status,
        "pr": _rounded(heads.pr),
        "target": target,
        "attention": _rounded(heads.attention.get(target)),
        "selectivity": _rounded(heads.selectivity.get(target)),
        "first_token": _rounded(heads.attention.get("first_token")),
    }


def _probe(snapshot: Snapshot, probe: str) -> dict[str, Any]:
    seen = snapshot.of(probe)
    last = seen[-1]
    layers = np.unique(last.heads.layer)
    described = snapshot.run.get("probes", {}).get(probe, {})

    def series(read: Any) -> list[float | None]:
        return [_number(read(one)) for one in seen]

    def rank(one: Observation, reduce: Any) -> float:
        finite = one.heads.pr[np.isfinite(one.heads.pr)]
        return float(reduce(finite)) if len(finite) else math.nan

    return {
        "name": probe,
        "target": target_of(last, snapshot.run),
        "fingerprint": last.fingerprint,
        "rows": last.metrics.rows,
        "length": described.get("length") if isinstance(described, Mapping) else None,
        "baseline": last.baseline,
        "steps": [one.step for one in seen],
        "tokens": [one.tokens for one in seen],
        "estimated": last.tokens_estimated,
        "time": [one.time for one in seen],
        "finite": [one.finite for one in seen],
        "mark": [one.mark for one in seen],
        "label": [one.label for one in seen],
        "attempt": [one.attempt for one in seen],
        "top1": series(lambda one: one.metrics.top1),
        "top5": series(lambda one: one.metrics.top5),
        "loss": series(lambda one: one.metrics.loss),
        "seconds": series(lambda one: one.seconds),
        "share": series(lambda one: one.share),
        "null_p99": series(lambda one: one.null_p99),
        "pr_mean": series(lambda one: rank(one, np.mean)),
        "pr_max": series(lambda one: rank(one, np.max)),
        "not_ok": [int(np.count_nonzero(one.heads.status != "ok")) for one in seen],
        "fractions": {
            name: series(lambda one, name=name: float(np.mean(one.heads.head_class == name)))
            for name in (*CLASSES, UNCLASSIFIED)
        },
        "layers": layers,
        "heads": len(last.heads),
        "first_token_by_layer": [
            [
                _number(float(np.mean(one.heads.head_class[one.heads.layer == layer] == "first_token")))
                for layer in layers
            ]
            for one in seen
        ],
        "followed": _followed(snapshot, seen),
    }


def _followed(snapshot: Snapshot, seen: Sequence[Observation]) -> list[dict[str, Any]]:
    """The heads worth a line each, with their series."""
    last = seen[-1]
    target = target_of(last, snapshot.run)
    reasons: dict[str, str] = {}
    for verdict in reversed(snapshot.verdicts):
        if verdict.probe == last.probe:
            reasons |= {head: "circuit" for head in verdict.heads if head not in reasons}
    for event in snapshot.events:
        if event.probe in ("", last.probe) and event.kind in ("selectivity_crossing", "circuit_formed"):
            reasons |= {head: "crossed" for head in event.heads if head not in reasons}
    if target in last.heads.attention:
        names = list(last.heads)
        strongest = np.argsort(-np.nan_to_num(last.heads.attention[target], nan=-1.0), kind="stable")
        for at in strongest[: max(4, FOLLOWED - len(reasons))]:
            reasons.setdefault(str(names[at]), "strongest")
    for event in snapshot.events:
        if event.probe in ("", last.probe) and event.kind in ("pr_rise", "content_rise", "attention_rise"):
            reasons |= {head: "alarm" for head in event.heads if head not in reasons}
    found = []
    for name, reason in list(reasons.items())[:FOLLOWED]:
        try:
            at = last.heads.index(Head.parse(name))
        except (KeyError, ValueError):
            continue
        found.append(
            {
                "name": name,
                "reason": reason,
                "pr": [_at(one.heads.pr, at) for one in seen],
                "attention": [_at(one.heads.attention.get(target), at) for one in seen],
                "selectivity": [_at(one.heads.selectivity.get(target), at) for one in seen],
            }
        )
    return found


def _event(event: Event) -> dict[str, Any]:
    return {
        "kind": event.kind,
        "step": event.step,
        "tokens": event.tokens,
        "probe": event.probe,
        "capability": event.capability,
        "heads": event.heads,
        "direction": event.direction,
        "text": event.text,
        "time": event.time,
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    baseline = verdict.condition("baseline")
    intact = math.nan if baseline is None else baseline.logprob

    def fall(name: str) -> float | None:
        condition = verdict.condition(name)
        return None if condition is None else _number(intact - condition.logprob)

    return {
        "step": verdict.step,
        "tokens": verdict.tokens,
        "probe": verdict.probe,
        "capability": verdict.capability,
        "mode": verdict.mode,
        "verdict": verdict.verdict,
        "reason": verdict.reason,
        "heads": verdict.heads,
        "p_value": _number(verdict.p_value),
        "level": _number(verdict.level),
        "draws": verdict.draws,
        "distinct_draws": verdict.distinct_draws,
        "effect": _number(verdict.effect),
        "ci": [_number(value) for value in verdict.effect_ci],
        "circuit": fall("circuit"),
        "bound": fall("upper bound"),
        "random": [_number(intact - draw.logprob) for draw in verdict.random],
        "top1": {condition.name: _number(condition.top1) for condition in verdict.conditions},
        "random_top1": [_number(draw.top1) for draw in verdict.random],
    }


def _described(model: Any) -> str:
    """A model's description in one line, whatever the record holds."""
    if isinstance(model, Mapping):
        return ", ".join(f"{name} {value}" for name, value in model.items() if isinstance(value, (str, int, float)))[
            :200
        ]
    return "" if model is None else str(model)[:200]


def _number(value: Any) -> float | None:
    """Five significant digits; None for what is not finite."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None


def _at(values: Any, index: int) -> float | None:
    return None if values is None or index >= len(values) else _number(float(values[index]))


def _rounded(values: Any) -> list[float | None]:
    return [] if values is None else [_number(value) for value in np.asarray(values).tolist()]
