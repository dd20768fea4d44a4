"""What ~/.ssh/config adds to an ssh line: address, user, port, key, machines on the way, the need for OpenSSH."""

from __future__ import annotations

import getpass
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sojourn.config.messages import printable
from sojourn.errors import UserError
from sojourn.expand_user import expand_user
from sojourn.remote.ssh_line import SshLine, check_address, check_user, join_address, parse_address, parse_jumps

_MOST_JUMPS = 8
_OPENSSH_ONLY = (
    *("ProxyCommand", "PKCS11Provider", "SecurityKeyProvider", "GSSAPIAuthentication", "HostbasedAuthentication"),
    *("CertificateFile", "IdentityAgent", "HostKeyAlias", "BindAddress", "CanonicalizeHostname"),
)


@dataclass(frozen=True)
class ConfigEntry:
    """What the file says about one name; `needs_openssh` names the keys that only OpenSSH has."""

    address: str | None = None
    user: str | None = None
    port: int | None = None
    keys: tuple[str, ...] = ()
    jump: str | None = None
    needs_openssh: tuple[str, ...] = ()

    @property
    def says_something(self) -> bool:
        return self != ConfigEntry()


def config_file() -> Path:
    return Path.home() / ".ssh" / "config"


def apply_config(line: SshLine, path: Path | None = None) -> SshLine:
    """The line with what the file adds to it, as `ssh` itself would do; the line's own words come first. Afterwards
    `user` and `port` are known."""
    path = path or config_file()
    name = line.config_name or line.address
    entry = read_entry(name, line.user, line.port, path)
    notes, needed = list(line.notes), list(entry.needs_openssh)
    user = line.user or entry.user
    if user is None:
        user = check_user(getpass.getuser())
        unknown = "" if entry.says_something or "." in name or ":" in name else f"{name} is not in {path}; "
        notes.append(f"{unknown}the line has no user: {user} is taken, as ssh does")
    key = line.key or next((key for key in entry.keys if Path(key).is_file()), None)
    if key and _is_hardware_key(Path(key)):
        needed.append("a hardware key")
    jump = line.jump or parse_jumps(entry.jump or "")
    jump, jump_needs = _resolve_jumps(jump, path)
    needed += jump_needs
    if needed:
        notes.append(f"OpenSSH will make the connections, because of {', '.join(dict.fromkeys(needed))} in {path}")
    address = entry.address if entry.address and line.config_name is None else line.address
    own_address = (f"HostName={address}",) if line.config_name and entry.says_something else ()  # of -o HostName
    return replace(
        line,
        address=check_address(address),
        user=check_user(user),
        port=line.port or entry.port or 22,
        jump=jump,
        key=key,
        config_name=name if entry.says_something else None,
        options=(*line.options, *own_address),
        transport="openssh" if needed else line.transport,
        notes=notes,
    )


def read_entry(name: str, user: str | None, port: int | None, path: Path) -> ConfigEntry:
    if not path.is_file():
        return ConfigEntry()
    options = _options(name, user, port, path)
    jump, command = options.get("ProxyJump"), options.get("ProxyCommand")
    needs = [key for key in _OPENSSH_ONLY if _is_set(options.get(key))]
    if jump and str(jump).lower() == "none":
        jump = None
    if jump and command:  # OpenSSH takes the one that stands first; its own parser decides
        needs.append("ProxyJump with ProxyCommand")
    keys = tuple(str(expand_user(key)) for key in options.get("IdentityFile", ()) if str(key).lower() != "none")
    found_port = options.get("Port") if port is None else None
    found_user = options.get("User") if user is None else None
    return ConfigEntry(options.get("Hostname"), found_user, found_port, keys, jump, tuple(needs))


def _options(name: str, user: str | None, port: int | None, path: Path) -> dict[str, Any]:
    from asyncssh import ConfigParseError
    from asyncssh.config import SSHClientConfig

    class Config(SSHClientConfig):
        """With the hardware-key option, which asyncssh passes over."""

        _handlers = {  # noqa: RUF012
            **SSHClientConfig._handlers,
            "securitykeyprovider": ("SecurityKeyProvider", SSHClientConfig._set_string),
        }

    typed = (getpass.getuser(), () if user is None else user, name, () if port is None else port)
    try:
        found = Config.load(None, [path], False, False, False, *typed)
        if found.has_match_final():
            found = Config.load(None, [path], False, False, True, *typed)
        return dict(found.get_options(False))
    except (ConfigParseError, OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {printable(error, 200)}") from None


def _is_set(value: object) -> bool:
    if isinstance(value, str):
        return value.lower() not in ("", "none", "no", "internal", "ssh_auth_sock")
    return bool(value)


def _resolve_jumps(jumps: tuple[str, ...], path: Path) -> tuple[tuple[str, ...], list[str]]:
    """Each machine on the way as user@address:port; one with a key or a way of its own in the file needs OpenSSH."""
    needs: list[str] = []
    found: list[str] = []
    for jump in jumps:
        user, name, port = parse_address(jump)
        entry = read_entry(name, user, port, path)
        if entry.keys or entry.needs_openssh or entry.jump:
            needs.append(f"the settings of {name}")
        address = check_address(entry.address or name)
        found.append(
            join_address(check_user(user or entry.user or getpass.getuser()), address, port or entry.port or 22)
        )
    if len(found) > _MOST_JUMPS:
        raise UserError(f"{len(found)} machines on the way: at most {_MOST_JUMPS} are supported")
    return tuple(found), needs


def _is_hardware_key(key: Path) -> bool:
    """By its public half: `sk-ssh-ed25519@openssh.com` and the like need a touch of the device."""
    try:
        return key.with_name(key.name + ".pub").read_text(encoding="utf-8", errors="replace").startswith("sk-")
    except OSError:
        return False
