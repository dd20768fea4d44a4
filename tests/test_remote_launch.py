"""From the laptop to the box and home with a model: the real commands, a real sshd, a real training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from laptop import RUN, Laptop
from remote_box import PASSWORD, RemoteBox, files_with, needs_box, remote_box

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
    assert files_with(PASSWORD, laptop.folder, box.root / "root") == []
