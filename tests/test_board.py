"""The board over HTTP: what it shows of run folders, whom it lets in, and that runs do not need it."""

from __future__ import annotations

import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from conftest import called
from sojourn.board import actions, series
from sojourn.board.app import make_app, make_board
from sojourn.board.chinese import in_chinese
from sojourn.board.guard import HEADER
from sojourn.board.report import report_html
from sojourn.board.series import RunSeries, SeriesCache, Sparklines, thin_out
from sojourn.board.tasks import Tasks
from sojourn.config.load import load_run
from sojourn.errors import UserError
from sojourn.run.folder import RunFolder
from sojourn.run.stop import stop_run

TOKEN = "page-token"


def _line(step: int, kind: str = "train", **more: Any) -> dict[str, Any]:
    values = {
        "time": 1000.0 + step,
        "kind": kind,
        "step": step,
        "loss": 5.0 / (1 + step),
        "lr": 1e-3,
        "tokens": 64 * step,
    }
    return {**values, **more}


def _write_run(home: Path, name: str = "one", steps: int = 40, state: str = "done") -> RunFolder:
    run = RunFolder(home / "runs" / name)
    run.path.mkdir(parents=True)
    (run.path / "run.yaml").write_text(f"extends: smoke\nname: {name}\nmodel:\n  d_model: 64\n")
    (run.path / "status.json").write_text(
        json.dumps({"state": state, "step": steps, "total_steps": 40, "pid": 1, "started": 0.5, "updated": 1000.0})
    )
    lines = [_line(step) for step in range(1, steps + 1)] + [_line(steps, "eval", loss=1.25, best=True)]
    lines += [{"time": 1.0, "kind": "sample", "step": steps, "prompt": "<b>2+3?</b>", "text": "5"}]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.events.write_text(json.dumps({"time": 1000.0, "kind": "saved", "step": 40}) + "\n")
    environment = {"command": ["sojourn", "train", name], "auto": {"train.compile": "off: for GPUs"}, "python": "3.11"}
    (run.path / "environment.json").write_text(json.dumps(environment))
    return run


@pytest.fixture
def page(home: Path):
    """A client of a board on this machine, with the token of its page."""
    board = make_board(home, [], TOKEN, local=True, ask_hosts=False)
    with TestClient(make_app(board), "http://127.0.0.1", headers={HEADER: TOKEN}) as client:
        yield client


# -- Metrics --


def test_of_many_points_the_smallest_and_largest_are_kept():
    draw = random.Random(0)
    values = [draw.random() for _ in range(10_000)]
    values[1234], values[8765] = 99.0, -99.0
    chosen = thin_out(values, 0, len(values), 200)
    assert len(chosen) <= 202 and chosen == sorted(set(chosen))
    assert {0, 1234, 8765, 9999} <= set(chosen)
    assert thin_out(values, 10, 20, 200) == list(range(10, 20))


def test_series_follow_the_file_and_a_restart_replaces_what_came_after(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(_line(step)) + "\n" for step in range(1, 11)) + '{"time": 5, "kind": "tr')
    series = RunSeries(file)
    series.update()
    assert series.chart("loss", "step", 100)[0] == list(range(1, 11))
    with file.open("a") as opened:  # the line that was cut short, then steps 8 and 9 again
        opened.write('\nnot json\n[1]\n{"kind": "train", "step": "x"}\n')
        opened.writelines(json.dumps(_line(step, loss=1.0)) + "\n" for step in (8, 9))
    before = series.version
    series.update()
    assert series.version > before
    xs, ys = series.chart("loss", "step", 100)
    assert xs == list(range(1, 10)) and ys[-2:] == [1.0, 1.0] and ys[6] == 5 / 8
    file.write_text(json.dumps(_line(3)) + "\n")  # another, shorter file
    series.update()
    assert series.chart("loss", "step", 100)[0] == [3]


