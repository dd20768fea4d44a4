"""Asks a box what it is: runs the probe there through any connection, and names its platform by our catalogue."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from sojourn.catalog.platforms import platforms
from sojourn.errors import UserError
from sojourn.machine.platform import Platform, detect, find_home
from sojourn.remote.box.probe import MARKER
from sojourn.remote.connection import Runner

# A command over SSH has a short PATH: the image's conda is not on it. Standard input is the script, so that of the
# candidates is closed.
_FIND_PYTHON = """for p in python3 python /root/miniconda3/bin/python /opt/conda/bin/python /opt/venv/bin/python \
/venv/main/bin/python "$HOME/miniconda3/bin/python" /usr/local/bin/python3; do
"$p" -c 'import sys; sys.exit(sys.version_info < (3, 8))' </dev/null >/dev/null 2>&1 && exec "$p" "$@"
done
exit 126"""


@dataclass(frozen=True)
class BoxFacts:
    """`found` is the probe's answer, see box/probe.py."""

    found: dict[str, Any]

    @cached_property
    def platform(self) -> Platform:
        return detect(self.found["variables"], has_folder=lambda folder: folder in self.found["folders"])

    @property
    def pythons(self) -> list[dict[str, Any]]:
        """Those that answered, the best for training first."""
        return [row for row in self.found["pythons"] if "version" in row]

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """Empty where nvidia-smi is missing or fails; `gpu_error` says why."""
        return self.found["gpus"] if isinstance(self.found["gpus"], list) else []

    @property
    def gpu_error(self) -> str | None:
        return self.found["gpus"]["error"] if isinstance(self.found["gpus"], dict) else None

    def suggest_home(self) -> tuple[str, str | None]:
        """The folder that persists there, else the user's home folder; and a warning when it does not survive."""
        writable = {disk["path"] for disk in self.found["disks"] if disk["writable"]}
        home = find_home(self.platform, is_writable=lambda place: place in writable)
        if home.path is None:
            return self.found["user_home"], home.warning
        return str(PurePosixPath(home.path.as_posix())), home.warning

    def disk(self, path: str) -> dict[str, Any] | None:
        return next((disk for disk in self.found["disks"] if disk["path"] == path), None)


def box_script(name: str) -> bytes:
    """The source of a file below remote/box."""
    return resources.files("sojourn.remote.box").joinpath(name).read_bytes()


def python_command(*arguments: str) -> list[str]:
    """Runs any Python ≥ 3.8 of the box with these arguments; exit code 126 where there is none."""
    return ["sh", "-c", _FIND_PYTHON, "sh", *arguments]


def probe(
    box: Runner,
    home: str = "",
    *,
    import_torch: bool = False,
    packages: bool = False,
    hosts: Iterable[str] = (),
    timeout: float = 180,
) -> BoxFacts:
    """What the box is. `import_torch` also tries CUDA, which takes seconds on a cold disk."""
    rows = platforms()
    folders = sorted({folder for row in rows for folder in row.folders})
    places = {place.partition("!")[0] for row in rows for place in (*row.home, *row.fallback)}
    places.update(disk.path for row in rows for disk in row.disks)
    asked = {
        "home": home,
        "variables": sorted({name.partition("=")[0] for row in rows for name in row.env} | {"HF_ENDPOINT"}),
        "folders": folders,
        "paths": sorted(places | set(folders)),
        "hosts": sorted(hosts),
        "import_torch": import_torch,
        "packages": packages,
    }
    done = box.run(python_command("-", json.dumps(asked)), input=box_script("probe.py"), timeout=timeout)
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        if line.startswith(MARKER):
            return BoxFacts(json.loads(line[len(MARKER) :]))
    if done.code == 126:
        raise UserError("the box has no Python 3.8 or newer: rent it with an image that has PyTorch")
    why = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.code}"]
    raise UserError(f"the box could not be examined: {why[-1][:200]}")


def host_port(url: str) -> str:
    """What to connect to for a URL: "pypi.org:443"."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
