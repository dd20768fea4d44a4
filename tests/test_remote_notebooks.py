"""A run as a Colab notebook and as a SkyPilot task. The real nbformat and sky are asked where they are installed; else
what is written is compared with keys recorded from nbformat 5.11 and SkyPilot 0.14.1."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from conftest import called
from shared import Shared, write_chats
from sojourn.config.load import Loaded, load_run
from sojourn.config.yaml_file import read_yaml
from sojourn.errors import UserError
from sojourn.remote.platforms.colab import DRIVE, MIRROR, cli_lines, make_colab_bundle
from sojourn.remote.platforms.skypilot import MIRROR as BUCKET
from sojourn.remote.platforms.skypilot import SkyOptions, bucket_name, make_sky_task, sky_gpu, task_config

TASK_KEYS = {
    "api_server_access", "config", "envs", "event_callback", "file_mounts", "file_mounts_mapping", "inputs",
    "managed_secrets", "name", "num_nodes", "outputs", "pool", "resources", "run", "secrets", "service", "setup",
    "volume_mounts", "volumes", "workdir",
}  # fmt: skip
RESOURCE_KEYS = {
    "accelerator_args", "accelerators", "any_of", "autostop", "cloud", "cpus", "disk_size", "disk_tier",
    "ephemeral_storage", "image_id", "infra", "instance_type", "job_recovery", "labels", "local_disk",
    "max_hourly_cost", "memory", "network_tier", "ordered", "ports", "priority", "priority_class", "region", "use_spot",
    "volumes", "zone",
}  # fmt: skip
STORAGE_KEYS = {"config", "mode", "name", "persistent", "source", "store", "type"}


@pytest.fixture(autouse=True)
def _prepared(home: Path, shared: Shared) -> None:
    shared.copy_prepared(home)


def _loaded(home: Path, *words: str) -> Loaded:
    write_chats(home / "my.jsonl")
    return load_run(["smoke", "data.sources=my.jsonl", "data.vocab_size=400", "data.max_length=64", *words])


def _python(cell: dict[str, Any]) -> str:
    """A cell without the lines that are IPython's."""
    return re.sub(r"^!.*$", "pass", "".join(cell["source"]), flags=re.MULTILINE)


def test_the_notebook_is_valid_and_mounts_runs_and_flushes(home: Path) -> None:
    made, path = make_colab_bundle(_loaded(home))
    notebook = json.loads(path.read_text(encoding="utf-8"))
    if importlib.util.find_spec("nbformat"):
        import nbformat

        nbformat.validate(nbformat.from_dict(notebook))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(
        {"source", "outputs", "execution_count", "metadata", "id"} == cell.keys() - {"cell_type"} for cell in code
    )
    for cell in code:
        ast.parse(_python(cell))
    text = "\n".join("".join(cell["source"]) for cell in code)
    order = [
        "drive.mount",
        f"!python /content/{made.path.name} --home",
        "--pack",
        "drive.flush_and_unmount",
        "unassign",
    ]
    assert [text.index(word) for word in order] == sorted(text.index(word) for word in order)
    assert made.config.save.mirror == MIRROR and MIRROR.startswith(DRIVE)
    assert "HF_TOKEN" not in text  # nothing of this run is on the hub


def test_the_same_run_gives_the_same_notebook_and_a_hub_model_asks_for_a_token(home: Path) -> None:
    _, path = make_colab_bundle(_loaded(home))
    before = path.read_bytes()
    _, again = make_colab_bundle(_loaded(home))
    assert again.read_bytes() == before
    loaded = load_run(["model.base=Qwen/Qwen2.5-0.5B", f"data.sources={write_chats(home / 'my.jsonl')}"])
    _, path = make_colab_bundle(loaded)
    assert "HF_TOKEN" in path.read_text(encoding="utf-8")


def test_a_mirror_that_colab_does_not_have_is_refused(home: Path) -> None:
    with pytest.raises(UserError, match="on Colab it is /content/drive/MyDrive"):
        make_colab_bundle(_loaded(home, "save.mirror=/root/autodl-fs"))
    assert make_colab_bundle(_loaded(home, "save.mirror=hub:me/run"))[0].config.save.mirror == "hub:me/run"


