"""A box that is this machine with a HOME of its own: its commands run here, over no connection. And images for it."""

from __future__ import annotations

import http.server
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from sojourn.errors import RunFailed
from sojourn.remote.connection import Completed
from sojourn.remote.hosts import Host

TORCH = """
from types import SimpleNamespace
__version__ = "{version}"
version = SimpleNamespace(cuda="12.4")
cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1)
"""


@dataclass
class LocalBox:
    """`image`: the Python on its PATH; `commands`: what was run, for tests that count."""

    folder: Path
    image: Path
    extra_path: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)

    @property
    def host(self) -> Host:
        return Host("box", "root", "192.0.2.1", home=str(self.folder / "data"), price_per_hour=2.19, currency="CNY")

    def run(
        self,
        argv: Sequence[str],
        *,
        input: bytes = b"",
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        self.commands.append(list(argv))
        path = os.pathsep.join([str(self.image.parent), *self.extra_path, "/usr/bin", "/bin"])
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        (self.folder / "user").mkdir(exist_ok=True)
        there = {"PATH": path, "HOME": str(self.folder / "user"), "SHELL": "/bin/sh", **self.env, **(env or {})}
        try:
            done = subprocess.run(argv, input=input, capture_output=True, timeout=timeout, env=there, check=False)
        except OSError as error:
            return Completed(127, b"", str(error).encode())
        return Completed(done.returncode, done.stdout, done.stderr)

    def write_bytes(self, path: str, data: bytes, mode: int = 0o644) -> None:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(data)
        except OSError as error:
            raise RunFailed(f"{path}: {error.strerror}") from error

    def push(self, items: Sequence[tuple[Path, str]], *, durable: bool = False) -> None:
        for local, there in items:
            self.write_bytes(there, local.read_bytes())


def make_image(folder: Path, torch: str | None = "2.6.0+cu124", pip: bool = True) -> Path:
    """A venv that stands for an image's Python, with a torch of that version; its pip is this Python's own."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    if torch is not None:
        (site / "torch").mkdir()
        (site / "torch/__init__.py").write_text(TORCH.format(version=torch))
        (site / "torch/version.py").write_text(
            "__version__ = 'x'\ncuda: Optional[str] = '12.4'\nhip: Optional[str] = None\n"
        )
        _describe(site, "torch", torch)
    if pip:
        import pip as ours

        shutil.copytree(Path(ours.__file__).parent, site / "pip")
        _describe(site, "pip", ours.__version__)
    return folder / "bin/python"


def _describe(site: Path, name: str, version: str) -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "INSTALLER").write_text("image\n")


def make_wheel(folder: Path, name: str, version: str, needs: Sequence[str] = (), code: str = "") -> Path:
    stem = f"{name.replace('-', '_')}-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{stem}-py3-none-any.whl"
    info = f"{stem}.dist-info"
    headers = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(
        f"Requires-Dist: {n}\n" for n in needs
    )
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name.replace('-', '_')}/__init__.py", textwrap.dedent(code))
        archive.writestr(f"{info}/METADATA", headers)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return wheel


def make_index(folder: Path, wheels: Sequence[Path]) -> None:
    """A package index and a hub, as static files."""
    for wheel in wheels:
        place = folder / "simple" / wheel.name.partition("-")[0].replace("_", "-")
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(wheel, place)
    (folder / "simple/peft").mkdir(parents=True, exist_ok=True)
    (folder / "simple/peft/index.html").write_text("<title>links for peft</title>")
    (folder / "gpt2/resolve/main").mkdir(parents=True, exist_ok=True)
    (folder / "gpt2/resolve/main/config.json").write_text('{"model_type": "gpt2"}')


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
