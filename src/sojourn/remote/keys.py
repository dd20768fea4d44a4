"""Our own SSH key, and the host keys that were pinned at first contact (known_hosts, in OpenSSH's format)."""

from __future__ import annotations

import base64
import binascii
import hashlib
from pathlib import Path

from sojourn.errors import UserError
from sojourn.remote.connection import HostKeyChanged
from sojourn.remote.hosts import Host, config_folder
from sojourn.remote.private_files import locked, private_folder, write_private
from sojourn.remote.ssh_line import join_address


def key_path() -> Path:
    return config_folder() / "keys" / "id_ed25519"


def known_hosts_path() -> Path:
    return config_folder() / "known_hosts"


def our_key() -> Path:
    """The private key, made at the first call; `our_public_key` is its other half."""
    path = key_path()
    if path.is_file():
        return path
    import asyncssh

    private_folder(private_folder(path.parent.parent) / path.parent.name).chmod(0o700)
    with locked(path):
        if not path.is_file():
            key = asyncssh.generate_private_key("ssh-ed25519", comment="sojourn")
            write_private(path, key.export_private_key().decode())
    return path


def our_public_key() -> str:
    """One line for authorized_keys, computed from the private key: nobody can put another one beside it."""
    import asyncssh

    path = our_key()
    try:
        key = asyncssh.read_private_key(path)
    except (OSError, asyncssh.KeyImportError) as error:
        raise UserError(f"{path}: cannot be read as a key ({error}); move it away, and add your hosts again") from None
    kind, data = key.export_public_key().decode().split()[:2]
    return f"{kind} {data} sojourn"


def fingerprint(public_key: str) -> str:
    """As `ssh` shows it: SHA256:… of `ssh-ed25519 AAAA…`, with the kind of key."""
    if public_key.startswith("SHA256:"):
        return public_key  # where ssh itself reported it
    kind, _, data = public_key.strip().partition(" ")
    try:
        digest = hashlib.sha256(base64.b64decode(data.split()[0], validate=True)).digest()
    except (IndexError, binascii.Error):
        return f"unreadable ({kind})"
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')} ({_kind(kind)})"


def _kind(kind: str) -> str:
    short = kind.removeprefix("sk-").removeprefix("ssh-").partition("@")[0]
    return "ECDSA" if short.startswith("ecdsa") else short.upper()


def known_hosts_name(address: str, port: int) -> str:
    """How known_hosts calls a machine."""
    return address if port == 22 else f"[{address}]:{port}"


def pinned_keys(address: str, port: int) -> list[str]:
    """The public keys (`ssh-ed25519 AAAA…`) that were pinned for this machine."""
    name = known_hosts_name(address, port)
    return [key for line_name, key in _lines() if line_name == name]


def pin(address: str, port: int, public_keys: list[str]) -> None:
    """From now on only these keys are accepted from this machine."""
    path, name = known_hosts_path(), known_hosts_name(address, port)
    with locked(path):
        kept = [f"{other} {key}" for other, key in _lines() if other != name]
        _write(path, [*kept, *(f"{name} {' '.join(key.split()[:2])}" for key in public_keys)])


def unpin(address: str, port: int) -> None:
    path = known_hosts_path()
    with locked(path):
        if pinned_keys(address, port):
            name = known_hosts_name(address, port)
            _write(path, [f"{other} {key}" for other, key in _lines() if other != name])


def host_key_changed(host: Host, address: str, port: int, shown: str) -> HostKeyChanged:
    """`shown`: the public key that the machine at this address has now; it may be a machine on the way to the host."""
    old = " or ".join(fingerprint(key) for key in pinned_keys(address, port)) or "another one"
    return HostKeyChanged(
        f"{host.name}: the host key of {join_address(None, address, port)} is not the one that was pinned: "
        f"pinned {old}, now {fingerprint(shown)}. Either the box was reinstalled or its address now belongs to another "
        "box, or somebody sits between you and it. Nothing was sent. Compare with the platform's page; if the new key "
        f'is right: sojourn host add {host.name} "{host.ssh_line}" --replace --accept-new-key'
    )


def _lines() -> list[tuple[str, str]]:
    try:
        text = known_hosts_path().read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    parts = (line.split(None, 1) for line in text.splitlines())
    return [(part[0], part[1].strip()) for part in parts if len(part) == 2 and not part[0].startswith("#")]


def _write(path: Path, lines: list[str]) -> None:
    write_private(path, "".join(f"{line}\n" for line in lines))
