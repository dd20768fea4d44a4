"""Runs on Kaggle without a browser, against a local server that behaves as Kaggle does."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import called
from kaggle_server import KEY, TOKEN, USER, Kaggle, kaggle_server
from shared import Shared, write_chats
from sojourn.config.load import Loaded, load_run
from sojourn.errors import RunFailed, UserError
from sojourn.remote.box import kaggle_boot
from sojourn.remote.platforms import kaggle_hours
from sojourn.remote.platforms.http_api import OutcomeUnknown
from sojourn.remote.platforms.kaggle import (
    KaggleRun,
    boot_script,
    launch_kaggle,
    logs_kaggle,
    machine_shape,
    pull_kaggle,
    resume_kaggle,
    slug_of,
    status_kaggle,
)
from sojourn.remote.platforms.kaggle_api import KaggleApi, find_credentials
from sojourn.storage.files import read_json_object

HOUR = 3600.0


@pytest.fixture
def server() -> Iterator[Kaggle]:
    with kaggle_server() as kaggle:
        yield kaggle


@pytest.fixture(autouse=True)
def _prepared(home: Path, shared: Shared) -> None:
    shared.copy_prepared(home)


@pytest.fixture
def api(server: Kaggle) -> KaggleApi:
    return _api(server)


def _api(server: Kaggle, user: str | None = USER, key: str = KEY, timeout: float = 5.0) -> KaggleApi:
    return KaggleApi(user, key, server.url, sleep=lambda seconds: None, timeout=timeout)


def _loaded(home: Path, *words: str) -> Loaded:
    write_chats(home / "my.jsonl")
    small = ("data.vocab_size=400", "data.max_length=64", "train.steps=20", "name=My Run".replace(" ", "-"))
    return load_run(["smoke", "data.sources=my.jsonl", *small, *words])


def _launch(home: Path, api: KaggleApi, *words: str, **options: object) -> tuple[KaggleRun, list[str]]:
    said: list[str] = []
    run = launch_kaggle(_loaded(home, *words), api=api, say=said.append, sleep=lambda s: None, **options)  # type: ignore[arg-type]
    return run, said


def _end_session(server: Kaggle, run: KaggleRun, state: str, files: dict[str, bytes], **result: object) -> None:
    kernel = server.kernels[run.kernel]
    kernel.status = "COMPLETE"
    listed = {f"runs/{run.run}/{name}": content for name, content in files.items()}
    facts = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in listed.items()}
    values = {"run": run.run, "state": state, "message": "", "seconds": 7200.0, "files": facts, **result}
    kernel.outputs = {**listed, kaggle_boot.RESULT: json.dumps(values).encode()}


def test_a_run_is_uploaded_pushed_followed_and_brought_home(home: Path, server: Kaggle, api: KaggleApi) -> None:
    run, said = _launch(home, api)
    assert (run.kernel, run.dataset) == ("sojourn-my-run-s1", "sojourn-my-run-code")
    body = server.bodies("SaveKernel")[0]
    assert body["datasetDataSources"] == [f"{USER}/{run.dataset}"] and "kernelDataSources" not in body
    assert body["isPrivate"] and body["enableGpu"] and body["machineShape"] == "NvidiaTeslaT4"
    assert body["sessionTimeoutSeconds"] == 12 * HOUR and 'RUN = "My-Run"' in body["text"]
    assert bytes(server.blobs["blob0"])[:2] == b"PK" and len(server.blobs["blob0"]) == server.sizes["blob0"]
    assert any("blobs received" in line for line in said)
    assert status_kaggle(run.run, api=api).state == "queued"
    server.kernels[run.kernel].status, server.kernels[run.kernel].log = "RUNNING", ["step 1\n", "step 2\n"]
    assert status_kaggle(run.run, api=api).state == "running"
    assert "".join(logs_kaggle(run.run, api=api)) == "step 1\nstep 2\n"
    with pytest.raises(UserError, match="Kaggle gives its outputs when it has ended"):
        pull_kaggle(run.run, api=api)
    with pytest.raises(UserError, match="is running on Kaggle already"):
        resume_kaggle(run.run, api=api)
    _end_session(server, run, "done", {"final/model.safetensors": b"w" * 100_000, "status.json": b"{}", "a b": b""})
    report = status_kaggle(run.run, api=api)
    assert (report.state, report.hours) == ("done", 2.0)
    folder = pull_kaggle(run.run, api=api, say=print)
    assert folder == home / "runs" / "My-Run" and (folder / "final/model.safetensors").stat().st_size == 100_000
    assert kaggle_hours.used_hours(run.started + 1) == pytest.approx(2.0, abs=0.01)
    with pytest.raises(UserError, match="is done on Kaggle"):
        resume_kaggle(run.run, api=api)


def test_the_next_session_reads_the_outputs_of_the_one_before(home: Path, server: Kaggle, api: KaggleApi) -> None:
    run, _ = _launch(home, api)
    _end_session(server, run, "stopped", {"status.json": b"{}"})
    second = resume_kaggle(run.run, api=api)
    assert second.kernel == "sojourn-my-run-s2"
    assert server.kernels[second.kernel].request["kernelDataSources"] == [f"{USER}/sojourn-my-run-s1"]
    _end_session(server, second, "stopped", {})
    third, _ = _launch(home, api)  # the launch typed again is a resume, too, with the data set's next version
    assert third.session == 3 and server.datasets[third.dataset]["versions"] == 2


@pytest.mark.parametrize("fault", [429, "break", *(pytest.param(code, marks=pytest.mark.slow) for code in (500, 503))])
def test_a_busy_or_broken_server_is_asked_again(home: Path, server: Kaggle, api: KaggleApi, fault: object) -> None:
    server.faults = {name: [fault] for name in ("GetDatasetStatus", "StartBlobUpload", "GetAcceleratorQuotaStatistics")}
    server.faults["upload"] = ["break", 503]
    run, _ = _launch(home, api)
    assert len(server.blobs["blob0"]) == server.sizes["blob0"]
    server.kernels[run.kernel].status, server.kernels[run.kernel].log = "RUNNING", [f"{i}\n" for i in range(20)]
    server.faults = {"logs": [500], "stream": ["break"]}
    assert "".join(logs_kaggle(run.run, follow=True, api=api)) == "".join(f"{i}\n" for i in range(20))
    _end_session(server, run, "done", {"final/model.safetensors": bytes(range(256)) * 999})
    server.faults = {"download": [None, "break", "break"]}
    pulled = pull_kaggle(run.run, api=api)
    assert (pulled / "final/model.safetensors").read_bytes() == bytes(range(256)) * 999


def test_a_push_without_an_answer_is_looked_for_and_not_repeated(home: Path, server: Kaggle) -> None:
    api = _api(server, timeout=0.3)
    run, _ = _launch(home, api)
    _end_session(server, run, "stopped", {})
    server.faults["SaveKernel"] = ["hang"]
    with pytest.raises(OutcomeUnknown):  # it never arrived
        resume_kaggle(run.run, api=api)
    assert len(server.bodies("SaveKernel")) == 1
    assert kaggle_hours.used_hours(run.started + 1) == pytest.approx(2.0, abs=0.01)
    assert resume_kaggle(run.run, api=api).session == 2


def test_a_wrong_token_says_where_to_make_one(home: Path, server: Kaggle) -> None:
    with pytest.raises(
        UserError, match=r"the token was refused; make one at https://www.kaggle.com/settings"
    ) as refused:
        _api(server, key="wrong-key-1234").quota()
    assert "wrong-key-1234" not in str(refused.value)
    with pytest.raises(UserError, match="not valid or has expired"):
        _api(server, None, "KGAT_wrong")
    assert _api(server, None, TOKEN).user == USER


def test_the_weekly_quota_shortens_a_session_or_refuses_it(home: Path, server: Kaggle, api: KaggleApi) -> None:
    server.quota = (25.0, 30.0)
    run, said = _launch(home, api, expected_hours=20.0)
    assert run.hours == pytest.approx(5.0) and any("more than is left" in line for line in said)
    config = json.loads(_bundled(server, "run.json"))
    assert config["limits"]["session"] == "4h50m"
    server.quota = (30.0, 30.0)
    _end_session(server, run, "stopped", {})
    with pytest.raises(UserError, match=r"30.0 of 30 GPU hours of this week are used \(by Kaggle's count\)"):
        resume_kaggle(run.run, api=api)
    server.quota = None  # an account whose count is not known: ours
    kaggle_hours.record("another", 29.0, run.started)
    with pytest.raises(UserError, match="by this machine's count"):
        resume_kaggle(run.run, api=api)


def _bundled(server: Kaggle, name: str) -> bytes:
    import io
    import zipfile

    return zipfile.ZipFile(io.BytesIO(bytes(server.blobs["blob0"]))).read(name)


def test_a_quota_that_runs_out_between_question_and_push_is_kaggles_own_word(
    home: Path, server: Kaggle, api: KaggleApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "quota", lambda: None)
    server.quota = (30.0, 30.0)
    with pytest.raises(RunFailed, match=r"Maximum weekly GPU quota of 30.00 hours reached"):
        _launch(home, api)
    assert read_json_object(kaggle_hours.hours_file())["sessions"][0]["hours"] == 0


def test_weeks_start_on_saturday_and_sessions_count_from_there() -> None:
    saturday = 1_793_404_800.0  # 2026-10-31, 00:00 UTC
    assert kaggle_hours.week_start(saturday + 5 * 24 * HOUR) == saturday
    assert kaggle_hours.week_start(saturday - 1) == saturday - 7 * 24 * HOUR


def test_a_session_over_the_weekend_counts_the_part_of_this_week(home: Path) -> None:
    saturday = 1_793_404_800.0
    kaggle_hours.record("x", 10.0, saturday - 4 * HOUR)
    assert kaggle_hours.used_hours(saturday + HOUR) == pytest.approx(6.0)


def test_a_dataset_that_fails_and_one_that_is_slow(home: Path, server: Kaggle, api: KaggleApi) -> None:
    server.dataset_polls = 40
    run, said = _launch(home, api)
    assert sum("data set is" in line for line in said) == 1
    server.datasets[run.dataset]["failed"] = True
    _end_session(server, run, "stopped", {})
    with pytest.raises(RunFailed, match="is failed"):
        _launch(home, api)


def test_outputs_that_are_damaged_missing_or_elsewhere_are_refused(home: Path, server: Kaggle, api: KaggleApi) -> None:
    run, _ = _launch(home, api)
    _end_session(server, run, "done", {"final/a": b"good"})
    outputs = server.kernels[run.kernel].outputs
    outputs["runs/My-Run/final/a"] = b"evil"
    with pytest.raises(RunFailed, match="did not arrive whole"):
        pull_kaggle(run.run, api=api)
    assert not (home / "runs" / "My-Run" / "final" / "a").exists()
    del outputs["runs/My-Run/final/a"]
    with pytest.raises(RunFailed, match="1 outputs of sojourn-my-run-s1 are missing"):
        pull_kaggle(run.run, api=api)
    _end_session(server, run, "done", {"../../../evil": b"x"})
    with pytest.raises(RunFailed, match="which is not a file of My-Run"):
        pull_kaggle(run.run, api=api)
    server.kernels[run.kernel].outputs = {}
    with pytest.raises(RunFailed, match="did not end by itself"):
        pull_kaggle(run.run, api=api)
    assert status_kaggle(run.run, api=api).state == "failed"


def test_p100_is_refused_with_the_reason_and_t4_is_two_of_them() -> None:
    with pytest.raises(UserError, match="no kernels for it"):
        machine_shape("P100")
    with pytest.raises(UserError, match="use --gpu T4"):
        machine_shape("H100")
    assert {machine_shape(word) for word in ("T4", "t4x2", "NvidiaTeslaT4", "2x T4")} == {"NvidiaTeslaT4"}


@pytest.mark.parametrize("run", ["a", "Qwen2.5-7B_qlora", "x" * 200, "中文-run", "--odd--"])
def test_slugs_are_as_kaggle_wants_them(run: str) -> None:
    slug = slug_of(run)
    assert 6 <= len(f"{slug}-code") <= 50 and slug.strip("-") == slug and slug == slug.lower()


def test_credentials_are_found_where_kaggles_own_client_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KAGGLE_API_TOKEN", "SOJOURN_KAGGLE_API_TOKEN", "KAGGLE_USERNAME", "KAGGLE_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SOJOURN_CONFIG", str(tmp_path / "config"))
    with pytest.raises(UserError, match="kaggle: no token"):
        find_credentials()
    (tmp_path / ".kaggle").mkdir()
    (tmp_path / ".kaggle" / "kaggle.json").write_text(json.dumps({"username": USER, "key": KEY}))
    assert find_credentials() == (USER, KEY)
    monkeypatch.setenv("KAGGLE_API_TOKEN", TOKEN)
    assert find_credentials() == (None, TOKEN)


def test_the_boot_script_continues_from_an_earlier_session_and_lists_its_files(tmp_path: Path) -> None:
    """With a bundle that only says how it was called."""
    run = KaggleRun("demo", USER, "sojourn-demo", 2, 12.0, 0.0)
    (tmp_path / "boot.py").write_text(boot_script(run), encoding="utf-8")
    earlier = tmp_path / "input" / "kernels" / "sojourn-demo-s1" / "runs" / "demo"
    (earlier / "checkpoints").mkdir(parents=True)
    (earlier / "identity.json").write_text("{}")
    bundle = tmp_path / "input" / "datasets" / "bundle.sojourn"
    bundle.parent.mkdir(parents=True)
    calls = "import sys, pathlib\npathlib.Path(sys.argv[2], 'runs/demo/called').write_text(' '.join(sys.argv[3:]))"
    bundle.write_text(f"{calls}\nsys.exit(3)")
    env = {name: str(tmp_path / name.rpartition("_")[2].lower())
           for name in ("SOJOURN_KAGGLE_INPUT", "SOJOURN_KAGGLE_WORKING", "SOJOURN_KAGGLE_HOME")}  # fmt: skip
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "boot.py")],
        check=False,
        env={**env, "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    working = tmp_path / "working"
    assert (working / "runs/demo/called").read_text() == "--foreground --minutes 713.0"
    result = json.loads((working / kaggle_boot.RESULT).read_text())
    assert result["state"] == "stopped"
    assert set(result["files"]) == {"runs/demo/called", "runs/demo/identity.json"}
    assert sorted(path.name for path in working.iterdir()) == ["runs", kaggle_boot.RESULT]


def test_the_verbs_know_runs_on_kaggle(home: Path, server: Kaggle, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SOJOURN_KAGGLE_URL", server.url), ("KAGGLE_USERNAME", USER), ("KAGGLE_KEY", KEY)):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SOJOURN_CONFIG", str(home / "config"))
    write_chats(home / "my.jsonl")
    words = ("data.vocab_size=400", "data.max_length=64", "train.steps=20", "name=verbs")
    done = called("launch", "smoke", "--train_file", "my.jsonl", *words, "--on", "kaggle", "--budget", "¥5")
    assert done.returncode == 0, done.stderr
    assert "note: --budget is not used on kaggle" in done.stdout and "verbs is on Kaggle" in done.stdout
    listed = called("runs")
    assert "verbs" in listed.stdout and "kaggle" in listed.stdout
    assert called("launch", "smoke", "--on", "kaggle,box").returncode == 2
    assert "the session is" in called("pull", "verbs").stderr
