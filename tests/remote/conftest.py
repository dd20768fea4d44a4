"""One box, one laptop and one undisturbed run for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from laptop import RUN, Laptop
from remote_box import RemoteBox, remote_box


@pytest.fixture(scope="session")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteBox]:
    with remote_box(tmp_path_factory.mktemp("box")) as made:
        yield made


@pytest.fixture(scope="session")
def laptop(tmp_path_factory: pytest.TempPathFactory, box: RemoteBox) -> Laptop:
    made = Laptop(tmp_path_factory.mktemp("laptop"))
    made.add(box)
    made.run("train", *RUN, "name=undisturbed")
    return made


@pytest.fixture(autouse=True)
def healthy(box: RemoteBox) -> Iterator[None]:
    yield
    box.set_gpu()
