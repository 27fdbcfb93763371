"""The report: what it says, that it stays inside its file, and that it works in a real browser."""

from __future__ import annotations

import base64
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spectral_monitor.development import develop
from spectral_monitor.errors import RecordError
from spectral_monitor.observation import ConditionMetrics, Event, HeadTable, Observation, ProbeMetrics, Verdict
from spectral_monitor.publish.figures import write_figures, write_tables
from spectral_monitor.publish.report import build_report, pack, write_report
from spectral_monitor.publish.tables import show, tables_of, tokens_text
from spectral_monitor.record import RunRecord
from spectral_monitor.screen import Thresholds, classify

STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 724, 1024)
CIRCUIT = (4, 6)


def observation(step: int, layers: int = 2, per_layer: int = 4, **fields: Any) -> Observation:
    """Heads L1H0 and L1H2 become induction heads at step 256; L0H1 is a first-token head from step 512."""
    count = layers * per_layer
    generator = np.random.default_rng(step)
    ranks = 1.5 + generator.uniform(0, 0.2, count)
    ratios = {name: generator.uniform(0.5, 1.5, count) for name in ("induction", "first_token")}
    masses = {"induction": np.full(count, 0.01)}
    if step >= 64:
        ranks[list(CIRCUIT)] = 8.0
    if step >= 256:
        ratios["induction"][list(CIRCUIT)] = 90.0
        masses["induction"][list(CIRCUIT)] = 0.6
    if step >= 512:
        ratios["first_token"][1] = 45.0
    heads = HeadTable(
        layer=np.repeat(np.arange(layers), per_layer),
        head=np.tile(np.arange(per_layer), layers),
        pr=ranks,
        pr_moment=ranks,
        attention=masses,
        baselines={"others": np.full(count, 0.005)},
        selectivity=ratios,
        head_class=classify(ratios, Thresholds()),
        status=np.full(count, "ok"),
        sink=np.zeros(count),
    )
    top1 = 0.9 if step >= 256 else 0.02
    given: dict[str, Any] = {"seconds": 0.5, "share": 0.02, "null_p99": 1.8, **fields}
    return Observation(
        step=step,
        tokens=step * 4096.0,
        probe="induction",
        fingerprint="ab" * 32,
        heads=heads,
        metrics=ProbeMetrics(top1, top1, 0.3, 1.0, 64),
        baseline="others",
        **given,
    )


def condition(name: str, logprob: float, heads: tuple[str, ...] = ()) -> ConditionMetrics:
    return ConditionMetrics(name, heads, logprob, 0.5, 0.6, 1.0)


def a_verdict(mode: str = "zero") -> Verdict:
    draws = tuple(condition(f"matched random {n}", -0.305 - 0.01 * n, ("L1H1", "L1H3")) for n in range(20))
    conditions = (condition("baseline", -0.2), condition("circuit", -4.2), condition("upper bound", -4.4))
    return Verdict(
        step=1024,
        tokens=1024 * 4096.0,
        probe="induction",
        capability="induction",
        heads=("L1H0", "L1H2"),
        mode=mode,
        verdict="causal",
        reason="damage 4.000 nats, reached by 0 of 20 matched random sets",
        p_value=1 / 21,
        level=0.05,
        draws=20,
        distinct_draws=20,
        seed=0,
        effect=4.0,
        effect_ci=(3.8, 4.2),
        excess=3.8,
        excess_ci=(3.6, 4.0),
        conditions=conditions,
        random=draws,
        rows=64,
    )


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    probes = {"induction": {"fingerprint": "ab" * 32, "rows": 64, "length": 64, "capability": "induction"}}
    with RunRecord.create(tmp_path / "demo run", {"probes": probes, "versions": {"torch": "2.13"}}) as made:
        for step in STEPS:
            made.append(observation(step, mark="duplicate of step512" if step == 724 else None))
        made.add_verdict(a_verdict())
        made.add_event(Event("pr_rise", 64, 64 * 4096.0, "induction", "induction", ("L1H0",), text="PR 5x its minimum"))
    return RunRecord.open(tmp_path / "demo run")


