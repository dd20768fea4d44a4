"""A run as one archive: started by Python itself on a machine without SSH, killed, started again by the same line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from shared import Shared, write_chats
from sojourn.config.load import load_run
from sojourn.errors import UserError
from sojourn.remote.box import start
from sojourn.remote.bundle import Bundle, extras_of, make_bundle
from sojourn.run.home import run_folder

RUN = (
    "smoke", "model.d_model=64", "data.vocab_size=400", "data.sources=my chats.jsonl", "data.max_length=64",
    "train.global_batch=8", "train.device=cpu", "train.precision=fp32", "train.rehearse=off", "log.tensorboard=off",
    "limits.session=off", "log.every_steps=1",
)  # fmt: skip
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the start script runs on rented Linux machines")


def _bundle(home: Path, *words: str, out: str | None = None) -> Bundle:
    write_chats(home / "my chats.jsonl")
    return make_bundle(load_run([*RUN, *words]), Path(out) if out else None)


@pytest.fixture(autouse=True)
def _prepared(home: Path, shared: Shared) -> None:
    shared.copy_prepared(home)


@pytest.fixture
def other_home(tmp_path: Path) -> Iterator[Path]:
    """The home folder of the machine without SSH; what was started there is killed at the end."""
    folder = tmp_path / "other machine"
    yield folder
    _kill_all(folder)


def _processes(home: Path) -> list[psutil.Process]:
    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if any(f"{home}/.sojourn/" in word for word in one.info["cmdline"] or ()) and one.pid != os.getpid()
    ]


def _kill_all(home: Path) -> None:
    """As when a session ends: whatever revives another process is killed too."""
    while found := _processes(home):
        for one in found:
            with suppress(psutil.Error):
                one.kill()


def _start(bundle: Path, home: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("SOJOURN_HOME", "PYTHONPATH")}
    argv = [sys.executable, str(bundle.resolve()), "--home", str(home), *flags]
    env |= {"OMP_NUM_THREADS": "1"}
    return subprocess.run(argv, check=False, capture_output=True, text=True, env=env, cwd="/", timeout=300)


def _wait_for(path: Path, pattern: str) -> None:
    while not any(path.glob(pattern)):
        time.sleep(0.02)


def _undisturbed(made: Bundle) -> Path:
    """The same run in this process."""
    import torch

    from sojourn.train.loop import train

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the bundle's process: sums in another order have other last bits
    try:
        words = [*RUN, "train.steps=120", "save.every_steps=10", f"name={made.run}"]
        train(load_run(words).config, run_folder(made.run))
    finally:
        torch.set_num_threads(threads)
    return run_folder(made.run).path


@pytest.mark.slow
@needs_linux
def test_a_bundle_that_is_killed_and_started_again_ends_with_the_weights_of_an_undisturbed_run(
    home: Path, other_home: Path
) -> None:
    made = _bundle(home, "train.steps=120", "save.every_steps=10")
    run = other_home / "runs" / made.run
    started = _start(made.path, other_home)
    assert started.returncode == 0, started.stderr
    assert "it runs on when this page is closed" in started.stdout
    _wait_for(run, "checkpoints/step-*/manifest.json")
    _kill_all(other_home)
    assert not (run / "final").exists()
    assert ": lost" in _start(made.path, other_home, "--status").stdout
    again = _start(made.path, other_home, "--foreground")
    assert again.returncode == 0 and "resum" in again.stdout, again.stdout + again.stderr
    assert "installing" not in again.stdout
    weights = "final/model.safetensors"
    assert (run / weights).read_bytes() == (_undisturbed(made) / weights).read_bytes()
    done = _start(made.path, other_home)
    assert done.returncode == 0 and ": done step 120 of 120" in done.stdout
    packed = _start(made.path, other_home, "--pack").stdout.strip().removeprefix("download ")
    assert f"{made.run}/model.safetensors" in zipfile.ZipFile(packed).namelist()


def test_the_same_run_gives_the_same_bytes_and_another_run_another_name(home: Path) -> None:
    one, two = _bundle(home), _bundle(home, out="again.zip")
    assert one.path.read_bytes() == two.path.read_bytes() and one.run == two.run
    assert _bundle(home, "limits.session=3h", "save.every=5m").run == one.run  # these do not make it another run
    other = _bundle(home, "train.lr=2e-3")
    assert other.run != one.run and other.run.startswith("smoke-")
    assert _bundle(home, "name=mine").path == Path("mine.zip")


def test_it_has_the_wheel_the_prepared_data_the_sources_and_no_path_of_this_machine(home: Path) -> None:
    made = _bundle(home)
    with zipfile.ZipFile(made.path) as archive:
        names = archive.namelist()
        settings = [archive.read(name).decode() for name in ("run.json", "spec.json", "bundle.json")]
    assert any(name.endswith("py3-none-any.whl") for name in names)
    assert any("/prepared/" in name for name in names) and any("my-chats-" in name for name in names)
    assert names.index("payload/prepared/" + str(made.artefact) + "/artefact.json") == len(names) - 1
    assert not any(str(home) in text for text in settings)
    phases = json.loads(settings[1])["phases"]
    assert [phase["name"] for phase in phases] == ["train"]
    assert set(made.parts) == {"programs", "settings", "wheel", "files", "prepared data"}


def test_secrets_are_refused_unless_allowed(home: Path) -> None:
    write_chats(home / "my chats.jsonl")
    token = "hf_" + "aB3dE5gH7jK9" * 3
    with (home / "my chats.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps({"prompt": "key?", "completion": token}))
    with pytest.raises(UserError, match="a Hugging Face token"):
        make_bundle(load_run(list(RUN)))
    assert make_bundle(load_run(list(RUN)), allow_secrets=True).path.is_file()
    assert not list(home.glob(".*.zip*"))


def test_a_damaged_bundle_is_refused_and_marks_nothing_as_complete(home: Path, tmp_path: Path) -> None:
    made = _bundle(home)
    folder = tmp_path / "unpacked"
    with zipfile.ZipFile(made.path) as archive:
        archive.extractall(folder)
    damaged = next(folder.glob("payload/prepared/*/train/tokens.bin"))
    damaged.write_bytes(bytes(len(damaged.read_bytes())))
    source = start.Source(folder / "start.py")
    with pytest.raises(start.Problem, match=r"tokens.bin: damaged in the bundle; upload it again"):
        start.unpack(source, source.read_json("bundle.json")["files"], tmp_path / "there")
    assert not list((tmp_path / "there").rglob("artefact.json")) and not list((tmp_path / "there").rglob(".tokens*"))


def test_the_home_folder_is_the_one_that_survives_on_the_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOJOURN_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drive").mkdir()
    rows = [
        {
            "env": ["ONLY_THERE=1"],
            "folders": [],
            "home": [f"{tmp_path}/none", f"{tmp_path}/drive!runs"],
            "fallback": [],
        },
        {"env": [], "folders": [str(tmp_path)], "home": [], "fallback": [str(tmp_path)]},
    ]
    assert start.find_home(rows) == tmp_path
    monkeypatch.setenv("ONLY_THERE", "1")
    assert start.find_home(rows) == tmp_path / "drive" / "runs"
    assert start.find_home([]) == tmp_path / "sojourn"
    monkeypatch.setenv("SOJOURN_HOME", "/elsewhere")
    assert start.find_home(rows) == Path("/elsewhere")


def test_no_python_with_torch_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(start.Problem, match=r"no Python 3.10 to 3.13 with torch"):
        start.find_python(str(tmp_path / "none"))


def test_extras_are_those_that_the_run_needs() -> None:
    config = load_run([*RUN, "data.clean.languages=[en]", "parallel.engine=deepspeed"]).config
    assert extras_of(config) == ["train", "clean", "deepspeed"]
