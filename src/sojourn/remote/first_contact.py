"""The first connection to a host: its key is shown and pinned, the password asked for once, our key installed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sojourn.config.messages import printable
from sojourn.errors import UserError
from sojourn.remote.connect import connect
from sojourn.remote.connection import AuthFailed, Connection, HostUnreachable
from sojourn.remote.hosts import Host
from sojourn.remote.keys import fingerprint, host_key_changed, our_public_key, pin, pinned_keys, unpin
from sojourn.remote.secrets import remember
from sojourn.remote.ssh_line import join_address, parse_address

SECONDS = 20.0
_RSA = ["rsa-sha2-512", "rsa-sha2-256"]
_HOST_KEY_ALGORITHMS = ["ssh-ed25519", *(f"ecdsa-sha2-nistp{bits}" for bits in (256, 384, 521)), *_RSA]
# Its key comes by standard input. A commented line does not count, and a last line without its newline is ended first.
_INSTALL_KEY = """
umask 077
read -r key && [ -n "$key" ] && [ -n "$HOME" ] || exit 2
mkdir -p "$HOME/.ssh" && chmod 700 "$HOME/.ssh" || exit 3
file="$HOME/.ssh/authorized_keys"
blob=$(printf '%s' "$key" | cut -d ' ' -f 2)
if ! grep -v '^[[:space:]]*#' "$file" 2>/dev/null | grep -qF "$blob"; then
  if [ -s "$file" ] && [ -n "$(tail -c 1 "$file")" ]; then echo >> "$file" || exit 4; fi
  printf '%s\\n' "$key" >> "$file" || exit 4
fi
chmod 600 "$file"
"""

Say = Callable[[str], None]


@dataclass(frozen=True)
class PasswordSource:
    """`ask` gets the prompt; None: there is nobody to ask. `tries`: how often it may be asked. Each answer is sent
    once, since servers lock out whoever fails too often."""

    ask: Callable[[str], str | None]
    tries: int = 1


@contextlib.contextmanager
def pinned_host_keys(host: Host, accept_new_key: bool, say: Say) -> Iterator[None]:
    """Pins the key of every machine on the way. Where what follows fails, the pins are as they were."""
    before: dict[tuple[str, int], list[str]] = {}
    try:
        for step, (_, address, port) in enumerate(steps(host)):
            shown = _host_key(host, step)
            place, known = join_address(None, address, port), pinned_keys(address, port)
            if shown in known:
                continue
            if known and not accept_new_key:
                raise host_key_changed(host, address, port, shown)
            before[address, port] = known
            pin(address, port, [shown])
            was = f"instead of {' and '.join(map(fingerprint, known))}" if known else "first contact"
            say(f"host key of {place}: {fingerprint(shown)}, {was}")
        yield
    except BaseException:
        for (address, port), keys in before.items():
            if keys:
                pin(address, port, keys)
            else:
                unpin(address, port)
        raise


def log_in(host: Host, passwords: PasswordSource, say: Say) -> tuple[Host, Connection]:
    """By a key or the agent where one of them works; else by password, to install our key, which is then proved to
    work by a connection of its own. The host is returned with the key that works."""
    try:
        return host, connect(host)
    except AuthFailed:
        _refuse_keys_only(host)
    installed = _install_by_password(host, passwords, say)
    try:
        connection = connect(installed)
    except AuthFailed:
        raise AuthFailed(
            f"{host.name}: our key was added to ~/.ssh/authorized_keys there, but the box does not accept it: its sshd "
            f"may refuse keys, or {host.user}'s home folder is writable by others (there: chmod go-w ~)"
        ) from None
    say("our key is installed there and works; the password is not needed again, and not kept")
    return installed, connection


def steps(host: Host) -> list[tuple[str, str, int]]:
    """User, address and port of every machine on the way, the host itself last."""
    jumps = host.jump if host.transport == "asyncssh" else ()  # OpenSSH checks those by the user's own known_hosts
    found = [parse_address(jump) for jump in jumps]
    return [*((user or host.user, address, port or 22) for user, address, port in found), _last(host)]


def _last(host: Host) -> tuple[str, str, int]:
    return host.user, host.address, host.port


def _install_by_password(host: Host, passwords: PasswordSource, say: Say) -> Host:
    where = f"{host.user}@{join_address(None, host.address, host.port)}"
    key = our_public_key()
    for attempt in range(1, passwords.tries + 1):
        password = passwords.ask(f"password of {where} (used once, never kept): ")
        if not password:
            raise AuthFailed(
                f"{host.name}: no key is accepted by {where} and no password was given; in a script: --password-stdin, "
                "or the variable SOJOURN_SSH_PASSWORD"
            )
        remember(password)
        try:
            connection = connect(host, password=password)
        except AuthFailed:
            wrong = f"{host.name}: {where} does not accept this password"
            if attempt == passwords.tries:
                raise AuthFailed(f"{wrong}; copy it anew from the platform's page and try again") from None
            say(wrong)
            continue
        with contextlib.closing(connection):
            done = connection.run(["sh", "-c", _INSTALL_KEY], input=f"{key}\n".encode(), timeout=SECONDS)
        if done.code != 0:
            why = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.code}"]
            raise UserError(
                f"{host.name}: our key cannot be added to ~/.ssh/authorized_keys there: {printable(why[-1], 200)}"
            )
        break
    if host.key:
        say(f"the key {host.key} is not accepted there; our own is used")
    return replace(host, key=None)


def _refuse_keys_only(host: Host) -> None:
    """Where no password would help: say which key to enter on the platform's page."""
    where = f"{host.user}@{join_address(None, host.address, host.port)}"
    if host.transport == "openssh":
        raise AuthFailed(
            f"{host.name}: ssh logs in to {where} with none of your keys; make `ssh {host.config_name or where}` work "
            "without a password first, then add the host"
        )
    methods = _with_last_address(host, _auth_methods)
    if methods and not {"password", "keyboard-interactive"} & {*methods}:
        raise AuthFailed(
            f"{host.name}: {where} accepts keys only, and none of yours. Enter this public key on the platform's page "
            f"for SSH keys (some apply it only to new machines), then add the host again: {our_public_key()}"
        )


