"""The ssh line as platforms show it and people paste it, and names of ~/.ssh/config."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sojourn.errors import UserError
from sojourn.remote.ssh_config import apply_config
from sojourn.remote.ssh_line import SshLine, join_address, parse_address, parse_ssh_line

CANARY = "canary-in-the-line"


@pytest.mark.parametrize(
    ("line", "user", "address", "port"),
    [
        ("ssh -p 12345 root@region-9.autodl.com", "root", "region-9.autodl.com", 12345),
        ("ssh root@1.2.3.4 -p 22", "root", "1.2.3.4", 22),
        ("ssh -p22 root@connect.westb.seetacloud.com", "root", "connect.westb.seetacloud.com", 22),
        ("  $ ssh -p 7 root@h  ", "root", "h", 7),
        ("ssh –p 7 root@h", "root", "h", 7),
        ("ssh.exe -l root h -p 7", "root", "h", 7),
        ("root@h -p 7", "root", "h", 7),
        ("ssh \\\n  -p 7 root@h", "root", "h", 7),
        ("ssh -o Port=7 -o 'User root' -o HostName=9.9.9.9 h", "root", "9.9.9.9", 7),
        ("ssh -p 7 -o Port=8 root@h", "root", "h", 7),
        ("ssh://root@h:2222", "root", "h", 2222),
        ("ssh ssh://root@[::1]:2222/", "root", "::1", 2222),
        ("root@h:2222", "root", "h", 2222),
        ("root@[2001:db8::1]:2222", "root", "2001:db8::1", 2222),
        ("ssh root@2001:db8::1", "root", "2001:db8::1", None),
        ("ssh fe80::1%eth0", None, "fe80::1%eth0", None),
        ("ssh me@corp.example@h", "me@corp.example", "h", None),
        ("mybox", None, "mybox", None),
    ],
)
def test_a_line_is_read_as_ssh_reads_it(line: str, user: str | None, address: str, port: int | None):
    found = parse_ssh_line(line)
    assert (found.user, found.address, found.port) == (user, address, port)
    assert found.transport == "asyncssh"


def test_jumps_and_keys_and_what_is_ignored():
    line = parse_ssh_line("ssh -J a@b:2200,c -i ~/k -NfL 8080:localhost:80 -o StrictHostKeyChecking=no u@h nvidia-smi")
    assert line.jump == ("a@b:2200", "c") and line.key == str(Path("~/k").expanduser())
    assert line.notes == ["the command after the address is ignored", "ignored: -N, -f, -L, StrictHostKeyChecking"]
    assert parse_ssh_line("ssh -o ProxyJump=none h").jump == ()
    windows = parse_ssh_line(r"ssh -i C:\Users\me\.ssh\k root@h")
    assert windows.key is not None and windows.key.endswith(r"C:\Users\me\.ssh\k")


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("ssh -o 'ProxyCommand=nc %h %p' u@h", "ProxyCommand=nc %h %p"),
        ("ssh -I /usr/lib/pkcs11.so u@h", "PKCS11Provider=/usr/lib/pkcs11.so"),
        ("ssh -K u@h", "GSSAPIAuthentication=yes"),
        ("ssh -o KexAlgorithms=+diffie-hellman-group14-sha1 u@h", "KexAlgorithms=+diffie-hellman-group14-sha1"),
    ],
)
def test_what_only_openssh_can_do_is_left_to_it_and_said(line: str, option: str):
    found = parse_ssh_line(line)
    assert found.transport == "openssh" and found.options == (option,)
    assert found.notes == [f"OpenSSH will make the connections, because of {option.partition('=')[0]}"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "is empty"),
        ("   \n ", "is empty"),
        ("hello world", "'hello' is not ssh"),
        ("sssh -p 7 root@h", "did you mean ssh"),
        ("scp -P 7 a root@h:", "a line for scp"),
        ("rsync -av a root@h:", "a line for rsync"),
        (f"sshpass -p {CANARY} ssh root@h", "there is a password in this line"),
        (f"SSHPASS={CANARY} /usr/bin/sshpass -e ssh root@h", "there is a password in this line"),
        (f"ssh://root:{CANARY}@h", "there is a password in this line"),
        (f"root:{CANARY}@h", "there is a password in this line"),
        (f"ssh root@h\n密码: {CANARY}", "2 lines were given"),
        ("ssh root@-oProxyCommand=reboot", "begins with '-'"),
        ("ssh -- -oProxyCommand=reboot", "begins with '-'"),
        ("ssh -J -oProxyCommand=reboot root@h", "begins with '-'"),
        ("ssh -l -oProxyCommand=reboot h", "cannot be a user's name"),
        ("ssh '$(reboot)@h'", "cannot be a user's name"),
        ("ssh 'root@h;reboot'", "is not an address"),
        ("ssh -p 70000 root@h", "is not a port"),
        ("ssh -p １２ root@h", "is not a port"),
        ("ssh root@h -p", "-p needs a value"),
        ("ssh --port 7 root@h", "ssh has no option"),
        ("ssh -F other root@h", "-F is not supported"),
        ("ssh -o nonsense root@h", "is not Key=Value"),
        ("ssh 'root@h", "a quote is missing"),
        ("ssh -p 7", "there is no address"),
        ("ssh://h:0", "is not a port"),
        ("ssh://[::1", "is not a valid address"),
    ],
)
def test_other_lines_are_refused_in_one_line_that_repeats_no_password(line: str, message: str):
    with pytest.raises(UserError) as refused:
        parse_ssh_line(line)
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert CANARY not in str(refused.value)


_WORDS = st.sampled_from(
    ["ssh", "-p", "22", "-J", "a@b:1,c", "-o", "Port=1", "ProxyCommand=x", "-i", "~/k", "root@h", "ssh://u@h:1", "--",
     "-", "[::1]:2", "::1", "-oPort=x", "user:pw@h", "'", '"', "\\", "\n", "$(x)", "@", ":", "-L", "1:2:3", "\0", "é",
     "-NfT"]
)  # fmt: skip


@given(st.one_of(st.text(), st.lists(_WORDS).map(" ".join), st.lists(st.one_of(_WORDS, st.text())).map("".join)))
@example("ssh -o ProxyJump= h")
@example("ssh ssh://%2doProxyCommand=x@h")
@example("ssh://u@%2dh")
def test_any_text_is_a_line_or_one_line_of_error(text: str):
    try:
        found = parse_ssh_line(text)
    except UserError as error:
        assert "\n" not in str(error)
        return
    for place in (found.address, found.user or "u", *found.jump):
        assert place and not place.startswith("-") and place.isprintable() and " " not in place
    assert found.port is None or 0 < found.port < 65536
    again = parse_address(join_address(found.user, found.address, found.port))
    assert again == (found.user, found.address, found.port)


CONFIG = """
Host gpu
  HostName 10.0.0.5
  User ubuntu
  Port 2200
  IdentityFile {folder}/gpu_key
  ProxyJump bastion
