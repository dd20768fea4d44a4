"""What the verbs on hosts and remote runs do: pull, stop, gpu, forward, shell."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from sojourn.errors import UserError
from sojourn.expand_user import expand_user
from sojourn.remote.box_client import Box
from sojourn.remote.follow import read_report
from sojourn.remote.hosts import Host, get_host, load_hosts
from sojourn.remote.job import BoxPaths, find_job, get_job
from sojourn.remote.platforms.kaggle import find_kaggle_run
from sojourn.remote.pull import What, note_copies, pull_artefact, pull_run
from sojourn.remote.state import stop
from sojourn.remote.without_ssh import pull_from_kaggle

Say = Callable[[str], None]
_CHECK = 10.0  # seconds between two looks at the connection of a forward
_PORTS = {"tensorboard": 6006, "serve": 8000, "board": 8765}
_GPU_FIELDS = {
    "index": "index",
    "name": "name",
    "utilization": "utilization.gpu",
    "memory_used": "memory.used",
    "memory_total": "memory.total",
    "temperature": "temperature.gpu",
    "power": "power.draw",
}


_START_TENSORBOARD = """
import socket, subprocess, sys
try:
    socket.create_connection(("127.0.0.1", 6006), 1).close()
except OSError:
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", sys.argv[1], "--port", "6006"]
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    subprocess.Popen(command, start_new_session=True, **quiet)
    print("started")
"""


def host_of(name: str) -> tuple[Host, str | None]:
    """The host of that name, or the one of a run of that name, and then the run."""
    if name in load_hosts():
        return get_host(name), None
    job = find_job(name)
    return (get_host(job.host), job.run) if job is not None else (get_host(name), None)


def pull_named(run: str, what: str, to: str | None, say: Say) -> dict[str, Any]:
    wanted = next((known for known in get_args(What) if known == what), None)
    if wanted is None:
        raise UserError(f"--what: “{what[:40]}” given; allowed: {', '.join(get_args(What))}")
    if find_job(run) is None and find_kaggle_run(run) is not None:
        return pull_from_kaggle(run, what, expand_user(to) if to else None, say)
    job = get_job(run)
    host, folder = get_host(job.host), expand_user(to).absolute() if to else Path(job.folder)
    with Box(host, say=say) as box:
        report = read_report(box, host, run)
        names = pull_run(box, host, run, folder, wanted, report, box.progress(f"pulling {what} of {run}"))
        if any(name.startswith("checkpoints/") for name in names):
            pull_artefact(box, folder, box.progress("pulling its prepared data"))
        if "final" in names and to is None:
            note_copies(box, host, job)
    replace(job, pulled=job.pulled or ("final" in names and to is None)).seen(report)
    for name in names:
        say(f"{folder / name}: verified")
    return {"folder": str(folder), "pulled": names}


def stop_named(run: str, say: Say) -> dict[str, Any]:
    job = get_job(run)
    host = get_host(job.host)
    with Box(host, say=say) as box:
        report = stop(box, host, run, say)
    job.seen(report)
    step = f"step {report['step']:,} of {report['total_steps']:,}"
    say(f"{run}: {report['state']} at {step}; go on: the same launch, or sojourn move {run} --to HOST")
    return report


def gpus_of(name: str, say: Say) -> list[dict[str, str]]:
    host, _ = host_of(name)
    query = ",".join(_GPU_FIELDS.values())
    with Box(host, say=say, patience=20) as box:
        done = box.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"], timeout=30)
    if done.code != 0:
        why = (done.stdout + done.stderr).decode(errors="replace").strip().rpartition("\n")[2]
        raise UserError(f"{host.name}: nvidia-smi failed: {why[:200]}; on AutoDL, is the box in no-GPU mode?")
    lines = [
        line for line in done.stdout.decode(errors="replace").splitlines() if line.count(",") == len(_GPU_FIELDS) - 1
    ]
    return [dict(zip(_GPU_FIELDS, (cell.strip() for cell in line.split(",")), strict=True)) for line in lines]


def forward_until_interrupted(
    name: str, what: str, port: int, say: Say, opened: Callable[[dict[str, Any]], None]
) -> None:
    host, run = host_of(name)
    there = _PORTS.get(what) or (int(what) if what.isascii() and what.isdigit() else 0)
    if not 0 < there < 65536:
        raise UserError(f"“{what[:40]}” is neither a port nor one of {', '.join(_PORTS)}")
    with Box(host, say=say) as box:
        if what == "tensorboard":
            _start_tensorboard(box, host, run, say)
        here = box.forward(port or there, there)
        say(f"http://127.0.0.1:{here} is port {there} of {host.name}; Ctrl-C ends it")
        opened({"host": host.name, "port": here, "port_there": there})
        while True:
            time.sleep(_CHECK)
            box.run(["true"])  # opens a lost connection again, and its forwards


def _start_tensorboard(box: Box, host: Host, run: str | None, say: Say) -> None:
    """Where nothing listens there yet; it ends with the box."""
    paths = BoxPaths(host, run or "")
    logs = f"{paths.run_folder}/logs" if run else f"{host.home}/runs"
    python = f"{paths.ours}/env/bin/python"
    done = box.run([python, "-c", _START_TENSORBOARD, logs], timeout=60)
    if b"started" in done.stdout:
        say(f"TensorBoard starts on {host.name} over {logs}; the page may need some seconds")


def open_shell(name: str) -> int:
    from sojourn.remote.openssh_connection import destination, ssh_options, ssh_program

    host, run = host_of(name)
    ssh = ssh_program()
    if ssh is None:
        raise UserError("shell: OpenSSH's ssh is not installed here; install it, or use: sojourn logs, sojourn gpu")
    folder = BoxPaths(host, run).run_folder if run else host.home
    inside = f"cd {folder!r} 2>/dev/null; exec ${{SHELL:-/bin/sh}} -l"
    command = [ssh, "-t", *ssh_options(host, timeout=15), *destination(host), inside]
    return subprocess.run(command, check=False).returncode
