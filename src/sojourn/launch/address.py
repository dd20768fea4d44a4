"""The address of a node, and the order in which torchrun numbers the nodes.

torchrun names a node by its host name and numbers nodes in the order of these names. Host names are often unknown to
other nodes, so we pass the address from which the node reaches the rendezvous, as a string that sorts by `--node_rank`.
"""

from __future__ import annotations

import os
import socket

import psutil

from sojourn.config.schema import ParallelConfig
from sojourn.errors import UserError


class Address(str):
    """An address that sorts by the rank of its node, which is how torchrun's agent assigns ranks."""

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
    """Host and port at which the nodes meet."""
    host, _, port = str(parallel.master).partition(":")
    if not (port or "1").isdecimal():
        raise UserError(f"parallel.master: {parallel.master} given, but a port is a number: HOST:{parallel.port}")
    return host, int(port or parallel.port)


def node_address(parallel: ParallelConfig) -> Address:
    """The address from which this node reaches the rendezvous. Gloo and NCCL are set to the same network interface."""
    host, port = rendezvous_endpoint(parallel)
    address = _source_address(host, port)
    if address.startswith("127.") and host not in ("localhost", address):  # its own name, in its own hosts file
        address = _source_address("192.0.2.1", port)
    interfaces = psutil.net_if_addrs().items()
    interface = next((name for name, known in interfaces if address in [one.address for one in known]), None)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    return Address(address, 0 if parallel.node == "auto" else parallel.node)


def _source_address(host: str, port: int) -> str:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"parallel.master: {host} cannot be reached from here ({error.strerror}); give the first node's address"
        ) from None