Host bastion
  HostName bastion.example.com
  User jump
Host corp
  ProxyCommand corp-proxy %h %p
Host token
  PKCS11Provider /usr/lib/opensc.so
Host kerberos
  GSSAPIAuthentication yes
Host touch
  IdentityFile {folder}/touch_key
Host far
  ProxyJump keyed
Host keyed
  IdentityFile {folder}/gpu_key
Match final host late
  User later
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "gpu_key").write_text("")
    (tmp_path / "touch_key").write_text("")
    (tmp_path / "touch_key.pub").write_text("sk-ssh-ed25519@openssh.com AAAA me\n")
    path = tmp_path / "config"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


def _resolved(line: str, config: Path) -> SshLine:
    return apply_config(parse_ssh_line(line), config)


def test_a_name_of_the_config_brings_its_address_user_key_and_jump(config: Path):
    line = _resolved("gpu", config)
    assert (line.user, line.address, line.port, line.config_name) == ("ubuntu", "10.0.0.5", 2200, "gpu")
    assert line.jump == ("jump@bastion.example.com:22",) and line.key == str(config.parent / "gpu_key")
    assert line.transport == "asyncssh" and line.notes == []
    own = _resolved("ssh -p 7 -J x@y root@gpu", config)
    assert (own.user, own.address, own.port, own.jump) == ("root", "10.0.0.5", 7, ("x@y:22",))
    assert _resolved("late", config).user == "later"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("corp", "ProxyCommand"),
        ("token", "PKCS11Provider"),
        ("kerberos", "GSSAPIAuthentication"),
        ("touch", "a hardware key"),
        ("far", "the settings of keyed"),
    ],
)
def test_a_config_that_needs_openssh_gets_it(config: Path, name: str, reason: str):
    line = _resolved(name, config)
    assert line.transport == "openssh" and line.config_name == name
    assert any(reason in note and "OpenSSH" in note for note in line.notes)


def test_a_name_that_the_config_lacks_is_an_address_and_a_broken_config_is_one_line(config: Path):
    line = _resolved("mybox", config)
    assert line.config_name is None and line.address == "mybox" and "is not in" in line.notes[0]
    config.write_text("Host x\n  Port many\n")
    with pytest.raises(UserError, match=r"config: cannot be read"):
        _resolved("ssh x", config)
