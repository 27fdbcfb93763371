from __future__ import annotations

import http.client
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spectral_monitor.errors import RecordError
from spectral_monitor.publish.names import PublishError
from spectral_monitor.publish.serve import LiveServer, live_data, serve
from spectral_monitor.record import RunRecord

from . import factories as make


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    make.record(tmp_path / "run", layers=4, heads=6)
    with serve(tmp_path / "run", 0) as server:
        yield server


def ask(
    server: LiveServer, path: str, method: str = "GET", host: str | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=120)
    connection.putrequest(method, path, skip_host=True)
    if host != "":
        connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body


def test_the_page_and_its_parts_come_from_this_server_only(server: LiveServer) -> None:
    for path, kind in {"/": "html", "/live.css": "css", "/base.css": "css", "/live.js": "javascript"}.items():
        status, headers, body = ask(server, path)
        assert status == 200 and kind in headers["content-type"] and body
        assert "default-src 'none'" in headers["content-security-policy"]
        assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"") and b"https://" not in body
    assert server.server_address[0] == "127.0.0.1"


def test_live_data_is_the_record(server: LiveServer) -> None:
    status, headers, body = ask(server, "/live.json")
    data = json.loads(body)
    (probe,) = data["probes"]
    assert status == 200 and probe["steps"] == [0, 1, 2, 4, 8, 16, 24, 32]
    assert probe["top1"][-1] == pytest.approx(make.observation(32, formed=make.formed_at(32)).metrics.top1, rel=1e-4)
    assert [head["name"] for head in probe["followed"]][:2] == ["L1H0", "L1H2"]
    assert probe["followed"][0]["reason"] == "circuit"
    assert data["verdicts"][0]["circuit"] == pytest.approx(3.1) and len(data["verdicts"][0]["random"]) == 24
    assert [event["kind"] for event in data["events"]] == ["pr_rise", "selectivity_crossing", "circuit_formed"]
    assert headers["cache-control"] == "no-cache"


def test_an_unchanged_run_costs_no_body_and_a_new_look_is_there_at_once(server: LiveServer) -> None:
    _, headers, _ = ask(server, "/live.json")
    status, again, body = ask(server, "/live.json", If_None_Match=headers["etag"])
    assert status == 304 and body == b"" and again["etag"] == headers["etag"]
    make.record(server.follower.run_dir, (40,), layers=4, heads=6)
    status, newer, body = ask(server, "/live.json", If_None_Match=headers["etag"])
    assert status == 200 and newer["etag"] != headers["etag"]
    assert json.loads(body)["probes"][0]["steps"][-1] == 40


def test_one_look_with_all_its_heads(server: LiveServer) -> None:
    status, _, body = ask(server, "/look.json?probe=induction&step=16")
    look = json.loads(body)
    assert status == 200 and len(look["pr"]) == 24 and look["step"] == 16
    expected = make.observation(16, layers=4, heads=6, formed=make.formed_at(16))
    assert look["attention"] == pytest.approx(expected.heads.attention["induction"].tolist(), rel=1e-4)
    for query in ("", "?probe=induction&step=17", "?probe=x&step=16", "?probe=induction&step=../../etc/passwd"):
        assert ask(server, "/look.json" + query)[0] == 404


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "localhost:9000", "LOCALHOST:1", "[::1]", "[::1]:8321"])
def test_answers_under_the_loopback_names(server: LiveServer, host: str) -> None:
    """On any port: the page may be forwarded by ssh."""
    assert ask(server, "/", host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["", "evil.example", "evil.example:8321", "127.0.0.1.evil.example", "localhost.evil.example", "127.0.0.1:x"]
)
def test_refuses_foreign_host_names(server: LiveServer, host: str) -> None:
    """Another site's name that points to 127.0.0.1 (DNS rebinding) must not read the run."""
    for path in ("/", "/live.json", "/report"):
        status, _, body = ask(server, path, host=host)
        assert status == 403 and b"run" not in body