def test_axes_are_step_time_tokens_and_money(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = [_line(step, spent=step * 0.5) for step in (10, 20, 30)] + [_line(20, "eval", time=1021.0)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    series = RunSeries(file)
    series.update()
    assert series.keys() == ["loss", "lr", "tokens", "spent", "eval/loss", "eval/lr", "eval/tokens"]
    assert series.chart("loss", "time", 10)[0] == [0, 10, 20]
    assert series.chart("loss", "tokens", 10)[0] == [640, 1280, 1920]
    assert series.chart("loss", "money", 10)[0] == [5, 10, 15]
    assert series.chart("eval/loss", "money", 10)[0] == [10]
    assert series.chart("loss", "step", 10, low=15, high=25)[0] == [10, 20, 30]  # with a neighbour on each side
    assert series.chart("absent", "step", 10) == ([], [])


def test_long_files_read_in_the_background_are_forgotten_too(tmp_path, monkeypatch):
    monkeypatch.setattr(series, "_LONG_BYTES", 1000)
    text = "".join(json.dumps(_line(step)) + "\n" for step in range(1, 101))
    cache = SeriesCache(most_values=700)
    for number in range(8):
        (tmp_path / f"{number}.jsonl").write_text(text)
        cache.open(tmp_path / f"{number}.jsonl")
    until = time.monotonic() + 30
    while any(thread.name == "metrics" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert sum(one.size for one in cache._held.values()) <= 700


def test_rows_that_are_added_together_are_as_if_added_one_by_one(tmp_path, monkeypatch):
    """Restarts, null, booleans, evaluations between, clocks that go back, keys that come and go."""
    draw, step, lines = random.Random(0), 0, []
    for _ in range(600):
        step = max(1, step - draw.randrange(20)) if draw.random() < 0.02 else step + 1
        more: dict[str, Any] = (
            {"loss": draw.choice((None, 2.0, 3, 1e999, True)), "flag": True} if draw.random() < 0.1 else {}
        )
        more |= {"mfu": 0.4} if draw.random() < 0.5 else {}
        lines.append(_line(step, draw.choice(("train", "train", "train", "eval", "odd")), **more))
        lines[-1]["time"] -= draw.choice((0, 0, 0, 500))
    lines.insert(100, {"kind": "train", "step": 10**400, "time": 1.0})
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines).replace("Infinity", "1e999"))
    (together := RunSeries(file)).update()
    monkeypatch.setattr(RunSeries, "_add_rows", lambda self, keys, rows: False)
    (alone := RunSeries(file)).update()
    keys = alone.keys()
    assert sorted(together.keys()) == sorted(keys) and "eval/loss" in keys and "flag" not in keys
    for key in keys:
        for x in ("step", "time", "tokens"):
            assert together.chart(key, x, 5000) == alone.chart(key, x, 5000), (key, x)
            assert together.gaps(key, x, 5000, -1e9, 1e9) == alone.gaps(key, x, 5000, -1e9, 1e9)


def test_the_cache_forgets_what_was_not_looked_at(tmp_path):
    files = []
    for number in range(3):
        files.append(tmp_path / f"{number}.jsonl")
        files[-1].write_text("".join(json.dumps(_line(step)) + "\n" for step in range(1, 101)))
    cache = SeriesCache(most_values=700)
    opened = [cache.open(file) for file in files]
    assert cache.open(files[2]) is opened[2]
    assert cache.open(files[0]) is not opened[0]


def test_a_long_file_is_shown_roughly_at_once_and_wholly_soon(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with file.open("w") as opened:
        opened.writelines(
            json.dumps(_line(one, loss=99.0 if one == 12_345 else 1.0)) + "\n" for one in range(1, 25_001)
        )
    series = SeriesCache().open(file)
    with series.lock:
        if series.is_partial:
            rough = series.chart("loss", "step", 1000)[0]
            assert 300 < len(rough) <= 600 and rough[-1] == 25_000
    _wait(lambda: not series.is_partial)
    assert max(series.chart("loss", "step", 100)[1]) == 99.0
    assert len(series.chart("loss", "step", 10**6)[0]) == 25_000


def test_sparklines_read_a_few_places_of_a_long_file(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(_line(step, loss=float(step))) + "\n" for step in range(1, 5001)))
    found = Sparklines().of(file)
    assert 40 <= len(found) <= 62 and found == sorted(found) and found[-1] == 5000
    assert Sparklines().of(tmp_path / "absent.jsonl") == []


# -- Routes --


def test_runs_their_curves_and_details(home, page):
    _write_run(home)
    listed = page.get("/api/runs").json()["runs"]
    assert listed == [] or listed[0]["name"] == "one"  # looked at every second
    run = page.get("/api/runs/one").json()
    assert (run["state"], run["step"], run["loss"], run["model"]) == ("done", 40, 5 / 41, "64×1")
    assert run["auto"] == {"train.compile": {"value": "off", "reason": "for GPUs"}}
    assert run["command"] == "sojourn train one" and run["config"]["model"]["d_model"] == 64
    found = page.get("/api/runs/one/series?keys=loss,eval/loss&points=10").json()
    assert found["series"]["eval/loss"] == {"x": [40], "y": [1.25]} and len(found["series"]["loss"]["x"]) <= 12
    again = page.get(f"/api/runs/one/series?keys=loss&version={found['version']}").json()
    assert again == {"unchanged": True, "version": found["version"]}
    assert page.get("/api/runs/one/events").json()["events"][0]["kind"] == "saved"
    assert page.get("/api/runs/one/samples").json()["samples"] == [{"step": 40, "prompt": "<b>2+3?</b>", "text": "5"}]
    csv = page.get("/api/runs/one/series.csv?keys=loss,eval/loss").text.splitlines()
    assert (
        csv[0] == "step,loss,eval/loss" and csv[-1].startswith("40.0,") and csv[-1].endswith("1.25") and len(csv) == 41
    )
    assert page.get("/api/sparklines?id=one&id=absent").json()["one"]


def test_a_run_is_tagged(home, page):
    _write_run(home)
    assert page.post("/api/runs/one/tags", json={"tags": [" good ", "good", "", "x" * 99]}).json()["tags"] == [
        "good",
        "x" * 40,
    ]
    assert page.get("/api/runs/one").json()["tags"] == ["good", "x" * 40]
    assert page.post("/api/runs/one/tags", json={"tags": [1]}).status_code == 400


def test_a_form_is_a_command_a_yaml_file_and_a_plan(home, page):
    form = {"preset": "smoke", "settings": {"train.steps": 7, "data.sources": "a b.txt", "model.base": ""}}
    found = page.post("/api/form", json=form).json()
    assert found["line"] == "sojourn train smoke train.steps=7 'data.sources=a b.txt'" and found["errors"] == []
    (home / "form.yaml").write_text(found["yaml"])
    config = load_run(["form.yaml"]).config
    assert config.train.steps == 7 and config.data.sources[0].path == "a b.txt"
    wrong = page.post("/api/form", json={"preset": "smoke", "settings": {"train.stepz": 7}}).json()
    assert "train.stepz" in wrong["errors"][0]
    plan = page.post("/api/plan", json={"preset": "lora-20k", "gpu": ["RTX 4090"], "budget": "¥30"}).json()
    assert plan["line"] == "sojourn plan lora-20k --gpu 'RTX 4090' --budget '¥30'" and plan["memory"]["by_kind"]
    assert page.post("/api/plan", json={"preset": "lora-20k", "gpu": ["No Such GPU"]}).status_code == 400


def test_data_is_looked_at_before_it_is_prepared(home, page):
    (home / "my.jsonl").write_text('{"instruction": "Hi", "output": "Hello", "extra": 1}\n' * 3)
    found = page.post("/api/preview", json={"preset": "smoke", "settings": {"data.sources": "my.jsonl"}}).json()
    assert "alpaca" in found["formats"][0][1] and "extra" in found["formats"][0][1]
    assert "Hello" in found["examples"][0]["text"]


def test_only_files_of_known_folders_are_shown(home, page):
    form = {"preset": "smoke", "settings": {"data.sources": "/etc/passwd"}}
    answer = page.post("/api/preview", json=form)
    assert answer.status_code == 400 and "outside the folders of this board" in answer.json()["error"]
    (home / "link.txt").symlink_to("/etc/passwd")
    for path in ("link.txt", "../../../../../../../../../etc/passwd"):
        answer = page.post("/api/preview", json={"preset": "smoke", "settings": {"data.sources": path}})
        assert answer.status_code == 400 and "root:" not in answer.text


def test_a_gap_is_where_a_metric_was_nan_and_events_have_a_place_on_each_axis(home, page):
    run = _write_run(home, steps=0)
    lines = [_line(step, **({"loss": None} if step in (4, 5) else {"spent": step / 10})) for step in range(1, 9)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.events.write_text(json.dumps({"time": 1003.5, "kind": "saved", "step": 3}) + "\n")
    found = page.get("/api/runs/one/series?keys=loss").json()["series"]["loss"]
    assert found["x"] == [1, 2, 3, 4, 6, 7, 8] and [i for i, y in enumerate(found["y"]) if y is None] == [3]
    axes = ("step", "time", "tokens", "money")
    places = {x: page.get(f"/api/runs/one/events?x={x}").json()["events"][0]["x"] for x in axes}
    assert places == {"step": 3, "time": 2.5, "tokens": 192, "money": 0.3}
    assert page.get("/api/runs/one/events?x=colour").status_code == 400


def test_a_line_is_shown_before_it_is_started(home, page):
    run = _write_run(home, state="stopped")
    tasks = len(page.get("/api/tasks").json()["tasks"])
    line = page.post("/api/runs/one/resume", json={"preview": True}).json()
    assert line == {"line": f"sojourn train {run.path}"}
    form = {"preset": "smoke", "settings": {"train.steps": 3}, "preview": True}
    assert page.post("/api/start", json=form).json() == {"line": "sojourn train smoke train.steps=3"}
    chats = [page.post("/api/runs/one/chat", json={"preview": True}).json()["line"] for _ in range(2)]
    assert chats[0] == chats[1] and chats[0].startswith(f"sojourn serve {run.path} --port ")
    assert len(page.get("/api/tasks").json()["tasks"]) == tasks


def test_uploads_are_whole_or_absent(home, page):
    path = page.post("/api/upload?name=../..//my data.jsonl", content=b'{"text": "x"}\n').json()["path"]
    assert Path(path) == home / "uploads" / "my-data.jsonl" and Path(path).read_bytes() == b'{"text": "x"}\n'
    assert page.post("/api/upload?name=my data.jsonl", content=b'{"text": "x"}\n').json()["path"] == path
    other = page.post("/api/upload?name=my data.jsonl", content=b"other").json()["path"]
    assert other.endswith("my-data-2.jsonl")
    assert page.post("/api/upload?name=..", content=b"x").status_code == 400
    assert sorted(one.name for one in (home / "uploads").iterdir()) == ["my-data-2.jsonl", "my-data.jsonl"]


def test_prepared_data_with_its_mask(words, home, page):
    artefact = next((home / "prepared").iterdir())
    assert page.get("/api/data").json()["artefacts"][0]["hash"] == artefact.name
    assert page.get(f"/api/data/{artefact.name}").json()["train"]["documents"]
    found = page.get(f"/api/data/{artefact.name}/examples?count=2").json()
    parts = found["examples"][0]["text_parts"]
    assert {part["trained"] for part in parts} == {True, False} and len(found["examples"]) == 2
    none = page.get(f"/api/data/{artefact.name}/examples?search=no+such+text").json()
    assert none["examples"] == [] and none["next"] is None


@pytest.mark.parametrize(
    "path",
    ["/api/runs/..%2F..%2Fetc/logs", "/api/runs/absent", "/api/data/..", "/api/data/%2e%2e%2fruns", "/page/..%2fapp.py",
     "/page/../app.py", "/api/tasks/..", "/api/tasks/%2e%2e"],
)  # fmt: skip
def test_no_file_outside_is_served(home, page, path):
    (home / "secret.txt").write_text("secret")
    answer = page.get(path)
    assert answer.status_code == 404 and "secret" not in answer.text


def test_a_log_is_one_of_the_runs_own(home, page):
    run = _write_run(home)
    (home / "secret.txt").write_text("secret")
    (run.path / "train.log").write_text("line 1\nline 2\n")
    assert page.get("/api/runs/one/logs?tail=7").json()["text"] == "line 2\n"
    assert "secret" not in page.get("/api/runs/one/logs?file=../../secret.txt").text


# -- Whom it lets in --


def test_other_web_pages_cannot_reach_it(home, page):
    assert page.get("/api/runs", headers={"host": "evil.example"}).status_code == 403
    assert page.post("/api/form", json={}, headers={"origin": "http://evil.example"}).status_code == 403
    assert page.post("/api/form", json={}, headers={HEADER: "guessed"}).status_code == 403
    assert page.post("/api/form", json={"preset": "smoke"}, headers={"origin": "http://127.0.0.1"}).status_code == 200


def test_off_this_machine_everything_but_health_needs_the_token(home):
    app = make_app(make_board(home, [], TOKEN, local=False, ask_hosts=False))
    with TestClient(app, "http://192.0.2.1:8765", follow_redirects=False) as client:
        paths = json.loads(client.get("/openapi.json", headers={"authorization": f"Bearer {TOKEN}"}).text)["paths"]
        known = {(path, method) for path, methods in paths.items() for method in methods}
        assert len(known) > 20
        for path, method in {*known, ("/", "get"), ("/page/main.js", "get"), ("/openapi.json", "get")}:
            expected = 200 if path == "/health" else 401
            assert client.request(method, path).status_code == expected, path
        assert client.get("/?token=wrong").status_code == 401
        answer = client.get(f"/?token={TOKEN}")
        assert answer.status_code == 303 and "HttpOnly; SameSite=Strict" in answer.headers["set-cookie"]
        assert client.get("/api/runs").status_code == 200  # the cookie
        assert client.post("/api/form", json={"preset": "smoke"}).status_code == 403  # which is not enough to act


# -- Actions --


def _wait(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    assert condition()


def test_a_task_outlives_the_board_and_leaves_its_output(home):
    program = "from pathlib import Path; from sojourn.board.tasks import Tasks; "
    program += "print(Tasks(Path('tasks')).start(['presets', 'list'])['id'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    tasks, task_id = Tasks(home / "tasks"), done.stdout.strip()
    _wait(lambda: tasks.get(task_id)["state"] != "running")
    task = tasks.get(task_id)
    assert (task["state"], task["code"], task["line"]) == ("done", 0, "sojourn presets list")
    text, end = tasks.output(task_id, 0)
    assert "smoke" in text and tasks.output(task_id, end) == ("", end)
    assert [one["id"] for one in tasks.list_all()] == [task_id]


def test_a_command_that_fails_says_so(home):
    tasks = Tasks(home / "tasks")
    task_id = tasks.start(["train", "no-such-run"])["id"]
    _wait(lambda: tasks.get(task_id)["state"] != "running")
    assert tasks.get(task_id)["state"] == "failed" and tasks.get(task_id)["code"] == 2
    assert "no-such-run" in tasks.output(task_id, 0)[0]


_TRAINER = """
import signal, sys, time
from pathlib import Path
from sojourn.run.folder import RunFolder
run = RunFolder(Path(sys.argv[1]))
def end(*_):
    run.set_status("stopped", 8, 40, "a signal")
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
run.set_status("running", 7, 40)
print("ready", flush=True)
time.sleep(60)
"""


def test_stop_asks_the_runs_own_process_and_waits(home):
    run = _write_run(home)
    with pytest.raises(UserError, match="does not run: it is done"):
        stop_run(run)
    trainer = subprocess.Popen([sys.executable, "-c", _TRAINER, str(run.path)], stdout=subprocess.PIPE)
    assert trainer.stdout is not None and trainer.stdout.readline() == b"ready\n"
    try:
        done = called("stop", "one")
        assert done.returncode == 0 and "one: stopped at step 8 of 40; go on: sojourn train" in done.stdout
        assert trainer.wait(10) == 3
    finally:
        trainer.kill()
        trainer.stdout.close()
    # its pid may belong to another process by now
    values = json.loads((run.path / "status.json").read_text())
    (run.path / "status.json").write_text(json.dumps({**values, "state": "running", "pid": os.getpid()}))
    with pytest.raises(UserError, match="does not run"):
        stop_run(run)
    assert signal.getsignal(signal.SIGTERM) is not None  # we are still here


def test_actions_refuse_what_makes_no_sense_in_one_line(home, page):
    _write_run(home)
    for action, body, message in (
        ("pull", {}, "is on this machine already"),
        ("move", {"to": "box"}, "is not moved"),
        ("verify", {"checkpoint": 99}, "no checkpoint of step 99"),
        ("export", {"to": "exe"}, "there are: hf"),
        ("chat", {"beside": "--evil"}, "beside: a run or a folder is needed"),
        ("chat", {"with": "x"}, "with: Extra inputs are not permitted"),
        ("explode", {}, "no action is called 'explode'"),
    ):
        answer = page.post(f"/api/runs/one/{action}", json=body)
        assert answer.status_code == 400 and message in answer.json()["error"], action
    assert page.get("/api/tasks").json() == {"tasks": []}
    for body in (b"[1]", b"{", b"[" * 100_000):
        assert page.post("/api/form", content=body).status_code == 400


# -- Report --


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_report_is_one_file_without_script(home, language):
    text = report_html(_write_run(home), language)
    assert "<svg" in text and "<script" not in text and "&lt;b&gt;2+3?&lt;/b&gt;" in text and "http" not in text
    assert ("损失" in text) == (language == "zh")


def test_report_is_a_command(home):
    _write_run(home)
    assert called("report", "one").returncode == 0 and (home / "one.html").is_file()
    wrong = called("report", "one", "--language", "fr")
    assert wrong.returncode == 2 and "allowed: en, zh" in wrong.stderr


# -- Chinese --


def _messages_of_the_board() -> list[str]:
    """What its files say to people, with X for values."""
    found = []
    files = Path(actions.__file__).parent.glob("*.py")
    for path in (path for path in files if path.name not in ("start.py", "on_box.py")):  # those speak in a terminal
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
                "UserError",
                "HTTPException",
                "RunFailed",
            ):
                found.append(_text_of(node.args[-1]))
            elif isinstance(node, ast.Return) and path.name == "guard.py" and isinstance(node.value, ast.Tuple):
                found.append(_text_of(node.value.elts[-1]))
    return [text for text in found if text.strip("X: ,.")]


def _text_of(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text_of(part) for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else "123"


def test_every_message_of_the_board_is_there_in_chinese():
    messages = _messages_of_the_board()
    assert len(messages) > 20
    for message in messages:
        chinese = in_chinese(message)
        before_command = re.split(r"sojourn (?!board 打印)|pip install", chinese)[0]
        words = set(re.findall(r"[A-Za-z]{3,}", before_command))
        assert words <= {"Host", "sojourn", "board", "launch", "name", "what", "verify"}, f"{message}: {chinese}"


def test_presets_and_notes_of_plans_are_there_in_chinese(home, page):
    known = "sojourn demo fast RTX GPU CPU LoRA QLoRA Colab Kaggle AutoDL paper_r64 pretrained_r320"
    for one in page.get("/api/catalog", headers={"accept-language": "zh"}).json()["presets"]:
        assert set(re.findall(r"[A-Za-z]{3,}\w*", one["description"])) <= set(known.split()), one
    (home / "few.txt").write_text("A few words.\n" * 50)
    forms = [{"preset": "lora-20k"}, {"preset": "smoke", "settings": {"data.sources": "few.txt"}}]
    for form in forms:
        found = page.post("/api/plan", json=form, headers={"accept-language": "zh"}).json()
        notes = [one for one in (found["assumed"], found["assumed_vocabulary"]) if one] + found["data_notes"]
        left = re.sub(r"(data|train)\.\w+|org/unknown|token", "", " ".join(notes))
        assert notes and not re.findall(r"[A-Za-z]{3,}", left), notes


def test_errors_and_notes_are_in_the_language_of_the_page(page):
    zh = {"accept-language": "zh"}
    assert page.get("/api/runs/none", headers=zh).json()["error"] == "没有名为 'none' 的训练"
    assert page.get("/api/runs/none").json()["error"] == "no run is called 'none'"
    form = {"preset": "smoke", "settings": {"train.steps": "abc"}}
    assert "1 到 1,000,000,000 的整数，或 null" in page.post("/api/form", json=form, headers=zh).json()["errors"][0]
    form = {"preset": "smoke", "settings": {"trian.lr": 1}}
    assert page.post("/api/form", json=form, headers=zh).json()["errors"][0].endswith("没有这个设置；是不是 train？")
    form = {"preset": "smoke", "settings": {"train.steps": 3, "train.epochs": 2}}
    assert page.post("/api/form", json=form, headers=zh).json()["notes"] == [
        "长度由 train.steps=3 决定；train.epochs=2 未使用"
    ]
    wrong = page.post("/api/form", json={}, headers={**zh, HEADER: "other"})
    assert wrong.status_code == 403 and "重新加载" in wrong.json()["error"]
