"""Connections against a real sshd: keys, passwords, jump hosts, banners, odd shells, dead links, Ctrl-C."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import asyncssh
import pytest

from plain_sshd import PlainSshd, needs_sshd, plain_sshd
from slow_link import slow_link
from sojourn.errors import UserError
from sojourn.remote import connection as connection_module
from sojourn.remote.asyncssh_channel import AsyncsshChannel
from sojourn.remote.box_client import Box
from sojourn.remote.connect import connect
from sojourn.remote.connection import (
    AuthFailed,
    CommandTimeout,
    Connection,
    ConnectionLost,
    HostKeyChanged,
    HostUnreachable,
    command_line,
)
from sojourn.remote.hosts import Host

pytestmark = needs_sshd


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainSshd]:
    with plain_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture(autouse=True)
def config(sshd: PlainSshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOJOURN_CONFIG", str(sshd.config))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)


@pytest.fixture(params=["asyncssh", "openssh"])
def host(request: pytest.FixtureRequest, sshd: PlainSshd) -> Host:
    return replace(sshd.host, transport=request.param)


@pytest.fixture
def connection(host: Host) -> Iterator[Connection]:
    opened = connect(host)
    yield opened
    opened.close()


def test_commands_their_streams_and_codes(connection: Connection) -> None:
    data = bytes(range(256)) * 40_000
    assert connection.run(["cat"], input=data).stdout == data
    done = connection.run(["sh", "-c", "echo out; echo err >&2; exit 7"])
    assert (done.code, done.stdout, done.stderr) == (7, b"out\n", b"err\n")
    words = ["a b", "'", '"', "$HOME", "`x`", "\\", "new\nline", "!", "权重", "*", ""]
    assert (
        connection.run([sys.executable, "-c", "import sys; print(sys.argv[1:])", *words]).stdout.decode()
        == f"{words}\n"
    )
    assert connection.run(["sh", "-c", 'printf %s "$A"'], env={"A": "x 'y"}).stdout == b"x 'y"
    with pytest.raises(CommandTimeout):
        connection.run(["sleep", "60"], timeout=0.3)
    assert connection.run(["true"]).code == 0


@pytest.mark.parametrize("data", [b"", b"x" * (8 << 20)])
def test_a_command_may_end_before_it_gets_its_input(
    data: bytes, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = AsyncsshChannel.write

    def late(self: AsyncsshChannel, data: bytes) -> None:
        self.exit_code()
        send(self, data)

    monkeypatch.setattr(AsyncsshChannel, "write", late)
    done = connection.run(["sh", "-c", "echo out; echo err >&2; exit 7"], input=data)
    assert (done.code, done.stdout, done.stderr) == (7, b"out\n", b"err\n")
    done = connection.run(["no-such-program"], input=data)
    assert done.code == 127 and b"no-such-program" in done.stderr


def test_several_channels_at_once(connection: Connection) -> None:
    channels = [connection.open(["cat"]) for _ in range(4)]
    for number, channel in enumerate(channels):
        channel.write(b"%d" % number)
    for number, channel in enumerate(channels):
        assert channel.read(10) == b"%d" % number
        channel.close()


def test_a_port_is_forwarded(connection: Connection) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = connection.forward(0, server.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted = server.accept()[0]
            client.sendall(b"hello")
            assert accepted.recv(5) == b"hello"
            accepted.close()


def test_refusals_say_what_to_type(host: Host, sshd: PlainSshd, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sojourn host add box"):
        connect(replace(host, port=1))  # never pinned
    with pytest.raises(AuthFailed, match="sojourn host add box"):
        connect(replace(host, key=str(sshd.folder / "host")))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(HostUnreachable, match="is the box running"):
            connect(replace(host, port=sshd.through(closed.getsockname()[1]).port))


def test_a_changed_host_key_is_refused_before_anything_is_sent(host: Host, sshd: PlainSshd) -> None:
    known = sshd.config / "known_hosts"
    pinned = known.read_text()
    known.write_text(f"[127.0.0.1]:{host.port} {' '.join((sshd.folder / 'client.pub').read_text().split()[:2])}\n")
    try:
        with pytest.raises(HostKeyChanged, match=r"pinned SHA256:\S+ .* now SHA256:") as caught:
            connect(host)
        assert "sojourn host" in str(caught.value)
    finally:
        known.write_text(pinned)


def test_a_server_that_never_answers(host: Host, sshd: PlainSshd) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(HostUnreachable):
        connect(replace(host, port=sshd.through(silent.getsockname()[1]).port), timeout=1)


def test_through_a_jump_host(sshd: PlainSshd, tmp_path: Path) -> None:
    with plain_sshd(tmp_path) as jump:
        (jump.folder / "authorized").write_text((sshd.folder / "client.pub").read_text())
        with (sshd.config / "known_hosts").open("a") as file:
            file.write((jump.config / "known_hosts").read_text())
        with Box(replace(sshd.host, jump=(f"root@127.0.0.1:{jump.host.port}",))) as box:
            assert box.run(["echo", "through"]).stdout == b"through\n"
        jump.process.kill()
        with pytest.raises(HostUnreachable):
            connect(replace(sshd.host, jump=(f"root@127.0.0.1:{jump.host.port}",)))


@pytest.mark.parametrize("cut", ["reset", "silence"])
def test_a_lost_link_is_noticed_and_made_again(
    sshd: PlainSshd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cut: str
) -> None:
    for module in (connection_module, importlib.import_module("sojourn.remote.asyncssh_connection")):
        monkeypatch.setattr(module, "KEEPALIVE_SECONDS", 0.3)
    lines: list[str] = []
    with slow_link("127.0.0.1", sshd.host.port) as link, Box(sshd.through(link.local_port), lines.append) as box:
        box.write_bytes(str(tmp_path / "log"), b"12345")
        assert box.tail(str(tmp_path / "log"), 3) == b"45"
        link.cut(silent=cut == "silence")
        if cut == "silence":
            threading.Timer(2.0, link.heal).start()
        assert box.read_bytes(str(tmp_path / "log")) == b"12345"
    assert len(lines) == 2
    assert "connecting again" in lines[0]
    assert lines[1] == "box: connected again"


def test_patience_ends(sshd: PlainSshd, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_link("127.0.0.1", sshd.host.port) as link:
        box = Box(sshd.through(link.local_port), patience=0.5)
        assert box.read_bytes("/nowhere") is None
    with pytest.raises((ConnectionLost, HostUnreachable)):
        box.read_bytes("/nowhere")


def test_a_banner_of_the_login_shell_is_not_output(tmp_path: Path) -> None:
    banner = "echo 'Welcome to the box'; printf 'no newline'; echo to stderr >&2;"
    with plain_sshd(tmp_path, f'ForceCommand {banner} sh -c "$SSH_ORIGINAL_COMMAND"') as server:
        os.environ["SOJOURN_CONFIG"] = str(server.config)
        for transport in ("asyncssh", "openssh"):
            with Box(replace(server.host, transport=transport, home=str(tmp_path / "home"))) as box:
                assert box.run(["echo", "1"]).stdout == b"1\n"
                box.write_bytes(str(tmp_path / "x"), b"2")
                assert box.read_bytes(str(tmp_path / "x")) == b"2"


@pytest.mark.parametrize("shell", ["sh", "dash", "bash", "zsh", "fish", "csh", "tcsh", "busybox"])
def test_command_lines_mean_the_same_in_every_shell(shell: str) -> None:
    from shutil import which

    if which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    words = ["a b", "'", '"', "$HOME ~ *", "`x`", "\\", "\\n", "new\nline", "!x", "权重", "%s", "-e", "", "{a,b}", "#"]
    line = command_line([sys.executable, "-c", "import sys; print(sys.argv[1:])", *words])
    start = [shell, "sh", "-c"] if shell == "busybox" else [shell, "-c"]
    done = subprocess.run([*start, f"echo mark; {line}"], capture_output=True, text=True, check=True)
    assert done.stdout == f"mark\n{words}\n"


@pytest.mark.parametrize(
    "program, said",
    [("/nowhere/python", r"no Python 3\.8 .* sojourn shell box"), ("false", "the file server cannot start on the box")],
)
def test_no_python_on_the_box_is_said(
    program: str, said: str, sshd: PlainSshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sojourn.remote.agent_client.PYTHONS", (program,))
    with Box(replace(sshd.host, python=None)) as box, pytest.raises(UserError, match=said):
        box.read_bytes("/etc/hostname")


def test_tail_waits_for_more(sshd: PlainSshd, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one")
    with Box(sshd.host) as box:
        assert box.tail(str(log), 0) == b"one"
        assert box.tail(str(log), 3, wait=0.2) == b""
        threading.Timer(0.3, lambda: log.write_bytes(b"one two")).start()
        assert box.tail(str(log), 3, wait=20) == b" two"
        assert box.tail(str(tmp_path / "none"), 0) == b""


def test_files_of_the_box(sshd: PlainSshd, tmp_path: Path) -> None:
    with Box(sshd.host) as box:
        box.write_bytes(str(tmp_path / "deep/secret"), b"x", mode=0o600)
        assert (tmp_path / "deep/secret").stat().st_mode & 0o777 == 0o600
        box.write_bytes(str(tmp_path / "deep/a.json"), b'{"step": 1}')
        box.write_bytes(str(tmp_path / "deep/b.json"), b"not json")
        assert list(box.list_json(f"{tmp_path}/deep/*.json").values()) == [{"step": 1}, None]
        assert box.list_folder(str(tmp_path / "deep")) == ["a.json", "b.json", "secret"]
        assert box.list_folder(str(tmp_path / "none")) == []
        assert box.free_bytes(str(tmp_path / "none")) > 0
        box.rename(str(tmp_path / "deep/a.json"), str(tmp_path / "deep/c.json"))
        box.remove(str(tmp_path / "deep"))
        box.remove(str(tmp_path / "deep"))
        assert not (tmp_path / "deep").exists()
        with pytest.raises(UserError, match="not removed"):
            box.remove("/")


def test_ctrl_c_answers_at_once(sshd: PlainSshd) -> None:
    program = (
        "from dataclasses import replace\n"
        "from sojourn.remote.box_client import Box\n"
        "from sojourn.remote.hosts import Host\n"
        f"box = Box(Host('box', 'root', '127.0.0.1', {sshd.host.port}, key={sshd.host.key!r}))\n"
        "box.run(['true']); print('ready', flush=True); box.run(['sleep', '600'])\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    assert child.wait(10) != 0


def test_a_key_is_signed_at_once_and_channels_are_asked_for_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request to authenticate, and the channel's behind it before the answer could have come."""
    with plain_sshd(tmp_path, "LogLevel DEBUG1") as server:
        monkeypatch.setenv("SOJOURN_CONFIG", str(server.config))
        packets: list[int] = []
        send = asyncssh.SSHClientConnection.send_packet

        def record(self: object, kind: int, *fields: bytes, **options: object) -> None:
            packets.append(kind)
            send(self, kind, *fields, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(asyncssh.SSHClientConnection, "send_packet", record)
        with Box(server.host) as box:
            box.write_bytes(str(tmp_path / "file"), b"1")
        log = (tmp_path / "log").read_text()
    assert log.count("userauth-request for user") == 1
    assert "method none" not in log
    order = [kind for kind in packets if kind in (5, 50, 90)]
    assert order == [5, 50, 90]


@pytest.mark.parametrize("how", ["another key first", "steps only"])
def test_a_server_that_does_not_take_the_key_at_once(
    how: str, sshd: PlainSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's own key is refused, or the connection ends when requests are not one by one: the next way is tried."""
    monkeypatch.setenv("HOME", str(tmp_path))
    host = sshd.host
    if how == "another key first":
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
        (tmp_path / ".ssh").mkdir()
        (tmp_path / ".ssh" / "id_ed25519").write_bytes((sshd.folder / "client").read_bytes())
        (tmp_path / ".ssh" / "id_ed25519").chmod(0o600)
        host = replace(host, key=str(tmp_path / "other"))
    else:

        def cut(connection: asyncssh.SSHClientConnection, sent: object) -> None:
            async def end(*fields: bytes, **options: object) -> None:
                connection._transport.abort()  # type: ignore[union-attr]

            connection.send_userauth_request = end  # type: ignore[method-assign]

        monkeypatch.setattr("sojourn.remote.asyncssh_connection.authenticate_at_once", cut)
    with Box(host, patience=0.1) as box:
        box.write_bytes(str(tmp_path / "file"), b"1")
    assert (tmp_path / "file").read_bytes() == b"1"