def test_refuses_two_host_headers(server: LiveServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=120)
    connection.putrequest("GET", "/live.json", skip_host=True)
    connection.putheader("Host", "127.0.0.1")
    connection.putheader("Host", "evil.example")
    connection.endheaders()
    assert connection.getresponse().status == 403
    connection.close()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_read_only(server: LiveServer, method: str) -> None:
    status, headers, _ = ask(server, "/", method)
    assert status == 405 and headers["allow"] == "GET, HEAD"


def test_head_and_paths_that_do_not_exist(server: LiveServer) -> None:
    status, headers, body = ask(server, "/live.json", "HEAD")
    assert status == 200 and int(headers["content-length"]) > 100 and body == b""
    for path in ("/run.json", "/../run.json", "/%2e%2e/run.json", "/live.json/x", "//etc/passwd", "/state.json"):
        assert ask(server, path)[0] == 404


def test_nothing_in_the_run_directory_is_touched(server: LiveServer) -> None:
    def stamps() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in server.follower.run_dir.rglob("*")}

    before = stamps()
    for path in ("/", "/live.json", "/look.json?probe=induction&step=16"):
        ask(server, path)
    assert stamps() == before


def test_a_run_that_goes_away_is_said_and_comes_back(server: LiveServer, tmp_path: Path) -> None:
    shutil.move(tmp_path / "run", tmp_path / "away")
    status, _, body = ask(server, "/live.json")
    assert status == 503 and "no run directory" in json.loads(body)["error"]
    shutil.move(tmp_path / "away", tmp_path / "run")
    assert ask(server, "/live.json")[0] == 200


def test_may_start_before_the_run(tmp_path: Path) -> None:
    with serve(tmp_path / "run", 0, wait=True) as server:
        assert ask(server, "/")[0] == 200 and ask(server, "/live.json")[0] == 503
        make.record(tmp_path / "run")
        assert ask(server, "/live.json")[0] == 200


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no run directory"):
        serve(tmp_path / "nowhere")
    make.record(tmp_path / "run")
    with serve(tmp_path / "run", 0) as one, pytest.raises(PublishError, match=r"cannot be opened.*--port"):
        serve(tmp_path / "run", one.server_port)
    with pytest.raises(PublishError, match="port 99999"):
        serve(tmp_path / "run", 99999)


def test_values_that_are_not_finite_stay_valid_json(tmp_path: Path) -> None:
    nan = float("nan")
    seen = make.observation(1, finite=False, tokens=None, share=nan, null_p99=nan)
    heads = seen.heads
    heads.pr[:] = nan
    heads.status[:2] = "dead"
    with RunRecord.create(tmp_path / "run", {"probes": {}}) as record:
        record.append(seen)
        record.add_verdict(make.verdict(1, p_value=nan, random=(), conditions=()))
    with serve(tmp_path / "run", 0) as server:
        body = ask(server, "/live.json")[2]
        look = ask(server, "/look.json?probe=induction&step=1")[2]
    assert b"NaN" not in body and json.loads(body)["probes"][0]["pr_mean"] == [None]
    assert json.loads(look)["pr"] == [None] * 8


def test_a_large_model_stays_small_on_the_wire(tmp_path: Path) -> None:
    with RunRecord.create(tmp_path / "run", {"probes": {}}) as record:
        for step in range(20):
            record.append(make.observation(step, layers=48, heads=32))
    with serve(tmp_path / "run", 0) as server:
        assert len(ask(server, "/live.json")[2]) < 200_000
        snapshot = server.snapshot()
    assert len(live_data(snapshot)["probes"][0]["followed"]) <= 12


# -- a real browser ---------------------------------------------------------------------------------------------------


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--window-size=1200,1000",
        f"--user-data-dir={tmp_path / 'profile'}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield made
    made.quit()


