"""`sojourn board` from its command line to a listening server."""

from __future__ import annotations

import importlib.util
import logging
import secrets
import webbrowser
from collections.abc import Callable
from pathlib import Path

from sojourn.errors import UserError
from sojourn.run.home import home
from sojourn.web.address import bind, is_loopback, url_of

_NEEDED = ("fastapi", "uvicorn")


def start(
    host: str, port: int, folders: list[Path], browser: bool, hosts: tuple[str, ...], say: Callable[[str], None]
) -> None:
    """Until a signal ends it. Runs go on without it."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"board needs {', '.join(missing)}; type: pip install 'sojourn[board]'")
    local, token = is_loopback(host), secrets.token_urlsafe(24)
    with bind(host, port) as listening:
        address = f"{url_of(listening)}/"
        shown = address if local else f"{address}?token={token}"
        listening.listen(128)
        say(f"board: {shown} (Ctrl-C ends it; runs go on)")
        if browser:
            webbrowser.open(shown)
        import uvicorn  # takes as long as a browser to start: requests wait in the socket meanwhile

        from sojourn.board.app import make_app, make_board
        from sojourn.board.freed_memory import use_few_arenas

        use_few_arenas()
        board = make_board(home(), [folder.absolute() for folder in folders], token, local)
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # requests that its end cuts short are no errors
        config = uvicorn.Config(
            make_app(board, hosts), ws="none", log_config=None, access_log=False, server_header=False,
            timeout_graceful_shutdown=2,
        )  # fmt: skip
        uvicorn.Server(config).run([listening])
