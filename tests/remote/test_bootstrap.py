"""Bootstrap over a real SSH connection that is cut again and again."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from local_box import make_index, make_wheel, serve
from remote_box import PASSWORD, RemoteBox, needs_box, remote_box
from sojourn.errors import UserError
from sojourn.remote import bootstrap as bootstrap_module
from sojourn.remote.bootstrap import bootstrap
from sojourn.remote.box_client import Box
from sojourn.remote.box_doctor import examine
from sojourn.remote.hosts import Host
from sojourn.remote.keys import pin

pytestmark = needs_box


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteBox]:
    monkeypatch.setenv("SOJOURN_CONFIG", str(tmp_path / "config"))
    with remote_box(tmp_path / "box") as machine:
        pin(machine.address, 22, [(machine.root / "etc/ssh/box_ed25519.pub").read_text().strip()])
        yield machine


def host(machine: RemoteBox) -> Host:
    return Host("box", "root", machine.address, home="/root/autodl-tmp", platform="autodl", price_per_hour=2.19)


def test_sojourn_runs_beside_the_images_torch_and_the_doctor_answers(machine: RemoteBox) -> None:
    with Box(host(machine), password=PASSWORD) as box:
        made = bootstrap(box, box.host, lambda line: None)
        assert made.base == "/root/miniconda3/bin/python" and made.torch
        assert box.run(["/root/autodl-tmp/.sojourn/env/bin/sojourn", "--version"]).stdout.startswith(b"sojourn ")
        assert not bootstrap(box, box.host, lambda line: None).fresh
        doctor = examine(box, box.host, made)
        assert doctor.counts["ok"] > 5 and not any("over SSH" in problem for problem in doctor.problems)


def test_a_connection_that_is_cut_again_and_again_does_not_stop_it(machine: RemoteBox) -> None:
    random_pause, done = random.Random(7), threading.Event()

    def cut() -> None:
        for _ in range(12):
            if done.wait(random_pause.uniform(0.05, 1.5)):
                return
            machine.cut()

    thread = threading.Thread(target=cut)
    with Box(host(machine), password=PASSWORD) as box:
        box.run(["true"])
        thread.start()
        try:
            made = bootstrap(box, box.host, lambda line: None)
        finally:
            done.set()
            thread.join()
        assert box.run([made.python, "-c", "import sojourn, torch"]).code == 0


def test_a_reboot_during_the_installation_is_overcome_by_the_same_command(machine: RemoteBox) -> None:
    with Box(host(machine), password=PASSWORD) as box:
        reboots = []

        def reboot_once(line: str) -> None:
            if "making an environment" in line and not reboots:
                reboots.append(line)
                machine.reboot()

        made = bootstrap(box, box.host, reboot_once)
        assert reboots and box.run([made.python, "-c", "import sojourn, torch"]).code == 0


def test_a_box_without_internet_gets_what_is_missing_from_the_laptop(
    machine: RemoteBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_index(tmp_path / "index", [make_wheel(tmp_path / "w", "plain", "1.0", ["torch>=2"], code="value = 7")])
    real = bootstrap_module.requirements
    monkeypatch.setattr(bootstrap_module, "requirements", lambda *given: [*real(*given), "plain>=1"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with serve(tmp_path / "index") as url, Box(host(machine), password=PASSWORD) as box:
        monkeypatch.setenv("PIP_INDEX_URL", f"{url}/simple")
        made = bootstrap(box, box.host, lambda line: None)
        assert made.installed == ("plain 1.0",)
        assert box.run([made.python, "-c", "import plain; print(plain.value)"]).stdout == b"7\n"


@pytest.mark.parametrize("size", ["1m", "3m"])
def test_a_full_disk_and_a_read_only_home_are_one_line(machine: RemoteBox, size: str) -> None:
    """Full when our wheel arrives, or when it is unpacked."""
    small = machine.root / "root/autodl-tmp"
    machine._mount(small, "-t", "tmpfs", "-o", f"size={size}", "none")
    machine.reboot()
    with Box(host(machine), password=PASSWORD) as box:
        with pytest.raises(UserError, match=r"No space left on device|the disk of the box has 0 MiB free") as full:
            bootstrap(box, box.host, lambda line: None)
        assert "\n" not in str(full.value)
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        machine.reboot()
        with pytest.raises(UserError, match="Read-only file system") as read_only:
            bootstrap(box, box.host, lambda line: None)
        assert "\n" not in str(read_only.value)
