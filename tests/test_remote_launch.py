"""From the laptop to the box and home with a model: the real commands, a real sshd, a real training."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fork_server import ForkServer
from laptop import RUN, Laptop
from remote_box import PASSWORD, RemoteBox, files_with, needs_box, remote_box

pytestmark = needs_box


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteBox]:
    with remote_box(tmp_path_factory.mktemp("box")) as made:
        yield made


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory, box: RemoteBox, fork_server: ForkServer) -> Laptop:
    made = Laptop(tmp_path_factory.mktemp("laptop"), fork_server=fork_server)
    made.add(box)
    return made


def test_a_run_is_launched_brought_home_and_the_box_powered_off(
    box: RemoteBox, laptop: Laptop, fork_server: ForkServer
) -> None:
    words = (*RUN, "advanced.cpu_kernels=off")  # the box would compile them for itself
    done = laptop.run("launch", *words, "name=whole", "--on", "box", "--budget", "¥20", "--stop-when-done")
    assert "the model is at home" in done.stdout
    assert len(box.shutdown_calls()) == 1
    assert fork_server.run("train", *words, "name=here", env=laptop.env, cwd=str(laptop.home)).returncode == 0
    assert laptop.weights("whole") == laptop.weights("here")
    assert files_with(PASSWORD, laptop.folder, box.root / "root") == []


def test_the_other_verbs_on_a_run_that_has_ended(box: RemoteBox, laptop: Laptop) -> None:
    """Of the run above: its log from the box, its GPU, a port, a shell, and the box let go as its model is at home."""
    assert "24/24" in laptop.run("logs", "whole", "--tail", "20").stdout
    followed = laptop.run("logs", "whole", "-f", "--json")
    assert "24/24" in followed.stderr and json.loads(followed.stdout)["state"] == "done"
    assert "4090" in json.loads(laptop.run("gpu", "whole", "--json").stdout)[0]["name"]
    forward = laptop.start("forward", "box", "22", "--json")
    assert forward.stdout is not None
    opened = json.loads(forward.stdout.readline())
    with socket.create_connection(("127.0.0.1", opened["port"]), timeout=30) as link:
        assert link.recv(4) == b"SSH-"
    forward.send_signal(signal.SIGINT)
    assert forward.wait(20) == 130
    shell = laptop.start("shell", "whole", stdin=subprocess.PIPE)
    assert shell.communicate("pwd -P\nexit 7\n", timeout=60)[0].splitlines()[-1].endswith("/runs/whole")
    assert shell.returncode == 7
    calls = len(box.shutdown_calls())
    released = laptop.run("release", "box", "--power-off", "--yes", "--json")
    assert json.loads(released.stdout)["action"] == "power_off"
    again = len(box.shutdown_calls()) - calls - 1  # only where the connection broke meanwhile, which is said
    assert again == 0 or (again > 0 and "connecting again" in released.stderr), released.stderr
    kept = laptop.run("release", "box", "--yes", code=2).stderr  # which would wipe what has no copy here
    assert "box is kept: " in kept and "sojourn pull whole --what all" in kept
    laptop.run("pull", "whole", "--what", "all")
    assert "everything on box is safe" in laptop.run("release", "box", "--yes", code=2).stderr  # by the console only


def test_runs_names_hosts_that_do_not_answer(box: RemoteBox, laptop: Laptop) -> None:
    hosts = laptop.folder / "config" / "hosts.json"
    known = hosts.read_text(encoding="utf-8")
    try:
        _add_copies(hosts, {"second": {}, "third": {}, "silent": {"address": _nobody(box)}, "closed": {"port": 9}})
        done = laptop.run("runs")
        assert "box" in done.stdout and "second" in done.stdout and "third" in done.stdout
        for name in ("silent", "closed"):
            assert any(line.startswith(f"unreachable: {name}: ") for line in done.stderr.splitlines()), done.stderr
        assert "Traceback" not in done.stderr
        assert isinstance(json.loads(laptop.run("runs", "--json").stdout), list)
    finally:
        hosts.write_text(known, encoding="utf-8")


def _nobody(box: RemoteBox) -> str:
    """An address of its network from which no answer comes."""
    network, _, last = box.address.rpartition(".")
    return f"{network}.{int(last) + 3}"


def _add_copies(hosts: Path, changes: dict[str, dict[str, object]]) -> None:
    """Of the one host that is there, each with something changed."""
    written = json.loads(hosts.read_text(encoding="utf-8"))
    pins = hosts.with_name("known_hosts")
    key = " ".join(pins.read_text(encoding="utf-8").split()[1:3])
    for name, change in changes.items():
        made = {**written["hosts"]["box"], "name": name, **change}
        written["hosts"][name] = made
        for address in (made["address"], f"[{made['address']}]:{made['port']}"):
            pins.write_text(pins.read_text(encoding="utf-8") + f"{address} {key}\n", encoding="utf-8")
    hosts.write_text(json.dumps(written), encoding="utf-8")
