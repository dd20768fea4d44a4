"""Where a server of ours listens."""

from __future__ import annotations

import ipaddress
import socket
import sys

from sojourn.errors import UserError


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """The socket to listen at; 0: any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.socket(family, socket.SOCK_STREAM)
        if sys.platform != "win32":
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host.strip("[]"), port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        other = f"; choose another one: --port {port + 1}" if "in use" in reason else ""
        raise UserError(f"cannot listen at {host} port {port}: {reason}{other}") from None
    return found


def url_of(listening: socket.socket) -> str:
    """What others open; of a server at all addresses, with the one that this machine has in its network."""
    host, port = listening.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = _own_address(listening.family) or host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _own_address(family: int) -> str | None:
    """From which packets to other networks are sent; none is. None without a network."""
    elsewhere = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((elsewhere, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
