"""From the laptop to the box and home with a model: the real commands, a real sshd, a real training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from laptop import RUN, Laptop
from remote_box import PASSWORD, RemoteBox, needs_box, remote_box
from sojourn.storage.files import read_json_object

pytestmark = needs_box


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteBox]:
    with remote_box(tmp_path_factory.mktemp("box")) as made:
        yield made


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory, box: RemoteBox) -> Laptop:
    made = Laptop(tmp_path_factory.mktemp("laptop"))
    made.add(box)
    return made


def test_a_run_is_launched_brought_home_and_the_box_powered_off(box: RemoteBox, laptop: Laptop) -> None:
    done = laptop.run("launch", *RUN, "name=whole", "--on", "box", "--budget", "¥20", "--stop-when-done")
    assert "the model is at home" in done.stdout
    assert len(box.shutdown_calls()) == 1
    laptop.run("train", *RUN, "name=here")
    assert laptop.weights("whole") == laptop.weights("here")
    assert _files_with(PASSWORD, laptop.folder, box.root / "root") == []


def _files_with(text: str, *folders: Path) -> list[Path]:
    found = []
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 24 and ".pyenv" not in path.parts:
                found += [path] if text.encode() in path.read_bytes() else []
    return found
