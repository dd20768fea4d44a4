"""Authentication with a key in one round trip, where asyncssh alone takes four.

asyncssh waits for the answer to each of: the request for the authentication service, a request without a key, a
question whether the key would do, the signature. SSH lets a client send the first and the last together (RFC 4252,
section 5: a client may send requests before the answers to earlier ones; section 7: the question is optional). That
happens when asyncssh asks for the service, which is after the host key was verified. This changes methods of one
connection; where a release of asyncssh no longer has them, the connection is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncssh

_METHOD = b"publickey"
_QUESTION, _SIGNED = b"\0", b"\1"
_CHANNEL_OPEN = 90
_NEEDED = (
    "send_service_request",
    "try_next_auth",
    "send_userauth_request",
    "send_packet",
    "_auth_methods",
    "_auth_in_progress",
    "_auth_complete",
)


def can_authenticate_at_once(key: asyncssh.SSHKeyPair) -> bool:
    """Which signature a server takes from an RSA key is known only after its first message."""
    return not bytes(key.algorithm).startswith((b"ssh-rsa", b"rsa-"))


def authenticate_at_once(connection: Any, sent: Callable[[Any], None]) -> None:
    """For a connection whose first key is the one that the box knows; called before anything is sent. `sent` is called
    with the connection when the signature is under way: channels that it opens travel with it."""
    if not all(hasattr(connection, name) for name in _NEEDED):
        return
    ask_for_service, try_next = connection.send_service_request, connection.try_next_auth
    send_request, send_packet = connection.send_userauth_request, connection.send_packet
    started = accepted = False

    def service_and_key(service: bytes) -> None:
        nonlocal started
        ask_for_service(service)
        if not started:
            started = True
            connection._auth_in_progress = True
            connection._auth_methods = [_METHOD]
            try_next()

    def next_auth(*, next_method: bool = False) -> None:
        """asyncssh calls this first when the service is accepted: the request for it is already under way."""
        nonlocal accepted
        if started and not accepted:
            accepted = True
            return
        try_next(next_method=next_method)

    async def signed(method: bytes, *fields: bytes, **options: Any) -> None:
        key = getattr(connection.auth, "_keypair", None)
        if method == _METHOD and fields[:1] == (_QUESTION,) and key is not None:
            await send_request(method, _SIGNED, *fields[1:], key=key, trivial=False)
            sent(connection)
        else:
            await send_request(method, *fields, **options)

    def packet(kind: int, *fields: bytes, **options: Any) -> None:
        """asyncssh holds back what is not for the authentication until that has succeeded; the box reads packets in
        their order, so that a channel may be asked for behind the signature (RFC 4252, section 6)."""
        early = kind == _CHANNEL_OPEN and not connection._auth_complete
        if early:
            connection._auth_complete = True
        try:
            send_packet(kind, *fields, **options)
        finally:
            if early:
                connection._auth_complete = False

    connection.send_packet = packet
    connection.send_service_request = service_and_key
    connection.try_next_auth = next_auth
    connection.send_userauth_request = signed
