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
