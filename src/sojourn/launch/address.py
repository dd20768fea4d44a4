"""Where a machine of several is reached, and the order in which they are counted."""

from __future__ import annotations

import os
import socket

import psutil

from sojourn.config.schema import ParallelConfig
from sojourn.errors import UserError


class Address(str):
    """Where a machine is reached. torchrun's agent counts the machines in the order of these: in that of `node`."""

    node: int

    def __new__(cls, address: str, node: int = 0) -> Address:
        made = super().__new__(cls, address)
        made.node = node
        return made

    def __getnewargs__(self) -> tuple[str, int]:  # type: ignore[override]
        return str(self), self.node

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other) and self.node == getattr(other, "node", 0)

    def __hash__(self) -> int:
        return hash(str(self))

    def __lt__(self, other: str) -> bool:
        return (self.node, str(self)) < (getattr(other, "node", 0), str(other))


def rendezvous_endpoint(parallel: ParallelConfig) -> tuple[str, int]:
    host, _, port = str(parallel.master).partition(":")
    if not (port or "1").isdecimal():
        raise UserError(f"parallel.master: {parallel.master} given, but a port is a number: HOST:{parallel.port}")
    return host, int(port or parallel.port)


def node_address(parallel: ParallelConfig) -> Address:
    """The one from which this machine reaches the meeting place. Its name is often unknown to the others, or known here
    as 127.0.1.1. Gloo and NCCL are told to use the same network."""
    host, port = rendezvous_endpoint(parallel)
    address = _from_here(host, port)
    if address.startswith("127.") and host not in ("localhost", address):  # its own name, in its own hosts file
        address = _from_here("192.0.2.1", port)
    cards = psutil.net_if_addrs().items()
    card = next((name for name, those in cards if address in [one.address for one in those]), None)
    if card is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", card)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", card)
    return Address(address, 0 if parallel.node == "auto" else parallel.node)


def _from_here(host: str, port: int) -> str:
    try:
        family, kind, proto, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"parallel.master: {host} cannot be reached from here ({error.strerror}); give the first machine's address"
        ) from None
