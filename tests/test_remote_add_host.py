"""A box is added by its ssh line: host key pinned, password used once and found nowhere, platform and price."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from remote_box import PASSWORD, RemoteBox, needs_box, remote_box
from sojourn.cli.host import host_app
from sojourn.remote import box_facts
from sojourn.remote.box_facts import BoxFacts
from sojourn.remote.connection import AuthFailed, Connection, HostKeyChanged, HostUnreachable
from sojourn.remote.hosts import config_folder, get_host, load_hosts
from sojourn.remote.keys import known_hosts_path, our_public_key, pinned_keys

pytestmark = needs_box
_PROGRAM = "from sojourn.cli.host import host_app; host_app(prog_name='sojourn host', standalone_mode=True)"
_WRONG = "wrong-canary"
_found: list[BoxFacts] = []


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteBox]:
    with remote_box(tmp_path_factory.mktemp("box")) as box:
        yield box


@pytest.fixture(autouse=True)
def fresh(box: RemoteBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of ours on the box, and a laptop that never saw it."""
    for name in ("SSH_AUTH_SOCK", "SOJOURN_SSH_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SOJOURN_CONFIG", str(tmp_path / "config"))
    (tmp_path / "home").mkdir()
    for path in (box.root / "root/.ssh").glob("*"):
        path.unlink()


