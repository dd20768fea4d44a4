"""One archive for machines without SSH: our wheel, the run, its files, prepared data, supervisor and start script.

It is uploaded through a notebook's file browser and started by Python itself: `python NAME.zip`. The same line
continues the run. The archive has no secrets, and the same run gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.catalog.platforms import platforms
from sojourn.config.load import Loaded, dump, with_settings
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.remote.box import start
from sojourn.remote.portability import Destination, Say, Shipment, make_shipment
from sojourn.remote.wheel import build_wheel
from sojourn.storage.files import advice, sha256

_DATE = (1980, 1, 1, 0, 0, 0)
_PACKED = (".safetensors", ".gguf", ".gz", ".zst", ".parquet", ".whl", ".pt", ".pth")  # compressing them saves nothing
_MOST_TO_RUN = 2**31  # Python before 3.13 does not run larger archives
_MIN_FREE_BYTES = 256 << 20
_DECISIVE = ("model", "method", "data", "train")
_BOX = Path(start.__file__).parent


@dataclass(frozen=True)
class Bundle:
    """`start`: the line that starts and continues it there. `parts`: bytes by kind."""

    path: Path
    run: str
    config: RunConfig
    start: str
    size: int
    sha256: str
    parts: dict[str, int]
    notes: tuple[str, ...]
    artefact: str | None

    @property
    def needs_hub(self) -> bool:
        return any("from the hub" in note for note in self.notes)


@dataclass(frozen=True)
class _Entry:
    """A file of the archive: `path` is where it goes below the home folder, None where the start script reads it."""

    name: str
    kind: str
    content: Path | bytes
    path: str | None = None

    @property
    def size(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest() if isinstance(self.content, bytes) else sha256(self.content)


def make_bundle(
    loaded: Loaded,
    out: Path | None = None,
    *,
    settings: dict[str, Any] | None = None,
    allow_secrets: bool = False,
    platform: str = "generic",
    mirror_disks: tuple[str, ...] = (),
    say: Say = lambda line: None,
) -> Bundle:
    """`settings`: keys changed for that platform; `mirror_disks`: its folders for a mirror. `out`: NAME.zip here where
    not given."""
    config = with_settings(loaded.config, settings) if settings else loaded.config
    to = Destination(start.HOME_MARK, disks=mirror_disks)
    shipment = make_shipment(config, to, allow_secrets=allow_secrets, say=say)
    shipment.check()
    run = run_name(loaded, shipment)
    config = with_settings(shipment.config, {"name": run})
    out = out or Path(f"{run}.zip")
    with tempfile.TemporaryDirectory() as scratch:
        wheel = build_wheel(Path(scratch))
        entries = _entries(config, run, shipment, wheel, platform)
        _write(out, entries)
        parts = dict[str, int]()
        for entry in entries:
            parts[entry.kind] = parts.get(entry.kind, 0) + entry.size
    size = out.stat().st_size
    line = f"python {shlex.quote(out.name)}"
    if size > _MOST_TO_RUN:
        line = f"python -m zipfile -e {shlex.quote(out.name)} {run} && python {run}/start.py"
    notes = tuple(note.replace(start.HOME_MARK, "HOME") for note in shipment.notes)
    return Bundle(out, run, config, line, size, sha256(out), parts, notes, shipment.artefact)


def run_name(loaded: Loaded, shipment: Shipment) -> str:
    """The user's name; else the preset's with a hash of what decides the result, so that two runs do not meet there."""
    name = str(loaded.config.name or "run")
    if loaded.name_given:
        return name
    decisive = {key: value for key, value in dump(shipment.config).items() if key in _DECISIVE}
    facts = json.dumps([decisive, shipment.artefact], sort_keys=True, default=str)
    return f"{name[:80]}-{hashlib.sha256(facts.encode()).hexdigest()[:6]}"


def make_spec(run: str, config: RunConfig, platform: str, prepared: bool) -> dict[str, Any]:
    """The job of `box/supervisor.py`, with marks for the folder and the Python that the start script finds there."""
    job = f"{start.HOME_MARK}/.sojourn/jobs/{run}"
    sojourn = [start.PYTHON_MARK, "-m", "sojourn"]
    return {
        "version": 1,
        "run": run,
        "home": start.HOME_MARK,
        "job": job,
        "run_folder": f"{start.HOME_MARK}/runs/{run}",
        "env": {"SOJOURN_HOME": start.HOME_MARK, "PYTHONUNBUFFERED": "1"},
        "secret_env_files": {},
        "phases": [
            *([] if prepared else [{"name": "prepare", "argv": [*sojourn, "prepare", f"{job}/run.yaml"]}]),
            {"name": "train", "argv": [*sojourn, "train", f"{job}/run.yaml"], "restart": True},
        ],
        "stall_minutes": 30,
        "min_free_bytes": _MIN_FREE_BYTES,
        "max_restarts": 3,
        "grace_seconds": 60,
        "hold_minutes": 0,
        "mirror": config.save.mirror,
        "disks": [],
        "platform": platform,
        "stop": {"when_done": False, "action": "none", "command": None},
        "notify": [],
    }


def extras_of(config: RunConfig) -> list[str]:
    """The optional packages that this run needs."""
    extras = ["train"]
    if config.data.clean.languages or config.data.clean.duplicates == "near":
        extras.append("clean")
    if config.parallel.engine == "deepspeed" or config.parallel.deepspeed is not None:
        extras.append("deepspeed")
    return extras


def _entries(config: RunConfig, run: str, shipment: Shipment, wheel: Path, platform: str) -> list[_Entry]:
    home = f"{start.HOME_MARK}/"
    payload = [
        _Entry(f"payload/.sojourn/wheels/{wheel.name}", "wheel", wheel, f".sojourn/wheels/{wheel.name}"),
        _Entry("payload/.sojourn/box/supervisor.py", "programs", _BOX / "supervisor.py", ".sojourn/box/supervisor.py"),
    ]
    for local, remote in (*shipment.items, *shipment.last_items):  # in this order: what marks a folder complete is last
        path = remote.removeprefix(home)
        kind = "prepared data" if path.startswith("prepared/") else "files"
        payload.append(_Entry(f"payload/{path}", kind, local, path))
    facts = {
        "version": 1,
        "run": run,
        "wheel": f".sojourn/wheels/{wheel.name}",
        "extras": extras_of(config),
        "platforms": [
            {"name": one.name, "env": one.env, "folders": one.folders, "home": one.home, "fallback": one.fallback}
            for one in platforms()
        ],
        "files": [{"name": e.name, "path": e.path, "size": e.size, "sha256": e.digest} for e in payload],
    }
    program = (_BOX / "start.py").read_bytes()
    return [
        _Entry("__main__.py", "programs", program),  # `python NAME.zip`
        _Entry("start.py", "programs", program),
        _Entry("bundle.json", "settings", _json(facts)),
        _Entry("run.json", "settings", _json(dump(config))),
        _Entry("spec.json", "settings", _json(make_spec(run, config, platform, shipment.artefact is not None))),
        *payload,
    ]


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, default=list) + "\n").encode()


def _write(out: Path, entries: Iterable[_Entry]) -> None:
    """Deterministic: one date, one order, the same attributes wherever it is made."""
    stage = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(stage, "w", allowZip64=True) as archive:
            for entry in entries:
                info = zipfile.ZipInfo(entry.name, _DATE)
                info.create_system, info.external_attr = 3, 0o644 << 16
                stored = entry.name.endswith(_PACKED)
                info.compress_type = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
                info.file_size = entry.size
                with archive.open(info, "w", force_zip64=entry.size >= 2**31) as target:
                    _copy(entry.content, target)
        stage.replace(out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror or error}; {advice(error)}") from None
    finally:
        stage.unlink(missing_ok=True)


def _copy(content: Path | bytes, target: Any) -> None:
    if isinstance(content, bytes):
        target.write(content)
        return
    with content.open("rb") as file:
        while block := file.read(1 << 20):
            target.write(block)
