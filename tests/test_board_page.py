"""The board's page in a real browser, against a real `sojourn board` and real runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from board_page import (
    CURVES,
    LONG,
    change,
    confirm,
    in_browser,
    last_loss,
    metric,
    press,
    running_board,
    show,
    write_run,
)
from sojourn.board import app
from sojourn.web.static import ASSETS
from webdriver import ENTER, ESCAPE, Browser, browsing

PAGE = Path(app.__file__).with_name("page")
FILES = sorted([*PAGE.iterdir(), *ASSETS.iterdir()])
RIGHT, HOME = "\ue014", "\ue011"


# -- Files --


def test_both_languages_have_the_same_texts_and_all_are_used() -> None:
    keys = [re.findall(r"(?<=[ {,])(\w+): \"", (PAGE / name).read_text()) for name in ("en.js", "zh.js")]
    assert keys[0] == keys[1] and len(keys[0]) > 200 and len(set(keys[0])) == len(keys[0])
    values = [re.findall(r"\{(\w+)\}", (PAGE / name).read_text()) for name in ("en.js", "zh.js")]
    assert sorted(values[0]) == sorted(values[1])
    used = "".join(path.read_text() for path in FILES if path.name not in ("en.js", "zh.js"))
    prefixes = tuple(set(re.findall(r"t\(`(\w+_)\$\{", used)))
    words = set(re.findall(r"\w+", used))
    assert [key for key in keys[0] if key not in words and not key.startswith(prefixes)] == []
    named = set(re.findall(r"\bt\(\"(\w+)\"", used)) | set(re.findall(r"data-(?:text|label)=\"(\w+)\"", used))
    assert named - set(keys[0]) == set()


def test_the_page_has_no_inline_script_and_no_foreign_address() -> None:
    for file in FILES:
        text = file.read_text()
        addresses = set(re.findall(r"https?://[^\s\"'`\\]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not {one for one in addresses if one[8:9].isalnum()}, file
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), file
        assert file.suffix != ".html" or not re.search(r"<script(?![^>]* src=)|style=|\son\w+=", text), file


# -- A board and a browser --


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("board")


@pytest.fixture(scope="module")
def board(home: Path) -> Iterator[str]:
    with running_board(home) as address:
        yield address


@pytest.fixture(scope="module")
def opened(home: Path) -> Iterator[Browser]:
    with browsing(home) as made:
        yield made


@pytest.fixture
def page(opened: Browser, board: str) -> Iterator[Browser]:
    """The page as somebody sees it who has never been here. No script of it fails; a 400 is shown, not hidden."""
    opened.size(1300, 900)
    opened.dark(False)
    opened.open(board + "/page/icon.svg")
    opened.js("localStorage.clear(); sessionStorage.clear()")
    opened.log()
    yield opened
    assert [line for line in opened.log() if "status of 400" not in line] == []


@in_browser
def test_a_curve_goes_on_while_one_looks_and_the_language_changes(page: Browser, board: str, home: Path) -> None:
    run = write_run(home, "watched", 100)
    show(page, board, "#/runs", "document.querySelector('.run-name')")
    page.wait("document.querySelector('.sparkline path')")
    assert "100 of 2,000" in page.text("td.c-progress") and page.text("td.c-money b") == "¥0.25"
    page.click(".run-name")
    page.wait(CURVES)
    before = last_loss(page)
    (run / "status.json").write_text(
        json.dumps({"state": "running", "step": 120, "total_steps": 2000, "pid": os.getpid(), "started": started()})
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write("".join(metric(step, loss=0.125) for step in range(101, 121)))
    page.wait("document.querySelector('.chart').getAttribute('aria-label').includes('last 0.125')")
    assert "last 0.125" not in before
    page.click("#language")
    page.wait("document.getElementById('tab-curves').textContent === '曲线'")
    assert page.js("return document.documentElement.lang") == "zh-CN" and "运行中" in page.text(".page-head")
    (run / "status.json").write_text(json.dumps({"state": "stopped", "step": 120, "total_steps": 2000}))


def started() -> float:
    from sojourn.machine.process import start_time

    return start_time(os.getpid()) or 0.0


@in_browser
def test_a_page_whose_files_could_not_be_fetched_is_loaded_again(page: Browser, board: str) -> None:
    page.cdp("Network.enable")
    page.cdp("Network.setBlockedURLs", urls=["*/page/theme.js"])
    page.open("about:blank")
    page.open(f"{board}/#/runs")
    page.wait("Number(sessionStorage.getItem('sojourn.reloads')) >= 1")
    page.cdp("Network.setBlockedURLs", urls=[])
    page.wait("document.querySelector('.page')")
    page.wait("sessionStorage.getItem('sojourn.reloads') === null")
    page.log()


# -- Slow: with training processes, and everything that a person may do --


@pytest.fixture(scope="module")
def training(home: Path) -> Iterator[Path]:
    """A real run that goes on for minutes."""
    command = [
        sys.executable, "-m", "sojourn", "train", "smoke", "name=real", "train.steps=20000", "log.every_steps=1",
        "train.eval_every=20", 'train.samples=["The cat"]', "train.sample_tokens=8",
    ]  # fmt: skip
    environment = {**os.environ, "SOJOURN_HOME": str(home), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        metrics, ends = home / "runs" / "real" / "metrics.jsonl", time.monotonic() + LONG
        while not metrics.exists() or metrics.read_text().count("\n") < 30:
            assert process.poll() is None and time.monotonic() < ends
            time.sleep(0.2)
        yield metrics.parent
    finally:
        process.terminate()
        process.wait(60)
        pid = json.loads((home / "runs" / "real" / "status.json").read_text())
        if pid["state"] in ("starting", "running"):
            os.kill(pid["pid"], signal.SIGTERM)


def state_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "status.json").read_text())
    return found


@in_browser
@pytest.mark.slow
def test_a_real_run_is_watched_stopped_and_resumed(page: Browser, board: str, training: Path) -> None:
    show(page, board, "#/run/real", CURVES)
    before = last_loss(page)
    page.wait("document.querySelector('.chart').getAttribute('aria-label') !== arguments[0]", before)
    press(page, "Samples")
    page.wait("document.querySelector('.sample')?.textContent.includes('The cat')", seconds=60)
    press(page, "Stop", ".page-head")
    confirm(page, f"sojourn stop {training}")
    page.wait("document.querySelector('.page-head .state').textContent === 'stopped'", seconds=LONG)
    stopped = state_of(training)["step"]
    assert stopped >= 30 and page.count("#tasks:not([hidden]) .task") == 1
    press(page, "Checkpoints")
    press(page, "Verify")
    page.wait("document.querySelector('.checkpoints').textContent.includes('whole')")
    press(page, "Resume", ".page-head")
    confirm(page, f"sojourn train {training}")
    page.wait("document.querySelector('.page-head .state').textContent === 'running'", seconds=LONG)
    page.wait("document.querySelector('.output').textContent.includes('step')", seconds=LONG)
    ends = time.monotonic() + LONG
    while state_of(training)["step"] <= stopped:
        assert time.monotonic() < ends
        time.sleep(0.2)
    press(page, "Stop", ".page-head")
    confirm(page, "sojourn stop")
    page.wait("document.querySelector('.page-head .state').textContent === 'stopped'", seconds=LONG)
    steps = [json.loads(line).get("step") for line in (training / "metrics.jsonl").read_text().splitlines()]
    assert stopped + 1 in steps


@in_browser
@pytest.mark.slow
def test_the_form_shows_the_data_and_starts_a_run(page: Browser, board: str, home: Path, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{n}+1?"}, {"role": "assistant", "content": f"{n + 1}"}]}
            for n in range(200)]  # fmt: skip
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    show(page, board, "#/new", "document.querySelector('.segments')")
    press(page, "From scratch")
    change(page, ".form select", "smoke", "change")
    page.type("#data-file", str(tmp_path / "sums.jsonl"))
    page.wait("document.querySelector('.example')?.textContent.includes('0+1?')", seconds=60)
    assert "sums.jsonl" in page.text(".main-side") and "messages" in page.text(".main-side")
    page.type("[placeholder='chosen for you']", "by-form")
    page.type("textarea.mono", "train.steps=3\nlog.every_steps=1\ntrain.nonsense=1")
    page.wait("document.querySelector('.main-side > .error:not([hidden])')")
    assert "nonsense" in page.text(".main-side > .error") and page.count("#start:disabled") == 1
    change(page, "textarea.mono", "train.steps=3\nlog.every_steps=1")
    page.wait("document.querySelector('#start:not(:disabled)')")
    page.wait("document.querySelector('.code').textContent.includes('name=by-form')")
    assert "extends: smoke" in page.text(".main-side")
    page.click("#start")
    confirm(page, "sojourn train smoke")
    page.wait("location.hash === '#/runs'")
    done = "[...document.querySelectorAll('tbody tr')].some(row => /by-form[^]*done/.test(row.innerText))"
    page.wait(done, seconds=LONG)
    assert state_of(home / "runs" / "by-form")["step"] == 3
    press(page, "Data", "#nav")
    page.wait("document.querySelector('.data-table a')")
    page.click(".data-table a")
    page.wait("document.querySelector('.example mark')")
    trained = page.js("return [...document.querySelectorAll('.example mark')].map(one => one.textContent).join('')")
    assert "2" in trained and "+1?" not in trained and page.count(".histogram tr") > 0
    page.type("[type=search]", "no such text anywhere")
    page.wait("document.querySelector('.page.data').textContent.includes('Nothing found')")


COVERED = """
  const name = document.querySelector(".scatter text.best").getBoundingClientRect();
  return [...document.querySelectorAll("circle.offer")].filter((one) => {
    const at = one.getBoundingClientRect();
    return at.right > name.left && at.left < name.right && at.bottom > name.top && at.top < name.bottom;
  }).length;