@pytest.fixture
def one_probe(box: RemoteBox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The box is examined once for all tests that are not about what is found."""

    def probe(connection: Connection, home: str = "") -> BoxFacts:
        if not _found:
            _found.append(box_facts.probe(connection, home))
        assert connection.run(["true"]).code == 0
        return _found[0]

    monkeypatch.setattr("sojourn.remote.add_host.probe", probe)


def host(*words: str, password: str | None = None) -> Result:
    """`sojourn host …`; the password comes by standard input."""
    stdin = None if password is None else f"{password}\n"
    given = ["--password-stdin"] if password is not None else []
    return CliRunner().invoke(host_app, [*words, *given], input=stdin)


def add(box: RemoteBox, *words: str, password: str | None = PASSWORD) -> Result:
    done = host("add", "my4090", box.ssh_line, *words, password=password)
    assert done.exit_code == 0, done.exception
    return done


def failed_logins(box: RemoteBox) -> int:
    return (box.folder / "sshd.log").read_text().count("Failed password")


def authorized_keys(box: RemoteBox) -> Path:
    return box.root / "root/.ssh/authorized_keys"


def files_below(top: Path) -> list[Path]:
    """Without what is mounted there."""
    found = subprocess.run(["find", top, "-xdev", "-type", "f", "-print0"], capture_output=True, check=True).stdout
    return [Path(os.fsdecode(name)) for name in found.split(b"\0") if name]


def test_a_box_is_added_with_its_platform_gpu_price_and_persistent_folder(box: RemoteBox):
    said = add(box).output
    found = get_host("my4090")
    assert (found.platform, found.gpu, found.gpus, found.home) == ("autodl", "RTX 4090", 1, "/root/autodl-tmp")
    assert (found.price_per_hour, found.currency, found.python) == (2.19, "CNY", "/root/miniconda3/bin/python")
    shown = subprocess.run(
        ["ssh-keygen", "-lf", box.root / "etc/ssh/box_ed25519.pub"], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    assert f"{shown} (ED25519), first contact" in said and "AutoDL, RTX 4090, ¥2.19/h (AutoDL price page" in said
    assert pinned_keys(box.address, 22)
    listed = host("list").output
    assert re.search(rf"my4090 +autodl +RTX 4090 +¥2.19/h +root@{box.address}:22 +/root/autodl-tmp", listed)
    checked = host("check", "my4090")
    assert (
        checked.exit_code == 0 and "nothing has changed" in checked.output and "24.0 of 24.0 GiB free" in checked.output
    )


def test_the_password_is_in_no_file_no_output_and_no_command_line(box: RemoteBox, tmp_path: Path):
    seen: list[str] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    if PASSWORD.encode() in path.read_bytes():
                        seen.append(str(path))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, "add", "my4090", box.ssh_line],
            env={**os.environ, "SOJOURN_SSH_PASSWORD": PASSWORD},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        ended.set()
        watcher.join()
    assert done.returncode == 0, done.stderr
    assert PASSWORD not in done.stdout + done.stderr and not seen
    tops = (tmp_path, box.folder / "disk/upper", box.root / "root", box.root / "tmp", box.root / "run")
    files = [path for top in tops for path in files_below(top)]
    assert config_folder() / "hosts.json" in files and authorized_keys(box) in files
    assert not [path for path in files if PASSWORD.encode() in path.read_bytes()]
    assert PASSWORD not in (box.folder / "sshd.log").read_text()


@pytest.mark.usefixtures("one_probe")
def test_our_key_is_appended_once_after_a_line_that_lacks_its_end(box: RemoteBox):
    theirs = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKhfQ1mJUzJwZyXcBzP9E2q9j0N7J5mQ2n9o9m3xJ0aV other"
    authorized_keys(box).parent.mkdir(exist_ok=True)
    authorized_keys(box).write_text(f"# {our_public_key()}\n{theirs}")
    add(box)
    add(box, "--replace", password=None)  # the key works: no password is asked for
    lines = authorized_keys(box).read_text().splitlines()
    assert lines == [f"# {our_public_key()}", theirs, our_public_key()]
    assert authorized_keys(box).stat().st_mode & 0o777 == 0o600
    assert authorized_keys(box).parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("one_probe")
def test_a_wrong_password_is_tried_once_and_leaves_nothing(box: RemoteBox):
    before = failed_logins(box)
    refused = host("add", "my4090", box.ssh_line, password=_WRONG)
    assert isinstance(refused.exception, AuthFailed) and "does not accept this password" in str(refused.exception)
    assert _WRONG not in str(refused.exception) + refused.output
    assert failed_logins(box) == before + 1
    assert not load_hosts() and not pinned_keys(box.address, 22) and not authorized_keys(box).exists()
    silent = host("add", "my4090", box.ssh_line)
    assert isinstance(silent.exception, AuthFailed) and "SOJOURN_SSH_PASSWORD" in str(silent.exception)
    assert failed_logins(box) == before + 1


def test_a_prompt_asks_again_after_a_wrong_password_and_sends_each_answer_once(box: RemoteBox):
    before = failed_logins(box)
    import pty  # not on Windows

    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", _PROGRAM, "add", "my4090", box.ssh_line])  # noqa: S606
    shown, answers = b"", iter([_WRONG, PASSWORD])
    with contextlib.suppress(OSError):  # the terminal's end
        while select.select([terminal], [], [], 60)[0] and (part := os.read(terminal, 4096)):
            shown += part
            if shown.count(b"never kept): ") > shown.count(b"\0"):
                shown += b"\0"  # one mark per answer
                os.write(terminal, f"{next(answers)}\n".encode())
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0, shown
    assert b"does not accept this password" in shown and PASSWORD.encode() not in shown
    assert failed_logins(box) == before + 1 and "my4090" in load_hosts()


@pytest.mark.usefixtures("one_probe")
def test_a_changed_host_key_is_refused_with_both_fingerprints_until_it_is_accepted(box: RemoteBox):
    add(box, "--price", "¥2.5")
    old = known_hosts_path().read_text()
    box.new_host_key()
    box.reboot()
    for command in (["check", "my4090"], ["add", "my4090", box.ssh_line, "--replace"]):
        refused = host(*command)
        assert isinstance(refused.exception, HostKeyChanged)
        message = str(refused.exception)
        assert (
            len(set(re.findall(r"SHA256:\S+", message))) == 2 and "reinstalled" in message and "between you" in message
        )
        assert f'host add my4090 "{box.ssh_line}" --replace --accept-new-key' in message
        assert known_hosts_path().read_text() == old
    add(box, "--replace", "--accept-new-key", password=None)
    assert known_hosts_path().read_text() != old and get_host("my4090").price_per_hour == 2.5
    assert host("check", "my4090").exit_code == 0


@pytest.mark.usefixtures("one_probe")
def test_a_box_that_takes_keys_only_says_which_key_to_enter(box: RemoteBox):
    settings = box.root / "etc/ssh/box_config"
    text = settings.read_text()
    settings.write_text(text.replace("PasswordAuthentication yes", "PasswordAuthentication no"))
    box.reboot()
    try:
        refused = host("add", "my4090", box.ssh_line, password=PASSWORD)
    finally:
        settings.write_text(text)
        box.reboot()
    assert isinstance(refused.exception, AuthFailed) and our_public_key() in str(refused.exception)


@pytest.mark.usefixtures("one_probe")
def test_a_host_behind_another_is_added_and_both_keys_are_pinned(box: RemoteBox):
    refused = host("add", "inner", f"ssh -J root@{box.address} root@127.0.0.1", password=PASSWORD)
    assert "on the way to it" in str(refused.exception)
    add(box)
    done = host("add", "inner", f"ssh -J root@{box.address} root@127.0.0.1")
    assert done.exit_code == 0, done.exception
    assert get_host("inner").jump == (f"root@{box.address}:22",)
    assert pinned_keys("127.0.0.1", 22) == pinned_keys(box.address, 22)
    assert host("check", "inner").exit_code == 0
    assert host("remove", "my4090").exit_code == 0 and pinned_keys(box.address, 22)  # the other one needs it
    assert host("remove", "inner").exit_code == 0 and not known_hosts_path().read_text()


@pytest.mark.usefixtures("one_probe")
def test_a_line_that_needs_openssh_is_added_by_it(box: RemoteBox, tmp_path: Path):
    add(box)
    relay = tmp_path / "relay.py"
    relay.write_text(
        "import os, socket, sys, threading\n"
        "link = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "def up():\n"
        "    while data := os.read(0, 65536): link.sendall(data)\n"
        "threading.Thread(target=up, daemon=True).start()\n"
        "while data := link.recv(65536): os.write(1, data)\n"
    )
    line = f"ssh -o 'ProxyCommand={sys.executable} {relay} %h %p' root@{box.address}"
    done = host("add", "proxied", line)
    assert done.exit_code == 0, done.exception
    assert "OpenSSH will make the connections, because of ProxyCommand" in done.output
    assert get_host("proxied").transport == "openssh" and host("check", "proxied").exit_code == 0


def test_an_unknown_box_has_no_price_and_a_folder_that_is_said(tmp_path: Path):
    with remote_box(tmp_path / "plain", ()) as plain:
        done = host("add", "lab", plain.ssh_line, "--home", "~/data", "--price", "$0.4", password=PASSWORD)
        assert done.exit_code == 0, done.exception
        found = get_host("lab")
        assert (found.platform, found.home) == ("generic", "/root/data") and (plain.root / "root/data").is_dir()
        assert (found.price_per_hour, found.currency) == (0.4, "USD")
        for words, message in (
            (["--price", "0.4"], "say in which currency"),
            (["--home", "data"], "give a folder on the box"),
            (["--home", "/proc/x"], "cannot be written"),
            (["--platform", "autodlx"], "did you mean autodl"),
            (["--pric", "3"], "did you mean --price"),
        ):
            refused = host("add", "other", plain.ssh_line, *words)
            assert message in str(refused.exception), refused.exception
        done = host("add", "other", plain.ssh_line)
        assert get_host("other").home == "/root/sojourn" and "price per hour is not known" in done.output
        plain.set_gpu(count=2, name="NVIDIA GeForce RTX 3090")
        changed = host("check", "other")
        assert "gpu: RTX 4090 → RTX 3090" in changed.output and get_host("other").gpus == 2
        plain.power_off()
        gone = host("check", "lab")
        assert isinstance(gone.exception, HostUnreachable) and gone.exception.code == 1
        assert "\n" not in str(gone.exception)
