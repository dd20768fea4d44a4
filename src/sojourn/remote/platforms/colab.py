"""Google Colab: a notebook that runs a bundle with its checkpoints mirrored to Drive, and continues it when re-opened.

The run folder is on the machine's own disk, which is fast and lost with the session; the mirror is on Drive. Drive's
writes lag, so the notebook flushes them at the end. The official command line (google-colab-cli) does the same from a
terminal, on Linux and macOS.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from sojourn.config.load import Loaded
from sojourn.errors import UserError
from sojourn.remote.bundle import Bundle, make_bundle
from sojourn.remote.portability import Say
from sojourn.storage.files import write_text

DRIVE = "/content/drive/MyDrive/sojourn"
MIRROR = f"{DRIVE}/mirror"
HOME = "/content/sojourn"
GPUS = ("T4", "L4", "G4", "A100", "H100")  # the command line makes an A100 of any other word

_MOUNT = """\
from google.colab import drive
drive.mount("/content/drive")

import os, shutil
RUN, BUNDLE = "{run}", "/content/{file}"
os.makedirs("{drive}", exist_ok=True)
kept = "{drive}/{file}"
if not os.path.exists(kept):
    from google.colab import files
    print("choose {file}")
    files.upload_file(kept)
shutil.copyfile(kept, BUNDLE)
"""
_HUB_LOGIN = """\
# A model or data set that needs a token: add HF_TOKEN under the key symbol on the left.
try:
    from google.colab import userdata
    os.environ["HF_TOKEN"] = userdata.get("HF_TOKEN")
except Exception as error:
    print("no HF_TOKEN:", type(error).__name__)
"""
_RUN = "!python {file} --home {home} --foreground\n"
_KEEP = """\
!python {file} --home {home} --pack
model = f"{home}/{{RUN}}-final.zip"
if os.path.exists(model):
    shutil.copyfile(model, f"{drive}/{{RUN}}-final.zip")
    print(f"the model is on your Drive: sojourn/{{RUN}}-final.zip")
drive.flush_and_unmount()  # Drive writes lag behind
"""
_END = """\
# Give the machine back: it costs compute units while it is idle.
from google.colab import runtime
runtime.unassign()
"""


def make_colab_bundle(
    loaded: Loaded, out: Path | None = None, *, allow_secrets: bool = False, say: Say = lambda line: None
) -> tuple[Bundle, Path]:
    """The bundle, and the notebook beside it."""
    if loaded.config.save.mirror not in (None, MIRROR) and not str(loaded.config.save.mirror).startswith("hub:"):
        raise UserError(f"save.mirror: on Colab it is {MIRROR} (your Drive) or hub:USER/REPOSITORY; leave it out")
    settings = {} if loaded.config.save.mirror else {"save.mirror": MIRROR}
    made = make_bundle(
        loaded, out, settings=settings, allow_secrets=allow_secrets, platform="colab", mirror_disks=(DRIVE,), say=say
    )
    path = made.path.with_suffix(".ipynb")
    write_text(path, json.dumps(notebook(made), indent=1, ensure_ascii=False) + "\n")
    return made, path


def notebook(made: Bundle, gpu: str = "T4") -> dict[str, Any]:
    """nbformat 4.5. Running all cells starts the run, or continues it from Drive."""
    values = {"run": made.run, "file": made.path.name, "drive": DRIVE, "home": HOME}
    cells = [
        _markdown(
            f"# {made.run}\n\nRun all cells. Close the page whenever you like; open it again and run all cells to "
            f"continue from the last checkpoint on your Drive (`{MIRROR}`).\n\n"
            f"Runtime → Change runtime type: {gpu} GPU."
        ),
        _code(_MOUNT.format(**values)),
        *([_code(_HUB_LOGIN)] if made.needs_hub else []),
        _code(_RUN.format(**{**values, "file": shlex.quote(f"/content/{made.path.name}")})),
        _code(_KEEP.format(**{**values, "file": shlex.quote(f"/content/{made.path.name}")})),
        _code(_END),
    ]
    for number, cell in enumerate(cells):
        cell["id"] = f"sojourn-{number}"
    return {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {
            "accelerator": "GPU",
            "colab": {"gpuType": gpu, "provenance": []},
            "kernelspec": {"display_name": "Python 3", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "cells": cells,
    }


def cli_lines(made: Bundle, gpu: str = "T4") -> list[str]:
    """The same with google-colab-cli. Silence ends its `exec`, so the run is started detached and looked at."""
    if gpu not in GPUS:
        raise UserError(f"colab: no GPU “{gpu[:40]}”; there are {', '.join(GPUS)}")
    there = f"/content/{made.run}.zip"
    session, program = f"-s {made.run}", f"!python {there} --home {HOME}"
    return [
        f"colab new {session} --gpu {gpu}",
        f"colab drivemount {session}",
        f"echo '!mkdir -p {DRIVE}' | colab exec {session}",
        f"colab upload {session} {shlex.quote(str(made.path))} {there}",
        f"echo '{program}' | colab exec {session} --timeout 1800",
        f"echo '{program} --status' | colab exec {session}",
        f"echo '{program} --pack' | colab exec {session} --timeout 600",
        f"colab download {session} {HOME}/{made.run}-final.zip {made.run}-final.zip",
        f"colab stop {session}",
    ]


def has_cli() -> bool:
    return sys.platform != "win32" and shutil.which("colab") is not None


def _code(source: str) -> dict[str, Any]:
    lines = source.rstrip("\n").splitlines(keepends=True)
    return {"cell_type": "code", "id": "", "metadata": {}, "source": lines, "outputs": [], "execution_count": None}


def _markdown(source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "id": "", "metadata": {}, "source": source.splitlines(keepends=True)}