def test_the_page_tells_the_story(record: RunRecord) -> None:
    html = build_report(record)
    text = re.sub(r"<[^>]+>", " ", html)
    assert "An induction circuit of 2 heads (L1H0 L1H2) formed between 524K and 1.05M tokens." in text
    assert "They do the work: without them the right token loses 4.00 nats" in text
    assert "against 0.20 on average in 20 matched random removals (p = 0.048)" in text
    assert "PR rose before the pattern in 2 of 2 circuit heads" in text
    assert "1 of 1 heads with a PR alarm joined the induction circuit (100%)" in text
    assert "step 724 is left out: duplicate of step512" in text
    assert "13 observations took 6.5 s" in text and "2.0% of the run" in text
    assert "{{" not in html


def test_nothing_on_the_page_points_outside(record: RunRecord) -> None:
    html = build_report(record, title="<script>alert(1)</script>")
    assert "<script>alert(1)" not in html
    assert "default-src 'none'" in html
    outside = re.findall(
        r"""(?:src|href)=["'](?!#|data:)[^"']*|url\(\s*["']?(?!data:)|@import|https?://[^\s"'<]+""", html
    )
    assert [found for found in outside if "www.w3.org/2000/svg" not in found] == []


def test_a_record_with_little_in_it_still_makes_a_page(tmp_path: Path) -> None:
    with RunRecord.create(tmp_path / "run", {"probes": {}}) as made:
        bare = observation(5, seconds=float("nan"), share=float("nan"), null_p99=float("nan"))
        made.append(bare)
        html = build_report(made)
    assert "No causal check was made" in html and "at least 3 are needed" in html


