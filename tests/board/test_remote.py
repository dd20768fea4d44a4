"""Runs on rented boxes from the page: a real sshd in a machine of its own, and a host that is gone."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from board_page import CURVES, change, confirm, in_browser, last_loss, press, running_board, show
from laptop import RUN, Laptop
from remote_box import RemoteBox, needs_box, remote_box
from webdriver import Browser, browsing

pytestmark = [in_browser, needs_box]
GONE = "192.0.2.1"  # packets to it go nowhere
MINUTES = 300.0  # seconds that a launch may take on a busy machine
ROW = (
    "[...document.querySelectorAll('tbody tr')]"
    ".find(row => row.querySelector('.host-tag')?.textContent === arguments[0])"
)
STATE = "document.querySelector('.page-head .state')?.textContent"


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RemoteBox]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(remote_box(tmp_path_factory.mktemp(name))) for name in ("near", "far")}


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory, boxes: dict[str, RemoteBox]) -> Laptop:
    """It knows two boxes, and one whose packets go nowhere."""
    made = Laptop(tmp_path_factory.mktemp("laptop"), {"OMP_NUM_THREADS": "1"})
    for name, box in boxes.items():
        made.add(box, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOJOURN_CONFIG", made.env["SOJOURN_CONFIG"])
        from sojourn.remote.hosts import load_hosts, save_host
        from sojourn.remote.keys import known_hosts_path

        near = load_hosts()["near"]
        save_host(replace(near, name="gone", address=GONE))
        pinned = known_hosts_path().read_text().splitlines()
        copied = [line.replace(near.address, GONE) for line in pinned if near.address in line]
        known_hosts_path().write_text("\n".join([*pinned, *copied, ""]))
    return made


@pytest.fixture(scope="module")
def board(laptop: Laptop) -> Iterator[str]:
    with running_board(laptop.home, env=laptop.env) as address:
        yield address


@pytest.fixture(scope="module")
def page(laptop: Laptop) -> Iterator[Browser]:
    with browsing(laptop.folder) as made:
        made.size(1300, 900)
        yield made
        assert [line for line in made.log() if "status of 400" not in line] == []


def test_a_host_that_is_gone_holds_up_nothing_and_gpus_are_shown(page: Browser, board: str) -> None:
    began = time.monotonic()
    show(page, board, "#/runs", "document.querySelector('.page > .empty h2')")
    assert time.monotonic() - began < 8
    page.wait("document.querySelector('.hosts')?.textContent.match(/near: RTX 4090 97% · 0.0.\\/.24.0.GiB/)")
    assert "gone: asking" in page.text(".hosts") or "gone: unreachable" in page.text(".hosts")
    page.wait("document.querySelector('.hosts').textContent.includes('gone: unreachable')", seconds=60)
    assert "near: RTX 4090" in page.text(".hosts")


def test_a_run_is_started_on_a_host_watched_moved_stopped_and_pulled(
    page: Browser, board: str, laptop: Laptop, boxes: dict[str, RemoteBox]
) -> None:
    show(page, board, "#/new", "document.querySelector('.segments')")
    press(page, "From scratch")
    change(page, ".form select", "smoke", "change")
    page.type("[placeholder='chosen for you']", "travels")
    settings = [
        one for one in RUN if "=" in one and not one.startswith(("train.steps", "save.", "data.max", "train.global"))
    ]
    page.type("textarea.mono", "\n".join([*settings, "train.steps=100000", "save.every_steps=200"]))
    where = "[...document.querySelectorAll('.pair select')].find(one => [...one.options].some(o => o.value === 'near'))"
    page.js(f"const one = {where}; one.value = 'near'; one.dispatchEvent(new Event('change'))")
    change(page, "[placeholder='¥30, $5']", "¥30")
    page.wait("document.querySelector('#start:not(:disabled)')?.textContent === 'Start on near'")
    page.wait("document.querySelector('.code').textContent.includes('--on near')")
    page.click("#start")
    confirm(page, "--on near --detach --budget")
    page.wait("location.hash === '#/runs'")
    page.wait(f"/running/.test({ROW}?.innerText)", "near", seconds=MINUTES)
    page.wait(f"/tok.s/.test({ROW}?.innerText) && /GPU.97%/.test({ROW}?.innerText)", "near", seconds=MINUTES)
    page.js(f"{ROW}.querySelector('.run-name').click()", "near")
    page.wait(CURVES, seconds=60)
    before = last_loss(page)
    page.wait("document.querySelector('.chart').getAttribute('aria-label') !== arguments[0]", before, seconds=60)
    press(page, "Move", ".page-head")
    change(page, "#dialog select", "far")
    confirm(page, "sojourn move travels --to far --detach")
    page.js("location.hash = '#/runs'")
    page.wait(f"/running/.test({ROW}?.innerText)", "far", seconds=MINUTES)
    status = boxes["far"].root / "root/autodl-tmp/runs/travels/status.json"
    until = time.monotonic() + MINUTES
    while not status.exists() or json.loads(status.read_text())["state"] != "running":  # its records came before it
        assert time.monotonic() < until
        time.sleep(0.2)
    page.js("location.hash = '#/run/far:travels'")
    page.wait(f"{STATE}?.startsWith('running')", seconds=60)
    press(page, "Stop", ".page-head")
    confirm(page, "sojourn stop travels")
    page.wait(f"{STATE}?.startsWith('stopped')", seconds=MINUTES)
    press(page, "Pull", ".page-head")
    change(page, "#dialog select", "checkpoint")
    confirm(page, "sojourn pull travels --what checkpoint")
    page.wait("document.querySelector('#tasks .task')?.textContent.includes('done')", seconds=MINUTES)
    assert list((laptop.home / "runs" / "travels" / "checkpoints").glob("step-*"))


def test_the_board_of_a_box_is_seen_through_the_tunnel(
    page: Browser, laptop: Laptop, boxes: dict[str, RemoteBox]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tunnel = laptop.start("board", "--host", "far", "--no-browser", "--port", str(port))
    try:
        assert tunnel.stdout is not None
        line = next(line for line in tunnel.stdout if "http" in line)
        address = re.search(r"http://\S+\d", line)[0]  # type: ignore[index]
        _until_up(address)
        show(page, address, "#/runs", "document.querySelector('.run-name')?.textContent === 'travels'")
        page.wait("document.querySelector('.hosts').textContent.includes('RTX 4090')")
        show(page, address, "#/run/travels", CURVES)
        assert page.text(".page-head .state") == "stopped"
    finally:
        page.open("about:blank")
        tunnel.terminate()
        tunnel.wait(30)
    assert boxes["far"].processes("sojourn board")  # it stays on the box


def _until_up(address: str) -> None:
    import httpx

    until = time.monotonic() + 60
    while True:
        try:
            httpx.get(f"{address}/health", timeout=5).raise_for_status()
            return
        except httpx.HTTPError:
            assert time.monotonic() < until
            time.sleep(0.2)
