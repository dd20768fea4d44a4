"""A checkpoint is exported and talked to from the page, beside another one."""

from __future__ import annotations

from pathlib import Path

from board_page import LONG, change, confirm, in_browser, press, show
from webdriver import ENTER, Browser

pytestmark = in_browser
ROW = "[...document.querySelectorAll('.checkpoints tbody tr')].find(row => row.textContent.startsWith(arguments[0]))"


def open_checkpoints(page: Browser, board: str) -> None:
    show(page, board, "#/run/tiny", "document.querySelector('.page-head h1')")
    page.js("document.getElementById('tab-checkpoints').click()")
    page.wait(ROW, "step 3")


def press_in_row(page: Browser, row: str, text: str) -> None:
    page.js(f"[...{ROW}.querySelectorAll('button')].find(one => one.textContent === arguments[1]).click()", row, text)


def test_a_checkpoint_is_verified_and_exported(page: Browser, board: str, shared_home: Path) -> None:
    open_checkpoints(page, board)
    press_in_row(page, "step 2", "Verify")
    page.wait(f"{ROW}.textContent.includes('whole')", "step 2")
    press_in_row(page, "step 2", "Export")
    page.wait("document.querySelector('dialog[open] select')")
    assert page.js("return [...document.querySelectorAll('#dialog option')].map(one => one.value)")[:2] == [
        "hf",
        "gguf",
    ]
    confirm(page, f"sojourn export {shared_home / 'runs' / 'tiny'} --to hf --checkpoint 2")
    page.wait("document.querySelector('#tasks .task small')?.textContent.startsWith('done')", seconds=LONG)
    assert "replayed" in page.text("#tasks .output") or "written" in page.text("#tasks .output")
    assert list(shared_home.rglob("sojourn_export.json"))


def test_two_checkpoints_answer_side_by_side(page: Browser, board: str, shared_home: Path) -> None:
    open_checkpoints(page, board)
    press_in_row(page, "step 2", "Chat")
    run = shared_home / "runs" / "tiny"
    page.wait("document.querySelector('dialog[open] select')")
    change(page, "#dialog select", f"{run}@3")
    confirm(page, f"sojourn serve {run}@2 --port")
    page.wait("document.querySelector('#tasks .task a.primary')")
    url = str(page.js("return document.querySelector('#tasks .task a.primary').href"))
    page.wait("/http.*:\\d+/.test(document.querySelector('#tasks .output')?.textContent)", seconds=LONG)
    page.open(url)
    page.wait("document.querySelectorAll('#model option').length === 2", seconds=LONG)
    page.log()  # 503 while they are loaded
    names = page.js("return [...document.querySelectorAll('#model option')].map(one => one.value)")
    assert len(set(names)) == 2
    page.click("#compare")
    page.wait("!document.getElementById('other').hidden")
    page.type("#input", "2+1?" + ENTER)
    page.wait("document.querySelectorAll('#messages .pair .message').length === 2", seconds=LONG)
    page.wait("!document.getElementById('send').hidden", seconds=LONG)
    show(page, board, "#/runs", "document.querySelector('.run-name')")
    page.click("#tasks-open")
    page.js("document.querySelector('#tasks .task-head[aria-expanded=false]')?.click()")
    press(page, "Stop", "#tasks")
    page.wait("!document.querySelector('#tasks .task small')?.textContent.startsWith('running')", seconds=60)
