"""The one script that Kaggle runs: it starts the bundle of its data set, and continues what an earlier session left.

Standard library only. The session's outputs are RUN's folder and a list of its files with their SHA-256; programs stay
outside /kaggle/working. It ends with exit code 0 whatever happens: Kaggle keeps outputs of scripts that succeed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

RUN = "@RUN@"
MINUTES = "@MINUTES@"
INPUT = Path(os.environ.get("SOJOURN_KAGGLE_INPUT", "/kaggle/input"))
WORKING = Path(os.environ.get("SOJOURN_KAGGLE_WORKING", "/kaggle/working"))
HOME = Path(os.environ.get("SOJOURN_KAGGLE_HOME", "/tmp/sojourn"))  # noqa: S108 (a machine of one user)
RESULT = "sojourn-result.json"
_STATES = {0: "done", 3: "stopped"}


def unusable_gpu() -> Optional[str]:
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60).stdout.decode()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return "Kaggle gave a P100, for which current PyTorch has no kernels" if "P100" in names else None


def restore() -> Optional[Path]:
    """The run folder of the newest earlier session, copied to where this one goes on."""
    target = WORKING / "runs" / RUN
    found = [path.parent for path in INPUT.rglob("identity.json") if path.parent.name == RUN]
    if target.exists() or not found:
        return None
    newest = max(
        found, key=lambda folder: (folder / "status.json").stat().st_mtime if (folder / "status.json").exists() else 0
    )
    shutil.copytree(str(newest), str(target))
    return newest


def list_files(folder: Path) -> Dict[str, Any]:
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            digest = hashlib.sha256()
            with path.open("rb") as file:
                for block in iter(lambda: file.read(1 << 20), b""):
                    digest.update(block)
            files[path.relative_to(WORKING).as_posix()] = {"size": path.stat().st_size, "sha256": digest.hexdigest()}
    return files


def finish(started: float, state: str, message: str) -> None:
    files = list_files(WORKING / "runs" / RUN)
    result = {"run": RUN, "state": state, "message": message, "seconds": time.time() - started, "files": files}
    stage = WORKING / ("." + RESULT)
    stage.write_text(json.dumps(result, indent=1), encoding="utf-8")
    os.replace(str(stage), str(WORKING / RESULT))
    print("sojourn: %s on Kaggle: %s %s" % (RUN, state, message), flush=True)


def main() -> None:
    started = time.time()
    (WORKING / "runs").mkdir(parents=True, exist_ok=True)
    problem = unusable_gpu()
    bundles: List[Path] = sorted(INPUT.rglob("bundle.sojourn"))
    if problem is None and not bundles:
        problem = "the data set with the bundle is not below %s" % INPUT
    before = restore()
    if before is not None:
        print("sojourn: continuing from %s" % before, flush=True)
    if problem is not None:
        finish(started, "failed", problem)
        return
    HOME.mkdir(parents=True, exist_ok=True)
    if not (HOME / "runs").is_symlink():
        (HOME / "runs").symlink_to(WORKING / "runs")
    argv = [sys.executable, str(bundles[0]), "--home", str(HOME), "--foreground", "--minutes", MINUTES]
    code = subprocess.call(argv)
    finish(started, _STATES.get(code, "failed"), "" if code in _STATES else "exit code %d; see the log" % code)


if __name__ == "__main__":
    main()
