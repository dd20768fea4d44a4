"""The board among what goes wrong: kills, two boards, vanished and damaged runs, odd names, read-only disks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from board_page import CURVES, in_browser, metric, press, running_board, show, write_run
from mounts import mounted
from webdriver import ENTER, Browser, browsing

ODD_NAMES = ("训练 一", 'it\'s "quoted"', "<script>alert(1)", "a,b", "50%25 & more?#x", "..dots", "🚀")


def token_of(address: str) -> dict[str, str]:
    return {"x-sojourn-token": httpx.get(f"{address}/api/session").json()["token"]}


def wait_for(condition: Any, seconds: float = 60.0) -> Any:
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


def started_board(home: Path) -> tuple[subprocess.Popen[str], str]:
    environment = {**os.environ, "SOJOURN_HOME": str(home)}
    command = [sys.executable, "-m", "sojourn", "board", "--no-browser", "--port", "0"]
    board = subprocess.Popen(command, env=environment, cwd=home, stdout=subprocess.PIPE, text=True)
    assert board.stdout is not None
    return board, board.stdout.readline().split()[1].rstrip("/")


@pytest.mark.parametrize("after", [0.0, 0.02, 0.2, 1.0])
def test_what_a_board_has_started_goes_on_when_it_is_killed(tmp_path: Path, after: float) -> None:
    """However early: the next board shows the task, its output and its end."""
    board, address = started_board(tmp_path)
    form = {"preset": "smoke", "settings": {"name": "kept", "train.steps": 5, "train.device": "cpu"}}
    httpx.post(f"{address}/api/start", json=form, headers=token_of(address), timeout=60).raise_for_status()
    time.sleep(after)
    board.send_signal(signal.SIGKILL)
    board.wait()
    with running_board(tmp_path) as again:

        def tasks() -> list[dict[str, Any]]:
            return httpx.get(f"{again}/api/tasks", timeout=30).json()["tasks"]  # type: ignore[no-any-return]

        assert len(tasks()) == 1
        wait_for(lambda: tasks()[0]["state"] == "done", 180)
        text = httpx.get(f"{again}/api/tasks/{tasks()[0]['id']}").json()["text"]
        assert "kept" in text and json.loads((tmp_path / "runs/kept/status.json").read_text())["state"] == "done"


def test_a_task_whose_board_was_killed_before_it_noted_the_pid_is_running(tmp_path: Path) -> None:
    from sojourn.board.tasks import Tasks

    tasks = Tasks(tmp_path / "tasks")
    made = tasks.start(["train", "smoke", "train.steps=2", "train.device=cpu", f"name={tmp_path}/x"])
    file = tmp_path / "tasks" / made["id"] / "task.json"
    wait_for((file.parent / "process.json").exists)
    facts = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in facts.items() if key not in ("pid", "process_started")}))
    assert (found := tasks.get(made["id"])) is not None and found["state"] in ("running", "failed")
    assert found["state"] == "running" or (file.parent / "end.json").exists()


def test_two_boards_of_one_home_keep_each_others_tags_and_tasks(tmp_path: Path) -> None:
    write_run(tmp_path, "one", 10)
    write_run(tmp_path, "two", 10)
    with running_board(tmp_path) as first, running_board(tmp_path) as second:
        for address, run in ((first, "one"), (second, "two"), (first, "two")):
            tags = {"tags": [f"{run} by {address[-5:]}"]}
            httpx.post(f"{address}/api/runs/{run}/tags", json=tags, headers=token_of(address)).raise_for_status()
        wanted = {"one": [f"one by {first[-5:]}"], "two": [f"two by {first[-5:]}"]}
        for address in (first, second):
            wait_for(
                lambda address=address: (
                    {one["name"]: one["tags"] for one in httpx.get(f"{address}/api/runs").json()["runs"]} == wanted
                )
            )
        wrong = httpx.post(f"{second}/api/runs/one/tags", json={"tags": []}, headers=token_of(first))
        assert wrong.status_code == 403  # the page of one board does not act through the other
        stop = httpx.post(f"{first}/api/runs/one/stop", json={}, headers=token_of(first)).json()["task"]
        assert [task["id"] for task in httpx.get(f"{second}/api/tasks").json()["tasks"]] == [stop["id"]]


def test_a_home_that_cannot_be_written_to_is_shown_and_says_so(tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_run(home, "one", 10)
    (home / "prepared").mkdir()
    with mounted(home, "--bind", str(home)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(home)], check=True)
        with running_board(home) as address:
            headers = token_of(address)
            assert [run["name"] for run in httpx.get(f"{address}/api/runs").json()["runs"]] == ["one"]
            assert httpx.get(f"{address}/api/runs/one/series").json()["last_step"] == 10
            for path, body in (
                ("runs/one/tags", {"tags": ["x"]}),
                ("runs/one/stop", {}),
                ("start", {"preset": "smoke"}),
            ):
                answer = httpx.post(f"{address}/api/{path}", json=body, headers=headers)
                assert answer.status_code in (400, 503) and "Read-only" in answer.json()["error"], answer.text
            answer = httpx.post(f"{address}/api/upload?name=a.txt", content=b"x", headers=headers)
            assert answer.status_code in (400, 503) and "Read-only" in answer.json()["error"], answer.text


def test_damaged_and_strange_files_of_a_run(tmp_path: Path) -> None:
    good = "".join(metric(step) for step in range(1, 50)).encode()
    contents = {
        "garbage": os.urandom(300_000), "cut": good[:-37], "holes": good + bytes(5_000_000) + b"\n" + good,
        "long line": b'{"kind": "train", "text": "' + b"x" * 3_000_000 + b'"}\n' + good, "empty": b"",
        "numbers": b'{"kind":"train","step":1e400,"time":1}\n{"kind":"train","step":1,"time":"x"}\n[1]\n7\n' + good,
    }  # fmt: skip
    for name, data in contents.items():
        (write_run(tmp_path, name, 0) / "metrics.jsonl").write_bytes(data)
    folder = write_run(tmp_path, "folder", 0)
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    fifo = write_run(tmp_path, "fifo", 0)
    for name in ("metrics.jsonl", "status.json", "events.jsonl"):
        (fifo / name).unlink()
        os.mkfifo(fifo / name)
    for name in ("status.json", "run.yaml", "ledger.json", "environment.json"):
        (write_run(tmp_path, f"no {name}", 5) / name).write_bytes(os.urandom(1000))
    with running_board(tmp_path) as address:
        runs = httpx.get(f"{address}/api/runs", timeout=30).json()["runs"]
        assert {run["name"] for run in runs} >= {*contents, "folder", "fifo"}
        for run in runs:
            for rest in ("", "/series", "/events", "/samples", "/logs", "/report.html"):
                answer = httpx.get(f"{address}/api/runs/{run['name']}{rest}", timeout=30)
                assert answer.status_code == 200, (run["name"], rest, answer.text)
        for name in ("cut", "holes", "long line", "numbers"):
            wait_for(lambda name=name: httpx.get(f"{address}/api/runs/{name}/series").json()["last_step"] >= 48)


def test_a_log_of_two_gigabytes_is_shown_from_its_end(tmp_path: Path) -> None:
    run = write_run(tmp_path, "loud", 10)
    with (run / "train.log").open("wb") as file:
        file.truncate(2 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\nthe last line\n")
    with running_board(tmp_path) as address:
        httpx.get(f"{address}/api/runs", timeout=30)
        began = time.monotonic()
        found = httpx.get(f"{address}/api/runs/loud/logs?tail=40000").json()
        assert found["text"].endswith("the last line\n") and len(found["text"]) <= 40_000
        assert time.monotonic() - began < 1.0


def test_a_clock_that_is_set_back_tears_no_curve(tmp_path: Path) -> None:
    run = write_run(tmp_path, "clock", 0)
    lines = [metric(step, time=1.7e9 + step - (3600 if step > 50 else 0)) for step in range(1, 101)]
    (run / "metrics.jsonl").write_text("".join(lines))
    (run / "events.jsonl").write_text(json.dumps({"time": 1.6e9, "kind": "saved", "step": 3}) + "\n")
    (run / "status.json").write_text(json.dumps({"state": "done", "step": 100, "updated": time.time() + 86400}))
    with running_board(tmp_path) as address:
        found = httpx.get(f"{address}/api/runs/clock/series?x=time").json()["series"]["loss"]
        assert len(found["x"]) == 100 and found["x"] == sorted(found["x"])
        assert (
            httpx.get(f"{address}/api/runs/clock/series?x=time&low=10&high=20").json()["series"]["loss"]["x"][0] <= 10
        )
        assert httpx.get(f"{address}/api/runs/clock/events?x=time").json()["events"][0]["x"] == 0


@in_browser
def test_names_of_any_kind_are_shown_opened_compared_and_tagged(tmp_path: Path) -> None:
    for name in ODD_NAMES:
        write_run(tmp_path, "plain", 100).rename(tmp_path / "runs" / name)
    with running_board(tmp_path) as address, browsing(tmp_path) as page:
        names = "[...document.querySelectorAll('.run-name')].map(one => one.textContent)"
        show(page, address, "#/runs", f"{names}.length === {len(ODD_NAMES)}")
        assert set(page.js(f"return {names}")) == set(ODD_NAMES)
        page.wait(f"document.querySelectorAll('.sparkline path').length === {len(ODD_NAMES)}")
        for name in ODD_NAMES:
            page.open("about:blank")
            page.open(f"{address}/#/runs")
            page.wait(f"{names}.length === {len(ODD_NAMES)}")
            page.js(
                "[...document.querySelectorAll('.run-name')].find(one => one.textContent === arguments[0]).click()",
                name,
            )
            page.wait(CURVES)
            assert page.text("h1") == name
        page.js("location.hash = '#/runs'")
        page.wait("document.querySelectorAll('tbody input').length > 2")
        page.js("[...document.querySelectorAll('tbody input')].forEach((one) => one.click())")
        press(page, "Compare")
        page.wait("document.querySelectorAll('.compared thead a').length === 6")
        page.wait(CURVES)
        page.js("location.hash = '#/runs'")
        page.wait("document.querySelector('.menu button')")
        page.js("document.querySelector('.menu button').click()")
        press(page, "Tags…")
        page.type("#dialog input", "<b>好</b>" + ENTER)
        page.wait("document.querySelector('.tag')?.textContent === '<b>好</b>'")
        assert page.log() == []


@in_browser
def test_a_run_whose_folder_is_deleted_while_one_looks(tmp_path: Path) -> None:
    import shutil

    run = write_run(tmp_path, "short-lived", 300, "running")
    write_run(tmp_path, "stays", 300)
    with running_board(tmp_path) as address, browsing(tmp_path) as page:
        show(page, address, "#/run/short-lived", CURVES)
        shutil.rmtree(run)
        page.wait("document.querySelector('.page > .error')?.checkVisibility()")
        assert "short-lived" in page.text(".page > .error") and page.count(".chart .line") > 2  # what was seen stays
        page.log()
        for tab in ("checkpoints", "logs", "events", "samples", "config"):
            page.js("document.getElementById(arguments[0]).click()", f"tab-{tab}")
            page.wait(
                "document.querySelector('.tabbed > .error').checkVisibility() "
                "|| document.querySelector('#tab-panel .empty')"
            )
        _looks_alive(page)
        write_run(tmp_path, "short-lived", 50)
        page.wait("!document.querySelector('.page > .error').checkVisibility()", seconds=60)


def _looks_alive(page: Browser) -> None:
    press(page, "Runs", "#nav")
    page.wait("document.querySelector('.run-name')?.textContent === 'stays'")
    page.js("history.back()")
    page.wait("location.hash === '#/run/short-lived'")