"""


@in_browser
@pytest.mark.slow
def test_a_plan_follows_its_sliders(page: Browser, board: str) -> None:
    show(page, board, "#/plan", "document.querySelector('.offers tbody tr')")
    table, figures = page.text(".offers"), page.text(".plan-result .facts")
    assert page.count(".offer.best") == 1 and "sojourn plan lora-20k" in page.text(".command")
    for width in (1280, 390):
        page.size(width, 860)
        page.wait("document.querySelector('.scatter text.best').getBoundingClientRect().right <= innerWidth")
        assert page.js(COVERED) == 0
    page.size(1280, 860)
    slider = ".slider:nth-of-type(5) input[type=range]"
    assert page.js("return document.querySelector(arguments[0]).ariaLabel", slider) == "Sequence length"
    change(page, slider, "6")
    page.wait("document.querySelector('.offers')?.innerText !== arguments[0]", table)
    assert page.text(".plan-result .facts") != figures and "data.max_length=8192" in page.text(".command")
    change(page, "[placeholder='¥30, $5']", "¥2")
    page.wait("document.querySelector('.scatter line.limit')")
    change(page, "[placeholder='12h, 3d']", "never")
    page.wait("document.querySelector('.main-side .error:not([hidden])')")
    assert page.count(".offers tbody tr") > 0  # the last answer stays


@in_browser
@pytest.mark.slow
def test_charts_zoom_read_out_hide_and_are_saved(page: Browser, board: str, home: Path) -> None:
    write_run(home, "long", 4000)
    for name, lines in {
        "gap": [metric(step, loss=None if 20 < step < 30 else 2.0) for step in range(1, 51)],
        "single": [metric(7)],
        "empty": [],
    }.items():
        (write_run(home, name, 0) / "metrics.jsonl").write_text("".join(lines))
    show(page, board, "#/run/long", CURVES)
    reach = "return document.querySelector('.chart .line:not(.raw)').getAttribute('d').split('L').length"
    assert 300 < page.js(reach) < 1000
    ticks = "return [...document.querySelectorAll('.chart .grid text')].map(one => one.textContent)"
    whole = page.js(ticks)
    page.js("document.querySelector('.chart').focus()")
    page.keys(HOME, RIGHT, RIGHT)
    assert page.js("return document.getElementById('live').textContent").startswith("Step ")
    page.keys("+", "+", "+")
    page.wait("!document.querySelector('.curves .quiet').disabled")
    page.wait("[...document.querySelectorAll('.chart .grid text')].some(one => one.textContent === '800')")
    page.keys(ESCAPE)
    page.wait("document.querySelector('.curves .quiet').disabled")
    assert page.js(ticks) == whole
    change(page, ".curves select", "money", "change")
    page.wait("document.querySelector('.chart .grid').textContent.includes('¥3.00')")
    page.cdp("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(home))
    for kind in ("PNG", "SVG"):
        page.click(".panel .menu button")
        press(page, kind, ".menu-list")
    files = [home / f"long-loss.{kind}" for kind in ("png", "svg")]
    ends = time.monotonic() + 30
    while not all(file.exists() and file.stat().st_size for file in files):
        assert time.monotonic() < ends
        time.sleep(0.05)
    assert files[0].read_bytes()[:4] == b"\x89PNG" and files[0].stat().st_size > 5000
    assert "<path" in files[1].read_text() and "light-dark" not in files[1].read_text()
    show(page, board, "#/run/gap", CURVES)
    assert page.js("return document.querySelector('.chart .line:not(.raw)').getAttribute('d').split('M').length") == 3
    show(page, board, "#/run/single", "document.querySelector('.chart circle.dot')")
    show(page, board, "#/run/empty", "document.querySelector('.charts .empty')")
    show(page, board, "#/compare/long,gap,single", CURVES)
    page.wait("document.querySelector('.compared code')?.textContent === 'name'")
    lines = page.count(".chart .line")
    page.click(".runs-legend button")
    page.wait("document.querySelectorAll('.chart .line').length < arguments[0]", lines)


DRAW_SIX = """
  return (async () => {
    const { Chart } = await import("/page/chart.js");
    const root = document.createElement("div");
    root.className = "charts";
    document.getElementById("page").replaceChildren(root);
    const charts = Array.from({ length: 6 }, () => new Chart({ title: "x" }));
    root.append(...charts.map((chart) => chart.element));
    await new Promise((resolve) => setTimeout(resolve, 300));
    const x = Array.from({ length: 800 }, (_, i) => i);
    const times = [];
    for (let i = 0; i < 20; i++) {
      const y = x.map((n) => Math.sin(n / 50 + i) + Math.random()), from = performance.now();
      for (const chart of charts) chart.set({ series: [{ id: "a", name: "a", color: 0, x, y }], smoothing: 0.5 });
      root.getBoundingClientRect();
      times.push(performance.now() - from);
      await new Promise((resolve) => requestAnimationFrame(resolve));
    }
    return Math.min(...times);
  })()
