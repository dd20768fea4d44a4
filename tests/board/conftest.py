"""A home with runs and data, a board and a browser for all tests here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from board_page import running_board, write_run
from webdriver import Browser, browsing


@pytest.fixture(scope="session")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one of which trained for three steps and has checkpoints and samples; prepared data with duplicates."""
    home = tmp_path_factory.mktemp("board")
    sums = [(f"{n % 90}+1?", f"{n % 90 + 1}") for n in range(100)]
    roles = ("user", "assistant")
    chats = [
        {"messages": [{"role": role, "content": text} for role, text in zip(roles, one, strict=True)]} for one in sums
    ]
    (home / "sums.jsonl").write_text("".join(json.dumps(one) + "\n" for one in chats))
    words = [
        "train",
        "smoke",
        "name=tiny",
        "train.steps=3",
        "log.every_steps=1",
        "save.every_steps=1",
        "data.sources=sums.jsonl",
    ]
    words += ['train.samples=["2+1?"]', "train.sample_tokens=4", "train.eval_every=1", "train.device=cpu"]
    environment = {**os.environ, "SOJOURN_HOME": str(home), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "sojourn", *words], env=environment, cwd=home, check=True, capture_output=True
    )
    write_run(home, "other", 300)
    write_run(home, "going", 300, "running")
    return home


@pytest.fixture(scope="session")
def board(shared_home: Path) -> Iterator[str]:
    with running_board(shared_home) as address:
        yield address


@pytest.fixture(scope="session")
def browser(shared_home: Path) -> Iterator[Browser]:
    with browsing(shared_home) as made:
        yield made


@pytest.fixture
def page(browser: Browser, board: str) -> Iterator[Browser]:
    """No script of it fails."""
    browser.size(1300, 900)
    browser.dark(False)
    browser.open(board + "/page/icon.svg")
    browser.js("localStorage.clear(); sessionStorage.clear()")
    browser.log()
    yield browser
    assert [line for line in browser.log() if "status of 400" not in line] == []
