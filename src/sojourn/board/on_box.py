"""`sojourn board --host NAME`: the board of a box, started there and reached through the tunnel."""

from __future__ import annotations

import time
import webbrowser
from collections.abc import Callable

from sojourn.errors import UserError
from sojourn.remote.box_client import Box
from sojourn.remote.hosts import get_host
from sojourn.remote.job import BoxPaths

_PORT = 8765
_CHECK = 10.0  # seconds between two looks at the connection
_START = """
import os, socket, subprocess, sys
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[1])), 1).close()
except OSError:
    os.environ["SOJOURN_HOME"] = sys.argv[2]
    command = [sys.executable, "-m", "sojourn", "board", "--no-browser", "--port", sys.argv[1]]
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    subprocess.Popen(command, start_new_session=True, **quiet)
    print("started")
"""


def board_of_box(name: str, port: int, browser: bool, say: Callable[[str], None]) -> None:
    """Until Ctrl-C; the board stays on the box."""
    host = get_host(name)
    with Box(host, say=say) as box:
        python = f"{BoxPaths(host).ours}/env/bin/python"
        done = box.run([python, "-c", _START, str(_PORT), host.home], timeout=60)
        if done.code != 0:
            raise UserError(
                f"{name}: no Sojourn is installed there yet; launch a run on it first: sojourn launch … --on {name}"
            )
        here = box.forward(port or _PORT, _PORT)
        address = f"http://127.0.0.1:{here}/"
        say(f"board of {name}: {address} (Ctrl-C ends it; runs go on)")
        if browser:
            webbrowser.open(address)
        while True:
            time.sleep(_CHECK)
            box.run(["true"])  # opens a lost connection again, and its forwards
