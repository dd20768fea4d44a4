"""An export that is killed at any call that changes the disk leaves nothing half-written, and goes on where it was."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from fork_server import ForkServer, needs_fork
from sojourn.export.stage import MANIFEST
from sojourn.storage.files import read_json_object, sha256
from tiny import Tiny

pytestmark = needs_fork

# argv: model, target, the disk call to die at (0: none), the file to count calls in
WRITE = """
import os, signal, sys, threading
from pathlib import Path
from sojourn.export import hf, ranges
from sojourn.export.open_source import open_weights
from sojourn.export.progress import NoProgress
from sojourn.export.stage import ExportStage
from sojourn.export import direct_file
from sojourn.storage import disk

model, target, last, log = sys.argv[1:]
hf.SHARD_BYTES, ranges._SYNC_BYTES = 60_000, 20_000
direct_file.LEAST_BYTES, direct_file._BUFFER_BYTES = 0, 8192
calls, lock = 0, threading.Lock()

def counted(call):
    def run(*given):
        global calls
        with lock:
            calls += 1
            if calls == int(last):
                if call.__name__ == "write":
                    view = memoryview(given[1]).cast("B")
                    half = len(view) // 2
                    given[0].write(view[: half // 4096 * 4096 or half])  # whole blocks of a direct write
                os.kill(os.getpid(), signal.SIGKILL)
        return call(*given)
    return run

for name in ("write", "sync", "rename", "unlink", "make_folder", "remove_folder"):
    setattr(disk, name, counted(getattr(disk, name)))
source = open_weights(model)
with ExportStage(Path(target), source.fingerprint) as stage:
    hf.write(source, stage, "auto", NoProgress())
    stage.finish({"format": "hf"})
Path(log).write_text(str(calls))
"""


def contents(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}


def write(server: ForkServer, model: Path, target: Path, last: int) -> int:
    return server.run(str(model), str(target), str(last), str(target.with_suffix(".calls")), code=WRITE).returncode


@pytest.fixture(scope="module")
def undisturbed(tiny: Tiny, fork_server: ForkServer) -> tuple[Path, int]:
    """An export, and how many disk calls it took."""
    target = tiny.home / "undisturbed"
    assert write(fork_server, tiny.base, target, 0) == 0
    return target, int(target.with_suffix(".calls").read_text())


@pytest.mark.parametrize(
    "share", [0.55, 0.95, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.02, 0.3, 0.8, 1.0))]
)
def test_a_kill_leaves_no_target_and_the_next_call_goes_on(
    share: float, undisturbed: tuple[Path, int], tiny: Tiny, fork_server: ForkServer, tmp_path: Path
) -> None:
    expected, calls = undisturbed
    target = tmp_path / "out"
    code = write(fork_server, tiny.base, target, max(1, round(share * calls)))
    if target.exists():  # only its last calls were left; a few depend on how fast the disk was
        assert share >= 0.9 and contents(target) == contents(expected)
        return
    assert code == -signal.SIGKILL
    partial = tmp_path / ".partial-out"
    done = read_json_object(partial / MANIFEST).get("files", {})
    times = {name: (partial / name).stat().st_mtime_ns for name in done}
    for name, facts in done.items():
        assert facts["sha256"] in ("", sha256(partial / name)) and (partial / name).stat().st_size == facts["size"]
    assert write(fork_server, tiny.base, target, 0) == 0
    assert contents(target) == contents(expected)
    assert {name: (target / name).stat().st_mtime_ns for name in done} == times, "written again"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["out"]
    assert not share >= 0.3 or done


def test_ctrl_c_answers_at_once_and_says_how_to_go_on(tiny: Tiny, fork_server: ForkServer, tmp_path: Path) -> None:
    """In the middle of a shard, whose parts are slow here."""
    slow = "from sojourn.export import hf; import time; real = hf._piece\n"
    slow += (
        "def piece(*given):\n    time.sleep(0.05)\n    return real(*given)\nhf._piece = piece; hf.SHARD_BYTES = 60_000"
    )
    args = ("export", str(tiny.base), "--out", str(tmp_path / "out"))
    child = fork_server.start(*args, preamble=slow)
    while len(read_json_object(tmp_path / ".partial-out" / MANIFEST).get("files", {})) < 6:
        assert child.poll() is None, child.stderr
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    assert child.wait() == 130
    assert child.stderr.splitlines()[-1] == "interrupted; run the same command to go on where it was"
    assert not (tmp_path / "out").exists()
    again = fork_server.run(*args, preamble="from sojourn.export import hf; hf.SHARD_BYTES = 60_000")
    assert again.returncode == 0 and "going on in" in again.stderr