def test_what_cannot_be_reported_is_one_sentence(record: RunRecord, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="is a directory"):
        write_report(record, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot be written"):
        write_report(record, tmp_path / "file" / "report.html")
    with (
        RunRecord.create(tmp_path / "empty", {"probes": {}}) as empty,
        pytest.raises(RecordError, match="no observation"),
    ):
        write_report(empty, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_packed_values_come_back() -> None:
    generator = np.random.default_rng(0)
    values = np.exp(generator.uniform(-3, 9, (7, 11)))
    values[2, 3] = np.nan
    entry = pack(values, log=True, least=1e-3)
    codes = np.frombuffer(base64.b64decode(entry["data"]), "<u2").reshape(7, 11)
    back = entry["lo"] * (entry["hi"] / entry["lo"]) ** (codes / 65534)
    assert codes[2, 3] == 65535
    known = np.isfinite(values)
    np.testing.assert_allclose(back[known], values[known], rtol=3e-4)
    assert (codes[known] < 65535).all()
    masses = pack(np.array([[0.0, 0.5, 1.0]]), log=False)
    assert np.frombuffer(base64.b64decode(masses["data"]), "<u2").tolist() == [0, 32767, 65534]


def test_tables_are_complete_and_csv_has_full_values(record: RunRecord, tmp_path: Path) -> None:
    found = develop(record)
    files = write_tables(found, record.verdicts(), record.events(), tmp_path / "out")
    names = {file.stem for file in files}
    assert {"milestones", "circuits", "recall", "lead", "verdicts", "ranking", "calibration", "observations"} <= names
    lead = (tmp_path / "out" / "lead.csv").read_text().splitlines()
    assert lead[1].startswith("L1H0,262144.0,1048576.0,4.0,")
    verdict = next(table for table in tables_of(found, record.verdicts(), record.events()) if table.name == "verdicts")
    assert str(1 / 21) in verdict.csv() and "damage 4.000 nats" in verdict.csv()
    assert (tokens_text(264e9), tokens_text(999), show(float("nan")), show(True)) == ("264B", "999", "\u2013", "yes")


def test_figures_are_written(record: RunRecord, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    files = write_figures(develop(record), record.verdicts(), tmp_path)
    assert sorted(file.name for file in files) == [
        f"{name}.{kind}" for name in ("causal", "headline", "sinks") for kind in ("png", "svg")
    ]
    assert all(file.stat().st_size > 2000 for file in files)
    svg = (tmp_path / "headline.svg").read_text()
    assert "<svg" in svg


# -- in a real browser ------------------------------------------------------------------------------------------------

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium or chromedriver is not installed")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,1000"):
        options.add_argument(flag)
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def requests_of(driver: Any) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    assert any(request["documentURL"].startswith("file:") for request in sent), "the log does not hold the page itself"
    # the browser's own start page makes requests too; only those of the report count
    urls = [request["request"]["url"] for request in sent if not request["documentURL"].startswith("chrome:")]
    return [url for url in urls if not url.startswith(("file:", "data:", "blob:"))]


def wait_ready(driver: Any) -> None:
    deadline = time.monotonic() + 30
    while driver.execute_script("return document.documentElement.dataset.ready") != "yes":
        assert time.monotonic() < deadline, "the page's script did not finish"
        time.sleep(0.05)


@pytest.mark.slow
def test_the_page_works_in_chromium(record: RunRecord, tmp_path: Path, browser: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    page = write_report(record, tmp_path / "report.html")
    browser.get(page.as_uri())
    wait_ready(browser)
    body = browser.find_element(By.TAG_NAME, "body").text
    assert "An induction circuit of 2 heads" in body and "Is it causal?" in body

    # the slider, with the keyboard: the observation and the ringed heads follow
    slider, at = browser.find_element(By.ID, "slider"), browser.find_element(By.ID, "at")
    assert at.text.startswith("step 1024")
    before = browser.execute_script("return document.querySelector('#m-screen canvas').toDataURL()")
    slider.send_keys(Keys.HOME)
    assert at.text.startswith("step 0")
    assert browser.execute_script("return document.querySelector('#m-screen canvas').toDataURL()") != before
    slider.send_keys(Keys.RIGHT)
    assert at.text.startswith("step 1 ")

    # a tooltip by pointer, and by keyboard; Enter follows a head
    canvas = browser.find_element(By.CSS_SELECTOR, "#m-pr canvas")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", canvas)
    ActionChains(browser).move_to_element_with_offset(canvas, 20 - canvas.size["width"] // 2 + 44, -20).perform()
    tip = browser.find_element(By.ID, "tip")
    assert tip.is_displayed() and tip.text.startswith("L0H0 at step 1")
    chips = len(browser.find_elements(By.CSS_SELECTOR, ".chip"))
    browser.execute_script("arguments[0].focus()", canvas)
    ActionChains(browser).send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ENTER).perform()
    assert len(browser.find_elements(By.CSS_SELECTOR, ".chip")) == chips + 1
    assert "L0H1" in browser.find_element(By.ID, "chips").text

    # the other quantity, the other theme, the other axis
    browser.execute_script(
        "const s = document.getElementById('metric'); s.value = 'class'; s.dispatchEvent(new Event('change'))"
    )
    assert "first-token" in browser.find_element(By.ID, "m-screen").text
    theme = browser.execute_script("return document.documentElement.dataset.theme")
    browser.execute_script("document.getElementById('theme').click()")
    assert browser.execute_script("return document.documentElement.dataset.theme") != theme
    browser.execute_script("document.getElementById('scale').click()")

    # every chart is there and nothing is wider than the window, at two sizes
    for width in (1280, 480):
        browser.set_window_size(width, 900)
        time.sleep(0.4)
        wide = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1] + 1
        for chart in ("c-milestones", "c-classes", "c-probe", "c-pr", "c-selectivity", "c-sink", "c-lead", "c-recall"):
            assert browser.execute_script(f"return document.querySelectorAll('#{chart} svg').length") == 1, chart
        assert browser.execute_script("return document.querySelectorAll('.verdict svg circle').length") == 20

    # on paper
    pdf = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert pdf.startswith(b"%PDF") and len(pdf) > 20_000

    logs = [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert logs == []
    assert requests_of(browser) == []


@pytest.mark.slow
def test_a_large_record_stays_small_and_responsive(tmp_path: Path, browser: Any) -> None:
    """154 observations of 1,024 heads: under 15 MB; moving the slider stays within a frame or two."""
    with RunRecord.create(tmp_path / "run", {"probes": {}}) as made:
        for number in range(154):
            made.append(observation(number * 10, layers=32, per_layer=32))
        started = time.perf_counter()
        page = write_report(made, tmp_path / "report.html")
        print(f"report of 154 x 1,024 written in {time.perf_counter() - started:.2f} s")
    assert page.stat().st_size < 15e6
    browser.get(page.as_uri())
    wait_ready(browser)
    spent = browser.execute_script(
        "const s = document.getElementById('slider'), t = performance.now();"
        "for (let i = 0; i < 100; i++) { s.value = i; s.dispatchEvent(new Event('input')); }"
        "return (performance.now() - t) / 100"
    )
    print(f"one move of the slider: {spent:.1f} ms")
    assert browser.get_log("browser") == []
