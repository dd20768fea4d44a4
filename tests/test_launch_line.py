"""The printed commands: torchrun, bash and YAML read them as they were meant, and a wrong run prints none."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from conftest import called, sojourn
from sojourn.config.load import load_run
from sojourn.errors import UserError
from sojourn.launch.command_lines import Launch, check_launch, refuse_secrets, shell_commands, slurm_script
from sojourn.launch.kubernetes import pytorchjob, trainjob

WORDS = ("small", "data.sources=/my data/it's $(here).txt", "--lr", "1e-4", "train.global_batch=64")
TWO = Launch("small", WORDS, nodes=2, gpus=4, master="10.0.0.1", image="registry/sojourn:1")


def as_torchrun_reads_it(line: str) -> Namespace:
    from torch.distributed.run import parse_args

    program, *rest = [word for word in shlex.split(line) if not word.startswith("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=")]
    assert program == "torchrun"
    return parse_args(rest)


def printed(*words: str) -> str:
    said = called("launch-line", *words)
    assert said.returncode == 0, said.stderr
    return said.stdout


def refused(*words: str) -> str:
    """The one line of an error; nothing may be printed beside it that one could paste."""
    said = called("launch-line", *words)
    assert said.returncode == 2 and said.stdout == "" and len(said.stderr.splitlines()) == 1, said
    return said.stderr


def test_one_line_serves_every_machine_and_torchrun_understands_it() -> None:
    read = as_torchrun_reads_it(shell_commands(TWO)["every"])
    assert (read.nnodes, read.nproc_per_node, read.max_restarts) == ("2", "4", 3)
    assert (read.rdzv_backend, read.rdzv_id, read.rdzv_endpoint) == ("c10d", "small", "10.0.0.1:29500")
    assert read.module and read.training_script == "sojourn"
    assert read.training_script_args == ["train", *WORDS]


_WORKER = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
here = Path(sys.argv[1])
(here / f"{os.environ['GROUP_RANK']}.part").write_text(str(os.getpid()))
(here / f"{os.environ['GROUP_RANK']}.part").rename(here / f"up-{os.getppid()}")
while True:  # the first one says when it is over
    over = torch.tensor(float((here / "over").exists()))
    dist.broadcast(over, 0)
    if over:
        break
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_machine_that_was_lost_comes_back_with_the_same_line(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    line = shell_commands(Launch("r", (), 2, 1, "localhost", port))["every"]
    line = f"{line.partition(' -m sojourn')[0]} worker.py {shlex.quote(str(tmp_path))}"
    (tmp_path / "worker.py").write_text(_WORKER)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    machines: list[subprocess.Popen[bytes]] = []

    def start() -> Path:
        machines.append(
            subprocess.Popen(
                ["bash", "-c", f"export {line.replace(' ', '; exec ', 1)}"],
                cwd=tmp_path,
                env={**os.environ, "PATH": path},
            )
        )
        return tmp_path / f"up-{machines[-1].pid}"

    def wait_for(sign: Path) -> int:
        until = time.monotonic() + 90
        while not sign.exists():
            assert time.monotonic() < until and machines[0].poll() is None, "the machines did not meet"
            time.sleep(0.05)
        return int(sign.read_text())

    try:
        first = start()
        until = time.monotonic() + 60
        while socket.socket().connect_ex(("localhost", port)):  # the first one keeps the rendezvous
            assert time.monotonic() < until
            time.sleep(0.1)
        second = start()
        worker, _ = wait_for(second), wait_for(first)
        first.unlink()
        for process in (machines[1].pid, worker):
            os.kill(process, signal.SIGKILL)
        third = start()
        wait_for(third), wait_for(first)
        (tmp_path / "over").touch()
        assert (machines[0].wait(60), machines[2].wait(60)) == (0, 0)
    finally:
        for machine in machines:
            if machine.poll() is None:
                machine.terminate()
                machine.wait(60)


def test_the_group_is_checked_by_the_doctor_without_restarts() -> None:
    read = as_torchrun_reads_it(shell_commands(TWO)["check"])
    assert (read.nnodes, read.rdzv_endpoint, read.max_restarts) == ("2", "10.0.0.1:29500", 0)
    assert (read.training_script, read.training_script_args) == ("sojourn", ["doctor"])


def test_the_guides_way_has_a_line_for_each_machine() -> None:
    lines = [as_torchrun_reads_it(line) for line in shell_commands(TWO)["by_rank"]]
    assert [read.node_rank for read in lines] == [0, 1]
    assert {(read.nnodes, read.master_addr, read.master_port) for read in lines} == {("2", "10.0.0.1", 29500)}
    assert all(read.training_script_args == ["train", *WORDS] for read in lines)


def test_the_command_prints_lines_that_can_be_pasted(home: Path) -> None:
    said = printed(*WORDS, "--nodes", "3", "--gpus-per-node", "2", "--master", "node-a", "--port", "1234")
    lines = [line for line in said.splitlines() if line and not line.startswith("#")]
    assert len(lines) == 1 + 3 + 1 + 3
    read = as_torchrun_reads_it(lines[4])
    assert (read.nnodes, read.nproc_per_node, read.rdzv_endpoint) == ("3", "2", "node-a:1234")
    assert load_run(read.training_script_args[1:]).config == load_run(list(WORDS)).config


def test_one_machine_needs_no_launcher(home: Path) -> None:
    assert printed("small", "--nodes", "1") == "sojourn train small --gpus all\n"
    assert printed("small", "--nodes", "1", "--gpus-per-node", "2") == "sojourn train small --gpus 0,1\n"
    assert printed("small", "--nodes", "1", "--gpus", "1") == "sojourn train small --gpus 1\n"


def test_json_has_the_same_lines(home: Path) -> None:
    said = json.loads(printed(*WORDS, "--gpus-per-node", "4", "--master", "10.0.0.1", "--json"))
    assert (said["run"], said["nodes"], said["gpus_per_node"]) == ("small", 2, 4)
    assert said["shell"] == shell_commands(TWO)


def test_a_fork_is_named_and_handed_on(home: Path) -> None:
    said = json.loads(printed("small", "--fork", "second", "--gpus-per-node", "1", "--master", "a", "--json"))
    read = as_torchrun_reads_it(said["shell"]["every"])
    assert read.rdzv_id == "second" and read.training_script_args[-2:] == ["--fork", "second"]


def test_auto_is_what_the_driver_sees_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from sojourn.cli import launch_line
    from sojourn.machine import gpus

    monkeypatch.setattr(gpus, "driver_gpus", lambda: [object()] * 3)
    assert launch_line._count_gpus("auto") == 3
    monkeypatch.setattr(gpus, "driver_gpus", list)
    assert launch_line._count_gpus("auto") == 1


def directives(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH ")]
    return {line.partition("=")[0]: line.partition("=")[2] for line in lines}


def test_the_sbatch_script_asks_for_the_machines_and_gets_a_signal_before_the_end() -> None:
    script = slurm_script(TWO)
    asked = directives(script)
    assert script.startswith("#!/bin/bash\n")
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-node"]) == ("2", "1", "4")
    assert "requeue" in asked
    told, _, seconds = asked["signal"].partition("@")
    assert told == "B:TERM" and int(seconds) >= TWO.grace + 60
    longer = directives(slurm_script(Launch("r", WORDS, 2, 4, grace=600)))["signal"]
    assert int(longer.partition("@")[2]) >= 660


_SLURM = {
    "scontrol": 'echo "scontrol $*" >> calls; if [ "$1" = show ]; then printf "n7\\nn8\\n"; fi',
    "scancel": 'echo "scancel $*" >> calls; kill "$(cat srun.pid)"',
    "squeue": "cat state",
    "srun": (
        "printf '%s\\n' \"$@\" > arguments; trap 'echo saved >> calls; exit 1' TERM; echo $$ > srun.part; "
        "mv srun.part srun.pid; for i in $(seq 300); do if [ -e done ]; then exit 0; fi; sleep 0.1; done; exit 9"
    ),
}


def started(folder: Path, state: str = "RUNNING") -> subprocess.Popen[bytes]:
    """The script under a Slurm of four lines, until its step runs."""
    (folder / "bin").mkdir()
    for name, body in _SLURM.items():
        tool = folder / "bin" / name
        tool.write_text(f"#!/bin/bash\n{body}\n")
        tool.chmod(0o755)
    (folder / "state").write_text(state)
    (folder / "job").write_text(slurm_script(TWO))
    given = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n[7-8]", "SLURM_CPUS_PER_TASK": "16"}
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    job = subprocess.Popen(["bash", "job"], cwd=folder, env={**os.environ, **given, "PATH": path})
    until = time.monotonic() + 20
    while not (folder / "srun.pid").exists():
        assert time.monotonic() < until and job.poll() is None
        time.sleep(0.02)
    return job


def test_the_sbatch_script_is_bash_and_starts_torchrun_on_the_first_host(tmp_path: Path) -> None:
    (tmp_path / "check").write_text(slurm_script(TWO))
    assert subprocess.run(["bash", "-n", "check"], cwd=tmp_path, check=False).returncode == 0
    job = started(tmp_path)
    (tmp_path / "done").touch()
    assert job.wait(20) == 0
    line = (tmp_path / "arguments").read_text().splitlines()
    read = as_torchrun_reads_it(shlex.join(line[line.index("torchrun") :]))
    assert (read.nnodes, read.nproc_per_node, read.rdzv_endpoint, read.rdzv_id) == ("2", "4", "n7:29500", "42")
    assert read.training_script_args == ["train", *WORDS]
    assert "requeue" not in (tmp_path / "calls").read_text()


def test_before_the_time_limit_the_run_saves_and_the_job_is_queued_again(tmp_path: Path) -> None:
    job = started(tmp_path)
    job.send_signal(signal.SIGTERM)
    assert job.wait(20) == 1
    assert (tmp_path / "calls").read_text().splitlines()[1:] == [
        "scancel --signal=TERM 42",
        "saved",
        "scontrol requeue 42",
    ]


def test_a_job_that_is_cancelled_stays_cancelled(tmp_path: Path) -> None:
    job = started(tmp_path, state="COMPLETING")
    job.send_signal(signal.SIGTERM)
    assert job.wait(20) == 1
    assert "saved" in (tmp_path / "calls").read_text() and "requeue" not in (tmp_path / "calls").read_text()


def escaped(words: tuple[str, ...]) -> list[str]:
    return [word.replace("$", "$$") for word in words]


def test_the_pytorchjob_has_a_master_and_workers_with_memory_and_a_volume() -> None:
    job = yaml.safe_load(pytorchjob(TWO))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {kind: spec["replicas"] for kind, spec in replicas.items()} == {"Master": 1, "Worker": 1}
    assert job["spec"]["nprocPerNode"] == "4"
    for spec in replicas.values():
        assert spec["restartPolicy"] == "OnFailure"
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        assert (container["name"], container["image"]) == ("pytorch", "registry/sojourn:1")
        assert container["command"] == ["torchrun", "--max-restarts=0", "-m", "sojourn", "train", *escaped(WORDS)]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}  # noqa: S108
        given = {one["name"]: one for one in container["env"]}
        assert "persistentVolumeClaim" in volumes[mounts[given["SOJOURN_HOME"]["value"]]]
        assert given["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["optional"] is True
    alone = yaml.safe_load(pytorchjob(Launch("a", WORDS, nodes=1, gpus=1, image="i")))
    assert list(alone["spec"]["pytorchReplicaSpecs"]) == ["Master"]


def test_the_trainjob_says_how_many_nodes_processes_and_gpus() -> None:
    job = yaml.safe_load(trainjob(TWO))
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    spec, trainer = job["spec"], job["spec"]["trainer"]
    assert spec["runtimeRef"] == {"name": "torch-distributed"}
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["image"]) == (2, 4, "registry/sojourn:1")
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 4}
    assert trainer["command"][-len(WORDS) :] == escaped(WORDS)
    (node,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    assert not {one["name"] for one in trainer["env"]} & {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK"}


def test_a_word_that_looks_like_a_number_stays_text_for_every_reader_of_yaml() -> None:
    assert '- "1e-4"' in pytorchjob(TWO) and '- "1e-4"' in trainjob(TWO)


@pytest.mark.parametrize(
    ("name", "wanted"), [("LoRA_r64.v2", "lora-r64-v2"), ("7b", "run-7b"), ("模型", "run"), ("x" * 90, "x" * 40)]
)
def test_a_job_is_named_as_kubernetes_allows(name: str, wanted: str) -> None:
    job = Launch(name, WORDS, 2, 4, image="i")
    assert yaml.safe_load(pytorchjob(job))["metadata"]["name"] == wanted
    assert yaml.safe_load(trainjob(job))["metadata"]["name"] == wanted


def test_the_token_in_the_environment_is_in_no_text(home: Path) -> None:
    token = "hf_" + "x" * 30
    words = ["small", "--gpus-per-node", "4", "--master", "a", "--image", "i", "--for", "all"]
    said = sojourn("launch-line", *words, env={**os.environ, "HF_TOKEN": token})
    assert said.returncode == 0 and token not in said.stdout + said.stderr
    assert all(f"# {kind}\n" in said.stdout for kind in ("shell", "slurm", "pytorchjob", "trainjob"))


@pytest.mark.parametrize(
    "word", ["model.base=hf_abcdefghij0123456789", "hf_token=abc", "save.mirror=https://me:pw@host/x"]
)
def test_a_secret_among_the_words_is_refused_and_not_repeated(word: str, home: Path) -> None:
    said = refused("small", word, "--master", "a")
    assert "HF_TOKEN" in said and word.partition("=")[2] not in said


def test_ordinary_words_are_no_secrets() -> None:
    refuse_secrets(["small", "data.special_tokens=[<think>]", "train.tokens=10M", "model.base=https://host/x", "a@b"])


ONE_LINERS = {
    "no such preset": (["smal", "--master", "a"], "did you mean small?"),
    "a wrong key": (["small", "train.rl=1", "--master", "a"], "train.rl"),
    "too small a batch": (
        ["small", "train.global_batch=4", "--gpus-per-node", "4", "--master", "a"],
        "4 rows cannot be shared by 8 ranks (2 × 4); set train.global_batch=8",
    ),
    "GPUs by number": (["small", "--gpus", "0,1", "--master", "a"], "--gpus-per-node 2"),
    "no master": (["small"], "--master 192.168.1.1"),
    "a master with its port": (["small", "--master", "10.0.0.1:29500"], "without a port"),
    "a master with a quote": (["small", "--master", "a';rm"], "without a port"),
    "no image": (["small", "--for", "pytorchjob"], "--image"),
    "no image either": (["small", "--for", "trainjob"], "--image"),
    "no such launcher": (["small", "--for", "pbs"], "“pbs” given; allowed: shell, slurm"),
    "no nodes": (["small", "--nodes", "0"], "--nodes"),
    "GPUs in words": (["small", "--gpus-per-node", "four"], "“four” given; allowed: auto or a number"),
    "a port too high": (["small", "--port", "70000"], "--port"),
}  # fmt: skip


@pytest.mark.parametrize("case", ONE_LINERS)
def test_what_is_wrong_is_one_line_and_nothing_to_paste(case: str, home: Path) -> None:
    words, wanted = ONE_LINERS[case]
    assert wanted in refused(*words)


def test_a_driver_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from sojourn.cli import launch_line
    from sojourn.machine import gpus

    def broken() -> list[object]:
        raise RuntimeError("nvidia-smi did not answer")

    monkeypatch.setattr(gpus, "driver_gpus", broken)
    with pytest.raises(UserError, match="give a number, such as"):
        launch_line._count_gpus("auto")


def test_a_grace_that_torchrun_does_not_keep_is_reported() -> None:
    config = load_run(["small", "limits.grace=2m"]).config
    (kept,) = check_launch(Launch("a", WORDS, 2, 4, grace=120.0), config)
    assert "30 s" in kept and check_launch(Launch("a", WORDS, 2, 4), config) == []


def test_our_own_lines_say_who_is_who() -> None:
    lines = [shlex.split(line) for line in shell_commands(Launch("r", ("small",), 2, 2, "box", 2950, 7))["own"]]
    for number, words in enumerate(lines):
        assert words[:2] == ["sojourn", "train"]
        found = load_run(words[2:]).config.parallel
        assert (found.nodes, found.node, found.master, found.port) == (2, number, "box", 2950)
        assert (found.gpus, found.restarts) == ([0, 1], 7)