def until(browser: Any, script: str, wanted: Any, seconds: float = 90.0) -> None:
    ends = time.monotonic() + seconds
    found = None
    while time.monotonic() < ends:
        found = browser.execute_script(f"return {script}")
        if found == wanted:
            return
        time.sleep(0.1)
    raise AssertionError(f"{script} is {found!r}, not {wanted!r}")


FACT = "document.querySelector('#facts dd')?.textContent"
POINTS = "document.querySelectorAll('#c-accuracy path')[0]?.getAttribute('d').split('L').length"
NAMES = (
    "[...document.querySelectorAll('#names .chip')].slice(0, 2).map((chip) => chip.childNodes[1].textContent).join()"
)
PAINTED = """(() => {
  const canvas = document.querySelector('#map canvas');
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data, colours = new Set();
  for (let i = 0; i < data.length; i += 4) colours.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
  return colours.size > 4;
})()"""


def test_values_appear_in_a_real_browser_without_reload(browser: Any, tmp_path: Path) -> None:
    make.record(tmp_path / "run", (0, 1, 2), layers=3, heads=5)
    with serve(tmp_path / "run", 0) as server:
        browser.get(server.address)
        until(browser, FACT, "2")
        until(browser, POINTS, 3)
        browser.execute_script("window.notReloaded = true")
        assert browser.execute_script("return document.querySelector('.badge')") is None
        make.record(tmp_path / "run", (4, 8, 16, 24), layers=3, heads=5)
        until(browser, FACT, "24")
        until(browser, POINTS, 7)
        until(browser, "document.querySelector('.badge').textContent", "causal")
        until(browser, "document.querySelectorAll('#events p.new').length", 4)
        until(browser, NAMES, "L1H0,L1H2")
        until(browser, "document.querySelectorAll('.strip circle').length", 24)
        until(browser, PAINTED, True)
        shutil.move(tmp_path / "run", tmp_path / "away")
        until(browser, "document.querySelector('#status').className", "status lost")
        shutil.move(tmp_path / "away", tmp_path / "run")
        until(browser, "document.querySelector('#status').className.includes('lost')", False)
        assert browser.execute_script("return window.notReloaded") is True
        wide = browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        assert wide, "nothing sticks out sideways"
    problems = [line for line in browser.get_log("browser") if "503" not in line["message"]]
    refused = [line for line in problems if "ERR_CONNECTION_REFUSED" not in line["message"]]
    assert not refused, refused


def test_text_from_the_record_is_never_markup(browser: Any, tmp_path: Path) -> None:
    evil = "<img src=x onerror=window.hurt=1><script>window.hurt=1</script>"
    with RunRecord.create(tmp_path / "run", {"probes": {}, "model": evil}) as record:
        record.append(make.observation(1, label=evil, mark=evil))
        record.add_event(make.event(step=1, text=evil, capability=evil))
        record.add_verdict(make.verdict(1, reason=evil))
    with serve(tmp_path / "run", 0) as server:
        browser.get(server.address)
        until(browser, FACT, "1")
        until(browser, "document.querySelector('.verdict p').textContent.includes('<script>')", True)
        assert browser.execute_script("return [window.hurt, document.querySelectorAll('main img').length]") == [None, 0]


def test_picture_of_the_page_is_not_empty(browser: Any, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    make.record(tmp_path / "run", layers=6, heads=12)
    with serve(tmp_path / "run", 0) as server:
        browser.get(server.address)
        until(browser, FACT, "32")
        browser.save_screenshot(str(tmp_path / "page.png"))
    with image.open(tmp_path / "page.png") as picture:
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    assert len(np.unique(pixels, axis=0)) > 100


def test_the_full_report_of_the_moment(server: LiveServer) -> None:
    status, headers, body = ask(server, "/report")
    assert status == 200 and b"<!doctype html>" in body[:200].lower() and b"L1H0" in body
    assert (
        "connect-src" not in headers["content-security-policy"]
        and "default-src 'none'" in headers["content-security-policy"]
    )