async def _auth_methods(host: Host, address: str, port: int) -> list[str]:
    import asyncssh

    with contextlib.suppress(asyncssh.Error, OSError, asyncio.TimeoutError):
        found = await asyncio.wait_for(asyncssh.get_server_auth_methods(address, port, host.user, config=None), SECONDS)
        return list(found)
    return []


def _with_last_address(host: Host, asked: Callable[[Host, str, int], Any]) -> Any:
    """Runs `asked` with an address from which the host answers here: its own, or a forwarded port."""
    if not host.jump:
        return asyncio.run(asked(host, host.address, host.port))
    user, address, port = parse_address(host.jump[-1])
    nearer = replace(host, user=user or host.user, address=address, port=port or 22, jump=host.jump[:-1])
    with contextlib.closing(_through(nearer)) as connection:
        local = connection.forward(0, host.port, host.address)
        return asyncio.run(asked(host, "127.0.0.1", local))


def _through(jump: Host) -> Connection:
    try:
        return connect(jump)
    except AuthFailed:
        raise AuthFailed(
            f"{jump.name}: {jump.user}@{join_address(None, jump.address, jump.port)}, on the way to it, accepts none "
            f"of your keys; add it as a host of its own first, which installs our key: sojourn host add jump "
            f'"ssh -p {jump.port} {join_address(jump.user, jump.address, None)}"'
        ) from None


def unreachable(host: Host, reason: str) -> HostUnreachable:
    """Of a host that is not added yet."""
    return HostUnreachable(
        f"{join_address(None, host.address, host.port)} cannot be reached: {reason}; is the box running, and is "
        "this its line?"
    )


def _host_key(host: Host, step: int) -> str:
    """The public key that the machine at this step shows."""
    if host.transport == "openssh":
        return _host_key_by_openssh(host)
    user, address, port = steps(host)[step]
    at_step = replace(host, user=user, address=address, port=port, jump=host.jump[:step])
    return str(_with_last_address(at_step, _fetch_host_key))


async def _fetch_host_key(host: Host, address: str, port: int) -> str:
    import asyncssh

    known = [key.split()[0] for key in pinned_keys(host.address, host.port)]
    preferred = [name for kind in known for name in (_RSA if kind == "ssh-rsa" else [kind])]
    algorithms = [*dict.fromkeys([*preferred, *_HOST_KEY_ALGORITHMS])]
    try:
        key = await asyncio.wait_for(
            asyncssh.get_server_host_key(address, port, server_host_key_algs=algorithms, config=None), SECONDS
        )
    except asyncio.TimeoutError:
        raise unreachable(host, f"no answer within {SECONDS:g} seconds") from None
    except asyncssh.Error as error:
        raise unreachable(host, f"SSH failed: {error.reason or error}") from None
    except OSError as error:
        raise unreachable(host, os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)) from None
    if key is None:
        raise unreachable(host, "it showed no host key")
    return " ".join(key.export_public_key().decode().split()[:2])


def _host_key_by_openssh(host: Host) -> str:
    from sojourn.remote.openssh_connection import destination, ssh_options, ssh_program

    program = ssh_program()
    if program is None:
        raise UserError(f"{host.name}: this host needs the ssh program, which is not installed; install OpenSSH")
    with tempfile.TemporaryDirectory(prefix="sojourn-") as folder:
        found = Path(folder) / "known_hosts"
        first = ["StrictHostKeyChecking=accept-new", f"UserKnownHostsFile={found}", "PreferredAuthentications=none"]
        options = [part for option in (*first, "HashKnownHosts=no") for part in ("-o", option)]  # the first one counts
        command = [program, *options, *ssh_options(host, SECONDS), "-T", *destination(host), "true"]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS + 5, check=False
            )
        except subprocess.TimeoutExpired:
            raise unreachable(host, f"no answer within {SECONDS:g} seconds") from None
        lines = found.read_text(encoding="utf-8").splitlines() if found.is_file() else []
    keys = [" ".join(line.split()[1:3]) for line in lines if len(line.split()) >= 3]
    if not keys:
        why = done.stderr.decode(errors="replace").strip().splitlines() or ["it showed no host key"]
        raise unreachable(host, printable(why[-1], 200))
    return keys[0]
