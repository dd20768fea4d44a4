"""Reads the ssh line that a platform shows: `ssh -p 123 -J jump root@address`, a URL, an address, a name.

The line is never given to a shell, and nothing in it can become an option of ssh: addresses and users that begin with
"-" are refused. Messages never repeat the whole line, since people paste passwords into it.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from sojourn.config.messages import did_you_mean, printable
from sojourn.errors import UserError
from sojourn.expand_user import expand_user

EXAMPLE = '"ssh -p 12345 root@region-9.autodl.com"'
_WITH_VALUE = set("BbcDEeFIiJLlmOopPQRSWw")
_FLAGS = set("1246AaCfGgKkMNnqsTtVvXxYy")
_IGNORED = {  # of -o: what a session of ours does not have, or decides itself
    *("addkeystoagent", "addressfamily", "batchmode", "checkhostip", "clearallforwardings", "compression"),
    *("connectionattempts", "connecttimeout", "controlmaster", "controlpath", "controlpersist", "dynamicforward"),
    *("escapechar", "exitonforwardfailure", "forkafterauthentication", "forwardagent", "forwardx11"),
    *("forwardx11trusted", "gatewayports", "globalknownhostsfile", "hashknownhosts", "identitiesonly", "ipqos"),
    *("localforward", "loglevel", "numberofpasswordprompts", "passwordauthentication", "permitlocalcommand"),
    *("preferredauthentications", "pubkeyauthentication", "remotecommand", "remoteforward", "requesttty", "sendenv"),
    *("serveralivecountmax", "serveraliveinterval", "sessiontype", "setenv", "stdinnull", "stricthostkeychecking"),
    *("tcpkeepalive", "updatehostkeys", "userknownhostsfile", "visualhostkey", "warnweakcrypto"),
}
_AS_OPTION = {"b": "BindAddress", "B": "BindInterface", "c": "Ciphers", "m": "MACs", "I": "PKCS11Provider", "P": "Tag"}
_HOST_NAME = re.compile(r"[^\W_]([\w.-]{0,251}\w\.?)?|_[\w.-]{0,252}")
_USER = re.compile(r"[^-\s@:/,'\"`;&<>|(){}$*?!\\#][^\s@:/,'\"`;&<>|(){}$*?!]{0,127}(@[\w.-]{1,120})?")
_OTHER_PROGRAMS = {
    "scp",
    "sftp",
    "rsync",
    "mosh",
    "ftp",
    "telnet",
    "ssh-copy-id",
    "ssh-keygen",
    "autossh",
    "plink",
    "putty",
}


@dataclass
class SshLine:
    """What the line says. `user` and `port` are None where it does not; `options`: Key=Value, only OpenSSH knows them.
    `notes`: one line each about what was ignored or changed."""

    address: str
    user: str | None = None
    port: int | None = None
    jump: tuple[str, ...] = ()
    key: str | None = None
    config_name: str | None = None
    transport: Literal["asyncssh", "openssh"] = "asyncssh"
    options: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)


def parse_ssh_line(text: str) -> SshLine:
    """Raises UserError for whatever is no ssh line. Reads no file: see ssh_config.py for names of ~/.ssh/config."""
    words = _split(text)
    first = Path(words[0].replace("\\", "/")).name.lower().removesuffix(".exe")
    if any(Path(word).name.lower().removesuffix(".exe") == "sshpass" for word in words):
        raise _password_inside("sshpass")
    if first in _OTHER_PROGRAMS:
        raise UserError(f"this is a line for {first}, not for ssh; copy the one that begins with ssh, like {EXAMPLE}")
    if first == "ssh":
        words = words[1:]
    elif len(words) > 1 and "@" not in words[0] and not words[0].startswith(("-", "ssh://")):
        known = did_you_mean(first, ["ssh"])
        raise UserError(
            f"'{printable(words[0])}' is not ssh{known}; give the line that begins with ssh, like {EXAMPLE}"
        )
    return _Reader().read(words)


def parse_address(text: str) -> tuple[str | None, str, int | None]:
    """User, address and port of `user@address:port`, `[IPv6]:port`, `ssh://user@address:port`."""
    if text.startswith("ssh://"):
        return _parse_url(text)
    user, at, place = text.rpartition("@")
    if at and re.search(r"[^:]:[^:]", user):
        raise _password_inside(f"{printable(user.split(':')[0])}:…@")
    port: int | None = None
    if bracketed := re.fullmatch(r"\[([^\[\]]*)\](?::(\d+))?", place):
        place, port = bracketed[1], check_port(bracketed[2]) if bracketed[2] else None
    elif place.count(":") == 1:
        place, _, number = place.partition(":")
        port = check_port(number)
    return check_user(user) if at else None, check_address(place), port


def check_address(text: str) -> str:
    if text.startswith("-"):
        raise UserError(f"'{printable(text)}' cannot be an address: it begins with '-'")
    if _HOST_NAME.fullmatch(text) and text.isprintable():
        return text
    try:
        ipaddress.ip_address(text)
    except ValueError:
        shown = f"'{printable(text)}' is not an address" if text else "there is no address"
        raise UserError(f"{shown}; give the platform's ssh line, like {EXAMPLE}") from None
    if "%" in text and not re.fullmatch(r"[0-9A-Fa-f:.]+%[\w.-]+", text):
        raise UserError(f"'{printable(text)}' is not an address")
    return text


def check_user(text: str) -> str:
    if not _USER.fullmatch(text) or not text.isprintable():
        raise UserError(f"'{printable(text)}' cannot be a user's name on a machine; give a line like {EXAMPLE}")
    return text


def check_port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and 0 < int(text) < 65536):
        raise UserError(f"'{printable(text)}' is not a port: a number from 1 to 65535 is needed")
    return int(text)


def join_address(user: str | None, address: str, port: int | None) -> str:
    """The inverse of `parse_address`."""
    place = f"[{address}]" if ":" in address else address
    return f"{f'{user}@' if user else ''}{place}{f':{port}' if port else ''}"


def parse_jumps(text: str) -> tuple[str, ...]:
    """The machines of -J or ProxyJump; `none` is none."""
    if text.strip().lower() in ("", "none"):
        return ()
    return tuple(join_address(*parse_address(part.strip())) for part in text.split(","))


def _parse_url(text: str) -> tuple[str | None, str, int | None]:
    try:
        parts = urlsplit(text)
        user, address, port = parts.username, parts.hostname, parts.port
    except ValueError:
        raise UserError(
            f"'ssh://…' is not a valid address; it looks like ssh://root@1.2.3.4:12345, or {EXAMPLE}"
        ) from None
    if parts.password:
        raise _password_inside("ssh://user:…@")
    if parts.path.strip("/") or parts.query:
        raise UserError("an ssh:// address ends after the port, like ssh://root@1.2.3.4:12345")
    if port == 0:
        raise UserError("0 is not a port: a number from 1 to 65535 is needed")
    return check_user(unquote(user)) if user else None, check_address(unquote(address or "")), port


def _password_inside(where: str) -> UserError:
    return UserError(
        f"there is a password in this line ({where}): leave it out, it is asked for without being shown; in a script: "
        "--password-stdin, or the variable SOJOURN_SSH_PASSWORD"
    )


def _split(text: str) -> list[str]:
    lines = [line.strip() for line in text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines() if line.strip()]
    if not lines:
        raise UserError(f"the ssh line is empty; paste the one that the platform shows, like {EXAMPLE}")
    if len(lines) > 1:
        raise UserError(f"{len(lines)} lines were given; paste only the one that begins with ssh, like {EXAMPLE}")
    line = re.sub(r"^[$#>%]\s+", "", lines[0])  # a shell's prompt
    line = re.sub(r"(^|\s)[–—−－](?=\w)", r"\1-", line)  # web pages turn - into a dash
    windows = re.search(r"(^|[\s\"'=])(~|[A-Za-z]:|%\w+%)\\", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters, lexer.escape = True, "", "" if windows else "\\"
    try:
        words = [word for word in lexer if word]
    except ValueError:
        raise UserError(f"a quote is missing in this ssh line; it should look like {EXAMPLE}") from None
    if not words:
        raise UserError(f"the ssh line is empty; paste the one that the platform shows, like {EXAMPLE}")
    return words


class _Reader:
    """Goes through the words as OpenSSH does: options may stand on either side of the address."""

    def __init__(self) -> None:
        self.address: str | None = None
        self.user: str | None = None
        self.port: int | None = None
        self.host_name: str | None = None
        self.jump: tuple[str, ...] | None = None
        self.keys: list[str] = []
        self.options: list[str] = []
        self.ignored: list[str] = []
        self.notes: list[str] = []

    def read(self, words: list[str]) -> SshLine:
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if word == "--" and rest and self.address is None:
                self._place(rest.pop(0))
                break
            if word == "--":
                break
            if word.startswith("-") and word != "-":
                self._flags(word, rest)
            elif self.address is None:
                self._place(word)
            else:
                rest.insert(0, word)
                break
        if rest:
            self.notes.append("the command after the address is ignored")
        if self.address is None:
            raise UserError(f"there is no address in this ssh line; it should look like {EXAMPLE}")
        return self._line(self.address)

    def _line(self, address: str) -> SshLine:
        if self.ignored:
            self.notes.append(f"ignored: {', '.join(dict.fromkeys(self.ignored))}")
        if len(self.keys) > 1:
            self.notes.append(f"of several keys the first is used: {printable(self.keys[0], 200)}")
        if self.options:
            names = ", ".join(dict.fromkeys(option.partition("=")[0] for option in self.options))
            self.notes.append(f"OpenSSH will make the connections, because of {names}")
        line = SshLine(self.host_name or address, self.user, self.port, self.jump or ())
        line.config_name = address if self.host_name else None
        line.key = str(expand_user(self.keys[0])) if self.keys else None
        line.transport = "openssh" if self.options else "asyncssh"
        line.options, line.notes = tuple(self.options), self.notes
        return line

    def _place(self, word: str) -> None:
        user, self.address, port = parse_address(word)
        self.user, self.port = self.user or user, self.port or port

    def _flags(self, word: str, rest: list[str]) -> None:
        """`-N`, `-NfL value`, `-p22`."""
        for index, letter in enumerate(word[1:], 1):
            if letter in _WITH_VALUE:
                value = word[index + 1 :] or (rest.pop(0) if rest else "")
                if not value:
                    raise UserError(f"-{letter} needs a value in this ssh line; it should look like {EXAMPLE}")
                self._option(letter, value)
                return
            if letter not in _FLAGS:
                raise UserError(f"ssh has no option '{printable(word, 20)}'; the line should look like {EXAMPLE}")
            if letter == "K":
                self.options.append("GSSAPIAuthentication=yes")
            else:
                self.ignored.append(f"-{letter}")

    def _option(self, letter: str, value: str) -> None:
        if letter == "p":
            self.port = check_port(value)
        elif letter == "l":
            self.user = check_user(value)
        elif letter == "i":
            self.keys.append(value)
        elif letter == "J":
            self.jump = parse_jumps(value)
        elif letter == "o":
            self._key_value(value)
        elif letter == "F":
            raise UserError(
                "-F is not supported: copy that host's part of the file into ~/.ssh/config, and give its name"
            )
        elif letter in _AS_OPTION:
            self.options.append(f"{_AS_OPTION[letter]}={value}")
        else:
            self.ignored.append(f"-{letter}")

    def _key_value(self, text: str) -> None:
        """The first value of a key counts, as in OpenSSH; -p and -l count before -o."""
        name, value = (part.strip() for part in re.split(r"\s*=\s*|\s+", text.strip() + " ", maxsplit=1))
        value = value.strip('"')
        if not re.fullmatch(r"[A-Za-z0-9]+", name) or not value:
            raise UserError(f"'-o {printable(text, 30)}' is not Key=Value, like -o Port=12345")
        key = name.lower()
        if key == "port":
            self.port = self.port or check_port(value)
        elif key == "user":
            self.user = self.user or check_user(value)
        elif key == "hostname":
            self.host_name = self.host_name or check_address(value)
        elif key == "identityfile":
            self.keys.append(value)
        elif key == "proxyjump":
            self.jump = parse_jumps(value) if self.jump is None else self.jump
        elif key in _IGNORED:
            self.ignored.append(name)
        elif any(not character.isprintable() for character in value):
            raise UserError(f"the value of -o {name} has characters that cannot be printed")
        else:
            self.options.append(f"{name}={value}")
