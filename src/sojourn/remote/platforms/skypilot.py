"""SkyPilot, the way to the big clouds and to Kubernetes: a run as a task whose managed job recovers from our mirror.

The task brings the bundle, mounts a bucket for the mirror, and trains; after a preemption SkyPilot starts it on another
machine, where training goes on from the newest checkpoint in the bucket. A restart after an error does the same.
"""

from __future__ import annotations

import getpass
import hashlib
import platform
import re
import shlex
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.catalog.gpus import find_gpu
from sojourn.config.load import Loaded
from sojourn.config.yaml_file import write_yaml
from sojourn.errors import UserError
from sojourn.remote.bundle import Bundle, make_bundle
from sojourn.remote.portability import Say
from sojourn.storage.files import write_text

MIRROR = "/sojourn-mirror"
HOME = "~/sojourn"
_STORES = ("s3", "gcs", "azure", "r2", "ibm", "oci", "nebius", "coreweave")
_NAMES = {"A100 40GB": "A100", "A100 80GB": "A100-80GB", "V100 16GB": "V100", "V100 32GB": "V100-32GB"}
_TORCH = "torch>=2.6"


@dataclass(frozen=True)
class SkyOptions:
    """What the machine is to be. `bucket`: for the mirror; one of our own name is made where none is given. `store`:
    whose; SkyPilot's choice where not given. `infra`: such as aws, gcp/us-central1 or k8s."""

    gpu: str = "A100"
    count: int = 1
    spot: bool = True
    bucket: str | None = None
    store: str | None = None
    infra: str | None = None
    disk_gb: int = 256
    max_hourly_cost: float | None = None

    def check(self) -> None:
        if self.count < 1:
            raise UserError(f"sky: {self.count} GPUs; allowed: 1 and more")
        if self.store is not None and self.store.lower() not in _STORES:
            raise UserError(f"sky: no store “{self.store[:30]}”; there are {', '.join(_STORES)}")
        if self.bucket is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", self.bucket):
            raise UserError(f"sky: “{self.bucket[:70]}” is no name of a bucket: 3 to 63 of a–z, 0–9, - and .")


def make_sky_task(
    loaded: Loaded, options: SkyOptions, out: Path | None = None, *, allow_secrets: bool = False, say: Say = print
) -> tuple[Bundle, Path]:
    """The bundle, and the task's YAML beside it (`out`, else NAME.sky.yaml)."""
    options.check()
    mirror = loaded.config.save.mirror
    if mirror not in (None, MIRROR) and not str(mirror).startswith("hub:"):
        raise UserError(f"save.mirror: on SkyPilot it is a bucket at {MIRROR} or hub:USER/REPOSITORY; leave it out")
    settings: dict[str, Any] = {} if mirror else {"save.mirror": MIRROR}
    if options.count > 1 and loaded.config.parallel.gpus == "auto":
        settings["parallel.gpus"] = "all"
    folder = out.parent if out else Path()
    made = make_bundle(
        loaded, None if out is None else folder / f"{out.name.split('.')[0]}.zip", settings=settings,
        allow_secrets=allow_secrets, platform="skypilot", mirror_disks=(MIRROR,), say=say,
    )  # fmt: skip
    path = out or folder / f"{made.run}.sky.yaml"
    header = (
        f"# sky jobs launch {path.name}   (a managed job: SkyPilot recovers it, training goes on from the mirror)\n"
    )
    write_text(path, header + write_yaml(task_config(made, options)))
    return made, path


def task_config(made: Bundle, options: SkyOptions) -> dict[str, Any]:
    """What sky.Task.from_yaml_config reads."""
    name = re.sub(r"[^a-z0-9]+", "-", made.run.lower()).strip("-")[:50] or "run"
    bundle = f"{HOME}-{name}.zip"
    # Exit code 3 is a limit of the user's (budget, time): it is the end of this job, not an error to recover from.
    resources: dict[str, Any] = {
        "accelerators": f"{sky_gpu(options.gpu)}:{options.count}",
        "use_spot": options.spot,
        "disk_size": options.disk_gb,
        "job_recovery": {"max_restarts_on_errors": 3},
    }
    if options.infra:
        resources["infra"] = options.infra
    if options.max_hourly_cost is not None:
        resources["max_hourly_cost"] = options.max_hourly_cost
    mounts: dict[str, Any] = {bundle: made.path.resolve().as_posix()}
    if made.config.save.mirror == MIRROR:
        # MOUNT: what is written is in the bucket when the write returns; a cached mount could lose it.
        storage: dict[str, Any] = {"name": options.bucket or bucket_name(name), "mode": "MOUNT", "persistent": True}
        mounts[MIRROR] = {**storage, **({"store": options.store.lower()} if options.store else {})}
    setup = [
        "set -e",
        f"python -c 'import torch' || pip install '{_TORCH}'",
        f"python {bundle} --home {HOME} --install",
    ]
    return {
        "name": f"sojourn-{name}",
        "resources": resources,
        "envs": {"PYTHONUNBUFFERED": "1"},
        "file_mounts": mounts,
        "setup": "\n".join(setup) + "\n",
        "run": f"exec python {bundle} --home {HOME} --train\n",
    }


def launch_sky(path: Path, *, say: Say = print) -> int:
    """Hands the task to `sky jobs launch`; the exit code of that."""
    sky = shutil.which("sky")
    line = ["sky", "jobs", "launch", "--yes", "--detach-run", str(path)]
    if sky is None:
        raise UserError(f"sky: SkyPilot is not installed here: pip install skypilot, then: {shlex.join(line)}")
    say(f"running: {shlex.join(line)}")
    return subprocess.run([sky, *line[1:]], check=False).returncode


def sky_gpu(gpu: str) -> str:
    """SkyPilot's name of a GPU; one that the catalogue does not know stays as it is."""
    with suppress(UserError):
        name = find_gpu(gpu).name
        return _NAMES.get(name, name.removesuffix(" PCIe").replace(" ", ""))
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", gpu):
        raise UserError(f"sky: “{gpu[:40]}” is no name of a GPU; see: sky gpus list")
    return gpu


def bucket_name(run: str) -> str:
    """The names of buckets are shared by everybody, and the same run must find its own again."""
    me = hashlib.sha256(f"{getpass.getuser()}@{platform.node()}".encode()).hexdigest()[:8]
    return f"sojourn-{run[:40].strip('-')}-{me}"