"""


@in_browser
@pytest.mark.slow
def test_six_charts_are_drawn_within_two_frames(page: Browser, board: str) -> None:
    show(page, board, "#/data", "document.querySelector('.page-head')")
    milliseconds = page.js(DRAW_SIX)
    assert milliseconds < 33, f"{milliseconds:.1f} ms"


@in_browser
@pytest.mark.slow
def test_runs_are_filtered_sorted_tagged_and_compared(page: Browser, board: str, home: Path) -> None:
    for name, steps in (("alpha", 10), ("beta", 300), ("gamma", 200)):
        write_run(home, name, steps, "done")
    show(page, board, "#/runs", "[...document.querySelectorAll('.run-name')].some(one => one.textContent === 'gamma')")
    names = "return [...document.querySelectorAll('.run-name')].map(one => one.textContent)"
    press(page, "Run", "thead")
    assert page.js(names) == sorted(page.js(names))
    press(page, "Run", "thead")
    assert page.js(names) == sorted(page.js(names), reverse=True)
    row = "[...document.querySelectorAll('tbody tr')].find(row => row.textContent.includes('beta'))"
    page.js(f"{row}.querySelector('.menu button').click()")
    press(page, "Tags…")
    page.type("#dialog input", "good, baseline" + ENTER)
    page.wait(f"{row}.textContent.includes('baseline')")
    page.type("[type=search]", "baseline")
    page.wait("document.querySelectorAll('.run-name').length === 1")
    change(page, "[type=search]", "zzz")
    page.wait("document.querySelector('.page > .empty').checkVisibility()")
    press(page, "Show all runs")
    for name in ("alpha", "beta"):
        page.js(f"document.querySelector('[aria-label=\"Select {name}\"]').click()")
    press(page, "Compare")
    page.wait("document.querySelector('.compared code')")
    assert "2 runs compared" in page.text("h1") and "train.seed" in page.text(".page.compare")


@in_browser
@pytest.mark.slow
def test_the_page_says_when_the_board_is_gone_and_goes_on_when_it_is_back(opened: Browser, tmp_path: Path) -> None:
    write_run(tmp_path, "one", 50)
    with running_board(tmp_path) as address:
        opened.open(f"{address}/#/runs")
        opened.wait("document.querySelector('.run-name')")
    opened.wait("document.getElementById('connection').checkVisibility()")
    assert "sojourn board" in opened.text("#connection")
    opened.log()
    write_run(tmp_path, "two", 50)
    with running_board(tmp_path, int(address.rsplit(":", 1)[1])):
        opened.wait("!document.getElementById('connection').checkVisibility()", seconds=60)
        opened.wait("document.querySelectorAll('.run-name').length === 2")
        opened.js("document.querySelector('.menu button').click()")
        press(opened, "Tags…")
        opened.type("#dialog input", "after" + ENTER)  # the token of the new board
        opened.wait("document.querySelector('.tag')?.textContent === 'after'")
    opened.open("about:blank")


ADDRESSES = ("#/runs", "#/run/phone", "#/new", "#/plan", "#/data", "#/compare/phone,beside")


@in_browser
@pytest.mark.slow
@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_page_fits_a_phone_and_names_its_controls(
    page: Browser, board: str, home: Path, language: str, tmp_path: Path
) -> None:
    for name in ("phone", "beside"):
        if not (home / "runs" / name).exists():
            write_run(home, name, 100)
    page.js("localStorage.setItem('sojourn.language', arguments[0])", language)
    unnamed = (
        "return [...document.querySelectorAll('button, select, a, input:not([hidden]), textarea, [role=group]')]"
        ".filter(one => one.checkVisibility() && !(one.ariaLabel || one.textContent.trim() || one.labels?.length))"
        ".map(one => one.outerHTML)"
    )
    for size in ((360, 740), (1300, 900)):
        page.size(*size)
        for address in ADDRESSES:
            show(page, board, address, "document.querySelector('.page')")
            page.wait("!document.querySelector('.plan-result .empty') && !document.querySelector('.plan-card .empty')")
            time.sleep(0.5)  # further answers
            assert page.js("return document.documentElement.scrollWidth") <= size[0], address
            assert (
                page.js("const main = document.getElementById('main'); return main.scrollWidth - main.clientWidth") <= 0
            ), address
            assert page.js(unnamed) == [], address
            assert "undefined" not in page.text("body") and "NaN" not in page.text("body"), address
