"""Curves elsewhere: the real packages, offline; what they write is read back from their files."""

import importlib.util
import json
import os
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sojourn.config.load import load_run
from sojourn.errors import Stopped, UserError
from sojourn.run.folder import RunFolder
from sojourn.storage.files import read_json_lines
from sojourn.train.metrics.meters import EvalScores, Meters, MfuInputs

Curve = dict[tuple[str, int], float]
SERVICES = ("wandb", "swanlab", "mlflow", "trackio")


@pytest.fixture
def run(home: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of somebody who is logged in nowhere."""
    for name in list(os.environ):
        if name.startswith(("WANDB_", "SWANLAB_", "MLFLOW_", "TRACKIO_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    folder = RunFolder(home / "runs" / "t")
    folder.path.mkdir(parents=True)
    return folder


def _config(*trackers: str):
    words = ["smoke", "name=t", "train.device=cpu", "log.tensorboard=off", "log.project=p", "train.lr=0.125"]
    return load_run([*words, f"log.trackers=[{','.join(trackers)}]"]).config


def _train(run: RunFolder, tracker: str, losses: list[float], first: int = 0) -> None:
    with Meters(run, _config(tracker), 10, first, MfuInputs()) as meters:
        for step, loss in enumerate(losses, first + 1):
            meters.count_step(10, 0.0)
            meters.log(step, loss, 0.125, 1.0, 0.1, 100, spent=None)
        meters.log_eval(step, EvalScores(1.5, 4.5, 0.4))
        meters.log_samples(step, [("Hello", f"World {step}")])


def _records(path: Path) -> Iterator[bytes]:
    """wandb and swanlab both write LevelDB's log format after a header of seven bytes."""
    data, at, whole, block = path.read_bytes(), 7, b"", 32768
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def _read_wandb(run: RunFolder) -> tuple[Curve, set[str], dict[str, str]]:
    from wandb.proto.wandb_internal_pb2 import Record

    curve, ids, settings = {}, set(), {}
    for path in sorted(run.logs.glob("wandb/offline-run-*/*.wandb")):
        for data in _records(path):
            record = Record.FromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
                settings |= {item.key: item.value_json for item in record.run.config.update}
            if record.HasField("history"):
                row = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
                curve |= {(name, row["step"]): value for name, value in row.items() if not name.startswith("_")}
    return curve, ids, settings


def _read_swanlab(run: RunFolder) -> tuple[Curve, set[str], dict[str, str]]:
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    curve, ids, settings = {}, set(), {}
    for path in sorted(run.logs.glob("swanlab/run-*/*.swanlab")):
        for data in _records(path):
            record = Record.FromString(data)
            if record.HasField("start"):
                ids.add(record.start.id)
            if record.HasField("scalar"):
                curve[record.scalar.key, record.scalar.step] = record.scalar.value.number
        kept = yaml.safe_load((path.parent / "files" / "config.yaml").read_text())
        settings |= {key: str(entry["value"]) for key, entry in kept.items()}
    return curve, ids, settings


def _read_mlflow(run: RunFolder) -> tuple[Curve, set[str], dict[str, str]]:
    from mlflow import MlflowClient

    database = run.logs / "mlflow" / "mlflow.db"
    client = MlflowClient(f"sqlite:///{database}" if database.exists() else (run.logs / "mlflow/mlruns").as_uri())
    found = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    curve = {
        (name, point.step): point.value
        for one in found
        for name in one.data.metrics
        for point in client.get_metric_history(one.info.run_id, name)
    }
    return curve, {one.info.run_id for one in found}, found[0].data.params


def _read_trackio(run: RunFolder) -> tuple[Curve, set[str], dict[str, str]]:
    with sqlite3.connect(run.logs / "trackio" / "p.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        (settings,) = database.execute("SELECT config FROM configs").fetchone()
    curve = {(name, step): value for _, step, found in rows for name, value in json.loads(found).items()}
    return curve, {name for name, _, _ in rows}, {key: str(value) for key, value in json.loads(settings).items()}


def _read(tracker: str, run: RunFolder) -> tuple[Curve, set[str], dict[str, str]]:
    """Services write beside us, and may be a moment late."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with suppress(Exception):  # half a record
            found = READ[tracker](run)
            if ("eval/loss", 4) in found[0] and ("train/loss", 3) in found[0]:
                return found
        time.sleep(0.05)
    return READ[tracker](run)


READ = {"wandb": _read_wandb, "swanlab": _read_swanlab, "mlflow": _read_mlflow, "trackio": _read_trackio}


@pytest.mark.parametrize("tracker", SERVICES)
def test_values_reach_the_service_and_a_continued_run_is_the_same_one_there(tracker, run, home, capfd):
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")
    _train(run, tracker, [4.0, 3.0])
    _train(run, tracker, [2.5, 2.0], first=2)
    curve, ids, settings = _read(tracker, run)
    assert [curve["train/loss", step] for step in (1, 2, 3, 4)] == [4.0, 3.0, 2.5, 2.0]
    assert curve["train/lr", 4] == 0.125 and curve["eval/perplexity", 4] == 4.5
    assert len(ids) == 1 and settings["train.lr"] == "0.125"
    assert not run.events.exists(), "nothing failed"
    strangers = {path.name for path in home.iterdir()} - {"runs"}
    assert not strangers & {"wandb", "swanlog", "mlruns", "mlflow.db"}, "nothing is left in the working folder"
    said = capfd.readouterr().out
    if tracker in ("wandb", "swanlab"):
        assert f"{tracker}: not logged in; to upload later: {tracker} login; {tracker} sync" in said


def test_a_service_that_refuses_is_reported_once_and_the_run_goes_on(run, monkeypatch, capsys):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "no such key")
    _train(run, "wandb", [4.0, 3.0, 2.0])
    assert [line["loss"] for line in run.read_metrics() if line["kind"] == "train"] == [4.0, 3.0, 2.0]
    (event,) = read_json_lines(run.events)
    assert (event["kind"], event["tracker"]) == ("tracker_failed", "wandb")
    assert capsys.readouterr().out.count("warning: wandb: AuthenticationError") == 1


SILENT = """
import os, socket, sys
from pathlib import Path

server = socket.socket()
server.bind(("127.0.0.1", 0))
server.listen()
os.environ |= {"WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}", "WANDB_API_KEY": 40 * "a"}
sys.path.insert(0, sys.argv[1])
from sojourn.run.folder import RunFolder
from sojourn.train.metrics import tracker_backends
from sojourn.train.metrics import trackers
from test_trackers import _train

tracker_backends.CLOSE_TIMEOUT = trackers.CLOSE_TIMEOUT = 0.5
_train(RunFolder(Path(sys.argv[2])), "wandb", [4.0, 3.0])
"""


def test_a_service_that_never_answers_holds_up_neither_the_run_nor_its_end(run):
    pytest.importorskip("wandb")
    command = [sys.executable, "-c", SILENT, str(Path(__file__).parent), str(run.path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert [line["loss"] for line in run.read_metrics() if line["kind"] == "train"] == [4.0, 3.0]
    assert "it did not finish within 0.5 s; training continues" in ended.stdout


@pytest.mark.parametrize(("error", "state"), [(Stopped, "ABORTED"), (RuntimeError, "CRASHED")])
def test_the_service_learns_how_the_run_ended(error, state, run):
    pytest.importorskip("swanlab")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.proto.swanlab.run.v1.run_pb2 import RunState

    with pytest.raises(error), Meters(run, _config("swanlab"), 10, 0, MfuInputs()):
        raise error("over")
    (path,) = run.logs.glob("swanlab/run-*/*.swanlab")
    ends = [record.finish.state for record in map(Record.FromString, _records(path)) if record.HasField("finish")]
    assert [RunState.Name(end) for end in ends] == [f"RUN_STATE_{state}"]


def test_a_tracker_that_is_not_installed_is_reported_before_training(run):
    missing = next((name for name in SERVICES if importlib.util.find_spec(name) is None), None)
    if missing is None:
        pytest.skip("every tracker is installed here")
    with pytest.raises(UserError, match=f"log.trackers: {missing} is not installed; pip install {missing}"):
        Meters(run, _config(missing), 10, 0, MfuInputs())
    assert not run.metrics.exists()


def test_a_run_without_trackers_has_no_identity_elsewhere(run):
    with Meters(run, _config(), 10, 0, MfuInputs()) as meters:
        meters.count_step(10, 0.0)
        meters.log(1, 4.0, 0.1, 1.0, 0.1, 100, spent=None)
    assert not (run.path / "trackers.json").exists()
