"""What we write is accepted by the real packages: kaggle's own client, nbformat, SkyPilot. Each is installed into an
environment of its own, since they pin versions that training does not want."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kaggle_server import KEY, USER, kaggle_server
from shared import write_chats
from sojourn.config.load import load_run
from sojourn.remote.platforms.colab import make_colab_bundle
from sojourn.remote.platforms.kaggle import KaggleRun, boot_script, kernel_metadata
from sojourn.remote.platforms.kaggle_api import KaggleApi
from sojourn.remote.platforms.skypilot import SkyOptions, make_sky_task

_KAGGLE = """
import json, sys
import kagglesdk.kaggle_env as env
env._env_to_endpoint[env.KaggleEnv.PROD] = sys.argv[1]
from kaggle.api.kaggle_api_extended import KaggleApi
api = KaggleApi()
api.authenticate()
made = api.dataset_create_new(sys.argv[2], public=False, quiet=True)
assert not made.error, made.error
pushed = api.kernels_push(sys.argv[3], timeout="43200")
assert not pushed.error and pushed.version_number == 1, pushed.error
slug = json.load(open(sys.argv[3] + "/kernel-metadata.json"))["id"]
assert api.kernels_status(slug).status.name == "QUEUED"
assert api.quota_view().gpu_quota.time_used.total_seconds() == 3 * 3600
"""


@pytest.fixture(scope="module")
def python_with(tmp_path_factory: pytest.TempPathFactory) -> object:
    """A Python of its own with one package."""
    made: dict[str, Path] = {}

    def make(*packages: str) -> Path:
        key = packages[0]
        if key not in made:
            folder = tmp_path_factory.mktemp(key)
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            pip = [str(folder / "bin" / "pip"), "install", "--quiet", *packages]
            if subprocess.run(pip, check=False, capture_output=True).returncode:
                pytest.skip(f"{key} cannot be installed here: no package index")
            made[key] = folder / "bin" / "python"
        return made[key]

    return make


def _run(python: Path, code: str, *args: str, **env: str) -> None:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [str(python), "-c", code, *args], check=False, capture_output=True, text=True, env={**clean, **env}
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_kaggles_own_client_sends_what_ours_sends(tmp_path: Path, python_with) -> None:  # type: ignore[no-untyped-def]
    python = python_with("kaggle", "six")
    run = KaggleRun("demo", USER, "sojourn-demo", 1, 12.0, 0.0)
    data, code = tmp_path / "data", tmp_path / "code"
    data.mkdir()
    code.mkdir()
    (data / "bundle.sojourn").write_bytes(b"PK" + bytes(100_000))
    facts = {"id": f"{USER}/{run.dataset}", "title": run.dataset, "licenses": [{"name": "unknown"}]}
    (data / "dataset-metadata.json").write_text(json.dumps(facts))
    (code / "kernel-metadata.json").write_text(json.dumps(kernel_metadata(run, None)))
    (code / "boot.py").write_text(boot_script(run), encoding="utf-8")
    with kaggle_server() as server:
        _run(
            python, _KAGGLE, server.url, str(data), str(code), KAGGLE_USERNAME=USER, KAGGLE_KEY=KEY, HOME=str(tmp_path)
        )
        theirs = dict(server.requests)
        server.datasets.clear()
        server.kernels.clear()
        api = KaggleApi(USER, KEY, server.url)
        api.create_dataset(run.dataset, run.dataset, [data / "bundle.sojourn"], lambda done, size: None)
        api.push_kernel(kernel_metadata(run, None), boot_script(run), 43200)
        ours = dict(server.requests)
    assert theirs["SaveKernel"] == ours["SaveKernel"] and theirs["StartBlobUpload"] == ours["StartBlobUpload"]
    assert {**theirs["CreateDataset"], "files": 0} == {**ours["CreateDataset"], "files": 0}


def test_nbformat_accepts_the_notebook(home: Path, python_with) -> None:  # type: ignore[no-untyped-def]
    write_chats(home / "my.jsonl")
    _, path = make_colab_bundle(load_run(["smoke", "data.sources=my.jsonl"]))
    _run(python_with("nbformat"), "import nbformat, sys; nbformat.validate(nbformat.read(sys.argv[1], 4))", str(path))


@pytest.mark.parametrize(
    "options",
    [
        SkyOptions(),
        SkyOptions("4090", 2, spot=False, store="s3", bucket="my-bucket", infra="k8s"),
        SkyOptions("A100 80GB", 8, infra="gcp/us-central1", store="gcs", max_hourly_cost=12.5),
    ],
)
def test_sky_accepts_the_task(home: Path, python_with, options: SkyOptions) -> None:  # type: ignore[no-untyped-def]
    write_chats(home / "my.jsonl")
    _, path = make_sky_task(load_run(["smoke", "data.sources=my.jsonl"]), options)
    code = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
assert task.run and task.setup and len(task.file_mounts) == 1 and len(task.storage_mounts) == 1, task
assert resources.use_spot == (sys.argv[2] == "True")
assert resources.job_recovery["max_restarts_on_errors"] == 3
"""
    _run(python_with("skypilot"), code, str(path), str(options.spot), HOME=str(home))
