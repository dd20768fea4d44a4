"""No secret is in a file that others could read, in a log, a run folder or a command line, on either machine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from laptop import RUN, Laptop
from remote_box import PASSWORD, RemoteBox, files_with, needs_box

pytestmark = needs_box

TOKEN = "canary-token-5820"


@contextlib.contextmanager
def _webhook(address: str) -> Iterator[tuple[str, list[bytes]]]:
    """A server on this machine that the box reaches; its URL has the token in it."""
    got: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer((address, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{address}:{server.server_port}/{TOKEN}", got
    finally:
        server.shutdown()


def test_secrets_are_seen_nowhere_and_the_webhook_is_called(box: RemoteBox, laptop: Laptop) -> None:
    network, _, last = box.address.rpartition(".")
    with _webhook(f"{network}.{int(last) - 1}") as (url, got):
        words = ("launch", *RUN, "name=secrets", "--on", "box", "--notify", "webhook")
        process = laptop.start(*words, SOJOURN_NOTIFY_WEBHOOK=url, HF_TOKEN=TOKEN)
        seen = set()
        while process.poll() is None:
            seen |= _command_lines_with(TOKEN)
        out, err = process.communicate()
    assert process.returncode == 0 and TOKEN not in out + err, out + err
    assert seen == set()
    assert got and b"secrets" in got[0] and TOKEN.encode() not in got[0]
    assert files_with(TOKEN, laptop.folder, box.root / "root", box.root / "var", box.root / "tmp") == []
    assert files_with(PASSWORD, laptop.folder, box.root / "root", box.root / "var", box.root / "tmp") == []


def _command_lines_with(text: str) -> set[str]:
    found = set()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = entry.read_bytes()
            found |= {line.decode(errors="replace")} if text.encode() in line else set()
    return found