def test_an_unknown_gpu_is_refused_since_colabs_command_line_would_make_an_a100_of_it(home: Path) -> None:
    made, _ = make_colab_bundle(_loaded(home))
    assert cli_lines(made)[0] == f"colab new -s {made.run} --gpu T4"
    assert not any("--foreground" in line for line in cli_lines(made))  # silence ends `colab exec`
    with pytest.raises(UserError, match="no GPU “V100”"):
        cli_lines(made, "V100")


def test_the_task_brings_the_bundle_mounts_the_mirror_and_recovers(home: Path) -> None:
    made, path = make_sky_task(_loaded(home), SkyOptions("4090", 2, store="S3", infra="k8s"))
    task, _ = read_yaml(path)
    assert task == task_config(made, SkyOptions("4090", 2, store="S3", infra="k8s"))
    assert task["resources"]["accelerators"] == "RTX4090:2" and task["resources"]["use_spot"] is True
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 3}
    mirror = task["file_mounts"][BUCKET]
    assert (mirror["mode"], mirror["store"], mirror["persistent"]) == ("MOUNT", "s3", True)
    assert made.config.save.mirror == BUCKET and made.config.parallel.gpus == "all"
    bundle = next(key for key in task["file_mounts"] if key.endswith(".zip"))
    assert f"{bundle} --home ~/sojourn --install" in task["setup"] and "--train" in task["run"]
    assert Path(task["file_mounts"][bundle]) == made.path.resolve()


def test_sky_accepts_the_task(home: Path) -> None:
    made, path = make_sky_task(_loaded(home), SkyOptions(max_hourly_cost=2.5, infra="aws/us-east-1"))
    task, _ = read_yaml(path)
    if importlib.util.find_spec("sky"):
        import sky

        sky.Task.from_yaml_config(task)
        return
    assert task.keys() <= TASK_KEYS and task["resources"].keys() <= RESOURCE_KEYS
    assert task["file_mounts"][BUCKET].keys() <= STORAGE_KEYS
    assert made.run in task["name"]


def test_names_of_gpus_and_buckets() -> None:
    assert [sky_gpu(word) for word in ("A100 80GB", "A100", "H100", "T4", "RTX 3090", "L40S", "MI300X")] == [
        "A100-80GB", "A100", "H100", "T4", "RTX3090", "L40S", "MI300X",
    ]  # fmt: skip
    assert bucket_name("run") == bucket_name("run") and len(bucket_name("x" * 99)) <= 63
    for options in (SkyOptions(bucket="No Bucket"), SkyOptions(store="floppy"), SkyOptions(count=0)):
        with pytest.raises(UserError, match=r"^sky: "):
            options.check()
    with pytest.raises(UserError, match="is no name of a GPU"):
        sky_gpu("; rm -rf /")


def test_a_mirror_on_the_hub_needs_no_bucket(home: Path) -> None:
    made, path = make_sky_task(_loaded(home, "save.mirror=hub:me/run"), SkyOptions())
    assert list(read_yaml(path)[0]["file_mounts"].values()) == [str(made.path.resolve())]
    with pytest.raises(UserError, match="on SkyPilot it is a bucket"):
        make_sky_task(_loaded(home, "save.mirror=/mnt/x"), SkyOptions())


def test_launch_on_sky_writes_the_task(home: Path) -> None:
    done = called("launch", "smoke", "name=on-sky", "--on", "sky", "--gpu", "A100:2", "--to-yaml", "task.yaml")
    assert done.returncode == 0, done.stderr
    assert "A100:2" in (home / "task.yaml").read_text(encoding="utf-8")
    wrong = called("launch", "smoke", "--on", "sky", "--gpu", "A100:many", "--to-yaml", "task.yaml")
    assert wrong.returncode == 2 and "such as A100:2" in wrong.stderr
