"""How channels from the laptop reach agents: wide pipes, a greeting, and a socket for more of them. Stdlib only.

The first agent of a connection is started by a login shell and loads what it needs. Others come by a channel that the
SSH server forwards to the socket, and are forks of it. All this is done before the rest of the agent is loaded: what
arrives meanwhile waits in the pipes and in the socket's queue.
"""

from __future__ import annotations

import contextlib
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import BinaryIO, Callable

MAGIC = b"sojourn-agent-2 "
LISTENS, ALONE = b"1", b"0"  # follows it
_WAITING = 16


def greet(path: str) -> socket.socket | None:
    """Listens on `path`, if that is not empty and can be, then says so."""
    _widen_pipes()
    server = _listen(path) if path else None
    sys.stdout.buffer.write(MAGIC + (ALONE if server is None else LISTENS))
    sys.stdout.buffer.flush()
    return server


def _widen_pipes() -> None:
    """To 1 MiB, where the system can: a sixteenth of the switches between the SSH server and us."""
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl

        for handle in (0, 1):
            fcntl.fcntl(handle, getattr(fcntl, "F_SETPIPE_SZ", 1031), 1 << 20)


def _listen(path: str) -> socket.socket | None:
    """In a folder that only this user may enter."""
    import socket

    try:
        os.mkdir(os.path.dirname(path), 0o700)
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen(_WAITING)
        return server
    except (OSError, AttributeError):
        _remove(path)
        return None


def accept(server: socket.socket, serve: Callable[[BinaryIO, BinaryIO], None]) -> None:
    """In a process of its own, which ends with this one."""
    ended, alive = os.pipe()  # `alive` stays open until this process ends
    if os.fork() == 0:
        try:
            os.close(alive)
            _accept(server, ended, serve)
        finally:
            _remove(server.getsockname())
            os._exit(0)
    os.close(ended)
    server.close()


def _accept(server: socket.socket, ended: int, serve: Callable[[BinaryIO, BinaryIO], None]) -> None:
    import select
    import signal

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes below
    nothing = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):  # else the channel of the first agent would not end with it
        os.dup2(nothing, handle)
    while ended not in select.select([server.fileno(), ended], [], [])[0]:
        channel = server.accept()[0]
        if os.fork() == 0:
            server.close()
            os.close(ended)
            with contextlib.suppress(OSError):
                channel.sendall(MAGIC + ALONE)
                serve(channel.makefile("rb"), channel.makefile("wb"))
            os._exit(0)
        channel.close()


def _remove(path: str) -> None:
    for how, name in ((os.unlink, path), (os.rmdir, os.path.dirname(path))):
        with contextlib.suppress(OSError):
            how(name)
